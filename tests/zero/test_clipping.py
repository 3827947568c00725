# SPDX-License-Identifier: Apache-2.0
"""Clipping by value, and of some parameters, gives the same bits at every stage."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW, Muon, Sharded
from ringcomm.optim.muon import muon_groups
from tests.support.covering import in_test_all
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model, text

Tensor = torch.Tensor
STAGES = [0, 3, *in_test_all(1, 2)]
BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16, reduce=torch.bfloat16)


def adamw(module: Any) -> Any:
    return AdamW(module.parameters(), lr=1e-2)


def momentum(module: Any) -> Any:
    return Sharded(torch.optim.SGD, module.parameters(), lr=0.5, momentum=0.9)


def muon(module: Any) -> Any:
    return Muon(muon_groups(module, ("embed.weight",)), lr=1e-2)


def clipped(comm, base, stage, make, precision=None):
    """Returns the final parameters, and the norms of each step."""
    options = zero.ZeroOptions(
        bucket_elems=SMALL_BUCKET_ELEMS, precision=precision or zero.Precision()
    )
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
    optimizer = make(module)
    norms = []
    for turn in range(3):
        module(*text(comm, turn)).backward()
        blocks = [list(block.parameters()) for block in module.blocks]
        norms.append(optimizer.clip_grad_norm_(0.005, params=blocks[0]).item())
        optimizer.clip_grad_value_(0.0003)
        norms.append(optimizer.clip_grad_norm_(0.0002, float("inf"), params=blocks[1]).item())
        norms.append(optimizer.clip_grad_norm_(0.001).item())
        optimizer.clip_grad_value_(0.00002, params=[module.embed.weight])
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(module), norms


@pytest.mark.parametrize(
    ("make", "precision"),
    [(adamw, BF16), (momentum, BF16), (muon, None)],
    ids=["adamw bf16", "momentum bf16", "muon fp32"],
)
def test_every_stage_clips_values_and_parts_alike(worlds, make, precision):
    base = new_model("gpt")
    (wanted, norms), _ = worlds(2).run(clipped, base, 1, make, precision)
    assert norms[0] > 0.005 and norms[1] == pytest.approx(0.0003, rel=1e-2)
    for stage in (0, 2, 3) if make is momentum else STAGES:
        for state, told in worlds(2).run(clipped, base, stage, make, precision):
            assert told == norms
            assert_same_bits(state, wanted)


def test_gradients_that_were_clipped_are_what_get_gradient_returns(worlds):
    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm)
        optimizer = adamw(module)
        optimizer.prepare()
        module(torch.ones(2, 13)).backward()
        weight = module.head.weight
        whole = zero.get_gradient(weight)
        assert whole is not None
        optimizer.clip_grad_value_(1e-4)
        found = zero.get_gradient(weight)
        assert found is not None and torch.equal(found, whole.clamp(-1e-4, 1e-4))
        assert not torch.equal(found, whole)

    base = new_model("mlp")
    for stage in (1, 2, 3):
        worlds(2).run(work, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_of_no_group_do_not_count(worlds, stage):
    """As in torch, frozen parameters do not count, whether frozen before or after shard()."""

    def work(comm, everything):
        module: Any = deepcopy(base)
        module.embed.requires_grad_(False)
        zero.shard(module, stage, comm=comm)
        module.blocks[0].requires_grad_(False)
        trained = [param for param in module.parameters() if param.requires_grad]
        optimizer = AdamW(trained, lr=1e-2)
        module(*text(comm, 0)).backward()
        params = module.parameters if everything else lambda: iter(trained)
        norm = optimizer.clip_grad_norm_(1e-3, params=params())
        optimizer.clip_grad_value_(1e-4, params=params())
        optimizer.step()
        late = list(module.blocks[0].requires_grad_().parameters())
        name, _ = next(module.blocks[0].named_parameters())
        said = rf"params: number 0: expected a parameter of this optimizer, got blocks\.0\.{name}, "
        for clip in (optimizer.clip_grad_norm_, optimizer.clip_grad_value_):
            with pytest.raises(ArgumentError, match=said):
                clip(1.0, params=late)
        return zero.full_state_dict(module), norm

    base = new_model("gpt")
    outcomes = zip(worlds(2).run(work, True), worlds(2).run(work, False), strict=True)
    for (state, norm), (wanted, alone) in outcomes:
        assert norm == alone > 1e-3
        assert_same_bits(state, wanted)
