"""Trace files: recordings that the first rank to see a fault writes.

A trace is one JSON object: ``format``, ``version``, ``sha256`` of the body's text, and ``body``.
The reader checks every field.
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
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ringcomm.comm.recorder.records import STATES, NodeLevel, Record, Recording
from ringcomm.errors import RingcommError, printable
from ringcomm.json_reader import LONGEST_FILE_TEXT, read_bounded, read_object, shown

__all__ = [
    "VARIABLE",
    "OfNode",
    "Trace",
    "directory",
    "find_newest",
    "is_off",
    "leave",
    "newest",
    "prune",
    "read",
    "text_of",
]

VARIABLE = "RINGCOMM_TRACE_DIR"
OFF = "off"
FORMAT, VERSION = "ringcomm-trace", 1
KEPT_TRACES = 32
# The writer of a file that has not changed for so long has died.
STALE_S = 3600
LARGEST_BYTES = 256 << 20
# The year 9999, the last of Python's dates.
_LATEST_S = 253_402_300_799
# More than any communicator has; a small file could claim any number.
_MOST_RANKS = 1 << 16
_NAME = re.compile(r"ringcomm-[\w.-]{1,80}-[0-9a-f]{16}\.json")
_UNFINISHED = re.compile(r"ringcomm-[\w.-]{1,120}\.part")
# Ranks that are threads of one process write one trace: more would only slow each other down.
_writing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class OfNode:
    """The node whose ranks left a trace of a communicator over nodes.

    ``world_id`` identifies the communicator on all nodes, ``node`` is the number of this one in
    ``nodes``, which are the ranks of each.
    """

    world_id: int
    node: int
    nodes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A recording, the rank and time (seconds since 1970) that wrote it, and the error.

    Over nodes it has the ranks of one node, as ``of_node`` says.
    """

    recording: Recording
    written_by: int
    written_s: float
    error: str
    of_node: OfNode | None = None

    @property
    def level(self) -> NodeLevel | None:
        """The node and its ranks; None unless the communicator is over nodes."""
        if self.of_node is None:
            return None
        node = self.of_node.node
        return NodeLevel(self.recording.communicator, node, self.of_node.nodes[node])


def is_off() -> bool:
    """True when the user wants no traces."""
    return os.environ.get(VARIABLE, "") == OFF


def directory() -> Path | None:
    """Returns the folder for traces, which may not exist yet; None if traces are turned off.

    The folder is ``RINGCOMM_TRACE_DIR``, or else ``ringcomm-<uid>`` in the system's temporary
    folder, which must be this user's alone.

    Raises:
        RingcommError: the default folder belongs to another user, or is open to others.
    """
    if is_off():
        return None
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    path = Path(tempfile.gettempdir(), f"ringcomm-{os.geteuid()}")
    try:
        status = path.lstat()
    except FileNotFoundError:
        return path
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or stat.S_IMODE(status.st_mode) & 0o077:
        raise RingcommError(
            f"traces: expected {path} to be a folder of this user's alone (mode 0700), got "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}. Remove it, or set {VARIABLE}"
        )
    return path


def _files(folder: Path, name: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
    """Lists the regular files with such names, oldest first; others may remove some meanwhile."""
    found = []
    try:
        paths = [path for path in folder.iterdir() if name.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append((path, path.lstat()))
    regular = [each for each in found if stat.S_ISREG(each[1].st_mode)]
    return sorted(regular, key=lambda each: (each[1].st_mtime_ns, each[0]))


def find_newest() -> Path | None:
    """Returns the newest trace of the current folder, or else of :func:`directory`, or None.

    Raises:
        RingcommError: a folder cannot be read.
    """
    for folder in (Path(), directory()):
        try:
            files = _files(folder, _NAME) if folder is not None else []
        except OSError as error:
            raise RingcommError(f"trace: cannot look into {folder}: {error.strerror}") from error
        found = [path for path, status in files if status.st_size]
        if found:
            return found[-1]
    return None


def newest() -> Path:
    """Returns the trace of :func:`find_newest`.

    Raises:
        RingcommError: there is none.
    """
    found = find_newest()
    if found is None:
        raise RingcommError(
            f"trace: expected a trace in this folder or in {directory() or f'{VARIABLE}={OFF}'}, "
            "got none. A communicator leaves one at a fault; name a FILE, or --pid for processes "
            "that run"
        )
    return found


def text_of(trace: Trace) -> str:
    """Returns the text of a trace's file."""
    # dataclasses.asdict() takes ten times as long.
    ranks = [
        {
            **vars(rank),
            "collectives": list(map(vars, rank.collectives)),
            "messages": list(map(vars, rank.messages)),
        }
        for rank in trace.recording.ranks
    ]
    plain = {**vars(trace), "recording": {**vars(trace.recording), "ranks": ranks}}
    plain["of_node"] = None if trace.of_node is None else vars(trace.of_node)
    body = json.dumps(plain, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
    return f'{head[:-1]}, "body": {body}}}\n'


def leave(recording: Recording, rank: int, error: str, of_node: OfNode | None = None) -> str:
    """Writes a trace for this communicator unless another rank has. Never raises.

    Args:
        recording: of its ranks, or of one node's.
        rank: of the writer.
        error: what happened.
        of_node: whose ranks these are where the communicator is over nodes.

    Returns:
        Text to append to an error message: where the file is, or why there is none.
    """
    if is_off():
        return ""
    # Both texts may come from the user or a peer, and the reader refuses control characters.
    name = printable(recording.communicator, "")[:LONGEST_FILE_TEXT]
    recording = dataclasses.replace(recording, communicator=name)
    try:
        text = printable(error)[:LONGEST_FILE_TEXT]
        path = _write(Trace(recording, rank, time.time(), text, of_node))
    except Exception as trouble:
        return f". No trace was written: {type(trouble).__name__}: {trouble}"
    whose = "each rank" if of_node is None else f"each rank of node {of_node.node}"
    return f". What {whose} did last: ringcomm trace {path}"


def _write(trace: Trace) -> Path:
    folder = directory()
    if folder is None:
        raise RingcommError(f"{VARIABLE} was set to {OFF}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory()  # somebody else may have made it meanwhile
    node = "" if trace.of_node is None else f".node{trace.of_node.node}"
    safe = re.sub(r"[^\w.-]", "_", trace.recording.communicator, flags=re.ASCII)
    name = f"{safe[: 80 - len(node)]}{node}" or "_"
    path = folder / f"ringcomm-{name}-{trace.recording.world_id:016x}.json"
    with _writing:
        if not path.exists():
            _publish(text_of(trace), path)
    return path


def _publish(text: str, path: Path) -> None:
    """Writes a file under a name that it gets only once complete; an existing file stays."""
    descriptor, unfinished = tempfile.mkstemp(".part", f"{path.stem}-", path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            pass  # another rank was first
        except OSError:  # a file system without hard links
            os.rename(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def prune() -> None:
    """Removes this user's oldest traces and the files of writers that died. Never raises."""
    with suppress(OSError, RingcommError):
        folder = directory()
        if folder is None:
            return
        traces = [each for each in _files(folder, _NAME) if each[1].st_uid == os.geteuid()]
        old = [path for path, _ in traces[:-KEPT_TRACES]]
        for path, status in _files(folder, _UNFINISHED):
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_S:
                old.append(path)
        for path in old:
            with suppress(OSError):  # others remove them, too
                path.unlink()


def read(path: Path) -> Trace:
    """Reads a trace and checks every field.

    Raises:
        RingcommError: the file cannot be read, is no trace, has another version, or is damaged.
    """

    def fail(why: str) -> NoReturn:
        raise RingcommError(f"trace {path}: expected a trace of version {VERSION}, got {why}")

    try:
        raw = read_bounded(path, LARGEST_BYTES)
    except OSError as error:
        raise RingcommError(f"trace {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        fail(str(error))
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError) as error:
        fail(f"no JSON ({error}); was its writer killed while it wrote?")
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        fail("something else")
    if whole.get("version") != VERSION:
        fail(f"version {shown(whole.get('version'))}")
    body = whole.get("body")
    text = json.dumps(body, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != whole.get("sha256"):
        fail("one that was changed after it was written (its sha256 differs)")
    try:
        trace = read_object(Trace, body, "body")
        _check(trace)
    except (ValueError, RecursionError) as error:
        fail(f"one that is damaged: {error}")
    return trace


def _check(trace: Trace) -> None:
    recording, of_node = trace.recording, trace.of_node
    world = recording.world_size
    if not 0 < world <= _MOST_RANKS:
        raise ValueError(f"it has {world} ranks, of at most {_MOST_RANKS}")
    if not 0 <= trace.written_s <= _LATEST_S:
        raise ValueError(f"written_s {trace.written_s} is out of range")
    # By rank, whether it can have a record here.
    awaited = bytearray([of_node is None]) * world
    if of_node is not None:
        if sorted(rank for ranks in of_node.nodes for rank in ranks) != list(range(world)):
            raise ValueError("the ranks of the nodes are not those of the communicator")
        if of_node.node not in range(len(of_node.nodes)):
            raise ValueError(f"node {of_node.node} is out of range")
        for rank in of_node.nodes[of_node.node]:
            awaited[rank] = True
    for each in recording.ranks:
        if not (0 <= each.rank < world and awaited[each.rank] and -1 <= each.waits_for < world):
            raise ValueError(f"rank {each.rank} is out of range or there twice")
        awaited[each.rank] = False
        for records, track in ((each.collectives, "collectives"), (each.messages, "messages")):
            _check_records(records, track)


def _check_records(records: tuple[Record, ...], track: str) -> None:
    before = 0
    for record in records:
        if record.track != track or record.number <= before:
            raise ValueError(f"{track} are not in order")
        if record.state not in STATES:
            raise ValueError(f"state {shown(record.state)} is none")
        before = record.number
