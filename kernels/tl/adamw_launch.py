# SPDX-License-Identifier: Apache-2.0
"""Plans and launches of the optimizer's Triton kernels, and their compile-time constants.

The collectives are plans for :func:`ringcomm._tl.launch.launch_kernel`. Their ``out_ptr`` is the
address of a descriptor that the device reads: an AdamWShard, or for a reduce-scatter two addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ringcomm import _native

from .adamw import adamw_shard_kernel
from .fused_steps import (
    adamw_all_gather_kernel,
    grad_norm_kernel,
    reduce_scatter_adamw_all_gather_kernel,
    reduce_scatter_norm_kernel,
)
from .hooks import IS_INTERPRETED, interpreting, lives
from .launch import DTYPES, OPTIONS, KernelPlan

__all__ = [
    "NormKind",
    "ShardKind",
    "launch_adamw_shard",
    "launch_grad_norm",
    "plan_adamw_all_gather",
    "plan_one_pass",
    "plan_reduce_scatter_norm",
    "shard_kind",
]

# Programs of a kernel of one rank. Chosen, not measured: four for each multiprocessor of the
# largest GPUs. In the interpreter programs run one after another.
PROGRAMS = 2 if IS_INTERPRETED else 528
# Elements that make one more program worthwhile.
_PROGRAM_ELEMS = 1024


@dataclass(frozen=True)
class ShardKind:
    """A compile-time argument of the kernels that update a shard; equal on all ranks.

    NOTE [the oldest Triton] of the package says how kernels may pass its attributes on.

    Attributes:
        grad: Triton's type of the gradients.
        param: Triton's type of the parameters.
        master: the FP32 master weights: "own", the parameters themselves; "fp32", a copy;
            "remainder", bfloat16 parameters and 16 bits more; "none", only rounded parameters.
        keeps_max: some group uses amsgrad.
        stochastic: 16-bit parameters are rounded stochastically.
        divisor: the divisor of the gradients' sum.
    """

    grad: Any
    param: Any
    master: str
    keeps_max: bool
    stochastic: bool
    divisor: int


@dataclass(frozen=True)
class NormKind:
    """A compile-time argument of the kernels that sum norms; equal on all ranks.

    Attributes:
        grad: Triton's type of the gradients.
        kind: native code of the norm.
        divisor: the divisor of the gradients' sum.
        stores: the reduced gradients are stored.
        accumulates: the reduced gradients are added to the stored ones.
    """

    grad: Any
    kind: int
    divisor: int
    stores: bool
    accumulates: bool


def shard_kind(
    grad: str,
    param: str,
    op: str,
    world: int,
    *,
    master: str,
    keeps_max: bool,
    stochastic: bool,
) -> ShardKind:
    """Returns the constants that the kernels of a shard are compiled for.

    Args:
        grad: dtype of the gradients, as the native module names it.
        param: dtype of the parameters.
        op: "SUM" or "AVG".
        world: number of ranks.
        master: "fp32", "remainder" or "none"; ignored for FP32 parameters, which
            are their own masters.
        keeps_max: the shard has max_exp_avg_sq.
        stochastic: 16-bit parameters are rounded stochastically.
    """
    own = param == "float32"
    return ShardKind(
        DTYPES[grad],
        DTYPES[param],
        "own" if own else master,
        keeps_max,
        stochastic and not own,
        world if op == "AVG" else 1,
    )


def _is_ring(algorithm: int) -> bool:
    return algorithm == _native.ALGORITHMS["ring"]


def _name_of(dtype: Any) -> str:
    return next(name for name, known in DTYPES.items() if known is dtype)


def _words(
    collective: str, elems: int, grad: str, op: str, result: str, algorithm: int
) -> tuple[int, int, int, int]:
    return _native.call_words(
        match_bytes=elems,
        collective=_native.COLLECTIVES[collective],
        dtype=_native.DTYPES[grad],
        redop=_native.OPS[op],
        algorithm=algorithm,
        root=_native.DTYPES[result],
    )


def plan_reduce_scatter_norm(
    elems: int,
    grad: str,
    op: str,
    kind: int,
    accumulates: bool,
    algorithm: int,
    world: int,
    *,
    stores: bool = True,
) -> KernelPlan:
    """Plans a reduce-scatter of ``elems`` gradients, with the norm whose native code is ``kind``.
    If ``stores`` is false, plans only the norm; this requires a world of one rank."""
    norm = NormKind(DTYPES[grad], kind, world if op == "AVG" else 1, stores, accumulates)
    return KernelPlan(
        reduce_scatter_norm_kernel,
        (elems,),
        _words("reduce_scatter_norm", elems, grad, op, "float32", algorithm),
        {"RING": _is_ring(algorithm), "NORM": norm},
    )


def plan_adamw_all_gather(elems: int, kind: ShardKind, algorithm: int) -> KernelPlan:
    """Plans the update of a bucket of ``elems`` parameters from gradient shards."""
    grad, param = _name_of(kind.grad), _name_of(kind.param)
    return KernelPlan(
        adamw_all_gather_kernel,
        (elems,),
        _words("adamw_all_gather", elems, grad, "SUM", param, algorithm),
        {"RING": _is_ring(algorithm), "KIND": kind},
    )


def plan_one_pass(elems: int, kind: ShardKind, op: str, algorithm: int) -> KernelPlan:
    """Plans a whole step of a bucket of ``elems`` parameters."""
    grad, param = _name_of(kind.grad), _name_of(kind.param)
    return KernelPlan(
        reduce_scatter_adamw_all_gather_kernel,
        (elems,),
        _words("reduce_scatter_adamw_all_gather", elems, grad, op, param, algorithm),
        {"RING": _is_ring(algorithm), "KIND": kind},
    )


def launch_adamw_shard(shard_ptr: int, grad_ptr: int, elems: int, kind: ShardKind) -> None:
    """Updates a shard of ``elems`` elements from its chunk's gradient, on the current stream.

    Args:
        shard_ptr: address of the AdamWShard.
        grad_ptr: address of the gradient.
        elems: elements of the shard.
        kind: constants of the kernel; the divisor is 1.
    """
    _launch(
        lambda grid: adamw_shard_kernel[grid](shard_ptr, grad_ptr, elems, KIND=kind, **OPTIONS),
        elems,
    )


def launch_grad_norm(grad_ptr: int, grad: str, elems: int, kind: int, words_ptr: int) -> None:
    """Adds the norm of a gradient to the words at ``words_ptr``, on the current stream."""
    norm = NormKind(DTYPES[grad], kind, 1, False, False)
    _launch(
        lambda grid: grad_norm_kernel[grid](grad_ptr, words_ptr, elems, NORM=norm, **OPTIONS), elems
    )


def _launch(run: Callable[[tuple[int]], object], elems: int) -> None:
    programs = max(1, min(PROGRAMS, elems // _PROGRAM_ELEMS))
    with interpreting(lives) if IS_INTERPRETED else nullcontext():
        run((programs,))
