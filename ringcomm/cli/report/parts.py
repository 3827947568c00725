"""What a page is made of: sections of texts, findings, matrices, tables and figures, as plain data.

A figure holds what plotly.js draws, and the same values as a table, for those who cannot see it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "COLOURS",
    "Block",
    "Figure",
    "Findings",
    "Matrix",
    "Section",
    "Table",
    "Text",
    "axis_of_sizes",
    "colours_of",
    "duration",
    "in_figure",
    "size",
]


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        columns: their titles.
        rows: as many cells each.
        caption: what the rows are.
        numeric: indices of the columns that hold numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    numeric: frozenset[int] = frozenset()

    def without_empty_columns(self) -> Table:
        """The same without columns of which every cell is empty."""
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        return Table(
            [self.columns[i] for i in kept],
            [[row[i] for i in kept] for row in self.rows],
            self.caption,
            frozenset(kept.index(i) for i in self.numeric if i in kept),
        )


@dataclass(frozen=True)
class Figure:
    """A chart of plotly.js, and its table.

    Attributes:
        title: what it shows.
        data: the traces.
        layout: without colours and fonts, which the page takes from its own.
        table: the same values.
        notes: sentences below the title.
        height: in pixels.
        buttons: a label each, and what ``Plotly.relayout`` is given when it is pressed.
        is_wide: it takes the page's whole width.
    """

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    table: Table
    notes: Sequence[str] = ()
    height: int = 340
    buttons: Sequence[tuple[str, Mapping[str, Any]]] = ()
    is_wide: bool = True


@dataclass(frozen=True)
class Text:
    """Lines that stand as they are, such as a command's own output; folded away with a title."""

    text: str
    folded: str = ""


@dataclass(frozen=True)
class Matrix:
    """A table whose numbers are shaded.

    Attributes:
        table: the first column names the rows.
        heat: of each further cell, from 0 to 1.
        notes: sentences above it.
    """

    table: Table
    heat: Sequence[Sequence[float]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Findings:
    """A list of verdicts: ``entries`` are verdict, name, value and advice ("" without)."""

    entries: Sequence[tuple[str, str, str, str]]


Block = Table | Figure | Text | Matrix | Findings


@dataclass(frozen=True)
class Section:
    """A part of the page, which shows one file or several that belong together.

    Attributes:
        kind: of what it shows, in a word or two.
        title: names it.
        files: where it comes from.
        facts: names and values, such as machine and versions.
        blocks: what is shown.
    """

    kind: str
    title: str
    files: Sequence[str]
    facts: Sequence[tuple[str, str]]
    blocks: Sequence[Block] = field(default_factory=tuple)


# Those of Okabe and Ito, which all readers tell apart, without the black and the yellow that vanish
# on one of the page's two backgrounds, and two more.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8C7AE6",
    "#8A8A8A",
    "#A6761D",
)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, by the order of their first place."""
    distinct = list(dict.fromkeys(names))
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(distinct)}


def in_figure(text: str) -> str:
    """Text from a file, as plotly.js shows it: what it would take for markup is none."""
    return html.escape(text, quote=False)


def duration(seconds: float) -> str:
    """A duration of a readable size."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * factor >= 1.0 or unit == "us":
            return f"{seconds * factor:.4g} {unit}"
    raise AssertionError


def size(size_bytes: float) -> str:
    """ "4 KiB" for 4096: the largest unit of which there is one at least."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.3g} {unit}"
    return f"{size_bytes:.0f} B"


_MOST_TICKS = 7


def axis_of_sizes(sizes: Sequence[int]) -> dict[str, Any]:
    """A logarithmic axis whose ticks are among the sizes, and are named as such."""
    found = sorted({each for each in sizes if each > 0})
    step = -(-len(found) // _MOST_TICKS) or 1
    ticks = found[::-1][::step][::-1]
    return {
        "type": "log",
        "title": {"text": "size"},
        "tickvals": ticks,
        "ticktext": [size(each) for each in ticks],
    }
