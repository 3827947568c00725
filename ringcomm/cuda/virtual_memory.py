# SPDX-License-Identifier: Apache-2.0
"""Virtual memory of the CUDA driver: device memory that is mapped to reserved addresses.

CuPy has no functions for this, so libcuda's entry points are called directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p
from typing import Any, NamedTuple

from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.errors import UnsupportedError

# Values of the driver's enums, from cuda.h.
_ATTRIBUTE_VIRTUAL_MEMORY, _ATTRIBUTE_DESCRIPTORS = 102, 103
MEMORY_PINNED, LOCATION_DEVICE, ACCESS_READ_WRITE = 1, 1, 3
HANDLE_IS_DESCRIPTOR = 1
_GRANULARITY_RECOMMENDED = 1
_OUT_OF_MEMORY = 2


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemoryProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


ENTRY_POINTS: dict[str, list[Any]] = {
    "cuCtxGetDevice": [POINTER(c_int)],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(MemoryProp), c_int],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(MemoryProp), c_ulonglong],
    "cuMemRelease": [c_uint64],
    "cuMemExportToShareableHandle": [c_void_p, c_uint64, c_int, c_ulonglong],
    "cuMemImportFromShareableHandle": [POINTER(c_uint64), c_void_p, c_int],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_ulonglong],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(AccessDesc), c_size_t],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class DriverRefusal(UnsupportedError):
    """The driver refused a call; ``code`` is the error, or 0 if the driver has no such call."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class DriverCalls:
    """Entry points of the driver, as methods that raise DriverRefusal if the driver refuses.

    Args:
        library: name or path of the driver's library.
        entry_points: argument types by name of the entry point; must have cuGetErrorString.
        since: the first version of CUDA with all these entry points, for errors.
        causes: usual causes of refusals, for errors.
    """

    def __init__(
        self, library: str, entry_points: Mapping[str, list[Any]], since: str, causes: str = ""
    ) -> None:
        self._library = ctypes.CDLL(library)
        self._causes = causes
        for name, arguments in entry_points.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise DriverRefusal(f"the driver has no {name}: it is older than CUDA {since}")
            function.argtypes = arguments

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            result = function(*arguments)
            if result != 0:
                text = c_char_p()
                self._library.cuGetErrorString(result, byref(text))
                reason = (text.value or b"?").decode()
                raise DriverRefusal(
                    f"{name}: CUDA error {result}: {reason}{self._causes}", int(result)
                )

        return call


def _calls(runtime: DeviceRuntime) -> DriverCalls:
    return DriverCalls(runtime.driver_library, ENTRY_POINTS, "10.2")


def why_not(runtime: DeviceRuntime, device: int) -> str:
    """Returns why ``device`` cannot have memory in chunks that peers map; "" if it can."""
    number, found = c_int(), c_int()
    wanted = {
        _ATTRIBUTE_VIRTUAL_MEMORY: "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        _ATTRIBUTE_DESCRIPTORS: "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    }
    try:
        driver = _calls(runtime)
        with runtime.on_device(device):
            driver.cuCtxGetDevice(byref(number))
            for attribute, name in wanted.items():
                driver.cuDeviceGetAttribute(byref(found), attribute, number.value)
                if not found.value:
                    return f"its attribute CU_DEVICE_ATTRIBUTE_{name} is 0"
    except UnsupportedError as error:
        return str(error)
    return ""


class MappedChunk(NamedTuple):
    """A chunk of memory mapped in a range; ``handle`` is the driver's handle (0: released)."""

    offset_bytes: int
    size_bytes: int
    handle: int


class ChunkedRange:
    """Reserved addresses of one device, to which memory is mapped chunk by chunk from the start.

    Calls of methods must not overlap: the caller holds a lock during each call.

    Args:
        runtime: runtime of the device.
        device: ordinal of the device, whose kernels may use the mapped memory.
        size_bytes: size of the range; rounded up to the driver's granularity.

    Attributes:
        base_ptr: first address of the range.
        size_bytes: size of the range.
        granularity_bytes: the sizes of chunks are multiples of it.
        chunks: the mapped chunks, by address.

    Raises:
        UnsupportedError: the driver refuses.
    """

    def __init__(self, runtime: DeviceRuntime, device: int, size_bytes: int) -> None:
        self._runtime, self._device = runtime, device
        self._driver = _calls(runtime)
        self.chunks: list[MappedChunk] = []
        number, unit_bytes, ptr = c_int(), c_size_t(), c_uint64()
        with runtime.beside_captures(device):
            self._driver.cuCtxGetDevice(byref(number))
            self._locations = [Location(LOCATION_DEVICE, number.value)]
            self._driver.cuMemGetAllocationGranularity(
                byref(unit_bytes), byref(self._prop()), _GRANULARITY_RECOMMENDED
            )
            self.granularity_bytes = unit_bytes.value
            self.size_bytes = self.rounded(size_bytes)
            self._driver.cuMemAddressReserve(byref(ptr), self.size_bytes, 0, 0, 0)
        self.base_ptr = ptr.value

    def _prop(self) -> MemoryProp:
        return MemoryProp(MEMORY_PINNED, HANDLE_IS_DESCRIPTOR, self._locations[0])

    def rounded(self, size_bytes: int) -> int:
        """Rounds up to a multiple of the driver's granularity."""
        return -(-size_bytes // self.granularity_bytes) * self.granularity_bytes

    @property
    def mapped_bytes(self) -> int:
        """The number of mapped bytes, counted from the start of the range."""
        return self.chunks[-1].offset_bytes + self.chunks[-1].size_bytes if self.chunks else 0

    def create(self, size_bytes: int) -> None:
        """Allocates memory of the device and maps it after the last chunk.

        Raises:
            MemoryError: the device has too little free memory.
            UnsupportedError: the driver refuses.
        """
        made = c_uint64()
        with self._runtime.beside_captures(self._device), ExitStack() as undo:
            try:
                self._driver.cuMemCreate(byref(made), size_bytes, byref(self._prop()), 0)
            except DriverRefusal as error:
                if error.code == _OUT_OF_MEMORY:
                    raise MemoryError(str(error)) from error
                raise
            undo.callback(self._driver.cuMemRelease, made)
            self._map(made, size_bytes)
            undo.pop_all()
        self.chunks.append(MappedChunk(self.mapped_bytes, size_bytes, made.value))

    def adopt(self, descriptor: int, size_bytes: int) -> None:
        """Maps another process's memory after the last chunk.

        Raises:
            UnsupportedError: the driver refuses.
        """
        made = c_uint64()
        with self._runtime.beside_captures(self._device):
            self._driver.cuMemImportFromShareableHandle(
                byref(made), descriptor, HANDLE_IS_DESCRIPTOR
            )
            try:
                self._map(made, size_bytes)
            finally:  # the mapping keeps the memory alive
                self._driver.cuMemRelease(made)
        self.chunks.append(MappedChunk(self.mapped_bytes, size_bytes, 0))

    def _map(self, memory: c_uint64, size_bytes: int) -> None:
        ptr = self.base_ptr + self.mapped_bytes
        self._driver.cuMemMap(ptr, size_bytes, 0, memory, 0)
        try:
            self._set_access(ptr, size_bytes)
        except BaseException:
            self._driver.cuMemUnmap(ptr, size_bytes)
            raise

    def _set_access(self, ptr: int, size_bytes: int) -> None:
        access = [AccessDesc(location, ACCESS_READ_WRITE) for location in self._locations]
        array = (AccessDesc * len(access))(*access)
        self._driver.cuMemSetAccess(ptr, size_bytes, array, len(access))

    def grant(self, device: int) -> None:
        """Lets kernels of another device of this process use all present and later chunks.

        Raises:
            UnsupportedError: the driver refuses.
        """
        number = c_int()
        with self._runtime.beside_captures(device):
            self._driver.cuCtxGetDevice(byref(number))
        if any(location.id == number.value for location in self._locations):
            return
        self._locations.append(Location(LOCATION_DEVICE, number.value))
        try:
            with self._runtime.beside_captures(self._device):
                for chunk in self.chunks:
                    self._set_access(self.base_ptr + chunk.offset_bytes, chunk.size_bytes)
        except UnsupportedError:
            self._locations.pop()
            raise

    def export(self, chunk: MappedChunk) -> int:
        """Returns a new file descriptor of a chunk, which the caller closes."""
        descriptor = c_int(-1)
        with self._runtime.beside_captures(self._device):
            self._driver.cuMemExportToShareableHandle(
                byref(descriptor), chunk.handle, HANDLE_IS_DESCRIPTOR, 0
            )
        return descriptor.value

    def close(self) -> None:
        """Frees everything; no kernel may use the range any more."""
        with self._runtime.beside_captures(self._device):
            while self.chunks:
                chunk = self.chunks.pop()
                self._driver.cuMemUnmap(self.base_ptr + chunk.offset_bytes, chunk.size_bytes)
                if chunk.handle:
                    self._driver.cuMemRelease(chunk.handle)
            if self.base_ptr:
                self._driver.cuMemAddressFree(self.base_ptr, self.size_bytes)
                self.base_ptr = 0
