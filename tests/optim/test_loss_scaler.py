# SPDX-License-Identifier: Apache-2.0
"""The loss scale follows its options, stays on the device, and survives a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.optim.setting import LossScaleOptions, LossScaler

CLEAN, OVERFLOW = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)


def scales(options: LossScaleOptions, steps: str) -> list[float]:
    """Returns the scale after each step; "o" is an overflow."""
    scaler, seen = LossScaler(options), []
    for step in steps:
        scaler.update(OVERFLOW if step == "o" else CLEAN)
        seen.append(scaler.current.item())
    return seen


def test_it_starts_high_halves_on_overflow_and_doubles_after_2000_clean_steps():
    scaler = LossScaler()
    assert scaler.current.item() == 2.0**16
    scaler.update(OVERFLOW)
    assert scaler.current.item() == 2.0**15
    for _ in range(1999):
        scaler.update(CLEAN)
    assert scaler.current.item() == 2.0**15
    scaler.update(CLEAN)
    assert scaler.current.item() == 2.0**16
    for _ in range(1999):
        scaler.update(CLEAN)
    scaler.update(OVERFLOW)
    assert scaler.current.item() == 2.0**15


def test_an_overflow_starts_the_count_of_clean_steps_anew():
    options = LossScaleOptions(init_scale=8.0, growth_interval=3)
    assert scales(options, "..o.....") == [8, 8, 4, 4, 4, 8, 8, 8]


def test_hysteresis_lets_overflows_pass_until_its_credit_is_spent():
    options = LossScaleOptions(init_scale=8.0, growth_interval=2, hysteresis=3)
    # After the credit is spent, each overflow lowers the scale; growth restores the credit.
    assert scales(options, "ooooo") == [8, 8, 4, 2, 1]
    assert scales(options, "ooo..oo") == [8, 8, 4, 4, 8, 8, 8]
    assert scales(options, "o.o.o") == [8, 8, 8, 8, 4]


def test_it_keeps_within_its_bounds():
    options = LossScaleOptions(init_scale=4.0, growth_interval=1, min_scale=3.0, max_scale=10.0)
    assert scales(options, "...oooo") == [8, 10, 10, 5, 3, 3, 3]


def test_other_factors():
    options = LossScaleOptions(
        init_scale=100.0, growth_factor=3.0, backoff_factor=0.1, growth_interval=1
    )
    assert scales(options, ".o") == [300, 30]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_loss_is_scaled_in_float32_where_the_scale_has_room(dtype):
    scaler = LossScaler(LossScaleOptions(init_scale=2.0**15))
    loss = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    scaled = scaler.scale(loss)
    scaled.backward()
    assert scaled.dtype is torch.float32 and scaled.item() == 3 * 2.0**15
    assert loss.grad.item() == 2.0**15


def test_the_state_is_data_and_continues_exactly():
    options = LossScaleOptions(init_scale=8.0, growth_interval=4, hysteresis=2)
    steps = "o.o...o.....oo."
    for cut in range(len(steps)):
        first, second = LossScaler(options), LossScaler()
        for step in steps[:cut]:
            first.update(OVERFLOW if step == "o" else CLEAN)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for step in steps[cut:]:
            second.update(OVERFLOW if step == "o" else CLEAN)
        assert second.current.item() == scales(options, steps)[-1]
        assert second.options == options


@pytest.mark.parametrize(
    "change", [{"scale": "big"}, {"scale": -1.0}, {"clean_steps": -1}, {"options": {}}]
)
def test_a_damaged_state_is_refused_and_changes_nothing(change):
    scaler = LossScaler()
    scaler.update(OVERFLOW)
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match="expected the state of a LossScaler"):
        scaler.load_state_dict({**before, "scale": 4.0, **change})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth_factor", 0.5),
        ("backoff_factor", 0.0),
        ("backoff_factor", 1.5),
        ("growth_interval", 0),
        ("hysteresis", 0),
        ("min_scale", 0.0),
        ("max_scale", 0.5),
        ("init_scale", 2.0**40),
        ("init_scale", float("nan")),
    ],
)
def test_bad_options_are_refused(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        LossScaleOptions(**{name: value})


def test_it_belongs_to_one_optimizer():
    scaler, first, second = LossScaler(), torch.nn.Module(), torch.nn.Module()
    scaler.bind(first)
    scaler.bind(first)
    with pytest.raises(ArgumentError, match="belongs to another optimizer"):
        scaler.bind(second)
    del first
    scaler.bind(second)
