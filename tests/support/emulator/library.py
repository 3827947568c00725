"""Loads the emulated driver."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_int,
    c_uint,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache

from tests.support import emulated_driver

COMPILER = emulated_driver.COMPILER

SUCCESS = 0
OUT_OF_MEMORY = 2
HOST_FUNCTION = CFUNCTYPE(None)


class PtxSchedule(ctypes.Structure):
    """In which order the warps and lanes of a kernel run; see tests/ptx_interpreter/source/warp.h.

    Attributes:
        seed: the order of the warps of a block: 0 upwards, 1 downwards, else random.
        no_progress_in_a_warp: a lane may wait for another one of its own warp for good.
        even_are_late: the blocks of even ranks nap before they look what they wait for, and before
            they end.
        replicates_reads: several threads of a block may read what one of them stores, as in
            Triton's kernels.
    """

    _fields_ = (
        ("seed", c_uint32),
        ("no_progress_in_a_warp", c_uint8),
        ("even_are_late", c_uint8),
        ("replicates_reads", c_uint8),
    )


class PtxLaunch(ctypes.Structure):
    """How ``ptx_run`` launches a kernel; see tests/ptx_interpreter/source/kernel.cpp."""

    _fields_ = (
        ("parameters", c_char_p),
        ("parameter_bytes", c_uint64),
        ("grid_x", c_int),
        ("grid_y", c_int),
        ("threads", c_int),
        ("shared_bytes", c_uint32),
        ("schedule", PtxSchedule),
    )


# Result and arguments. c_int as a result is one of the driver's codes.
_PROTOTYPES = {
    "cuLaunchKernel": (c_int, [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]),
    "cuMemcpyAsync": (c_int, [c_uint64, c_uint64, c_uint64, c_void_p]),
    "cuGetErrorString": (c_int, [c_int, POINTER(c_char_p)]),
    "emulated_kernel": (c_void_p, [c_char_p, c_char_p]),
    "emu_test_kernel": (c_void_p, [c_char_p]),
    "ptx_load": (c_void_p, [c_char_p]),
    "ptx_refusal": (c_char_p, []),
    "ptx_kernel": (c_void_p, [c_void_p, c_char_p, c_void_p, POINTER(PtxSchedule)]),
    "ptx_reached": (c_int, [c_void_p, POINTER(c_uint32), c_int]),
    "ptx_run": (c_char_p, [c_void_p, c_char_p, POINTER(PtxLaunch)]),
    "ptx_allow": (None, [c_uint64, c_uint64]),
    "ptx_forget_allowed": (None, []),
    "ptx_watch": (None, [c_uint64, HOST_FUNCTION]),
    "ptx_be_strict": (None, [c_int]),
    "ptx_failure": (c_char_p, []),
    "ptx_forget_failure": (None, []),
    "emulated_barriers_met": (c_uint64, []),
    "emulated_figures": (None, [c_void_p, POINTER(c_int), POINTER(c_int)]),
    "emu_params_bytes": (c_uint64, []),
    "emu_device_make": (c_void_p, [c_int, c_int, c_int]),
    "emu_device_blocks_each": (c_int, [c_void_p, c_void_p]),
    "emu_device_blocks_of": (c_int, [c_void_p, c_int, c_int, c_int]),
    "emu_device_resident": (c_int, [c_void_p]),
    "emu_device_set": (None, [c_void_p]),
    "emu_device_get": (c_void_p, []),
    "emu_device_synchronize": (c_int, [c_void_p]),
    "emu_device_settle": (None, [c_void_p]),
    "emu_stream_make": (c_void_p, [c_void_p, c_int, c_int]),
    "emu_stream_capturing": (c_int, [c_void_p]),
    "emu_stream_run": (c_int, [c_void_p, HOST_FUNCTION]),
    "emu_stream_wait": (c_int, [c_void_p, c_void_p]),
    "emu_stream_pass": (c_int, [c_void_p]),
    "emu_event_make": (c_void_p, []),
    "emu_event_destroy": (None, [c_void_p]),
    "emu_event_record": (c_int, [c_void_p, c_void_p]),
    "emu_event_query": (c_int, [c_void_p, POINTER(c_int)]),
    "emu_event_synchronize": (c_int, [c_void_p]),
    "emu_capture_begin": (c_int, [c_void_p]),
    "emu_capture_end": (c_int, [c_void_p, POINTER(c_void_p)]),
    "emu_graph_launch": (c_int, [c_void_p, c_void_p]),
    "emu_graph_destroy": (None, [c_void_p]),
    "emu_memory_allocate": (c_void_p, [c_uint64]),
    "emu_memory_free": (c_int, [c_void_p]),
    "emu_memory_export": (c_int, [c_void_p, c_char_p]),
    "emu_memory_open": (c_int, [c_char_p, POINTER(c_void_p)]),
    "emu_memory_close": (c_int, [c_void_p]),
    "emu_device_without_multicast": (None, [c_void_p]),
    "emu_vmm_in_use": (c_int, []),
}


class DriverError(RuntimeError):
    """The emulated driver refused; ``code`` is the driver API's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"emulated driver: error {code}: {text}")
        self.code = code


@cache
def library() -> ctypes.CDLL:
    """The loaded library, its functions typed."""
    loaded = ctypes.CDLL(str(emulated_driver.library_path()))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def check(code: int) -> None:
    """Raises DriverError unless ``code`` is success."""
    if code != SUCCESS:
        text = c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(code, (text.value or b"?").decode())
