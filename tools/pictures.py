"""Draws the charts of docs/pictures from bench/results: `make pictures`.

The diagrams in that folder are SVG files that are edited by hand. A picture stands in a page as an
image: it follows the reader's preference for light or dark, and has a background of its own.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringcomm import _native
from ringcomm.bench.modes import PROCESSES
from ringcomm.bench.report import Report, Row, read
from ringcomm.bench.training_deepspeed import STAGES as DEEPSPEED
from ringcomm.comm.topology.fit import Measured, read_rows

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "bench" / "results"
TRAINING = RESULTS / "training" / "2ranks-deepspeed.csv"
WIRES = RESULTS / "nodes" / "wires.csv"
KIB, MIB = 1 << 10, 1 << 20
Points = Sequence[tuple[float, float]]

# On light and on dark screens. Readers who confuse colours tell the strong ones apart; the soft
# ones are fills behind text.
COLOURS = {
    "paper": ("#ffffff", "#161a22"),
    "panel": ("#f3f5f9", "#222834"),
    "ink": ("#1d2330", "#e8ebf2"),
    "muted": ("#596273", "#a4adbd"),
    "line": ("#aab2c0", "#525c6d"),
    "faint": ("#e2e6ed", "#2c3340"),
    "blue": ("#0b65c2", "#6cb2ff"),
    "blue-soft": ("#dcebfc", "#17355a"),
    "orange": ("#a34606", "#ffa562"),
    "orange-soft": ("#fde6d3", "#4d2d10"),
    "green": ("#0b7a55", "#58d3a2"),
    "green-soft": ("#d6f2e6", "#113f30"),
    "violet": ("#7a3fb0", "#c79bf5"),
    "violet-soft": ("#eee2f9", "#38244f"),
}
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"


def _theme(index: int) -> str:
    return "".join(
        f".f-{name}{{fill:{both[index]}}}.s-{name}{{stroke:{both[index]}}}"
        for name, both in COLOURS.items()
    )


class Sheet:
    """An SVG picture 800 wide. ``title`` and ``desc`` are read to those who do not see it."""

    def __init__(self, height: int, title: str, desc: str) -> None:
        size = {"width": "800", "height": str(height)}
        described = {"role": "img", "aria-labelledby": "title desc"}
        space = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 800 {height}"}
        self._root = ET.Element("svg", {**space, **size, **described})
        ET.SubElement(self._root, "title", id="title").text = title
        ET.SubElement(self._root, "desc", id="desc").text = desc
        dark = f"@media (prefers-color-scheme:dark){{{_theme(1)}}}"
        style = f"text{{font-family:{FONT}}}.b{{font-weight:600}}.n{{fill:none}}{_theme(0)}{dark}"
        ET.SubElement(self._root, "style").text = style
        self._add("rect", "f-paper", width=800, height=height, rx=10)

    def _add(self, tag: str, classes: str, **attributes: object) -> ET.Element:
        texts = {
            name.replace("_", "-"): f"{value:.4g}" if isinstance(value, float) else str(value)
            for name, value in attributes.items()
            if value
        }
        return ET.SubElement(self._root, tag, {"class": classes, **texts})

    def text(self, x: float, y: float, text: str, style: str = "f-muted", **how: object) -> None:
        """Sets a line of text whose baseline is at ``y``; the size is 13 unless ``how`` has one."""
        self._add("text", style, x=x, y=y, **{"font_size": 13, **how}).text = text

    def line(self, points: Points, colour: str, width: float, dashed: bool = False) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = "5 4" if dashed else ""
        self._add(
            *("polyline", f"n s-{colour}"),
            stroke_width=width,
            stroke_dasharray=dashes,
            points=places,
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        self._add("circle", f"f-{colour}", cx=x, cy=y, r=3)

    def bar(self, x: float, y: float, width: float, colour: str) -> None:
        self._add("rect", f"f-{colour}-soft s-{colour}", x=x, y=y, width=width, height=24, rx=2)

    def svg(self) -> str:
        ET.indent(self._root, "")
        return ET.tostring(self._root, encoding="unicode") + "\n"


@dataclass(frozen=True)
class Curve:
    """One system's name in the legend, and how it is drawn."""

    name: str
    colour: str
    dashed: bool = False


def legend(sheet: Sheet, y: float, curves: Sequence[Curve], step: float) -> None:
    """Draws the names of curves, ``step`` from each other."""
    for index, curve in enumerate(curves):
        x = 60 + index * step
        sheet.line([(x, y - 4), (x + 26, y - 4)], curve.colour, 2.6, curve.dashed)
        sheet.text(x + 32, y, curve.name, "f-ink")


@dataclass(frozen=True)
class Panel:
    """A place for curves, 84 to 316 from the top, with logarithmic axes."""

    left: float
    width: float
    x_range: tuple[float, float]
    x_ticks: Mapping[float, str]
    y_ticks: Sequence[float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        y_range = (self.y_ticks[0] / 1.4, self.y_ticks[-1] * 2)
        share_x, share_y = (
            math.log(value / least) / math.log(most / least)
            for value, (least, most) in ((x, self.x_range), (y, y_range))
        )
        return self.left + share_x * self.width, 316 - share_y * 232

    def draw(self, sheet: Sheet, title: str, numbered: bool) -> None:
        """Draws title, grid and ticks; ``numbered``: those of y with their numbers."""
        right = self.left + self.width
        sheet.text(self.left, 72, title, "f-ink b", font_size=14)
        for value in self.y_ticks:
            y = self.at(1, value)[1]
            sheet.line([(self.left, y), (right, y)], "faint", 1)
            if numbered:
                sheet.text(self.left - 8, y + 4, f"{value:g}", font_size=12, text_anchor="end")
        for value, text in self.x_ticks.items():
            x = self.at(value, 1)[0]
            sheet.line([(x, 316), (x, 321)], "line", 1)
            sheet.text(x, 336, text, font_size=12, text_anchor="middle")
        sheet.line([(self.left, 316), (right, 316)], "line", 1.2)

    def curve(self, sheet: Sheet, points: Points, curve: Curve) -> None:
        places = [self.at(*point) for point in points]
        sheet.line(places, curve.colour, 2.2, curve.dashed)
        for x, y in places if not curve.dashed else []:
            sheet.dot(x, y, curve.colour)


# ---- bandwidth over size ----------------------------

# torch.distributed has all_reduce in place only.
CASES = (("reduce_scatter", "out"), ("all_gather", "out"), ("all_reduce", "in"))
HOST_CURVES = {
    "bare": Curve("bare loop", "muted", True),
    "mpi": Curve("MPICH", "green"),
    "gloo": Curve("Gloo", "orange"),
    "ringcomm": Curve("ringcomm", "blue"),
}
GPU_CURVES = {
    "copy": Curve("plain copy", "muted", True),
    "torch": Curve("torch", "green"),
    "triton:direct": Curve("its Triton kernels", "orange"),
    "ringcomm:ring": Curve("its ring", "violet"),
    "ringcomm": Curve("ringcomm", "blue"),
}


def _machine(report: Report) -> str:
    facts = report.provenance
    return f"{facts.get('gpu', facts['cpu'])}, {facts['date']}"


@dataclass(frozen=True)
class Bandwidth:
    """A picture of bandwidth over size, of all systems of one run."""

    file: Path
    title: str
    desc: str
    heading: str
    curves: Mapping[str, Curve]
    y_ticks: Sequence[float]
    note: str

    def draw(self) -> Sheet:
        report = read(self.file)
        rows = [row for row in report.rows if row.busbw_gbps and _is_large_or_of_host(row)]
        machine = _machine(report)
        sheet = Sheet(404, self.title, f"{self.desc} Measured on {machine}.")
        sheet.text(27, 34, f"{self.heading}: bus bandwidth, GB/s", "f-ink b", font_size=15)
        sizes = sorted({row.size_bytes for row in rows})
        x_range = (sizes[0] / 1.3, sizes[-1] * 1.3)
        x_ticks = {
            float(size): f"{size // MIB}M" if size >= MIB else f"{size // KIB}K"
            for size in sizes[:: 1 if len(sizes) < 8 else 3]
        }
        for index, case in enumerate(CASES):
            panel = Panel(70 + index * 240, 220, x_range, x_ticks, self.y_ticks)
            panel.draw(sheet, case[0], numbered=index == 0)
            for system, curve in self.curves.items():
                points = [
                    (float(row.size_bytes), row.busbw_gbps or 0.0)
                    for row in rows
                    if (row.collective, row.placement) == case and row.system == system
                ]
                panel.curve(sheet, sorted(points), curve)
        legend(sheet, 366, [*self.curves.values()][::-1], 145)
        sheet.text(60, 390, f"{machine}; {self.note}")
        return sheet


def _is_large_or_of_host(row: Row) -> bool:
    """On a GPU, calls of two ranks one by one: small ones cost what a launch costs."""
    large = row.ranks == 2 and not row.graph_calls and row.size_bytes >= MIB
    return large or row.mode == PROCESSES


HOST_BANDWIDTH = Bandwidth(
    RESULTS / "2ranks-float-plain.csv",
    "Bandwidth over size: 2 ranks on CPUs",
    "Bus bandwidth of reduce-scatter, all-gather and all-reduce from 4 KiB to 64 MiB, two ranks, "
    "FP32, plain tensors, all systems in one run: ringcomm lies above Gloo and MPICH at every "
    "size, and from 1 MiB on at 0.6 to 1.2 times the bandwidth of a bare loop.",
    "2 ranks, FP32, plain tensors",
    HOST_CURVES,
    (0.001, 0.01, 0.1, 1.0, 10.0),
    "one run, medians of rounds by turns",
)
GPU_BANDWIDTH = Bandwidth(
    RESULTS / "gpu-nvidia-h100-80gb-hbm3-2026-11-26.csv",
    "Bandwidth over size: 2 ranks that share an H100",
    "Bus bandwidth of reduce-scatter, all-gather and all-reduce from 1 to 256 MiB, two ranks that "
    "share one GPU. torch's sums and copies, and a plain copy, have 4 to 10 times the bandwidth "
    "of ringcomm at 1 MiB, and 1.1 to 1.5 times at 256 MiB.",
    "2 ranks on one GPU, FP32",
    GPU_CURVES,
    (1.0, 10.0, 100.0, 1000.0),
    "one launch a call, heap tensors",
)


# ---- a training step ----------------------------

BARS = (
    *((f"stage {stage}", f"ringcomm, stage {stage}", "blue") for stage in range(4)),
    ("ddp on ringcomm", "DDP on ringcomm", "violet"),
    ("ddp on gloo", "DDP on Gloo", "orange"),
    ("fsdp2 on ringcomm", "FSDP2 on ringcomm", "violet"),
    ("fsdp2 on gloo", "FSDP2 on Gloo", "orange"),
    *((name, f"DeepSpeed, ZeRO-{stage}", "green") for name, stage in DEEPSPEED.items()),
)


def _time_and_memory(row: Row) -> tuple[float, float]:
    """Milliseconds of a step, and megabytes that training adds to a rank."""
    if row.time_us is None or row.held_bytes is None:
        raise ValueError(f"{row.system}: not measured: {row.note}")
    return row.time_us / 1e3, row.held_bytes / 1e6


def training() -> Sheet:
    """Time and memory of a training step, side by side, of one run."""
    report = read(TRAINING)
    rows = {row.system: row for row in report.rows}
    pairs = {system: _time_and_memory(rows[system]) for system, _, _ in BARS}
    first = report.rows[0]
    model = f"{first.count / 1e6:.0f} million FP32 parameters, {first.ranks} ranks, AdamW"
    told = "; ".join(
        f"{name} {pairs[system][0]:.0f} ms and {pairs[system][1]:.0f} MB"
        for system, name, _ in BARS
    )
    sheet = Sheet(
        560,
        "A training step: time and memory",
        f"One GPT of {model}; all systems in one run on {_machine(report)}. Time of a step and "
        f"memory that training adds to a rank: {told}.",
    )
    heading = f"GPT {first.placement.partition(',')[0]}, {model}"
    sheet.text(27, 34, heading, "f-ink b", font_size=15)
    sheet.text(190, 66, "time of a step, ms")
    sheet.text(500, 66, "memory of a rank, MB")
    scales = [230 / max(pair[column] for pair in pairs.values()) for column in (0, 1)]
    for index, (system, name, colour) in enumerate(BARS):
        y = 80 + index * 35 + 8 * (index >= 4)
        sheet.text(178, y + 17, name, "f-ink", text_anchor="end")
        for x, value, scale in zip((190, 500), pairs[system], scales, strict=True):
            sheet.bar(x, y, value * scale, colour)
            sheet.text(x + value * scale + 7, y + 17, f"{value:.0f}", "f-ink b")
    load = report.provenance["load"].partition(" ")[0]
    told = f"One run, medians; load average {load}, of which 2 are the ranks"
    sheet.text(27, 526, f"{_machine(report)}; memory: what training adds.")
    sheet.text(27, 546, f"{told}; DeepSpeed on Gloo.")
    return sheet


# ---- sums over nodes by wire ----------------------------

WIRE_CURVES = {
    "": Curve("FP32", "ink"),
    "int8": Curve("int8", "blue"),
    "fp8": Curve("fp8", "orange"),
    "int4": Curve("int4", "green"),
}
SUMS = {"all_reduce": 2, "reduce_scatter": 1}  # with the halves of a sum that each crosses the link


def link_ms(row: Measured) -> float:
    """The time that the bytes of a row take on a node's link, and nothing else."""
    sent_bytes = SUMS[row.collective] * row.bytes * (row.nodes - 1) / row.nodes
    if row.wire:
        elems = row.bytes // 4
        sent_bytes *= _native.wire_bytes(_native.WIRES[row.wire], elems) / (4 * elems)
    return sent_bytes * 8 / (row.nics_per_node * row.gbit_s * 1e6)


def wires() -> Sheet:
    """Time of an all-reduce and of a reduce-scatter over the rate of a node's link."""
    rows = [r for r in read_rows(WIRES) if r.algorithm == "rail-direct" and r.collective in SUMS]
    rows = [row for row in rows if row.bytes == max(each.bytes for each in rows)]
    first, rates = rows[0], sorted({row.gbit_s for row in rows})
    shape = f"{first.bytes >> 20} MiB of FP32, {first.nodes} nodes of {first.ranks_per_node} ranks"
    sheet = Sheet(
        430,
        "Sums over nodes by wire",
        f"Measured time of an all-reduce and of a reduce-scatter, {shape}, for links of "
        f"{rates[0]:g} to {rates[-1]:g} Gbit/s a node, in FP32 and in codes of int8, fp8 and int4. "
        "On slow links codes are faster than FP32, as their bytes are fewer; on fast ones all "
        "take the time of the processors.",
    )
    sheet.text(27, 34, f"{shape}: measured, ms", "f-ink b", font_size=15)
    x_range, x_ticks = (rates[0] / 1.2, rates[-1] * 1.2), {rate: f"{rate:g}" for rate in rates}
    for index, collective in enumerate(SUMS):
        panel = Panel(60 + index * 368, 352, x_range, x_ticks, (10, 20, 50, 100, 200, 500))
        panel.draw(sheet, collective, numbered=index == 0)
        for wire, curve in WIRE_CURVES.items():
            mine = [row for row in rows if (row.collective, row.wire) == (collective, wire)]
            slowest = link_ms(next(row for row in mine if row.gbit_s == rates[0]))
            # Time over rate is a straight line here, drawn to the last rate or down to 8 ms.
            end = min(rates[-1], rates[0] * slowest / 8)
            link = [(rates[0], slowest), (end, slowest * rates[0] / end)]
            panel.curve(sheet, link, Curve(curve.name, curve.colour, dashed=True))
            panel.curve(sheet, sorted((row.gbit_s, row.ms) for row in mine), curve)
        middle = panel.left + panel.width / 2
        sheet.text(middle, 366, "Gbit/s of a node's link", text_anchor="middle")
    bytes_alone = Curve("the bytes alone on the link", "muted", dashed=True)
    legend(sheet, 406, [*WIRE_CURVES.values(), bytes_alone], 110)
    return sheet


PICTURES: dict[str, Callable[[], Sheet]] = {
    "bandwidth": HOST_BANDWIDTH.draw,
    "bandwidth-h100": GPU_BANDWIDTH.draw,
    "training": training,
    "wires": wires,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
