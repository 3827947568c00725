# SPDX-License-Identifier: Apache-2.0
"""Limited resources of an emulated device, and what waits for them: occupancy, queues, memory.

If a test fails here, the tests that show where ringcomm may stall on a GPU mean nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.handles import EmulatedStream
from tests.support.emulator.library import COMPILER, check, library
from tests.support.emulator.test_emulator import GRACE_S, MIB, TOO_LARGE, Device
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


# ---- occupancy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "blocks"),
    [
        (128, 0, 256, 2),  # registers
        (129, 0, 256, 1),  # a warp gets registers in units of 256
        (254, 10080, 256, 1),
        (16, 0, 256, 8),  # threads
        (16, 0, 32, 32),  # the limit of 32 blocks
        (32, (75 << 10) - 128, 256, 3),  # shared memory: 76 KiB of 228, the system's included
        (32, 75 << 10, 256, 3),
        (32, (75 << 10) + 1, 256, 2),
        (32, 227 << 10, 256, 1),
        (32, (227 << 10) + 1, 256, 0),
    ],
)
def test_what_bounds_the_blocks_of_a_multiprocessor(registers, shared_bytes, threads, blocks):
    """The numbers that CUDA's occupancy calculator gives for an H100."""
    native = EmulatedRuntime()._native[0]
    found = library().emu_device_blocks_of(native, registers, shared_bytes, threads)
    assert found == blocks


def test_shared_memory_is_taken_and_comes_back():
    crowded = Device(multiprocessors=1)
    streams = [crowded.runtime.make_stream(0) for _ in range(2)]
    check(crowded.launch(streams[0].handle, "wait_in_shared", 0, 1, 1))
    crowded.until_it_runs(0)
    crowded.add(streams[1].handle, word=1)
    time.sleep(GRACE_S)
    assert crowded.words[1] == 0  # though three quarters of the registers are free
    crowded.open(0)
    crowded.runtime.synchronize(0)
    assert crowded.words[1] == 1
    assert crowded.launch(0, "wait_in_shared", 0, 1, 0, blocks=2) == TOO_LARGE


def test_part_of_a_launch_keeps_its_place_while_it_waits_for_more():
    """The block scheduler places block by block: an urgent launch that comes later must wait."""
    crowded = Device(block_slots=3)
    runtime = crowded.runtime
    first, wide = runtime.make_stream(0), runtime.make_stream(0)
    urgent = runtime.make_stream(0, high_priority=True)
    crowded.wait_then_add(first.handle, gate=0, blocks=2)
    crowded.until_it_runs(0)
    check(crowded.launch(wide.handle, "add", 1, 1, blocks=3))
    time.sleep(GRACE_S)
    crowded.add(urgent.handle, word=2)
    time.sleep(GRACE_S)
    assert crowded.words[1:3].tolist() == [0, 0]
    crowded.open(0)
    runtime.synchronize(0)
    assert crowded.words[1:3].tolist() == [3, 1]


def test_blocks_that_wait_for_nobody_run_in_waves():
    crowded = Device(multiprocessors=1)
    stream = crowded.runtime.make_stream(0)
    crowded.wait_then_add(stream.handle, gate=0, blocks=2)
    crowded.until_it_runs(0)
    check(crowded.launch(0, "add_in_waves", 1, 1, blocks=5))  # one block fits beside the others
    crowded.runtime.record_event(0, 0).synchronize()
    assert crowded.words[1] == 5
    crowded.open(0)
    crowded.runtime.synchronize(0)


# ---- hardware queues -----------------------------------------------------------------------------


@pytest.mark.parametrize(("queues", "stalls"), [(2, True), (3, False), (8, False)])
def test_streams_of_one_queue_hold_each_other_back(queues, stalls):
    """With two queues streams 0 and 2 share one: the legacy stream took the first turn."""
    device = Device(hardware_queues=queues)
    runtime = device.runtime
    streams = [runtime.make_stream(0) for _ in range(3)]
    device.wait_then_add(streams[0].handle, gate=0)
    device.add(streams[0].handle, word=1)  # cannot start
    device.add(streams[2].handle, word=2)  # could start if it had its own queue
    device.add(streams[1].handle, word=3)
    runtime.record_event(0, streams[1].handle).synchronize()
    if stalls:
        time.sleep(GRACE_S)
    else:
        runtime.record_event(0, streams[2].handle).synchronize()
    assert device.words[1:4].tolist() == [0, 0 if stalls else 1, 1]
    device.open(0)
    runtime.synchronize(0)
    assert device.words[1:4].tolist() == [1, 1, 1]


def test_what_runs_holds_nobody_back_but_an_event_behind_it_does():
    device = Device(hardware_queues=1)
    runtime = device.runtime
    one, two = runtime.make_stream(0), runtime.make_stream(0)
    device.wait_then_add(one.handle, gate=0)
    device.add(two.handle, word=1)
    runtime.record_event(0, two.handle).synchronize()  # runs beside the waiting stream
    assert device.words[1] == 1
    runtime.record_event(0, one.handle)
    device.add(two.handle, word=1)
    behind = runtime.record_event(0, two.handle)
    time.sleep(GRACE_S)
    assert device.words[1] == 1 and not behind.query()
    device.open(0)
    behind.synchronize()
    assert device.words[1] == 2


def _stalled(device: Device) -> list[EmulatedStream]:
    """Fills the default number of the device's queues with work that waits for word 0."""
    streams = [device.runtime.make_stream(0) for _ in range(device.runtime.hardware_queues)]
    for stream in streams:
        device.wait_then_add(stream.handle, gate=0)
        device.add(stream.handle, word=1)
    return streams


def test_streams_of_another_priority_and_small_copies_have_other_queues():
    device = Device(hardware_queues=2)
    streams = _stalled(device)
    urgent = device.runtime.make_stream(0, high_priority=True)
    device.add(urgent.handle, word=2)
    device.runtime.record_event(0, urgent.handle).synchronize()
    device.runtime.write(0, device.memory + 12, (7).to_bytes(4, "little"))
    assert device.runtime.read(0, device.memory + 8, 8) == bytes([1, 0, 0, 0, 7, 0, 0, 0])
    device.open(0)
    device.runtime.synchronize(0)
    assert device.words[0] == len(streams) + 1


def test_small_copies_of_usual_priority_would_stall():
    device = Device(hardware_queues=2)
    runtime = device.runtime
    runtime._service[0] = library().emu_stream_make(runtime._native[0], 0, 0)
    streams = _stalled(device)
    reader = threading.Thread(target=runtime.read, args=(0, device.memory, 4))
    reader.start()
    reader.join(GRACE_S)
    assert reader.is_alive()
    device.open(0)
    reader.join()
    runtime.synchronize(0)
    assert device.words[0] == len(streams) + 1


# ---- what waits for the whole device -------------------------------------------------------------


@contextmanager
def held(runtime: EmulatedRuntime) -> Iterator[threading.Event]:
    """Inside, a stream has work until the yielded event is set; a timer sets it soon."""
    over, stream = threading.Event(), runtime.make_stream(0)

    def hold() -> None:
        over.wait()

    runtime.run_on_stream(0, stream.handle, hold)
    timer = threading.Timer(GRACE_S, over.set)
    timer.start()
    try:
        yield over
    finally:
        timer.cancel()
        over.set()
        runtime.synchronize(0)


WAITS: dict[str, Callable[[EmulatedRuntime, int], object]] = {
    "allocate": lambda runtime, ptr: runtime.allocate(0, MIB),
    "free": lambda runtime, ptr: runtime.free(0, ptr),
    "pin": lambda runtime, ptr: runtime.allocate_pinned(64),
    "reach a peer": lambda runtime, ptr: runtime.enable_peer(0, 1),
    "load": lambda runtime, ptr: runtime.find_kernel(0, "move", "rc_move"),
}
DOES_NOT_WAIT: dict[str, Callable[[EmulatedRuntime, int], object]] = {
    "read": lambda runtime, ptr: runtime.read(0, ptr, 4),
    "write": lambda runtime, ptr: runtime.write(0, ptr, b"1234"),
    "memory info": lambda runtime, ptr: runtime.memory_info(0),
    "export": lambda runtime, ptr: runtime.export_handle(0, ptr),
    "make a stream": lambda runtime, ptr: runtime.make_stream(0),
    "pin again": lambda runtime, ptr: runtime.allocate_pinned(128).free(),
    "reach a peer again": lambda runtime, ptr: runtime.enable_peer(0, 2),
    "load again": lambda runtime, ptr: runtime.find_kernel(0, "move", "rc_ll_move"),
}


@pytest.mark.parametrize("name", [*WAITS, *DOES_NOT_WAIT])
def test_which_calls_wait_for_the_device(name):
    runtime = EmulatedRuntime(devices=3)
    ptr = runtime.allocate(0, MIB)
    runtime.allocate_pinned(128)
    runtime.enable_peer(0, 2)
    runtime.find_kernel(0, "move", "rc_ll_move")
    with held(runtime) as over:
        (WAITS | DOES_NOT_WAIT)[name](runtime, ptr)
        assert over.is_set() == (name in WAITS)


def test_a_call_that_waits_for_the_device_breaks_no_capture():
    runtime = EmulatedRuntime()
    with runtime.capture() as graph:
        runtime.free(0, runtime.allocate(0, MIB))
    assert graph.handle


def test_a_copy_on_the_legacy_stream_waits_for_blocking_streams():
    """``tensor.cpu()`` makes such a copy if the default stream is current."""
    device = Device()
    runtime = device.runtime
    blocking, other = runtime.make_stream(0, blocking=True), runtime.make_stream(0)
    device.wait_then_add(other.handle, gate=0)
    with runtime.in_stream_order():
        assert device.words[0].clone() == 0  # does not wait for the non-blocking stream
        device.wait_then_add(blocking.handle, gate=1)
        threading.Timer(GRACE_S, lambda: device.open(1)).start()
        assert device.words[1].clone() == 2  # but waits for the blocking one
    device.open(0)
    runtime.synchronize(0)


def test_an_operation_on_one_device_s_tensors_waits_for_no_other_device():
    """Otherwise one rank's thread could wait for a call that another rank must join first."""
    device = Device(devices=2, hardware_queues=1)
    runtime, streams = device.runtime, _stalled(device)
    passed = threading.Event()

    def rank(of: int) -> None:
        with runtime.assuming(of), runtime.in_stream_order():
            torch.zeros(1).add_(1)
            passed.set()

    threads = [threading.Thread(target=rank, args=(of,)) for of in (1, 0)]
    threads[0].start()
    threads[0].join()
    assert passed.is_set()
    passed.clear()
    threads[1].start()
    assert not passed.wait(GRACE_S)
    device.open(0)
    threads[1].join()
    runtime.synchronize(0)
    assert device.words[0] == len(streams) + 1


def _map(store, rank, world):
    runtime = EmulatedRuntime()
    store.set(f"handle/{rank}", runtime.export_handle(0, runtime.allocate(0, MIB)).hex())
    theirs = bytes.fromhex(store.get(f"handle/{1 - rank}").decode())
    waited = []
    with held(runtime) as over:
        ptr = runtime.open_handle(0, theirs)
        waited.append(over.is_set())
    with held(runtime) as over:
        runtime.close_handle(0, ptr)
        waited.append(over.is_set())
    store.add("closed", 1)
    while store.add("closed", 0) < world:
        time.sleep(0.001)
    return waited


def test_to_map_another_process_s_memory_and_to_end_that_wait_for_the_device():
    assert run_ranks(_map, 2) == [[True, True]] * 2
