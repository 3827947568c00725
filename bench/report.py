"""Rows of results: the printed table, JSON and CSV, each with where the figures come from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .cases import IN_PLACE, OUT_OF_PLACE
from .modes import PROCESSES

SCHEMA = 1
_CSV_COMMENT = "# "


@dataclass(frozen=True)
class Row:
    """One system on one case.

    Times in microseconds per call (median, fastest round), bandwidths in 1e9 bytes per
    second. ``ratio`` is the median over rounds of this system's time over the subject's,
    with its quartiles, ``ratio_p95`` that of the 95th percentiles; ``wrong`` is None where
    nothing was checked. A row without a time says why in ``note``. ``mode`` is how the ranks
    share processors; ``buffer_sets`` of buffers were used in turn; ``graph_calls`` calls were
    replayed as one graph (0: made one by one). ``nodes`` is how many the ranks were on.
    ``held_bytes`` is what a training adds to a rank's memory, where that is most.
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


@dataclass(frozen=True)
class Report:
    """A run: ``provenance`` is the machine, the software and the command, as plain text."""

    provenance: dict[str, str]
    rows: list[Row]

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows)


def write_json(report: Report, path: str | Path) -> None:
    document = {
        "schema": SCHEMA,
        "provenance": report.provenance,
        "rows": [asdict(row) for row in report.rows],
    }
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_csv(report: Report, path: str | Path) -> None:
    """One line per row under ``# key: value`` lines that hold the provenance."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        for key, value in {"schema": str(SCHEMA), **report.provenance}.items():
            file.write(f"{_CSV_COMMENT}{key}: {value}\n")
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(Row)]
        writer.writerow(names)
        for row in report.rows:
            values = asdict(row)
            writer.writerow(["" if values[name] is None else values[name] for name in names])


def read(path: str | Path) -> Report:
    """Reads what :func:`write_json` or :func:`write_csv` wrote.

    Raises ``ValueError`` for another schema.
    """
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".json":
        document = json.loads(text)
        _require_schema(path, str(document.get("schema")))
        return Report(document["provenance"], [Row(**row) for row in document["rows"]])
    lines = text.splitlines()
    head = [line[len(_CSV_COMMENT) :] for line in lines if line.startswith(_CSV_COMMENT)]
    provenance = {key: value for key, _, value in (line.partition(": ") for line in head)}
    _require_schema(path, provenance.pop("schema", ""))
    records = csv.DictReader(line for line in lines if not line.startswith(_CSV_COMMENT))
    return Report(provenance, [_row_of_text(record) for record in records])


def _require_schema(path: str | Path, found: str) -> None:
    if found != str(SCHEMA):
        raise ValueError(f"{path}: schema {found or 'missing'}, expected {SCHEMA}")


def _row_of_text(record: Mapping[str, str]) -> Row:
    values: dict[str, Any] = {}
    for field in fields(Row):
        if field.name not in record:
            continue  # a column that came later: its default holds
        text, kind = record[field.name], str(field.type)
        if text == "" and "None" in kind:
            values[field.name] = None
        elif kind.startswith("int"):
            values[field.name] = int(text)
        elif kind.startswith("float"):
            values[field.name] = float(text)
        else:
            values[field.name] = text
    return Row(**values)


_KEY_FORMAT = "{:>12} {:>10} {:>9} {:>6} {:>5}  {:<15} {:<19}"
_CELL_FORMAT = "{:>10} {:>8} {:>8} {:>7} {:>8} {:>10} {:>8}"


def table_head(subject: str, placements: Sequence[str]) -> str:
    titles = {OUT_OF_PLACE: "out of place", IN_PLACE: "in place"}
    cell_width = len(_CELL_FORMAT.format(*[""] * 7))
    key_width = len(_KEY_FORMAT.format(*[""] * 7))
    groups = "".join(f"  {titles[placement]:^{cell_width}}" for placement in placements)
    names = _KEY_FORMAT.format("size", "count", "type", "redop", "root", "system", "mode")
    units = _KEY_FORMAT.format("(B)", "(elems)", "", "", "", "", "")
    cells = "  " + _CELL_FORMAT.format(
        "time", "algbw", "busbw", "#wrong", "ratio", "p95", "ratio95"
    )
    cell_units = "  " + _CELL_FORMAT.format("(us)", "(GB/s)", "(GB/s)", "", "", "(us)", "")
    return "\n".join(
        [
            f"# ratio: time over that of {subject}, median over rounds",
            f"# p95, ratio95: the 95th percentile of the rounds, and that over {subject}'s",
            "#" + " " * (key_width - 1) + groups,
            "#" + names[1:] + cells * len(placements),
            "#" + units[1:] + cell_units * len(placements),
        ]
    )


def table_lines(rows: Iterable[Row], placements: Sequence[str]) -> list[str]:
    """One line per system of the rows of one size, placements side by side."""
    by_system: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_system.setdefault(row.system, {})[row.placement] = row
    lines = []
    for system, cells in by_system.items():
        row = next(iter(cells.values()))
        root = str(row.root) if row.root >= 0 else "-"
        key = _KEY_FORMAT.format(
            row.size_bytes, row.count, row.dtype, row.op, root, system, row.mode
        )
        lines.append(key + "".join("  " + _cell(cells.get(place)) for place in placements))
    return lines


def _cell(row: Row | None) -> str:
    if row is None or row.time_us is None:
        return _CELL_FORMAT.format("n/a", *[""] * 6)
    return _CELL_FORMAT.format(
        f"{row.time_us:.2f}",
        f"{row.algbw_gbps:.2f}",
        f"{row.busbw_gbps:.2f}",
        "-" if row.wrong is None else row.wrong,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.p95_us is None else f"{row.p95_us:.2f}",
        "" if row.ratio_p95 is None else f"{row.ratio_p95:.2f}",
    )
