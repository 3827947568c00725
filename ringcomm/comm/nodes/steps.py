"""The calls of an optimizer's step over several nodes, and what stage 3 of ZeRO sends on rails.

A bucket has W = N L chunks, for N nodes of L ranks. The rank at place l of node n owns chunk
l N + n: so the chunks of one rail lie side by side, and make up chunk l of L, which in each node is
that of the rank at place l. Each node reduces its gradients into partial sums in FP32, one for each
chunk, which travel on the rail of the chunk's owner and are added there in the order of the nodes.
Updated chunks return on the rails, and each node shares what its ranks received. With gradients of
G bytes (of the wire's type) and parameters of P bytes (G + P) (N-1)/N leave a node.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ringcomm import _native
from ringcomm.comm.nodes.core import (
    ELEM_BYTES,
    FLOAT32,
    SUM,
    NodesCore,
    Reducing,
    Span,
)
from ringcomm.comm.nodes.rails import Message


class _Shard(NamedTuple):
    """The fields of an ``AdamWShard`` that these calls read; the names are those of adamw.h."""

    params: int
    bucket_elems: int
    elems: int
    param_dtype: int

    @classmethod
    def of(cls, shard: _native.AdamWShard) -> _Shard:
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


class StepsCore(NodesCore):
    """One rank's core over several nodes, with the calls of optimizers; nodes have equal sizes."""

    # The parameters are those of the native methods, which callers pass by position.
    def reduce_scatter_norm(  # noqa: PLR0913
        self,
        grads: int,
        bucket_elems: int,
        dtype: int,
        op: int,
        out: int,
        accumulate: bool,
        kind: int,
        words: int,
        algorithm: int,
        step_bytes: int,
        tag: int,
    ) -> int:
        spans = self._chunks(grads, bucket_elems, ELEM_BYTES[dtype])
        elems = spans[self.places.rank].elems
        r = Reducing(dtype, op, 1.0)

        def body() -> None:
            if accumulate:
                fresh = self._scratch.take(elems * ELEM_BYTES[FLOAT32])
                self._reduce_spans(spans, fresh.data_ptr(), r, FLOAT32)
                both = [out, fresh.data_ptr()]
                _native.combine_partials(both, FLOAT32, out, FLOAT32, elems, SUM)
                self._scratch.give([fresh])
            else:
                self._reduce_spans(spans, out, r, FLOAT32)
            if words:
                _native.grad_norm(out, FLOAT32, elems, kind, words)

        head = (bucket_elems * ELEM_BYTES[dtype], dtype, op, tag or -1)
        sizes = (bucket_elems, FLOAT32)
        return self._run("reduce_scatter_norm", head, algorithm, body, optimizer=sizes)

    def adamw_all_gather(
        self,
        shard: _native.AdamWShard,
        grad: int,
        grad_dtype: int,
        algorithm: int,
        step_bytes: int,
    ) -> int:
        read = _Shard.of(shard)
        head = (read.bucket_bytes, grad_dtype, -1, -1)
        return self._run(
            "adamw_all_gather",
            head,
            algorithm,
            lambda: self._update_and_gather(shard, read, grad, grad_dtype),
            optimizer=(read.bucket_elems, read.param_dtype),
        )

    def reduce_scatter_adamw_all_gather(
        self,
        shard: _native.AdamWShard,
        grads: int,
        grad_dtype: int,
        op: int,
        algorithm: int,
        step_bytes: int,
        tag: int,
    ) -> int:
        read = _Shard.of(shard)
        spans = self._chunks(grads, read.bucket_elems, ELEM_BYTES[grad_dtype])

        def body() -> None:
            reduced = self._scratch.take(read.elems * ELEM_BYTES[FLOAT32])
            r = Reducing(grad_dtype, op, 1.0)
            self._reduce_spans(spans, reduced.data_ptr(), r, FLOAT32)
            self._update_and_gather(shard, read, reduced.data_ptr(), FLOAT32)
            self._scratch.give([reduced])

        head = (read.bucket_bytes, grad_dtype, op, tag or -1)
        sizes = (read.bucket_elems, read.param_dtype)
        return self._run("reduce_scatter_adamw_all_gather", head, algorithm, body, optimizer=sizes)

    def all_gather_on_rail(self, ptrs: Sequence[int], sizes_bytes: Sequence[int], algo: int) -> int:
        """Gathers among the ranks of this rank's rail alone, in place.

        Args:
            ptrs: by node, where the bytes of its rank of the rail belong; this node's are there.
            sizes_bytes: by node, equal on all ranks of the rail.
            algo: "auto" or "direct".
        """
        spans = [Span(*span) for span in zip(ptrs, sizes_bytes, strict=True)]
        head = (sum(sizes_bytes), -1, -1, -1)
        return self._run("all_gather_on_rail", head, algo, lambda: self._gather_on_rail(spans))

    def _chunks(self, ptr: int, elems: int, elem_bytes: int) -> list[Span]:
        """Returns by rank the chunk of a bucket that it owns."""
        each, whole = _native.chunk_elems(elems, self._world), Span(ptr, elems)
        indices = map(self.places.shard_index_of, range(self._world))
        return [whole.part(at * each, (at + 1) * each, elem_bytes) for at in indices]

    def _update_and_gather(
        self, shard: _native.AdamWShard, read: _Shard, grad: int, grad_dtype: int
    ) -> None:
        # A peer that makes another call must not find out after this rank has changed parameters.
        self._check_headers()
        _native.adamw_shard(shard, grad, grad_dtype)
        spans = [
            Span(ptr, elems * ELEM_BYTES[read.param_dtype])
            for ptr, elems in self._chunks(
                read.params, read.bucket_elems, ELEM_BYTES[read.param_dtype]
            )
        ]
        self._gather_spans(spans[self.places.rank].ptr, spans)

    def _gather_on_rail(self, spans: list[Span]) -> None:
        places = self.places
        segments = self._segments(max(span.elems for span in spans), 1, 1)

        def begin(s: int, _: None) -> list[Message]:
            row = [span.part(*segments[s], 1) for span in spans]
            messages = [
                self._receive(places.place, node, *row[node])
                for node in places.others()
                if row[node].elems
            ]
            if row[places.node].elems:
                messages += [
                    self._send(places.place, node, *row[places.node]) for node in places.others()
                ]
            return messages

        def end(s: int, messages: list[Message]) -> None:
            self._check_headers()
            self._settle(messages)

        self._in_stages(len(segments), begin, end)
