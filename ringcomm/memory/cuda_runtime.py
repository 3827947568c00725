"""The devices of this process through CuPy (memory, IPC, modules) and torch (streams).

For CuPy 13 and 14 with CUDA 12 and 13. Memory comes from plain cudaMalloc, not from torch's
allocator, whose ``expandable_segments`` cannot be shared through IPC handles.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ringcomm.errors import UnsupportedError
from ringcomm.memory import kernel_build
from ringcomm.memory.cuda_detection import (
    check_torch,
    count_devices,
    import_cupy,
    no_device,
    said,
)
from ringcomm.memory.cuda_driver import DRIVER_LIBRARY, CudaDriver
from ringcomm.memory.cuda_streams import CudaStreams
from ringcomm.memory.device_runtime import DeviceIdentity

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


class CudaPage:
    """Page-locked host memory that is mapped into every device.

    Args:
        cuda: CuPy's runtime.
        size_bytes: of the page.
        beside_captures: inside what it returns, a call breaks no capture. A communicator that
            nobody closed gives its page back from a garbage collection, at any time.
    """

    def __init__(
        self,
        cuda: Any,
        size_bytes: int,
        beside_captures: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cuda = cuda
        self._beside_captures = beside_captures
        self.size_bytes = size_bytes
        self.host_ptr = int(cuda.hostAlloc(size_bytes, _HOST_ALLOC_PORTABLE | _HOST_ALLOC_MAPPED))
        self.device_ptr = int(cuda.pointerGetAttributes(self.host_ptr).devicePointer)
        ctypes.memset(self.host_ptr, 0, size_bytes)

    def free(self) -> None:
        ptr, self.host_ptr, self.device_ptr = self.host_ptr, 0, 0
        if ptr:
            with self._beside_captures():
                self._cuda.freeHost(ptr)


@dataclass(frozen=True)
class CudaKernel:
    """A loaded kernel. Its module is never unloaded."""

    handle: int
    threads: int
    blocks_per_multiprocessor: int


class CudaRuntime(CudaStreams):
    """Implements ``device_runtime.DeviceRuntime``; ``cuda`` and ``modules`` are CuPy's."""

    kind = "cuda"
    driver_library = DRIVER_LIBRARY

    def __init__(self, cuda: Any, modules: Any, driver: CudaDriver) -> None:
        super().__init__(cuda, driver)
        self._modules = modules
        self._kernels_lock = threading.Lock()
        self._kernels: dict[tuple[int, str, str], CudaKernel] = {}
        self._loaded: dict[tuple[int, str], int] = {}
        self._exported: dict[int, bytes] = {}
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
        return self.device_of(tensor) == device

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
        beside_captures = partial(self._beside_captures, self.current_device())
        with beside_captures():
            try:
                return CudaPage(self._cuda, size_bytes, beside_captures)
            except RuntimeError as error:
                if getattr(error, "status", None) == _OUT_OF_MEMORY:
                    raise MemoryError(str(error)) from error
                raise

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
        with self._kernels_lock:
            kernel = self._kernels.get((device, unit, name))
            if kernel is None:
                kernel = self._kernels[device, unit, name] = self._load(device, unit, name)
            return kernel

    def _load_module(self, device: int, unit: str) -> int:
        """The unit's module; compiled here where the driver refuses what came with the package."""
        capability = self.identity(device).capability
        image = kernel_build.load_unit(unit, capability)
        try:
            return int(self._modules.moduleLoadData(image))
        except self._modules.CUDADriverError as error:
            maker = kernel_build.prebuilt_by(unit, capability)
            if maker is None or getattr(error, "status", None) not in _REFUSED_IMAGE:
                raise
            warnings.warn(
                f"the driver refuses the kernels that {maker} compiled with the package "
                f"({said(error)}): they are compiled by NVRTC at their first use instead. Update "
                "the driver, or install ringcomm with a CUDA toolkit that the driver knows",
                RuntimeWarning,
                stacklevel=2,
            )
        image = kernel_build.load_unit(unit, capability, prebuilt=False)
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
    """The CUDA runtime of this process; see ``device_runtime.current`` for what it raises."""
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
