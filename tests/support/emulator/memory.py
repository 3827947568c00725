# SPDX-License-Identifier: Apache-2.0
"""Memory of emulated devices: its owners, its amount, and who maps it."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import torch

from ringcomm.errors import UnsupportedError
from tests.support.emulator.handles import EmulatedPage, PagePool
from tests.support.emulator.library import DriverError, check, library

HANDLE_BYTES = 64
_MOST_RANGES = 256


@dataclass(frozen=True)
class _Allocation:
    device: int
    size_bytes: int
    opened: bool


class EmulatedMemory:
    """The memory half of an ``EmulatedRuntime``.

    Calls that allocate, map or free memory wait for all the work of the device. CUDA's
    documentation says this of cudaFree; for device and pinned allocations it says that commands of
    two streams cannot run concurrently if such a call is made between them. Mappings
    (cudaIpcOpenMemHandle and its end, peer access) are assumed to wait, too, the worst that a
    driver may do. Virtual memory (cuMemCreate, cuMemMap, cuMemSetAccess) does not wait here: the
    documentation says nothing like this, and torch's expandable segments use it while kernels run.
    """

    def __init__(
        self, memory_bytes: int, unreachable: frozenset[tuple[int, int]], native: list[int]
    ) -> None:
        self._memory_bytes = memory_bytes
        self._native_devices = native
        for device in native:
            library().emu_vmm_set_room(device, memory_bytes)
        self._unreachable = unreachable
        self._lock = threading.Lock()
        self._allocations: dict[int, _Allocation] = {}
        self._pages = PagePool()
        self.peers: set[tuple[int, int]] = set()

    def current_device(self) -> int:
        raise NotImplementedError

    def settle(self, device: int) -> None:
        """Waits for all the work of the device."""
        raise NotImplementedError

    def pass_queue(self, device: int) -> None:
        """Waits until a small copy that is issued now would have run."""
        raise NotImplementedError

    def owner_of(self, ptr: int) -> int | None:
        """Returns the device whose memory or mapping contains ``ptr``."""
        with self._lock:
            for base, allocation in self._allocations.items():
                if base <= ptr < base + allocation.size_bytes:
                    return allocation.device
        native = library().emu_vmm_device_at(ptr)
        return self._native_devices.index(native) if native in self._native_devices else None

    def allocate(self, device: int, size_bytes: int) -> int:
        self.settle(device)
        free_bytes, _ = self.memory_info(device)
        ptr = library().emu_memory_allocate(size_bytes) if size_bytes <= free_bytes else None
        if not ptr:
            raise MemoryError("emulated driver: error 2: out of memory")
        with self._lock:
            self._allocations[ptr] = _Allocation(device, size_bytes, opened=False)
        self._leave_room(device)
        return int(ptr)

    def _leave_room(self, device: int) -> None:
        """Limits virtual memory to the bytes that allocations have left."""
        room_bytes = self._memory_bytes - self._allocated_bytes(device)
        library().emu_vmm_set_room(self._native_devices[device], room_bytes)

    def free(self, device: int, ptr: int) -> None:
        self.settle(device)
        self._forget(ptr, opened=False)
        check(library().emu_memory_free(ptr))
        self._leave_room(device)

    def _forget(self, ptr: int, *, opened: bool) -> None:
        with self._lock:
            if ptr not in self._allocations or self._allocations[ptr].opened != opened:
                raise DriverError(1, f"invalid argument: {ptr:#x} is not such memory")
            del self._allocations[ptr]

    def memory_info(self, device: int) -> tuple[int, int]:
        used = self._allocated_bytes(device)
        used += int(library().emu_vmm_used(self._native_devices[device]))
        return self._memory_bytes - used, self._memory_bytes

    def _allocated_bytes(self, device: int) -> int:
        with self._lock:
            return sum(
                allocation.size_bytes
                for allocation in self._allocations.values()
                if allocation.device == device and not allocation.opened
            )

    def allocated(self) -> list[int]:
        """Returns the addresses of device memory that this process has allocated but not freed.

        A virtual memory range is listed by its first address.
        """
        return self._memory_that_is(opened=False)

    def opened(self) -> list[int]:
        """Returns the addresses at which other processes' memory is mapped now."""
        return self._memory_that_is(opened=True)

    def _memory_that_is(self, *, opened: bool) -> list[int]:
        with self._lock:
            found = [ptr for ptr, each in self._allocations.items() if each.opened == opened]
        begins = (ctypes.c_uint64 * _MOST_RANGES)()
        for native in self._native_devices:
            count = library().emu_vmm_ranges(native, opened, begins, _MOST_RANGES)
            found += begins[:count]
        return found

    def tensor(self, device: int, ptr: int, size_bytes: int, owner: object) -> torch.Tensor:
        memory = (ctypes.c_uint8 * size_bytes).from_address(ptr)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read(self, device: int, ptr: int, size_bytes: int) -> bytes:
        self.pass_queue(device)
        return ctypes.string_at(ptr, size_bytes)

    def write(self, device: int, ptr: int, data: bytes) -> None:
        self.pass_queue(device)
        ctypes.memmove(ptr, data, len(data))

    def allocate_pinned(self, size_bytes: int) -> EmulatedPage:
        return self._pages.take(size_bytes, lambda: self.settle(self.current_device()))

    def export_handle(self, device: int, ptr: int) -> bytes:
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        check(library().emu_memory_export(ptr, handle))
        return handle.raw

    def open_handle(self, device: int, handle: bytes) -> int:
        ptr = ctypes.c_void_p()
        self.settle(device)
        try:
            check(library().emu_memory_open(handle, ctypes.byref(ptr)))
        except DriverError as error:
            raise UnsupportedError(str(error)) from error
        size_bytes = int.from_bytes(handle[24:32], "little")
        with self._lock:
            self._allocations[ptr.value or 0] = _Allocation(device, size_bytes, opened=True)
        return ptr.value or 0

    def close_handle(self, device: int, ptr: int) -> None:
        self.settle(device)
        self._forget(ptr, opened=True)
        check(library().emu_memory_close(ptr))

    def enable_peer(self, device: int, peer: int) -> None:
        if (device, peer) in self._unreachable:
            raise UnsupportedError(f"emulated driver: no peer access from {device} to {peer}")
        if (device, peer) not in self.peers:
            self.settle(device)
            self.peers.add((device, peer))
