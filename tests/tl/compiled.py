"""Triton kernels compiled ahead of time, for GPUs that need not be here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringcomm._tl.geometry import Geometry
from ringcomm._tl.launch import Plan
from ringcomm._tl.moving import NUM_WARPS
from tests.support.cuda_code import Binary, Kernel, Loop

WARP = 32
TARGETS = (80, 90, 100)
# Triton spells an acquire as ld.global.sys.acquire, PTX's own manual as ld.acquire.sys.global.
ACQUIRE_SYS = re.compile(r"\bld\.(?:acquire\.sys|global\.sys\.acquire|acquire\.global\.sys)\b")
RELEASE_SYS = re.compile(r"\b(?:atom|red)\.(?:[\w:]+\.)*(?:sys\.release|release\.sys)\b")


def compile_kernel(
    kernel: Any, signature: Mapping[str, Any], target: int, **constants: Any
) -> Binary:
    """A kernel's PTX and machine code.

    Args:
        kernel: a ``triton.jit`` function.
        signature: type of each argument that is no constant.
        target: compute capability, 10 * major + minor.
        constants: compile-time arguments, and of a launch's options ``enable_fp_fusion``.
    """
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": constants.pop("enable_fp_fusion", True)}
    full = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel, signature={name: full[name] for name in kernel.arg_names}, constexprs=constants
    )
    made = triton.compile(source, target=GPUTarget("cuda", target, WARP), options=options)
    return Binary(made.asm["cubin"], made.asm["ptx"], "")


def compile_plan(plan: Plan, world: int, target: int) -> Binary:
    """A collective for one rank per launch."""
    addresses = ("i64",)
    signature: dict[str, Any] = dict.fromkeys(plan.kernel.arg_names, "i64")
    signature |= dict.fromkeys(("tables", "inputs", "outputs"), addresses)
    signature["call"] = ("i64",) * 4
    geometry = Geometry(world, 16, 4, 128 << 10, 1 << 20)
    return compile_kernel(plan.kernel, signature, target, **plan.constants, G=geometry)


def hot_loops(kernel: Kernel) -> list[Loop]:
    """The innermost loops that move 16 bytes at a time."""
    loops = [loop for loop in kernel.loops() if any(each.loaded for each in loop.code)]
    return [loop for loop in loops if not any(loop.encloses(other) for other in loops)]


def opcodes(loop: Loop | Sequence[Any]) -> list[str]:
    """What a loop's instructions are."""
    code = loop.code if isinstance(loop, Loop) else loop
    return [instruction.opcode for instruction in code]
