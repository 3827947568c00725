# SPDX-License-Identifier: Apache-2.0
"""``ringcomm trace``: shows the ranks' last calls, and where the ranks diverge."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringcomm.cli import table_lines
from ringcomm.cli.output import why_no_file, write_file
from ringcomm.comm.recorder.reader import (
    Trace,
    ended_ranks,
    find_newest,
    live_recordings,
    newest,
    read,
    running_communicators,
)
from ringcomm.comm.recorder.records import (
    NodeLevel,
    RankRecording,
    Record,
    Recording,
)
from ringcomm.errors import ArgumentError

__all__ = [
    "add_arguments",
    "aligned",
    "by_communicator",
    "chrome_text",
    "over_nodes",
    "report",
    "run",
    "verdict",
]


# ---- Recordings as text: each rank's calls, what each rank does now, and where they diverge ------


HERE = ">"


def report(
    recording: Recording,
    last: int,
    ended: Collection[int] = frozenset(),
    level: NodeLevel | None = None,
) -> list[str]:
    """Returns the lines of a report.

    Args:
        recording: the recording of one communicator.
        last: how many collectives, and how many messages, to show per rank; 0: all.
        ended: ranks whose processes are known to have ended.
        level: the node and its ranks, if the communicator spans nodes. None reads them from the
            communicator's name.
    """
    lines = verdict(recording, ended, level)
    is_nested = (level or NodeLevel.of(recording)) is not None
    marked = recording.divergence() or _not_made_by_all(recording)
    for each in recording.ranks:
        lines += ["", *_table(each, recording.taken_ns, last, marked, nested=is_nested)]
    return lines


def verdict(
    recording: Recording,
    ended: Collection[int] = frozenset(),
    level: NodeLevel | None = None,
) -> list[str]:
    """Returns the lines above the tables of calls: what each rank does, where the ranks diverge.

    The arguments are the same as in :func:`report`.
    """
    is_file = level is not None
    level = level or NodeLevel.of(recording)
    expected: Sequence[int] = range(recording.world_size) if level is None else level.ranks
    if level is None:
        lines = [f"communicator {recording.communicator}, {_count(recording.world_size)}"]
    else:
        lines = [
            f"communicator {level.communicator} over nodes, node {level.node}: {_ranks(expected)}",
            "calls within the node are indented below the call over nodes that is made of them; "
            f"for other nodes give {'their files' if is_file else '--pid of a process there'}",
        ]
    there = {each.rank for each in recording.ranks}
    missing = [rank for rank in expected if rank not in there]
    if missing:
        lines.append(f"no recorder of rank {', '.join(map(str, missing))} could be read")
    if not recording.ranks:
        return lines
    lines += ["", *(f"  {_now(each, recording.taken_ns, ended)}" for each in recording.ranks)]
    return [*lines, "", *_divergence(recording)]


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _now(rank: RankRecording, taken_ns: int, ended: Collection[int]) -> str:
    """Describes in one line what a rank does now, or did when its process ended."""
    who, verb = f"rank {rank.rank} (pid {rank.pid})", "is"
    if rank.rank in ended:
        who, verb = f"{who}, whose process has ended,", "was"
    if rank.on_device:
        return f"{who} {_enqueued(rank, taken_ns)}"
    running = [each for each in (*rank.collectives, *rank.messages) if each.state == "running"]
    if running:
        record = max(running, key=lambda each: each.begin_ns)
        seconds = _seconds(taken_ns - record.begin_ns)
        since = f", begun {seconds} ago" if rank.rank in ended else f" for {seconds}"
        text = f"{verb} in {_call(record)}{since}"
        if record.track == "collectives" and rank.waits_for >= 0:
            text += f", {'waited' if rank.rank in ended else 'waits'} for rank {rank.waits_for}"
        return f"{who} {text}{_at(record)}"
    done = [track[-1] for track in (rank.collectives, rank.messages) if track]
    if not done:
        return f"{who} has made no call"
    record = max(done, key=lambda each: each.end_ns)
    how = "done" if not record.status else f"failed ({record.status})"
    if record.status and record.peer >= 0:
        how += f", waiting for rank {record.peer},"
    return (
        f"{who} {verb} in no call; last: {_call(record)}, {how} "
        f"{_seconds(taken_ns - record.end_ns)} ago{_at(record)}"
    )


def _enqueued(rank: RankRecording, taken_ns: int) -> str:
    """Describes a device rank's last enqueued call, and the first call that is still open."""
    records = [*rank.collectives, *rank.messages]
    if not records:
        return "has made no call"
    last = max(records, key=lambda each: each.begin_ns)
    verb = "captured" if last.state == "captured" else "enqueued"
    text = f"{verb} last: {_call(last)}, {_seconds(taken_ns - last.begin_ns)} ago{_at(last)}"
    waiting = [each for each in records if each.is_open]
    failed = [each for each in records if each.status]
    if failed:
        first = min(failed, key=lambda each: (each.status == "aborted", each.begin_ns))
        peer = f", waiting for rank {first.peer}" if first.peer >= 0 else ""
        text += f"; seen failed ({first.status}{peer}): {_call(first)}{_at(first)}"
    elif waiting:
        first = min(waiting, key=lambda each: each.begin_ns)
        begun = " (begun on the device)" if first.state == "begun" else ""
        text += f"; not seen completed since {_call(first)}{begun}{_at(first)}"
    else:
        text += "; nothing open"
    return text


def _divergence(recording: Recording) -> list[str]:
    """Describes where the ranks diverge, and how far each rank has come."""
    lines = []
    diverged = recording.divergence()
    if diverged is not None:
        lines.append(f"the ranks diverge at call {diverged}:")
        for each in recording.ranks:
            record = each.collective(diverged)
            what = "not called, or forgotten" if record is None else str(record) + _at(record)
            backward = each.backward_at(diverged)
            if backward and (record is None or backward not in what):
                what += f"; its last reduction: {backward}"
            lines.append(f"  rank {each.rank}: {what}")
    else:
        lines.append("as far as the records go, all ranks made the same collective calls")
    skip = recording.skipped_call()
    if skip is not None:
        lines.append(
            f"but from call {skip.number} on, rank {skip.rank} makes them at the lines of rank "
            f"{skip.other}'s next calls: it seems to have left out call {skip.number}, which rank "
            f"{skip.other} made at {skip.site}"
        )
    number = _not_made_by_all(recording)
    if number is not None:
        made = [rank for rank, count in _counts(recording).items() if count >= number]
        late = [rank for rank, count in _counts(recording).items() if count < number]
        verb = "enqueued" if any(each.on_device for each in recording.ranks) else "begun"
        lines.append(f"call {number} was {verb} by {_ranks(made)}, but not yet by {_ranks(late)}")
    return lines


def _counts(recording: Recording) -> dict[int, int]:
    """Returns the number of collectives begun, by rank."""
    return {each.rank: each.last.number if each.last else 0 for each in recording.ranks}


def _not_made_by_all(recording: Recording) -> int | None:
    counts = set(_counts(recording).values())
    return min(counts) + 1 if len(counts) > 1 else None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _table(
    rank: RankRecording, taken_ns: int, last: int, marked: int | None, *, nested: bool
) -> list[str]:
    lines = [f"rank {rank.rank}, pid {rank.pid}:"]
    shown = sorted(
        (*rank.collectives[-last:], *rank.messages[-last:]), key=lambda each: each.begin_ns
    )
    if rank.torn:
        lines.append(f"  {rank.torn} torn record{'s' if rank.torn > 1 else ''} left out")
    columns = _DEVICE_COLUMNS if rank.on_device else _COLUMNS
    inner = rank.inner_calls() if nested else set()
    rows = [
        _row(each, taken_ns, marked, rank.on_device, is_inner=each.number in inner)
        if each.track == "collectives"
        else _row(each, taken_ns, marked, rank.on_device)
        for each in shown
    ]
    return [*lines, *table_lines([columns, *rows])]


_COLUMNS = (" ", "call", "began", "took", "state", "what", "where")
# For devices the host only knows when it enqueued a call and when it saw that the call had ended.
_DEVICE_COLUMNS = (" ", "call", "enqueued", "end seen", "state", "what", "where")


def _row(
    record: Record,
    taken_ns: int,
    marked: int | None,
    on_device: bool,
    *,
    is_inner: bool = False,
) -> tuple[str, ...]:
    is_message = record.track == "messages"
    state = record.state if not record.status else record.status
    if record.status and record.peer >= 0 and not is_message:
        state += f" (rank {record.peer})"
    if on_device:
        second = f"-{_seconds(taken_ns - record.end_ns)}" if record.end_ns else ""
    else:
        second = _seconds((record.end_ns or taken_ns) - record.begin_ns)
    return (
        HERE if not is_message and record.number == marked else " ",
        f"{'m' if is_message else ''}{record.number}",
        f"-{_seconds(taken_ns - record.begin_ns)}",
        second,
        state,
        ("  " if is_inner else "") + str(record),
        record.site,
    )


def _call(record: Record) -> str:
    number = f"message {record.number}" if record.track == "messages" else f"call {record.number}"
    return f"{record}, {number}"


def _at(record: Record) -> str:
    return f", at {record.site}" if record.site else ""


def _seconds(ns: int) -> str:
    """Formats a duration with a readable unit.

    The duration is negative if its ends were read from clocks of two machines that disagree.
    """
    if abs(ns) < 1_000_000:
        return f"{ns / 1e3:.1f} us"
    return f"{ns / 1e6:.1f} ms" if abs(ns) < 1_000_000_000 else f"{ns / 1e9:.1f} s"


# Traces of one communicator over nodes: each node has left a file.


def over_nodes(traces: Sequence[Trace]) -> list[str]:
    """Returns lines that say for whom the ranks of all nodes waited.

    Args:
        traces: traces of one communicator over nodes, from one node or several.
    """
    seen = {trace.of_node.node: trace for trace in traces if trace.of_node is not None}
    nodes = next(trace.of_node.nodes for trace in seen.values() if trace.of_node is not None)
    world = sum(map(len, nodes))
    lines = [
        f"communicator {traces[0].recording.communicator} over {len(nodes)} nodes, {_count(world)}"
    ]
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    known: dict[int, RankRecording] = {}
    for node, ranks in enumerate(nodes):
        if node not in seen:
            lines.append(f"  of node {node} ({_ranks(ranks)}) no trace was given")
            continue
        for each in seen[node].recording.ranks:
            known[each.rank] = each
            lines.append(f"  {_when_it_failed(each, node_of)}")
    return [*lines, "", *_awaited(known, node_of)]


def _named(rank: int, node_of: Mapping[int, int]) -> str:
    return f"rank {rank} (node {node_of[rank]})"


def _when_it_failed(rank: RankRecording, node_of: Mapping[int, int]) -> str:
    """Describes in one line a rank's call at the failure, and the rank that the call awaited."""
    who = _named(rank.rank, node_of)
    # The first unsuccessful call is the call over nodes; the calls that it consists of follow.
    open_ = next((each for each in rank.collectives if each.status or each.is_open), None)
    if open_ is not None:
        text = f"{who} was in {_call(open_)}"
        if rank.waits_for >= 0:
            text += f", and waited for {_named(rank.waits_for, node_of)}"
        return text + _at(open_)
    if not rank.collectives:
        return f"{who} had made no collective call"
    # A call over nodes ends after the calls that it consists of.
    last = max(rank.collectives, key=lambda each: each.end_ns)
    return f"{who} was in no collective call; last: {_call(last)}{_at(last)}"


def _awaited(known: Mapping[int, RankRecording], node_of: Mapping[int, int]) -> list[str]:
    """Follows each rank's chain of waits to its end; describes the ranks at the ends."""
    waits = {rank: each.waits_for for rank, each in known.items() if each.waits_for >= 0}
    waiting: dict[int, list[int]] = {}
    ends: dict[int, tuple[int, ...]] = {}
    for rank in waits:
        way: dict[int, None] = {}
        last = rank
        while last in waits and last not in way and last not in ends:
            way[last] = None
            last = waits[last]
        if last in ends:
            end = ends[last]
        else:
            # The end of the path: a cycle of waits, or a rank that waited for nobody.
            gone = list(way)
            end = tuple(sorted(gone[gone.index(last) :])) if last in way else (last,)
        ends.update(dict.fromkeys(way, end))
        waiting.setdefault(end[0], []).append(rank)
    lines = []
    for ranks in waiting.values():
        end = ends[ranks[0]]
        names = " and ".join(_named(rank, node_of) for rank in end)
        inside = {*end}
        others = [rank for rank in ranks if rank not in inside]
        if end[0] in waits:
            also = f", and {_ranks(others)} for them" if others else ""
            lines.append(
                f"{names} waited for each other{also}: the errors say which of them ended or "
                "made another call, or the link between them was down"
            )
        elif end[0] in known:
            lines.append(f"{_ranks(others)} waited in the end for {names}, which waited for nobody")
        else:
            lines.append(f"{_ranks(others)} waited in the end for {names}, whose trace is not here")
    return lines or ["no rank waited for another one"]


def aligned(traces: Sequence[Trace]) -> list[Recording]:
    """Returns machines' recordings in the first machine's time, converted by the wall clocks."""
    first, shifted = traces[0], []
    for trace in traces:
        recording = trace.recording
        shift_ns = round((trace.written_s - first.written_s) * 1e9)
        shift_ns -= recording.taken_ns - first.recording.taken_ns
        shifted.append(_shifted(recording, shift_ns))
    return shifted


def _shifted(recording: Recording, shift_ns: int) -> Recording:
    def moved(record: Record) -> Record:
        end_ns = record.end_ns + shift_ns if record.end_ns else 0
        return replace(record, begin_ns=record.begin_ns + shift_ns, end_ns=end_ns)

    ranks = tuple(
        replace(
            each,
            collectives=tuple(map(moved, each.collectives)),
            messages=tuple(map(moved, each.messages)),
        )
        for each in recording.ranks
    )
    return replace(recording, taken_ns=recording.taken_ns + shift_ns, ranks=ranks)


# Recordings as a Chrome trace: all ranks on one time line.
#
# The format is the Trace Event Format of the Chromium project: X events with ``ts`` and ``dur`` in
# microseconds, one process per rank, one thread per track.

_THREADS = {"collectives": 0, "messages": 1}


def chrome_text(recordings: Sequence[Recording]) -> str:
    """Returns the JSON text; each communicator's ranks are processes of their own."""
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
    """Returns the event of one call. A running call ends with the recording, and is marked.

    On a device the event lasts from when the host enqueued the call to when it saw its end.
    """
    end_ns = record.end_ns or taken_ns
    args = {"call": str(record), "number": record.number, "state": record.state}
    args |= {"site": record.site, "bytes": record.size_bytes}
    if record.status:
        args["status"] = record.status
    if record.peer >= 0:
        args["peer"] = record.peer
    if on_device:
        args["span"] = "from enqueued to end seen by the host"
    if record.state == "captured":
        end_ns = record.begin_ns
    marked = "" if record.state in ("done", "completed") else f" ({record.state})"
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
        help="traces of a fault, one per node; default: running processes and the newest trace",
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
    """Prints the recordings; returns 0 even if they show a fault.

    Raises:
        ArgumentError: options that exclude each other, or an output that cannot be written.
        RingcommError: a file is not a trace, or a process has no readable recorder.
    """
    if args.file and args.pid:
        raise ArgumentError("expected FILEs or --pid, got both")
    if args.last < 0:
        raise ArgumentError(f"--last: expected a number >= 0, got {args.last}")
    why = None if args.chrome is None else why_no_file(str(args.chrome))
    if why is not None:
        raise ArgumentError(f"--chrome {args.chrome}: {why}")
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
        write_file("--chrome", args.chrome, chrome_text(recordings))
        print(f"\nwrote {args.chrome}", file=sys.stderr)
    return 0


def _without_arguments(last: int) -> tuple[list[Recording], list[str]]:
    """Lists running communicators, reads the newest trace; returns recordings and lines to print.

    Raises:
        RingcommError: there are neither communicators nor a trace.
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
    """Describes a trace's folder, its age, and the process that wrote it."""
    trace = read(path)
    writer = trace.recording.rank(trace.written_by)
    where = "of this folder" if path.parent == Path() else f"of {path.parent}"
    age_s = max(time.time() - trace.written_s, 0.0)
    process = "" if writer is None else f" (pid {writer.pid})"
    return f"{where}, written {age_s:.0f} s ago by rank {trace.written_by}{process}"


def by_communicator(files: Sequence[tuple[Path, Trace]]) -> list[list[tuple[Path, Trace]]]:
    """Groups trace files: all files of one communicator over nodes form a group."""
    groups: dict[object, list[tuple[Path, Trace]]] = {}
    for path, trace in files:
        key = path if trace.of_node is None else trace.of_node.world_id
        groups.setdefault(key, []).append((path, trace))
    return list(groups.values())


def _of_files(paths: Sequence[Path], last: int) -> tuple[list[Recording], list[str]]:
    """Reads files; returns recordings and lines to print, grouped by communicator."""
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
