"""Time and bytes of collectives over several nodes, from the numbers of a cluster.

For a buffer of B bytes on each of W = N L ranks, N nodes of L ranks. B is what travels: where the
sums of 16-bit gradients are kept in FP32, B counts 4 bytes an element. Reduce-scatter:

    algorithm     rounds                 messages of a rank   bytes that leave a node
    flat-ring     W - 1                  W - 1 a ring         B (W-1)/W
    rail-ring     N - 1                  N - 1                B (N-1)/N
    rail-direct   1                      N - 1                B (N-1)/N
    rail-levels   2                      a + b - 2, a b = N   B (N-1)/N
    rail-pat      ceil(log2 N)           ceil(log2 N)         B (N-1)/N
    torus         sum of (size - 1)      2 d times that       B (N-1)/N

An all-gather is the same backwards without the sums, an all-reduce both after each other, segment
by segment. On rails the ranks of a node first reduce among themselves, so that each holds 1/L of
the node's sums, and gather among themselves last. ``docs/scaling.md`` has the model and what it
says. On a coded wire (:class:`Coding`) rails are direct, and a rank codes what it sends and decodes
what it receives; in an all-reduce twice.

Sources: ring and the alpha-beta model: Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH" (2005), and Chan, Heimlich, Purkayastha, van de Geijn,
"Collective communication: theory, practice, and experience" (2007), which also composes
collectives of groups (levels). PAT: Jeaugey, "PAT: a new algorithm for all-gather and
reduce-scatter operations at scale" (2025, arXiv:2506.20252), NCCL 2.23. Torus: Sack and Gropp,
"Collective algorithms for multiported torus networks" (2015); Jouppi et al. (ISCA'23).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ringcomm import _native
from ringcomm.comm.topology.network import Network
from ringcomm.comm.topology.pipeline import Flow, LinkStage, StageSequence, finish_us
from ringcomm.errors import ArgumentError

__all__ = [
    "ALGORITHMS",
    "CODED",
    "COLLECTIVES",
    "FP32_BYTES",
    "RAILS",
    "Cluster",
    "Coding",
    "Cost",
    "algorithms_of",
    "best_cost",
    "best_rail",
    "collective_cost",
    "direct_until",
]

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
ALGORITHMS = ("flat-ring", "rail-ring", "rail-direct", "rail-levels", "rail-pat", "torus")
# The one of them that never sums codes on the way, and so codes each number once.
CODED = "rail-direct"
# What the rails of a communicator over nodes choose from, the simplest first.
RAILS = ("rail-direct", "rail-ring", "rail-levels")
# The model is not finer than that; a choice.
SIMPLER_WITHIN = 0.05
MOST_SEGMENTS = 256
LEAST_SEGMENT_BYTES = 1 << 16
FP32_TERMS = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Cluster:
    """The connections between the ranks, each rate in one direction. ``_gbps`` are 1e9 bytes/s.

    The defaults are an assumption, no measurement: NVLink 4 and HBM3 of an H100; 14 us are what
    NCCL's own model takes for a hop of a ring over the network, about 4 us for one over NVLink
    (``src/graph/tuning.cc``); those of a message and of a further link are choices.

    Attributes:
        network: of the nodes.
        ranks_per_node: that map each other's memory.
        nics_per_node: shared by the ranks of a node; 0 is one a rank.
        nic_gbps: what a NIC sends, and receives at the same time.
        nic_alpha_us: from the end of a message until the receiver goes on, one link apart.
        nic_message_us: by which a NIC is busy with a message beside its bytes.
        hop_us: latency of each link after the first.
        node_gbps: at which a rank reads from its peers while all of them do.
        node_alpha_us: of a segment of a collective within the node.
        memory_gbps: at which a rank reads and writes its own memory while all of them do.
    """

    network: Network
    ranks_per_node: int = 8
    nics_per_node: int = 0
    nic_gbps: float = 50.0
    nic_alpha_us: float = 14.0
    nic_message_us: float = 1.0
    hop_us: float = 0.3
    node_gbps: float = 450.0
    node_alpha_us: float = 4.0
    memory_gbps: float = 3350.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ArgumentError(f"cluster: expected at least 1 rank, got {self.ranks_per_node}")
        if not 0 <= self.nics_per_node <= self.ranks_per_node:
            raise ArgumentError(
                f"cluster: expected at most a NIC for each of {self.ranks_per_node} ranks, got "
                f"{self.nics_per_node}"
            )
        if self.ranks_per_node % self.nics:
            raise ArgumentError(
                f"cluster: expected NICs that divide {self.ranks_per_node} ranks, got {self.nics}"
            )
        for name in ("nic_gbps", "node_gbps", "memory_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ArgumentError(
                    f"cluster: expected {name} above 0 and finite, got {getattr(self, name)!r}"
                )
        for name in ("nic_alpha_us", "nic_message_us", "hop_us", "node_alpha_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(
                    f"cluster: expected {name} of at least 0, got {getattr(self, name)!r}"
                )

    @property
    def nodes(self) -> int:
        return self.network.nodes

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def nics(self) -> int:
        """NICs of a node."""
        return self.nics_per_node or self.ranks_per_node

    @property
    def bisection_gbps(self) -> float:
        """The rate of all NICs of one half of the nodes to the other half, one direction."""
        return self.network.bisection * (self.nodes // 2) * self.nics * self.nic_gbps

    def with_nodes(self, nodes: int) -> Cluster:
        """The same machines, another number of them; a torus takes its most cubic shape."""
        return replace(self, network=replace(self.network, nodes=nodes, dims=()))


@dataclass(frozen=True)
class Cost:
    """The cost of one collective.

    Attributes:
        algorithm: one of ``ALGORITHMS``.
        collective: one of ``COLLECTIVES``.
        time_us: from the first to the last segment.
        segments: in which a rank's data were cut.
        node_sent_bytes: that leave each node.
        peers: ranks of other nodes that a rank is connected with.
        shape: of the two levels, or of the torus; else ().
    """

    algorithm: str
    collective: str
    time_us: float
    segments: int
    node_sent_bytes: float
    peers: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Coding:
    """A coded wire, as ``docs/nodes.md`` describes it.

    Attributes:
        share: its bytes for each byte of FP32.
        gbps: FP32 bytes that a rank codes, or decodes and adds, while all of them do.
    """

    share: float
    gbps: float

    @classmethod
    def of_wire(cls, wire: str, gbps: float) -> Coding:
        """The coding of a wire by its name in ``CommOptions.wire``, at a rate."""
        block = _native.WIRE_BLOCK
        return cls(_native.wire_bytes(_native.WIRES[wire], block) / (block * FP32_BYTES), gbps)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ArgumentError(f"coding: expected a share in (0, 1], got {self.share!r}")
        if not 0 < self.gbps < math.inf:
            raise ArgumentError(f"coding: expected gbps above 0 and finite, got {self.gbps!r}")


@dataclass(frozen=True)
class _Round:
    """One round of messages of a rail, and what its receiver then sums.

    Attributes:
        stage: on the network.
        sum_bytes: that the sum reads and writes in a rank's memory; an all-gather has none.
    """

    stage: LinkStage
    sum_bytes: float
    repeats: int = 1


class _Call(NamedTuple):
    """The collective that is evaluated, as :func:`collective_cost` describes it."""

    collective: str
    num_bytes: int
    algorithm: str
    segment_bytes: int | None
    coding: Coding | None


@dataclass(frozen=True)
class _Exchange:
    """The exchanges of a rail for a segment.

    Attributes:
        rounds: of a reduce-scatter, from a segment's bytes and the number of the flow.
        peers: as in :class:`Cost`.
        shape: as in :class:`Cost`.
        flows: into which a rank's data are cut.
    """

    rounds: Callable[[float, int], list[_Round]]
    peers: int
    shape: tuple[int, ...] = ()
    flows: int = 1


def algorithms_of(network: Network) -> tuple[str, ...]:
    """The algorithms that a network of this kind can run."""
    return ALGORITHMS if network.sizes else ALGORITHMS[:-1]


def collective_cost(
    cluster: Cluster,
    collective: str,
    num_bytes: int,
    algorithm: str,
    segment_bytes: int | None = None,
    coding: Coding | None = None,
) -> Cost:
    """Evaluates one collective.

    Args:
        cluster: the machines.
        collective: one of ``COLLECTIVES``.
        num_bytes: of the whole buffer: what each rank reduces, or has in the end.
        algorithm: one of ``ALGORITHMS``.
        segment_bytes: of the pieces that a rank's data are pipelined in; None takes the power of
            two of equal segments that is fastest, for each algorithm its own.
        coding: of what travels between nodes, and ``num_bytes`` are FP32; None sends it as it is.

    Raises:
        ArgumentError: there is no such collective or algorithm here, a size is not positive, or
            the algorithm is not direct on a coded wire.
    """
    _check(cluster, collective, num_bytes, algorithm, segment_bytes)
    if coding is not None and algorithm != CODED:
        raise ArgumentError(f"algorithm: expected {CODED} on a coded wire, got {algorithm}")
    options = [
        _evaluated(cluster, _Call(collective, num_bytes, algorithm, segment_bytes, coding), each)
        for each in _exchanges(cluster, algorithm)
    ]
    return min(options, key=lambda cost: cost.time_us)


def best_cost(
    cluster: Cluster, collective: str, num_bytes: int, segment_bytes: int | None = None
) -> Cost:
    """The fastest of the algorithms that the network can run."""
    return min(
        (
            collective_cost(cluster, collective, num_bytes, algorithm, segment_bytes)
            for algorithm in algorithms_of(cluster.network)
        ),
        key=lambda cost: cost.time_us,
    )


def best_rail(cluster: Cluster, collective: str, num_bytes: int) -> Cost:
    """The simplest of ``RAILS`` that takes at most 5 % longer than the fastest of them."""
    costs = [collective_cost(cluster, collective, num_bytes, each) for each in RAILS]
    enough_us = (1 + SIMPLER_WITHIN) * min(cost.time_us for cost in costs)
    return next(cost for cost in costs if cost.time_us <= enough_us)


def direct_until(
    cluster: Cluster, collective: str, num_bytes: int, most_nodes: int, slack: float = 0.0
) -> int:
    """The most nodes, a power of two, up to which direct is within ``slack`` of two levels.

    Args:
        slack: 0.1 lets direct take 10 % longer.

    Returns:
        At most ``most_nodes``; at least 2, where there are no two levels.
    """
    nodes = 2
    while nodes * 2 <= most_nodes:
        wider = cluster.with_nodes(nodes * 2)
        direct, levels = (
            collective_cost(wider, collective, num_bytes, algorithm).time_us
            for algorithm in ("rail-direct", "rail-levels")
        )
        if direct > (1 + slack) * levels:
            break
        nodes *= 2
    return nodes


def _check(
    cluster: Cluster, collective: str, num_bytes: int, algorithm: str, segment_bytes: int | None
) -> None:
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective: expected one of {', '.join(COLLECTIVES)}: {collective}")
    if algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm}")
    if algorithm not in algorithms_of(cluster.network):
        raise ArgumentError(
            f"algorithm torus: expected a torus or a ring, got a {cluster.network.kind}"
        )
    if num_bytes < 1:
        raise ArgumentError(f"collective: expected at least 1 byte, got {num_bytes}")
    if segment_bytes is not None and segment_bytes < 1:
        raise ArgumentError(f"segment: expected at least 1 byte, got {segment_bytes}")


def _evaluated(cluster: Cluster, call: _Call, exchange: _Exchange | None) -> Cost:
    """The cost with the segment asked for, or the fastest one; no exchange is the flat ring."""
    copies = cluster.nics
    cut_bytes = call.num_bytes / cluster.ranks_per_node
    if exchange is None:
        cut_bytes = call.num_bytes / copies / cluster.world_size
    best: tuple[float, int, list[Flow]] | None = None
    for segments in _segment_counts(cut_bytes, call.segment_bytes):
        if exchange is None:
            flows = _flat_flows(cluster, call.collective, cut_bytes / segments, segments)
        else:
            flows = _rail_flows(cluster, call, cut_bytes / segments, segments, exchange)
        time_us = finish_us(flows)
        if best is not None and time_us >= best[0]:
            break
        best = time_us, segments, flows
    assert best is not None
    return Cost(
        call.algorithm,
        call.collective,
        best[0],
        best[1],
        copies * sum(flow.nic_bytes for flow in best[2]),
        exchange.peers if exchange else 2,
        exchange.shape if exchange else (),
    )


def _segment_counts(cut_bytes: float, segment_bytes: int | None) -> Iterator[int]:
    """Numbers of segments to try, from one on."""
    if segment_bytes is not None:
        yield max(1, math.ceil(cut_bytes / segment_bytes))
        return
    segments = 1
    while segments == 1 or (
        segments <= MOST_SEGMENTS and cut_bytes >= segments * LEAST_SEGMENT_BYTES
    ):
        yield segments
        segments *= 2


def _transfer_us(num_bytes: float, gbps: float) -> float:
    return num_bytes / (gbps * 1e3)


# The flat ring: all ranks in one ring, those of a node one after the other. There is a ring for
# each NIC, and each leaves the node by another one.


def _flat_flows(
    cluster: Cluster, collective: str, segment_bytes: float, segments: int
) -> list[Flow]:
    """The chunks that are at the same place of their nodes at the same time are one flow.

    In step t the chunk of place p is on edge p + t of its node, and the last edge is the NIC's.
    """
    ranks = cluster.ranks_per_node
    steps = cluster.world_size - 1
    edges = max(1.0, cluster.nics * (ranks - 1) / ranks)
    within = LinkStage(
        "edge {}",
        _transfer_us(segment_bytes, cluster.node_gbps / edges),
        cluster.node_alpha_us,
    )
    between = _nic(cluster, 1, segment_bytes, 1.0, cluster.network.hops(1))
    # A hop's sum reads two terms and writes one; it delays the next hop.
    sum_us = _transfer_us((FP32_TERMS + 1) * segment_bytes, cluster.memory_gbps)
    flows = []
    for place in range(ranks):
        parts: list[StageSequence] = []
        for half, extra_us in _halves(collective, sum_us):
            first = (place + half * steps) % ranks
            lap = [
                replace(between if edge == ranks - 1 else within, link=f"edge {edge}")
                for edge in ((first + hop) % ranks for hop in range(ranks))
            ]
            lap = [replace(stage, latency_us=stage.latency_us + extra_us) for stage in lap]
            parts.append(StageSequence(tuple(lap), steps // ranks))
            parts.append(StageSequence(tuple(lap[: steps % ranks])))
        flows.append(Flow(tuple(parts), segments))
    return flows


def _halves(collective: str, sum_us: float) -> list[tuple[int, float]]:
    """The rounds of a ring, by number, with what a hop's sum adds."""
    rounds = {"reduce_scatter": [sum_us], "all_gather": [0.0], "all_reduce": [sum_us, 0.0]}
    return list(enumerate(rounds[collective]))


# The rails: the ranks of equal place. Several of them share a NIC.


def _rail_flows(
    cluster: Cluster,
    call: _Call,
    segment_bytes: float,
    segments: int,
    exchange: _Exchange,
) -> list[Flow]:
    """Node reduce-scatter and rounds with sums; the same rounds backwards and node all-gather."""
    ranks = cluster.ranks_per_node
    part_bytes = segment_bytes / exchange.flows
    read_us = cluster.node_alpha_us + _transfer_us((ranks - 1) * part_bytes, cluster.node_gbps)
    flows = []
    for sharer in range(ranks // cluster.nics):
        node = [StageSequence((LinkStage(f"node {sharer}", read_us),))] if ranks > 1 else []
        for number in range(exchange.flows):
            share = 1.0 if call.coding is None else call.coding.share
            rounds = exchange.rounds(part_bytes * share, number)
            if call.coding is None:
                scatter = [_with_sum(cluster, each, f"memory {sharer}") for each in rounds]
                moved = [StageSequence((each.stage,), each.repeats) for each in rounds]
            else:
                code_us = _transfer_us(part_bytes, call.coding.gbps)
                code = LinkStage(f"memory {sharer}", code_us)
                code_sums = LinkStage(code.link, code_us / cluster.nodes)
                scatter = [StageSequence((code, each.stage, code)) for each in rounds]
                moved = [StageSequence((code_sums, each.stage, code)) for each in rounds]
            parts = {
                "reduce_scatter": node + scatter,
                # Its schedule, seen backwards, is that of a reduce-scatter without sums.
                "all_gather": node + moved,
                "all_reduce": node + scatter + moved[::-1] + node,
            }[call.collective]
            flows.append(Flow(tuple(parts), segments))
    return flows


def _with_sum(cluster: Cluster, each: _Round, memory: str) -> StageSequence:
    sum_us = _transfer_us(each.sum_bytes, cluster.memory_gbps)
    return StageSequence((each.stage, LinkStage(memory, sum_us)), each.repeats)


def _nic(
    cluster: Cluster, messages: int, num_bytes: float, contention: float, hops: int
) -> LinkStage:
    """Messages of a rank to other nodes, ``num_bytes`` together."""
    busy_us = messages * cluster.nic_message_us
    busy_us += contention * _transfer_us(num_bytes, cluster.nic_gbps)
    latency_us = cluster.nic_alpha_us + (hops - 1) * cluster.hop_us
    return LinkStage("nic", busy_us, latency_us, num_bytes)


def _exchanges(cluster: Cluster, algorithm: str) -> list[_Exchange | None]:
    """The forms of an algorithm to choose from; None is the flat ring."""
    nodes = cluster.nodes
    if algorithm == "flat-ring":
        return [None]
    if algorithm == "rail-ring":
        return [_Exchange(partial(_ring_rounds, cluster), min(2, nodes - 1))]
    if algorithm == "rail-direct":
        return [_Exchange(partial(_level_rounds, cluster, (nodes,)), nodes - 1)]
    if algorithm == "rail-levels":
        shapes: list[tuple[int, ...]] = [
            (near, nodes // near) for near in range(2, nodes // 2 + 1) if not nodes % near
        ]
        # A prime number of nodes has one level only.
        return [
            _Exchange(partial(_level_rounds, cluster, shape), sum(shape) - len(shape), shape)
            for shape in shapes or [(nodes,)]
        ]
    if algorithm == "rail-pat":
        rounds = (nodes - 1).bit_length()
        return [_Exchange(partial(_pat_rounds, cluster), min(nodes - 1, 2 * rounds))]
    sizes = cluster.network.sizes
    neighbours = sum(min(2, size - 1) for size in sizes)
    return [_Exchange(partial(_torus_rounds, cluster), neighbours, sizes, len(sizes))]


def _ring_rounds(cluster: Cluster, segment_bytes: float, _: int) -> list[_Round]:
    """N - 1 hops to the successor, each of a chunk of the segment.

    Neighbours contend nowhere: a tapered tree has one of them leave each leaf, and a torus has d
    rings through all nodes that share no link, each way, over which the data are cut.
    """
    chunk_bytes = segment_bytes / cluster.nodes
    stage = _nic(cluster, 1, chunk_bytes, 1.0, cluster.network.hops(1))
    return [_Round(stage, (FP32_TERMS + 1) * chunk_bytes, cluster.nodes - 1)]


def _level_rounds(
    cluster: Cluster, shape: tuple[int, ...], segment_bytes: float, _: int
) -> list[_Round]:
    """All-to-all among neighbours, of whose sums all-to-all among those further off.

    The receiver reads one term of each member, its own too, and writes their sum.
    """
    rounds, stride, left_bytes = [], 1, segment_bytes
    for count in shape:
        sent_bytes = left_bytes * (count - 1) / count
        contention = cluster.network.exchange_contention(count, stride)
        hops = cluster.network.exchange_hops(count, stride)
        stage = _nic(cluster, count - 1, sent_bytes, contention, hops)
        rounds.append(_Round(stage, left_bytes * (1 + 1 / count)))
        left_bytes, stride = left_bytes / count, stride * count
    return rounds


def _pat_rounds(cluster: Cluster, segment_bytes: float, _: int) -> list[_Round]:
    """Round i sends, in one message over 2^i nodes, the chunks whose way has that hop last.

    These are the distances below N whose lowest bit is i; an all-gather begins with the furthest.
    """
    chunk_bytes, nodes = segment_bytes / cluster.nodes, cluster.nodes
    rounds = []
    for bit in range((nodes - 1).bit_length()):
        distance = 1 << bit
        chunks = (nodes - 1 + distance) // (2 * distance)
        sent_bytes = chunks * chunk_bytes
        contention = cluster.network.shift_contention(distance)
        stage = _nic(cluster, 1, sent_bytes, contention, cluster.network.hops(distance))
        rounds.append(_Round(stage, (FP32_TERMS + 1) * sent_bytes))
    return rounds


def _torus_rounds(cluster: Cluster, part_bytes: float, number: int) -> list[_Round]:
    """A ring in each dimension after the other, both ways at once.

    The data are cut into a part for each dimension to begin with, so that all links are busy; each
    half of a part goes one way round.
    """
    sizes, rounds = cluster.network.sizes, []
    link_gbps = cluster.nic_gbps / (2 * len(sizes))
    left_bytes = part_bytes
    for turn in range(len(sizes)):
        dim = (number + turn) % len(sizes)
        left_bytes /= sizes[dim]
        busy_us = cluster.nic_message_us + _transfer_us(left_bytes / 2, link_gbps)
        stage = LinkStage(f"dimension {dim}", busy_us, cluster.nic_alpha_us, left_bytes)
        rounds.append(_Round(stage, (FP32_TERMS + 1) * left_bytes, sizes[dim] - 1))
    return rounds
