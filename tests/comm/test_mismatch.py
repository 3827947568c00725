# SPDX-License-Identifier: Apache-2.0
"""If two ranks make different calls, the error names both calls, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, MismatchError
from tests.support.ranks import run_ranks

ReduceOp = torch.distributed.ReduceOp
T = torch.ones

# The call of rank 0, the call of rank 1, and words of the message about each.
CASES = {
    "collective": (
        lambda c: c.all_reduce(T(64)),
        lambda c: c.all_gather_into_tensor(T(128), T(64)),
        ("all_reduce", "all_gather"),
    ),
    "size": (lambda c: c.all_reduce(T(64)), lambda c: c.all_reduce(T(65)), ("256", "260")),
    "large size": (
        lambda c: c.all_reduce(T(100_000)),
        lambda c: c.all_reduce(T(3)),
        ("400000", "12"),
    ),
    "dtype": (
        lambda c: c.all_reduce(T(64)),
        lambda c: c.all_reduce(T(64).int()),
        ("float32", "int32"),
    ),
    "op": (
        lambda c: c.all_reduce(T(64)),
        lambda c: c.all_reduce(T(64), ReduceOp.MAX),
        ("SUM", "MAX"),
    ),
    "root": (
        lambda c: c.broadcast(T(64), 0),
        lambda c: c.broadcast(T(64), 1),
        ("broadcast(float32, root", "rank"),
    ),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(T(64)), ("barrier", "all_reduce")),
    "scatter size": (
        lambda c: c.reduce_scatter_tensor(T(64), T(128)),
        lambda c: c.reduce_scatter_tensor(T(32), T(64)),
        ("512", "256"),
    ),
    "algorithm": (
        lambda c: c.all_reduce(T(64), algorithm="ring"),
        lambda c: c.all_reduce(T(64), algorithm="two_shot"),
        ("ring", "two_shot"),
    ),
    "order": (
        lambda c: (c.barrier(), c.all_reduce(T(64))),
        lambda c: (c.all_reduce(T(64)), c.barrier()),
        ("barrier(call 1", "all_reduce"),
    ),
    # Each waits for data that the other never sends: only the flight recorders show the mismatch.
    "gathers to themselves": (
        lambda c: c.gather(T(64), [T(64), T(64)], 0),
        lambda c: c.gather(T(64), [T(64), T(64)], 1),
        ("gather(float32, root 0", "gather(float32, root 1"),
    ),
    "reductions to themselves": (
        lambda c: c.reduce(T(64), 0),
        lambda c: c.reduce(T(64), 1),
        ("reduce(float32, SUM, root 0", "reduce(float32, SUM, root 1"),
    ),
    "async": (
        lambda c: c.all_reduce(T(64), async_op=True).wait(),
        lambda c: c.all_reduce(T(32), async_op=True).wait(),
        ("256", "128"),
    ),
    "coalesced": (
        lambda c: c.all_reduce_coalesced([T(64), T(8)]),
        lambda c: c.all_reduce_coalesced([T(64), T(9)]),
        ("32", "36", "call 2 "),
    ),
    "all_to_all sizes": (
        lambda c: c.all_to_all_single(T(6), T(5), [1, 5], [1, 4]),
        lambda c: c.all_to_all_single(T(6), T(6), [3, 3], [3, 3]),
        ("all_to_all", "rank"),
    ),
}


Calls = Callable[[Any], object]


def site_of(call: Calls) -> str:
    """Returns file and line of a function that fits on one line, as errors name them."""
    return f"{Path(__file__)}:{call.__code__.co_firstlineno}"


def errors_of(first: Calls, second: Calls, error: type[BaseException]) -> list[str]:
    """Returns the errors of two ranks that make these calls."""
    told = ["", ""]

    def body(comm: Any) -> None:
        with pytest.raises(error) as raised:
            (first, second)[comm.rank](comm)
        told[comm.rank] = str(raised.value)

    world = ringcomm.local_world(2, timeout=30)
    world.run(body)
    world.close()
    return told


@pytest.mark.parametrize("case", CASES)
def test_both_calls_are_named(case):
    first, second, words = CASES[case]
    world = ringcomm.local_world(2, timeout=30)
    seen = []

    def body(comm):
        with pytest.raises(MismatchError) as raised:
            (first, second)[comm.rank](comm)
            # A rank that only sends gets the error from its next call that reads data.
            comm.all_gather_into_tensor(T(8), T(4))
        seen.append(str(raised.value))
        with pytest.raises(ringcomm.AbortedError, match=r"First fault: MismatchError"):
            comm.barrier()

    world.run(body)
    world.close()
    for text in seen:
        assert all(word in text for word in words), text
        assert "Rank 0 called" in text or "Rank 1 called" in text
        assert f" at {site_of(first)}" in text, text
        assert f" at {site_of(second)}" in text, text
        assert "build a new one" in text
    with ringcomm.local_world(2, timeout=30) as fresh:
        fresh.run(lambda comm: comm.barrier())


def test_mismatch_among_many_reaches_all():
    world = ringcomm.local_world(5, timeout=30)

    def body(comm):
        with pytest.raises(MismatchError, match=r"[Rr]ank 3 called"):
            comm.all_reduce(T(100 if comm.rank == 3 else 50))

    world.run(body)
    world.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (T(65), "Number of elements is 64 on rank 0 and 65 on rank 1"),
        (T(64).int(), 'Dtype is "torch.float32" on rank 0 and "torch.int32" on rank 1'),
    ],
    ids=["size", "dtype"],
)
def test_tensors_of_all_ranks_from_one_thread_that_differ(other, words):
    """A check before the call finds the difference, so the communicators stay usable."""
    with ringcomm.local_world(2, timeout=30) as world:
        with pytest.raises(ArgumentError, match=f"all_reduce on rank 1 of 2: .*{words}"):
            world.all_reduce([T(64), other])
        world.all_reduce([T(64), T(64)])


def test_two_roots_are_named_at_the_next_call():
    """A root waits for no rank, so the next call of any kind reports the mismatch at the latest."""

    def rank(communicator):
        with pytest.raises(MismatchError, match=r"broadcast\(.*root [01].*call 1 "):
            communicator.broadcast(torch.ones(4), src=communicator.rank)
            communicator.barrier()

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(rank)


def test_messages_of_another_dtype():
    def rank(communicator):
        if communicator.rank == 0:
            communicator.send(torch.ones(8), dst=1)
            communicator.send(torch.ones(8), dst=1)
        else:
            with pytest.raises(MismatchError, match="32 bytes of int32, got 32 bytes of float32"):
                communicator.recv(torch.zeros(8, dtype=torch.int32), src=0)
            received = torch.zeros(8)
            communicator.recv(received, src=0)
            assert torch.equal(received, torch.ones(8))

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(rank)


def test_without_a_recorder_calls_are_named_without_their_call_sites():
    """The negative control: only the recorder provides the names of call sites."""
    options = ringcomm.CommOptions(timeout=30, records=0)
    told = ["", ""]

    def body(comm):
        with pytest.raises(MismatchError) as raised:
            comm.all_reduce(T(64 + comm.rank))
        told[comm.rank] = str(raised.value)
        assert comm.recording().ranks == ()

    world = ringcomm.local_world(2, options=options)
    world.run(body)
    world.close()
    assert all("256" in text and "260" in text and __file__ not in text for text in told), told


PROCESS_CASE = CASES["gathers to themselves"][:2]


def in_processes(store, rank, world):
    comm = ringcomm.Communicator.from_store(store, rank, world, timeout=30)
    with pytest.raises(MismatchError) as raised:
        PROCESS_CASE[rank](comm)
    return str(raised.value)


def test_both_calls_are_named_across_processes():
    for text in run_ranks(in_processes, 2):
        for call in PROCESS_CASE:
            assert f" at {site_of(call)}" in text, text


def in_c10d(store, rank, world):
    torch.distributed.init_process_group("ringcomm", store=store, rank=rank, world_size=world)
    try:
        with pytest.raises(MismatchError) as raised:
            torch.distributed.all_reduce(T(8 + rank))
        return str(raised.value)
    finally:
        torch.distributed.destroy_process_group()


def test_both_calls_are_named_under_torch_distributed():
    line = in_c10d.__code__.co_firstlineno + 4
    for text in run_ranks(in_c10d, 2):
        assert text.count(f" at {__file__}:{line}") == 2, text
