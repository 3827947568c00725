"""The CUDA runtime of this process: memory, IPC and modules by CuPy, streams with torch."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ringcomm.cuda import build
from ringcomm.cuda.driver import DRIVER_LIBRARY, CudaDriver
from ringcomm.cuda.runtime import DeviceIdentity
from ringcomm.cuda.streams import CudaStreams
from ringcomm.errors import UnsupportedError

# Whether this process has CUDA devices that both CuPy and torch can use, and if not, why.
#
# All of it raises UnsupportedError, in words, whatever CuPy, torch or the driver raise.

NO_DEVICE = 100  # cudaErrorNoDevice
SAID_CHARS = 300


def said(error: BaseException) -> str:
    """Returns a library's error message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SAID_CHARS]}"


def no_device(reason: str) -> UnsupportedError:
    """The error for an installation or a machine without usable devices."""
    return UnsupportedError(f"CUDA device: {reason}. Tensors on the CPU need none of this")


def import_cupy() -> Any:
    """CuPy, if it is there and whole."""
    try:
        import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise no_device(
                "CuPy is not installed: pip install 'ringcomm[cuda13]', or 'ringcomm[cuda12]' for "
                "a driver of CUDA 12"
            ) from error
        raise no_device(f"CuPy is installed but cannot be imported: {said(error)}") from error
    return cupy


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "is not set" if value is None else f"is {value!r}"


def count_devices(cuda: Any) -> int:
    """Returns how many devices the driver shows to CuPy; at least one."""
    try:
        has_driver = cuda.driverGetVersion() != 0
        count = int(cuda.getDeviceCount()) if has_driver else 0
    except Exception as error:
        if getattr(error, "status", None) != NO_DEVICE:
            raise no_device(
                f"the driver does not work with CuPy: {said(error)}. See whether nvidia-smi "
                "works, and whether the driver is new enough for the CUDA version of CuPy"
            ) from error
        count = 0
    if not has_driver:
        raise no_device(f"there is no NVIDIA driver ({DRIVER_LIBRARY}) on this machine")
    if count == 0:
        raise no_device(f"the driver shows no device; CUDA_VISIBLE_DEVICES {_visible()}")
    return count


def check_torch(count: int) -> None:
    """Starts CUDA in torch, which must see the same ``count`` devices."""
    if torch.version.cuda is None:
        raise no_device(
            f"this torch ({torch.__version__}) was built without CUDA: install a CUDA build of it"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        seen = torch.cuda.device_count()
    except Exception as error:
        raise no_device(f"the driver does not work with torch: {said(error)}") from error
    if seen != count:
        raise no_device(
            f"CuPy sees {count} devices and torch {seen}; CUDA_VISIBLE_DEVICES {_visible()}, and "
            "must not change while the process runs"
        )


# The devices of this process through CuPy (memory, IPC, modules) and torch (streams).
#
# For CuPy 13 and 14 with CUDA 12 and 13. Memory comes from plain cudaMalloc, not from torch's
# allocator, whose ``expandable_segments`` cannot be shared through IPC handles.

_OUT_OF_MEMORY = 2
_PEER_ACCESS_ALREADY_ENABLED = 704
_HOST_ALLOC_PORTABLE, _HOST_ALLOC_MAPPED = 1, 2
_COPY_TO_DEVICE, _COPY_TO_HOST = 1, 2
_MAX_THREADS_PER_BLOCK = 0
_LAZY_ENABLE_PEER_ACCESS = 1
# What the driver says of machine code that another driver or another GPU would take: an image that
# is invalid, has nothing for this GPU or PTX that does not compile (of a newer version, too), and
# one of a kind that is not known yet.
_REFUSED_IMAGE = (200, 209, 218, 221, 222, 223, 300)


class _Memory:
    """Device memory as torch takes it without a copy; the tensor keeps this object."""

    def __init__(self, ptr: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
        }


# Pages that are pinned at a time: a driver may wait for the whole device before it pins or frees
# host memory, and a communicator must be built and closed while a message of another one waits.
_PINNED_PAGES = 256


class CudaPage:
    """Page-locked host memory, mapped into every device; free, it returns to its pool.

    So its end calls no driver, which may come from a garbage collection while a kernel waits for
    this very thread.
    """

    def __init__(
        self, ptrs: tuple[int, int], size_bytes: int, pool: deque[tuple[int, int]]
    ) -> None:
        self.host_ptr, self.device_ptr = ptrs
        self.size_bytes = size_bytes
        self._pool = pool
        ctypes.memset(self.host_ptr, 0, size_bytes)

    def free(self) -> None:
        ptrs = self.host_ptr, self.device_ptr
        self.host_ptr = self.device_ptr = 0
        if ptrs[0]:
            self._pool.append(ptrs)


@dataclass(frozen=True)
class CudaKernel:
    """A loaded kernel. Its module is never unloaded."""

    handle: int
    threads: int
    blocks_per_multiprocessor: int


class CudaRuntime(CudaStreams):
    """Implements ``runtime.DeviceRuntime``; ``cuda`` and ``modules`` are CuPy's."""

    kind = "cuda"
    driver_library = DRIVER_LIBRARY

    def __init__(self, cuda: Any, modules: Any, driver: CudaDriver) -> None:
        super().__init__(cuda, driver)
        self._modules = modules
        self._loading: dict[int, threading.Lock] = defaultdict(threading.Lock)  # by device
        self._kernels: dict[tuple[int, str, str], CudaKernel] = {}
        self._loaded: dict[tuple[int, str], int] = {}
        self._exported: dict[int, bytes] = {}
        self._idle_pages: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self.identity = cache(self._identity)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cuda", device)

    def _identity(self, device: int) -> DeviceIdentity:
        # The uuid from torch: CuPy's is cut at the first zero byte.
        properties = torch.cuda.get_device_properties(device)
        return DeviceIdentity(
            index=device,
            uuid=f"GPU-{properties.uuid}",
            pci_bus_id=self._cuda.deviceGetPCIBusId(device).lower(),
            name=properties.name,
            capability=(properties.major, properties.minor),
            multiprocessors=properties.multi_processor_count,
        )

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.device.type == "cuda" else None

    def is_device_tensor(self, tensor: torch.Tensor, device: int) -> bool:
        return tensor.is_cuda and tensor.get_device() == device

    # ---- memory -----------------------------------------------------------------------------

    def allocate(self, device: int, size_bytes: int) -> int:
        with self._beside_captures(device):
            try:
                ptr = int(self._cuda.malloc(size_bytes))
            except RuntimeError as error:
                if getattr(error, "status", None) == _OUT_OF_MEMORY:
                    raise MemoryError(str(error)) from error
                raise
            stream = self._service_stream(device)
            self._cuda.memsetAsync(ptr, 0, size_bytes, stream)
            self._cuda.streamSynchronize(stream)
            return ptr

    def free(self, device: int, ptr: int) -> None:
        with self._beside_captures(device):
            self._cuda.free(ptr)
        self._exported.pop(ptr, None)

    def memory_info(self, device: int) -> tuple[int, int]:
        with self._beside_captures(device):
            free_bytes, total_bytes = self._cuda.memGetInfo()
            return int(free_bytes), int(total_bytes)

    def tensor(self, device: int, ptr: int, size_bytes: int, owner: object) -> torch.Tensor:
        memory = _Memory(ptr, size_bytes, owner)
        return torch.as_tensor(memory, device=self.torch_device(device))

    def _copy(self, device: int, to: int, source: int, size_bytes: int, kind: int) -> None:
        with self._beside_captures(device):
            stream = self._service_stream(device)
            self._cuda.memcpyAsync(to, source, size_bytes, kind, stream)
            self._cuda.streamSynchronize(stream)

    def read(self, device: int, ptr: int, size_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(size_bytes)
        self._copy(device, ctypes.addressof(buffer), ptr, size_bytes, _COPY_TO_HOST)
        return buffer.raw

    def write(self, device: int, ptr: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._copy(device, ptr, ctypes.addressof(buffer), len(data), _COPY_TO_DEVICE)

    def allocate_pinned(self, size_bytes: int) -> CudaPage:
        pool = self._idle_pages[size_bytes]
        try:
            ptrs = pool.popleft()
        except IndexError:
            ptrs, *others = self._pin_pages(size_bytes)
            pool.extend(others)
        return CudaPage(ptrs, size_bytes, pool)

    def _pin_pages(self, size_bytes: int) -> list[tuple[int, int]]:
        """Returns the addresses of new pages, for the host and for kernels."""
        with self._beside_captures(self.current_device()):
            try:
                flags = _HOST_ALLOC_PORTABLE | _HOST_ALLOC_MAPPED
                host_ptr = int(self._cuda.hostAlloc(_PINNED_PAGES * size_bytes, flags))
            except RuntimeError as error:
                if getattr(error, "status", None) == _OUT_OF_MEMORY:
                    raise MemoryError(str(error)) from error
                raise
            device_ptr = int(self._cuda.pointerGetAttributes(host_ptr).devicePointer)
        offsets = range(0, _PINNED_PAGES * size_bytes, size_bytes)
        return [(host_ptr + offset, device_ptr + offset) for offset in offsets]

    # ---- other processes and devices --------------------------------------------------------

    def export_handle(self, device: int, ptr: int) -> bytes:
        with self._beside_captures(device):
            try:
                handle = bytes(self._cuda.ipcGetMemHandle(ptr))
            except RuntimeError as error:
                raise UnsupportedError(
                    f"the driver shares no memory of device {device} with other processes: "
                    f"{said(error)}"
                ) from error
        self._exported[ptr] = handle
        return handle

    def open_handle(self, device: int, handle: bytes) -> int:
        # cudaIpcOpenMemHandle fails on this in a way that points elsewhere.
        if handle in self._exported.values():
            raise UnsupportedError("an IPC handle cannot be opened in the process that made it")
        with self._beside_captures(device):
            try:
                # The memory may be another device's: peer access is enabled on the way.
                return int(self._cuda.ipcOpenMemHandle(handle, _LAZY_ENABLE_PEER_ACCESS))
            except RuntimeError as error:
                raise UnsupportedError(
                    f"the driver does not map the memory into device {device}: {said(error)}"
                ) from error

    def close_handle(self, device: int, ptr: int) -> None:
        with self._beside_captures(device):
            self._cuda.ipcCloseMemHandle(ptr)

    def enable_peer(self, device: int, peer: int) -> None:
        with self._beside_captures(device):
            if not self._cuda.deviceCanAccessPeer(device, peer):
                raise UnsupportedError(f"device {device} has no peer access to device {peer}")
            try:
                self._cuda.deviceEnablePeerAccess(peer)
            except RuntimeError as error:
                if getattr(error, "status", None) != _PEER_ACCESS_ALREADY_ENABLED:
                    raise UnsupportedError(
                        f"device {device} gets no peer access to device {peer}: {said(error)}"
                    ) from error

    # ---- kernels ----------------------------------------------------------------------------

    def find_kernel(self, device: int, unit: str, name: str) -> CudaKernel:
        # A thread that loads one holds the device's lock, perhaps until the device is idle. Other
        # threads must be able to launch what is loaded, and to load on their own devices.
        loaded = self._kernels.get((device, unit, name))
        if loaded is not None:
            return loaded
        with self._loading[device]:
            kernel = self._kernels.get((device, unit, name))
            if kernel is None:
                kernel = self._kernels[device, unit, name] = self._load(device, unit, name)
            return kernel

    def _load_module(self, device: int, unit: str) -> int:
        """The unit's module; compiled here where the driver refuses what came with the package."""
        capability = self.identity(device).capability
        image = build.load_unit(unit, capability)
        try:
            return int(self._modules.moduleLoadData(image))
        except self._modules.CUDADriverError as error:
            maker = build.prebuilt_by(unit, capability)
            if maker is None or getattr(error, "status", None) not in _REFUSED_IMAGE:
                raise
            warnings.warn(
                f"the driver refuses the kernels that {maker} compiled with the package "
                f"({said(error)}): they are compiled by NVRTC at their first use instead. Update "
                "the driver, or install ringcomm with a CUDA toolkit that the driver knows",
                RuntimeWarning,
                stacklevel=2,
            )
        image = build.load_unit(unit, capability, prebuilt=False)
        return int(self._modules.moduleLoadData(image))

    def _load(self, device: int, unit: str, name: str) -> CudaKernel:
        module = self._loaded.get((device, unit))
        with self._beside_captures(device):
            try:
                if module is None:
                    module = self._loaded[device, unit] = self._load_module(device, unit)
                function = int(self._modules.moduleGetFunction(module, name))
                self._driver.load_function(function)
                threads = int(self._modules.funcGetAttribute(_MAX_THREADS_PER_BLOCK, function))
                occupancy = self._modules.occupancyMaxActiveBlocksPerMultiprocessor
                return CudaKernel(function, threads, int(occupancy(function, threads, 0)))
            except self._modules.CUDADriverError as error:
                raise UnsupportedError(
                    f"kernel {name} of unit {unit} cannot be loaded on device {device}: "
                    f"{said(error)}"
                ) from error


def make_cuda_runtime() -> CudaRuntime:
    """The CUDA runtime of this process; see ``ringcomm.cuda.current`` for what it raises."""
    cupy = import_cupy()
    try:
        cuda, driver = cupy.cuda.runtime, cupy.cuda.driver
    except Exception as error:
        raise no_device(f"CuPy does not work here: {said(error)}") from error
    check_torch(count_devices(cuda))
    try:
        return CudaRuntime(cuda, driver, CudaDriver())
    except (OSError, AttributeError) as error:
        raise no_device(f"{DRIVER_LIBRARY} cannot be used: {said(error)}") from error
