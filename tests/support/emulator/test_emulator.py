# SPDX-License-Identifier: Apache-2.0
"""The emulated driver keeps CUDA's rules: order, occupancy, memory, capture.

A test that fails here makes every other test on emulated devices meaningless.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ringcomm.errors import UnsupportedError
from tests import ptx_interpreter
from tests.support.emulator import DriverError, EmulatedRuntime
from tests.support.emulator.in_stream_order import InStreamOrder
from tests.support.emulator.library import COMPILER, check, library

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

MIB = 1 << 20
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, TOO_LARGE = 1, 201, 400, 720
# Time for an event that must not happen. If the code is right, the event never happens.
GRACE_S = 0.05
RUNS_AFTER = 128  # kRunsAfter in test_kernels.cpp


class Device:
    """Launches the emulator's test kernels on device 0; test_limits.py uses it, too."""

    def __init__(self, **options: int) -> None:
        self.runtime = EmulatedRuntime(**options)  # type: ignore[arg-type]
        self.memory = self.runtime.allocate(0, MIB)
        self.words = self.runtime.tensor(0, self.memory, MIB, None).view(torch.int32)

    def launch(
        self, stream: int, name: str, word: int, amount: int, other: int = 0, blocks: int = 1
    ) -> int:
        """Launches and returns the driver's result; ``word`` is an index into ``words``."""
        given = (self.memory + 4 * word).to_bytes(8, "little")
        given += amount.to_bytes(4, "little") + other.to_bytes(4, "little")
        return self.launch_with(stream, name, given, library().emu_params_bytes(), blocks)

    def launch_with(
        self, stream: int, name: str, given: bytes, params_bytes: int, blocks: int = 1
    ) -> int:
        """Launches with ``params_bytes`` bytes, ``given`` first; returns the driver's result."""
        params = ctypes.create_string_buffer(given, params_bytes)
        size = ctypes.c_size_t(params_bytes)
        packed = (ctypes.c_void_p * 5)(1, ctypes.addressof(params), 2, ctypes.addressof(size), 0)
        kernel = library().emu_test_kernel(name.encode())
        with self.runtime.on_device(0):
            return int(
                library().cuLaunchKernel(kernel, blocks, 1, 1, 1, 1, 1, 0, stream, None, packed)
            )

    def add(self, stream: int, word: int, amount: int = 1) -> None:
        check(self.launch(stream, "add", word, amount))

    def wait_then_add(self, stream: int, gate: int, amount: int = 1, blocks: int = 1) -> None:
        """Launches a kernel that runs until word ``gate`` is at least 1."""
        check(self.launch(stream, "wait_then_add", gate, 1, amount, blocks))

    def until_it_runs(self, gate: int) -> None:
        """Waits until the kernel that waits at this gate has been placed."""
        while not self.words[gate + RUNS_AFTER]:
            time.sleep(0.001)

    def open(self, gate: int) -> None:
        self.words[gate] += 1

    def done(self, stream: int) -> bool:
        return self.runtime.record_event(0, stream).query()


def test_a_launch_of_other_parameters_than_the_kernel_takes_is_refused(device):
    takes = library().emu_params_bytes()
    given = device.memory.to_bytes(8, "little")
    assert device.launch_with(0, "add", given, takes) == 0
    for wrong in (takes - 8, takes + 8, 4096):
        assert device.launch_with(0, "add", given, wrong) == INVALID_VALUE


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.runtime.synchronize(0)


def test_a_launch_runs_beside_the_host_and_in_the_stream_s_order(device):
    stream = device.runtime.make_stream(0)
    device.wait_then_add(stream.handle, gate=0)
    device.add(stream.handle, word=1)
    event = device.runtime.record_event(0, stream.handle)
    time.sleep(GRACE_S)
    assert device.words[:2].tolist() == [0, 0]
    assert not event.query()
    device.open(0)
    event.synchronize()
    assert device.words[:2].tolist() == [2, 1]
    assert event.query()


def test_the_arguments_are_those_of_the_launch(device):
    stream = device.runtime.make_stream(0)
    device.wait_then_add(stream.handle, gate=0)
    for amount in (1, 10, 100):  # each in a buffer of its own, freed before the kernel runs
        device.add(stream.handle, 5, amount)
    device.open(0)
    device.runtime.synchronize(0)
    assert device.words[5] == 111


def test_a_grid_runs_all_its_blocks(device):
    check(device.launch(0, "add", 0, 1, blocks=3))
    device.runtime.synchronize(0)
    assert device.words[0] == 3


def test_streams_run_side_by_side_and_an_event_orders_them(device):
    runtime = device.runtime
    one, two = runtime.make_stream(0), runtime.make_stream(0)
    device.wait_then_add(one.handle, gate=0)
    device.add(two.handle, word=1)
    runtime.record_event(0, two.handle).synchronize()
    assert device.words[1] == 1  # though the first stream still waits
    runtime.wait_event(0, two.handle, runtime.record_event(0, one.handle))
    device.add(two.handle, word=1)
    time.sleep(GRACE_S)
    assert device.words[1] == 1
    device.open(0)
    runtime.synchronize(0)
    assert device.words[1] == 2


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(device):
    blocking = device.runtime.make_stream(0, blocking=True)
    other = device.runtime.make_stream(0, blocking=True)
    device.wait_then_add(blocking.handle, gate=0)
    device.add(0, word=1)
    device.add(other.handle, word=2)
    time.sleep(GRACE_S)
    assert device.words[:3].tolist() == [0, 0, 0]
    device.open(0)
    device.runtime.synchronize(0)
    assert device.words[:3].tolist() == [2, 1, 1]


def test_streams_of_the_runtime_take_no_part_in_the_legacy_order(device):
    stream = device.runtime.make_stream(0)
    device.wait_then_add(0, gate=0)
    device.add(stream.handle, word=1)
    device.runtime.record_event(0, stream.handle).synchronize()
    assert device.words[1] == 1
    device.open(0)


def test_a_launch_waits_until_it_fits():
    crowded = Device(block_slots=3)
    runtime = crowded.runtime
    streams = [runtime.make_stream(0) for _ in range(3)]
    crowded.wait_then_add(streams[0].handle, gate=0, blocks=2)
    crowded.until_it_runs(0)
    crowded.wait_then_add(streams[1].handle, gate=1, blocks=2)
    crowded.open(1)
    time.sleep(GRACE_S)
    assert crowded.words[1] == 1  # its gate is open, but the launch does not fit
    crowded.open(0)
    runtime.synchronize(0)
    assert crowded.words[1] == 2
    assert crowded.launch(streams[2].handle, "add", 0, 1, blocks=4) == TOO_LARGE


def test_blocks_take_the_registers_of_one_multiprocessor():
    """Two blocks of "add", or four of "wait_then_add", fill a multiprocessor."""
    crowded = Device(multiprocessors=2)
    streams = [crowded.runtime.make_stream(0) for _ in range(2)]
    crowded.wait_then_add(streams[0].handle, gate=0, blocks=6)
    crowded.until_it_runs(0)
    crowded.add(streams[1].handle, word=1)
    time.sleep(GRACE_S)
    assert crowded.words[1] == 0  # each multiprocessor has registers for half a block
    crowded.open(0)
    crowded.runtime.synchronize(0)
    assert crowded.words[1] == 1
    check(crowded.launch(0, "add", 1, 1, blocks=4))
    assert crowded.launch(0, "add", 1, 1, blocks=5) == TOO_LARGE
    crowded.runtime.synchronize(0)


def test_a_high_priority_stream_is_placed_first():
    crowded = Device(block_slots=1)
    runtime = crowded.runtime
    first, usual = runtime.make_stream(0), runtime.make_stream(0)
    urgent = runtime.make_stream(0, high_priority=True)
    crowded.wait_then_add(first.handle, gate=0)
    crowded.until_it_runs(0)
    crowded.add(usual.handle, word=1)
    time.sleep(GRACE_S)
    crowded.wait_then_add(urgent.handle, gate=2)
    time.sleep(GRACE_S)
    crowded.open(0)
    runtime.record_event(0, first.handle).synchronize()
    time.sleep(GRACE_S)
    assert crowded.words[1] == 0  # the urgent launch, which came last, takes the free slot
    crowded.open(2)
    runtime.synchronize(0)
    assert crowded.words[1] == 1


def test_bad_calls_are_refused(device):
    stream = device.runtime.make_stream(0)
    assert device.launch(stream.handle, "no such kernel", 0, 1) == INVALID_VALUE
    two = EmulatedRuntime(devices=2)
    elsewhere = two.make_stream(1)
    assert device.launch(elsewhere.handle, "add", 0, 1) == INVALID_HANDLE
    answers: list[int] = []

    def without_context() -> None:
        answers.append(library().cuMemcpyAsync(device.memory, device.memory, 4, None))

    thread = threading.Thread(target=without_context)
    thread.start()
    thread.join()
    assert answers == [INVALID_CONTEXT]


# Divides by a subnormal number, which the interpreter rejects as an error.
FAILING_KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry fails()
{
  .reg .f32 %f<3>;
  mov.f32 %f1, 0f00000001;
  div.approx.f32 %f2, %f1, %f1;
  ret;
}
"""


def test_loops_that_were_not_built_are_refused(monkeypatch):
    monkeypatch.setenv("RINGCOMM_KERNELS", "serial")
    with pytest.raises(UnsupportedError, match="made batched loops alone, and RINGCOMM_KERNELS"):
        EmulatedRuntime(ptx=None).find_kernel(0, "move", "rc_move")


def test_an_error_is_reported_after_all_work_has_ended(device):
    stream = device.runtime.make_stream(0)
    event = device.runtime.record_event(0, stream.handle)
    device.wait_then_add(stream.handle, gate=0)
    device.add(stream.handle, word=1)
    device.until_it_runs(0)
    assert ptx_interpreter.run(ptx_interpreter.load(FAILING_KERNEL), "fails", b"")
    caught: list[BaseException] = []

    def query() -> None:
        try:
            event.query()
        except DriverError as error:
            caught.append(error)

    asking = threading.Thread(target=query)
    asking.start()
    time.sleep(GRACE_S)
    assert asking.is_alive(), "the error was reported while a kernel ran"
    device.open(0)
    asking.join()
    ptx_interpreter.forget()
    device.runtime.synchronize(0)
    assert "subnormal" in str(caught[0])
    assert device.words[:2].tolist() == [2, 0], "work that came after the failure has run"


def test_error_texts(device):
    text = ctypes.c_char_p()
    assert library().cuGetErrorString(TOO_LARGE, ctypes.byref(text)) == 0
    assert text.value == b"too many blocks in cooperative launch"
    assert library().cuGetErrorString(12345, ctypes.byref(text)) == INVALID_VALUE


def test_copies_are_in_order(device):
    runtime, stream = device.runtime, device.runtime.make_stream(0)
    device.wait_then_add(stream.handle, gate=0)
    with runtime.on_device(0):
        check(library().cuMemcpyAsync(device.memory + 4, device.memory, 4, stream.handle))
    device.open(0)
    runtime.synchronize(0)
    assert device.words[1] == 2


# ---- capture -------------------------------------------------------------------------------------


def test_a_graph_replays_what_was_captured(device):
    runtime = device.runtime
    with runtime.capture() as graph:
        stream = runtime.current_stream(0)
        assert runtime.is_capturing(0)
        device.add(stream, word=0)
        with runtime.on_device(0):
            check(library().cuMemcpyAsync(device.memory + 4, device.memory, 4, stream))
        device.add(stream, word=1, amount=1000)
    assert not runtime.is_capturing(0)
    runtime.synchronize(0)
    assert device.words[:2].tolist() == [0, 0]
    for _ in range(1000):
        runtime.replay(graph)
    runtime.synchronize(0)
    assert device.words[:2].tolist() == [1000, 2000]


def _fork_and_join(device: Device, side: int) -> None:
    """Captures a launch on stream ``side`` beside a launch on the capturing stream."""
    runtime, stream = device.runtime, device.runtime.current_stream(0)
    runtime.wait_event(0, side, runtime.record_event(0, stream))
    assert runtime.is_capturing(0, side)
    device.wait_then_add(side, gate=0)  # the other branch opens the gate
    device.add(stream, word=0)
    runtime.wait_event(0, stream, runtime.record_event(0, side))
    device.add(stream, word=2)


def test_another_stream_joins_a_capture_and_its_branch_runs_beside(device):
    side = device.runtime.make_stream(0)
    with device.runtime.capture() as graph:
        _fork_and_join(device, side.handle)
    assert not device.runtime.is_capturing(0, side.handle)
    device.runtime.replay(graph)
    device.runtime.synchronize(0)
    assert device.words[:3].tolist() == [2, 0, 1]


def test_what_a_capture_does_not_allow(device):
    runtime = device.runtime
    side, blocking = runtime.make_stream(0), runtime.make_stream(0, blocking=True)
    outside = runtime.record_event(0, side.handle)

    def unjoined() -> None:
        runtime.wait_event(0, side.handle, runtime.record_event(0, runtime.current_stream(0)))
        device.add(side.handle, word=0)

    def isolated() -> None:
        runtime.wait_event(0, runtime.current_stream(0), outside)

    def queried() -> None:
        runtime.record_event(0, runtime.current_stream(0)).query()

    def waited() -> None:
        runtime.synchronize(0)

    for broken, code in ((unjoined, 904), (isolated, 905), (queried, 907), (waited, 900)):
        with pytest.raises(DriverError) as raised, runtime.capture():
            broken()
        assert raised.value.code in (code, 901), broken.__name__
    with runtime.on_device(0):
        assert library().emu_capture_begin(0) == 900
        check(library().emu_capture_begin(blocking.handle))
        with pytest.raises(DriverError, match="906"):
            device.add(0, word=0)
        graph = ctypes.c_void_p()
        assert library().emu_capture_end(blocking.handle, ctypes.byref(graph)) == 901
    runtime.synchronize(0)
    assert device.words[0] == 0


# ---- torch's operations --------------------------------------------------------------------------


def test_torch_operations_in_stream_order(device):
    runtime = device.runtime
    with runtime.in_stream_order():
        device.wait_then_add(0, gate=0)
        view = device.words[1:3].view(-1)  # views do not wait
        threading.Timer(GRACE_S, lambda: device.open(0)).start()
        view += device.words[0]
    assert device.words[:3].tolist() == [2, 2, 2]


def test_threads_that_first_meet_an_operator_are_given_one_object(device, monkeypatch):
    """With two objects, torch would free the first while a dispatch may be reading it."""
    made, given = [], []
    both, make = threading.Barrier(2), torch._ops.OpOverload.__init__

    def make_beside_another(operator, *args):
        make(operator, *args)
        made.append(operator)
        both.wait(10.0)

    class Given(InStreamOrder):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def call(order):
        with order:
            double(torch.ones(1))

    with torch.library._scoped_library("emulator_test", "DEF") as operators:
        operators.define("double(Tensor x) -> Tensor")
        operators.impl("double", lambda x: x + x, "CPU")
        double, _ = torch._C._jit_get_operation("emulator_test::double")
        orders = [Given(lambda: None) for _ in range(2)]
        monkeypatch.setattr(torch._ops.OpOverload, "__init__", make_beside_another)
        threads = [threading.Thread(target=call, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        met = [each for each in given if each.namespace == "emulator_test"]
    assert made == []
    assert len(met) == 2 and met[0] is met[1]


def test_kept_tensors_live_until_the_stream_is_done(device):
    runtime, stream = device.runtime, device.runtime.make_stream(0)
    device.wait_then_add(stream.handle, gate=0)
    tensor = torch.zeros(10)
    references = sys.getrefcount(tensor)
    runtime.keep_for_stream(tensor, stream)
    assert sys.getrefcount(tensor) == references + 1
    device.open(0)
    runtime.synchronize(0)
    runtime.keep_for_stream(torch.zeros(1), stream)
    assert sys.getrefcount(tensor) == references
