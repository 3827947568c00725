"""A rank's shard of an optimizer, to a checkpoint and back, in this world or another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ringcomm.errors import CheckpointError
from ringcomm.optim import table
from ringcomm.optim.agreement import agreed_load
from ringcomm.optim.groups import check_groups, pack_groups, take_groups
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.sharded import ShardedStep
from ringcomm.optim.shards import ChunkTensors, SavedShards, Shard, describe_shard

Tensor = torch.Tensor
_LOAD = "load_state_dict"


def save(sharded: ShardedStep) -> dict[str, Any]:
    """This rank's shard as in :mod:`ringcomm.optim.shards`; its tensors are no copies."""
    sharded.refuse_if_torn("state_dict")
    sharded.written.take_over()
    control = sharded.table.control
    return {
        "state": {
            "step": sharded.table.step,
            "steps_taken": control[table.STEPS],
            "skipped_steps": control[table.SKIPPED],
            "buckets": [bucket.state.tensors() for bucket in sharded.buckets],
        },
        "param_groups": pack_groups(sharded.groups, sharded.layout),
        "shard": describe_shard(sharded.layout, *sharded.shard_of),
    }


def load(sharded: ShardedStep, shards: Sequence[Shard]) -> None:
    """Continues from one's own shard, or from all shards of any world.

    Raises:
        CheckpointError: nothing was changed.
    """
    setting = sharded.setting
    operation = setting.where(_LOAD)
    with agreed_load(setting.comm, operation) as agreement:
        saved = SavedShards(shards, operation)
        check_same_params(sharded.layout, saved.layout, operation)
        groups = check_groups(sharded.groups, saved.first.param_groups, setting.device, operation)
        tensors = _own(sharded, saved, operation)
        _check_kinds(sharded, tensors, operation)
        agreement.append([saved.first.step.tolist(), saved.first.scalars])
    take_state(sharded, tensors)
    take_groups(sharded.groups, groups)
    sharded.table.step.copy_(saved.first.step)
    sharded.table.control[table.STEPS].fill_(saved.first.scalars["steps_taken"])
    sharded.table.control[table.SKIPPED].fill_(saved.first.scalars["skipped_steps"])
    sharded.begin_anew()


def check_same_params(mine: ShardLayout, saved: ShardLayout, operation: str) -> None:
    """Raises CheckpointError unless both are of the same parameters; names do not matter."""
    if len(mine.params) != len(saved.params):
        raise CheckpointError(
            f"{operation}: expected the state of {len(mine.params)} parameters, got that of "
            f"{len(saved.params)}"
        )
    for index, (spec, given) in enumerate(zip(mine.params, saved.params, strict=True)):
        if replace(spec, name="") != replace(given, name=""):
            raise CheckpointError(
                f"{operation}: parameter {index}: expected the state of {spec}, got that of {given}"
            )


def _own(sharded: ShardedStep, saved: SavedShards, operation: str) -> ChunkTensors:
    """This rank's tensors: as they were saved, or cut from all shards."""
    rank, world_size = sharded.shard_of
    shard = saved.by_rank.get(rank)
    same_world = saved.world_size == world_size
    if same_world and shard is not None and saved.layout.buckets == sharded.layout.buckets:
        return shard.buckets
    if same_world and shard is None:
        raise CheckpointError(
            f"{operation}: expected the shard of this rank, or of all ranks, got those of "
            f"{sorted(saved.by_rank)}"
        )
    saved.require_all()
    return saved.cut(sharded.layout, rank, world_size)


def _check_kinds(sharded: ShardedStep, tensors: ChunkTensors, operation: str) -> None:
    for bucket, given in zip(sharded.buckets, tensors, strict=True):
        mine = {*bucket.state.tensors()} - {"max_exp_avg_sq"}
        theirs = {*given} - {"max_exp_avg_sq"}
        if mine != theirs:
            raise CheckpointError(
                f"{operation}: bucket {bucket.number}: expected the tensors {sorted(mine)}, which "
                f"master={sharded.setting.options.master!r} keeps, got {sorted(theirs)}; convert "
                "with full_state_dict() and load_torch_state_dict()"
            )


def take_state(sharded: ShardedStep, tensors: ChunkTensors) -> None:
    """Copies checked tensors into this rank's state."""
    for bucket, given in zip(sharded.buckets, tensors, strict=True):
        if "max_exp_avg_sq" in given:
            bucket.ensure_max()
        for name, tensor in bucket.state.tensors().items():
            if name in given:
                tensor.copy_(given[name])
            else:
                tensor.zero_()
    sharded.kernels.forget()
