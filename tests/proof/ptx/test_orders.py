# SPDX-License-Identifier: Apache-2.0
"""Mutants of the PTX: orders of memory, dropped access by access, and other compiler mistakes.

Each is run on the interpreter in jobs whose results are known (small_jobs.py), which must show a
wrong result or a forbidden access. ``make test`` runs a mutant of each kind. RINGCOMM_PTX_CHECK=all
runs mutants of every access that a job executes, in each subunit that has it: one of these jobs
must show the mutant, or this file must name the reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import pytest

from tests.proof.ptx.orderings import orderings
from tests.proof.ptx.small_jobs import JOBS
from tests.proof.ptx.survivors import RIGHT, Mutant, stale, unexplained
from tests.support import fork_server, nvrtc
from tests.support.emulator.library import COMPILER
from tests.support.emulator.ptx import ptx_of

EVERYTHING = os.environ.get("RINGCOMM_PTX_CHECK") == "all"
LIMIT_S = 4 * 3600 if EVERYTHING else 600

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(nvrtc.library_path() is None, reason=nvrtc.NEEDS_NVRTC),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

# Mutants of each kind and of each kind of job, and the job that shows each.
SAMPLE = {
    "acquire of arrive (1)": "one_shot",
    "acquire of slot_is_free": "to a root",
    "release of send": "one_shot",
    "release of offer": "one-shot step",
    "release of raise_fault": "absent",
    "barrier of load_packet_words": "ll",
    "barrier of receive_sources": "one-shot halves",
    "barrier of publish_item": "ring",
    "barrier of end_norm": "norm alone",
}
SLIPS_SEEN_BY = {
    "a vector a word too far": "one hop",
    "lanes that count a warp too few": "norm alone",
    "another lane of a shuffle": "norm alone",
    "lanes that store a status plainly": "lost",
}
if EVERYTHING:
    SLIPS_SEEN_BY |= {
        "a store's other operand": "one hop",
        "too few lanes at a shuffle": "norm alone",
    }
# Subunits with the templates of all CUDA units; other types differ in arithmetic only.
SUBUNITS = ("move", "reduce_float32/sum", "adamw_float32/float32", "adamw_float32/norm")

TRIES = 3  # tries of a job: on a busy machine ranks may be late at their rendezvous
LOST_TRIES = 10

_FAULTS = (
    "of the words of a fault, which say something to a call that fails alone; that a lent buffer "
    "changes only behind them is a matter of reordering, and of tests/proof/model/lend.pml"
)
_ONE_OF_SEVERAL = "another barrier stands before any lane reads what it orders"
_LAST = "behind it the call has but the barrier of verify_peer_buffers, and ends"
# Patterns of accesses whose removal no job shows, and the reasons.
SURVIVORS = {
    r"(acquire|fence) of await_raised$|exchange of claim_fault$|fence of raise_fault$": _FAULTS,
    r"acquire of (aborted|load_channel)$": _FAULTS,
    r"fence of verify_peer_buffers$": _FAULTS,
    r"acquire of await_slowly \(2\)$": "the last look of a wait that fails: the peer had not come",
    r"acquire of has_detached$": "of a word that stays 0 here",
    r"barrier of (drain_chunks|finish_exchange|finish_sharing \(1\)|return_offers \(2\))$": (
        "for what the caller does with its buffer after the call, which knows what all lanes knew"
    ),
    r"barrier of (finish_sharing \(2\)|commit_ring|all_reduce_one_hop \(3\))$": _LAST,
    r"barrier of (all_gather_ring \([12]\)|all_reduce_one_hop \(1\)|"
    r"reduce_scatter_(ring \(2\)|adamw_all_gather_ring)|gather_parameters_ring|"
    r"accept \(1\))$": _ONE_OF_SEVERAL,
    r"barrier of offer$": "each lane writes the header that it publishes",
    r"barrier of verify_(streams|peer_buffers)$": "all lanes bring the same when all is well",
    r"barrier of receive_packets": (
        "as do these; packets are strong words that each lane waits for itself, and the factors "
        "behind them are not used by these sums"
    ),
    r"(barrier|fence) of clear_other_set$": (
        "the interpreter keeps strong stores in order; see tests/proof/model/ll.pml"
    ),
    r"adamw_float32/(float32|norm): acquire of drained$": (
        "a step reads what its peers have lent, too, so that a fence stands behind the wait"
    ),
    r"adamw_float32/(float32|norm): acquire of find_link$": (
        "the host waits between the steps of a job, which tells their kernels what others read; of "
        "calls between which it does not, the reductions' kernels show the same access"
    ),
    r"adamw_float32/float32: barrier of (begin_step|consume|own_gradients)$": (
        "update_lanes() has another barrier before any lane reads what they order"
    ),
    r"adamw_float32/float32: barrier of (return_offers \(1\)|reduce_scatter_ring \(4\))$": (
        "an update ends with the barriers of end_turns()"
    ),
    r"adamw_float32/norm: barrier of await_slot$": (
        "reduce_hop() has another barrier before a lane writes the slot"
    ),
    r"barrier of prepare_kernel$": "what is changed behind it no other lane reads",
}
# Accesses that only some waits execute, or that another order mostly covers: jobs may or may not
# show their removal.
LONG_WAITS = {
    r"acquire of other_call_in$": "of a header that is looked at when a call ahead is there",
}


@dataclass(frozen=True)
class Outcome:
    """A job's outcome: the lines that each subunit's kernels executed, or the failure."""

    reached: Mapping[str, list[int]]
    failed: str | None


def do(job: str, changes: Mapping[str, list[int]], *slips: str) -> Outcome:
    """Runs a job in a process of its own, with changes made to the texts of its subunits.

    Fails if the process did not report how the job ended, since that proves nothing.
    """
    program = [sys.executable, "-m", "tests.proof.ptx.small_jobs", job, json.dumps(changes), *slips]
    for _ in range(TRIES):
        done = fork_server.run(program, kind=fork_server.PopenForDevices, env=dict(os.environ))
        told = json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
        if told is not None and not told.get("failed", "").startswith("RendezvousError"):
            return Outcome(told.get("reached", {}), told.get("failed"))
    raise AssertionError(f"the job {job!r}: {done.returncode}, {told}, {done.stderr[-2000:]}")


def do_until_it_fails(job: str, slip: str) -> Outcome:
    """Runs a job with a slip up to LOST_TRIES times, until it fails; returns the last outcome.

    Whether two lanes of a block fail together, so that their stores race, depends on when the loss
    of a rank reaches each of them: on 2 busy cores this happens in about two of three runs.
    """
    for _ in range(LOST_TRIES):
        outcome = do(job, {}, slip)
        if outcome.failed is not None:
            break
    return outcome


@cache
def accesses() -> dict[str, dict[str, list[int]]]:
    """Returns the lines of every access that orders memory, by its name and by subunit."""
    found: dict[str, dict[str, list[int]]] = {}
    for subunit in SUBUNITS:
        for name, copies in orderings(ptx_of(subunit)).items():
            found.setdefault(name, {})[subunit] = [each.line for each in copies]
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made
        made.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def sample(pool: ThreadPoolExecutor) -> dict[str, Future[Outcome]]:
    known = accesses()
    mutants = {name: pool.submit(do, job, known.get(name, {})) for name, job in SAMPLE.items()}
    slips = {
        slip: pool.submit(do_until_it_fails, job, slip)
        if job == "lost"
        else pool.submit(do, job, {}, slip)
        for slip, job in SLIPS_SEEN_BY.items()
    }
    return mutants | slips | {"nothing": pool.submit(do, "lost", {})}


@pytest.mark.skipif(EVERYTHING, reason="all of them are below")
@pytest.mark.parametrize("name", SAMPLE)
def test_what_orders_memory_is_missed(sample: dict[str, Future[Outcome]], name: str) -> None:
    assert name in accesses(), f"the kernels have no {name}"
    assert sample[name].result().failed is not None, f"{name}, in the job {SAMPLE[name]!r}"


@pytest.mark.skipif(EVERYTHING, reason="_jobs_by_mutant looks at all jobs")
def test_lanes_that_fail_together_do_not_race(sample: dict[str, Future[Outcome]]) -> None:
    assert sample["nothing"].result().failed is None


@pytest.mark.parametrize("slip", SLIPS_SEEN_BY)
def test_a_slip_is_seen(sample: dict[str, Future[Outcome]], slip: str) -> None:
    assert sample[slip].result().failed is not None, f"{slip}, in the job {SLIPS_SEEN_BY[slip]!r}"


def _jobs_by_mutant(pool: ThreadPoolExecutor) -> dict[Mutant, list[str]]:
    """Returns the jobs that execute each access of each subunit when nothing is changed."""
    found: dict[Mutant, list[str]] = {}
    for job, outcome in zip(JOBS, pool.map(lambda job: do(job, {}), JOBS), strict=True):
        assert outcome.failed is None, f"the job {job!r} fails with nothing changed"
        for name, by_subunit in accesses().items():
            for subunit, lines in by_subunit.items():
                if set(lines) & set(outcome.reached.get(subunit, ())):
                    found.setdefault((subunit, name), []).append(job)
    return found


@pytest.mark.skipif(not EVERYTHING, reason="many minutes: RINGCOMM_PTX_CHECK=all")
def test_every_place_is_missed(pool: ThreadPoolExecutor) -> None:
    jobs = _jobs_by_mutant(pool)

    def outcome(mutant: Mutant) -> str:
        subunit, name = mutant
        lines = {subunit: accesses()[name][subunit]}
        return next((said for job in jobs[mutant] if (said := do(job, lines).failed)), RIGHT)

    def outcomes(mutants: list[Mutant]) -> dict[Mutant, str]:
        return dict(zip(mutants, pool.map(outcome, mutants), strict=True))

    unseen = unexplained(list(jobs), [*SURVIVORS, *LONG_WAITS], outcomes)
    assert unseen == []
    assert stale(SURVIVORS, jobs) == []
