# SPDX-License-Identifier: Apache-2.0
"""The order of calls, streams, asynchronous work, and several communicators."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, ArgumentError, CollectiveTimeout, CommOptions, UnsupportedError
from ringcomm.memory.device_heap import existing_heap
from tests.proof.faults.device.conftest import Rigs
from tests.proof.faults.device.rig import (
    DEVICE,
    LONG_S,
    OPTIONS,
    SOON_S,
    Gate,
    Rig,
    error_of,
    until,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deadlines

# How long a test waits to see that an event does not happen.
GRACE_S = 0.05
COUNT = 3000


def both(world: Any, call: Any) -> list[Any]:
    """Calls ``call(comm)`` on every rank in a thread of its own, on the default streams."""
    results: dict[int, Any] = {}

    def body(comm: Any) -> None:
        results[comm.rank] = call(comm)

    threads = [threading.Thread(target=body, args=(comm,)) for comm in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    return [results[comm.rank] for comm in world]


def event_of(rig: Rig, stream: int) -> Any:
    return rig.runtime.record_event(0, stream)


def test_a_call_is_behind_its_stream_and_ahead_of_what_comes_later(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(2)
    tensors = [rig.full(COUNT, 0.0) for _ in world]
    seen: list[float] = []
    streams = [rig.runtime.make_stream(0) for _ in world]
    gates = [Gate(rig, stream.handle) for stream in streams]
    for rank, stream in enumerate(streams):
        rig.runtime.run_on_stream(0, stream.handle, lambda k=rank: tensors[k].fill_(k + 1))

    def call(comm: Any) -> None:
        with rig.runtime.on_stream(streams[comm.rank]):
            comm.all_reduce(tensors[comm.rank])

    both(world, call)  # returns while the streams are held
    for rank, stream in enumerate(streams):
        rig.runtime.run_on_stream(
            0, stream.handle, lambda k=rank: seen.append(tensors[k].sum().item())
        )
    gates[0].open()
    time.sleep(GRACE_S)
    assert seen == []  # the collective needs both
    gates[1].open()
    rig.synchronize()
    assert seen == [3.0 * COUNT] * 2


def test_calls_on_different_streams_follow_each_other(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(1)
    first, second = (rig.runtime.make_stream(0) for _ in range(2))
    gate = Gate(rig, first.handle)
    with rig.runtime.on_stream(first):
        world[0].all_reduce(lasting(rig, world))
    with rig.runtime.on_stream(second):
        world[0].barrier()
    done = event_of(rig, second.handle)
    time.sleep(GRACE_S)
    assert not done.query()
    gate.open()
    until(done.query)


def lasting(rig: Rig, world: Any) -> torch.Tensor:
    """Returns a tensor that lives as long as the world."""
    tensor = rig.full(COUNT, 1.0)
    world.kept = [*getattr(world, "kept", []), tensor]
    return tensor


def test_asynchronous_calls_run_beside_the_current_stream(emulated: Rigs) -> None:
    """The current stream continues; wait() orders it behind the call, without blocking the host."""
    rig = emulated()
    world = rig.world(1)
    comm = world[0]
    stream = rig.runtime.make_stream(0)
    tensor = rig.full(COUNT, 1.0)
    with rig.runtime.on_stream(stream):
        comm.all_reduce(tensor, async_op=True).wait()
    rig.synchronize()
    side = comm.engine.streams._side
    gate = Gate(rig, side.handle)
    with rig.runtime.on_stream(stream):
        work = comm.all_reduce(tensor, async_op=True)
        beside = event_of(rig, stream.handle)
        until(beside.query)
        assert not work.is_completed() and not work.is_success()
        assert work.exception() is None
        assert work.wait() is True  # the call's side stream is still held
        behind = event_of(rig, stream.handle)
    time.sleep(GRACE_S)
    assert not behind.query()
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"not done after 0\.1 s of wait"):
        work.wait(timedelta(seconds=0.1))
    assert time.monotonic() - started < SOON_S
    gate.open()
    until(behind.query)
    assert work.wait(LONG_S) is True
    assert work.is_completed() and work.is_success()


def test_an_asynchronous_call_is_behind_the_current_stream(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(1)
    stream = rig.runtime.make_stream(0)
    gate = Gate(rig, stream.handle)
    with rig.runtime.on_stream(stream):
        work = world[0].all_reduce(lasting(rig, world), async_op=True)
    time.sleep(GRACE_S)
    assert not work.is_completed()
    gate.open()
    until(work.is_completed)


def test_wait_on_another_thread_orders_that_threads_stream(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(1)
    first, other = (rig.runtime.make_stream(0) for _ in range(2))
    gate = Gate(rig, first.handle)
    with rig.runtime.on_stream(first):
        work = world[0].barrier(async_op=True)

    def wait() -> None:
        with rig.runtime.on_stream(other):
            work.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(LONG_S)
    done = event_of(rig, other.handle)
    time.sleep(GRACE_S)
    assert not done.query()
    gate.open()
    until(done.query)


def test_tensors_live_until_the_call_is_done(emulated: Rigs) -> None:
    """Drops the tensors and the handle right after the call; a strided tensor is copied."""
    rig = emulated()
    world = rig.world(1)
    stream = rig.runtime.make_stream(0)
    gate = Gate(rig, stream.handle)
    kept = ringcomm.zeros(COUNT, device=DEVICE)
    heap = existing_heap(0)
    assert heap is not None
    refs: list[Any] = [weakref.ref(heap.find_allocation(kept.data_ptr()))]
    dense, strided = rig.full(COUNT, 1.0), rig.full(2 * COUNT, 1.0)[::2]
    refs += [weakref.ref(each) for each in (dense, strided)]
    with rig.runtime.on_stream(stream):
        for tensor in (kept, dense, strided):
            world[0].all_reduce(tensor, async_op=True)
    del kept, dense, strided, tensor
    assert all(ref() is not None for ref in refs)
    gate.open()
    rig.synchronize()
    world[0].barrier(async_op=True)  # looks what is done
    assert [ref() for ref in refs] == [None] * 3


def test_freed_tensors_of_a_device_are_not_used_again_too_early(rig: Rig) -> None:
    """Otherwise the collective would write into the next owner's memory."""
    world = rig.world(2)

    def body(comm: Any) -> list[torch.Tensor]:
        others = []
        with rig.ordered():
            for turn in range(20):
                tensor = rig.full(COUNT, float(turn))
                comm.all_reduce(tensor, async_op=True)
                del tensor
                others.append(rig.full(COUNT, -5.0))
            rig.synchronize()
        return others

    for others in world.run(body):
        assert all(torch.equal(other, rig.full(COUNT, -5.0)) for other in others)


def test_the_legacy_default_stream_serves_all_ranks(rig: Rig) -> None:
    """Two launches on that stream could not run at once, so one launch carries both ranks."""
    world = rig.world(2)

    def call(comm: Any) -> torch.Tensor:
        assert rig.runtime.current_stream(0) == 0
        tensor = rig.full(COUNT, comm.rank + 1.0)
        for _ in range(3):
            comm.all_reduce(tensor)
        rig.synchronize()
        return tensor

    for tensor in both(world, call):
        assert torch.equal(tensor, rig.full(COUNT, 12.0))


def test_results_of_a_work(rig: Rig) -> None:
    world = rig.world(2)

    def body(comm: Any) -> None:
        with rig.ordered():
            tensor = rig.full(COUNT, comm.rank + 1.0)
            work = comm.all_reduce(tensor, async_op=True)
            (output,) = work.result()
            assert output is tensor
            assert torch.equal(tensor, rig.full(COUNT, 3.0))
            future = work.get_future()
            assert work.get_future() is future
            (output,) = future.wait()
            assert torch.equal(output, rig.full(COUNT, 3.0))
            rig.synchronize()
            assert work.is_completed() and work.is_success() and work.exception() is None
            with pytest.raises(ArgumentError):
                work.wait(-1.0)

    world.run(body)


def test_the_future_of_a_failed_call_gives_the_error(rig: Rig) -> None:
    world = rig.world(2, timeout=0.2)
    work = world[0].irecv(rig.full(10, 0.0), 1)
    until(work.is_completed)
    with pytest.raises(Exception, match="until its timeout ended, for rank 1"):
        work.get_future().wait()
    assert not work.is_success()


def test_submitted_functions(rig: Rig) -> None:
    world = rig.world(2)

    def body(comm: Any) -> None:
        usual = comm.timeout
        tensor, seen = rig.full(COUNT, 1.0), []

        def several() -> list[torch.Tensor]:
            seen.append(comm.timeout)
            comm.all_reduce(tensor)
            comm.all_reduce(tensor)
            return [tensor]

        with rig.ordered():
            work = comm.engine.submit(several, "mine", timeout=5.0)
            assert seen == [timedelta(seconds=5)]
            assert comm.timeout == usual
            (output,) = work.result()
            assert torch.equal(output, rig.full(COUNT, 4.0))
            until(work.is_completed)
            assert work.is_success()

            def fails() -> list[torch.Tensor]:
                raise KeyError("mine")

            with pytest.raises(KeyError):
                comm.engine.submit(fails, "mine", timeout=5.0)
            assert comm.timeout == usual

    world.run(body)


def test_a_submitted_function_is_done_when_its_calls_are(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(1)
    stream = rig.runtime.make_stream(0)
    gate = Gate(rig, stream.handle)

    def call() -> list[torch.Tensor]:
        world[0].barrier()
        return []

    with rig.runtime.on_stream(stream):
        work = world[0].engine.submit(call, "mine")
    time.sleep(GRACE_S)
    assert not work.is_completed()
    gate.open()
    until(work.is_completed)


def test_a_launch_that_could_not_be_co_resident_is_refused(emulated: Rigs) -> None:
    rig = emulated(multiprocessors=2, blocks_per_multiprocessor=1)
    world = rig.world(1)
    assert world[0].all_reduce(lasting(rig, world)) is None
    used = rig.used_bytes()
    with pytest.raises(UnsupportedError, match="needs 4 co-resident blocks, but device 0 runs 2"):
        rig.world(2)
    # The call may still run on the current stream; until it ends, no memory is freed.
    rig.synchronize()
    assert rig.used_bytes() == used


# Bytes of a call that uses a communicator's blocks of all channels.
WIDE_BYTES = 2 * 32 << 10


def opposite_orders(
    store: Any, rank: int, n: int, kind: str, rounds: int, knobs: dict[str, int]
) -> list[str]:
    """Uses two communicators on two streams; the two ranks use them in opposite orders."""
    rig = Rig(kind, **knobs)
    comms = [rig.connect(store, rank, n, name=name) for name in ("first", "second")]
    streams = [rig.runtime.make_stream(0) for _ in comms]
    tensors = [rig.full(WIDE_BYTES // 4, 1.0) for _ in comms]
    for comm in comms:
        comm.barrier()
    rig.synchronize()
    for comm in comms:
        comm.timeout = LONG_S if rounds else 1.0
    told = []
    try:
        for turn in range(max(1, rounds)):
            for k in (0, 1) if (rank + turn) % 2 else (1, 0):
                with rig.runtime.on_stream(streams[k]):
                    comms[k].all_reduce(tensors[k])
        rig.synchronize()
        for comm in comms:
            comm.barrier()
        rig.synchronize()
    except CollectiveTimeout as error:
        told.append(str(error))
    except AbortedError as error:
        told.append(str(error))
    for comm in comms:
        try:
            comm.close()
        except (CollectiveTimeout, AbortedError) as error:
            told.append(str(error))
    if rounds:
        for tensor in tensors:
            assert torch.equal(tensor, rig.full(WIDE_BYTES // 4, 2.0**rounds))
    rig.close()
    return told


def test_communicators_in_opposite_orders_run_side_by_side(kind: str) -> None:
    """The blocks of all launches fit, so no launch may wait for another's end."""
    told = run_ranks(opposite_orders, 2, kind, 10, {"multiprocessors": 4})
    assert told == [[], []]


def test_opposite_orders_past_the_capacity_end_by_the_deadline() -> None:
    """Each rank's second launch does not fit beside its first, which waits for the other rank."""
    knobs = {"multiprocessors": 2, "blocks_per_multiprocessor": 1}
    for told in run_ranks(opposite_orders, 2, "emulated", 0, knobs):
        assert told
        assert all("timeout ended" in text for text in told)


def test_opposite_orders_in_one_hardware_queue_end_by_the_deadline() -> None:
    """The blocks fit, but in one queue the second launch waits for the end of the first."""
    knobs = {"multiprocessors": 4, "hardware_queues": 1}
    for told in run_ranks(opposite_orders, 2, "emulated", 0, knobs):
        assert told
        assert all("timeout ended" in text for text in told)
        assert "hardware queues for 1" in told[0] and "CUDA_DEVICE_MAX_CONNECTIONS" in told[0]


def same_order(store: Any, rank: int, n: int) -> int:
    """Uses more communicators than fit at a time, each on its own stream: they take turns."""
    rig = Rig("emulated", multiprocessors=4, blocks_per_multiprocessor=1)
    comms = [rig.connect(store, rank, n, name=f"number-{k}") for k in range(4)]
    streams = [rig.runtime.make_stream(0) for _ in comms]
    tensors = [rig.full(WIDE_BYTES // 4, 1.0) for _ in comms]
    for _ in range(5):
        for comm, stream, tensor in zip(comms, streams, tensors, strict=True):
            with rig.runtime.on_stream(stream):
                comm.all_reduce(tensor)
    rig.synchronize()
    assert all(torch.equal(each, rig.full(WIDE_BYTES // 4, 32.0)) for each in tensors)
    for comm in comms:
        comm.close()
    rig.close()
    return 0


def test_communicators_past_the_capacity_take_turns() -> None:
    assert run_ranks(same_order, 2) == [0, 0]


def test_a_launch_that_does_not_fit_waits_on_the_device(emulated: Rigs) -> None:
    """An event puts it behind the oldest running launch, so the scheduler never sees both."""
    rig = emulated(multiprocessors=2, blocks_per_multiprocessor=1)
    first, second = rig.world(1), rig.world(1)
    streams = [rig.runtime.make_stream(0) for _ in range(2)]
    tensors = [rig.full(WIDE_BYTES // 4, 1.0) for _ in streams]
    for stream, world, tensor in zip(streams, (first, second), tensors, strict=True):
        with rig.runtime.on_stream(stream):
            world[0].all_reduce(tensor)
    rig.synchronize()
    gate = Gate(rig, streams[0].handle)
    with rig.runtime.on_stream(streams[0]):
        first[0].all_reduce(tensors[0])
    with rig.runtime.on_stream(streams[1]):
        second[0].all_reduce(tensors[1])
    done = event_of(rig, streams[1].handle)
    time.sleep(GRACE_S)
    assert not done.query()
    gate.open()
    until(done.query)


def test_a_launch_of_all_ranks_that_does_not_fit_waits_on_the_device(emulated: Rigs) -> None:
    rig = emulated(multiprocessors=4, blocks_per_multiprocessor=1)
    worlds = [rig.world(2) for _ in range(2)]
    streams = [rig.runtime.make_stream(0) for _ in worlds]
    tensors = [[rig.full(WIDE_BYTES // 4, 1.0) for _ in world] for world in worlds]
    gate = Gate(rig, streams[0].handle)
    for world, stream, of_ranks in zip(worlds, streams, tensors, strict=True):
        with rig.runtime.on_stream(stream):
            world.all_reduce(of_ranks)
    done = event_of(rig, streams[1].handle)
    time.sleep(GRACE_S)
    assert not done.query()
    gate.open()
    until(done.query)
    rig.synchronize()


def test_threads_in_opposite_orders_end_by_the_deadline(rig: Rig) -> None:
    """Ranks of one launch meet on the host, where each thread waits for the other's."""
    worlds = [rig.world(2, timeout=0.5) for _ in range(2)]
    told: dict[int, str] = {}

    def call(comm: Any) -> None:
        mine = [world[comm.rank] for world in worlds]
        tensors = [rig.full(COUNT, 1.0) for _ in mine]
        told[comm.rank] = str(
            error_of(
                lambda: [
                    mine[k].all_reduce(tensors[k]) for k in ((0, 1) if comm.rank == 0 else (1, 0))
                ]
            )
        )

    both(worlds[0], call)
    assert all("waited 0.5 s" in text for text in told.values()), told


def test_messages_beside_a_collective(rig: Rig) -> None:
    """Both ranks send first; a collective precedes the receives."""
    world = rig.world(2)

    def body(comm: Any) -> None:
        with rig.ordered():
            out, into = rig.full(COUNT, comm.rank + 1.0), rig.full(COUNT, 0.0)
            sent = comm.isend(out, 1 - comm.rank)
            total = rig.full(COUNT, 1.0)
            comm.all_reduce(total)
            received = comm.irecv(into, 1 - comm.rank)
            sent.wait()
            received.wait()
            assert torch.equal(into, rig.full(COUNT, 2.0 - comm.rank))
            assert torch.equal(total, rig.full(COUNT, 2.0))

    world.run(body)


def test_sends_that_wait_leave_blocks_for_the_collective_before_the_receives(
    emulated: Rigs,
) -> None:
    """All ranks share a device, whose multiprocessors each run one block of a reduction.

    The sends wait for the receives, which come after a collective that uses all blocks.
    """
    rig = emulated(multiprocessors=16, hardware_queues=32)
    options = CommOptions(segment_bytes=4096)
    world = rig.world(4, timeout=SOON_S, options=options)
    count = (512 << 10) // 4

    def body(comm: Any) -> None:
        with rig.ordered():
            out = rig.full(count, comm.rank + 1.0)
            into, total = rig.full(count, 0.0), rig.full(count, 1.0)
            sent = comm.isend(out, (comm.rank + 1) % 4)
            comm.all_reduce(total)
            comm.recv(into, (comm.rank + 3) % 4)
            sent.wait()
            assert torch.equal(into, rig.full(count, (comm.rank + 3) % 4 + 1.0))
            assert torch.equal(total, rig.full(count, 4.0))

    world.run(body)


def test_messages_that_would_not_fit_beside_a_collective_are_refused(emulated: Rigs) -> None:
    rig = emulated(multiprocessors=4, blocks_per_multiprocessor=1)
    world = rig.world(2)  # of two channels

    def body(comm: Any) -> None:
        with rig.ordered():
            comm.all_reduce(rig.full(COUNT, 1.0))
            with pytest.raises(UnsupportedError, match=r"4 blocks .* 4 blocks of a collective"):
                comm.isend(rig.full(COUNT, 1.0), 1 - comm.rank)
            comm.all_reduce(rig.full(COUNT, 1.0))

    world.run(body)


def test_options_bound_the_blocks(emulated: Rigs) -> None:
    """By default ranks divide the multiprocessors that messages leave free into channels."""
    rig = emulated(multiprocessors=15)
    options = CommOptions(segment_bytes=OPTIONS.segment_bytes)
    assert "channels=3" in rig.world(3, options=options)[0].engine.owner.layout
