"""The picture of ``ringcomm estimate``: memory by stage, and over the world."""

from __future__ import annotations

from typing import Any

from ringcomm.cli.estimate_report import Report, total_bytes
from ringcomm.cli.estimate_table import GB, count
from ringcomm.cli.picture import new_figure, write_figure

# Colours of the Okabe-Ito palette, told apart by all readers.
_PARTS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "working buffers": "#E69F00",
    "activations": "#CC79A7",
}
_STAGES = (("#000000", "o"), ("#0072B2", "s"), ("#D55E00", "^"), ("#009E73", "D"))
_SIZE_INCHES = (10.0, 4.2)
_LEAST_SHOWN_WORLD = 1024
# Sizes closer than this leave a logarithmic axis without two labels to read.
_LOG_FROM_RATIO = 20


def draw(report: Report, path: str) -> None:
    """Writes the picture; its format is the ending of ``path`` (png, svg, pdf).

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no format.
    """
    figure = new_figure(_SIZE_INCHES, path)
    by_stage, over_world = figure.subplots(1, 2)
    _draw_bars(by_stage, report)
    _draw_lines(over_world, report)
    request = report.request
    title = f"{count(request.model.total)} parameters, {request.precision}"
    write_figure(figure, (by_stage, over_world), title, path)


def _draw_bars(panel: Any, report: Report) -> None:
    labels = [f"stage {row.stage}" for row in report.rows]
    below = [0.0] * len(labels)
    for part, colour in _PARTS.items():
        heights = [
            {
                "parameters": row.state.params,
                "gradients": row.state.grads,
                "optimizer state": row.state.state,
                "working buffers": row.working.total,
                "activations": row.activation_bytes,
            }[part]
            / GB
            for row in report.rows
        ]
        if any(heights):
            panel.bar(labels, heights, bottom=below, color=colour, label=part, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    _draw_budget(panel, report)
    panel.use_sticky_edges = False
    panel.set_ylim(bottom=0.0)
    panel.set_ylabel("memory of a rank (GB = 1e9 bytes)")
    panel.set_title(f"world {report.request.world_size}", fontsize=10)


def _draw_lines(panel: Any, report: Report) -> None:
    last = max(_LEAST_SHOWN_WORLD, report.request.world_size)
    worlds = [1 << power for power in range(last.bit_length()) if 1 << power <= last]
    shown: list[float] = []
    for stage in report.request.stages:
        colour, marker = _STAGES[stage]
        sizes = [total_bytes(report, stage, world) / GB for world in worlds]
        panel.plot(worlds, sizes, color=colour, marker=marker, markersize=4, label=f"stage {stage}")
        shown += sizes
    _draw_budget(panel, report)
    panel.set_xscale("log", base=2)
    if max(shown) > _LOG_FROM_RATIO * min(shown):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0.0)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("world (ranks)")
    panel.set_title("all of it, over the world", fontsize=10)


def _draw_budget(panel: Any, report: Report) -> None:
    budget = report.request.budget_bytes
    if budget is not None:
        label = f"budget {budget / GB:g} GB"
        panel.axhline(budget / GB, color="#777777", linestyle="--", linewidth=1.2, label=label)
