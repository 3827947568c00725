"""Multicast objects of the CUDA driver and the windows that are bound to them.

A window is memory of one device at an address of its own. The windows of several devices are bound
to one multicast object. At the object's address, a load returns the sum of all windows and a store
writes to all windows: the NVSwitch does the work. CuPy has no functions for this, so libcuda's
entry points are called directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
    Location,
    MemoryProp,
)
from ringcomm.errors import UnsupportedError

# The driver's numbers, from cuda.h.
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

    Every device calls :meth:`create` or :meth:`join`, which adds it to the object. Then each device
    calls :meth:`bind`, in which the driver blocks until all devices have been added. Kernels may
    use the addresses when all have bound; call :meth:`close` when no device's kernels use them.

    Attributes:
        own_ptr: address of the window; 0 before :meth:`bind`.
        all_ptr: address for multimem instructions, which reach all windows.
        size_bytes: size of the window.
    """

    def __init__(self, runtime: DeviceRuntime, device: int, size_bytes: int) -> None:
        self.own_ptr = self.all_ptr = 0
        self.size_bytes = size_bytes
        self._runtime, self._device = runtime, device
        self._driver = _calls(runtime)
        self._object = c_uint64()
        self._number = c_int()  # the driver's number of the device
        self._undo = ExitStack()  # every step adds the function that undoes it

    @classmethod
    def create(
        cls, runtime: DeviceRuntime, device: int, size_bytes: int, devices: int
    ) -> MulticastWindow:
        """Makes the object for ``devices`` devices with windows of ``size_bytes`` bytes.

        Raises:
            UnsupportedError: the driver refuses.
        """
        window, prop = cls(runtime, device, size_bytes), _object_prop(devices, size_bytes)
        window._begin(lambda driver, made: driver.cuMulticastCreate(made, byref(prop)))
        return window

    @classmethod
    def join(
        cls, runtime: DeviceRuntime, device: int, size_bytes: int, descriptor: int
    ) -> MulticastWindow:
        """Adds this device to the object that another device has made and exported.

        Raises:
            UnsupportedError: the driver refuses.
        """
        window = cls(runtime, device, size_bytes)
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
            self.own_ptr = self._map(memory, location)
            self.all_ptr = self._map(self._object, location)

    def _map(self, handle: c_uint64, location: Location) -> int:
        driver, ptr, size = self._driver, c_uint64(), self.size_bytes
        driver.cuMemAddressReserve(byref(ptr), size, 0, 0, 0)
        self._undo.callback(driver.cuMemAddressFree, ptr, size)
        driver.cuMemMap(ptr, size, 0, handle, 0)
        self._undo.callback(driver.cuMemUnmap, ptr, size)
        driver.cuMemSetAccess(ptr, size, byref(AccessDesc(location, ACCESS_READ_WRITE)), 1)
        return ptr.value

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        with self._runtime.beside_captures(self._device):
            self._undo.close()
