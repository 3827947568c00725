# SPDX-License-Identifier: Apache-2.0
"""Writes to 16-bit parameters in place: their masters follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.optim import AdamW, AdamWOptions, buckets
from ringcomm.optim.buckets import OutsideWrites
from tests.support.covering import covering

Tensor = torch.Tensor
# At stage 3 a module can be loaded only inside unsharded().
STAGES = [0, 1, 2]
BF16 = zero.ZeroOptions(precision=zero.Precision(param=torch.bfloat16), bucket_elems=512)


def _small() -> Any:
    return nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 4))


def _state() -> dict[str, Tensor]:
    # A generator of its own, because threads share torch's global one.
    generator = torch.Generator().manual_seed(5)
    shapes = {name: value.shape for name, value in _small().state_dict().items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _step(module: Any, optimizer: AdamW) -> None:
    module(torch.ones(2, 8)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _loaded(worlds, stage: int, steps_before: int, master: str = "fp32") -> dict[str, Tensor]:
    """Returns the parameters one step after a load; steps have a learning rate of 0."""

    def work(comm):
        module = zero.shard(_small(), stage, comm=comm, options=BF16)
        options = AdamWOptions(master=master)
        optimizer = AdamW(module.parameters(), lr=0.0, comm=comm, options=options)
        for _ in range(steps_before):
            _step(module, optimizer)
        module.load_state_dict(_state())
        _step(module, optimizer)
        return zero.full_state_dict(module)

    first, second = worlds(2).run(work)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


def _is_what_was_loaded(found: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value.bfloat16()) for name, value in _state().items())


@covering(strength=1, steps_before=[0, 1], stage=STAGES)
def test_a_step_keeps_what_was_loaded(worlds, steps_before, stage):
    assert _is_what_was_loaded(_loaded(worlds, stage, steps_before))


def test_a_first_step_with_remainders_keeps_what_was_loaded(worlds):
    assert _is_what_was_loaded(_loaded(worlds, 1, 0, "remainder"))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_without_following_it_would_be_undone(worlds, monkeypatch, steps_before):
    monkeypatch.setattr(buckets, "following", lambda master, params, compression: master)
    assert not _is_what_was_loaded(_loaded(worlds, 2, steps_before))


def _masters_after_one_write(worlds) -> tuple[Tensor, Tensor]:
    """Returns masters [8 x 96] in FP32 before and after a write to a parameter's element (3, 5)."""

    def work(comm):
        module: Any = zero.shard(_small(), 2, comm=comm, options=BF16)
        optimizer = AdamW(module.parameters(), lr=0.0, comm=comm)
        _step(module, optimizer)
        before = optimizer.full_state_dict()["master"][0]
        with torch.no_grad():
            module[0].weight[3, 5] = 7.0
        return before, optimizer.full_state_dict()["master"][0]

    found: tuple[Tensor, Tensor] = worlds(2).run(work)[0]
    return found


def _keeps_every_bit(before: Tensor, after: Tensor) -> bool:
    """True if masters have more than 16 bits, and only the written element changed."""
    wide = not torch.equal(before, before.bfloat16().float())
    before[3, 5] = 7.0
    return wide and torch.equal(before, after)


def test_what_was_not_written_keeps_every_bit(worlds):
    assert _keeps_every_bit(*_masters_after_one_write(worlds))


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (buckets, "following", lambda master, params, compression: params.to(master.dtype)),
        (OutsideWrites, "take_over", lambda written: None),
    ],
    ids=["all rounded", "none taken over"],
)
def test_masters_that_do_not_follow_just_so_are_told(worlds, monkeypatch, where, name, mutant):
    monkeypatch.setattr(where, name, mutant)
    assert not _keeps_every_bit(*_masters_after_one_write(worlds))


@pytest.mark.parametrize("module_first", [False, True])
def test_a_state_that_is_loaded_has_the_last_word(module_first):
    """A module and its optimizer may be loaded in either order: masters return with every bit."""
    module = zero.shard(_small(), 1, options=BF16)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    _step(module, optimizer)
    weights, state = module.state_dict(), optimizer.full_state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    masters = {index: value.clone() for index, value in state["master"].items()}
    _step(module, optimizer)
    loads = [
        lambda: module.load_state_dict(weights),
        lambda: optimizer.load_torch_state_dict(state),
    ]
    for load in loads if module_first else reversed(loads):
        load()
    found = optimizer.full_state_dict()["master"]
    assert all(torch.equal(found[index], masters[index]) for index in masters)
