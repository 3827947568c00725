"""Rows and routes of the calls: their arguments, checked, and the tables made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.arguments import DTYPE_CODES, CallChecks, readable
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.engine import Call
from ringcomm.errors import UnsupportedError, where
from ringcomm.extras.moe.outboxes import RowsHeader
from ringcomm.functional.traced_groups import find
from ringcomm.memory import empty

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIRES = ("int8", "fp8")

DISPATCH, COMBINE, BACKWARD, WEIGHTS = range(4)
# What a combine has of weights, and whether their gradients are wanted.
UNWEIGHTED, WEIGHTED, WANTS_GRADIENT = range(3)
WORD_BYTES = 8
FLOAT_BYTES = 4
ENTRY_WORDS = 2
# Rows of so many bytes on lie in the heap, whose pages are in use already.
IN_HEAP_FROM_BYTES = 1 << 20


def new_rows(comm: Communicator, like: Tensor, count: int) -> Tensor:
    """Returns memory for rows, not initialised."""
    nbytes = count * like.size(1) * like.element_size()
    if nbytes >= IN_HEAP_FROM_BYTES and not comm.launches:
        return empty(count, like.size(1), dtype=like.dtype)
    return like.new_empty((count, like.size(1)))


def usable(group: str, world_size: int, operation: str) -> Communicator:
    """Returns the communicator, if rows can be exchanged over it."""
    comm = find(group, world_size, operation)
    if not comm.launches:
        return comm
    comm.raise_if_unusable(operation)
    head = where(operation, comm.rank, comm.world_size)
    if not isinstance(comm, DeviceCallEngine):
        raise UnsupportedError(
            f"{head}: on devices the rows of experts are exchanged within one node. Take a group "
            "of its ranks (comm.node), or a communicator on the host and CPU tensors"
        )
    runtime, device = comm.device_place
    if runtime.is_capturing(device):
        raise UnsupportedError(
            f"{head}: the current stream records a graph, but the host has to wait for what the "
            "ranks tell each other of their rows. Leave this call out of the graph"
        )
    return comm


def run_native(comm: Communicator, operation: str, name: str, *arguments: Any) -> None:
    """Calls a native function where the communicator's ranks have their rows.

    On the host it is the module's. On a device it is that of the same name of the device's end,
    which enqueues a kernel on the current stream.
    """
    if comm.launches:
        comm.start_call(Call(operation, lambda end: getattr(end, name)(*arguments), []))
    else:
        getattr(_native, name)(*arguments)


def check_rows(checks: CallChecks, name: str, tensor: Tensor) -> None:
    checks.tensor(name, tensor)
    if tensor.dim() != 2:
        checks.fail(f"{name}: expected rows [n, hidden], got shape {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        checks.fail(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")


class Tables(NamedTuple):
    """The routes of a dispatch, by which a combine and the gradients find their rows.

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


def check_routes(checks: CallChecks, r: Routes) -> None:
    x, topk_idx = r.x, r.topk_idx
    check_rows(checks, "x", x)
    checks.tensor("topk_idx", topk_idx)
    if topk_idx.dtype is not torch.int64 or topk_idx.dim() != 2 or len(topk_idx) != len(x):
        checks.fail(
            f"topk_idx: expected int64 [{len(x)}, k], a row for each of x, got {topk_idx.dtype} "
            f"{tuple(topk_idx.shape)}"
        )
    if r.experts < 1 or r.experts % checks.world_size:
        checks.fail(
            f"num_experts: expected a multiple of the {checks.world_size} ranks, which have "
            f"equally many experts, got {r.experts}"
        )
    if r.topk_weights is not None:
        check_weights(checks, r.topk_weights, tuple(topk_idx.shape), x.dtype)
    if r.wire is not None and r.wire not in WIRES:
        checks.fail(f"wire: expected None, {' or '.join(map(repr, WIRES))}, got {r.wire!r}")
    if r.limit < -1:
        checks.fail("max_rows: expected a number >= 0 or None, got a negative one")


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


class Routes(NamedTuple):
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

    def write_payload(self, payload: Tensor) -> None:
        """Writes the tokens, as they are published, to bytes."""
        x = self.x.detach()
        if self.wire is None:
            payload.view(x.dtype).view(x.shape).copy_(x)
            return
        dense, code = readable(x), _native.WIRES[self.wire]
        _native.encode_rows(
            code, dense.data_ptr(), DTYPE_CODES[x.dtype], len(x), x.size(1), payload.data_ptr()
        )

    def read_rows(self, comm: Communicator, sources: Tensor, tokens_ptrs: list[int]) -> Tensor:
        """Returns the rows that sources name of what was published."""
        rows = new_rows(comm, self.x, len(sources))
        entries = (sources.data_ptr(), _native.SOURCE_WORDS, len(sources), tokens_ptrs)
        if self.wire is None:
            _native.copy_rows(*entries, self.payload_bytes, rows.data_ptr())
        else:
            code, dtype = _native.WIRES[self.wire], DTYPE_CODES[self.x.dtype]
            _native.decode_rows(code, *entries, dtype, self.x.size(1), rows.data_ptr())
        return rows

    def header(self) -> RowsHeader:
        """Returns what all ranks are told of the arguments."""
        return RowsHeader(
            operation=DISPATCH,
            experts=self.experts,
            k=self.topk_idx.size(1),
            hidden=self.x.size(1),
            dtype=DTYPE_CODES[self.x.dtype],
            wire=self.wire_code,
            weighted=int(self.topk_weights is not None),
            tokens=len(self.x),
            limit=self.limit,
        )


def tables_bytes(r: Routes) -> int:
    """Returns the bytes that :func:`write_tables` writes."""
    assignments = r.topk_idx.numel()
    of_weights = 0 if r.topk_weights is None else assignments * FLOAT_BYTES
    return (r.experts + assignments) * WORD_BYTES + of_weights


def write_tables(checks: CallChecks, routes: Routes, tables: Tensor) -> None:
    """Writes counts by expert, assignments in the order of experts, and weights."""
    idx = readable(routes.topk_idx)
    counts_ptr = tables.data_ptr()
    order_ptr = counts_ptr + routes.experts * WORD_BYTES
    bad = _native.sort_by_expert(idx.data_ptr(), idx.numel(), routes.experts, order_ptr, counts_ptr)
    if bad >= 0:
        checks.fail(no_such_expert(routes, bad))
    if routes.topk_weights is not None:
        begin = (routes.experts + idx.numel()) * WORD_BYTES
        tables[begin:].view(torch.float32).copy_(routes.topk_weights.reshape(-1))


def no_such_expert(routes: Routes, assignment: int) -> str:
    """Returns the words for an assignment to an expert that there is not."""
    token, column = divmod(assignment, routes.topk_idx.size(1))
    return (
        f"topk_idx[{token}, {column}]: expected an expert from 0 to {routes.experts - 1}, or -1 "
        f"for none, got {int(routes.topk_idx[token, column])}"
    )


def check_combined(checks: CallChecks, y: Tensor, sources: Tensor) -> None:
    check_rows(checks, "y", y)
    if y.size(0) != sources.size(0):
        checks.fail(f"y: expected {sources.size(0)} rows, as dispatch returned, got {y.size(0)}")


def rows_by_rank(comm: Communicator, headers: Sequence[RowsHeader], counts_ptrs: list[int]) -> int:
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
