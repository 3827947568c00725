"""Checkpoints of modules with experts: the dense part in one folder, experts in one for each rank.

NOTE [When a checkpoint of both is whole]
Experts are saved first, and the dense part last. So a step has a checkpoint once the dense part has
one, and what experts have of later steps is of a save that was cut off: the next one removes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.extras.moe.optimizer import Optimizer
from ringcomm.extras.moe.sharding import Parts, parts_of
from ringcomm.optim.agreement import all_or_none
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.zero.checkpoint.checkpoints import Checkpoints
from ringcomm.zero.checkpoint.save_load import check_load, take_load
from ringcomm.zero.sharding import check_step_number, path_of

_SAVE, _LOAD = "moe.save", "moe.load"


def save(
    root: str | os.PathLike[str],
    step: int,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    data: Any = None,
    keep: int | None = 2,
) -> Path:
    """Saves both parts below ``root``; collective.

    Args:
        root: the run's folder, which all ranks see; another one for each stage of a pipeline.
        step: as of ``zero.save``.
        data: as of ``zero.save``.
        keep: as of ``zero.save``.
        module: what :func:`ringcomm.moe.shard` returned.
        optimizer: on it.

    Returns:
        The folder of the dense part's checkpoint.

    Raises:
        Exception: as of ``zero.save``.
    """
    root = path_of(root, _SAVE, "root")
    check_step_number(step, _SAVE)
    parts = parts_of(module, _SAVE)
    dense, experts = _optimizers(optimizer, _SAVE)
    if parts.experts is not None:
        with all_or_none(parts.everyone, _SAVE):
            _remove_cut_off(Path(root), parts)
        with all_or_none(parts.everyone, _SAVE):
            if parts.writes:
                zero.save(_of_experts(root, parts), step, parts.experts, experts, keep=keep)
    return zero.save(_of_dense(root), step, module, dense, data=data, keep=keep)


def load(
    root: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
) -> zero.Loaded:
    """Continues from what :func:`save` wrote, at any stage and number of replicas; collective.

    The experts must be divided over as many ranks as they were.

    Args:
        root: as of ``zero.load``.
        step: as of ``zero.load``.
        module: what :func:`ringcomm.moe.shard` returned.
        optimizer: on it, or None to load the module alone.

    Raises:
        CheckpointError: there is none of both parts, experts were divided over another number of
            ranks, or one part is damaged; nothing was changed.
        ArgumentError: as of ``zero.load``.
    """
    root = path_of(root, _LOAD, "root")
    parts = parts_of(module, _LOAD)
    dense, experts = _optimizers(optimizer, _LOAD)
    found = Checkpoints(_of_dense(root)).latest() if step is None else step
    with all_or_none(parts.everyone, _LOAD):
        if parts.experts is not None:
            _check_there(Path(root), parts, found)
    loading = None
    with all_or_none(parts.everyone, _LOAD):
        if parts.experts is not None:
            loading = check_load(_of_experts(root, parts), parts.experts, experts, step=found)
    of_dense = check_load(_of_dense(root), module, dense, step=found)
    if loading is not None:
        with all_or_none(parts.everyone, _LOAD):
            take_load(loading)
    return take_load(of_dense)


def _of_dense(root: str | os.PathLike[str]) -> Path:
    return Path(root) / "dense"


def _of_experts(root: str | os.PathLike[str], parts: Parts) -> Path:
    assert parts.group is not None
    return Path(root) / f"experts-{parts.group.rank:05d}-of-{parts.group.world_size:05d}"


def _optimizers(
    optimizer: Any, operation: str
) -> tuple[ShardedOptimizer | None, ShardedOptimizer | None]:
    if optimizer is None:
        return None, None
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"{operation}: optimizer: expected a moe.Optimizer or None, got a "
            f"{type(optimizer).__name__}"
        )
    return optimizer.dense, optimizer.experts


def _remove_cut_off(root: Path, parts: Parts) -> None:
    """Removes what only experts have; see NOTE [When a checkpoint of both is whole]."""
    assert parts.replicas is not None
    if parts.replicas.rank or not parts.writes:
        return
    whole, mine = Checkpoints(_of_dense(root)).steps(), Checkpoints(_of_experts(root, parts))
    for step in mine.steps():
        if step > max(whole, default=-1):
            mine.remove(step)


def _check_there(root: Path, parts: Parts, step: int | None) -> None:
    folder = _of_experts(root, parts)
    if step is None or step not in Checkpoints(folder).steps():
        others = sorted(each.name for each in root.glob("experts-*"))
        raise CheckpointError(
            f"{_LOAD}: {root}: expected a checkpoint of both parts, of step "
            f"{'any' if step is None else step} in dense and {folder.name}, found "
            f"{', '.join(others) or 'no experts'}; experts are loaded by as many ranks as they "
            "were divided over"
        )
