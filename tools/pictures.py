# SPDX-License-Identifier: Apache-2.0
"""Draws the charts of docs/pictures from bench/results: `make pictures`.

The diagrams in this folder are SVG files that are edited by hand. Pages include a picture as an
image, so a picture has its own background, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ringcomm.bench.report import Report, Row, read, size_label
from ringcomm.bench.training_deepspeed import STAGES as DEEPSPEED

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "bench" / "results"
KIB, MIB = 1 << 10, 1 << 20
Points = Sequence[tuple[float, float]]

# Colours for light and for dark screens. Readers with colour blindness can distinguish the strong
# colours; the soft colours are backgrounds of text.
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
    """An SVG picture of width 800. Screen readers read ``title`` and ``desc``."""

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
        """Adds a line of text with its baseline at ``y``; the default font size is 13, ``how`` may
        change it.
        """
        self._add("text", style, x=x, y=y, **{"font_size": 13, **how}).text = text

    def line(self, points: Points, colour: str, width: float, dashed: bool = False) -> None:
        positions = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        how = {"stroke_width": width, "stroke_dasharray": "5 4" if dashed else ""}
        self._add("polyline", f"n s-{colour}", points=positions, **how)

    def dot(self, x: float, y: float, colour: str) -> None:
        self._add("circle", f"f-{colour}", cx=x, cy=y, r=3)

    def bar(self, x: float, y: float, width: float, colour: str) -> None:
        self._add("rect", f"f-{colour}-soft s-{colour}", x=x, y=y, width=width, height=24, rx=2)

    def svg(self) -> str:
        ET.indent(self._root, "")
        return ET.tostring(self._root, encoding="unicode") + "\n"


class Curve(NamedTuple):
    """A curve with its name in the legend."""

    name: str
    colour: str
    points: Points
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Panels side by side with the same logarithmic axes."""

    title: str
    desc: str
    heading: str
    x_ticks: Mapping[float, str]
    y_ticks: Sequence[float]
    panels: Mapping[str, Sequence[Curve]]
    note: str

    def sheet(self) -> Sheet:
        sheet = Sheet(404, self.title, self.desc)
        sheet.text(27, 34, self.heading, "f-ink b", font_size=15)
        count = len(self.panels)
        width = (720 - 20 * count) / count
        for index, (title, curves) in enumerate(self.panels.items()):
            self._panel(sheet, title, curves, 70 + index * (width + 20), width)
        for index, curve in enumerate(next(iter(self.panels.values()))):
            x = 60 + index * 140
            sheet.line([(x, 362), (x + 26, 362)], curve.colour, 2.6, curve.dashed)
            sheet.text(x + 32, 366, curve.name, "f-ink")
        sheet.text(60, 390, self.note)
        return sheet

    def _panel(
        self, sheet: Sheet, title: str, curves: Sequence[Curve], left: float, width: float
    ) -> None:
        """Draws a panel from 84 to 316 units below the top; only the first panel has numbers on its
        y axis.
        """
        x_range = (min(self.x_ticks) / 1.3, max(self.x_ticks) * 1.3)
        y_range = (self.y_ticks[0] / 1.4, self.y_ticks[-1] * 2)

        def at(x: float, y: float) -> tuple[float, float]:
            shares = (
                math.log(value / least) / math.log(most / least)
                for value, (least, most) in ((x, x_range), (y, y_range))
            )
            return left + next(shares) * width, 316 - next(shares) * 232

        sheet.text(left, 72, title, "f-ink b", font_size=14)
        for value in self.y_ticks:
            y = at(1, value)[1]
            sheet.line([(left, y), (left + width, y)], "faint", 1)
            if left < 100:
                sheet.text(left - 8, y + 4, f"{value:g}", font_size=12, text_anchor="end")
        for value, text in self.x_ticks.items():
            x = at(value, 1)[0]
            sheet.line([(x, 316), (x, 321)], "line", 1)
            sheet.text(x, 336, text, font_size=12, text_anchor="middle")
        sheet.line([(left, 316), (left + width, 316)], "line", 1.2)
        for curve in reversed(curves):
            positions = [at(*point) for point in curve.points]
            sheet.line(positions, curve.colour, 2.2, curve.dashed)
            for x, y in positions if not curve.dashed else []:
                sheet.dot(x, y, curve.colour)


# ---- bandwidth over size ----------------------------

# torch.distributed has all_reduce only in place.
CASES = (("reduce_scatter", "out"), ("all_gather", "out"), ("all_reduce", "in"))


def _machine(report: Report) -> str:
    facts = report.provenance
    return f"{facts.get('gpu', facts['cpu'])}, {facts['date']}"


def _bandwidths(
    rows: Sequence[Row], systems: Sequence[tuple[str, str, str]]
) -> dict[str, list[Curve]]:
    """Returns the systems' curves by collective, with names and colours."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if (row.collective, row.placement) in CASES and row.busbw_gbps:
            size = (float(row.size_bytes), row.busbw_gbps)
            points.setdefault((row.collective, row.system), []).append(size)
    return {
        collective: [
            Curve(name, colour, sorted(points[collective, system]), colour == "muted")
            for system, name, colour in systems
        ]
        for collective, _ in CASES
    }


def bandwidth() -> Sheet:
    """Draws the bandwidth of all systems of one run on the host, over the size."""
    report = read(RESULTS / "2ranks-float-plain.csv")
    systems = (
        *(("ringcomm", "ringcomm", "blue"), ("gloo", "Gloo", "orange")),
        *(("mpi", "MPICH", "green"), ("bare", "bare loop", "muted")),
    )
    return Chart(
        "Bandwidth over size: 2 ranks on CPUs",
        "Bus bandwidth of reduce-scatter, all-gather and all-reduce from 4 KiB to 64 MiB, two "
        "ranks, FP32, plain tensors: ringcomm lies above Gloo and MPICH at every size, and from 1 "
        "MiB on at 0.6 to 1.2 times the bandwidth of a bare loop. "
        f"Measured on {_machine(report)}, all systems in one run.",
        "2 ranks, FP32, plain tensors: bus bandwidth, GB/s",
        {4 * KIB: "4K", 64 * KIB: "64K", MIB: "1M", 8 * MIB: "8M", 64 * MIB: "64M"},
        (0.001, 0.01, 0.1, 1.0, 10.0),
        _bandwidths(report.rows, systems),
        f"{_machine(report)}; one run, medians of rounds by turns",
    ).sheet()


# Systems of collectives on CPUs, with their names and colours.
_LIBRARIES = (
    *(("gloo", "Gloo", "orange"), ("mpi", "MPICH", "green")),
    *(("impi", "Intel MPI", "violet"), ("oneccl", "oneCCL", "blue")),
)


def ratio_bars(reports: Sequence[Report]) -> Sheet:
    """Draws the systems' times at the largest size in ``reports``, as multiples of ringcomm's.

    All systems were measured in one session.
    """
    size_bytes = max(row.size_bytes for report in reports for row in report.rows)
    ratios = {
        (row.collective, row.placement, row.system): row.ratio
        for report in reports
        for row in report.rows
        if row.size_bytes == size_bytes and row.ratio
    }
    systems = [each for each in _LIBRARIES if all((*case, each[0]) in ratios for case in CASES)]
    bars = [
        (f"{collective}: {name}", colour, ratios[collective, placement, system])
        for collective, placement in CASES
        for system, name, colour in systems
    ]
    told = "; ".join(f"{name} {_multiple(ratio)} times" for name, _, ratio in bars)
    bottom = 89 + (len(bars) - 1) * 33 + 10 * (len(CASES) - 1)
    machine, size = _machine(reports[0]), size_label(size_bytes)
    sheet = Sheet(
        bottom + 56,
        f"Collectives of {size}: the time of other libraries over the time of ringcomm",
        f"Two ranks on CPUs, FP32, tensors in the heap, all systems in one session: {told} as long "
        f"as ringcomm. Measured on {machine}.",
    )
    heading = f"Collectives of {size}, 2 ranks: how many times as long as ringcomm"
    sheet.text(27, 34, heading, "f-ink b", font_size=15)
    scale = 440 / max([1.0, *(ratio for _, _, ratio in bars)])
    for index, (name, colour, ratio) in enumerate(bars):
        y = 56 + index * 33 + 10 * (index // len(systems))
        lost = ", lost" if ratio < 1 else ""
        sheet.text(228, y + 17, name, "f-ink", text_anchor="end")
        sheet.bar(240, y, ratio * scale, colour)
        sheet.text(247 + ratio * scale, y + 17, f"{_multiple(ratio)}{lost}", "f-ink b")
    note = f"FP32 tensors in the heap; {machine}; one session, medians of rounds"
    sheet.text(27, bottom + 38, note)
    return sheet


def _multiple(ratio: float) -> str:
    """Returns a ratio with one decimal, or below 2 with two."""
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def bandwidth_gpu() -> Sheet:
    """Draws bandwidth over size of two ranks that share a GPU."""
    report = read(RESULTS / "gpu-nvidia-h100-80gb-hbm3-2026-11-26.csv")
    one_by_one = [row for row in report.rows if row.ranks == 2 and not row.graph_calls]
    rows = [row for row in one_by_one if row.size_bytes >= MIB]
    # The recorded file uses an old name of one-shot.
    systems = (
        *(("ringcomm", "ringcomm", "blue"), ("ringcomm:ring", "its ring", "violet")),
        *(("triton:direct", "Triton kernels", "orange"), ("torch", "torch", "green")),
        ("copy", "copy", "muted"),
    )
    return Chart(
        "Bandwidth over size: 2 ranks that share an H100",
        "Bus bandwidth of reduce-scatter, all-gather and all-reduce from 1 to 256 MiB, two ranks "
        "that share one GPU. torch's sums and copies, and a copy, have 4 to 10 times the "
        "bandwidth of ringcomm at 1 MiB, and 1.1 to 1.5 times at 256 MiB. "
        f"Measured on {_machine(report)}.",
        "2 ranks on one GPU, FP32: bus bandwidth, GB/s",
        {MIB: "1M", 4 * MIB: "4M", 16 * MIB: "16M", 64 * MIB: "64M", 256 * MIB: "256M"},
        (1.0, 10.0, 100.0, 1000.0),
        _bandwidths(rows, systems),
        f"{_machine(report)}; one launch a call, heap tensors",
    ).sheet()


# ---- a training step ----------------------------

BARS = (
    *((f"stage {stage}", f"ringcomm, stage {stage}", "blue") for stage in range(4)),
    ("ddp on ringcomm", "DDP on ringcomm", "violet"),
    ("ddp on gloo", "DDP on Gloo", "orange"),
    ("fsdp2 on ringcomm", "FSDP2 on ringcomm", "violet"),
    ("fsdp2 on gloo", "FSDP2 on Gloo", "orange"),
    *((name, f"DeepSpeed, ZeRO-{stage}", "green") for name, stage in DEEPSPEED.items()),
)


def training() -> Sheet:
    """Draws the time and memory of a training step, for all systems of one run."""
    report = read(RESULTS / "training" / "2ranks-deepspeed.csv")
    pairs = {
        row.system: (row.time_us / 1e3, row.held_bytes / 1e6)
        for row in report.rows
        if row.time_us is not None and row.held_bytes is not None
    }
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
    scales = [230 / max(pairs[name][column] for name, _, _ in BARS) for column in (0, 1)]
    for index, (system, name, colour) in enumerate(BARS):
        y = 80 + index * 35 + 8 * (index >= 4)
        sheet.text(178, y + 17, name, "f-ink", text_anchor="end")
        for x, value, scale in zip((190, 500), pairs[system], scales, strict=True):
            sheet.bar(x, y, value * scale, colour)
            sheet.text(x + value * scale + 7, y + 17, f"{value:.0f}", "f-ink b")
    sheet.text(27, 526, f"{_machine(report)}; memory: what training adds.")
    load = report.provenance["load"].partition(" ")[0]
    sheet.text(27, 546, f"One run, medians, at a load average of {load}; DeepSpeed on Gloo.")
    return sheet


PICTURES: dict[str, Callable[[], Sheet]] = {
    "bandwidth": bandwidth,
    "bandwidth-h100": bandwidth_gpu,
    "training": training,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
