# SPDX-License-Identifier: Apache-2.0
"""Dispatch on devices of one node, whose kernels read peers' rows in place.

Rows, counts and tables have the bits that :mod:`ringcomm.extras.moe.dispatch` computes on the host.
There, native code walks through lists of assignments; here torch operations compute the results by
sorting a rank's own assignments and summing the counts of all ranks. The host waits for the device
twice: for the headers, and for the counts, which determine the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.arguments import DTYPE_CODES, readable
from ringcomm.comm.nodes.device_core import preload
from ringcomm.cuda.units import UNITS
from ringcomm.extras.moe.rows import (
    COMPRESSIONS,
    DISPATCH,
    ENTRY_WORDS,
    WORD_BYTES,
    Outboxes,
    Routes,
    RowsHeader,
    check_routes,
    exchange,
    lendable,
    no_such_expert,
    numbers_on_host,
    on_device_of,
    outboxes_of,
    prepared,
    reading,
    rows_by_rank,
    run_native,
    tables_bytes,
)

Tensor = torch.Tensor
_SOURCE_WORDS = _native.SOURCE_WORDS
_BLOCK = _native.QUANT_BLOCK
# Bytes of a block's scale: a quantized block has one byte per value, and one scale.
_SCALE_BYTES = _native.quantized_bytes(_native.QUANT_FORMATS["fp8"], _BLOCK) - _BLOCK


class _Assignments(NamedTuple):
    """A rank's assignments of its tokens to experts.

    Attributes:
        order: int64, indices of the assignments, sorted by expert; assignments to no expert first.
        counts: int64 [experts], number of assignments to each expert.
        refused: int64, 1 + the index of the first assignment to an expert that does not exist; 0:
            all experts exist.
    """

    order: Tensor
    counts: Tensor
    refused: Tensor

    @classmethod
    def of(cls, topk_idx: Tensor, experts: int) -> _Assignments:
        flat = topk_idx.reshape(-1)
        by_expert, order = flat.sort(stable=True)
        begins = torch.arange(experts + 1, device=flat.device)
        counts = torch.searchsorted(by_expert, begins).diff()
        if not len(flat):
            return cls(order, counts, counts.new_zeros(()))
        none = len(flat) + 1
        is_bad = (flat < -1) | (flat >= experts)
        numbers = torch.arange(1, none, device=flat.device)
        # If all assignments are good, the least number is `none`, which the modulo turns into 0.
        return cls(order, counts, torch.where(is_bad, numbers, none).amin() % none)


class _DeviceDispatch(NamedTuple):
    """A dispatch under way on one rank.

    Attributes:
        comm: the ranks.
        operation: named in errors.
        routes: the arguments.
        headers: headers of all ranks.
        counts: int64 [ranks, experts] on the host, number of rows by the token's rank and expert.
        order_ptrs, weights_ptrs, tokens_ptrs: for each rank, the addresses of its assignments
            sorted by expert, of its weights and of its tokens.
    """

    comm: Communicator
    operation: str
    routes: Routes
    headers: Sequence[RowsHeader]
    counts: Tensor
    order_ptrs: list[int]
    weights_ptrs: list[int]
    tokens_ptrs: list[int]

    def pull(self, entries_ptr: int, entry_words: int, ptrs: list[int], out: Tensor) -> None:
        """Fills ``out`` with one row per entry; an entry is (rank, number of a row on the rank)."""
        row_bytes = out.nbytes // len(out) if len(out) else 0
        given = (entries_ptr, entry_words, len(out), ptrs, row_bytes, out.data_ptr())
        run_native(self.comm, self.operation, "copy_rows", *given)


def dispatch(comm: Communicator, operation: str, routes: Routes) -> tuple[Tensor, ...]:
    """Dispatches tokens on devices, as ``_dispatch`` in ``dispatch.py`` does on the host."""
    outboxes = outboxes_of(comm)
    published, refusal = prepared(lambda: _publish(comm, outboxes, operation, routes))
    mine, assignments = (RowsHeader(DISPATCH, refused=1), None) if published is None else published
    found = None if assignments is None else assignments.refused
    headers = exchange(comm, operation, mine, refusal, found)
    assert assignments is not None
    if refused := headers[comm.rank].refused:
        comm.engine.checks(operation).fail(no_such_expert(routes, refused - 1))
    # Up to here a call fails on all ranks or on none, so the ranks' counters agree.
    outboxes.calls += 1
    k, experts = headers[0].k, headers[0].experts
    order_ptrs = outboxes.at([header.tables for header in headers])
    counts_ptrs = [
        ptr + header.tokens * k * WORD_BYTES
        for ptr, header in zip(order_ptrs, headers, strict=True)
    ]
    with reading(comm, operation, ()):
        call = _DeviceDispatch(
            comm=comm,
            operation=operation,
            routes=routes,
            headers=headers,
            counts=_counts_of_all(comm, operation, counts_ptrs, routes),
            order_ptrs=order_ptrs,
            weights_ptrs=[ptr + experts * WORD_BYTES for ptr in counts_ptrs],
            tokens_ptrs=outboxes.at([header.payload for header in headers]),
        )
    count = rows_by_rank(comm, headers, [row.data_ptr() for row in call.counts])
    with reading(comm, operation, headers):
        return _found_of(call, count, outboxes.calls, assignments.order)


def _load_kernels(comm: Communicator, compression: str | None) -> None:
    """Loads the kernels that the calls launch, before a peer waits for this rank."""
    engine = comm.engine
    assert isinstance(engine, DeviceCallEngine)
    runtime, device = engine.device_ref
    for name in UNITS["rows"].kernels:
        runtime.find_kernel(device, "rows", name)
    if compression in COMPRESSIONS:
        preload(engine.device_ref, compression)


def _publish(
    comm: Communicator, outboxes: Outboxes, operation: str, r: Routes
) -> tuple[RowsHeader, _Assignments]:
    checks = comm.engine.checks(operation)
    check_routes(checks, r)
    _load_kernels(comm, r.compression)
    x = r.x.detach()
    if r.compression is not None and x.size(1) % _BLOCK:
        checks.fail(
            f"x: on a device compression={r.compression!r} quantizes rows of a multiple of "
            f"{_BLOCK} numbers, got "
            f"{x.size(1)}"
        )
    lent = r.compression is None and lendable(comm, x)
    tables, payload = outboxes.take(tables_bytes(r), 0 if lent else len(x) * r.payload_bytes)
    found = _Assignments.of(r.topk_idx.detach(), r.experts)
    parts = [found.order.view(torch.uint8), found.counts.view(torch.uint8)]
    if r.topk_weights is not None:
        wide = r.topk_weights.detach().float().reshape(-1)
        parts.append(wide.view(torch.uint8))
    tables.copy_(torch.cat(parts))
    if lent:
        payload = x
    elif r.compression is None:
        payload.view(x.dtype).view(x.shape).copy_(x)
    elif x.numel():
        dense = readable(x)
        given = (dense.data_ptr(), DTYPE_CODES[x.dtype], payload.data_ptr(), x.numel())
        run_native(comm, operation, "quantize", _native.QUANT_FORMATS[r.compression], *given)
    header = r.header()._replace(
        lent=int(lent),
        payload=outboxes.offset_of(payload),
        tables=outboxes.offset_of(tables),
    )
    return header, found


def _counts_of_all(comm: Communicator, operation: str, counts_ptrs: list[int], r: Routes) -> Tensor:
    """Returns the counts of all ranks, on the host."""
    everyone = r.topk_idx.new_empty((comm.world_size, r.experts))
    ranks = torch.arange(comm.world_size, device=everyone.device)
    entries = torch.stack([ranks, torch.zeros_like(ranks)], 1)
    row_bytes = r.experts * WORD_BYTES
    given = (entries.data_ptr(), ENTRY_WORDS, comm.world_size, counts_ptrs, row_bytes)
    run_native(comm, operation, "copy_rows", *given, everyone.data_ptr())
    numbers = numbers_on_host(comm, operation, everyone)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _before(counts: Tensor) -> Tensor:
    """Returns exclusive prefix sums along the last dimension."""
    return counts.cumsum(-1) - counts


def _found_of(call: _DeviceDispatch, count: int, number: int, order: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of a dispatch: rows, counts, and the tables.

    Args:
        call: the dispatch, with all ranks' headers and counts.
        count: number of rows of this rank.
        number: number of the dispatch.
        order: indices of this rank's assignments, sorted by expert.
    """
    r, idx = call.routes, call.routes.topk_idx
    room = count if r.limit < 0 else r.limit
    lists = _Lists.of_call(call)
    sources = idx.new_full((room, _SOURCE_WORDS), -1)
    sources[:count] = _list_sources(call, lists, count)
    rows = _read_rows(call, sources)
    weighted = r.topk_weights is not None
    row_weights = r.x.new_empty(room if weighted else 0, dtype=torch.float32)
    if weighted:
        second = sources.data_ptr() + ENTRY_WORDS * WORD_BYTES
        call.pull(second, _SOURCE_WORDS, call.weights_ptrs, row_weights)
    stamp = torch.tensor([number, count], dtype=torch.int64, device="cpu")
    counts = lists.lengths.view(-1, call.comm.world_size).sum(1)
    return rows, counts, _expert_rows(call, lists, order), sources, row_weights, stamp


class _Lists(NamedTuple):
    """Lists by expert, from which the tables are computed; int64 [experts] each, on the device.

    The first three describe this rank's rows in groups, by this rank's expert and then by source
    rank; the others describe this rank's assignments, by expert.

    Attributes:
        lengths: number of rows in a group: an expert's rows from one source rank.
        ranks: the source rank of a group.
        begins: position of a group's first row in the source rank's order, minus its position among
            this rank's rows.
        own: number of this rank's assignments to an expert.
        to: the rank of the expert.
        first: for the first of these assignments, its row number on the expert's rank, minus its
            position in this rank's order.
    """

    lengths: Tensor
    ranks: Tensor
    begins: Tensor
    own: Tensor
    to: Tensor
    first: Tensor

    @classmethod
    def of_call(cls, call: _DeviceDispatch) -> _Lists:
        comm, counts, k = call.comm, call.counts, call.headers[0].k
        here = call.routes.experts // comm.world_size
        mine = slice(comm.rank * here, (comm.rank + 1) * here)
        tokens = [header.tokens for header in call.headers]
        without = k * torch.tensor(tokens, device="cpu") - counts.sum(1)
        begins = (_before(counts) + without[:, None])[:, mine]
        lengths, own = counts[:, mine].t().reshape(-1), counts[comm.rank]
        by_expert = _before(counts.sum(0).view(-1, here)).reshape(-1)
        ranks = torch.arange(comm.world_size, device="cpu")
        lists = [
            lengths,
            ranks.repeat(here),
            begins.t().reshape(-1) - _before(lengths),
            own,
            ranks.repeat_interleave(here),
            by_expert + counts[: comm.rank].sum(0) - _before(own),
        ]
        return cls(*on_device_of(comm, torch.stack(lists)))


def _list_sources(call: _DeviceDispatch, lists: _Lists, count: int) -> Tensor:
    """Returns the source of each row: int64 [count, 4], as ``list_sources`` on the host."""
    rank, begin = (
        each.repeat_interleave(lists.lengths, output_size=count)
        for each in (lists.ranks, lists.begins)
    )
    at = begin + torch.arange(count, device=begin.device)
    entries, assignment = torch.stack([rank, at], 1), torch.empty_like(rank)
    call.pull(entries.data_ptr(), ENTRY_WORDS, call.order_ptrs, assignment)
    token = assignment.div(call.headers[0].k, rounding_mode="floor")
    return torch.stack([rank, token, rank, assignment], 1)


def _expert_rows(call: _DeviceDispatch, lists: _Lists, order: Tensor) -> Tensor:
    """Returns rank and row number of each assignment's row: int64 [tokens, k, 2]."""
    idx, total = call.routes.topk_idx, int(call.counts[call.comm.rank].sum())
    to, first = (
        each.repeat_interleave(lists.own, output_size=total) for each in (lists.to, lists.first)
    )
    at = first + torch.arange(total, device=first.device)
    expert_rows = order.new_zeros((idx.numel(), ENTRY_WORDS))
    expert_rows[:, 0] = -1
    expert_rows[order[len(order) - total :]] = torch.stack([to, at], 1)
    return expert_rows.view(*idx.shape, ENTRY_WORDS)


def _read_rows(call: _DeviceDispatch, sources: Tensor) -> Tensor:
    """Returns the rows that ``sources`` names.

    If the rows are quantized, it copies all values, and after them all scales, so that the copy can
    be dequantized as a whole.
    """
    r, count, hidden = call.routes, len(sources), call.routes.x.size(1)
    rows = r.x.new_empty((count, hidden))
    if r.compression is None:
        call.pull(sources.data_ptr(), _SOURCE_WORDS, call.tokens_ptrs, rows)
        return rows
    of_scales = hidden // _BLOCK * _SCALE_BYTES
    run = r.x.new_empty(count * (hidden + of_scales), dtype=torch.uint8)
    values, scales = run[: count * hidden], run[count * hidden :]
    scales_ptrs = [
        ptr + header.tokens * hidden
        for ptr, header in zip(call.tokens_ptrs, call.headers, strict=True)
    ]
    call.pull(sources.data_ptr(), _SOURCE_WORDS, call.tokens_ptrs, values.view(count, hidden))
    call.pull(sources.data_ptr(), _SOURCE_WORDS, scales_ptrs, scales.view(count, of_scales))
    if count:
        given = (run.data_ptr(), 1, 0, rows.data_ptr(), DTYPE_CODES[rows.dtype], rows.numel())
        run_native(
            call.comm,
            call.operation,
            "dequantize_and_sum",
            _native.QUANT_FORMATS[r.compression],
            *given,
        )
    return rows
