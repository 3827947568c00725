# SPDX-License-Identifier: Apache-2.0
"""Multicast objects of the CUDA driver, and the memory that is bound to them.

A window is memory of one device, at an ordinary address. The windows of several devices are bound
to one multicast object. At the object's address, a load returns the sum of all windows and a store
writes to all windows: the NVSwitch does the work. The chunks of the devices' heaps can be bound to
the same object. CuPy has no functions for this, so libcuda's entry points are called directly.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong
from typing import Any

from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.cuda.virtual_memory import (
    ACCESS_READ_WRITE,
    ENTRY_POINTS,
    HANDLE_IS_DESCRIPTOR,
    LOCATION_DEVICE,
    MEMORY_PINNED,
    AccessDesc,
    DriverCalls,
    DriverRefusal,
    Location,
    MappedChunk,
    MemoryProp,
)
from ringcomm.errors import UnsupportedError

# Values of the driver's enums, from cuda.h.
_ATTRIBUTE_MULTICAST_SUPPORTED = 132
_GRANULARITY_MINIMUM = 0

LEAST_CAPABILITY = (9, 0)
_CAUSES = (
    ". Usual causes: nvidia-fabricmanager does not run, or has no multicast groups left; the GPUs "
    "are under different NVSwitches; MIG; a container without the driver's IPC devices"
)


class _ObjectProp(ctypes.Structure):
    """CUmulticastObjectProp."""

    _fields_ = (
        ("devices", c_uint),
        ("size_bytes", c_size_t),
        ("handle_types", c_ulonglong),
        ("flags", c_ulonglong),
    )


_ENTRY_POINTS: dict[str, list[Any]] = {
    **ENTRY_POINTS,
    "cuMulticastGetGranularity": [POINTER(c_size_t), POINTER(_ObjectProp), c_int],
    "cuMulticastCreate": [POINTER(c_uint64), POINTER(_ObjectProp)],
    "cuMulticastAddDevice": [c_uint64, c_int],
    "cuMulticastBindMem": [c_uint64, c_size_t, c_uint64, c_size_t, c_size_t, c_ulonglong],
    "cuMulticastUnbind": [c_uint64, c_int, c_size_t, c_size_t],
}


def _calls(runtime: DeviceRuntime) -> DriverCalls:
    return DriverCalls(runtime.driver_library, _ENTRY_POINTS, "12.1", _CAUSES)


def _object_prop(devices: int, size_bytes: int) -> _ObjectProp:
    return _ObjectProp(devices, size_bytes, HANDLE_IS_DESCRIPTOR, 0)


def why_not(runtime: DeviceRuntime, device: int) -> str:
    """Returns why ``device`` cannot use multicast; "" if it can."""
    major, minor = runtime.identity(device).capability
    if (major, minor) < LEAST_CAPABILITY:
        return f"its compute capability is {major}.{minor}, and multimem instructions need 9.0"
    supported, number = c_int(), c_int()
    try:
        driver = _calls(runtime)
        with runtime.on_device(device):
            driver.cuCtxGetDevice(byref(number))
            driver.cuDeviceGetAttribute(
                byref(supported), _ATTRIBUTE_MULTICAST_SUPPORTED, number.value
            )
    except UnsupportedError as error:
        return str(error)
    if not supported.value:
        return (
            "it is under no NVSwitch that has multicast (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)"
        )
    return ""


def granularity_bytes(runtime: DeviceRuntime, device: int, devices: int) -> int:
    """Returns the granularity in bytes of a multicast object's windows, for ``devices`` devices."""
    found = c_size_t()
    with runtime.beside_captures(device):
        driver = _calls(runtime)
        prop = _object_prop(devices, 1)
        driver.cuMulticastGetGranularity(byref(found), byref(prop), _GRANULARITY_MINIMUM)
    return found.value


class MulticastWindow:
    """A device's part of a multicast object and, after :meth:`bind`, the device's window.

    :meth:`create` or :meth:`join` adds a device to the object. Then each device calls :meth:`bind`,
    in which the driver blocks until all devices have been added. Kernels may use the addresses when
    all devices have bound; call :meth:`close` when no device's kernels use them any more.

    The object also has addresses for the devices' heaps, after the windows. A device binds the
    chunks of its heap by :meth:`bind_heap`, at any time after :meth:`bind`. Kernels may use the
    part of the heaps that all devices have bound.

    Attributes:
        own_ptr: address of the window; 0 before :meth:`bind`.
        all_ptr: address for multimem instructions, which reach all windows.
        heaps_ptr: address for multimem instructions at offset 0 of all heaps; 0: heaps are not
            bound.
        size_bytes: size of the window.
        heap_bytes: the most bytes of a heap that can be bound; 0: heaps are not bound.
        bound_heap_bytes: bytes of this device's heap, from its start, that are bound.
        heap_refusal: the reason why no more of this device's heap can be bound; "" if it can.
    """

    def __init__(
        self, runtime: DeviceRuntime, device: int, size_bytes: int, heap_bytes: int = 0
    ) -> None:
        self.own_ptr = self.all_ptr = self.heaps_ptr = self.bound_heap_bytes = 0
        self.size_bytes, self.heap_bytes = size_bytes, heap_bytes
        self.heap_refusal = ""
        self._closed, self._binding = False, threading.Lock()
        self._runtime, self._device = runtime, device
        self._driver = _calls(runtime)
        self._object = c_uint64()
        self._number = c_int()  # The driver's number of the device.
        self._undo = ExitStack()  # Each step adds the function that undoes it.

    @classmethod
    def create(
        cls,
        runtime: DeviceRuntime,
        device: int,
        size_bytes: int,
        devices: int,
        heap_bytes: int = 0,
    ) -> MulticastWindow:
        """Makes the object for ``devices`` devices with windows of ``size_bytes`` bytes.

        If the driver refuses an object with heaps, makes an object of windows alone: the result's
        ``heap_bytes`` is 0 then, and ``heap_refusal`` the reason.

        Raises:
            UnsupportedError: the driver refuses.
        """
        window = cls(runtime, device, size_bytes, heap_bytes)
        prop = _object_prop(devices, size_bytes + heap_bytes)
        try:
            window._begin(lambda driver, made: driver.cuMulticastCreate(made, byref(prop)))
        except DriverRefusal as error:
            if heap_bytes == 0:
                raise
            window = cls.create(runtime, device, size_bytes, devices)
            window.heap_refusal = str(error)
        return window

    @classmethod
    def join(
        cls,
        runtime: DeviceRuntime,
        device: int,
        size_bytes: int,
        descriptor: int,
        heap_bytes: int = 0,
    ) -> MulticastWindow:
        """Adds this device to the object that another device has made and exported.

        Raises:
            UnsupportedError: the driver refuses.
        """
        window = cls(runtime, device, size_bytes, heap_bytes)
        window._begin(
            lambda driver, made: driver.cuMemImportFromShareableHandle(
                made, descriptor, HANDLE_IS_DESCRIPTOR
            )
        )
        return window

    def _begin(self, make: Callable[[DriverCalls, Any], None]) -> None:
        driver = self._driver
        with self._or_close(), self._runtime.beside_captures(self._device):
            make(driver, byref(self._object))
            self._undo.callback(driver.cuMemRelease, self._object)
            driver.cuCtxGetDevice(byref(self._number))
            driver.cuMulticastAddDevice(self._object, self._number)

    def _or_close(self) -> ExitStack:
        """Returns a context that closes the window on an error."""
        stack = ExitStack()
        stack.push(lambda kind, error, trace: self.close() if error is not None else None)
        return stack

    def export(self) -> int:
        """Returns a new file descriptor of the object, for :meth:`join`; the caller closes it."""
        descriptor = c_int(-1)
        with self._runtime.beside_captures(self._device):
            self._driver.cuMemExportToShareableHandle(
                byref(descriptor), self._object, HANDLE_IS_DESCRIPTOR, 0
            )
        return descriptor.value

    def bind(self) -> None:
        """Allocates the window, binds it, and maps it and the object.

        If the driver does not map the heaps' part of the object, maps only the windows' part, and
        sets ``heap_refusal``: this device then binds no chunk of its heap.

        Raises:
            UnsupportedError: the driver refuses, perhaps because the device has no memory left.
        """
        driver, memory, size = self._driver, c_uint64(), self.size_bytes
        location = Location(LOCATION_DEVICE, self._number.value)
        prop = MemoryProp(MEMORY_PINNED, HANDLE_IS_DESCRIPTOR, location)
        with self._or_close(), self._runtime.beside_captures(self._device):
            driver.cuMemCreate(byref(memory), size, byref(prop), 0)
            self._undo.callback(driver.cuMemRelease, memory)
            driver.cuMulticastBindMem(self._object, 0, memory, 0, size, 0)
            self._undo.callback(driver.cuMulticastUnbind, self._object, self._number, 0, size)
            self.own_ptr = self._map(memory, location, size)
            try:
                self.all_ptr = self._map(self._object, location, size + self.heap_bytes)
            except DriverRefusal as error:
                if self.heap_bytes == 0:
                    raise
                self.heap_bytes, self.heap_refusal = 0, str(error)
                self.all_ptr = self._map(self._object, location, size)
        self.heaps_ptr = self.all_ptr + size if self.heap_bytes else 0

    def bind_heap(self, chunks: Sequence[MappedChunk]) -> None:
        """Binds the chunks of this device's heap that are not bound yet.

        If the driver refuses a chunk, sets ``heap_refusal`` and binds no more chunks. The driver
        counts a bound chunk as used until :meth:`close`.

        Args:
            chunks: all chunks of the heap, by offset.
        """
        driver = self._driver
        with self._binding, self._runtime.beside_captures(self._device):
            for chunk in chunks:
                begin, size = chunk.offset_bytes, chunk.size_bytes
                if begin < self.bound_heap_bytes:
                    continue
                if self._closed or self.heap_refusal:
                    return
                if begin + size > self.heap_bytes:
                    self.heap_refusal = f"the object has {self.heap_bytes} bytes for each heap"
                    return
                at = self.size_bytes + begin
                try:
                    driver.cuMulticastBindMem(self._object, at, chunk.handle, 0, size, 0)
                except DriverRefusal as error:
                    self.heap_refusal = str(error)
                    return
                self._undo.callback(driver.cuMulticastUnbind, self._object, self._number, at, size)
                self.bound_heap_bytes = begin + size

    def _map(self, handle: c_uint64, location: Location, size: int) -> int:
        driver, ptr = self._driver, c_uint64()
        driver.cuMemAddressReserve(byref(ptr), size, 0, 0, 0)
        self._undo.callback(driver.cuMemAddressFree, ptr, size)
        driver.cuMemMap(ptr, size, 0, handle, 0)
        self._undo.callback(driver.cuMemUnmap, ptr, size)
        driver.cuMemSetAccess(ptr, size, byref(AccessDesc(location, ACCESS_READ_WRITE)), 1)
        return ptr.value

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        with self._binding, self._runtime.beside_captures(self._device):
            self._closed = True
            self._undo.close()
