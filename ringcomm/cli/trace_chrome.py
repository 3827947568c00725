"""Recordings as a Chrome trace: all ranks on one time line.

The format is that of the Trace Event Format document of the Chromium project: X events with
``ts`` and ``dur`` in microseconds, a process per rank, a thread per track.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ringcomm.comm.recording import (
    CAPTURED,
    COMPLETED,
    DONE,
    Record,
    Recording,
    describe,
)

__all__ = ["chrome_text"]

_THREADS = {"collectives": 0, "messages": 1}


def chrome_text(recordings: Sequence[Recording]) -> str:
    """The JSON text. Of several communicators, each has processes of its own."""
    events: list[dict[str, Any]] = []
    base = 0
    for recording in recordings:
        events += _events(recording, base)
        base += recording.world_size
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
