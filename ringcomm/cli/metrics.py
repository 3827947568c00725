# SPDX-License-Identifier: Apache-2.0
"""``ringcomm metrics``: prints or serves the flight recorders' figures in Prometheus's text format.

Counters come from totals that each recorder keeps since its communicator was made. The records
themselves are a ring of the last calls, so the figures made of them are gauges.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ringcomm.cli.report import waits_of
from ringcomm.comm.recorder.reader import (
    FoundRecorder,
    FoundRecorders,
    ended_ranks,
    other_processes,
    read,
    recording_of,
)
from ringcomm.comm.recorder.records import CallTotals, NodeLevel, RankRecording, Recording
from ringcomm.errors import ArgumentError, RingcommError

__all__ = [
    "FAMILIES",
    "Reading",
    "add_arguments",
    "exposition",
    "make_server",
    "of_files",
    "of_processes",
    "run",
]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ADDRESS, PATH = "127.0.0.1", "/metrics"
# Seconds after which a connection without a request is closed.
IDLE_S = 10
STATES = ("idle", "in_call", "failed", "ended")
COUNTER, GAUGE = "counter", "gauge"


@dataclass(frozen=True)
class Family:
    """The type of a metric, and its description."""

    kind: str
    text: str


FAMILIES = {
    "ringcomm_process_up": Family(GAUGE, "1 if the process of --pid was read, 0 if it has ended."),
    "ringcomm_rank_readable": Family(GAUGE, "1 if the rank's flight recorder was read, else 0."),
    "ringcomm_rank_info": Family(GAUGE, "Always 1; the rank's process and where it runs."),
    "ringcomm_rank_state": Family(GAUGE, "1 for the rank's present state, 0 for the other states."),
    "ringcomm_calls_total": Family(COUNTER, "Calls that the rank has begun, by collective."),
    "ringcomm_call_bytes_total": Family(COUNTER, "Bytes of the buffers of these calls."),
    "ringcomm_call_failures_total": Family(COUNTER, "Calls that have failed, by collective."),
    "ringcomm_call_seconds_total": Family(
        COUNTER, "Time in calls that have ended, including waits; only for ranks on the host."
    ),
    "ringcomm_open_call_seconds": Family(GAUGE, "How long the rank has been in its present call."),
    "ringcomm_awaited": Family(GAUGE, "1 for the peer that the rank awaits at this moment."),
    "ringcomm_last_call_number": Family(
        GAUGE, "Number of the rank's last collective, or last message, whose record was read."
    ),
    "ringcomm_window_calls": Family(GAUGE, "Calls whose records are kept: the last ones."),
    "ringcomm_window_wait_seconds": Family(
        GAUGE, "Time that the rank waited for the peer in the calls whose records are kept."
    ),
    "ringcomm_window_failures": Family(
        GAUGE, "Failed calls among the records, by kind of fault and awaited peer (-1: none)."
    ),
    "ringcomm_torn_records": Family(GAUGE, "Records that were incomplete when they were read."),
}

Labels = tuple[tuple[str, str], ...]
Totals = Mapping[str, CallTotals]


@dataclass(frozen=True)
class Reading:
    """The records and totals of one communicator.

    Attributes:
        recording: the records of its ranks.
        level: the node of the ranks, if the communicator spans nodes.
        totals: the totals by rank and collective; a trace file has none.
        ended: ranks whose processes have ended.
    """

    recording: Recording
    level: NodeLevel | None
    totals: Mapping[int, Totals] = field(default_factory=dict)
    ended: Collection[int] = ()


class Samples:
    """The samples of an exposition, by metric and labels."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Labels, float]] = {name: {} for name in FAMILIES}

    def add(self, name: str, labels: Labels, value: float, **more: object) -> None:
        """Adds a sample; ``more`` are further labels."""
        added = tuple((key, str(each)) for key, each in more.items())
        self._found[name][labels + added] = value

    def text(self) -> str:
        """Returns the samples in version 0.0.4 of Prometheus's text format."""
        lines: list[str] = []
        for name, samples in self._found.items():
            if not samples:
                continue
            family = FAMILIES[name]
            lines += [f"# HELP {name} {_escaped(family.text)}", f"# TYPE {name} {family.kind}"]
            lines += (f"{name}{_braced(labels)} {value!r}" for labels, value in samples.items())
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _braced(labels: Labels) -> str:
    inside = []
    for key, each in labels:
        quoted = _escaped(each).replace('"', '\\"')
        inside.append(f'{key}="{quoted}"')
    return f"{{{','.join(inside)}}}"


def exposition(readings: Sequence[Reading], up: Mapping[int, bool] | None = None) -> str:
    """Returns the text for some communicators.

    Args:
        readings: the records and totals of each communicator.
        up: whether each process of ``--pid`` was read.
    """
    samples = Samples()
    for pid, is_up in (up or {}).items():
        samples.add("ringcomm_process_up", (), int(is_up), pid=pid)
    for reading in readings:
        _add_reading(samples, reading)
    return samples.text()


def _add_reading(samples: Samples, reading: Reading) -> None:
    recording, level = reading.recording, reading.level
    common: Labels = (
        ("communicator", recording.communicator if level is None else level.communicator),
        ("world_id", f"{recording.world_id:016x}"),
    )
    if level is not None:
        common += (("node", str(level.node)),)
    expected = range(recording.world_size) if level is None else level.ranks
    there = {each.rank for each in recording.ranks}
    for rank in expected:
        samples.add("ringcomm_rank_readable", common, int(rank in there), rank=rank)
    for each in recording.ranks:
        labels = (*common, ("rank", str(each.rank)))
        _add_state(samples, labels, each, reading)
        _add_totals(samples, labels, each, reading.totals.get(each.rank, {}))
    waits: dict[tuple[int, int], float] = {}
    for wait in waits_of(recording, len(expected)):
        waits[wait.rank, wait.awaited] = waits.get((wait.rank, wait.awaited), 0.0) + wait.seconds
    for (rank, peer), seconds in sorted(waits.items()):
        labels = (*common, ("rank", str(rank)))
        samples.add("ringcomm_window_wait_seconds", labels, seconds, peer=peer)


def _add_state(samples: Samples, labels: Labels, rank: RankRecording, reading: Reading) -> None:
    records = [*rank.collectives, *rank.messages]
    device = "device" if rank.on_device else "host"
    samples.add("ringcomm_rank_info", labels, 1, pid=rank.pid, on=device)
    last = max(records, key=lambda record: record.begin_ns, default=None)
    running = [record for record in records if record.is_open]
    state = "idle"
    if rank.rank in reading.ended:
        state = "ended"
    elif running:
        state = "in_call"
    elif last is not None and last.status:
        state = "failed"
    for each in STATES:
        samples.add("ringcomm_rank_state", labels, int(each == state), state=each)
    if state == "in_call" and not rank.on_device:
        call = max(running, key=lambda record: record.begin_ns)
        seconds = max(reading.recording.taken_ns - call.begin_ns, 0) / 1e9
        samples.add("ringcomm_open_call_seconds", labels, seconds, collective=call.collective)
        if rank.waits_for >= 0:
            samples.add("ringcomm_awaited", labels, 1, peer=rank.waits_for)
    for track, kept in (("collectives", rank.collectives), ("messages", rank.messages)):
        number = kept[-1].number if kept else 0
        samples.add("ringcomm_last_call_number", labels, number, track=track)
    samples.add("ringcomm_window_calls", labels, len(records))
    failures: dict[tuple[str, int], int] = {}
    for record in records:
        if record.status:
            key = (record.status, record.peer)
            failures[key] = failures.get(key, 0) + 1
    for (kind, peer), count in sorted(failures.items()):
        samples.add("ringcomm_window_failures", labels, count, kind=kind, peer=peer)
    samples.add("ringcomm_torn_records", labels, rank.torn)


def _add_totals(samples: Samples, labels: Labels, rank: RankRecording, totals: Totals) -> None:
    for name, each in totals.items():
        samples.add("ringcomm_calls_total", labels, each.calls, collective=name)
        samples.add("ringcomm_call_bytes_total", labels, each.size_bytes, collective=name)
        samples.add("ringcomm_call_failures_total", labels, each.failures, collective=name)
        if not rank.on_device:
            samples.add("ringcomm_call_seconds_total", labels, each.ns / 1e9, collective=name)


def of_processes(pids: Sequence[int], must_run: bool = False) -> str:
    """Returns the exposition of running processes.

    Args:
        pids: the processes to read; empty: all processes of this user that have a communicator.
        must_run: raise for processes that have ended; else ``ringcomm_process_up`` is 0 for them.

    Raises:
        RingcommError: ``must_run``, and a process has ended, or no process has a communicator.
    """
    found, up = FoundRecorders(), dict.fromkeys(pids, True)
    for pid in pids or other_processes():
        try:
            found.look_into(pid)
        except RingcommError:
            if must_run and pids:
                raise
            if pids:
                up[pid] = False
    # A communicator without an id has made no call: its ranks have not met.
    worlds = [members for members in found.worlds() if members[0].header.world_id]
    if must_run and not worlds:
        raise RingcommError(
            "expected a process with a communicator that records its calls, found none. "
            "Wait until its ranks have met, or name a trace FILE"
        )
    return exposition(list(map(_reading, worlds)), up)


def _reading(members: Sequence[FoundRecorder]) -> Reading:
    recording = recording_of(members)
    totals = {rank.rank: each.totals for each, rank in zip(members, recording.ranks, strict=True)}
    ended = ended_ranks(recording, members[0].seen_by)
    return Reading(recording, NodeLevel.of(recording), totals, ended)


def of_files(paths: Sequence[Path]) -> str:
    """Returns the exposition of trace files, which have no totals.

    Raises:
        RingcommError: a file is not a trace.
    """
    traces = map(read, paths)
    return exposition([Reading(each.recording, each.level) for each in traces])


# ---- The server ----------------------------------------------------------------------------------


def make_server(port: int, pids: Sequence[int]) -> ThreadingHTTPServer:
    """Returns a server for ``/metrics`` on the loopback interface, which reads at each request.

    Args:
        port: the port; 0: any free port.
        pids: as in :func:`of_processes`.

    Raises:
        ArgumentError: the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def _answer(self, has_body: bool) -> None:
            if self.path.partition("?")[0] != PATH:
                self.send_error(HTTPStatus.NOT_FOUND, f"expected {PATH}")
                return
            body = of_processes(pids).encode("utf-8", "replace")
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing: a scrape every few seconds would fill the terminal."""

    if port not in range(1 << 16):
        raise ArgumentError(f"--serve: expected a port from 0 to 65535, got {port}")
    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        told = f"--serve {port}: cannot listen on {ADDRESS}: {error.strerror}"
        raise ArgumentError(told) from error


# ---- The command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm metrics``."""
    parser.description = (
        "Prints calls, bytes, times, waits and faults of ranks in Prometheus's text format, from "
        "the flight recorders of processes or from trace files. docs/howto/metrics.md lists the "
        "metrics."
    )
    files = "traces of faults; default: all processes of this user that have a communicator"
    pids = "the processes to read instead; one rank is enough"
    serve = f"serve http://{ADDRESS}:PORT{PATH} and read at each request; 0: any free port"
    parser.add_argument("file", nargs="*", type=Path, help=files)
    parser.add_argument("--pid", nargs="+", type=int, default=[], metavar="PID", help=pids)
    parser.add_argument("--serve", type=int, metavar="PORT", help=serve)


def run(args: argparse.Namespace) -> int:
    """Prints the figures once, or serves them until Ctrl-C.

    Raises:
        ArgumentError: options that exclude each other, or a port that cannot be used.
        RingcommError: a file is not a trace, or a process has no readable recorder.
    """
    if args.file and (args.pid or args.serve is not None):
        option = "--pid" if args.pid else "--serve"
        raise ArgumentError(f"expected FILEs or {option}, got both")
    if args.serve is not None:
        return _serve(args.serve, args.pid)
    text = of_files(args.file) if args.file else of_processes(args.pid, must_run=True)
    print(text, end="")
    return 0


def _serve(port: int, pids: Sequence[int]) -> int:
    if pids:
        of_processes(pids, must_run=True)  # reports a wrong pid now and not to the first scrape
    with make_server(port, pids) as server:
        print(f"serving http://{ADDRESS}:{server.server_port}{PATH}", file=sys.stderr, flush=True)
        server.serve_forever()
    return 0
