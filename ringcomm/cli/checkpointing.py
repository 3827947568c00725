"""Checkpoints of ``ringcomm train``: saved while it runs, and continued from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringcomm import zero
from ringcomm.cli.config import FROM_ANY, TrainConfig
from ringcomm.cli.training_engines import ZeroEngine
from ringcomm.cli.training_outcome import Start
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.zero.checkpoint import Checkpoints

# A run that goes on may have other ranks and micro-batches; these it must share with what was
# saved, or its losses would be none of the run's.
SHARED = ("model", "batch", "steps", "learning_rate", "seed")


@dataclass(frozen=True)
class Saving:
    """Where and when a run saves.

    Attributes:
        folder: of its checkpoints.
        every: steps from one to the next; the last step is saved, too.
        resume: "latest": it begins behind the latest; "auto": if there is one; None: there must be
            none.
    """

    folder: str
    every: int
    resume: str | None

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to save once ``step`` of all ``steps`` are done."""
        return step % self.every == 0 or step == steps


def save_run(
    saving: Saving,
    engine: ZeroEngine,
    config: TrainConfig,
    losses: Sequence[float],
    held_out: float,
) -> None:
    """Saves what :func:`resume_run` needs; collective.

    Args:
        saving: the folder.
        engine: after the step whose loss is the last.
        config: of the run.
        losses: of all steps so far, equal on all ranks.
        held_out: the loss before step 0.

    Raises:
        CheckpointError: a rank could not write; on all ranks.
    """
    data = {"config": asdict(config), "losses": list(losses), "held_out": held_out}
    zero.save(saving.folder, len(losses), engine.module, engine.adamw, data=data)


def resume_run(saving: Saving, engine: ZeroEngine, config: TrainConfig) -> Start | None:
    """Where the run begins; loads the latest checkpoint if it is to resume; collective.

    Returns:
        None with "auto" where all steps are done.

    Raises:
        ArgumentError: there are checkpoints, and ``saving`` does not say to resume; the one that is
            there is of a run of other options, or with "latest" of one that was done.
        CheckpointError: there is none to resume from, or it is damaged, of another model or not of
            ``ringcomm train``.
    """
    found = Checkpoints(saving.folder)
    latest = found.latest()
    if saving.resume is None:
        if latest is not None:
            raise ArgumentError(
                f"--save {saving.folder}: holds a checkpoint of step {latest} already; add "
                "--resume to go on from it, or give another folder"
            )
        return Start()
    if saving.resume == FROM_ANY and latest is None:
        return Start()
    _check(saving, _saved_config(found), asdict(config))
    if latest == config.steps:
        if saving.resume == FROM_ANY:
            return None
        raise ArgumentError(
            f"--resume: all {config.steps} steps are done in {saving.folder}; there is nothing "
            "left to train"
        )
    loaded = zero.load(saving.folder, engine.module, engine.adamw)
    return Start(tuple(loaded.data["losses"]), loaded.data["held_out"])


def _saved_config(found: Checkpoints) -> dict[str, Any]:
    reader = found.reader()
    try:
        config: dict[str, Any] = reader.data["user"]["config"]
        if not set(SHARED) <= set(config):
            raise KeyError(*SHARED)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"--resume: {reader.folder}: expected a checkpoint that ringcomm train saved, got one "
            "that says nothing of its run"
        ) from error
    return config


def _check(saving: Saving, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in SHARED:
        if saved[name] != wanted[name]:
            raise ArgumentError(
                f"--resume: {saving.folder} was saved with {name} = {saved[name]}, got "
                f"{wanted[name]}; give the options of the run that saved it"
            )
