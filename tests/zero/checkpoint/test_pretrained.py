# SPDX-License-Identifier: Apache-2.0
"""Weights of safetensors files are read directly into the shards."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError, RingcommError
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.zero.checkpoint.pretrained import WeightFiles
from tests.support.covering import covering
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits

STAGES = [0, 1, 2, 3]
PRECISIONS = {
    "float32": (zero.Precision(), AdamWOptions()),
    "bf16-mixed": (zero.Precision.preset("bf16-mixed"), AdamWOptions()),
    "bf16-remainder": (zero.Precision.preset("bf16-remainder"), AdamWOptions()),
}


class Block(nn.Module):
    """A block of frozen and trained parameters, with buffers that are saved or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 37)
        self.scale = nn.Parameter(torch.randn(13), requires_grad=False)
        self.register_buffer("mean", torch.randn(37))
        self.register_buffer("count", torch.randint(9, (2,)))
        self.down = nn.Linear(37, 13, bias=False)
        self.register_buffer("shift", torch.full((13,), 0.25), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(-1.0)
            self.get_buffer("shift").fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, mean = (self.get_buffer(name).to(x.dtype) for name in ("shift", "mean"))
        x = self.up(x * self.scale.to(x.dtype) + shift)
        found: torch.Tensor = self.down(torch.tanh(x - mean))
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(13, 13, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(13, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean()


def new_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def weights_of(net: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns the weights as save_pretrained() writes them: tied weights once, under one name."""
    state = {n: t.clone() for n, t in net.state_dict().items() if n != "head.weight"}
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(weights_of(new_net(1)), path)
    return path


def options_of(precision: zero.Precision, **more: Any) -> zero.ZeroOptions:
    return zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS, precision=precision, **more)


def two_steps(module: Any, rank: int, adamw: AdamWOptions) -> dict[str, torch.Tensor]:
    """Takes two steps and returns parameters and masters; any wrong bit at the start would show."""
    params = [param for param in module.parameters() if param.requires_grad]
    optimizer = AdamW(params, lr=1e-2, options=adamw)
    optimizer.prepare()
    masters = {f"first {n}": zero.get_master(p) for n, p in trained(module)}
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        module(torch.randn(4, 13, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters |= {f"last {n}": zero.get_master(p) for n, p in trained(module)}
    return {**zero.full_state_dict(module), **masters}


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad]


def moments_of(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: zero.get_state(p, "exp_avg") for n, p in trained(module)}
    return {name: moment for name, moment in found.items() if moment is not None}


@covering(strength=1, stage=STAGES, kind=[*PRECISIONS], dtype=[torch.float32, torch.bfloat16])
def test_a_meta_module_is_as_if_loaded_before(worlds, tmp_path, stage, kind, dtype):
    path = tmp_path / "model.safetensors"
    save_file(weights_of(new_net(1), dtype), path)
    precision, adamw = PRECISIONS[kind]
    base = new_net(2)
    base.load_state_dict(load_file(path) | {"head.weight": load_file(path)["embed.weight"]})
    modules = [meta_net() for _ in range(2)]

    def work(comm):
        options = options_of(precision)
        before: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        wanted = two_steps(before, comm.rank, adamw)
        source = zero.pretrained(path)
        module = modules[comm.rank]
        zero.shard(module, stage, comm=comm, options=options, init=source)
        assert (source.missing_keys, source.unexpected_keys) == ((), ())
        assert module.head.weight is module.embed.weight
        assert_same_bits(two_steps(module, comm.rank, adamw), wanted)
        return True

    assert all(worlds(2).run(work))


@covering(strength=1, stage=STAGES, kind=[*PRECISIONS])
def test_a_trained_module_takes_other_weights(worlds, file, stage, kind):
    """Loading sets the optimizer's masters to the values before rounding, and keeps its moments."""
    precision, adamw = PRECISIONS[kind]
    base, wanted = new_net(2), new_net(1).state_dict()

    def work(comm):
        options = options_of(precision)
        # Loaded before the optimizer exists: its masters also get the values before rounding.
        first = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        assert zero.load_pretrained(first, file) == zero.IncompatibleKeys((), ())
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        two_steps_of = [AdamW([p for _, p in trained(m)], options=adamw) for m in (module, first)]
        two_steps_of[1].prepare()
        module(torch.ones(4, 13)).backward()
        two_steps_of[0].step()
        moments = moments_of(module)
        zero.load_pretrained(module, file)
        for each in (module, first):
            for name, value in zero.full_state_dict(each).items():
                if name.endswith("shift"):
                    continue
                if value.dtype is torch.bfloat16 and kind == "bf16-remainder":
                    assert (value.float() - wanted[name]).abs().max() < 2**-7 * wanted[
                        name
                    ].abs().max()
                else:
                    assert torch.equal(value, wanted[name].to(value.dtype)), name
            for name, param in trained(each):
                assert torch.equal(zero.get_master(param), wanted[name]), name
        assert_same_bits(moments_of(module), moments)
        return zero.full_state_dict(module)

    ours, theirs = worlds(2).run(work)
    assert_same_bits(ours, theirs)


def test_over_nodes(file):
    choices: tuple[dict[str, Any], ...] = ({}, {"state": "node"}, {"params": "world"})
    modules = [[meta_net() for _ in range(4)] for _ in choices]
    wanted = new_net(1).state_dict()

    def work(comm, number):
        module, more = modules[number][comm.rank], choices[number]
        zero.shard(
            module,
            3,
            comm=comm,
            options=options_of(zero.Precision(), **more),
            init=zero.pretrained(file),
        )
        assert_same_bits(zero.full_state_dict(module), wanted)
        with zero.unsharded(module, write_from=0):
            for param in module.parameters():
                param.detach().zero_()
        zero.load_pretrained(module, file)
        assert_same_bits(zero.full_state_dict(module), wanted)
        return True

    with ringcomm.local_world(4, nodes=[2, 2], timeout=60) as world:
        assert all(all(world.run(work, number)) for number in range(3))


@pytest.mark.parametrize("kind", PRECISIONS)
def test_each_element_is_read_by_one_rank(worlds, file, kind, monkeypatch):
    """At stage 3 one rank reads each element, even if it has a master; all ranks read buffers."""
    modules = [meta_net() for _ in range(3)]
    read: list[int] = []
    whole = WeightFiles._read_bytes

    def count(self, stored, at, buffer):
        read.append(buffer.nbytes)
        whole(self, stored, at, buffer)

    monkeypatch.setattr(WeightFiles, "_read_bytes", count)

    def work(comm):
        options = options_of(PRECISIONS[kind][0])
        zero.shard(modules[comm.rank], 3, comm=comm, options=options, init=zero.pretrained(file))

    worlds(3).run(work)
    net = new_net(1)
    saved = load_file(file)
    buffers = sum(saved[name].nbytes for name, _ in net.named_buffers() if name in saved)
    assert sum(read) == sum(param.nbytes for param in net.parameters()) + 3 * buffers


# ---- parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_files_do_not_have_is_initialised(worlds, tmp_path, stage):
    weights = weights_of(new_net(1))
    del weights["blocks.1.scale"]
    weights["other"] = torch.ones(3)
    save_file(weights, tmp_path / "a.safetensors")
    modules = [meta_net() for _ in range(2)]

    def work(comm):
        source = zero.pretrained(tmp_path / "a.safetensors", strict=False)
        module = modules[comm.rank]
        zero.shard(module, stage, comm=comm, init=source)
        assert source.missing_keys == ("blocks.1.scale",)
        assert source.unexpected_keys == ("other",)
        wanted = new_state | {"blocks.1.scale": torch.full((13,), -1.0)}
        assert_same_bits(zero.full_state_dict(module), wanted)
        return True

    new_state = new_net(1).state_dict()
    assert all(worlds(2).run(work))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_is_loaded_under_other_names(worlds, tmp_path, stage):
    """``only`` and ``rename`` load some weights; others come from rank 0, and no key is missing."""
    wanted = new_net(1).state_dict()
    theirs = {f"layer{n}.w": wanted[f"blocks.{n}.down.weight"].clone() for n in range(2)}
    save_file({**theirs, "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    base = [new_net(5), new_net(6)]

    def rename(name):
        number = re.fullmatch(r"layer(\d)\.w", name)
        return None if number is None else f"blocks.{number[1]}.down.weight"

    def work(comm):
        choice: dict[str, Any] = {"only": ["blocks.*.down"], "rename": rename}
        path = tmp_path / "a.safetensors"
        first = zero.shard(
            deepcopy(base[comm.rank]), stage, comm=comm, init=zero.pretrained(path, **choice)
        )
        second = zero.shard(deepcopy(base[0]), stage, comm=comm)
        assert zero.load_pretrained(second, path, **choice) == ((), ())
        for module in (first, second):
            state = base[0].state_dict()
            state |= {f"blocks.{n}.down.weight": theirs[f"layer{n}.w"] for n in range(2)}
            assert_same_bits(zero.full_state_dict(module), state)
        with pytest.raises(CheckpointError, match=r"they have no 'blocks.0.up.weight'"):
            zero.load_pretrained(second, path, only=["blocks.*.up", "blocks.*.down"], rename=rename)
        with pytest.raises(ArgumentError, match=r"only.*none matches 'block'"):
            zero.load_pretrained(second, path, only=["block"])
        return True

    assert all(worlds(2).run(work))


# ---- files that are refused ------------------------------------------------------------------


def changed(**changes: Any) -> dict[str, torch.Tensor]:
    weights = weights_of(new_net(1)) | changes
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


MISFITS = {
    r"they have no 'embed\.weight'": changed(**{"embed.weight": None}),
    r"the module has no 'other'": changed(other=torch.ones(1)),
    r"embed\.weight.*shape \(13, 13\).*\(13, 12\)": changed(**{"embed.weight": torch.ones(13, 12)}),
    r"embed\.weight: expected values .* torch.float32,.*I8; quantized": changed(
        **{"embed.weight": torch.ones(13, 13, dtype=torch.int8)}
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_files_that_do_not_fit_change_nothing(worlds, tmp_path, message):
    """Files that fit on no rank, or on one rank only, raise on all ranks and change nothing."""
    save_file(MISFITS[message], tmp_path / "bad.safetensors")
    save_file(weights_of(new_net(1)), tmp_path / "good.safetensors")
    base = new_net(3)
    modules = [meta_net() for _ in range(2)]

    def work(comm):
        for bad_ranks in ((0, 1), (1,)):
            path = tmp_path / f"{'bad' if comm.rank in bad_ranks else 'good'}.safetensors"
            module = modules[comm.rank]
            with pytest.raises(CheckpointError, match=message):
                zero.shard(module, 3, comm=comm, init=zero.pretrained(path))
            assert all(param.device.type == "meta" for param in module.parameters())
            sharded = zero.shard(deepcopy(base), 3, comm=comm)
            with pytest.raises(CheckpointError, match=message):
                zero.load_pretrained(sharded, path)
            assert_same_bits(zero.full_state_dict(sharded), base.state_dict())
        return True

    assert all(worlds(2).run(work))


def test_ranks_with_other_files_or_none(worlds, tmp_path):
    save_file(weights_of(new_net(1)), tmp_path / "0.safetensors")
    save_file(weights_of(new_net(1), torch.bfloat16), tmp_path / "1.safetensors")
    modules = [meta_net() for _ in range(2)]

    def work(comm):
        module = modules[comm.rank]
        with pytest.raises(MismatchError, match=r"Option weight files is"):
            zero.shard(
                module, comm=comm, init=zero.pretrained(tmp_path / f"{comm.rank}.safetensors")
            )
        init: Any = zero.pretrained(tmp_path / "0.safetensors") if comm.rank else nn.init.ones_
        with pytest.raises(MismatchError, match="Option reads weights"):
            zero.shard(module, comm=comm, init=init)
        with pytest.raises(CheckpointError, match=r"2\.safetensors: cannot be opened"):
            zero.shard(module, comm=comm, init=zero.pretrained(tmp_path / "2.safetensors"))
        return True

    assert all(worlds(2).run(work))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_that_ends_while_it_is_read(worlds, file, stage, monkeypatch):
    """All ranks raise at once, and the parameters are on the meta device again."""
    modules = [meta_net() for _ in range(2)]
    wanted = new_net(1).state_dict()
    whole = WeightFiles._read_bytes

    def work(comm):
        def cut(self, stored, at, buffer):
            if comm.rank == 1 and "blocks.1" in stored.name and self in mine:
                raise CheckpointError(f"{stored.name}: the file ends")
            return whole(self, stored, at, buffer)

        comm.barrier()
        if comm.rank == 1:
            monkeypatch.setattr(WeightFiles, "_read_bytes", cut)
        comm.barrier()
        module, source = modules[comm.rank], zero.pretrained(file)
        open_files = source.open

        def keep(root):
            open_files(root)
            if comm.rank == 1:
                mine.append(source._files)

        source.open = keep  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"blocks\.1.*the file ends.*have changed"):
            zero.shard(module, stage, comm=comm, init=source)
        assert all(param.device.type == "meta" for param in module.parameters())
        comm.barrier()
        mine.clear()
        zero.shard(module, stage, comm=comm, init=zero.pretrained(file))
        assert_same_bits(zero.full_state_dict(module), wanted)
        return True

    mine: list[Any] = []
    assert all(worlds(2).run(work))


def test_a_module_without_a_way_to_fill_what_is_missing(worlds, tmp_path):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("shift", torch.ones(3), persistent=False)

    save_file({"scale": torch.ones(3)}, tmp_path / "a.safetensors")
    with torch.device("meta"):
        module: Any = Own()

    def work(comm):
        with pytest.raises(ArgumentError, match=r"Own has .* no reset_parameters.*init="):
            zero.shard(module, 3, comm=comm, init=zero.pretrained(tmp_path / "a.safetensors"))

        def fill(each):
            each.shift.fill_(7)

        source = zero.pretrained(tmp_path / "a.safetensors", init=fill)
        zero.shard(module, 3, comm=comm, init=source)
        assert module.shift.tolist() == [7] * 3
        with pytest.raises(RingcommError, match="load_pretrained: expected the module that shard"):
            zero.load_pretrained(nn.Linear(2, 2), tmp_path / "a.safetensors")

    worlds(1).run(work)
