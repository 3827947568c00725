"""Ring orders over a few devices: edge-disjoint Hamiltonian cycles, and the best single one.

Pure arithmetic over matrices, so that it is tested without a machine. A *ring* is an order of all
devices; the one at place i sends to the one at place i + 1, the last to the first. An NVLink is
full duplex: a ring takes one link of every hop in its own direction only, so that its reverse
finds the links' other direction free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

__all__ = ["SEARCHED_DEVICES", "best_ring", "disjoint_rings"]

# (8 - 1)! orders can be looked at one by one; no machine without a switch has more GPUs.
SEARCHED_DEVICES = 8
# Steps of one search: a fraction of a second. Every machine in the tests needs far fewer.
SEARCH_STEPS = 3000

Ring = tuple[int, ...]
Matrix = Sequence[Sequence[float]]


def disjoint_rings(links: Sequence[Sequence[int]]) -> tuple[tuple[Ring, ...], int]:
    """As many rings as fit at once when each takes one link of every hop.

    Rings are exact: no larger number fits, unless the search ran out of steps (which no known
    machine comes near). A ring that is wanted more than once is repeated, and what all have in
    common is divided out: four links between every two of three devices make two rings, one each
    way, with four links per hop.

    Args:
        links: symmetric [n, n] numbers of links, n from 2 to ``SEARCHED_DEVICES``.

    Returns:
        Rings that begin with device 0, none if no ring exists; and the links that each has of
        every hop.
    """
    count = len(links)
    if count == 2:
        return (((0, 1),), links[0][1]) if links[0][1] else ((), 0)
    bound = _smallest_cut(links)
    search = _Search(links, directed=False)
    there = search.run(bound // 2)
    rings = [way for ring in there for way in (ring, (0, *reversed(ring[1:])))]
    if len(rings) < bound:
        # Rings that are not each other's reverse use an odd number of links, if anything does.
        search = _Search(links, directed=True)
        one_way = search.run(bound)
        rings = one_way if len(one_way) > len(rings) else rings
    repeats = Counter(rings)
    common = math.gcd(*repeats.values())
    return tuple(ring for ring in repeats for _ in range(repeats[ring] // common)), common


def best_ring(quality: Matrix) -> Ring:
    """The ring whose worst hop is best; among equals, the one with the fewest such hops, and so on.

    Args:
        quality: symmetric [n, n], larger is better, n from 1 to ``SEARCHED_DEVICES``.
    """
    orders = _orders(len(quality), directed=False)
    return max(orders, key=lambda ring: sorted(quality[a][b] for a, b in hops(ring)))


def hops(ring: Ring) -> Iterator[tuple[int, int]]:
    """Sender and receiver of every hop of a ring."""
    return ((ring[place - 1], ring[place]) for place in range(len(ring)))


def _orders(count: int, directed: bool) -> Iterator[Ring]:
    for rest in permutations(range(1, count)):
        if directed or count < 3 or rest[0] < rest[-1]:
            yield (0, *rest)


def _smallest_cut(links: Sequence[Sequence[int]]) -> int:
    """Links out of the set of devices that has the fewest: every ring leaves every set."""
    everyone = set(range(len(links)))
    sets = (
        {0, *more} for size in range(len(links) - 1) for more in combinations(everyone - {0}, size)
    )
    return min(sum(links[a][b] for a in inside for b in everyone - inside) for inside in sets)


class _Search:
    """Depth-first search for rings that together take no link twice."""

    def __init__(self, links: Sequence[Sequence[int]], directed: bool) -> None:
        count = len(links)
        pairs = permutations(range(count), 2) if directed else combinations(range(count), 2)
        self._edges = [(a, b) for a, b in pairs if links[a][b]]
        place = {edge: index for index, edge in enumerate(self._edges)}
        if not directed:
            place |= {(b, a): index for (a, b), index in place.items()}
        self._left = [links[a][b] for a, b in self._edges]
        self._per_device = 1 if directed else 2
        self._rings: list[tuple[Ring, int, list[int]]] = []
        for ring in _orders(count, directed):
            taken = [place[hop] for hop in hops(ring) if hop in place]
            if len(taken) == count:
                self._rings.append((ring, sum(1 << edge for edge in taken), taken))
        self._steps = 0
        self._best: list[Ring] = []

    def run(self, bound: int) -> list[Ring]:
        """The most rings found, at most ``bound``."""
        for wanted in range(bound, 0, -1):
            if len(self._best) >= wanted or self._steps >= SEARCH_STEPS:
                break
            self._extend([], self._rings, wanted)
        return self._best

    def _extend(
        self, taken: list[Ring], candidates: list[tuple[Ring, int, list[int]]], wanted: int
    ) -> bool:
        if len(taken) > len(self._best):
            self._best = list(taken)
        if len(taken) == wanted:
            return True
        self._steps += 1
        free = sum(1 << edge for edge, left in enumerate(self._left) if left)
        candidates = [each for each in candidates if not each[1] & ~free]
        tight = self._tight_edge(candidates, wanted - len(taken))
        branches = candidates if tight is None else [c for c in candidates if c[1] >> tight & 1]
        for number, (ring, _, edges) in enumerate(branches):
            if self._steps >= SEARCH_STEPS:
                return False
            for edge in edges:
                self._left[edge] -= 1
            # Sets of rings, not sequences: what an earlier branch tried is not tried again.
            rest = candidates if tight is not None else candidates[number:]
            if self._extend([*taken, ring], rest, wanted):
                return True
            for edge in edges:
                self._left[edge] += 1
        return False

    def _tight_edge(
        self, candidates: list[tuple[Ring, int, list[int]]], missing: int
    ) -> int | None:
        """An edge that must be used, because its device has no link to spare; of these, the one
        that the fewest candidates use."""
        spare: Counter[int] = Counter()
        for (a, b), left in zip(self._edges, self._left, strict=True):
            spare[a] += left
            spare[b] += left if self._per_device == 2 else 0
        no_spare = {device for device in spare if spare[device] == missing * self._per_device}
        users = {
            edge: sum(mask >> edge & 1 for _, mask, _ in candidates)
            for edge, (a, b) in enumerate(self._edges)
            if self._left[edge] and (a in no_spare or (self._per_device == 2 and b in no_spare))
        }
        return min(users, key=lambda edge: (users[edge], edge), default=None)
