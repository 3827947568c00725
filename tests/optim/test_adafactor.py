"""Adafactor: torch's bits in every world, whose rows and columns all ranks have."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError, UnsupportedError
from ringcomm.optim import Adafactor, AdamW, reshard
from tests.optim.problems import SMALL_BUCKETS, assert_same_state, values
from tests.optim.test_adamw import SAME_LOOPS, noise

Tensor = torch.Tensor
STEPS = 3
# Matrices and others within one chunk, over several, and more of them than ranks.
SHAPES = ((40, 33), (7, 64), (33,), (), (16, 16), (5, 3, 2, 4), (96, 20), (1, 9), (700,))
# With such hyper-parameters all branches are taken.
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.02, "weight_decay": 0.1},
    {"lr": 0.5, "eps": (1e-6, 1e-2), "d": 1.5, "beta2_decay": -0.6, "maximize": True},
)


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(s, i).to(dtype).requires_grad_() for i, s in enumerate(SHAPES)]


def groups_of(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[index::2], **group} for index, group in enumerate(GROUPS)]


def give(params: list[Tensor], step: int, ranks: range) -> None:
    """The mean of noise of ranks; the second parameter has no gradient in the first step."""
    for index, param in enumerate(params):
        total = sum(noise(tuple(param.shape), index % 4, step, rank) for rank in ranks)
        param.grad = (total / len(ranks)).to(param.dtype)
    if step == 0:
        params[1].grad = None


def train(comm: Any, clips: bool = False) -> tuple[list[Tensor], Any]:
    params = parameters()
    optimizer = Adafactor(groups_of(params), comm=comm, options=SMALL_BUCKETS)
    for step in range(STEPS):
        give(params, step, range(comm.rank, comm.rank + 1))
        if clips:
            optimizer.clip_grad_norm_(1e30)
        optimizer.step()
    return [param.detach().clone() for param in params], optimizer.full_state_dict()


@pytest.mark.skipif(not SAME_LOOPS, reason="torch's loops have other multiply-adds here")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bits_are_those_of_torch(worlds, world):
    theirs = parameters()
    reference = torch.optim.Adafactor(groups_of(theirs))
    for step in range(STEPS):
        give(theirs, step, range(world))
        reference.step()
    wanted = reference.state_dict()["state"]
    for params, full in worlds(world).run(train):
        assert all(torch.equal(*pair) for pair in zip(params, theirs, strict=True))
        assert full["state"].keys() == wanted.keys()
        for index, state in wanted.items():
            assert full["state"][index].keys() == state.keys()
            assert all(torch.equal(full["state"][index][name], state[name]) for name in state)


def test_two_passes_give_the_bits_of_one(worlds):
    results = worlds(3).run(train), worlds(3).run(lambda comm: train(comm, clips=True))
    for (a, one), (b, two) in zip(*results, strict=True):
        assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))
        assert_same_state(one, two)


def test_bfloat16_parameters_are_the_rounded_masters(worlds):
    def work(comm):
        params = parameters(torch.bfloat16)
        optimizer = Adafactor(groups_of(params), comm=comm, options=SMALL_BUCKETS)
        wide = [param.detach().float().requires_grad_() for param in params]
        reference = torch.optim.Adafactor(groups_of(wide))
        for step in range(STEPS):
            give(params, step, range(1))
            optimizer.step()
            for mine, other in zip(params, wide, strict=True):
                other.grad = None if mine.grad is None else mine.grad.float()
            reference.step()
        masters = optimizer.full_state_dict()["master"]
        # Indices are in the groups' order.
        order = [*range(0, len(SHAPES), 2), *range(1, len(SHAPES), 2)]
        for index, place in enumerate(order):
            assert torch.equal(params[place], masters[index].bfloat16())
            if SAME_LOOPS:
                assert torch.equal(masters[index], wide[place])

    worlds(2).run(work)


def test_a_step_that_overflows_changes_nothing(worlds):
    def work(comm):
        params = parameters()
        options = replace(SMALL_BUCKETS, check_finite=True)
        optimizer = Adafactor(groups_of(params), comm=comm, options=options)
        give(params, 1, range(1))
        optimizer.step()
        before = [param.detach().clone() for param in params]
        state = copy.deepcopy(optimizer.full_state_dict())
        give(params, 2, range(1))
        if comm.rank == 1:
            assert params[2].grad is not None
            params[2].grad[3] = torch.inf
        optimizer.step()
        assert optimizer.skipped_steps == 1 and optimizer.steps_taken == 1
        assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
        assert_same_state(optimizer.full_state_dict(), state)

    worlds(2).run(work)


def test_states_go_on_in_another_world_and_in_torchs_format(worlds):
    def save(comm):
        params = parameters()
        optimizer = Adafactor(groups_of(params), comm=comm, options=SMALL_BUCKETS)
        for step in range(2):
            give(params, step, range(1))
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        full = copy.deepcopy(optimizer.full_state_dict())
        then = [param.detach().clone() for param in params]
        give(params, 2, range(1))
        optimizer.step()
        return saved, full, then, [param.detach().clone() for param in params]

    # A power of two, whose mean of equal gradients is that of one rank.
    results = worlds(4).run(save)
    shards = [each[0] for each in results]
    _, full, then, wanted = results[0]

    def load(comm):
        cut = reshard(shards, 2)[comm.rank]
        for given in (cut, shards, None):
            params = [value.clone().requires_grad_() for value in then]
            optimizer = Adafactor(groups_of(params), comm=comm, options=SMALL_BUCKETS)
            if given is None:
                optimizer.load_torch_state_dict(full)
            else:
                optimizer.load_state_dict(given)
            give(params, 2, range(1))
            optimizer.step()
            assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))
        damaged = copy.deepcopy(full)
        if comm.rank == 1:
            damaged["state"][0]["row_var"] = torch.ones(3)
        with pytest.raises(CheckpointError, match=r"row_var: expected floating-point of shape"):
            optimizer.load_torch_state_dict(damaged)
        short = copy.deepcopy(shards)
        del short[0]["state"]["whole"]
        with pytest.raises(CheckpointError, match=r"parameter 0: row_var: expected a tensor"):
            optimizer.load_state_dict(short)
        plain = [{"params": group["params"]} for group in groups_of(params)]
        other = AdamW(plain, comm=comm, options=SMALL_BUCKETS)
        with pytest.raises(CheckpointError, match="of AdamW, got that of Adafactor"):
            other.load_state_dict(shards)

    worlds(2).run(load)


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


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "decay": ({"beta2_decay": 0.5}, "beta2_decay: expected a number <= 0"),
    "clip": ({"d": 0.5}, "d: expected a number >= 1"),
    "eps": ({"eps": 1e-3}, "eps: expected two numbers >= 0, of which the first may be None"),
    "lr": ({"lr": -1.0}, "lr: expected a number >= 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    settings, text = BAD[name]
    with pytest.raises(ArgumentError, match=f"param group 0.*{text}"):
        Adafactor([torch.zeros(3, 3, requires_grad=True)], **settings)


@pytest.mark.parametrize(
    "change", [{"master": "remainder"}, {"master": "none", "rounding": "stochastic"}]
)
def test_options_that_it_has_not_are_refused(change):
    params = [torch.zeros(3, 3, requires_grad=True)]
    optimizer = Adafactor(params, options=replace(SMALL_BUCKETS, **change))
    with pytest.raises(UnsupportedError, match="Adafactor: expected"):
        optimizer.prepare()


def test_ranks_with_other_settings_are_told_so(worlds):
    def work(comm):
        params = [torch.ones(4, 4, requires_grad=True)]
        optimizer = Adafactor(params, d=1.0 + comm.rank, comm=comm)
        with pytest.raises(MismatchError, match=r"\"d\": 1\.0.* on rank 0 and"):
            optimizer.prepare()

    worlds(2).run(work)


def test_a_group_that_is_added_later_leaves_the_state_of_others(worlds):
    def work(comm):
        params = parameters()
        mine = Adafactor(params[:4], comm=comm, options=SMALL_BUCKETS)
        theirs = parameters()
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
