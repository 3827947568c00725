"""The public functions: they turn groups and ops into plain values and call the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed import DebugLevel, get_debug_level

from ringcomm.comm.arguments import OP_CODES, PREMUL_SUM, SUM, PremulSum, ReduceOp, reduction_of
from ringcomm.comm.groups import Group, communicator_of
from ringcomm.errors import ArgumentError, MismatchError, where
from ringcomm.functional.ops import LINEAR, OPERATORS, keep_order, named, no_gradient
from ringcomm.functional.traced_groups import evaluated_while_tracing, place_of

Tensor = torch.Tensor
_ops = torch.ops.ringcomm
_NAME_AT = {id(getattr(ReduceOp, name)): name for name in OP_CODES if name != PREMUL_SUM}


def all_gather(tensor: Tensor, group: Group = None) -> Tensor:
    """The tensors of all ranks, one after the other along dimension 0.

    Its gradient is :func:`reduce_scatter` with SUM.

    Args:
        tensor: [n, ...], of one shape and dtype on all ranks; any strides.
        group: a Communicator; None means the default group.

    Returns:
        [world_size * n, ...], contiguous.

    Raises:
        ArgumentError: bad argument; no peer was disturbed.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = _enter("all_gather", tensor, group)
    return cast(Tensor, _ops.all_gather(tensor, key, world_size))


def reduce_scatter(tensor: Tensor, op: Any = SUM, group: Group = None) -> Tensor:
    """Combines the tensors of all ranks; rank r gets the r-th of world_size equal chunks.

    Its gradient is :func:`all_gather`, divided by world_size for AVG, times this rank's factor
    for PREMUL_SUM.

    Args:
        tensor: [world_size * n, ...], of one shape and dtype on all ranks; any strides.
        op: a ``ReduceOp`` or ``premul_sum(factor)``.
        group: a Communicator; None means the default group.

    Returns:
        [n, ...], contiguous.

    Raises:
        ArgumentError: bad argument; no peer was disturbed.
        UnsupportedError: ``tensor`` requires grad and ``op`` is not SUM, AVG or PREMUL_SUM.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    name, factor = _parts_of(op, "reduce_scatter", group)
    key, world_size = _enter("reduce_scatter", tensor, group, name)
    return cast(Tensor, _ops.reduce_scatter(tensor, name, factor, key, world_size))


def all_reduce(tensor: Tensor, op: Any = SUM, group: Group = None) -> Tensor:
    """Combines the tensors of all ranks element by element.

    Its gradient is :func:`all_reduce` with the same op; for PREMUL_SUM it is the SUM, times this
    rank's factor.

    Args:
        tensor: of one shape and dtype on all ranks; any strides.
        op: a ``ReduceOp`` or ``premul_sum(factor)``.
        group: a Communicator; None means the default group.

    Returns:
        A contiguous tensor of the shape of ``tensor``.

    Raises:
        ArgumentError: bad argument; no peer was disturbed.
        UnsupportedError: ``tensor`` requires grad and ``op`` is not SUM, AVG or PREMUL_SUM.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    name, factor = _parts_of(op, "all_reduce", group)
    key, world_size = _enter("all_reduce", tensor, group, name)
    return cast(Tensor, _ops.all_reduce(tensor, name, factor, key, world_size))


def all_to_all(
    tensor: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Cuts the tensor along dimension 0, sends piece r to rank r, and joins what arrives.

    Its gradient is :func:`all_to_all` with the splits swapped.

    Args:
        tensor: [n, ...], of one dtype and row shape on all ranks; any strides.
        output_splits: rows from each rank; None, for equal pieces, only if ``input_splits`` is
            None too, since what is sent does not tell what arrives.
        input_splits: rows to each rank, with the sum n; None means equal pieces.
        group: a Communicator; None means the default group.

    Returns:
        [sum(output_splits), ...], contiguous.

    Raises:
        ArgumentError: bad argument; no peer was disturbed.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = _enter("all_to_all", tensor, group)
    return cast(Tensor, _ops.all_to_all(tensor, output_splits, input_splits, key, world_size))


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """The ``tensor`` of rank ``src``, on every rank.

    Its gradient is the sum of all ranks' gradients on ``src`` and zeros elsewhere.

    Args:
        tensor: of one shape and dtype on all ranks; any strides. Only the values of ``src``
            matter, but for a gradient it must require grad on all ranks.
        src: the global rank that has the data.
        group: a Communicator; None means the default group.

    Returns:
        A contiguous tensor of the shape of ``tensor``.

    Raises:
        ArgumentError: bad argument; no peer was disturbed.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = _enter("broadcast", tensor, group)
    return cast(Tensor, _ops.broadcast(tensor, src, key, world_size))


def _enter(function: str, tensor: Any, group: Group, op: str = "SUM") -> tuple[str, int]:
    """Checks what can be checked without the shape; returns the group's key and world size."""
    operation = named(function)
    key, rank, world_size = place_of(group, operation)
    if torch.compiler.is_compiling():
        _prepare_to_compile()
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{where(operation, rank, world_size)}: tensor: expected a tensor, got "
            f"{type(tensor).__name__}"
        )
    differentiable = tensor.requires_grad and torch.is_grad_enabled()
    if differentiable and op not in LINEAR:
        raise no_gradient(where(operation, rank, world_size), op)
    if not torch.compiler.is_compiling() and get_debug_level() == DebugLevel.DETAIL:
        _check_agreement(operation, differentiable, group)
    return key, world_size


def _parts_of(op: Any, function: str, group: Group) -> tuple[str, float]:
    """Name and factor of an op; traceable."""
    if not torch.compiler.is_compiling():
        try:
            reduction = reduction_of(op)
        except ArgumentError as error:
            raise _bad_op(function, group, str(error)) from None
        return reduction.name, reduction.factor
    if isinstance(op, PremulSum):
        return PREMUL_SUM, op.factor
    # Ops of torch are opaque to dynamo, except for their id, which it guards.
    name = _name_at(id(op))
    if not name:
        raise _bad_op(
            function, group, "op: torch.compile knows ReduceOp.SUM and the like, and premul_sum"
        )
    return name, 1.0


@evaluated_while_tracing
def _prepare_to_compile() -> bool:
    return keep_order(OPERATORS)


@evaluated_while_tracing
def _name_at(identity: int) -> str:
    return _NAME_AT.get(identity, "")


def _bad_op(function: str, group: Group, text: str) -> ArgumentError:
    operation = named(function)
    _, rank, world_size = place_of(group, operation)
    return ArgumentError(f"{where(operation, rank, world_size)}: {text}")


def _check_agreement(operation: str, differentiable: bool, group: Group) -> None:
    """Raises on every rank if only some ranks will take part in the backward.

    It costs a collective, so it runs only with TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    communicator = communicator_of(group, operation)
    mine = torch.tensor([differentiable], dtype=torch.uint8, device=communicator.device)
    everyone = mine.new_empty(communicator.world_size)
    communicator.all_gather_into_tensor(everyone, mine)
    communicator.finish_host_side()
    flags: list[int] = everyone.tolist()
    if len(set(flags)) > 1:
        raise MismatchError(
            f"{where(operation, communicator.rank, communicator.world_size)}: expected the tensor "
            "to require grad on all ranks or on none, since its gradient is a collective; it does "
            f"on ranks {[rank for rank, flag in enumerate(flags) if flag]} of the group, and not "
            f"on ranks {[rank for rank, flag in enumerate(flags) if not flag]}"
        )
