# SPDX-License-Identifier: Apache-2.0
"""CudaRuntime with stand-ins for CuPy and torch, which record its calls and return set answers.

Only a GPU can show that the CUDA calls are the right ones. These tests check what ringcomm itself
decides.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringcomm.cuda import build
from ringcomm.cuda.cupy_runtime import CudaDriver, CudaRuntime
from ringcomm.cuda.units import LOOPS_VARIABLE as LOOPS
from ringcomm.errors import RingcommError, UnsupportedError
from tests.support.emulator.library import COMPILER

UUID = "1b2c0000-0000-0000-0000-00000000beef"


class CudaError(RuntimeError):
    """Like an error of CuPy's runtime API: the error number is in ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: what it means")
        self.status = status


class CUDADriverError(RuntimeError):
    """Like an error of CuPy's driver API."""

    def __init__(self, text: str, status: int = 500) -> None:
        super().__init__(text)
        self.status = status


class Library:
    """Answers to calls by name: a value, an exception to raise, or a function; default 0."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            answer = self.answers.get(name, 0)
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call


class Driver:
    """Replaces libcuda."""

    def __init__(self) -> None:
        self.relaxed = 0
        self.made: list[int] = []
        self.loaded: list[int] = []
        self.passed: set[int] = set()
        self.inside = False
        self.broken = False
        self.limits: list[int] = []

    @contextmanager
    def outside_captures(self) -> Any:
        self.relaxed += 1
        before, self.inside = self.inside, True
        yield
        self.inside = before

    def has_passed(self, event: int) -> bool:
        if self.broken:
            raise RuntimeError("what the driver says")
        return event in self.passed

    def make_stream(self, priority: int) -> int:
        self.made.append(priority)
        return 1000 + len(self.made)

    def multiprocessors(self) -> list[int]:
        return self.limits

    def load_function(self, function: int) -> None:
        self.loaded.append(function)


class Current:
    """The current device and streams of torch, and the functions of torch that change them."""

    def __init__(self) -> None:
        self.device = 0
        self.entered: list[int] = []
        self.streams: dict[int, tuple[int, int, int]] = {}

    def exchange_device(self, device: int) -> int:
        before, self.device = self.device, device
        self.entered.append(device)
        return before

    def leave_device(self, before: int) -> int:
        left, self.device = self.device, before
        return left

    def stream(self, device: int) -> tuple[int, int, int]:
        return self.streams.get(device, (70 + device, device, 1))

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.device = device_index
        self.streams[device_index] = (stream_id, device_index, device_type)


class Stack(SimpleNamespace):
    cuda: Library
    current: Current
    modules: Any
    driver: Driver
    runtime: CudaRuntime


def _wrapped(handle: int, device: int) -> Any:
    return SimpleNamespace(cuda_stream=handle, stream_id=handle, device_index=device, device_type=1)


@pytest.fixture
def stack(monkeypatch) -> Stack:
    properties = SimpleNamespace(
        uuid=UUID, name="A GPU", major=9, minor=0, multi_processor_count=132
    )
    current = Current()
    for name, function in {
        "_cuda_exchangeDevice": current.exchange_device,
        "_cuda_maybeExchangeDevice": current.leave_device,
        "_cuda_getCurrentStream": current.stream,
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentRawStream": lambda device: current.stream(device)[0],
        "_cuda_setStream": current.set_stream,
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    # As torch does, ExternalStream turns handle 0 into a new stream of torch's pool, and
    # get_stream_from_external into the default stream
    # (https://github.com/pytorch/pytorch/issues/182960).
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: _wrapped(handle or 33, device)
    )
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", _wrapped)
    cuda, modules = Library(deviceGetPCIBusId="0000:1B:00.0"), Library()
    driver = Driver()
    modules.CUDADriverError = CUDADriverError  # type: ignore[attr-defined]
    runtime = CudaRuntime(cuda, modules, driver)  # type: ignore[arg-type]
    return Stack(cuda=cuda, modules=modules, driver=driver, runtime=runtime, current=current)


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_cudas_and_zeroed_on_a_stream_of_our_own(stack):
    stack.cuda.answers["malloc"] = 0x7000
    assert stack.runtime.allocate(1, 4096) == 0x7000
    assert stack.cuda.calls[0] == ("setDevice", 1)
    assert stack.cuda.named("memsetAsync") == [(0x7000, 0, 4096, 1001)]
    assert stack.cuda.named("streamSynchronize") == [(1001,)]
    assert stack.driver.relaxed > 0


def test_only_want_of_memory_is_a_memory_error(stack):
    stack.cuda.answers["malloc"] = stack.cuda.answers["hostAlloc"] = CudaError(2)
    with pytest.raises(MemoryError, match="cudaError2"):
        stack.runtime.allocate(0, 4096)
    with pytest.raises(MemoryError, match="cudaError2"):
        stack.runtime.allocate_pinned(4096)
    stack.cuda.answers["malloc"] = stack.cuda.answers["hostAlloc"] = CudaError(700)
    for call in (
        lambda: stack.runtime.allocate(0, 4096),
        lambda: stack.runtime.allocate_pinned(64),
    ):
        with pytest.raises(CudaError):
            call()


def test_small_copies_do_not_use_the_default_stream(stack):
    def copy(to: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        assert stream == 1001
        if kind == 2:
            ctypes.memmove(to, b"\x01\x00\x02", size_bytes)
        else:
            assert ctypes.string_at(source, size_bytes) == b"a\x00b"

    stack.cuda.answers["memcpyAsync"] = copy
    assert stack.runtime.read(0, 0x7000, 3) == b"\x01\x00\x02"
    stack.runtime.write(0, 0x7000, b"a\x00b")
    assert [call[2:4] for call in stack.cuda.named("memcpyAsync")] == [(3, 2), (3, 1)]
    assert stack.driver.made == [-5]  # a priority of its own, and so a hardware queue of its own
    assert stack.cuda.named("streamSynchronize") == [(1001,), (1001,)]


def test_a_tensor_is_made_of_the_memory_s_own_description(stack, monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: given.append((memory, device)))
    owner = object()
    stack.runtime.tensor(1, 0x7000, 4096, owner)
    ((memory, device),) = given
    assert device == torch.device("cuda", 1)
    assert memory.owner is owner
    described = memory.__cuda_array_interface__
    assert (described["data"], described["shape"]) == ((0x7000, False), (4096,))
    assert (described["typestr"], described["strides"]) == ("|u1", None)


def test_pinned_pages_are_mapped_zeroed_and_used_again(stack):
    """One driver call allocates many pages, and none is freed: freeing may wait for the device."""
    memory = ctypes.create_string_buffer(b"\xff" * (256 * 64), 256 * 64)
    address = ctypes.addressof(memory)
    stack.cuda.answers["hostAlloc"] = address
    stack.cuda.answers["pointerGetAttributes"] = SimpleNamespace(devicePointer=0x9000)
    pages = [stack.runtime.allocate_pinned(64) for _ in range(256)]
    assert [page.host_ptr for page in pages] == [address + 64 * k for k in range(256)]
    assert [page.device_ptr for page in pages] == [0x9000 + 64 * k for k in range(256)]
    assert stack.cuda.named("hostAlloc") == [(256 * 64, 3)]  # portable and mapped
    assert memory.raw == bytes(256 * 64)
    ctypes.memset(pages[7].host_ptr, 1, 64)
    pages[7].free()
    pages[7].free()
    assert stack.runtime.allocate_pinned(64).host_ptr == address + 7 * 64
    assert memory.raw == bytes(256 * 64)
    stack.cuda.answers["hostAlloc"] = CudaError(700)
    with pytest.raises(CudaError):  # all pages are in use; the freed page was pooled only once
        stack.runtime.allocate_pinned(64)
    assert stack.cuda.named("freeHost") == []


def test_a_device_is_waited_for_beside_captures(stack, monkeypatch):
    inside: list[bool] = []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: inside.append(stack.driver.inside)
    )
    stack.runtime.synchronize(1)
    assert inside == [True]


def test_identity_is_torch_s_uuid(stack):
    identity = stack.runtime.identity(0)
    assert identity.uuid == f"GPU-{UUID}"
    assert identity.pci_bus_id == "0000:1b:00.0"
    assert (identity.capability, identity.multiprocessors) == ((9, 0), 132)
    assert stack.runtime.identity(0) is identity


@pytest.mark.parametrize(("limits", "usable"), [([], 132), ([66], 66), ([132, 16], 16)])
def test_a_share_of_mps_and_a_green_context_limit_the_multiprocessors(
    stack, monkeypatch, limits, usable
):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: stack.current.device)
    stack.driver.limits = limits
    assert stack.runtime.usable_multiprocessors(0) == usable
    assert stack.current.entered == [], "a green context that is current was left"
    assert stack.runtime.usable_multiprocessors(1) == usable
    assert stack.current.entered == [1]


# ---- other processes and devices -----------------------------------------------------------------


def test_a_handle_is_not_opened_where_it_was_made(stack):
    stack.cuda.answers |= {"ipcGetMemHandle": b"h" * 64, "ipcOpenMemHandle": 0x8000}
    handle = stack.runtime.export_handle(0, 0x7000)
    with pytest.raises(UnsupportedError, match="in the process that made it"):
        stack.runtime.open_handle(0, handle)
    assert stack.cuda.named("ipcOpenMemHandle") == []
    assert stack.runtime.open_handle(0, b"x" * 64) == 0x8000
    assert stack.cuda.named("ipcOpenMemHandle") == [(b"x" * 64, 1)]


def test_what_the_driver_says_to_ipc_is_passed_on(stack):
    stack.cuda.answers |= {"ipcGetMemHandle": CudaError(801), "ipcOpenMemHandle": CudaError(217)}
    with pytest.raises(UnsupportedError, match=r"shares no memory of device 1.*cudaError801"):
        stack.runtime.export_handle(1, 0x7000)
    with pytest.raises(UnsupportedError, match=r"does not map .* into device 1.*cudaError217"):
        stack.runtime.open_handle(1, b"x" * 64)


def test_peer_access(stack):
    with pytest.raises(UnsupportedError, match="device 0 has no peer access to device 1"):
        stack.runtime.enable_peer(0, 1)
    assert stack.cuda.named("deviceEnablePeerAccess") == []
    stack.cuda.answers["deviceCanAccessPeer"] = 1
    stack.runtime.enable_peer(0, 1)
    stack.cuda.answers["deviceEnablePeerAccess"] = CudaError(704)  # already
    stack.runtime.enable_peer(0, 1)
    stack.cuda.answers["deviceEnablePeerAccess"] = CudaError(711)
    with pytest.raises(UnsupportedError, match=r"gets no peer access to device 1: .*cudaError711"):
        stack.runtime.enable_peer(0, 1)


# ---- streams and events --------------------------------------------------------------------------


def test_streams_are_our_own_and_are_used_again(stack):
    one = stack.runtime.make_stream(0)
    urgent = stack.runtime.make_stream(0, high_priority=True)
    assert stack.driver.made == [0, -1]
    assert one.handle != urgent.handle
    assert one.torch_stream.cuda_stream == one.handle
    handle = one.handle
    del one
    assert stack.runtime.make_stream(1).handle != handle
    assert stack.runtime.make_stream(0).handle == handle


def test_streams_beyond_the_hardware_queues_are_counted(stack, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    kept = [stack.runtime.make_stream(0) for _ in range(3)]
    stack.runtime.make_stream(0, high_priority=True)
    assert stack.runtime.stream_queues(0) == (8, 4)
    assert stack.runtime.stream_queues(1) == (8, 1)
    kept.pop()
    stack.runtime.make_stream(0)  # used again
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert stack.runtime.stream_queues(0) == (32, 4)


@pytest.mark.parametrize("handle", [0, 2, 0x7F0000000001])
def test_a_call_goes_to_the_stream_of_its_handle(stack, handle):
    """The default stream, the per-thread stream (cudaStreamPerThread), and another stream."""
    seen: list[tuple[int, int]] = []

    def function() -> None:
        seen.append((stack.current.device, stack.runtime.current_stream(1)))

    stack.runtime.call_on_stream(1, handle, function)
    assert seen == [(1, handle)]
    assert stack.cuda.named("setDevice") == [(1,)]
    assert (stack.current.device, stack.runtime.current_stream(1)) == (0, 71)


def test_a_stream_is_current_inside_alone(stack):
    mine, other = stack.runtime.make_stream(1), stack.runtime.make_stream(1)
    stack.current.entered.clear()
    with pytest.raises(CudaError), stack.runtime.on_stream(mine):
        with stack.runtime.on_stream(other):
            assert (stack.current.device, stack.runtime.current_stream(1)) == (1, other.handle)
        assert (stack.current.device, stack.runtime.current_stream(1)) == (1, mine.handle)
        raise CudaError(1)
    assert (stack.current.device, stack.runtime.current_stream(1)) == (0, 71)
    assert stack.current.entered == [1, 1]


def test_a_device_is_entered_once_and_left_at_the_end(stack):
    runtime, current, seen = stack.runtime, stack.current, []
    for name in ("eventRecord", "streamWaitEvent", "streamIsCapturing"):
        stack.cuda.answers[name] = lambda *_: seen.append(current.device)
    with runtime.on_device(1):
        with runtime.on_device(1):
            runtime.wait_event(1, 0, runtime.record_event(1, 0))
        assert current.device == 1
        assert runtime.is_capturing(1) is False
        assert (current.entered, stack.cuda.named("setDevice")) == ([1], [(1,)])
        # Another device, from within.
        runtime.record_event(0, 0)
        runtime.record_event(1, 0)
        assert (current.entered, current.device) == ([1, 0], 1)
    assert current.device == 0
    # Outside of on_device() each call enters its device, whatever this thread entered before.
    runtime.wait_event(1, 0, runtime.record_event(1, 0))
    runtime.is_capturing(1)
    assert (current.entered, current.device) == ([1, 0, 1, 1, 1], 0)
    assert seen == [1, 1, 1, 0, 1, 1, 1, 1]


def test_user_code_on_a_stream_may_change_the_device(stack):
    """A rank's thread, which is on its own stream for as long as it runs, may change the device."""
    runtime, current, seen = stack.runtime, stack.current, []
    stack.cuda.answers["eventRecord"] = lambda *_: seen.append(current.device)
    stream = runtime.make_stream(1)
    with runtime.on_device(0), runtime.on_stream(stream):
        runtime.record_event(0, 0)
        current.device = 0
        runtime.record_event(1, stream.handle)
    assert (seen, current.device) == ([0, 1], 0)


def test_what_one_thread_entered_no_other_is_in(stack):
    with stack.runtime.on_device(1):
        thread = threading.Thread(target=stack.runtime.record_event, args=(1, 0))
        thread.start()
        thread.join()
    assert stack.cuda.named("setDevice") == [(1,), (1,)]


def test_a_device_that_cannot_be_set_is_not_entered(stack):
    stack.cuda.answers["setDevice"] = CudaError(46)
    for _ in range(2):
        with pytest.raises(CudaError), stack.runtime.on_device(1):
            pass
        assert stack.current.device == 0
    assert stack.current.entered == [1, 1]


def test_events(stack):
    stack.cuda.answers["eventCreateWithFlags"] = 55
    event = stack.runtime.record_event(0, 1001)
    assert stack.cuda.named("eventCreateWithFlags") == [(2,)]
    assert stack.cuda.named("eventRecord") == [(55, 1001)]
    assert event.query() is False
    stack.driver.passed.add(55)
    assert event.query() is True
    # cudaEventQuery would leave "not ready" as the last error, which torch checks after a launch.
    assert stack.cuda.named("eventQuery") == []
    stack.runtime.wait_event(1, 1002, event)
    assert stack.cuda.named("streamWaitEvent") == [(1002, 55)]
    stack.driver.broken = True
    with pytest.raises(RingcommError, match="what the driver says"):
        event.query()
    del event
    assert stack.runtime.record_event(0, 1003).handle == 55
    assert len(stack.cuda.named("eventCreateWithFlags")) == 1
    assert stack.cuda.named("eventDestroy") == []


def test_a_stream_whose_state_cannot_be_asked_counts_as_capturing(stack):
    assert stack.runtime.is_capturing(0) is False
    assert stack.cuda.named("streamIsCapturing") == [(70,)]
    stack.cuda.answers["streamIsCapturing"] = True
    assert stack.runtime.is_capturing(0, 1001) is True
    stack.cuda.answers["streamIsCapturing"] = CudaError(906)
    assert stack.runtime.is_capturing(0, 0) is True


# ---- kernels -------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_wholly_and_once(stack, monkeypatch):
    units: list[tuple[str, tuple[int, int]]] = []

    def load_unit(unit: str, capability: tuple[int, int]) -> bytes:
        units.append((unit, capability))
        return b"image"

    monkeypatch.setattr(build, "load_unit", load_unit)
    stack.modules.answers |= {
        "moduleLoadData": 5,
        "moduleGetFunction": 6,
        "funcGetAttribute": 512,
        "occupancyMaxActiveBlocksPerMultiprocessor": 3,
    }
    kernel = stack.runtime.find_kernel(1, "move", "rc_move")
    assert (kernel.handle, kernel.threads, kernel.blocks_per_multiprocessor) == (6, 512, 3)
    assert stack.driver.loaded == [6]
    assert stack.modules.named("funcGetAttribute") == [(0, 6)]
    assert stack.runtime.find_kernel(1, "move", "rc_move") is kernel
    stack.runtime.find_kernel(1, "move", "rc_ll_move")
    assert stack.modules.named("moduleLoadData") == [(b"image",)]
    with stack.runtime._loading[1]:  # another thread loads a kernel and waits for its device
        assert stack.runtime.find_kernel(1, "move", "rc_move") is kernel
        stack.runtime.find_kernel(0, "move", "rc_move")
    assert units == [("move", (9, 0))] * 2  # each device needs a module of its own

    stack.modules.answers["moduleGetFunction"] = CUDADriverError("not found")
    with pytest.raises(
        UnsupportedError, match=r"kernel rc_x of unit move .* device 1: .*not found"
    ):
        stack.runtime.find_kernel(1, "move", "rc_x")


def test_loops_of_both_kinds_live_beside_each_other(stack, monkeypatch):
    monkeypatch.setattr(build, "load_unit", lambda unit, capability: os.environ[LOOPS].encode())
    stack.modules.answers |= {
        "moduleLoadData": {b"serial": 5, b"batched": 6}.__getitem__,
        "moduleGetFunction": lambda module, name: 10 * module,
        "funcGetAttribute": 256,
        "occupancyMaxActiveBlocksPerMultiprocessor": 1,
    }
    for loops, handle in (("serial", 50), ("batched", 60), ("serial", 50)):
        monkeypatch.setenv(LOOPS, loops)
        assert stack.runtime.find_kernel(0, "move", "rc_move").handle == handle
    assert stack.modules.named("moduleLoadData") == [(b"serial",), (b"batched",)]


def refuse_prebuilt(stack: Stack, monkeypatch, status: int, maker: str | None) -> list[bool]:
    """Lets the driver refuse prebuilt units; returns the list of load_unit's ``prebuilt``."""
    asked: list[bool] = []

    def load_unit(unit: str, capability: tuple[int, int], prebuilt: bool = True) -> bytes:
        asked.append(prebuilt)
        return b"of nvcc" if prebuilt else b"of NVRTC"

    def module(image: bytes) -> int:
        if image == b"of nvcc":
            raise CUDADriverError("CUDA_ERROR_X: what it means", status)
        return 5

    monkeypatch.setattr(build, "load_unit", load_unit)
    monkeypatch.setattr(build, "prebuilt_by", lambda unit, capability: maker)
    stack.modules.answers |= {
        "moduleLoadData": module,
        "moduleGetFunction": 6,
        "funcGetAttribute": 256,
        "occupancyMaxActiveBlocksPerMultiprocessor": 1,
    }
    return asked


@pytest.mark.parametrize("status", [200, 209, 218, 221, 222, 223, 300])
def test_what_an_older_driver_refuses_is_compiled_and_this_is_said(stack, monkeypatch, status):
    asked = refuse_prebuilt(stack, monkeypatch, status, "nvcc 13.0")
    said = r"driver refuses the kernels that nvcc 13.0 .*CUDA_ERROR_X.*by NVRTC"
    with pytest.warns(RuntimeWarning, match=said):
        assert stack.runtime.find_kernel(0, "move", "rc_move").handle == 6
    assert asked == [True, False]


@pytest.mark.parametrize(("status", "maker"), [(2, "nvcc 13.0"), (222, None)])
def test_no_other_failure_is_taken_for_an_older_driver(stack, monkeypatch, status, maker):
    asked = refuse_prebuilt(stack, monkeypatch, status, maker)
    with pytest.raises(UnsupportedError, match=r"cannot be loaded on device 0.*CUDA_ERROR_X"):
        stack.runtime.find_kernel(0, "move", "rc_move")
    assert asked == [True]


LIBCUDA = """
static int mode = 0;
extern "C" {
int test_mode() { return mode; }
int cuGetErrorString(int error, const char** text) { *text = "what it means"; return 0; }
int cuThreadExchangeStreamCaptureMode(int* other) {
  const int before = mode; mode = *other; *other = before; return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  if (flags != 1) return 1;
  *stream = reinterpret_cast<void*>(0x7f0000000000 - priority);
  return 0;
}
int cuCtxGetExecAffinity(unsigned* affinity, int type) {
  if (type != 0) return 1;
  affinity[0] = 0; affinity[1] = 66;  // CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(0x7f0000000007);
  return 0;
}
#ifdef LOADS
int cuCtxGetDevResource(void* context, unsigned* resource, int type) {
  if (context != reinterpret_cast<void*>(0x7f0000000007) || type != 1) return 1;
  resource[24] = 16;  // behind the type and 92 bytes of padding
  return 0;
}
#endif
int queried_in = 0;
int test_queried_in() { return queried_in; }
int cuLaunchKernel() { return 1; }
int cuMemcpyAsync() { return 1; }
int cuStreamIsCapturing() { return 1; }
int cuEventCreate() { return 1; }
int cuEventRecord() { return 1; }
int cuEventSynchronize() { return 1; }
int cuStreamWaitEvent() { return 1; }
int cuEventQuery(void* event) {
  queried_in = mode;
  const auto handle = reinterpret_cast<unsigned long long>(event);
  return handle == 0x7f0000000055 ? 0 : handle == 0x7f0000000056 ? 600 : 907;
}
#ifdef LOADS
int cuFuncLoad(void* function) {
  return function == reinterpret_cast<void*>(0x7f0000000006) ? 0 : 400;
}
#endif
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("loads", [True, False])
def test_libcuda_is_called_with_whole_pointers(tmp_path: Path, loads):
    source, library = tmp_path / "cuda.cpp", tmp_path / f"libcuda{loads}.so"
    source.write_text(LIBCUDA)
    options = ["-shared", "-fPIC", *(["-DLOADS"] if loads else [])]
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(library)], check=True)
    driver, mode = CudaDriver(str(library)), ctypes.CDLL(str(library)).test_mode
    with driver.outside_captures():
        assert mode() == 2  # relaxed
    assert mode() == 0
    assert driver.make_stream(-1) == 0x7F0000000001
    assert driver.has_passed(0x7F0000000055) is True
    assert driver.has_passed(0x7F0000000056) is False
    with pytest.raises(RuntimeError, match=r"cuEventQuery failed: what it means \(907\)"):
        driver.has_passed(0x7F0000000057)
    assert (ctypes.CDLL(str(library)).test_queried_in(), mode()) == (2, 0)
    assert driver.multiprocessors() == ([66, 16] if loads else [66])
    driver.load_function(0x7F0000000006)
    if loads:
        with pytest.raises(RingcommError, match="cuFuncLoad: CUDA error 400: what it means"):
            driver.load_function(7)
