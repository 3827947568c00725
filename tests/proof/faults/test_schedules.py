# SPDX-License-Identifier: Apache-2.0
"""Random plans of faults: whatever fails and wherever, the promises hold.

``make soak`` plays many more plans; docs/reliability.md lists the promises.
"""

import pytest

from tests.support.covering import thinned
from tests.support.fault_checks import run_chain
from tests.support.fault_schedules import FATAL, HARMLESS, KINDS, draw_chain, interpreted, is_chain

pytestmark = pytest.mark.deadlines

# Chosen to stop few ranks, as each stop costs a timeout, and to cover all that the tests require.
SEEDS = (
    *(422, 424, 426, 428, 430, 431, 432, 434, 436, 438),
    *(440, 441, 442, 444, 446, 448, 449, 450, 452, 455),
)
INTERPRETED_SEEDS = (431,)
CHAINS = {seed: draw_chain(seed) for seed in SEEDS}


@pytest.mark.parametrize("seed", thinned(SEEDS, 4))
def test_promises_hold(seed):
    assert run_chain(CHAINS[seed]) == []


@pytest.mark.parametrize("seed", INTERPRETED_SEEDS)
def test_promises_hold_in_the_interpreter(seed):
    assert run_chain(interpreted(CHAINS[seed])) == []


def test_the_seeds_cover_what_can_fail():
    schedules = [schedule for chain in CHAINS.values() for schedule in chain]
    assert len(schedules) >= 90
    failing = [(each.calls[each.fault.call], each.fault) for each in schedules]
    for fatal in (True, False):
        assert {call.kind for call, fault in failing if fault.is_fatal == fatal} == set(KINDS)
    assert {fault.action for _, fault in failing} == {*FATAL, *HARMLESS}
    lost = [(call, fault) for call, fault in failing if fault.is_fatal]
    for kind, forms in KINDS.items():
        of_kind = [call for call, _ in lost if call.kind == kind]
        assert {call.algorithm for call in of_kind} == set(forms)
        assert (
            {call.heap for call in of_kind}
            == {call.async_op for call in of_kind}
            == {
                True,
                False,
            }
        )
    assert {schedule.world_size for schedule in schedules} == {2, 3, 4}
    in_the_interpreter = [
        schedule.calls[schedule.fault.call].kernels
        for seed in INTERPRETED_SEEDS
        for schedule in interpreted(CHAINS[seed])
        if schedule.fault.is_fatal
    ]
    assert in_the_interpreter.count("triton") >= 1


def test_a_seed_is_a_chain():
    for seed, chain in CHAINS.items():
        assert is_chain(chain)
        assert draw_chain(seed) == chain
    assert len(set(CHAINS.values())) == len(CHAINS)
    first = CHAINS[SEEDS[0]]
    assert not is_chain(first[1:] + first[:1])
