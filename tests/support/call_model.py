# SPDX-License-Identifier: Apache-2.0
"""Predicts where each rank waits after one rank fails, from the steps of calls in kernels/include.

The calls are staged native calls on the host. The events of a rank do not depend on the order in
which ranks arrive, so the schedule alone decides where each rank stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ringcomm import CommOptions
from tests.support.fault_schedules import Call, Schedule

ELEM_BYTES = 4
LINE_BYTES = 64
SLOTS = CommOptions().slots
# The values of kOneHopBytes (kernels/host/comm.cpp), kLookahead and kZeroCopyMinBytes (endpoint.h).
ONE_HOP_BYTES, LOOKAHEAD, ZERO_COPY_BYTES = 32768, 1, 16384
PAIR, SHARED = "pair", "shared"
PUBLISH, ACKNOWLEDGE, AWAIT_READY, AWAIT_CONSUMED = range(4)


@dataclass(frozen=True)
class Step:
    """A step of a rank: publishes, acknowledges or awaits an item of a stream to or from a peer."""

    what: int
    stream: str
    peer: int
    item: int


Steps = Iterator[Step]


@dataclass(frozen=True)
class WaitPoint:
    """Where a rank waits: the peer that it waits for, and the item of the call."""

    peer: int
    item: int


def _items(size_bytes: int, item_bytes: int) -> int:
    return max(-(-size_bytes // item_bytes), 1)


@dataclass(frozen=True)
class Rank:
    """A rank of a world that cuts buffers into segments."""

    rank: int
    world: int
    segment_bytes: int

    @property
    def peers(self) -> list[int]:
        return [(self.rank + distance) % self.world for distance in range(1, self.world)]

    def pieces(self, total_bytes: int, chunk_bytes: int) -> list[int]:
        """Returns the number of segments of each rank's chunk."""
        sizes = [
            min(max(total_bytes - rank * chunk_bytes, 0), chunk_bytes) for rank in range(self.world)
        ]
        return [_items(size, self.segment_bytes) for size in sizes]

    def _shares(self, item: int) -> Steps:
        yield from (Step(AWAIT_CONSUMED, SHARED, peer, item) for peer in self.peers)

    def _shared(self, item: int) -> Steps:
        yield from (Step(PUBLISH, SHARED, peer, item) for peer in self.peers)

    def _collects(self, item: int, pieces: list[int]) -> Steps:
        for peer in self.peers:
            if item < pieces[peer]:
                yield Step(AWAIT_READY, SHARED, peer, item)
                yield Step(ACKNOWLEDGE, SHARED, peer, item)

    def one_hop(self) -> Steps:
        """all_reduce_one_hop."""
        yield from self._shares(0)
        yield from self._shared(0)
        yield from (Step(AWAIT_READY, SHARED, peer, 0) for peer in self.peers)
        yield from (Step(ACKNOWLEDGE, SHARED, peer, 0) for peer in self.peers)

    def two_hops(self, pieces: list[int]) -> Steps:
        """all_reduce_two_hops."""
        for turn in range(pieces[0] + 2 * LOOKAHEAD):
            for peer in self.peers:
                if turn < pieces[peer]:
                    yield Step(AWAIT_CONSUMED, PAIR, peer, turn)
                    yield Step(PUBLISH, PAIR, peer, turn)
            mine = turn - LOOKAHEAD
            if 0 <= mine < pieces[self.rank]:
                yield from (Step(AWAIT_READY, PAIR, peer, mine) for peer in self.peers)
                yield from self._shares(mine)
                yield from (Step(ACKNOWLEDGE, PAIR, peer, mine) for peer in self.peers)
                yield from self._shared(mine)
            if turn >= 2 * LOOKAHEAD:
                yield from self._collects(turn - 2 * LOOKAHEAD, pieces)

    def gather(self, pieces: list[int]) -> Steps:
        """Returns the steps of share_one_shot on all ranks."""
        for turn in range(max(pieces) + LOOKAHEAD):
            if turn < pieces[self.rank]:
                yield from self._shares(turn)
                yield from self._shared(turn)
            if turn >= LOOKAHEAD:
                yield from self._collects(turn - LOOKAHEAD, pieces)

    def scatter(self, pieces: list[int]) -> Steps:
        """Returns the steps of reduce_scatter_one_shot with chunks of equal size."""
        for turn in range(pieces[0] + LOOKAHEAD):
            for peer in self.peers if turn < pieces[0] else ():
                yield Step(AWAIT_CONSUMED, PAIR, peer, turn)
                yield Step(PUBLISH, PAIR, peer, turn)
            if turn >= LOOKAHEAD:
                mine = turn - LOOKAHEAD
                yield from (Step(AWAIT_READY, PAIR, peer, mine) for peer in self.peers)
                yield from (Step(ACKNOWLEDGE, PAIR, peer, mine) for peer in self.peers)

    def ring(self, rounds: int, gathers: bool) -> Steps:
        """Steps of reduce_scatter_ring, or of all_gather_ring, which awaits its slot last."""
        hops = self.world - 1
        ahead, behind = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        for turn in range(rounds):
            for hop in range(hops + 1):
                item = turn * hops + hop
                slot = [Step(AWAIT_CONSUMED, PAIR, ahead, item)] if hop < hops else []
                data = [Step(AWAIT_READY, PAIR, behind, item - 1)] if hop else []
                yield from data + slot if gathers else slot + data
                if hop < hops:
                    yield Step(PUBLISH, PAIR, ahead, item)
                if hop:
                    yield Step(ACKNOWLEDGE, PAIR, behind, item - 1)

    def phases(self, call: Call) -> list[Steps]:
        """Returns the parts of a call; each part counts its items from 0."""
        ring = call.algorithm == "ring"
        size_bytes = call.elems * ELEM_BYTES
        if call.kind != "all_reduce":
            pieces = self.pieces(size_bytes * self.world, size_bytes)
            gathers = call.kind == "all_gather_into_tensor"
            if ring:
                return [self.ring(pieces[0], gathers)]
            return [self.gather(pieces) if gathers else self.scatter(pieces)]
        share = _items(size_bytes, self.world)
        pieces = self.pieces(size_bytes, _items(share, LINE_BYTES) * LINE_BYTES)
        if ring:
            return [self.ring(pieces[0], gathers) for gathers in (False, True)]
        one_hop = size_bytes <= min(ONE_HOP_BYTES, self.segment_bytes)
        return [self.one_hop() if one_hop else self.two_hops(pieces)]


def is_modelled(call: Call) -> bool:
    """True if :func:`wait_points` knows the steps of the call."""
    return (
        call.kind in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        and call.kernels == "native"
        and not (call.heap and call.elems * ELEM_BYTES >= ZERO_COPY_BYTES)
    )


def steps_of(rank: Rank, call: Call) -> list[Step]:
    """Returns all steps of one call; ``_native.fault_passages()`` counts the same number."""
    return [step for phase in rank.phases(call) for step in phase]


@dataclass
class _Walk:
    """One rank's progress through calls. All ranks share ``words``: how many items were published
    or acknowledged, by kind of step, stream, writer and reader.
    """

    rank: Rank
    words: Counter[tuple[int, str, int, int]]
    ways: Iterator[tuple[Step, int]]
    now: tuple[Step, int] | None = None

    def goes_on(self) -> bool:
        """Takes steps until one must wait; returns whether it took any."""
        moved = False
        while self.now is not None and self._takes(*self.now):
            self.now = next(self.ways, None)
            moved = True
        return moved

    def _takes(self, step: Step, want: int) -> bool:
        me, peer = self.rank.rank, step.peer
        if step.what in (PUBLISH, ACKNOWLEDGE):
            self.words[step.what, step.stream, me, peer] += 1
            return True
        told = PUBLISH if step.what == AWAIT_READY else ACKNOWLEDGE
        return self.words[told, step.stream, peer, me] >= want


def _ways(rank: Rank, calls: Sequence[Call]) -> Iterator[tuple[Step, int]]:
    """Yields the steps of the calls; each waiting step with the count that its word must reach."""
    done: Counter[tuple[int, str, int]] = Counter()
    for phase in (phase for call in calls for phase in rank.phases(call)):
        base = done.copy()
        for step in phase:
            want = step.item + 1
            if step.what == AWAIT_READY:
                want += base[ACKNOWLEDGE, step.stream, step.peer]
            elif step.what == AWAIT_CONSUMED:
                want += base[PUBLISH, step.stream, step.peer] - SLOTS
            else:
                done[step.what, step.stream, step.peer] += 1
            yield step, want


def wait_points(schedule: Schedule, calls: Sequence[Call], before: int) -> dict[int, WaitPoint]:
    """Returns where the survivors of a fatal fault stop waiting.

    Args:
        schedule: the world size, the segment size and the rank that fails.
        calls: all calls of the communicator, in order.
        before: how many steps the failing rank takes before its fault, counted over all calls.
    """
    words: Counter[tuple[int, str, int, int]] = Counter()
    walks = []
    for number in range(schedule.world_size):
        rank = Rank(number, schedule.world_size, schedule.segment_bytes)
        ways = _ways(rank, calls)
        if number == schedule.fault.rank:
            ways = islice(ways, before)
        walks.append(_Walk(rank, words, ways, next(ways, None)))
    while any(walk.goes_on() for walk in walks):
        pass
    return {
        walk.rank.rank: WaitPoint(walk.now[0].peer, walk.now[0].item) for walk in walks if walk.now
    }
