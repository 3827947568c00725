"""What CuPy does not offer of the driver API, called in libcuda directly."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p

from ringcomm import _native
from ringcomm.errors import RingcommError

DRIVER_LIBRARY = "libcuda.so.1"
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1


class CudaDriver:
    """A few entry points of libcuda; all of them act on this thread's current context."""

    def __init__(self, library_name: str = DRIVER_LIBRARY) -> None:
        library = ctypes.CDLL(library_name)
        library.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
        library.cuThreadExchangeStreamCaptureMode.argtypes = [POINTER(c_int)]
        library.cuStreamCreateWithPriority.argtypes = [POINTER(c_void_p), c_uint, c_int]
        self._library = library
        # A query costs a microsecond more through ctypes, and every asynchronous call makes some.
        self.has_passed = _native.Driver(library_name).has_passed
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
        """Inside, this thread may make calls that a capture elsewhere in the process forbids.

        torch.cuda.graph captures in global mode, in which an allocation or an event's query in
        any thread breaks the capture. Ours concern other memory and other streams than the
        capture's.
        """
        mode = c_int(_CAPTURE_MODE_RELAXED)
        name = "cuThreadExchangeStreamCaptureMode"
        self._check(name, self._library.cuThreadExchangeStreamCaptureMode(byref(mode)))
        try:
            yield
        finally:  # `mode` holds what was in force before
            self._library.cuThreadExchangeStreamCaptureMode(byref(mode))

    def make_stream(self, priority: int) -> int:
        """A stream outside the legacy default stream's order; smaller priorities go first."""
        stream = c_void_p()
        result = self._library.cuStreamCreateWithPriority(
            byref(stream), _STREAM_NON_BLOCKING, priority
        )
        self._check("cuStreamCreateWithPriority", result)
        return stream.value or 0

    def load_function(self, function: int) -> None:
        """Loads a kernel's code now.

        Lazy loading would do it at the first launch, which may wait for all running kernels to
        end: for ever, if one of them waits for that launch. Drivers without the call load a
        function when its attributes are read, which whoever loads it does as well.
        """
        if self._load_function is not None:
            self._check("cuFuncLoad", self._load_function(function))
