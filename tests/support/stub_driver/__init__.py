# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that does nothing, and a runtime on it, to count what calls cost the host.

Launches do nothing, so tensors keep their values. The emulated device (``tests/support/emulator``)
runs launches.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, byref, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from ringcomm import _native
from ringcomm.cuda.runtime import HOST_PLACE, DeviceIdentity, Event, Graph, Stream
from tests.support import ROOT
from tests.support.shared_library import COMPILER, SharedLibrary, Unit

__all__ = ["COMPILER", "StubDriver", "StubRuntime", "driver"]

FOLDER = ROOT / "tests" / "support" / "stub_driver"
LIBRARY = SharedLibrary(
    "stub",
    FOLDER,
    {"driver": Unit("-O1", ("driver.cpp",))},
    headers=(FOLDER,),
    includes=(ROOT,),
)
# In the same order as in driver.cpp.
CALLS = (
    "launch",
    "copy",
    "is_capturing",
    "query",
    "create",
    "record",
    "synchronize",
    "wait",
    "exchange_mode",
    "set_device",
    "graph_launch",
    "get_green_context",
)
_PROTOTYPES = {
    "cuEventCreate": (c_int, [POINTER(c_void_p), c_int]),
    "cuEventRecord": (c_int, [c_void_p, c_void_p]),
    "cuEventQuery": (c_int, [c_void_p]),
    "cuEventSynchronize": (c_int, [c_void_p]),
    "cuStreamWaitEvent": (c_int, [c_void_p, c_void_p, c_int]),
    "cuStreamIsCapturing": (c_int, [c_void_p, POINTER(c_int)]),
    "stub_reset": (None, []),
    "stub_count": (c_uint64, [c_int]),
    "stub_params_bytes": (c_uint64, []),
    "stub_set_capturing": (None, [c_void_p, c_int]),
    "stub_set_green": (None, [c_void_p, c_uint]),
    "stub_set_passing": (None, [c_int]),
    "stub_pass": (None, [c_void_p]),
    "stub_refuse": (None, [c_int, c_int]),
    "stub_take_wait": (c_int, [POINTER(c_void_p), POINTER(c_void_p)]),
    "stub_take_record": (c_int, [POINTER(c_void_p)]),
}


class StubDriver:
    """The stub's library, one per process.

    Attributes:
        native: the native module's driver object for it.
    """

    def __init__(self) -> None:
        self.path = str(LIBRARY.path)
        self.library = ctypes.CDLL(self.path)
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self.native = _native.Driver(self.path)

    def reset(self) -> None:
        """Resets the counts; all events count as passed, and later events pass at once."""
        self.library.stub_reset()

    def counted(self) -> dict[str, int]:
        """Returns how often each entry point was called since the last reset, without zeros."""
        counts = {name: self.library.stub_count(i) for i, name in enumerate(CALLS)}
        return {name: count for name, count in counts.items() if count}

    def params_bytes(self) -> int:
        """Returns the largest number of parameter bytes in a launch since the last reset."""
        return int(self.library.stub_params_bytes())

    def waits(self) -> list[tuple[int, int]]:
        """Returns and forgets the waits since the last reset: stream and event of each."""
        found = []
        stream, event = c_void_p(), c_void_p()
        while self.library.stub_take_wait(byref(stream), byref(event)):
            found.append((stream.value or 0, event.value or 0))
        return found

    def records(self) -> list[int]:
        """Returns and forgets the events that were recorded since the last reset."""
        found = []
        event = c_void_p()
        while self.library.stub_take_record(byref(event)):
            found.append(event.value or 0)
        return found

    def hold_events(self) -> None:
        """From now on an event passes only when :meth:`let_pass` is called."""
        self.library.stub_set_passing(0)

    def let_pass(self, event: int) -> None:
        self.library.stub_pass(event)

    def set_capturing(self, stream: int, captures: bool = True) -> None:
        self.library.stub_set_capturing(stream, captures)

    def set_green(self, stream: int, multiprocessors: int) -> None:
        """Makes a stream count as a stream of a green context."""
        self.library.stub_set_green(stream, multiprocessors)

    def refuse(self, code: int, times: int = 1) -> None:
        """Makes the next launches, records and waits return ``code``."""
        self.library.stub_refuse(code, times)


@cache
def driver() -> StubDriver:
    """Returns the driver of this process."""
    return StubDriver()


@dataclass(frozen=True)
class StubStream:
    handle: int
    device: int


class StubEvent:
    def __init__(self, library: ctypes.CDLL) -> None:
        handle = c_void_p()
        library.cuEventCreate(byref(handle), 0)
        self.handle = handle.value or 0
        self._library = library

    def query(self) -> bool:
        return self._library.cuEventQuery(self.handle) == 0

    def synchronize(self) -> None:
        self._library.cuEventSynchronize(self.handle)


@dataclass(frozen=True)
class StubKernel:
    handle: int = 1
    threads: int = 256
    blocks_per_multiprocessor: int = 1


class StubPage:
    def __init__(self, size_bytes: int) -> None:
        self._memory = ctypes.create_string_buffer(size_bytes + 64)
        self.size_bytes = size_bytes
        self.host_ptr = self.device_ptr = -(-ctypes.addressof(self._memory) // 64) * 64

    def free(self) -> None:
        self.host_ptr = self.device_ptr = 0


class StubRuntime:
    """A device whose memory is host memory, and which runs nothing."""

    kind = "stub"

    def __init__(self, multiprocessors: int = 132) -> None:
        self.driver = driver()
        self.driver.reset()  # an earlier test may have left events that never pass
        self.driver_library = self.driver.path
        self._library = self.driver.library
        self._multiprocessors = multiprocessors
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._streams = 0
        #: The device that is current outside of :meth:`on_device`.
        self.device_now = 0
        #: For mutants: :meth:`current_device` returns 0, whichever device is current.
        self.hides_device = False
        self._current = 0
        #: How often each of its own methods was called, by name.
        self.calls: Counter[str] = Counter()

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0 if self.hides_device else self.device_now

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        self.calls["on_device"] += 1
        before, self.device_now = self.device_now, device
        try:
            yield
        finally:
            self.device_now = before

    beside_captures = on_device

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cpu")

    def tensor_place(self, device: int) -> tuple[int, int]:
        return HOST_PLACE

    def identity(self, device: int) -> DeviceIdentity:
        return DeviceIdentity(0, "GPU-stub", "0000:10:00.0", "Stub", (9, 0), self._multiprocessors)

    def usable_multiprocessors(self, device: int) -> int:
        return self._multiprocessors

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return 0

    def is_device_tensor(self, tensor: torch.Tensor, device: int) -> bool:
        return True

    # ---- memory -----------------------------------------------------------------------------

    def allocate(self, device: int, size_bytes: int) -> int:
        memory = ctypes.create_string_buffer(size_bytes + 4096)
        ptr = -(-ctypes.addressof(memory) // 4096) * 4096
        self._memory[ptr] = memory
        return ptr

    def free(self, device: int, ptr: int) -> None:
        del self._memory[ptr]

    def memory_info(self, device: int) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def tensor(self, device: int, ptr: int, size_bytes: int, owner: object) -> torch.Tensor:
        memory = (ctypes.c_uint8 * size_bytes).from_address(ptr)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read(self, device: int, ptr: int, size_bytes: int) -> bytes:
        return ctypes.string_at(ptr, size_bytes)

    def write(self, device: int, ptr: int, data: bytes) -> None:
        ctypes.memmove(ptr, data, len(data))

    def allocate_pinned(self, size_bytes: int) -> StubPage:
        return StubPage(size_bytes)

    def export_handle(self, device: int, ptr: int) -> bytes:
        return ptr.to_bytes(64, "little")

    def open_handle(self, device: int, handle: bytes) -> int:
        raise NotImplementedError("a stub has no other process")

    def close_handle(self, device: int, ptr: int) -> None:
        raise NotImplementedError("a stub has no other process")

    def enable_peer(self, device: int, peer: int) -> None:
        return

    # ---- streams ----------------------------------------------------------------------------

    def current_stream(self, device: int) -> int:
        return self._current

    def make_stream(self, device: int, high_priority: bool = False) -> StubStream:
        self._streams += 1
        return StubStream(self._streams << 12, device)

    def stream_queues(self, device: int) -> tuple[int, int]:
        return 32, self._streams + 1

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream.handle
        try:
            yield
        finally:
            self._current = before

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        with self.on_stream(StubStream(stream, device)):
            function()

    def record_event(self, device: int, stream: int) -> StubEvent:
        event = StubEvent(self._library)
        self._library.cuEventRecord(event.handle, stream)
        return event

    def wait_event(self, device: int, stream: int, event: Event) -> None:
        assert isinstance(event, StubEvent)
        self._library.cuStreamWaitEvent(stream, event.handle, 0)

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.calls["keep_for_stream"] += 1

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        status = c_int()
        handle = self._current if stream is None else stream
        self._library.cuStreamIsCapturing(handle, byref(status))
        return status.value != 0

    def capture_on(self, stream: Stream) -> AbstractContextManager[Graph]:
        raise NotImplementedError("a stub runs nothing that a graph could replay")

    def synchronize(self, device: int) -> None:
        self.calls["synchronize"] += 1

    # ---- kernels ----------------------------------------------------------------------------

    def find_kernel(self, device: int, unit: str, name: str) -> StubKernel:
        return StubKernel()
