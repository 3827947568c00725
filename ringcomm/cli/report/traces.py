"""Sections of what ranks did: traces of the flight recorder, and Chrome traces of the commands."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringcomm.cli.report.parts import Block, Figure, Section, Table, Text, colours_of, duration
from ringcomm.cli.report.time_line import FAILED, OPEN, Bar, time_line
from ringcomm.cli.report.waits import Wait, blocks_of, waits_of
from ringcomm.cli.trace import SHOWN_CALLS
from ringcomm.cli.trace_text import aligned, over_nodes, report, verdict
from ringcomm.comm.recorder.records import OPEN as OPEN_STATES
from ringcomm.comm.recorder.records import (
    NodeLevel,
    RankRecording,
    Record,
    Recording,
    describe,
    inner_calls,
)
from ringcomm.comm.recorder.trace_file import Trace

__all__ = ["is_profile", "of_chrome", "of_processes", "of_traces", "profiles_of_runs"]

KIND = "trace"
_LATEST_S = 4e10  # in the year 3237; beyond 9999 there is no date


def of_traces(group: Sequence[tuple[Path, Trace]]) -> Section:
    """The section of the trace files of one communicator, over nodes one of each node."""
    traces = [trace for _, trace in group]
    blocks: list[Block] = []
    if traces[0].of_node is not None:
        blocks.append(Text("\n".join(over_nodes(traces))))
    for path, trace in group:
        told = verdict(trace.recording, level=trace.level)
        said = f"{path.name}, written by rank {trace.written_by}:\n{trace.error}"
        blocks.append(Text("\n".join([said, "", *told])))
    recordings = aligned(traces)
    expected = [
        trace.recording.world_size if trace.level is None else len(trace.level.ranks)
        for trace in traces
    ]
    blocks += _of_recordings(recordings, expected, "the moment of the trace")
    for path, trace in group:
        last = "\n".join(report(trace.recording, SHOWN_CALLS, level=trace.level))
        blocks.append(Text(last, folded=f"the last calls: ringcomm trace {path.name}"))
    written = time.gmtime(min(max(0.0, traces[0].written_s), _LATEST_S))
    facts = [
        ("communicator", traces[0].recording.communicator),
        ("ranks", str(traces[0].recording.world_size)),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S UTC", written)),
    ]
    if traces[0].of_node is not None:
        facts.append(("nodes", f"{len(traces[0].of_node.nodes)}, {len(group)} of them here"))
    title = f"Trace of {traces[0].recording.communicator}"
    return Section(KIND, title, [str(path) for path, _ in group], facts, blocks)


def of_processes(recording: Recording, ended: Collection[int], pids: Sequence[int]) -> Section:
    """The section of a communicator of running processes."""
    blocks: list[Block] = [
        Text("\n".join(verdict(recording, ended))),
        *_of_recordings([recording], [recording.world_size], "now, when the processes were read"),
        Text("\n".join(report(recording, SHOWN_CALLS, ended)), folded="the last calls"),
    ]
    level = NodeLevel.of(recording)
    name = recording.communicator if level is None else f"{level.communicator}, node {level.node}"
    facts = [
        ("communicator", name),
        ("ranks", str(recording.world_size)),
        ("read", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())),
    ]
    files = [f"process {pid}" for pid in pids]
    return Section(KIND, f"Running processes of {name}", files, facts, blocks)


def _of_recordings(
    recordings: Sequence[Recording], expected: Sequence[int], moment: str
) -> list[Block]:
    found: list[Wait] = []
    bars: list[Bar] = []
    zero_ns = recordings[0].taken_ns
    for recording, count in zip(recordings, expected, strict=True):
        waits = waits_of(recording, count)
        found += waits
        by_call = {(wait.rank, wait.track, wait.number): wait for wait in waits}
        for rank in recording.ranks:
            bars += _bars(rank, zero_ns, recording.taken_ns, by_call)
    ranks = [rank for recording in recordings for rank in recording.ranks]
    if not bars:
        return [Text("No rank has a record of a call.")]
    notes = ["Bars with stripes have not ended; those with crosses failed."]
    if any(rank.on_device for rank in ranks):
        notes.append(
            "On devices a bar lasts from when its host enqueued the call to when that saw its end."
        )
    figure = time_line(bars, moment, notes)
    hosts = [rank.rank for rank in ranks if not rank.on_device]
    if not hosts:
        why = "Who waited for whom on devices their hosts do not know; see the lines above."
        return [figure, Text(why)]
    return [figure, *blocks_of(found, hosts)]


def _bars(
    rank: RankRecording, zero_ns: int, taken_ns: int, waits: dict[tuple[int, str, int], Wait]
) -> Iterator[Bar]:
    inner = inner_calls(rank.collectives) if not rank.on_device else set()
    for record in (*rank.collectives, *rank.messages):
        row = f"rank {rank.rank}"
        if record.track == "messages":
            row += " messages"
        elif record.number in inner:
            row += " within"
        mark = FAILED if record.status else OPEN if record.state in OPEN_STATES else ""
        end_ns = record.end_ns or (taken_ns if record.state in OPEN_STATES else record.begin_ns)
        yield Bar(
            row=row,
            name=record.collective,
            begin_s=(record.begin_ns - zero_ns) / 1e9,
            end_s=max(end_ns - zero_ns, record.begin_ns - zero_ns) / 1e9,
            told=_told(record, waits.get((rank.rank, record.track, record.number))),
            mark=mark,
        )


def _told(record: Record, wait: Wait | None) -> dict[str, str]:
    awaited = ""
    if wait is not None:
        awaited = f"rank {wait.awaited}, {duration(wait.seconds)}"
    return {
        "call": f"{'m' if record.track == 'messages' else ''}{record.number}",
        "what": describe(record),
        "bytes": f"{record.size_bytes:,}",
        "state": record.status or record.state,
        "waited for": awaited,
        "where": record.site,
    }


# Chrome traces: what `ringcomm train --profile`, the benchmark of training and `ringcomm trace
# --chrome` write. Events are checked when they are read.

_KINDS = ("compute", "wait", "communication")


def is_profile(events: Sequence[dict[str, Any]]) -> bool:
    """True if all spans are those of an engine's steps."""
    return all(event["cat"] in _KINDS for event in events if event["ph"] == "X")


def profiles_of_runs(
    files: Sequence[tuple[Path, Sequence[dict[str, Any]]]],
) -> list[list[tuple[Path, Sequence[dict[str, Any]]]]]:
    """Puts files together of which each has the profile of other ranks: they are of one run."""
    runs: list[list[tuple[Path, Sequence[dict[str, Any]]]]] = []
    ranks: set[int] = set()
    for path, events in files:
        own = {event["pid"] for event in events}
        if runs and is_profile(events) and is_profile(runs[-1][-1][1]) and not own & ranks:
            runs[-1].append((path, events))
            ranks |= own
        else:
            runs.append([(path, events)])
            ranks = own
    return runs


def of_chrome(files: Sequence[tuple[Path, Sequence[dict[str, Any]]]]) -> Section:
    """The section of Chrome traces of one run, of which each has ranks of its own.

    Args:
        files: with their events that last, and those that name processes.
    """
    events = [event for _, of_file in files for event in of_file]
    names = {
        event["pid"]: str(event["args"].get("name", ""))
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    spans = sorted(
        (event for event in events if event["ph"] == "X"),
        key=lambda event: (event["pid"], event["tid"], event["ts"]),
    )
    of_steps = is_profile(events)
    name = ", ".join(path.name for path, _ in files)
    title = f"{'Profile of steps' if of_steps else 'Chrome trace'}, {name}"
    paths = [str(path) for path, _ in files]
    processes = {span["pid"] for span in spans}
    facts = [("ranks", str(len(processes))), ("spans", f"{len(spans):,}")]
    if not spans:
        return Section("profile", title, paths, facts, [Text("It holds no span.")])
    first_us = min(span["ts"] for span in spans)
    # By process, the number of each thread.
    threads: dict[int, dict[int, int]] = {}
    for span in spans:
        known = threads.setdefault(span["pid"], {})
        known.setdefault(span["tid"], len(known))
    bars = []
    for span in spans:
        row = names.get(span["pid"]) or f"rank {span['pid']}"
        if len(threads[span["pid"]]) > 1:
            row += f", thread {threads[span['pid']][span['tid']]}"
        told = {name: str(value) for name, value in span["args"].items()}
        if of_steps:
            told = {"span": span["name"], **told}
        begin_s = (span["ts"] - first_us) / 1e6
        end_s = begin_s + span["dur"] / 1e6
        bars.append(Bar(row, span["cat"] if of_steps else span["name"], begin_s, end_s, told))
    blocks: list[Block] = [time_line(bars, "the first span", names=_KINDS if of_steps else ())]
    if of_steps:
        blocks += [_shares(spans), _waits_by_name(spans)]
    return Section("profile", title, paths, facts, blocks)


def _shares(spans: Sequence[dict[str, Any]]) -> Figure:
    """The seconds of each kind, by rank."""
    ranks = sorted({span["pid"] for span in spans})
    sums: dict[str, dict[int, float]] = {}
    for span in spans:
        of_kind = sums.setdefault(span["cat"], dict.fromkeys(ranks, 0.0))
        of_kind[span["pid"]] += span["dur"]
    totals = {kind: [sums[kind][rank] / 1e6 for rank in ranks] for kind in _KINDS if kind in sums}
    labels = [f"rank {rank}" for rank in ranks]
    colours = colours_of(_KINDS)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": labels,
            "x": [round(value, 6) for value in values],
            "marker": {"color": colours[kind]},
            "hovertemplate": f"%{{y}}: %{{x:.4s}}s, {kind}<extra></extra>",
        }
        for kind, values in totals.items()
    ]
    table = Table(
        ["rank", *totals],
        [
            [label, *(duration(values[index]) for values in totals.values())]
            for index, label in enumerate(labels)
        ],
        "time by kind",
        frozenset(range(1, len(totals) + 1)),
    )
    layout = {
        "barmode": "group",
        "dragmode": False,
        "xaxis": {"title": {"text": "time"}, "ticksuffix": "s", "exponentformat": "SI"}
        | {"rangemode": "tozero", "fixedrange": True},
        "yaxis": {"autorange": "reversed", "type": "category", "fixedrange": True},
    }
    notes = ["Kinds may overlap: communication of another thread runs beside computation."]
    height = 130 + 24 * len(ranks) * len(totals)
    return Figure("Computing, communicating and waiting", data, layout, table, notes, height)


def _waits_by_name(spans: Sequence[dict[str, Any]]) -> Block:
    """Lists the waits of each rank by what it waited for, longest first."""
    totals: dict[tuple[int, str], list[float]] = {}
    for span in spans:
        if span["cat"] == "wait":
            totals.setdefault((span["pid"], span["name"]), []).append(span["dur"] / 1e6)
    if not totals:
        return Text("No rank waited for communication.")
    order = sorted(totals.items(), key=lambda item: (-sum(item[1]), item[0]))
    rows = [
        [f"rank {rank}", name, duration(sum(each)), str(len(each)), duration(max(each))]
        for (rank, name), each in order
    ]
    columns = ("rank", "what", "waited", "times", "longest")
    return Table(columns, rows, "What waited for what", frozenset({2, 3, 4}))
