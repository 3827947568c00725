# SPDX-License-Identifier: Apache-2.0
"""``accumulate_dtype``: gradients of several backwards add up in FP32, at every stage."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW, AdamWOptions, GradScaler
from ringcomm.optim.dtensors import grad_of
from tests.support.covering import in_test_all
from tests.zero.job import BF16
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model, text

Tensor = torch.Tensor
FP32_SUMS = AdamWOptions(accumulate_dtype=torch.float32)
OPTIONS = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS, precision=BF16)


def gradients_of(module: Any, comm: Any, turn: int) -> list[Tensor]:
    """The BF16 gradients of one backward without any sharding, as FP32."""
    reference = deepcopy(module).to(torch.bfloat16)
    reference(*text(comm, turn)).backward()
    return [param.grad.float() for param in reference.parameters()]


def test_the_gradient_is_the_fp32_sum_of_each_backwards_16_bit_gradients(worlds):
    base = new_model("gpt")

    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=OPTIONS)
        optimizer = AdamW(module.parameters(), options=FP32_SUMS)
        optimizer.prepare()
        sums = [torch.zeros(param.shape) for param in base.parameters()]
        for turn in range(3):
            with zero.no_sync(module) if turn < 2 else nullcontext():
                module(*text(comm, turn)).backward()
            for total, grad in zip(sums, gradients_of(base, comm, turn), strict=True):
                total += grad
        assert all(grad_of(param) is None for param in module.parameters()) or stage < 2
        for total, param in zip(sums, dict(module.named_parameters()).values(), strict=True):
            comm.all_reduce(total, ringcomm.ReduceOp.AVG)
            assert torch.equal(zero.get_gradient(param), total)  # type: ignore[arg-type]

    for stage in (1, 3):
        worlds(2).run(work, stage)


def test_sums_are_forgotten_scaled_and_reduced_by_a_step_without_a_backward(worlds):
    """FP32 sums can be dropped, unscaled, clipped and reduced like gradients in ``p.grad``."""
    base = new_model("gpt")

    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=OPTIONS)
        optimizer = AdamW(module.parameters(), lr=1e-2, options=FP32_SUMS)
        scaler = GradScaler("cpu", init_scale=64.0)
        for forget in (optimizer.zero_grad, module.zero_grad if stage > 1 else optimizer.zero_grad):
            with zero.no_sync(module):
                (module(*text(comm, 9)) * 1e4).backward()
            forget()
        norms = []
        for turn in range(2):
            with zero.no_sync(module):
                for part in range(2):
                    scaler.scale(module(*text(comm, 2 * turn + part))).backward()
            scaler.unscale_(optimizer)
            norms.append(optimizer.clip_grad_norm_(0.1).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return zero.full_state_dict(module), norms

    wanted, norms = worlds(2).run(work, 1)[0]
    for stage in (2, 3, *in_test_all(0)):
        for state, told in worlds(2).run(work, stage):
            assert told == norms
            assert_same_bits(state, wanted)


def test_an_optimizer_that_comes_after_a_backward_is_told_so(worlds):
    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm)
        batch = torch.full((4, 13), 1.0 + comm.rank)
        module(batch).backward()
        with pytest.raises(ArgumentError, match="build the optimizer before the first backward"):
            AdamW(module.parameters(), options=FP32_SUMS)
        module.zero_grad()
        optimizer = AdamW(module.parameters(), options=FP32_SUMS)
        module(batch).backward()
        optimizer.step()

    base = new_model("mlp")
    for stage in (2, 3):
        worlds(2).run(work, stage)
