"""Loss and memory over the steps: as a picture, or in characters."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from ringcomm.cli.picture import new_figure, write_figure
from ringcomm.cli.training_memory import MB
from ringcomm.cli.training_outcome import Outcome

COLUMNS = 60
LOSS_LINES = 8
MEMORY_LINES = 4
LABEL_CHARS = 9
# Colours of the Okabe-Ito palette, told apart by all readers.
RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
SIZE_INCHES = (8.0, 6.0)


def draw(outcome: Outcome, title: str, path: str) -> None:
    """Writes the picture; its format is the ending of ``path`` (png, svg, pdf).

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no format.
    """
    figure = new_figure(SIZE_INCHES, path)
    loss, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_loss(loss, outcome)
    _draw_memory(memory, outcome)
    write_figure(figure, (loss, memory), title, path)


def _draw_loss(panel: Any, outcome: Outcome) -> None:
    steps = len(outcome.losses)
    panel.plot(range(steps), outcome.losses, color="#0072B2", linewidth=1.2, label="training")
    held_out = (outcome.held_out_before, outcome.held_out_after)
    panel.plot((0, steps), held_out, color="#D55E00", marker="o", linestyle="", label="held out")
    panel.set_ylabel("loss (nats per byte)")


def _draw_memory(panel: Any, outcome: Outcome) -> None:
    steps = range(outcome.first_step, len(outcome.losses))
    for rank, held in enumerate(outcome.memory):
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
        sizes = [size / MB for size in held.added_bytes]
        panel.plot(steps, sizes, color=colour, linewidth=1.2, label=f"rank {rank}")
    panel.set_ylim(bottom=0.0)
    panel.set_ylabel("memory added (MB = 1e6 bytes)")
    panel.set_xlabel("step")


def as_text(outcome: Outcome) -> str:
    """The same in characters; of the ranks' memory that of the one that holds most."""
    steps = len(outcome.losses)
    most = max(outcome.memory, key=lambda held: max(held.added_bytes))
    sizes = [size / MB for size in most.added_bytes]
    return "\n".join(
        (
            "loss (nats per byte)",
            *curve(outcome.losses, LOSS_LINES, from_zero=False),
            _axis(0, steps - 1),
            "memory that training adds, on the rank where it is most (MB = 1e6 bytes)",
            *curve(sizes, MEMORY_LINES, from_zero=True),
            _axis(outcome.first_step, steps - 1),
        )
    )


def curve(values: Sequence[float], lines: int, from_zero: bool) -> list[str]:
    """``lines`` lines of text with the largest and the smallest value at their left.

    Each of at most 60 columns is the mean of its share of ``values``; what is not finite leaves its
    column empty.
    """
    columns = min(COLUMNS, len(values))
    edges = [column * len(values) // columns for column in range(columns + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return ["(no value is finite)"]
    low, high = min([0.0, *finite] if from_zero else finite), max(finite)
    grid = [[" "] * columns for _ in range(lines)]
    for column, mean in enumerate(means):
        if math.isfinite(mean):
            height = (mean - low) / (high - low) if high > low else 0.0
            grid[round((1 - height) * (lines - 1))][column] = "*"
    labels = [f"{high:.4g}", *[""] * (lines - 2), f"{low:.4g}"]
    return [
        f"{label:>{LABEL_CHARS}} |{''.join(row)}".rstrip()
        for label, row in zip(labels, grid, strict=True)
    ]


def _axis(first: int, last: int) -> str:
    columns = min(COLUMNS, last - first + 1)
    return f"{'step':>{LABEL_CHARS}}  {first}{last:>{max(2, columns - len(str(first)))}}"
