"""Where sequence parallelism begins and ends: what all ranks have alike, and its parts by rank.

The two are each other's gradient. :func:`split_sequence` gathers gradients, so that what comes
before it has the same, whole gradients on all ranks; :func:`join_sequence` takes of gradients that
all ranks have alike this rank's part, so that a loss which all compute alike counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ringcomm.comm.arguments import readable
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.groups import Group
from ringcomm.functional.collectives import enter, linear_tangent, named
from ringcomm.functional.operators import Batching, Derivatives, register
from ringcomm.functional.traced_groups import find

Tensor = torch.Tensor


def split_sequence(tensor: Tensor, group: Group = None) -> Tensor:
    """This rank's tokens of a sequence that all ranks have whole; its gradient is gathered.

    Args:
        tensor: [..., world_size * n, k], alike on all ranks.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [..., n, k]: tokens rank * n and following.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
    """
    return _called("split_sequence", tensor, group)


def join_sequence(tensor: Tensor, group: Group = None) -> Tensor:
    """The tokens of all ranks; its gradient is this rank's part of one that all have alike.

    So all ranks must go on alike with the result. Where each goes its own way ``all_gather`` has
    the right gradient.

    Args:
        tensor: [..., n, k], of one shape and dtype on all ranks.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [..., world_size * n, k], rank by rank.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    return _called("join_sequence", tensor, group)


def _called(function: str, tensor: Tensor, group: Group) -> Tensor:
    key, world_size = enter(function, tensor, group)
    return cast(Tensor, getattr(torch.ops.ringcomm, function)(tensor, key, world_size))


def _split(tensor: Tensor, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("split_sequence"))
    checks = communicator.checks(named("split_sequence"))
    checks.tensor("tensor", tensor)
    if tensor.dim() < 2 or tensor.size(-2) % world_size:
        checks.fail(
            f"tensor: expected [..., tokens, columns] with tokens that world_size {world_size} "
            f"divides, got {tuple(tensor.shape)}; pad it"
        )
    rows = tensor.size(-2) // world_size
    part = tensor.narrow(-2, communicator.rank * rows, rows)
    return part.clone(memory_format=torch.contiguous_format)


def _shape_of_part(tensor: Tensor, group: str, world_size: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:-2], tensor.size(-2) // world_size, tensor.size(-1)))


def _join(tensor: Tensor, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("join_sequence"))
    checks = communicator.checks(named("join_sequence"))
    checks.tensor("tensor", tensor)
    if tensor.dim() < 2:
        checks.fail(f"tensor: expected [..., tokens, columns], got {tuple(tensor.shape)}")
    return gathered_rows(communicator, tensor)


def gathered_rows(communicator: Communicator, tensor: Tensor) -> Tensor:
    """Returns [..., n, k] of all ranks as [..., world_size * n, k], rank by rank."""
    if tensor.dim() == 2:
        whole = tensor.new_empty((communicator.world_size * tensor.size(0), tensor.size(1)))
        communicator.all_gather_into_tensor(whole, readable(tensor))
        return whole
    by_rank = tensor.new_empty((communicator.world_size, *tensor.shape))
    communicator.all_gather_into_tensor(by_rank, readable(tensor))
    return by_rank.movedim(0, -3).flatten(-3, -2)


def _shape_of_whole(tensor: Tensor, group: str, world_size: int) -> Tensor:
    return tensor.new_empty((*tensor.shape[:-2], tensor.size(-2) * world_size, tensor.size(-1)))


_SCHEMA = "(Tensor tensor, str group, int world_size) -> Tensor"
_ops = torch.ops.ringcomm


def _remember(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.place = inputs[1:]


def _gradient_of_part(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _ops.join_sequence(grad, *ctx.place), None, None


def _gradient_of_whole(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _ops.split_sequence(grad, *ctx.place), None, None


def _register(
    name: str,
    kernel: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    gradient: Callable[..., tuple[Any, ...]],
) -> None:
    derivatives = Derivatives(gradient, linear_tangent(name), _remember)
    batching = Batching(0, least_dims=2)
    register(name, _SCHEMA, kernel, shape, derivatives=derivatives, batching=batching)


_register("split_sequence", _split, _shape_of_part, _gradient_of_part)
_register("join_sequence", _join, _shape_of_whole, _gradient_of_whole)
