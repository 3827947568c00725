# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the PTX of Triton's kernels: a small job must show each, or this file gives a reason.

``make test`` runs one of each kind; RINGCOMM_PTX_CHECK=all runs every access that a job executes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("triton")

from ringcomm._tl.hooks import IS_INTERPRETED
from tests.proof.ptx.survivors import Mutant, stale, unexplained
from tests.proof.ptx.triton_jobs import EDITS, JOBS, ONE_WARP_LESS
from tests.support import ROOT
from tests.support.fork_server import PopenForDevices

ALL = os.environ.get("RINGCOMM_PTX_CHECK") == "all"
LIMIT_S = 3600 if ALL else 600

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

_SCATTER = "reduce_piece in reduce_scatter_one_shot"
SOME = (
    ("one_shot", "acquire of await_acquire_sys in receive"),
    ("one_shot", f"release of {_SCATTER}"),
    ("one_shot", f"all barriers of the release of {_SCATTER}"),
    ("one_shot", "barrier behind the acquire of await_acquire_sys in receive"),
    ("one_shot", "a vector a word too far"),
    ("one_shot", ONE_WARP_LESS),
)

# Patterns of accesses whose removal no job shows, and the reasons. None of these accesses is the
# only order between data and the signal that the data has arrived or has been read.
SURVIVORS = {
    r"(acquire|exchange) of (begin_call|begin_kernel|end_call) ": (
        "of the abort words, which say something to a call that fails alone; that data are read "
        "before them is a matter of reordering, and of tests/proof/litmus"
    ),
    r"library: acquire of other_call_seen$": "of the words of collectives, which send nothing here",
    r"acquire of await_acquire_sys in (finish_sending|finish_sharing|return_offers)$": (
        "for what the caller does with its buffer after the call, which is no kernel's access here"
    ),
    r"steps: acquire of await_acquire_sys in await_slot$": (
        "of the word that return_offers() of the call before has acquired"
    ),
    r"(release of|all barriers of the release of) return_offers in reduce_scatter_norm_one_shot$": (
        "for what the peer does with its gradients after the call"
    ),
    r"all barriers of the release of (offer in|signal_release_gpu in relay_kernel)": (
        "one lane stores all that it releases"
    ),
    r"barrier (before|behind) the exchange of end_call ": "as are the words that it orders",
    r"barrier before the acquire of (await_acquire_sys in \w+|shift_kernel)$": (
        "Triton's, around its own words in shared memory, of which others come before"
    ),
    r"barrier before the release of (collect_piece|reduce_piece|return_offers) ": (
        "one of several, of which 'all barriers of the release' leaves none"
    ),
    r"barrier in (set_of_peer in )?(collect_piece|reduce_piece|reduce_ring|all_gather_ring|"
    r"return_offers)( in|$)": "the same; see kernels/tl/words.py",
    r"barrier before the release of (offer|barrier_sys|signal_release_gpu) ": (
        "one lane stores all that it releases"
    ),
    r"barrier in (commit_seen|commit_sent|end_call|open_state|begin_kernel|"
    r"set_of_peer in begin_receive|advance_epoch in barrier_sys)( in|$)": (
        "of words of the block's own, which are read behind the two barriers of an atomic operation"
    ),
}
# Accesses that only a long wait executes, so a job may or may not show their removal.
LONG_WAITS = {
    r"acquire of (reason_to_give_up|word_of_host_acquire_sys) ": "of words that stay 0 here",
    r"barrier (before|behind) the acquire of (reason_to_give_up|word_of_host_acquire_sys) ": (
        "around them"
    ),
    r"barrier in (clock_ns in )?await_slowly$": "around the clock, which is read with them",
    r".* await_block$": "blocks of a rank mostly need not wait for each other",
    r"steps: acquire of await_acquire_sys in receive$": (
        "of an offer's first look, which rarely comes after the offer; the job one_shot shows it"
    ),
}


def _outcomes(tasks: Iterable[Mutant]) -> dict[Mutant, Any]:
    command = [sys.executable, "-m", "tests.proof.ptx.triton_jobs"]
    pipe = subprocess.PIPE
    with PopenForDevices(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            asked = "".join(json.dumps(task) + "\n" for task in tasks)
            output, _ = process.communicate(asked, timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in output.splitlines()]
    return {(job, mutant): outcome for job, mutant, outcome in lines}


def _unseen(tasks: list[Mutant]) -> list[Mutant]:
    """Returns the mutants that must be shown and are not."""

    def outcomes(left: list[Mutant]) -> dict[Mutant, Any]:
        found = _outcomes(left)
        assert [task for task in left if "REFUSED" in found[task]] == []
        return found

    return unexplained(tasks, [*SURVIVORS, *LONG_WAITS], outcomes)


def _reached(outcomes: dict[Mutant, Any]) -> dict[str, list[str]]:
    """Returns, by job, the accesses that the unchanged job executed, which must have succeeded."""
    unchanged = {job: found for (job, mutant), found in outcomes.items() if not mutant}
    assert [found for found in unchanged.values() if not isinstance(found, list)] == []
    return unchanged


@pytest.mark.skipif(ALL, reason="all of them are below")
def test_a_mistake_of_each_kind_is_seen():
    reached = _reached(_outcomes((job, "") for job in dict(SOME)))
    for job, mutant in SOME:
        assert mutant in (*reached[job], *EDITS, ONE_WARP_LESS), mutant
    assert _unseen(list(SOME)) == []


@pytest.mark.skipif(not ALL, reason="minutes: RINGCOMM_PTX_CHECK=all")
def test_every_mistake_is_seen():
    reached = _reached(_outcomes((job, "") for job in JOBS))
    tasks = [(job, access) for job, found in reached.items() for access in found]
    tasks += [("one_shot", edit) for edit in (*EDITS, ONE_WARP_LESS) if "shuffle" not in edit]
    tasks += [("steps", "another lane of a shuffle")]
    assert _unseen(tasks) == []
    assert stale(SURVIVORS, tasks) == []
