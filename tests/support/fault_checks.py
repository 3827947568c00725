# SPDX-License-Identifier: Apache-2.0
"""Runs plans of faults, and returns which promises of docs/reliability.md were broken."""

from __future__ import annotations

import pickle
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.call_model import Rank, WaitPoint, is_modelled, steps_of, wait_points
from tests.support.fault_player import (
    EXACT,
    LAST,
    STOPPED_TIMEOUT_S,
    Ended,
    Player,
    Report,
    play,
    report_path,
)
from tests.support.fault_schedules import Chain, Schedule, is_chain
from tests.support.faults import shared_memory_files
from tests.support.ranks import Outcome, Ranks, RanksFailed

# Much longer than any chain takes, even on a busy machine: a rank still running then hangs.
DEADLINE_S = 90.0
# How much later than its timeout a call may raise: the machine may be busy, and it writes a trace.
GRACE_S = 5.0
# The error of survivors in the first call that cannot complete.
FIRST_ERROR = {"kill": "PeerLost", "stop": "CollectiveTimeout"}
LATER_ERROR = "AbortedError"
# Some calls issue other calls; an error then names one of these.
NAMES = {"messages": ("isend", "irecv", "recv")}
# Which rank gave up, after how long, and at which item: for a lost peer, and for a timeout.
WAITED = (
    re.compile(r"rank (\d+) in .* \(noticed after ([\d.]+) s at item (\d+)\)"),
    re.compile(r"rank (\d+) in .* waited ([\d.]+) s, .* \(item (\d+), epoch"),
)


@dataclass(frozen=True)
class Wait:
    """The wait that ended in an error, parsed from the error's text."""

    rank: int
    waited_s: float
    item: int

    @classmethod
    def of(cls, text: str) -> Wait | None:
        """Parses the text; returns None if it mentions no wait."""
        told = text.partition(": ")[2]
        found = next(filter(None, (form.match(told) for form in WAITED)), None)
        if found is None:
            return None
        rank, waited_s, item = found.groups()
        return cls(int(rank), float(waited_s), int(item))


def run_chain(
    chain: Chain, player: type[Player] = Player, deadline_s: float = DEADLINE_S
) -> list[str]:
    """Plays the chain with processes as ranks; returns what was broken, or an empty list."""
    assert is_chain(chain), chain
    before = shared_memory_files()
    found: list[str] = []
    with (
        tempfile.TemporaryDirectory() as name,
        Ranks(play, chain[0].world_size, chain, Path(name), player) as ranks,
    ):
        try:
            outcomes = ranks.wait(deadline_s)
        except RanksFailed as error:
            return [f"{error}"]
        found += violations(chain, outcomes, Path(name))
        alive = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
        found += [f"rank {rank} is left" for rank in alive]
    found += [f"/dev/shm/{name} is left" for name in shared_memory_files() - before]
    return found


def violations(chain: Chain, outcomes: list[Outcome], folder: Path) -> list[str]:
    """Returns the violations in the ranks' reports."""
    members = list(range(len(outcomes)))
    found = []
    for number, schedule in enumerate(chain):
        lost = None
        if schedule.fault.is_fatal:
            lost = outcomes[members.pop(schedule.fault.rank)]
            if lost.exitcode != -signal.SIGKILL:
                found.append(f"schedule {number}: the fault did not happen: {lost.describe()}")
        for each in members:
            path = report_path(folder, number, each)
            if not path.exists():
                found.append(f"schedule {number}: no report: {outcomes[each].describe()}")
                continue
            report: Report = pickle.loads(path.read_bytes())
            told = check_report(schedule, report)
            found += [f"schedule {number}, rank {report.rank}: {text}" for text in told]
    return found


def check_report(schedule: Schedule, report: Report) -> Iterator[str]:
    """Yields the violations in one survivor's report of one schedule."""
    fault = schedule.fault
    for text in report.leaks:
        yield f"left behind: {text}"
    errors = [number for number, each in enumerate(report.ended) if each.raised]
    first = errors[0] if errors else len(report.ended)
    for number, each in enumerate(report.ended[:first]):
        if each.outcome != EXACT:
            yield f"call {number} ({each.kind}) returned a wrong result: {each.text}"
    if not fault.is_fatal:
        if errors:
            yield f"a fault that only delays was raised: {report.ended[first].text}"
        return
    if report.fresh is None or report.fresh.outcome != EXACT:
        yield f"a new communicator of the survivors does not work: {report.fresh}"
    if not errors:
        yield "no call raised"
        return
    if first <= fault.call:
        yield f"call {first} raised, before the fault: {report.ended[first].text}"
    yield from check_first_error(schedule, report.ended[first])
    for each in report.ended[first + 1 :]:
        if each.outcome != LATER_ERROR or report.ended[first].text[:60] not in each.text:
            yield f"expected every later call to repeat the first fault, got {each}"


def check_first_error(schedule: Schedule, error: Ended) -> Iterator[str]:
    """Checks an error's class, and that it names the operation, the lost rank and an item."""
    fault = schedule.fault
    if error.outcome != FIRST_ERROR[fault.action]:
        yield f"expected {FIRST_ERROR[fault.action]}, got {error.outcome}: {error.text}"
    operations = NAMES.get(error.kind, (error.kind,))
    if not any(error.text.startswith(f"{name} on rank ") for name in operations):
        yield f"the error does not begin with its operation: {error.text}"
    if f"rank {fault.rank}" not in error.text:
        yield f"the error does not name 'rank {fault.rank}': {error.text}"
    wait = Wait.of(error.text)
    if wait is None:
        yield f"the error does not name an item and how long was waited: {error.text}"
        return
    least_s = STOPPED_TIMEOUT_S[schedule.calls[fault.call].kernels]
    if fault.action == "stop" and wait.waited_s < least_s:
        yield f"expected a wait of {least_s} s or more, got {wait.waited_s} s: {error.text}"
    expected = expected_waits(schedule)
    if expected is not None and WaitPoint(fault.rank, wait.item) != expected.get(wait.rank):
        yield f"expected one of the waits {expected}, got {wait}: {error.text}"


def check_deadline(text: str, rank: int, elapsed_s: float, timeout_s: float) -> Iterator[str]:
    """Checks that ``rank`` timed out in time; it raised after ``elapsed_s`` in the call."""
    wait = Wait.of(text)
    if wait is None:
        yield f"the error does not say how long was waited: {text}"
        return
    if wait.waited_s < timeout_s:
        yield f"gave up after {wait.waited_s} s of {timeout_s} s: {text}"
    if wait.rank == rank and wait.waited_s > elapsed_s:
        yield f"waited {wait.waited_s} s in a call of {elapsed_s} s: {text}"
    if elapsed_s > timeout_s + GRACE_S:
        yield f"raised after {elapsed_s} s, with a timeout of {timeout_s} s: {text}"


def expected_waits(schedule: Schedule) -> dict[int, WaitPoint] | None:
    """Returns by rank where survivors can notice the loss of the failing rank; None: unknown."""
    fault = schedule.fault
    if not all(map(is_modelled, schedule.calls)):
        return None
    # The ranks make the failing call twice: once to count its steps, and once to fail in it.
    earlier = schedule.calls[: fault.call + 1]
    calls = (*earlier, *schedule.calls[fault.call :], LAST)
    failing = Rank(fault.rank, schedule.world_size, schedule.segment_bytes)
    counts = [len(steps_of(failing, call)) for call in earlier]
    found = wait_points(schedule, calls, sum(counts) + fault.step % counts[-1])
    # A rank that waits for a survivor: if a peer has died, it learns of the death from other ranks;
    # if a rank has stopped, it times out, and names the stopped rank that all wait for.
    if fault.action == "stop":
        return {rank: WaitPoint(fault.rank, point.item) for rank, point in found.items()}
    return {rank: point for rank, point in found.items() if point.peer == fault.rank}
