# SPDX-License-Identifier: Apache-2.0
"""Access to a rank's shards of parameters, for averages of weights without whole copies."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, RingcommError
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.zero.stages import shards as module_shards
from tests.support.covering import covering, in_test_all
from tests.zero.job import BF16
from tests.zero.models import MODELS, Run, assert_same_bits, new_model, options_of

Tensor = torch.Tensor
STAGES = [0, 3, *in_test_all(1, 2)]
PRECISIONS = {"fp32": zero.Precision(), "bf16": BF16}
DECAY = 0.75


def sharded(comm, base, stage, precision=PRECISIONS["fp32"], **adamw: Any) -> tuple[Any, AdamW]:
    module = deepcopy(base)
    zero.shard(module, stage, comm=comm, options=options_of(Run("", stage, precision=precision)))
    return module, AdamW(module.parameters(), lr=0.1, options=AdamWOptions(**adamw))


def step(module: Any, optimizer: AdamW, comm, model: str, turn: int) -> None:
    generator = torch.Generator().manual_seed(10 * turn + comm.rank)
    module(*MODELS[model][1](generator, turn)).backward()
    optimizer.step()
    optimizer.zero_grad()


@covering(strength=1, world_size=[1, 3], stage=range(4), precision=[*PRECISIONS])
def test_an_average_by_shards_is_that_of_whole_weights(worlds, world_size, stage, precision):
    """Covers tied and frozen weights; evaluating with the average leaves training unchanged."""
    base = new_model("partial")
    batch = torch.ones(4, 12)

    def work(comm, averages):
        module, optimizer = sharded(comm, base, stage, PRECISIONS[precision])
        shards = zero.local_shards(module)
        mean = {name: s.values.to(torch.float32, copy=True) for name, s in shards.items()}
        whole = {n: value.float() for n, value in zero.full_state_dict(module).items()}
        for turn in range(3):
            step(module, optimizer, comm, "partial", turn)
            if not averages:
                continue
            for name, shard in shards.items():
                mean[name].lerp_(shard.values.float(), 1 - DECAY)
            for name, value in zero.full_state_dict(module).items():
                whole[name].lerp_(value.float(), 1 - DECAY)
            before = zero.full_state_dict(module)
            with zero.exchanged(module, mean), torch.no_grad():
                inside = zero.full_state_dict(module)
                loss = module(batch)
            assert_same_bits(zero.full_state_dict(module), before)
            reference: Any = deepcopy(base).to(loss.dtype)
            assert_same_bits(inside, {n: value.to(inside[n].dtype) for n, value in whole.items()})
            reference.load_state_dict(inside)
            with torch.no_grad():
                assert torch.equal(reference(batch.to(loss.dtype)), loss)
        state = {**zero.full_state_dict(module), "master": optimizer.full_state_dict()}
        return mean, whole, {n: (s.begin, s.end) for n, s in shards.items()}, state

    outcomes = worlds(world_size).run(work, True)
    for mean, whole, ranges, _ in outcomes:
        for name, (begin, end) in ranges.items():
            assert torch.equal(mean[name], whole[name].view(-1)[begin:end])
    for name, value in outcomes[0][1].items():
        elems = sum(ranges[name][1] - ranges[name][0] for _, _, ranges, _ in outcomes)
        everywhere = stage == 0 or (stage < 3 and name.startswith("frozen"))
        assert elems == value.numel() * (world_size if everywhere else 1)
    _, _, _, without = worlds(world_size).run(work, False)[0]
    for *_, state in outcomes:
        torch.testing.assert_close(state, without, rtol=0, atol=0)


@covering(
    strength=1,
    adamw={"fp32": {}, "rest": {"master": "remainder"}, "late": None},
    stage=range(4),
)
def test_masters_follow_elements_that_were_written(worlds, stage, adamw):
    """Masters of unwritten elements keep the bits that the parameters' rounding drops."""
    base = new_model("mlp")

    def work(comm):
        module, optimizer = sharded(comm, base, stage, BF16, **(adamw or {}))
        params = dict(module.named_parameters())
        if adamw is not None:
            step(module, optimizer, comm, "mlp", 0)
            wanted = {name: zero.get_master(param) for name, param in params.items()}
        else:
            wanted = {name: param.detach().clone() for name, param in base.named_parameters()}
        with zero.writing_shards(module) as shards:
            for shard in shards.values():
                at = torch.arange(shard.begin, shard.end)
                shard.values[at % 3 == 0] = 0.5
        optimizer.prepare()
        for name, param in params.items():
            wanted[name].view(-1)[::3] = 0.5
            assert torch.equal(zero.get_master(param), wanted[name]), name
        for name, value in zero.full_state_dict(module).items():
            if name in wanted:
                assert torch.equal(value, wanted[name].bfloat16()), name

    worlds(2).run(work)


def test_a_refusal_comes_when_all_ranks_have_their_values_back(worlds, monkeypatch):
    """Otherwise a rank that raises early would unshard another rank's unrestored values."""
    base = new_model("mlp")
    put_back = module_shards._Memory.put_back

    def slowly(memory):
        time.sleep(0.1 * memory._engine.comm.rank)
        put_back(memory)

    def work(comm):
        module, _ = sharded(comm, base, 3)
        refused = pytest.raises(ArgumentError, match="not these")
        with refused, zero.writing_shards(module) as shards:
            for shard in shards.values():
                shard.values.zero_()
            raise ArgumentError("not these")
        with zero.unsharded(module):
            found = {name: param.detach().clone() for name, param in module.named_parameters()}
        for name, param in base.named_parameters():
            assert torch.equal(found[name], param), name

    monkeypatch.setattr(module_shards._Memory, "put_back", slowly)
    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_refused_changes_nothing(worlds, stage, tmp_path):
    base = new_model("mlp")

    def work(comm):
        module, optimizer = sharded(comm, base, stage)
        step(module, optimizer, comm, "mlp", 0)
        before = zero.full_state_dict(module)
        mine = comm.rank == 1
        mean = {name: shard.values + 1 for name, shard in zero.local_shards(module).items()}
        failed = pytest.raises(ZeroDivisionError if mine else RingcommError, match="by zero")
        with failed, zero.writing_shards(module) as shards:
            for shard in shards.values():
                shard.values.zero_()
            assert 1 / (comm.rank - 1) != 0
        wrong = {**mean, "layers.2.weight": torch.zeros(3)} if mine else mean
        with pytest.raises(ArgumentError, match=r"layers\.2\.weight: expected this rank's shard"):
            zero.exchanged(module, wrong).__enter__()
        with pytest.raises(ArgumentError, match="the module has no parameter 'other'"):
            zero.exchanged(module, {**mean, "other": torch.zeros(3)}).__enter__()
        fewer = dict(list(mean.items())[comm.rank :])
        with pytest.raises(MismatchError, match=r"Option parameters is .* on rank 0 and .* rank 1"):
            zero.exchanged(module, fewer).__enter__()
        if stage == 0:
            others = {name: each + comm.rank for name, each in mean.items()}
            with pytest.raises(MismatchError, match="the ranks differ"):
                zero.exchanged(module, others).__enter__()
        if stage == 3:
            with (
                zero.unsharded(module),
                pytest.raises(ArgumentError, match=r"inside unsharded\(\)"),
            ):
                zero.writing_shards(module).__enter__()
        assert_same_bits(zero.full_state_dict(module), before)
        param = next(iter(dict(module.named_parameters()).values()))
        module(torch.ones(4, 13)).backward()
        optimizer.clip_grad_norm_(1.0)
        state, whole = optimizer.state_dict(), optimizer.full_state_dict()
        refused: dict[str, Any] = {
            "optimizer.step": optimizer.step,
            "optimizer.clip_grad_norm_": lambda: optimizer.clip_grad_norm_(2.0),
            "optimizer.clip_grad_value_": lambda: optimizer.clip_grad_value_(0.5, params=param),
            "optimizer.load_state_dict": lambda: optimizer.load_state_dict(state),
            "optimizer.load_torch_state_dict": lambda: optimizer.load_torch_state_dict(whole),
            "optimizer.refresh_master_weights": optimizer.refresh_master_weights,
            "optimizer.full_state_dict": optimizer.full_state_dict,
            "get_gradient": lambda: zero.get_gradient(param),
            "set_gradient": lambda: zero.set_gradient(param, torch.zeros(37, 13)),
            "get_master": lambda: zero.get_master(param),
            "set_master": lambda: zero.set_master(param, torch.zeros(37, 13)),
            "save": lambda: zero.save(tmp_path, 1, module, optimizer),
            "load": lambda: zero.load(tmp_path, module, optimizer),
            "load_pretrained": lambda: zero.load_pretrained(module, tmp_path),
            "TrainState.state_dict": zero.TrainState(module, optimizer).state_dict,
            "exchanged": lambda: zero.exchanged(module, mean).__enter__(),
            "writing_shards": lambda: zero.writing_shards(module).__enter__(),
            "unsharded": lambda: zero.unsharded(module, write_from=0).__enter__(),
            "remove_sharding": lambda: zero.remove_sharding(module),
        }
        with zero.exchanged(module, mean):
            for operation, called in refused.items():
                said = rf"^{operation} on rank . of 2: called inside exchanged\(\)"
                with pytest.raises(ArgumentError, match=said):
                    called()
        assert_same_bits(zero.full_state_dict(module), before)

    worlds(2).run(work)


def test_masters_begin_with_a_module_s_own_values(worlds):
    base = new_model("mlp")

    def work(comm):
        module, optimizer = sharded(comm, base, 3, BF16)
        others = {name: shard.values + 1 for name, shard in zero.local_shards(module).items()}
        for early in (optimizer.prepare, optimizer.step, optimizer.state_dict):
            with (
                pytest.raises(ArgumentError, match=r"^optimizer.prepare .* inside exchanged\(\)"),
                zero.exchanged(module, others),
            ):
                early()
        optimizer.prepare()
        for name, param in module.named_parameters():
            assert torch.equal(zero.get_master(param), base.get_parameter(name))

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_an_average_is_exported_inside(worlds, stage, tmp_path):
    base = new_model("partial")

    def work(comm):
        module, optimizer = sharded(comm, base, stage, BF16)
        step(module, optimizer, comm, "partial", 0)
        before = zero.full_state_dict(module)
        others = {n: 2 * shard.values.float() for n, shard in zero.local_shards(module).items()}
        with zero.exchanged(module, others):
            inside = zero.full_state_dict(module)
            (file,) = zero.save_pretrained(module, tmp_path / "average", aliases="copy")
        assert_same_bits(load_file(file), inside)
        assert all(torch.equal(inside[name], 2 * before[name]) for name in others)
        assert_same_bits(zero.full_state_dict(module), before)

    worlds(2).run(work)


def test_a_module_that_is_not_sharded_has_no_shards():
    with pytest.raises(ArgumentError, match="local_shards: expected the module that shard"):
        zero.local_shards(nn.Linear(2, 2))
