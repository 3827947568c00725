# SPDX-License-Identifier: Apache-2.0
"""The heap of this process on each of its GPUs, and the mapped heaps of its peers."""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections import deque
from dataclasses import dataclass
from math import prod
from multiprocessing.util import Finalize
from weakref import WeakValueDictionary

import torch

from ringcomm import _native, cuda
from ringcomm.cuda.runtime import DeviceRuntime, Event, Stream
from ringcomm.cuda.virtual_memory import why_not
from ringcomm.errors import (
    ArgumentError,
    HeapError,
    MismatchError,
    RendezvousError,
    UnsupportedError,
)
from ringcomm.json_reader import read_fields, shown
from ringcomm.memory.chunk_service import reason_of
from ringcomm.memory.device_memory import (
    MAPPING_WAIT_S,
    FixedMemory,
    GrowingMemory,
    OfferedChunks,
    PeerAllocation,
    PeerChunks,
)
from ringcomm.memory.host_heap import parse_bytes
from ringcomm.process import until_exit, warn_of_unknown
from ringcomm.rendezvous.handles import machine_identity

# ---- Extents (buffers) of pinned host memory, copied to and from a device while it computes


class Copy:
    """A copy between an extent and memory of the device."""

    def __init__(self, runtime: DeviceRuntime, device: int, done: Event) -> None:
        self._runtime, self._device = runtime, device
        self.done = done

    def wait(self) -> None:
        """Makes the current stream wait for the copy; does not block the host."""
        stream = self._runtime.current_stream(self._device)
        self._runtime.wait_event(self._device, stream, self.done)


class PinnedStorage:
    """Numbered buffers (extents) of pinned host memory, copied to and from one device.

    A copy begins after all earlier work of the caller's stream, since this work may use the same
    device memory. Copies of the same extent, or of device memory at the same address, run in the
    order of submission. Copies to the device use one stream and copies from it another, since PCIe
    transfers both ways at once.

    Args:
        runtime: runtime of the device.
        device: ordinal of the device.
    """

    def __init__(self, runtime: DeviceRuntime, device: int) -> None:
        self._runtime, self._device = runtime, device
        self._to_device = runtime.make_stream(device)
        self._to_host = runtime.make_stream(device)
        self._extents: list[torch.Tensor] = []
        # The last copy of each extent, and the last copy at each address on the device.
        self._last: dict[tuple[str, int], Copy] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all extents."""
        return sum(extent.nbytes for extent in self._extents)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Returns device memory filled with zeros: uint8 [size_bytes]."""
        device = self._runtime.torch_device(self._device)
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def add_extent(self, size_bytes: int) -> int:
        """Adds an extent filled with zeros, and returns its number."""
        pins = self._runtime.torch_device(self._device).type != "cpu"  # "cpu" if emulated
        made = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pins)
        self._extents.append(made)
        return len(self._extents) - 1

    def read(self, extent: int, memory: torch.Tensor) -> Copy:
        """Begins to copy an extent to ``memory`` of the device (uint8, of the extent's size)."""
        return self._copy(extent, memory, memory, self._extents[extent], self._to_device)

    def write(self, extent: int, memory: torch.Tensor) -> Copy:
        """Begins to copy device memory to an extent."""
        return self._copy(extent, memory, self._extents[extent], memory, self._to_host)

    def _copy(
        self,
        extent: int,
        memory: torch.Tensor,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: Stream,
    ) -> Copy:
        runtime, device = self._runtime, self._device
        keys = ("extent", extent), ("memory", memory.data_ptr())
        behind = [self._last[key].done for key in keys if key in self._last]
        behind.append(runtime.record_event(device, runtime.current_stream(device)))
        for event in behind:
            runtime.wait_event(device, stream.handle, event)
        with runtime.on_stream(stream):
            target.copy_(source, non_blocking=True)
        runtime.keep_for_stream(memory, stream)
        done = Copy(runtime, device, runtime.record_event(device, stream.handle))
        self._last.update(dict.fromkeys(keys, done))
        return done


# One device heap: memory of a device (device_memory.py), divided into allocations.
#
# Queued work may still use a freed allocation, so its space is not free yet: the heap records an
# event in every stream that may use the allocation, and reuses the space after all these events.
# The streams are the current stream at the allocation, the current stream at the free, and the
# streams passed to ``keep_for_stream``. This is the rule of torch's allocator, with the same duty
# for callers: they must pass every other stream that uses a tensor to ``keep_for_stream``.

HEAP_BYTES_VARIABLE = "RINGCOMM_CUDA_HEAP_BYTES"
HEAP_KIND_VARIABLE = "RINGCOMM_CUDA_HEAP"
ALLOCATION_ALIGN = 256
TOKEN_BYTES = 8


class DeviceAllocation:
    """Part of a device heap; its space is reused after its deletion, once no work uses it."""

    __slots__ = ("__weakref__", "_streams", "heap", "offset_bytes", "size_bytes")

    def __init__(self, heap: DeviceHeap, offset_bytes: int, size_bytes: int) -> None:
        self.heap = heap
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self._streams: dict[int, Stream | None] = {heap.current_stream(): None}

    @property
    def ptr(self) -> int:
        """The address on the device."""
        return self.heap.base_ptr + self.offset_bytes

    def keep_for_stream(self, stream: Stream) -> None:
        """After the deletion, delays reuse of the space until work queued on ``stream`` ends."""
        self._streams[stream.handle] = stream

    def tensor(self) -> torch.Tensor:
        """Returns a uint8 tensor over the allocation's memory, which keeps this object alive."""
        return self.heap.runtime.tensor(self.heap.device, self.ptr, self.size_bytes, self)

    @until_exit
    def __del__(self) -> None:
        self.heap.give_back(self.offset_bytes, self._streams)


@dataclass
class _FreedAllocation:
    """A freed allocation; its space may be reused after ``events`` (None: not recorded yet)."""

    offset_bytes: int
    streams: dict[int, Stream | None]
    events: list[Event] | None


class DeviceHeap:
    """The heap of this process on one device. ``token`` identifies it among all heaps.

    Args:
        runtime: runtime of the device.
        device: ordinal of the device.
        capacity_bytes: largest size of the heap.
        why_fixed: the reason that the heap has its full size from the start; "": it grows.
    """

    def __init__(
        self, runtime: DeviceRuntime, device: int, capacity_bytes: int, why_fixed: str
    ) -> None:
        self.runtime = runtime
        self.device = device
        self.token = secrets.randbits(64)
        self.pid = os.getpid()
        self.memory = (
            FixedMemory(runtime, device, capacity_bytes, why_fixed)
            if why_fixed
            else GrowingMemory(runtime, device, capacity_bytes, self.token)
        )
        self.capacity_bytes = self.memory.capacity_bytes
        self.base_ptr = self.memory.base_ptr
        self._closed = False
        self._lock = threading.Lock()
        self._allocator = _native.Allocator(self.capacity_bytes)
        self._live: WeakValueDictionary[int, DeviceAllocation] = WeakValueDictionary()
        # The garbage collector may delete an allocation anywhere, even while this thread holds the
        # lock in allocate(). So freed allocations are added to a deque, which needs no lock.
        self._dead: deque[_FreedAllocation] = deque()
        self._leaving: list[_FreedAllocation] = []
        # Offset 0 holds the token: a peer reads it to check that it has mapped the right heap.
        self._allocator.allocate(TOKEN_BYTES, ALLOCATION_ALIGN)
        try:
            self.memory.grow(ALLOCATION_ALIGN)
            runtime.write(device, self.base_ptr, self.token.to_bytes(TOKEN_BYTES, "little"))
        except BaseException:
            self.close()
            raise

    def current_stream(self) -> int:
        return self.runtime.current_stream(self.device)

    def contains(self, ptr: int, size_bytes: int) -> bool:
        """True if the ``size_bytes`` bytes at ``ptr`` are in this heap."""
        return 0 <= ptr - self.base_ptr <= self.capacity_bytes - size_bytes

    def is_reached(self, ptr: int, size_bytes: int) -> bool:
        """True if the bytes are in the part of this heap that all peers have mapped."""
        return 0 <= ptr - self.base_ptr <= self.memory.reached_bytes - size_bytes

    def allocate(self, size_bytes: int, operation: str) -> DeviceAllocation:
        """Returns an allocation at a multiple of 256 bytes, for use in the current stream's order.

        Grows the heap if needed and possible. If the only fitting space is still used by queued
        work, waits for that work.

        Raises:
            HeapError: too little free space; the message names ``operation``, need and free space.
            UnsupportedError: the current stream is capturing a graph, whose replays would use the
                memory after the allocation is deleted.
        """
        if self.runtime.is_capturing(self.device):
            raise UnsupportedError(
                f"{operation}: the current stream is capturing a graph, and during a capture "
                "the device heap cannot allocate memory. Allocate before the capture, and keep the "
                "tensor as long as the graph"
            )
        while True:
            with self._lock:
                self._reclaim()
                offset = self._allocator.allocate(size_bytes, ALLOCATION_ALIGN)
                waits = self._leaving[0].events if self._leaving else None
            refusal = self._commit(offset, size_bytes) if offset is not None else None
            if offset is not None and refusal is None:
                allocation = self._live[offset] = DeviceAllocation(self, offset, size_bytes)
                return allocation
            if not waits:
                raise self._no_room(size_bytes, operation, refusal) from refusal
            # Wait without the lock: another rank's thread may need the lock for an allocation
            # before it makes the call that the queued work waits for.
            for event in waits:
                event.synchronize()

    def _commit(self, offset_bytes: int, size_bytes: int) -> Exception | None:
        """Grows the heap up to the end of an allocation; returns the error if it cannot grow."""
        try:
            self.memory.grow(offset_bytes + size_bytes)
        except BaseException as error:
            with self._lock:
                self._allocator.free(offset_bytes)
            if isinstance(error, (MemoryError, UnsupportedError)):
                return error
            raise
        return None

    def await_peers(self, operation: str, timeout_s: float) -> None:
        """Waits until all processes that map this heap have mapped all of it.

        Call it before peers access this heap's memory without checking whether it is mapped yet.

        Raises:
            HeapError: a process did not map the heap in time, or cannot map it.
        """
        if self.memory.await_peers(timeout_s):
            return
        grown = f"{operation}: the heap on device {self.device} has grown"
        memory = self.memory
        if refusals := memory.refusals:
            raise HeapError(
                f"{grown}, but {'; '.join(refusals)}. Only {memory.reached_bytes} of its "
                f"{memory.committed_bytes} bytes are mapped by all processes. Free memory of the "
                f"device, or set {HEAP_KIND_VARIABLE}=fixed on all ranks; then start them again"
            )
        raise HeapError(
            f"{grown} to {memory.committed_bytes} bytes, but after {timeout_s:g} seconds the other "
            f"processes have mapped only {memory.reached_bytes} bytes of it. Does a process hang, "
            "or is its driver busy? See its output; or allocate before the ranks wait for each "
            "other"
        )

    def give_back(self, offset_bytes: int, streams: dict[int, Stream | None]) -> None:
        """Frees an allocation's space; does nothing in a forked child, as the parent owns it."""
        if self._closed or self.pid != os.getpid():
            return
        leaving = _FreedAllocation(offset_bytes, {**streams, self.current_stream(): None}, None)
        self._record(leaving)
        self._dead.append(leaving)

    def _record(self, leaving: _FreedAllocation) -> None:
        runtime, device = self.runtime, self.device
        # An event recorded during a capture never completes: record it after the capture.
        if not any(runtime.is_capturing(device, stream) for stream in leaving.streams):
            leaving.events = [runtime.record_event(device, stream) for stream in leaving.streams]

    def _reclaim(self) -> None:
        while self._dead:
            self._leaving.append(self._dead.popleft())
        remaining = []
        for leaving in self._leaving:
            if leaving.events is None:
                self._record(leaving)
            if leaving.events is not None and all(event.query() for event in leaving.events):
                self._allocator.free(leaving.offset_bytes)
            else:
                remaining.append(leaving)
        self._leaving = remaining

    def _no_room(self, size_bytes: int, operation: str, refusal: Exception | None) -> HeapError:
        stats = self.stats()
        free_bytes, total_bytes = self.runtime.memory_info(self.device)
        if not self.memory.why_fixed and self.capacity_bytes >= total_bytes:
            refusal = refusal or MemoryError(f"its limit is {self.capacity_bytes} bytes")
        if refusal is not None:
            return HeapError(
                f"{operation}: needs {size_bytes} bytes, and the heap on device {self.device} "
                f"cannot grow: it has {stats['committed_bytes']} bytes, of which "
                f"{stats['used_bytes']} are used, and the device has {free_bytes} bytes free of "
                f"{total_bytes}: {refusal}. Free tensors of the heap, or end other programs on the "
                "device; torch.cuda.empty_cache() frees memory that torch caches"
            )
        grows = f"; the heap does not grow: {self.memory.why_fixed}" * bool(self.memory.why_fixed)
        raises = f"raise {HEAP_BYTES_VARIABLE} (or heap_bytes=) before the heap's first use"
        if stats["used_bytes"] + size_bytes - stats["committed_bytes"] > free_bytes:
            # A larger heap alone would not help: the device lacks the memory, too.
            raises = (
                f"end other programs on the device and {raises}; torch.cuda.empty_cache() frees "
                "memory that torch caches"
            )
        return HeapError(
            f"{operation}: needs {size_bytes} bytes, free {stats['free_bytes']} bytes (largest "
            f"range {stats['largest_free_bytes']}) of the {self.capacity_bytes} bytes of the heap "
            f"on device {self.device}{grows}; the device has {free_bytes} bytes free of "
            f"{total_bytes}. Free tensors of the heap, or {raises}"
        )

    def stats(self) -> dict[str, int]:
        """Returns ``heap_stats()``; freed space that queued work may still use counts as used."""
        with self._lock:
            self._reclaim()
            used_bytes = self._allocator.used_bytes
            largest_free_bytes = self._allocator.largest_free_bytes
        committed_bytes = self.memory.committed_bytes
        free_bytes = self.capacity_bytes - used_bytes
        if committed_bytes < self.capacity_bytes:
            left_bytes = self.runtime.memory_info(self.device)[0]
            free_bytes = min(free_bytes, max(0, committed_bytes - used_bytes) + left_bytes)
        return {
            "capacity_bytes": self.capacity_bytes,
            "committed_bytes": committed_bytes,
            "used_bytes": used_bytes,
            "free_bytes": free_bytes,
            "largest_free_bytes": min(largest_free_bytes, free_bytes),
        }

    def find_allocation(self, ptr: int) -> DeviceAllocation | None:
        """Returns the live allocation that begins at ``ptr``, or None."""
        return self._live.get(ptr - self.base_ptr)

    def close(self) -> None:
        """Frees the memory; allocations that still exist must not be used any more."""
        if not self._closed:
            self._closed = True
            self.memory.close()


# The heap of this process on each of its devices, and tensors in it.
#
# One heap per process and device, made at first use: all communicators and heap tensors on the
# device share it, and a peer that has mapped the heap can access everything in it. It is freed at
# exit, after the mappings of peers' heaps.

# The default size of a heap that does not grow.
DEFAULT_HEAP_BYTES = 1 << 30
# The driver shares memory between processes in whole pages of 2 MiB: with a smaller allocation,
# peers could read the rest of its page.
PAGE_BYTES = 2 << 20
# Exit priorities: communicators close first (100), then peers' mappings (90), then heaps (80).
EXIT_PRIORITY = 80


class _ProcessHeaps:
    """The device heaps of this process; a forked child starts with a new, empty object."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.heaps: dict[int, DeviceHeap] = {}
        self.closes_at_exit = False


_process = _ProcessHeaps()
_inherited: list[_ProcessHeaps] = []


def _forget_heaps_in_child() -> None:
    global _process
    _inherited.append(_process)
    _process = _ProcessHeaps()


os.register_at_fork(after_in_child=_forget_heaps_in_child)


def why_heap_is_fixed(runtime: DeviceRuntime, device: int) -> str:
    """Returns why the heap on ``device`` is, or will be, one allocation; "" if it grows by chunks.

    Raises:
        ArgumentError: ``RINGCOMM_CUDA_HEAP`` is neither "growing" nor "fixed".
    """
    kind = os.environ.get(HEAP_KIND_VARIABLE, "") or "growing"
    if kind not in ("growing", "fixed"):
        raise ArgumentError(
            f'{HEAP_KIND_VARIABLE}: expected "growing" or "fixed", got {shown(kind)}; unset it for '
            "a heap that grows"
        )
    if kind == "fixed":
        return f"{HEAP_KIND_VARIABLE}=fixed is set"
    refusal = why_not(runtime, device)
    return refusal and f"the device has no virtual memory management: {refusal}"


def _wanted_bytes(
    runtime: DeviceRuntime, device: int, heap_bytes: int | None, *, grows: bool
) -> int:
    warn_of_unknown()
    text = os.environ.get(HEAP_BYTES_VARIABLE, "")
    if heap_bytes is None and text:
        heap_bytes = parse_bytes(text, HEAP_BYTES_VARIABLE)
    if heap_bytes is None:
        free_bytes, total_bytes = runtime.memory_info(device)
        usual_bytes = total_bytes if grows else min(DEFAULT_HEAP_BYTES, free_bytes // 2)
        heap_bytes = max(PAGE_BYTES, usual_bytes)
    if heap_bytes < PAGE_BYTES:
        raise ArgumentError(
            f"heap_bytes: expected at least {PAGE_BYTES} bytes, got {heap_bytes}; pass a larger "
            f"heap_bytes= or set {HEAP_BYTES_VARIABLE}"
        )
    return -(-heap_bytes // PAGE_BYTES) * PAGE_BYTES


def _make_heap(runtime: DeviceRuntime, device: int, heap_bytes: int | None) -> DeviceHeap:
    why_fixed = why_heap_is_fixed(runtime, device)
    capacity_bytes = _wanted_bytes(runtime, device, heap_bytes, grows=not why_fixed)
    if why_fixed and runtime.kind == "cuda":
        warnings.warn(
            f"the heap on device {device} is one allocation of {capacity_bytes} bytes and does "
            f"not grow: {why_fixed}",
            RuntimeWarning,
            stacklevel=4,
        )
    try:
        return DeviceHeap(runtime, device, capacity_bytes, why_fixed)
    except MemoryError as error:
        free_bytes, total_bytes = runtime.memory_info(device)
        needed_bytes = capacity_bytes if why_fixed else PAGE_BYTES
        raise HeapError(
            f"device heap: needs {needed_bytes} bytes, free {free_bytes} bytes of the "
            f"{total_bytes} bytes of device {device} ({runtime.identity(device).name}): {error}. "
            f"Set {HEAP_BYTES_VARIABLE} (or heap_bytes=) to a smaller size, or end other programs "
            "on the device; torch.cuda.empty_cache() frees memory that torch caches"
        ) from error


def device_heap(device: int, heap_bytes: int | None = None) -> DeviceHeap:
    """Returns the heap of this process on ``device``, and makes it at the first use.

    Args:
        device: ordinal in this process.
        heap_bytes: capacity in bytes, rounded up to 2 MiB; None takes
            ``RINGCOMM_CUDA_HEAP_BYTES``, or else the size of the device's memory. A heap that does
            not grow allocates its capacity at once; its default is 1 GiB, or half of the device's
            free memory if half is less.

    Raises:
        HeapError: the heap cannot be made, or exists already with less than ``heap_bytes``.
        ArgumentError: the size is not usable.
        UnsupportedError: this process has no devices; the message says why.
        ForkError: this process was forked from one that used its devices.
    """
    runtime = cuda.current()
    process = _process
    with process.lock:
        heap = process.heaps.get(device)
        if heap is not None and heap.runtime is not runtime:
            # cuda.use() has set another runtime since the heap was made. Remove the heap from the
            # table before closing it: other threads use the heaps in the table.
            del process.heaps[device]
            heap.close()
            heap = None
        if heap is None:
            heap = process.heaps[device] = _make_heap(runtime, device, heap_bytes)
            if not process.closes_at_exit:
                # Not atexit: child processes of multiprocessing skip its functions.
                Finalize(None, close_heaps, exitpriority=EXIT_PRIORITY)
                process.closes_at_exit = True
        elif heap_bytes is not None and heap.capacity_bytes < heap_bytes:
            raise HeapError(
                f"heap_bytes={heap_bytes}: the heap on device {device} exists already with "
                f"{heap.capacity_bytes} bytes; ask for the larger size at its first use, or set "
                f"{HEAP_BYTES_VARIABLE}"
            )
        return heap


def existing_heap(device: int) -> DeviceHeap | None:
    """Returns the heap on ``device``, or None if there is none yet."""
    return _process.heaps.get(device)


def heap_of_token(token: int) -> DeviceHeap | None:
    """Returns this process's heap with this token, on any of its devices, or None."""
    heaps = list(_process.heaps.values())
    return next((heap for heap in heaps if heap.token == token), None)


def close_heaps() -> None:
    """Frees all heaps of this process; runs at exit."""
    process = _process
    with process.lock:
        while process.heaps:
            _, heap = process.heaps.popitem()
            heap.close()


def keep_for_stream(device: int, tensor: torch.Tensor, stream: Stream) -> None:
    """Keeps the tensor's memory until the work on ``stream`` that uses the tensor is done.

    If the tensor is not from the heap, torch's ``Tensor.record_stream`` keeps the memory.
    """
    heap = existing_heap(device)
    allocation = (
        heap.find_allocation(tensor.untyped_storage().data_ptr()) if heap is not None else None
    )
    if allocation is not None:
        allocation.keep_for_stream(stream)
    else:
        cuda.current().keep_for_stream(tensor, stream)


def device_empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: int, operation: str = "ringcomm.empty"
) -> torch.Tensor:
    """Returns an uninitialized tensor in the heap of ``device``; see ``ringcomm.empty``."""
    count_elems = prod(shape)
    if count_elems == 0:
        on_device = cuda.current().torch_device(device)
        return torch.empty(shape, dtype=dtype, device=on_device)
    allocation = device_heap(device).allocate(count_elems * dtype.itemsize, operation)
    return allocation.tensor().view(dtype).view(shape)


# ---- The device heaps of the other ranks, each mapped once for all communicators of this process.
# A peer is a thread of this process on the same device (it uses this rank's own heap), a thread on
# another device (by peer access between the two devices), or another process (by chunks that it
# sends, or by CUDA IPC, which never works in the process that made the handle).

# Exit priorities: communicators close first (100), then these mappings (90), then heaps (80).
UNMAP_PRIORITY = 90

USUAL_CAUSES = (
    "Usual causes: containers that do not share the IPC and PID namespaces; an IOMMU, or PCIe ACS, "
    "that redirects traffic between GPUs; MIG instances, which cannot reach each other; a GPU that "
    "CUDA_VISIBLE_DEVICES hides from one of the two; a driver or GPU without peer access. "
    "'ringcomm topo' and 'nvidia-smi topo -p2p rw' show what the driver reports. Ranks with "
    "different RINGCOMM_NODE_ID are on different nodes, which NCCL joins"
)


@dataclass(frozen=True)
class RecorderAddress:
    """The address of a rank's flight recorder, in the heap of its process on the host."""

    rank: int
    pid: int
    fd: int
    capacity_bytes: int
    token: int
    offset_bytes: int


@dataclass(frozen=True)
class DeviceHandle:
    """A rank's message to its peers: its device heap, its region, and values to compare.

    ``ipc_handle`` and ``service`` (the socket that sends a growing heap's chunks) are hexadecimal.
    Both are empty if the driver cannot share the heap; ``ipc_refusal`` has the reason. ``proof`` is
    random, so that each communicator tests its links with other values than earlier communicators.
    The recorder's fields are 0 without a flight recorder.
    """

    rank: int
    world_size: int
    host: str
    boot: str
    pid_namespace: str
    pid: int
    kind: str
    device: int
    uuid: str
    pci_bus_id: str
    device_name: str
    ipc_handle: str
    service: str
    ipc_refusal: str
    capacity_bytes: int
    committed_bytes: int
    token: int
    proof: int
    region_offset_bytes: int
    region_bytes: int
    recorder_fd: int
    recorder_capacity_bytes: int
    recorder_token: int
    recorder_offset_bytes: int
    layout: str

    @classmethod
    def from_json(cls, text: bytes, rank: int, operation: str) -> DeviceHandle:
        """Parses the handle that ``rank`` posted; raises RendezvousError if it is not valid."""
        return cls(**read_fields(cls, text, rank, operation, hexadecimal=("ipc_handle", "service")))

    @property
    def recorder(self) -> RecorderAddress:
        return RecorderAddress(
            self.rank,
            self.pid,
            self.recorder_fd,
            self.recorder_capacity_bytes,
            self.recorder_token,
            self.recorder_offset_bytes,
        )

    @property
    def named(self) -> str:
        """The rank and its device, for error messages."""
        return (
            f"rank {self.rank} (pid {self.pid}, device {self.device}: {self.device_name} at "
            f"{self.pci_bus_id})"
        )


def make_handle(
    heap: DeviceHeap,
    rank: int,
    world_size: int,
    region: tuple[int, int],
    layout: str,
    recorder: RecorderAddress | None = None,
    *,
    shares: bool = True,
) -> DeviceHandle:
    """Returns the handle that this rank sends to its peers.

    Args:
        heap: heap of this rank.
        rank: this rank.
        world_size: the number of ranks.
        region: offset in the heap and size, in bytes.
        layout: layout of the region, which must be equal on all ranks.
        recorder: flight recorder of this rank, or None.
        shares: False if all ranks are threads of this process, so that none has to map the heap.

    Raises:
        RingcommError: the thread that sends the heap's chunks cannot be started.
    """
    host, boot, pid_namespace = machine_identity()
    identity = heap.runtime.identity(heap.device)
    ipc_handle, service, ipc_refusal = heap.memory.export() if shares else ("", "", "")
    return DeviceHandle(
        rank=rank,
        world_size=world_size,
        host=host,
        boot=boot,
        pid_namespace=pid_namespace,
        pid=os.getpid(),
        kind=heap.runtime.kind,
        device=heap.device,
        uuid=identity.uuid,
        pci_bus_id=identity.pci_bus_id,
        device_name=identity.name,
        ipc_handle=ipc_handle,
        service=service,
        ipc_refusal=ipc_refusal,
        capacity_bytes=heap.capacity_bytes,
        committed_bytes=heap.memory.committed_bytes,
        token=heap.token,
        proof=secrets.randbits(63),
        region_offset_bytes=region[0],
        region_bytes=region[1],
        recorder_fd=recorder.fd if recorder else 0,
        recorder_capacity_bytes=recorder.capacity_bytes if recorder else 0,
        recorder_token=recorder.token if recorder else 0,
        recorder_offset_bytes=recorder.offset_bytes if recorder else 0,
        layout=layout,
    )


class MappedDeviceHeap:
    """A rank's device heap, mapped in this process at ``base_ptr`` for kernels and copies.

    If the rank is a thread of this process, ``pid`` is 0 and ``heap`` is the thread's heap.
    """

    __slots__ = ("__weakref__", "base_ptr", "heap", "pid")

    def __init__(self, base_ptr: int, pid: int, heap: DeviceHeap | None) -> None:
        self.base_ptr = base_ptr
        self.pid = pid
        self.heap = heap


class _OpenedHeap(MappedDeviceHeap):
    """Another process's heap, mapped for one device until its last user is deleted."""

    __slots__ = ("_closed", "_opened_by", "memory")

    def __init__(
        self, runtime: DeviceRuntime, device: int, handle: DeviceHandle, reader: str
    ) -> None:
        self.memory = (
            PeerChunks(
                runtime,
                device,
                OfferedChunks(
                    bytes.fromhex(handle.service),
                    handle.pid,
                    handle.token,
                    handle.capacity_bytes,
                    handle.named,
                    reader,
                ),
            )
            if handle.service
            else PeerAllocation(runtime, device, bytes.fromhex(handle.ipc_handle))
        )
        super().__init__(self.memory.base_ptr, handle.pid, None)
        self._opened_by = os.getpid()
        self._closed = False

    def close(self) -> None:
        # In a forked child the mapping belongs to the parent.
        if not self._closed and self._opened_by == os.getpid():
            self._closed = True
            self.memory.close()

    @until_exit
    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # __init__ has succeeded
            self.close()


class _Mappings:
    """The heaps that this process has mapped; a forked child starts with a new, empty object."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opened: WeakValueDictionary[tuple[int, int, int], _OpenedHeap] = WeakValueDictionary()
        self.closes_at_exit = False


_mappings = _Mappings()
_inherited_mappings: list[tuple[_Mappings, list[_OpenedHeap]]] = []


def _forget_mappings_in_child() -> None:
    global _mappings
    _inherited_mappings.append((_mappings, list(_mappings.opened.values())))
    _mappings = _Mappings()


os.register_at_fork(after_in_child=_forget_mappings_in_child)


def close_mappings() -> None:
    """Closes the mappings of other processes' heaps; runs at exit, before close_heaps()."""
    for mapped in list(_mappings.opened.values()):
        mapped.close()


def opened_heaps() -> int:
    """Returns the number of heaps of other processes that are mapped now."""
    return len(_mappings.opened)


def map_device_heap(
    handle: DeviceHandle, own_heap: DeviceHeap, operation: str, reader: str
) -> MappedDeviceHeap:
    """Returns the heap of ``handle``, mapped for kernels on ``own_heap``'s device.

    Args:
        handle: the handle that the peer sent.
        own_heap: this rank's heap.
        operation: named in errors.
        reader: this rank, for messages about later chunks of the heap.

    Raises:
        UnsupportedError: the two devices cannot access each other; the message names usual causes.
        MismatchError: the ranks use different kinds of device.
        RendezvousError: the peer has ended, or the mapped memory is not its heap.
    """
    if handle.token == own_heap.token:
        return MappedDeviceHeap(own_heap.base_ptr, 0, own_heap)
    if handle.kind != own_heap.runtime.kind:
        raise MismatchError(
            f"{operation}: {handle.named} has a device of kind {handle.kind!r}, this rank one of "
            f"kind {own_heap.runtime.kind!r}. Give all ranks the same kind of device="
        )
    if (handle.pid, handle.pid_namespace) == (os.getpid(), machine_identity()[2]):
        return _peer_device(handle, own_heap, operation)
    return _open(handle, own_heap, operation, reader)


def _peer_device(handle: DeviceHandle, own_heap: DeviceHeap, operation: str) -> MappedDeviceHeap:
    heap = heap_of_token(handle.token)
    if heap is None:
        raise RendezvousError(
            f"{operation}: {handle.named} is in this process, which has no such heap. "
            "Was the heap closed, or the runtime replaced?"
        )
    try:
        own_heap.runtime.enable_peer(own_heap.device, heap.device)
        heap.memory.grant(own_heap.device)
    except UnsupportedError as error:
        raise _unreachable(handle, own_heap, operation, str(error)) from error
    return MappedDeviceHeap(heap.base_ptr, 0, heap)


def _open(
    handle: DeviceHandle, own_heap: DeviceHeap, operation: str, reader: str
) -> MappedDeviceHeap:
    process, runtime, device = _mappings, own_heap.runtime, own_heap.device
    if not handle.ipc_handle and not handle.service:
        raise _unreachable(handle, own_heap, operation, handle.ipc_refusal)
    key = (device, handle.pid, handle.token)
    with process.lock:
        opened = process.opened.get(key)
        if opened is None:
            try:
                opened = _OpenedHeap(runtime, device, handle, reader)
            except UnsupportedError as error:
                raise _unreachable(handle, own_heap, operation, str(error)) from error
            except OSError as error:
                raise _no_chunks(handle, operation, reason_of(error)) from error
            if not process.closes_at_exit:
                # Not atexit: child processes of multiprocessing skip its functions.
                Finalize(None, close_mappings, exitpriority=UNMAP_PRIORITY)
                process.closes_at_exit = True
            found = int.from_bytes(runtime.read(device, opened.base_ptr, TOKEN_BYTES), "little")
            if found != handle.token:
                raise RendezvousError(
                    f"{operation}: the mapped memory is not the heap that {handle.named} "
                    f"announced: its token is {found:#x}, announced {handle.token:#x}. Has the "
                    "peer ended?"
                )
            process.opened[key] = opened
    if not opened.memory.await_bytes(handle.committed_bytes, MAPPING_WAIT_S):
        reason = opened.memory.refusal or "a chunk did not arrive, or was not mapped"
        raise _no_chunks(handle, operation, reason)
    return opened


def _no_chunks(handle: DeviceHandle, operation: str, said: str) -> RendezvousError:
    return RendezvousError(
        f"{operation}: the heap of {handle.named} could not be mapped: {said}. Has the peer "
        "ended? Do the ranks run in containers that do not share a network namespace? Share it, or "
        f"set {HEAP_KIND_VARIABLE}=fixed on all ranks"
    )


def _unreachable(
    handle: DeviceHandle, own_heap: DeviceHeap, operation: str, said: str
) -> UnsupportedError:
    identity = own_heap.runtime.identity(own_heap.device)
    return UnsupportedError(
        f"{operation}: device {own_heap.device} ({identity.name} at {identity.pci_bus_id}) of this "
        f"rank cannot reach the memory of {handle.named}: {said}. {USUAL_CAUSES}"
    )
