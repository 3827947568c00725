# SPDX-License-Identifier: Apache-2.0
"""Partial checkpoints: for models with another head, of chosen parts, and of trained parts only."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.optim import AdamW
from tests.support.covering import covering
from tests.zero.checkpoint.states import forge
from tests.zero.job import BF16
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits

Tensor = torch.Tensor


class Net(nn.Module):
    """A body that may be frozen, with a buffer and a tied weight, and a head with a given name."""

    def __init__(self, seed: int, head: str = "head", frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ModuleList([nn.Linear(13, 13) for _ in range(3)])
        self.body[2].weight = self.body[1].weight
        self.register_buffer("mean", torch.randn(13))
        self.body.requires_grad_(not frozen)
        self.last = head
        self.add_module(head, nn.Linear(13, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        found: Tensor = self.get_submodule(self.last)(x)
        return found.float().square().mean()


def sharded(net: nn.Module, stage: int, comm: Any, **options: Any) -> tuple[Any, AdamW]:
    module = deepcopy(net)
    chosen = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS, **options)
    zero.shard(module, stage, comm=comm, options=chosen)
    return module, AdamW(module.parameters(), lr=1e-2)


def train(module: Any, optimizer: AdamW, rank: int, steps: int = 1) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        module(torch.randn(4, 13, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(module: nn.Module) -> dict[str, Tensor]:
    return {n: zero.get_master(p) for n, p in module.named_parameters() if p.requires_grad}


@covering(strength=1, stage=[0, 1, 2, 3], precision={"float32": zero.Precision(), "bf16": BF16})
def test_a_model_with_another_head(worlds, tmp_path, stage, precision):
    """Loads the body; the module keeps its own head, with the head's masters and moments."""
    first, second = Net(1), Net(2, "score")

    def work(comm):
        module, _ = sharded(first, 2, comm, precision=precision)
        zero.save(tmp_path, 3, module, data="mine")
        saved = zero.full_state_dict(module)
        other, optimizer = sharded(second, stage, comm, precision=precision)
        train(other, optimizer, comm.rank)
        before, kept = zero.full_state_dict(other), masters(other)
        moments = optimizer.full_state_dict()["state"]
        with pytest.raises(CheckpointError, match="is of another model"):
            zero.load(tmp_path, other)
        assert_same_bits(zero.full_state_dict(other), before)
        loaded = zero.load(tmp_path, other, strict=False)
        assert loaded == zero.Loaded(
            3, "mine", False, ("score.weight", "score.bias"), ("head.bias", "head.weight")
        )
        after = zero.full_state_dict(other)
        assert_same_bits(after, {n: before[n] if "score" in n else saved[n] for n in before})
        for name, master in masters(other).items():
            wanted = kept[name] if "score" in name else saved[name].float()
            assert torch.equal(master, wanted), name
        again = optimizer.full_state_dict()["state"]
        assert_same_bits(again[0], moments[0])
        return True

    assert all(worlds(2).run(work))


@pytest.mark.parametrize("stage", [0, 3])
def test_parts_that_are_chosen(worlds, tmp_path, stage):
    """Loaded before the optimizer exists: masters of other parts get the values before rounding."""
    first, second = Net(1), Net(2)

    def work(comm):
        zero.save(tmp_path, 1, sharded(first, 1, comm, precision=BF16)[0])
        module = deepcopy(second)
        options = zero.ZeroOptions(precision=BF16)
        zero.shard(module, stage, comm=comm, options=options)
        loaded = zero.load(tmp_path, module, only=["body.0", "mean"])
        assert (loaded.missing_keys, loaded.unexpected_keys) == ((), ())
        mine = {n for n in theirs if n.startswith("body.0") or n == "mean"}
        for name, value in zero.full_state_dict(module).items():
            wanted = theirs[name] if name in mine else own[name]
            assert torch.equal(value, wanted.to(value.dtype)), name
        optimizer = AdamW(module.parameters())
        optimizer.prepare()
        for name, master in masters(module).items():
            wanted = theirs[name].bfloat16().float() if name in mine else own[name]
            assert torch.equal(master, wanted), name
        with pytest.raises(ArgumentError, match=r"optimizer: expected None with strict=False"):
            zero.load(tmp_path, module, optimizer, strict=False)
        with pytest.raises(ArgumentError, match=r"only: .*none matches 'tail'.*'body\.0\.weight'"):
            zero.load(tmp_path, module, only=["tail"])
        return True

    theirs, own = first.state_dict(), second.state_dict()
    assert all(worlds(2).run(work))


def test_a_part_of_another_shape_or_name_is_refused(worlds, tmp_path):
    def work(comm):
        zero.save(tmp_path, 1, sharded(nets[0], 1, comm)[0])
        module, _ = sharded(nets[1], 3, comm)
        before = zero.full_state_dict(module)
        with pytest.raises(
            CheckpointError, match=r"it has no 'score\.weight', 'score\.bias'\. Pass"
        ):
            zero.load(tmp_path, module, only=["score"])
        wide, _ = sharded(nets[2], 3, comm)
        with pytest.raises(
            CheckpointError, match=r"model\.head\.weight: expected.*\(7, 13\).*\(5, 13\)"
        ):
            zero.load(tmp_path, wide, strict=False)
        assert_same_bits(zero.full_state_dict(module), before)
        return True

    nets = [Net(1), Net(2, "score"), Net(3)]
    nets[2].head = nn.Linear(13, 7)
    assert all(worlds(2).run(work))


# ---- what is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_trained_is_saved_alone(worlds, tmp_path, stage):
    """Trained parts are saved alone; training resumes with the same bits on the same base."""
    base = Net(1, frozen=True)
    started = deepcopy(base)
    nn.init.zeros_(started.get_parameter("head.weight"))

    def work(comm):
        module, optimizer = sharded(base, stage, comm)
        train(module, optimizer, comm.rank, 2)
        folder = zero.save(tmp_path / "part", 1, module, optimizer, trainable_only=True)
        zero.save(tmp_path / "whole", 1, module, optimizer)
        train(module, optimizer, comm.rank, 2)
        wanted = zero.full_state_dict(module)
        for other_stage in (stage, 3 - stage):
            other, of_other = sharded(started, other_stage, comm)
            assert zero.load(tmp_path / "part", other, of_other).exact
            train(other, of_other, comm.rank, 2)
            assert_same_bits(zero.full_state_dict(other), wanted)
        return folder

    folder = worlds(2).run(work)[0]
    told = json.loads((folder / "checkpoint.json").read_text())
    model = {name for name in told["tensors"] if name.startswith("model.")}
    assert model == {"model.head.weight", "model.head.bias", "model.mean"}
    (path,) = zero.export_safetensors(folder, tmp_path / "exported")
    assert {*load_file(path)} == {name.removeprefix("model.") for name in model}


def test_what_is_trained_needs_the_same_model(worlds, tmp_path):
    """A partial checkpoint needs a module that freezes every part that was left out."""
    nets = {"trained": Net(2), "other": Net(2, "score", frozen=True)}

    def work(comm):
        module, optimizer = sharded(base, 2, comm)
        zero.save(tmp_path, 1, module, optimizer, trainable_only=True)
        trained, _ = sharded(nets["trained"], 3, comm)
        before = zero.full_state_dict(trained)
        with pytest.raises(CheckpointError, match=r"without the frozen.*'body\.0\.bias'.*trained"):
            zero.load(tmp_path, trained)
        assert_same_bits(zero.full_state_dict(trained), before)
        loaded = zero.load(tmp_path, trained, strict=False)
        assert "body.0.bias" in loaded.missing_keys and not loaded.unexpected_keys
        other, _ = sharded(nets["other"], 3, comm)
        with pytest.raises(CheckpointError, match="is of another model"):
            zero.load(tmp_path, other)
        return True

    base = Net(1, frozen=True)
    assert all(worlds(2).run(work))


@pytest.mark.parametrize(
    ("key", "value"),
    [("left_out", 5), ("left_out", [["head.bias"]]), ("tied", [1]), ("tied", {"a": [1]})],
)
def test_forged_names_are_errors(worlds, tmp_path, key, value):
    def work(comm):
        module, _ = sharded(base, 2, comm)
        folder = zero.save(tmp_path, 1, module)
        if comm.rank == 0:
            forge(folder, change)
        comm.barrier()
        for strict in (True, False):
            with pytest.raises(CheckpointError, match="is not a checkpoint of ringcomm"):
                zero.load(tmp_path, module, strict=strict)
        return True

    def change(told):
        (told["data"] if key == "tied" else told["data"]["ringcomm"])[key] = value

    base = Net(1)
    assert all(worlds(2).run(work))
