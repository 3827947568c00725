# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime of this process: memory, IPC and modules by CuPy, streams with torch."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ringcomm import _native
from ringcomm.cuda import build, units
from ringcomm.cuda.runtime import (
    CONNECTIONS_VARIABLE,
    CUDA_KIND,
    DEFAULT_CONNECTIONS,
    DeviceIdentity,
    Event,
    Stream,
)
from ringcomm.errors import RingcommError, UnsupportedError

# ---- Functions of the driver API that CuPy lacks, called in libcuda directly --------------------

DRIVER_LIBRARY = "libcuda.so.1"
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_AFFINITY_OF_SM_COUNT = 0
# CUdevResource: the type code of SMs; the size of the structure and the offset of its SM count, in
# bytes.
_RESOURCE_OF_SM, _RESOURCE_BYTES, _RESOURCE_SM_COUNT = 1, 144, 96


class CudaDriver:
    """A few entry points of libcuda; all of them act on this thread's current context."""

    def __init__(self, library_name: str = DRIVER_LIBRARY) -> None:
        library = ctypes.CDLL(library_name)
        library.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
        library.cuThreadExchangeStreamCaptureMode.argtypes = [POINTER(c_int)]
        library.cuStreamCreateWithPriority.argtypes = [POINTER(c_void_p), c_uint, c_int]
        self._library = library
        # The native module queries events: through ctypes a query takes 1 us longer, and an
        # asynchronous call makes several queries.
        self.has_passed = _native.Driver(library_name).has_passed
        # Functions for the limits on SMs: under MPS, and in a green context (since CUDA 12.4).
        library.cuCtxGetExecAffinity.argtypes = [POINTER(c_uint * 2), c_int]
        library.cuCtxGetCurrent.argtypes = [POINTER(c_void_p)]
        self._get_resource = getattr(library, "cuCtxGetDevResource", None)
        if self._get_resource is not None:
            self._get_resource.argtypes = [c_void_p, c_void_p, c_int]
        # Since CUDA 12.4.
        self._load_function = getattr(library, "cuFuncLoad", None)
        if self._load_function is not None:
            self._load_function.argtypes = [c_void_p]

    def _check(self, name: str, result: int) -> None:
        if result != 0:
            text = c_char_p()
            self._library.cuGetErrorString(result, byref(text))
            raise RingcommError(f"{name}: CUDA error {result}: {(text.value or b'?').decode()}")

    @contextmanager
    def outside_captures(self) -> Iterator[None]:
        """A context in which this thread may make calls that another thread's capture forbids.

        torch.cuda.graph captures in global mode, in which an allocation or an event's query in
        any thread breaks the capture. Calls that ringcomm makes in this context are safe: they do
        not touch the memory or the streams of the capture.
        """
        mode = c_int(_CAPTURE_MODE_RELAXED)
        name = "cuThreadExchangeStreamCaptureMode"
        self._check(name, self._library.cuThreadExchangeStreamCaptureMode(byref(mode)))
        try:
            yield
        finally:  # `mode` holds the previous mode
            self._library.cuThreadExchangeStreamCaptureMode(byref(mode))

    def make_stream(self, priority: int) -> int:
        """Makes a stream not ordered with the legacy default stream; a low number runs first."""
        stream = c_void_p()
        result = self._library.cuStreamCreateWithPriority(
            byref(stream), _STREAM_NON_BLOCKING, priority
        )
        self._check("cuStreamCreateWithPriority", result)
        return stream.value or 0

    def multiprocessors(self) -> list[int]:
        """Returns the numbers of multiprocessors to which the current context is limited.

        Such limits are a share of MPS (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE) and a green context. The
        list leaves out limits that the driver does not support.
        """
        found = []
        affinity = (c_uint * 2)()  # CUexecAffinityParam: the type, and a number
        if self._library.cuCtxGetExecAffinity(byref(affinity), _AFFINITY_OF_SM_COUNT) == 0:
            found.append(int(affinity[1]))
        context = c_void_p()
        resource = (c_uint * (_RESOURCE_BYTES // 4))()  # CUdevResource
        if (
            self._get_resource is not None
            and self._library.cuCtxGetCurrent(byref(context)) == 0
            and self._get_resource(context, byref(resource), _RESOURCE_OF_SM) == 0
        ):
            found.append(int(resource[_RESOURCE_SM_COUNT // 4]))
        return [number for number in found if number > 0]

    def load_function(self, function: int) -> None:
        """Loads a kernel's code now.

        Lazy loading would load it at the first launch, which may wait for all running kernels to
        end: forever, if a running kernel waits for this launch. Drivers without cuFuncLoad load a
        function when its attributes are read, as ``CudaRuntime`` does next.
        """
        if self._load_function is not None:
            self._check("cuFuncLoad", self._load_function(function))


# ---- CUDA streams, events and captures, shared with torch ---------------------------------------

_EVENT_DISABLE_TIMING = 2
_HIGH_PRIORITY, _USUAL_PRIORITY = -1, 0
# The priority of ringcomm's own small copies: the highest of an H100, which torch gives to no
# stream. So these copies have a hardware queue of their own, and no waiting work of another stream
# delays them. A driver with fewer priorities uses its highest.
_SERVICE_PRIORITY = -5


def _torch_stream(device: int, handle: int) -> torch.cuda.Stream:
    """Returns torch's stream of a handle, which is 0 for the default stream.

    For handle 0 ``torch.cuda.ExternalStream`` would take a stream of torch's pool, not ordered
    with the default stream (https://github.com/pytorch/pytorch/issues/182960).
    """
    return torch.cuda.get_stream_from_external(handle, device)


# torch's key of a stream: the stream's id, the device's index and the device's type.
StreamKey = tuple[int, int, int]


def _key_of(stream: torch.cuda.Stream) -> StreamKey:
    return stream.stream_id, stream.device_index, stream.device_type


class CudaStream:
    """A stream that no one else uses; it returns to its pool when this object dies.

    torch's own pool has 32 streams per device; the 33rd user shares the first user's stream: two
    communicators on one stream would wait for each other without need. Besides, a handle must stay
    valid until the process ends, see ``runtime.Stream``.
    """

    def __init__(self, device: int, handle: int, pool: deque[int]) -> None:
        # First set the attributes that __del__ reads: __del__ also runs if __init__ raises below.
        self.handle = handle
        self._pool = pool
        self.device = device
        self.torch_stream = _torch_stream(device, handle)
        self.key = _key_of(self.torch_stream)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class CudaEvent:
    """An event without timing. When deleted, it returns to its pool without a driver call."""

    __slots__ = ("_pool", "_streams", "handle")

    def __init__(self, streams: CudaStreams, handle: int, pool: deque[int]) -> None:
        self.handle = handle
        self._streams = streams
        self._pool = pool

    def query(self) -> bool:
        try:
            return self._streams.has_passed(self.handle)
        except RuntimeError as error:
            raise RingcommError(str(error)) from error

    def synchronize(self) -> None:
        self._streams.await_event(self.handle)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class _Here(threading.local):
    """The device that ringcomm has made current in this thread; None if another may be current."""

    device: int | None = None


class _Inside:
    """A context that makes a device, and optionally a stream of it, current in this thread.

    ``torch.cuda.device`` and ``torch.cuda.stream`` do the same, but take longer than the rest of a
    call (docs/performance.md). Entering the current device again costs almost nothing.
    """

    __slots__ = (
        "_cuda",
        "_device",
        "_device_before",
        "_here",
        "_outer",
        "_stream",
        "_stream_before",
    )

    def __init__(self, cuda: Any, here: _Here, device: int, stream: StreamKey | None) -> None:
        self._cuda, self._here = cuda, here
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        here, device = self._here, self._device
        self._outer = here.device
        if self._outer != device:
            self._device_before = torch._C._cuda_exchangeDevice(device)
            try:
                # torch calls the driver only if the device changes. So without this call, a thread
                # that has made no CUDA call would have no context, and its launches would fail.
                self._cuda.setDevice(device)
            except BaseException:
                torch._C._cuda_maybeExchangeDevice(self._device_before)
                raise
            # The user's code runs inside a context with a stream, and may change the device.
            here.device = device if self._stream is None else None
        if self._stream is not None:
            self._stream_before = torch._C._cuda_getCurrentStream(device)
            torch._C._cuda_setStream(*self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            torch._C._cuda_setStream(*self._stream_before)
        if self._outer != self._device:
            self._here.device = self._outer
            torch._C._cuda_maybeExchangeDevice(self._device_before)


class CudaStreams:
    """The methods of ``CudaRuntime`` for devices, streams, events and captures.

    CuPy's functions act on the current device. A method makes its device current unless its caller
    has done so: a collective calls up to eight of these methods, but changes the device only once.
    """

    def __init__(self, cuda: Any, driver: CudaDriver) -> None:
        self._streams_made: Counter[int] = Counter()
        self._cuda = cuda  # cupy.cuda.runtime
        self._driver = driver
        self._here = _Here()
        # torch.cuda.current_stream() makes an object and takes 50 times as long as this function.
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        # Function: True if an event has passed; it may be called while a graph is captured.
        self.has_passed = driver.has_passed
        self._lock = threading.Lock()
        self._idle_streams: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._idle_events: dict[int, deque[int]] = defaultdict(deque)
        self._service_streams: dict[int, int] = {}

    def on_device(self, device: int) -> AbstractContextManager[None]:
        return _Inside(self._cuda, self._here, device, None)

    @contextmanager
    def _beside_captures(self, device: int) -> Iterator[None]:
        with self.on_device(device), self._driver.outside_captures():
            yield

    def beside_captures(self, device: int) -> AbstractContextManager[None]:
        return self._beside_captures(device)

    def make_stream(self, device: int, high_priority: bool = False) -> CudaStream:
        priority = _HIGH_PRIORITY if high_priority else _USUAL_PRIORITY
        pool = self._idle_streams[device, priority]
        try:
            handle = pool.popleft()
        except IndexError:
            with self._beside_captures(device):
                handle = self._driver.make_stream(priority)
            self._streams_made[device] += not high_priority
        return CudaStream(device, handle, pool)

    def stream_queues(self, device: int) -> tuple[int, int]:
        setting = os.environ.get(CONNECTIONS_VARIABLE, "")
        queues = int(setting) if setting.isdecimal() else DEFAULT_CONNECTIONS
        return queues, self._streams_made[device] + 1  # the default stream

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, CudaStream)
        return _Inside(self._cuda, self._here, stream.device, stream.key)

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        key = _key_of(_torch_stream(device, stream))
        with _Inside(self._cuda, self._here, device, key):
            function()

    def record_event(self, device: int, stream: int) -> CudaEvent:
        if self._here.device != device:
            with self.on_device(device):
                return self.record_event(device, stream)
        pool = self._idle_events[device]
        try:
            handle = pool.popleft()
        except IndexError:
            handle = self._cuda.eventCreateWithFlags(_EVENT_DISABLE_TIMING)
        event = CudaEvent(self, handle, pool)
        self._cuda.eventRecord(handle, stream)
        return event

    def wait_event(self, device: int, stream: int, event: Event) -> None:
        if self._here.device != device:
            with self.on_device(device):
                return self.wait_event(device, stream, event)
        assert isinstance(event, CudaEvent)
        self._cuda.streamWaitEvent(stream, event.handle)

    def await_event(self, event: int) -> None:
        with self._driver.outside_captures():
            self._cuda.eventSynchronize(event)

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        tensor.record_stream(stream.torch_stream)

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        if self._here.device != device:
            with self.on_device(device):
                return self.is_capturing(device, stream)
        handle = self.current_stream(device) if stream is None else stream
        try:
            return bool(self._cuda.streamIsCapturing(handle))
        except RuntimeError:
            # The capture is broken, or this is the legacy default stream, which must not be used
            # while another stream captures: no event can be recorded here now.
            return True

    @contextmanager
    def capture_on(self, stream: Stream) -> Iterator[torch.cuda.CUDAGraph]:
        assert isinstance(stream, CudaStream)
        graph = torch.cuda.CUDAGraph()
        # Avoid global mode, in which an allocation of another rank's thread breaks the capture.
        with torch.cuda.graph(graph, stream=stream.torch_stream, capture_error_mode="thread_local"):
            yield graph

    def synchronize(self, device: int) -> None:
        with self._beside_captures(device):
            torch.cuda.synchronize(device)

    def _service_stream(self, device: int) -> int:
        """Returns the stream of internal copies, which must not wait for the default stream."""
        with self._lock:
            if device not in self._service_streams:
                self._service_streams[device] = self._driver.make_stream(_SERVICE_PRIORITY)
            return self._service_streams[device]


# Checks that this process has CUDA devices that both CuPy and torch can use.
#
# Each check raises UnsupportedError with the reason, whatever CuPy, torch or the driver raise.

NO_DEVICE = 100  # cudaErrorNoDevice
SAID_CHARS = 300


def said(error: BaseException) -> str:
    """Returns a library's error message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SAID_CHARS]}"


def no_device(reason: str) -> UnsupportedError:
    """Returns the error for an installation or a machine without usable devices."""
    return UnsupportedError(f"CUDA device: {reason}. Tensors on the CPU need no CUDA device")


def import_cupy() -> Any:
    """Imports and returns CuPy; raises UnsupportedError if it is missing or broken."""
    try:
        import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise no_device(
                "CuPy is not installed: pip install cupy-cuda13x nvidia-ml-py triton, or "
                "cupy-cuda12x in its place for a driver of CUDA 12"
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
# It works with CuPy 13 and 14, and CUDA 12 and 13. Memory comes from cudaMalloc itself, not from
# torch's allocator, whose ``expandable_segments`` cannot be shared through IPC handles.

_OUT_OF_MEMORY = 2
_PEER_ACCESS_ALREADY_ENABLED = 704
_HOST_ALLOC_PORTABLE, _HOST_ALLOC_MAPPED = 1, 2
_COPY_TO_DEVICE, _COPY_TO_HOST = 1, 2
_MAX_THREADS_PER_BLOCK = 0
_LAZY_ENABLE_PEER_ACCESS = 1
# The driver's errors for machine code that another driver or another GPU might accept: an image
# that is invalid, that has no code for this GPU, whose PTX does not compile or is too new for the
# driver, or whose kind the driver does not know.
_REFUSED_IMAGE = (200, 209, 218, 221, 222, 223, 300)


class _CudaMemory:
    """Device memory that torch uses without a copy; the tensor keeps this object alive."""

    def __init__(self, ptr: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
        }


# Number of pages that are pinned at a time. A driver may wait for the whole device before it pins
# or frees host memory, but building or closing a communicator must not wait for others' messages.
_PINNED_PAGES = 256


class CudaPage:
    """Page-locked host memory, mapped into every device; ``free`` returns it to its pool.

    So ``free`` makes no driver call: a garbage collection may call ``free`` while a kernel waits
    for this very thread.
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
    """Implements ``runtime.DeviceRuntime`` with CuPy's ``runtime`` and ``driver`` modules."""

    kind = "cuda"
    driver_library = DRIVER_LIBRARY

    def __init__(self, cuda: Any, modules: Any, driver: CudaDriver) -> None:
        super().__init__(cuda, driver)
        self._modules = modules
        self._loading: dict[int, threading.Lock] = defaultdict(threading.Lock)  # by device
        # The key ends with the variant of the kernels' loops (units.LOOPS_VARIABLE): a benchmark
        # compares both variants in one process.
        self._kernels: dict[tuple[int, str, str, str], CudaKernel] = {}
        self._loaded: dict[tuple[int, str, str], int] = {}
        self._exported: dict[int, bytes] = {}
        self._idle_pages: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self.identity = cache(self._identity)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cuda", device)

    def tensor_place(self, device: int) -> tuple[int, int]:
        return CUDA_KIND, device

    def _identity(self, device: int) -> DeviceIdentity:
        # Take torch's uuid: CuPy cuts the uuid off at the first zero byte.
        properties = torch.cuda.get_device_properties(device)
        return DeviceIdentity(
            index=device,
            uuid=f"GPU-{properties.uuid}",
            pci_bus_id=self._cuda.deviceGetPCIBusId(device).lower(),
            name=properties.name,
            capability=(properties.major, properties.minor),
            multiprocessors=properties.multi_processor_count,
        )

    def usable_multiprocessors(self, device: int) -> int:
        # Do not enter the current device again: the thread would leave its green context.
        inside = torch.cuda.current_device() == device
        with nullcontext() if inside else self.on_device(device):
            limits = self._driver.multiprocessors()
        return min([self.identity(device).multiprocessors, *limits])

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
        memory = _CudaMemory(ptr, size_bytes, owner)
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
        """Pins new pages, and returns their addresses for the host and for kernels."""
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
        # cudaIpcOpenMemHandle's error for a handle of this process itself is misleading.
        if handle in self._exported.values():
            raise UnsupportedError("an IPC handle cannot be opened in the process that made it")
        with self._beside_captures(device):
            try:
                # The memory may be on another device: the flag enables peer access to it.
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
        # A thread that loads a kernel holds the device's lock, perhaps until the device is idle.
        # Other threads must be able to launch loaded kernels, and to load on their own devices.
        key = (device, unit, name, units.chosen_loops())
        loaded = self._kernels.get(key)
        if loaded is not None:
            return loaded
        with self._loading[device]:
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel = self._kernels[key] = self._load(*key)
            return kernel

    def _load_module(self, device: int, unit: str) -> int:
        """Loads the unit's module; compiles it here if the driver refuses the package's binary."""
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

    def _load(self, device: int, unit: str, name: str, loops: str) -> CudaKernel:
        module = self._loaded.get((device, unit, loops))
        with self._beside_captures(device):
            try:
                if module is None:
                    module = self._load_module(device, unit)
                    self._loaded[device, unit, loops] = module
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
    """Makes the CUDA runtime of this process; ``ringcomm.cuda.current`` lists its errors."""
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
