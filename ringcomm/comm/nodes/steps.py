# SPDX-License-Identifier: Apache-2.0
"""The calls of an optimizer's step over several nodes, and the gathers of ZeRO's stage 3.

A bucket has W = N L chunks, for N nodes of L ranks. The rank with local rank l on node n owns chunk
l N + n. So the chunks of one rail are adjacent, and form chunk l of the L chunks that a node sees.
Each node reduces its gradients into FP32 partial sums, one for each chunk; they are sent on the
rail of the chunk's owner, which adds them in the order of the nodes. Updated chunks return on the
rails, and each node shares the chunks that its ranks received. With gradients of G bytes and
parameters of P bytes, each in the type that is sent, (G + P) (N-1)/N leave a node. If parameters
are sent quantized, a rank quantizes the FP32 masters of its chunk, and like all other ranks it uses
the dequantized values.

If each node has a copy of the state (``Steps.per_node``) a bucket has L chunks, and the rank with
local rank l on every node keeps state for chunk l. The chunk has a subchunk for each rank of its
rail, which adds the subchunk's partial sums. The sums, not the parameters, return on the rails, in
FP32 or in the quantized format: with S bytes of sums (G + S) (N-1)/N leave a node.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate as accumulate_sizes
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call, CallEngine, Work, itself
from ringcomm.comm.host.rendezvous import NodeLayout
from ringcomm.comm.host.step_core import (
    AdamWAllGather,
    ReduceScatterAdamWAllGather,
    ReduceScatterNorm,
    StepCore,
)
from ringcomm.comm.nodes import compressed_sums
from ringcomm.comm.nodes.calls import AUTO, BYTE, ELEM_BYTES, Span
from ringcomm.comm.nodes.compressed_sums import (
    FLOAT32,
    SUM,
    ErrorFeedback,
    FeedbackForm,
    Form,
    QuantizedForm,
    Reducing,
)
from ringcomm.comm.nodes.core import NodesCore
from ringcomm.errors import UnsupportedError, where

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = torch.Tensor


class _NodeShard(NamedTuple):
    """The fields of an ``AdamWShard`` that these calls read; the names come from adamw.h."""

    params: int
    bucket_elems: int
    elems: int
    param_dtype: int

    @classmethod
    def of(cls, shard: _native.AdamWShard) -> _NodeShard:
        described = _native.adamw_shard_bytes(shard)

        def read(name: str, form: str) -> int:
            at = _native.OPTIMIZER_STRUCTURES[f"shard.{name}"]
            number: int = struct.unpack_from(form, described, at)[0]
            return number

        return cls(
            read("params", "=Q"),
            read("bucket_elems", "=Q"),
            read("elems", "=Q"),
            read("param_dtype", "=i"),
        )

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_elems * ELEM_BYTES[self.param_dtype]


class _StepTarget(NamedTuple):
    """The destination of a bucket's sum, and its error feedback.

    Attributes:
        out: address of the FP32 sums of the elements for which this rank keeps state.
        accumulate: add to ``out`` instead of overwriting.
        error_feedback: None: the quantization error is discarded.
    """

    out: int
    accumulate: bool
    error_feedback: ErrorFeedback | None


class QuantizedGather(NamedTuple):
    """The arguments of a quantized gathering.

    Attributes:
        wide: address of this rank's FP32 numbers.
        ptrs: the outputs, by rank; by node if only the ranks of a rail gather.
        elems: the elements of each output.
        dtype: code of the outputs' type.
        on_rail: only the ranks of this rank's rail gather.
        tag: distinguishes gathers of equal size; 0 if none is needed.
    """

    wide: int
    ptrs: list[int]
    elems: list[int]
    dtype: int
    on_rail: bool
    tag: int


class StepsCore(NodesCore):
    """One rank's core over several nodes, with the calls of sharded training."""

    def steps(
        self, per_node: bool, compression: str | None, error_feedback: ErrorFeedback | None
    ) -> Steps:
        """Returns the calls of a step; ``per_node`` needs nodes of equal sizes."""
        return Steps(self, per_node, compression, error_feedback)

    def error_feedback_of(self, bucket_elems: int, per_node: bool) -> ErrorFeedback:
        """Returns a bucket's error feedback, with zero errors; needs nodes of equal sizes."""
        bucket, layout = Span(0, bucket_elems), self.layout
        if per_node:
            chunk = self._node_chunks(*bucket, 1)[layout.local_rank]
            sums = self._subchunks(chunk, bucket_elems, 1)[layout.node]
        else:
            chunks = self._chunks(*bucket, 1)
            own = [chunks[rank] for rank in layout.rail(layout.local_rank)]
            chunk, sums = Span(own[0].ptr, sum(each.elems for each in own)), Span(0, 0)
        partial, of_sums = (
            torch.zeros(each.elems, dtype=torch.float32, device="cpu") for each in (chunk, sums)
        )
        return ErrorFeedback(chunk.ptr, partial, sums.ptr, of_sums)

    def reduce_norm(
        self, call: ReduceScatterNorm, per_node: bool, error_feedback: ErrorFeedback | None
    ) -> int:
        """Reduces a bucket to this rank's shard; computes the norm of the part it summed."""
        bucket, r = Span(call.grads, call.bucket_elems), Reducing(call.dtype, call.op, 1.0)
        target = _StepTarget(call.out, call.accumulate, error_feedback)

        def body() -> None:
            own = self._reduce_bucket(bucket, target, r, per_node)
            if call.words:
                _native.grad_norm(own.ptr, FLOAT32, own.elems, call.kind, call.words)

        size_bytes = call.bucket_elems * ELEM_BYTES[call.dtype]
        head = (size_bytes, call.dtype, call.op, call.tag or -1)
        sizes = (call.bucket_elems, FLOAT32)
        return self._run("reduce_scatter_norm", head, call.algorithm, body, optimizer=sizes)

    def update(self, call: AdamWAllGather, per_node: bool) -> int:
        """Updates this rank's shard, and gathers the bucket's parameters."""
        read = _NodeShard.of(call.shard)

        def body() -> None:
            self._update_and_gather(call.shard, call.grad, call.grad_dtype, per_node)

        head = (read.bucket_bytes, call.grad_dtype, -1, -1)
        sizes = (read.bucket_elems, read.param_dtype)
        return self._run("adamw_all_gather", head, call.algorithm, body, optimizer=sizes)

    def reduce_update(
        self,
        call: ReduceScatterAdamWAllGather,
        per_node: bool,
        error_feedback: ErrorFeedback | None,
    ) -> int:
        """Does :meth:`reduce_norm` without the norm, then :meth:`update`."""
        read = _NodeShard.of(call.shard)
        bucket, r = Span(call.grads, read.bucket_elems), Reducing(call.grad_dtype, call.op, 1.0)

        def body() -> None:
            reduced = self._scratch.take(read.elems * ELEM_BYTES[FLOAT32])
            target = _StepTarget(reduced.data_ptr(), False, error_feedback)
            self._reduce_bucket(bucket, target, r, per_node)
            self._update_and_gather(call.shard, reduced.data_ptr(), FLOAT32, per_node)
            self._scratch.give([reduced])

        head = (read.bucket_bytes, call.grad_dtype, call.op, call.tag or -1)
        sizes, name = (read.bucket_elems, read.param_dtype), "reduce_scatter_adamw_all_gather"
        return self._run(name, head, call.algorithm, body, optimizer=sizes)

    # StepCalls.all_gather_bucket() passes these parameters by position.
    def all_gather_bucket(
        self, own_ptr: int, bucket_ptr: int, elems: int, elem_bytes: int, tag: int
    ) -> int:
        """Gathers a bucket in which each rank owns a chunk; this rank's chunk is at ``own_ptr``."""
        chunks = self._chunks(bucket_ptr, elems, elem_bytes)
        spans = [Span(ptr, chunk_elems * elem_bytes) for ptr, chunk_elems in chunks]
        head = (elems * elem_bytes, -1, -1, tag)
        return self._run(
            "all_gather_bucket", head, AUTO, lambda: self._gather_spans(own_ptr, spans)
        )

    def all_gather_on_rail(
        self, ptrs: Sequence[int], sizes_bytes: Sequence[int], algorithm: int
    ) -> int:
        """Gathers among the ranks of this rank's rail only, in place.

        Args:
            ptrs: by node, the address for the data of the node's rank; this rank's data are there.
            sizes_bytes: by node, equal on all ranks of the rail.
            algorithm: "auto" or "one_shot".
        """
        spans = [Span(*span) for span in zip(ptrs, sizes_bytes, strict=True)]
        head = (sum(sizes_bytes), -1, -1, -1)
        return self._run("all_gather_on_rail", head, algorithm, lambda: self._gather_on_rail(spans))

    def gather_quantized(self, call: QuantizedGather, compression: str) -> int:
        """Gathers quantized FP32 numbers; all ranks get the dequantized values."""
        form = QuantizedForm(Reducing(call.dtype, SUM, 1.0), _native.QUANT_FORMATS[compression])
        spans = [Span(*span) for span in zip(call.ptrs, call.elems, strict=True)]
        gather = self._gather_quantized_on_rail if call.on_rail else self._gather_quantized

        def body() -> None:
            # If a peer makes another call, the call must fail before this rank changes its output.
            self._check_headers()
            gather(call.wide, spans, form)

        name = "all_gather_on_rail" if call.on_rail else "all_gather_bucket"
        size_bytes = sum(call.elems) * ELEM_BYTES[call.dtype]
        with self.using_compression(compression):
            return self._run(name, (size_bytes, call.dtype, -1, call.tag or -1), AUTO, body)

    def _chunks(self, ptr: int, elems: int, elem_bytes: int) -> list[Span]:
        """Returns, by rank, the chunk of a bucket that the rank owns."""
        each, whole = _native.chunk_elems(elems, self._world), Span(ptr, elems)
        indices = map(self.layout.shard_index_of, range(self._world))
        return [whole.slice(at * each, (at + 1) * each, elem_bytes) for at in indices]

    def _node_chunks(self, ptr: int, elems: int, elem_bytes: int) -> list[Span]:
        """Returns, by local rank, the chunk whose state the ranks of this local rank keep."""
        local_ranks = range(len(self.layout.node_ranks))
        each, whole = _native.chunk_elems(elems, len(local_ranks)), Span(ptr, elems)
        return [whole.slice(at * each, (at + 1) * each, elem_bytes) for at in local_ranks]

    def _subchunks(self, chunk: Span, bucket_elems: int, elem_bytes: int) -> list[Span]:
        """Returns, by node, the subchunk that the node's rank on this rail sums."""
        nodes = range(len(self.layout.nodes))
        each = _native.chunk_elems(bucket_elems, len(self.layout.node_ranks))
        size = _native.chunk_elems(each, len(nodes))
        return [chunk.slice(node * size, (node + 1) * size, elem_bytes) for node in nodes]

    def _reduce_bucket(
        self, bucket: Span, target: _StepTarget, r: Reducing, per_node: bool
    ) -> Span:
        """Reduces a bucket in FP32 to the elements for which this rank keeps state.

        Returns:
            The elements that this rank has summed: all of them, or with ``per_node`` a part, since
            other ranks of the rail sum the rest.
        """
        size, layout = ELEM_BYTES[r.dtype], self.layout
        form = self._form(r, bucket.elems)
        if target.error_feedback is not None and isinstance(form, QuantizedForm):
            target.error_feedback.follow_scale()
            form = FeedbackForm(r, form.code, bucket.ptr, size, target.error_feedback)
        if not per_node:
            spans = self._chunks(*bucket, size)
            own = Span(target.out, spans[layout.rank].elems)
            self._reduce_own(spans, own, form, target.accumulate)
            return own
        chunks = self._node_chunks(*bucket, size)
        subchunks = [self._subchunks(chunk, bucket.elems, size) for chunk in chunks]
        ranks = range(self._world)
        spans = [subchunks[layout.local_rank_of(rank)][layout.node_of(rank)] for rank in ranks]
        out = Span(target.out, chunks[layout.local_rank].elems)
        outs = self._subchunks(out, bucket.elems, ELEM_BYTES[FLOAT32])
        if isinstance(form, QuantizedForm):
            self._reduce_own_quantized(spans, outs, form, target.accumulate)
        else:
            self._reduce_own(spans, outs[layout.node], form, target.accumulate)
            self._gather_on_rail(_in_bytes(outs, FLOAT32))
        return outs[layout.node]

    def _reduce_own_quantized(
        self, spans: list[Span], outs: list[Span], form: QuantizedForm, accumulate: bool
    ) -> None:
        """Reduces spans, one for each rank, to ``outs``, one for each node of the rail, in FP32.

        The sums are quantized once more, and each node gets the dequantized values. If ``outs`` are
        accumulated, their earlier contents are added in FP32 and not quantized.
        """
        mine = outs[self.layout.node]
        widest = max(out.elems for out in outs)
        fresh = self._scratch.take(widest * ELEM_BYTES[FLOAT32])
        sizes_bytes = [form.bytes_of(out.elems) for out in outs]
        room = self._scratch.take(sum(sizes_bytes))
        begins = accumulate_sizes(sizes_bytes, initial=room.data_ptr())
        quantized = [Span(*each) for each in zip(begins, sizes_bytes, strict=False)]
        self._reduce_spans(spans, fresh.data_ptr(), form, FLOAT32)
        form.write_sums(fresh.data_ptr(), quantized[self.layout.node].ptr, mine.elems)
        self._gather_on_rail(quantized)
        for out, run in zip(outs, quantized, strict=True):
            to = fresh.data_ptr() if accumulate else out.ptr
            form.finish([run.ptr], to, FLOAT32, out.elems, 0)
            if accumulate:
                _native.combine_partials([out.ptr, to], FLOAT32, out.ptr, FLOAT32, out.elems, SUM)
        self._scratch.give([fresh, room])

    def _reduce_own(self, spans: list[Span], own: Span, form: Form, accumulate: bool) -> None:
        """Reduces spans, one for each rank, in FP32; writes this rank's sum to ``own``."""
        if not accumulate:
            self._reduce_spans(spans, own.ptr, form, FLOAT32)
            return
        fresh = self._scratch.take(own.elems * ELEM_BYTES[FLOAT32])
        self._reduce_spans(spans, fresh.data_ptr(), form, FLOAT32)
        both = [own.ptr, fresh.data_ptr()]
        _native.combine_partials(both, FLOAT32, own.ptr, FLOAT32, own.elems, SUM)
        self._scratch.give([fresh])

    def _update_and_gather(
        self, shard: _native.AdamWShard, grad: int, grad_dtype: int, per_node: bool
    ) -> None:
        # If a peer makes another call, the call must fail before this rank changes parameters.
        self._check_headers()
        _native.adamw_shard(shard, grad, grad_dtype)
        read, layout = _NodeShard.of(shard), self.layout
        cut = self._node_chunks if per_node else self._chunks
        spans = _in_bytes(
            cut(read.params, read.bucket_elems, ELEM_BYTES[read.param_dtype]), read.param_dtype
        )
        if not per_node:
            self._gather_spans(spans[layout.rank].ptr, spans)
            return
        ptrs, sizes_bytes = zip(*spans, strict=True)
        own = spans[layout.local_rank].ptr
        self._inside(self._inner.all_gather_list(own, list(ptrs), list(sizes_bytes), BYTE))


def _in_bytes(spans: Sequence[Span], dtype: int) -> list[Span]:
    return [Span(ptr, elems * ELEM_BYTES[dtype]) for ptr, elems in spans]


@dataclass(frozen=True)
class Steps:
    """The calls of a step on one rank's core, for an optimizer.

    Attributes:
        core: the core.
        per_node: True if each node has a copy of the state.
        compression: the compression of gradient sums; None: the communicator's compression.
        error_feedback: the bucket's error feedback; None: the quantization error is discarded.
    """

    core: StepsCore
    per_node: bool
    compression: str | None
    error_feedback: ErrorFeedback | None

    def reduce_scatter_norm(self, *arguments: Unpack[ReduceScatterNorm]) -> int:
        call = ReduceScatterNorm(*arguments)
        with self.core.using_compression(self.compression):
            return self.core.reduce_norm(call, self.per_node, self.error_feedback)

    def adamw_all_gather(self, *arguments: Unpack[AdamWAllGather]) -> int:
        return self.core.update(AdamWAllGather(*arguments), self.per_node)

    def reduce_scatter_adamw_all_gather(
        self, *arguments: Unpack[ReduceScatterAdamWAllGather]
    ) -> int:
        call = ReduceScatterAdamWAllGather(*arguments)
        with self.core.using_compression(self.compression):
            return self.core.reduce_update(call, self.per_node, self.error_feedback)


class StepCoreOf(Protocol):
    """Maps a call's core to the object that makes an optimizer's collectives.

    ``error_feedback`` is the error feedback of the call's bucket.
    """

    def __call__(self, core: Core, error_feedback: ErrorFeedback | None = None, /) -> StepCore: ...


def of_one_node(core: Any, error_feedback: ErrorFeedback | None = None, /) -> Any:
    """Returns ``core`` itself: a single node's core makes the step calls, without quantization."""
    return core


# Tells the type checker that a core over nodes is a StepsCore; at run time it does nothing.
_steps_core: Callable[[Core], StepsCore] = itself


class StepCalls:
    """The calls of sharded training on a communicator, for optimizers and ZeRO.

    Args:
        engine: the engine of the communicator.
        layout: the nodes of its ranks.
    """

    def __init__(self, engine: CallEngine, layout: NodeLayout) -> None:
        self._engine = engine
        self._layout = layout

    @property
    def shard_index(self) -> int:
        """The number of this rank's chunk of state that is sharded over all ranks."""
        return self.shard_index_of(self._engine.rank)

    def shard_index_of(self, rank: int) -> int:
        """Returns which chunk ``rank`` owns if state is sharded over all ranks.

        Raises:
            UnsupportedError: the ranks are on devices of several nodes.
        """
        if len(self._layout.nodes) > 1 and self._engine.launches:
            raise UnsupportedError(
                f"{where('sharding state', *self._engine.rank_of)}: expected a communicator "
                "on the host, or of one node (Communicator.node), got one on devices over several "
                "nodes. Optimizers and zero.shard do not work on devices over nodes yet"
            )
        return self._layout.shard_index_of(rank)

    def calls_of(self, state: str, compression: str | None = None) -> StepCoreOf:
        """Returns the function that maps a call's core to the object for an optimizer's calls.

        Args:
            state: "world" if state is sharded over all ranks, "node" if each node has a copy.
            compression: compression of gradient sums between nodes; None: the communicator's.
        """
        if len(self._layout.nodes) == 1:
            return of_one_node
        per_node = state == "node"

        def of_several_nodes(core: Core, error_feedback: ErrorFeedback | None = None, /) -> Steps:
            return _steps_core(core).steps(per_node, compression, error_feedback)

        return of_several_nodes

    def error_feedback_of(self, elems: int, state: str) -> ErrorFeedback | None:
        """Makes a bucket's error feedback; see NOTE [Error feedback].

        Args:
            elems: the elements of the bucket.
            state: as in :meth:`calls_of`.

        Returns:
            None if nothing is quantized: on one node, or if the bucket is small.
        """
        # Quantization depends on the bytes of the gradients, at most 4 per element.
        core = self._engine.owner
        if elems * 4 <= compressed_sums.QUANTIZED_ABOVE_BYTES or not isinstance(core, StepsCore):
            return None
        return core.error_feedback_of(elems, state == "node")

    def all_gather_bucket(self, own: Tensor, bucket: Tensor, tag: int) -> None:
        """Gathers a bucket over several nodes; each rank owns one chunk.

        Args:
            own: [chunk elements], this rank's chunk.
            bucket: [bucket elements], written.
            tag: distinguishes the bucket from others of its size; equal on all ranks.
        """
        arguments = (own.data_ptr(), bucket.data_ptr(), bucket.numel(), bucket.element_size(), tag)

        def run(core: Core) -> int:
            return _steps_core(core).all_gather_bucket(*arguments)

        self._engine.start_call(Call("all_gather_bucket", run, [bucket]))

    def all_gather_on_rail(self, tensors: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """Gathers among the ranks of this rank's rail only, in place.

        Args:
            tensors: by node, contiguous; this node's tensor is sent, the others are written.
            async_op: return a Work at once instead of waiting.
        """
        if len(self._layout.nodes) == 1:
            return None
        ptrs = [tensor.data_ptr() for tensor in tensors]
        sizes_bytes = [tensor.nbytes for tensor in tensors]

        def run(core: Core) -> int:
            return _steps_core(core).all_gather_on_rail(ptrs, sizes_bytes, AUTO)

        return self._engine.start_call(Call("all_gather_on_rail", run, list(tensors)), async_op)

    def all_gather_quantized(
        self,
        wide: Tensor,
        tensors: Sequence[Tensor],
        compression: str,
        *,
        tag: int = 0,
        on_rail: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        """Gathers numbers, quantized between nodes; all ranks get the dequantized values.

        Args:
            wide: float32, this rank's numbers.
            tensors: by rank, contiguous, of one floating-point dtype; all are written.
            compression: "int8", "fp8" or "int4".
            tag: as in :meth:`all_gather_bucket`.
            on_rail: only the ranks of this rank's rail gather; ``tensors`` are by node.
            async_op: return a Work at once instead of waiting.
        """
        ptrs = [tensor.data_ptr() for tensor in tensors]
        elems = [tensor.numel() for tensor in tensors]
        dtype = DTYPE_CODES[tensors[0].dtype]
        call = QuantizedGather(wide.data_ptr(), ptrs, elems, dtype, on_rail, tag)

        def run(core: Core) -> int:
            return _steps_core(core).gather_quantized(call, compression)

        return self._engine.start_call(
            Call("all_gather_quantized", run, [wide, *tensors]), async_op
        )
