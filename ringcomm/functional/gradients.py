"""The gradients of the operators: each is the collective that moves data the other way.

NOTE [What the gradient is of]
Every rank calls ``backward`` on a scalar of its own, and what it gets is the gradient of the
sum of all ranks' scalars, as in ``torch.distributed.nn.functional``. So a loss that every rank
computes alike from collected values counts world_size times; use it on one rank's behalf
(``loss / world_size``) or collect with AVG.

NOTE [Every rank in the backward]
A collective's gradient is a collective. All ranks must take part, as often and in the same order
as in the forward: on each, the input must require grad and the result must reach the scalar,
even if by ``+ 0 * result.sum()``.

Factors are real, so the transposed map is the conjugate transposed one, and complex gradients
need nothing more. PREMUL_SUM's factor is each rank's own and multiplies what arrives there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringcomm.comm.reduce_ops import PREMUL_SUM
from ringcomm.errors import UnsupportedError
from ringcomm.functional.ops import library, named

Tensor = torch.Tensor
SUM = "SUM"
AVG = "AVG"
LINEAR = (SUM, AVG, PREMUL_SUM)
_ops = torch.ops.ringcomm


def no_gradient(where: str, op: str) -> UnsupportedError:
    """The error for an op that has no dual."""
    return UnsupportedError(
        f"{where}: expected one of the ops {', '.join(LINEAR)} for a tensor that requires grad, "
        f"got {op}, which has no gradient here; call .detach() first, or use torch.no_grad()"
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _all_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    group, world_size = ctx.arguments
    return _ops.reduce_scatter(grad, SUM, 1.0, group, world_size), None, None


def _reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    op, factor, group, world_size = ctx.arguments
    if op not in LINEAR:
        raise no_gradient(named("reduce_scatter"), op)
    gathered = _ops.all_gather(grad / world_size if op == AVG else grad, group, world_size)
    return gathered * factor if op == PREMUL_SUM else gathered, None, None, None, None


def _all_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    op, factor, group, world_size = ctx.arguments
    if op not in LINEAR:
        raise no_gradient(named("all_reduce"), op)
    reduced = _ops.all_reduce(grad, AVG if op == AVG else SUM, 1.0, group, world_size)
    return reduced * factor if op == PREMUL_SUM else reduced, None, None, None, None


def _all_to_all(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    output_splits, input_splits, group, world_size = ctx.arguments
    back = _ops.all_to_all(grad, input_splits, output_splits, group, world_size)
    return back, None, None, None, None


def _broadcast(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _ops.reduce(grad, *ctx.arguments), None, None, None


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _ops.broadcast(grad, *ctx.arguments), None, None, None


_BACKWARDS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}
for _name, _backward in _BACKWARDS.items():
    torch.library.register_autograd(
        f"ringcomm::{_name}", _backward, setup_context=_remember, lib=library
    )
