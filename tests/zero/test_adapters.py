# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on a frozen base, added before or after ``shard()``, and replaced."""

from __future__ import annotations

import gc
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
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [2, 3, *in_test_all(0, 1)]
SMALL = zero.ZeroOptions(bucket_elems=2048)


class LoRA(nn.Module):
    """A linear layer with a low-rank addition, as users write it, around another module's layer."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.adapter: Any = nn.Sequential(
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight, self.base.bias) + self.adapter(x)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        down, up = self.adapter
        self.base.weight += up.weight @ down.weight
        return self.base


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


torch.manual_seed(5)
BASE = nn.Sequential(Block(), Block(), nn.Linear(24, 1)).requires_grad_(False)
# One adapter per layer, so that models get the same values in any order of construction.
BLOCKS: Any = BASE[:2]
ADAPTERS = [[LoRA(layer).adapter for layer in (block.up, block.down)] for block in BLOCKS]


def put_in(model: Any, generation: int = 0) -> list[LoRA]:
    """Wraps both layers of each block in a LoRA layer."""
    made = []
    for block, adapters in zip(model[:2], ADAPTERS, strict=True):
        for name, adapter in zip(("up", "down"), adapters, strict=True):
            layer = LoRA(getattr(block, name))
            layer.adapter = deepcopy(adapter)
            with torch.no_grad():
                for param in layer.adapter.parameters():
                    param.add_(0.01 * generation)
            setattr(block, name, layer)
            made.append(layer)
    return made


def adapters_of(layers: list[LoRA]) -> nn.ModuleList:
    return nn.ModuleList(layer.adapter for layer in layers)


def steps(model: Any, optimizer: AdamW, count: int, shift: int = 0) -> None:
    """Trains on the same batches on all ranks, so that the mean gradient equals each rank's."""
    for turn in range(count):
        x = torch.linspace(-1, 1, 72).view(3, 24) + turn + shift
        model(x).square().mean().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def alone() -> dict[str, Tensor]:
    """Returns the state after two generations of adapters in one process; the first is merged."""
    model: Any = deepcopy(BASE)
    layers = put_in(model)
    adapters = adapters_of(layers)
    steps(model, AdamW(adapters.parameters(), lr=0.1, comm="alone"), 3)
    take_out(model, layers)
    layers = put_in(model, 1)
    steps(model, AdamW(adapters_of(layers).parameters(), lr=0.1, comm="alone"), 2)
    return dict(model.state_dict())


def take_out(model: Any, layers: list[LoRA]) -> None:
    merged = [layer.merge() for layer in layers]
    for number, block in enumerate(model[:2]):
        block.up, block.down = merged[2 * number : 2 * number + 2]


@covering(stage=STAGES, shards=[False, True])
def test_adapters_put_in_after_shard(worlds, stage, shards):
    """Adapters may be sharded separately or not at all; they are merged and replaced by others."""

    def trained(comm, model, generation, count):
        layers = put_in(model, generation)
        adapters = adapters_of(layers)
        if shards:
            zero.shard(adapters, stage, comm=comm)
        optimizer = AdamW(adapters.parameters(), lr=0.1, comm=comm)
        steps(model, optimizer, count)
        return layers, adapters

    def work(comm):
        model: Any = zero.shard(deepcopy(BASE), stage, comm=comm, options=SMALL)
        with pytest.raises(
            ArgumentError, match=r"base\.weight belongs to .* nn\.ModuleList of the ad"
        ):
            zero.shard(LoRA(model[0].up), stage, comm=comm)
        layers, adapters = trained(comm, model, 0, 3)
        with zero.unsharded(model, write_from=0):
            take_out(model, layers)
        if shards:
            zero.remove_sharding(adapters)
        del layers, adapters
        _, adapters = trained(comm, model, 1, 2)
        state = zero.full_state_dict(model)
        with zero.unsharded(model[0]):
            assert torch.equal(model[0].up.adapter[0].weight, state["0.up.adapter.0.weight"])
        zero.remove_sharding(model)
        if shards:
            zero.remove_sharding(adapters)
        assert_same_bits(dict(model.state_dict()), state)
        return state

    wanted = alone()
    for found in worlds(2).run(work):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_a_base_is_saved_with_its_adapters_or_without(worlds, stage, tmp_path):
    """Saved names are those that the modules have now; sharded adapters are saved separately."""

    def made(comm, shards):
        model: Any = zero.shard(deepcopy(BASE), stage, comm=comm)
        adapters = adapters_of(put_in(model))
        if shards:
            zero.shard(adapters, stage, comm=comm)
        return model, adapters, AdamW(adapters.parameters(), lr=0.1, comm=comm)

    def work(comm):
        for shards in (False, True):
            base, own = tmp_path / f"base-{shards}", tmp_path / f"own-{shards}"
            model, adapters, optimizer = made(comm, shards)
            steps(model, optimizer, 2)
            zero.save(base, 2, model)
            if shards:
                zero.save(own, 2, adapters, optimizer)
            other, its, loaded = made(comm, shards)
            zero.load(base, other)
            if shards:
                zero.load(own, its, loaded)
            else:
                loaded.load_state_dict(optimizer.state_dict())
            steps(model, optimizer, 2, shift=2)
            steps(other, loaded, 2, shift=2)
            assert_same_bits(zero.full_state_dict(other), zero.full_state_dict(model))

    worlds(2).run(work)
    with_adapters: Any = deepcopy(BASE)
    put_in(with_adapters)

    def load(comm):
        zero.load(tmp_path / "base-False", zero.shard(with_adapters, 0, comm=comm))

    worlds(1).run(load)


@pytest.mark.parametrize("stage", STAGES)
def test_shards_that_are_gone(worlds, stage):
    """A step after ``remove_sharding()`` is refused. Frozen parameters have no gradient bucket."""

    def work(comm):
        model: Any = deepcopy(BASE)
        layers = put_in(model)
        zero.shard(model, stage, comm=comm)
        optimizer = AdamW(model.parameters(), lr=0.1)
        steps(model, optimizer, 1)
        engine: Any = engine_of(model, "test")
        elems = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert elems == sum(each.end - each.begin for b in engine.stored for each in b.params)
        zero.remove_sharding(model)
        before = deepcopy(model.state_dict())
        model(torch.ones(1, 24)).sum().backward()
        with pytest.raises(
            ArgumentError, match=r"no longer sharded since remove_sharding\(\).* new optim"
        ):
            optimizer.step()
        assert_same_bits(dict(model.state_dict()), before)
        steps(model, AdamW(adapters_of(layers).parameters(), lr=0.1, comm=comm), 1)

    worlds(2).run(work)


def test_a_parameter_whose_module_is_gone(worlds):
    def work(comm):
        weight = next(zero.shard(nn.Linear(4, 4), 3, comm=comm).parameters())
        gc.collect()
        with pytest.raises(ArgumentError, match=r"weight: linear needs .* is gone on this rank"):
            F.linear(torch.ones(1, 4), weight)

    worlds(1).run(work)
