"""The operators ``torch.ops.ringcomm.*``: schemas, kernels, shapes, gradients, inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._library.effects import EffectType

from ringcomm.comm.arguments import PREMUL_SUM, CallChecks, ReduceOp, premul_sum, readable
from ringcomm.comm.functions import root_of
from ringcomm.errors import UnsupportedError
from ringcomm.functional.traced_groups import find

# Keeps inductor's scheduler in step with the program.
#
# NOTE [Order in inductor] inductor turns the tokens of NOTE [Ranks stay in step] into dependencies
# between kernels. It files them under the name of a buffer, where its scheduler looks for the name
# of an operation, so they are lost (torch 2.11 to 2.14, pytorch/pytorch#189209), and the scheduler,
# which reorders to save memory, may exchange two collectives on one rank only. So the operators get
# lowerings that file them under the right name; as dependencies that order, and do not keep the
# earlier result in memory.


@cache
def keep_order(operators: tuple[str, ...]) -> bool:
    """Gives the operators their lowerings; loads inductor, so only once something is compiled."""
    from torch._inductor.lowering import lowerings

    for name in operators:
        operator = getattr(torch.ops.ringcomm, name).default
        lowerings[operator] = _in_order(operator)
    return True


def _in_order(operator: Any) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower: Callable[..., Any] = fallback_handler(  # type: ignore[no-untyped-call]
        operator, add_to_fallback_set=False
    )

    def lower_in_order(*arguments: Any) -> Any:
        graph = V.graph
        before = len(graph.operations)
        result = lower(*arguments)
        previous = graph.effectful_ops.get(EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[before:]:
                name = operation.get_operation_name()
                graph.additional_buffer_deps[name].add(previous.get_name())
        return result

    return lower_in_order


# The operators ``torch.ops.ringcomm.*``: schemas, kernels for every device, and shapes.
#
# All of them take ``group``, a key from :mod:`ringcomm.functional.traced_groups`, and its world
# size; ``op`` is the name of a ``ReduceOp`` and ``factor`` that of PREMUL_SUM (else 1); ``src`` and
# ``dst`` are global ranks. Outputs are contiguous and share no memory with the input.
#
# NOTE [Ranks stay in step] To a compiler these operators look like functions: an unused result may
# be dropped, two equal calls merged, a cheap one computed again in the backward graph. Where the
# ranks' graphs differ (one of them logs a result, another does not), that happens on some ranks
# only, and they hang or exchange wrong data. So the operators are registered as ordered effects:
# AOTAutograd threads a token through all of them, which keeps each call, once, in the order of the
# program, on every rank. Inductor needs NOTE [Order in inductor] besides.

Tensor = torch.Tensor
Splits = Sequence[int] | None

_REDUCING = "(Tensor input, str op, float factor, str group, int world_size) -> Tensor"
_SCHEMAS = {
    "all_gather": "(Tensor input, str group, int world_size) -> Tensor",
    "all_reduce": _REDUCING,
    "all_to_all": "(Tensor input, SymInt[]? output_splits, SymInt[]? input_splits, str group, "
    "int world_size) -> Tensor",
    "broadcast": "(Tensor input, int src, str group, int world_size) -> Tensor",
    "reduce": "(Tensor input, int dst, str group, int world_size) -> Tensor",
    "reduce_scatter": _REDUCING,
}
OPERATORS = tuple(_SCHEMAS)
library = torch.library.Library("ringcomm", "DEF")  # type: ignore[no-untyped-call]


def named(operation: str) -> str:
    """How errors call it, to tell it from the in-place function of the same name."""
    return f"functional.{operation}"


def _expect(holds: bool | torch.SymBool, otherwise: str) -> None:
    """A check of sizes that may be symbols, for which a kernel's own checks are too strict."""
    torch._check(holds, lambda: otherwise)  # type: ignore[no-untyped-call]


def _op_of(name: str, factor: float) -> Any:
    # An unknown name goes on as it is, to be complained about with all others.
    return premul_sum(factor) if name == PREMUL_SUM else getattr(ReduceOp, name, name)


def _check_rows(checks: CallChecks, input: Tensor) -> None:
    checks.tensor("tensor", input)
    if not input.dim():
        checks.fail("tensor: expected at least one dimension, got a scalar; pass tensor.view(1)")


def _all_gather(input: Tensor, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("all_gather"))
    _check_rows(communicator.checks(named("all_gather")), input)
    output = _gathered(input, group, world_size)
    communicator.all_gather_into_tensor(output, readable(input))
    return output


def _gathered(input: Tensor, group: str, world_size: int) -> Tensor:
    _expect(input.dim() > 0, "functional.all_gather: got a scalar")
    return input.new_empty((input.size(0) * world_size, *input.shape[1:]))


def _reduce_scatter(input: Tensor, op: str, factor: float, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("reduce_scatter"))
    checks = communicator.checks(named("reduce_scatter"))
    _check_rows(checks, input)
    if input.size(0) % world_size:
        checks.fail(
            f"tensor: expected dimension 0 divisible by world_size {world_size}, got shape "
            f"{tuple(input.shape)}; pad it"
        )
    output = _scattered(input, op, factor, group, world_size)
    communicator.reduce_scatter_tensor(output, readable(input), _op_of(op, factor))
    return output


def _scattered(input: Tensor, op: str, factor: float, group: str, world_size: int) -> Tensor:
    _expect(input.dim() > 0, "functional.reduce_scatter: got a scalar")
    _expect(
        input.size(0) % world_size == 0,
        f"functional.reduce_scatter: dimension 0 is not divisible by world_size {world_size}",
    )
    return input.new_empty((input.size(0) // world_size, *input.shape[1:]))


def _all_reduce(input: Tensor, op: str, factor: float, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("all_reduce"))
    communicator.checks(named("all_reduce")).tensor("tensor", input)
    output = _like(input).copy_(input)
    communicator.all_reduce(output, _op_of(op, factor))
    return output


def _like(input: Tensor, *_: object) -> Tensor:
    return input.new_empty(input.shape)


def _all_to_all(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: str, world_size: int
) -> Tensor:
    communicator = find(group, world_size, named("all_to_all"))
    checks = communicator.checks(named("all_to_all"))
    _check_rows(checks, input)
    if output_splits is None and input_splits is not None:
        checks.fail("output_splits: expected a list where input_splits is one, got None")
    _check_splits(checks, "input_splits", input_splits, input.size(0))
    if output_splits is not None:
        _check_splits(checks, "output_splits", output_splits, sum(output_splits))
    output = _exchanged(input, output_splits, input_splits, group, world_size)
    communicator.all_to_all_single(output, readable(input), output_splits, input_splits)
    return output


def _check_splits(checks: CallChecks, name: str, splits: Splits, rows: int) -> None:
    world_size = checks.world_size
    if splits is None:
        if rows % world_size:
            checks.fail(
                f"tensor: expected dimension 0 divisible by world_size {world_size}, got {rows} "
                f"rows; pass {name}"
            )
    elif len(splits) != world_size or sum(splits) != rows or min(splits) < 0:
        checks.fail(
            f"{name}: expected {world_size} numbers >= 0, one per rank, with the sum of the rows "
            f"({rows}), got {list(splits)}"
        )


def _exchanged(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: str, world_size: int
) -> Tensor:
    _expect(input.dim() > 0, "functional.all_to_all: got a scalar")
    if output_splits is None:
        return input.new_empty(input.shape)
    return input.new_empty((sum(output_splits), *input.shape[1:]))


def _broadcast(input: Tensor, src: int, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("broadcast"))
    communicator.checks(named("broadcast")).tensor("tensor", input)
    root = root_of(communicator, named("broadcast"), "src", src, None)
    output = _like(input)
    if communicator.rank == root:
        output.copy_(input)
    communicator.broadcast(output, root)
    return output


def _reduce(input: Tensor, dst: int, group: str, world_size: int) -> Tensor:
    """The sum on ``dst``, zeros elsewhere: what :func:`_broadcast` is to gradients."""
    communicator = find(group, world_size, named("reduce"))
    communicator.checks(named("reduce")).tensor("tensor", input)
    root = root_of(communicator, named("reduce"), "dst", dst, None)
    if communicator.rank != root:
        communicator.reduce(readable(input), root)  # which keeps theirs
        return input.new_zeros(input.shape)
    output = _like(input).copy_(input)
    communicator.reduce(output, root)
    return output


_KERNELS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all_gather": (_all_gather, _gathered),
    "all_reduce": (_all_reduce, _like),
    "all_to_all": (_all_to_all, _exchanged),
    "broadcast": (_broadcast, _like),
    "reduce": (_reduce, _like),
    "reduce_scatter": (_reduce_scatter, _scattered),
}


def _register(name: str) -> None:
    kernel, fake = _KERNELS[name]
    # Kernels bring their input into order themselves, so a compiler need not keep its strides.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    library.define(name + _SCHEMAS[name], tags=tags)  # type: ignore[no-untyped-call]
    library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"ringcomm::{name}", fake, lib=library)
    torch.library._register_effectful_op(f"ringcomm::{name}", EffectType.ORDERED, lib=library)


for _name in OPERATORS:
    _register(_name)


# The gradients of the operators: each is the collective that moves data the other way.
#
# NOTE [What the gradient is of] Every rank calls ``backward`` on a scalar of its own, and what it
# gets is the gradient of the sum of all ranks' scalars, as in ``torch.distributed.nn.functional``.
# So a loss that every rank computes alike from collected values counts world_size times; use it on
# one rank's behalf (``loss / world_size``) or collect with AVG.
#
# NOTE [Every rank in the backward] A collective's gradient is a collective. All ranks must take
# part, as often and in the same order as in the forward: on each, the input must require grad and
# the result must reach the scalar, even if by ``+ 0 * result.sum()``.
#
# Factors are real, so the transposed map is the conjugate transposed one, and complex gradients
# need nothing more. PREMUL_SUM's factor is each rank's own and multiplies what arrives there.

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


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    group, world_size = ctx.arguments
    return _ops.reduce_scatter(grad, SUM, 1.0, group, world_size), None, None


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    op, factor, group, world_size = ctx.arguments
    if op not in LINEAR:
        raise no_gradient(named("reduce_scatter"), op)
    gathered = _ops.all_gather(grad / world_size if op == AVG else grad, group, world_size)
    return gathered * factor if op == PREMUL_SUM else gathered, None, None, None, None


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    op, factor, group, world_size = ctx.arguments
    if op not in LINEAR:
        raise no_gradient(named("all_reduce"), op)
    reduced = _ops.all_reduce(grad, AVG if op == AVG else SUM, 1.0, group, world_size)
    return reduced * factor if op == PREMUL_SUM else reduced, None, None, None, None


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    output_splits, input_splits, group, world_size = ctx.arguments
    back = _ops.all_to_all(grad, input_splits, output_splits, group, world_size)
    return back, None, None, None, None


def _broadcast_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _ops.reduce(grad, *ctx.arguments), None, None, None


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _ops.broadcast(grad, *ctx.arguments), None, None, None


_BACKWARDS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather_backward,
    "all_reduce": _all_reduce_backward,
    "all_to_all": _all_to_all_backward,
    "broadcast": _broadcast_backward,
    "reduce": _reduce_backward,
    "reduce_scatter": _reduce_scatter_backward,
}
for _name, _backward in _BACKWARDS.items():
    torch.library.register_autograd(
        f"ringcomm::{_name}", _backward, setup_context=_remember, lib=library
    )
