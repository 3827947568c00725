"""``TrainState``: a sharded module and its optimizer for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ringcomm.errors import CheckpointError
from ringcomm.json_reader import DAMAGE, decode, encode, in_words
from ringcomm.memory import normal_tensors
from ringcomm.module_names import KnownNames
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.checkpoint import module_state
from ringcomm.zero.checkpoint.module_state import (
    NAMES_IN_FACTS,
    SavedFacts,
    StatePart,
    check_names,
    check_optimizer,
    describe,
    renamed,
    take_optimizer,
)
from ringcomm.zero.checkpoint.optimizer_state import parts_to_load, state_parts
from ringcomm.zero.checkpoint.rank_data import (
    ExtraState,
    read_extra_state,
    save_extra_state,
    set_extra_state,
)
from ringcomm.zero.recoding import follow_coded, recode
from ringcomm.zero.sharding import engine_of

Tensor = torch.Tensor


class TrainState:
    """A Stateful of ``torch.distributed.checkpoint``, for any stage and any world.

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

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer | None = None) -> None:
        self._engine = engine_of(module, "TrainState")
        with normal_tensors():
            self._step = module_state.step_of(self._engine, optimizer, "TrainState")

    def __repr__(self) -> str:
        comm = self._engine.comm
        return f"<ringcomm.zero.TrainState of stage {self._engine.stage} on {comm!r}>"

    def state_dict(self) -> dict[str, Any]:
        """Returns by name this rank's part of each flat tensor, to be saved or loaded in place.

        "facts" is the rest, as JSON; buffers of parameters' modules are whole tensors, and so are
        those of modules' extra state, the rest of which is "extra".

        Raises:
            ArgumentError: inside ``gathered()`` or ``exchanged()``.
        """
        engine, step = self._engine, self._step
        engine.check_values("TrainState.state_dict")
        engine.free_for_change("TrainState.state_dict")
        params = module_state.copies_of_params(engine)
        parts = [*params, *module_state.loose_parts(engine, True)]
        if step is not None:
            step.refuse_if_torn("state_dict")
            parts += state_parts(engine, step, True)
        shards = {part.name: part.shard() for part in parts}
        buffers = module_state.buffers_of(engine.parts.module)
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

    @normal_tensors()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what is no tensor; torch has loaded those in place.

        Raises:
            CheckpointError: it is of another model, or of an optimizer with other param groups.
        """
        engine, step = self._engine, self._step
        try:
            told = json.loads(state["facts"])
        except DAMAGE as error:
            raise _failed(f"is no checkpoint of a TrainState: {in_words(error)}") from error
        known = KnownNames.of(engine.parts.module)
        SavedFacts.read(told, _failed)
        facts = SavedFacts.read(renamed(told, known, NAMES_IN_FACTS), _failed)
        check_names(engine, facts, _failed)
        groups = [] if step is None else check_optimizer(engine, step, facts, _failed)
        extra = self._read_extra(state)
        for bucket in engine.stored:
            if bucket.wire is None:
                bucket.wide = None
        engine.count_change()
        with engine.together("TrainState.load_state_dict"):
            if engine.parts.store is not None:
                _take(module_state.params_to_load(engine), state)
            if step is not None:
                self._take_copies(step, state)
                assert facts.optimizer is not None
                take_optimizer(engine, step, facts.optimizer, groups)
            else:
                follow_coded(engine)
                engine.placement.refresh_masters()
        engine.comm.barrier()
        recode(engine)
        set_extra_state(engine.parts.module, extra, _failed)

    def _take_copies(self, step: ShardedStep, state: Mapping[str, Any]) -> None:
        """Takes state of which torch has loaded copies: of 8 bits, or in another tier."""
        if step.rule.eight_bits or step.tier is not None:
            _take(parts_to_load(self._engine, step, step.groups), state)

    def _read_extra(self, state: Mapping[str, Any]) -> dict[str, Any]:
        try:
            plain = decode(json.loads(state["extra"])) if "extra" in state else {}
        except DAMAGE as error:
            raise _failed(f"has extra state that is damaged: {in_words(error)}") from error
        engine = self._engine
        if isinstance(plain, dict):
            known = KnownNames.of(engine.parts.module)
            plain = {known.find_module(name): each for name, each in plain.items()}
        saved = ExtraState(plain, dict(state))
        return read_extra_state(engine.parts.module, saved, engine.comm.device, _failed)


def _take(parts: Iterator[StatePart], state: Mapping[str, Any]) -> None:
    """Fills parts from the shards of a state that have their elements."""
    for part in parts:
        given = state[part.name]
        begin = part.begin - given.begin
        part.local.copy_(given.local[begin : begin + part.local.numel()])


def _failed(text: str) -> CheckpointError:
    return CheckpointError(f"TrainState.load_state_dict: the checkpoint {text}")
