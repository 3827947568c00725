# SPDX-License-Identifier: Apache-2.0
"""Updates in backward, for modules with several outputs, and for modules that run repeatedly.

An inner or second output gets its gradient after the parameters behind it were updated.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm import zero
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.zero.stages.engine import owner_of
from tests.support.covering import in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
WIDTH = 24


class Outputs(nn.Module):
    """Hidden states, auxiliary heads, a root parameter, and a weight that is used twice."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(block(x)) * self.scale

    def forward(self, x: Tensor) -> dict[str, Any]:
        x, hidden = self.embed(x), []
        for block in self.blocks:
            if self.checkpoints == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.checkpoints:
                x = checkpoint(self.run, block, x, use_reentrant=False)
            else:
                x = self.run(block, x)
            hidden.append(x)
        aux = [head(x) for head, x in zip(self.heads, hidden, strict=False)]
        return {"out": self.head(F.linear(x, self.embed.weight)), "hidden": hidden, "aux": aux}


class Recursive(nn.Module):
    """A module that calls itself; one level uses some parameters, all levels use others."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.levels = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if not depth:
            return self.norm(x)
        y = torch.tanh(self.levels[depth](x))
        if self.checkpoints:
            y = checkpoint(self, y, depth - 1, use_reentrant=False)
        else:
            y = self(y, depth - 1)
        return self.outer(y) + y if depth == 2 else self.norm(y) * 2


class Twice(nn.Module):
    """Units that call themselves, and that run twice per forward."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.units = nn.ModuleList(Recursive(checkpoints) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 1, 0):
            x = self.units[number](x)
        return self.head(x)


def batch(turn: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(turn)).requires_grad_()


def all_of(module: Any, turn: int = 0) -> Tensor:
    found = module(batch(turn))
    hidden, aux = found["hidden"], found["aux"]
    return found["out"].square().mean() + hidden[1].mean() + aux[0].square().mean()


def first_hidden(module: Any, turn: int = 0) -> Tensor:
    found = module(batch(turn))
    return found["hidden"][0].square().mean() + found["out"].mean()


def aux_alone(module: Any, turn: int = 0) -> Tensor:
    return module(batch(turn))["aux"][1].square().mean()


def only(module: Any, turn: int = 0) -> Tensor:
    return module(batch(turn)).square().mean()


def once(module: Any, loss: Callable[..., Tensor]) -> None:
    loss(module).backward()


def of_two_forwards(module: Any, loss: Callable[..., Tensor]) -> None:
    (loss(module) + loss(module, 1)).backward()


def retained(module: Any, loss: Callable[..., Tensor]) -> None:
    found = loss(module)
    with zero.no_sync(module):
        found.backward(retain_graph=True)
    found.backward()


MODULES: dict[str, tuple[Callable[[], nn.Module], list[Callable[..., Tensor]]]] = {
    "outputs": (Outputs, [all_of, first_hidden, aux_alone]),
    "checkpoints": (lambda: Outputs("plain"), [all_of, aux_alone]),
    "reentrant": (lambda: Outputs("reentrant"), [all_of, first_hidden]),
    "recursive": (Recursive, [only]),
    "recursive checkpoints": (lambda: Recursive(True), [only]),
    "twice": (Twice, [only]),
    "twice checkpoints": (lambda: Twice(True), [only]),
}


def trained(
    comm: Any, base: Any, stage: int, update: Any, backward: Any, loss: Any
) -> dict[str, Tensor]:
    options = zero.ZeroOptions(bucket_elems=512)
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
    optimizer = AdamW(module.parameters(), lr=1e-2, options=AdamWOptions(update=update))
    for _ in range(2):
        backward(module, loss)
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(module)


@pytest.mark.parametrize(
    "name",
    [
        *("outputs", "checkpoints", "reentrant", "recursive", "twice checkpoints"),
        *in_test_all("recursive checkpoints", "twice"),
    ],
)
def test_the_bits_are_those_of_updates_in_the_step(worlds, name):
    new, losses = MODULES[name]
    torch.manual_seed(0)
    base = new()
    ways = [(losses[0], of_two_forwards), (losses[-1], retained)]
    if name == "reentrant":
        ways = []  # a second forward adds more gradients later
    run = worlds(2).run
    for loss, backward in [*product(losses, [once]), *ways]:
        wanted = run(trained, base, 1, "in_step", backward, loss)[0]
        # Checkpoints at stage 2 are skipped: the stage unshards no parameter again in backward.
        for stage in (2, 3) if loss is losses[0] and "checkpoints" not in name else (3,):
            found = run(trained, base, stage, "in_backward", backward, loss)[0]
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_in_parts_are_refused(worlds, stage):
    """A reentrant checkpoint runs a separate backward, after which more gradients may follow."""

    class Reentrant(Recursive):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            if not depth:
                return self.norm(x)
            y = torch.tanh(self.levels[depth](x))
            return self.outer(checkpoint(self, y, depth - 1, use_reentrant=True)) + y

    refused = {
        2: "parameter outer.weight: linear needs its values, and a backward has updated it already",
        3: "outer.weight and others of its bucket are needed again, and a backward has updated",
    }

    def work(comm):
        options = zero.ZeroOptions(bucket_elems=512)
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        early = AdamWOptions(update="in_backward")
        optimizer = AdamW(module.parameters(), lr=1e-2, options=early)
        # In the first backward, buckets wait for the end, since their order is not known yet.
        only(module).backward()
        optimizer.step()
        # A parameter's second gradient would fill its bucket again, but a bucket is reduced once.
        engine = owner_of(next(module.parameters()))
        assert sorted(engine.reduction.order) == list(range(len(engine.reduction.buckets)))
        with pytest.raises(ArgumentError, match=refused[stage]):
            only(module).backward()
        with pytest.raises(RingcommError):
            optimizer.step()  # this ends the failed backward on all ranks

    base = Reentrant()
    worlds(2).run(work)
