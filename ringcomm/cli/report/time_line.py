"""The time line of all ranks: a bar for each call or span, and the same as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringcomm.cli.report.parts import Figure, Table, colours_of, duration, in_figure

__all__ = ["MOST_BARS", "Bar", "time_line"]

# A choice: plotly.js draws so many in well under a second, and moves them without a delay.
MOST_BARS = 4000
ENDED, OPEN, FAILED = "", "open", "failed"
# Open and failed calls are told apart without colours.
_PATTERNS = {ENDED: "", OPEN: "/", FAILED: "x"}
_LANE_PIXELS, _MARGIN_PIXELS = 26, 130
_MOST_PIXELS = 1400
_CONTEXT_BARS_PER_ROW = 8


@dataclass(frozen=True)
class Bar:
    """A call or a span.

    Attributes:
        row: where it stands: a rank, or a thread of one.
        name: gives its colour.
        begin_s, end_s: on the clock of the whole.
        told: names and values, in the order of the table's columns.
        mark: "" if it ended well, "open" or "failed".
    """

    row: str
    name: str
    begin_s: float
    end_s: float
    told: Mapping[str, str] = field(default_factory=dict)
    mark: str = ENDED


def time_line(
    bars: Sequence[Bar],
    clock: str,
    notes: Sequence[str] = (),
    names: Sequence[str] = (),
    most: int = MOST_BARS,
) -> Figure:
    """Draws bars; of more than ``most`` the newest of each row.

    Args:
        bars: of all rows; rows stand in the order of their first bars.
        clock: what second 0 is.
        notes: sentences below the title.
        names: those that get the first colours, so that other figures can have the same.
        most: bars.
    """
    shown = _newest(bars, most)
    told = [*notes, "Drag over a span to look closer; a double click shows all again."]
    if len(shown) < len(bars):
        told.append(
            f"{len(shown)} of {len(bars)} are shown, the newest of each row; "
            f"{len(bars) - len(shown)} older ones are left out."
        )
    lanes, ticks = _lanes(shown)
    colours = colours_of([*names, *(bar.name for bar in shown)])
    # Where many bars share a pixel, what took most of the time lies on top.
    placed: dict[str, list[tuple[Bar, int]]] = {}
    for bar, lane in zip(shown, lanes, strict=True):
        placed.setdefault(bar.name, []).append((bar, lane))
    data = [_trace(name, placed[name], colours[name]) for name in _by_time(shown)]
    count = max(lanes, default=0) + 1
    layout = {
        "barmode": "overlay",
        "hovermode": "closest",
        "dragmode": "zoom",
        "legend": {"traceorder": "reversed"},
        "xaxis": {
            "title": {"text": f"seconds, 0: {clock}"},
            "ticksuffix": "s",
            "exponentformat": "SI",
            "hoverformat": ".6f",
        },
        "yaxis": {
            "tickvals": [position for _, position in ticks],
            "ticktext": [in_figure(row) for row, _ in ticks],
            "range": [count - 0.4, -0.6],
            "fixedrange": True,
        },
    }
    height = min(_MARGIN_PIXELS + _LANE_PIXELS * count, _MOST_PIXELS)
    table, buttons = _table(shown), _buttons(shown)
    return Figure("Time line of all ranks", data, layout, table, told, height, buttons)


def _by_time(bars: Sequence[Bar]) -> list[str]:
    """The names of bars, those with the least time in all first."""
    totals: dict[str, float] = {}
    for bar in bars:
        totals[bar.name] = totals.get(bar.name, 0.0) + bar.end_s - bar.begin_s
    return sorted(totals, key=lambda name: (totals[name], name))


def _newest(bars: Sequence[Bar], most: int) -> list[Bar]:
    """The newest bars of each row, as many of each, in order of time."""
    by_row: dict[str, list[Bar]] = {}
    for bar in bars:
        by_row.setdefault(bar.row, []).append(bar)
    room, rows = most, sorted(by_row.values(), key=len)
    kept: dict[str, list[Bar]] = {}
    for index, row in enumerate(rows):
        share = room // (len(rows) - index)
        kept[row[0].row] = sorted(row, key=lambda bar: bar.end_s)[len(row) - min(share, len(row)) :]
        room -= len(kept[row[0].row])
    return [
        bar for row in by_row for bar in sorted(kept[row], key=lambda bar: (bar.begin_s, bar.end_s))
    ]


def _lanes(bars: Sequence[Bar]) -> tuple[list[int], list[tuple[str, float]]]:
    """The lane of each bar, so that none covers another one, and the middle of each row's lanes."""
    lanes: list[int] = []
    ticks: list[tuple[str, float]] = []
    first, row = 0, ""
    ends: list[float] = []
    for index, bar in enumerate(bars):
        if index == 0 or bar.row != row:
            first, ends, row = first + len(ends), [], bar.row
            ticks.append((row, first))
        free = next((lane for lane, end in enumerate(ends) if end <= bar.begin_s), len(ends))
        ends[free : free + 1] = [bar.end_s]
        lanes.append(first + free)
        ticks[-1] = (row, first + (len(ends) - 1) / 2)
    return lanes, ticks


def _trace(name: str, bars: Sequence[tuple[Bar, int]], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": in_figure(name),
        "base": [round(bar.begin_s, 9) for bar, _ in bars],
        "x": [round(bar.end_s - bar.begin_s, 9) for bar, _ in bars],
        "y": [y for _, y in bars],
        "width": 0.8,
        "hovertext": [_hover(bar) for bar, _ in bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "textposition": "none",
        "marker": {
            "color": colour,
            # So that a call of microseconds is seen in a line of seconds.
            "line": {"color": colour, "width": 0.5},
            "pattern": {"shape": [_PATTERNS[bar.mark] for bar, _ in bars], "size": 6},
        },
    }


_LONGEST_HOVER = 160


def _hover(bar: Bar) -> str:
    lines = [f"<b>{in_figure(bar.name)}</b>, {in_figure(bar.row)}"]
    for name, value in bar.told.items():
        if value:
            short = value if len(value) <= _LONGEST_HOVER else f"{value[:_LONGEST_HOVER]}..."
            lines.append(f"{in_figure(name)}: {in_figure(short)}")
    lines.append(f"took: {duration(bar.end_s - bar.begin_s)}")
    return "<br>".join(lines)


def _table(bars: Sequence[Bar]) -> Table:
    names = list(dict.fromkeys(name for bar in bars for name in bar.told))
    rows = [
        [
            bar.row,
            bar.name,
            f"{bar.begin_s:.6f}",
            duration(bar.end_s - bar.begin_s),
            *(bar.told.get(name, "") for name in names),
        ]
        for bar in bars
    ]
    columns = ["row", "name", "began (s)", "took", *names]
    return Table(columns, rows, "all that is drawn", frozenset({2, 3})).without_empty_columns()


def _buttons(bars: Sequence[Bar]) -> list[tuple[str, Mapping[str, Any]]]:
    """Where something waits to the end, a look at what came before, which a long wait flattens."""
    buttons: list[tuple[str, Mapping[str, Any]]] = [("all", {"xaxis.autorange": True})]
    stopped = [bar.begin_s for bar in bars if bar.mark]
    ended = sorted(bar.begin_s for bar in bars if not bar.mark)
    if stopped and ended:
        rows = len({bar.row for bar in bars})
        begin = ended[max(0, len(ended) - _CONTEXT_BARS_PER_ROW * rows)]
        last = max(*stopped, *(bar.end_s for bar in bars if not bar.mark))
        margin = max(0.05 * (last - begin), 1e-6)
        spans = [begin - margin, last + 3 * margin]
        buttons.append(("the last calls before it stopped", {"xaxis.range": spans}))
    moves = (("closer", {"zoom": 0.5}), ("wider", {"zoom": 2.0}))
    return [*buttons, *moves, ("earlier", {"shift": -0.5}), ("later", {"shift": 0.5})]
