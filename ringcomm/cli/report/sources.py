"""The files of a report: which kind each is, by its content, and what it holds, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ringcomm.cli.report import sections
from ringcomm.cli.report.sections import Section, ShownOutcome, ShownRow
from ringcomm.cli.trace import by_communicator
from ringcomm.comm.recorder import trace_file
from ringcomm.comm.recorder.trace_file import LARGEST_BYTES, Trace
from ringcomm.errors import ArgumentError, printable
from ringcomm.json_reader import read_bounded, read_object, shown

T = TypeVar("T")
EXPECTED = "a trace of a fault, a profile of steps, or what bench, demo or train write with --json"
MOST_FACTS = 200
LARGEST_NUMBER = 1e18
Profile = tuple[Path, Sequence[Mapping[str, Any]]]


def find(paths: Sequence[Path]) -> tuple[list[Section], list[str]]:
    """Reads files, and the ``*.json`` of folders.

    Returns the sections, and the files of folders that are none of a run, with why.

    Raises:
        ArgumentError: a file is of none of the kinds, or is damaged, or a folder has none of a run.
        RingcommError: a trace is damaged.
    """
    taken = Taken([], [], [])
    left_out: list[str] = []
    for path in paths:
        if not path.is_dir():
            _take(path, taken)
            continue
        inside = sorted(path.glob("*.json"))
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
    found = [sections.of_traces(group) for group in by_communicator(taken.traces)]
    runs: dict[tuple[Path, str], list[Profile]] = {}
    for path, spans in taken.profiles:
        # Of the ranks of a run, as rank0.json and rank1.json.
        runs.setdefault((path.parent, path.stem.rstrip("0123456789")), []).append((path, spans))
    found += map(sections.of_profile, runs.values())
    return found + taken.sections, left_out


@dataclass(frozen=True)
class Taken:
    """The contents of the files read so far. Several traces or profiles may be of one run."""

    traces: list[tuple[Path, Trace]]
    profiles: list[Profile]
    sections: list[Section]


def _take(path: Path, taken: Taken) -> None:
    plain = _parsed(path)
    if plain.get("format") == trace_file.FORMAT:
        taken.traces.append((path, trace_file.read(path)))
        return
    try:
        for names, read in KINDS:
            if names <= set(plain):
                read(path, plain, taken)
                return
    except ValueError as error:
        raise ArgumentError(f"{path}: damaged, or of another version: {error}") from error
    told = shown(sorted(map(str, plain)))
    raise ArgumentError(f"{path}: expected {EXPECTED}, got an object of {told}")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        # Losses that are no numbers are written as NaN, which read_json() refuses.
        plain = json.loads(read_bounded(path, LARGEST_BYTES))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        told = printable(str(error))
        raise ArgumentError(f"{path}: expected {EXPECTED}, got no JSON ({told})") from error
    if type(plain) is not dict:
        raise ArgumentError(f"{path}: expected {EXPECTED}, got {shown(plain)}")
    return plain


def _known(kind: type[T], plain: Any, where: str) -> T:
    """Reads an object's fields, of which later versions may write more; numbers are measurable."""
    if type(plain) is not dict:
        raise ValueError(f"{where}: expected an object, got {shown(plain)}")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    found = read_object(kind, {name: plain[name] for name in plain if name in names}, where)
    for name, value in vars(found).items():
        # Differences of numbers are numbers, too.
        if type(value) is float and not abs(value) <= LARGEST_NUMBER:
            raise ValueError(f"{where}.{name}: expected a number that can be measured, got {value}")
    return found


def _items(plain: Any, where: str) -> list[tuple[str, Any]]:
    """The items of a list, each with its place."""
    if type(plain) is not list:
        raise ValueError(f"{where}: expected a list, got {shown(plain)}")
    return [(f"{where}[{index}]", each) for index, each in enumerate(plain)]


def _facts(plain: Any, where: str) -> dict[str, str]:
    """Names and scalars as text, those of inner objects with the outer name before them."""
    if type(plain) is not dict or len(plain) > MOST_FACTS:
        raise ValueError(f"{where}: expected an object of at most {MOST_FACTS}, got {shown(plain)}")
    found: dict[str, str] = {}
    for name, value in plain.items():
        if type(value) is dict:
            inner = _facts(value, f"{where}.{name}")
            found |= {printable(f"{name} {key}"): text for key, text in inner.items()}
        elif value is None or type(value) in (bool, int, float, str):
            found[printable(name)] = "none" if value is None else printable(str(value))
        else:
            raise ValueError(f"{where}.{name}: expected text or a number, got {shown(value)}")
    return found


def _benchmark(path: Path, plain: Mapping[str, Any], taken: Taken, title: str = "") -> None:
    if plain.get("schema") != 1:
        raise ValueError(f"schema: expected 1, got {shown(plain.get('schema'))}")
    rows = [_known(ShownRow, each, where) for where, each in _items(plain["rows"], "rows")]
    facts = _facts(plain["provenance"], "provenance")
    taken.sections.append(sections.of_benchmark(path, title or path.name, facts, rows))


def _demo(path: Path, plain: Mapping[str, Any], taken: Taken) -> None:
    if type(plain["parts"]) is not dict:
        raise ValueError(f"parts: expected an object, got {shown(plain['parts'])}")
    for title, part in plain["parts"].items():
        if type(part) is not dict or not {"provenance", "rows"} <= set(part):
            raise ValueError(f"parts: expected what bench writes, got {shown(part)}")
        _benchmark(path, part, taken, printable(title))


def _training(path: Path, plain: Mapping[str, Any], taken: Taken) -> None:
    outcome = _known(ShownOutcome, plain["outcome"], "outcome")
    told = {"ranks": plain.get("ranks"), "software": plain.get("software", {})}
    facts = _facts({**_facts(plain["options"], "options"), **told}, "record")
    taken.sections.append(sections.of_training(path, facts, outcome))


@dataclass(frozen=True)
class Span:
    """A span of a profile, in microseconds."""

    name: str
    cat: str
    pid: int
    ts: float
    dur: float


def _profile(path: Path, plain: Mapping[str, Any], taken: Taken) -> None:
    spans = []
    for where, each in _items(plain["traceEvents"], "traceEvents"):
        if type(each) is dict and each.get("ph") == "M":
            continue  # names a process
        span = _known(Span, each, where)
        if span.cat not in sections.KINDS_OF_SPANS:
            raise ValueError(
                f"{where}.cat: expected {', '.join(sections.KINDS_OF_SPANS)}, got "
                f"{shown(span.cat)}; ui.perfetto.dev opens other Chrome traces"
            )
        spans.append({**vars(span), "name": printable(span.name)})
    taken.profiles.append((path, spans))


# By the entries that only this kind has.
KINDS: Sequence[tuple[set[str], Callable[[Path, Mapping[str, Any], Taken], None]]] = (
    ({"provenance", "rows"}, _benchmark),
    ({"passed", "parts"}, _demo),
    ({"options", "outcome"}, _training),
    ({"traceEvents"}, _profile),
)
