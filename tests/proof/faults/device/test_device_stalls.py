# SPDX-License-Identifier: Apache-2.0
"""Calls that would stall on a GPU stall here: in streams of one hardware queue, or in the driver.

A driver call that waits for the device, such as an allocation, also waits for running messages,
which may themselves wait for the calling thread. If ringcomm promises that nothing stalls, the test
requires it; otherwise the call must end by its deadline and name the possible cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, CollectiveTimeout, CommOptions
from tests.support.device_worlds import Devices, device_of
from tests.support.emulator import DriverError, handles
from tests.support.emulator.library import COMPILER

pytestmark = [
    pytest.mark.deadlines,
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

COUNT = 16 << 10  # more than the staging of a message holds
# Timeouts of calls that must end by their deadline, and of calls that must not reach it.
SOON_S, LONG_S = 0.7, 30.0
TOLD = "until its timeout ended"
QUEUES = "hardware queues for"

Body = Callable[[Devices, Any], None]


def ran(body: Body, ranks: int, on: tuple[int, ...], timeout: float, **settings: Any) -> str:
    """Runs ``body`` on ranks that are threads of this process; returns the text of their errors."""
    devices = Devices("emulated", devices=len(on), physical=on, **settings)
    options = CommOptions(timeout=timeout, segment_bytes=1024, channels=2)
    try:
        world = devices.new_world(ranks, on, options)
        try:
            devices.run(world, lambda comm: body(devices, comm))
            return ""
        except (CollectiveTimeout, AbortedError) as error:
            return str(error)
        finally:
            for comm in world:
                comm.abort("the test is over")
            world.close()
    finally:
        devices.close()


def settle(devices: Devices, comm: Any) -> None:
    """Waits for all kernels; raises the error of a kernel of this rank."""
    devices.runtime.synchronize(device_of(comm))
    comm.barrier()


def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((COUNT,), value, dtype=dtype)


# ---- hardware queues -----------------------------------------------------------------------------


def send_reduce_receive(devices: Devices, comm: Any) -> None:
    """All ranks send first; a collective comes before the receives for which the sends wait."""
    n, into, total = comm.world_size, full(0.0), full(1.0)
    sent = comm.isend(full(comm.rank + 1.0), (comm.rank + 1) % n)
    comm.all_reduce(total)
    comm.recv(into, (comm.rank - 1) % n)
    sent.wait()
    settle(devices, comm)
    assert torch.equal(into, full((comm.rank - 1) % n + 1.0))
    assert torch.equal(total, full(float(n)))


def test_a_rank_with_a_device_of_its_own_has_enough_queues():
    """A rank uses five: 2 for messages, 1 for asynchronous calls, its thread's, the default."""
    assert ran(send_reduce_receive, 2, (0, 1), LONG_S, hardware_queues=8) == ""


def test_with_one_queue_a_message_holds_back_what_it_waits_for():
    told = ran(send_reduce_receive, 2, (0, 1), SOON_S, hardware_queues=1)
    assert TOLD in told and f"{QUEUES} 1:" in told and "CUDA_DEVICE_MAX_CONNECTIONS=32" in told


def test_two_ranks_of_one_device_have_enough_queues():
    assert ran(send_reduce_receive, 2, (0,), LONG_S, hardware_queues=8) == ""


@pytest.mark.parametrize("queues", [8, 32])
def test_messages_of_four_ranks_of_one_device_need_more_queues_than_usual(queues):
    """Each rank has three streams, and the joint launch one: 14 streams with the default stream."""
    if queues == 32:
        assert ran(send_reduce_receive, 4, (0,), LONG_S, hardware_queues=32) == ""
        return
    told = ran(send_reduce_receive, 4, (0,), SOON_S, hardware_queues=8)
    assert TOLD in told and f"{QUEUES} 8:" in told


def collectives(devices: Devices, comm: Any) -> None:
    streams = [devices.runtime.make_stream(device_of(comm)) for _ in range(4)]
    works, tensors = [], []
    for turn in range(8):
        with devices.runtime.on_stream(streams[turn % 4]):
            tensors.append(full(1.0))
            works.append(comm.all_reduce(tensors[-1], async_op=turn % 2 == 0))
    for work in works:
        if work is not None:
            work.wait()
    settle(devices, comm)
    assert all(torch.equal(each, full(float(comm.world_size))) for each in tensors)


@pytest.mark.parametrize(("ranks", "on"), [(4, (0,)), (2, (0, 1))])
def test_collectives_stall_in_no_queue(ranks, on):
    """Each collective follows all earlier launches, so streams and queues do not matter."""
    assert ran(collectives, ranks, on, LONG_S, hardware_queues=1) == ""


# ---- calls that wait for the device --------------------------------------------------------------


def reduce_beside_a_message(call: Callable[[Devices, Any], object]) -> Body:
    """Makes ``call`` after a send; the receiver makes the next collective before it receives."""

    def body(devices: Devices, comm: Any) -> None:
        comm.barrier()
        if comm.rank == 0:
            sent = comm.isend(full(3.0), 1)
        call(devices, comm)
        total, into = full(1.0), full(0.0)
        comm.all_reduce(total)
        if comm.rank == 0:
            sent.wait()
        else:
            comm.recv(into, 0)
        settle(devices, comm)
        assert torch.equal(total, full(2.0))
        assert comm.rank == 0 or torch.equal(into, full(3.0))

    return body


def allocate(devices: Devices, comm: Any) -> None:
    """Allocates as torch's allocator does when its cache is empty."""
    runtime: Any = devices.runtime
    runtime.free(comm.rank, runtime.allocate(comm.rank, 1 << 20))


def reduce_half(devices: Devices, comm: Any) -> None:
    comm.all_reduce(full(1.0, torch.float16))


def copy_on_the_default_stream(devices: Devices, comm: Any) -> None:
    """Waits, as ``tensor.cpu()`` does there, for blocking streams; ringcomm has none."""
    runtime: Any = devices.runtime
    runtime.record_event(comm.rank, 0).synchronize()


def test_an_allocation_between_a_message_and_its_collective_stalls():
    assert TOLD in ran(reduce_beside_a_message(allocate), 2, (0, 1), SOON_S)


def test_the_first_collective_of_a_dtype_beside_a_message_stalls():
    assert TOLD in ran(reduce_beside_a_message(reduce_half), 2, (0, 1), SOON_S)


def test_a_later_collective_of_a_dtype_beside_a_message_does_not():
    def body(devices: Devices, comm: Any) -> None:
        reduce_half(devices, comm)
        reduce_beside_a_message(reduce_half)(devices, comm)

    assert ran(body, 2, (0, 1), LONG_S) == ""


def test_a_copy_on_the_default_stream_beside_a_message_does_not_stall():
    assert ran(reduce_beside_a_message(copy_on_the_default_stream), 2, (0, 1), LONG_S) == ""


def test_a_thread_that_loads_a_kernel_holds_up_no_other_device():
    """Rank 0 loads a kernel while its first one waits for rank 1, which loads the same later."""
    loading = threading.Event()

    def body(devices: Devices, comm: Any) -> None:
        if comm.rank == 1:
            loading.wait()
            time.sleep(0.05)
        comm.all_reduce(full(1.0, torch.bfloat16))
        loading.set()
        reduce_half(devices, comm)
        settle(devices, comm)

    assert ran(body, 2, (0, 1), LONG_S) == ""


def test_a_rank_that_returns_before_its_kernel_runs_is_not_lost():
    """Rank 1's kernel waits for earlier work of its stream, while rank 0's waits for rank 1."""
    devices = Devices("emulated", devices=2)
    assert devices.emulated is not None
    runtime = devices.emulated
    options = CommOptions(timeout=LONG_S, segment_bytes=1024, channels=2)
    earlier = threading.Event()

    def hold() -> None:
        assert earlier.wait(LONG_S)

    def body(comm: Any) -> torch.Tensor:
        with runtime.assuming(comm.rank):
            tensor = full(1.0)
            if comm.rank == 1:
                runtime.run_on_stream(1, runtime.current_stream(1), hold)
            comm.all_reduce(tensor)
            if comm.rank == 0:
                time.sleep(0.3)  # meanwhile rank 1 returns
                earlier.set()
                comm.engine.finish_host_side()
        return tensor

    try:
        world = devices.new_world(2, (0, 1), options)
        tensors = world.run(body)
        world.close()
        assert all(torch.equal(tensor, full(2.0)) for tensor in tensors)
    finally:
        devices.close()


def test_a_device_in_error_keeps_no_rank_busy(monkeypatch: pytest.MonkeyPatch):
    """An event that is not done keeps a rank busy; an event whose query fails does not."""
    devices = Devices("emulated", devices=1)
    failing, open_event = mock.Mock(), mock.Mock()
    failing.query.side_effect = DriverError(700, "an illegal memory access was encountered")
    open_event.query.return_value = False
    try:
        with devices.new_world(1, (0,), CommOptions(timeout=LONG_S)) as world:
            engine: Any = world[0].engine
            assert not engine.is_busy()
            monkeypatch.setattr(engine, "_events_of_the_end", lambda: [open_event])
            assert engine.is_busy()
            monkeypatch.setattr(engine, "_events_of_the_end", lambda: [failing, open_event])
            assert not engine.is_busy()
            monkeypatch.undo()
    finally:
        devices.close()


@pytest.mark.parametrize("pages", [256, 1])
def test_a_communicator_is_built_and_closed_beside_a_message(monkeypatch, pages):
    """The driver pins memory for many pages at once: a call per page would wait for the message."""
    monkeypatch.setattr(handles.PagePool, "PAGES", pages)
    store = torch.distributed.HashStore()

    def another(devices: Devices, comm: Any) -> None:
        options, device = CommOptions(segment_bytes=1024, channels=2), f"cuda:{comm.rank}"
        other = ringcomm.Communicator.from_store(
            store, comm.rank, 2, timeout=LONG_S, options=options, device=device
        )
        total = full(1.0)
        other.all_reduce(total)
        other.close()
        assert torch.equal(total, full(2.0))

    told = ran(reduce_beside_a_message(another), 2, (0, 1), LONG_S if pages > 1 else SOON_S)
    assert (TOLD in told) == (pages == 1), told
