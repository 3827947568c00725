# SPDX-License-Identifier: Apache-2.0
"""The fused rules other than AdamW: torch's bits in every world, dtype and form; their states."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import ringcomm.optim.adamw
from ringcomm.errors import CheckpointError
from ringcomm.optim import Adam, AdamW, AdamW8bit
from ringcomm.optim.rules import FusedRule
from ringcomm.optim.sharded import ShardedOptimizer
from tests.comm.device import test_device_steps
from tests.optim import test_step_kernels
from tests.optim.problems import (
    OURS,
    SMALL_BUCKETS,
    Problem,
    TorchLion,
    assert_same_state,
    started,
    train,
)
from tests.optim.test_adamw import SAME_LOOPS, in_groups, noise
from tests.zero import test_precision

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
    """Returns noise, but no gradient for parameter 1 in the first step, so that it starts later."""
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
    """Masters start from the rounded parameters, and take the same gradients as FP32 parameters."""
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


# ---- lists of the fused rules in other tests are complete ---------------------------------------

FUSED = {
    each
    for each in vars(ringcomm.optim.adamw).values()
    if isinstance(each, type)
    and issubclass(each, ShardedOptimizer)
    and each.__module__ == ringcomm.optim.adamw.__name__
}


def classes(makers: Iterable[Any]) -> set[Any]:
    return {make.func if isinstance(make, partial) else make for make in makers}


def rules(base: type[FusedRule] = FusedRule) -> Iterator[type[FusedRule]]:
    """Yields the fused rules that an optimizer can use."""
    for each in base.__subclasses__():
        if not each.__abstractmethods__:
            yield each
        yield from rules(each)


def test_every_fused_optimizer_is_in_the_lists_of_the_tests():
    adam = {Adam, AdamW, AdamW8bit}  # tested in test_adamw.py and test_quantized_moments.py
    lists = {
        "OURS of tests/optim/problems.py": set(OURS.values()),
        "PROBLEMS of this file": {OURS[each.torch_class] for each in PROBLEMS.values()} | adam,
        "RULES of tests/comm/device/test_device_steps.py": classes(test_device_steps.RULES.values())
        | {Adam, AdamW},
        "OPTIMIZERS of tests/zero/test_precision.py": FUSED
        & classes(test_precision.OPTIMIZERS.values()),
    }
    for name, known in lists.items():
        assert known == FUSED, name
    kernels = {rule.name.lower() for rule in rules()}
    assert kernels <= test_step_kernels.RULES.keys(), "RULES of tests/optim/test_step_kernels.py"
