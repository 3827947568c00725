# SPDX-License-Identifier: Apache-2.0
"""Rows and routes of dispatch and combine: checks of arguments, headers, outboxes and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ringcomm import _native
from ringcomm.comm.agreement import first_other, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.arguments import DTYPE_CODES, CallChecks, is_contiguous, readable
from ringcomm.comm.host.engine import Call
from ringcomm.comm.peer_memory import awaiting_peers, heap_bases, is_in_heap
from ringcomm.errors import MismatchError, UnsupportedError, where
from ringcomm.functional.collectives import find
from ringcomm.memory import empty, normal_tensors

# ---- Outboxes in the heap, where local peers read rows, and the exchange of headers --------------
# NOTE [Two outboxes by turns]
# The data that a call publishes must stay in place until all local peers have read it, but no call
# ends with a collective that confirms this. So each rank has two outboxes, and calls write them
# alternately: call n writes the outbox of call n - 2. Between the two writes is the exchange of
# headers of call n - 1. A local peer enters this exchange once it has read all data of call n - 2,
# and the exchange ends once all ranks have entered. So when an outbox is written again, or replaced
# by a larger one, no peer reads it. Outboxes live as long as their communicator; a rank whose last
# call on a communicator was a dispatch or combine must call, for example, a barrier before it drops
# the communicator.
#
# A caller's tensor that is in the heap is read in place, and not copied to an outbox. The caller
# may write to it once the call ends; so if any rank has lent such memory, all ranks wait for each
# other at the end of the call.
#
# On devices the outboxes are in the devices' heaps, and all work runs in stream order: a rank
# enters the exchange once its kernels have read the data of the previous call. The host waits for
# the headers, which determine the kernels to launch.

Tensor = torch.Tensor
T = TypeVar("T")

# Parts of an outbox begin at multiples of a cache line.
_LINE_BYTES = 64


class RowsHeader(NamedTuple):
    """A rank's header of a call: only numbers, so that one collective exchanges all headers.

    Attributes:
        operation: number of the kind of call: dispatch, combine, or one of their backwards.
        number: number of the dispatch that made the rows; 0 in a dispatch.
        refused: nonzero if this rank refuses its arguments; the other fields are then meaningless.
        experts, k, hidden, dtype, compression, weighted: values that must be equal on all ranks.
        tokens: rows that this rank publishes.
        limit: rows that this rank has room for; -1 for any number.
        wants: whether this rank has weights and needs their gradients; see WANTS_GRADIENT.
        lent: 1 if this rank publishes the caller's memory.
        payload: offset of the rows in this rank's heap.
        tables: offset of the tables in this rank's heap.
    """

    operation: int
    number: int = 0
    refused: int = 0
    experts: int = 0
    k: int = 0
    hidden: int = 0
    dtype: int = 0
    compression: int = 0
    weighted: int = 0
    tokens: int = 0
    limit: int = -1
    wants: int = 0
    lent: int = 0
    payload: int = 0
    tables: int = 0


_IN_COMMON = {
    "operation": "which call it makes (dispatch, combine, or the backward of one)",
    "number": "the dispatch whose rows these are (its number)",
    "experts": "option num_experts",
    "k": "experts of a token (the columns of topk_idx)",
    "hidden": "the columns of the rows",
    "dtype": "the dtype of the rows (ringcomm's code)",
    "compression": "option compression (0: none)",
    "weighted": "whether there are weights",
}
_in_common = attrgetter(*_IN_COMMON)


class Outboxes:
    """The outboxes of this rank, and the addresses at which the node's heaps are mapped here.

    Attributes:
        calls: number of dispatches so far for which all ranks agreed on the arguments.
    """

    def __init__(self, comm: Communicator) -> None:
        self._bases = heap_bases(comm.node)
        self._await_peers = awaiting_peers(comm.node)
        self._own_base = self._bases[comm.node.rank]
        self._heap_device = comm.heap_device
        nothing = torch.empty(0, dtype=torch.uint8, device=comm.device)
        self._outboxes = [nothing, nothing]
        self._turn = 0
        self.calls = 0

    def take(self, *sizes_bytes: int) -> list[Tensor]:
        """Switches to the other outbox, and returns parts of it as tensors of bytes.

        Raises:
            HeapError: there is no room for a larger outbox.
        """
        ends, total = [], 0
        for size in sizes_bytes:
            ends.append(total)
            total += -(-size // _LINE_BYTES) * _LINE_BYTES
        self._turn ^= 1
        if self._outboxes[self._turn].numel() < total:
            # Free the smaller outbox first: there may not be room for both.
            self._outboxes[self._turn] = self._outboxes[self._turn].new_empty(0)
            with normal_tensors():
                made = empty(total, dtype=torch.uint8, device=self._heap_device)
            self._await_peers("an outbox of experts' rows")
            self._outboxes[self._turn] = made
        outbox = self._outboxes[self._turn]
        return [outbox[end : end + size] for end, size in zip(ends, sizes_bytes, strict=True)]

    def offset_of(self, tensor: Tensor) -> int:
        """Returns the offset of a tensor in this rank's heap."""
        return tensor.data_ptr() - self._own_base if tensor.numel() else 0

    def at(self, offsets: Sequence[int]) -> list[int]:
        """Returns for each rank of the node the local address of an offset in the rank's heap."""
        return [base + offset for base, offset in zip(self._bases, offsets, strict=True)]


_outboxes: WeakKeyDictionary[Communicator, Outboxes] = WeakKeyDictionary()


def outboxes_of(comm: Communicator) -> Outboxes:
    """Returns this rank's outboxes of a communicator, which live as long as the communicator."""
    found = _outboxes.get(comm)
    if found is None:
        found = _outboxes[comm] = Outboxes(comm)
    return found


def lendable(comm: Communicator, tensor: Tensor) -> bool:
    """True if the communicator's ranks can read the tensor in place."""
    return is_contiguous(tensor) if comm.world_size == 1 else is_in_heap(comm, tensor)


def prepared(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Calls ``make`` before an exchange; returns (result, None), or (None, error) if it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def numbers_on_host(comm: Communicator, operation: str, tensor: Tensor) -> list[Any]:
    """Returns the numbers of a tensor, after the current stream has computed them.

    Raises:
        RingcommError: the communicator has become unusable, and the numbers are invalid.
    """
    engine = comm.engine
    if isinstance(engine, DeviceCallEngine):
        runtime, device = engine.device_ref
        with runtime.on_device(device):
            runtime.record_event(device, runtime.current_stream(device)).synchronize()
        engine.raise_if_unusable(operation)
    return tensor.tolist()


def on_device_of(comm: Communicator, numbers: Tensor) -> Tensor:
    """Copies a host tensor to the communicator's device, without waiting."""
    if comm.device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(comm.device, non_blocking=True)


def exchange(
    comm: Communicator,
    operation: str,
    mine: RowsHeader,
    refusal: Exception | None,
    refused: Tensor | None = None,
) -> list[RowsHeader]:
    """Returns the headers of all ranks, whose published data may then be read; collective.

    Args:
        comm: the ranks.
        operation: named in errors.
        mine: this rank's header.
        refusal: the error for which this rank refuses its arguments, or None; raised here once all
            ranks have received it.
        refused: int64 on the device, added to ``mine.refused``: nonzero if the device has found a
            bad argument. If it is nonzero on this rank, this function returns the headers, and the
            caller must raise.

    Raises:
        MismatchError: another rank refused its arguments, or they differ from this rank's.
    """
    if comm.world_size == 1 and refused is None:
        if refusal is not None:
            raise refusal
        return [mine]
    own = on_device_of(comm, torch.tensor(mine, dtype=torch.int64, device="cpu"))
    if refused is not None:
        own[RowsHeader._fields.index("refused")] += refused
    everyone = own.new_empty((comm.world_size, len(mine)))
    comm.all_gather_into_tensor(everyone.view(-1), own)
    if refusal is not None:
        raise refusal
    headers = [RowsHeader(*row) for row in numbers_on_host(comm, operation, everyone)]
    if headers[comm.rank].refused:
        return headers
    head = where(operation, comm.rank, comm.world_size)
    for rank, theirs in enumerate(headers):
        if theirs.refused:
            raise MismatchError(f"{head}: rank {rank} refused its arguments; its error says why")
    rows = [_in_common(header) for header in headers]
    if other := first_other(rows):
        advice = "Give all ranks the same options, and have them make the same calls"
        raise unequal(head, _IN_COMMON.values(), rows, other, advice)
    return headers


@contextmanager
def reading(comm: Communicator, operation: str, headers: Sequence[RowsHeader]) -> Iterator[None]:
    """A context for reading peers' memory; waits for peers at the end if memory was lent.

    An error inside aborts the communicator: otherwise the peers would wait for this rank.
    """
    try:
        yield
    except BaseException as error:
        for each in (comm, comm.node):
            each.abort(f"{operation}: {type(error).__name__}: {error}")
        raise
    if comm.world_size > 1 and any(header.lent for header in headers):
        comm.barrier()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPRESSIONS = ("int8", "fp8")

DISPATCH, COMBINE, BACKWARD, WEIGHTS = range(4)
# Whether a combine has weights, and whether their gradients are needed.
UNWEIGHTED, WEIGHTED, WANTS_GRADIENT = range(3)
WORD_BYTES = 8
FLOAT_BYTES = 4
ENTRY_WORDS = 2
# Rows of at least IN_HEAP_FROM_BYTES are allocated in the heap, whose pages already exist.
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
    engine = comm.engine
    engine.raise_if_unusable(operation)
    head = where(operation, comm.rank, comm.world_size)
    if not isinstance(engine, DeviceCallEngine):
        raise UnsupportedError(
            f"{head}: on devices the rows of experts are exchanged only within one node. Use a "
            "group of one node's ranks (comm.node), or a communicator on the host and CPU tensors"
        )
    runtime, device = engine.device_ref
    if runtime.is_capturing(device):
        raise UnsupportedError(
            f"{head}: the current stream is capturing a graph, but the host has to wait for the "
            "row counts of the other ranks. Leave this call out of the graph"
        )
    return comm


def run_native(comm: Communicator, operation: str, name: str, *arguments: Any) -> None:
    """Calls a native function on the host or device that has the communicator's rows.

    On the host it is the native module's function. On a device it is the method of the same name of
    the device's core, which enqueues a kernel on the current stream.
    """
    if comm.launches:
        comm.engine.start_call(Call(operation, lambda end: getattr(end, name)(*arguments), []))
    else:
        getattr(_native, name)(*arguments)


def check_rows(checks: CallChecks, name: str, tensor: Tensor) -> None:
    checks.tensor(name, tensor)
    if tensor.dim() != 2:
        checks.fail(f"{name}: expected rows [n, hidden], got shape {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        checks.fail(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")


class Tables(NamedTuple):
    """The routes of a dispatch, with which a combine and the gradients find rows and tokens.

    Attributes:
        expert_rows: int64 [tokens, k, 2], the rank of each token's expert, and the row's number on
            the expert's rank; -1 if there is no expert.
        sources: int64 [rows, 4], positions of each row's token and weight; -1 after the last row.
        row_weights: float32 [rows], the weights of the rows; [0] without weights.
        stamp: int64 [2], the number of the dispatch, and the rows of this rank.
    """

    expert_rows: Tensor
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
    if r.compression is not None and r.compression not in COMPRESSIONS:
        known = " or ".join(map(repr, COMPRESSIONS))
        checks.fail(f"compression: expected None, {known}, got {r.compression!r}")
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
    compression: str | None
    group: str
    world_size: int

    @property
    def quant_format(self) -> int:
        """1 + the native module's number of the quantized format; 0 without quantization."""
        return 0 if self.compression is None else _native.QUANT_FORMATS[self.compression] + 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of a published row, quantized or not."""
        hidden = self.x.size(1)
        if self.compression is None:
            return hidden * self.x.element_size()
        return _native.quantized_bytes(_native.QUANT_FORMATS[self.compression], hidden)

    def write_payload(self, payload: Tensor) -> None:
        """Writes the tokens in their published form to ``payload``, a tensor of bytes."""
        x = self.x.detach()
        if self.compression is None:
            payload.view(x.dtype).view(x.shape).copy_(x)
            return
        dense, code = readable(x), _native.QUANT_FORMATS[self.compression]
        _native.quantize_rows(
            code, dense.data_ptr(), DTYPE_CODES[x.dtype], len(x), x.size(1), payload.data_ptr()
        )

    def read_rows(self, comm: Communicator, sources: Tensor, tokens_ptrs: list[int]) -> Tensor:
        """Returns the published rows that ``sources`` names."""
        rows = new_rows(comm, self.x, len(sources))
        entries = (sources.data_ptr(), _native.SOURCE_WORDS, len(sources), tokens_ptrs)
        if self.compression is None:
            _native.copy_rows(*entries, self.payload_bytes, rows.data_ptr())
        else:
            code, dtype = _native.QUANT_FORMATS[self.compression], DTYPE_CODES[self.x.dtype]
            _native.dequantize_rows(code, *entries, dtype, self.x.size(1), rows.data_ptr())
        return rows

    def header(self) -> RowsHeader:
        """Returns the header that describes the arguments to all ranks."""
        return RowsHeader(
            operation=DISPATCH,
            experts=self.experts,
            k=self.topk_idx.size(1),
            hidden=self.x.size(1),
            dtype=DTYPE_CODES[self.x.dtype],
            compression=self.quant_format,
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
    """Returns the message for an assignment to an expert that does not exist."""
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
    """Returns this rank's number of rows; all ranks raise if one rank has no room for its rows."""
    here = headers[0].experts // comm.world_size
    for rank, header in enumerate(headers):
        if header.limit < 0 and rank != comm.rank:
            continue
        rows = _native.count_rows(counts_ptrs, rank * here, here)
        if 0 <= header.limit < rows:
            comm.engine.checks("moe.dispatch").fail(
                f"max_rows: the experts of rank {rank} get {rows} rows, and there is room for "
                f"{header.limit}; pass a larger max_rows"
            )
        if rank == comm.rank:
            mine = rows
    return mine
