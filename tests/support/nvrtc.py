# SPDX-License-Identifier: Apache-2.0
"""NVRTC of the ``nvidia-cuda-nvrtc`` package, with the same functions as CuPy's ``nvrtc`` module.

ringcomm calls NVRTC through CuPy; this module replaces CuPy where it is not installed. It is as
strict as CuPy about ``str`` and ``bytes``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

NEEDS_NVRTC = "no NVRTC: pip install -e .[test]"


class NVRTCError(RuntimeError):
    """A call of NVRTC failed."""


def nvidia_files(pattern: str) -> list[Path]:
    """Returns files of NVIDIA's Python packages that match a pattern below ``nvidia/``."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    return sorted(path for folder in folders or () for path in Path(folder).glob(pattern))


def library_path() -> Path | None:
    """Returns the newest installed libnvrtc, or None."""
    return next(iter(reversed(nvidia_files("*/lib/libnvrtc.so.*"))), None)


@cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise NVRTCError(NEEDS_NVRTC)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> None:
    code = getattr(_library(), name)(*arguments)
    if code != 0:
        raise NVRTCError(f"{_library().nvrtcGetErrorString(code).decode()} ({code})")


def _output(program: int, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", ctypes.c_void_p(program), ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", ctypes.c_void_p(program), buffer)
    return buffer.raw


def _texts(texts: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*texts)


def getVersion() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def getSupportedArchs() -> tuple[int, ...]:
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", numbers)
    return tuple(numbers)


def createProgram(
    source: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]
) -> int:
    program = ctypes.c_void_p()
    count = len(headers)
    texts, names = _texts(headers), _texts(include_names)
    strings = (source.encode(), name.encode())
    _call("nvrtcCreateProgram", ctypes.byref(program), *strings, count, texts, names)
    assert program.value is not None
    return program.value


def compileProgram(program: int, options: Sequence[str]) -> None:
    words = _texts([option.encode() for option in options])
    _call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), words)


def getCUBIN(program: int) -> bytes:
    return _output(program, "CUBIN")


def getPTX(program: int) -> bytes:
    return _output(program, "PTX")[:-1]


def getProgramLog(program: int) -> str:
    return _output(program, "ProgramLog").decode()


def destroyProgram(program: int) -> None:
    _call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))


def stand_in_for_cupy(patch: pytest.MonkeyPatch) -> None:
    """Makes the library import this module as ``nvrtc``; skips the test if there is no NVRTC."""
    if library_path() is None:
        pytest.skip(NEEDS_NVRTC)
    libs = ModuleType("cupy_backends.cuda.libs")
    libs.nvrtc = sys.modules[__name__]  # type: ignore[attr-defined]
    for name in ("cupy_backends", "cupy_backends.cuda"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
