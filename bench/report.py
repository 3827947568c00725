"""Rows of results: the printed table, JSON and CSV, each with where the figures come from."""

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
from pathlib import Path
from typing import Any, NamedTuple

import torch

SCHEMA = 1
# Names the commit of a source tree that came without its history, or with another one.
COMMIT_VARIABLE = "RINGCOMM_COMMIT"
IN_PLACE, OUT_OF_PLACE = "in", "out"
PROCESSES = "processes"  # the mode of ranks on the CPU


@dataclass(frozen=True)
class Row:
    """One system on one case.

    Times in microseconds per call (median, fastest round), bandwidths in 1e9 bytes per
    second. ``ratio`` is the median over rounds of this system's time over the subject's,
    with its quartiles, ``ratio_p95`` that of the 95th percentiles; ``wrong`` is None where
    nothing was checked. A row without a time says why in ``note``. ``mode`` is how the ranks
    share processors; ``buffer_sets`` of buffers were used in turn; ``graph_calls`` calls were
    replayed as one graph (0: made one by one). ``nodes`` is how many the ranks were on.
    ``held_bytes`` is what a training adds to a rank's memory, where that is most; ``loss`` is one
    in nats per byte, after ``count`` steps.
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
    """The row of a case of ``elems`` elements, with no system and nothing measured in it."""
    how = {"op": "none", "root": -1, "system": "", "placement": shape, **more}
    name = str(dtype).removeprefix("torch.")
    return Row(what, dtype.itemsize * elems, elems, name, ranks=ranks, **how)


@dataclass(frozen=True)
class Report:
    """A run: ``provenance`` is the machine, the software and the command, as text."""

    provenance: dict[str, str]
    rows: list[Row]

    @property
    def head(self) -> str:
        """The provenance, as the head of a CSV file has it."""
        return "\n".join(f"# {key}: {value}" for key, value in self.provenance.items())

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows)


def write_json(report: Report, path: str | Path) -> None:
    document = {"schema": SCHEMA, **asdict(report)}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_csv(report: Report, path: str | Path) -> None:
    """One line per row under ``# key: value`` lines that hold the provenance."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        file.write(f"# schema: {SCHEMA}\n{report.head}\n")
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, report.rows))


def read(path: str | Path) -> Report:
    """Reads what :func:`write_json` or :func:`write_csv` wrote.

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
            continue  # a column that came later: its default holds
        text, kind = record[field.name], str(field.type)
        read = int if kind.startswith("int") else float if kind.startswith("float") else str
        values[field.name] = None if text == "" and "None" in kind else read(text)
    return Row(**values)


def size_label(size_bytes: int) -> str:
    """ "4 KiB" for 4096: the largest unit that leaves a whole number, else one decimal."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.3g} {unit}"
    return f"{size_bytes} B"


class Column(NamedTuple):
    """A column of a table. ``width`` is as in a format: ">9" to the right, "<22" to the left."""

    title: str
    unit: str
    width: str
    text: Callable[[Row], object]


def _join(columns: Sequence[Column], texts: Iterable[object]) -> str:
    pairs = zip(columns, texts, strict=True)
    return " ".join(f"{text!s:{column.width}}" for column, text in pairs)


@dataclass(frozen=True)
class Table:
    """Rows as text, below a ``title``, whose first columns are ``key`` and the others ``cell``.

    The first column of ``cell`` tells that a row has no time. With ``placements``, side by side and
    a group of ``cell`` each, rows that agree in all of ``key`` stand in one line.
    """

    title: str
    key: tuple[Column, ...]
    cell: tuple[Column, ...]
    placements: tuple[str, ...] = ()

    def head(self) -> str:
        lines = [self.title] if self.title else []
        names = {OUT_OF_PLACE: "out of place", IN_PLACE: "in place"}
        groups = len(self.placements) or 1
        key, cell = (_join(each, [c.title for c in each]) for each in (self.key, self.cell))
        if self.placements:
            named = "".join(f"  {names[each]:^{len(cell)}}" for each in self.placements)
            lines.append("#" + " " * (len(key) - 1) + named)
        lines.append("#" + key[1:] + f"  {cell}" * groups)
        key, cell = (_join(each, [c.unit for c in each]) for each in (self.key, self.cell))
        lines.append("#" + key[1:] + f"  {cell}" * groups)
        return "\n".join(line.rstrip() for line in lines)

    def lines(self, rows: Iterable[Row]) -> list[str]:
        found: dict[tuple[str, int], dict[str, Row]] = {}
        for number, row in enumerate(rows):
            key = _join(self.key, [column.text(row) for column in self.key])
            apart = (key, 0 if self.placements else number)
            found.setdefault(apart, {})[row.placement if self.placements else ""] = row
        return [
            "  ".join([key, *(self._cell(cells.get(each)) for each in self.placements or ("",))])
            for (key, _), cells in found.items()
        ]

    def _cell(self, row: Row | None) -> str:
        texts = ["" if row is None else column.text(row) for column in self.cell]
        if row is None or not (row.rounds or row.loss):
            texts[0] = "n/a"
        return _join(self.cell, texts)


def _number(name: str, digits: int = 2, per: float = 1.0) -> Callable[[Row], str]:
    """The text of a field, in units of ``per``; "" where it is None."""

    def text(row: Row) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{value / per:.{digits}f}"

    return text


def _agreement(row: Row) -> str:
    return {None: "-", 0: "equal"}.get(row.wrong, f"WRONG: {row.wrong}")


# The columns of nccl-tests.
COLLECTIVE_KEY = (
    Column("size", "(B)", ">12", lambda row: row.size_bytes),
    Column("count", "(elems)", ">10", lambda row: row.count),
    Column("type", "", ">9", lambda row: row.dtype),
    Column("redop", "", ">6", lambda row: row.op),
    Column("root", "", ">5", lambda row: row.root if row.root >= 0 else "-"),
    Column("system", "", "<15", lambda row: row.system),
    Column("mode", "", "<19", lambda row: row.mode),
)
COLLECTIVE_CELL = (
    Column("time", "(us)", ">10", _number("time_us")),
    Column("algbw", "(GB/s)", ">8", _number("algbw_gbps")),
    Column("busbw", "(GB/s)", ">8", _number("busbw_gbps")),
    Column("#wrong", "", ">7", lambda row: "-" if row.wrong is None else row.wrong),
    Column("ratio", "", ">8", _number("ratio")),
    Column("p95", "(us)", ">10", _number("p95_us")),
    Column("ratio95", "", ">8", _number("ratio_p95")),
)
_CASE = (
    Column(" case", "", "<22", lambda row: row.collective),
    Column("of", "", "<28", lambda row: row.placement),
    Column("type", "", "<8", lambda row: row.dtype),
    Column("system", "", "<34", lambda row: row.system),
)
TIMES = Table(
    "# ratio: of times, median over rounds, with its quartiles",
    _CASE,
    (
        Column("time", "(ms)", ">11", _number("time_us", 3, 1e3)),
        Column("best", "(ms)", ">11", _number("best_us", 3, 1e3)),
        Column("ratio", "", ">7", _number("ratio", 3)),
        Column("low", "", ">7", _number("ratio_low", 3)),
        Column("high", "", ">7", _number("ratio_high", 3)),
        Column("speed", "(GB/s)", ">8", _number("algbw_gbps")),
        Column("check", "", "<8", _agreement),
        Column("", "", "<1", lambda row: row.note),
    ),
)
LOSSES = Table(
    "",
    _CASE,
    (
        Column("steps", "", ">6", lambda row: row.count),
        Column("loss", "(nats/B)", ">9", _number("loss", 5)),
    ),
)


def collect(
    command: Sequence[str], versions: Mapping[str, str], device_facts: Mapping[str, str]
) -> dict[str, str]:
    """Text by key; ``versions`` are those of the systems that were timed."""
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
    """Returns what RINGCOMM_COMMIT says, else the commit of the source tree, or "unknown"."""
    root = Path(__file__).resolve().parent.parent
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        return subprocess.check_output(git, cwd=root, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        # No git here, or a tree that belongs to another user, which git refuses to read.
        return "unknown"
