# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at every step of a call in turn; the survivors always end with an error.

The error names the step at which call_model.py expects the survivor.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import ringcomm
from ringcomm import CommOptions, _native
from tests.support.call_model import (
    ACKNOWLEDGE,
    AWAIT_CONSUMED,
    AWAIT_READY,
    PUBLISH,
    Rank,
    steps_of,
)
from tests.support.fault_calls import make
from tests.support.fault_checks import expected_waits, run_chain
from tests.support.fault_schedules import Call, Fault, Schedule

pytestmark = pytest.mark.deadlines

WORLD, KILLED = 3, 1
SEGMENT_BYTES = 256
ONE_SEGMENT, TWO_SEGMENTS = 40, 70  # elements of a chunk
# Ranks mostly wait for each other or for the news of a death, so several worlds run at once.
WORLDS_AT_ONCE = 3

CALLS = {
    "two_shot": Call("all_reduce", WORLD * TWO_SEGMENTS, algorithm="two_shot"),
    "ring": Call("all_reduce", WORLD * ONE_SEGMENT, algorithm="ring"),
    "all_gather": Call("all_gather_into_tensor", TWO_SEGMENTS),
}
# Calls with seven segments per chunk, the step at which rank KILLED fails, and the steps at which
# ranks 0 and 2 then are.
LONG = {
    "two_shot": (Call("all_reduce", WORLD * 400, algorithm="two_shot"), 59, {0: 3, 2: 5}),
    "ring": (Call("all_reduce", WORLD * 400, algorithm="ring"), 37, {0: 11, 2: 10}),
}


@pytest.fixture(scope="module")
def passages():
    """Returns the numbers of fault points that rank KILLED passes in each call."""
    counts = {}
    options = CommOptions(timeout=60.0, segment_bytes=SEGMENT_BYTES)
    with ringcomm.local_world(WORLD, options=options) as world:
        for name, call in CALLS.items():
            _native.arm_fault("none", rank=KILLED)
            assert world.run(make, call, 0) == [""] * WORLD
            counts[name] = _native.fault_passages()
            _native.disarm_fault()
    return counts


# All-gather is left out: it is the second half of the two-shot all-reduce.
@pytest.mark.parametrize("name", ["two_shot", "ring"])
def test_killed_at_every_step(passages, name):
    def broken(step: int) -> list[str]:
        fault = Fault("kill", KILLED, 0, step)
        return run_chain((Schedule(WORLD, SEGMENT_BYTES, (CALLS[name],), fault),))

    steps = range(sum(passages[name].values()))
    with ThreadPoolExecutor(WORLDS_AT_ONCE) as pool:
        found = dict(zip(steps, pool.map(broken, steps), strict=True))
    assert {step: texts for step, texts in found.items() if texts} == {}


def test_no_step_is_left_out(passages):
    """Counts match the algorithms: items to and from two peers, and a wait for each slot."""
    assert passages == {
        # Two segments to rank 0, one to rank 2 (whose chunk is the shortest), two shared with both.
        "two_shot": {"publish": 7, "acknowledge": 7, "await": 14},
        "ring": {"publish": 4, "acknowledge": 4, "await": 8},
        "all_gather": {"publish": 4, "acknowledge": 4, "await": 8},
    }


@pytest.mark.parametrize("name", CALLS)
def test_the_model_has_all_steps(passages, name):
    steps = steps_of(Rank(KILLED, WORLD, SEGMENT_BYTES), CALLS[name])
    whats = Counter(step.what for step in steps)
    assert passages[name] == {
        "publish": whats[PUBLISH],
        "acknowledge": whats[ACKNOWLEDGE],
        "await": whats[AWAIT_READY] + whats[AWAIT_CONSUMED],
    }


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("name", LONG)
def test_errors_name_the_step_within_a_long_call(name, action):
    call, step, waits = LONG[name]
    schedule = Schedule(WORLD, SEGMENT_BYTES, (call,), Fault(action, KILLED, 0, step))
    expected = expected_waits(schedule)
    steps = {rank: point.item for rank, point in (expected or {}).items()}
    # After a kill, only the ranks that wait for the killed rank itself name it.
    assert steps == waits or (action == "kill" and steps and steps.items() < waits.items())
    assert run_chain((schedule,)) == []
