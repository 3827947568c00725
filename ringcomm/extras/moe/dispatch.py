"""Tokens to the ranks of their experts and back: dispatch and combine."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from ringcomm.comm.functions import Group, communicator_of
from ringcomm.comm.host.arguments import CallChecks
from ringcomm.errors import ArgumentError
from ringcomm.extras.moe import operators
from ringcomm.extras.moe.rows import Tables
from ringcomm.functional.collectives import enter

Tensor = torch.Tensor
_DISPATCH = "moe.dispatch"
_COMBINE = "moe.combine"


class Handle(NamedTuple):
    """The routing of a :func:`dispatch`, by which :func:`combine` brings its rows back.

    Attributes:
        weights: [tokens, k], or None.
        tables: where rows and tokens lie.
        group: the key of the group, and its world size.
    """

    weights: Tensor | None
    tables: Tables
    group: tuple[str, int]


def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    group: Group = None,
    *,
    wire: str | None = None,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor, Handle]:
    """Copies each token to the ranks of its experts; collective.

    Experts are divided evenly over the ranks: of W ranks, rank r has experts r * num_experts / W
    and following. Rows come without padding, and as many as there are. The gradient of ``x`` is the
    sum over k of those of its rows, in FP32; so all ranks must take part in backward.

    Args:
        x: [tokens, hidden] in float32, bfloat16 or float16; any strides, and as many tokens as
            this rank has, even none. One in the heap (``ringcomm.empty``) is not copied first.
        topk_idx: int64 [tokens, k], the experts of each token; -1 means none.
        topk_weights: [tokens, k] in float32 or x's dtype, for :func:`combine`; None on all ranks
            means 1.
        num_experts: of all ranks; a multiple of the world size.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        wire: "fp8" or "int8": rows travel as codes of 8 bits in blocks of 128 with a scale each,
            whatever the nodes; None: as they are. Gradients always travel as they are.
        max_rows: return so many rows, zeros behind the last; None: as many as there are. All
            ranks fail if one gets more.

    Returns:
        rows [n, hidden], the tokens of this rank's experts: by expert, and of one expert in the
        order (rank, token, k); counts int64 [experts of this rank]; and what ``combine`` needs.

    Raises:
        ArgumentError: bad argument here, or more rows than ``max_rows`` on a rank. Nothing was
            copied, and the group stays usable.
        MismatchError: another rank has a bad argument, or other sizes or options than this one.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = enter(_DISPATCH, x, group)
    if not torch.compiler.is_compiling():
        communicator = communicator_of(group, _DISPATCH)
        checks = CallChecks(_DISPATCH, communicator.rank, communicator.world_size)
        num_experts = checks.integer("num_experts", num_experts)
        if max_rows is not None:
            max_rows = checks.integer("max_rows", max_rows)
    rows, counts, *tables = operators.dispatch(
        x,
        topk_idx,
        None if topk_weights is None else topk_weights.detach(),
        num_experts,
        # To the operator -1 means None, and what is below it is refused on all ranks.
        -1 if max_rows is None else -2 if max_rows == -1 else max_rows,
        wire,
        key,
        world_size,
    )
    return rows, counts, Handle(topk_weights, Tables(*tables), (key, world_size))


def combine(y: Tensor, handle: Handle) -> Tensor:
    """Sums the experts' rows of each token, times their weights; collective.

    Products and sums are made in FP32 in the order of k, and the sum is rounded once. A token
    without experts gets zeros. There are gradients for ``y`` and for the weights that
    :func:`dispatch` was given, whose own gradients are refused.

    Args:
        y: [n, hidden], a row for each of those that ``dispatch`` returned, in float32, bfloat16 or
            float16; its hidden size may be another one. One in the heap is not copied first.
        handle: of the dispatch; it may serve several combines.

    Returns:
        [tokens, hidden], the rows of this rank's tokens.

    Raises:
        ArgumentError: bad argument; the group stays usable.
        MismatchError: another rank has a bad argument, or another handle or size than this one.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    if not isinstance(handle, Handle):
        raise ArgumentError(
            f"{_COMBINE}: handle: expected what dispatch() returned third, got {handle!r:.80}"
        )
    if not isinstance(y, Tensor):
        raise ArgumentError(f"{_COMBINE}: y: expected a tensor, got {type(y).__name__}")
    found = operators.combine(y, handle.weights, *handle.tables, *handle.group)
    return cast(Tensor, found)
