"""Mutants of the PTX: what orders memory, dropped place by place, and other slips of a compiler.

Each is run on the interpreter in a job whose results are known (small_jobs.py), and must be seen
there, as a wrong result or as a race. ``make test`` takes a mutant of each kind, and
``make ptx-check`` all places that the jobs' kernels come to.
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

from tests.proof.ptx.orderings import LINE_INFO, orderings
from tests.support import fork_server, nvrtc
from tests.support.emulator.library import COMPILER
from tests.support.emulator.ptx import ptx_of

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(nvrtc.library_path() is None, reason=nvrtc.NEEDS_NVRTC),
    pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler"),
]

EVERYTHING = os.environ.get("RINGCOMM_PTX_CHECK") == "all"

# A mutant of each kind, and the job that sees it.
SAMPLE = {
    "acquire of arrive (1)": "direct",
    "acquire of arrive (2)": "direct",
    "acquire of find_link": "to a root",
    "acquire of await_slowly (1)": "ring",
    "acquire of drained": "direct halves",
    "acquire of slot_is_free": "to a root",
    "release of send": "direct",
    "release of publish_item": "ring",
    "release of publish_shared": "direct halves",
    "release of release": "to a root",
    "release of offer": "direct step",
    "barrier of load_table": "packet",
    "barrier of begin_packets (1)": "packet",
    "barrier of receive_sources": "direct",
    "barrier of publish_item": "ring",
    "barrier of end_norm": "norm alone",
}


@dataclass(frozen=True)
class Outcome:
    """What a job said: of which lines each part's kernels came to, or how it failed."""

    reached: Mapping[str, list[int]]
    failed: str | None


def do(job: str, changes: Mapping[str, list[int]]) -> Outcome:
    """Does a job in a process of its own, with ``changes`` made to the texts of its parts."""
    command = [sys.executable, "-m", "tests.proof.ptx.small_jobs", job, json.dumps(changes)]
    done = fork_server.run(command, env=dict(os.environ))
    lines = done.stdout.splitlines()
    told = json.loads(lines[-1]) if lines else {"failed": f"it ended early: {done.stderr[-500:]}"}
    failed = told.get("failed")
    assert not (failed or "").startswith("RendezvousError"), failed
    return Outcome(told.get("reached", {}), failed)


@cache
def places() -> dict[str, dict[str, list[int]]]:
    """The lines of every place that orders memory, by its name and by part."""
    found: dict[str, dict[str, list[int]]] = {}
    for part in ("move", "reduce_float32/sum", "adamw_float32/float32"):
        for name, copies in orderings(ptx_of(part, LINE_INFO)).items():
            found.setdefault(name, {})[part] = [each.line for each in copies]
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made
        made.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def sample(pool: ThreadPoolExecutor) -> dict[str, Future[Outcome]]:
    return {name: pool.submit(do, job, places()[name]) for name, job in SAMPLE.items()}


@pytest.mark.parametrize("name", SAMPLE)
def test_what_orders_memory_is_missed(sample: dict[str, Future[Outcome]], name: str) -> None:
    assert sample[name].result().failed is not None, f"{name}, in the job {SAMPLE[name]!r}"
