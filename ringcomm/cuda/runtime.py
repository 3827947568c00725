# SPDX-License-Identifier: Apache-2.0
"""The interface of a GPU's runtime as ringcomm needs it.

``DeviceRuntime`` separates the communicator from the machine: ``cupy_runtime`` implements it with
CuPy and torch.cuda, and tests replace it by a runtime on CPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

# The variable that sets a process's number of hardware queues per device, and its default.
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_CONNECTIONS = 8
# DLPack's (device type, device number) of host tensors, and its device type of CUDA devices.
HOST_PLACE, CUDA_KIND = (1, 0), 2


@dataclass(frozen=True)
class DeviceIdentity:
    """The physical GPU behind a device, as a rank describes it to the other ranks.

    ``index`` is valid in this process only: under ``CUDA_VISIBLE_DEVICES`` one GPU has different
    ordinals in different processes. ``uuid`` is unique: ranks with equal ``uuid`` share a GPU.
    """

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    capability: tuple[int, int]
    multiprocessors: int


class Stream(Protocol):
    """A stream that the runtime made, with no other user while this object lives.

    The handle stays valid until the process ends: memory that the stream used may outlive this
    object, and freeing this memory records an event on the stream.
    """

    @property
    def handle(self) -> int:
        """The driver's handle (CUstream)."""
        ...


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """True once all work before the event is done."""
        ...

    def synchronize(self) -> None:
        """Blocks this thread, but no other, until all work before the event is done."""
        ...


class Graph(Protocol):
    """A captured graph of work; it keeps the memory that was allocated during the capture."""

    def replay(self) -> None:
        """Queues the work again, on this thread's current stream."""
        ...


class PinnedPage(Protocol):
    """Host memory that kernels read and write in place; initially 0."""

    @property
    def host_ptr(self) -> int: ...

    @property
    def device_ptr(self) -> int:
        """The page's address in kernels, on every device of this process."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def free(self) -> None:
        """Frees the page, which no kernel may use any more; a second call does nothing."""
        ...


class Kernel(Protocol):
    """A kernel that is fully loaded and stays loaded: no launch of it loads or compiles code.

    Loading may block until the device is idle.
    """

    @property
    def handle(self) -> int:
        """The function that the driver launches (CUfunction)."""
        ...

    @property
    def threads(self) -> int:
        """The threads per block for which the kernel was compiled."""
        ...

    @property
    def blocks_per_multiprocessor(self) -> int:
        """The number of blocks of ``threads`` threads that run on one multiprocessor at once."""
        ...


class DeviceRuntime(Protocol):
    """The devices of this process; arguments name a device or peer by its ordinal in this process.

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
        """Returns this thread's current device, which "cuda" without an index names.

        The native module also calls this method.
        """
        ...

    def on_device(self, device: int) -> AbstractContextManager[None]:
        """A context in which ``device`` is this thread's current device; driver calls need it."""
        ...

    def beside_captures(self, device: int) -> AbstractContextManager[None]:
        """Like :meth:`on_device`; driver calls inside do not invalidate other threads' captures."""
        ...

    def torch_device(self, device: int) -> torch.device:
        """Returns the torch device of tensors that belong to ``device``."""
        ...

    def tensor_place(self, device: int) -> tuple[int, int]:
        """Returns DLPack's device type and device number of tensors on ``device``."""
        ...

    def identity(self, device: int) -> DeviceIdentity: ...

    def usable_multiprocessors(self, device: int) -> int:
        """Returns how many multiprocessors this thread's context of the device may use.

        With an MPS share or in a green context, it may use fewer than the device has.
        """
        ...

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the device that has the tensor's memory; None for host memory."""
        ...

    def is_device_tensor(self, tensor: torch.Tensor, device: int) -> bool:
        """True if the tensor's memory is on ``device``."""
        ...

    # ---- memory -----------------------------------------------------------------------------

    def allocate(self, device: int, size_bytes: int) -> int:
        """Allocates zeroed memory that other processes can map; raises MemoryError if it fails."""
        ...

    def free(self, device: int, ptr: int) -> None:
        """Frees memory of :meth:`allocate`; waits for all work of the device."""
        ...

    def memory_info(self, device: int) -> tuple[int, int]:
        """Returns free and total bytes of the device's memory."""
        ...

    def tensor(self, device: int, ptr: int, size_bytes: int, owner: object) -> torch.Tensor:
        """Returns a uint8 tensor of ``size_bytes`` bytes at ``ptr`` that keeps ``owner`` alive."""
        ...

    def read(self, device: int, ptr: int, size_bytes: int) -> bytes:
        """Reads device memory as it is now; does not wait for work on the caller's streams."""
        ...

    def write(self, device: int, ptr: int, data: bytes) -> None:
        """Writes to device memory and returns when done; waits for no other work."""
        ...

    def allocate_pinned(self, size_bytes: int) -> PinnedPage:
        """Allocates host memory mapped into all devices; raises MemoryError if it fails.

        Call it inside :meth:`on_device`: it initialises the current device if necessary. It waits
        for the device only if the runtime has no idle page left.
        """
        ...

    # ---- other processes and devices --------------------------------------------------------

    def export_handle(self, device: int, ptr: int) -> bytes:
        """Returns a handle by which another process opens memory of :meth:`allocate`.

        Raises:
            UnsupportedError: the driver does not share this memory.
        """
        ...

    def open_handle(self, device: int, handle: bytes) -> int:
        """Maps another process's memory for kernels of ``device``; returns the mapped address.

        Raises:
            UnsupportedError: the driver refuses, as it does for handles that this process exported.
        """
        ...

    def close_handle(self, device: int, ptr: int) -> None:
        """Unmaps memory that :meth:`open_handle` has mapped."""
        ...

    def enable_peer(self, device: int, peer: int) -> None:
        """Lets kernels of ``device`` use the memory of ``peer``; a second call does nothing.

        Raises:
            UnsupportedError: the two devices have no peer access.
        """
        ...

    # ---- streams ----------------------------------------------------------------------------

    def current_stream(self, device: int) -> int:
        """Returns the handle of the stream on which torch runs this thread's work on ``device``.

        The native module also calls this method, at each call of a communicator.
        """
        ...

    def make_stream(self, device: int, high_priority: bool = False) -> Stream:
        """Makes a stream that is not ordered with the legacy default stream."""
        ...

    def stream_queues(self, device: int) -> tuple[int, int]:
        """Returns how many hardware queues and how many streams of usual priority there are.

        Only the streams of :meth:`make_stream` and the default stream count. With more streams than
        queues, work may be delayed even if it depends on no other work.
        """
        ...

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """A context in which torch runs this thread's work on ``stream``."""
        ...

    def record_event(self, device: int, stream: int) -> Event:
        """Records an event after all work that is queued on ``stream`` now."""
        ...

    def wait_event(self, device: int, stream: int, event: Event) -> None:
        """Makes later work of ``stream`` wait for ``event``; the host does not wait."""
        ...

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keeps torch from reusing the tensor's memory until the work queued on ``stream`` ends."""
        ...

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        """True while ``stream`` (None: this thread's current stream) is capturing a graph."""
        ...

    def capture_on(self, stream: Stream) -> AbstractContextManager[Graph]:
        """A context that captures the work of ``stream``, torch's included, as a graph.

        The graph may be replayed after the block. If the block raises, no graph is made, and the
        stream is in its previous state.
        """
        ...

    def synchronize(self, device: int) -> None:
        """Blocks this thread until all work of the device is done."""
        ...

    # ---- kernels ----------------------------------------------------------------------------

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        """Calls ``function``; its launches through torch or Triton are queued on ``stream``."""
        ...

    def find_kernel(self, device: int, unit: str, name: str) -> Kernel:
        """Returns the kernel ``name`` of compilation unit ``unit``, loaded on ``device``.

        Raises:
            UnsupportedError: there is no binary for this device and none can be compiled.
        """
        ...
