"""The operators of torch behind dispatch and combine, with their gradients.

A rank publishes rows in its heap, all exchange a header (:mod:`ringcomm.moe.windows`), and each
then copies the rows it needs from where they lie. Three operators do so:

* ``moe_dispatch`` copies tokens to the ranks of their experts. Its gradient is a combine without
  weights.
* ``moe_combine`` sums the experts' rows of each token. Its gradient is
* ``moe_combine_backward``, which copies gradients of tokens to the ranks of their experts, times
  the weights, and brings the weights' gradients back.

What they have to know of each other is in tensors, :class:`Tables`, which compiled graphs carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.arguments import DTYPE_CODES, CallChecks, readable, size_bytes
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import UnsupportedError, where
from ringcomm.functional.collectives import library, register
from ringcomm.functional.traced_groups import find
from ringcomm.memory import empty
from ringcomm.moe.windows import (
    Header,
    Windows,
    exchange,
    lendable,
    prepared,
    reading,
    windows_of,
)

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIRES = ("int8", "fp8")

DISPATCH, COMBINE, BACKWARD, WEIGHTS = range(4)
# What a combine has of weights, and whether their gradients are wanted.
UNWEIGHTED, WEIGHTED, WANTS_GRADIENT = range(3)
_WORD_BYTES = 8
_FLOAT_BYTES = 4
_ENTRY_WORDS = 2
# Rows of so many bytes on lie in the heap, whose pages are in use already.
IN_HEAP_FROM_BYTES = 1 << 20


def new_rows(like: Tensor, count: int) -> Tensor:
    """Returns memory for rows, not initialised."""
    nbytes = count * like.size(1) * like.element_size()
    if nbytes >= IN_HEAP_FROM_BYTES:
        return empty(count, like.size(1), dtype=like.dtype)
    return like.new_empty((count, like.size(1)))


def usable(group: str, world_size: int, operation: str) -> Communicator:
    """Returns the communicator, if rows can be exchanged over it."""
    comm = find(group, world_size, operation)
    if comm.launches:
        raise UnsupportedError(
            f"{where(operation, comm.rank, comm.world_size)}: the rows of experts are exchanged "
            "on the host; there are no kernels for devices yet. Use a communicator without "
            "device= and CPU tensors"
        )
    if comm.num_nodes > 1:
        raise UnsupportedError(
            f"{where(operation, comm.rank, comm.world_size)}: the ranks are on "
            f"{comm.num_nodes} nodes, and rows of experts are exchanged within one"
        )
    return comm


def check_rows(checks: CallChecks, name: str, tensor: Tensor) -> None:
    checks.tensor(name, tensor)
    if tensor.dim() != 2:
        checks.fail(f"{name}: expected rows [n, hidden], got shape {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        checks.fail(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")


class Tables(NamedTuple):
    """What a combine and the gradients have to know of a dispatch.

    Attributes:
        places: int64 [tokens, k, 2], the rank of each token's expert, and the row there; -1: none.
        sources: int64 [rows, 4], where each row's token and weight lie; -1 behind the last row.
        row_weights: float32 [rows], the weights of the rows; [0] without weights.
        stamp: int64 [2], the number of the dispatch, and the rows of this rank.
    """

    places: Tensor
    sources: Tensor
    row_weights: Tensor
    stamp: Tensor


class _Published(NamedTuple):
    """What a rank has published: the header that says so, and tensors that must stay until then."""

    header: Header
    kept: tuple[Tensor, ...]


# ---- dispatch ---------------------------------------------------------------------------------


def _check_routes(
    checks: CallChecks, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, experts: int
) -> None:
    check_rows(checks, "x", x)
    checks.tensor("topk_idx", topk_idx)
    if topk_idx.dtype is not torch.int64 or topk_idx.dim() != 2 or len(topk_idx) != len(x):
        checks.fail(
            f"topk_idx: expected int64 [{len(x)}, k], a row for each of x, got {topk_idx.dtype} "
            f"{tuple(topk_idx.shape)}"
        )
    if experts < 1 or experts % checks.world_size:
        checks.fail(
            f"num_experts: expected a multiple of the {checks.world_size} ranks, which have "
            f"equally many experts, got {experts}"
        )
    if topk_weights is not None:
        check_weights(checks, topk_weights, tuple(topk_idx.shape), x.dtype)


def check_weights(
    checks: CallChecks, weights: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    checks.tensor("topk_weights", weights)
    if tuple(weights.shape) != shape or weights.dtype not in (torch.float32, dtype):
        known = " or ".join(dict.fromkeys(("torch.float32", str(dtype))))
        checks.fail(
            f"topk_weights: expected {known} {shape}, as topk_idx, got {weights.dtype} "
            f"{tuple(weights.shape)}"
        )


class _Routes(NamedTuple):
    """The arguments of a dispatch."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    experts: int
    limit: int
    wire: str | None
    group: str
    world_size: int

    @property
    def wire_code(self) -> int:
        """The native module's code of the wire plus 1, or 0."""
        return 0 if self.wire is None else _native.WIRES[self.wire] + 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row as it is published."""
        hidden = self.x.size(1)
        if self.wire is None:
            return hidden * self.x.element_size()
        return _native.wire_bytes(_native.WIRES[self.wire], hidden)


def _tables_bytes(experts: int, assignments: int, weighted: bool) -> int:
    words = experts + assignments
    return words * _WORD_BYTES + (assignments * _FLOAT_BYTES if weighted else 0)


def _write_tables(checks: CallChecks, routes: _Routes, tables: Tensor) -> None:
    """Writes counts by expert, assignments in the order of experts, and weights."""
    idx = readable(routes.topk_idx)
    counts_ptr = tables.data_ptr()
    order_ptr = counts_ptr + routes.experts * _WORD_BYTES
    bad = _native.sort_by_expert(idx.data_ptr(), idx.numel(), routes.experts, order_ptr, counts_ptr)
    if bad >= 0:
        token, column = divmod(bad, idx.size(1))
        checks.fail(
            f"topk_idx[{token}, {column}]: expected an expert from 0 to {routes.experts - 1}, or "
            f"-1 for none, got {int(idx.view(-1)[bad])}"
        )
    if routes.topk_weights is not None:
        begin = (routes.experts + idx.numel()) * _WORD_BYTES
        tables[begin:].view(torch.float32).copy_(routes.topk_weights.reshape(-1))


def _publish_routes(comm: Communicator, windows: Windows, operation: str, r: _Routes) -> _Published:
    checks = comm.checks(operation)
    _check_routes(checks, r.x, r.topk_idx, r.topk_weights, r.experts)
    if r.wire is not None and r.wire not in WIRES:
        checks.fail(f"wire: expected None, {' or '.join(map(repr, WIRES))}, got {r.wire!r}")
    if r.limit < -1:
        checks.fail(f"max_rows: expected a number >= 0 or None, got {r.limit}")
    x, tokens = r.x.detach(), r.x.size(0)
    lent = r.wire is None and lendable(x, comm.world_size)
    weighted = r.topk_weights is not None
    tables_bytes = _tables_bytes(r.experts, r.topk_idx.numel(), weighted)
    tables, payload = windows.take(tables_bytes, 0 if lent else tokens * r.payload_bytes)
    _write_tables(checks, r, tables)
    if r.wire is not None:
        dense = readable(x)
        code, dtype = _native.WIRES[r.wire], DTYPE_CODES[x.dtype]
        _native.encode_rows(code, dense.data_ptr(), dtype, tokens, x.size(1), payload.data_ptr())
    elif lent:
        payload = x
    else:
        payload.view(x.dtype).view(x.shape).copy_(x)
    header = Header(
        operation=DISPATCH,
        experts=r.experts,
        k=r.topk_idx.size(1),
        hidden=x.size(1),
        dtype=DTYPE_CODES[x.dtype],
        wire=r.wire_code,
        weighted=int(weighted),
        tokens=tokens,
        limit=r.limit,
        lent=int(lent),
        payload=windows.offset_of(payload),
        tables=windows.offset_of(tables),
    )
    return _Published(header, (x, tables, payload))


def _rows_by_rank(comm: Communicator, headers: Sequence[Header], counts_ptrs: list[int]) -> int:
    """Returns how many rows this rank gets; raises on all ranks if one has no room for its own."""
    here = headers[0].experts // comm.world_size
    for rank, header in enumerate(headers):
        if header.limit < 0 and rank != comm.rank:
            continue
        rows = _native.count_rows(counts_ptrs, rank * here, here)
        if 0 <= header.limit < rows:
            comm.checks("moe.dispatch").fail(
                f"max_rows: the experts of rank {rank} get {rows} rows, and there is room for "
                f"{header.limit}; pass a larger max_rows"
            )
        if rank == comm.rank:
            mine = rows
    return mine


def _dispatch(*arguments: Any) -> tuple[Tensor, ...]:
    operation = "moe.dispatch"
    routes = _Routes(*arguments)
    comm = usable(routes.group, routes.world_size, operation)
    windows = windows_of(comm)
    published, refusal = prepared(lambda: _publish_routes(comm, windows, operation, routes))
    mine = Header(DISPATCH, refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    # Calls that end here end so on all ranks, which therefore count alike.
    windows.calls += 1
    counts_ptrs = windows.at([header.tables for header in headers])
    count = _rows_by_rank(comm, headers, counts_ptrs)
    with reading(comm, operation, headers):
        return _pull_tokens(comm, windows, routes, headers, (counts_ptrs, count))


def _pull_tokens(
    comm: Communicator,
    windows: Windows,
    routes: _Routes,
    headers: Sequence[Header],
    found: tuple[list[int], int],
) -> tuple[Tensor, ...]:
    counts_ptrs, count = found
    x, k, experts = routes.x, headers[0].k, headers[0].experts
    here = experts // comm.world_size
    room = count if routes.limit < 0 else routes.limit
    order_ptrs = [ptr + experts * _WORD_BYTES for ptr in counts_ptrs]
    tokens_ptrs = windows.at([header.payload for header in headers])
    places = torch.empty(len(x), k, _ENTRY_WORDS, dtype=torch.int64, device="cpu")
    sources = torch.empty(room, _native.SOURCE_WORDS, dtype=torch.int64, device="cpu")
    counts = torch.empty(here, dtype=torch.int64, device="cpu")
    rows = new_rows(x, room)
    _native.find_places(order_ptrs, counts_ptrs, comm.rank, experts, len(x) * k, places.data_ptr())
    first = comm.rank * here
    _native.list_sources(
        order_ptrs, counts_ptrs, first, here, k, sources.data_ptr(), counts.data_ptr()
    )
    sources[count:] = -1
    entries = (sources.data_ptr(), _native.SOURCE_WORDS, room, tokens_ptrs)
    if routes.wire is None:
        _native.copy_rows(*entries, routes.payload_bytes, rows.data_ptr())
    else:
        code, dtype = _native.WIRES[routes.wire], DTYPE_CODES[x.dtype]
        _native.decode_rows(code, *entries, dtype, x.size(1), rows.data_ptr())
    row_weights = torch.empty(room if headers[0].weighted else 0, dtype=torch.float32, device="cpu")
    if headers[0].weighted:
        weights_ptrs = [
            order_ptr + header.tokens * k * _WORD_BYTES
            for order_ptr, header in zip(order_ptrs, headers, strict=True)
        ]
        second = sources.data_ptr() + _ENTRY_WORDS * _WORD_BYTES
        _native.copy_rows(
            second, _native.SOURCE_WORDS, room, weights_ptrs, _FLOAT_BYTES, row_weights.data_ptr()
        )
    stamp = torch.tensor([windows.calls, count], dtype=torch.int64, device="cpu")
    return rows, counts, places, sources, row_weights, stamp


def _shape_of_dispatched(*arguments: Any) -> tuple[Tensor, ...]:
    x, topk_idx, topk_weights, num_experts, max_rows, _, _, world_size = arguments
    room: Any = max_rows
    if max_rows < 0:
        room = torch.library.get_ctx().new_dynamic_size()
    weighted = topk_weights is not None
    return (
        x.new_empty((room, x.size(1))),
        topk_idx.new_empty((num_experts // world_size,)),
        topk_idx.new_empty((*topk_idx.shape, _ENTRY_WORDS)),
        topk_idx.new_empty((room, _native.SOURCE_WORDS)),
        x.new_empty((room if weighted else 0,), dtype=torch.float32),
        topk_idx.new_empty((2,)),
    )


# ---- combine ----------------------------------------------------------------------------------


def _publish_rows(
    comm: Communicator, windows: Windows, rows: Tensor, count: int, header: Header
) -> _Published:
    """Publishes the first ``count`` of rows."""
    rows = rows.detach()[:count]
    lent = lendable(rows, comm.world_size)
    [payload] = windows.take(0 if lent else size_bytes(rows))
    if lent:
        payload = rows
    else:
        payload.view(rows.dtype).view(rows.shape).copy_(rows)
    header = header._replace(
        hidden=rows.size(1),
        dtype=DTYPE_CODES[rows.dtype],
        tokens=count,
        lent=int(lent),
        payload=windows.offset_of(payload),
    )
    return _Published(header, (payload,))


def _check_combined(checks: CallChecks, y: Tensor, sources: Tensor) -> None:
    check_rows(checks, "y", y)
    if y.size(0) != sources.size(0):
        checks.fail(f"y: expected {sources.size(0)} rows, as dispatch returned, got {y.size(0)}")


def _combine(y: Tensor, weights: Tensor | None, *rest: Any) -> Tensor:
    places, sources, _, stamp, group, world_size = rest
    operation = "moe.combine"
    comm = usable(group, world_size, operation)
    windows = windows_of(comm)
    number, count = stamp.tolist()
    base = Header(COMBINE, number, k=places.size(1), weighted=int(weights is not None))

    def publish() -> _Published:
        checks = comm.checks(operation)
        _check_combined(checks, y, sources)
        if weights is not None:
            check_weights(checks, weights, tuple(places.shape[:2]), y.dtype)
        return _publish_rows(comm, windows, y, count, base)

    published, refusal = prepared(publish)
    mine = base._replace(refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    with reading(comm, operation, headers):
        out = new_rows(y, places.size(0))
        wide = None if weights is None else readable(weights.detach().float())
        _native.sum_rows(
            readable(places).data_ptr(),
            windows.at([header.payload for header in headers]),
            places.size(0),
            places.size(1),
            0 if wide is None else wide.data_ptr(),
            DTYPE_CODES[y.dtype],
            y.size(1),
            out.data_ptr(),
        )
    return out


def _shape_of_combined(y: Tensor, weights: Tensor | None, places: Tensor, *_: Any) -> Tensor:
    return y.new_empty((places.size(0), y.size(1)))


# ---- the gradient of combine ------------------------------------------------------------------


def _combine_backward(grad: Tensor, y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    places, sources, row_weights, stamp, weighting, group, world_size = rest
    operation = "moe.combine_backward"
    comm = usable(group, world_size, operation)
    windows = windows_of(comm)
    number, _ = stamp.tolist()
    base = Header(BACKWARD, number, weighted=int(weighting > UNWEIGHTED), wants=weighting)

    def publish() -> _Published:
        check_rows(comm.checks(operation), "grad", grad)
        return _publish_rows(comm, windows, grad, grad.size(0), base)

    published, refusal = prepared(publish)
    mine = base._replace(refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    table = readable(sources)
    with reading(comm, operation, headers):
        of_y = new_rows(y, y.size(0))
        ptrs = windows.at([header.payload for header in headers])
        if weighting == UNWEIGHTED:
            row_bytes = grad.size(1) * grad.element_size()
            entries = (table.data_ptr(), _native.SOURCE_WORDS, y.size(0), ptrs)
            _native.copy_rows(*entries, row_bytes, of_y.data_ptr())
            return of_y, _no_gradient(grad)
        dots = torch.empty(y.size(0), 1, dtype=torch.float32, device="cpu")
        dense = readable(y.detach())
        _native.scale_rows(
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
    of_weights = _weight_gradients(comm, windows, dots, places, stamp)
    return of_y, of_weights if weighting == WANTS_GRADIENT else _no_gradient(grad)


def _no_gradient(grad: Tensor) -> Tensor:
    return grad.new_empty((0, 0), dtype=torch.float32)


def _weight_gradients(
    comm: Communicator, windows: Windows, dots: Tensor, places: Tensor, stamp: Tensor
) -> Tensor:
    """Brings the scalar products of rows to the ranks of their tokens: [tokens, k]."""
    operation = "moe.combine_backward"
    number, count = stamp.tolist()
    base = Header(WEIGHTS, number)
    published, refusal = prepared(lambda: _publish_rows(comm, windows, dots, count, base))
    mine = base._replace(refused=1) if published is None else published.header
    headers = exchange(comm, operation, mine, refusal)
    table = readable(places)
    with reading(comm, operation, headers):
        of_weights = torch.empty(places.shape[:2], dtype=torch.float32, device="cpu")
        ptrs = windows.at([header.payload for header in headers])
        entries = (table.data_ptr(), _ENTRY_WORDS, of_weights.numel(), ptrs)
        _native.copy_rows(*entries, _FLOAT_BYTES, of_weights.data_ptr())
    return of_weights


def _shape_of_gradients(grad: Tensor, y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    places, weighting = rest[0], rest[4]
    shape = tuple(places.shape[:2]) if weighting == WANTS_GRADIENT else (0, 0)
    return y.new_empty(y.shape), grad.new_empty(shape, dtype=torch.float32)


# ---- the operators ----------------------------------------------------------------------------

_GROUP = "str group, int world_size"
register(
    "moe_dispatch",
    "(Tensor x, Tensor topk_idx, Tensor? topk_weights, int num_experts, SymInt max_rows, "
    f"str? wire, {_GROUP}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _shape_of_dispatched,
)
register(
    "moe_combine",
    "(Tensor y, Tensor? weights, Tensor places, Tensor sources, Tensor row_weights, "
    f"Tensor stamp, {_GROUP}) -> Tensor",
    _combine,
    _shape_of_combined,
)
register(
    "moe_combine_backward",
    "(Tensor grad, Tensor y, Tensor places, Tensor sources, Tensor row_weights, Tensor stamp, "
    f"int weighting, {_GROUP}) -> (Tensor, Tensor)",
    _combine_backward,
    _shape_of_gradients,
)
_ops = torch.ops.ringcomm


def _remember_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, places, sources, row_weights, stamp = output
    ctx.mark_non_differentiable(row_weights)
    ctx.save_for_backward(places, sources, stamp)
    ctx.place = inputs[6:]


def _gradients_of_dispatch(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    places, sources, stamp = ctx.saved_tensors
    none = grad.new_empty(0, dtype=torch.float32)
    of_x = _ops.moe_combine(grad, None, places, sources, none, stamp, *ctx.place)
    return (of_x, *[None] * 7)


def _remember_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, places, sources, row_weights, stamp = inputs[:6]
    # The weights only for autograd's sake, which complains if they have changed since.
    ctx.save_for_backward(y, weights, places, sources, row_weights, stamp)
    ctx.place = inputs[6:]


def _gradients_of_combine(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    y, weights, places, sources, row_weights, stamp = ctx.saved_tensors
    wants = weights is not None and ctx.needs_input_grad[1]
    weighting = UNWEIGHTED if weights is None else WANTS_GRADIENT if wants else WEIGHTED
    of_y, of_weights = _ops.moe_combine_backward(
        grad, y, places, sources, row_weights, stamp, weighting, *ctx.place
    )
    return (of_y, of_weights.to(weights.dtype) if wants else None, *[None] * 6)


def _refuse_again(ctx: Any, *_: Any) -> Any:
    raise UnsupportedError(
        "moe.combine_backward: the gradient of combine has no gradient of its own; do not call "
        "backward(create_graph=True) or torch.autograd.grad(create_graph=True) through it"
    )


for _name, _gradients, _remember in (
    ("moe_dispatch", _gradients_of_dispatch, _remember_dispatch),
    ("moe_combine", _gradients_of_combine, _remember_combine),
    ("moe_combine_backward", _refuse_again, lambda ctx, inputs, output: None),
):
    torch.library.register_autograd(
        f"ringcomm::{_name}", _gradients, setup_context=_remember, lib=library
    )


dispatch = _ops.moe_dispatch
combine = _ops.moe_combine
