# SPDX-License-Identifier: Apache-2.0
"""``ringcomm report``: writes one HTML page about a run; the page needs no server or network."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from ringcomm.cli.output import why_no_file
from ringcomm.cli.trace import SHOWN_CALLS, aligned, by_communicator, over_nodes, report, verdict
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.reader import LARGEST_BYTES, Trace, ended_ranks, live_recordings, newest
from ringcomm.comm.recorder.records import (
    NodeLevel,
    RankRecording,
    Record,
    Recording,
)
from ringcomm.errors import ArgumentError, printable
from ringcomm.json_reader import read_bounded, read_object, reason, shown

# The parts of a page, which report.html draws.

WIDTH, HEIGHT = 600, 200
MOST_POINTS = 1000
MOST_MARKED_POINTS = 50  # of a line; the points of longer lines would merge
MOST_SIZES = 9  # labels of the horizontal axis that do not overlap


@dataclass(frozen=True)
class Text:
    """Lines of preformatted text; with the title ``folded``, collapsed under this title."""

    text: str
    folded: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text. ``shares`` maps row and column to the filled fraction of the cell, 0 to 1."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    shares: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps, or over sizes in bytes on a logarithmic axis.

    Points are in the order of the horizontal axis; a value that is not finite leaves a gap.
    """

    title: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    note: str = ""
    over_sizes: bool = False

    @property
    def ends(self) -> tuple[float, float, float, float]:
        """The first and last value of the horizontal axis, then of the vertical axis."""
        points = [point for line in self.lines.values() for point in line]
        values = [y for _, y in points if math.isfinite(y)] or [0.0]
        low, high = min(0.0, *values), max(0.0, *values)
        return min(points)[0], max(points)[0], low, high if high > low else 1.0

    @property
    def axis(self) -> str:
        """The title of the horizontal axis."""
        return "size" if self.over_sizes else "step"

    @property
    def columns(self) -> list[tuple[float, str]]:
        """The position and the label of each tick of the horizontal axis."""
        first, last, _, _ = self.ends
        if not self.over_sizes:
            return [(self._across(x), f"{x:g}") for x in ticks(first, last, least=1.0)]
        sizes = sorted({x for line in self.lines.values() for x, _ in line})
        return [(self._across(x), size(x)) for x in sizes[:: -(-len(sizes) // MOST_SIZES)]]

    @property
    def levels(self) -> list[tuple[float, str]]:
        """The position and the label of each tick of the vertical axis."""
        _, _, low, high = self.ends
        return [(self._down(y), f"{y:.4g}") for y in ticks(low, high)]

    @property
    def paths(self) -> list[tuple[str, str, str]]:
        """The name of each line, its path in SVG, and the path of its points.

        Long lines omit points, and have no path of points.
        """
        found = []
        for name, line in self.lines.items():
            path, points, pen = "", "", "M"
            for x, y in line[:: -(-len(line) // MOST_POINTS)]:
                if is_there := math.isfinite(y):
                    # "h0" makes a single point visible: without it the path would have no length.
                    at = f"{self._across(x):.1f} {self._down(y):.1f}h0"
                    path += f"{pen}{at}"
                    points += f"M{at}"
                pen = "L" if is_there else "M"
            found.append((name, path, points if len(line) <= MOST_MARKED_POINTS else ""))
        return found

    def _across(self, x: float) -> float:
        scale = math.log2 if self.over_sizes else float
        first, last, _, _ = self.ends
        return WIDTH * (scale(x) - scale(first)) / (scale(last) - scale(first) or 1.0)

    def _down(self, y: float) -> float:
        _, _, low, high = self.ends
        return HEIGHT * (high - y) / (high - low)


Panel = Text | Table | Chart


@dataclass(frozen=True)
class Section:
    """A part of the page, which shows one file or several related files."""

    title: str
    files: Sequence[str]
    facts: Sequence[tuple[str, str]]
    panels: Sequence[Panel]


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Returns about five round values from ``low`` to ``high``, at least ``least`` apart."""
    apart = max((high - low) / 5, least)
    unit = 10.0 ** math.floor(math.log10(apart)) if apart > sys.float_info.min else 0.0
    if unit == 0.0:
        return [low]
    step = unit * next(each for each in (1, 2, 5, 10) if unit * each >= apart * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)] or [low]


def duration(seconds: float) -> str:
    """Formats a duration with a readable unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1.0:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def size(size_bytes: float) -> str:
    """Formats a size, such as "4 KiB" for 4096, with the largest unit not above it."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.3g} {unit}"
    return f"{size_bytes:.0f} B"


# Which rank waited for which other rank, as far as the records of calls show it.

FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
MOST_PAIRS = 200


@dataclass(frozen=True)
class Wait:
    """A wait of ``rank``, either recorded or derived from the times at which ranks began a call."""

    rank: int
    awaited: int
    seconds: float
    is_told: bool


def waits_of(recording: Recording, expected: int) -> list[Wait]:
    """Returns all waits of a recording; ``expected`` is its number of ranks if none is missing.

    A call that has failed or not ended waits for the rank that the recorder names. A collective
    that ended on all ranks waited, on each rank, until the last rank began it. If only the root
    sends, all others waited for the root; if only the root receives, the root alone waited.
    Finished messages are omitted, and so are calls on devices, whose hosts do not know when they
    ran. If a rank's records are missing, the rank that began last is unknown.
    """
    ranks = [rank for rank in recording.ranks if not rank.on_device]
    found = [wait for rank in ranks for wait in _told(rank, recording.taken_ns)]
    if len(ranks) < expected:
        return found
    inner: set[int] = set()
    for rank in ranks:
        inner |= rank.inner_calls()
    of_ranks = [{each.number: each for each in rank.collectives} for rank in ranks]
    for number in sorted(set.intersection(*map(set, of_ranks)) - inner if of_ranks else ()):
        calls = {rank.rank: calls[number] for rank, calls in zip(ranks, of_ranks, strict=True)}
        if all(call.end_ns and not call.status for call in calls.values()):
            found += _of_arrivals(calls)
    return found


def _told(rank: RankRecording, taken_ns: int) -> Iterator[Wait]:
    """Yields the waits for which a rank's own records name a peer."""
    running = [each for each in rank.collectives if each.state == "running"]
    innermost = max(running, key=lambda each: each.begin_ns, default=None)
    for record in (*rank.collectives, *rank.messages):
        awaited = -1
        if record.state == "failed" or (record.track == "messages" and record.state == "running"):
            awaited = record.peer
        elif record is innermost:
            awaited = rank.waits_for
        if awaited >= 0 and awaited != rank.rank:
            seconds = ((record.end_ns or taken_ns) - record.begin_ns) / 1e9
            yield Wait(rank.rank, awaited, max(seconds, 0.0), is_told=True)


def _of_arrivals(calls: dict[int, Record]) -> Iterator[Wait]:
    some = next(iter(calls.values()))
    last = max(calls, key=lambda rank: calls[rank].begin_ns)
    waiting, awaited = list(calls), last
    if some.collective in FROM_ROOT:
        awaited = some.root
    elif some.collective in TO_ROOT:
        waiting = [some.root]
    if awaited not in calls:
        return
    for rank in waiting:
        if rank == awaited or rank not in calls:
            continue
        until_ns = min(calls[rank].end_ns, calls[awaited].begin_ns)
        if until_ns > calls[rank].begin_ns:
            seconds = (until_ns - calls[rank].begin_ns) / 1e9
            yield Wait(rank, awaited, seconds, is_told=False)


def tables_of(waits: Sequence[Wait], ranks: Sequence[int]) -> list[Panel]:
    """Returns tables of the ranks by the time that others waited for them, and of rank pairs."""
    if not waits:
        return [Text("No rank is known to have waited for another one.")]
    by_rank: dict[int, list[Wait]] = {rank: [] for rank in ranks}
    by_pair: dict[tuple[int, int], list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.awaited, []).append(wait)
        by_pair.setdefault((wait.rank, wait.awaited), []).append(wait)
    of_ranks = [([f"rank {rank}"], each) for rank, each in by_rank.items()]
    of_pairs = [([f"rank {a}", f"rank {b}"], each) for (a, b), each in by_pair.items()]
    note = "Summed over the ranks that waited. The recorder names the awaited rank of failed and "
    note += "open calls; in other calls it is the rank that began last."
    pairs = f"The longest {MOST_PAIRS}." if len(of_pairs) > MOST_PAIRS else ""
    return [
        _waits("Whom the others waited for", ["rank"], of_ranks, note),
        _waits("Who waited for whom", ["rank", "for"], of_pairs, pairs),
    ]


def _waits(
    title: str, names: list[str], waits: list[tuple[list[str], list[Wait]]], note: str
) -> Table:
    """Returns a table with a row for each entry of ``waits``, longest waits first."""
    sums = [
        (sum(w.seconds for w in each), sum(w.seconds for w in each if w.is_told), each, name)
        for name, each in waits
    ]
    sums = sorted(sums, key=lambda row: -row[0])[:MOST_PAIRS]
    rows = [(*name, duration(s), duration(told), str(len(each))) for s, told, each, name in sums]
    columns = [*names, "waited", "of it in calls that did not end", "calls"]
    shares = {(row, len(names)): each[0] / (sums[0][0] or 1.0) for row, each in enumerate(sums)}
    return Table(title, columns, rows, note, shares)


# Traces of the flight recorder.


def of_traces(group: Sequence[tuple[Path, Trace]]) -> Section:
    """Returns the section for one communicator's trace files; over nodes, one file per node."""
    traces = [trace for _, trace in group]
    panels: list[Panel] = []
    if traces[0].of_node is not None:
        panels.append(Text("\n".join(over_nodes(traces))))
    for path, trace in group:
        said = f"{path.name}, written by rank {trace.written_by}:\n{trace.error}\n"
        panels.append(Text("\n".join([said, *verdict(trace.recording, level=trace.level)])))
    expected = [
        trace.recording.world_size if trace.level is None else len(trace.level.ranks)
        for trace in traces
    ]
    panels += _of_recordings(aligned(traces), expected)
    for path, trace in group:
        last = "\n".join(report(trace.recording, SHOWN_CALLS, level=trace.level))
        panels.append(Text(last, folded=f"the last calls: ringcomm trace {path.name}"))
    name = traces[0].recording.communicator
    written_s = min(max(0.0, traces[0].written_s), 4e10)  # after the year 9999 dates fail
    facts = [
        ("ranks", str(traces[0].recording.world_size)),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_s))),
    ]
    if traces[0].of_node is not None:
        facts.append(("nodes", f"{len(traces[0].of_node.nodes)}, {len(group)} of them here"))
    return Section(f"Trace of {name}", [str(path) for path, _ in group], facts, panels)


def of_processes(recording: Recording, ended: Collection[int], pids: Sequence[int]) -> Section:
    """Returns the section for a communicator of running processes."""
    last = "\n".join(report(recording, SHOWN_CALLS, ended))
    panels: list[Panel] = [
        Text("\n".join(verdict(recording, ended))),
        *_of_recordings([recording], [recording.world_size]),
        Text(last, folded="the last calls"),
    ]
    level = NodeLevel.of(recording)
    name = recording.communicator if level is None else f"{level.communicator}, node {level.node}"
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    facts = [("ranks", str(recording.world_size)), ("read", now)]
    files = [f"process {pid}" for pid in pids]
    return Section(f"Running processes of {name}", files, facts, panels)


def _of_recordings(recordings: Sequence[Recording], expected: Sequence[int]) -> list[Panel]:
    pairs = zip(recordings, expected, strict=True)
    waits = [wait for recording, count in pairs for wait in waits_of(recording, count)]
    ranks = [rank for recording in recordings for rank in recording.ranks]
    hosts = [rank.rank for rank in ranks if not rank.on_device]
    if not hosts:
        return [Text("Hosts do not know who waited for whom on devices; see the lines above.")]
    return tables_of(waits, hosts)


# Profiles of steps.

KINDS_OF_SPANS = ("compute", "wait", "communication")


def of_profile(files: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> Section:
    """Returns the section for the profiles of one run; each file has spans of different ranks."""
    spans = [span for _, of_file in files for span in of_file]
    kinds: dict[int, dict[str, float]] = {}
    waits: dict[tuple[int, str], list[float]] = {}
    for span in spans:
        rank, seconds = span["pid"], span["dur"] / 1e6
        kinds.setdefault(rank, dict.fromkeys(KINDS_OF_SPANS, 0.0))[span["cat"]] += seconds
        if span["cat"] == "wait":
            waits.setdefault((rank, span["name"]), []).append(seconds)
    by_rank = sorted(kinds.items())
    most = max((max(each.values()) for each in kinds.values()), default=0.0) or 1.0
    shares = {
        (row, column): seconds / most
        for row, (_, each) in enumerate(by_rank)
        for column, seconds in enumerate(each.values(), 1)
    }
    rows = [[f"rank {rank}", *map(duration, each.values())] for rank, each in by_rank]
    note = "Kinds may overlap: communication of another thread runs beside computation."
    times = Table("Time by kind", ["rank", *KINDS_OF_SPANS], rows, note, shares)
    order = sorted(waits.items(), key=lambda item: -sum(item[1]))
    awaited = [
        (f"rank {rank}", name, duration(sum(each)), str(len(each)), duration(max(each)))
        for (rank, name), each in order
    ]
    columns = ("rank", "what", "waited", "times", "longest")
    title = f"Profile of steps, {', '.join(path.name for path, _ in files)}"
    panels = [times, Table("What ranks waited for", columns, awaited)]
    return Section(title, [str(path) for path, _ in files], [("spans", f"{len(spans):,}")], panels)


# Benchmarks.


@dataclass(frozen=True)
class ShownRow:
    """A row of a benchmark: the fields of ``bench/report.py`` that the page shows."""

    system: str
    collective: str
    size_bytes: int
    dtype: str
    ranks: int
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
    held_bytes: float | None = None  # may be negative for a small model
    note: str = ""


# Column heads for fields whose names contain a unit or several words.
HEADS = {
    "size_bytes": "size (bytes)",
    "time_us": "time (us)",
    "best_us": "best (us)",
    "p95_us": "95th percentile (us)",
    "algbw_gbps": "algorithm bandwidth (GB/s)",
    "busbw_gbps": "bus bandwidth (GB/s)",
    "ratio_low": "lowest ratio",
    "ratio_high": "highest ratio",
    "wrong": "wrong elements",
    "held_bytes": "held (bytes)",
}


def of_benchmark(
    path: Path, title: str, facts: Mapping[str, str], rows: Sequence[ShownRow]
) -> Section:
    """Returns a chart of bandwidth or time over size per collective, and a table of all rows."""
    panels: list[Panel] = []
    wrong = [row for row in rows if row.wrong]
    if wrong:
        names = ", ".join(sorted({f"{row.collective} of {row.system}" for row in wrong}))
        panels.append(Text(f"FAIL: results are wrong in {len(wrong)} rows: {names}"))
    by_name: dict[str, list[ShownRow]] = {}
    for row in rows:
        by_name.setdefault(row.collective, []).append(row)
    for name, of_name in by_name.items():
        panels += [*_over_size(name, of_name), _rows(name, of_name)]
    return Section(title, [str(path)], list(facts.items()), panels)


def _over_size(collective: str, rows: Sequence[ShownRow]) -> Iterator[Chart]:
    """Yields a chart if at least one of its lines has several sizes."""
    names = ("placement", "dtype", "mode", "ranks")
    varied = [name for name in names if len({_cell(row, name) for row in rows}) > 1]
    has_bandwidth = any(row.busbw_gbps for row in rows)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.size_bytes):
        value = row.busbw_gbps if has_bandwidth else row.time_us
        if value is not None and row.size_bytes > 0:
            label = ", ".join([row.system, *(_cell(row, name) for name in varied)])
            lines.setdefault(label, []).append((row.size_bytes, value))
    if any(len({x for x, _ in line}) > 1 for line in lines.values()):
        what, unit = ("bus bandwidth", "GB/s") if has_bandwidth else ("time", "us")
        yield Chart(f"{collective}: {what} over size", unit, lines, over_sizes=True)


def _rows(name: str, rows: Sequence[ShownRow]) -> Table:
    """Returns a table of all rows, without columns in which every cell is empty."""
    kept = [each.name for each in fields(ShownRow) if any(_cell(row, each.name) for row in rows)]
    cells = [[_cell(row, name) for name in kept] for row in rows]
    most = max(row.time_us or 0.0 for row in rows) or 1.0
    at = kept.index("time_us") if "time_us" in kept else 0
    shares = {(i, at): row.time_us / most for i, row in enumerate(rows) if row.time_us}
    heads = [HEADS.get(each, each) for each in kept]
    return Table(f"{name}: all rows", heads, cells, "Times are medians.", shares)


def _cell(row: ShownRow, name: str) -> str:
    value = getattr(row, name)
    if isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


# Records of `ringcomm train --json`.


@dataclass(frozen=True)
class ShownMemory:
    """The memory that a rank held, in bytes: before the model, and at each step of the run."""

    before_bytes: int
    steps_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ShownOutcome:
    """The part of a training run's outcome that the page shows."""

    first_step: int
    losses: tuple[float, ...]
    held_out_before: float
    held_out_after: float
    tokens_per_s: float
    memory: tuple[ShownMemory, ...]
    skipped_steps: int = 0
    steps_s: tuple[float, ...] = ()


def of_training(path: Path, options: Mapping[str, str], outcome: ShownOutcome) -> Section:
    """Returns the section for losses, step times and memory over the steps."""
    facts = [
        *((name, value) for name, value in options.items() if value not in ("none", "False")),
        ("speed", f"{outcome.tokens_per_s:,.0f} tokens/s"),
        ("held-out loss", f"{outcome.held_out_before:.4f} to {outcome.held_out_after:.4f}"),
        ("steps skipped for an overflow", str(outcome.skipped_steps)),
    ]
    first, memory = outcome.first_step, {}
    for rank, each in enumerate(outcome.memory):
        added = [(held - each.before_bytes) / 1e6 for held in each.steps_bytes]
        if added:
            memory[f"rank {rank}, at most {max(added):,.1f}"] = list(enumerate(added, first))
    times = {"step": list(enumerate((1e3 * each for each in outcome.steps_s), first))}
    between = "Between backward and the optimizer's step."
    charts = [
        Chart("Loss", "nats per byte", {"loss": list(enumerate(outcome.losses))}),
        Chart("Step time", "ms", times, "Rank 0's. The first step sets things up."),
        Chart("Memory that training adds", "MB = 1e6 bytes", memory, between),
    ]
    drawn = [chart for chart in charts if any(chart.lines.values())]
    return Section(f"Training run {path.name}", [str(path)], facts, drawn)


# ---- The files of a report: their kinds, detected by content, and their checked contents ---------

T = TypeVar("T")
EXPECTED = "a trace of a fault, a profile of steps, or what bench, demo or train write with --json"
MOST_FACTS = 200
LARGEST_NUMBER = 1e18
Profile = tuple[Path, Sequence[Mapping[str, Any]]]


def find(paths: Sequence[Path]) -> tuple[list[Section], list[str]]:
    """Reads files, and the ``*.json`` of folders.

    Returns the sections, and the folders' files that are not files of a run, with the reasons.

    Raises:
        ArgumentError: a file has no known kind or is damaged, or a folder has no file of a run.
        RingcommError: a trace is damaged.
    """
    taken = Taken([], [], [])
    left_out: list[str] = []
    for path in paths:
        # Path.is_dir() raises for an unreadable path; reading the file then reports the reason.
        if not os.path.isdir(path):
            _take(path, taken)
            continue
        inside = _files_in(path)
        others = []
        for each in inside:
            try:
                _take(each, taken)
            except ArgumentError as error:
                others.append(str(error))
        left_out += others
        if len(others) == len(inside):
            told = f"expected a folder with files of a run, got {len(inside)} *.json, none of them"
            raise ArgumentError(f"{path}: {told} {EXPECTED}")
    found = [of_traces(group) for group in by_communicator(taken.traces)]
    runs: dict[tuple[Path, str], list[Profile]] = {}
    for path, spans in taken.profiles:
        # Group the files of one run's ranks, such as rank0.json and rank1.json.
        runs.setdefault((path.parent, path.stem.rstrip("0123456789")), []).append((path, spans))
    found += map(of_profile, runs.values())
    return found + taken.sections, left_out


def _files_in(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ArgumentError(f"{folder}: cannot be read: {error.strerror}") from error
    return [folder / name for name in names if name.endswith(".json")]


@dataclass(frozen=True)
class Taken:
    """The contents of the files read so far. Several traces or profiles may belong to one run."""

    traces: list[tuple[Path, Trace]]
    profiles: list[Profile]
    sections: list[Section]


def _take(path: Path, taken: Taken) -> None:
    data = _parsed(path)
    if data.get("format") == reader.FORMAT:
        taken.traces.append((path, reader.read(path)))
        return
    try:
        for names, read in KINDS:
            if names <= set(data):
                read(path, data, taken)
                return
    except ValueError as error:
        raise ArgumentError(f"{path}: damaged, or of another version: {error}") from error
    told = shown(sorted(map(str, data)))
    raise ArgumentError(f"{path}: expected {EXPECTED}, got an object of {told}")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        # A loss that is not a number is written as NaN, which read_json() would reject.
        data = json.loads(read_bounded(path, LARGEST_BYTES))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        told = printable(str(error))
        raise ArgumentError(f"{path}: expected {EXPECTED}, got no JSON ({told})") from error
    if type(data) is not dict:
        raise ArgumentError(f"{path}: expected {EXPECTED}, got {shown(data)}")
    return data


def _known(kind: type[T], data: Any, where: str) -> T:
    """Reads an object's known fields, ignoring fields of later versions; checks its numbers."""
    if type(data) is not dict:
        raise ValueError(f"{where}: expected an object, got {shown(data)}")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    found = read_object(kind, {name: data[name] for name in data if name in names}, where)
    for name, value in vars(found).items():
        # Differences of numbers must also be finite.
        if type(value) is float and not abs(value) <= LARGEST_NUMBER:
            raise ValueError(f"{where}.{name}: expected a number from -1e18 to 1e18, got {value}")
    return found


def _items(data: Any, where: str) -> list[tuple[str, Any]]:
    """Returns the items of a list, each with its position."""
    if type(data) is not list:
        raise ValueError(f"{where}: expected a list, got {shown(data)}")
    return [(f"{where}[{index}]", each) for index, each in enumerate(data)]


def _facts(data: Any, where: str) -> dict[str, str]:
    """Returns names and scalars as text; names of inner objects get the outer name as prefix."""
    if type(data) is not dict or len(data) > MOST_FACTS:
        raise ValueError(f"{where}: expected an object of at most {MOST_FACTS}, got {shown(data)}")
    found: dict[str, str] = {}
    for name, value in data.items():
        if type(value) is dict:
            inner = _facts(value, f"{where}.{name}")
            found |= {printable(f"{name} {key}"): text for key, text in inner.items()}
        elif value is None or type(value) in (bool, int, float, str):
            found[printable(name)] = "none" if value is None else printable(str(value))
        else:
            raise ValueError(f"{where}.{name}: expected text or a number, got {shown(value)}")
    return found


def _benchmark(path: Path, data: Mapping[str, Any], taken: Taken, title: str = "") -> None:
    if data.get("schema") != 1:
        raise ValueError(f"schema: expected 1, got {shown(data.get('schema'))}")
    rows = [_known(ShownRow, each, where) for where, each in _items(data["rows"], "rows")]
    facts = _facts(data["provenance"], "provenance")
    taken.sections.append(of_benchmark(path, title or path.name, facts, rows))


def _demo(path: Path, data: Mapping[str, Any], taken: Taken) -> None:
    if type(data["runs"]) is not dict:
        raise ValueError(f"runs: expected an object, got {shown(data['runs'])}")
    for title, run in data["runs"].items():
        if type(run) is not dict or not {"provenance", "rows"} <= set(run):
            raise ValueError(f"runs: expected the output of bench, got {shown(run)}")
        _benchmark(path, run, taken, printable(title))


def _training(path: Path, data: Mapping[str, Any], taken: Taken) -> None:
    outcome = _known(ShownOutcome, data["outcome"], "outcome")
    told = {"ranks": data.get("ranks"), "software": data.get("software", {})}
    facts = _facts({**_facts(data["options"], "options"), **told}, "record")
    taken.sections.append(of_training(path, facts, outcome))


@dataclass(frozen=True)
class ProfileSpan:
    """A span of a profile, in microseconds."""

    name: str
    cat: str
    pid: int
    ts: float
    dur: float


def _profile(path: Path, data: Mapping[str, Any], taken: Taken) -> None:
    spans = []
    for where, each in _items(data["traceEvents"], "traceEvents"):
        if type(each) is dict and each.get("ph") == "M":
            continue  # a metadata event that names a process
        span = _known(ProfileSpan, each, where)
        if span.cat not in KINDS_OF_SPANS:
            raise ValueError(
                f"{where}.cat: expected {', '.join(KINDS_OF_SPANS)}, got "
                f"{shown(span.cat)}; ui.perfetto.dev opens other Chrome traces"
            )
        spans.append({**vars(span), "name": printable(span.name)})
    taken.profiles.append((path, spans))


# Kinds are detected by entries that only one kind has.
KINDS: Sequence[tuple[set[str], Callable[[Path, Mapping[str, Any], Taken], None]]] = (
    ({"provenance", "rows"}, _benchmark),
    ({"passed", "runs"}, _demo),
    ({"options", "outcome"}, _training),
    ({"traceEvents"}, _profile),
)


# ---- The command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm report``."""
    parser.description = (
        "Writes one HTML page of a run: who waited for whom, bandwidths, step times and "
        "memory. The page needs no server or network. docs/report.md shows how to read it."
    )
    kinds = "traces of faults, profiles of steps, and the --json files of bench, demo and train"
    told = f"{kinds}, and folders of such files; none: the newest trace"
    pids = "also look into running, hung or stopped processes; one rank is enough"
    output = Path("report.html")
    add = parser.add_argument
    add("run", nargs="*", type=Path, metavar="RUN", help=told)
    add("--pid", nargs="+", type=int, default=[], help=pids)
    add("-o", "--output", type=Path, default=output, help="the page (default: %(default)s)")
    add("--title", help="title of the page (default: the titles of its sections)")


def run(args: argparse.Namespace) -> int:
    """Writes the page; returns 0 even if the page shows a fault.

    Raises:
        ArgumentError: a file has no known kind, or the page cannot be written.
        RingcommError: a trace is damaged, or a process has no readable recorder.
    """
    why = why_no_file(str(args.output))
    if why is not None:
        raise ArgumentError(f"--output {args.output}: {why}")
    sections = [
        of_processes(recording, ended_ranks(recording, args.pid[0]), args.pid)
        for recording in (live_recordings(args.pid) if args.pid else [])
    ]
    found, left_out = find(args.run or ([] if args.pid else [newest()]))
    sections += found
    title = args.title or f"ringcomm report: {', '.join(each.title for each in sections[:3])}"
    text = page(title, sections, left_out)
    try:
        written = args.output.write_bytes(text.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--output {args.output}: cannot be written: {reason(error)}"
        ) from error
    for each in left_out:
        print(f"left out: {each}", file=sys.stderr)
    told = f"{written / 1e6:.1f} MB" if written >= 1e6 else f"{written / 1e3:.1f} KB"
    print(f"wrote {args.output} ({told}): open it in a browser", file=sys.stderr)
    return 0


def page(title: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """Returns the page with all text escaped and no scripts; ``left_out`` are the omitted files."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title, sections=sections, left_out=left_out
    )
