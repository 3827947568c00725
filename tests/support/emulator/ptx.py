# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA kernels' PTX: NVRTC compiles it, and an interpreter executes each instruction.

The emulated driver's kernel launch calls the interpreter (``tests/ptx_interpreter``). Streams,
graphs, IPC and all Python code are therefore the same as with kernels that the host's compiler
makes from the same templates.

As a program, this module compiles all units, which later runs find in build/ptx. Otherwise a test
would wait for the compilation of its unit, up to two minutes, within its own deadlines.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

from ringcomm.cuda import units
from ringcomm.process import available_cores
from tests import ptx_interpreter
from tests.ptx_interpreter import PtxSchedule, RefusedError
from tests.support import ROOT, nvrtc
from tests.support.cuda_code import unit_source
from tests.support.emulator.library import library

TARGET = "compute_90a"


# "ptx" or "ptx:SEED": emulated devices of this process and its children execute PTX.
ENVIRONMENT = "RINGCOMM_EMULATED_KERNELS"


def from_environment() -> PtxKernels | None:
    """Returns the PTX kernels if the environment variable requests them."""
    kind, _, seed = os.environ.get(ENVIRONMENT, "").partition(":")
    return PtxKernels(PtxSchedule(int(seed or 0)), strict=False) if kind == "ptx" else None


def ptx_of(unit: str, target: str = TARGET) -> str:
    """Returns the PTX of a unit, or of a subunit: see ``cuda_code.unit_source``.

    Its loops are those that RINGCOMM_KERNELS chooses.
    """
    return ptx_from(unit, *unit_source(unit, units.chosen_loops()), target=target)


def ptx_from(
    unit: str, source: str, headers: dict[str, str], macros: list[str], target: str = TARGET
) -> str:
    """Returns the PTX of a source text and its headers.

    The PTX names the source line of each instruction. A cache under ``build/`` keeps it, by a
    digest of everything that it is made from.
    """
    options = [*units.NVRTC_OPTIONS, *macros, f"-arch={target}", "-lineinfo"]
    made_from = (source, sorted(headers.items()), options, _which_compiler())
    digest = hashlib.sha256(repr(made_from).encode())
    path = ROOT / "build" / "ptx" / f"{unit.replace('/', '-')}-{digest.hexdigest()[:16]}.ptx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(_compile(source, headers, options))
        unfinished.rename(path)
    return path.read_text()


@cache
def _which_compiler() -> tuple[str, int, int]:
    """Identifies NVRTC by its file: loading it to get its version takes a quarter of a second."""
    path = nvrtc.library_path()
    if path is None:
        raise nvrtc.NVRTCError(nvrtc.NEEDS_NVRTC)
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


def _compile(source: str, headers: dict[str, str], options: list[str]) -> str:
    names = [name.encode() for name in headers]
    texts = [header.encode() for header in headers.values()]
    program = nvrtc.createProgram(source, units.SOURCE, texts, names)
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getPTX(program).decode()
    finally:
        nvrtc.destroyProgram(program)


@dataclass(eq=False)
class PtxKernels:
    """Kernels of an emulated device that are executed as PTX.

    Args:
        schedule: of warps and lanes.
        strict: kernels may use only memory of devices, and tensors passed to
            ``ptx_interpreter.allow``, as all arguments of calls are; otherwise any memory.
        subunit: returns the subunit that a kernel is taken from; default: the whole unit.
        text_of: returns the PTX of a subunit, possibly a mutant.
    """

    schedule: PtxSchedule = field(default_factory=PtxSchedule)
    strict: bool = True
    subunit: Callable[[str, str], str] = lambda unit, kernel: unit
    text_of: Callable[[str], str] = lambda subunit: ptx_of(subunit)
    _modules: dict[str, int] = field(default_factory=dict, init=False)
    _kernels: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        ptx_interpreter.be_strict(self.strict)

    def kernel(self, unit: str, name: str, like: int) -> int:
        """Returns the handle of a kernel; ``like``: the same kernel from the host's compiler."""
        with self._lock:  # ranks that share a launch must get the same handle
            if (unit, name) not in self._kernels:
                self._kernels[unit, name] = self._find(unit, name, like)
            return self._kernels[unit, name]

    def module(self, subunit: str) -> int:
        """Returns the handle of a subunit's PTX; a kernel of it must have been loaded before."""
        return self._modules[subunit]

    def reached(self) -> dict[str, list[int]]:
        """By subunit, the lines of its PTX that order memory and that kernels have executed."""
        return {
            subunit: ptx_interpreter.reached(module) for subunit, module in self._modules.items()
        }

    def _find(self, unit: str, name: str, like: int) -> int:
        subunit = self.subunit(unit, name)
        if subunit not in self._modules:
            self._modules[subunit] = ptx_interpreter.load(self.text_of(subunit))
        handle = library().emulated_ptx_kernel(
            self._modules[subunit], name.encode(), like, ctypes.byref(self.schedule)
        )
        if not handle:
            raise RefusedError(f"no kernel {name} in the PTX of {subunit}")
        return int(handle)


def main() -> None:
    """Compiles every unit that is not in the cache."""
    with ThreadPoolExecutor(available_cores()) as pool:
        for unit, text in zip(units.UNITS, pool.map(ptx_of, units.UNITS), strict=True):
            print(f"{unit}: {len(text)} characters of PTX", flush=True)


if __name__ == "__main__":
    main()
