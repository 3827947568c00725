# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` before and after ``shard()``, of the whole module and of its units."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.covering import in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=512)
# More specialisations of one function than Dynamo compiles before it gives up.
BLOCKS = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Graphs:
    """A backend that counts the graphs that it compiles, and returns them unchanged."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def base():
    torch._dynamo.reset()
    torch.manual_seed(5)
    yield Stack()
    torch._dynamo.reset()


def train(called: Any, module: nn.Module) -> dict[str, Tensor]:
    optimizer = AdamW(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        called(torch.randn(4, 8, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(module)


def uncompiled(world, base, stage) -> dict[str, Tensor]:
    module = zero.shard(deepcopy(base), stage, comm=world[0], options=SMALL)
    return train(module, module)


@pytest.mark.parametrize("stage", STAGES)
def test_a_compiled_module_is_sharded_as_the_module_in_it(worlds, base, stage, tmp_path):
    world = worlds(1)
    wanted = uncompiled(world, base, stage)
    inner = deepcopy(base)
    compiled: Any = torch.compile(inner, backend=Graphs())
    assert zero.shard(compiled, stage, comm=world[0], options=SMALL) is compiled
    assert_same_bits(train(compiled, compiled), wanted)
    assert_same_bits(zero.full_state_dict(inner), wanted)
    zero.save(tmp_path, 1, compiled)
    with zero.unsharded(compiled, write_from=0), torch.no_grad():
        inner.blocks[0].layer.weight.zero_()
    zero.load(tmp_path, compiled)
    assert_same_bits(zero.full_state_dict(compiled), wanted)
    with zero.no_sync(compiled):
        compiled(torch.ones(1, 8)).backward()
    assert all(param.grad is not None for param in inner.parameters())
    assert zero.remove_sharding(compiled) is compiled
    assert_same_bits(inner.state_dict(), wanted)


@pytest.mark.parametrize("stage", [2, *in_test_all(0, 1)])
def test_below_stage_3_the_whole_module_is_one_graph(worlds, base, stage):
    world, graphs = worlds(1), Graphs()
    wanted = uncompiled(world, base, stage)
    module = zero.shard(deepcopy(base), stage, comm=world[0], options=SMALL)
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    assert_same_bits(train(compiled, module), wanted)
    assert graphs.count == 1


def _units_before(module: Any, graphs: Graphs, shard: Any) -> Any:
    for number in range(BLOCKS):
        module.blocks[number] = torch.compile(module.blocks[number], backend=graphs, fullgraph=True)
    return shard(module)


def _units_in_place(module: Any, graphs: Graphs, shard: Any) -> Any:
    for block in module.blocks:
        block.compile(backend=graphs)
    return shard(module)


def _all_after(module: Any, graphs: Graphs, shard: Any) -> Any:
    return torch.compile(shard(module), backend=graphs)


@pytest.mark.parametrize("how", [_units_before, _units_in_place, _all_after])
@pytest.mark.usefixtures("base")
def test_at_stage_3_units_share_what_was_compiled(worlds, how):
    world, graphs, base = worlds(1), Graphs(), Stack(BLOCKS)
    wanted = uncompiled(world, base, 3)

    def shard(module: nn.Module) -> nn.Module:
        return zero.shard(module, 3, comm=world[0], options=SMALL)

    module = deepcopy(base)
    called = how(module, graphs, shard)
    found = train(called, module)
    assert_same_bits({k.replace("_orig_mod.", ""): v for k, v in found.items()}, wanted)
    # Two graphs: the first block's input requires no gradient, the other blocks' inputs do.
    assert graphs.count == 2


BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16)


# Each compilation takes seconds, so each stage tests one precision.
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (2, BF16),
        (3, zero.Precision()),
        *in_test_all((0, BF16), (1, zero.Precision()), (3, BF16)),
    ],
)
def test_whole_graphs_of_autograd_train_with_all_habits(worlds, base, stage, precision):
    """Forward and backward compile to one graph each; at stage 3, to one graph each per block."""

    def work(comm, stage, compiles):
        module: Any = deepcopy(base)
        graph: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
        if compiles and stage == 3:
            for block in module.blocks:
                block.compile(**graph)
        options = zero.ZeroOptions(bucket_elems=512, precision=precision)
        zero.shard(module, stage, comm=comm, options=options)
        called: Any = torch.compile(module, **graph) if compiles and stage < 3 else module
        sums = AdamWOptions(accumulate_dtype=torch.float32)
        optimizer = AdamW(module.parameters(), lr=1e-2, options=sums)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(2):
            with zero.no_sync(module):
                called(torch.randn(4, 8, generator=generator)).backward()
            called(torch.randn(4, 8, generator=generator)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.clip_grad_value_(0.01)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                called(torch.randn(4, 8, generator=generator))
        return zero.full_state_dict(module)

    wanted = worlds(2).run(work, 1, False)[0]
    for state in worlds(2).run(work, stage, True):
        assert_same_bits(state, wanted)


def test_one_graph_of_a_split_module_is_refused_with_the_way_out(worlds, base):
    module = zero.shard(base, 3, comm=worlds(1)[0], options=SMALL)
    compiled = torch.compile(module, backend=Graphs(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile\\(\\) before shard"):
        compiled(torch.ones(1, 8))


class Inward(nn.Module):
    """A backward inside the forward frees the unit, and the forward then reads its weight again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad((x @ self.weight).square().sum(), x)
        return grad @ self.weight


def test_a_weight_that_a_backward_in_the_forward_has_freed(worlds):
    torch.manual_seed(2)
    base = nn.Sequential(Inward(), Inward())
    x = torch.randn(3, 8)

    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm, options=SMALL)
        return module(x)

    assert torch.equal(worlds(1).run(work)[0], base(x))


def test_a_parameter_that_is_registered_while_the_others_are_here(worlds):
    def work(comm):
        module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4)), 3, comm=comm, options=SMALL)
        with zero.unsharded(module):
            module[0].register_parameter("extra", nn.Parameter(torch.ones(2)))
        assert sorted(module[0]._parameters) == ["bias", "extra", "weight"]
        assert torch.equal(module[0].extra, torch.ones(2))

    worlds(1).run(work)
