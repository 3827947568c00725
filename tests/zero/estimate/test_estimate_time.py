"""Volumes, times and efficiencies, against the papers' formulas and figures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.errors import ArgumentError
from ringcomm.zero.estimate import STAGES, BytesPerElement
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.estimate_time import (
    StepTime,
    checkpoint_intensity,
    efficiency,
    params_intensity,
    state_intensity,
    step_flops,
    step_time,
    traffic,
)

# Of the machine of ZeRO-Infinity, section 4: 70 TFLOPS that a V100 reaches.
PEAK_TFLOPS = 70.0
BOOK = BytesPerElement.of(torch.float16, reduce=torch.float16)
POSITIVE = st.floats(1e-3, 1e6)


def test_volumes_of_the_paper():
    """2 P, 2 P, 2 P, 3 P elements (ZeRO, section 7)."""
    moved = [traffic(ModelElems(1000), stage, BOOK) for stage in STAGES]
    assert [each.volume_elems for each in moved] == [2000, 2000, 2000, 3000]
    assert [each.volume_bytes for each in moved] == [4000, 4000, 4000, 6000]


def test_a_rank_sends_all_but_its_own_chunk():
    moved = [traffic(ModelElems(1000), stage, BOOK) for stage in STAGES]
    assert [each.sent_elems(8) for each in moved] == [1750, 1750, 1750, 2625]
    assert [each.sent_bytes(8) for each in moved] == [3500, 3500, 3500, 5250]
    assert [each.sent_elems(1) for each in moved] == [0, 0, 0, 0]
    uneven = traffic(ModelElems(10), 1, BytesPerElement())
    assert uneven.sent_elems(4) == 2 * (10 - 2), "the rank whose chunk is smallest sends most"


def test_frozen_parameters_are_gathered_at_stage_3_only():
    model = ModelElems(1000, frozen=300)
    volumes = [traffic(model, stage, BytesPerElement()).volume_elems for stage in STAGES]
    assert volumes == [2000, 2000, 2000, 1000 + 2 * 1300]


def test_gradients_move_in_their_own_dtype_and_sums_in_theirs():
    """Only stage 0 moves sums."""
    model = ModelElems(100)
    narrow = BytesPerElement.of(torch.bfloat16, reduce=torch.float32)
    wide = BytesPerElement(param=2, grad=4)
    for each, sizes in ((narrow, [600, 400, 400, 600]), (wide, [800, 600, 600, 800])):
        assert [traffic(model, stage, each).volume_bytes for stage in STAGES] == sizes


def test_operations_of_a_step():
    assert step_flops(10**9, 2048, recompute=True) == 2 * 4 * 2048 * 10**9
    assert step_flops(10**9, 2048, recompute=False) == 2 * 3 * 2048 * 10**9


def test_intensities():
    assert params_intensity(2 * 1024) == 2048
    assert state_intensity(2 * 1024) == 512
    assert state_intensity(2 * 1024, recompute=False) == 384
    assert checkpoint_intensity(8192) == 24 * 8192
    assert checkpoint_intensity(8192, every=3) == 72 * 8192


def test_intensities_are_operations_over_bytes():
    params, layers, width, tokens, every = 12 * 6 * 64**2, 6, 64, 160, 2
    flops = step_flops(params, tokens, recompute=True)
    assert params_intensity(tokens) == flops / (2 * 4 * params)
    assert state_intensity(tokens) == flops / (2 * 16 * params)
    checkpoint_bytes = 2 * tokens * width * layers // every
    assert checkpoint_intensity(width, every) == flops / (2 * checkpoint_bytes)
    kept = step_flops(params, tokens, recompute=False)
    assert params_intensity(tokens) == kept / (2 * 3 * params)
    assert state_intensity(tokens, recompute=False) == kept / (2 * 16 * params)


@pytest.mark.parametrize(
    ("intensity", "gbps", "at_least"),
    [
        (params_intensity(1024), 70.0, 0.5),
        (state_intensity(1024), 4 * 70.0, 0.5),
        (state_intensity(2 * 1024), 1500.0, 0.9),
        (checkpoint_intensity(2048), 2.0, 0.5),
        (checkpoint_intensity(8192), 1.0, 0.5),
    ],
)
def test_bandwidths_that_zero_infinity_asks_for(intensity, gbps, at_least):
    """Section 4.2: sequences of 1024 tokens."""
    assert efficiency(intensity, gbps, PEAK_TFLOPS) > at_least
    if at_least == 0.9:
        assert efficiency(intensity, 0.8 * gbps, PEAK_TFLOPS) < at_least


def test_efficiency_by_hand():
    # 100 operations per byte at 10 GB/s feed 1 TFLOPS.
    assert efficiency(100.0, 10.0, 3.0) == 0.25
    assert efficiency(100.0, 10.0, 3.0, overlap=True) == 1 / 3
    assert efficiency(100.0, 10.0, 0.5, overlap=True) == 1.0


@given(st.integers(1, 10**12), st.integers(1, 10**12), POSITIVE, POSITIVE)
def test_a_steps_efficiency_is_that_of_its_intensity(flops, sent_bytes, gbps, peak_tflops):
    time = step_time(flops, sent_bytes, gbps, peak_tflops)
    intensity = flops / sent_bytes
    assert math.isclose(time.serial_efficiency, efficiency(intensity, gbps, peak_tflops))
    overlapped = efficiency(intensity, gbps, peak_tflops, overlap=True)
    assert math.isclose(time.overlapped_efficiency, overlapped)
    assert time.overlapped_s <= time.serial_s <= 2 * time.overlapped_s


def test_times_by_hand():
    time = step_time(6 * 10**12, 5 * 10**9, gbps=10.0, peak_tflops=3.0)
    assert time == StepTime(compute_s=2.0, communication_s=0.5)
    assert (time.serial_s, time.overlapped_s) == (2.5, 2.0)
    assert (time.serial_efficiency, time.overlapped_efficiency) == (0.8, 1.0)
    late = StepTime(compute_s=1.0, communication_s=4.0)
    assert (late.serial_efficiency, late.overlapped_efficiency) == (0.2, 0.25)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: step_time(1, 1, 0.0, 1.0), "expected bandwidth_gbps above 0 and finite, got 0.0"),
        (
            lambda: step_time(1, 1, 1.0, math.inf),
            "expected peak_tflops above 0 and finite, got inf",
        ),
        (lambda: efficiency(math.nan, 1.0, 1.0), "expected intensity above 0 and finite, got nan"),
        (lambda: step_flops(0, 5, True), "expected param_elems of at least 1, got 0"),
        (lambda: params_intensity(0), "expected tokens of at least 1, got 0"),
        (lambda: traffic(ModelElems(1), 5, BytesPerElement()), "stage: expected 0, 1, 2 or 3"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()
