# SPDX-License-Identifier: Apache-2.0
"""Emulated devices, their streams, graphs and kernels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ringcomm.cuda import units
from ringcomm.cuda.runtime import HOST_PLACE, DeviceIdentity, Stream
from ringcomm.errors import UnsupportedError
from tests import ptx_interpreter
from tests.support.emulated_driver import library_path
from tests.support.emulator.capture import TorchGraph, capture_on
from tests.support.emulator.handles import (
    EmulatedEvent,
    EmulatedFunction,
    EmulatedGraph,
    EmulatedStream,
    StreamPool,
)
from tests.support.emulator.in_stream_order import InStreamOrder
from tests.support.emulator.library import (
    HOST_FUNCTION,
    DriverError,
    check,
    figures_of,
    library,
)
from tests.support.emulator.memory import EmulatedMemory
from tests.support.emulator.ptx import PtxKernels, from_environment

_FUNCTIONS: list[object] = []
# The priority of the stream for small copies; CudaRuntime gives it to no other stream.
_SERVICE = -5


class _ThisThread(threading.local):
    """State of each thread, as CUDA and torch keep it."""

    device: int | None = None
    assumed: int | None = None

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


def _passed(event: EmulatedEvent) -> bool:
    try:
        return event.query()
    except DriverError:  # captured: the graph uses the tensor at every replay
        return False


@dataclass(eq=False)
class EmulatedRuntime(EmulatedMemory):
    """Emulated devices of this process.

    Args:
        devices: how many this process sees.
        multiprocessors: of each.
        usable: how many of them contexts of this process may use, as under MPS; None: all.
        memory_bytes: of each; how much one process may allocate there.
        blocks_per_multiprocessor: how many of any kernel run at once on each; None: as many as the
            registers, shared memory and threads of the real kernel allow.
        hardware_queues: that the streams of a device share, as CUDA_DEVICE_MAX_CONNECTIONS says.
        threads: of a block of the kernels that the host's compiler made, as they report it.
        block_slots: how many blocks a device runs at once, for any kernel; None: as
            many as the kernels' resources allow.
        assume_device: the device of tensors that are in no device's memory; None: the host.
        physical: which GPU each device is; default 0, 1, ...
        unreachable: pairs of devices without peer access.
        capability: compute capability of each.
        multicast: the devices are under an NVSwitch, which has multicast objects.
        virtual_memory: the devices have virtual memory management, with file descriptors.
        ptx: executes the PTX of the CUDA kernels instead of host code from the same templates;
            default: as the environment says.
    """

    devices: int = 1
    multiprocessors: int = 4
    usable: int | None = None
    memory_bytes: int = 1 << 30
    blocks_per_multiprocessor: int | None = None
    threads: int = 4
    block_slots: int | None = None
    hardware_queues: int = 8
    assume_device: int | None = 0
    physical: tuple[int, ...] = ()
    unreachable: frozenset[tuple[int, int]] = frozenset()
    capability: tuple[int, int] = (9, 0)
    multicast: bool = True
    virtual_memory: bool = True
    ptx: PtxKernels | None = field(default_factory=from_environment)
    kind: str = field(default="emulated", init=False)
    #: Tensors that the host may read in a capture: with a GPU they would be in host memory.
    host_tensors: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        room = (self.usable_multiprocessors(0), self.blocks_per_multiprocessor or 0)
        if self.block_slots is not None:
            room = (self.block_slots, 1)
        queues = self.hardware_queues
        self._native = [library().emu_device_make(*room, queues) for _ in range(self.devices)]
        EmulatedMemory.__init__(self, self.memory_bytes, self.unreachable, self._native)
        if not self.virtual_memory:
            for native in self._native:
                library().emu_device_without_virtual_memory(native)
        if not self.multicast:
            for native in self._native:
                library().emu_device_without_multicast(native)
        self._pools = [StreamPool(native) for native in self._native]
        self._service = [library().emu_stream_make(each, 0, _SERVICE) for each in self._native]
        self._loading = [threading.Lock() for _ in self._native]
        self._loaded: dict[tuple[int, str, str], EmulatedFunction] = {}
        self._thread = _ThisThread()
        self._kept: list[tuple[EmulatedEvent, torch.Tensor]] = []
        self.driver_library = str(library_path())

    # ---- devices ----------------------------------------------------------------------------

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return self._thread.device or 0

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before, native = self._thread.device, library().emu_device_get()
        self._thread.device = device
        library().emu_device_set(self._native[device])
        try:
            yield
        finally:
            self._thread.device = before
            library().emu_device_set(native)

    def beside_captures(self, device: int) -> AbstractContextManager[None]:
        return self.on_device(device)

    @contextmanager
    def assuming(self, device: int | None) -> Iterator[None]:
        """Inside, this thread's plain tensors count as ``device``'s (None: the host's)."""
        before, self._thread.assumed = self._thread.assumed, -1 if device is None else device
        try:
            yield
        finally:
            self._thread.assumed = before

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cpu")

    def tensor_place(self, device: int) -> tuple[int, int]:
        return HOST_PLACE

    def identity(self, device: int) -> DeviceIdentity:
        gpu = self.physical[device] if self.physical else device
        return DeviceIdentity(
            index=device,
            uuid=f"GPU-emulated-{gpu}",
            pci_bus_id=f"0000:{gpu + 16:02x}:00.0",
            name="Emulated GPU",
            capability=self.capability,
            multiprocessors=self.multiprocessors,
        )

    def usable_multiprocessors(self, device: int) -> int:
        return self.multiprocessors if self.usable is None else self.usable

    def device_of(self, tensor: torch.Tensor) -> int | None:
        device = self.owner_of(tensor.data_ptr())
        if device is not None:
            return device
        if self.ptx is not None:
            ptx_interpreter.allow(tensor)
        assumed = self._thread.assumed
        return self.assume_device if assumed is None else None if assumed < 0 else assumed

    def is_device_tensor(self, tensor: torch.Tensor, device: int) -> bool:
        return self.device_of(tensor) == device

    # ---- streams ----------------------------------------------------------------------------

    def current_stream(self, device: int) -> int:
        return self._thread.streams.get(device, 0)

    def make_stream(
        self, device: int, high_priority: bool = False, blocking: bool = False
    ) -> EmulatedStream:
        return EmulatedStream(device, self._pools[device], (blocking, -1 if high_priority else 0))

    def stream_queues(self, device: int) -> tuple[int, int]:
        return self.hardware_queues, self._pools[device].made[0] + 1

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, EmulatedStream)
        streams = self._thread.streams
        before = streams.get(stream.device, 0)
        streams[stream.device] = stream.handle
        try:
            with self.on_device(stream.device):  # as torch.cuda.stream does
                yield
        finally:
            streams[stream.device] = before

    def record_event(self, device: int, stream: int) -> EmulatedEvent:
        event = EmulatedEvent()
        with self.on_device(device):
            check(library().emu_event_record(event.handle, stream))
        return event

    def wait_event(self, device: int, stream: int, event: object) -> None:
        assert isinstance(event, EmulatedEvent)
        with self.on_device(device):
            check(library().emu_stream_wait(stream, event.handle))

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, EmulatedStream)
        event = self.record_event(stream.device, stream.handle)
        with self._lock:
            self._kept = [(each, kept) for each, kept in self._kept if not _passed(each)]
            self._kept.append((event, tensor))

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        handle = self.current_stream(device) if stream is None else stream
        with self.on_device(device):
            return bool(library().emu_stream_capturing(handle))

    def synchronize(self, device: int) -> None:
        check(library().emu_device_synchronize(self._native[device]))

    def resident_blocks(self, device: int) -> int:
        """Returns how many blocks fit on the device now."""
        return int(library().emu_device_resident(self._native[device]))

    def settle(self, device: int) -> None:
        library().emu_device_settle(self._native[device])

    def pass_queue(self, device: int) -> None:
        with self.on_device(device):
            check(library().emu_stream_pass(self._service[device]))

    def run_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        """Calls ``function`` in the stream's order, as cudaLaunchHostFunc does."""
        callback = HOST_FUNCTION(function)
        # Kept for ever: a graph may call it at any time, and the stream's thread may still be
        # returning from it after this runtime has been deleted.
        _FUNCTIONS.append(callback)
        with self.on_device(device):
            check(library().emu_stream_run(stream, callback))

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        """Calls ``function`` in stream order; the interpreter launches its kernels so."""
        self.run_on_stream(device, stream, function)

    def in_stream_order(self, of_all_devices: bool = False) -> InStreamOrder:
        """Inside, torch's operations of this thread wait for its current streams, as on a GPU.

        A thread that assumes a device waits only for this device's stream: work in the queues of
        other ranks of this process may wait for this thread.

        Args:
            of_all_devices: waits for all, since the thread acts for ranks of several devices.
        """
        wait = partial(self._await_current_streams, of_all_devices)
        return InStreamOrder(wait, self._keeps_itself)

    def _keeps_itself(self, tensor: torch.Tensor) -> bool:
        """True for a tensor in the heap. Others are torch's; kernels get access to them here."""
        if tensor.layout is not torch.strided:
            return False
        # The storage of an absent parameter has an address, but its tensor refuses to return one.
        if self.owner_of(tensor.untyped_storage().data_ptr()) is not None:
            return True
        if self.ptx is not None:
            ptx_interpreter.allow(tensor)
        return False

    def assumed_devices(self) -> Iterable[int]:
        """The device that this thread's plain tensors count as, or all devices."""
        assumed = self._thread.assumed
        return range(self.devices) if assumed is None or assumed < 0 else (assumed,)

    def _await_current_streams(self, of_all_devices: bool) -> None:
        for device in range(self.devices) if of_all_devices else self.assumed_devices():
            self.record_event(device, self.current_stream(device)).synchronize()

    # ---- graphs and kernels -----------------------------------------------------------------

    @contextmanager
    def capture(
        self, device: int = 0, stream: EmulatedStream | None = None
    ) -> Iterator[EmulatedGraph]:
        """Inside, ``stream`` (None: a new one) is current and captures; torch's work does not."""
        stream, graph = stream or self.make_stream(device), EmulatedGraph()
        ended = ctypes.c_void_p()
        with self.on_stream(stream):
            check(library().emu_capture_begin(stream.handle))
            try:
                yield graph
            finally:
                result = library().emu_capture_end(stream.handle, ctypes.byref(ended))
        check(result)
        graph.handle = ended.value or 0

    def capture_on(self, stream: Stream) -> AbstractContextManager[TorchGraph]:
        assert isinstance(stream, EmulatedStream)
        return capture_on(self, stream, self.host_tensors)

    def replay(self, graph: EmulatedGraph, device: int = 0) -> None:
        """Runs the graph once, in the order of this thread's current stream."""
        with self.on_device(device):
            check(library().emu_graph_launch(graph.handle, self.current_stream(device)))

    def find_kernel(self, device: int, unit: str, name: str) -> EmulatedFunction:
        """Returns a kernel. Its first use waits for all work of the device, as lazy loading may."""
        kernel = self._loaded.get((device, unit, name))
        if kernel is None:
            with self._loading[device]:
                kernel = self._find(device, unit, name)
                self.settle(device)
                self._loaded[device, unit, name] = kernel
        return kernel

    def _find(self, device: int, unit: str, name: str) -> EmulatedFunction:
        handle = library().emulated_kernel(unit.encode(), name.encode())
        if not handle:
            raise UnsupportedError(f"emulated driver: no kernel {name} in unit {unit}")
        if self.ptx is None and unit.startswith("multicast_"):
            raise UnsupportedError(
                f"emulated driver: kernel {name} of unit {unit} has multimem instructions, which "
                "only PTX kernels execute: EmulatedRuntime(ptx=PtxKernels())"
            )
        loops = units.chosen_loops()
        if self.ptx is None and loops != units.BATCHED:
            raise UnsupportedError(
                f"emulated driver: the host's compiler made {units.BATCHED} loops alone, and "
                f"{units.LOOPS_VARIABLE} asks for {loops}: EmulatedRuntime(ptx=PtxKernels())"
            )
        threads = self.threads
        if self.ptx is not None:
            handle = self.ptx.kernel(unit, name, handle)
            threads = figures_of(handle).threads
        blocks_each = library().emu_device_blocks_each(self._native[device], handle)
        return EmulatedFunction(handle, threads, blocks_each)
