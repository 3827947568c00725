# SPDX-License-Identifier: Apache-2.0
"""Loads the emulated driver."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_int,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import cache
from typing import NamedTuple

from tests.ptx_interpreter import PtxSchedule
from tests.support import emulated_driver

COMPILER = emulated_driver.COMPILER

SUCCESS = 0
HOST_FUNCTION = CFUNCTYPE(None)
# Parameters and their bytes, grid x and y, threads and dynamic shared bytes of a block.
LAUNCHED = CFUNCTYPE(None, c_void_p, c_int, c_int, c_int, c_int, c_int)


# Types of the result and the arguments; a result c_int is a code of the driver API.
_PROTOTYPES = {
    "cuLaunchKernel": (c_int, [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]),
    "cuMemcpyAsync": (c_int, [c_uint64, c_uint64, c_uint64, c_void_p]),
    "cuGetErrorString": (c_int, [c_int, POINTER(c_char_p)]),
    "emulated_kernel": (c_void_p, [c_char_p, c_char_p]),
    "emu_test_kernel": (c_void_p, [c_char_p]),
    "emulated_ptx_kernel": (c_void_p, [c_void_p, c_char_p, c_void_p, POINTER(PtxSchedule)]),
    "emulated_kernel_of": (c_void_p, [POINTER(c_int), c_int, LAUNCHED]),
    "emulated_barriers_met": (c_uint64, []),
    "emulated_figures": (None, [c_void_p, *[POINTER(c_int)] * 3]),
    "emu_params_bytes": (c_uint64, []),
    "emulated_params_bytes": (c_uint64, [c_void_p]),
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
    "emu_device_without_virtual_memory": (None, [c_void_p]),
    "emu_vmm_in_use": (c_int, []),
    "emu_vmm_set_room": (None, [c_void_p, c_uint64]),
    "emu_vmm_used": (c_uint64, [c_void_p]),
    "emu_vmm_device_at": (c_void_p, [c_uint64]),
    "emu_vmm_ranges": (c_int, [c_void_p, c_int, POINTER(c_uint64), c_int]),
}


class DriverError(RuntimeError):
    """An error of the emulated driver; ``code`` is the driver API's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"emulated driver: error {code}: {text}")
        self.code = code


@cache
def library() -> ctypes.CDLL:
    """Returns the loaded library; its functions have types."""
    loaded = ctypes.CDLL(str(emulated_driver.library_path()))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def check(code: int) -> None:
    """Raises DriverError unless ``code`` means success."""
    if code != SUCCESS:
        text = c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(code, (text.value or b"?").decode())


class Figures(NamedTuple):
    """A kernel's resources in the emulator."""

    registers: int  # of a thread
    shared_bytes: int  # of a block
    threads: int  # of a block


def figures_of(kernel: int) -> Figures:
    """Returns the figures of a kernel, by its handle."""
    found = [c_int() for _ in Figures._fields]
    library().emulated_figures(kernel, *map(ctypes.byref, found))
    return Figures(*(each.value for each in found))
