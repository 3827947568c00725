"""``ringcomm trace``: what the ranks of a communicator did last, and where they part."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringcomm.cli.trace_text import aligned, over_nodes, report
from ringcomm.comm.recorder.live import ended_ranks, live_recordings, running_communicators
from ringcomm.comm.recorder.records import CAPTURED, COMPLETED, DONE, Record, Recording, describe
from ringcomm.comm.recorder.trace_file import Trace, find_newest, newest, read
from ringcomm.errors import ArgumentError

__all__ = ["add_arguments", "by_communicator", "chrome_text", "run"]

# Recordings as a Chrome trace: all ranks on one time line.
#
# The format is that of the Trace Event Format document of the Chromium project: X events with
# ``ts`` and ``dur`` in microseconds, a process per rank, a thread per track.

_THREADS = {"collectives": 0, "messages": 1}


def chrome_text(recordings: Sequence[Recording]) -> str:
    """The JSON text. Of several communicators, each has processes of its own."""
    events: list[dict[str, Any]] = []
    base = 0
    for recording in recordings:
        events += _events(recording, base)
        base += max([recording.world_size, *(each.rank + 1 for each in recording.ranks)])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _events(recording: Recording, base: int) -> Iterator[dict[str, Any]]:
    for rank in recording.ranks:
        pid = base + rank.rank
        name = f"{recording.communicator} rank {rank.rank} (pid {rank.pid})"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for track, tid in _THREADS.items():
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": tid,
                "args": {"name": track},
            }
        for record in (*rank.collectives, *rank.messages):
            yield _event(record, pid, recording.taken_ns, rank.on_device)


def _event(record: Record, pid: int, taken_ns: int, on_device: bool) -> dict[str, Any]:
    """One call. A call that runs ends where the recording does, and says so.

    On a device it lasts from when its host enqueued it to when that saw its end.
    """
    end_ns = record.end_ns or taken_ns
    args = {"call": describe(record), "number": record.number, "state": record.state}
    args |= {"site": record.site, "bytes": record.size_bytes}
    if record.status:
        args["status"] = record.status
    if record.peer >= 0:
        args["peer"] = record.peer
    if on_device:
        args["span"] = "from enqueued to end seen by the host"
    if record.state == CAPTURED:
        end_ns = record.begin_ns
    marked = "" if record.state in (DONE, COMPLETED) else f" ({record.state})"
    return {
        "ph": "X",
        "name": record.collective + marked,
        "cat": record.track,
        "pid": pid,
        "tid": _THREADS[record.track],
        "ts": record.begin_ns / 1000,
        "dur": max(end_ns - record.begin_ns, 0) / 1000,
        "args": args,
    }


SHOWN_CALLS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="*",
        type=Path,
        help="traces of a fault, over nodes one of each node; none: what runs, and the newest one",
    )
    parser.add_argument(
        "--pid",
        nargs="+",
        type=int,
        default=[],
        metavar="PID",
        help="look into running, hung or stopped processes instead; one rank is enough",
    )
    parser.add_argument(
        "--last",
        type=int,
        default=SHOWN_CALLS,
        metavar="N",
        help=f"calls to show of each rank, default {SHOWN_CALLS}; 0: all",
    )
    parser.add_argument(
        "--chrome",
        type=Path,
        metavar="OUT.json",
        help="write all calls as a Chrome trace, for Perfetto or chrome://tracing",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the recordings; 0 also when they show a fault.

    Raises:
        ArgumentError: options that do not go together, or an output that cannot be written.
        RingcommError: a file is no trace, or a process has no recorder to read.
    """
    if args.file and args.pid:
        raise ArgumentError("expected FILEs or --pid, got both")
    if args.last < 0:
        raise ArgumentError(f"--last: expected a number >= 0, got {args.last}")
    recordings: list[Recording] = []
    parts: list[str] = []
    if args.pid:
        recordings = live_recordings(args.pid)
        parts = [
            "\n".join(report(each, args.last, ended_ranks(each, args.pid[0])))
            for each in recordings
        ]
    elif args.file:
        recordings, parts = _of_files(args.file, args.last)
    else:
        recordings, parts = _without_arguments(args.last)
    print("\n\n".join(parts))
    if args.chrome is not None:
        try:
            args.chrome.write_text(chrome_text(recordings), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--chrome: cannot write {args.chrome}: {error}") from error
        print(f"\nwrote {args.chrome}", file=sys.stderr)
    return 0


def _without_arguments(last: int) -> tuple[list[Recording], list[str]]:
    """Lists what runs, and reads the newest trace; returns recordings and what to print.

    Raises:
        RingcommError: there is neither.
    """
    running = [_running(each) for each in running_communicators()]
    parts = []
    if running:
        told = "what this user's processes run; ringcomm trace --pid PID shows the calls:"
        parts.append("\n".join([told, *sorted(running)]))
    path = find_newest() if running else newest()
    if path is None:
        return [], parts
    recordings, told_of_file = _of_files([path], last)
    return recordings, [*parts, f"the newest trace {_whose(path)}:", *told_of_file]


def _running(recording: Recording) -> str:
    pids = ", ".join(f"{each.rank}: pid {each.pid}" for each in recording.ranks)
    return f"  {recording.communicator}, {recording.world_size} ranks ({pids})"


def _whose(path: Path) -> str:
    """Says where a trace lies, how old it is, and which process wrote it."""
    trace = read(path)
    writer = trace.recording.rank(trace.written_by)
    where = "of this folder" if path.parent == Path() else f"of {path.parent}"
    age_s = max(time.time() - trace.written_s, 0.0)
    process = "" if writer is None else f" (pid {writer.pid})"
    return f"{where}, written {age_s:.0f} s ago by rank {trace.written_by}{process}"


def by_communicator(files: Sequence[tuple[Path, Trace]]) -> list[list[tuple[Path, Trace]]]:
    """Groups files of traces: those of one communicator over nodes belong together."""
    groups: dict[object, list[tuple[Path, Trace]]] = {}
    for path, trace in files:
        key = path if trace.of_node is None else trace.of_node.world_id
        groups.setdefault(key, []).append((path, trace))
    return list(groups.values())


def _of_files(paths: Sequence[Path], last: int) -> tuple[list[Recording], list[str]]:
    """Reads files; returns recordings and what to print, those of one communicator together."""
    recordings: list[Recording] = []
    parts = []
    for group in by_communicator([(path, read(path)) for path in paths]):
        traces = [trace for _, trace in group]
        recordings += aligned(traces)
        if traces[0].of_node is not None:
            parts.append("\n".join(over_nodes(traces)))
        for path, trace in group:
            told = [f"{path}, written by rank {trace.written_by}", trace.error, ""]
            parts.append("\n".join([*told, *report(trace.recording, last, level=trace.level)]))
    return recordings, parts
