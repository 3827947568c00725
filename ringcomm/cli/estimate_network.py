"""The network's section of ``ringcomm estimate``: collectives over several nodes, predicted."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ringcomm import _native
from ringcomm.cli.estimate_request import parse_not_negative
from ringcomm.comm.topology.cost import (
    CODED,
    COLLECTIVES,
    FP32_BYTES,
    Cluster,
    Coding,
    Cost,
    algorithms_of,
    best_cost,
    collective_cost,
)
from ringcomm.comm.topology.network import LEAF_NODES, NETWORKS, Network, cubic_dims
from ringcomm.errors import ArgumentError
from ringcomm.output import new_figure, write_figure
from ringcomm.zero.estimate import BytesPerElement, World
from ringcomm.zero.estimate_model import ModelElems

DEFAULT_RANKS = 8
PREDICTED = "predicted by docs/scaling.md's model, not measured"
MACHINE_OPTIONS = (
    "nic_alpha_us",
    "nic_message_us",
    "hop_us",
    "node_gbps",
    "node_alpha_us",
    "memory_gbps",
)
NETWORK_OPTIONS = (
    *("gpus_per_node", "nic_gbps", "nics_per_node", "network", "torus", "taper", "leaf_nodes"),
    *("segment_bytes", "bytes", "coding_gbps"),
    *MACHINE_OPTIONS,
)


def parse_dims(text: str) -> tuple[int, ...]:
    """ "8x8x4" as (8, 8, 4).

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    sizes = text.lower().split("x")
    if not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected dimensions such as 8x8x4, got {text!r}")
    return tuple(map(int, sizes))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a network between nodes."""
    group = parser.add_argument_group(
        "network", "several nodes: time of collectives by algorithm (docs/scaling.md)"
    )
    add = group.add_argument
    add("--nodes", type=int, help="of the job; --world is then nodes x GPUs")
    add("--gpus-per-node", type=int, metavar="GPUS", help=f"default: {DEFAULT_RANKS}")
    add(
        "--nic-gbps",
        type=parse_not_negative,
        metavar="GB/s",
        help="of a NIC, each direction, 1e9 bytes/s: 50 for 400 Gbit/s; of all links of a torus",
    )
    add("--nics-per-node", type=int, metavar="NICS", help="default: one for each GPU")
    add("--network", choices=NETWORKS, help="default: switch, without contention")
    add("--torus", type=parse_dims, metavar="AxBxC", help="nodes by dimension; default: cubic")
    add(
        "--taper",
        type=parse_not_negative,
        help="of a fat tree: rate into a leaf switch over rate out of it (default: 1)",
    )
    add("--leaf-nodes", type=int, help=f"of a fat tree: at a leaf switch (default: {LEAF_NODES})")
    add("--bytes", type=int, help="of one collective: without a model, this section alone")
    add("--segment-bytes", type=int, help="pipelined in; default: the fastest, by algorithm")
    add(
        "--coding-gbps",
        type=parse_not_negative,
        metavar="GB/s",
        help="of FP32 that a rank codes, or decodes and adds, for a --wire in codes (default: as "
        "fast as its memory reads the numbers and writes the codes)",
    )
    for name in MACHINE_OPTIONS:
        metavar = "GB/s" if name.endswith("gbps") else "US"
        option = f"--{name.replace('_', '-')}"
        default = getattr(Cluster, name)
        add(option, type=parse_not_negative, metavar=metavar, help=f"default: {default:g}")


@dataclass(frozen=True)
class Question:
    """A question about a network.

    Attributes:
        cluster: the machines.
        num_bytes: of one collective; None takes the model's.
        segment_bytes: None takes the fastest.
        wire: of sums between nodes, as in :class:`ringcomm.comm.options.CommOptions`.
        coding: of that wire; None for one that codes nothing.
        param_coding: the same of updated parameters.
    """

    cluster: Cluster
    num_bytes: int | None
    segment_bytes: int | None
    wire: str = "fp32"
    coding: Coding | None = None
    param_coding: Coding | None = None


def read_question(args: argparse.Namespace) -> Question | None:
    """Reads the network's options; None without ``--nodes``.

    Raises:
        ArgumentError: options do not go together.
    """
    if args.nodes is None:
        for name in NETWORK_OPTIONS:
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name.replace('_', '-')}: expected --nodes with it")
        return None
    if args.nic_gbps is None:
        raise ArgumentError(f"--nodes {args.nodes}: expected --nic-gbps with it")
    kind = args.network or ("switch" if args.torus is None else "torus")
    network = Network(
        kind,
        args.nodes,
        args.torus or (),
        LEAF_NODES if args.leaf_nodes is None else args.leaf_nodes,
        1.0 if args.taper is None else args.taper,
    )
    given = {name: getattr(args, name) for name in MACHINE_OPTIONS}
    cluster = Cluster(
        network,
        DEFAULT_RANKS if args.gpus_per_node is None else args.gpus_per_node,
        args.nics_per_node or 0,
        args.nic_gbps,
        **{name: value for name, value in given.items() if value is not None},
    )
    for name in ("bytes", "segment_bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    wire = args.wire or "fp32"
    coding, param_coding = (
        _read_coding(each, args.coding_gbps, cluster) for each in (wire, args.wire_parameters)
    )
    if args.coding_gbps is not None and coding is param_coding is None:
        raise ArgumentError("--coding-gbps: expected a --wire or --wire-parameters in codes")
    return Question(cluster, args.bytes, args.segment_bytes, wire, coding, param_coding)


def _read_coding(wire: str | None, gbps: float | None, cluster: Cluster) -> Coding | None:
    if wire not in _native.WIRES:
        return None
    if gbps is None:
        share = Coding.of_wire(wire, 1.0).share
        gbps = cluster.memory_gbps / (1 + share)
    return Coding.of_wire(wire, gbps)


@dataclass(frozen=True)
class PredictedCall:
    """One collective of some bytes, by every algorithm, and on the coded wire that was named."""

    collective: str
    num_bytes: int
    costs: tuple[Cost, ...]
    coded: Cost | None = None

    @property
    def best(self) -> Cost:
        """The fastest of those that send the numbers as they are."""
        return min(self.costs, key=lambda cost: cost.time_us)


@dataclass(frozen=True)
class StageTime:
    """The collectives of a step at a stage of ZeRO, each call by its fastest algorithm.

    Attributes:
        stage: of ZeRO.
        reduce_scatter_s: of the gradients, bucket after bucket.
        all_gather_s: of the parameters, within the nodes, too; of the sums at stage 0, and of both
            where each node has a copy of the state.
        exposed_s: what computing cannot hide if all else hides; None where it is not known.
    """

    stage: int
    reduce_scatter_s: float
    all_gather_s: float
    exposed_s: float | None

    @property
    def communication_s(self) -> float:
        return self.reduce_scatter_s + self.all_gather_s


@dataclass(frozen=True)
class Step:
    """The facts from which the network's times of a step follow.

    Attributes:
        model: its elements.
        each: bytes of one.
        bucket_elems: that one call moves.
        compute_s: of a step; None where it is not known.
        stages: of ZeRO.
        world: the ranks, and what they share.
    """

    model: ModelElems
    each: BytesPerElement
    bucket_elems: int
    compute_s: float | None
    stages: tuple[int, ...]
    world: World


@dataclass(frozen=True)
class Prediction:
    """The answer: calls of one size, and the steps of a model."""

    question: Question
    calls: tuple[PredictedCall, ...]
    stages: tuple[StageTime, ...]


def predict(question: Question, step: Step | None) -> Prediction:
    """Evaluates the collectives of ``--bytes``, or of a model's bucket and step.

    Raises:
        ArgumentError: there is neither.
    """
    if question.num_bytes is None and step is None:
        raise ArgumentError("--nodes: expected a model or --bytes with it")
    sizes = dict.fromkeys(COLLECTIVES, question.num_bytes or 0)
    if question.num_bytes is None and step is not None:
        bucket = max(1, min(step.bucket_elems, step.model.trainable))
        sizes = dict.fromkeys(COLLECTIVES, bucket * step.each.reduced)
        sizes["all_gather"] = bucket * step.each.param
    calls = tuple(_call(question, name, num_bytes) for name, num_bytes in sizes.items())
    stages = () if step is None else tuple(_stage_times(question, step))
    return Prediction(question, calls, stages)


def _call(question: Question, collective: str, num_bytes: int) -> PredictedCall:
    costs = tuple(
        collective_cost(question.cluster, collective, num_bytes, each, question.segment_bytes)
        for each in algorithms_of(question.cluster.network)
    )
    coded = None
    # An all-gather of its own sends values, which are not coded.
    if question.coding is not None and collective != "all_gather":
        coded = _coded(question, collective, num_bytes, question.coding)
    return PredictedCall(collective, num_bytes, costs, coded)


def _coded(question: Question, collective: str, num_bytes: int, coding: Coding) -> Cost:
    cluster, segment_bytes = question.cluster, question.segment_bytes
    return collective_cost(cluster, collective, num_bytes, CODED, segment_bytes, coding)


def _stage_times(question: Question, step: Step) -> Iterator[StageTime]:
    reduced_s = _sums_s(question, step, "reduce_scatter")
    for stage in step.stages:
        gathered_s = _gathered_s(question, step, stage)
        exposed_s = None
        if step.compute_s is not None:
            exposed_s = max(0.0, reduced_s + gathered_s - step.compute_s)
        yield StageTime(stage, reduced_s, gathered_s, exposed_s)


def _gathered_s(question: Question, step: Step, stage: int) -> float:
    """The time of what a step gathers after its sums, over the nodes and within them.

    Nodes that share the state send each other the parameters that they have updated; nodes with a
    copy of it each (``state="node"``) send sums instead. Where nodes have copies of the parameters,
    stage 3 gathers them within the node, in forward and in backward.
    """
    model, each, world = step.model, step.each, step.world
    if stage == 0:
        return _over_nodes_s(question, step, "all_gather", model.trainable, each.reduced)
    if stage == 3 and world.params == "world":
        frozen_s = _over_nodes_s(question, step, "all_gather", model.frozen, each.param)
        return 2 * (_params_s(question, step, model.trainable) + frozen_s)
    if world.state == "node":
        gathered_s = _sums_s(question, step, "all_gather")
        if stage < 3:
            gathered_s += _within_node_s(question, step, model.trainable)
    else:
        gathered_s = _params_s(question, step, model.trainable)
    if stage == 3:
        gathered_s += 2 * _within_node_s(question, step, model.total)
    return gathered_s


def _sums_s(question: Question, step: Step, collective: str) -> float:
    """The time in which the nodes' sums of all gradients travel, in the form of the wire."""
    elems, coding = step.model.trainable, question.coding
    if coding is None:
        elem_bytes = step.each.grad if question.wire == "param" else FP32_BYTES
        return _over_nodes_s(question, step, collective, elems, elem_bytes)
    return _coded_s(question, step, collective, elems, coding)


def _params_s(question: Question, step: Step, elems: int) -> float:
    """The time in which so many parameters are gathered over the nodes, in the form of the wire."""
    if question.param_coding is None:
        return _over_nodes_s(question, step, "all_gather", elems, step.each.param)
    return _coded_s(question, step, "all_gather", elems, question.param_coding)


def _coded_s(question: Question, step: Step, collective: str, elems: int, coding: Coding) -> float:
    """The time of all buckets of so many FP32 numbers in codes, one call after the other."""
    return (
        sum(
            calls * _coded(question, collective, size * FP32_BYTES, coding).time_us
            for calls, size in _buckets(elems, step.bucket_elems)
        )
        / 1e6
    )


def _over_nodes_s(
    question: Question, step: Step, collective: str, elems: int, elem_bytes: int
) -> float:
    """The time of all buckets of so many elements, one call after the other."""
    return (
        sum(
            calls
            * best_cost(
                question.cluster, collective, size * elem_bytes, question.segment_bytes
            ).time_us
            for calls, size in _buckets(elems, step.bucket_elems)
        )
        / 1e6
    )


def _within_node_s(question: Question, step: Step, elems: int) -> float:
    """The time in which each rank of a node reads so many parameters' other shards, per bucket."""
    cluster = question.cluster
    peers = cluster.ranks_per_node - 1
    if peers == 0:
        return 0.0
    read_bytes = elems * step.each.param * peers / cluster.ranks_per_node
    calls = sum(calls for calls, _ in _buckets(elems, step.bucket_elems))
    return read_bytes / (cluster.node_gbps * 1e9) + calls * cluster.node_alpha_us / 1e6


def _buckets(elems: int, bucket_elems: int) -> list[tuple[int, int]]:
    """How many buckets of which size hold so many elements; none are empty."""
    whole, rest = divmod(elems, bucket_elems)
    return [(calls, size) for calls, size in ((whole, bucket_elems), (1, rest)) if calls and size]


# How it is told.


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def as_text(prediction: Prediction) -> str:
    """The tables; no line is longer than 100 columns."""
    parts = [_headline(prediction.question.cluster), _call_table(prediction)]
    parts += [_stage_table(prediction)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _headline(cluster: Cluster) -> list[str]:
    network = cluster.network
    sizes = " x ".join(map(str, network.sizes))
    kind = f"{sizes} {network.kind}" if network.kind == "torus" else network.kind
    kind += f" of taper {network.taper:g}" if network.kind == "fat-tree" else ""
    return [
        f"network: {network.nodes} nodes of {cluster.ranks_per_node} ranks, {kind}; NICs of a "
        f"node: {cluster.nics} of {cluster.nic_gbps:g} GB/s",
        f"links between two nodes: at most {network.diameter}, {network.mean_hops:.3g} on average; "
        f"bisection {number(cluster.bisection_gbps)} GB/s one way",
        PREDICTED,
    ]


def _call_table(prediction: Prediction) -> list[str]:
    calls = prediction.calls
    rows = [["algorithm", *(f"{call.collective} ms" for call in calls)]]
    rows[0] += ["MB out of a node", "peers", "shape"]
    for costs in zip(*(call.costs for call in calls), strict=True):
        last = costs[-1]
        rows.append(
            [
                last.algorithm,
                *(number(cost.time_us / 1e3) for cost in costs),
                number(last.node_sent_bytes / 1e6),
                str(last.peers),
                "x".join(map(str, last.shape)) or "-",
            ]
        )
    if prediction.question.coding is not None:
        cells = ["-" if call.coded is None else number(call.coded.time_us / 1e3) for call in calls]
        coded = calls[-1].coded
        assert coded is not None
        rows.append([f"{CODED}, {prediction.question.wire}", *cells])
        rows[-1] += [number(coded.node_sent_bytes / 1e6), str(coded.peers), "-"]
    sizes = ", ".join(f"{call.collective} of {number(call.num_bytes / 1e6)} MB" for call in calls)
    best = ", ".join(f"{call.collective} {call.best.algorithm}" for call in calls)
    return [
        f"one call: {sizes}",
        *_aligned(rows),
        f"bytes out of a node, peers of a rank in other nodes and shape: of {calls[-1].collective}",
        f"fastest{' in full' if prediction.question.coding else ''}: {best}",
    ]


def _stage_table(prediction: Prediction) -> list[str]:
    if not prediction.stages:
        return []
    rows = [["stage", "reduce-scatter ms", "all-gather ms", "communication ms"]]
    known = prediction.stages[0].exposed_s is not None
    rows[0] += ["exposed ms"] if known else []
    for row in prediction.stages:
        seconds = [row.reduce_scatter_s, row.all_gather_s, row.communication_s]
        seconds += [] if row.exposed_s is None else [row.exposed_s]
        rows.append([str(row.stage), *(number(1e3 * each) for each in seconds)])
    lines = ["communication of a step over the network, bucket after bucket", *_aligned(rows)]
    if known:
        lines.append("exposed: what remains if computing hides all it can")
    return lines


def as_json(prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain JSON types: bytes, microseconds of a call, seconds of a step."""
    cluster = prediction.question.cluster
    network = cluster.network
    return {
        "predicted": True,
        "cluster": {**asdict(cluster), "nics_per_node": cluster.nics},
        "wire": prediction.question.wire,
        "sizes": network.sizes,
        "most_links": network.diameter,
        "mean_links": network.mean_hops,
        "bisection_gbps": cluster.bisection_gbps,
        "calls": [
            {
                "collective": call.collective,
                "bytes": call.num_bytes,
                "fastest": call.best.algorithm,
                "costs": [asdict(cost) for cost in call.costs],
                "coded": None if call.coded is None else asdict(call.coded),
            }
            for call in prediction.calls
        ],
        "stages": [
            {**asdict(row), "communication_s": row.communication_s} for row in prediction.stages
        ],
    }


# The picture: time of a collective over the nodes, by algorithm and by network.

_LINES = {
    "flat-ring": ("#777777", "x"),
    "rail-ring": ("#E69F00", "v"),
    "rail-direct": ("#0072B2", "o"),
    "rail-levels": ("#D55E00", "s"),
    "rail-pat": ("#009E73", "^"),
    "torus": ("#CC79A7", "D"),
}
_NETWORKS = (
    ("switch, or full fat tree", "switch", (), 1.0, "#0072B2", "o"),
    ("fat tree, taper 2", "fat-tree", (), 2.0, "#56B4E9", "v"),
    ("3D torus", "torus", (3,), 1.0, "#CC79A7", "D"),
    ("2D torus", "torus", (2,), 1.0, "#D55E00", "s"),
    ("ring", "ring", (), 1.0, "#777777", "x"),
)
_SIZE_INCHES = (11.0, 4.4)
_LEAST_SHOWN_NODES = 16


def draw(prediction: Prediction, path: str) -> None:
    """Writes the picture; its format is the ending of ``path`` (png, svg, pdf).

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no format.
    """
    figure = new_figure(_SIZE_INCHES, path)
    panels = figure.subplots(1, 3)
    question, num_bytes = prediction.question, prediction.calls[0].num_bytes
    last = max(_LEAST_SHOWN_NODES, question.cluster.nodes)
    nodes = [1 << power for power in range(1, last.bit_length()) if 1 << power <= last]
    _draw_algorithms(panels[0], question, nodes, num_bytes)
    _draw_networks(panels[1], question.cluster, nodes, num_bytes)
    _draw_exchange(panels[2], question.cluster, nodes)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_xlabel("nodes")
    cluster = question.cluster
    title = (
        f"predicted: {num_bytes / 1e6:.4g} MB, {cluster.ranks_per_node} ranks and {cluster.nics} "
        f"NICs of {cluster.nic_gbps:g} GB/s a node, {cluster.nic_alpha_us:g} us a message"
    )
    write_figure(figure, panels, title, path)


def _draw_algorithms(panel: Any, question: Question, nodes: list[int], num_bytes: int) -> None:
    for algorithm in algorithms_of(question.cluster.network):
        colour, marker = _LINES[algorithm]
        times = [
            collective_cost(
                question.cluster.with_nodes(count), "reduce_scatter", num_bytes, algorithm
            ).time_us
            / 1e3
            for count in nodes
        ]
        panel.plot(nodes, times, color=colour, marker=marker, markersize=4, label=algorithm)
    panel.set_title(f"reduce-scatter, {question.cluster.network.kind}, ms", fontsize=10)


def _draw_networks(panel: Any, cluster: Cluster, nodes: list[int], num_bytes: int) -> None:
    for label, colour, marker, clusters in shown_networks(cluster, nodes):
        times = [best_cost(each, "all_reduce", num_bytes).time_us / 1e3 for each in clusters]
        panel.plot(nodes, times, color=colour, marker=marker, markersize=4, label=label)
    panel.set_title("all-reduce, fastest algorithm, ms", fontsize=10)


def _draw_exchange(panel: Any, cluster: Cluster, nodes: list[int]) -> None:
    for label, colour, marker, clusters in shown_networks(cluster, nodes):
        rates = [
            each.nics * each.nic_gbps / each.network.exchange_contention(each.nodes)
            for each in clusters
        ]
        panel.plot(nodes, rates, color=colour, marker=marker, markersize=4, label=label)
    panel.set_title("all-to-all, GB/s of a node", fontsize=10)


def shown_networks(
    cluster: Cluster, nodes: list[int]
) -> Iterator[tuple[str, str, str, list[Cluster]]]:
    """Yields each network of the picture: its name, colour and mark, and it with those nodes."""
    for label, kind, dims, taper, colour, marker in _NETWORKS:
        networks = [
            Network(kind, count, cubic_dims(count, *dims) if dims else (), taper=taper)
            for count in nodes
        ]
        yield label, colour, marker, [replace(cluster, network=each) for each in networks]
