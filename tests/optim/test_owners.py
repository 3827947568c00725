# SPDX-License-Identifier: Apache-2.0
"""Muon and Adafactor, which assign each parameter to a rank: torch's bits in every world."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.optim import Adafactor, AdamW, Muon, muon_groups, reshard
from ringcomm.optim.muon import cost_of, owners_of
from tests.optim.problems import SMALL_BUCKETS, assert_same_state, values
from tests.optim.test_adamw import SAME_LOOPS, noise
from tests.support.covering import covering

Tensor = torch.Tensor
STEPS = 3
# Tall, wide and square matrices, some across chunks of several buckets; and AdamW's parameters.
MATRICES = ((40, 33), (7, 64), (16, 16), (96, 20))
OTHERS = ((33,), (), (5, 3, 2), (12, 4))
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}
# These hyper-parameters reach all branches of Adafactor.
ADAFACTOR: tuple[dict[str, Any], ...] = (
    {"lr": 0.02, "weight_decay": 0.1},
    {"lr": 0.5, "eps": (1e-6, 1e-2), "d": 1.5, "beta2_decay": -0.6, "maximize": True},
)


def groups_of_muon(params: list[Tensor], **more: Any) -> list[dict[str, Any]]:
    count = len(MATRICES)
    return [
        {"params": params[: count - 1], **MUON, **more},
        {"params": params[count - 1 : count], **MUON, "nesterov": False, **more},
        {"params": params[count:], "algorithm": "adamw", **ADAMW},
    ]


def groups_of_adafactor(params: list[Tensor]) -> list[dict[str, Any]]:
    half = len(params) // 2
    first, second = ADAFACTOR
    return [{"params": params[:half], **first}, {"params": params[half:], **second}]


def muon_in_torch(params: list[Tensor], **more: Any) -> list[torch.optim.Optimizer]:
    muon, no_nesterov, adamw = groups_of_muon(params, **more)
    rest = {key: value for key, value in adamw.items() if key != "algorithm"}
    return [
        torch.optim.Muon([muon, no_nesterov], lr=1.0),
        torch.optim.AdamW([rest], foreach=False, fused=False),
    ]


def give(params: list[Tensor], step: int, ranks: range) -> None:
    """Sets the mean of ranks' noise; parameter 1 has no gradient in the first step."""
    for index, param in enumerate(params):
        total = sum(noise(tuple(param.shape), index % 4, step, rank) for rank in ranks)
        param.grad = (total / len(ranks)).to(param.dtype)
    if step == 0:
        params[1].grad = None


@dataclass(frozen=True)
class Kind:
    """An optimizer of ringcomm, and the optimizers of torch that it is compared with.

    Attributes:
        make: the optimizer's class.
        shapes: shapes of more parameters than ranks, within one chunk and across several.
        groups: function that returns param groups, in the order of the parameters.
        in_torch: function that returns optimizers of torch that together take the same steps.
        exact: how many parameters, from the first, have torch's bits.
    """

    make: Any
    shapes: tuple[tuple[int, ...], ...]
    groups: Callable[..., list[dict[str, Any]]]
    in_torch: Callable[..., list[torch.optim.Optimizer]]
    exact: int

    def parameters(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [values(s, i).to(dtype).requires_grad_() for i, s in enumerate(self.shapes)]

    def build(self, comm: Any, params: list[Tensor], options: Any = SMALL_BUCKETS) -> Any:
        return self.make(self.groups(params), comm=comm, options=options)

    def train(self, comm: Any, clips: bool = False, **more: Any) -> tuple[list[Tensor], Any]:
        params = self.parameters()
        optimizer = self.make(self.groups(params, **more), comm=comm, options=SMALL_BUCKETS)
        for step in range(STEPS):
            give(params, step, range(comm.rank, comm.rank + 1))
            if clips:
                optimizer.clip_grad_norm_(1e30)
            optimizer.step()
        return [param.detach().clone() for param in params], optimizer.full_state_dict()


SHAPES = ((40, 33), (7, 64), (33,), (), (16, 16), (5, 3, 2, 4), (96, 20), (1, 9), (700,))
KINDS = {
    "Muon": Kind(Muon, (*MATRICES, *OTHERS), groups_of_muon, muon_in_torch, len(MATRICES)),
    "Adafactor": Kind(
        Adafactor,
        SHAPES,
        groups_of_adafactor,
        lambda params: [torch.optim.Adafactor(groups_of_adafactor(params))],
        len(SHAPES),
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


# ---- promises of both optimizers ----------------------------------------------------------------


@pytest.mark.skipif(not SAME_LOOPS, reason="torch's loops have other multiply-adds here")
@covering(
    strength=1,
    how={
        "Muon": ("Muon", {}),
        "Muon as AdamW": ("Muon", {"adjust_lr_fn": "match_rms_adamw"}),
        "Adafactor": ("Adafactor", {}),
    },
    world=[1, 2, 3],
)
def test_bits_are_those_of_torch(worlds, how, world):
    name, more = how
    kind = KINDS[name]
    theirs = kind.parameters()
    references = kind.in_torch(theirs, **more)
    for step in range(STEPS):
        give(theirs, step, range(world))
        for each in references:
            each.step()
    wanted = references[0].state_dict()["state"]
    for params, full in worlds(world).run(lambda comm: kind.train(comm, **more)):
        for index, (mine, other) in enumerate(zip(params, theirs, strict=True)):
            if index < kind.exact:
                assert torch.equal(mine, other), index
            # AdamW itself is compared more closely in test_adamw.py.
            assert_close(mine, other, rtol=1e-5, atol=1e-6)
        for index, state in wanted.items():
            assert full["state"][index].keys() == state.keys()
            assert all(torch.equal(full["state"][index][name], state[name]) for name in state)


def test_two_passes_and_clipping_give_the_bits_of_one(worlds, kind):
    results = worlds(3).run(kind.train), worlds(3).run(lambda comm: kind.train(comm, clips=True))
    for (a, one), (b, two) in zip(*results, strict=True):
        assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))
        assert_same_state(one, two)


def test_bfloat16_parameters_are_the_rounded_masters(worlds, kind):
    def work(comm):
        params = kind.parameters(torch.bfloat16)
        optimizer = kind.build(comm, params)
        wide = [param.detach().float().requires_grad_() for param in params]
        references = kind.in_torch(wide)
        for step in range(STEPS):
            give(params, step, range(1))
            optimizer.step()
            for mine, other in zip(params, wide, strict=True):
                other.grad = None if mine.grad is None else mine.grad.float()
            for each in references:
                each.step()
        masters = optimizer.full_state_dict()["master"]
        for index, param in enumerate(params):
            assert torch.equal(param, masters[index].bfloat16())
            if SAME_LOOPS and index < kind.exact:
                assert torch.equal(masters[index], wide[index])

    worlds(2).run(work)


def test_a_step_that_overflows_changes_nothing(worlds, kind):
    def work(comm):
        params = kind.parameters()
        optimizer = kind.build(comm, params, replace(SMALL_BUCKETS, check_finite=True))
        give(params, 1, range(1))
        optimizer.step()
        before = [param.detach().clone() for param in params]
        state = copy.deepcopy(optimizer.full_state_dict())
        give(params, 2, range(1))
        if comm.rank == 1:
            grad = params[2].grad
            assert grad is not None
            grad.view(-1)[3] = torch.inf
        optimizer.step()
        assert optimizer.skipped_steps == 1 and optimizer.steps_taken == 1
        assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
        assert_same_state(optimizer.full_state_dict(), state)

    worlds(2).run(work)


def test_states_go_on_in_another_world_and_in_torchs_format(worlds, kind):
    def save(comm):
        params = kind.parameters()
        optimizer = kind.build(comm, params)
        for step in range(2):
            give(params, step, range(1))
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        full = copy.deepcopy(optimizer.full_state_dict())
        then = [param.detach().clone() for param in params]
        give(params, 2, range(1))
        optimizer.step()
        return saved, full, then, [param.detach().clone() for param in params]

    # Four ranks, because the mean of 2^n equal gradients is exactly one rank's gradient.
    results = worlds(4).run(save)
    shards = [each[0] for each in results]
    _, full, then, wanted = results[0]

    def load(comm):
        cut = reshard(shards, 2)[comm.rank]
        for given in (cut, shards, None):
            params = [value.clone().requires_grad_() for value in then]
            optimizer = kind.build(comm, params)
            if given is None:
                optimizer.load_torch_state_dict(full)
            else:
                optimizer.load_state_dict(given)
            give(params, 2, range(1))
            optimizer.step()
            assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))
        if kind.make is Adafactor:
            refuse_damaged_rows(comm, optimizer, full, shards)
        copies = kind.groups([value.clone().requires_grad_() for value in then])
        without_options = [{"params": group["params"]} for group in copies]
        other = AdamW(without_options, comm=comm, options=SMALL_BUCKETS)
        with pytest.raises(CheckpointError, match=f"of AdamW, got that of {kind.make.__name__}"):
            other.load_state_dict(shards)

    worlds(2).run(load)


def refuse_damaged_rows(comm: Any, optimizer: Adafactor, full: Any, shards: Any) -> None:
    damaged = copy.deepcopy(full)
    if comm.rank == 1:
        damaged["state"][0]["row_var"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"row_var: expected a float tensor of shape"):
        optimizer.load_torch_state_dict(damaged)
    short = copy.deepcopy(shards)
    del short[0]["state"]["whole"]
    with pytest.raises(CheckpointError, match=r"parameter 0: row_var: expected a tensor"):
        optimizer.load_state_dict(short)


@pytest.mark.parametrize(
    "change", [{"master": "remainder"}, {"master": "none", "rounding": "stochastic"}]
)
def test_options_that_it_has_not_are_refused(kind, change):
    params = [torch.zeros(3, 3, requires_grad=True)]
    optimizer = kind.make(params, options=replace(SMALL_BUCKETS, **change))
    with pytest.raises(UnsupportedError, match=f"{kind.make.__name__}: expected"):
        optimizer.prepare()


# ---- Muon ---------------------------------------------------------------------------------------


def test_state_is_kept_where_it_is_used():
    params = KINDS["Muon"].parameters()
    optimizer = Muon(groups_of_muon(params), options=replace(SMALL_BUCKETS, bucket_elems=512))
    give(params, 1, range(1))
    optimizer.step()
    for bucket in optimizer.sharded_step().buckets:
        matrices = [each.param < len(MATRICES) for each in bucket.layout.segments]
        wanted = {"momentum_buffer"} if any(matrices) else set()
        wanted |= set() if all(matrices) else {"exp_avg", "exp_avg_sq"}
        assert bucket.state.tensors().keys() == wanted


def test_owners_are_balanced_by_cost():
    shapes = [(64, 64)] * 4 + [(256, 64)] * 2 + [(1, 5)]
    costs = [cost_of(shape) for shape in shapes]
    assert costs[0] == 64 * 64 * 3 * 64 and cost_of((64, 256)) == costs[4]
    owners = owners_of(costs, 2)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(2)]
    assert abs(loads[0] - loads[1]) == costs[-1]
    assert owners_of(costs, 2) == owners
    assert owners_of([], 3) == []


def test_groups_of_a_module():
    module = nn.ModuleDict(
        {"embed": nn.Embedding(5, 4), "block": nn.Linear(4, 4), "head": nn.Linear(4, 5)}
    )
    muon, adamw = muon_groups(module, ("embed.weight", "head.*"), lr=3e-4)
    assert [id(each) for each in muon["params"]] == [id(module["block"].weight)]
    assert muon["algorithm"] == "muon" and adamw["algorithm"] == "adamw" and adamw["lr"] == 3e-4
    assert len(adamw["params"]) == 4
    Muon([muon, adamw]).prepare()
    with pytest.raises(ArgumentError, match="'heads' names no matrix"):
        muon_groups(module, ("heads",))
    module["embed"].requires_grad_(False)
    (_, without) = muon_groups(module, ("embed.weight", "head.*"))
    assert len(without["params"]) == 3


@pytest.mark.parametrize("sizes", [(512, 1 << 20), (1 << 20, 512)])
def test_a_state_fits_other_buckets(sizes):
    """Small buckets hold parameters of one algorithm only; large buckets hold those of both."""

    def made(elems: int) -> Muon:
        params = [torch.ones(shape, requires_grad=True) for shape in ((600,), (40, 33), (700,))]
        groups = [
            {"params": params[::2], "algorithm": "adamw"},
            {"params": params[1:2], "algorithm": "muon"},
        ]
        optimizer = Muon(groups, lr=0.1, options=replace(SMALL_BUCKETS, bucket_elems=elems))
        optimizer.prepare()
        for number, param in enumerate(params):
            param.grad = noise(tuple(param.shape), number, 0, 0)
        return optimizer

    trained, other = map(made, sizes)
    trained.step()
    wanted = trained.full_state_dict()
    other.load_state_dict(trained.state_dict())
    assert_same_state(other.full_state_dict(), wanted)


# ---- Adafactor ----------------------------------------------------------------------------------


def sharded(comm: Any, stage: int) -> tuple[nn.Module, Adafactor]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    zero.shard(module, stage, comm=comm, options=zero.ZeroOptions(bucket_elems=512))
    return module, Adafactor(module.parameters(), lr=0.1, weight_decay=0.1)


def steps(module: nn.Module, optimizer: Adafactor, first: int, count: int) -> dict[str, Tensor]:
    for step in range(first, first + count):
        module(values((4, 12), step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(module)


def test_checkpoints_of_a_sharded_module_and_its_state(worlds, tmp_path):
    def save(comm, stage):
        module, optimizer = sharded(comm, stage)
        steps(module, optimizer, 0, 2)
        zero.save(tmp_path / f"stage{stage}", 2, module, optimizer)
        return steps(module, optimizer, 2, 1)

    def load(comm, stage):
        module, optimizer = sharded(comm, 3 - stage)
        zero.load(tmp_path / f"stage{stage}", module, optimizer)
        weight: Any = dict(module.named_parameters())["0.weight"]
        rows = zero.get_state(weight, "row_var")
        assert rows is not None and rows.shape == (40, 1) and rows.gt(0).all()
        zero.set_state(weight, "row_var", 2 * rows)
        assert_close(zero.get_state(weight, "row_var", local=True), 2 * rows, rtol=0, atol=0)
        with pytest.raises(ArgumentError, match=r"expected a tensor of shape \(40, 1\), got \(40,"):
            zero.set_state(weight, "row_var", torch.ones(40, 12))
        with pytest.raises(ArgumentError, match=r"Adafactor keeps row_var, col_var, got 'exp_avg'"):
            zero.get_state(weight, "exp_avg")
        zero.set_state(weight, "row_var", rows)
        return steps(module, optimizer, 2, 1)

    for stage in (0, 3):
        wanted = worlds(4).run(save, stage)[0]
        for found in worlds(2).run(load, stage):
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_group_that_is_added_later_leaves_the_state_of_others(worlds):
    def work(comm):
        params = KINDS["Adafactor"].parameters()
        mine = Adafactor(params[:4], comm=comm, options=SMALL_BUCKETS)
        theirs = KINDS["Adafactor"].parameters()
        reference = torch.optim.Adafactor(theirs[:4])
        for step in range(1, STEPS + 1):
            if step == 2:
                mine.add_param_group({"params": params[4:]})
                reference.add_param_group({"params": theirs[4:]})
            for each in (params, theirs):
                give(each, step, range(1))
            mine.step()
            reference.step()
        for one, other in zip(params, theirs, strict=True):
            assert_close(one, other, rtol=1e-6, atol=1e-6)

    worlds(2).run(work)
