"""``save()``: a sharded module and its optimizer in a crash-safe checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import where
from ringcomm.optim.agreement import all_or_none, exchange
from ringcomm.optim.sharded import ShardedStep
from ringcomm.optim.sharded_adam import ShardedAdam
from ringcomm.zero import contents
from ringcomm.zero.checkpoint import Checkpoints, FlatShard
from ringcomm.zero.engine import Engine
from ringcomm.zero.extra_state import (
    ExtraState,
    modules_with_extra_state,
    save_extra_state,
)
from ringcomm.zero.facts import describe
from ringcomm.zero.random_state import save_generators
from ringcomm.zero.sharding import engine_of
from ringcomm.zero.units import aliases

Tensor = torch.Tensor


class CommRanks:
    """The ranks of a communicator, as checkpoints want them."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def world_size(self) -> int:
        return self._comm.world_size

    def exchange(self, mine: Any) -> list[Any]:
        return exchange(self._comm, mine)


def save(
    root: str | os.PathLike[str],
    step: int,
    module: nn.Module,
    optimizer: ShardedAdam | None = None,
    *,
    data: Any = None,
    keep: int | None = 2,
) -> Path:
    """Saves in ``root``/step-00000100 and so on; collective.

    Each rank writes its chunks, the same at every stage, so any stage and any world can load them.
    Killed at any moment, the checkpoints before are as they were. ``docs/checkpoint.md`` has the
    format: JSON and safetensors, no pickle.

    Args:
        root: the run's folder, which all ranks see.
        step: a number that grows from save to save.
        module: what ``shard()`` returned.
        optimizer: on its parameters; with its loss scaler.
        data: plain JSON data, equal on all ranks, such as ``scheduler.state_dict()``.
        keep: how many checkpoints stay, the latest ones; None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        ArgumentError: the module is not sharded, the optimizer is another's, or the step is not
            after those that are saved, or a parameter was replaced since ``shard()``.
        CheckpointError: a rank could not write; on all ranks.
        UnsupportedError: a module's extra state is neither plain data nor tensors, on any rank.
    """
    engine = engine_of(module, "save")
    with torch.no_grad():
        sharded = contents.step_of(engine, optimizer, "save")
        if sharded is not None:
            sharded.refuse_if_torn("save")
        engine.slots.check_all(engine.comm, "save")
        buffers = contents.buffers_of(engine.parts.module)
        extra = _extra_state(engine)
        tensors, generators = save_generators(engine.comm.device)
        own = {f"buffer.{name}": buffer.detach() for name, buffer in buffers.items()}
        checkpoints = Checkpoints(root, keep=keep, ranks=CommRanks(engine.comm))
        return checkpoints.save(
            step,
            shards_of(engine, sharded),
            data={
                "ringcomm": describe(engine, sharded),
                "tied": aliases(engine.parts.module),
                "user": data,
            },
            rank_data={"generators": generators, "extra": extra.plain},
            rank_tensors={**own, **tensors, **extra.tensors},
        )


def _extra_state(engine: Engine) -> ExtraState:
    module, comm = engine.parts.module, engine.comm
    if not modules_with_extra_state(module):
        return ExtraState({}, {})
    with all_or_none(comm, "save"):
        return save_extra_state(module, where("save", comm.rank, comm.world_size))


def shards_of(engine: Engine, step: ShardedStep | None) -> dict[str, FlatShard]:
    """What this rank saves, by name."""
    return {
        part.name: FlatShard(part.elems, part.begin, part.local, part.shape)
        for part in _parts(engine, step)
    }


def _parts(engine: Engine, step: ShardedStep | None) -> Iterator[contents.Part]:
    yield from contents.param_parts(engine, whole=False)
    yield from contents.loose_parts(engine, whole=False)
    for name, buffer in contents.buffers_of(engine.parts.module).items():
        flat = buffer.detach().contiguous().reshape(-1)
        local = flat if engine.comm.rank == 0 else flat[:0]
        yield contents.Part(f"model.{name}", flat.numel(), 0, local, tuple(buffer.shape))
    if step is not None:
        yield from contents.state_parts(engine, step, whole=False)
