# SPDX-License-Identifier: Apache-2.0
"""State in torch's format: both ways with every bit, and the states that are refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from ringcomm.errors import CheckpointError
from tests.optim.problems import SMALL_BUCKETS, Problem, assert_same_state, go_on, started
from tests.support.covering import covering

Tensor = torch.Tensor
PROBLEMS = {
    "fp32": Problem(groups=({"lr": 0.1}, {"weight_decay": 0.5, "betas": (0.5, 0.75)})),
    "amsgrad": Problem(groups=({}, {"amsgrad": True})),
    "bf16": Problem(torch.bfloat16),
    "fp16": Problem(torch.float16),
}
REMAINDER = replace(SMALL_BUCKETS, master="remainder")
STEPS = 3


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["fp32", "amsgrad"])
def test_torchs_state_goes_both_ways_with_every_bit(worlds, name, world):
    """ringcomm, torch, ringcomm: the moments equal torch's after each change."""
    problem = PROBLEMS[name]

    def work(comm):
        params, optimizer = started(comm, problem)
        full = copy.deepcopy(optimizer.full_state_dict())
        theirs = [param.detach().clone().requires_grad_() for param in params]
        reference = problem.torch(theirs)
        reference.load_state_dict(full)
        assert_same_state({"state": reference.state_dict()["state"]}, {"state": full["state"]})
        for step in range(STEPS, 2 * STEPS):
            problem.give(theirs, step, 0)
            reference.step()
        back = [param.detach().clone().requires_grad_() for param in theirs]
        last = problem.ours(back, comm)
        last.load_torch_state_dict(copy.deepcopy(reference.state_dict()))
        assert_same_state(
            {"state": last.full_state_dict()["state"]}, {"state": reference.state_dict()["state"]}
        )
        mine = [{**group, "params": 0} for group in last.param_groups]
        assert mine == [{**group, "params": 0} for group in reference.param_groups]
        go_on(last, problem, back, 2 * STEPS, 1)
        problem.give(theirs, 2 * STEPS, 0)
        reference.step()
        for a, b in zip(back, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        return optimizer.full_state_dict(dst=0)

    results = worlds(world).run(work)
    assert all((full == {}) == (rank > 0) for rank, full in enumerate(results))


@covering(
    world=[1, 2],
    options={"master": SMALL_BUCKETS, "remainder": REMAINDER},
    target={"to master": SMALL_BUCKETS, "to remainder": REMAINDER},
)
def test_masters_move_between_the_ways_of_keeping_them(worlds, options, target, world):
    problem = PROBLEMS["bf16"]

    def work(comm):
        params, optimizer = started(comm, problem, options)
        full = copy.deepcopy(optimizer.full_state_dict())
        others = [param.detach().clone().requires_grad_() for param in params]
        second = problem.ours(others, comm, target)
        second.load_torch_state_dict(full)
        assert_same_state(second.full_state_dict(), full)
        go_on(optimizer, problem, params, STEPS, 1)
        go_on(second, problem, others, STEPS, 1)
        assert_same_state(second.full_state_dict(), optimizer.full_state_dict())

    worlds(world).run(work)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_without_masters_they_are_the_parameters(name):
    problem = PROBLEMS[name]
    params, optimizer = started(None, problem)
    full = copy.deepcopy(optimizer.full_state_dict())
    del full["master"]
    optimizer.load_torch_state_dict(full)
    for index, master in optimizer.full_state_dict()["master"].items():
        assert torch.equal(master, params[index].float())


TORCH_DAMAGES = {
    "no state": (lambda s: s.pop("state"), 'expected a dict with "state"'),
    "groups": (lambda s: s["param_groups"].pop(), "expected 2 param groups"),
    "moment": (lambda s: s["state"][1].pop("exp_avg"), "parameter 1: expected step, exp_avg"),
    "shape": (lambda s: s["state"][0].update(exp_avg=torch.zeros(2)), "parameter 0: exp_avg"),
    "kind": (
        lambda s: s["state"][0].update(exp_avg_sq=torch.zeros(3, 5).long()),
        "expected a float tensor",
    ),
    "step": (lambda s: s["state"][0].update(step=-1), "a step >= 0"),
    "amsgrad": (lambda s: s["param_groups"][0].update(amsgrad=True), "max_exp_avg_sq"),
    "eps": (lambda s: s["param_groups"][0].update(eps=-1.0), "param group 0: eps"),
}


@pytest.mark.parametrize("damage", TORCH_DAMAGES)
def test_a_damaged_torch_state_is_refused_and_changes_nothing(damage):
    problem = PROBLEMS["fp32"]
    _, optimizer = started(None, problem)
    before = copy.deepcopy(optimizer.full_state_dict())
    state = copy.deepcopy(before)
    change, message = TORCH_DAMAGES[damage]
    change(state)
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_torch_state_dict(state)
    assert_same_state(optimizer.full_state_dict(), before)


def test_missing_masters_are_refused():
    _, optimizer = started(None, PROBLEMS["bf16"])
    full = copy.deepcopy(optimizer.full_state_dict())
    del full["master"][4]
    with pytest.raises(CheckpointError, match="parameter 4: master"):
        optimizer.load_torch_state_dict(full)


def test_state_that_torch_has_not_made_yet_starts_at_zero():
    problem = PROBLEMS["fp32"]
    theirs = problem.params()
    reference = problem.torch(theirs)
    problem.give(theirs, 0, 0)
    theirs[1].grad = None
    reference.step()
    _, optimizer = started(None, problem)
    optimizer.load_torch_state_dict(reference.state_dict())
    # Index 4 is the first parameter of the second group; the first group has four.
    assert 4 not in optimizer.full_state_dict()["state"]
    assert optimizer.state_dict()["state"]["step"].tolist() == [1, 1, 1, 1, 0, 1, 1]
