# SPDX-License-Identifier: Apache-2.0
"""Rows of results: the printed table, JSON and CSV, each with the provenance of the figures."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringcomm.cli import table_lines

SCHEMA = 1
# Environment variable with the commit, for a source tree without git history.
COMMIT_VARIABLE = "RINGCOMM_COMMIT"
IN_PLACE, OUT_OF_PLACE = "in", "out"
PROCESSES = "processes"  # mode: ranks are processes on the CPU


@dataclass(frozen=True)
class Row:
    """The result of one system for one case.

    Times are in microseconds per call (median, fastest round), bandwidths in 1e9 bytes per second.
    ``ratio`` is the median over rounds of this system's time divided by the subject's time, with
    quartiles; ``ratio_p95`` is the ratio of the 95th percentiles. ``wrong`` is None if results were
    not checked. ``note`` explains a row without a time. ``mode`` is how ranks share processors.
    ``buffer_sets`` sets of buffers were used in rotation. ``graph_calls`` calls were replayed as
    one graph (0: single calls). ``nodes`` is the number of nodes of the ranks. ``held_bytes`` is
    the memory that training adds to a rank, on the rank with the most. ``loss`` is in nats per
    byte, after ``count`` steps.
    """

    collective: str
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    ranks: int
    system: str
    placement: str
    time_us: float | None = None
    best_us: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    wrong: int | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    rounds: int = 0
    batch: int = 0
    note: str = ""
    mode: str = PROCESSES
    buffer_sets: int = 1
    graph_calls: int = 0
    p95_us: float | None = None
    ratio_p95: float | None = None
    nodes: int = 1
    held_bytes: int | None = None
    loss: float | None = None


def row_of(
    what: str, shape: str, ranks: int, elems: int, dtype: torch.dtype = torch.float32, **more: Any
) -> Row:
    """Returns the row of a case of ``elems`` elements, without system and measurements."""
    how = {"op": "none", "root": -1, "system": "", "placement": shape, **more}
    name = str(dtype).removeprefix("torch.")
    return Row(what, dtype.itemsize * elems, elems, name, ranks=ranks, **how)


@dataclass(frozen=True)
class Report:
    """A run's rows; ``provenance`` is the machine, the software and the command, as text."""

    provenance: dict[str, str]
    rows: list[Row]

    @property
    def head(self) -> str:
        """Returns the provenance as comment lines for the head of a CSV file."""
        return "\n".join(f"# {key}: {value}" for key, value in self.provenance.items())

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows)


def write_json(report: Report, path: str | Path) -> None:
    document = {"schema": SCHEMA, **asdict(report)}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_csv(report: Report, path: str | Path) -> None:
    """Writes one line per row, below ``# key: value`` lines with the provenance."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        file.write(f"# schema: {SCHEMA}\n{report.head}\n")
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, report.rows))


def read(path: str | Path) -> Report:
    """Reads a file that :func:`write_json` or :func:`write_csv` wrote.

    Raises ``ValueError`` for another schema.
    """
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".json":
        document = json.loads(text)
        found, provenance = str(document.get("schema")), document["provenance"]
        rows: Iterator[Row] = (Row(**row) for row in document["rows"])
    else:
        lines = text.splitlines()
        head = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
        provenance = {key: value for key, _, value in head}
        found = provenance.pop("schema", "")
        records = csv.DictReader(line for line in lines if not line.startswith("# "))
        rows = map(_row_of_text, records)
    if found != str(SCHEMA):
        raise ValueError(f"{path}: schema {found or 'missing'}, expected {SCHEMA}")
    return Report(provenance, list(rows))


def _row_of_text(record: Mapping[str, str]) -> Row:
    values: dict[str, Any] = {}
    for field in fields(Row):
        if field.name not in record:
            continue  # a newer column: use its default
        text, kind = record[field.name], str(field.type)
        read = int if kind.startswith("int") else float if kind.startswith("float") else str
        values[field.name] = None if text == "" and "None" in kind else read(text)
    return Row(**values)


def size_label(size_bytes: int) -> str:
    """Returns "4 KiB" for 4096: the largest unit that leaves a whole number, else one decimal."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.3g} {unit}"
    return f"{size_bytes} B"


class Column(NamedTuple):
    """A column of a table, at least ``width`` wide, aligned left or right."""

    title: str
    unit: str
    width: int
    text: Callable[[Row], object]
    right: bool = True


@dataclass(frozen=True)
class RowTable:
    """A table of rows below a ``title``: first the columns ``key``, then the columns ``cell``.

    A row without a time has its note in the first column of ``cell``. With ``placements`` each
    placement gets its own group of ``cell`` columns, and rows with equal ``key`` share one line.
    """

    title: str
    key: tuple[Column, ...]
    cell: tuple[Column, ...]
    placements: tuple[str, ...] = ()

    @property
    def _columns(self) -> tuple[Column, ...]:
        return self.key + self.cell * (len(self.placements) or 1)

    def head(self) -> str:
        names = {OUT_OF_PLACE: "out of place", IN_PLACE: "in place"}
        lines = []
        if self.placements:
            groups = ["", *(names[each] for each in self.placements)]
            widths = [_joint_width(self.key)] + [_joint_width(self.cell)] * len(self.placements)
            lines += table_lines([groups], widths=widths)
        lines += self._aligned([[column.title for column in self._columns]])
        lines += self._aligned([[column.unit for column in self._columns]])
        marked = ["#" + line[1:] for line in lines]
        return "\n".join([self.title, *marked] if self.title else marked)

    def lines(self, rows: Iterable[Row]) -> list[str]:
        found: dict[tuple[tuple[str, ...], int], dict[str, Row]] = {}
        for number, row in enumerate(rows):
            key = tuple(str(column.text(row)) for column in self.key)
            apart = (key, 0 if self.placements else number)
            found.setdefault(apart, {})[row.placement if self.placements else ""] = row
        groups = self.placements or ("",)
        return self._aligned(
            [*key, *chain.from_iterable(self._cell(cells.get(each)) for each in groups)]
            for (key, _), cells in found.items()
        )

    def _cell(self, row: Row | None) -> list[str]:
        texts = ["" if row is None else str(column.text(row)) for column in self.cell]
        if row is None or not (row.rounds or row.loss):
            texts[0] = "n/a"
        return texts

    def _aligned(self, texts: Iterable[Sequence[str]]) -> list[str]:
        """Aligns the columns by fixed widths, since the rows of a table arrive one by one."""
        columns = self._columns
        sides, widths = [each.right for each in columns], [each.width for each in columns]
        return table_lines(texts, right=sides, widths=widths)


def _joint_width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + 2 * (len(columns) - 1)


def _number(name: str, digits: int = 2, per: float = 1.0) -> Callable[[Row], str]:
    """Returns the text of a field, divided by ``per``; "" if it is None."""

    def text(row: Row) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{value / per:.{digits}f}"

    return text


def _agreement(row: Row) -> str:
    return {None: "-", 0: "equal"}.get(row.wrong, f"WRONG: {row.wrong}")


# The columns of nccl-tests, except those with one value per table, which are in the table's title:
# type, redop and root.
COLLECTIVE_KEY = (
    Column("size", "(B)", 10, lambda row: row.size_bytes),
    Column("count", "(elems)", 10, lambda row: row.count),
    Column("system", "", 12, lambda row: row.system, right=False),
)
COLLECTIVE_CELL = (
    Column("time", "(us)", 10, _number("time_us")),
    Column("algbw", "(GB/s)", 6, _number("algbw_gbps")),
    Column("busbw", "(GB/s)", 6, _number("busbw_gbps")),
    Column("#wrong", "", 6, lambda row: "-" if row.wrong is None else row.wrong),
    Column("ratio", "", 6, _number("ratio")),
    Column("p95", "(us)", 9, _number("p95_us")),
    Column("ratio95", "", 7, _number("ratio_p95")),
)
_CASE = (
    Column(" case", "", 21, lambda row: row.collective, right=False),
    Column("of", "", 27, lambda row: row.placement, right=False),
    Column("type", "", 8, lambda row: row.dtype, right=False),
    Column("system", "", 33, lambda row: row.system, right=False),
)
TIMES = RowTable(
    "# ratio: of times, median over rounds, with its quartiles",
    _CASE,
    (
        Column("time", "(ms)", 11, _number("time_us", 3, 1e3)),
        Column("best", "(ms)", 10, _number("best_us", 3, 1e3)),
        Column("ratio", "", 6, _number("ratio", 3)),
        Column("low", "", 6, _number("ratio_low", 3)),
        Column("high", "", 6, _number("ratio_high", 3)),
        Column("speed", "(GB/s)", 7, _number("algbw_gbps")),
        Column("check", "", 8, _agreement, right=False),
        Column("", "", 1, lambda row: row.note, right=False),
    ),
)
LOSSES = RowTable(
    "",
    _CASE,
    (
        Column("steps", "", 5, lambda row: row.count),
        Column("loss", "(nats/B)", 8, _number("loss", 5)),
    ),
)


def collect(
    command: Sequence[str], versions: Mapping[str, str], device_facts: Mapping[str, str]
) -> dict[str, str]:
    """Returns the provenance by key; ``versions`` are the timed systems' versions."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{f"version of {name}": version for name, version in versions.items()},
        **device_facts,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(command),
    }


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    facts = dict(re.findall(r"(?m)^(model name|cpu family|model)\s*: (.*)", text))
    model = str(facts.get("model name", platform.machine()))
    if "cpu family" in facts:
        model += f" (family {facts['cpu family']} model {facts['model']})"
    return model


def commit() -> str:
    """Returns the value of RINGCOMM_COMMIT, else the commit of the source tree, or "unknown"."""
    root = Path(__file__).resolve().parent.parent
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        return subprocess.check_output(git, cwd=root, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        # There is no git, or the tree belongs to another user, so that git refuses to read it.
        return "unknown"
