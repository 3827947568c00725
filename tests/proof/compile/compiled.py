# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled ahead of time, for GPUs that need not be here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringcomm._tl.geometry import Geometry
from ringcomm._tl.launch import OPTIONS, KernelPlan, RankPointers, launch_kernel
from ringcomm._tl.native_launch import native_kernel, numbers_of
from tests.support.cuda_code import Binary, Kernel, Loop
from tests.support.triton_device import WARP, StandIn, in_place, only_front_end

TARGETS = (80, 90, 100)
# Triton spells an acquire as ld.global.sys.acquire, PTX's own manual as ld.acquire.sys.global.
ACQUIRE_SYS = re.compile(r"\bld\.(?:acquire\.sys|global\.sys\.acquire|acquire\.global\.sys)\b")
RELEASE_SYS = re.compile(r"\b(?:atom|red)\.(?:[\w:]+\.)*(?:sys\.release|release\.sys)\b")


@contextmanager
def on_gpu(capability: int) -> Iterator[StandIn]:
    """Inside, Triton's launches take place on a stand-in for a GPU."""
    gpu = StandIn(capability)
    with in_place(gpu):
        yield gpu


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


def _launch(plan: KernelPlan, world: int, more: int) -> tuple[int, ...]:
    """Launches one rank, whose buffers and sizes are ``more`` than round numbers.

    Returns the numbers that were passed.
    """
    geometry = Geometry(world, 16, 4, 128 << 10, 1 << 20)
    ranks = [RankPointers(1 << 40, (1 << 40) + more, (1 << 41) + 2 * more)]
    sizes = tuple(size + more for size in plan.sizes)
    launched, timeout_ns = replace(plan, sizes=sizes), 20_000_000_000 + more
    launch_kernel(launched, ranks, timeout_ns, geometry)
    return numbers_of(launched, ranks, timeout_ns)


def read_by_triton(plan: KernelPlan, world: int) -> bool:
    """True if Triton's front end takes what a launch of a collective would compile; else it raises.

    Whatever a kernel may not say is refused there, in a tenth of the time that compiling it takes.
    """
    with on_gpu(90), only_front_end() as is_read:
        _launch(plan, world, 0)
    return is_read()


def compile_plan(plan: KernelPlan, world: int, target: int) -> Binary:
    """Returns the kernels that a rank's launches of a collective compile, for any buffers.

    The native module, too, must know how to launch them.
    """
    with on_gpu(target) as gpu:
        launches = [_launch(plan, world, more) for more in (0, 4)]
    assert all(native_kernel(gpu.made[0], numbers).takes(numbers) for numbers in launches)
    assert gpu.launched == [plan.kernel.__name__] * 2
    assert not gpu.made[0].metadata.enable_fp_fusion
    return only_binary(gpu)


def only_binary(gpu: StandIn) -> Binary:
    """What was compiled for all launches on ``gpu`` so far, which must be one kernel."""
    (made,) = gpu.made
    return Binary(made.asm["cubin"], made.asm["ptx"], "")


def hot_loops(kernel: Kernel) -> list[Loop]:
    """The innermost loops that move 16 bytes at a time."""
    loops = [loop for loop in kernel.loops() if any(each.loaded for each in loop.code)]
    return [loop for loop in loops if not any(loop.encloses(other) for other in loops)]


def opcodes(loop: Loop | Sequence[Any]) -> list[str]:
    """Returns the instructions of a loop."""
    code = loop.code if isinstance(loop, Loop) else loop
    return [instruction.opcode for instruction in code]
