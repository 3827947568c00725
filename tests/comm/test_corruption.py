# SPDX-License-Identifier: Apache-2.0
"""Damage in a peer's region: the reader reports it without using it, and all ranks end."""

import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import Communicator, CorruptedError, RingcommError, _native
from tests.support.forgery import (
    FIELDS,
    HEADER,
    MESSAGE,
    SEND,
    SHARED,
    Region,
    header,
    heap_end,
    publish,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deadlines

GATHER = _native.COLLECTIVES["all_gather"]
COUNT = 64
SIZE = 4 * COUNT
# No test waits this long: damage is detected when it is read.
TIMEOUT_S = 20
ITEM_BYTES = 256 << 10


def _sound(**changes: Any) -> bytes:
    return header(GATHER, "float32", SIZE, 2 * SIZE, **{"item_bytes": ITEM_BYTES, **changes})


def _until_a_fault(comm: Communicator) -> None:
    core: Any = comm.engine.core
    deadline = time.monotonic() + TIMEOUT_S
    while core.fault() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def _reads(comm: Communicator, raw: bytes) -> RingcommError | torch.Tensor:
    """Rank 1 publishes ``raw`` instead of an all_gather; returns rank 0's result or error."""
    if comm.rank == 1:
        slot = Region.of(comm)
        at = slot.offset("slot", SHARED, 0)
        slot.write(at, torch.full((COUNT,), 7.0).numpy().tobytes())
        publish(comm, 0, SHARED, raw)
        _until_a_fault(comm)
        try:
            comm.barrier()
        except RingcommError as error:
            return error
        return torch.empty(0)
    out = torch.zeros(2 * COUNT)
    try:
        comm.all_gather_into_tensor(out, torch.ones(COUNT))
    except RingcommError as error:
        return error
    comm.abort("done")
    return out


def _outcome(raw: bytes) -> RingcommError | torch.Tensor:
    with ringcomm.local_world(2, timeout=TIMEOUT_S) as world:
        return world.run(_reads, raw)[0]


def test_a_sound_header_is_read():
    found = _outcome(_sound())
    assert isinstance(found, torch.Tensor)
    assert found[COUNT:].eq(7).all()


BAD: dict[str, dict[str, Any]] = {
    "item bytes": {"item_bytes": 64},
    "no item bytes": {"item_bytes": 0},
    "behind the heap": {"heap_offset": "end", "item_bytes": SIZE},
    "half behind the heap": {"heap_offset": "end - 4", "item_bytes": SIZE},
    "before the heap": {"heap_offset": 2**64 - 4096, "item_bytes": SIZE},
    "a sum that overflows": {"heap_offset": 2**64 - SIZE, "item_bytes": SIZE},
    "between two elements": {"heap_offset": 4097, "item_bytes": SIZE},
    "a result nobody asked for": {"result_offset": 0},
    "nothing there": {"process_ptr": 4096, "item_bytes": SIZE},
    "in the heap and in the process": {"heap_offset": 0, "process_ptr": 4096, "item_bytes": SIZE},
}


def _resolved(changes: dict[str, Any]) -> dict[str, Any]:
    ends = {"end": heap_end(), "end - 4": heap_end() - 4}
    return {name: ends.get(value, value) for name, value in changes.items()}


@pytest.mark.parametrize("case", BAD)
def test_what_leads_outside_is_refused(case):
    error = _outcome(_sound(**_resolved(BAD[case])))
    assert type(error) is CorruptedError
    for word in ("rank 1 published for rank 0 is damaged", "all_gather", "build a new one"):
        assert word in str(error)


def _mappings() -> list[tuple[int, int]]:
    """Returns each mapping of this process: its first address and its end."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split(None, 1)[0].split("-") for line in lines)
    return [(int(first, 16), int(behind, 16)) for first, behind in ranges]


def _bit_to_flip(at: int, chance: random.Random) -> int:
    """Returns a bit to flip in a sound header's byte ``at``.

    In process_ptr, which is 0, the highest bit whose address is unmapped. Python's linking decides
    which addresses are unmapped.
    """
    shift = 8 * (at - (HEADER.size - 8))
    if shift < 0:
        return chance.randrange(8)
    mapped = _mappings()
    return max(
        bit
        for bit in range(8)
        if not any(first - SIZE < 1 << (shift + bit) < behind for first, behind in mapped)
    )


def test_every_byte_of_a_header():
    """Flips a bit of each byte: rank 0 gets an error of ringcomm, or the data that was sent."""
    chance = random.Random(7)
    kinds: set[type] = set()
    for at in range(HEADER.size):
        raw = bytearray(_sound())
        raw[at] ^= 1 << _bit_to_flip(at, chance)
        found = _outcome(bytes(raw))
        kinds.add(type(found))
        factor = HEADER.size - 24 <= at < HEADER.size - 16
        assert isinstance(found, torch.Tensor) == factor, f"byte {at} of {FIELDS}: {found}"
        if factor:
            assert isinstance(found, torch.Tensor)
            assert found[COUNT:].eq(7).all()
    assert kinds == {torch.Tensor, CorruptedError, ringcomm.MismatchError}


def _in_processes(store, rank, world, changes):
    with Communicator.from_store(store, rank, world, timeout=TIMEOUT_S) as comm:
        found = _reads(comm, _sound(**_resolved(changes)))
    return type(found).__name__, str(found)


@pytest.mark.parametrize("case", ["half behind the heap", "before the heap"])
def test_across_processes_all_ranks_end(case):
    (reader, told), (writer, _) = run_ranks(_in_processes, 2, BAD[case])
    assert reader == "CorruptedError"
    assert writer in ("CorruptedError", "MismatchError")  # its own call also differs
    assert "rank 1 published for rank 0 is damaged" in told


MESSAGES = {
    "huge": {"stream_bytes": 2**60, "match_bytes": 2**60},
    "no items": {"item_bytes": 0},
    "outside": {"heap_offset": 2**63, "item_bytes": SIZE},
    "no send": {"collective": GATHER},
    "dtype": {"dtype": 99},
    "negative dtype": {"dtype": -1},
}


def _receives(comm, changes):
    if comm.rank == 1:
        values = {"sequence": 0, "root": 0, "item_bytes": ITEM_BYTES, **changes}
        publish(comm, 0, MESSAGE, header(SEND, "float32", SIZE, SIZE, **values))
        return None
    with pytest.raises(CorruptedError, match="rank 1 published for rank 0 is damaged") as raised:
        comm.recv(torch.zeros(COUNT), 1)
    return raised.value


@pytest.mark.parametrize("case", MESSAGES)
def test_a_message(case):
    with ringcomm.local_world(2, timeout=TIMEOUT_S) as world:
        world.run(_receives, MESSAGES[case])


def _runs_ahead(comm):
    if comm.rank == 1:
        theirs = Region.of(comm, 0)
        publish(comm, 0, MESSAGE, header(SEND, "float32", SIZE, SIZE))
        theirs.write(theirs.offset("signal", MESSAGE, 1), struct.pack("<I", 1 << 20))
        return
    with pytest.raises(CorruptedError):
        comm.recv(torch.zeros(COUNT), 1)


def test_more_items_than_slots():
    with ringcomm.local_world(2, timeout=TIMEOUT_S) as world:
        world.run(_runs_ahead)


def _aborts_with(comm, rank, peer, status, reason):
    page = _native.STRUCTURES
    if comm.rank == 1:
        mine = Region.of(comm)
        for name, value in (("status", status), ("rank", rank), ("peer", peer)):
            mine.write(page["page.fault"] + page[f"fault.{name}"], struct.pack("<i", value))
        for name in ("mine", "theirs"):
            junk = b"\xfe" * HEADER.size
            mine.write(page["page.fault"] + page[f"fault.{name}"], junk)
        mine.write(_native.REASON_OFFSET_BYTES, reason)
        mine.write(_native.ABORTED_OFFSET_BYTES, struct.pack("<I", 77))
        return
    with pytest.raises(RingcommError, match=r"(?i)rank 1"):
        comm.barrier()


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4, 5, 6, 7, 8, -1, 2**31 - 1])
def test_a_fault_record(status):
    for rank, peer, reason in (
        (2**31 - 1, -(2**31), b"\xff" * 256),
        (-1, 99, b"\xc3" + b"x" * 254),
    ):
        with ringcomm.local_world(2, timeout=TIMEOUT_S) as world:
            world.run(_aborts_with, rank, peer, status, reason)


def test_a_reason_that_is_cut_between_two_bytes():
    def body(comm):
        if comm.rank == 0:
            comm.abort("ä" * 300)
        with pytest.raises(RingcommError, match="ä" if comm.rank else r"aborted|ä"):
            comm.barrier()

    with ringcomm.local_world(2, timeout=TIMEOUT_S) as world:
        world.run(body)


def test_a_reason_of_half_a_surrogate_pair():
    def body(comm):
        if comm.rank == 0:
            comm.abort("because \ud800")
        with pytest.raises(RingcommError, match="because"):
            comm.barrier()

    with ringcomm.local_world(2, timeout=TIMEOUT_S) as world:
        world.run(body)


def test_waits_for_nobody():
    """A rank claims to wait for a rank that does not exist: the timeout names the rank itself."""

    def body(comm):
        if comm.rank == 1:
            for value in (99, 2**31, 2**32 - 1):
                offset = _native.STRUCTURES["page.waits_for"]
                Region.of(comm).write(offset, struct.pack("<I", value))
            return
        with pytest.raises(RingcommError, match=r"(?i)rank 1"):
            comm.barrier()

    with ringcomm.local_world(2, timeout=0.3) as world:
        world.run(body)
