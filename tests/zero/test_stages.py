# SPDX-License-Identifier: Apache-2.0
"""Training at each stage equals torch's in one process; other orders of sums come close."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from tests.optim.problems import OURS, Problem
from tests.optim.test_adamw import SAME_LOOPS
from tests.optim.test_other_fused_rules import PROBLEMS
from tests.support.covering import covering
from tests.zero.models import Run, assert_same_bits, new_model, train_world

Tensor = torch.Tensor


class Fixed(nn.Module):
    """A loss whose gradients are small integers, for any parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(700)), nn.Parameter(torch.ones(9))])

    def forward(self, factors: Tensor) -> Tensor:
        return sum((part * factors[: part.numel()]).sum() for part in self.parts)


def _integers(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-3, 4, (700,), generator=generator).float()


RULES = {"AdamW": Problem(settings={"lr": 1e-2}), **PROBLEMS}


@covering(rule=[*RULES], stage=[0, 1, 2, 3], world_size=[1, 2, 4])
def test_training_is_that_of_one_process_with_torch(worlds, rule, world_size, stage):
    """Gradients are exact, so only the update rounds: AdamW's by 1 ulp per step (docs/adamw.md).

    An error of 1 ulp stays as small in later steps: the update reads the parameter only for its
    decay, which is below 1. So after n steps the difference is at most n ulps of the largest
    magnitude on the way. Updates by other rules have torch's bits.
    """
    if rule != "AdamW" and not SAME_LOOPS:
        pytest.skip("torch's loops have other multiply-adds here")
    steps = 10
    problem = replace(RULES[rule], groups=RULES[rule].groups[:2])  # each of one parameter

    def work(comm):
        module: Any = zero.shard(Fixed(), stage, comm=comm)
        groups = problem.dealt([*module.parameters()])
        optimizer = OURS[problem.torch_class](groups, **problem.settings)
        for turn in range(steps):
            module(_integers(comm.rank, turn)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.unsharded(module):
            found = [param.detach().clone() for param in module.parameters()]
        zero.remove_sharding(module)
        return found

    reference = Fixed()
    optimizer = problem.torch([*reference.parameters()])
    for turn in range(steps):
        mean = sum(_integers(rank, turn) for rank in range(world_size)) / world_size
        reference(mean).backward()
        optimizer.step()
        optimizer.zero_grad()
    ulp = 2.0**-23 * 2  # parameters stay below 2
    for found in worlds(world_size).run(work):
        for mine, wanted in zip(found, reference.parameters(), strict=True):
            if rule != "AdamW":
                assert torch.equal(mine, wanted)
                continue
            assert wanted.abs().max() < 2
            assert (mine - wanted).abs().max() <= steps * ulp


def test_buckets_and_units_change_no_bits(worlds):
    """Holds for elementwise rules without norms; other rules depend on the layout of buckets."""
    wanted, _ = train_world(worlds(2), Run("narrow gpt", 0))
    layouts: list[tuple[int, Any, dict[str, Any]]] = [
        (2, None, {"bucket_elems": 1 << 20}),
        (2, (nn.Linear,), {}),
        (3, lambda name, module: name.endswith("mlp"), {}),
        (3, (nn.Linear, nn.Module), {"bucket_elems": 1 << 20}),
    ]
    for stage, units, options in layouts:
        found, _ = train_world(worlds(2), Run("narrow gpt", stage, units=units, options=options))
        assert_same_bits(found, wanted)


def test_the_models_are_what_they_claim():
    mlp = new_model("mlp")
    assert mlp.layers[4].weight is mlp.layers[2].weight
    assert not new_model("partial").frozen.weight.requires_grad
    assert new_model("conv").first.weight.is_contiguous(memory_format=torch.channels_last)
