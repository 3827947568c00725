# SPDX-License-Identifier: Apache-2.0
"""The core of a communicator over several nodes: its node's core, and the rails.

It implements :class:`ringcomm.comm.nodes.calls.CollectivesOverNodes` for the host. N nodes of L
ranks; W = N L; a buffer of B bytes (in the type that is sent). A rail joins one rank of each node,
all with the same local rank.

    reduce-scatter   each node reduces the data for a node m into partial sums, one for each rank
                     of m, and its ranks send them on their rails; rank r adds the N partial sums
                     of its chunk in node order. B (N-1)/N leave a node.
    all-gather       each rank sends its chunk to its rail peers, and each node shares the chunks
                     that its ranks received. B (N-1)/N leave a node.
    all-reduce       both, on pieces; each rank owns 1/W. Below ``ONE_HOP_BYTES`` each node reduces
                     the whole buffer, and each rank exchanges the result with its rail peers: one
                     network hop in place of two, but L times the bytes.

Partial sums are kept and added in the accumulator's type (FP32 for 16-bit types), and the result is
rounded once: it equals the result of one node that sums in groups of L ranks
(``CommOptions.sum_group_size``). ``compression="param"`` rounds partial sums before they are sent.

Large calls are cut into segments in a pipeline: while one segment is on the network, the node
reduces the next segment, and adds and shares the segment before. One-shot rails work this way; the
other schedules also add partial sums in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import isqrt
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.nodes.calls import BYTE, ELEM_BYTES, ONE_SHOT, CollectivesOverNodes, Span
from ringcomm.comm.nodes.compressed_sums import (
    AVG,
    FLOAT32,
    SUM,
    Form,
    QuantizedForm,
    Reducing,
    is_quantized,
)
from ringcomm.comm.nodes.transport import RailMessage, memory_at

Tensor = torch.Tensor


# ---- The rounds in which the ranks of a rail exchange partial sums or chunks, as data -----------
# A rail joins one rank of each of N nodes. A *reduction* begins with N partial sums on each rank;
# each of them has a node as its *target*. In each round a rank sends some of its partial sums, and
# adds the arriving partial sums to its other ones; after the last round it has the sum for its own
# node. Every partial sum is sent once. A *gathering* is the same schedule backwards: sends become
# receives, and nothing is added.
#
#     schedule   rounds   messages of a rank     terms of a sum   a rank sends, of B bytes
#     one_shot   1        N - 1                  N                B (N-1)/N
#     levels     2        a + b - 2, a b = N     a, then b        B (N-1)/N
#     ring       N - 1    N - 1                  2                B (N-1)/N
#
# Levels: the nodes of group j, [j a, (j+1) a), first exchange partial sums; each node receives the
# sums for the nodes at its own position in all b groups. Then nodes at equal positions exchange
# sums. The first round has most of the bytes, so most bytes stay among neighbours. Ring: the
# partial sum of a target starts at the node after it and grows as it passes from node to node.

# "auto" means levels from this number of nodes on. Predicted (docs/scaling.md, "One-shot, ring or
# levels"): levels are faster from 32 nodes on if a message costs 1 us, from 256 nodes on if 0.1 us.
LEVELS_FROM_NODES = 32


class Exchange(NamedTuple):
    """A message of a round: the other node, and the targets whose sums it contains, in order."""

    peer: int
    targets: tuple[int, ...]


class Round(NamedTuple):
    """The messages that a rank sends in a round, and the messages that it receives in the round."""

    sends: tuple[Exchange, ...]
    receives: tuple[Exchange, ...]


def rail_schedule(asked: str, nodes: int) -> str:
    """Returns the schedule that ``CommOptions.rails`` selects for this number of nodes."""
    if asked != "auto":
        return asked
    return "levels" if nodes >= LEVELS_FROM_NODES else "one_shot"


def levels_of(nodes: int) -> tuple[int, int]:
    """Returns (a, b) with a * b == ``nodes`` and the fewest messages; for a prime number a is 1."""
    near = next(each for each in range(isqrt(nodes), 0, -1) if nodes % each == 0)
    return near, nodes // near


@lru_cache(maxsize=64)
def reduction(name: str, nodes: int, node: int) -> tuple[Round, ...]:
    """Returns the rounds of a reduction for the rank on ``node``.

    Args:
        name: "one_shot", "levels" or "ring".
        nodes: N, at least 2.
        node: the number of this rank's node, counted from 0.
    """
    if name == "ring":
        return tuple(
            Round(
                (Exchange((node + 1) % nodes, ((node - 1 - turn) % nodes,)),),
                (Exchange((node - 1) % nodes, ((node - 2 - turn) % nodes,)),),
            )
            for turn in range(nodes - 1)
        )
    near = 1 if name == "one_shot" else levels_of(nodes)[0]
    first, position = node - node % near, node % near
    alike = tuple(range(position, nodes, near))
    rounds = []
    if near > 1:
        others = [(position + distance) % near for distance in range(1, near)]
        rounds.append(
            Round(
                tuple(Exchange(first + each, tuple(range(each, nodes, near))) for each in others),
                tuple(Exchange(first + each, alike) for each in others),
            )
        )
    far = [alike[(node // near + distance) % len(alike)] for distance in range(1, len(alike))]
    rounds.append(
        Round(
            tuple(Exchange(each, (each,)) for each in far),
            tuple(Exchange(each, (node,)) for each in far),
        )
    )
    return tuple(rounds)


@lru_cache(maxsize=64)
def gathering(name: str, nodes: int, node: int) -> tuple[Round, ...]:
    """Returns the rounds of a gathering: the rounds of the reduction, reversed."""
    return tuple(
        Round(each.receives, each.sends) for each in reversed(reduction(name, nodes, node))
    )


# ---- Sums and gathers over nodes: within each node, and in rounds on the rails ------------------
# Both use a *table*: the elements that each rank owns, by node and local rank. Large tables are cut
# into segments: while one segment is on the network, the node reduces the next segment, and adds
# and shares the segment before.

# Pieces and segments begin at multiples of this number of elements, so that they hold whole vectors
# of every type and whole quantization blocks.
LINE_ELEMS = _native.QUANT_BLOCK
# SEGMENT_BYTES: the bytes that a rank sends to a peer per segment. The first and the last segment
# have 1/END_DIVISOR of them. Measured with calls of 16 MiB on two nodes of 2 ranks, in network
# namespaces of one machine with 2 virtual cores of an Intel Xeon (family 6 model 207) and other
# work; segments of 256 KiB to 2 MiB and divisors of 1 to 8 took turns in 13 to 15 rounds. At
# 1 Gbit/s a larger divisor shortens a reduce-scatter from 74 to 71 ms at best; sending the bytes
# alone takes 70 ms. At 20 Gbit/s the cores are the limit: calls with segments of 2 MiB take 0.8
# times as long as calls with segments of 1 MiB.
SEGMENT_BYTES = 2 << 20
END_DIVISOR = 8


# The elements that each rank owns, by node and local rank. In an all-reduce every node has as many
# parts as there are rails, so a rank of a smaller node owns several parts.
Table = list[list[Span]]


@dataclass
class InFlight:
    """Messages that a stage of a call has sent, and the scratch memory that they use.

    Attributes:
        sent: the messages to wait for before the memory may be reused.
        scratch: the memory.
    """

    sent: list[RailMessage] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)


@dataclass
class _RailParcel:
    """An arriving message, which holds the spans of one node or of several nodes, concatenated.

    Attributes:
        peer: the node that sends the message.
        message: the receive; None if the spans have arrived and are in place.
        spans: by node, the memory in which the node's elements arrive.
    """

    peer: int
    message: RailMessage | None
    spans: dict[int, Span]


@dataclass
class _OnRail:
    """A reduction or a gathering of one segment under way on one rail.

    Attributes:
        rail: the number of the rail.
        spans: by node, this rank's partial sum for the node; in a gathering, the node's output.
        rounds: the rounds of the schedule.
        arriving: by round, the arriving messages.
    """

    rail: int
    spans: list[Span]
    rounds: tuple[Round, ...]
    arriving: list[list[_RailParcel]] = field(default_factory=list)


@dataclass
class _Begun(InFlight):
    """A reduction or a gathering of one segment under way on all rails of this rank.

    Attributes:
        rails: the state of each rail, by its number.
        form: the quantized form of gathered data; None if the data are not quantized.
    """

    rails: dict[int, _OnRail] = field(default_factory=dict)
    form: QuantizedForm | None = None


class NodesCore(CollectivesOverNodes):
    """One rank's core over several nodes."""

    def _table(self, spans: Sequence[Span]) -> Table:
        return [[spans[rank] for rank in ranks] for ranks in self.layout.nodes]

    def _pieces(self, ptr: int, begin: int, end: int, elem_bytes: int) -> Table:
        """Cuts elements [begin, end) of a buffer into a piece for each rail and node."""
        rails, nodes = self.layout.num_rails, len(self.layout.nodes)
        each = -(-(end - begin) // (rails * nodes))
        each = -(-each // LINE_ELEMS) * LINE_ELEMS
        whole = Span(ptr + begin * elem_bytes, end - begin)
        return [
            [
                whole.slice(number * each, (number + 1) * each, elem_bytes)
                for number in range(node, rails * nodes, nodes)
            ]
            for node in range(nodes)
        ]

    def _segments(self, elems: int, pieces: int, elem_bytes: int) -> list[tuple[int, int]]:
        """Cuts a buffer of ``elems`` elements in ``pieces`` pieces into segments [begin, end).

        If there are several segments, the first and the last are small, because the network idles
        while the node reduces the first segment, and again after the last segment has arrived.
        """
        each, small = (
            max(size_bytes // elem_bytes, 1) * pieces
            for size_bytes in (SEGMENT_BYTES, SEGMENT_BYTES // END_DIVISOR)
        )
        if elems <= min(each, 2 * small):
            return [(0, elems)] if elems else []
        last = (elems - small) // LINE_ELEMS * LINE_ELEMS
        ends = [*range(small, last, each), last, elems]
        return list(zip([0, *ends], ends, strict=False))

    def _in_stages(self, count: int, *stages: Callable[[int, Any], Any]) -> None:
        """Runs ``stages`` on ``count`` segments as a pipeline, with one segment in each stage."""
        under_way: list[dict[int, Any]] = [{} for _ in stages]
        for turn in range(count + len(stages) - 1):
            for number, stage in enumerate(stages):
                segment = turn - number
                if not 0 <= segment < count:
                    continue
                before = under_way[number - 1].pop(segment) if number else None
                under_way[number][segment] = stage(segment, before)

    def _rows(self, table: Table, node: int) -> Iterator[tuple[int, list[Span]]]:
        """Yields (index, row): a row has one span of ``node`` for each rank of this rank's node.

        ``index`` is the position of this rank's span among all spans of ``node``. The last row is
        filled up with empty spans, so its index may be past the last span.
        """
        spans, num_local = table[node], len(self.layout.node_ranks)
        for first in range(0, len(spans), num_local):
            row = spans[first : first + num_local]
            row += [Span(row[0].ptr, 0)] * (num_local - len(row))
            if any(span.elems for span in row):
                yield first + self.layout.local_rank, row

    @property
    def _rounds(self) -> range:
        """The indices of the rounds of this communicator's schedule."""
        return range(len(reduction(self._schedule, len(self.layout.nodes), self.layout.node)))

    def _taken(self, begun: InFlight, size_bytes: int) -> int:
        tensor = self._scratch.take(size_bytes)
        begun.scratch.append(tensor)
        return tensor.data_ptr()

    def _given_back(self, begun: InFlight) -> None:
        """Waits until the messages are sent, then releases their scratch memory."""
        self._settle(begun.sent)
        self._scratch.give(begun.scratch)

    # ---- reduce-scatter -------------------------------------------------------------------------

    def _reduce_spans(self, spans: list[Span], out_ptr: int, form: Form, out_dtype: int) -> None:
        """Reduces spans, one for each rank; writes this rank's sum to ``out_ptr``."""
        r = form.r
        size, out_size = ELEM_BYTES[r.dtype], ELEM_BYTES[out_dtype]
        segments = self._segments(max(span.elems for span in spans), 1, ELEM_BYTES[r.partial])
        mine = Span(out_ptr, spans[self.layout.rank].elems)
        own = self.layout.local_rank

        def begin(s: int, _: None) -> _Begun:
            return self._begin_reduction(
                self._table([span.slice(*segments[s], size) for span in spans]), form
            )

        def end(s: int, begun: _Begun) -> None:
            self._end_reduction(begun, {own: mine.slice(*segments[s], out_size)}, form, out_dtype)

        self._in_stages(len(segments), begin, *self._adding_stages(form), end)

    def _reduce_to_each(self, spans: list[Span], out: Span, r: Reducing) -> None:
        form = self._form(r, sum(span.elems for span in spans))
        self._reduce_spans(spans, out.ptr, form, r.dtype)

    def _reduce_to_all(self, ins: Span, out: Span, r: Reducing) -> None:
        (in_ptr, elems), out_ptr = ins, out.ptr
        layout, size = self.layout, ELEM_BYTES[r.dtype]
        pieces, form = layout.num_rails * len(layout.nodes), self._form(r, elems)
        segments = self._segments(elems, pieces, form.segment_elem_bytes)
        sources = [self._pieces(in_ptr, *segment, size) for segment in segments]
        results = [self._pieces(out_ptr, *segment, size) for segment in segments]

        def add(s: int, begun: _Begun) -> _Begun:
            own = dict(enumerate(results[s][layout.node]))
            if isinstance(form, QuantizedForm):
                return self._quantize_sums(begun, own, results[s], form)
            self._end_reduction(begun, own, form, r.dtype)
            return self._begin_gathering(results[s], size)

        self._in_stages(
            len(segments),
            lambda s, _: self._begin_reduction(sources[s], form),
            *self._adding_stages(form),
            add,
            *self._passing_stages(),
            lambda s, begun: self._end_gathering(begun, results[s], size),
        )

    def _quantize_sums(
        self, begun: _Begun, own: Mapping[int, Span], table: Table, form: QuantizedForm
    ) -> _Begun:
        """Ends a reduction, quantizes its sums, and begins to gather the quantized sums.

        This rank's own results are the dequantized values, as on all other ranks.
        """
        gathered = _Begun(form=form)
        size = ELEM_BYTES[form.r.partial]
        wide = {
            rail: Span(self._taken(gathered, own[rail].elems * size), own[rail].elems)
            for rail in begun.rails
        }
        self._end_reduction(begun, wide, form, form.r.partial)
        for rail, sums in wide.items():
            spans = [row[rail] if rail < len(row) else Span(0, 0) for row in table]
            self._begin_quantized_on_rail(gathered, rail, sums, spans, form)
        return gathered

    def _begin_quantized_on_rail(
        self, begun: _Begun, rail: int, wide: Span, spans: Sequence[Span], form: QuantizedForm
    ) -> None:
        """Quantizes this rank's FP32 numbers, and begins to gather them on one rail.

        Args:
            begun: holds the memory of the quantized values.
            rail: the number of the rail.
            wide: the FP32 numbers.
            spans: by node, the memory for the dequantized numbers; fills this node's at once.
            form: the form in which partial sums are sent.
        """
        quantized = [Span(0, form.bytes_of(span.elems)) for span in spans]
        ptr = self._taken(begun, sum(span.elems for span in quantized))
        for node, span in enumerate(quantized):
            quantized[node], ptr = Span(ptr, span.elems), ptr + span.elems
        mine = quantized[self.layout.node].ptr
        form.write(wide.ptr, mine, wide.elems)
        form.dequantize(mine, spans[self.layout.node].ptr, wide.elems)
        self._begin_on_rail(begun, rail, quantized)

    def _begin_reduction(self, table: Table, form: Form) -> _Begun:
        """Reduces within the node, and sends the partial sums of the first round."""
        begun, layout = _Begun(), self.layout
        for rail in layout.rails_of(layout.rank):
            elems = [row[rail].elems if rail < len(row) else 0 for row in table]
            begun.rails[rail] = self._with_room(begun, rail, elems, form)
        rounds = reduction(self._schedule, len(layout.nodes), layout.node)
        # The data that are sent first are reduced first.
        for number, exchange in ((n, each) for n, turn in enumerate(rounds) for each in turn.sends):
            for target in exchange.targets:
                self._reduce_rows(begun, table, target, form)
            if number == 0:
                for on_rail in begun.rails.values():
                    self._send_sums(begun, on_rail, exchange, 0, form)
        self._reduce_rows(begun, table, layout.node, form)
        return begun

    def _with_room(self, begun: InFlight, rail: int, elems: Sequence[int], form: Form) -> _OnRail:
        """Takes memory for partial sums, in the order of sending; begins all rounds' receives."""
        layout = self.layout
        rounds = reduction(self._schedule, len(layout.nodes), layout.node)
        leaving = [
            target for turn in rounds for exchange in turn.sends for target in exchange.targets
        ]
        sizes_bytes = [form.bytes_of(each) for each in elems]
        ptr = self._taken(begun, sum(sizes_bytes))
        spans = [Span(0, 0)] * len(elems)
        for node in (*leaving, layout.node):
            spans[node] = Span(ptr, elems[node])
            ptr += sizes_bytes[node]
        on_rail = _OnRail(rail, spans, rounds)
        for number, turn in enumerate(rounds):
            on_rail.arriving.append([])
            for exchange in turn.receives:
                size_bytes = sum(sizes_bytes[target] for target in exchange.targets)
                if size_bytes:
                    ptr, arriving = self._taken(begun, size_bytes), {}
                    message = self._receive(rail, exchange.peer, ptr, size_bytes, number)
                    for target in exchange.targets:
                        arriving[target] = Span(ptr, elems[target])
                        ptr += sizes_bytes[target]
                    on_rail.arriving[-1].append(_RailParcel(exchange.peer, message, arriving))
        return on_rail

    def _reduce_rows(self, begun: _Begun, table: Table, target: int, form: Form) -> None:
        """Reduces, within this node, the elements of node ``target``'s ranks to partial sums."""
        r = form.r
        for local_rank, row in self._rows(table, target):
            mine = row[self.layout.local_rank]
            # If this rank is not on the rail of this number, the span is empty.
            ptr = (
                begun.rails[local_rank].spans[target].ptr if local_rank in begun.rails else mine.ptr
            )
            wide = ptr
            if not form.is_partial:
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
            if not form.is_partial and mine.elems:
                form.write_partial(mine.ptr, wide, ptr, mine.elems)

    def _send_sums(
        self, begun: _Begun, on_rail: _OnRail, exchange: Exchange, number: int, form: Form
    ) -> None:
        """Sends the partial sums of a message, which are contiguous in memory."""
        size_bytes = sum(form.bytes_of(on_rail.spans[node].elems) for node in exchange.targets)
        if size_bytes:
            ptr = on_rail.spans[exchange.targets[0]].ptr
            begun.sent.append(self._send(on_rail.rail, exchange.peer, ptr, size_bytes, number))

    def _adding_stages(self, form: Form) -> Iterator[Callable[[int, _Begun], _Begun]]:
        """Yields all stages of a reduction except the first and the last."""

        def add(number: int, s: int, begun: _Begun) -> _Begun:
            for on_rail in begun.rails.values():
                for target, ptrs in self._terms(on_rail, number).items():
                    span = on_rail.spans[target]
                    form.join(ptrs, span.ptr, span.elems)
                for exchange in on_rail.rounds[number + 1].sends:
                    self._send_sums(begun, on_rail, exchange, number + 1, form)
            return begun

        yield from (partial(add, number) for number in self._rounds[:-1])

    def _terms(self, on_rail: _OnRail, number: int) -> dict[int, list[int]]:
        """Waits for a round; returns for each target the addresses of its terms, in node order."""
        came: dict[int, list[tuple[int, int]]] = {}
        for parcel in on_rail.arriving[number]:
            self._arrive(parcel)
            for target, span in parcel.spans.items():
                if span.elems:
                    came.setdefault(target, []).append((parcel.peer, span.ptr))
        return {
            target: [
                ptr for _, ptr in sorted([*terms, (self.layout.node, on_rail.spans[target].ptr)])
            ]
            for target, terms in came.items()
        }

    def _end_reduction(
        self, begun: _Begun, outs: Mapping[int, Span], form: Form, out_dtype: int
    ) -> None:
        """Adds the partial sums of the last round to the parts that this rank owns."""
        divide_by = self._world if form.r.op == AVG else 0
        for rail, on_rail in begun.rails.items():
            for ptrs in self._terms(on_rail, self._rounds[-1]).values():
                elems = on_rail.spans[self.layout.node].elems
                form.finish(ptrs, outs[rail].ptr, out_dtype, elems, divide_by)
        self._given_back(begun)

    def _join(self, begun: InFlight, ptrs: list[int], out: Span, r: Reducing) -> None:
        """Adds one partial sum per node, in node order; with levels, first within each group."""
        near = levels_of(len(ptrs))[0] if self._schedule == "levels" else 1
        if near > 1:
            size_bytes = out.elems * ELEM_BYTES[r.partial]
            groups = [ptrs[first : first + near] for first in range(0, len(ptrs), near)]
            room = self._taken(begun, size_bytes * len(groups))
            ptrs = [room + number * size_bytes for number in range(len(groups))]
            for group, ptr in zip(groups, ptrs, strict=True):
                _native.combine_partials(group, r.partial, ptr, r.partial, out.elems, r.joining, 0)
        divide_by = self._world if r.op == AVG else 0
        _native.combine_partials(ptrs, r.partial, out.ptr, r.dtype, out.elems, r.joining, divide_by)

    def _form(self, r: Reducing, elems: int) -> Form:
        """Returns the form in which partial sums of ``elems`` elements are sent."""
        code = _native.QUANT_FORMATS.get(self.compression)
        if code is not None and is_quantized(r, elems * ELEM_BYTES[r.dtype]):
            return QuantizedForm(r, code)
        dtype = r.dtype if self.compression == "param" else r.partial
        return Form(r, dtype, ELEM_BYTES[dtype])

    # ---- all-gather -----------------------------------------------------------------------------

    def _gather_spans(self, in_ptr: int, spans: list[Span]) -> None:
        """Gathers spans of bytes, one from each rank; this rank's data are at ``in_ptr``."""
        own = spans[self.layout.rank]
        if in_ptr != own.ptr and own.elems:
            memory_at(own.ptr, own.elems).copy_(memory_at(in_ptr, own.elems))
        segments = self._segments(max(span.elems for span in spans), 1, 1)
        tables = [self._table([span.slice(*s, 1) for span in spans]) for s in segments]
        self._in_stages(
            len(tables),
            lambda s, _: self._begin_gathering(tables[s], 1),
            *self._passing_stages(),
            lambda s, begun: self._end_gathering(begun, tables[s], 1),
        )

    def _gather_on_rail(self, spans: list[Span]) -> None:
        """Gathers spans of bytes, one for each node, among the ranks of this rank's rail only."""
        segments = self._segments(max(span.elems for span in spans), 1, 1)

        def begin(s: int, _: None) -> _Begun:
            begun = _Begun()
            self._begin_on_rail(
                begun, self.layout.local_rank, [span.slice(*segments[s], 1) for span in spans]
            )
            return begun

        def end(s: int, begun: _Begun) -> None:
            self._pass_on(begun, self._rounds[-1])
            self._check_headers()
            self._given_back(begun)

        self._in_stages(len(segments), begin, *self._passing_stages(), end)

    def _gather_quantized(self, wide_ptr: int, spans: list[Span], form: QuantizedForm) -> None:
        """Gathers quantized elements, one span from each rank, and dequantizes them.

        Args:
            wide_ptr: the FP32 numbers that this rank quantizes.
            spans: by rank, the memory for the rank's dequantized elements.
            form: the form in which partial sums are sent.
        """
        layout, size, nothing = self.layout, ELEM_BYTES[form.r.dtype], Span(0, 0)
        mine = Span(wide_ptr, spans[layout.rank].elems)
        elems = max(span.elems for span in spans)
        segments = self._segments(elems, 1, form.segment_elem_bytes)
        tables = [self._table([span.slice(*s, size) for span in spans]) for s in segments]

        def begin(s: int, _: None) -> _Begun:
            begun, wide = _Begun(form=form), mine.slice(*segments[s], ELEM_BYTES[FLOAT32])
            for rail in layout.rails_of(layout.rank):
                row = [each[rail] if rail < len(each) else nothing for each in tables[s]]
                here = wide if rail == layout.local_rank else nothing
                self._begin_quantized_on_rail(begun, rail, here, row, form)
            return begun

        self._in_stages(
            len(tables),
            begin,
            *self._passing_stages(),
            lambda s, begun: self._end_gathering(begun, tables[s], size),
        )

    def _gather_quantized_on_rail(
        self, wide_ptr: int, spans: list[Span], form: QuantizedForm
    ) -> None:
        """Does :meth:`_gather_quantized` with one span per node, on this rank's rail only."""
        layout, size = self.layout, ELEM_BYTES[form.r.dtype]
        mine = Span(wide_ptr, spans[layout.node].elems)
        elems = max(span.elems for span in spans)
        segments = self._segments(elems, 1, form.segment_elem_bytes)
        rows = [[span.slice(*s, size) for span in spans] for s in segments]

        def begin(s: int, _: None) -> _Begun:
            begun, wide = _Begun(form=form), mine.slice(*segments[s], ELEM_BYTES[FLOAT32])
            self._begin_quantized_on_rail(begun, layout.local_rank, wide, rows[s], form)
            return begun

        def end(s: int, begun: _Begun) -> None:
            self._pass_on(begun, self._rounds[-1])
            quantized = begun.rails[layout.local_rank].spans
            for node in layout.others():
                form.dequantize(quantized[node].ptr, *rows[s][node])
            self._given_back(begun)

        self._in_stages(len(rows), begin, *self._passing_stages(), end)

    def _begin_gathering(self, table: Table, elem_bytes: int) -> _Begun:
        """Sends the elements that this rank owns to the rail peers of the first round."""
        begun, nothing = _Begun(), Span(0, 0)
        for rail in self.layout.rails_of(self.layout.rank):
            spans = [row[rail] if rail < len(row) else nothing for row in table]
            self._begin_on_rail(begun, rail, [Span(ptr, n * elem_bytes) for ptr, n in spans])
        return begun

    def _begin_on_rail(self, begun: _Begun, rail: int, spans: list[Span]) -> None:
        """Begins a gathering of spans of bytes, by node, on one rail."""
        layout = self.layout
        rounds = gathering(self._schedule, len(layout.nodes), layout.node)
        begun.rails[rail] = on_rail = _OnRail(rail, spans, rounds)
        for number, turn in enumerate(rounds, len(rounds)):
            on_rail.arriving.append([])
            for exchange in turn.receives:
                arriving = {node: spans[node] for node in exchange.targets if spans[node].elems}
                if not arriving:
                    continue
                size_bytes = sum(span.elems for span in arriving.values())
                ptr = next(iter(arriving.values())).ptr
                if len(arriving) > 1:
                    ptr = at = self._taken(begun, size_bytes)
                    for node, span in arriving.items():
                        arriving[node] = Span(at, span.elems)
                        at += span.elems
                message = self._receive(rail, exchange.peer, ptr, size_bytes, number)
                on_rail.arriving[-1].append(_RailParcel(exchange.peer, message, arriving))
        self._send_round(begun, on_rail, 0)

    def _send_round(self, begun: _Begun, on_rail: _OnRail, number: int) -> None:
        """Sends the messages of one round of a gathering; packs the spans of several nodes."""
        packed: dict[tuple[int, ...], Span] = {}
        for exchange in on_rail.rounds[number].sends:
            if exchange.targets not in packed:
                spans = [on_rail.spans[node] for node in exchange.targets]
                packed[exchange.targets] = self._packed(begun, [s for s in spans if s.elems])
            span = packed[exchange.targets]
            if span.elems:
                tag = number + len(on_rail.rounds)
                begun.sent.append(self._send(on_rail.rail, exchange.peer, *span, tag))

    def _packed(self, begun: InFlight, spans: list[Span]) -> Span:
        """Returns contiguous memory with the bytes of all spans; a single span is not copied."""
        if len(spans) <= 1:
            return spans[0] if spans else Span(0, 0)
        size_bytes = sum(span.elems for span in spans)
        ptr = at = self._taken(begun, size_bytes)
        for span in spans:
            memory_at(at, span.elems).copy_(memory_at(*span))
            at += span.elems
        return Span(ptr, size_bytes)

    def _passing_stages(self) -> Iterator[Callable[[int, _Begun], _Begun]]:
        """Yields all stages of a gathering except the first and the last."""

        def pass_on(number: int, s: int, begun: _Begun) -> _Begun:
            self._pass_on(begun, number)
            return begun

        yield from (partial(pass_on, number) for number in self._rounds[:-1])

    def _pass_on(self, begun: _Begun, number: int) -> None:
        """Waits for a round of a gathering, and sends the messages of the next round."""
        for on_rail in begun.rails.values():
            for parcel in on_rail.arriving[number]:
                self._arrive(parcel, on_rail.spans)
            if number + 1 < len(on_rail.rounds):
                self._send_round(begun, on_rail, number + 1)

    def _end_gathering(self, begun: _Begun, table: Table, elem_bytes: int) -> None:
        """Shares this rank's own elements, and the elements that it received, within the node."""
        layout = self.layout
        for node in (layout.node, *layout.others()):
            for local_rank, row in self._rows(table, node):
                if local_rank in begun.rails:
                    on_rail = begun.rails[local_rank]
                    for parcel in (each for turn in on_rail.arriving for each in turn):
                        if node in parcel.spans:
                            self._arrive(parcel, on_rail.spans)
                            if begun.form is not None:
                                begun.form.dequantize(
                                    on_rail.spans[node].ptr, *row[layout.local_rank]
                                )
                self._inside(
                    self._inner.all_gather_list(
                        row[layout.local_rank].ptr,
                        [span.ptr for span in row],
                        [span.elems * elem_bytes for span in row],
                        BYTE,
                    )
                )
        self._given_back(begun)

    def _arrive(self, parcel: _RailParcel, belong: Sequence[Span] = ()) -> None:
        """Waits for a message, and copies each node's span to ``belong[node]``, if given."""
        if parcel.message is None:
            return
        self._arrived(parcel.message)
        parcel.message = None
        for node, span in parcel.spans.items():
            if belong and span.ptr != belong[node].ptr:
                memory_at(belong[node].ptr, span.elems).copy_(memory_at(*span))

    # ---- the bodies of the collectives ----------------------------------------------------------

    def barrier_fast(self, *_: object) -> int:
        with self.turn:
            return self.barrier()

    def barrier(self) -> int:
        def body() -> None:
            # A rank sends its header once its node has passed the barrier within the node. So the
            # headers of all rail peers show that all ranks have arrived.
            self._inside(self._inner.barrier())
            self._send_headers()
            self._check_headers()

        return self._run("barrier", (0, -1, -1, -1), ONE_SHOT, body, headers=False)

    def _reduce_in_one_hop(self, ins: Span, out: Span, r: Reducing) -> None:
        in_ptr, elems = ins
        if not elems:
            return
        begun, layout = InFlight(), self.layout
        size_bytes = elems * ELEM_BYTES[r.partial]
        room = self._taken(begun, size_bytes * len(layout.nodes))
        ptrs = [room + node * size_bytes for node in range(len(layout.nodes))]
        arriving = [
            self._receive(layout.local_rank, node, ptrs[node], size_bytes)
            for node in layout.others()
        ]
        mine = ptrs[layout.node]
        _native.combine_partials([in_ptr], r.dtype, mine, r.partial, elems, r.joining, 0)
        within = SUM if r.op == AVG else r.op
        self._inside(
            self._inner.all_reduce(mine, mine, elems, r.partial, within, r.factor, ONE_SHOT)
        )
        self._sent += [
            self._send(rail, node, mine, size_bytes)
            for rail in layout.rails_of(layout.rank)
            for node in layout.others()
            if rail < len(layout.nodes[node])
        ]
        for message in arriving:
            self._arrived(message)
        self._join(begun, ptrs, out, r)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _reduce_to_root(self, root: int, ins: Span, out: Span, r: Reducing) -> None:
        """Each node reduces to its rank on the root's rail; the root adds the arriving sums."""
        in_ptr, elems = ins
        begun, layout, form = InFlight(), self.layout, self._form(r, elems)
        quantized = form if isinstance(form, QuantizedForm) else None
        wide_bytes = elems * ELEM_BYTES[r.partial]
        size_bytes = wide_bytes if quantized is None else quantized.bytes_of(elems)
        rail, node = layout.local_rank_of(root), layout.node_of(root)
        at = rail % len(layout.node_ranks)
        receives = layout.local_rank == at
        ptrs = [0] * len(layout.nodes)
        if receives:
            room = self._taken(begun, size_bytes * len(layout.nodes))
            ptrs = [room + each * size_bytes for each in range(len(layout.nodes))]
        arriving = []
        if layout.rank == root and elems:
            arriving = [
                self._receive(rail, each, ptrs[each], size_bytes) for each in layout.others()
            ]
        mine = wide = ptrs[layout.node]
        if quantized is not None and receives:
            wide = self._taken(begun, wide_bytes)
        self._inside(self._inner.reduce_partial(in_ptr, wide, elems, r.dtype, r.op, r.factor, at))
        if quantized is not None and receives:
            quantized.write(wide, mine, elems)
        if receives and layout.node != node and elems:
            self._sent.append(self._send(rail, node, mine, size_bytes))
        for message in arriving:
            self._arrived(message)
        if layout.rank == root and quantized is not None:
            quantized.finish(ptrs, out.ptr, r.dtype, elems, self._world if r.op == AVG else 0)
        elif layout.rank == root:
            self._join(begun, ptrs, out, r)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _broadcast(self, whole: Span, root: int) -> None:
        """Passes segments from node to node along the root's rail; each node's ranks share them."""
        layout, size = self.layout, len(self.layout.nodes)
        rail, node = layout.local_rank_of(root), layout.node_of(root)
        at = rail % len(layout.node_ranks)
        distance = (layout.node - node) % size
        before, after = (layout.node - 1) % size, (layout.node + 1) % size
        segments = [whole.slice(*s, 1) for s in self._segments(whole.elems, 1, 1)]
        relays = layout.local_rank == at
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
            self._inside(self._inner.broadcast(segment.ptr, segment.elems, self._called.dtype, at))

    def _gather_to(self, root: int, in_ptr: int, size_bytes: int, out_ptrs: Sequence[int]) -> None:
        begun, layout = InFlight(), self.layout
        rail, node = layout.local_rank_of(root), layout.node_of(root)
        at = rail % len(layout.node_ranks)
        collects = layout.local_rank == at
        ptrs: list[int] = []
        if layout.rank == root:
            ptrs = [out_ptrs[rank] for rank in layout.node_ranks]
        elif collects:
            room = self._taken(begun, size_bytes * len(layout.node_ranks))
            ptrs = [room + local_rank * size_bytes for local_rank in range(len(layout.node_ranks))]
        arriving = [
            self._receive(rail, each, out_ptrs[rank], size_bytes)
            for each in (layout.others() if layout.rank == root and size_bytes else ())
            for rank in layout.nodes[each]
        ]
        self._inside(self._inner.gather(in_ptr, size_bytes, ptrs, self._called.dtype, at))
        if collects and layout.node != node and size_bytes:
            self._sent += [self._send(rail, node, ptr, size_bytes) for ptr in ptrs]
        for message in arriving:
            self._arrived(message)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _scatter_from(
        self, root: int, in_ptrs: Sequence[int], out_ptr: int, size_bytes: int
    ) -> None:
        begun, layout = InFlight(), self.layout
        rail, node = layout.local_rank_of(root), layout.node_of(root)
        at = rail % len(layout.node_ranks)
        ptrs: list[int] = []
        if layout.rank == root:
            ptrs = [in_ptrs[rank] for rank in layout.node_ranks]
            self._sent += [
                self._send(rail, each, in_ptrs[rank], size_bytes)
                for each in (layout.others() if size_bytes else ())
                for rank in layout.nodes[each]
            ]
        elif layout.local_rank == at:
            room = self._taken(begun, size_bytes * len(layout.node_ranks))
            ptrs = [room + local_rank * size_bytes for local_rank in range(len(layout.node_ranks))]
            if layout.node != node and size_bytes:
                for message in [self._receive(rail, node, ptr, size_bytes) for ptr in ptrs]:
                    self._arrived(message)
        self._inside(self._inner.scatter(ptrs, out_ptr, size_bytes, self._called.dtype, at))
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _exchange(self, ins: list[Span], outs: list[Span]) -> None:
        """Sends data for another node's rank from the local rank on the receiver's rail.

        First this local rank collects the data of all ranks of its node, so ranks send messages
        only to their rail peers. Each message has the bytes of one rank of the node, and arrives
        directly at its place in the output.
        """
        begun, layout = InFlight(), self.layout
        sizes = self._sizes_by_sender([span.elems for span in ins])
        self._compare_sizes(sizes, [span.elems for span in outs])
        arriving = [
            self._receive(layout.local_rank, node, *outs[rank])
            for node in layout.others()
            for rank in layout.nodes[node]
            if outs[rank].elems
        ]
        node_ranks = layout.node_ranks
        self._inside(
            self._inner.all_to_all(
                [ins[rank].ptr for rank in node_ranks],
                [ins[rank].elems for rank in node_ranks],
                [outs[rank].ptr for rank in node_ranks],
                [outs[rank].elems for rank in node_ranks],
                self._called.dtype,
            )
        )
        for node in layout.others():
            for first in range(0, len(layout.nodes[node]), len(node_ranks)):
                self._collect_for(node, first, ins, sizes, begun)
        for message in arriving:
            self._arrived(message)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _collect_for(
        self, node: int, first: int, ins: list[Span], sizes: list[list[int]], begun: InFlight
    ) -> None:
        """Collects and sends the data for the ranks of ``node`` from local rank ``first`` on."""
        layout = self.layout
        targets = layout.nodes[node][first : first + len(layout.node_ranks)]
        outgoing = [ins[rank] for rank in targets]
        outgoing += [Span(ins[0].ptr, 0)] * (len(layout.node_ranks) - len(targets))
        rail = first + layout.local_rank
        incoming = [Span(0, 0)] * len(layout.node_ranks)
        if layout.local_rank < len(targets):
            target = targets[layout.local_rank]
            incoming = [Span(0, size[target]) for size in sizes]
            room = self._taken(begun, sum(span.elems for span in incoming))
            for local_rank, span in enumerate(incoming):
                incoming[local_rank] = Span(room, span.elems)
                room += span.elems
        self._inside(
            self._inner.all_to_all(
                [span.ptr for span in outgoing],
                [span.elems for span in outgoing],
                [span.ptr for span in incoming],
                [span.elems for span in incoming],
                self._called.dtype,
            )
        )
        self._sent += [self._send(rail, node, *span) for span in incoming if span.elems]
