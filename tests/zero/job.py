# SPDX-License-Identifier: Apache-2.0
"""A training run that uses every kind of state that a checkpoint must restore."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch

from ringcomm import zero
from ringcomm.optim import (
    AdamW,
    AdamWOptions,
    LossScaleOptions,
    LossScaler,
    Muon,
    Sharded,
    muon_groups,
)
from ringcomm.optim.sharded import ShardedOptimizer
from tests.zero.models import MODELS, SMALL_BUCKET_ELEMS, groups_of

BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16)


def by_two_algorithms(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns Muon's param groups, with AdamW for the embeddings."""
    names = [name for name, _ in module.named_parameters()]
    return muon_groups(module, adamw=[name for name in names if "embed" in name])


def whole_state(module: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Returns parameters, buffers, moments and masters, whole; collective."""
    full = optimizer.full_state_dict()
    moments = {
        f"{index}.{name}": torch.as_tensor(value)
        for index, state in full["state"].items()
        for name, value in state.items()
    }
    masters = {f"master.{index}": each for index, each in full.get("master", {}).items()}
    return {**zero.full_state_dict(module), **moments, **masters}


class Job:
    """A training run on one rank that uses every kind of state that a checkpoint must restore."""

    def __init__(self, comm, base, stage, precision=None, adamw=None, scaled=False, **settings):
        options = zero.ZeroOptions(
            bucket_elems=settings.pop("bucket_elems", SMALL_BUCKET_ELEMS),
            precision=precision or zero.Precision(),
            **settings.pop("zero_options", {}),
        )
        self.comm = comm
        self.module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        self.scaler = LossScaler(LossScaleOptions(init_scale=8.0)) if scaled else None
        kind = settings.pop("kind", None)
        own = kind is None or issubclass(kind, ShardedOptimizer)
        make: Any = (kind or AdamW) if own else partial(Sharded, kind)
        self.optimizer = make(
            by_two_algorithms(self.module) if kind is Muon else groups_of(self.module),
            lr=1e-2,
            options=adamw or AdamWOptions(),
            loss_scaler=self.scaler,
            **settings,
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.turn = 0

    def train(self, model: str, steps: int) -> None:
        for _ in range(steps):
            # Rank threads share torch's global generator, so each rank makes its own.
            generator = torch.Generator().manual_seed(97 * self.turn + self.comm.rank)
            loss = self.module(*MODELS[model][1](generator, self.turn))
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
                if self.turn == 1:
                    loss = loss * float("nan")
            loss.backward()
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.turn += 1

    def save(self, root) -> None:
        data = {"turn": self.turn, "schedule": self.schedule.state_dict()}
        zero.save(root, self.turn, self.module, self.optimizer, data=data)

    def load(self, root) -> zero.Loaded:
        loaded = zero.load(root, self.module, self.optimizer)
        self.turn = loaded.data["turn"]
        self.schedule.load_state_dict(loaded.data["schedule"])
        return loaded

    def state(self) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        rates = {f"lr.{i}": torch.tensor(group["lr"]) for i, group in enumerate(groups)}
        return {**whole_state(self.module, self.optimizer), **rates}
