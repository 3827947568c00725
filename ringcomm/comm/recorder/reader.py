# SPDX-License-Identifier: Apache-2.0
"""Reads the flight recorders of a communicator's ranks, writes traces, and explains faults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from ringcomm import _native
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.records import (
    HEADER_BYTES,
    STATES,
    TOTALS_BYTES,
    CallTotals,
    Clock,
    NodeLevel,
    RankRecording,
    Record,
    RecorderHeader,
    Recording,
    at,
    read_header,
    read_recorder,
    read_totals,
    renumbered,
    unstable_records,
    with_failure,
)
from ringcomm.errors import ArgumentError, RingcommError, printable
from ringcomm.json_reader import LONGEST_FILE_TEXT, read_bounded, read_object, shown

__all__ = [
    "LIMIT_S",
    "VARIABLE",
    "FlightRecorder",
    "FoundRecorder",
    "FoundRecorders",
    "OfNode",
    "Trace",
    "Writing",
    "at_this_call_site",
    "directory",
    "ended_ranks",
    "find_newest",
    "is_off",
    "last_over_nodes",
    "leave",
    "live_recordings",
    "newest",
    "other_processes",
    "program_line",
    "prune",
    "read",
    "recording_of",
    "running_communicators",
    "text_of",
    "told_over_nodes",
]

VARIABLE = "RINGCOMM_TRACE_DIR"
OFF = "off"
FORMAT, VERSION = "ringcomm-trace", 1
KEPT_TRACES = 32
# Seconds: if an unfinished file has not changed for this long, its writer counts as dead.
STALE_S = 3600
LARGEST_BYTES = 256 << 20
# The year 9999, the last of Python's dates, in seconds since 1970.
_LATEST_S = 253_402_300_799
# The most ranks that a trace may have; no communicator has more.
_MOST_RANKS = 1 << 16
_NAME = re.compile(r"ringcomm-[\w.-]{1,80}-[0-9a-f]{16}\.json")
_UNFINISHED = re.compile(r"ringcomm-[\w.-]{1,120}\.part")
# Ranks that are threads take turns: the first writes the trace, and the others find the file.
_writing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class OfNode:
    """The node whose ranks left a trace, for a communicator over nodes.

    ``world_id`` identifies the communicator on all nodes; ``node`` is the number of the node;
    ``nodes`` has the ranks of each node.
    """

    world_id: int
    node: int
    nodes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A recording, the rank that wrote it and when (seconds since 1970), and the error.

    For a communicator over nodes it covers the ranks of one node, which ``of_node`` names.
    """

    recording: Recording
    written_by: int
    written_s: float
    error: str
    of_node: OfNode | None = None

    @property
    def level(self) -> NodeLevel | None:
        """The node and its ranks; None unless the communicator spans nodes."""
        if self.of_node is None:
            return None
        node = self.of_node.node
        return NodeLevel(self.recording.communicator, node, self.of_node.nodes[node])


def is_off() -> bool:
    """True when the user has turned traces off."""
    return os.environ.get(VARIABLE, "") == OFF


def directory() -> Path | None:
    """Returns the folder for traces, which may not exist yet; None if traces are turned off.

    The folder is ``RINGCOMM_TRACE_DIR``, or by default ``ringcomm-<uid>`` in the system's temporary
    folder, to which only this user may have access.

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
    """Lists the regular files with matching names, oldest first; tolerates files that vanish."""
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
    """Returns the newest trace in the current folder, else in :func:`directory`, else None.

    Raises:
        RingcommError: a folder cannot be read.
    """
    for folder in (Path(), directory()):
        try:
            files = _files(folder, _NAME) if folder is not None else []
        except OSError as error:
            raise RingcommError(f"cannot look into {folder}: {error.strerror}") from error
        found = [path for path, status in files if status.st_size]
        if found:
            return found[-1]
    return None


def newest() -> Path:
    """Returns the trace of :func:`find_newest`.

    Raises:
        RingcommError: there is no trace.
    """
    found = find_newest()
    if found is None:
        raise RingcommError(
            f"expected a trace in this folder or in {directory() or f'{VARIABLE}={OFF}'}, "
            "got none. A communicator leaves one at a fault; name a FILE, or --pid for processes "
            "that run"
        )
    return found


def text_of(trace: Trace) -> str:
    """Returns the text of a trace's file."""
    # Do not use dataclasses.asdict(), which takes ten times as long.
    ranks = [
        {
            **vars(rank),
            "collectives": list(map(vars, rank.collectives)),
            "messages": list(map(vars, rank.messages)),
        }
        for rank in trace.recording.ranks
    ]
    fields = {**vars(trace), "recording": {**vars(trace.recording), "ranks": ranks}}
    fields["of_node"] = None if trace.of_node is None else vars(trace.of_node)
    body = json.dumps(fields, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
    return f'{head[:-1]}, "body": {body}}}\n'


def leave(recording: Recording, rank: int, error: str, of_node: OfNode | None = None) -> str:
    """Writes a trace of this communicator unless another rank has written it. Never raises.

    Args:
        recording: the recording of its ranks, or of one node's ranks.
        rank: the writing rank.
        error: the text of the error.
        of_node: the node of the ranks, if the communicator spans nodes.

    Returns:
        Text to append to an error message: the path of the file, or why there is no file.
    """
    if is_off():
        return ""
    # Name and error may come from the user or a peer; the reader rejects control characters.
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
    directory()  # raises if the folder is another user's
    node = "" if trace.of_node is None else f".node{trace.of_node.node}"
    safe = re.sub(r"[^\w.-]", "_", trace.recording.communicator, flags=re.ASCII)
    name = f"{safe[: 80 - len(node)]}{node}" or "_"
    path = folder / f"ringcomm-{name}-{trace.recording.world_id:016x}.json"
    with _writing:
        if not path.exists():
            _publish(text_of(trace), path)
    return path


def _publish(text: str, path: Path) -> None:
    """Writes a file that gets its name only when complete; never replaces an existing file."""
    descriptor, unfinished = tempfile.mkstemp(".part", f"{path.stem}-", path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            pass  # another rank has written its file first
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
            with suppress(OSError):  # another process may have removed it
                path.unlink()


def read(path: Path) -> Trace:
    """Reads a trace and checks every field.

    Raises:
        ArgumentError: the file cannot be read.
        RingcommError: the file is not a trace, has another version, or is damaged.
    """

    def fail(why: str) -> NoReturn:
        raise RingcommError(f"{path}: expected a trace of version {VERSION}, got {why}")

    try:
        raw = read_bounded(path, LARGEST_BYTES)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
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
        raise ValueError(f"it has {world} ranks, expected at most {_MOST_RANKS}")
    if not 0 <= trace.written_s <= _LATEST_S:
        raise ValueError(f"written_s {trace.written_s} is out of range")
    # By rank: True while the trace may still have a record of the rank.
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
            raise ValueError(f"rank {each.rank} is out of range or occurs twice")
        awaited[each.rank] = False
        for records, track in ((each.collectives, "collectives"), (each.messages, "messages")):
            _check_records(records, track)


def _check_records(records: tuple[Record, ...], track: str) -> None:
    before = 0
    for record in records:
        if record.track != track or record.number <= before:
            raise ValueError(f"{track} are not in order")
        if record.state not in STATES:
            raise ValueError(f"unknown state {shown(record.state)}")
        before = record.number


# ---- Reading flight recorders, and adding their facts to a fault ---------------------------------

# ---- Flight recorders of running processes, read from their heaps without their help -------------
# A process has its own heap and its peers' heaps open as files. So one process is enough to read
# all ranks, even a rank that was killed. Reading writes nothing and stops no process.


# kernels/host/heap.h
_HEAP_MAGIC = int.from_bytes(b"RNGHEAP1", "little")
_HEAP_HEAD = struct.Struct("<QQII")
_MOST_RECORDERS = 4096
_TOTALS_TRIES = 64
# States in proc_pid_stat(5): no process, a zombie, dead.
ENDED = ("", "Z", "X")
CLOCKS_DIFFER_S = 0.1
# kernels/include/ringcomm/protocol/call.h: ControlPage
WAITS_FOR_OFFSET, WORD_BYTES = _native.STRUCTURES["page.waits_for"], 4


@dataclass(frozen=True)
class FoundRecorder:
    header: RecorderHeader
    memory: bytes
    unstable: list[int]
    waits_for: int
    totals: dict[str, CallTotals]
    # The pid of the process whose heap has the recorder.
    seen_by: int = 0


class FoundRecorders:
    """The recorders of processes, each heap read once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], FoundRecorder] = {}
        self._known: set[int] = set()

    def look_into(self, pid: int) -> None:
        """Reads the recorders in the heaps of a process.

        Raises:
            RingcommError: the process does not exist, is another user's, or has no ringcomm heap.
        """
        has_heap = False
        for token, descriptor in _heaps_of(pid):
            has_heap = True
            if token in self._known:
                continue
            self._known.add(token)
            for each in _recorders(descriptor):
                header = each.header
                key = (header.world_id, header.rank, header.created_ns)
                self._found[key] = replace(each, seen_by=pid)
        if not has_heap:
            raise RingcommError(
                f"expected process {pid} to be a rank of a ringcomm communicator that "
                "records, got a process without a heap of ringcomm's"
            )

    def worlds(self) -> list[list[FoundRecorder]]:
        """Returns the recorders of each communicator, by rank; oldest communicator first.

        Each rank that never connected counts as a communicator of its own.
        """
        worlds: dict[tuple[int, int], list[FoundRecorder]] = {}
        for each in self._found.values():
            key = (each.header.world_id, 0 if each.header.world_id else each.header.created_ns)
            worlds.setdefault(key, []).append(each)
        for members in worlds.values():
            members.sort(key=lambda each: each.header.rank)
        return sorted(worlds.values(), key=_oldest)


def live_recordings(pids: Iterable[int]) -> list[Recording]:
    """Reads the recordings of all communicators that these processes take part in.

    Raises:
        RingcommError: a process does not exist, is another user's, or has no flight recorder.
    """
    found = FoundRecorders()
    for pid in pids:
        found.look_into(pid)
    worlds = found.worlds()
    if not worlds:
        raise RingcommError("these processes have no communicator that records its calls")
    return list(map(recording_of, worlds))


def running_communicators() -> list[Recording]:
    """Returns the recordings of all communicators of this user's other processes."""
    found = FoundRecorders()
    for pid in other_processes():
        with suppress(RingcommError):  # a process that ends, or has no communicator
            found.look_into(pid)
    return list(map(recording_of, found.worlds()))


def other_processes() -> list[int]:
    """Returns the pids of this user's other processes."""
    pids = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # the process has ended, or the name is not a pid
            if folder.stat().st_uid == os.geteuid() and int(folder.name) != os.getpid():
                pids.append(int(folder.name))
    return pids


def ended_ranks(recording: Recording, pid: int) -> frozenset[int]:
    """Returns the ranks whose processes have ended.

    Zombies count as ended, and so do ranks whose pid now belongs to another process.

    Args:
        recording: a recording of running processes, just taken.
        pid: a process from which it was read. If that process is in another pid namespace, the
            ranks' pids are meaningless here, and the result is empty.
    """
    try:
        theirs, mine = (os.readlink(f"/proc/{each}/ns/pid") for each in (pid, "self"))
    except OSError:
        return frozenset()
    ranks = recording.ranks if theirs == mine else ()
    return frozenset(each.rank for each in ranks if _has_ended(each, recording.taken_ns))


def _has_ended(rank: RankRecording, taken_ns: int) -> bool:
    state, age_s = _state_of(rank.pid)
    if state in ENDED:
        return True
    begun = [each.begin_ns for each in (*rank.collectives, *rank.messages)]
    # A process that is younger than its first record is another process with the same pid. The
    # margin covers the error of comparing two clocks; one clock has ticks of 10 ms.
    return bool(begun) and (taken_ns - min(begun)) / 1e9 > age_s + CLOCKS_DIFFER_S


def _state_of(pid: int) -> tuple[str, float]:
    """Returns the state letter of a process ("" if it does not exist) and its age in seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0.0
    # proc_pid_stat(5): fields 3 and 22. Field 2, before them, may hold blanks and parentheses.
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0], time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _heaps_of(pid: int) -> Iterator[tuple[int, int]]:
    """Yields the token and an open descriptor of each heap that a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    if _state_of(pid)[0] in ENDED:
        raise RingcommError(f"expected a running process, got pid {pid}, which has ended")
    try:
        names = sorted(os.listdir(folder), key=int)
    except FileNotFoundError:
        raise RingcommError(f"expected a running process, got pid {pid}, which has ended") from None
    except PermissionError:
        raise RingcommError(
            f"process {pid} is another user's, or not dumpable; run as its user, where "
            "ptrace is allowed"
        ) from None
    for name in names:
        try:
            descriptor = _open_regular(folder / name)
        except OSError:
            continue  # the descriptor was closed, or its file cannot be opened again
        if descriptor is None:
            continue
        try:
            token = _token(descriptor)
            if token is not None:
                yield token, descriptor
        finally:
            os.close(descriptor)


def _open_regular(path: Path) -> int | None:
    """Opens the file of a descriptor if it is in memory or an unnamed file, else returns None."""
    if not os.readlink(path).endswith(" (deleted)") or not stat.S_ISREG(path.stat().st_mode):
        return None
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _token(descriptor: int) -> int | None:
    head = os.pread(descriptor, _HEAP_HEAD.size, 0)
    if len(head) < _HEAP_HEAD.size:
        return None
    token, magic, version, _ = _HEAP_HEAD.unpack(head)
    return token if magic == _HEAP_MAGIC and version == 1 else None


def _recorders(descriptor: int) -> Iterator[FoundRecorder]:
    """Yields the recorders listed in a heap; skips entries without a valid recorder."""
    count = min(_HEAP_HEAD.unpack(os.pread(descriptor, _HEAP_HEAD.size, 0))[3], _MOST_RECORDERS)
    size_bytes = os.fstat(descriptor).st_size
    table = os.pread(descriptor, 8 * count, _HEAP_HEAD.size)
    for (offset,) in struct.iter_unpack("<Q", table[: len(table) // 8 * 8]):
        if not 0 < offset < size_bytes:
            continue
        try:
            yield _recorder(descriptor, offset)
        except RingcommError:
            continue  # the recorder's memory has been freed in the meantime


def _recorder(descriptor: int, offset: int) -> FoundRecorder:
    header = read_header(os.pread(descriptor, HEADER_BYTES, offset))
    # Read twice: a record is stable if its bytes and version are equal both times.
    first = os.pread(descriptor, header.memory_bytes, offset)
    second = os.pread(descriptor, header.memory_bytes, offset)
    if len(second) < header.memory_bytes:
        raise RingcommError("expected a recorder inside its heap, got one that exceeds it")
    unstable = unstable_records(first, second)
    totals = _totals(descriptor, offset + header.memory_bytes, header.totals)
    if header.on_device:
        # The rank's control page, from which the word below is read, is in device memory.
        return FoundRecorder(header, first, unstable, 0, totals)
    control = max(offset - header.control_bytes, 0)
    word = os.pread(descriptor, WORD_BYTES, control + WAITS_FOR_OFFSET)
    return FoundRecorder(header, first, unstable, int.from_bytes(word, "little"), totals)


def _totals(descriptor: int, offset: int, count: int) -> dict[str, CallTotals]:
    """Returns the totals after the records; reads until two reads are equal, thus undisturbed."""
    size_bytes = TOTALS_BYTES if count else 0
    before = os.pread(descriptor, size_bytes, offset)
    for _ in range(_TOTALS_TRIES):
        now = os.pread(descriptor, size_bytes, offset)
        if now == before:
            break
        before = now
    return read_totals(before, count) if len(before) == size_bytes else {}


def recording_of(members: Sequence[FoundRecorder]) -> Recording:
    """Returns the recording of a communicator, with ranks in the order of ``members``."""
    header = members[0].header
    clock = Clock.since(header)
    recording = Recording(
        header.name,
        header.world_size,
        header.world_id,
        clock.now[1],
        tuple(_ranks(each, clock) for each in members),
    )
    level = NodeLevel.of(recording)
    return recording if level is None else renumbered(recording, level.ranks)


def _ranks(found: FoundRecorder, clock: Clock) -> RankRecording:
    ranks = read_recorder(found.memory, found.unstable, clock)
    return ranks.waiting_for(found.waits_for, found.header.world_size)


def _oldest(members: list[FoundRecorder]) -> int:
    return min(each.header.created_ns for each in members)


# Seconds by which reading records and writing a trace may delay a fault's error, even if the file
# system hangs or a large world has many records.
LIMIT_S = 2.0
# Records read per rank and track at a fault: a compromise between time and information.
KEPT_RECORDS = 256

T = TypeVar("T")
Fault = dict[str, Any]


def _both(path: str) -> list[Path]:
    """Returns a path in two forms: as Python's frames show it, and with resolved links."""
    return [Path(path).absolute(), Path(path).resolve()]


def _tell_apart_frames() -> None:
    """Registers the folders and files whose frames are never call sites.

    They are ringcomm, torch, and the parts of the standard library that start a thread or enter a
    context manager. The command's programs and the bench count as user code.
    """
    homes = [file.parent.parent.parent for file in _both(__file__)]
    folders = [*homes, *(home.parent / "kernels" / "tl" for home in homes)]
    for package in (torch.__file__, futures.__file__):
        folders += [file.parent for file in _both(package)]
    modules = (threading.__file__, contextlib.__file__, functools.__file__)
    files = [file for module in modules for file in _both(module)]
    _native.set_library_folders(
        [*(f"{folder}/" for folder in folders), *map(str, files)],
        [f"{home / name}/" for home in homes for name in ("cli", "examples", "bench")],
    )


_tell_apart_frames()


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.startswith(("ringcomm.", "torch."))


def program_line() -> tuple[str, int]:
    """Returns the file and line from which the program called ringcomm on this thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def at_this_call_site(run: Callable[[], T]) -> Callable[[], T]:
    """Wraps ``run`` so that its calls on another thread are recorded with this call site."""
    site = _native.call_site()

    def held() -> T:
        _native.hold_call_site(site)
        try:
            return run()
        finally:
            _native.hold_call_site(0)

    return held


def _ago(then_ns: int, now_ns: int) -> str:
    return f"{max(now_ns - then_ns, 0) / 1e9:.1f} s"


def _is_under_way(record: Record) -> bool:
    # An aborted or timed-out call was still running at the time of the fault.
    return record.is_open or record.status in ("aborted", "timeout")


def _seen_state(record: Record, now_ns: int) -> str:
    """Describes the state of a device call, as far as the host has seen it."""
    enqueued = f"enqueued {_ago(record.begin_ns, now_ns)} ago"
    if record.state == "captured":
        return f"captured into a graph {_ago(record.begin_ns, now_ns)} ago"
    if record.is_open:
        begun = ", and begun on its device" if record.state == "begun" else ""
        return f"{enqueued}{begun}, not seen completed"
    how = f"failed ({record.status})" if record.status else record.state
    return f"{enqueued}, seen {how} {_ago(record.end_ns, now_ns)} ago"


def _in_words(record: Record, now_ns: int, on_device: bool) -> str:
    if on_device:
        state = _seen_state(record, now_ns)
    elif _is_under_way(record):
        state = f"under way for {_ago(record.begin_ns, record.end_ns or now_ns)}"
    else:
        state = f"{record.state} {_ago(record.end_ns, now_ns)} ago"
    number = "" if record.track == "messages" else f" (call {record.number})"
    return f"{record}{number}{at(record)}, {state}"


def _story(reporter: RankRecording, peer: RankRecording, fault: Fault, now_ns: int) -> str:
    """Describes the awaited rank's last calls, in sentences that each end with a blank."""
    who = f"Rank {peer.rank}"
    lasts = [track[-1] for track in (peer.collectives, peer.messages) if track]
    if not lasts:
        return f"{who} has made no call yet. "
    if fault["message"]:
        newest = max(lasts, key=lambda record: record.begin_ns)
        return f"{who}'s last call: {_in_words(newest, now_ns, peer.on_device)}. "
    told = _story_of_collectives(reporter, peer, fault, now_ns)
    # The peer may not have made this call because it is waiting for a message.
    if peer.messages and _is_under_way(peer.messages[-1]):
        told += f"Its last message: {_in_words(peer.messages[-1], now_ns, peer.on_device)}. "
    return told


def _story_of_collectives(
    reporter: RankRecording, peer: RankRecording, fault: Fault, now_ns: int
) -> str:
    who = f"Rank {peer.rank}"
    same = peer.collective(fault["sequence"])
    mine = reporter.collective(fault["sequence"])
    if same is not None and mine is not None and same.call != mine.call:
        # Different kernels may wait for different words and never read each other's headers. Then
        # the calls time out instead of reporting the mismatch.
        words = _in_words(same, now_ns, peer.on_device)
        return f"{who} has made another call instead: {words}. "
    if same is not None and _is_under_way(same):
        does = "has enqueued" if peer.on_device else "is in"
        return f"{who} {does} this call, too: {_in_words(same, now_ns, peer.on_device)}. "
    last = peer.last
    if last is None:
        return f"{who} has made no collective call yet. "
    has_not = f"{who} has not made this call. " if last.number < fault["sequence"] else ""
    return f"{has_not}{who}'s last call: {_in_words(last, now_ns, peer.on_device)}. "


def _tell_mismatch(fault: Fault, reporter: RankRecording, peer: RankRecording | None) -> None:
    # The peer's header may belong to an earlier call, for which this rank made another call.
    number = fault["their_sequence"]
    mine, theirs = reporter.collective(number), peer.collective(number) if peer else None
    parted = mine is not None and theirs is not None and mine.call != theirs.call
    if mine is not None and parted and number != fault["sequence"]:
        words = str(mine).removesuffix(")")
        fault["mine"] = (
            f"{words}{', ' if words[-1] != '(' else ''}call {number} of this communicator)"
        )
    elif number != fault["sequence"]:
        mine = reporter.collective(fault["sequence"])
    fault["mine"] += at(mine)
    fault["theirs"] += at(theirs)
    last = [
        f"Rank {each.rank}'s last reduction of gradients is of {backward}. "
        for each in (reporter, peer)
        if each is not None and (backward := each.backward_at(number))
    ]
    fault["story"] = "".join(last)


def _tell(fault: Fault, recording: Recording) -> Fault:
    """Returns a copy of the fault with descriptions from the ranks' records."""
    told = dict(fault)
    reporter, peer = recording.rank(fault["rank"]), recording.rank(fault["peer"])
    if reporter is None:
        return told
    if fault["kind"] == "mismatch":
        _tell_mismatch(told, reporter, peer)
    elif fault["sequence"]:
        find = reporter.message if fault["message"] else reporter.collective
        told["mine"] += at(find(fault["sequence"]))
    if peer is not None and fault["kind"] in ("timeout", "peer_lost", "peer_left", "peer_closed"):
        told["story"] = _story(reporter, peer, fault, recording.taken_ns)
    return told


_NUMBER = re.compile(r" \(call \d+\)")


def _outer(rank: RankRecording) -> RankRecording:
    """Returns a copy without calls that are parts of calls over nodes."""
    inner = rank.inner_calls()
    outer = tuple(each for each in rank.collectives if each.number not in inner)
    return replace(rank, collectives=outer)


def last_over_nodes(rank: RankRecording, now_ns: int) -> str:
    """Describes the last multi-node call that a rank made; "" if the rank has made none."""
    last = _outer(rank).last
    return "" if last is None else _NUMBER.sub("", _in_words(last, now_ns, rank.on_device))


def told_over_nodes(fault: Fault, recording: Recording) -> Fault:
    """Describes a fault within a node by the calls over nodes that the program made.

    Args:
        fault: the fault, with the rank numbers of the recording.
        recording: the node's ranks, with the calls over nodes and the calls within the node.
    """
    if fault["message"]:
        return _tell(fault, recording)
    outer = replace(recording, ranks=tuple(map(_outer, recording.ranks)))

    def around(number_of: int, call: int) -> Record | None:
        known, made = recording.rank(number_of), outer.rank(number_of)
        if known is None or made is None or known.collective(call) is None:
            return None
        return [each for each in made.collectives if each.number <= call][-1]

    mine = around(fault["rank"], fault["sequence"])
    if mine is None:
        return _tell(fault, recording)
    told = {**fault, "mine": str(mine), "sequence": mine.number}
    if fault["kind"] == "mismatch":
        theirs = around(fault["peer"], fault["their_sequence"])
        told["mine"] += at(mine)
        if theirs is not None:
            told["theirs"] = f"{theirs}{at(theirs)}"
        return told
    told = _tell(told, outer)
    # The call numbers also count calls within the node, so they mean nothing to a user.
    return {**told, "story": _NUMBER.sub("", told.get("story", ""))}


class RecorderSource(Protocol):
    """Copies the recorders of all ranks."""

    def recorded(self, rank: int, most: int) -> bytes:
        """Returns a copy of a rank's recorder; empty when it cannot be read."""
        ...


class Writing:
    """Writes a trace on a thread, since its file system may hang. Raises nothing.

    Args:
        write: writes the trace, and returns the text to add to the error.
        begin_s: when the wait for the trace began, in ``time.monotonic()``; None: now.
    """

    def __init__(self, write: Callable[[], str], begin_s: float | None = None) -> None:
        self._end_s = LIMIT_S + (time.monotonic() if begin_s is None else begin_s)
        late = f". Its trace was not written within {LIMIT_S:g} s"
        self._told = "" if reader.is_off() else late
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="ringcomm-trace", daemon=True
        )
        try:
            self._thread.start()
        except Exception as trouble:  # no memory or threads left, or the interpreter ends
            self._told = f". No trace was written: {trouble}"

    def told(self) -> str:
        """Returns the text to add to the error, after at most ``LIMIT_S``."""
        if self._thread.is_alive():
            self._thread.join(max(self._end_s - time.monotonic(), 0))
        return self._told

    def _run(self, write: Callable[[], str]) -> None:
        try:
            self._told = write()
        except Exception as trouble:
            self._told = f". Its flight recorders cannot be read: {trouble}"
        reader.prune()


class FlightRecorder:
    """Reads the recorders of all ranks of a communicator.

    Args:
        source: copies the recorders; None: nothing is recorded.
        name: the name of the communicator.
        rank_of: this rank, and the world size.
        locate: translates the call numbers of a kernel's fault to the records' numbers.
    """

    def __init__(
        self,
        source: RecorderSource | None,
        name: str,
        rank_of: tuple[int, int],
        locate: Callable[[Fault], Fault] | None = None,
    ) -> None:
        self._source = source
        self._locate = locate
        self._name = name
        self._rank, self._world_size = rank_of
        self._made = _native.clock_pair()

    def recording(self) -> Recording:
        """Returns all records of all ranks; a recording without ranks if nothing is recorded."""
        return self.read(self.copies(_native.MAX_RECORDS))

    def copies(self, most: int = KEPT_RECORDS) -> list[bytes]:
        """Returns copies of the readable recorders, each with its last ``most`` records."""
        if self._source is None:
            return []
        copies = [self._source.recorded(rank, most) for rank in range(self._world_size)]
        return [copy for copy in copies if copy]

    def read(self, copies: list[bytes]) -> Recording:
        """Returns the records in copies that :meth:`copies` made."""
        # Use this rank's own clock readings: readings in a peer's recorder may be damaged.
        clock = Clock(self._made, _native.clock_pair())
        ranks = tuple(read_recorder(copy, clock=clock) for copy in copies)
        world_id = read_header(copies[0]).world_id if copies else 0
        return Recording(self._name, self._world_size, world_id, clock.now[1], ranks)

    def explained(self, fault: Fault, word: Callable[[Fault], RingcommError]) -> Fault:
        """Calls :meth:`traced`, after translating a kernel's call numbers if necessary."""
        if self._locate is None:
            return self.traced(fault, word)
        try:
            return self.traced(self._locate(fault), word)
        except Exception as trouble:
            return {**fault, "trace": f". Its flight recorders cannot be read: {trouble}"}

    def traced(self, fault: Fault, word: Callable[[Fault], RingcommError]) -> Fault:
        """Writes a trace file, and returns the fault with the descriptions from the recorders.

        The user must get the error of the fault even if something fails here. So this method raises
        nothing, and returns within ``LIMIT_S`` with the facts found so far.

        Args:
            fault: the fault, as ``_native.Comm.fault()`` returns it.
            word: makes the error of a fault; its text goes into the trace.
        """
        begin_s = time.monotonic()
        found: Fault = {}

        def write(copies: list[bytes]) -> str:
            recording = with_failure(self.read(copies), fault)
            told = _tell(fault, recording)
            found.update(told)
            return reader.leave(recording, self._rank, str(word(told)))

        try:
            # Copy the records here and not on the thread: once this method has returned, the
            # communicator may be closed while the thread still runs.
            copies = self.copies()
        except Exception as trouble:
            return {**fault, "trace": f". No trace was written: {trouble}"}
        if not copies:
            return fault
        trace = Writing(functools.partial(write, copies), begin_s).told()
        return {**fault, **found, "trace": trace}
