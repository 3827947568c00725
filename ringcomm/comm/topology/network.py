"""Networks between nodes: their hops, their bisection, and how far traffic shares their links.

A node injects into its network at one rate, whatever the network: a torus of d dimensions has 2 d
links a node, each of 1 / (2 d) of that rate. So networks are compared at equal injection. Routes
are shortest ones, dimension by dimension on a torus; switches spread their traffic evenly.

Sources: fat tree: Leiserson, "Fat-trees: universal networks for hardware-efficient
supercomputing" (1985), and Al-Fares et al., "A scalable, commodity data center network
architecture" (SIGCOMM'08) for the k-ary tree of equal switches; torus: Dally and Towles,
"Principles and Practices of Interconnection Networks" (2004), chapter 5, and Jouppi et al., "TPU
v4: an optically reconfigurable supercomputer for machine learning" (ISCA'23).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringcomm.errors import ArgumentError

__all__ = ["NETWORKS", "Network", "cubic_dims", "torus_network"]

NETWORKS = ("switch", "fat-tree", "torus", "ring")
TORUS_DIMS = 3
# Half the ports of a switch of 64, which is what switches of 400 Gbit/s ports have.
LEAF_NODES = 32


def cubic_dims(nodes: int, dims: int = TORUS_DIMS) -> tuple[int, ...]:
    """The factors of ``nodes`` that are closest to each other, largest first.

    A prime gives (prime, 1, 1): a torus of one dimension.
    """
    if dims == 1:
        return (nodes,)
    root = round(nodes ** (1 / dims))
    # The smallest factor is at most the root; the nearest one below leaves the rest most cubic.
    least = next(size for size in range(root + 1, 0, -1) if not nodes % size)
    least = least if least**dims <= nodes else _factor_below(nodes, least)
    return (*cubic_dims(nodes // least, dims - 1), least)


def _factor_below(nodes: int, limit: int) -> int:
    return next(size for size in range(limit - 1, 0, -1) if not nodes % size)


@dataclass(frozen=True)
class Network:
    """One network of ``nodes`` nodes.

    Attributes:
        kind: "switch": one switch without contention. "fat-tree": switches in tiers. "torus": links
            to the neighbours in each dimension. "ring": a torus of one dimension.
        nodes: that it joins, in the order of their places: neighbours have numbers that follow.
        dims: of a torus: nodes in each dimension, the first one varies fastest; () chooses
            :func:`cubic_dims`.
        leaf_nodes: of a fat tree: nodes at one leaf switch, half its ports.
        taper: of a fat tree: rate into a leaf over rate out of it; 1 is a full bisection.

    Raises:
        ArgumentError: there is no such network.
    """

    kind: str
    nodes: int
    dims: tuple[int, ...] = ()
    leaf_nodes: int = LEAF_NODES
    taper: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in NETWORKS:
            raise ArgumentError(f"network: expected one of {', '.join(NETWORKS)}, got {self.kind}")
        if self.nodes < 2:
            raise ArgumentError(f"network: expected at least 2 nodes, got {self.nodes}")
        if self.leaf_nodes < 2:
            raise ArgumentError(f"network: expected at least 2 leaf nodes, got {self.leaf_nodes}")
        if not 1 <= self.taper < math.inf:
            raise ArgumentError(f"network: expected a taper of at least 1, got {self.taper:g}")
        if self.dims and self.kind != "torus":
            raise ArgumentError(f"network: expected dimensions of a torus only, got {self.kind}")
        if self.dims and math.prod(self.dims) != self.nodes:
            shown = " x ".join(map(str, self.dims))
            raise ArgumentError(f"network: expected a torus of {self.nodes} nodes, got {shown}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes in each dimension of a torus or ring, those of one node left out; else ()."""
        if self.kind == "ring":
            return (self.nodes,)
        if self.kind != "torus":
            return ()
        return tuple(size for size in self.dims or cubic_dims(self.nodes) if size > 1)

    @property
    def tiers(self) -> int:
        """Tiers of switches; 0 without any. t tiers join 2 leaf^t nodes, one tier leaf nodes."""
        if self.kind == "switch":
            return 1
        if self.kind != "fat-tree":
            return 0
        tiers = 1 if self.nodes <= self.leaf_nodes else 2
        while tiers > 1 and 2 * self.leaf_nodes**tiers < self.nodes:
            tiers += 1
        return tiers

    @property
    def diameter(self) -> int:
        """The most links between two nodes: 2 a tier, half of each dimension of a torus."""
        return 2 * self.tiers or sum(size // 2 for size in self.sizes)

    @property
    def mean_hops(self) -> float:
        """Links between two different nodes, over all pairs."""
        if self.sizes:
            return sum(map(_ring_hops, self.sizes)) * self.nodes / (self.nodes - 1)
        within, pairs, total = 1, self.nodes - 1, 0.0
        for tier in range(1, self.tiers + 1):
            reached = self.nodes if tier == self.tiers else min(self.nodes, self.leaf_nodes**tier)
            total += 2 * tier * (reached - within)
            within = reached
        return total / pairs

    @property
    def bisection(self) -> float:
        """The rate across the worst halving over that of one half's nodes, at most 1.

        A torus has 2 nodes / size links each way where its longest dimension is cut.
        """
        if self.sizes:
            return min(1.0, 2 / (len(self.sizes) * max(self.sizes)))
        return 1 / self.taper if self.tiers > 1 else 1.0

    def hops(self, distance: int) -> int:
        """Links between nodes that are ``distance`` numbers apart."""
        if self.sizes:
            return sum(_shorter(offset, size) for offset, size in self._offsets(distance))
        tier, reached = 1, self.leaf_nodes
        while tier < self.tiers and distance >= reached:
            tier, reached = tier + 1, reached * self.leaf_nodes
        return 2 * tier

    def shift_contention(self, distance: int) -> float:
        """How much longer than alone it takes if each node sends to the one ``distance`` after it.

        On a torus a node then sends on one link of each dimension, or on both where it is half way
        round. Carries from one dimension into the next are left out.
        """
        if self.sizes:
            links = 2 * len(self.sizes)
            loads = [
                links * _shorter(offset, size) / (2 if 2 * offset == size else 1)
                for offset, size in self._offsets(distance)
            ]
            return max(1.0, *loads)
        return self._tapered(min(distance, self.leaf_nodes) / self.leaf_nodes)

    def exchange_contention(self, count: int, stride: int = 1) -> float:
        """The same if the nodes of a group send equal parts to each other, in all groups at once.

        Args:
            count: nodes of a group.
            stride: between their numbers.
        """
        if not self.sizes:
            together = min(count, max(1, self.leaf_nodes // stride))
            return self._tapered((count - together) / (count - 1))
        # What a node sends is 1: of it each other node of the group gets 1 / (count - 1).
        links, scale = 2 * len(self.sizes), count / (count - 1)
        loads = [
            _ring_load(size) if span == size else _line_load(span)
            for span, size in self._spans(count, stride)
        ]
        return max(1.0, *(links * scale * load for load in loads))

    def exchange_hops(self, count: int, stride: int = 1) -> int:
        """The most links between two nodes of such a group."""
        if not self.sizes:
            return self.hops(stride * (count - 1))
        spans = self._spans(count, stride)
        return sum(size // 2 if span == size else span - 1 for span, size in spans)

    def _spans(self, count: int, stride: int) -> list[tuple[int, int]]:
        """Returns, for each dimension, over how many of its nodes a group reaches, and its size."""
        spans, below = [], 1
        for size in self.sizes:
            reached = min(size, -(-stride * count // below))
            spans.append((1 if stride >= below * size else reached, size))
            below *= size
        return spans

    def _tapered(self, leaving: float) -> float:
        return max(1.0, leaving * self.taper) if self.tiers > 1 else 1.0

    def _offsets(self, distance: int) -> list[tuple[int, int]]:
        offsets = []
        for size in self.sizes:
            offsets.append((distance % size, size))
            distance //= size
        return offsets


def torus_network(*dims: int) -> Network:
    """A torus of these dimensions."""
    return Network("torus", math.prod(dims), dims)


def _shorter(offset: int, size: int) -> int:
    return min(offset, size - offset)


def _ring_hops(size: int) -> float:
    """Hops between two nodes of a ring, over all pairs, a node with itself among them."""
    return (size * size // 4) / size


def _ring_load(size: int) -> float:
    """The share of a node's data that a directed link of a ring carries, if sent to all evenly."""
    return _ring_hops(size) / 2


def _line_load(size: int) -> float:
    """The same for the middle link of a line."""
    return (size // 2) * (size - size // 2) / size
