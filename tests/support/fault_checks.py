"""Runs plans of faults, and says which promises of docs/reliability.md they broke."""

from __future__ import annotations

import pickle
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.fault_plans import Chain, Schedule, is_chain
from tests.support.fault_player import EXACT, Ended, Player, Report, play, report_path
from tests.support.faults import shared_memory_files
from tests.support.ranks import Outcome, Ranks, RanksFailed

# Far beyond what any chain takes, on a busy machine too: who is not through by then hangs.
DEADLINE_S = 90.0
# What survivors raise in the first call that cannot complete.
FIRST_ERROR = {"kill": "PeerLost", "stop": "CollectiveTimeout"}
LATER_ERROR = "AbortedError"
# Calls that issue others say which one failed.
NAMES = {"messages": ("isend", "irecv", "recv")}


def run_chain(
    chain: Chain, player: type[Player] = Player, deadline_s: float = DEADLINE_S
) -> list[str]:
    """Plays the chain with processes as ranks; what was broken, nothing if all is well."""
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
    """What the ranks' reports say against the promises."""
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
    """What one survivor's report of one schedule says against the promises."""
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
    """Whether an error is of the right class and names the operation, the lost rank and a step."""
    fault = schedule.fault
    if error.outcome != FIRST_ERROR[fault.action]:
        yield f"expected {FIRST_ERROR[fault.action]}, got {error.outcome}: {error.text}"
    operations = NAMES.get(error.kind, (error.kind,))
    if not any(error.text.startswith(f"{name} on rank ") for name in operations):
        yield f"the error does not begin with its operation: {error.text}"
    for wanted in (f"rank {fault.rank}", "step "):
        if wanted not in error.text:
            yield f"the error does not name {wanted!r}: {error.text}"
