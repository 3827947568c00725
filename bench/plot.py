"""Bandwidth over message size, a panel per collective and a line per system.

``python -m ringcomm.bench.plot RESULTS... -o PICTURE`` draws from files that the harness wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import IN_PLACE, OUT_OF_PLACE
from .report import Report, Row, read

# In the order of the legend. Colours of the Okabe-Ito palette, told apart by all readers.
_STYLES = {
    "ringcomm": ("#0072B2", "o", "-"),
    "gloo": ("#D55E00", "s", "-"),
    "mpi": ("#009E73", "^", "-"),
    "bare": ("#777777", "", "--"),
    "ringcomm:direct": ("#56B4E9", "o", ":"),
    "ringcomm:ring": ("#CC79A7", "o", ":"),
    "ringcomm:packet": ("#000000", "o", ":"),
    "nccl": ("#D55E00", "s", "-"),
    "torch": ("#E69F00", "^", "-"),
    "copy": ("#777777", "", "--"),
}
_LABELS = {
    "gloo": "Gloo",
    "mpi": "MPICH",
    "bare": "bare loop",
    "nccl": "NCCL",
    "torch": "torch's operations",
    "copy": "plain copy",
}
_PANEL_INCHES = (4.6, 3.6)
_MAX_COLUMNS = 3


def draw(report: Report, path: str | Path) -> None:
    """Writes the picture; its format is the ending of ``path`` (png, svg, pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row.busbw_gbps]
    collectives = list(dict.fromkeys(row.collective for row in rows))
    if not collectives:
        raise ValueError("no row with a time: nothing to draw")
    columns = min(len(collectives), _MAX_COLUMNS)
    lines = -(-len(collectives) // columns)
    size_inches = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines + 0.9)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=size_inches, squeeze=False, sharey=True, layout="constrained"
    )
    panels = list(axes.flat)
    for panel, collective in zip(panels, collectives, strict=False):
        _draw_panel(panel, collective, [row for row in rows if row.collective == collective])
    for panel in panels[len(collectives) :]:
        panel.set_visible(False)
    for line in axes:
        line[0].set_ylabel("bus bandwidth (GB/s)")
    named = dict(item for panel in panels for item in zip(*_legend_of(panel), strict=True))
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=len(named), frameon=False
    )
    figure.suptitle(_title(report, rows), fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Any, collective: str, rows: Sequence[Row]) -> None:
    # Systems differ in what they offer: the placement that most of them have is shown.
    systems_of = {
        placement: {row.system for row in rows if row.placement == placement}
        for placement in (OUT_OF_PLACE, IN_PLACE)
    }
    placement = max(systems_of, key=lambda placement: len(systems_of[placement]))
    shown = [row for row in rows if row.placement == placement]
    for system, (colour, marker, line_style) in _STYLES.items():
        points = [(row.size_bytes, row.busbw_gbps) for row in shown if row.system == system]
        if points:
            panel.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                markersize=4.5,
                linewidth=1.6,
                linestyle=line_style,
                label=_LABELS.get(system, system),
            )
    sizes = sorted({row.size_bytes for row in shown})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [size_label(size) for size in sizes], rotation=45, fontsize=8)
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.grid(True, which="major", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    where = "in place" if placement == IN_PLACE else "out of place"
    panel.set_title(f"{collective} ({where})", fontsize=10)
    panel.set_xlabel("size")


def _legend_of(panel: Any) -> tuple[list[str], list[Any]]:
    handles, labels = panel.get_legend_handles_labels()
    return labels, handles


def size_label(size_bytes: int) -> str:
    """ "4 KiB" for 4096: the largest unit that leaves a whole number, else one decimal."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.3g} {unit}"
    return f"{size_bytes} B"


def _title(report: Report, rows: Sequence[Row]) -> str:
    facts = report.provenance
    cpu = f"{facts.get('cpu', 'unknown CPU')}, {facts.get('cores', '?')} cores"
    machine = f"{facts['gpu']}, {rows[0].mode}" if "gpu" in facts else cpu
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    return f"{rows[0].ranks} ranks, {dtypes}    {machine}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ringcomm.bench.plot", description="Draws results of the harness."
    )
    parser.add_argument("results", nargs="+", help="JSON or CSV files; their rows are put together")
    parser.add_argument("-o", "--output", required=True, help="PNG, SVG or PDF to write")
    args = parser.parse_args(argv)
    reports = [read(path) for path in args.results]
    rows = [row for report in reports for row in report.rows]
    draw(Report(reports[0].provenance, rows), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
