"""The rounds in which the ranks of a rail exchange what they sum or gather, as plain data.

A rail joins a rank of each of N nodes. A *reduction* begins with a partial sum of every node for
every node, its *target*; in each round a rank sends partial sums away and adds those that it
receives to its own, and in the end it has the sum for its own node. Every partial sum is sent once.
A *gathering* is the same backwards: what was sent arrives, and nothing is added.

    schedule   rounds   messages of a rank     terms of a sum   buffers of B bytes: a rank sends
    direct     1        N - 1                  N                B (N-1)/N
    levels     2        a + b - 2, a b = N     a, then b        B (N-1)/N
    ring       N - 1    N - 1                  2                B (N-1)/N

Levels: nodes a block, [j a, (j+1) a), exchange first what goes to their likes in all b blocks; then
nodes at the same place of their blocks exchange the sums. The first round has most of the bytes, so
that they stay among neighbours. Ring: the partial sum of a target starts at the node after it, goes
from node to node, and grows at each.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import NamedTuple

# From so many nodes on "auto" means levels. Predicted (docs/scaling.md, "Direct, ring or levels"):
# with 1 us a message levels win from 32 nodes on, with 0.1 us from 256 on.
LEVELS_FROM_NODES = 32


class Exchange(NamedTuple):
    """A message of a round: the other node, and the nodes whose parts it carries, in order."""

    peer: int
    targets: tuple[int, ...]


class Round(NamedTuple):
    """The messages that a rank sends, and those that it receives before the next round."""

    sends: tuple[Exchange, ...]
    receives: tuple[Exchange, ...]


def chosen(asked: str, nodes: int) -> str:
    """Returns the schedule that ``CommOptions.rails`` means for so many nodes."""
    if asked != "auto":
        return asked
    return "levels" if nodes >= LEVELS_FROM_NODES else "direct"


def levels_of(nodes: int) -> tuple[int, int]:
    """Returns (a, b) with a b = ``nodes`` and the fewest messages; a prime number has a = 1."""
    near = next(each for each in range(isqrt(nodes), 0, -1) if nodes % each == 0)
    return near, nodes // near


@lru_cache(maxsize=64)
def reduction(name: str, nodes: int, node: int) -> tuple[Round, ...]:
    """Returns the rounds of a reduction for the rank on ``node``.

    Args:
        name: "direct", "levels" or "ring".
        nodes: N, at least 2.
        node: from 0 on.
    """
    if name == "ring":
        return tuple(
            Round(
                (Exchange((node + 1) % nodes, ((node - 1 - turn) % nodes,)),),
                (Exchange((node - 1) % nodes, ((node - 2 - turn) % nodes,)),),
            )
            for turn in range(nodes - 1)
        )
    near = 1 if name == "direct" else levels_of(nodes)[0]
    first, place = node - node % near, node % near
    alike = tuple(range(place, nodes, near))
    rounds = []
    if near > 1:
        others = [(place + distance) % near for distance in range(1, near)]
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
    """Returns the rounds of a gathering: those of the reduction backwards."""
    return tuple(
        Round(each.receives, each.sends) for each in reversed(reduction(name, nodes, node))
    )
