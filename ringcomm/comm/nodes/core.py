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
reduced in the node, and the one before is added and shared. That is said of direct rails;
:mod:`.schedules` has others, which add partial sums on the way.
"""

from __future__ import annotations

from ringcomm import _native
from ringcomm.comm.nodes.calls import DIRECT
from ringcomm.comm.nodes.sums import ELEM_BYTES, InFlight, Span, SumsOverNodes
from ringcomm.comm.nodes.wires import AVG, SUM, CodedForm, Reducing

# A choice, by arithmetic: at 1 Gbit/s 8 KiB take 65 us, which is less than another hop on TCP.
ONE_HOP_BYTES = 8 << 10


class NodesCore(SumsOverNodes):
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
        form = self._form(Reducing(dtype, op, factor), elems * self._world)
        head = (size * self._world, dtype, op, -1)
        return self._run(
            "reduce_scatter", head, algo, lambda: self._reduce_spans(spans, out_ptr, form, dtype)
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
        form = self._form(Reducing(dtype, op, factor), sum(elems))
        head = (sum(elems) * ELEM_BYTES[dtype], dtype, op, -1)
        return self._run(
            "reduce_scatter", head, DIRECT, lambda: self._reduce_spans(spans, out_ptr, form, dtype)
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
        with self.turn:
            return self.barrier()

    def barrier(self) -> int:
        def body() -> None:
            # A header comes from a rank whose node has met: whoever has those of its rail peers
            # knows that all ranks are there.
            self._inside(self._inner.barrier())
            self._send_headers()
            self._check_headers()

        return self._run("barrier", (0, -1, -1, -1), DIRECT, body, headers=False)

    # ---- how each is done -----------------------------------------------------------------------

    def _reduce_in_one_hop(self, in_ptr: int, out_ptr: int, elems: int, r: Reducing) -> None:
        if not elems:
            return
        begun, places = InFlight(), self.places
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
        self._join(begun, ptrs, Span(out_ptr, elems), r)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _reduce_to(self, root: int, in_ptr: int, out_ptr: int, elems: int, r: Reducing) -> None:
        """Each node reduces at the rail of the root, which adds what arrives."""
        begun, places, form = InFlight(), self.places, self._form(r, elems)
        coded = form if isinstance(form, CodedForm) else None
        wide_bytes = elems * ELEM_BYTES[r.partial]
        size_bytes = wide_bytes if coded is None else coded.bytes_of(elems)
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
        mine = wide = ptrs[places.node]
        if coded is not None and receives:
            wide = self._taken(begun, wide_bytes)
        self._inside(self._inner.reduce_partial(in_ptr, wide, elems, r.dtype, r.op, r.factor, at))
        if coded is not None and receives:
            coded.write(wide, mine, elems)
        if receives and places.node != node and elems:
            self._sent.append(self._send(rail, node, mine, size_bytes))
        for message in arriving:
            self._arrived(message)
        if places.rank == root and coded is not None:
            coded.finish(ptrs, out_ptr, r.dtype, elems, self._world if r.op == AVG else 0)
        elif places.rank == root:
            self._join(begun, ptrs, Span(out_ptr, elems), r)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

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
            self._inside(self._inner.broadcast(segment.ptr, segment.elems, self._called.dtype, at))

    def _gather_to(self, root: int, in_ptr: int, size_bytes: int, out_ptrs: list[int]) -> None:
        begun, places = InFlight(), self.places
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
        self._inside(self._inner.gather(in_ptr, size_bytes, ptrs, self._called.dtype, at))
        if collects and places.node != node and size_bytes:
            self._sent += [self._send(rail, node, ptr, size_bytes) for ptr in ptrs]
        for message in arriving:
            self._arrived(message)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _scatter_from(self, root: int, in_ptrs: list[int], out_ptr: int, size_bytes: int) -> None:
        begun, places = InFlight(), self.places
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
        self._inside(self._inner.scatter(ptrs, out_ptr, size_bytes, self._called.dtype, at))
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _exchange(self, ins: list[Span], outs: list[Span]) -> None:
        """Collects in each node what goes to one rank elsewhere, and sends it on that rank's rail.

        So ranks have messages for their rail peers alone, each of one sender's bytes, which arrive
        where they belong.
        """
        begun, places = InFlight(), self.places
        sizes = self._sizes_of_mates([span.elems for span in ins])
        self._compare_sizes(sizes, [span.elems for span in outs])
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
                self._called.dtype,
            )
        )
        for node in places.others():
            for first in range(0, len(places.nodes[node]), len(mates)):
                self._collect_for(node, first, ins, sizes, begun)
        for message in arriving:
            self._arrived(message)
        self._settle(self._sent)
        self._scratch.give(begun.scratch)

    def _collect_for(
        self, node: int, first: int, ins: list[Span], sizes: list[list[int]], begun: InFlight
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
                self._called.dtype,
            )
        )
        self._sent += [self._send(rail, node, *span) for span in incoming if span.elems]
