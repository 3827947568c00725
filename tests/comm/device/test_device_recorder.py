# SPDX-License-Identifier: Apache-2.0
"""Records of calls on devices claim only facts that the host can know."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError
from ringcomm.cli.trace import report
from ringcomm.comm.device import sharing
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.recorder.records import OPEN
from ringcomm.optim import AdamW
from tests.support.device_worlds import with_options

SOON_S = 30.0
ALONE = with_options(channels=1)


def here(offset, function):
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def until(look):
    deadline = time.monotonic() + SOON_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def mine(comm):
    return comm.recording().ranks[comm.rank]


def states(comm):
    return [each.state for each in mine(comm).collectives]


def ones(comm, count=64):
    return torch.ones(count, device=comm.device)


@contextmanager
def held(devices, comm):
    """Blocks the device's current stream; yields a function that releases it."""
    if devices.emulated is None:
        pytest.skip("only an emulated stream can be held back")
    opened = threading.Event()
    devices.emulated.run_on_stream(0, 0, lambda: opened.wait(SOON_S))
    try:
        yield opened.set
    finally:
        opened.set()


def test_what_is_recorded_of_collectives(devices):
    world = devices.new_world(2)

    def body(comm):
        before_ns = time.monotonic_ns()
        comm.all_reduce(ones(comm, 4).char(), op=torch.distributed.ReduceOp.MIN, algorithm="ring")
        comm.broadcast(ones(comm, 6), 1)
        comm.barrier()
        comm.all_reduce(ones(comm, 8))
        comm.all_to_all_single(ones(comm, 4), ones(comm, 4))
        comm.all_gather_into_tensor(ones(comm, 8192), ones(comm, 4096), algorithm="copy_engine")
        comm.reduce_scatter_tensor(ones(comm, 4), ones(comm, 8), algorithm="one_shot")
        comm.engine.finish_host_side()
        recorded = comm.recording()
        own = recorded.ranks[comm.rank]
        assert (own.rank, own.pid, own.on_device, own.torn) == (comm.rank, os.getpid(), True, 0)
        for record in own.collectives:
            assert record.state == "completed" and record.peer == -1 and not record.status
            assert before_ns < record.begin_ns <= record.end_ns < recorded.taken_ns
        calls = [(each.number, each.call, each.size_bytes, each.site) for each in own.collectives]
        return calls, recorded.world_id

    (first, one_id), (second, other_id) = devices.run(world, body)
    assert first == second and one_id == other_id != 0
    # 16 KiB in pieces of 4096 bytes are four times two launches, and launches are numbered.
    assert first == [
        (1, ("all_reduce", "int8", "MIN", -1, "ring", "native", 4), 4, here(2, body)),
        (2, ("broadcast", "float32", "", 1, "one_shot", "native", 24), 24, here(3, body)),
        (3, ("barrier", "uint8", "", -1, "one_shot", "native", 0), 0, here(4, body)),
        (4, ("all_reduce", "float32", "SUM", -1, "ll", "native", 32), 32, here(5, body)),
        (5, ("all_to_all", "float32", "", -1, "one_shot", "native", 0), 16, here(6, body)),
        (
            6,
            ("all_gather", "float32", "", -1, "copy_engine", "native", 32768),
            32768,
            here(7, body),
        ),
        (
            14,
            ("reduce_scatter", "float32", "SUM", -1, "one_shot", "native", 32),
            32,
            here(8, body),
        ),
    ]
    world.close()


def test_messages_and_asynchronous_calls(devices):
    world = devices.new_world(2)

    def body(comm):
        work = comm.all_reduce(ones(comm), async_op=True)
        sent = comm.isend(ones(comm, 3), 1 - comm.rank, tag=7)
        received = comm.irecv(ones(comm, 3), 1 - comm.rank, tag=7)
        for each in (work, sent, received):
            until(each.is_completed)
        own = mine(comm)
        assert own.last.state == "completed" and own.last.site == here(1, body)
        return [
            (each.number, each.collective, each.peer, each.root, each.size_bytes, each.state)
            for each in own.messages
        ], [each.site for each in own.messages]

    for rank, (messages, sites) in enumerate(devices.run(world, body)):
        assert messages == [
            (1, "send", 1 - rank, 7, 12, "completed"),
            (2, "recv", 1 - rank, 7, 12, "completed"),
        ]
        assert sites == [here(2, body), here(3, body)]
    world.close()


def test_the_fused_optimizer_is_recorded(devices):
    world = devices.new_world(2, options=with_options(segment_bytes=4096))

    def body(comm):
        param = torch.nn.Parameter(ones(comm, 1000))
        optimizer = AdamW([param], comm=comm)
        param.grad = ones(comm, 1000)
        optimizer.step()
        comm.engine.finish_host_side()
        fused = mine(comm).last
        return fused.collective, fused.dtype, fused.size_bytes, fused.site, fused.state

    for name, dtype, size_bytes, site, state in devices.run(world, body):
        assert (name, dtype) == ("reduce_scatter_adamw_all_gather", "float32 to float32")
        assert (site, state) == (here(4, body), "completed") and size_bytes >= 4000
    world.close()


def test_a_call_is_not_completed_before_its_event_has_passed(devices):
    """Independent of the reader: the stream is blocked, so the kernels cannot have begun."""
    world = devices.new_world(1)
    comm = world[0]
    tensors = [ones(comm), ones(comm)]  # the device still uses them, which torch does not know
    with held(devices, comm) as release:
        comm.all_reduce(tensors[0])
        work = comm.all_reduce(tensors[1], async_op=True)
        comm.barrier()
        assert not work.is_completed()
        assert states(comm) == ["enqueued"] * 3
        assert all(each.end_ns == 0 for each in mine(comm).collectives)
        assert "not seen completed since all_reduce" in "\n".join(report(comm.recording(), 0))
        released_ns = time.monotonic_ns()
        release()
        until(work.is_completed)
        # The Work's event follows the first call, but says nothing about the barrier.
        native = comm.engine.device_core.recorder.native
        native.stop()
        assert states(comm)[:2] == ["completed"] * 2 and states(comm)[2] in OPEN
        assert min(each.end_ns for each in mine(comm).collectives[:2]) > released_ns
    devices.runtime.synchronize(0)
    world.close()


def test_the_kernels_count_says_what_has_begun(two_devices):
    """A kernel that waits for its peer has begun: earlier kernels are done, but this one is not."""
    world = two_devices.new_world(2, on=(0, 1), options=ALONE)
    come = threading.Event()

    def body(comm):
        comm.all_reduce(ones(comm))
        if comm.rank == 1:
            assert come.wait(SOON_S)
        comm.all_reduce(ones(comm))
        if comm.rank == 0:
            until(lambda: states(comm) == ["completed", "begun"])
            assert mine(comm).last.end_ns == 0
            come.set()
        comm.engine.finish_host_side()
        return states(comm)

    assert two_devices.run(world, body) == [["completed"] * 2] * 2
    world.close()


def test_a_captured_call_is_one_record_and_its_replays_are_none(devices):
    """Kernels count replays as well, so afterwards their count says nothing about calls."""
    if devices.emulated is None:
        pytest.skip("captures of torch's own streams: tests/proof/faults/device")
    runtime, world = devices.emulated, devices.new_world(1)
    comm = world[0]
    tensor = ones(comm)
    comm.all_reduce(tensor)
    with runtime.capture() as graph:
        comm.all_reduce(tensor)
    for _ in range(5):
        runtime.replay(graph)
    runtime.synchronize(0)
    with held(devices, comm):
        comm.all_reduce(tensor)
        assert states(comm)[1:] == ["captured", "enqueued"]
        (captured,) = [each for each in mine(comm).collectives if each.state == "captured"]
        assert captured.number == 2 and captured.end_ns == 0
    comm.engine.finish_host_side()
    assert states(comm) == ["completed", "captured", "completed"]
    world.close()


def kernels_count(comm):
    core = comm.engine.device_core
    ptr = core._ptr + core.native.sequence_offset_bytes
    return int.from_bytes(core.runtime.read(core.device, ptr, 8), "little")


@pytest.mark.parametrize("withdraws", [True, False], ids=["", "control"])
def test_a_call_that_was_not_launched_takes_no_number(devices, monkeypatch, withdraws):
    """The kernels did not count this call, so the next call's number must not skip one."""
    world = devices.new_world(2)
    tensors = [ones(comm) for comm in world]
    world.all_reduce(tensors)

    def refuses(prepared, stream):
        raise ValueError("too many list entries")

    with monkeypatch.context() as patch:
        patch.setattr(sharing, "launch_prepared", refuses)
        if not withdraws:
            patch.setattr(DeviceCallEngine, "withdraw", lambda engine: None)
        with pytest.raises(ArgumentError, match="too many list entries"):
            world.all_reduce(tensors)
    assert mine(world[0]).last.status == ("aborted" if withdraws else "")
    world.all_reduce(tensors)
    devices.runtime.synchronize(0)
    for comm in world:
        assert kernels_count(comm) == 2
        assert [each.number for each in mine(comm).collectives] == [1, 2] + [3] * (not withdraws)
    world.close()


def test_only_the_last_are_kept_and_none_takes_no_memory(devices):
    used = {}
    gc.collect()  # otherwise garbage of earlier tests is freed between the measurements
    for records in (0, 3):
        before = ringcomm.heap_stats()["used_bytes"]
        world = devices.new_world(2, options=with_options(records=records))
        used[records] = ringcomm.heap_stats()["used_bytes"] - before
        tensors = [ones(comm) for comm in world]
        for _ in range(7):
            world.all_reduce(tensors)
        devices.runtime.synchronize(0)
        recorded = world[0].recording()
        numbers = [[each.number for each in rank.collectives] for rank in recorded.ranks]
        assert numbers == ([[5, 6, 7]] * 2 if records else [])
        world.close()
        assert ringcomm.heap_stats()["used_bytes"] == before
    # For two ranks: a header of 256 bytes, 3 records of 192 bytes of two kinds, and 17 totals of 32
    # bytes, rounded up to blocks of 256 bytes.
    assert used == {0: 0, 3: 2 * 8 * 256}
