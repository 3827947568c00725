"""Times of sums over the rate of the links, by wire: when coding pays.

The rows are those of ``ringcomm.bench.nodes --wires``, and dashed what their bytes alone take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringcomm.comm.topology.cost import CODED, Cluster, Coding, collective_cost
from ringcomm.comm.topology.fit import BITS_PER_BYTE, Measured, read_rows
from ringcomm.comm.topology.network import Network
from tools.pictures.charts import Axis, Panel, legend
from tools.pictures.svg import Box, Sheet, Type

ROWS = Path(__file__).resolve().parents[2] / "bench" / "results" / "nodes" / "wires.csv"
COLLECTIVES = ("all_reduce", "reduce_scatter")
WIRES = {
    "": ("FP32", "ink", False),
    "int8": ("int8", "blue", False),
    "fp8": ("fp8", "orange", False),
    "int4": ("int4", "green", False),
}
TICKS_MS = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
MIDDLE = Type(13, "muted", anchor="middle")


def wire_rows(rows: Sequence[Measured]) -> list[Measured]:
    """The sums by ringcomm, of the largest buffer that was measured."""
    ours = [row for row in rows if row.algorithm == CODED and row.collective in COLLECTIVES]
    largest_bytes = max(row.bytes for row in ours)
    return [row for row in ours if row.bytes == largest_bytes]


def link_ms(row: Measured) -> float:
    """The time that the bytes of a row take on a node's link, and nothing else."""
    coding = Coding.of_wire(row.wire, 1.0) if row.wire else None
    cluster = Cluster(Network("switch", row.nodes), row.ranks_per_node, row.nics_per_node)
    cost = collective_cost(cluster, row.collective, row.bytes, CODED, row.bytes, coding)
    gbps = row.nics_per_node * row.gbit_s / BITS_PER_BYTE
    return cost.node_sent_bytes / (gbps * 1e6)


def _speedups(rows: Sequence[Measured], gbit_s: float) -> str:
    """How many times as fast as FP32 coded sums are at a rate: the least and the most."""
    times = {(row.collective, row.wire): row.ms for row in rows if row.gbit_s == gbit_s}
    ratios = [times[name, ""] / ms for (name, wire), ms in times.items() if wire]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times as fast at {gbit_s:g} Gbit/s"


def wires() -> Sheet:
    """Time of an all-reduce and of a reduce-scatter over the rate of a node's link."""
    rows = wire_rows(read_rows(ROWS))
    first, rates = rows[0], sorted({row.gbit_s for row in rows})
    told = ", ".join(_speedups(rows, rate) for rate in (rates[0], 1.0, rates[-1]))
    sheet = Sheet(
        800,
        430,
        "Sums over nodes by wire",
        f"Measured time of an all-reduce and of a reduce-scatter of {first.bytes >> 20} MiB over "
        f"{first.nodes} nodes of {first.ranks_per_node} ranks, for links of {rates[0]:g} to "
        f"{rates[-1]:g} Gbit/s a node, in FP32 and in codes of int8, fp8 and int4. Beside FP32, "
        f"codes are {told}. Up to some 0.25 Gbit/s all take little more than their bytes alone.",
    )
    heading = (
        f"{first.bytes >> 20} MiB of FP32, {first.nodes} nodes of {first.ranks_per_node} ranks"
    )
    sheet.text(27, 34, f"{heading}: measured, ms", Type(15, bold=True))
    x = Axis(rates[0] / 1.2, rates[-1] * 1.2, [(rate, f"{rate:g}") for rate in rates])
    y = Axis(9.0, 900.0, [(tick, f"{tick:g}") for tick in TICKS_MS])
    for index, collective in enumerate(COLLECTIVES):
        panel = Panel(Box(60 + index * 368, 84, 352, 252), x, y)
        panel.draw(sheet, collective, has_numbers=index == 0)
        mine = [row for row in rows if row.collective == collective]
        for wire, (_, colour, _) in WIRES.items():
            of_wire = sorted((row.gbit_s, row.ms) for row in mine if row.wire == wire)
            slowest = link_ms(next(r for r in mine if (r.wire, r.gbit_s) == (wire, rates[0])))
            # Time over rate is a straight line here, which is drawn as far as the panel goes.
            end = min(rates[-1], rates[0] * slowest / y.least)
            link = [(rates[0], slowest), (end, slowest * rates[0] / end)]
            panel.curve(sheet, link, colour, dashed=True)
            panel.curve(sheet, of_wire, colour)
        sheet.text(panel.place.middle[0], 378, "Gbit/s of a node's link", MIDDLE)
    names = [*WIRES.values(), ("the bytes alone on the link", "muted", True)]
    legend(sheet, 60, 412, names)
    return sheet
