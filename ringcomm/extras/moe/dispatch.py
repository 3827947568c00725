# SPDX-License-Identifier: Apache-2.0
"""Dispatch sends tokens to the ranks of their experts, and combine returns the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import Group, communicator_of
from ringcomm.comm.host.arguments import DTYPE_CODES, CallChecks, readable, size_bytes
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras.moe import devices, nodes
from ringcomm.extras.moe.rows import (
    BACKWARD,
    COMBINE,
    DISPATCH,
    ENTRY_WORDS,
    FLOAT_BYTES,
    UNWEIGHTED,
    WANTS_GRADIENT,
    WEIGHTED,
    WEIGHTS,
    WORD_BYTES,
    Outboxes,
    Routes,
    RowsHeader,
    Tables,
    check_combined,
    check_routes,
    check_rows,
    check_weights,
    exchange,
    lendable,
    new_rows,
    outboxes_of,
    prepared,
    reading,
    rows_by_rank,
    run_native,
    tables_bytes,
    usable,
    write_tables,
)
from ringcomm.functional.collectives import Derivatives, enter, no_forward_mode, register

Tensor = torch.Tensor


class _Published(NamedTuple):
    """The data that a rank publishes in a call: its header, and tensors that local peers read."""

    header: RowsHeader
    kept: tuple[Tensor, ...]


# ---- dispatch ---------------------------------------------------------------------------------


def _publish_routes(
    comm: Communicator, outboxes: Outboxes, operation: str, r: Routes
) -> _Published:
    checks = comm.engine.checks(operation)
    check_routes(checks, r)
    x = r.x.detach()
    lent = r.compression is None and lendable(comm, x)
    tables, payload = outboxes.take(tables_bytes(r), 0 if lent else len(x) * r.payload_bytes)
    write_tables(checks, r, tables)
    if lent:
        payload = x
    else:
        r.write_payload(payload)
    header = r.header()._replace(
        lent=int(lent),
        payload=outboxes.offset_of(payload),
        tables=outboxes.offset_of(tables),
    )
    return _Published(header, (x, tables, payload))


def _dispatch(*arguments: Any) -> tuple[Tensor, ...]:
    operation = "moe.dispatch"
    routes = Routes(*arguments)
    comm = usable(routes.group, routes.world_size, operation)
    if comm.launches:
        return devices.dispatch(comm, operation, routes)
    if comm.num_nodes > 1:
        return nodes.dispatch(comm, operation, routes)
    outboxes = outboxes_of(comm)
    published, refusal = prepared(lambda: _publish_routes(comm, outboxes, operation, routes))
    mine = RowsHeader(DISPATCH, refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    # Up to here a call fails on all ranks or on none, so the ranks' counters agree.
    outboxes.calls += 1
    counts_ptrs = outboxes.at([header.tables for header in headers])
    count = rows_by_rank(comm, headers, counts_ptrs)
    with reading(comm, operation, headers):
        return _pull_tokens(comm, outboxes, routes, headers, (counts_ptrs, count))


def _pull_tokens(
    comm: Communicator,
    outboxes: Outboxes,
    routes: Routes,
    headers: Sequence[RowsHeader],
    found: tuple[list[int], int],
) -> tuple[Tensor, ...]:
    counts_ptrs, count = found
    x, k, experts = routes.x, headers[0].k, headers[0].experts
    here = experts // comm.world_size
    room = count if routes.limit < 0 else routes.limit
    order_ptrs = [ptr + experts * WORD_BYTES for ptr in counts_ptrs]
    tokens_ptrs = outboxes.at([header.payload for header in headers])
    expert_rows = torch.empty(len(x), k, ENTRY_WORDS, dtype=torch.int64, device="cpu")
    sources = torch.empty(room, _native.SOURCE_WORDS, dtype=torch.int64, device="cpu")
    counts = torch.empty(here, dtype=torch.int64, device="cpu")
    _native.find_expert_rows(
        order_ptrs, counts_ptrs, comm.rank, experts, len(x) * k, expert_rows.data_ptr()
    )
    first = comm.rank * here
    _native.list_sources(
        order_ptrs, counts_ptrs, first, here, k, sources.data_ptr(), counts.data_ptr()
    )
    sources[count:] = -1
    rows = routes.read_rows(comm, sources, tokens_ptrs)
    row_weights = torch.empty(room if headers[0].weighted else 0, dtype=torch.float32, device="cpu")
    if headers[0].weighted:
        weights_ptrs = [
            order_ptr + header.tokens * k * WORD_BYTES
            for order_ptr, header in zip(order_ptrs, headers, strict=True)
        ]
        second = sources.data_ptr() + ENTRY_WORDS * WORD_BYTES
        _native.copy_rows(
            second, _native.SOURCE_WORDS, room, weights_ptrs, FLOAT_BYTES, row_weights.data_ptr()
        )
    stamp = torch.tensor([outboxes.calls, count], dtype=torch.int64, device="cpu")
    return rows, counts, expert_rows, sources, row_weights, stamp


def _shape_of_dispatched(*arguments: Any) -> tuple[Tensor, ...]:
    x, topk_idx, topk_weights, num_experts, max_rows, _, _, world_size = arguments
    room: Any = max_rows
    if max_rows < 0:
        room = torch.library.get_ctx().new_dynamic_size()
    weighted = topk_weights is not None
    return (
        x.new_empty((room, x.size(1))),
        topk_idx.new_empty((num_experts // world_size,)),
        topk_idx.new_empty((*topk_idx.shape, ENTRY_WORDS)),
        topk_idx.new_empty((room, _native.SOURCE_WORDS)),
        x.new_empty((room if weighted else 0,), dtype=torch.float32),
        # On the CPU, so that the host reads it without waiting for a device.
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


# ---- combine ----------------------------------------------------------------------------------


def _publish_rows(
    comm: Communicator, outboxes: Outboxes, rows: Tensor, count: int, header: RowsHeader
) -> _Published:
    """Publishes the first ``count`` rows; over several nodes, publishes only their header."""
    rows = rows.detach()[:count]
    header = header._replace(hidden=rows.size(1), dtype=DTYPE_CODES[rows.dtype], tokens=count)
    if comm.num_nodes > 1:
        return _Published(header, (rows,))
    lent = lendable(comm, rows)
    [payload] = outboxes.take(0 if lent else size_bytes(rows))
    if lent:
        payload = rows
    else:
        payload.view(rows.dtype).view(rows.shape).copy_(rows)
    header = header._replace(lent=int(lent), payload=outboxes.offset_of(payload))
    return _Published(header, (payload,))


def _combine(y: Tensor, weights: Tensor | None, *rest: Any) -> Tensor:
    expert_rows, sources, _, stamp, group, world_size = rest
    operation = "moe.combine"
    comm = usable(group, world_size, operation)
    outboxes = outboxes_of(comm)
    number, count = stamp.tolist()
    base = RowsHeader(COMBINE, number, k=expert_rows.size(1), weighted=int(weights is not None))

    def publish() -> _Published:
        checks = comm.engine.checks(operation)
        check_combined(checks, y, sources)
        if weights is not None:
            check_weights(checks, weights, tuple(expert_rows.shape[:2]), y.dtype)
        return _publish_rows(comm, outboxes, y, count, base)

    published, refusal = prepared(publish)
    mine = base._replace(refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    with reading(comm, operation, headers):
        table = readable(expert_rows)
        if comm.num_nodes == 1:
            ptrs = outboxes.at([header.payload for header in headers])
        else:
            given = (y.detach()[:count], sources[:count], table)
            table, (ptrs, _kept) = nodes.fetch_rows(comm, outboxes, *given)
        out = new_rows(comm, y, expert_rows.size(0))
        wide = None if weights is None else readable(weights.detach().float())
        run_native(
            comm,
            operation,
            "sum_rows",
            table.data_ptr(),
            ptrs,
            expert_rows.size(0),
            expert_rows.size(1),
            0 if wide is None else wide.data_ptr(),
            DTYPE_CODES[y.dtype],
            y.size(1),
            out.data_ptr(),
        )
    return out


def _shape_of_combined(y: Tensor, weights: Tensor | None, expert_rows: Tensor, *_: Any) -> Tensor:
    return y.new_empty((expert_rows.size(0), y.size(1)))


# ---- the gradient of combine ------------------------------------------------------------------


def _published_tokens(
    comm: Communicator,
    outboxes: Outboxes,
    operation: str,
    headers: Sequence[RowsHeader],
    given: tuple[Tensor, Tensor],
) -> nodes.Lent:
    """Returns the addresses of the gradients of all ranks' tokens."""
    grad, expert_rows = given[0].detach(), readable(given[1])
    if comm.num_nodes == 1:
        return outboxes.at([header.payload for header in headers]), []

    def write(to: Tensor) -> None:
        to.view(grad.dtype).view(grad.shape).copy_(grad)

    row_bytes = grad.size(1) * grad.element_size()
    return nodes.share_tokens(comm, outboxes, expert_rows, row_bytes, write)


def _combine_backward(grad: Tensor, y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    expert_rows, sources, row_weights, stamp, weighting, group, world_size = rest
    operation = "moe.combine_backward"
    comm = usable(group, world_size, operation)
    outboxes = outboxes_of(comm)
    number, _ = stamp.tolist()
    base = RowsHeader(BACKWARD, number, weighted=int(weighting > UNWEIGHTED), wants=weighting)

    def publish() -> _Published:
        check_rows(comm.engine.checks(operation), "grad", grad)
        return _publish_rows(comm, outboxes, grad, grad.size(0), base)

    published, refusal = prepared(publish)
    mine = base._replace(refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    table = readable(sources)
    with reading(comm, operation, headers):
        of_y = new_rows(comm, y, y.size(0))
        ptrs, _kept = _published_tokens(comm, outboxes, operation, headers, (grad, expert_rows))
        if weighting == UNWEIGHTED:
            row_bytes = grad.size(1) * grad.element_size()
            entries = (table.data_ptr(), _native.SOURCE_WORDS, y.size(0), ptrs)
            run_native(comm, operation, "copy_rows", *entries, row_bytes, of_y.data_ptr())
            return of_y, _no_gradient(grad)
        dots = y.new_empty((y.size(0), 1), dtype=torch.float32)
        dense = readable(y.detach())
        run_native(
            comm,
            operation,
            "scale_rows",
            table.data_ptr(),
            y.size(0),
            ptrs,
            row_weights.data_ptr(),
            dense.data_ptr(),
            DTYPE_CODES[y.dtype],
            y.size(1),
            of_y.data_ptr(),
            dots.data_ptr(),
        )
    if not any(header.wants == WANTS_GRADIENT for header in headers):
        return of_y, _no_gradient(grad)
    of_weights = _weight_gradients(comm, dots, Tables(expert_rows, table, row_weights, stamp))
    return of_y, of_weights if weighting == WANTS_GRADIENT else _no_gradient(grad)


def _no_gradient(grad: Tensor) -> Tensor:
    return grad.new_empty((0, 0), dtype=torch.float32)


def _weight_gradients(comm: Communicator, dots: Tensor, tables: Tables) -> Tensor:
    """Returns the weights' gradients [tokens, k]: the ranks of experts send one number per row."""
    operation = "moe.combine_backward"
    outboxes, expert_rows = outboxes_of(comm), readable(tables.expert_rows)
    number, count = tables.stamp.tolist()
    if comm.num_nodes > 1:
        with reading(comm, operation, ()):
            return nodes.send_numbers(comm, dots[:count], tables.sources[:count], expert_rows)
    base = RowsHeader(WEIGHTS, number)
    published, refusal = prepared(lambda: _publish_rows(comm, outboxes, dots, count, base))
    mine = base._replace(refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    with reading(comm, operation, headers):
        of_weights = dots.new_empty(expert_rows.shape[:2])
        ptrs = outboxes.at([header.payload for header in headers])
        entries = (expert_rows.data_ptr(), ENTRY_WORDS, of_weights.numel(), ptrs)
        run_native(comm, operation, "copy_rows", *entries, FLOAT_BYTES, of_weights.data_ptr())
    return of_weights


def _shape_of_gradients(grad: Tensor, y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    expert_rows, weighting = rest[0], rest[4]
    shape = tuple(expert_rows.shape[:2]) if weighting == WANTS_GRADIENT else (0, 0)
    return y.new_empty(y.shape), grad.new_empty(shape, dtype=torch.float32)


# ---- the operators ----------------------------------------------------------------------------

_ops = torch.ops.ringcomm


def _remember_dispatch(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    _, _, expert_rows, sources, row_weights, stamp = output
    ctx.mark_non_differentiable(row_weights)
    ctx.save_for_backward(expert_rows, sources, stamp)
    ctx.group = inputs[6:]


def _gradients_of_dispatch(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    expert_rows, sources, stamp = ctx.saved_tensors
    none = grad.new_empty(0, dtype=torch.float32)
    of_x = _ops.moe_combine(grad, None, expert_rows, sources, none, stamp, *ctx.group)
    return (of_x, *[None] * 7)


def _remember_combine(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    y, weights, expert_rows, sources, row_weights, stamp = inputs[:6]
    # The weights are saved only to let autograd raise if they change before backward.
    ctx.save_for_backward(y, weights, expert_rows, sources, row_weights, stamp)
    ctx.group = inputs[6:]


def _gradients_of_combine(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    y, weights, expert_rows, sources, row_weights, stamp = ctx.saved_tensors
    wants = weights is not None and ctx.needs_input_grad[1]
    weighting = UNWEIGHTED if weights is None else WANTS_GRADIENT if wants else WEIGHTED
    of_y, of_weights = _ops.moe_combine_backward(
        grad, y, expert_rows, sources, row_weights, stamp, weighting, *ctx.group
    )
    return (of_y, of_weights.to(weights.dtype) if wants else None, *[None] * 6)


def _refuse_again(ctx: Any, *_: Any) -> Any:
    raise UnsupportedError(
        "moe.combine_backward: the gradient of combine has no gradient of its own; do not call "
        "backward(create_graph=True) or torch.autograd.grad(create_graph=True) through it"
    )


def _refuse_tangents(inputs: Sequence[Any], has_tangent: bool) -> None:
    if has_tangent:
        raise no_forward_mode(
            "moe.combine_backward",
            "forward mode over reverse mode would differentiate the gradient of combine again; "
            "use torch.func.jvp or jacfwd without a gradient inside",
        )


def _tangent_of_dispatch(
    inputs: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, ...]:
    """Copies the tokens' tangents to the rows to which dispatch copied the tokens."""
    rows, _, expert_rows, sources, _, stamp = results
    none = rows.new_empty(0, dtype=torch.float32)
    of_rows, _ = _ops.moe_combine_backward(
        tangents[0], rows, expert_rows, sources, none, stamp, UNWEIGHTED, *inputs[6:]
    )
    return (of_rows, *[None] * 5)


def _tangent_of_combine(
    inputs: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]
) -> Tensor:
    y, weights, *rest = inputs
    of_y: Tensor = _ops.moe_combine(tangents[0], weights, *rest)
    return of_y if weights is None else of_y + _ops.moe_combine(y, tangents[1], *rest)


_GROUP = "str group, int world_size"
register(
    "moe_dispatch",
    "(Tensor x, Tensor topk_idx, Tensor? topk_weights, int num_experts, SymInt max_rows, "
    f"str? compression, {_GROUP}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _shape_of_dispatched,
    derivatives=Derivatives(_gradients_of_dispatch, _tangent_of_dispatch, _remember_dispatch),
)
register(
    "moe_combine",
    "(Tensor y, Tensor? weights, Tensor expert_rows, Tensor sources, Tensor row_weights, "
    f"Tensor stamp, {_GROUP}) -> Tensor",
    _combine,
    _shape_of_combined,
    derivatives=Derivatives(_gradients_of_combine, _tangent_of_combine, _remember_combine),
)
register(
    "moe_combine_backward",
    "(Tensor grad, Tensor y, Tensor expert_rows, Tensor sources, Tensor row_weights, Tensor stamp, "
    f"int weighting, {_GROUP}) -> (Tensor, Tensor)",
    _combine_backward,
    _shape_of_gradients,
    derivatives=Derivatives(
        _refuse_again, None, lambda ctx, inputs, output: None, _refuse_tangents
    ),
)


# ---- The public calls: dispatch and combine ------------------------------------------------------

_DISPATCH = "moe.dispatch"
_COMBINE = "moe.combine"


class Handle(NamedTuple):
    """The routing of a :func:`dispatch`, by which :func:`combine` returns rows to their tokens.

    Attributes:
        weights: [tokens, k], or None.
        tables: the positions of rows and tokens.
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
    compression: str | None = None,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor, Handle]:
    """Copies each token to the ranks of its experts; collective.

    Experts are divided evenly over the W ranks: rank r has num_experts / W experts, the first of
    which is number r * num_experts / W. The result has as many rows as arrive, without padding. The
    gradient of a token in ``x`` is the FP32 sum of the gradients of its k rows, so all ranks must
    take part in backward.

    Args:
        x: [tokens, hidden] in float32, bfloat16 or float16; any strides. The number of tokens may
            differ between ranks, and may be 0. A tensor in the heap (``ringcomm.empty``) is not
            copied first.
        topk_idx: int64 [tokens, k], the experts of each token; -1 means none.
        topk_weights: [tokens, k] in float32 or x's dtype, for :func:`combine`; None on all ranks
            means 1.
        num_experts: number of experts of all ranks; a multiple of the world size.
        group: a Communicator, process group of the backend or mesh; None means the default group.
        compression: "fp8" or "int8" sends rows quantized to 8 bits, in blocks of 128 with one scale
            each, even within a node; None does not quantize. Gradients are never quantized.
        max_rows: number of rows to return, with zeros after the rows that arrive; None returns only
            the rows that arrive. All ranks raise if one rank would get more than ``max_rows``.

    Returns:
        rows [n, hidden], the tokens of this rank's experts: ordered by expert, and for one expert
        by (rank, token, k); counts int64 [experts of this rank]; and the handle for
        :func:`combine`.

    Raises:
        ArgumentError: bad argument here, or more rows than ``max_rows`` on a rank. Nothing was
            copied, and the group stays usable.
        MismatchError: another rank has a bad argument, or sizes or options other than this rank's.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = enter(_DISPATCH, x, group)
    if not torch.compiler.is_compiling():
        communicator = communicator_of(group, _DISPATCH)
        checks = CallChecks(_DISPATCH, communicator.rank, communicator.world_size)
        num_experts = checks.integer("num_experts", num_experts)
        if max_rows is not None:
            max_rows = checks.integer("max_rows", max_rows)
    rows, counts, *tables = _ops.moe_dispatch(
        x,
        topk_idx,
        None if topk_weights is None else topk_weights.detach(),
        num_experts,
        # The operator takes -1 as None, and refuses smaller numbers on all ranks.
        -1 if max_rows is None else -2 if max_rows == -1 else max_rows,
        compression,
        key,
        world_size,
    )
    return rows, counts, Handle(topk_weights, Tables(*tables), (key, world_size))


def combine(y: Tensor, handle: Handle) -> Tensor:
    """Sums the experts' rows of each token, times their weights; collective.

    Products and sums are made in FP32 in the order of k, and the sum is rounded once. A token
    without experts gets zeros. ``y`` and the weights of :func:`dispatch` have gradients; gradients
    of these gradients are refused.

    Args:
        y: [n, hidden], one row for each row that ``dispatch`` returned, in float32, bfloat16 or
            float16; the hidden size may differ from the hidden size of ``x``. A tensor in the heap
            is not copied first.
        handle: the handle of the dispatch; several combines may use it.

    Returns:
        [tokens, hidden], the rows of this rank's tokens.

    Raises:
        ArgumentError: bad argument; the group stays usable.
        MismatchError: another rank has a bad argument, or its handle or size differs.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    if not isinstance(handle, Handle):
        raise ArgumentError(
            f"{_COMBINE}: handle: expected the third result of dispatch(), got {handle!r:.80}"
        )
    if not isinstance(y, Tensor):
        raise ArgumentError(f"{_COMBINE}: y: expected a tensor, got {type(y).__name__}")
    found = _ops.moe_combine(y, handle.weights, *handle.tables, *handle.group)
    return cast(Tensor, found)
