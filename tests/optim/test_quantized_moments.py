# SPDX-License-Identifier: Apache-2.0
"""AdamW with 8-bit moments: the number format, and steps with the bits of a torch reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ringcomm.errors import CheckpointError
from ringcomm.optim import AdamW8bit, AdamWOptions
from ringcomm.optim.buckets import MOMENT_BLOCK, MOMENT_FORMATS, TO_NEAREST, random_bits
from ringcomm.optim.state import take_state
from tests.optim.problems import (
    SMALL_BUCKETS,
    Problem,
    assert_same_state,
    started,
    train,
    whole_gradient,
)
from tests.optim.test_adamw import noise
from tests.support.covering import covering

Tensor = torch.Tensor
STEPS = 4
#: Block exponents as stored: the smallest, some in between, and the largest finite one.
EXPONENTS = (0, 1, 90, 91, 218)
PROBLEM = Problem(
    torch_class=AdamW8bit,
    settings={"lr": 0.01},
    groups=(
        {"weight_decay": 0.1},
        {"betas": (0.4, 0.9), "maximize": True},
        {"eps": 1e-3, "lr": 0.1},
    ),
    gradient=noise,
    # Fewer elements than a block, some whole blocks, and parameters that cross chunks.
    shapes=((3, 5), (700,), (), (0, 4), (33, 40), (64,), (1,), (1500,)),
)


def blocks(numbers: Tensor) -> Tensor:
    """Returns numbers as [blocks, MOMENT_BLOCK], padded with zeros."""
    flat = numbers.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)


@pytest.mark.parametrize("moment", MOMENT_FORMATS)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_numbers_are_kept_whatever_bits_they_are_rounded_by(moment, exponent):
    """Dequantizing and quantizing again changes no state, at any exponent and any random bits."""
    moment_format = MOMENT_FORMATS[moment]
    # One block per pair of a value and a smaller value, so that the block exponents differ.
    largest = torch.arange(256, dtype=torch.uint8)
    values = torch.cat([largest[:, None], torch.arange(256).view(4, 64).repeat(64, 1)[:, 1:]], 1)
    values = values.to(torch.uint8)
    magnitude = 0x7F if moment_format.signed else 0xFF
    smaller = (values & magnitude) <= (largest & magnitude)[:, None]
    wide = moment_format.dequantize(
        torch.where(smaller, values, 0), torch.full((256,), exponent).byte()
    )
    assert wide.isfinite().all()
    for random in (0, TO_NEAREST, (1 << 20) - 1):
        again = moment_format.dequantize(*moment_format.quantize(wide, random))
        assert torch.equal(again.view(torch.int32), wide.view(torch.int32))


@pytest.mark.parametrize("moment", MOMENT_FORMATS)
def test_values_are_in_the_order_of_their_numbers_and_an_eighth_apart(moment):
    moment_format = MOMENT_FORMATS[moment]
    count = 128 if moment_format.signed else 256
    values = torch.arange(count, dtype=torch.uint8).view(-1, MOMENT_BLOCK)
    numbers = (
        moment_format.dequantize(values, torch.full((len(values),), 91).byte()).view(-1).double()
    )
    assert numbers[0] == 0.0 and numbers[-1] == 1.875
    steps = numbers.diff()
    assert (steps > 0).all()
    # The spacing at a normal number is between 1/16 and 1/8 of the number.
    normal = numbers[8:-1]
    assert (steps[8:] <= normal / 8).all() and (steps[8:] > normal / 16).all()
    assert torch.equal(steps[:8], steps[:1].expand(8)) and steps[0] == 2.0 ** -(
        moment_format.below + 3
    )


@pytest.mark.parametrize("moment", MOMENT_FORMATS)
def test_the_expectation_of_a_rounded_number_is_the_number(moment):
    """Over all random bits, the share rounded up is the number's position between neighbours."""
    moment_format = MOMENT_FORMATS[moment]
    generator = torch.Generator().manual_seed(3)
    random = torch.arange(1 << 20, dtype=torch.int32).view(-1, MOMENT_BLOCK)
    for number in (*torch.rand(3, generator=generator).tolist(), 2.0**-9, 3e-5):
        numbers = torch.full(random.shape, number)
        numbers[:, 0] = 1.0  # each block's largest element, which is left out below
        rounded = moment_format.dequantize(*moment_format.quantize(numbers, random))[:, 1:].double()
        low, high = rounded.min(), rounded.max()
        exact = torch.tensor(number, dtype=torch.float32).double()
        assert low <= exact <= high
        if high > low:
            share = (rounded == high).double().mean()
            assert abs(share - (exact - low) / (high - low)) < 1e-4


def test_a_second_moment_is_never_rounded_to_nothing():
    moment_format = MOMENT_FORMATS["exp_avg_sq"]
    numbers = torch.tensor([[1.0, 1e-30, 0.0, *[2e-12] * 61]])
    wide = moment_format.dequantize(*moment_format.quantize(numbers, 0))
    assert wide[0, 2] == 0.0 and (wide[0, [0, 1, 3]] > 0.0).all()
    assert (
        MOMENT_FORMATS["exp_avg"].dequantize(*MOMENT_FORMATS["exp_avg"].quantize(numbers, 0))[0, 3]
        == 0.0
    )


@pytest.mark.parametrize("moment", MOMENT_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.9 * 2.0**127])
def test_a_block_without_a_finite_exponent_is_not_a_number(moment, bad):
    moment_format = MOMENT_FORMATS[moment]
    numbers = torch.ones(2, MOMENT_BLOCK)
    numbers[0, 5] = bad
    wide = moment_format.dequantize(*moment_format.quantize(numbers))
    assert wide[0].isnan().all() and torch.equal(wide[1], numbers[1])


class Reference:
    """Trains with FP32 kernels and rounds the moments in torch after each step."""

    def __init__(self, problem: Problem, options: AdamWOptions) -> None:
        self.problem, self.seed = problem, options.seed
        self.params = problem.params()
        wide = replace(problem, torch_class=torch.optim.AdamW)
        self.optimizer = wide.ours(self.params, None, options)

    def step(self, step: int, world: int) -> None:
        self.problem.give_mean(self.params, step, world)
        self.optimizer.step()
        sharded = self.optimizer.sharded_step()
        tensors = []
        for bucket in sharded.buckets:
            for begin, end, param in bucket.layout.segments:
                taken = int(sharded.table.step[param])
                drawn = random_bits(self.seed, param, taken, end - begin)
                for (name, moment_format), random in zip(
                    MOMENT_FORMATS.items(), drawn, strict=True
                ):
                    own = bucket.state.moments[name][begin:end]
                    quantized = moment_format.quantize(blocks(own), blocks(random))
                    if self.params_active(step, param):
                        own.copy_(moment_format.dequantize(*quantized).view(-1)[: end - begin])
            tensors.append(bucket.state.tensors())
        take_state(sharded, tensors)

    def params_active(self, step: int, param: int) -> bool:
        """True if a parameter took the step; ``param`` is its position in the optimizer."""
        flat = [p for group in self.optimizer.param_groups for p in group["params"]]
        return flat[param].grad is not None


def sometimes(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor | None:
    """Returns noise whose scale varies in a block and falls by step; sometimes no gradient."""
    if index == 4 and step == 1:
        return None
    scale = torch.logspace(-6, 0, max(1, shape[-1] if shape else 1)) * 10.0 ** (-3 * step)
    return (noise(shape, index, step, rank) * (scale if shape else 1.0)).view(shape)


@cache
def wanted(name: str, world: int) -> tuple[list[Tensor], dict[str, Any]]:
    problem, options = FORMS[name]
    made = Reference(problem, options)
    for step in range(STEPS):
        made.step(step, world)
    return [p.detach().clone() for p in made.params], made.optimizer.full_state_dict()


# Gradients whose means are exact in 16 bits.
BF16 = replace(PROBLEM, dtype=torch.bfloat16, gradient=whole_gradient)
FORMS = {
    "one pass": (replace(PROBLEM, gradient=sometimes), SMALL_BUCKETS),
    "two passes": (PROBLEM, replace(SMALL_BUCKETS, check_finite=True, seed=2**40 + 3)),
    "bfloat16": (BF16, SMALL_BUCKETS),
    "remainder": (BF16, replace(SMALL_BUCKETS, master="remainder")),
    "stochastic": (BF16, replace(SMALL_BUCKETS, master="none", rounding="stochastic", seed=5)),
}


@covering(strength=1, name=[*FORMS], world=[1, 2, 3])
def test_steps_have_the_bits_of_the_reference_in_every_world(worlds, name, world):
    problem, options = FORMS[name]
    expected, full = wanted(name, world)
    for params, found in worlds(world).run(train, problem, STEPS, options):
        assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
        assert_same_state(
            {k: v for k, v in found.items() if k != "param_groups"},
            {k: v for k, v in full.items() if k != "param_groups"},
        )


def test_bits_do_not_depend_on_the_buckets():
    results = [
        train(None, PROBLEM, STEPS, AdamWOptions(bucket_elems=elems))[0] for elems in (512, 1 << 20)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_seed_decides_what_is_rounded_up():
    params = [train(None, PROBLEM, STEPS, AdamWOptions(seed=seed))[0] for seed in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*params[:2], strict=True))
    assert not torch.equal(params[0][-1], params[2][-1])


def test_a_gradient_that_is_not_finite_is_seen_in_its_block_alone():
    param = torch.ones(3 * MOMENT_BLOCK, requires_grad=True)
    optimizer = AdamW8bit([param])
    for bad in (float("inf"), 1.0):
        param.grad = torch.ones(3 * MOMENT_BLOCK)
        param.grad[MOMENT_BLOCK] = bad
        optimizer.step()
    found = param.detach().isnan()
    assert (
        found[MOMENT_BLOCK : 2 * MOMENT_BLOCK].all()
        and not found[:MOMENT_BLOCK].any()
        and not found[2 * MOMENT_BLOCK :].any()
    )


def test_the_state_takes_two_bytes_and_a_thirty_second():
    param = torch.zeros(1 << 16, requires_grad=True)
    optimizer = AdamW8bit([param])
    optimizer.prepare()
    (bucket,) = optimizer.sharded_step().buckets
    assert not bucket.state.moments and not bucket.state.masters()
    taken = sum(each.memory.nbytes for each in bucket.state.quantized.values())
    assert taken == 2 * (65536 + 65536 // MOMENT_BLOCK)


def test_adamw_goes_on_from_the_state_and_the_other_way_round():
    wide = replace(PROBLEM, torch_class=torch.optim.AdamW)
    _, quantized = started(None, PROBLEM)
    states = quantized.state_dict(), quantized.full_state_dict()
    for state, name in zip(states, ("load_state_dict", "load_torch_state_dict"), strict=True):
        other = wide.ours(wide.params(), None)
        getattr(other, name)(state)
        assert_same_state(
            {"state": other.full_state_dict()["state"]},
            {"state": quantized.full_state_dict()["state"]},
        )
    torch_adamw = torch.optim.AdamW(wide.dealt(wide.params()))
    torch_adamw.load_state_dict(quantized.full_state_dict())
    _, exact = started(None, wide)
    quantized.load_state_dict(exact.state_dict())
    for index, entry in quantized.full_state_dict()["state"].items():
        for name, moment_format in MOMENT_FORMATS.items():
            given = exact.full_state_dict()["state"][index][name].reshape(-1)
            rounded = moment_format.dequantize(*moment_format.quantize(blocks(given))).view(-1)[
                : len(given)
            ]
            assert torch.equal(entry[name].reshape(-1), rounded)
            # The error is at most half a spacing unless the block's largest number is much larger.
            near = blocks(given).abs() > blocks(given).abs().amax(1, keepdim=True) * 2.0**-13
            error = (blocks(rounded) - blocks(given)).abs()
            assert (error <= blocks(given).abs() / 16)[near].all()


def test_states_with_maxima_are_refused():
    wide = replace(PROBLEM, torch_class=torch.optim.AdamW, settings={"amsgrad": True})
    _, exact = started(None, wide)
    _, quantized = started(None, PROBLEM)
    before = copy.deepcopy(quantized.full_state_dict())
    for name, state in (
        ("load_state_dict", exact.state_dict()),
        ("load_torch_state_dict", exact.full_state_dict()),
    ):
        with pytest.raises(CheckpointError, match="amsgrad: expected False"):
            getattr(quantized, name)(state)
    assert_same_state(quantized.full_state_dict(), before)
