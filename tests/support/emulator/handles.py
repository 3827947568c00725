# SPDX-License-Identifier: Apache-2.0
"""Objects of the emulated driver: streams, events, graphs, kernels, pinned pages."""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.emulator.library import check, library


class StreamPool:
    """Streams of one device, never destroyed: a handle stays valid after its object has died."""

    def __init__(self, native_device: int) -> None:
        self._native_device = native_device
        self._idle: dict[tuple[bool, int], deque[int]] = defaultdict(deque)
        self.made: Counter[int] = Counter()  # by priority

    def take(self, kind: tuple[bool, int]) -> int:
        try:
            return self._idle[kind].popleft()
        except IndexError:
            blocking, priority = kind
            self.made[priority] += 1
            return int(library().emu_stream_make(self._native_device, int(blocking), priority))

    def give_back(self, kind: tuple[bool, int], handle: int) -> None:
        self._idle[kind].append(handle)


class EmulatedStream:
    """A stream; ``kind`` says whether it takes part in the legacy stream's order; a priority."""

    def __init__(self, device: int, pool: StreamPool, kind: tuple[bool, int]) -> None:
        self.device = device
        self.handle = pool.take(kind)
        self._pool, self._kind = pool, kind

    def __del__(self) -> None:
        self._pool.give_back(self._kind, self.handle)


class EmulatedEvent:
    """A point in a stream, or a node of a graph being captured."""

    def __init__(self) -> None:
        self.handle: int = library().emu_event_make()

    def __del__(self) -> None:
        library().emu_event_destroy(self.handle)

    def query(self) -> bool:
        done = ctypes.c_int()
        check(library().emu_event_query(self.handle, ctypes.byref(done)))
        return bool(done.value)

    def synchronize(self) -> None:
        check(library().emu_event_synchronize(self.handle))


class EmulatedGraph:
    """A captured graph; ``handle`` is 0 until the capture has ended."""

    def __init__(self) -> None:
        self.handle = 0

    def __del__(self) -> None:
        if self.handle:
            library().emu_graph_destroy(self.handle)


@dataclass(frozen=True)
class EmulatedFunction:
    """A kernel of the emulator's library."""

    handle: int
    threads: int
    blocks_per_multiprocessor: int


class PagePool:
    """Pinned pages; as in CudaRuntime, the driver allocates slabs and never frees them."""

    PAGES = 256

    def __init__(self) -> None:
        self._idle: dict[int, deque[int]] = defaultdict(deque)

    def take(self, size_bytes: int, settle: Callable[[], None]) -> EmulatedPage:
        """Returns a page; ``settle`` waits for devices, as the driver may before it pins memory."""
        idle = self._idle[size_bytes]
        try:
            ptr = idle.popleft()
        except IndexError:
            settle()
            ptr = int(library().emu_memory_allocate(self.PAGES * size_bytes))
            idle.extend(ptr + page * size_bytes for page in range(1, self.PAGES))
        ctypes.memset(ptr, 0, size_bytes)
        return EmulatedPage(ptr, size_bytes, idle)


class EmulatedPage:
    """A page of host memory, which emulated devices use directly."""

    def __init__(self, ptr: int, size_bytes: int, pool: deque[int]) -> None:
        self.host_ptr = self.device_ptr = ptr
        self.size_bytes = size_bytes
        self._pool = pool

    def free(self) -> None:
        if self.host_ptr:
            self._pool.append(self.host_ptr)
        self.host_ptr = self.device_ptr = 0
