# SPDX-License-Identifier: Apache-2.0
"""Learning rates equal those that DeepSpeed 0.19.6 sets on an AdamW of lr 2e-3, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcomm.errors import ArgumentError
from ringcomm.extras.migrate.settings import make_schedule
from ringcomm.optim import AdamW

# Numbers of steps taken; the rates below are those of the next step.
AT = (0, 1, 2, 5, 8, 12, 24)
CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 7}
# The scheduler, its parameters, and the rates at AT.
RATES: list[tuple[str, dict[str, Any], str]] = [
    (
        "WarmupLR",
        {"warmup_max_lr": 0.0003, "warmup_num_steps": 10},
        "0.0 0.0 9.030899869919434e-05 0.00020969100130080557 0.00027092699609758294 0.0003 0.0003",
    ),
    (
        "WarmupLR",
        {
            "warmup_min_lr": 1e-05,
            "warmup_max_lr": 0.0003,
            "warmup_num_steps": 7,
            "warmup_type": "linear",
        },
        "1e-05 1e-05 5.1428571428571415e-05 0.00017571428571428566 0.0003 0.0003 0.0003",
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 1},
        "0.0 0.0 0.002 0.002 0.002 0.002 0.002",
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 40, "warmup_num_steps": 10},
        "0.0 0.0 0.00030102999566398113 0.0006989700043360187 0.0009030899869919433 "
        "0.0009666666666666667 0.0005666666666666667",
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 40,
            "warmup_num_steps": 10,
            "warmup_type": "linear",
            "warmup_min_lr": 1e-05,
            "warmup_max_lr": 0.0003,
        },
        "1e-05 1e-05 3.9e-05 0.000126 0.00021299999999999995 0.0002903333333333333 "
        "0.0001743333333333333",
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 40, "warmup_num_steps": 10},
        "0.0 0.0 0.0006020599913279623 0.0013979400086720373 0.0018061799739838866 "
        "0.0019781497859737325 0.001104618010421327",
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 40,
            "warmup_num_steps": 10,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
        "0.0 0.0002 0.00038 0.0009200000000000001 0.00146 0.0019792402206971153 "
        "0.0011493020401042709",
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 5, "warmup_num_steps": 10},
        "0.0 0.0 0.0006020599913279623 0.0013979400086720373 0.0018061799739838866 "
        "2.0000000000000002e-07 2.0000000000000002e-07",
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 1e-05, "cycle_max_lr": 0.001, "cycle_first_step_size": 10},
        "1e-05 0.00010900000000000009 0.00020800000000000018 0.000505 "
        "0.0008019999999999999 0.0008019999999999999 1e-05",
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-05,
            "cycle_max_lr": 0.001,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 11,
            "decay_step_size": 3,
            "decay_lr_rate": 0.3,
        },
        "1e-05 0.00015142857142857148 0.000292857142857143 0.0007171428571428568 0.00091 "
        "0.0005500000000000002 6.25e-06",
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-05,
            "cycle_max_lr": 0.001,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 11,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 4,
        },
        "1e-05 1e-05 1e-05 0.00067 0.0007525 0.000505 1e-05",
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-05,
            "cycle_max_lr": 0.001,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 0,
        },
        "1e-05 0.00015142857142857137 0.0002928571428571428 0.0007171428571428573 1e-05 "
        "1e-05 1e-05",
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-05,
            "cycle_max_lr": 0.001,
            "cycle_first_step_size": 9,
            "cycle_first_stair_count": 3,
            "cycle_momentum": False,
        },
        "1e-05 1e-05 1e-05 0.00034 0.00067 0.00067 1e-05",
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 7},
        "0.001 0.0011428571428571427 0.0012857142857142856 0.0017142857142857144 "
        "0.002142857142857143 0.0027142857142857147 0.004428571428571429",
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_step_size": 7,
            "lr_range_test_step_rate": 2.5,
            "lr_range_test_staircase": True,
            "lr_range_test_min_lr": 0.0001,
        },
        "0.0001 0.0001 0.0001 0.0001 0.00035 0.00035 0.0008500000000000001",
    ),
]
MOMENTA = (
    0.8,
    0.8857142857142858,
    0.8714285714285714,
    0.8285714285714286,
    0.8090909090909091,
    0.8454545454545455,
    0.918,
)


def adamw(groups: int = 1) -> Any:
    """Makes an optimizer with param groups of one element, whose steps change nothing."""
    params = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(groups)]
    return AdamW(params, lr=2e-3, comm="alone")


def walk(kind: str, params: dict[str, Any]) -> list[tuple[float, float]]:
    """Returns the rates and first betas at AT."""
    optimizer = adamw()
    scheduler = make_schedule(kind, params).build(optimizer)
    (group,) = optimizer.param_groups
    found = []
    for t in range(AT[-1] + 1):
        if t in AT:
            found.append((group["lr"], group["betas"][0]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("kind", "params", "rates"), RATES)
def test_rates_are_deepspeeds(kind, params, rates):
    assert [rate for rate, _ in walk(kind, params)] == [float(each) for each in rates.split()]


def test_the_first_beta_goes_the_other_way():
    params = {**CYCLE, "cycle_second_step_size": 11, "decay_step_size": 3, "decay_mom_rate": 0.01}
    assert tuple(beta for _, beta in walk("OneCycle", params)) == MOMENTA
    still = walk("OneCycle", {**params, "cycle_momentum": False})
    assert {beta for _, beta in still} == {0.9}


def test_groups_have_rates_of_their_own():
    optimizer = adamw(2)
    params = {"warmup_max_lr": [1e-3, 3e-3], "warmup_num_steps": 2}
    scheduler = make_schedule("WarmupLR", params).build(optimizer)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 3e-3]
    with pytest.raises(ArgumentError, match="one for each of 1 param groups, got 2"):
        make_schedule("WarmupLR", params).build(adamw())


def test_a_scheduler_goes_on_from_its_state():
    params = {"total_num_steps": 20, "warmup_num_steps": 5}
    optimizer, other = adamw(), adamw()
    scheduler = make_schedule("WarmupCosineLR", params).build(optimizer)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    again = make_schedule("WarmupCosineLR", params).build(other)
    again.load_state_dict(scheduler.state_dict())
    for each, at in ((scheduler, optimizer), (again, other)):
        at.step()
        each.step()
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] > 0.0


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps: expected an integer >= 1, got 0"),
        ("WarmupLR", {"warmup_type": "cubic"}, "expected one of log, linear, got 'cubic'"),
        ("WarmupCosineLR", {"total_num_steps": 0}, "total_num_steps: expected a number >= 1"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "expected a number > 0, got 0"),
        ("OneCycle", {**CYCLE, "cycle_second_step_size": -1}, "expected a number >= 0, got -1"),
        ("OneCycle", {"cycle_min_lr": 1.0}, "OneCycle needs cycle_max_lr too"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "expected a number >= 1, got 0"),
        ("LRRangeTest", {"warmup_min_lr": 0}, "is no parameter of LRRangeTest, which has lr_range"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(kind, params, message):
    with pytest.raises(ArgumentError, match=message):
        make_schedule(kind, params)
