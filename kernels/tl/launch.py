# SPDX-License-Identifier: Apache-2.0
"""Launches the collectives' kernels: compiled on a GPU, or in Triton's interpreter on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from ringcomm import _native

from .collectives import all_gather_kernel, all_reduce_kernel, reduce_scatter_kernel
from .endpoint import tagged
from .geometry import Geometry
from .hooks import IS_INTERPRETED, interpreting, lives
from .moving import NUM_WARPS

__all__ = [
    "DTYPES",
    "OPS",
    "OPTIONS",
    "KernelPlan",
    "RankPointers",
    "arguments_of",
    "launch_kernel",
    "plan_all_gather",
    "plan_all_reduce",
    "plan_reduce_scatter",
]  # fmt: skip

# Options of every launch. Triton must not fuse a product and a sum unless the kernel does so
# itself; Triton's default for this changes in 3.10.
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}

# The types and operators of the kernels' reductions, by the native module's names.
DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
OPS = ("SUM", "AVG")
_MOVED = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_LINE_BYTES = _native.STRUCTURES["line"]
_NONE = -1


@dataclass(frozen=True)
class RankPointers:
    """One rank's part of a launch: addresses of its rank table and of its buffers."""

    table_ptr: int
    in_ptr: int
    out_ptr: int


@dataclass(frozen=True)
class KernelPlan:
    """A prepared collective, equal on all ranks: kernel, sizes and compile-time arguments."""

    kernel: Any
    sizes: tuple[int, ...]
    call: tuple[int, int, int, int]
    constants: dict[str, Any]


def _is_ring(algorithm: int) -> bool:
    return algorithm == _native.ALGORITHMS["ring"]


def _divisor(op: str, world: int) -> int:
    return world if op == "AVG" else 1


def _moved(itemsize: int) -> Any:
    # 16-byte elements move as pairs of words.
    return _MOVED[min(itemsize, 8)]


def plan_reduce_scatter(
    chunk_bytes: int, dtype: str, op: str, algorithm: int, world: int
) -> KernelPlan:
    """Plans a reduce-scatter whose results have ``chunk_bytes`` bytes each."""
    return KernelPlan(
        reduce_scatter_kernel,
        (chunk_bytes,),
        _native.call_words(
            match_bytes=chunk_bytes * world,
            collective=_native.COLLECTIVES["reduce_scatter"],
            dtype=_native.DTYPES[dtype],
            redop=_native.OPS[op],
            algorithm=algorithm,
        ),
        {"RING": _is_ring(algorithm), "DTYPE": DTYPES[dtype], "DIVISOR": _divisor(op, world)},
    )


def plan_all_gather(
    chunk_bytes: int, dtype: int, itemsize: int, algorithm: int, world: int
) -> KernelPlan:
    """Plans an all-gather of ``chunk_bytes`` bytes from each rank; ``dtype`` is a native code."""
    return KernelPlan(
        all_gather_kernel,
        (chunk_bytes,),
        _native.call_words(
            match_bytes=chunk_bytes * world,
            collective=_native.COLLECTIVES["all_gather"],
            dtype=dtype,
            redop=_NONE,
            algorithm=algorithm,
        ),
        {"RING": _is_ring(algorithm), "DTYPE": _moved(itemsize)},
    )


def plan_all_reduce(size_bytes: int, dtype: str, op: str, algorithm: int, world: int) -> KernelPlan:
    """Plans an all-reduce of ``size_bytes`` bytes, cut into chunks of whole lines."""
    share = -(-size_bytes // world)
    chunk_bytes = -(-share // _LINE_BYTES) * _LINE_BYTES
    kind = DTYPES[dtype]
    return KernelPlan(
        all_reduce_kernel,
        (size_bytes, chunk_bytes),
        _native.call_words(
            match_bytes=size_bytes,
            collective=_native.COLLECTIVES["all_reduce"],
            dtype=_native.DTYPES[dtype],
            redop=_native.OPS[op],
            algorithm=algorithm,
        ),
        {
            "RING": _is_ring(algorithm),
            "DTYPE": kind,
            "MOVED": _moved(kind.primitive_bitwidth // 8),
            "DIVISOR": _divisor(op, world),
        },
    )


def arguments_of(
    plan: KernelPlan, ranks: Sequence[RankPointers], timeout_ns: int
) -> tuple[tuple[int, ...] | int, ...]:
    """Returns the numbers that a launch passes to the kernel, as the kernel names them.

    Args:
        plan: the collective.
        ranks: the ranks that the launch carries.
        timeout_ns: deadline of one wait.
    """
    return (
        tagged(rank.table_ptr for rank in ranks),
        # An empty tensor has address 0, which Triton would pass as another type.
        tagged(rank.in_ptr or rank.table_ptr for rank in ranks),
        tagged(rank.out_ptr or rank.table_ptr for rank in ranks),
        *plan.sizes,
        timeout_ns,
        tagged(plan.call),
    )


def launch_kernel(
    plan: KernelPlan,
    ranks: Sequence[RankPointers],
    timeout_ns: int,
    geometry: Geometry,
    health: Callable[[int], int] = lives,
) -> Any:
    """Runs ``plan`` for the ranks of one device, on torch's current stream there.

    In the interpreter the call blocks, and only one rank of a process can run at a time.

    Args:
        plan: the collective.
        ranks: the ranks that this launch carries.
        timeout_ns: deadline of one wait.
        geometry: the communicator's Geometry.
        health: for the interpreter: returns the status of a peer's process, 0 while it lives.

    Returns:
        Triton's CompiledKernel; None in the interpreter.
    """
    grid = (geometry.channels, len(ranks))
    with interpreting(health) if IS_INTERPRETED else nullcontext():
        return plan.kernel[grid](
            *arguments_of(plan, ranks, timeout_ns), **plan.constants, G=geometry, **OPTIONS
        )
