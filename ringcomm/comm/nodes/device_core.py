# SPDX-License-Identifier: Apache-2.0
"""The core of a communicator on devices over several nodes: calls of the node and the transport.

It implements the bodies of :class:`ringcomm.comm.nodes.calls.CollectivesOverNodes` for devices,
with the same bits as the host (:mod:`ringcomm.comm.nodes.core`). A call is a series of the node's
kernels, the transport's exchanges and torch's operations, all on the current stream:

    reduce-scatter   each rank copies its buffer, ordered by the local peer that sends each part,
                     and widens 16-bit types to FP32. One reduce-scatter of the node gives each rank
                     the partial sums for its rail peers. One exchange on the rail gives the rank
                     the N partial sums of its own part; it adds them in node order and rounds once.
    all-gather       each rank sends its part to its rail peers, and one all-gather of the node
                     shares all parts that its ranks have.
    all-reduce       both; or, below ``ONE_HOP_BYTES``, an all-reduce of the node and one exchange.

The bytes on the network are the same as on the host. Within the node 16-bit types take twice the
bytes, since they are widened before they are reduced, and each buffer is copied once more. Large
calls run in segments, one after the other.

Before a call is enqueued the hosts of a rail compare its headers: an exchange whose sizes differ
from the peers' sizes would stall on the device, or worse. So a call returns once the rail peers
have made it as well; their devices may be far behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm.device.launch import (
    POLL_S,
    DeviceCallEngine,
)
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import EXIT_GRACE_S, Call
from ringcomm.comm.host.rendezvous import NodeLayout
from ringcomm.comm.nodes.calls import (
    BYTE,
    ELEM_BYTES,
    ONE_SHOT,
    CollectivesOverNodes,
    Span,
    _Failed,
)
from ringcomm.comm.nodes.compressed_sums import AVG, FLOAT32, PREMUL, SUM, Reducing, is_quantized
from ringcomm.comm.nodes.core import LINE_ELEMS
from ringcomm.comm.nodes.transport import DeviceRails, Rails
from ringcomm.comm.nodes.watch import DeviceWatch
from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.process import Deadline

# ---- Quantization on a device, by kernels that the calls of a node's communicator enqueue -------
# They compile the host's code, ``kernels/include/ringcomm/core/quantization.h``, so the bits are
# equal. A *run* is a series of numbers that is quantized as a whole. Quantized runs begin at
# multiples of ``ALIGN_BYTES``, so that threads load and store whole words; on the host they are
# not padded.

Tensor = torch.Tensor

ALIGN_BYTES = 16
_FLOAT32 = _native.DTYPES["float32"]
_TYPES = ("float32", "bfloat16", "float16")


def size_bytes(compression: str, elems: int) -> int:
    """Returns the bytes of a quantized run of ``elems`` numbers, padded to ``ALIGN_BYTES``."""
    quantized_bytes = _native.quantized_bytes(_native.QUANT_FORMATS[compression], elems)
    return -(-quantized_bytes // ALIGN_BYTES) * ALIGN_BYTES


def preload(device_ref: tuple[DeviceRuntime, int], compression: str) -> None:
    """Loads a quantized format's kernels, so that no call has to load them while a peer waits."""
    runtime, device = device_ref
    for dtype in _TYPES if compression in _native.QUANT_FORMATS else ():
        for what in ("quantize", "dequantize_and_sum"):
            runtime.find_kernel(device, f"quantize_{compression}", f"rc_{what}_{dtype}")


class DeviceQuantizer:
    """Quantizes on a rank's device, and adds the dequantized values of runs.

    Args:
        enqueue: enqueues a call of the node's communicator, by its native name and arguments.
        room: returns a tensor of the given number of bytes on the device.
    """

    def __init__(self, enqueue: Callable[..., None], room: Callable[[int], Tensor]) -> None:
        self._enqueue = enqueue
        self._room = room

    def quantize(self, compression: str, runs: Sequence[Tensor]) -> Tensor:
        """Quantizes float32 runs; returns them concatenated, each padded as in size_bytes()."""
        sizes = [size_bytes(compression, run.numel()) for run in runs]
        quantized = self._room(sum(sizes))
        for run, to in zip(runs, torch.split(quantized, sizes), strict=True):
            if run.numel():
                given = (run.data_ptr(), _FLOAT32, to.data_ptr(), run.numel())
                self._enqueue("quantize", _native.QUANT_FORMATS[compression], *given)
        return quantized

    def add_up(
        self,
        compression: str,
        quantized: Tensor,
        count: int,
        out: Span,
        dtype: int,
        divide_by: int = 0,
    ) -> None:
        """Adds the dequantized numbers of ``count`` runs, in order, and rounds once.

        Args:
            compression: "int8", "fp8" or "int4".
            quantized: runs that :meth:`quantize` returned on any ranks, each as long as ``out``.
            count: the number of runs.
            out: where the sums are stored.
            dtype: code of the dtype of ``out``.
            divide_by: divides the sums, unless 0.
        """
        if out.elems:
            runs = (quantized.data_ptr(), count, size_bytes(compression, out.elems))
            result = (out.ptr, dtype, out.elems, divide_by)
            self._enqueue("dequantize_and_sum", _native.QUANT_FORMATS[compression], *runs, *result)


# ---- Sums of partial sums on a device, by torch's operations, with the host's bits; and copies --


TORCH_DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for name, code in _native.DTYPES.items() if hasattr(torch, name)
}
# torch has few operations for unsigned types; the signed types give the same bits.
AS_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
AS_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a < b) | (a != a), a, b)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a > b) | (a != a), a, b)


# The functions give the same bits as combine() of kernels/include/ringcomm/core/reduce.h.
_JOIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": _smaller,
    "MAX": _larger,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_JOIN_BOOL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **_JOIN,
    "SUM": torch.bitwise_or,
    "PRODUCT": torch.bitwise_and,
    "MIN": torch.bitwise_and,
    "MAX": torch.bitwise_or,
}
OP_NAMES = {code: name for name, code in _native.OPS.items()}


def joined(partials: Tensor, r: Reducing, divide_by: int) -> Tensor:
    """Combines partial sums in order, and divides by ``divide_by`` unless it is 0.

    Args:
        partials: [nodes, elements], in the partial sums' type, or in the elements' type if they
            were rounded for the network.
        r: the reduction.
        divide_by: the number of ranks for a mean, else 0.

    Returns:
        [elements], in the partial sums' type; complex numbers as pairs of real numbers.
    """
    rows = partials.to(TORCH_DTYPES[r.partial])
    kind = {**AS_SIGNED, **AS_REAL}.get(rows.dtype)
    rows = rows if kind is None else rows.view(kind)
    joins = _JOIN_BOOL if rows.dtype is torch.bool else _JOIN
    join: Callable[[Tensor, Tensor], Tensor] = joins[OP_NAMES[r.joining]]
    total = rows[0]
    for row in rows[1:]:
        total = join(total, row)
    if not divide_by:
        return total
    if not total.is_floating_point():
        return torch.div(total, divide_by, rounding_mode="trunc")
    # A tensor on the device: if the divisor were a host number, torch would multiply by 1/divisor.
    return total / torch.full((), divide_by, dtype=total.dtype, device=total.device)


def keeps_type(dtype: torch.dtype) -> bool:
    """True if :func:`joined` returns ``dtype`` itself, or the type of partial sums of ``dtype``.

    For other dtypes :func:`joined` returns signed integers, or pairs of real numbers.
    """
    return dtype not in AS_SIGNED and dtype not in AS_REAL


def check_reducible(operation: str, dtype: int, op: int) -> None:
    """Raises if no kernel reduces this dtype by this op; both are codes of the native module.

    Raises:
        ArgumentError: in the cases in which :meth:`DeviceComm.reduce` raises it.
    """
    kind, name = TORCH_DTYPES[dtype], OP_NAMES[op]
    signed_only = kind in AS_SIGNED and name in ("AVG", "PREMUL_SUM", "MIN", "MAX")
    if signed_only or (kind in AS_REAL and name == "PRODUCT"):
        raise ArgumentError(
            f"{operation}: GPUs do not reduce {kind} by {name}; convert the tensor to a signed or "
            "wider type, or reduce a CPU copy"
        )


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, in few launches; converts where the dtypes differ."""
    pairs = [
        (to, of) if to.dtype is not of.dtype else (to.view(torch.uint8), of.view(torch.uint8))
        for to, of in zip(targets, sources, strict=True)
        if to.numel()
    ]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])


# The bytes that a rank copies at a time (not measured). A call uses a few buffers of this size.
SCRATCH_BYTES = 64 << 20


class DeviceNodesCore(CollectivesOverNodes):
    """One rank's core on a device over several nodes.

    Args:
        control: the host core of this rank's node, by which hosts agree on calls.
        layout: the nodes of all ranks.
        rails: the host rails, also for agreement.
        watch: the watch over all ranks.
        compression: as ``CommOptions.compression``.
        calls: the device communicator of the node; nothing else uses it.
        device_rails: the rails that carry the data between nodes.
    """

    def __init__(
        self,
        control: _native.Comm,
        layout: NodeLayout,
        rails: Rails,
        watch: DeviceWatch,
        compression: str,
        calls: DeviceCallEngine,
        device_rails: DeviceRails,
    ) -> None:
        super().__init__(control, layout, rails, watch, None, compression, "one_shot")
        self.device_watch = watch
        self.calls = calls
        self._device_rails = device_rails
        self._runtime, self._device = calls.device_ref
        preload(calls.device_ref, compression)

    @property
    def segment_bytes(self) -> int:
        return self.calls.segment_bytes

    @property
    def timeout_ms(self) -> int:
        return self._inner.timeout_ms

    @timeout_ms.setter
    def timeout_ms(self, timeout_ms: int) -> None:
        self._inner.timeout_ms = timeout_ms
        self.calls.device_core.timeout_ms = timeout_ms

    @property
    def aborted(self) -> bool:
        return super().aborted or self.calls.aborted

    def ends(self, grace_s: float) -> bool:
        """Waits for the calls under way; returns False if they take longer than ``grace_s``."""
        deadline = Deadline(grace_s)
        while self.device_watch.under_way:
            if deadline.is_over():
                return False
            time.sleep(POLL_S)
        return True

    def forget(self) -> None:
        if not self.ends(EXIT_GRACE_S):
            self.abort("dropped with a call under way")
            self.ends(EXIT_GRACE_S)
        self.close()

    def close(self) -> None:
        self._closed = True
        self._watch.close()
        self._rails.close()
        self._device_rails.close()
        self.calls._close(self.timeout_ms / 1000, EXIT_GRACE_S)
        self._inner.close()

    # ---- the bodies of the collectives ----------------------------------------------------------

    def _reduce_to_all(self, ins: Span, out: Span, r: Reducing) -> None:
        size = ELEM_BYTES[r.dtype]
        each = -(-ins.elems // (self._world * LINE_ELEMS)) * LINE_ELEMS
        compression = self._quantization(r, ins.elems)
        for segment in self._segments_of(each, ELEM_BYTES[r.partial]):
            given = self._cut(ins, each, segment, size)
            outs = self._cut(out, each, segment, size)
            if compression is not None:
                self._all_reduce_quantized(given, outs, r, compression)
                continue
            self._reduce_segment(given, outs[self.layout.rank], r, None)
            as_bytes = [Span(span.ptr, span.elems * size) for span in outs]
            self._gather_segment(as_bytes[self.layout.rank], as_bytes)

    def _reduce_to_each(self, spans: list[Span], out: Span, r: Reducing) -> None:
        elems, size = [span.elems for span in spans], ELEM_BYTES[r.dtype]
        compression = self._quantization(r, sum(elems))
        for segment in self._segments_of(max(elems), ELEM_BYTES[r.partial]):
            segments = [span.slice(*segment, size) for span in spans]
            self._reduce_segment(segments, out.slice(*segment, size), r, compression)

    def _reduce_to_root(self, root: int, ins: Span, out: Span, r: Reducing) -> None:
        compression, size = self._quantization(r, ins.elems), ELEM_BYTES[r.dtype]
        for segment in self._segments_of(ins.elems, ELEM_BYTES[r.partial] * self._world):
            self._reduce_to(
                root, ins.slice(*segment, size), out.slice(*segment, size), r, compression
            )

    def _gather_spans(self, in_ptr: int, spans: list[Span]) -> None:
        mine = Span(in_ptr, spans[self.layout.rank].elems)
        for segment in self._segments_of(max(span.elems for span in spans), 1):
            segments = [span.slice(*segment, 1) for span in spans]
            self._gather_segment(mine.slice(*segment, 1), segments)

    def _broadcast(self, whole: Span, root: int) -> None:
        rail, node, at = self._way_to(root)
        if self.layout.local_rank == at and whole.elems:
            on_device = self._bytes(whole)
            self._carry(rail, lambda: self._device_rails.broadcast(rail, on_device, node))
        self._within("broadcast", *whole, self._called.dtype, at)

    def barrier(self) -> int:
        def body() -> None:
            # Rail peers exchange after their nodes' barriers: when the exchange ends, all ranks
            # have called barrier().
            self._within("barrier")
            ones = [1] * len(self.layout.nodes)
            for rail in self.layout.rails_of(self.layout.rank):
                self._exchange_on(rail, self._room(len(ones)), self._room(len(ones)), ones, ones)

        return self._call("barrier", (0, -1, -1, -1), ONE_SHOT, body)

    # ---- parts of a call ------------------------------------------------------------------------

    def _reducing(self, name: str, dtype: int, op: int, factor: float) -> Reducing:
        """Returns a reduction's arguments; raises, before a header is sent, if no kernel fits."""
        check_reducible(f"{name} on {self.layout.named(self.layout.rank)}", dtype, op)
        return Reducing(dtype, op, factor)

    def _call(
        self, name: str, head: tuple[int, int, int, int], algorithm: int, body: Callable[[], None]
    ) -> int:
        """Enqueues a call once the rail peers have made the same call."""

        def agreed() -> None:
            self._check_headers()
            body()

        return self._run(name, head, algorithm, agreed)

    def _within(self, name: str, *args: Any) -> None:
        """Enqueues a call of the node's device communicator."""

        def run(core: Core) -> int:
            status: int = getattr(core, name)(*args)
            return status

        try:
            self.calls.start_call(Call(self._called.name, run, []))
        except RingcommError as error:
            self.device_watch.in_calls(error, str(self._called))
            raise _Failed from error

    def _carry(self, rail: int, enqueue: Callable[[], None]) -> None:
        ranks = self.layout.rail(rail)
        peer = ranks[next(self.layout.others())]
        with self._waiting_on_rail(peer):
            enqueue()

    def _exchange_on(
        self, rail: int, out: Tensor, given: Tensor, out_elems: list[int], given_elems: list[int]
    ) -> None:
        self._carry(
            rail, lambda: self._device_rails.exchange(rail, out, given, out_elems, given_elems)
        )

    def _room(self, elems: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        on = self._runtime.torch_device(self._device)
        return torch.empty(elems, dtype=dtype, device=on)

    def _bytes(self, span: Span) -> Tensor:
        """Returns a uint8 tensor over the caller's memory, which the caller keeps alive."""
        if not span.elems:
            return self._room(0)
        return self._runtime.tensor(self._device, span.ptr, span.elems, None)

    def _tensor(self, span: Span, dtype: int) -> Tensor:
        whole = self._bytes(Span(span.ptr, span.elems * ELEM_BYTES[dtype]))
        return whole.view(TORCH_DTYPES[dtype])

    def _segments_of(self, elems: int, elem_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of segments; scratch has room for one segment of every rank."""
        each = SCRATCH_BYTES // (elem_bytes * self._world) // LINE_ELEMS * LINE_ELEMS
        each = max(each, LINE_ELEMS)
        yield from ((begin, min(begin + each, elems)) for begin in range(0, elems, each))

    def _cut(self, whole: Span, each: int, segment: tuple[int, int], elem_bytes: int) -> list[Span]:
        """Returns, by rank, one segment of the rank's chunk of ``each`` elements."""
        chunks = [
            whole.slice(rank * each, (rank + 1) * each, elem_bytes) for rank in range(self._world)
        ]
        return [chunk.slice(*segment, elem_bytes) for chunk in chunks]

    @cached_property
    def _passing(self) -> list[list[int]]:
        """By local rank: the ranks whose data the local rank carries, in order of rail and node.

        Rail k carries the data of the ranks whose local rank is k.
        """
        nodes, num_local = self.layout.nodes, len(self.layout.node_ranks)
        return [
            [
                ranks[rail]
                for rail in range(local_rank, self.layout.num_rails, num_local)
                for ranks in nodes
                if rail < len(ranks)
            ]
            for local_rank in range(num_local)
        ]

    def _on_rail(self, rail: int, elems: Sequence[int]) -> list[int]:
        """Returns, by node, the entry of ``elems`` for the node's rank on this rail; 0: no rank."""
        return [elems[ranks[rail]] if rail < len(ranks) else 0 for ranks in self.layout.nodes]

    def _way_to(self, root: int) -> tuple[int, int, int]:
        """Returns a root's rail and node, and the local rank on this node that uses the rail."""
        rail = self.layout.local_rank_of(root)
        return rail, self.layout.node_of(root), rail % len(self.layout.node_ranks)

    # ---- reductions -----------------------------------------------------------------------------

    @property
    def _quantizer(self) -> DeviceQuantizer:
        # The quantizer is not stored: it refers to this core, which would be a reference cycle.
        return DeviceQuantizer(self._within, self._room)

    def _quantization(self, r: Reducing, elems: int) -> str | None:
        """Returns the compression that quantizes sums of ``elems`` elements, or None."""
        quantized = self.compression in _native.QUANT_FORMATS and is_quantized(
            r, elems * ELEM_BYTES[r.dtype]
        )
        return self.compression if quantized else None

    def _reduce_segment(
        self, spans: list[Span], mine: Span, r: Reducing, compression: str | None
    ) -> None:
        """Reduces spans, one for each rank; writes this rank's sum to ``mine``."""
        sums = self._reduced_in_node(spans, r)
        if compression is not None:
            self._exchange_quantized(
                sums, [span.elems for span in spans], mine, r.dtype, r, compression
            )
            return
        sums = sums.to(TORCH_DTYPES[r.dtype]) if self.compression == "param" else sums
        arrived = self._exchange_sums(sums, [span.elems for span in spans])
        self._write(self._joined(arrived, r), mine, r)

    def _reduced_in_node(self, spans: list[Span], r: Reducing) -> Tensor:
        """Returns the node's partial sums of the spans that this rank sends, in rail order."""
        order = [rank for passing in self._passing for rank in passing]
        elems = [sum(spans[rank].elems for rank in passing) for passing in self._passing]
        packed = self._room(sum(elems), TORCH_DTYPES[r.partial])
        slices = torch.split(packed, [spans[rank].elems for rank in order])
        copy_all(slices, [self._tensor(spans[rank], r.dtype) for rank in order])
        sums = self._room(elems[self.layout.local_rank], TORCH_DTYPES[r.partial])
        self._within(
            "reduce_scatter_list",
            [chunk.data_ptr() for chunk in torch.split(packed, elems)],
            elems,
            sums.data_ptr(),
            *self._in_node(r),
        )
        return sums

    def _exchange_quantized(
        self,
        sums: Tensor,
        elems: Sequence[int],
        mine: Span,
        dtype: int,
        r: Reducing,
        compression: str,
    ) -> None:
        """Sends quantized partial sums; adds the arriving ones to ``mine``, of type ``dtype``."""
        runs = torch.split(sums, [elems[rank] for rank in self._passing[self.layout.local_rank]])
        sizes_bytes = [size_bytes(compression, count) for count in elems]
        arrived = self._exchange_sums(self._quantizer.quantize(compression, runs), sizes_bytes)
        self._add_up(arrived, mine, dtype, r, compression)

    def _add_up(
        self, arrived: Tensor, out: Span, dtype: int, r: Reducing, compression: str
    ) -> None:
        """Adds the quantized runs that arrived, in node order."""
        divide_by = self._world if r.op == AVG else 0
        self._quantizer.add_up(compression, arrived, len(self.layout.nodes), out, dtype, divide_by)

    def _all_reduce_quantized(
        self, given: list[Span], outs: list[Span], r: Reducing, compression: str
    ) -> None:
        """Reduces spans by rank, gathers the quantized sums, and dequantizes them on all ranks."""
        mine = self._room(outs[self.layout.rank].elems, TORCH_DTYPES[FLOAT32])
        span = Span(mine.data_ptr(), mine.numel())
        elems = [span.elems for span in given]
        self._exchange_quantized(
            self._reduced_in_node(given, r), elems, span, FLOAT32, r, compression
        )
        own = self._quantizer.quantize(compression, [mine])
        sizes_bytes = [size_bytes(compression, count) for count in elems]
        quantized = torch.split(self._room(sum(sizes_bytes)), sizes_bytes)
        spans = [Span(run.data_ptr(), run.numel()) for run in quantized]
        self._gather_segment(Span(own.data_ptr(), own.numel()), spans)
        for run, out in zip(quantized, outs, strict=True):
            self._quantizer.add_up(compression, run, 1, out, r.dtype)

    def _exchange_sums(self, sums: Tensor, elems: Sequence[int]) -> Tensor:
        """Sends the partial sums of other ranks' parts; returns the sums of this rank's part."""
        layout, begin = self.layout, 0
        own = elems[layout.rank]
        arrived = self._room(own * len(layout.nodes), sums.dtype)
        for rail in layout.rails_of(layout.rank):
            given = self._on_rail(rail, elems)
            end = begin + sum(given)
            if rail == layout.local_rank:
                into, room = [own] * len(layout.nodes), arrived
            else:
                into, room = [0] * len(layout.nodes), arrived[:0]
            self._exchange_on(rail, room, sums[begin:end], into, given)
            begin = end
        return arrived

    def _in_node(self, r: Reducing) -> tuple[int, int, float]:
        return r.partial, SUM if r.op == AVG else r.op, r.factor if r.op == PREMUL else 1.0

    def _joined(self, arrived: Tensor, r: Reducing) -> Tensor:
        """Adds the partial sums that arrived, in node order."""
        nodes = len(self.layout.nodes)
        partials = arrived.view(nodes, arrived.numel() // nodes)
        return joined(partials, r, self._world if r.op == AVG else 0)

    def _write(self, total: Tensor, out: Span, r: Reducing) -> None:
        """Writes sums to ``out`` in the elements' type, rounded once."""
        if not out.elems:
            return
        target = self._tensor(out, r.dtype)
        (target if keeps_type(target.dtype) else target.view(total.dtype)).copy_(total)

    def _widened(self, given: Span, r: Reducing) -> Tensor:
        wide = self._room(given.elems, TORCH_DTYPES[r.partial])
        copy_all([wide], [self._tensor(given, r.dtype)])
        return wide

    def _reduce_in_one_hop(self, given: Span, out: Span, r: Reducing) -> None:
        """Reduces the whole buffer in each node, then exchanges the results with the rail peers."""
        if not given.elems:
            return
        wide = self._widened(given, r)
        ptr = wide.data_ptr()
        self._within("all_reduce", ptr, ptr, given.elems, *self._in_node(r), ONE_SHOT)
        whole = [given.elems] * self._world
        copies = sum(
            rail < len(ranks)
            for rail in self.layout.rails_of(self.layout.rank)
            for ranks in self.layout.nodes
        )
        self._write(self._joined(self._exchange_sums(wide.repeat(copies), whole), r), out, r)

    def _reduce_to(
        self, root: int, given: Span, out: Span, r: Reducing, compression: str | None
    ) -> None:
        """Each node reduces to its rank on the root's rail; the root adds the arriving sums."""
        layout = self.layout
        rail, node, at = self._way_to(root)
        wide = self._widened(given, r)
        sums = torch.empty_like(wide)
        self._within("reduce", wide.data_ptr(), sums.data_ptr(), given.elems, *self._in_node(r), at)
        if layout.local_rank != at:
            return
        sent = sums if compression is None else self._quantizer.quantize(compression, [sums])
        count = sent.numel() if layout.rank == root else 0
        arrived = self._room(count * len(layout.nodes), sent.dtype)
        to_root = [sent.numel() if each == node else 0 for each in range(len(layout.nodes))]
        self._exchange_on(rail, arrived, sent, [count] * len(layout.nodes), to_root)
        if layout.rank != root:
            return
        if compression is None:
            self._write(self._joined(arrived, r), out, r)
        else:
            self._add_up(arrived, out, r.dtype, r, compression)

    # ---- all-gather, gather, scatter ------------------------------------------------------------

    def _gather_segment(self, mine: Span, spans: list[Span]) -> None:
        """Gathers spans of bytes, by rank; this rank sends ``mine``."""
        layout, begin = self.layout, 0
        sizes = [span.elems for span in spans]
        totals = [sum(sizes[rank] for rank in passing) for passing in self._passing]
        passed = self._room(totals[layout.local_rank])
        for rail in layout.rails_of(layout.rank):
            into = self._on_rail(rail, sizes)
            end = begin + sum(into)
            if rail == layout.local_rank:
                given = self._bytes(mine).repeat(len(layout.nodes))
                leaving = [mine.elems] * len(layout.nodes)
            else:
                given, leaving = passed[:0], [0] * len(layout.nodes)
            self._exchange_on(rail, passed[begin:end], given, into, leaving)
            begin = end
        packed = self._room(sum(totals))
        ptrs = [chunk.data_ptr() for chunk in torch.split(packed, totals)]
        self._within("all_gather_list", passed.data_ptr(), ptrs, totals, BYTE)
        order = [rank for passing in self._passing for rank in passing]
        slices = torch.split(packed, [sizes[rank] for rank in order])
        copy_all([self._bytes(spans[rank]) for rank in order], slices)

    def _gather_to(self, root: int, in_ptr: int, size_bytes: int, out_ptrs: Sequence[int]) -> None:
        layout = self.layout
        rail, node, at = self._way_to(root)
        collects, num_local = layout.local_rank == at, len(layout.node_ranks)
        collected = self._room(size_bytes * num_local if collects else 0)
        ptrs = [collected.data_ptr() + local_rank * size_bytes for local_rank in range(num_local)]
        self._within("gather", in_ptr, size_bytes, ptrs if collects else [], self._called.dtype, at)
        if not collects or not size_bytes:
            return
        is_root = layout.rank == root
        into = [len(ranks) * size_bytes if is_root else 0 for ranks in layout.nodes]
        to_root = [collected.numel() if each == node else 0 for each in range(len(into))]
        arrived = self._room(sum(into))
        self._exchange_on(rail, arrived, collected, into, to_root)
        if is_root:
            order = [rank for ranks in layout.nodes for rank in ranks]
            outs = [self._bytes(Span(out_ptrs[rank], size_bytes)) for rank in order]
            copy_all(outs, torch.split(arrived, size_bytes))

    def _scatter_from(
        self, root: int, in_ptrs: Sequence[int], out_ptr: int, size_bytes: int
    ) -> None:
        layout = self.layout
        rail, node, at = self._way_to(root)
        has, num_local = layout.local_rank == at, len(layout.node_ranks)
        arrived = self._room(size_bytes * num_local if has else 0)
        if has and size_bytes:
            given, leaving = self._room(0), [0] * len(layout.nodes)
            if layout.rank == root:
                order = [rank for ranks in layout.nodes for rank in ranks]
                given = torch.cat([self._bytes(Span(in_ptrs[rank], size_bytes)) for rank in order])
                leaving = [len(ranks) * size_bytes for ranks in layout.nodes]
            into = [arrived.numel() if each == node else 0 for each in range(len(leaving))]
            self._exchange_on(rail, arrived, given, into, leaving)
        ptrs = [arrived.data_ptr() + local_rank * size_bytes for local_rank in range(num_local)]
        self._within("scatter", ptrs if has else [], out_ptr, size_bytes, self._called.dtype, at)

    # ---- all-to-all -----------------------------------------------------------------------------

    def _exchange(self, ins: list[Span], outs: list[Span]) -> None:
        """Moves data to the local peer on the receiver's rail, which sends them to the receiver."""
        layout = self.layout
        sizes = self._sizes_by_sender([span.elems for span in ins])
        self._compare_sizes(sizes, [span.elems for span in outs])
        passing = self._passing[layout.local_rank]
        order = [rank for each in self._passing for rank in each]
        packed = self._room(sum(span.elems for span in ins))
        slices = torch.split(packed, [ins[rank].elems for rank in order])
        copy_all(slices, [self._bytes(ins[rank]) for rank in order])
        leaving = [sum(ins[rank].elems for rank in each) for each in self._passing]
        arriving = [sum(row[rank] for rank in passing) for row in sizes]
        collected = self._room(sum(arriving))
        self._within(
            "all_to_all",
            [chunk.data_ptr() for chunk in torch.split(packed, leaving)],
            leaving,
            [chunk.data_ptr() for chunk in torch.split(collected, arriving)],
            arriving,
            self._called.dtype,
        )
        # ``passing`` is ordered by sender, then receiver; the exchange needs receiver, then sender.
        splits = [
            torch.split(mine, [row[rank] for rank in passing])
            for mine, row in zip(torch.split(collected, arriving), sizes, strict=True)
        ]
        by_receiver = [by_sender[at] for at in range(len(passing)) for by_sender in splits]
        given, begin = torch.cat(by_receiver), 0
        received = self._room(sum(span.elems for span in outs))
        to_each = [sum(row[rank] for row in sizes) for rank in range(self._world)]
        for rail in layout.rails_of(layout.rank):
            sends = self._on_rail(rail, to_each)
            end = begin + sum(sends)
            into, room = [0] * len(layout.nodes), received[:0]
            if rail == layout.local_rank:
                into = [sum(outs[rank].elems for rank in ranks) for ranks in layout.nodes]
                room = received
            self._exchange_on(rail, room, given[begin:end], into, sends)
            begin = end
        senders = [rank for ranks in layout.nodes for rank in ranks]
        copy_all(
            [self._bytes(outs[rank]) for rank in senders],
            torch.split(received, [outs[rank].elems for rank in senders]),
        )
