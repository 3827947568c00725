"""Clipping by value and of some parameters, which has the same bits at every stage."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW, GradScaler, LossScaleOptions, LossScaler, Muon, Sharded
from ringcomm.optim.muon import muon_groups
from tests.support.covering import covering
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model, text

Tensor = torch.Tensor
STAGES = [0, 1, 2, 3]
BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16, reduce=torch.bfloat16)


def adamw(module: Any, **settings: Any) -> Any:
    return AdamW(module.parameters(), lr=1e-2, **settings)


def momentum(module: Any, **settings: Any) -> Any:
    return Sharded(torch.optim.SGD, module.parameters(), lr=0.5, momentum=0.9, **settings)


def muon(module: Any, **settings: Any) -> Any:
    return Muon(muon_groups(module, ("embed.weight",)), lr=1e-2, **settings)


def clipped(comm, base, stage, make, precision=None, scaler=None):
    """Final parameters, and the norms on the way."""
    options = zero.ZeroOptions(
        bucket_elems=SMALL_BUCKET_ELEMS, precision=precision or zero.Precision()
    )
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
    settings = {"loss_scaler": scaler} if isinstance(scaler, LossScaler) else {}
    optimizer = make(module, **settings)
    norms = []
    for turn in range(3):
        loss = module(*text(comm, turn))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if isinstance(scaler, GradScaler):
            scaler.unscale_(optimizer)
        blocks = [list(block.parameters()) for block in module.blocks]
        norms.append(optimizer.clip_grad_norm_(0.005, params=blocks[0]).item())
        optimizer.clip_grad_value_(0.0003)
        norms.append(optimizer.clip_grad_norm_(0.0002, float("inf"), params=blocks[1]).item())
        norms.append(optimizer.clip_grad_norm_(0.001).item())
        optimizer.clip_grad_value_(0.00002, params=[module.embed.weight])
        if isinstance(scaler, GradScaler):
            scaler.step(optimizer)
            scaler.update()
        else:
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
    for stage in STAGES:
        for state, told in worlds(2).run(clipped, base, stage, make, precision):
            assert told == norms
            assert_same_bits(state, wanted)


@covering(strength=1, kind=[LossScaler, GradScaler], stage=STAGES)
def test_a_scaled_loss_is_clipped_as_one_that_is_not(worlds, stage, kind):
    """The scale is a power of two, and no gradient is so small that it would show."""
    base = new_model("gpt")
    plain = worlds(2).run(clipped, base, stage, adamw)
    make = (
        (lambda: GradScaler("cpu", init_scale=256.0))
        if kind is GradScaler
        else lambda: LossScaler(LossScaleOptions(init_scale=256.0))
    )

    def work(comm):
        return clipped(comm, base, stage, adamw, None, make())

    for (state, told), (wanted, norms) in zip(worlds(2).run(work), plain, strict=True):
        assert told == norms
        assert_same_bits(state, wanted)


def test_gradients_that_were_clipped_are_what_get_gradient_returns(worlds):
    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm)
        optimizer = adamw(module)
        optimizer.prepare()
        module(*text(comm, 0)).backward()
        weight = module.head.weight
        whole = zero.get_gradient(weight)
        assert whole is not None
        optimizer.clip_grad_value_(1e-4)
        found = zero.get_gradient(weight)
        assert found is not None and torch.equal(found, whole.clamp(-1e-4, 1e-4))
        assert not torch.equal(found, whole)

    base = new_model("gpt")
    for stage in STAGES:
        worlds(2).run(work, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_of_no_group_do_not_count(worlds, stage):
    """As with torch, whether they were frozen before shard() or after it."""

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
