"""SGD and Lion: torch's bits, in every world, dtype and form of a step; their states."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringcomm.errors import ArgumentError, CheckpointError, MismatchError
from ringcomm.optim import SGD, AdamW, AdamWOptions, Lion, reshard
from tests.optim.problems import (
    SMALL_BUCKETS,
    Problem,
    TorchLion,
    assert_same_state,
    go_on,
    started,
    train,
)
from tests.optim.test_adamw import SAME_LOOPS, in_groups, noise

Tensor = torch.Tensor
STEPS = 4
PROBLEMS = {
    "plain": Problem(torch_class=torch.optim.SGD, settings={"lr": 0.1, "weight_decay": 0.01}),
    "momentum": Problem(
        torch_class=torch.optim.SGD,
        settings={"lr": 0.1, "momentum": 0.9},
        groups=(
            {"dampening": 0.25},
            {"nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.0, "maximize": True},
        ),
    ),
    "Lion": Problem(
        torch_class=TorchLion,
        settings={"lr": 0.01},
        groups=({"weight_decay": 0.1}, {"betas": (0.3, 0.7), "maximize": True}),
    ),
}


def sometimes(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor | None:
    """Noise, and for one parameter nothing at first, so that its first step is a later one."""
    return None if index == 1 and step == 0 else noise(shape, index, step, rank)


@pytest.mark.skipif(not SAME_LOOPS, reason="torch's loops have other multiply-adds here")
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", PROBLEMS)
def test_steps_have_the_bits_of_torch(worlds, name, world):
    problem = replace(PROBLEMS[name], gradient=sometimes)
    theirs = problem.params()
    reference = problem.torch(theirs)
    for step in range(STEPS):
        problem.give_mean(theirs, step, world)
        reference.step()
    for params, full in worlds(world).run(train, problem, STEPS):
        assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))
        state = {
            index: {key: each for key, each in entry.items() if isinstance(each, Tensor)}
            for index, entry in reference.state_dict()["state"].items()
        }
        assert_same_state(
            {"state": full["state"]}, {"state": {k: v for k, v in state.items() if v}}
        )


@pytest.mark.parametrize("name", ["momentum", "Lion"])
def test_16_bit_parameters_are_the_rounded_masters_that_fp32_has(worlds, name):
    """The masters start from the rounded parameters, and take the same gradients."""
    problem = replace(PROBLEMS[name], dtype=torch.bfloat16)
    wide = [param.detach().float().requires_grad_() for param in problem.params()]
    reference = problem.torch(wide)
    for step in range(STEPS):
        problem.give_mean(wide, step, 2)
        reference.step()
    for options in (SMALL_BUCKETS, replace(SMALL_BUCKETS, check_finite=True)):
        for params, full in worlds(2).run(train, problem, STEPS, options):
            wanted, narrow = in_groups(problem, wide), in_groups(problem, params)
            for index, master in full["master"].items():
                if SAME_LOOPS:
                    assert torch.equal(master, wanted[index])
                assert torch.equal(narrow[index], master.bfloat16())


def test_without_momentum_there_is_no_state():
    _, optimizer = started(None, PROBLEMS["plain"])
    assert all(bucket.state.tensors() == {} for bucket in optimizer.sharded_step().buckets)
    assert optimizer.full_state_dict()["state"] == {}
    _, optimizer = started(None, PROBLEMS["momentum"])
    assert all(
        [*bucket.state.tensors()] == ["momentum_buffer"]
        for bucket in optimizer.sharded_step().buckets
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_states_go_on_in_another_world_and_in_torch(worlds, name):
    problem = PROBLEMS[name]

    def save(comm):
        params, optimizer = started(comm, problem)
        saved = copy.deepcopy(optimizer.state_dict())
        full = copy.deepcopy(optimizer.full_state_dict())
        values = [param.detach().clone() for param in params]
        go_on(optimizer, problem, params, 3, 2)
        return saved, full, values, [param.detach().clone() for param in params]

    results = worlds(3).run(save)
    _, full, values, wanted = results[0]

    def load(comm):
        for shards in ([each[0] for each in results], reshard([each[0] for each in results], 2)):
            params = [value.clone().requires_grad_() for value in values]
            optimizer = problem.ours(params, comm)
            optimizer.load_state_dict(shards if len(shards) == 3 else shards[comm.rank])
            go_on(optimizer, problem, params, 3, 2)
            assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))
        params = [value.clone().requires_grad_() for value in values]
        optimizer = problem.ours(params, comm)
        optimizer.load_torch_state_dict(full)
        go_on(optimizer, problem, params, 3, 2)
        assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))

    worlds(2).run(load)
    theirs = [value.clone().requires_grad_() for value in values]
    reference = problem.torch(theirs)
    reference.load_state_dict(copy.deepcopy(full))
    for step in (3, 4):
        problem.give(theirs, step, 0)
        reference.step()
    if SAME_LOOPS:
        assert all(torch.equal(a, b) for a, b in zip(theirs, wanted, strict=True))


def test_states_of_other_optimizers_are_refused():
    problem = replace(PROBLEMS["momentum"], groups=({},))
    params, optimizer = started(None, problem)
    before = [param.detach().clone() for param in params]
    adamw = AdamW(problem.params(), options=SMALL_BUCKETS)
    with pytest.raises(CheckpointError, match="expected the state of AdamW, got that of SGD"):
        adamw.load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="expected the state of SGD, got that of AdamW"):
        optimizer.load_state_dict(adamw.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    damaged = copy.deepcopy(optimizer.full_state_dict())
    del damaged["state"][0]["momentum_buffer"]
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        optimizer.load_torch_state_dict(damaged)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lr": (SGD, {"lr": -1.0}, "lr: expected a number >= 0"),
    "momentum": (SGD, {"momentum": -0.5}, "momentum: expected a number >= 0"),
    "dampening": (SGD, {"dampening": float("nan")}, "dampening: expected a number"),
    "nesterov": (SGD, {"nesterov": True}, "nesterov: expected a momentum"),
    "betas": (Lion, {"betas": (0.9, 1.0)}, "betas: expected numbers from 0 to below 1"),
    "weight decay": (Lion, {"weight_decay": -1.0}, "weight_decay: expected a number >= 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_hyper_parameters_are_refused(name):
    kind, settings, text = BAD[name]
    with pytest.raises(ArgumentError, match=f"param group 0: {text}"):
        kind([torch.zeros(3, requires_grad=True)], **settings)


def test_ranks_with_other_momenta_are_told_so(worlds):
    def work(comm):
        params = [torch.ones(5, requires_grad=True)]
        optimizer = SGD(params, momentum=0.5 + comm.rank, comm=comm)
        with pytest.raises(MismatchError, match="momentum"):
            optimizer.prepare()

    worlds(2).run(work)


def test_a_rank_with_sgd_and_one_with_lion_are_told_so(worlds):
    def work(comm):
        params = [torch.ones(5, requires_grad=True)]
        optimizer = (SGD if comm.rank else Lion)(params, lr=0.1, comm=comm)
        with pytest.raises(MismatchError, match=r"betas.* on rank 0 and .*momentum"):
            optimizer.prepare()

    worlds(2).run(work)


@pytest.mark.parametrize("name", ["momentum", "Lion"])
def test_stochastic_rounding_needs_no_masters(worlds, name):
    """As in AdamW a step below half an ulp is not lost; the draws are equal in any world."""
    problem = replace(PROBLEMS[name], dtype=torch.bfloat16)
    options = AdamWOptions(bucket_elems=1024, master="none", rounding="stochastic", seed=5)
    # One rank's gradients are not the mean of two: only equal ones can be compared.
    alone = replace(problem, gradient=lambda shape, index, step, rank: noise(shape, index, step, 0))
    results = [worlds(world).run(train, alone, STEPS, options)[0][0] for world in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
