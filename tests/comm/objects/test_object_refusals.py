# SPDX-License-Identifier: Apache-2.0
"""Objects that cannot be sent: every rank gets an error at once, and calls continue to work."""

from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, CommOptions, CorruptedError, UnsupportedError
from ringcomm.comm import objects
from ringcomm.comm import objects as object_codec
from ringcomm.errors import ArgumentError, RingcommError
from tests.support.faults import leaving_together


class Other:
    """An object that is neither data nor can be pickled."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("an Other does not want to")


CALLS = {
    "all_gather_object": lambda comm, obj: ringcomm.all_gather_object([None] * 3, obj),
    "gather_object": lambda comm, obj: ringcomm.gather_object(
        obj, [None] * 3 if comm.rank == 2 else None, dst=2
    ),
    "broadcast_object_list": lambda comm, obj: ringcomm.broadcast_object_list([obj], src=1),
    "scatter_object_list": lambda comm, obj: ringcomm.scatter_object_list(
        [None], [1, obj, 2] if comm.rank == 1 else None, src=1
    ),
}


@pytest.mark.parametrize("objects", ["data", "pickle"])
@pytest.mark.parametrize("name", CALLS)
def test_every_rank_hears_of_it(name, objects):
    def body(comm):
        obj = Other() if comm.rank == 1 else "x" * 10**comm.rank
        with pytest.raises(UnsupportedError) as raised:
            CALLS[name](comm, obj)
        text = str(raised.value)
        found: list[Any] = [None] * 3
        ringcomm.all_gather_object(found, comm.rank)
        assert found == [0, 1, 2]
        return text, raised.value.repeats

    # No rank may wait for the timeout: it would make the communicator unusable.
    with ringcomm.local_world(3, options=CommOptions(objects=objects, timeout=60)) as world:
        texts = world.run(body)
    for rank, (text, repeats) in enumerate(texts):
        assert text.startswith(f"{name} on rank {rank} of 3: ")
        assert "Other" in text
        assert repeats == (rank != 1)
        assert rank == 1 or "rank 1 has an object that cannot be sent" in text


def test_several_refusals():
    def body(comm):
        with pytest.raises(UnsupportedError) as raised:
            ringcomm.all_gather_object([None] * 3, Other() if comm.rank else 1)
        return str(raised.value)

    with ringcomm.local_world(3, timeout=60) as world:
        texts = world.run(body)
    assert "rank 1 has an object" in texts[0]
    assert "rank 2 of 3: the object: objects travel as data" in texts[2]


def test_an_object_larger_than_agreed():
    options = CommOptions(largest_object_bytes=1000, timeout=60)

    def body(comm):
        with pytest.raises(UnsupportedError, match=r"at most 1000 bytes.*largest_object_bytes"):
            ringcomm.all_gather_object([None] * 2, "x" * (2000 * comm.rank))

    with ringcomm.local_world(2, options=options) as world:
        world.run(body)
    with pytest.raises(ArgumentError, match="largest_object_bytes: expected 1 or more, got 0"):
        CommOptions(largest_object_bytes=0)


@pytest.mark.parametrize("size", [0, -(10**6), 2**62])
def test_sizes_that_nobody_may_announce(size, monkeypatch):
    monkeypatch.setattr(objects.Parcel, "told_size", size)

    def body(comm):
        with pytest.raises(CorruptedError, match=f"rank 0 announced an object of {size} bytes"):
            ringcomm.all_gather_object([None] * 2, 1)
        with pytest.raises(CorruptedError, match=f"rank 1 announced an object of {size} bytes"):
            ringcomm.broadcast_object_list([1], src=1)

    with ringcomm.local_world(2, timeout=60) as world:
        world.run(body)


def test_a_rank_without_memory_ends_the_others_at_once(monkeypatch):
    """Memory is allocated before the objects are sent, while the other ranks wait."""

    class Scarce(bytearray):
        def __new__(cls, size: Any = 0) -> Any:
            if size == SIZE:
                raise MemoryError
            return bytearray(size)

    SIZE = len(object_codec.pack("x" * 3000, "op"))
    monkeypatch.setattr(objects, "bytearray", Scarce, raising=False)

    def body(comm):
        # Rank 0 allocates memory for rank 1's object; rank 1 waits for rank 0.
        with pytest.raises(RingcommError) as raised:
            ringcomm.gather_object("x" * (3000 * comm.rank), [None] * 2 if not comm.rank else None)
        return raised.value

    world = ringcomm.local_world(2, timeout=60)
    errors = world.run(body)
    world.close()
    assert type(errors[0]) is RingcommError
    assert "no memory for the object of" in str(errors[0]) and "rank 1 announced" in str(errors[0])
    assert isinstance(errors[1], AbortedError)
    assert str(errors[1]).startswith("gather_object on rank 1 of 2: ")
    assert "no memory for the object" in str(errors[1])


def test_ranks_make_no_room_for_what_others_send_elsewhere(monkeypatch):
    """Neither gather nor scatter pads objects to the largest size."""
    made: dict[str, list[int]] = {}
    room = objects.Codec.room

    def counted(self: Any, size_bytes: int, sender: int) -> Any:
        made.setdefault(self.where, []).append(size_bytes)
        return room(self, size_bytes, sender)

    monkeypatch.setattr(objects.Codec, "room", counted)
    large = torch.arange(10_000)

    def body(comm):
        found = [None] * 3 if comm.rank == 0 else None
        ringcomm.gather_object(large if comm.rank == 2 else comm.rank, found)
        out: list[Any] = [None]
        ringcomm.scatter_object_list(out, [0, large, 2] if comm.rank == 0 else None)
        return found, out[0]

    with ringcomm.local_world(3, timeout=60) as world:
        (found, first), (_, second), (_, third) = world.run(body)
    assert found[:2] == [0, 1] and torch.equal(found[2], large)
    assert first == 0 and torch.equal(second, large) and third == 2
    largest = {at: max(sizes) for at, sizes in made.items()}
    assert largest["gather_object on rank 0 of 3"] > 80_000
    assert largest["gather_object on rank 1 of 3"] == 0
    assert largest["gather_object on rank 2 of 3"] == 0
    assert largest["scatter_object_list on rank 1 of 3"] > 80_000
    assert largest["scatter_object_list on rank 2 of 3"] < 100


def test_a_fault_names_the_call_that_was_made():
    def body(comm):
        if comm.rank == 1:
            return ""
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            ringcomm.all_gather_object([None] * 2, 1)
        return str(raised.value)

    world = ringcomm.local_world(2, timeout=0.3)
    text = world.run(leaving_together(body, 2))[0]
    world.close()
    assert text.startswith("all_gather_object on rank 0 of 2: ")


def test_lists_are_checked_alike():
    def body(comm):
        wrong: Any = [None] * 3 if comm.rank else [1, 2]
        if comm.rank:
            with pytest.raises(
                ArgumentError, match=r"on rank 1 .*list of 2 .* as on rank 0, got 3"
            ):
                ringcomm.broadcast_object_list(wrong)
        else:
            ringcomm.broadcast_object_list(wrong)
        with pytest.raises(ArgumentError, match="expected a list of 2 entries, one per rank, got"):
            ringcomm.all_gather_object(wrong * 2, 1)
        with pytest.raises(ArgumentError, match="object_list: expected a list, got tuple"):
            ringcomm.broadcast_object_list((1,), src=comm.rank)  # type: ignore[arg-type]

    with ringcomm.local_world(2, timeout=60) as world:
        world.run(body)
