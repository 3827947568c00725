"""The interface of a GPU's runtime as ringcomm needs it.

``DeviceRuntime`` is the seam between the communicator and the machine: ``cuda_runtime`` implements
it with CuPy and torch.cuda, and tests put one over CPU memory in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

# How many hardware queues a process has on a device, and the driver's own number.
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_CONNECTIONS = 8
# Places of tensors as DLPack has them: the kind of a device, and its number.
HOST_PLACE, CUDA_KIND = (1, 0), 2


@dataclass(frozen=True)
class DeviceIdentity:
    """The physical GPU behind a device; travels to the other ranks.

    ``index`` holds in this process only: under ``CUDA_VISIBLE_DEVICES`` one GPU has different
    ordinals in different processes. ``uuid`` is the GPU's own; ranks of equal ``uuid`` share it.
    """

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    capability: tuple[int, int]
    multiprocessors: int


class Stream(Protocol):
    """A stream that the runtime made, of its own while this object lives.

    The handle stays usable for good: memory that the stream used may outlive this object, and
    whoever frees it records an event there.
    """

    @property
    def handle(self) -> int:
        """The driver's handle (CUstream)."""
        ...


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """True once all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Blocks this thread until then; other Python threads go on."""
        ...


class Graph(Protocol):
    """The work of a capture, which keeps the memory that was allocated in it."""

    def replay(self) -> None:
        """Does the work again, in the order of this thread's current stream."""
        ...


class PinnedPage(Protocol):
    """Host memory that kernels read and write in place; zeros at first."""

    @property
    def host_ptr(self) -> int: ...

    @property
    def device_ptr(self) -> int:
        """Its address in kernels, on every device of this process."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def free(self) -> None:
        """Gives it back; a second call does nothing. No kernel may use it any more."""
        ...


class Kernel(Protocol):
    """A kernel that is wholly loaded, for good: no later launch of it loads or compiles.

    To load it may take until the device is idle.
    """

    @property
    def handle(self) -> int:
        """The function that the driver launches (CUfunction)."""
        ...

    @property
    def threads(self) -> int:
        """The threads of its blocks: as many as it was compiled for."""
        ...

    @property
    def blocks_per_multiprocessor(self) -> int:
        """The number of blocks of ``threads`` threads that run on one multiprocessor at once."""
        ...


class DeviceRuntime(Protocol):
    """The devices of this process. Devices and their peers are ordinals in this process.

    Pointers are addresses in device memory; stream handles are the driver's, 0 being the
    legacy default stream. All methods may be called from any thread.
    """

    @property
    def kind(self) -> str:
        """ "cuda" or "emulated"; equal on all ranks."""
        ...

    @property
    def driver_library(self) -> str:
        """The library with the driver's entry points, for the native launcher's dlopen."""
        ...

    def device_count(self) -> int: ...

    def current_device(self) -> int:
        """The device that this thread has made current, which "cuda" without an index names.

        The native end calls this, too.
        """
        ...

    def on_device(self, device: int) -> AbstractContextManager[None]:
        """Inside, ``device`` is current in this thread: what driver calls such as launches need."""
        ...

    def beside_captures(self, device: int) -> AbstractContextManager[None]:
        """As :meth:`on_device`; and calls of the driver break no capture elsewhere."""
        ...

    def torch_device(self, device: int) -> torch.device:
        """Returns the torch device of tensors that belong to ``device``."""
        ...

    def tensor_place(self, device: int) -> tuple[int, int]:
        """Returns where tensors of ``device`` lie, as DLPack says it: a kind and a number."""
        ...

    def identity(self, device: int) -> DeviceIdentity: ...

    def usable_multiprocessors(self, device: int) -> int:
        """Returns how many multiprocessors this thread's context of the device may use.

        They are fewer than the device has under MPS with a share, and in a green context.
        """
        ...

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """The device that the tensor's memory is on; None for memory of the host."""
        ...

    def is_device_tensor(self, tensor: torch.Tensor, device: int) -> bool:
        """True if the tensor's memory is on ``device``."""
        ...

    # ---- memory -----------------------------------------------------------------------------

    def allocate(self, device: int, size_bytes: int) -> int:
        """Zeroed memory that other processes can map; raises MemoryError when there is none."""
        ...

    def free(self, device: int, ptr: int) -> None:
        """Gives back what :meth:`allocate` returned. Waits for the work of the whole device."""
        ...

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""
        ...

    def tensor(self, device: int, ptr: int, size_bytes: int, owner: object) -> torch.Tensor:
        """A tensor of ``size_bytes`` bytes (uint8) at ``ptr``, which keeps ``owner`` alive."""
        ...

    def read(self, device: int, ptr: int, size_bytes: int) -> bytes:
        """Reads device memory as it is now; does not wait for work on the caller's streams."""
        ...

    def write(self, device: int, ptr: int, data: bytes) -> None:
        """Writes to device memory; has happened when it returns. Waits for no other work."""
        ...

    def allocate_pinned(self, size_bytes: int) -> PinnedPage:
        """Host memory mapped into all devices; raises MemoryError when there is none.

        Belongs inside :meth:`on_device`: it starts the current device if that is not in use yet.
        Waits for the device only where the pages that the runtime keeps have been given out.
        """
        ...

    # ---- other processes and devices --------------------------------------------------------

    def export_handle(self, device: int, ptr: int) -> bytes:
        """Returns a handle by which another process opens what :meth:`allocate` returned.

        Raises:
            UnsupportedError: the driver does not share this memory.
        """
        ...

    def open_handle(self, device: int, handle: bytes) -> int:
        """Maps another process's memory for kernels of ``device`` and returns its address here.

        Raises:
            UnsupportedError: the driver refuses, as it does for handles of this same process.
        """
        ...

    def close_handle(self, device: int, ptr: int) -> None:
        """Ends a mapping of :meth:`open_handle`."""
        ...

    def enable_peer(self, device: int, peer: int) -> None:
        """Lets kernels of ``device`` use the memory of ``peer``; again does nothing.

        Raises:
            UnsupportedError: the two devices have no peer access.
        """
        ...

    # ---- streams ----------------------------------------------------------------------------

    def current_stream(self, device: int) -> int:
        """Handle of the stream on which torch runs this thread's work on ``device``.

        The native end calls this, too, at each call of a communicator.
        """
        ...

    def make_stream(self, device: int, high_priority: bool = False) -> Stream:
        """A stream that takes no part in the legacy default stream's order."""
        ...

    def stream_queues(self, device: int) -> tuple[int, int]:
        """How many hardware queues streams of usual priority share, and how many streams do so.

        Of the streams only those of :meth:`make_stream` and the default one are counted. Where
        there are more of them than queues, work that waits for nothing may be held up.
        """
        ...

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Inside, torch runs this thread's work on ``stream``."""
        ...

    def record_event(self, device: int, stream: int) -> Event:
        """An event behind all work that ``stream`` has by now."""
        ...

    def wait_event(self, device: int, stream: int, event: Event) -> None:
        """Makes later work of ``stream`` wait for ``event``; the host goes on."""
        ...

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keeps torch from reusing the tensor's memory before ``stream``'s work by now is done."""
        ...

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        """True while ``stream`` (None: this thread's current one) is capturing a graph."""
        ...

    def capture_on(self, stream: Stream) -> AbstractContextManager[Graph]:
        """Inside, ``stream`` is current, and what goes there is captured, torch's work included.

        The graph may be replayed after the block. If the block raises, there is none, and the
        stream is as it was before.
        """
        ...

    def synchronize(self, device: int) -> None:
        """Blocks this thread until all work of the device is done."""
        ...

    # ---- kernels ----------------------------------------------------------------------------

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        """Calls ``function``, whose launches through torch or Triton go to ``stream``."""
        ...

    def find_kernel(self, device: int, unit: str, name: str) -> Kernel:
        """The kernel ``name`` of compilation unit ``unit``, loaded on ``device``.

        Raises:
            UnsupportedError: there is no binary for this device and none can be compiled.
        """
        ...
