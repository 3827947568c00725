# SPDX-License-Identifier: Apache-2.0
"""Replacements for Triton's GPU driver: kernels compile as for a GPU, but no GPU is needed."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests import ptx_interpreter as ptx
from tests.ptx_interpreter import PtxSchedule
from tests.support import ROOT
from tests.support.emulator.library import LAUNCHED, library

WARP = 32
_devices = itertools.count()
# By Triton's name of a parameter's type; names of pointer types begin with a star.
_C_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
_MAY_BECOME_ONE = re.compile(r"\b(add|sub|mul)\.f32\b")
# Global and profile scratch memory, which ringcomm's kernels do not use.
_SCRATCH = ("u64", "u64")


class StandIn:
    """Replaces Triton's GPU driver: launches compile as with a GPU, but run nothing.

    Attributes:
        made: the compiled kernels, in the order of their compilation.
        launched: the kernels' names, in the order of their launches.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, WARP)
        self._device = next(_devices)  # a new device, for which no kernel is loaded
        self.utils = self
        self.made: list[Any] = []
        self.launched: list[str] = []

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None: ...

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: self.launched.append(metadata.name)


class PtxLauncher(StandIn):
    """Runs the PTX of launched kernels, to their end, in the launching thread.

    On an emulated device this is the stream's thread, so kernels of different streams run
    concurrently. Errors of a kernel are reported by the device's next query, and by
    :func:`ptx.failure`.

    Args:
        schedule: of warps and lanes. Its ``even_are_late`` applies to the first launching thread.
        text_of: returns the text that runs in place of a kernel's PTX, possibly a mutant.
        warps: per block, fewer than the kernel was compiled for.
        capability: the compute capability that kernels are compiled for.
    """

    def __init__(
        self,
        schedule: PtxSchedule | None = None,
        text_of: Callable[[str], str] = lambda text: text,
        warps: int | None = None,
        capability: int = 90,
    ) -> None:
        super().__init__(capability)
        self._schedule = schedule or PtxSchedule()
        self._schedule.replicates_reads = 1
        self._text_of = text_of
        self._warps = warps
        self._modules: dict[str, int] = {}
        self._lock = threading.Lock()
        self._threads: list[int] = []
        # The parameter types and the function of the kernel that this thread loads next.
        self._loads = threading.local()
        self._functions: list[Any] = []
        #: The kernels that were launched without Triton, in the order of their launches.
        self.passed_by: list[str] = []
        #: The parameters of all launches, as kernels read them.
        self.parameters: list[bytes] = []

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        module = self._module(metadata)
        types = list(_leaves(source.signature.values()))

        def run(parameters: bytes, x: int, y: int) -> None:
            self.parameters.append(parameters)
            ptx.run(
                module,
                metadata.name,
                parameters,
                grid=(x, y),
                threads=(self._warps or metadata.num_warps) * WARP,
                shared_bytes=metadata.shared,
                schedule=self._schedule_here(),
            )

        def launch(x: int, y: int, z: int, *passed: Any) -> None:
            _stream, _function, _packed, _launch_metadata, _enter, _exit, *given = passed
            assert z == 1, "grids of three dimensions are not emulated"
            self.launched.append(metadata.name)
            run(_laid_out(types, list(_leaves(given))), x, y)

        def pass_by(
            parameters: int, size: int, x: int, y: int, threads: int, shared_bytes: int
        ) -> None:
            assert (threads, shared_bytes) == (metadata.num_warps * WARP, metadata.shared)
            self.passed_by.append(metadata.name)
            run(ctypes.string_at(parameters, size), x, y)

        self._loads.next = types, pass_by
        return launch

    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        """Returns a kernel of emulated devices, which the native module can launch."""
        types, pass_by = self._loads.next
        numbers = [*(kind for kind in types if kind != "constexpr"), *_SCRATCH]
        sizes = [ctypes.sizeof(_C_TYPES["u64" if kind[0] == "*" else kind]) for kind in numbers]
        return 1, self._function(sizes, pass_by), 0, 0, 1024

    def _function(self, sizes: Sequence[int], launched: Callable[..., None]) -> int:
        function = LAUNCHED(launched)
        self._functions.append(function)
        count = len(sizes)
        return int(library().emulated_kernel_of((ctypes.c_int * count)(*sizes), count, function))

    def _schedule_here(self) -> PtxSchedule:
        """Makes only one rank's even blocks late; each rank's stream has a thread of its own."""
        made = PtxSchedule.from_buffer_copy(self._schedule)
        with self._lock:
            if threading.get_ident() not in self._threads:
                self._threads.append(threading.get_ident())
            made.even_are_late &= self._threads[0] == threading.get_ident()
        return made

    def reached(self) -> dict[str, list[int]]:
        """By kernels' hash, the lines of their PTX that order memory and were executed."""
        return {digest: ptx.reached(module) for digest, module in self._modules.items()}

    def _module(self, metadata: Any) -> int:
        digest = metadata.hash
        with self._lock:  # several ranks may be the first to launch a kernel
            if digest not in self._modules:
                text = next(each.asm["ptx"] for each in self.made if each.metadata.hash == digest)
                if metadata.enable_fp_fusion:
                    # Forbids fusing multiplications and additions, which ptxas may fuse here.
                    text = _MAY_BECOME_ONE.sub(r"\1.rn.f32", text)
                self._modules[digest] = ptx.load(self._text_of(text))
            return self._modules[digest]


def _leaves(values: Any) -> Iterator[Any]:
    """Yields the elements of nested tuples."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value


def _laid_out(types: Sequence[str], values: Sequence[Any]) -> bytes:
    """The parameters as a kernel reads them: each at a multiple of its size; no constants."""
    made = bytearray()
    given = [
        (kind, value) for kind, value in zip(types, values, strict=True) if kind != "constexpr"
    ]
    for kind, value in [*given, *((each, 0) for each in _SCRATCH)]:
        if kind.startswith("*"):
            kind, value = "u64", getattr(value, "data_ptr", lambda value=value: value)()
        c_type = _C_TYPES[kind]
        size = ctypes.sizeof(c_type)
        made += bytes(-len(made) % size) + bytes(c_type(value))
    return bytes(made)


@contextmanager
def in_place(gpu: StandIn) -> Iterator[None]:
    """Inside, ``gpu`` does Triton's launches."""
    compile_as_ever = triton.compiler.compile
    lock = threading.Lock()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with lock:  # if several ranks launch the same kernel, the first compiles it
            gpu.made.append(compile_as_ever(*args, **kwargs))
            return gpu.made[-1]

    before = driver._active
    driver.set_active(gpu)
    triton.compiler.compile = recorded
    try:
        yield
    finally:
        triton.compiler.compile = compile_as_ever
        driver._active = before


def _only_ptx(*pipeline: Any) -> tuple[str, str]:
    """A hook for Triton's compilation that leaves out the assembler: the interpreter runs PTX."""
    if pipeline:
        _backend, stages, *_ = pipeline
        stages["cubin"] = lambda *_: b""
    return "only PTX", "only PTX"


class _ReadError(Exception):
    """Ends a compilation after the front end."""


@contextmanager
def only_front_end() -> Iterator[Callable[[], bool]]:
    """Inside, a compilation ends when Triton's front end has made TTIR of a kernel.

    The end of a compilation also ends the block. Yields a function that says whether it happened.
    """
    read: list[None] = []

    def end(*_: Any) -> None:
        read.append(None)
        raise _ReadError

    def hook(*pipeline: Any) -> tuple[str, str]:
        if pipeline:
            _backend, stages, *_ = pipeline
            stages["ttir"] = end
        return "only the front end", "only the front end"

    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.runtime.scope(), suppress(_ReadError):
        # Triton 3.6 does not call the hook for a kernel from its cache.
        knobs.compilation.always_compile = True
        knobs.runtime.add_stages_inspection_hook = hook
        yield lambda: bool(read)


@contextmanager
def executed(gpu: StandIn) -> Iterator[None]:
    """Inside, ``gpu`` does Triton's launches, as PTX that is cached under ``build/``."""
    with triton.knobs.cache.scope(), triton.knobs.runtime.scope(), in_place(gpu):
        triton.knobs.cache.dir = str(ROOT / "build" / "triton")
        triton.knobs.runtime.add_stages_inspection_hook = _only_ptx
        yield
