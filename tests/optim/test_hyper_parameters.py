# SPDX-License-Identifier: Apache-2.0
"""If hyper-parameters differ between ranks, the step raises before anything changes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.optim.rules import AdamWRule
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
# Wide enough that each of three ranks has a shard.
WIDTH = 64
BEFORE: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
CHANGES: dict[str, dict[str, Any]] = {
    "lr": {"lr": math.nextafter(1e-2, 1.0)},
    "lr as a tensor": {"lr": torch.tensor(2e-2)},
    "betas": {"betas": (0.9, 0.999)},
    "eps": {"eps": 1e-7},
    "weight_decay": {"weight_decay": 0.0},
    "maximize": {"maximize": True},
}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    weight, bias = module.parameters()
    return [{"params": [bias]}, {"params": [weight]}]


def backward(comm: Any, module: nn.Module, turn: int) -> None:
    module.zero_grad()
    module(torch.full((2, WIDTH), 1.0 + comm.rank + turn)).square().sum().backward()


def state_of(module: Any, optimizer: AdamW) -> dict[str, Tensor]:
    full = optimizer.full_state_dict()["state"]
    moments = {f"{i}.{key}": torch.as_tensor(v) for i in full for key, v in full[i].items()}
    return {**moments, **{name: each.detach().clone() for name, each in module.named_parameters()}}


def train(comm: Any, change: dict[str, Any], clips: bool, compared: bool = True) -> dict[str, Any]:
    module = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.5)
    options = AdamWOptions() if compared else AdamWOptions(unused="zero")
    optimizer = AdamW(groups_of(module), **BEFORE, comm=comm, options=options)
    for turn in range(3):
        backward(comm, module, turn)
        if turn == 1 and comm.rank == 2:
            optimizer.param_groups[1].update(change)
        if turn == 1 and change and compared:
            before = state_of(module, optimizer)
            match = r"Param group 1 is .* on rank 0 and .* on rank 2"
            with pytest.raises(MismatchError, match=match):
                optimizer.clip_grad_norm_(0.1) if clips else optimizer.step()
            assert_same_bits(state_of(module, optimizer), before)
            optimizer.param_groups[1].update({**BEFORE, "maximize": False})
        if clips:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    return state_of(module, optimizer)


@covering(strength=1, change=[*CHANGES], clips={"step": False, "clip": True})
def test_a_change_on_one_rank_is_refused_and_can_be_mended(worlds, change, clips):
    wanted = worlds(3).run(train, {}, clips)
    for mine, theirs in zip(worlds(3).run(train, CHANGES[change], clips), wanted, strict=True):
        assert_same_bits(mine, theirs)


def test_without_the_comparison_shards_are_stepped_differently(worlds):
    """Negative control: with ``unused="zero"`` no all-reduce can carry the comparison."""
    wanted = worlds(3).run(train, {}, False, False)[0]
    found = worlds(3).run(train, CHANGES["maximize"], False, False)[0]
    assert any(not torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("stage", [0, 2, 3, *in_test_all(1)])
def test_at_all_stages(worlds, stage):
    def work(comm):
        module: Any = zero.shard(nn.Linear(WIDTH, WIDTH), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for turn in range(3):
            backward(comm, module, turn)
            optimizer.param_groups[0]["lr"] = 0.1**turn
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2 * comm.rank
        backward(comm, module, 4)
        with pytest.raises(MismatchError, match=r'"lr": 0\.0,.* on rank 0 and .* on rank 1'):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        assert optimizer.steps_taken.item() == 4.0

    worlds(2).run(work)


def clip_by(bound: dict[str, Any], optimizer: Any) -> None:
    optimizer.clip_grad_norm_(**{"max_norm": 0.1, **bound})


# Rank 1's call in place of clip_grad_norm_(0.1), and the error that all ranks raise.
OTHER_CLIPS: dict[str, tuple[Any, type[Exception], str]] = {
    "max_norm": (partial(clip_by, {"max_norm": 0.2}), MismatchError, r"max_norm is 0\.1 .* 0\.2"),
    "norm_type": (partial(clip_by, {"norm_type": math.inf}), MismatchError, r"norm_type is \"l2\""),
    "none": (
        lambda optimizer: optimizer.step(),
        MismatchError,
        '_" on rank 0 and "optimizer.step"',
    ),
    "by value": (
        lambda optimizer: optimizer.clip_grad_value_(0.1),
        MismatchError,
        'call is "optimizer.clip_grad_norm_" on rank 0 and "optimizer.clip_grad_value_" on rank 1',
    ),
    "not a number": (partial(clip_by, {"max_norm": math.nan}), ArgumentError, "max_norm: expected"),
    "no norm": (partial(clip_by, {"norm_type": "x"}), ArgumentError, "norm_type: expected"),
}


@covering(
    strength=1,
    how=[0, 1, 2, 3, "unused", "written"],
    clip=[*OTHER_CLIPS],
    # A plain step does not wait for other ranks if no all-reduce would carry the digest.
    valid=lambda case: case.get("clip") != "none" or case.get("how") not in ("unused", "written"),
)
def test_another_bound_on_one_rank_is_refused(worlds, how, clip):
    def work(comm):
        options = AdamWOptions(unused="zero" if how == "unused" else "skip")
        stage = how if isinstance(how, int) else 1
        module: Any = zero.shard(nn.Linear(WIDTH, WIDTH), stage, comm=comm)
        optimizer = AdamW(module.parameters(), options=options)
        backward(comm, module, 0)
        if how == "written":
            optimizer.clip_grad_value_(1.0)
        before = zero.full_state_dict(module)
        other, kind, match = OTHER_CLIPS[clip]
        with pytest.raises(kind, match=match):
            other(optimizer) if comm.rank == 1 else optimizer.clip_grad_norm_(0.1)
        assert_same_bits(zero.full_state_dict(module), before)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        assert optimizer.steps_taken.item() == 1.0

    worlds(2).run(work)


@pytest.mark.parametrize("clips", [False, True], ids=["step", "clip"])
def test_a_bad_one_on_one_rank_is_refused_on_all(worlds, clips):
    def work(comm):
        module = nn.Linear(WIDTH, WIDTH)
        optimizer = AdamW(module.parameters(), comm=comm)
        for turn in range(2):
            backward(comm, module, turn)
            optimizer.param_groups[0]["betas"] = "x" if comm.rank * turn else (0.9, 0.99)
            if not turn:
                optimizer.step()
        with pytest.raises(ArgumentError, match="betas") as raised:
            optimizer.clip_grad_norm_(0.1) if clips else optimizer.step()
        assert ("rank 1 of 2 failed" in str(raised.value)) == (comm.rank == 0)
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        optimizer.step()
        assert optimizer.steps_taken.item() == 2.0

    worlds(2).run(work)


@covering(strength=1, stage=[0, 1, 2, 3], ranks={"one rank": 1, "all": 2})
def test_a_late_freeze_is_refused_on_all_ranks(worlds, stage, ranks):
    def work(comm):
        module: Any = zero.shard(nn.Linear(WIDTH, WIDTH), stage, comm=comm)
        optimizer = AdamW(module.parameters())
        backward(comm, module, 0)
        module.bias.requires_grad_(comm.rank >= ranks)
        with pytest.raises(ArgumentError, match="frozen after its gradient had come"):
            optimizer.step()
        module.bias.requires_grad_(True)
        optimizer.step()
        assert optimizer.steps_taken.item() == 1.0

    worlds(2).run(work)


def test_digests_differ_where_numbers_do():
    digest = AdamWRule().digest
    group = {**BEFORE, "amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
    changed = [{**group, **change} for change in CHANGES.values()]
    digests = {digest([group, each]) for each in (group, *changed)}
    assert len(digests) == len(CHANGES) + 1
    assert all(each.is_integer() and 0 <= each < 2**52 for each in digests)
    assert digest([group]) != digest([group, group])
    assert digest([group]) == digest([{**group, "lr": 0.01, "params": None}])
