# SPDX-License-Identifier: Apache-2.0
"""Modules with experts: all layers are sharded, stepped, clipped and saved as one model."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import ArgumentError, CommOptions, Communicator, zero
from ringcomm.errors import CheckpointError, RingcommError, UnsupportedError
from ringcomm.extras import moe
from ringcomm.extras.moe.layer import groups_of
from ringcomm.optim import AdamW, AdamWOptions, LossScaler
from tests.extras.moe.test_layer import HIDDEN, filled, layer, tokens
from tests.support import ROOT

Tensor = torch.Tensor
RANKS, GROUP = 4, 2
STEPS, LR = 3, 0.01
DOCUMENT = ROOT / "docs" / "moe.md"
OPTIONS = zero.ZeroOptions(bucket_elems=512)


class Model(nn.Module):
    """A block of a network: a linear layer, experts, and a head."""

    def __init__(self, group: Communicator) -> None:
        super().__init__()
        self.first = filled(nn.Linear(HIDDEN, HIDDEN), 50)
        self.moe = layer(group)
        self.head = filled(nn.Linear(HIDDEN, 1), 51)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.moe(torch.tanh(self.first(x)))
        return self.head(hidden).squeeze(-1)


def of_four(body: Any) -> list[Any]:
    """Runs a function of a world communicator and a communicator of pairs, on four ranks."""
    with ringcomm.local_world(RANKS, options=CommOptions(timeout=60)) as world:
        return world.run(lambda comm: body(comm, comm.split(comm.rank // GROUP)))


def adamw(params: list[Tensor], **options: Any) -> AdamW:
    return AdamW(params, lr=LR, options=AdamWOptions(**options))


def backward(model: nn.Module, step: int, ranks: Any, share: float = 1.0) -> float:
    """Returns the loss of some ranks' tokens in a step; gradients are those of the mean."""
    on = next(model.parameters()).device
    x = torch.cat([tokens(10 * step + rank) for rank in ranks]).to(on)
    loss = (model(x) - x.sum(-1)).square().mean()
    (loss * share).backward()
    return float(loss.detach())


def told(model: nn.Module, optimizer: Any, ranks: Any, share: float = 1.0) -> list[float]:
    """Returns losses and norms of three steps, each clipped to a norm of 2."""
    found = []
    for step in range(STEPS):
        loss = backward(model, step, ranks, share)
        norm = float(optimizer.clip_grad_norm_(2.0))
        optimizer.step()
        optimizer.zero_grad()
        found += [loss, norm]
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's parameters: all of the dense layers, and its own experts."""
    experts = groups_of(model, "test").experts
    assert experts is not None
    with zero.unsharded(model), zero.unsharded(experts):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def add_by_hand(param: nn.Parameter, value: float) -> None:
    """Sets a parameter's gradient on all ranks, which the step then reduces."""
    param.grad = torch.full_like(param, value)


@pytest.fixture(scope="module")
def dense() -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and norms of one rank with all tokens, and its final parameters."""
    with ringcomm.local_world(1) as one:
        model = zero.shard(Model(one[0]), 1, comm=one[0], options=OPTIONS)
        found = told(model, AdamW(model.parameters(), lr=0.01), range(RANKS))
        return found, {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("reduce", ["avg", "sum"])
def test_it_trains_as_the_dense_model_does(dense, reduce):
    """Experts on 2 of 4 ranks: equal losses, norms over all layers and parameters, any stage."""
    expected, params = dense
    options = zero.ZeroOptions(bucket_elems=512, reduce=reduce)
    stages = (0, 1, 2, 3) if reduce == "avg" else (2,)

    def body(comm, group):
        found = []
        for stage in stages:
            model: Any = moe.shard(Model(group), stage, comm=comm, options=options)
            optimizer = moe.Optimizer(model, adamw)
            assert len(optimizer.param_groups) == len(optimizer.optimizers) == 2
            share = 1.0 if reduce == "avg" else 1 / RANKS
            numbers = torch.tensor(told(model, optimizer, [comm.rank], share), dtype=torch.float64)
            norms = numbers[1::2].clone()
            comm.all_reduce(numbers)
            assert torch.equal(norms, numbers[1::2] / RANKS)
            torch.testing.assert_close(
                numbers / RANKS, torch.tensor(expected, dtype=torch.float64), rtol=2e-5, atol=0
            )
            mine = values(model)
            for name in ("first.weight", "moe.router.weight", "head.bias"):
                torch.testing.assert_close(mine[name], params[name], rtol=1e-4, atol=1e-5)
            for number in range(4):
                name = f"moe.experts.{4 * group.rank + number}.0.weight"
                found_here = mine[f"moe.experts.{number}.0.weight"]
                torch.testing.assert_close(found_here, params[name], rtol=1e-4, atol=1e-5)
            found.append((numbers, mine))
        return found

    for found in of_four(body):
        for numbers, mine in found[1:]:
            assert torch.equal(numbers, found[0][0])
            assert same(mine, found[0][1])
    assert min(expected[1::2]) > 2  # so that every step is clipped


def test_a_step_is_skipped_for_both_parts_or_none():
    """If an expert's gradient overflows on one rank, no parameter changes on any rank."""

    def body(comm, group):
        model: Any = moe.shard(Model(group), 2, comm=comm, options=OPTIONS)
        optimizer = moe.Optimizer(model, lambda params: adamw(params, check_finite=True))
        optimizer.prepare()
        before = values(model)
        for clips in (False, True):
            backward(model, 0, [comm.rank])
            add_by_hand(model.moe.experts[0][0].weight, math.inf if comm.rank == 3 else 0.0)
            if clips:
                assert optimizer.clip_grad_norm_(1.0).isnan()
            optimizer.step()
            optimizer.zero_grad()
            assert same(values(model), before)
            assert [int(each.skipped_steps) for each in optimizer.optimizers] == [1 + clips] * 2
        backward(model, 0, [comm.rank])
        add_by_hand(model.first.weight, math.nan if comm.rank == 3 else 0.0)
        with pytest.raises(RingcommError, match="norm of type l2 is nan"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.zero_grad()
        backward(model, 0, [comm.rank])
        optimizer.clip_grad_value_(0.1)
        optimizer.step()
        assert not same(values(model), before)

    of_four(body)


def test_a_bad_learning_rate_on_one_rank_changes_nothing():
    def body(comm, group):
        model = moe.shard(Model(group), 2, comm=comm, options=OPTIONS)
        optimizer = moe.Optimizer(model, adamw)
        optimizer.prepare()
        before = values(model)
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            backward(model, 0, [comm.rank])
            if comm.rank == 1:
                optimizer.param_groups[-1]["lr"] = -1.0
            with pytest.raises(ArgumentError):
                call()
            assert same(values(model), before)
            optimizer.param_groups[-1]["lr"] = 0.01
            optimizer.zero_grad()
        backward(model, 0, [comm.rank])
        optimizer.step()

    of_four(body)


def test_it_goes_on_from_a_checkpoint(tmp_path):
    """Resumes at another stage with the same bits, also after a later save that was cut off."""

    def body(comm, group):
        def made(stage: int) -> tuple[Any, moe.Optimizer]:
            model = moe.shard(Model(group), stage, comm=comm, options=OPTIONS)
            return model, moe.Optimizer(model, adamw)

        model, optimizer = made(2)
        told(model, optimizer, [comm.rank])
        moe.save(tmp_path, 3, model, optimizer, data={"seen": 3})
        experts = groups_of(model, "test").experts
        assert experts is not None
        # A save that is cut off has saved only experts, and only on some ranks.
        if group.rank == 0:
            zero.save(tmp_path / "experts-00000-of-00002", 6, experts, optimizer.experts)
        told(model, optimizer, [comm.rank])
        again, its_optimizer = made(3)
        loaded = moe.load(tmp_path, again, its_optimizer)
        assert (loaded.step, loaded.data) == (3, {"seen": 3})
        told(again, its_optimizer, [comm.rank])
        assert same(values(again), values(model))
        # If the dense layers' checkpoint is damaged, the experts are not loaded either.
        manifest = tmp_path / "dense" / "step-00000003" / "checkpoint.json"
        comm.barrier()
        sound = manifest.read_text()
        comm.barrier()
        if comm.rank == 0:
            manifest.write_text(sound.replace('"steps_taken"', '"steps"', 1))
        comm.barrier()
        before = values(model)
        with pytest.raises(CheckpointError, match="damaged"):
            moe.load(tmp_path, model, optimizer, step=3)
        assert same(values(model), before)
        comm.barrier()
        if comm.rank == 0:
            manifest.write_text(sound)
        moe.save(tmp_path, 6, again, its_optimizer)
        assert moe.load(tmp_path, model).step == 6
        with pytest.raises(CheckpointError, match="no experts"):
            moe.load(tmp_path / "none", model)
        with pytest.raises(ArgumentError, match=r"expected a moe\.Optimizer"):
            moe.save(tmp_path, 9, model, optimizer.dense)  # type: ignore[arg-type]
        other: Any = moe.shard(Model(comm), 2, comm=comm, options=OPTIONS)
        with pytest.raises(CheckpointError, match=r"found experts-00000-of-00002, experts-00001"):
            moe.load(tmp_path, other)

    of_four(body)


def test_routers_stay_fp32_among_16_bits():
    def body(comm, group):
        options = zero.ZeroOptions(precision=zero.Precision.preset("bf16-mixed"))
        for stage in (2, 3):
            model: Any = moe.shard(Model(group), stage, comm=comm, options=options)
            optimizer = moe.Optimizer(model, adamw)
            told(model, optimizer, [comm.rank])
            kinds = {name: each.dtype for name, each in model.named_parameters()}
            assert kinds["moe.router.weight"] is torch.float32
            assert kinds["moe.experts.0.0.weight"] is kinds["first.weight"] is torch.bfloat16

    of_four(body)


def test_what_is_refused():
    def body(comm, group):
        with pytest.raises(ArgumentError, match="was not sharded by it"):
            moe.Optimizer(Model(group), adamw)
        buffered: Any = Model(group)
        buffered.moe.experts[1].register_buffer("scale", torch.ones(1))
        meta: Any = Model(group)
        meta.moe.experts.to("meta")
        unlike: Any = nn.ModuleList([Model(group), Model(comm)])
        odd = comm.split(int(comm.rank == 3))
        for message, module, over in (
            ("expected no buffers", buffered, comm),
            ("on the meta device", meta, comm),
            ("divided over the same ranks", unlike, comm),
            ("a multiple of the 4", Model(comm), group),
        ):
            with pytest.raises(ArgumentError, match=message):
                moe.shard(module, comm=over)
        uneven = moe.MoE(nn.Linear(4, 6), nn.Linear(4, 4), odd, num_experts=6)
        with pytest.raises(
            ArgumentError, match=r"multiple of the 3|divided over the same|failed, so"
        ):
            moe.shard(nn.Sequential(uneven), comm=comm)
        model: Any = Model(group)
        chosen = zero.ZeroOptions(units=(nn.Conv1d,)) if comm.rank == 2 else None
        with pytest.raises(ArgumentError, match="Conv1d"):
            moe.shard(model, comm=comm, expert_options=chosen)
        moe.shard(model, comm=comm)
        with pytest.raises(UnsupportedError, match="without loss_scaler"):
            moe.Optimizer(model, lambda params: AdamW(params, loss_scaler=LossScaler()))
        with pytest.raises(ArgumentError, match="got a SGD"):
            moe.Optimizer(model, lambda params: torch.optim.SGD(params))  # type: ignore
        moe.remove_sharding(model)
        moe.shard(model, comm=comm)

    of_four(body)


def test_the_block_of_the_document_runs(capsys):
    [block] = re.findall(r"## Training\n\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(block, str(DOCUMENT), "exec"), {"__name__": "block"})
    norms = json.loads(capsys.readouterr().out)
    assert len(norms) == 3 and min(norms) > 0


def test_a_group_of_all_ranks():
    """Each rank has experts that no other rank has, with reductions over the same ranks."""

    def body(comm, group):
        model = moe.shard(Model(comm), 3, comm=comm, options=OPTIONS)
        return told(model, moe.Optimizer(model, adamw), [comm.rank])

    with ringcomm.local_world(RANKS, options=CommOptions(timeout=60)) as world:
        found = world.run(lambda comm: body(comm, comm))
    norms = [each[1::2] for each in found]
    assert norms[1:] == norms[:-1]
    no_layer = nn.Linear(2, 2)
    with ringcomm.local_world(1) as one:
        optimizer = moe.Optimizer(moe.shard(no_layer, comm=one[0]), adamw)
        no_layer(torch.ones(1, 2)).sum().backward()
        assert optimizer.experts is None and optimizer.clip_grad_norm_(1.0) > 1
