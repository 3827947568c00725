# SPDX-License-Identifier: Apache-2.0
"""A frozen 8-bit base that the user's own module dequantizes, with trained adapters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from ringcomm.zero.stages.sharding import engine_of
from tests.support.covering import covering
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]


class Quantised(nn.Module):
    """A linear layer of 8-bit weights with one scale per row, and a low-rank addition."""

    zero: Tensor

    def __init__(self, dtype: torch.dtype, features: int = 24) -> None:
        super().__init__()
        values = torch.randn(features, features) * 20
        if dtype is torch.uint8:
            values = values.abs()
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.full((features, 1), 0.01), requires_grad=False)
        self.register_buffer("zero", torch.full((features, 1), 3.0))
        self.down, self.up = nn.Linear(features, 2, bias=False), nn.Linear(2, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.to(x.dtype) - self.zero.to(x.dtype)) * self.scale
        return torch.tanh(F.linear(x, weight) + self.up(self.down(x)))


def steps(model: Any, optimizer: AdamW, count: int) -> None:
    for turn in range(count):
        x = torch.linspace(-1, 1, 72).view(3, 24) + turn
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@covering(strength=1, dtype=DTYPES, cast=[None, torch.bfloat16])
def test_all_stages_end_with_the_same_bits(worlds, dtype, cast, tmp_path):
    """At stage 3 a rank keeps its share, 1 byte per parameter; other stages load the checkpoint."""
    base: Any = nn.Sequential(Quantised(dtype), Quantised(dtype))
    options = zero.ZeroOptions(precision=zero.Precision(param=cast))

    def work(comm, stage):
        model: Any = deepcopy(base)
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.float() + comm.rank)
        zero.shard(model, stage, comm=comm, options=options)
        optimizer = AdamW(trainable(model), lr=0.1)
        steps(model, optimizer, 2)
        zero.save(tmp_path / str(stage), 2, model, optimizer)
        if stage == 3:
            frozen = engine_of(model, "test").setup.stored_frozen
            kept: Any = [b for b in frozen if b.layout.dtype is dtype]
            assert sum(b.kept.nbytes for b in kept) * 2 == sum(b.layout.elems for b in kept) > 0
            with pytest.raises(ArgumentError, match=r"0\.weight: to needs its values"):
                next(model.parameters()).to(torch.float32)
        other = zero.shard(deepcopy(base), 3 - stage, comm=comm, options=options)
        loaded = AdamW(trainable(other), lr=0.1)
        zero.load(tmp_path / str(stage), other, loaded)
        for each, its in ((model, optimizer), (other, loaded)):
            steps(each, its, 1)
        state = zero.full_state_dict(model)
        found = zero.full_state_dict(other)
        assert state["0.weight"].dtype is dtype
        assert_same_bits(_as_bytes(found), _as_bytes(state))
        return state

    first = worlds(2).run(work, 0)[0]
    wanted = first["0.weight"].float()
    assert torch.equal(wanted, base[0].weight.float())
    for stage in (1, 3):
        for found in worlds(2).run(work, stage):
            assert_same_bits(_as_bytes(found), _as_bytes(first))


def _as_bytes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views 1-byte tensors as uint8, because torch does not compare float8."""
    return {n: t.view(torch.uint8) if t.element_size() == 1 else t for n, t in state.items()}


@covering(strength=1, stage=range(4), dtype=DTYPES)
def test_8_bits_are_written_in_unsharded(worlds, stage, dtype):
    def work(comm):
        model: Any = zero.shard(nn.Sequential(Quantised(dtype)), stage, comm=comm)
        with zero.unsharded(model, write_from=1), torch.no_grad():
            model[0].weight.copy_(torch.full((24, 24), 5.0 + comm.rank))
        assert bool((zero.full_state_dict(model)["0.weight"].float() == 6).all())
        zero.remove_sharding(model)
        assert model[0].weight.dtype is dtype and bool((model[0].weight.float() == 6).all())

    worlds(2).run(work)


def test_8_bits_that_are_to_be_trained():
    model: Any = nn.Sequential(Quantised(torch.float8_e4m3fn))
    model[0].weight.requires_grad_()
    for stage in (0, 3):
        with pytest.raises(ArgumentError, match=r"0\.weight: .*float8_e4m3fn, which no.*freeze it"):
            zero.shard(model, stage, comm="alone")


class Replacing(nn.Module):
    """Holds the values outside the parameter and assigns them in forward, as bitsandbytes does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = torch.randint(-9, 9, (8, 8), generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(values.to(torch.int8), requires_grad=False)
        self.values = self.weight.data

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.values
        return x @ (self.weight.float() * 0.1).t()


def test_a_forward_that_replaces_a_frozen_weight_by_equal_values(worlds):
    """Replacing by equal values has the same bits at all stages; other values are refused."""

    def work(comm, stage):
        module: Any = nn.Sequential(Replacing(comm.rank), deepcopy(last))
        zero.shard(module, stage, comm=comm)
        optimizer = AdamW(module[1].parameters(), lr=0.1, comm=comm)
        for _ in range(3):
            module(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = zero.full_state_dict(module)
        if stage == 3:
            own = module[0].values
            module[0].values = own + 1
            refused = r"0\.weight: its memory was replaced.*got torch\.int8 of shape \(8, 8\)"
            with pytest.raises(ArgumentError, match=refused), torch.no_grad():
                module(torch.ones(2, 8))
            module[0].values = own
            assert_same_bits(zero.full_state_dict(module), state)
        return state

    last = nn.Linear(8, 4)
    wanted = worlds(2).run(work, 0)[0]
    for stage in (2, 3):
        for state in worlds(2).run(work, stage):
            assert_same_bits(state, wanted)
