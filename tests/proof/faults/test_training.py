# SPDX-License-Identifier: Apache-2.0
"""A training run loses a rank at any step, and ends with the bits of a run without the loss."""

import pytest

from ringcomm import zero
from tests.support.covering import in_test_all, thinned
from tests.support.fault_training import (
    SAVE_EVERY,
    TURNS,
    TrainingFault,
    TrainingRank,
    draw_training,
    run_training,
)

SEEDS = (3, 5, 13, 16)


@pytest.mark.parametrize("seed", thinned(SEEDS, 2))
def test_nothing_is_lost(seed):
    assert run_training(draw_training(seed)) == []


def test_the_seeds_cover_the_stages():
    faults = [draw_training(seed) for seed in SEEDS]
    assert {fault.stage for fault in faults} == {0, 1, 2, 3}
    assert {fault.world_size for fault in faults} == {2, 3}
    saving = {fault.turn % SAVE_EVERY == SAVE_EVERY - 1 for fault in faults}
    assert saving == {True, False}
    assert all(SAVE_EVERY <= fault.turn < TURNS for fault in faults)


class ForgetsTheOptimizer(TrainingRank):
    """A rank that loads only the parameters."""

    def resume(self, comm):
        job = self.job(comm)
        loaded = zero.load(self.root, job.module)
        job.turn = loaded.data["turn"]
        self.train(job, TURNS, save=False)
        return loaded.step, job.state()


class BeginsAnew(TrainingRank):
    """A rank that starts from scratch, and claims that it has resumed."""

    def resume(self, comm):
        job = self.job(comm)
        job.turn = SAVE_EVERY
        self.train(job, TURNS, save=False)
        return SAVE_EVERY, job.state()


class GoesOn(TrainingRank):
    """A rank that ignores the lost rank."""

    def lose_a_rank(self, comm):
        told = super().lose_a_rank(comm)
        return "finished" if told else told


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (ForgetsTheOptimizer, "is not that of the undisturbed run"),
        *in_test_all(
            (BeginsAnew, "is not that of the undisturbed run"), (GoesOn, "expected PeerLost")
        ),
    ],
)
def test_a_lost_state_is_seen(trainer, expected):
    found = run_training(TrainingFault(1, 2, 1, SAVE_EVERY, 5), trainer)
    assert any(expected in text for text in found), found
