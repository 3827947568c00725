# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for Triton's driver of a GPU: kernels compile as for one that need not be here."""

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
# By Triton's name of a parameter's type; pointers begin with a star.
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
# Global and profile scratch memory, which kernels of ours do not use.
_SCRATCH = ("u64", "u64")


class StandIn:
    """In the place of Triton's driver of a GPU: launches compile as there, and run nothing.

    Attributes:
        made: what was compiled, in this order.
        launched: the kernels' names, in the order of their launches.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, WARP)
        self._device = next(_devices)  # a new one has no kernels yet
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
    """Runs the PTX of what is launched, to its end, in the launching thread.

    That is the stream's thread on an emulated device, which calls what launches Triton's kernels,
    so kernels of different streams run side by side. What a kernel does wrong is told by the device
    that is asked next, and by :func:`ptx.failure`.

    Args:
        schedule: of warps and lanes. That even blocks are late is for the first thread to launch.
        text_of: returns the text that runs in place of a kernel's PTX, of which it may be a mutant.
        warps: fewer of a block than the kernel was compiled for.
        capability: what kernels are compiled for.
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
        # The types and the function of the kernel that this thread loads next.
        self._loads = threading.local()
        self._functions: list[Any] = []
        #: The kernels that were launched without Triton, in this order.
        self.passed_by: list[str] = []
        #: The parameters of all launches, as the kernels found them.
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
        """Ranks with a device each are told apart by the threads of their streams."""
        made = PtxSchedule.from_buffer_copy(self._schedule)
        with self._lock:
            if threading.get_ident() not in self._threads:
                self._threads.append(threading.get_ident())
            made.even_are_late &= self._threads[0] == threading.get_ident()
        return made

    def reached(self) -> dict[str, list[int]]:
        """By kernels' hash, the lines of their texts that order memory and were come to."""
        return {digest: ptx.reached(module) for digest, module in self._modules.items()}

    def _module(self, metadata: Any) -> int:
        digest = metadata.hash
        with self._lock:  # ranks may be the first to launch a kernel at the same time
            if digest not in self._modules:
                text = next(each.asm["ptx"] for each in self.made if each.metadata.hash == digest)
                if metadata.enable_fp_fusion:
                    # Products and sums that may become one operation here do not.
                    text = _MAY_BECOME_ONE.sub(r"\1.rn.f32", text)
                self._modules[digest] = ptx.load(self._text_of(text))
            return self._modules[digest]


def _leaves(values: Any) -> Iterator[Any]:
    """The elements of nested tuples."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value


def _laid_out(types: Sequence[str], values: Sequence[Any]) -> bytes:
    """The parameters as a kernel finds them: each at a multiple of its size, no constants."""
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
    """Inside, Triton's launches take place on ``gpu``."""
    compile_as_ever = triton.compiler.compile
    lock = threading.Lock()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with lock:  # ranks that launch the same kernel: the second one finds what the first made
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
    """Triton's hook of a compilation: nothing assembles what the interpreter runs."""
    if pipeline:
        _backend, stages, *_ = pipeline
        stages["cubin"] = lambda *_: b""
    return "only PTX", "only PTX"


class _ReadError(Exception):
    """Ends a compilation behind the front end."""


@contextmanager
def only_front_end() -> Iterator[Callable[[], bool]]:
    """Inside, a compilation ends when Triton has made its own language of a kernel.

    It ends what stands inside, too. Gives a function that says whether this has happened.
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
        # Triton 3.6 asks no hook before it takes a kernel from its cache.
        knobs.compilation.always_compile = True
        knobs.runtime.add_stages_inspection_hook = hook
        yield lambda: bool(read)


@contextmanager
def executed(gpu: StandIn) -> Iterator[None]:
    """Inside, Triton's launches take place on ``gpu``, as PTX that is kept under ``build/``."""
    with triton.knobs.cache.scope(), triton.knobs.runtime.scope(), in_place(gpu):
        triton.knobs.cache.dir = str(ROOT / "build" / "triton")
        triton.knobs.runtime.add_stages_inspection_hook = _only_ptx
        yield
