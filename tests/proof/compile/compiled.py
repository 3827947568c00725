# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels ahead of time, for GPUs that this machine need not have."""

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
# Triton writes an acquire as ld.global.sys.acquire; the PTX manual writes ld.acquire.sys.global.
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
    """Returns a kernel's PTX and machine code, for arguments of which Triton knows only the types.

    Args:
        kernel: a ``triton.jit`` function.
        signature: type of each argument that is not a constant.
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
    """Launches one rank's kernel with buffers and sizes that are round numbers plus ``more``.

    Returns the numbers that were passed.
    """
    geometry = Geometry(world, 16, 4, 128 << 10, 1 << 20)
    ranks = [RankPointers(1 << 40, (1 << 40) + more, (1 << 41) + 2 * more)]
    sizes = tuple(size + more for size in plan.sizes)
    launched, timeout_ns = replace(plan, sizes=sizes), 20_000_000_000 + more
    launch_kernel(launched, ranks, timeout_ns, geometry)
    return numbers_of(launched, ranks, timeout_ns)


def read_by_triton(plan: KernelPlan, world: int) -> bool:
    """True if Triton's front end accepts the kernel of a collective's launch; raises otherwise.

    The front end refuses all code that kernels must not contain, and takes a tenth of the
    compiler's time.
    """
    with on_gpu(90), only_front_end() as is_read:
        _launch(plan, world, 0)
    return is_read()


def compile_plan(plan: KernelPlan, world: int, target: int) -> Binary:
    """Returns the one kernel that a rank's launches of a collective compile, whatever the buffers.

    Checks that the native module can launch this kernel, too.
    """
    with on_gpu(target) as gpu:
        launches = [_launch(plan, world, more) for more in (0, 4)]
    assert all(native_kernel(gpu.made[0], numbers).takes(numbers) for numbers in launches)
    assert gpu.launched == [plan.kernel.__name__] * 2
    assert not gpu.made[0].metadata.enable_fp_fusion
    return only_binary(gpu)


def only_binary(gpu: StandIn) -> Binary:
    """Returns the one kernel that all launches on ``gpu`` so far have compiled."""
    (made,) = gpu.made
    return Binary(made.asm["cubin"], made.asm["ptx"], "")


def hot_loops(kernel: Kernel) -> list[Loop]:
    """Returns the innermost loops that move 16 bytes at a time."""
    loops = [loop for loop in kernel.loops() if any(each.loaded for each in loop.code)]
    return [loop for loop in loops if not any(loop.encloses(other) for other in loops)]


def opcodes(loop: Loop | Sequence[Any]) -> list[str]:
    """Returns the instructions of a loop."""
    code = loop.code if isinstance(loop, Loop) else loop
    return [instruction.opcode for instruction in code]
