# SPDX-License-Identifier: Apache-2.0
"""Loss scaling with torch's GradScaler, ringcomm's GradScaler and LossScaler; skipped steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaleOptions, LossScaler
from tests.optim.problems import SMALL_BUCKETS, values
from tests.support.covering import covering

Tensor = torch.Tensor
FP32_SUMS = AdamWOptions(accumulate_dtype=torch.float32)
START = LossScaleOptions(init_scale=1024.0, growth_interval=4)


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        values((700,), 1).to(dtype).requires_grad_(),
        values((30,), 2).to(dtype).requires_grad_(),
    ]


def loss_of(params: list[Tensor], step: int, rank: int = 0, overflows: bool = False) -> Tensor:
    """Returns a loss with whole-number gradients, or with infinite ones if ``overflows``."""
    factor = float("inf") if overflows else float(step % 3 + 1)
    return sum((param.float() * factor).sum() for param in params) * (rank + 1)  # type: ignore[return-value]


def all_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@covering(
    strength=1,
    world=[3, 1],
    options={"grads": SMALL_BUCKETS, "fp32 sums": FP32_SUMS},
    clip=[True, False],
)
def test_a_loss_scaler_skips_what_overflows_on_any_rank(worlds, world, options, clip):
    """A scaled step equals the step without a scaler, and every rank has the same scale."""

    def work(comm):
        params = weights()
        scaler = LossScaler(START)
        optimizer = AdamW(params, comm=comm, options=options, loss_scaler=scaler)
        seen = []
        for step in range(10):
            optimizer.zero_grad()
            overflows = step in (2, 3) and comm.rank == comm.world_size - 1
            scaler.scale(loss_of(params, step, 0, overflows)).backward()
            norm = optimizer.clip_grad_norm_(1e9) if clip else None
            optimizer.step()
            seen.append(scaler.current.item())
            if norm is not None and not step:
                assert norm.item() == pytest.approx(730**0.5)
        counts = optimizer.steps_taken.item(), optimizer.skipped_steps.item()
        return params, seen, counts, optimizer.full_state_dict()["state"][0]["step"].item()

    expected = weights()
    reference = AdamW(expected)
    for step in range(10):
        reference.zero_grad()
        if step not in (2, 3):
            loss_of(expected, step).backward()
            reference.step()
    for params, seen, counts, steps in worlds(world).run(work):
        assert seen == [1024, 1024, 512, 256, 256, 256, 256, 512, 512, 512]
        assert counts == (8, 2) and steps == 8
        assert all_equal(params, expected)


@covering(strength=1, dtype=[torch.float16, torch.bfloat16], world=[2, 1])
def test_16_bit_gradients_overflow_and_recover(worlds, world, dtype):
    """A gradient of 1 overflows float16 at a scale of 2^16, but not at 2^15."""

    def work(comm):
        params = weights(dtype)
        scaler = LossScaler()
        optimizer = AdamW(params, comm=comm, loss_scaler=scaler)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(params, 0)).backward()
            optimizer.step()
        return optimizer.skipped_steps.item(), scaler.current.item()

    once = (1, 2.0**15) if dtype is torch.float16 else (0, 2.0**16)
    assert worlds(world).run(work) == [once] * world


@covering(strength=1, dtype=[torch.float32, torch.bfloat16], world=[1, 2])
def test_check_finite_skips_without_a_scale_counts_and_says_so(worlds, world, dtype, caplog):
    options = AdamWOptions(check_finite=True)

    def work(comm):
        params = weights(dtype)
        before = [param.detach().clone() for param in params]
        optimizer = AdamW(params, comm=comm, options=options)
        loss_of(params, 0, overflows=comm.rank == 0).backward()
        optimizer.step()
        assert all_equal(params, before)
        assert optimizer.full_state_dict()["state"] == {}
        optimizer.zero_grad()
        loss_of(params, 0).backward()
        optimizer.step()
        assert not all_equal(params, before)
        return optimizer.steps_taken.item(), optimizer.skipped_steps.item()

    with caplog.at_level(logging.WARNING, "ringcomm.optim"):
        assert worlds(world).run(work) == [(1, 1)] * world
    said = [record.getMessage() for record in caplog.records]
    assert said == ["optimizer: step skipped, its gradient is not finite (1 skipped so far)"]


def test_without_a_check_an_infinite_gradient_is_taken_as_torch_takes_it():
    params = weights()
    optimizer = AdamW(params)
    loss_of(params, 0, overflows=True).backward()
    optimizer.step()
    assert params[0].isnan().all()
    assert optimizer.skipped_steps.item() == 0


def steps_of(scaler, optimizer, params, rank=0, last=0, unscale=False):
    """Steps with a GradScaler; returns the scale after each step."""
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(params, step, 0, step == 2 and rank == last)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_torchs_grad_scaler_drives_it_alone(kind, unscale):
    params, theirs = weights(), weights()
    optimizer, reference = AdamW(params), torch.optim.AdamW(theirs)
    settings: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 4}
    seen = steps_of(kind("cpu", **settings), optimizer, params, unscale=unscale)
    other = steps_of(torch.amp.GradScaler("cpu", **settings), reference, theirs, unscale=unscale)
    assert seen == other == [1024, 1024, 512, 512, 512, 512, 1024, 1024]
    assert (optimizer.steps_taken.item(), optimizer.skipped_steps.item()) == (7, 1)
    for mine, param in zip(params, theirs, strict=True):
        torch.testing.assert_close(mine, param, rtol=1e-6, atol=1e-7)


@covering(
    strength=1,
    world=[2, 3],
    options={"grads": SMALL_BUCKETS, "fp32 sums": FP32_SUMS},
    unscale=[False, True],
)
def test_the_ranks_of_a_grad_scaler_agree(worlds, world, options, unscale):
    def work(comm):
        params = weights()
        optimizer = AdamW(params, comm=comm, options=options)
        scaler = GradScaler(init_scale=1024.0, growth_interval=4)
        seen = steps_of(scaler, optimizer, params, comm.rank, comm.world_size - 1, unscale)
        return params, seen, optimizer.skipped_steps.item()

    expected = weights()
    reference = AdamW(expected)
    steps_of(torch.amp.GradScaler("cpu", init_scale=1024.0), reference, expected)
    for params, seen, skipped in worlds(world).run(work):
        assert seen == [1024, 1024, 512, 512, 512, 512, 1024, 1024]
        assert skipped == 1
        assert all_equal(params, expected)


def test_the_ranks_of_a_grad_scaler_agree_on_optimizers_of_others(worlds):
    def work(comm):
        params = weights()
        optimizer = torch.optim.SGD(params, lr=0.1)
        return steps_of(GradScaler(init_scale=4.0), optimizer, params, comm.rank, 1), params

    (first, params), (second, others) = worlds(2).run(work)
    assert first == second == [4, 4, 2, 2, 2, 2, 2, 2]
    assert all_equal(params, others)


def test_a_rank_without_gradients_hears_of_the_others(worlds):
    def work(comm):
        params = weights()
        optimizer = AdamW(params, comm=comm)
        scaler = GradScaler(init_scale=4.0)
        scaled = scaler.scale(loss_of(params, 0, overflows=True))
        if comm.rank == 0:
            scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), optimizer.skipped_steps.item()

    assert worlds(2).run(work) == [(2.0, 1.0)] * 2


def test_unscaling_before_clipping_gives_the_norm_of_the_gradient():
    params = weights()
    optimizer, scaler = AdamW(params), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(params, 0)).backward()
    scaler.unscale_(optimizer)
    assert optimizer.clip_grad_norm_(1.0, 1.0).item() == 730.0
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.steps_taken.item() == 1


@pytest.mark.parametrize("unscale", [False, True])
def test_only_unscaling_refuses_fp16_gradients(unscale):
    params = weights(torch.float16)
    optimizer, scaler = AdamW(params), GradScaler(init_scale=4.0)
    scaler.scale(loss_of(params, 0)).backward()
    if unscale:
        with pytest.raises(ArgumentError, match=r"build the optimizer with loss_scaler="):
            scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)
    assert optimizer.steps_taken.item() == (0 if unscale else 1)


def test_torchs_grad_scaler_is_refused_where_ranks_could_disagree(worlds):
    def work(comm, options):
        params = weights()
        optimizer = AdamW(params, comm=comm, options=options)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(params, 0)).backward()
        before = [param.detach().clone() for param in params]
        with pytest.raises(UnsupportedError, match=r"use ringcomm\.optim\.GradScaler"):
            scaler.step(optimizer)
        assert all_equal(params, before)

    worlds(2).run(work, AdamWOptions())
    worlds(1).run(work, FP32_SUMS)


def test_two_scalers_are_one_too_many():
    params = weights()
    optimizer = AdamW(params, loss_scaler=LossScaler())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(params, 0)).backward()
    with pytest.raises(ArgumentError, match="either a GradScaler or loss_scaler="):
        scaler.step(optimizer)


def test_a_loss_scaler_has_one_optimizer():
    scaler = LossScaler()
    optimizer = AdamW(weights(), loss_scaler=scaler)
    with pytest.raises(ArgumentError, match="belongs to another optimizer"):
        AdamW(weights(), loss_scaler=scaler)
    assert optimizer.options == AdamWOptions()
