"""Uses of a module beside the plain loop, at every stage."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import zero
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaleOptions, LossScaler
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model, text

Tensor = torch.Tensor
STAGES = [0, 1, 2, 3]
SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)
FP16 = zero.ZeroOptions(precision=zero.Precision(param=torch.float16, buffer=torch.float16))


state_of = zero.full_state_dict


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_modules_train_alike(worlds, stage):
    """Runs in a world of one rank, since Dynamo's caches are not made for threads."""
    base = new_model("mlp")

    def work(comm, wrap):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        called = wrap(module)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            called(torch.randn(4, 13, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(module)

    with ringcomm.local_world(1) as world:
        wanted = work(world[0], lambda module: module)
        found = work(world[0], lambda module: torch.compile(module, backend="aot_eager"))
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_forward_and_backward(worlds, stage):
    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        loss = module(*text(comm, 0))
        module.eval()
        with torch.no_grad():
            before = module(*text(comm, 1)).item()
        module.train()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            after = module(*text(comm, 1)).item()
        return before, after, state_of(module)

    base = new_model("gpt")
    outcomes = worlds(2).run(work)
    plain = deepcopy(base)
    with torch.no_grad():
        wanted = plain(*text(worlds(2)[0], 1)).item()
    before, after, state = outcomes[0]
    assert before == wanted
    assert_same_bits(state, outcomes[1][2])
    plain.load_state_dict(state)
    with torch.no_grad():
        assert after == plain(*text(worlds(2)[0], 1)).item()


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_with_a_loss_scaler_skips_what_overflows(worlds, stage):
    base = new_model("gpt")

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=FP16)
        scaler = LossScaler(LossScaleOptions(init_scale=2.0**12))
        optimizer = AdamW(module.parameters(), lr=1e-3, loss_scaler=scaler)
        for turn in range(4):
            loss = scaler.scale(module(*text(comm, turn)))
            if turn == 1 and comm.rank == 0:
                loss = loss * float("inf")
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(module), optimizer.skipped_steps.item(), scaler.current.item()

    states = worlds(2).run(work)
    assert [each[1:] for each in states] == [(1.0, 2.0**11)] * 2
    assert_same_bits(states[0][0], states[1][0])
    assert not any(tensor.isnan().any() for tensor in states[0][0].values())


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_way_of_scaling(worlds, stage):
    base = new_model("gpt")

    def work(comm, scaled):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-3)
        scaler = GradScaler("cpu", comm=comm, enabled=scaled, init_scale=2.0**8)
        for turn in range(3):
            scaler.scale(module(*text(comm, turn))).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return state_of(module)

    # A scale of a power of two changes no bits of FP32 gradients.
    assert_same_bits(worlds(2).run(work, True)[0], worlds(2).run(work, False)[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_nothing_clears_are_warned_of(worlds, stage):

    def work(comm):
        module: Any = zero.shard(new_model("mlp"), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)

        def train(forget):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    module(torch.ones(2, 13)).backward()
                    module(torch.ones(2, 13)).backward()
                    optimizer.step()
                    forget()
            return [str(each.message) for each in caught]

        assert train(optimizer.zero_grad) == []
        assert train(module.zero_grad) == []
        (said,) = train(lambda: None)
        assert "added to those that an earlier step has used" in said
        assert train(lambda: None) == []

    worlds(1).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_between_a_step_and_zero_grad_is_not_warned_of(worlds, stage):
    """A GAN's discriminator forgets the generator's backward before its own."""

    def work(comm):
        module: Any = zero.shard(new_model("mlp"), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, 13)).backward()
            optimizer.step()
            module(torch.ones(2, 13)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_steps_without_zeroing_go_on_adding(worlds, stage):
    base = new_model("mlp")

    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        x = torch.ones(2, 13) * (comm.rank + 1)
        module(x).backward()
        first = optimizer.clip_grad_norm_(1e9).item()
        module(x).backward()
        second = optimizer.clip_grad_norm_(1e9).item()
        optimizer.zero_grad(set_to_none=False)
        third = optimizer.clip_grad_norm_(1e9).item()
        optimizer.step()
        return first, second, third

    for first, second, third in worlds(2).run(work, stage):
        assert second == pytest.approx(2 * first, rel=1e-6)  # sums of equal numbers
        assert third == 0.0


def test_stochastic_rounding_needs_no_master(worlds):
    base = new_model("gpt")
    options = zero.ZeroOptions(
        bucket_elems=SMALL_BUCKET_ELEMS,
        precision=zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16),
    )

    def work(comm):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=options)
        adamw = AdamWOptions(master="none", rounding="stochastic")
        optimizer = AdamW(module.parameters(), lr=1e-3, options=adamw)
        module(*text(comm, 0)).backward()
        optimizer.step()
        return [sorted(b) for b in optimizer.state_dict()["state"]["buckets"]]

    assert worlds(2).run(work)[0][0] == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raises_is_left_behind(worlds, stage):
    base = new_model("gpt")

    def work(comm, breaks):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for turn in range(3):
            loss = module(*text(comm, turn))
            if breaks and turn == 1:
                handle = module.blocks[1].mlp.expand.register_full_backward_hook(_raise)
                with pytest.raises(ValueError, match="on purpose"):
                    module(*text(comm, turn)).backward()
                handle.remove()
                optimizer.zero_grad()
                loss = module(*text(comm, turn))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(module)

    assert_same_bits(worlds(2).run(work, True)[0], worlds(2).run(work, False)[0])


def _raise(*_):
    raise ValueError("on purpose")
