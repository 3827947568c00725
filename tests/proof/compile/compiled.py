"""Triton kernels compiled ahead of time, for GPUs that need not be here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from ringcomm._tl.geometry import Geometry
from ringcomm._tl.launch import OPTIONS, KernelPlan, RankPointers, launch
from tests.support.cuda_code import Binary, Kernel, Loop

WARP = 32
TARGETS = (80, 90, 100)
# Triton spells an acquire as ld.global.sys.acquire, PTX's own manual as ld.acquire.sys.global.
ACQUIRE_SYS = re.compile(r"\bld\.(?:acquire\.sys|global\.sys\.acquire|acquire\.global\.sys)\b")
RELEASE_SYS = re.compile(r"\b(?:atom|red)\.(?:[\w:]+\.)*(?:sys\.release|release\.sys)\b")


_devices = itertools.count()


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

    @property
    def binary(self) -> Binary:
        """The one kernel that was compiled."""
        (made,) = self.made
        return Binary(made.asm["cubin"], made.asm["ptx"], "")


@contextmanager
def on_gpu(capability: int) -> Iterator[StandIn]:
    """Inside, Triton's launches take place on a stand-in for a GPU."""
    gpu = StandIn(capability)
    compile_as_ever = triton.compiler.compile

    def recorded(*args: Any, **kwargs: Any) -> Any:
        gpu.made.append(compile_as_ever(*args, **kwargs))
        return gpu.made[-1]

    before = driver._active
    driver.set_active(gpu)
    triton.compiler.compile = recorded
    try:
        yield gpu
    finally:
        triton.compiler.compile = compile_as_ever
        driver._active = before


def compile_kernel(
    kernel: Any, signature: Mapping[str, Any], target: int, **constants: Any
) -> Binary:
    """A kernel's PTX and machine code, for arguments of which Triton knows the types alone.

    Args:
        kernel: a ``triton.jit`` function.
        signature: type of each argument that is no constant.
        target: compute capability, 10 * major + minor.
        constants: compile-time arguments.
    """
    full = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel, signature={name: full[name] for name in kernel.arg_names}, constexprs=constants
    )
    made = triton.compile(source, target=GPUTarget("cuda", target, WARP), options=OPTIONS)
    return Binary(made.asm["cubin"], made.asm["ptx"], "")


def compile_plan(plan: KernelPlan, world: int, target: int) -> Binary:
    """Returns the kernels that a rank's launches of a collective compile, for any buffers."""
    geometry = Geometry(world, 16, 4, 128 << 10, 1 << 20)
    with on_gpu(target) as gpu:
        for more in (0, 4):
            parts = [RankPointers(1 << 40, (1 << 40) + more, (1 << 41) + 2 * more)]
            sizes = tuple(size + more for size in plan.sizes)
            launch(replace(plan, sizes=sizes), parts, 20_000_000_000 + more, geometry)
    assert gpu.launched == [plan.kernel.__name__] * 2
    assert not gpu.made[0].metadata.enable_fp_fusion
    return gpu.binary


def hot_loops(kernel: Kernel) -> list[Loop]:
    """The innermost loops that move 16 bytes at a time."""
    loops = [loop for loop in kernel.loops() if any(each.loaded for each in loop.code)]
    return [loop for loop in loops if not any(loop.encloses(other) for other in loops)]


def opcodes(loop: Loop | Sequence[Any]) -> list[str]:
    """Returns the instructions of a loop."""
    code = loop.code if isinstance(loop, Loop) else loop
    return [instruction.opcode for instruction in code]
