# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed and torch resume in ringcomm; pickles that run code are refused.

``deepspeed_checkpoints.zip`` has checkpoints that DeepSpeed 0.19 wrote on 2 CPU ranks after 3 steps
of :func:`model` with ``torch.optim.AdamW`` and the groups of :func:`groups`, at stages 1 to 3
(``sub_group_size`` 10).
"""

from __future__ import annotations

import functools
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from ringcomm import cli, zero
from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.extras.migrate.torch_file import Inert, MappedFile, TorchFile, read_pickle
from ringcomm.optim import AdamW
from tests.comm.conftest import worlds

__all__ = ["worlds"]
Tensor = torch.Tensor
SAVED = Path(__file__).with_name("deepspeed_checkpoints.zip")
STEPS = 3
ALL = 5


def model() -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 4, bias=False), nn.Linear(4, 3)
    )
    made.register_buffer("seen", torch.arange(3.0))
    made[2].weight.requires_grad_(False)
    return made


def groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in module.parameters() if param.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def loss_of(module: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    out: Tensor = module(x.to(next(module.parameters()).dtype))
    return out.float().square().mean()


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, Tensor]]:
    """Returns the weights after each step of one process on both ranks' batches."""
    module, found = model(), []
    optimizer = torch.optim.AdamW(groups(module), lr=1e-2)
    for step in range(ALL):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(module, step, rank) / 2).backward()
        optimizer.step()
        found.append({name: each.clone() for name, each in module.state_dict().items()})
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(SAVED) as packed:
        packed.extractall(folder)
    return folder


def go_on(
    comm: Any, root: Path, stage: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor], zero.Loaded]:
    """Loads a checkpoint; returns the weights as loaded, and after two more steps."""
    module = model()
    precision = zero.Precision(param=dtype, buffer=dtype)
    options = zero.ZeroOptions(precision=precision, bucket_elems=512)
    zero.shard(module, stage, comm=comm, options=options)
    optimizer = AdamW(groups(module), lr=1.0)
    loaded = zero.load(root, module, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
    assert optimizer.steps_taken == STEPS
    first = zero.full_state_dict(module)
    for step in range(STEPS, ALL):
        loss_of(module, step, comm.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, zero.full_state_dict(module), loaded


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], step_size: float) -> None:
    """Allows rounding per step, by another CPU's loops or by 16-bit weights."""
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name].float(), each, rtol=step_size, atol=step_size)


@pytest.mark.parametrize(("name", "stage"), [("stage2-fp32", 3), ("stage3-fp32", 1)])
def test_fp32_checkpoints_of_deepspeed_go_on(worlds, saved, wanted, tmp_path, name, stage):
    made = zero.convert(saved / name, tmp_path)
    assert made.name == "step-00000003"
    for first, last, loaded in worlds(2).run(go_on, tmp_path, stage):
        assert_near(first, wanted[STEPS - 1], 1e-6)
        assert_near(last, wanted[ALL - 1], 1e-6)
        assert loaded.step == 3 and not loaded.exact
        assert loaded.data["client_state"] == {"epoch": 2}


def test_bfloat16_checkpoints_of_deepspeed_go_on(worlds, saved, wanted, tmp_path):
    """The FP32 masters are kept, and become the weights of an FP32 model."""
    zero.convert(saved / "stage1-bf16", tmp_path)
    # bfloat16 noise can turn a step of lr 1e-2 around; most steps are far closer.
    for first, last, _ in worlds(2).run(go_on, tmp_path, 3, torch.bfloat16):
        assert_near(first, wanted[STEPS - 1], 1e-2)
        assert_near(last, wanted[ALL - 1], 1e-2)
    ((masters, _, _), _) = worlds(2).run(go_on, tmp_path, 0)
    for name in masters:
        assert torch.equal(masters[name].bfloat16(), first[name]), name


def test_one_conversion_fits_every_precision(worlds, saved, wanted, tmp_path):
    """FP32 parameters among 16-bit ones, FP32 buffers, and masters without any rounding."""
    zero.convert(saved / "stage2-fp32", tmp_path)
    narrow = torch.bfloat16
    precisions = [
        zero.ZeroOptions(precision=zero.Precision.preset("bf16-mixed", keep_fp32=("1",))),
        zero.ZeroOptions(
            precision=zero.Precision(param=narrow, buffer=narrow),
            per_unit={"0": zero.UnitOptions(param=torch.float32)},
            units=lambda name, _: name == "0",
        ),
    ]

    def work(comm, stage, options):
        module = zero.shard(model(), stage, comm=comm, options=options)
        optimizer = AdamW(groups(module))
        zero.load(tmp_path, module, optimizer)
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        masters = {name: zero.get_master(each) for name, each in trained.items()}
        return masters, zero.full_state_dict(module)

    for stage, options in ((1, precisions[0]), (3, precisions[0]), (3, precisions[1])):
        exact = worlds(1).run(go_on, tmp_path, 0)[0][0]
        for masters, weights in worlds(2).run(work, stage, options):
            assert {each.dtype for each in weights.values()} == {torch.float32, narrow}
            assert all(torch.equal(each, exact[name]) for name, each in masters.items())
            for name, each in weights.items():
                assert torch.equal(each, exact[name].to(each.dtype)), name


def save_dcp(root: str, rank: int, world_size: int) -> None:
    module = model()
    fully_shard(module[0])
    fully_shard(module)
    optimizer = torch.optim.AdamW(groups(module), lr=1e-2)
    for step in range(STEPS):
        loss_of(module, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = get_model_state_dict(module)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    nested = get_optimizer_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": nested, "step": 7}, checkpoint_id=f"{root}/nested")
    flattened = get_optimizer_state_dict(module, optimizer, options=flat)
    dcp.save({"app": {"model": weights, "optim": flattened}}, checkpoint_id=f"{root}/flat")
    dcp.save(weights, checkpoint_id=f"{root}/weights")
    dist.barrier()


def test_checkpoints_of_fsdp2_go_on(rank_pools, worlds, wanted, tmp_path):
    rank_pools(2).run(functools.partial(save_dcp, str(tmp_path)), "gloo")
    for name, step in (("nested", 7), ("flat", 0)):
        zero.convert(tmp_path / name, tmp_path / f"{name}.ours")
        for first, last, loaded in worlds(2).run(go_on, tmp_path / f"{name}.ours", 3):
            assert_near(first, wanted[STEPS - 1], 1e-6)
            assert_near(last, wanted[ALL - 1], 1e-6)
            assert loaded.step == step
    zero.convert(tmp_path / "weights", tmp_path / "weights.ours")
    module = zero.shard(model(), 2, comm=worlds(1)[0])
    zero.load(tmp_path / "weights.ours", module)
    assert_near(zero.full_state_dict(module), wanted[STEPS - 1], 1e-6)


def test_the_command_converts_there_and_to_safetensors(saved, wanted, tmp_path, capsys):
    source, run = str(saved / "stage2-fp32"), str(tmp_path / "run")
    assert cli.main(["convert", source, run, "--weights-only", "--step", "12"]) == 0
    assert "step-00000012" in capsys.readouterr().out
    assert cli.main(["convert", run, str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["0.weight"].dtype is torch.bfloat16
    assert_near(found, wanted[STEPS - 1], 1e-2)
    assert cli.main(["convert", run, str(tmp_path / "other"), "--step", "7"]) == 2
    assert "has no checkpoint of step 7; it has step 12" in capsys.readouterr().err
    assert cli.main(["convert", source, run, "--step", "12"]) == 2
    assert "expected a step after 12" in capsys.readouterr().err
    assert cli.main(["convert", source, run, "--dtype", "bfloat16"]) == 2
    assert "only for safetensors" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path), run]) == 1
    assert "expected a folder of DeepSpeed" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_and_nothing_changes(worlds, saved, tmp_path):
    zero.convert(saved / "stage2-fp32", tmp_path)

    def work(comm):
        other = nn.Sequential(*list(model())[:3])
        zero.shard(other, 1, comm=comm)
        before = zero.full_state_dict(other)
        with pytest.raises(CheckpointError, match=r"the module has no '3\.bias', '3\.weight'"):
            zero.load(tmp_path, other)
        assert all(torch.equal(each, before[n]) for n, each in zero.full_state_dict(other).items())
        module = zero.shard(model(), 1, comm=comm)
        one_group = [param for param in module.parameters() if param.requires_grad]
        with pytest.raises(CheckpointError, match="expected the param groups"):
            zero.load(tmp_path, module, AdamW(one_group))

    worlds(2).run(work)


def test_checkpoints_that_lack_something_are_refused(saved, tmp_path):
    folder = saved / "stage2-fp32" / "global_step3"
    copy = tmp_path / "partial"
    copy.mkdir()
    for path in folder.iterdir():
        if "rank_1" not in path.name:
            (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="optimizer states of 2 ranks, got 1"):
        zero.convert(copy, tmp_path / "out")
    (copy / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(UnsupportedError, match="DeepSpeed-MoE"):
        zero.convert(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- files of torch.save(), without running what they say ---------------------------------------


class Evil:
    """A pickle that would run code when it is loaded."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


def test_nothing_that_a_pickle_names_is_called(tmp_path):
    path = tmp_path / "evil.pt"
    torch.save({"weights": torch.ones(2), "more": Evil()}, path)
    with pytest.raises(SystemExit, match="it ran"):
        torch.load(path, weights_only=False)
    found = TorchFile(MappedFile(path)).read()
    assert torch.equal(found["weights"], torch.ones(2))
    assert isinstance(found["more"], Inert) and found["more"].name == "__builtin__.exec"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_data_are_read_as_python_reads_them(protocol):
    shared = ["a", b"b", 1 << 70, -3, 2.5, None, True]
    data = {"list": shared, "again": shared, "tuple": (1, (2,), ()), "nested": {"k": [{}, []]}}
    assert read_pickle(pickle.dumps(data, protocol), "data") == data


def test_tensors_are_read_as_torch_reads_them(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    dtypes = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn)
    data = [
        *(base, base[1:3, ::2], base.T, base[0, 0], nn.Parameter(base[:2]), torch.empty(0, 3)),
        *(torch.arange(3).to(dtype) for dtype in (*dtypes, torch.uint16)),
    ]
    path = tmp_path / "tensors.pt"
    torch.save(data, path)
    for mine, theirs in zip(TorchFile(MappedFile(path)).read(), data, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (
            theirs.dtype,
            theirs.shape,
            theirs.stride(),
        )
        assert mine.tolist() == theirs.tolist()


def test_damage_is_found_wherever_it_is(tmp_path):
    """Each cut or flipped byte raises a CheckpointError, or changes only values."""
    out = io.BytesIO()
    torch.save({"a": torch.arange(4.0), "b": [1, {"c": "d"}]}, out)
    whole = out.getvalue()
    path = tmp_path / "damaged.pt"
    refused = 0
    for at in range(0, len(whole), 5):
        flipped = bytearray(whole)
        flipped[at] ^= 0xFF
        for damaged in (whole[:at], bytes(flipped)):
            path.write_bytes(damaged)
            try:
                TorchFile(MappedFile(path)).read()
            except CheckpointError:
                refused += 1
    assert refused > len(whole) // 5
