"""The files of a report: which kind each is, by its content, and what it holds, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ringcomm.cli.doctor import Finding
from ringcomm.cli.report import measurements, traces
from ringcomm.cli.report.measurements import ShownMemory, ShownOutcome, ShownRow, ShownRun
from ringcomm.cli.report.parts import Section
from ringcomm.cli.trace import by_communicator
from ringcomm.comm.recorder import trace_file
from ringcomm.comm.recorder.trace_file import LARGEST_BYTES, Trace
from ringcomm.errors import ArgumentError, printable
from ringcomm.json_reader import read_bounded, read_object, shown

__all__ = ["CHROME", "KINDS", "FoundSections", "find"]

T = TypeVar("T")
EXPECTED = (
    "a trace of a fault, a Chrome trace, or what bench, demo, train or doctor write with --json"
)
_MOST_FACTS = 200
LARGEST_NUMBER = 1e18


@dataclass(frozen=True)
class FoundSections:
    """The sections of all files, and the files of folders that are none of a run, with why."""

    sections: list[Section]
    left_out: list[str]


def find(paths: Sequence[Path]) -> FoundSections:
    """Reads files, and the ``*.json`` of folders.

    Raises:
        ArgumentError: a file that was named is of none of the kinds, or is damaged, or a folder has
            none of a run.
        RingcommError: a trace is damaged.
    """
    taken = _Taken([], [], [])
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
            why = f"{len(inside)} *.json, none of them {EXPECTED}" if inside else "no *.json"
            raise ArgumentError(
                f"{path}: expected a folder with files of a run, got one with {why}"
            )
    sections = [traces.of_traces(group) for group in by_communicator(taken.traces)]
    sections += [traces.of_chrome(files) for files in traces.profiles_of_runs(taken.chrome)]
    return FoundSections([*sections, *taken.sections], left_out)


@dataclass(frozen=True)
class _Taken:
    """The contents of the files read so far. Several traces or profiles may be of one run."""

    traces: list[tuple[Path, Trace]]
    chrome: list[tuple[Path, Sequence[dict[str, Any]]]]
    sections: list[Section]


def _take(path: Path, taken: _Taken) -> None:
    plain = _parsed(path)
    if plain.get("format") == trace_file.FORMAT:
        taken.traces.append((path, trace_file.read(path)))
        return
    try:
        if set(plain) >= CHROME:
            taken.chrome.append((path, _read_chrome(plain)))
            return
        for names, read in KINDS:
            if names <= set(plain):
                taken.sections.extend(read(path, plain))
                return
    except ValueError as error:
        raise ArgumentError(f"{path}: damaged, or of another version: {error}") from error
    raise ArgumentError(
        f"{path}: expected {EXPECTED}, got an object of {shown(sorted(map(str, plain)))}"
    )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        raw = read_bounded(path, LARGEST_BYTES)
        # Losses that are no numbers are written as NaN, which read_json() refuses.
        plain = json.loads(raw)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        told = printable(str(error))
        raise ArgumentError(f"{path}: expected {EXPECTED}, got no JSON ({told})") from error
    if type(plain) is not dict:
        raise ArgumentError(f"{path}: expected {EXPECTED}, got {shown(plain)}")
    return plain


def _known(kind: type[T], plain: Any, where: str) -> T:
    """Reads an object's fields; later versions may write more than these."""
    if type(plain) is not dict:
        raise ValueError(f"{where}: expected an object, got {shown(plain)}")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return read_object(kind, {name: plain[name] for name in plain if name in names}, where)


def _finite(found: T, where: str) -> T:
    """The object, whose numbers are such that differences of them are numbers, too.

    Raises:
        ValueError: one is none, or is too large to be measured.
    """
    for name, value in vars(found).items():
        if type(value) is float and not abs(value) <= LARGEST_NUMBER:
            raise ValueError(f"{where}.{name}: expected a number that can be measured, got {value}")
    return found


def _items(plain: Any, where: str) -> list[Any]:
    if type(plain) is not list:
        raise ValueError(f"{where}: expected a list, got {shown(plain)}")
    return plain


def _facts(plain: Any, where: str) -> dict[str, str]:
    """Names and scalars as text, those of inner objects with the outer name before them."""
    if type(plain) is not dict or len(plain) > _MOST_FACTS:
        raise ValueError(
            f"{where}: expected an object of at most {_MOST_FACTS}, got {shown(plain)}"
        )
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


def _read_benchmark(path: Path, plain: Mapping[str, Any], title: str = "") -> list[Section]:
    if plain.get("schema") != 1:
        raise ValueError(f"schema: expected 1, got {shown(plain.get('schema'))}")
    rows = [
        _finite(_known(ShownRow, each, f"rows[{index}]"), f"rows[{index}]")
        for index, each in enumerate(_items(plain["rows"], "rows"))
    ]
    provenance = _facts(plain["provenance"], "provenance")
    return [measurements.of_benchmark(path, title or path.name, provenance, rows)]


def _read_demo(path: Path, plain: Mapping[str, Any]) -> list[Section]:
    if type(plain["parts"]) is not dict:
        raise ValueError(f"parts: expected an object, got {shown(plain['parts'])}")
    found: list[Section] = []
    for title, part in plain["parts"].items():
        if type(part) is not dict or not {"provenance", "rows"} <= set(part):
            raise ValueError(f"parts: expected what bench writes, got {shown(part)}")
        found += _read_benchmark(path, part, printable(title))
    return found


def _read_training(path: Path, plain: Mapping[str, Any]) -> list[Section]:
    whole = plain["outcome"]
    if type(whole) is not dict:
        raise ValueError(f"outcome: expected an object, got {shown(whole)}")
    memory = tuple(
        _known(ShownMemory, each, f"outcome.memory[{index}]")
        for index, each in enumerate(_items(whole.get("memory"), "outcome.memory"))
    )
    outcome = _known(ShownOutcome, {**whole, "memory": []}, "outcome")
    run = ShownRun(
        ranks=read_object(_RankCount, {"ranks": plain.get("ranks")}).ranks,
        options=_facts(plain["options"], "options"),
        software=_facts(plain.get("software", {}), "software"),
        outcome=outcome,
        memory=memory,
    )
    return [measurements.of_training(path, run)]


@dataclass(frozen=True)
class _RankCount:
    ranks: int


def _read_doctor(path: Path, plain: Mapping[str, Any]) -> list[Section]:
    if plain.get("schema") != 1:
        raise ValueError(f"schema: expected 1, got {shown(plain.get('schema'))}")
    findings = [
        _known(Finding, each, f"findings[{index}]")
        for index, each in enumerate(_items(plain["findings"], "findings"))
    ]
    return [measurements.of_doctor(path, findings)]


@dataclass(frozen=True)
class _Span:
    ph: str
    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    cat: str = ""


def _read_chrome(plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for index, each in enumerate(_items(plain["traceEvents"], "traceEvents")):
        where = f"traceEvents[{index}]"
        if type(each) is not dict:
            raise ValueError(f"{where}: expected an object, got {shown(each)}")
        if each.get("ph") not in ("X", "M"):
            continue
        of_name = {"ts": 0, "dur": 0} if each["ph"] == "M" else {}
        span = _finite(_known(_Span, {**each, **of_name}, where), where)
        args = _facts(each.get("args", {}), f"{where}.args")
        events.append({**vars(span), "name": printable(span.name), "args": args})
    return events


# By the entries that only this kind has.
CHROME = {"traceEvents"}
KINDS: Sequence[tuple[set[str], Callable[[Path, Mapping[str, Any]], list[Section]]]] = (
    ({"provenance", "rows"}, _read_benchmark),
    ({"passed", "parts"}, _read_demo),
    ({"options", "outcome"}, _read_training),
    ({"findings"}, _read_doctor),
)
