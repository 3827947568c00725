# SPDX-License-Identifier: Apache-2.0
"""Fault injection: the points that it counts, the ranks that it affects, the plans it refuses."""

from __future__ import annotations

import os

import pytest

import ringcomm
from ringcomm import CollectiveTimeout, CommOptions, Communicator, _native
from tests.support.fault_calls import make
from tests.support.fault_schedules import INTERPRETED, KINDS, Call
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deadlines

TIMEOUT_S = 60.0
NOTHING = {"publish": 0, "acknowledge": 0, "await": 0}
SUM = Call("all_reduce", 5)


@pytest.fixture
def world():
    with ringcomm.local_world(2, timeout=TIMEOUT_S) as ranks:
        yield ranks
    _native.disarm_fault()


def counted(world, call, **options):
    """Returns the numbers of points that one call passes; the fault stays armed."""
    _native.arm_fault("none", **options)
    assert world.run(make, call, 0) == ["", ""]
    return _native.fault_passages()


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_has_points(world, kind):
    passed = counted(world, Call(kind, 100))
    assert min(passed.values()) > 0
    again = counted(world, Call(kind, 100))
    # The progress points of messages depend on which rank comes first, but publications do not.
    assert again["publish"] == passed["publish"]


def test_points_of_a_rank_and_of_a_call(world):
    both = counted(world, SUM)
    assert both == {"publish": 2, "acknowledge": 2, "await": 4}
    assert counted(world, SUM, rank=1) == {"publish": 1, "acknowledge": 1, "await": 2}
    assert counted(world, SUM, rank=2) == NOTHING
    # This call is the world's sixth collective.
    sixth = 6
    assert counted(world, SUM, sequence=1) == NOTHING
    assert counted(world, SUM, sequence=sixth) == NOTHING
    assert counted(world, SUM, sequence=sixth) == both
    world.run(make, SUM, 0)
    assert _native.fault_passages() == both
    assert counted(world, Call("messages", 5), sequence=sixth) == NOTHING


def test_nothing_is_counted_when_no_plan_is_armed(world):
    passed = counted(world, SUM)
    assert _native.fault_armed()
    _native.disarm_fault()
    world.run(make, SUM, 0)
    assert _native.fault_passages() == passed
    assert not _native.fault_armed()


@pytest.mark.parametrize(("action", "seconds"), [("delay", 1.0), ("slow", 0.3)])
def test_one_rank_of_two_threads_is_late(action, seconds):
    """The delay exceeds the other rank's timeout, which ends that rank's wait for the slot."""
    with ringcomm.local_world(2, timeout=0.4) as world:
        _native.arm_fault(action, seconds=seconds, rank=1)
        with pytest.raises(CollectiveTimeout, match=r"waited .* for rank 1"):
            world.run(make, SUM, 0)
        _native.disarm_fault()


def test_a_short_delay_does_no_harm(world):
    _native.arm_fault("delay", passage=2, seconds=0.05, rank=0)
    assert world.run(make, SUM, 0) == ["", ""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "explode"}, "expected none, kill, stop, delay or slow"),
        ({"action": "kill", "passage": 0}, "expected 1 or more"),
        ({"action": "kill", "rank": 0}, "leave it out"),
        ({"action": "stop", "rank": 1}, "leave it out"),
        ({"action": "delay", "seconds": -1.0}, "expected 0 to 1e6"),
        ({"action": "delay", "seconds": float("nan")}, "expected 0 to 1e6"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _native.arm_fault(**arguments)
    assert not _native.fault_armed()


def _counts_in_both(store, rank, world_size):
    """Returns the points that each call passes with native kernels and in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    options = CommOptions(timeout=TIMEOUT_S, segment_bytes=256)
    passed = {}
    with Communicator.from_store(store, rank, world_size, options=options) as comm:
        for kind in INTERPRETED:
            for algorithm in KINDS[kind][1:]:
                for kernels in ("native", "triton"):
                    _native.arm_fault("none")
                    assert make(comm, Call(kind, 90, algorithm, kernels=kernels), 0) == ""
                    passed[kind, algorithm, kernels] = _native.fault_passages()
    return passed


def test_the_interpreter_passes_the_points_of_native_calls():
    for passed in run_ranks(_counts_in_both, 2):
        for (kind, algorithm, kernels), points in passed.items():
            native = passed[kind, algorithm, "native"]
            if (kind, algorithm) == ("all_reduce", "two_shot"):
                # The native call takes one hop, Triton's two.
                assert min(points.values()) > 0
            else:
                assert points == native, (kind, algorithm, kernels)
