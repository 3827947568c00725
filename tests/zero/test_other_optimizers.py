# SPDX-License-Identifier: Apache-2.0
"""Optimizers without support for sharding are refused at their first step; others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from ringcomm.optim import placement as placements
from ringcomm.zero.stages import optimizer
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [0, 3, *in_test_all(1, 2)]
REFUSED = (
    r"torch\.optim\.sgd\.SGD holds parameter 0\.weight .* "
    r"Use ringcomm\.optim\.AdamW or Adam, or ringcomm\.optim\.Sharded\(SGD, \.\.\.\)"
)


def small() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(module: nn.Module, rank: int) -> None:
    module(torch.full((2, 4), 1.0 + rank)).sum().backward()


@covering(strength=1, early={"after shard": False, "before shard": True}, stage=STAGES)
def test_an_optimizer_of_torchs_is_refused(worlds, early, stage):
    base = small()
    initial = {name: each.clone() for name, each in base.state_dict().items()}

    def work(comm):
        module: Any = small() if comm.rank else base
        reference = torch.optim.SGD(module.parameters(), lr=0.1)
        zero.shard(module, stage, comm=comm)
        if not early:
            reference = torch.optim.SGD(module.parameters(), lr=0.1)
        backward(module, comm.rank)
        with pytest.raises(ArgumentError, match=REFUSED):
            reference.step()
        assert_same_bits(zero.full_state_dict(module), initial)
        AdamW(module.parameters()).step()

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_without_the_check_gradients_refuse_it(worlds, monkeypatch, stage):
    """Without the optimizer's check, p.grad refuses; at stage 3 the parameters have no values."""

    def work(comm):
        module = zero.shard(small(), stage, comm=comm)
        backward(module, comm.rank)
        with pytest.raises(ArgumentError, match=r"parameter 0\.weight: "):
            torch.optim.SGD(module.parameters(), lr=0.1).step()

    monkeypatch.setattr(optimizer, "first_with_placement", lambda groups: None)
    worlds(2).run(work)


def test_parameters_of_other_modules_are_nobodys_business(worlds):
    def work(comm):
        module = zero.shard(small(), 3, comm=comm)
        adapter = nn.Linear(1, 1)
        reference = torch.optim.SGD(adapter.parameters(), lr=0.1)
        before = adapter.weight.detach().clone()
        adapter(module(torch.ones(2, 4))).sum().backward()
        # A stale entry, as if a sharded parameter had lived at this address.
        placements._ids.add(id(adapter.weight))
        reference.step()
        placements._ids.discard(id(adapter.weight))
        assert not torch.equal(adapter.weight, before)
        AdamW(module.parameters()).step()
        both = torch.optim.SGD([*adapter.parameters(), *module.parameters()], lr=0.1)
        with pytest.raises(ArgumentError, match=REFUSED):
            both.step()

    worlds(1).run(work)


class Wrapper(torch.optim.Optimizer):
    """An optimizer wrapper as libraries write them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.inner.step(closure)


def test_wrappers_are_what_they_wrap(worlds):
    def work(comm):
        module = zero.shard(small(), 2, comm=comm)
        wrapped = Wrapper(AdamW(module.parameters()))
        backward(module, comm.rank)
        wrapped.step()
        assert wrapped.steps == 1
        with pytest.raises(ArgumentError, match=r"Wrapper holds parameter 0\.weight"):
            Wrapper(torch.optim.SGD(module.parameters(), lr=0.1)).step()

    worlds(1).run(work)


def test_what_is_gone_is_not_looked_for(worlds):
    """After ``remove_sharding()``, or without the module, any optimizer may step the parameters."""

    def work(comm):
        module: Any = zero.shard(small(), 1, comm=comm)
        params = list(module.parameters())
        reference = torch.optim.SGD(params, lr=0.1)
        with pytest.raises(ArgumentError, match=REFUSED):
            reference.step()
        zero.remove_sharding(module)
        reference.step()
        zero.shard(module, 1, comm=comm)
        with pytest.raises(ArgumentError, match=REFUSED):
            reference.step()

    worlds(1).run(work)
