"""The places of ranks on nodes, and the rails between nodes.

A *node* is a set of ranks that can map each other's memory. A rank's *place* is its number among
the ranks of its node. *Rail* p joins one rank of each node: the one at place p, or, on a node of
fewer ranks, the one at place p modulo their number. So each rank is on a rail, and where all nodes
have equally many ranks it is on exactly one, with N - 1 peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ringcomm.errors import RendezvousError


@dataclass(frozen=True)
class Places:
    """The nodes of a communicator.

    Attributes:
        nodes: the ranks of each node, ascending; the nodes are in the order of their first ranks.
        rank: this rank.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def _found(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, place)
            for node, ranks in enumerate(self.nodes)
            for place, rank in enumerate(ranks)
        }

    def node_of(self, rank: int) -> int:
        """Returns the number of a rank's node."""
        return self._found[rank][0]

    def place_of(self, rank: int) -> int:
        """Returns a rank's number among the ranks of its node."""
        return self._found[rank][1]

    @cached_property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of(self.rank)

    @cached_property
    def place(self) -> int:
        """This rank's number among the ranks of its node."""
        return self.place_of(self.rank)

    @cached_property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this rank's node, this one among them."""
        return self.nodes[self.node]

    @cached_property
    def num_rails(self) -> int:
        """The number of rails, which is that of the ranks of the largest node."""
        return max(map(len, self.nodes))

    @property
    def even(self) -> bool:
        """True if all nodes have equally many ranks."""
        return all(len(ranks) == len(self.nodes[0]) for ranks in self.nodes)

    def rail(self, number: int) -> tuple[int, ...]:
        """Returns the ranks of a rail, by node."""
        return tuple(ranks[number % len(ranks)] for ranks in self.nodes)

    def rails_of(self, rank: int) -> list[int]:
        """Returns the numbers of the rails that a rank is on."""
        node, place = self._found[rank]
        return list(range(place, self.num_rails, len(self.nodes[node])))

    @cached_property
    def _shard_indices(self) -> dict[int, int]:
        in_order = sorted(self._found, key=lambda rank: self._found[rank][::-1])
        return {rank: index for index, rank in enumerate(in_order)}

    def shard_index_of(self, rank: int) -> int:
        """Returns the number of the chunk that a rank owns of state: by place, and then by node.

        Where nodes have equal sizes the chunks of one rail lie side by side, so that together they
        are a chunk of a node's.
        """
        return self._shard_indices[rank]

    def others(self) -> Iterator[int]:
        """Yields the other nodes' numbers, from the one after this rank's node on."""
        for distance in range(1, len(self.nodes)):
            yield (self.node + distance) % len(self.nodes)

    def named(self, rank: int) -> str:
        """Returns a rank in the words of messages."""
        return f"rank {rank} (node {self.node_of(rank)})"


def divide(
    rank: int,
    machines: Sequence[object],
    unreached: Sequence[Mapping[int, str]],
    operation: str,
) -> Places:
    """Divides ranks into nodes; all ranks do it from the same facts.

    Args:
        rank: this one.
        machines: by rank, what only ranks that may map each other's memory have in common.
        unreached: by rank, the ranks of its machine whose memory it could not map, and why.
        operation: named in errors.

    Raises:
        RendezvousError: of three ranks two can map the third one's memory, but not each other's, so
            they are neither one node nor several.
    """
    nodes: list[list[int]] = []
    for each, machine in enumerate(machines):
        for node in nodes:
            if machines[node[0]] == machine and not _apart(each, node[0], unreached):
                node.append(each)
                break
        else:
            nodes.append([each])
    for node in nodes:
        for first in node:
            for second in node:
                if _apart(first, second, unreached):
                    raise RendezvousError(
                        f"{operation}: ranks {first} and {second} cannot map each other's memory, "
                        f"but both can map that of rank {node[0]}: "
                        f"{unreached[first].get(second) or unreached[second].get(first)}. Give the "
                        "ranks of each node a RINGCOMM_NODE_ID of their own, or let all of a "
                        "machine's ranks run as one user in one container"
                    )
    return Places(tuple(map(tuple, nodes)), rank)


def _apart(first: int, second: int, unreached: Sequence[Mapping[int, str]]) -> bool:
    return second in unreached[first] or first in unreached[second]
