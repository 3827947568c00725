"""Sections of what was measured: benchmarks, training runs, and what ``ringcomm doctor`` found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringcomm.cli.doctor import Finding
from ringcomm.cli.report.parts import (
    COLOURS,
    Block,
    Figure,
    Findings,
    Section,
    Table,
    Text,
    axis_of_sizes,
    colours_of,
    duration,
    in_figure,
    size,
)

__all__ = [
    "ShownMemory",
    "ShownOutcome",
    "ShownRow",
    "ShownRun",
    "of_benchmark",
    "of_doctor",
    "of_training",
]

MB = 1e6
# Times below so many microseconds are shown in these.
_US_UP_TO = 1000.0
_LINEAR_AND_LOG = (("linear", {"yaxis.type": "linear"}), ("logarithmic", {"yaxis.type": "log"}))


@dataclass(frozen=True)
class ShownRow:
    """A row of a benchmark, with those fields of ``bench/report.py`` that the page shows."""

    collective: str
    size_bytes: int
    dtype: str
    ranks: int
    system: str
    placement: str
    op: str = ""
    mode: str = ""
    nodes: int = 1
    time_us: float | None = None
    best_us: float | None = None
    p95_us: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    wrong: int | None = None
    rounds: int = 0
    held_bytes: float | None = None  # of a small model less than nothing
    note: str = ""


def of_benchmark(
    path: Path, title: str, provenance: Mapping[str, str], rows: Sequence[ShownRow]
) -> Section:
    """Bandwidths over size, or times by system, a figure for each collective."""
    blocks: list[Block] = []
    wrong = [row for row in rows if row.wrong]
    if wrong:
        names = ", ".join(sorted({f"{row.collective} of {row.system}" for row in wrong}))
        blocks.append(
            Findings(
                [("FAIL", "results", f"wrong in {len(wrong)} rows: {names}", "see the tables")]
            )
        )
    collectives = list(dict.fromkeys(row.collective for row in rows))
    for name in collectives:
        of_name = [row for row in rows if row.collective == name]
        timed = [row for row in of_name if row.time_us is not None]
        if not timed:
            blocks.append(_table_of(of_name, f"{name}: no row has a time"))
        elif not _is_over_size(timed):
            blocks.append(_times(name, of_name))
            if any(row.held_bytes is not None for row in of_name):
                blocks.append(_held(name, of_name))
        elif any(row.busbw_gbps for row in timed):
            blocks.append(_bandwidths(name, of_name))
        else:
            blocks.append(_times_over_size(name, of_name))
    return Section("benchmark", title, [str(path)], list(provenance.items()), blocks)


def _is_over_size(rows: Sequence[ShownRow]) -> bool:
    """True if a line, which has one place, has several sizes."""
    label = _labels(rows)
    return len({(label(row), row.size_bytes) for row in rows}) > len({label(row) for row in rows})


def _labels(rows: Sequence[ShownRow]) -> Callable[[ShownRow], str]:
    """Names a line: the system, and of what else there are several."""
    others: list[Callable[[ShownRow], str]] = [
        each
        for each in (
            lambda row: row.placement.replace("_", " "),
            lambda row: row.dtype,
            lambda row: row.mode,
            lambda row: f"{row.ranks} ranks",
        )
        if len({each(row) for row in rows}) > 1
    ]
    return lambda row: ", ".join([row.system, *(each(row) for each in others)])


def _bandwidths(name: str, rows: Sequence[ShownRow]) -> Figure:
    timed = [row for row in rows if row.busbw_gbps]
    return _over_size(
        Figure(
            f"{name}: bus bandwidth over size",
            _lines(timed, lambda row: row.busbw_gbps or 0.0, "GB/s"),
            {"yaxis": {"title": {"text": "bus bandwidth (GB/s)"}, "rangemode": "tozero"}},
            _table_of(rows, f"all rows of {name}"),
            buttons=_LINEAR_AND_LOG,
            is_wide=False,
        ),
        timed,
    )


def _times_over_size(name: str, rows: Sequence[ShownRow]) -> Figure:
    timed = [row for row in rows if row.time_us is not None]
    return _over_size(
        Figure(
            f"{name}: time over size",
            _lines(timed, lambda row: row.time_us or 0.0, "us"),
            {"yaxis": {"title": {"text": "time (us)"}, "type": "log"}},
            _table_of(rows, f"all rows of {name}"),
            buttons=_LINEAR_AND_LOG[::-1],
            is_wide=False,
        ),
        timed,
    )


def _over_size(figure: Figure, rows: Sequence[ShownRow]) -> Figure:
    layout = {
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": axis_of_sizes([row.size_bytes for row in rows]),
        **figure.layout,
    }
    return replace(figure, layout=layout)


def _lines(
    rows: Sequence[ShownRow], value: Callable[[ShownRow], float], unit: str
) -> list[dict[str, Any]]:
    label = _labels(rows)
    colours = colours_of([row.system for row in rows])
    dashes = dict.fromkeys((row.placement, row.dtype, row.mode, row.ranks) for row in rows)
    styles = ("solid", "dot", "dash", "dashdot")
    style_of = {key: styles[index % len(styles)] for index, key in enumerate(dashes)}
    lines: dict[str, list[ShownRow]] = {}
    for row in rows:
        lines.setdefault(label(row), []).append(row)
    found = []
    for name, of_line in lines.items():
        first = of_line[0]
        points = sorted(of_line, key=lambda row: row.size_bytes)
        style = style_of[first.placement, first.dtype, first.mode, first.ranks]
        found.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": in_figure(name),
                "x": [row.size_bytes for row in points],
                "y": [value(row) for row in points],
                "line": {"color": colours[first.system], "dash": style, "width": 2},
                "marker": {"size": 6, "symbol": list(colours).index(first.system) % 6},
                "hovertext": [_hover(name, row, value(row), unit) for row in points],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    return found


def _hover(name: str, row: ShownRow, value: float, unit: str) -> str:
    lines = [f"<b>{in_figure(name)}</b>, {size(row.size_bytes)}", f"{value:.4g} {unit}"]
    if row.time_us is not None and unit != "us":
        lines.append(f"{duration(row.time_us / 1e6)} a call")
    if row.ratio is not None:
        lines.append(f"ratio {row.ratio:.3g}")
    if row.wrong:
        lines.append(f"WRONG: {row.wrong}")
    return "<br>".join(lines)


def _bars(
    rows: Sequence[ShownRow],
    value: Callable[[ShownRow], float | None],
    unit: str,
    spread_us: float | None,
) -> tuple[list[dict[str, Any]], int]:
    """Horizontal bars by system, a colour for each place; and the height that they need.

    Args:
        rows: with a value each, or None for no bar.
        value: of a row.
        unit: of the values.
        spread_us: of values that are times, the unit in microseconds, for whiskers.
    """
    places = list(dict.fromkeys((row.placement, row.ranks, row.size_bytes) for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    data = []
    for index, place in enumerate(places):
        here = [row for row in rows if (row.placement, row.ranks, row.size_bytes) == place]
        here = [row for row in here if value(row) is not None]
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": in_figure(f"{place[0]}, {place[1]} ranks"),
            "y": [in_figure(row.system) for row in here],
            "x": [value(row) for row in here],
            "marker": {"color": COLOURS[index % len(COLOURS)]},
            "hovertemplate": f"%{{y}}: %{{x:.5g}} {unit}<extra></extra>",
        }
        if spread_us and all(row.best_us and row.p95_us and row.time_us for row in here):
            trace["error_x"] = {
                "type": "data",
                "array": [_beyond(row.p95_us, row.time_us) / spread_us for row in here],
                "arrayminus": [_beyond(row.time_us, row.best_us) / spread_us for row in here],
                "thickness": 1.2,
                "width": 3,
            }
        data.append(trace)
    return data, 130 + max(26, 16 * len(places) + 8) * len(systems)


def _beyond(more: float | None, less: float | None) -> float:
    return max(0.0, (more or 0.0) - (less or 0.0))


def _bar_figure(
    title: str, data: Sequence[Mapping[str, Any]], axis: str, height: int, table: Table
) -> Figure:
    layout = {
        "barmode": "group",
        "dragmode": False,
        "xaxis": {"title": {"text": axis}, "rangemode": "tozero", "fixedrange": True},
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    return Figure(title, data, layout, table, height=height)


def _times(name: str, rows: Sequence[ShownRow]) -> Figure:
    timed = [row for row in rows if row.time_us is not None]
    longest_us = max(row.time_us or 0.0 for row in timed)
    unit, unit_us = ("ms", 1e3) if longest_us >= _US_UP_TO else ("us", 1.0)
    data, height = _bars(
        timed,
        lambda row: None if row.time_us is None else row.time_us / unit_us,
        unit,
        spread_us=unit_us,
    )
    table = _table_of(rows, f"all rows of {name}")
    spread = any("error_x" in trace for trace in data)
    figure = _bar_figure(f"{name}: time by system", data, f"time ({unit})", height, table)
    notes = ["The median; whiskers from the fastest round to the 95th percentile."]
    return replace(figure, notes=notes if spread else ())


def _held(name: str, rows: Sequence[ShownRow]) -> Figure:
    data, height = _bars(
        [row for row in rows if row.held_bytes is not None],
        lambda row: None if row.held_bytes is None else row.held_bytes / MB,
        "MB",
        spread_us=None,
    )
    held = [row for row in rows if row.held_bytes is not None]
    table = Table(
        ("system", "place", "memory (MB = 1e6 bytes)"),
        [(row.system, row.placement, f"{(row.held_bytes or 0) / MB:,.1f}") for row in held],
        "memory that a rank holds, where it is most",
        frozenset({2}),
    )
    title = f"{name}: memory that it adds to a rank, by system"
    return _bar_figure(title, data, "MB = 1e6 bytes", height, table)


def _table_of(rows: Sequence[ShownRow], caption: str) -> Table:
    columns = (
        *("system", "size (bytes)", "type", "op", "ranks", "nodes", "placement", "mode"),
        *("time (us)", "fastest", "p95", "algbw (GB/s)", "busbw (GB/s)"),
        *("ratio", "quartiles", "wrong", "rounds", "note"),
    )
    cells = [
        (
            *(row.system, f"{row.size_bytes:,}", row.dtype, row.op),
            *(str(row.ranks), str(row.nodes) if row.nodes > 1 else ""),
            *(row.placement, row.mode),
            *map(_number, (row.time_us, row.best_us, row.p95_us, row.algbw_gbps, row.busbw_gbps)),
            _number(row.ratio),
            "" if row.ratio_low is None else f"{row.ratio_low:.3g} to {row.ratio_high or 0:.3g}",
            "" if row.wrong is None else str(row.wrong),
            *(str(row.rounds) if row.rounds else "", row.note),
        )
        for row in rows
    ]
    numeric = frozenset({1, 4, 5, *range(8, 17)})
    return Table(columns, cells, caption, numeric).without_empty_columns()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


# Records of `ringcomm train --json`.


@dataclass(frozen=True)
class ShownMemory:
    """The memory that a rank held, in bytes: before the model, and at each step of the run."""

    before_bytes: int
    steps_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ShownOutcome:
    """The outcome of a training run, as far as the page shows it."""

    first_step: int
    losses: tuple[float, ...]
    held_out_before: float
    held_out_after: float
    tokens_per_s: float
    skipped_steps: int = 0
    loss_scale: float | None = None
    steps_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class ShownRun:
    """A record: options as names and text, and what came of them."""

    ranks: int
    options: Mapping[str, str]
    software: Mapping[str, str]
    outcome: ShownOutcome
    memory: Sequence[ShownMemory]


def of_training(path: Path, run: ShownRun) -> Section:
    """Losses, step times and memory over the steps."""
    outcome = run.outcome
    skips = f"{outcome.skipped_steps} for an overflow" if outcome.skipped_steps else "none"
    facts = [
        ("ranks", str(run.ranks)),
        *((n, v) for n, v in run.options.items() if v not in ("none", "False")),
        *run.software.items(),
        ("speed", f"{outcome.tokens_per_s:,.0f} tokens/s"),
        ("held-out loss", f"{outcome.held_out_before:.4f} to {outcome.held_out_after:.4f}"),
        ("steps skipped", skips),
    ]
    blocks: list[Block] = []
    if outcome.losses:
        blocks.append(_losses(outcome))
    if outcome.steps_s:
        blocks.append(_step_times(outcome))
    if any(rank.steps_bytes for rank in run.memory):
        blocks.append(_memory(outcome, run.memory))
    return Section("training", f"Training run {path.name}", [str(path)], facts, blocks)


def _line(name: str, x: Sequence[int], y: Sequence[float], colour: str) -> dict[str, Any]:
    # JSON has no NaN, and a gap is what a loss without a value should look like.
    values = [value if math.isfinite(value) else None for value in y]
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": name,
        "x": list(x),
        "y": values,
        "line": {"color": colour, "width": 1.8},
        "marker": {"color": colour},
    }


def _step_layout(axis: str, **y: Any) -> dict[str, Any]:
    return {
        "hovermode": "x unified",
        "dragmode": "zoom",
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": axis}, **y},
    }


def _losses(outcome: ShownOutcome) -> Figure:
    steps = list(range(len(outcome.losses)))
    data = [_line("training", steps, outcome.losses, COLOURS[0])]
    ends = [0, len(steps)]
    held_out = [outcome.held_out_before, outcome.held_out_after]
    data.append(_line("held out", ends, held_out, COLOURS[3]) | {"mode": "markers"})
    table = Table(
        ("step", "loss (nats per byte)"),
        [(str(step), f"{loss:.5f}") for step, loss in zip(steps, outcome.losses, strict=True)],
        "losses",
        frozenset({0, 1}),
    )
    return Figure("Loss", data, _step_layout("nats per byte"), table, is_wide=False)


def _step_times(outcome: ShownOutcome) -> Figure:
    steps = list(range(outcome.first_step, outcome.first_step + len(outcome.steps_s)))
    milliseconds = [seconds * 1e3 for seconds in outcome.steps_s]
    table = Table(
        ("step", "time (ms)"),
        [(str(step), f"{each:.3f}") for step, each in zip(steps, milliseconds, strict=True)],
        "step times",
        frozenset({0, 1}),
    )
    layout = _step_layout("ms", rangemode="tozero")
    notes = ["Rank 0's. The first step sets things up. Looks at the memory are not counted."]
    data = [_line("step", steps, milliseconds, COLOURS[2])]
    return Figure("Step time", data, layout, table, notes, buttons=_LINEAR_AND_LOG, is_wide=False)


def _memory(outcome: ShownOutcome, memory: Sequence[ShownMemory]) -> Figure:
    count = max(len(rank.steps_bytes) for rank in memory)
    steps = list(range(outcome.first_step, outcome.first_step + count))
    added = [[(held - rank.before_bytes) / MB for held in rank.steps_bytes] for rank in memory]
    data = [
        _line(f"rank {number}", steps, values, COLOURS[number % len(COLOURS)])
        for number, values in enumerate(added)
    ]
    rows = [
        (
            f"rank {number}",
            f"{rank.before_bytes / MB:,.1f}",
            f"{max(rank.steps_bytes) / MB:,.1f}",
            f"{max(values):,.1f}",
            f"{values[-1]:,.1f}",
        )
        for number, (rank, values) in enumerate(zip(memory, added, strict=True))
        if values
    ]
    columns = ("rank", "before the model (MB)", "at most (MB)", "of it training", "at the end")
    table = Table(columns, rows, "memory by rank, MB = 1e6 bytes", frozenset({1, 2, 3, 4}))
    notes = ["Between backward and the optimizer's step, without what was there before the model."]
    layout = _step_layout("MB = 1e6 bytes", rangemode="tozero")
    title = "Memory that training adds, by rank"
    return Figure(title, data, layout, table, notes, is_wide=False)


# What `ringcomm doctor --json` prints.


def of_doctor(path: Path, findings: Sequence[Finding]) -> Section:
    """The findings as a list, and whether collectives can work there."""
    failed = [each.name for each in findings if each.verdict == "FAIL"]
    told = "collectives can work here"
    if failed:
        told = f"collectives cannot work here: {', '.join(failed)}"
    facts = [
        (each.name, each.value) for each in findings if each.name in ("python", "torch", "ringcomm")
    ]
    entries = [(each.verdict, each.name, each.value, each.advice) for each in findings]
    return Section(
        "doctor", f"Doctor, {path.name}", [str(path)], facts, [Text(told), Findings(entries)]
    )
