"""Nodes and rails, and how collectives scale over nodes."""

from __future__ import annotations

import re
from pathlib import Path

from ringcomm.cli.estimate_network import shown_networks
from ringcomm.comm.topology.cost import Cluster, best_cost
from ringcomm.comm.topology.network import Network
from tools.pictures.charts import Axis, Panel, legend
from tools.pictures.svg import Box, Sheet, Type

BOLD = Type(15, bold=True)
SMALL = Type(13, "muted")
MIDDLE = Type(13, "muted", anchor="middle")
COLOURS = ("blue", "green", "violet", "orange")
RANKS = 4
SCALING = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def rails() -> Sheet:
    """A reduction over two nodes in three steps."""
    sheet = Sheet(
        800,
        442,
        "Nodes and rails",
        "Two nodes of four ranks. Step 1: the ranks of a node reduce in its memory. Step 2: each "
        "rank exchanges its part with the rank of equal place on the other node; these pairs are "
        "the rails. Step 3: the ranks of a node gather in its memory. A reduce-scatter of B bytes "
        "over N nodes sends B (N - 1) / N out of a node, over all its rails together.",
    )
    steps = ((66, "1", "reduce in the node"), (224, "2", "exchange on rails"), (334, "3", "gather"))
    for y, name, told in steps:
        sheet.dot(44, y + 24, 15, "ink")
        sheet.text(44, y + 29, name, Type(15, "paper", True, anchor="middle"))
        first, _, second = told.partition(" ")
        sheet.text(68, y + 21, first, Type(14, bold=True))
        sheet.text(68, y + 39, second or "in the node", SMALL)
    nodes = (Box(186, 16, 274, 410), Box(508, 16, 274, 410))
    for index, place in enumerate(nodes):
        sheet.box(place, "panel", "line", 10)
        sheet.text(place.x + 14, 40, f"node {index}", BOLD)
        _inside(sheet, place, index)
    for rank, colour in enumerate(COLOURS):
        y = 214 + rank * 22
        begin, end = (nodes[node].x + 46 + rank * 62 for node in (0, 1))
        sheet.line([(begin, 202), (begin, y), (end, y), (end, 202)], colour, 2.4)
        for x in (begin, end):
            sheet.arrow([(x, y), (x, 330)], colour, 1.6)
    return sheet


def _inside(sheet: Sheet, place: Box, node: int) -> None:
    bus = Box(place.x + 14, 104, 246, 34)
    for rank, colour in enumerate(COLOURS):
        x = place.x + 20 + rank * 62
        top = sheet.card(Box(x, 52, 52, 30), colour, f"r{node * RANKS + rank}", kind=Type(13))
        sheet.line([(top.middle[0], top.bottom), (top.middle[0], 104)], colour, 2)
        sheet.arrow([(top.middle[0], 138), (top.middle[0], 160)], colour, 2)
        sheet.card(Box(x, 160, 52, 42), colour, "sum of", "part", kind=Type(12))
        whole = Box(x, 330, 52, 30)
        sheet.card(whole, colour, "total", kind=Type(12))
        sheet.line([(x + 26, 360), (x + 26, 376)], colour, 2)
    sheet.card(bus, "blue", "through mapped memory", kind=Type(13))
    sheet.card(Box(place.x + 14, 376, 246, 34), "blue", "through mapped memory", kind=Type(13))


CURVES = {
    "flat-ring": ("one flat ring", "orange", False),
    "rail-ring": ("ring on rails", "violet", False),
    "rail-direct": ("direct", "green", False),
    "rail-levels": ("two levels", "blue", False),
    "rail-pat": ("PAT", "muted", True),
}


def _predicted() -> dict[str, list[tuple[float, float]]]:
    """(nodes, ms) by algorithm: the table that tools/scaling_tables.py wrote from the model."""
    text = SCALING.read_text().split("<!-- algorithms:")[1].split("<!-- end of algorithms")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    names = rows[0][1:6]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for nodes, *cells in rows[1:]:
        for name, cell in zip(names, cells, strict=False):
            times[name].append((float(nodes), float(re.split(r"[ (]", cell)[0])))
    return times


def scaling() -> Sheet:
    """Time of a reduce-scatter over the number of nodes, predicted."""
    times = _predicted()
    last = {name: points[-1] for name, points in times.items()}
    told = ", ".join(f"{CURVES[name][0]} {ms:g} ms" for name, (_, ms) in last.items())
    most = last["rail-ring"][0]
    sheet = Sheet(
        800,
        430,
        "Reduce-scatter over nodes, predicted",
        "Predicted time of a reduce-scatter of 64 MiB over 2 to 16384 nodes of 8 ranks, each with "
        f"a NIC of 50 GB/s. At {most:.0f} nodes: {told}. Rings grow with the number of nodes, "
        "direct from some hundred on, two levels and PAT hardly at all.",
    )
    ticks = [(nodes, f"{nodes:.0f}") for nodes, _ in times["rail-ring"]]
    panel = Panel(
        Box(76, 66, 694, 264),
        Axis(1.7, 19000, ticks),
        Axis(0.12, 1000, [(0.2, "0.2 ms"), (1, "1 ms"), (10, "10 ms"), (100, "100 ms")]),
    )
    panel.draw(sheet, "Reduce-scatter of 64 MiB, 8 ranks a node, 50 GB/s a rank: predicted")
    for name, points in times.items():
        panel.curve(sheet, points, *CURVES[name][1:])
    sheet.text(423, 376, "nodes", MIDDLE)
    legend(sheet, 60, 410, [CURVES[name] for name in times])
    return sheet


NETWORKS = {
    "switch, or full fat tree": ("switch", "blue", False),
    "fat tree, taper 2": ("fat tree, taper 2", "muted", True),
    "3D torus": ("3D torus", "violet", False),
    "2D torus": ("2D torus", "orange", False),
    "ring": ("ring", "green", False),
}
NODES = [4**power for power in range(1, 8)]
BUFFER_BYTES = 64 << 20


def networks() -> Sheet:
    """An all-reduce and an all-to-all over the number of nodes, by network, predicted."""
    shown = {
        label: each for label, _, _, each in shown_networks(Cluster(Network("switch", 2)), NODES)
    }
    times = {
        label: [best_cost(each, "all_reduce", BUFFER_BYTES).time_us / 1e3 for each in clusters]
        for label, clusters in shown.items()
    }
    rates = {
        label: [
            each.nics * each.nic_gbps / each.network.exchange_contention(each.nodes)
            for each in clusters
        ]
        for label, clusters in shown.items()
    }
    told = "; ".join(
        f"{name} {times[label][-1]:.2g} ms and {rates[label][-1]:.2g} GB/s"
        for label, (name, _, _) in NETWORKS.items()
    )
    sheet = Sheet(
        800,
        430,
        "Networks over nodes, predicted",
        "Predicted time of an all-reduce of 64 MiB by the fastest algorithm, and rate at which a "
        "node sends in an all-to-all, over 4 to 16384 nodes of 8 ranks, each with a NIC of 50 "
        f"GB/s, by network. At {NODES[-1]} nodes: {told}.",
    )
    sheet.text(27, 34, "8 ranks a node, 50 GB/s a rank, by network: predicted", BOLD)
    x = Axis(3.4, 19000, [(nodes, f"{nodes}") for nodes in NODES])
    panels = (
        ("All-reduce of 64 MiB, ms", times, Axis(0.25, 20, [(1, "1"), (10, "10")])),
        (
            "All-to-all, GB/s of a node",
            rates,
            Axis(0.07, 600, [(0.1, "0.1"), (1, "1"), (10, "10"), (100, "100")]),
        ),
    )
    for index, (title, values, y) in enumerate(panels):
        panel = Panel(Box(66 + index * 384, 84, 326, 252), x, y)
        panel.draw(sheet, title)
        for label, (_, colour, dashed) in reversed(NETWORKS.items()):
            panel.curve(sheet, list(zip(NODES, values[label], strict=True)), colour, dashed)
        sheet.text(panel.place.middle[0], 378, "nodes", MIDDLE)
    legend(sheet, 60, 412, list(NETWORKS.values()))
    return sheet
