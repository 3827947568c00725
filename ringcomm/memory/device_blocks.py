"""One device heap: a plain device allocation, cut into blocks.

Memory is used by work that the host has only queued, so a block that dies is not free yet: an event
goes into every stream that may use it, and the block is handed out again once all events have
passed. The streams are those that were current where it was allocated and where it died, and those
named with ``keep_for_stream``. This is the rule of torch's allocator, with the same duty for the
caller: a tensor that is used on further streams must be named to them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from ringcomm import _native
from ringcomm.errors import HeapError, UnsupportedError
from ringcomm.memory.device_runtime import DeviceRuntime, Event, Stream

HEAP_BYTES_VARIABLE = "RINGCOMM_CUDA_HEAP_BYTES"
BLOCK_ALIGN = 256
TOKEN_BYTES = 8


class DeviceBlock:
    """A part of a device heap; its space is used again after this object died and work ended."""

    __slots__ = ("__weakref__", "_streams", "heap", "offset_bytes", "size_bytes")

    def __init__(self, heap: DeviceHeap, offset_bytes: int, size_bytes: int) -> None:
        self.heap = heap
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self._streams: dict[int, Stream | None] = {heap.current_stream(): None}

    @property
    def ptr(self) -> int:
        """Its address on the device."""
        return self.heap.base_ptr + self.offset_bytes

    def keep_for_stream(self, stream: Stream) -> None:
        """Keeps the space until the work that ``stream`` has when this object dies is done."""
        self._streams[stream.handle] = stream

    def tensor(self) -> torch.Tensor:
        """Its bytes as a tensor (uint8), which keeps this object alive."""
        return self.heap.runtime.tensor(self.heap.device, self.ptr, self.size_bytes, self)

    def __del__(self) -> None:
        self.heap.give_back(self.offset_bytes, self._streams)


@dataclass
class _Leaving:
    """A dead block and what its space waits for; ``events`` is None until they are recorded."""

    offset_bytes: int
    streams: dict[int, Stream | None]
    events: list[Event] | None


class DeviceHeap:
    """The memory of this process on one device. ``token`` tells it from all other heaps."""

    def __init__(self, runtime: DeviceRuntime, device: int, capacity_bytes: int) -> None:
        self.runtime = runtime
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.token = secrets.randbits(64)
        self.pid = os.getpid()
        self.base_ptr = runtime.allocate(device, capacity_bytes)
        self._closed = False
        self._lock = threading.Lock()
        self._allocator = _native.Allocator(capacity_bytes)
        self._live: WeakValueDictionary[int, DeviceBlock] = WeakValueDictionary()
        # Blocks die wherever the garbage collector runs, even inside allocate() of the same
        # thread: a deque takes them without the lock.
        self._dead: deque[_Leaving] = deque()
        self._leaving: list[_Leaving] = []
        # Offset 0, for good: a peer that maps this memory looks whether it is the right one.
        self._allocator.allocate(TOKEN_BYTES, BLOCK_ALIGN)
        runtime.write(device, self.base_ptr, self.token.to_bytes(TOKEN_BYTES, "little"))

    def current_stream(self) -> int:
        return self.runtime.current_stream(self.device)

    def contains(self, ptr: int, size_bytes: int) -> bool:
        """Whether the ``size_bytes`` bytes at ``ptr`` lie in this heap."""
        return 0 <= ptr - self.base_ptr <= self.capacity_bytes - size_bytes

    def allocate(self, size_bytes: int, operation: str) -> DeviceBlock:
        """A block at a multiple of 256 bytes, for use in the order of the current stream.

        When only space is left whose last work is under way, waits for that work.

        Raises:
            HeapError: there is no room; names ``operation``, need, free space and remedy.
            UnsupportedError: the current stream records a graph, which would go on using the
                block at every replay, after its object died.
        """
        if self.runtime.is_capturing(self.device):
            raise UnsupportedError(
                f"{operation}: the current stream records a graph, and memory of the device heap "
                "cannot be handed out there. Allocate before the capture, and keep the tensor as "
                "long as the graph"
            )
        while True:
            with self._lock:
                self._reclaim()
                offset = self._allocator.allocate(size_bytes, BLOCK_ALIGN)
                if offset is not None:
                    block = self._live[offset] = DeviceBlock(self, offset, size_bytes)
                    return block
                waits = self._leaving[0].events if self._leaving else None
            if not waits:
                raise self._no_room(size_bytes, operation)
            # Without the lock: another rank's thread may have to allocate before it can make the
            # call that this work waits for.
            for event in waits:
                event.synchronize()

    def give_back(self, offset_bytes: int, streams: dict[int, Stream | None]) -> None:
        """Takes the space of a dead block; in a forked child it is the parent's, and stays so."""
        if self._closed or self.pid != os.getpid():
            return
        leaving = _Leaving(offset_bytes, {**streams, self.current_stream(): None}, None)
        self._record(leaving)
        self._dead.append(leaving)

    def _record(self, leaving: _Leaving) -> None:
        runtime, device = self.runtime, self.device
        # An event of a capture never passes; it is recorded behind the capture instead.
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

    def _no_room(self, size_bytes: int, operation: str) -> HeapError:
        stats = self.stats()
        return HeapError(
            f"{operation}: needs {size_bytes} bytes, free {stats['free_bytes']} bytes (largest "
            f"block {stats['largest_free_bytes']}) of the {self.capacity_bytes} bytes of the heap "
            f"on device {self.device}. Free tensors of the heap, or raise {HEAP_BYTES_VARIABLE} "
            "(or heap_bytes=) before the heap's first use"
        )

    def stats(self) -> dict[str, int]:
        """As ``ringcomm.heap_stats``; space that waits for work to end counts as used."""
        with self._lock:
            self._reclaim()
            used_bytes = self._allocator.used_bytes
            largest_free_bytes = self._allocator.largest_free_bytes
        return {
            "capacity_bytes": self.capacity_bytes,
            "committed_bytes": self.capacity_bytes,
            "used_bytes": used_bytes,
            "free_bytes": self.capacity_bytes - used_bytes,
            "largest_free_bytes": largest_free_bytes,
        }

    def find_block(self, ptr: int) -> DeviceBlock | None:
        """The live block that begins at ``ptr``."""
        return self._live.get(ptr - self.base_ptr)

    def close(self) -> None:
        """Gives the memory back; blocks that still live must not be used any more."""
        if not self._closed:
            self._closed = True
            self.runtime.free(self.device, self.base_ptr)
