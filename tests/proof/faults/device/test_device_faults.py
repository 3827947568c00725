# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process that fail: all other ranks learn the failed rank, and in time."""

from __future__ import annotations

import ctypes
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from ringcomm import (
    AbortedError,
    CollectiveTimeout,
    CommOptions,
    MismatchError,
    PeerLost,
    ReduceOp,
    RingcommError,
)
from ringcomm.algorithms import spelled
from tests.proof.faults.device.conftest import Rigs
from tests.proof.faults.device.rig import SOON_S, Gate, Rig, error_of, first_error, until

pytestmark = pytest.mark.deadlines

SHORT_S = 0.5
COUNT = 5000
# With more channels than there is room for packets next to the header of another message size.
WIDE = CommOptions(segment_bytes=4096, channels=4, ll_bytes=4096)


def outcomes(rig: Rig, world: Any, body: Any) -> list[Any]:
    """Returns what ``body(comm)`` raised or returned on each rank."""

    def caught(comm: Any) -> Any:
        with rig.ordered():
            try:
                return body(comm)
            except RingcommError as error:
                return error

    started = time.monotonic()
    results: list[Any] = world.run(caught)
    assert time.monotonic() - started < SOON_S
    return results


def works(rig: Rig, n: int = 2) -> None:
    """A new world of the same process works."""
    world = rig.world(n)
    results = outcomes(rig, world, lambda comm: sum_of_ones(rig, comm))
    assert results == [n * 5000.0] * n
    world.close()


def sum_of_ones(rig: Rig, comm: Any) -> float:
    tensor = rig.full(5000, 1.0)
    comm.all_reduce(tensor)
    return float(tensor.sum().item())


def test_an_abort_asks_the_kernels_before_it_copies(emulated: Rigs, monkeypatch: Any) -> None:
    """abort() tells the kernels before it copies: the copy may fail, or wait for a kernel."""
    rig = emulated()
    world = rig.world(2)
    core = world[0].engine.device_core
    asked = ctypes.c_uint32.from_address(core._page.host_ptr)  # HostPage.abort_requested
    seen: list[int] = []

    def refused(device: int, ptr: int, data: bytes) -> None:
        seen.append(asked.value)
        raise RuntimeError("the device takes no copies any more")

    world[0].irecv(rig.full(COUNT, 0.0), 1)
    with monkeypatch.context() as patch:
        patch.setattr(rig.runtime, "write", refused)
        with pytest.raises(RuntimeError, match="takes no copies"):
            world[0].abort("for a reason")
    assert seen == [1]
    until(lambda: core.native.raised)  # long before the deadline


def test_a_peer_hears_the_reason_though_kernels_are_quicker(
    emulated: Rigs, monkeypatch: Any
) -> None:
    rig = emulated()
    world = rig.world(2)
    write = rig.runtime.write
    peer_knows = threading.Event()

    def late(device: int, ptr: int, data: bytes) -> None:
        peer_knows.wait(SOON_S)
        time.sleep(0.1)
        write(device, ptr, data)

    for rank in range(2):
        world[rank].irecv(rig.full(COUNT, 0.0), 1 - rank)
    with monkeypatch.context() as patch:
        patch.setattr(rig.runtime, "write", late)
        abort = threading.Thread(target=world[0].abort, args=("for this reason",))
        abort.start()
        until(lambda: world[1].engine.device_core.native.raised)
        peer_knows.set()
        error = error_of(world[1].barrier)
        abort.join()
    assert "for this reason" in str(error)


def test_a_rank_that_does_not_come_is_a_timeout(rig: Rig) -> None:
    world = rig.world(3, timeout=SHORT_S)
    over = threading.Semaphore(0)

    def body(comm: Any) -> None:
        if comm.rank == 1:
            for _ in range(2):
                over.acquire()
            return
        try:
            comm.all_reduce(rig.full(10, 1.0))
        finally:
            over.release()

    late, absent, other = outcomes(rig, world, body)
    assert absent is None
    errors = sorted((late, other), key=lambda error: isinstance(error, AbortedError))
    assert isinstance(errors[0], CollectiveTimeout)
    assert isinstance(errors[1], CollectiveTimeout | AbortedError)
    for error in errors:
        assert "waited 0.5 s" in str(error)
        assert "for rank 1 to make the same call (item 0" in str(error)
    # Every rank raises, including the rank that was missing.
    again = outcomes(rig, world, lambda comm: comm.barrier())
    assert all(isinstance(error, AbortedError) for error in again), again
    assert all("for rank 1" in str(error) for error in again)
    world.close()
    works(rig, 3)


def test_a_call_that_was_given_up_is_never_launched(rig: Rig) -> None:
    """A rank that comes too late must not launch the call, whose memory has been freed."""
    world = rig.world(2, timeout=SHORT_S)
    tensors = [rig.full(10, 1.0), rig.full(10, 2.0)]
    late = threading.Event()

    def body(comm: Any) -> Any:
        if comm.rank == 1:
            late.wait()
        try:
            comm.all_reduce(tensors[comm.rank])
        finally:
            late.set()

    errors = outcomes(rig, world, body)
    assert isinstance(errors[0], CollectiveTimeout)
    assert isinstance(errors[1], RingcommError)
    rig.synchronize()
    assert torch.equal(tensors[0], rig.full(10, 1.0))
    assert torch.equal(tensors[1], rig.full(10, 2.0))


def test_a_rank_that_raises_wakes_the_others(rig: Rig) -> None:
    world = rig.world(2)

    def body(comm: Any) -> None:
        if comm.rank == 0:
            raise KeyError("mine")
        with rig.ordered():
            comm.all_reduce(rig.full(10, 1.0))

    started = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        world.run(body)
    assert time.monotonic() - started < SOON_S
    error = error_of(world[1].barrier)
    assert isinstance(error, AbortedError)
    assert "rank 0 aborted the communicator: KeyError: 'mine'" in str(error)


def test_a_rank_that_closes_is_lost(rig: Rig) -> None:
    world = rig.world(2)

    def body(comm: Any) -> None:
        if comm.rank == 0:
            comm.close()
        else:
            comm.all_reduce(rig.full(10, 1.0))

    _, error = outcomes(rig, world, body)
    assert isinstance(error, PeerLost)
    assert "all_reduce on rank 1 of 2" in str(error)
    assert "rank 0" in str(error) and "has closed the communicator" in str(error)
    assert isinstance(error_of(world[1].barrier), AbortedError)


def reduce_of(count: int, algorithm: str = "one_shot", op: Any = ReduceOp.SUM) -> Any:
    def call(rig: Rig, comm: Any) -> None:
        comm.all_reduce(rig.full(count, 1.0), op, algorithm=spelled(algorithm, "all_reduce"))

    return call


def gather_of(count: int, algorithm: str = "one_shot") -> Any:
    def call(rig: Rig, comm: Any) -> None:
        comm.all_gather_into_tensor(
            rig.full(count * comm.world_size, 0.0), rig.full(count, 1.0), algorithm=algorithm
        )

    return call


def scatter_of(count: int, algorithm: str = "one_shot") -> Any:
    def call(rig: Rig, comm: Any) -> None:
        comm.reduce_scatter_tensor(
            rig.full(count, 0.0), rig.full(count * comm.world_size, 1.0), algorithm=algorithm
        )

    return call


def integers_of(algorithm: str) -> Any:
    def call(rig: Rig, comm: Any) -> None:
        comm.all_reduce(rig.full(100, 1, torch.int32), algorithm=spelled(algorithm, "all_reduce"))

    return call


def barrier(rig: Rig, comm: Any) -> None:
    comm.barrier()


ALL = ("one_shot", "ring", "ll")
# Calls of rank 0 and rank 1, and the words that the error must contain about each.
MISMATCHES: dict[str, tuple[Any, Any, str, str]] = {
    **{
        f"sizes, {how}": (
            reduce_of(100, how),
            reduce_of(200, how),
            f"400 bytes, {spelled(how, 'all_reduce')}",
            f"800 bytes, {spelled(how, 'all_reduce')}",
        )
        for how in ALL
    },
    **{
        f"dtypes, {how}": (
            integers_of(how),
            reduce_of(100, how),
            f"int32, SUM, 400 bytes, {spelled(how, 'all_reduce')}",
            f"float32, SUM, 400 bytes, {spelled(how, 'all_reduce')}",
        )
        for how in ALL
    },
    **{
        f"ops, {how}": (
            reduce_of(100, how),
            reduce_of(100, how, ReduceOp.MAX),
            f"SUM, 400 bytes, {spelled(how, 'all_reduce')}",
            f"MAX, 400 bytes, {spelled(how, 'all_reduce')}",
        )
        for how in ALL
    },
    **{
        f"collectives, {how}": (
            scatter_of(100, how),
            gather_of(100, how),
            "reduce_scatter(",
            "all_gather(",
        )
        for how in ALL
    },
    "two-shot and ring": (reduce_of(100), reduce_of(100, "ring"), "two_shot", "ring"),
    "ll and two-shot": (reduce_of(100, "ll"), reduce_of(100), "bytes, ll", "two_shot"),
    "ring and ll": (reduce_of(100, "ring"), reduce_of(100, "ll"), "ring", "bytes, ll"),
    "numbers of blocks": (reduce_of(100), reduce_of(100_000), "400 bytes", "400000 bytes"),
    "barrier": (barrier, reduce_of(5000), "barrier(", "all_reduce("),
}


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_two_roots_are_found_out_by_the_next_call(rig: Rig, name: str) -> None:
    """Neither rank reads the other's data in this call; the next call finds the mismatch."""
    world = rig.world(2)

    def body(comm: Any) -> None:
        root = comm.rank if name == "broadcast" else 1 - comm.rank
        raise first_error(rig, comm, lambda: getattr(comm, name)(rig.full(100, 1.0), root))

    results = outcomes(rig, world, body)
    assert all(isinstance(error, MismatchError | AbortedError) for error in results), results
    for error in results:
        assert f"called {name}(float32, " in str(error)
        assert "root" in str(error)
    world.close()


def test_ranks_that_reduce_to_themselves_wait_for_the_deadline(rig: Rig) -> None:
    """Neither rank publishes anything, so neither can see the other's call."""
    world = rig.world(2, timeout=SHORT_S)

    def body(comm: Any) -> None:
        raise first_error(rig, comm, lambda: comm.reduce(rig.full(100, 1.0), comm.rank))

    results = outcomes(rig, world, body)
    assert all(isinstance(error, CollectiveTimeout | AbortedError) for error in results), results
    assert any(isinstance(error, CollectiveTimeout) for error in results)
    world.close()


def check_mismatch(results: list[Any], first: str, second: str) -> None:
    assert all(isinstance(error, MismatchError | AbortedError) for error in results), results
    named = [error for error in results if isinstance(error, MismatchError)]
    assert named
    for error in named:
        text = str(error)
        calls = {rank: text.split(f"ank {rank} called ")[1].split(")")[0] for rank in (0, 1)}
        assert first in calls[0] and second in calls[1], text


@pytest.mark.parametrize("name", MISMATCHES)
def test_different_calls_are_named(rig: Rig, name: str) -> None:
    *calls, first, second = MISMATCHES[name]
    world = rig.world(2)

    def body(comm: Any) -> None:
        raise first_error(rig, comm, lambda: calls[comm.rank](rig, comm))

    check_mismatch(outcomes(rig, world, body), first, second)
    again = outcomes(rig, world, lambda comm: comm.barrier())
    assert all(isinstance(error, AbortedError) for error in again)
    world.close()


def test_packets_of_different_sizes_are_never_taken_for_headers(rig: Rig) -> None:
    """The report is the same, whichever channel is the first to see that the calls differ."""
    for count in range(64, 1024, 96):
        world = rig.world(2, options=WIDE)

        def body(comm: Any, count: int = count) -> None:
            size = count if comm.rank == 0 else 1024
            raise first_error(rig, comm, lambda: reduce_of(size, "ll")(rig, comm))

        check_mismatch(outcomes(rig, world, body), f" {4 * count} bytes", " 4096 bytes")
        world.close()


def test_an_abort_ends_a_kernel_that_waits(rig: Rig) -> None:
    """A rank that receives a message waits in a kernel of its own, which the abort must end."""
    world = rig.world(2)
    tensor = rig.full(10, 0.0)
    work = world[0].irecv(tensor, 1)
    timer = threading.Timer(0.1, world[0].abort, ["changed my mind"])
    timer.start()
    until(work.is_completed)
    timer.join()
    error = error_of(work.wait)
    assert isinstance(error, AbortedError)
    assert "changed my mind" in str(error)
    assert not work.is_success()
    assert isinstance(work.exception(), AbortedError)
    # The peer made no call; its next call raises, and names the rank and the cause.
    error = error_of(world[1].barrier)
    assert isinstance(error, AbortedError)
    assert "rank 0 aborted the communicator: changed my mind" in str(error)
    world.close()
    works(rig)


def test_an_abort_while_nothing_runs(rig: Rig) -> None:
    world = rig.world(2)
    world[1].abort()
    world[1].abort("a second one changes nothing")
    assert world[1].aborted
    for comm in world:
        error = error_of(partial(comm.all_reduce, rig.full(10, 1.0)))
        assert isinstance(error, AbortedError)
        assert "Communicator.abort() was called" in str(error)
    world.close()


def test_an_abort_before_a_queued_call_begins(emulated: Rigs) -> None:
    """The aborted call must neither run nor wait for its deadline."""
    rig = emulated()
    world = rig.world(2)
    stream = rig.runtime.make_stream(0)
    gate = Gate(rig, stream.handle)
    tensor = rig.full(10, 5.0)
    with rig.runtime.on_stream(stream):
        work = world[0].irecv(tensor, 1)
    world[0].abort("too late")
    assert not work.is_completed()
    gate.open()
    until(work.is_completed)
    assert "too late" in str(error_of(work.wait))
    world.close()


def waits_in_vain(rig: Rig) -> tuple[Any, Any]:
    """Returns a world in which a kernel has given up, and its Work; no rank has raised yet."""
    world = rig.world(2, timeout=0.2)
    work = world[0].irecv(rig.full(10, 0.0), 1)
    until(work.is_completed)
    return world, work


def check_timeout(error: RingcommError, operation: str) -> None:
    assert isinstance(error, CollectiveTimeout), error
    text = str(error)
    assert text.startswith(f"{operation} on rank 0 of 2: rank 0 in ")
    assert "until its timeout ended, for rank 1 (item 0, epoch wanted 1, seen 0)" in text


def test_a_fault_is_raised_by_the_next_call(rig: Rig) -> None:
    world, work = waits_in_vain(rig)
    check_timeout(error_of(lambda: world[0].all_reduce(rig.full(10, 1.0))), "all_reduce")
    error = error_of(work.wait)
    assert isinstance(error, AbortedError)
    assert "unusable since an earlier fault. First fault: CollectiveTimeout" in str(error)
    world.close()


def test_a_fault_is_raised_by_wait(rig: Rig) -> None:
    world, work = waits_in_vain(rig)
    check_timeout(error_of(work.wait), "irecv")
    assert isinstance(error_of(world[0].barrier), AbortedError)
    world.close()


def test_a_fault_is_raised_by_close_if_nobody_was_told(rig: Rig) -> None:
    world, work = waits_in_vain(rig)
    check_timeout(error_of(world[0].close), "close")
    assert not work.is_success()
    assert "CollectiveTimeout" in str(error_of(work.wait))
    world[0].close()
    assert isinstance(error_of(world[0].barrier), AbortedError)
    world[1].close()
    works(rig)


def test_a_world_closes_all_ranks_even_if_one_raises(rig: Rig) -> None:
    world, _ = waits_in_vain(rig)
    check_timeout(error_of(world.close), "close")
    world.close()
    assert all(each.engine.closed for each in world)


def test_a_refused_launch_makes_the_communicator_unusable(emulated: Rigs) -> None:
    """Otherwise peers would take this rank's next call for the call that was not launched."""
    rig = emulated(block_slots=1)
    world = rig.world(1)
    error = error_of(lambda: world[0].all_reduce(rig.full(100_000, 1.0)))
    assert type(error) is RingcommError
    assert "all_reduce on rank 0 of 1" in str(error) and "too many blocks" in str(error)
    assert isinstance(error_of(world[0].barrier), AbortedError)
    world.close()


def test_bad_arguments_disturb_nobody(rig: Rig) -> None:
    """Each rank checks its own arguments, since a joint launch cannot refuse one rank's call."""
    options = CommOptions(segment_bytes=4096, channels=1, ll_bytes=1024)
    world = rig.world(2, options=options)

    def body(comm: Any) -> Any:
        error = error_of(lambda: comm.all_reduce(rig.full(1000, 1.0), algorithm="ll"))
        assert '"ll" takes up to' in str(error)
        return sum_of_ones(rig, comm)

    assert outcomes(rig, world, body) == [10000.0] * 2
    world.close()
