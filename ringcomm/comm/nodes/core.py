"""The core of a communicator over several nodes: its node's core, and the rails.

It has the methods of ``_native.Comm``, and so takes the calls of :mod:`ringcomm.comm.collectives`
as they are. N nodes, L ranks in each; W = N L; a buffer of B bytes (of the wire's element type).

    reduce-scatter   each node reduces what goes to a node m into partial sums, one for each rank
                     of m, and its ranks send them on their rails; rank r adds the N partial sums
                     of its chunk in node order. B (N-1)/N leave a node.
    all-gather       each rank sends its chunk to its rail peers, and each node shares what its
                     ranks received. B (N-1)/N leave a node.
    all-reduce       both, on pieces of which a rank owns 1/W. Below ``ONE_HOP_BYTES`` each node
                     reduces the whole, and each rank exchanges that with its rail peers: one hop
                     on the wire, where there are two, but L times the bytes.

Partial sums stay in the accumulator's type (FP32 for 16-bit types), in which they are added, so
that one rounding is all there is: the result is that of one node which sums in blocks of L ranks
(``CommOptions.sum_blocks``). With ``wire="param"`` partial sums are rounded before they travel.

Large calls are cut into segments, of which two are under way: while one is on the wire the next is
reduced in the node, and the one before is added and shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.nodes.calls import BYTE, DIRECT, CallsOverNodes
from ringcomm.comm.nodes.rails import Message, memory_at

Tensor = torch.Tensor

SUM, AVG, PREMUL = (_native.OPS[name] for name in ("SUM", "AVG", "PREMUL_SUM"))
BFLOAT16, FLOAT16, FLOAT32 = (_native.DTYPES[name] for name in ("bfloat16", "float16", "float32"))
ELEM_BYTES: dict[int, int] = {
    code: getattr(torch, name).itemsize
    for name, code in _native.DTYPES.items()
    if hasattr(torch, name)
}

# A choice, by arithmetic: at 1 Gbit/s 8 KiB take 65 us, which is less than another hop on TCP.
ONE_HOP_BYTES = 8 << 10
# Pieces begin at multiples of this, so that vectors of every type are whole; a choice.
LINE_ELEMS = 64
# What a rank has on the wire per segment and peer; a choice. Messages of TCP cost some 50 us each,
# and a segment of 1 MiB 8 ms at 1 Gbit/s and 80 us at 100 Gbit/s.
SEGMENT_BYTES = 1 << 20


class Span(NamedTuple):
    """Elements in this process's memory."""

    ptr: int
    elems: int

    def part(self, begin: int, end: int, elem_bytes: int) -> Span:
        """Returns elements [begin, end) of it, as far as it has them."""
        begin, end = min(begin, self.elems), min(end, self.elems)
        return Span(self.ptr + begin * elem_bytes, end - begin)


class Reducing(NamedTuple):
    """The arguments of a reduction beside its buffers; codes of the native module."""

    dtype: int
    op: int
    factor: float

    @property
    def partial(self) -> int:
        """The accumulator's type."""
        return FLOAT32 if self.dtype in (BFLOAT16, FLOAT16) else self.dtype

    @property
    def joining(self) -> int:
        """The op that joins partial sums, to which a factor has been applied."""
        return SUM if self.op in (AVG, PREMUL) else self.op


# By node and place, what each rank there owns. Of all-reduce every node has as many places as there
# are rails, and a rank of a smaller node owns several.
Table = list[list[Span]]


@dataclass
class _Reduction:
    """A reduction of a table under way.

    Attributes:
        partials: by place that this rank owns, and node, the address of its partial sum.
        elems: by place.
        arriving: by place, the messages that bring partial sums.
        sent: messages to wait for before ``taken`` is free.
        taken: scratch memory.
    """

    partials: dict[int, list[int]] = field(default_factory=dict)
    elems: dict[int, int] = field(default_factory=dict)
    arriving: dict[int, list[Message]] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)


@dataclass
class _Gathering:
    """An all-gather of a table under way: messages by (node, place), and those that were sent."""

    arriving: dict[tuple[int, int], Message] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)


class NodesCore(CallsOverNodes):
    """One rank's core over several nodes."""

    # ---- collectives ----------------------------------------------------------------------------

    def all_reduce(
        self, in_ptr: int, out_ptr: int, elems: int, dtype: int, op: int, factor: float, algo: int
    ) -> int:
        r = Reducing(dtype, op, factor)
        size = ELEM_BYTES[dtype]

        def body() -> None:
            if elems * size <= ONE_HOP_BYTES:
                self._reduce_in_one_hop(in_ptr, out_ptr, elems, r)
                return
            self._reduce_and_gather(in_ptr, out_ptr, elems, r)

        return self._run("all_reduce", (elems * size, dtype, op, -1), algo, body)

    def reduce_scatter(
        self, in_ptr: int, out_ptr: int, elems: int, dtype: int, op: int, factor: float, algo: int
    ) -> int:
        size = ELEM_BYTES[dtype] * elems
        spans = [Span(in_ptr + rank * size, elems) for rank in range(self._world)]
        r = Reducing(dtype, op, factor)
        head = (size * self._world, dtype, op, -1)
        return self._run(
            "reduce_scatter", head, algo, lambda: self._reduce_spans(spans, out_ptr, r, dtype)
        )

    def reduce_scatter_list(
        self,
        in_ptrs: list[int],
        elems: list[int],
        out_ptr: int,
        dtype: int,
        op: int,
        factor: float,
    ) -> int:
        spans = [Span(*span) for span in zip(in_ptrs, elems, strict=True)]
        r = Reducing(dtype, op, factor)
        head = (sum(elems) * ELEM_BYTES[dtype], dtype, op, -1)
        return self._run(
            "reduce_scatter", head, DIRECT, lambda: self._reduce_spans(spans, out_ptr, r, dtype)
        )

    def reduce(
        self, in_ptr: int, out_ptr: int, elems: int, dtype: int, op: int, factor: float, root: int
    ) -> int:
        r = Reducing(dtype, op, factor)
        head = (elems * ELEM_BYTES[dtype], dtype, op, root)
        return self._run(
            "reduce", head, DIRECT, lambda: self._reduce_to(root, in_ptr, out_ptr, elems, r)
        )

    def all_gather(self, in_ptr: int, out_ptr: int, in_bytes: int, dtype: int, algo: int) -> int:
        spans = [Span(out_ptr + rank * in_bytes, in_bytes) for rank in range(self._world)]
        head = (in_bytes * self._world, dtype, -1, -1)
        return self._run("all_gather", head, algo, lambda: self._gather_spans(in_ptr, spans))

    def all_gather_list(
        self, in_ptr: int, out_ptrs: list[int], sizes_bytes: list[int], dtype: int
    ) -> int:
        spans = [Span(*span) for span in zip(out_ptrs, sizes_bytes, strict=True)]
        head = (sum(sizes_bytes), dtype, -1, -1)
        return self._run("all_gather", head, DIRECT, lambda: self._gather_spans(in_ptr, spans))

    def broadcast(self, ptr: int, size_bytes: int, dtype: int, root: int) -> int:
        head = (size_bytes, dtype, -1, root)
        return self._run(
            "broadcast", head, DIRECT, lambda: self._broadcast(Span(ptr, size_bytes), root)
        )

    def gather(
        self, in_ptr: int, size_bytes: int, out_ptrs: list[int], dtype: int, root: int
    ) -> int:
        head = (size_bytes, dtype, -1, root)
        return self._run(
            "gather", head, DIRECT, lambda: self._gather_to(root, in_ptr, size_bytes, out_ptrs)
        )

    def scatter(
        self, in_ptrs: list[int], out_ptr: int, size_bytes: int, dtype: int, root: int
    ) -> int:
        head = (size_bytes, dtype, -1, root)
        return self._run(
            "scatter", head, DIRECT, lambda: self._scatter_from(root, in_ptrs, out_ptr, size_bytes)
        )

    def all_to_all(
        self,
        in_ptrs: list[int],
        in_sizes_bytes: list[int],
        out_ptrs: list[int],
        out_sizes_bytes: list[int],
        dtype: int,
    ) -> int:
        ins = [Span(*span) for span in zip(in_ptrs, in_sizes_bytes, strict=True)]
        outs = [Span(*span) for span in zip(out_ptrs, out_sizes_bytes, strict=True)]
        return self._run(
            "all_to_all", (0, dtype, -1, -1), DIRECT, lambda: self._exchange(ins, outs)
        )

    def barrier_plain(self) -> int:
        return self.barrier()

    def barrier(self) -> int:
        def body() -> None:
            # A header comes from a rank whose node has met: whoever has those of its rail peers
            # knows that all ranks are there.
            self._inside(self._inner.barrier())
            self._send_headers()
            self._check_headers()

        return self._run("barrier", (0, -1, -1, -1), DIRECT, body, headers=False)

    # ---- tables, segments, stages ---------------------------------------------------------------

    def _table(self, spans: Sequence[Span]) -> Table:
        return [[spans[rank] for rank in ranks] for ranks in self.places.nodes]

    def _pieces(self, ptr: int, begin: int, end: int, elem_bytes: int) -> Table:
        """Cuts elements [begin, end) of a buffer into a piece for each rail and node."""
        rails, nodes = self.places.num_rails, len(self.places.nodes)
        each = -(-(end - begin) // (rails * nodes))
        each = -(-each // LINE_ELEMS) * LINE_ELEMS
        whole = Span(ptr + begin * elem_bytes, end - begin)
        return [
            [
                whole.part(number * each, (number + 1) * each, elem_bytes)
                for number in range(node, rails * nodes, nodes)
            ]
            for node in range(nodes)
        ]

    def _segments(self, elems: int, pieces: int, elem_bytes: int) -> list[tuple[int, int]]:
        """Cuts elements that lie in so many pieces into what is under way at a time."""
        each = max(SEGMENT_BYTES // elem_bytes, 1) * pieces
        return [(begin, min(begin + each, elems)) for begin in range(0, elems, each)]

    def _in_stages(self, count: int, *stages: Callable[[int, Any], Any]) -> None:
        """Does the stages of all segments, each stage of one while the next is under way."""
        under_way: list[dict[int, Any]] = [{} for _ in stages]
        for turn in range(count + len(stages) - 1):
            for number, stage in enumerate(stages):
                segment = turn - number
                if not 0 <= segment < count:
                    continue
                before = under_way[number - 1].pop(segment) if number else None
                under_way[number][segment] = stage(segment, before)

    def _rows(self, table: Table, node: int) -> Iterator[tuple[int, list[Span]]]:
        """Yields the places of a node by as many as this rank has mates.

        Each row has a span for each mate, of no elements where there is none for it. With it comes
        the place of this rank's own, which may be past the node's last.
        """
        spans, mates = table[node], len(self.places.mates)
        for first in range(0, len(spans), mates):
            row = spans[first : first + mates]
            row += [Span(row[0].ptr, 0)] * (mates - len(row))
            if any(span.elems for span in row):
                yield first + self.places.place, row

    def _own(self, table: Table) -> range:
        """Returns the places of this rank's node that this rank owns."""
        return range(self.places.place, len(table[self.places.node]), len(self.places.mates))

    # ---- reduce-scatter -------------------------------------------------------------------------

    def _reduce_spans(self, spans: list[Span], out_ptr: int, r: Reducing, out_dtype: int) -> None:
        size, out_size = ELEM_BYTES[r.dtype], ELEM_BYTES[out_dtype]
        segments = self._segments(max(span.elems for span in spans), 1, ELEM_BYTES[r.partial])
        mine = Span(out_ptr, spans[self.places.rank].elems)
        own = self.places.place

        def begin(s: int, _: None) -> _Reduction:
            return self._begin_reduction(
                self._table([span.part(*segments[s], size) for span in spans]), r
            )

        def end(s: int, begun: _Reduction) -> None:
            self._end_reduction(begun, {own: mine.part(*segments[s], out_size)}, r, out_dtype)

        self._in_stages(len(segments), begin, end)

    def _begin_reduction(self, table: Table, r: Reducing) -> _Reduction:
        """Reduces within the node, and sends the partial sums on the rails."""
        begun, places = _Reduction(), self.places
        wire_bytes = ELEM_BYTES[self._wire(r)]
        for place in self._own(table):
            elems = table[places.node][place].elems
            room = self._taken(begun, elems * wire_bytes * len(places.nodes))
            begun.elems[place] = elems
            begun.partials[place] = [
                room + node * elems * wire_bytes for node in range(len(places.nodes))
            ]
            begun.arriving[place] = [
                self._receive(place, node, begun.partials[place][node], elems * wire_bytes)
                for node in places.others()
                if elems
            ]
        for node in (*places.others(), places.node):
            for place, row in self._rows(table, node):
                size_bytes = row[places.place].elems * wire_bytes
                if node == places.node and place in begun.partials:
                    self._reduce_row(begun, row, r, begun.partials[place][node])
                    continue
                ptr = self._taken(begun, size_bytes)
                self._reduce_row(begun, row, r, ptr)
                if size_bytes:
                    begun.sent.append(self._send(place, node, ptr, size_bytes))
        return begun

    def _reduce_row(self, begun: _Reduction, row: list[Span], r: Reducing, ptr: int) -> None:
        """Reduces a row within the node, this rank's span to a partial sum at ``ptr``."""
        wire, mine = self._wire(r), row[self.places.place]
        wide = ptr
        if wire != r.partial:
            wide = self._taken(begun, mine.elems * ELEM_BYTES[r.partial])
        self._inside(
            self._inner.reduce_scatter_partial(
                [span.ptr for span in row],
                [span.elems for span in row],
                wide,
                r.dtype,
                r.op,
                r.factor,
            )
        )
        if wide != ptr:
            _native.combine_partials([wide], r.partial, ptr, wire, mine.elems, r.joining, 0)

    def _end_reduction(
        self, begun: _Reduction, outs: Mapping[int, Span], r: Reducing, out_dtype: int
    ) -> None:
        """Adds the partial sums of the places that this rank owns, in the order of the nodes."""
        for place, ptrs in begun.partials.items():
            for message in begun.arriving[place]:
                self._arrived(message)
            if begun.elems[place]:
                _native.combine_partials(
                    ptrs,
                    self._wire(r),
                    outs[place].ptr,
                    out_dtype,
                    begun.elems[place],
                    r.joining,
                    self._world if r.op == AVG else 0,
                )
        self._settle(begun.sent)
        self._scratch.give(begun.taken)

    def _wire(self, r: Reducing) -> int:
        return r.dtype if self._narrow else r.partial

    def _taken(self, begun: _Reduction, size_bytes: int) -> int:
        tensor = self._scratch.take(size_bytes)
        begun.taken.append(tensor)
        return tensor.data_ptr()

    def _reduce_in_one_hop(self, in_ptr: int, out_ptr: int, elems: int, r: Reducing) -> None:
        if not elems:
            return
        begun, places = _Reduction(), self.places
        size_bytes = elems * ELEM_BYTES[r.partial]
        room = self._taken(begun, size_bytes * len(places.nodes))
        ptrs = [room + node * size_bytes for node in range(len(places.nodes))]
        arriving = [
            self._receive(places.place, node, ptrs[node], size_bytes) for node in places.others()
        ]
        mine = ptrs[places.node]
        _native.combine_partials([in_ptr], r.dtype, mine, r.partial, elems, r.joining, 0)
        within = SUM if r.op == AVG else r.op
        self._inside(self._inner.all_reduce(mine, mine, elems, r.partial, within, r.factor, DIRECT))
        self._sent += [
            self._send(rail, node, mine, size_bytes)
            for rail in places.rails_of(places.rank)
            for node in places.others()
            if rail < len(places.nodes[node])
        ]
        for message in arriving:
            self._arrived(message)
        divide_by = self._world if r.op == AVG else 0
        _native.combine_partials(ptrs, r.partial, out_ptr, r.dtype, elems, r.joining, divide_by)
        self._settle(self._sent)
        self._scratch.give(begun.taken)

    def _reduce_and_gather(self, in_ptr: int, out_ptr: int, elems: int, r: Reducing) -> None:
        places, size = self.places, ELEM_BYTES[r.dtype]
        pieces = places.num_rails * len(places.nodes)
        segments = self._segments(elems, pieces, ELEM_BYTES[self._wire(r)])
        sources = [self._pieces(in_ptr, *segment, size) for segment in segments]
        results = [self._pieces(out_ptr, *segment, size) for segment in segments]

        def add(s: int, begun: _Reduction) -> _Gathering:
            own = results[s][places.node]
            self._end_reduction(begun, dict(enumerate(own)), r, r.dtype)
            return self._begin_gathering(results[s], size)

        self._in_stages(
            len(segments),
            lambda s, _: self._begin_reduction(sources[s], r),
            add,
            lambda s, begun: self._end_gathering(begun, results[s], size),
        )

    def _reduce_to(self, root: int, in_ptr: int, out_ptr: int, elems: int, r: Reducing) -> None:
        """Each node reduces at the rail of the root, which adds what arrives."""
        begun, places = _Reduction(), self.places
        size_bytes = elems * ELEM_BYTES[r.partial]
        rail, node = places.place_of(root), places.node_of(root)
        at = rail % len(places.mates)
        receives = places.place == at
        ptrs = [0] * len(places.nodes)
        if receives:
            room = self._taken(begun, size_bytes * len(places.nodes))
            ptrs = [room + each * size_bytes for each in range(len(places.nodes))]
        arriving = []
        if places.rank == root and elems:
            arriving = [
                self._receive(rail, each, ptrs[each], size_bytes) for each in places.others()
            ]
        mine = ptrs[places.node]
        self._inside(self._inner.reduce_partial(in_ptr, mine, elems, r.dtype, r.op, r.factor, at))
        if receives and places.node != node and elems:
            self._sent.append(self._send(rail, node, mine, size_bytes))
        for message in arriving:
            self._arrived(message)
        if places.rank == root:
            divide_by = self._world if r.op == AVG else 0
            _native.combine_partials(ptrs, r.partial, out_ptr, r.dtype, elems, r.joining, divide_by)
        self._settle(self._sent)
        self._scratch.give(begun.taken)

    # ---- all-gather, broadcast, gather, scatter, all-to-all --------------------------------------

    def _gather_spans(self, in_ptr: int, spans: list[Span]) -> None:
        """Gathers spans of bytes, of which this rank's lies at ``in_ptr``, too."""
        own = spans[self.places.rank]
        if in_ptr != own.ptr and own.elems:
            memory_at(own.ptr, own.elems).copy_(memory_at(in_ptr, own.elems))
        segments = self._segments(max(span.elems for span in spans), 1, 1)
        tables = [self._table([span.part(*s, 1) for span in spans]) for s in segments]
        self._in_stages(
            len(tables),
            lambda s, _: self._begin_gathering(tables[s], 1),
            lambda s, begun: self._end_gathering(begun, tables[s], 1),
        )

    def _begin_gathering(self, table: Table, elem_bytes: int) -> _Gathering:
        """Sends what this rank owns to its rail peers."""
        begun, places = _Gathering(), self.places
        for node in places.others():
            for place in range(places.place, len(table[node]), len(places.mates)):
                span = table[node][place]
                if span.elems:
                    begun.arriving[node, place] = self._receive(
                        place, node, span.ptr, span.elems * elem_bytes
                    )
        for place in self._own(table):
            span = table[places.node][place]
            if span.elems:
                begun.sent += [
                    self._send(place, node, span.ptr, span.elems * elem_bytes)
                    for node in places.others()
                ]
        return begun

    def _end_gathering(self, begun: _Gathering, table: Table, elem_bytes: int) -> None:
        """Shares with the node what this rank has of its own and what arrived for it."""
        places = self.places
        for node in (places.node, *places.others()):
            for place, row in self._rows(table, node):
                message = begun.arriving.get((node, place))
                if message is not None:
                    self._arrived(message)
                self._inside(
                    self._inner.all_gather_list(
                        row[places.place].ptr,
                        [span.ptr for span in row],
                        [span.elems * elem_bytes for span in row],
                        BYTE,
                    )
                )
        self._settle(begun.sent)

    def _broadcast(self, whole: Span, root: int) -> None:
        """Passes segments from node to node along the root's rail, and shares them in each."""
        places, size = self.places, len(self.places.nodes)
        rail, node = places.place_of(root), places.node_of(root)
        at = rail % len(places.mates)
        distance = (places.node - node) % size
        before, after = (places.node - 1) % size, (places.node + 1) % size
        segments = [whole.part(*s, 1) for s in self._segments(whole.elems, 1, 1)]
        relays = places.place == at
        arriving = (
            [self._receive(rail, before, *segment) for segment in segments]
            if relays and distance > 0
            else []
        )
        for number, segment in enumerate(segments):
            if arriving:
                self._arrived(arriving[number])
            if relays and distance < size - 1:
                self._sent.append(self._send(rail, after, *segment))
            self._inside(self._inner.broadcast(segment.ptr, segment.elems, BYTE, at))

    def _gather_to(self, root: int, in_ptr: int, size_bytes: int, out_ptrs: list[int]) -> None:
        begun, places = _Reduction(), self.places
        rail, node = places.place_of(root), places.node_of(root)
        at = rail % len(places.mates)
        collects = places.place == at
        ptrs: list[int] = []
        if places.rank == root:
            ptrs = [out_ptrs[rank] for rank in places.mates]
        elif collects:
            room = self._taken(begun, size_bytes * len(places.mates))
            ptrs = [room + place * size_bytes for place in range(len(places.mates))]
        arriving = [
            self._receive(rail, each, out_ptrs[rank], size_bytes)
            for each in (places.others() if places.rank == root and size_bytes else ())
            for rank in places.nodes[each]
        ]
        self._inside(self._inner.gather(in_ptr, size_bytes, ptrs, BYTE, at))
        if collects and places.node != node and size_bytes:
            self._sent += [self._send(rail, node, ptr, size_bytes) for ptr in ptrs]
        for message in arriving:
            self._arrived(message)
        self._settle(self._sent)
        self._scratch.give(begun.taken)

    def _scatter_from(self, root: int, in_ptrs: list[int], out_ptr: int, size_bytes: int) -> None:
        begun, places = _Reduction(), self.places
        rail, node = places.place_of(root), places.node_of(root)
        at = rail % len(places.mates)
        ptrs: list[int] = []
        if places.rank == root:
            ptrs = [in_ptrs[rank] for rank in places.mates]
            self._sent += [
                self._send(rail, each, in_ptrs[rank], size_bytes)
                for each in (places.others() if size_bytes else ())
                for rank in places.nodes[each]
            ]
        elif places.place == at:
            room = self._taken(begun, size_bytes * len(places.mates))
            ptrs = [room + place * size_bytes for place in range(len(places.mates))]
            if places.node != node and size_bytes:
                for message in [self._receive(rail, node, ptr, size_bytes) for ptr in ptrs]:
                    self._arrived(message)
        self._inside(self._inner.scatter(ptrs, out_ptr, size_bytes, BYTE, at))
        self._settle(self._sent)
        self._scratch.give(begun.taken)

    def _exchange(self, ins: list[Span], outs: list[Span]) -> None:
        """Collects in each node what goes to one rank elsewhere, and sends it on that rank's rail.

        So ranks have messages for their rail peers alone, each of one sender's bytes, which arrive
        where they belong.
        """
        begun, places = _Reduction(), self.places
        sizes = self._sizes_of_mates([span.elems for span in ins])
        arriving = [
            self._receive(places.place, node, *outs[rank])
            for node in places.others()
            for rank in places.nodes[node]
            if outs[rank].elems
        ]
        mates = places.mates
        self._inside(
            self._inner.all_to_all(
                [ins[rank].ptr for rank in mates],
                [ins[rank].elems for rank in mates],
                [outs[rank].ptr for rank in mates],
                [outs[rank].elems for rank in mates],
                BYTE,
            )
        )
        for node in places.others():
            for first in range(0, len(places.nodes[node]), len(mates)):
                self._collect_for(node, first, ins, sizes, begun)
        for message in arriving:
            self._arrived(message)
        self._settle(self._sent)
        self._scratch.give(begun.taken)

    def _collect_for(
        self, node: int, first: int, ins: list[Span], sizes: list[list[int]], begun: _Reduction
    ) -> None:
        """Collects what goes to the ranks of a node at places [first, first + mates)."""
        places = self.places
        targets = places.nodes[node][first : first + len(places.mates)]
        outgoing = [ins[rank] for rank in targets]
        outgoing += [Span(ins[0].ptr, 0)] * (len(places.mates) - len(targets))
        rail = first + places.place
        incoming = [Span(0, 0)] * len(places.mates)
        if places.place < len(targets):
            target = targets[places.place]
            incoming = [Span(0, size[target]) for size in sizes]
            room = self._taken(begun, sum(span.elems for span in incoming))
            for place, span in enumerate(incoming):
                incoming[place] = Span(room, span.elems)
                room += span.elems
        self._inside(
            self._inner.all_to_all(
                [span.ptr for span in outgoing],
                [span.elems for span in outgoing],
                [span.ptr for span in incoming],
                [span.elems for span in incoming],
                BYTE,
            )
        )
        self._sent += [self._send(rail, node, *span) for span in incoming if span.elems]
