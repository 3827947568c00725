# SPDX-License-Identifier: Apache-2.0
"""The Python interface of the interpreter: see ``source/interpreter.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING

from tests.ptx_interpreter.build import LIBRARY

if TYPE_CHECKING:
    import torch

_WATCHER = CFUNCTYPE(None)


class PtxSchedule(ctypes.Structure):
    """The order in which the warps and lanes of a kernel run: see ``source/warp.h``.

    Attributes:
        seed: the order of the warps of a block: 0 upwards, 1 downwards, else random.
        no_progress_in_a_warp: a lane may wait forever for another lane of its own warp.
        even_are_late: the blocks of even ranks nap before they look for awaited data, and before
            they end.
        replicates_reads: several threads of a block may read an element that one of them stores, as
            in Triton's kernels.
        counts_trips: the trips to memory of each launch are counted: see :func:`trips`.
    """

    _fields_ = (
        ("seed", c_uint32),
        ("no_progress_in_a_warp", c_uint8),
        ("even_are_late", c_uint8),
        ("replicates_reads", c_uint8),
        ("counts_trips", c_uint8),
    )


class _PtxLaunch(ctypes.Structure):
    _fields_ = (
        ("parameters", c_char_p),
        ("parameter_bytes", c_uint64),
        ("grid_x", c_int),
        ("grid_y", c_int),
        ("threads", c_int),
        ("shared_bytes", c_uint32),
        ("schedule", PtxSchedule),
    )


# Result and arguments.
_PROTOTYPES = {
    "ptx_load": (c_void_p, [c_char_p]),
    "ptx_refusal": (c_char_p, []),
    "ptx_reached": (c_int, [c_void_p, POINTER(c_uint32), c_int]),
    "ptx_trips": (c_int, [c_void_p, c_char_p]),
    "ptx_run": (c_char_p, [c_void_p, c_char_p, POINTER(_PtxLaunch)]),
    "ptx_failure": (c_char_p, []),
    "ptx_forget_failure": (None, []),
    "ptx_allow": (None, [c_uint64, c_uint64]),
    "ptx_forget_allowed": (None, []),
    "ptx_be_strict": (None, [c_int]),
    "ptx_watch": (None, [c_uint64, _WATCHER]),
}


@cache
def _library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(LIBRARY.path))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class RefusedError(RuntimeError):
    """A text contains something that the interpreter does not know."""


def load(text: str) -> int:
    """Loads a module from PTX text; returns its handle.

    Raises:
        RefusedError: the text contains something that the interpreter does not know.
    """
    handle = _library().ptx_load(text.encode())
    if not handle:
        raise RefusedError(_library().ptx_refusal().decode())
    return int(handle)


def run(
    module: int,
    name: str,
    parameters: bytes,
    *,
    grid: tuple[int, int] = (1, 1),
    threads: int = 32,
    shared_bytes: int = 0,
    schedule: PtxSchedule | None = None,
) -> str | None:
    """Runs a kernel to its end, in this thread; returns its mistake, or None.

    Args:
        module: what :func:`load` returned.
        name: the kernel's.
        parameters: as the kernel declares them, laid out as in C.
        grid: blocks along x and y.
        threads: of a block.
        shared_bytes: dynamic shared memory.
        schedule: of its warps and lanes.
    """
    launch = _PtxLaunch(
        parameters, len(parameters), *grid, threads, shared_bytes, schedule or PtxSchedule()
    )
    failed = _library().ptx_run(module, name.encode(), ctypes.byref(launch))
    return failed.decode() if failed else None


def failure() -> str | None:
    """Returns the mistake of the first kernel that failed, and its place, until :func:`forget`."""
    text = _library().ptx_failure()
    return text.decode() if text else None


def forget() -> None:
    """Lets kernels run again after a failure."""
    _library().ptx_forget_failure()


def reached(module: int) -> list[int]:
    """Returns the lines of a module's text that order memory and that kernels have executed."""
    room = _library().ptx_reached(module, None, 0)
    lines = (c_uint32 * room)()
    _library().ptx_reached(module, lines, room)
    return sorted(set(lines))


def trips(module: int, kernel: str) -> int:
    """Returns the length of a kernel's chain of dependent trips to memory (``source/trips.h``).

    A launch counts its longest block. The result is the smallest count of the launches whose
    schedule counts trips, or -1 without such a launch.
    """
    return int(_library().ptx_trips(module, kernel.encode()))


def be_strict(strict: bool) -> None:
    """Sets whether kernels may use only allowed memory, or all memory of the process."""
    _library().ptx_be_strict(int(strict))


def allow(tensor: torch.Tensor) -> None:
    """Lets kernels use the tensor's memory, and nothing around it."""
    storage = tensor.untyped_storage()
    _library().ptx_allow(storage.data_ptr(), storage.nbytes())


def forget_allowed() -> None:
    """Withdraws all memory that :func:`allow` gave."""
    _library().ptx_forget_allowed()


@contextmanager
def watching(word_ptr: int, look: Callable[[], None]) -> Iterator[None]:
    """Inside, ``look`` is called when a kernel has stored the word, before the block's next step.

    At this time other observers may see the current contents of memory. ``look`` must not raise.
    """
    function = _WATCHER(look)
    _library().ptx_watch(word_ptr, function)
    try:
        yield
    finally:
        _library().ptx_watch(word_ptr, _WATCHER())
