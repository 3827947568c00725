"""Recordings as files: where the first rank that sees a fault leaves one, and what one holds.

A trace is one JSON object: ``format``, ``version``, ``sha256`` of the body's text, and ``body``.
Reading one trusts nothing in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import time
import types
import typing
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ringcomm.comm.recording import Record, Recording
from ringcomm.errors import RingcommError

__all__ = ["VARIABLE", "Trace", "directory", "leave", "newest", "read", "text_of", "traces_in"]

VARIABLE = "RINGCOMM_TRACE_DIR"
OFF = "off"
FORMAT, VERSION = "ringcomm-trace", 1
KEPT_TRACES = 32
# A file system that hangs must not keep a fault from its user.
WRITING_S = 2.0
LARGEST_BYTES = 256 << 20
_NAME = re.compile(r"ringcomm-[\w.-]{1,80}-[0-9a-f]{16}\.json")
_MOST_TEXT = 1 << 16
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a trace holds: a recording, who wrote it when (seconds since 1970), and its error."""

    recording: Recording
    written_by: int
    written_s: float
    error: str


def directory() -> Path | None:
    """Where traces go, made if need be; None where the user turned them off.

    ``RINGCOMM_TRACE_DIR``, or else ``ringcomm-<uid>`` in the system's temporary folder, which must
    be this user's alone.

    Raises:
        RingcommError: the default is somebody else's, or open to others.
        OSError: it cannot be made.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen == OFF:
        return None
    if chosen:
        Path(chosen).mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(chosen)
    path = Path(tempfile.gettempdir(), f"ringcomm-{os.geteuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or stat.S_IMODE(status.st_mode) & 0o077:
        raise RingcommError(
            f"traces: expected {path} to be a folder of this user's alone (mode 0700), got "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}. Remove it, or set {VARIABLE}"
        )
    return path


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, oldest first."""
    found = [(each.stat().st_mtime_ns, each) for each in folder.iterdir() if _is_trace(each)]
    return [path for _, path in sorted(found)]


def _is_trace(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)


def newest() -> Path:
    """The newest trace in :func:`directory`.

    Raises:
        RingcommError: there is none.
    """
    folder = directory()
    found = traces_in(folder) if folder is not None else []
    if not found:
        raise RingcommError(
            f"trace: expected a trace in {folder or f'{VARIABLE}={OFF}'}, got none. A communicator "
            "leaves one at a fault; name a FILE, or --pid for processes that run"
        )
    return found[-1]


def text_of(trace: Trace) -> str:
    """A trace as the text of its file."""
    body = json.dumps(dataclasses.asdict(trace), separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
    return f'{head[:-1]}, "body": {body}}}\n'


def leave(recording: Recording, rank: int, error: str) -> str:
    """Writes a trace for this communicator unless a rank has. Never raises, nor blocks for long.

    Returns:
        How an error message goes on: where the file is, or why there is none.
    """
    if os.environ.get(VARIABLE, "") == OFF:
        return ""
    outcome = [f". No trace was written: {VARIABLE} does not answer"]

    def work() -> None:
        # Whatever goes wrong here, the fault is what the user must hear of.
        try:
            path = _write(Trace(recording, rank, time.time(), error))
            outcome[0] = f". What each rank did last: ringcomm trace {path}"
        except Exception as trouble:
            outcome[0] = f". No trace was written: {type(trouble).__name__}: {trouble}"

    thread = threading.Thread(target=work, name="ringcomm-trace", daemon=True)
    try:
        thread.start()
    except RuntimeError as trouble:  # the interpreter ends, or there can be no more threads
        return f". No trace was written: {trouble}"
    thread.join(WRITING_S)
    return outcome[0]


def _write(trace: Trace) -> Path:
    folder = directory()
    if folder is None:
        raise RingcommError(f"{VARIABLE} was set to {OFF}")
    name = re.sub(r"[^\w.-]", "_", trace.recording.communicator, flags=re.ASCII)[:80] or "_"
    path = folder / f"ringcomm-{name}-{trace.recording.world_id:016x}.json"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        return path  # another rank was first
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text_of(trace))
    for old in traces_in(folder)[:-KEPT_TRACES]:
        old.unlink(missing_ok=True)
    return path


def read(path: Path) -> Trace:
    """Reads a trace and checks every field.

    Raises:
        RingcommError: it cannot be read, is no trace, of another version, or damaged.
    """

    def fail(why: str) -> NoReturn:
        raise RingcommError(f"trace {path}: expected a trace of version {VERSION}, got {why}")

    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise RingcommError(f"trace {path}: cannot be read: {error.strerror}") from error
    if len(raw) > LARGEST_BYTES:
        fail(f"more than {LARGEST_BYTES} bytes")
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError) as error:
        fail(f"no JSON ({error}); was its writer killed while it wrote?")
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        fail("something else")
    if whole.get("version") != VERSION:
        fail(f"version {whole.get('version')!r}")
    body = whole.get("body")
    text = json.dumps(body, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != whole.get("sha256"):
        fail("one that was changed after it was written (its sha256 differs)")
    try:
        trace = _object(Trace, body, "body")
        _check(trace.recording)
    except (ValueError, RecursionError) as error:
        fail(f"one whose {error}")
    return trace


def _value(kind: Any, plain: Any, name: str) -> Any:
    """A dataclass, a tuple of them or a scalar from JSON; ValueError names what is wrong."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, plain, name)
    if isinstance(kind, types.GenericAlias):
        if type(plain) is not list:
            raise ValueError(f"{name} is not a list")
        of = typing.get_args(kind)[0]
        return tuple(_value(of, each, f"{name}[{index}]") for index, each in enumerate(plain))
    if kind is float and type(plain) is int:
        plain = float(plain)
    if type(plain) is not kind:
        raise ValueError(f"{name} is not of type {kind.__name__}")
    if kind is int and not -1 <= plain < 1 << 64:
        raise ValueError(f"{name} is out of range")
    if kind is str and (len(plain) > _MOST_TEXT or not _is_printable(plain)):
        raise ValueError(f"{name} is no text to print")
    return plain


def _is_printable(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def _object(kind: type[T], plain: Any, name: str) -> T:
    hints = typing.get_type_hints(kind)
    if type(plain) is not dict or set(plain) != set(hints):
        raise ValueError(f"{name} does not have the fields of a {kind.__name__}")
    return kind(**{key: _value(hints[key], plain[key], f"{name}.{key}") for key in hints})


def _check(recording: Recording) -> None:
    world = range(recording.world_size)
    seen: set[int] = set()
    for each in recording.ranks:
        if each.rank not in world or each.rank in seen or each.waits_for not in (-1, *world):
            raise ValueError(f"rank {each.rank} is out of range or there twice")
        seen.add(each.rank)
        for records, track in ((each.collectives, "collectives"), (each.messages, "messages")):
            _check_records(records, track)


def _check_records(records: tuple[Record, ...], track: str) -> None:
    before = 0
    for record in records:
        if record.track != track or record.number <= before:
            raise ValueError(f"{track} are not in order")
        if record.state not in ("running", "done", "failed"):
            raise ValueError(f"state {record.state!r} is none")
        before = record.number
