# SPDX-License-Identifier: Apache-2.0
"""Training runs that lose a rank and continue from their last checkpoint without a loss."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch

import ringcomm
from ringcomm import Communicator, RingcommError, _native
from tests.support.fault_player import TIMEOUT_S
from tests.support.ranks import Ranks, RanksFailed, run_ranks
from tests.zero.job import Job
from tests.zero.models import new_model

MODEL = "mlp"
TURNS, SAVE_EVERY = 6, 2
DEADLINE_S = 90.0
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingFault:
    """A rank is killed in a turn of training, which may end with a save.

    Attributes:
        stage: of ZeRO.
        world_size: of the run before the fault.
        rank: the rank that is killed.
        turn: the turn in which it is killed, after the first save.
        step: it is killed before this publication, acknowledgement or wait, modulo their number.
    """

    stage: int
    world_size: int
    rank: int
    turn: int
    step: int


def draw_training(seed: int) -> TrainingFault:
    """Draws a plan; equal seeds give equal plans."""
    draw = Random(seed)
    world_size = draw.choice((2, 3))
    turn = draw.randrange(SAVE_EVERY, TURNS)
    rank = draw.randrange(world_size)
    return TrainingFault(draw.randrange(4), world_size, rank, turn, draw.getrandbits(16))


class TrainingRank:
    """The work of one rank; tests of the checks override methods."""

    def __init__(self, fault: TrainingFault, root: Path) -> None:
        self.fault = fault
        self.root = root

    @cached_property
    def base(self) -> Any:
        """The model. Make it while no other thread draws random numbers."""
        return new_model(MODEL)

    def job(self, comm: Communicator) -> Job:
        return Job(comm, self.base, self.fault.stage)

    def train(self, job: Job, until: int, save: bool) -> None:
        while job.turn < until:
            job.train(MODEL, 1)
            if save and job.turn % SAVE_EVERY == 0:
                job.save(self.root)

    def resume(self, comm: Communicator) -> tuple[int, State]:
        """Resumes a run; returns the step at which it resumed, and its final state."""
        job = self.job(comm)
        begun = job.load(self.root).step
        self.train(job, TURNS, save=False)
        return begun, job.state()

    def lose_a_rank(self, comm: Communicator) -> str:
        """Trains until a rank is killed; returns the text of a survivor's error."""
        fault, job = self.fault, self.job(comm)
        fails = comm.rank == fault.rank
        # A turn takes as many steps as the turn SAVE_EVERY before it, which also saves or does not.
        self.train(job, fault.turn - SAVE_EVERY, save=True)
        _native.arm_fault("none")
        self.train(job, fault.turn - SAVE_EVERY + 1, save=True)
        steps = sum(_native.fault_passages().values())
        _native.disarm_fault()
        self.train(job, fault.turn, save=True)
        if fails:
            _native.arm_fault("kill", 1 + fault.step % steps)
        try:
            self.train(job, TURNS, save=True)
        except RingcommError as error:
            return f"{type(error).__name__}: {error}"
        return "finished"


def _begin(store: Any, rank: int, world_size: int, trainer: TrainingRank) -> Any:
    torch.set_num_threads(1)
    comm = Communicator.from_store(store, rank, world_size, timeout=TIMEOUT_S)
    told = trainer.lose_a_rank(comm)
    comm.close()
    left = [each for each in range(world_size) if each != trainer.fault.rank]
    with Communicator.from_store(
        store, left.index(rank), len(left), name="survivors", timeout=TIMEOUT_S
    ) as comm:
        return told, trainer.resume(comm)


def _restart(store: Any, rank: int, world_size: int, trainer: TrainingRank) -> Any:
    torch.set_num_threads(1)
    with Communicator.from_store(store, rank, world_size, timeout=TIMEOUT_S) as comm:
        return trainer.resume(comm)


def _undisturbed(fault: TrainingFault, world_size: int, root: Path, step: int | None) -> State:
    """Returns the final state of a run from ``step`` (None: the beginning) that loses no rank."""
    trainer = TrainingRank(fault, root)
    assert trainer.base is not None  # made before the threads start

    def run(comm: Communicator) -> State:
        job = trainer.job(comm)
        if step is not None:
            assert job.load(root).step == step
        trainer.train(job, TURNS, save=False)
        return job.state()

    with ringcomm.local_world(world_size, timeout=TIMEOUT_S) as world:
        return world.run(run)[0]


def _differences(what: str, state: State, wanted: State) -> list[str]:
    return [
        f"{what}: {name} is not that of the undisturbed run"
        for name, tensor in wanted.items()
        if not torch.equal(state[name], tensor)
    ]


def run_training(fault: TrainingFault, trainer: type[TrainingRank] = TrainingRank) -> list[str]:
    """Loses a rank, continues with the survivors and with the first world size; returns what was
    broken, or an empty list.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        acting = trainer(fault, root)
        left = [rank for rank in range(fault.world_size) if rank != fault.rank]
        with Ranks(_begin, fault.world_size, acting) as ranks:
            try:
                outcomes = ranks.wait(DEADLINE_S, left)
                restarted = run_ranks(_restart, fault.world_size, acting, timeout_s=DEADLINE_S)
            except RanksFailed as error:
                return [f"{error}"]
        found = [outcome.describe() for outcome in outcomes if not outcome.ok]
        if found:
            return found
        whole = _undisturbed(fault, fault.world_size, root, None)
        saved = outcomes[0].value[1][0]
        smaller = _undisturbed(fault, len(left), root, saved)
        if saved not in (fault.turn // SAVE_EVERY * SAVE_EVERY, fault.turn + 1):
            found.append(f"the last checkpoint is of turn {saved}, the rank died in {fault.turn}")
        for outcome in outcomes:
            told, (_, state) = outcome.value
            if not told.startswith("PeerLost") or f"rank {fault.rank}" not in told:
                found.append(f"expected PeerLost that names rank {fault.rank}, got {told}")
            found += _differences("survivors", state, smaller)
        for begun, state in restarted:
            found += [] if begun == saved else [f"restarted at {begun}, saved {saved}"]
            found += _differences("restarted", state, whole)
        return found
