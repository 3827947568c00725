"""A sharded module and its optimizer for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ringcomm.errors import CheckpointError
from ringcomm.optim.sharded_adam import ShardedAdam
from ringcomm.zero import contents
from ringcomm.zero.checkpoint import FlatShard
from ringcomm.zero.checkpoint.plain_json import decode, encode
from ringcomm.zero.extra_state import (
    ExtraState,
    read_extra_state,
    save_extra_state,
    set_extra_state,
)
from ringcomm.zero.facts import check_names, check_optimizer, describe, take_optimizer
from ringcomm.zero.sharding import engine_of


class TrainState:
    """What ``torch.distributed.checkpoint`` calls a Stateful, at any stage and in any world.

    It needs a process group of torch, of any backend, with the ranks of the module's communicator::

        state = {"train": zero.TrainState(module, optimizer)}
        dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
        dcp.load(state, storage_reader=StorageReader(path), planner=LoadPlanner())

    with the classes of ``ringcomm.zero.checkpoint``, which need no pickle; torch's own work, too.
    torch loads tensors in place, one by one: a load that fails leaves a mixture, so load again.
    ``save()`` and ``load()`` are all or nothing, and take generators and buffers of ranks along.

    Args:
        module: what ``shard()`` returned.
        optimizer: on its parameters, or None.

    Raises:
        ArgumentError: the module is not sharded, or the optimizer is another's.
    """

    def __init__(self, module: nn.Module, optimizer: ShardedAdam | None = None) -> None:
        self._engine = engine_of(module, "TrainState")
        with torch.no_grad():
            self._step = contents.step_of(self._engine, optimizer, "TrainState")

    def state_dict(self) -> dict[str, Any]:
        """By name, what this rank has of each flat tensor, to be saved or loaded in place.

        "facts" is the rest, as JSON; buffers of parameters' modules are whole tensors, and so are
        those of modules' extra state, the rest of which is "extra".
        """
        engine, step = self._engine, self._step
        engine.free_for_step()
        parts = [*contents.param_parts(engine, True), *contents.loose_parts(engine, True)]
        if step is not None:
            step.refuse_if_torn("state_dict")
            parts += contents.state_parts(engine, step, True)
        shards = {
            part.name: FlatShard(part.elems, part.begin, part.local, part.shape) for part in parts
        }
        buffers = contents.buffers_of(engine.parts.module)
        extra = save_extra_state(engine.parts.module, "TrainState.state_dict")
        # A checkpoint of modules without extra state has no such entry.
        told = {"extra": json.dumps(encode(extra.plain, "extra"))} if extra.plain else {}
        return {
            **shards,
            **{f"model.{name}": buffer.detach() for name, buffer in buffers.items()},
            **extra.tensors,
            **told,
            "facts": json.dumps(describe(engine, step)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what is no tensor; torch has loaded those in place.

        Raises:
            CheckpointError: it is of another model, or of an optimizer with other param groups.
        """
        engine, step = self._engine, self._step
        try:
            facts = json.loads(state["facts"])
            given = facts["optimizer"]
        except (KeyError, TypeError, ValueError) as error:
            raise _failed(f"is no checkpoint of a TrainState: {error!r}") from error
        check_names(engine, facts, _failed)
        for bucket in engine.stored:
            bucket.wide = None
        if step is not None and given is None:
            raise _failed("was saved without an optimizer; load the module alone")
        extra = self._read_extra(state)
        if step is not None:
            take_optimizer(engine, step, facts, check_optimizer(engine, step, facts, _failed))
        else:
            engine.placement.refresh_masters()
        engine.comm.barrier()
        set_extra_state(engine.parts.module, extra, _failed)

    def _read_extra(self, state: Mapping[str, Any]) -> dict[str, Any]:
        try:
            plain = decode(json.loads(state["extra"])) if "extra" in state else {}
        except (TypeError, ValueError) as error:
            raise _failed(f"has extra state that is damaged: {error!r}") from error
        engine = self._engine
        saved = ExtraState(plain, dict(state))
        return read_extra_state(engine.parts.module, saved, engine.comm.device, _failed)


def _failed(text: str) -> CheckpointError:
    return CheckpointError(f"TrainState.load_state_dict: the checkpoint {text}")
