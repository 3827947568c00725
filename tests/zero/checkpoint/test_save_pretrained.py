# SPDX-License-Identifier: Apache-2.0
"""Each rank writes its part of a sharded module's weights to its offsets in the files."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError
from ringcomm.optim import AdamW
from ringcomm.zero.checkpoint import export
from ringcomm.zero.checkpoint import format as tensor_file
from tests.support.covering import covering
from tests.zero.models import SMALL_BUCKET_ELEMS

INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    """A model of tied and frozen weights, several dtypes and shapes, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(37, 13)
        self.layers = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 13).bfloat16()])
        self.layers[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("count", torch.tensor([1, 2, 3]))
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight


def sharded(net: nn.Module, stage: int, comm: Any, **options: Any) -> nn.Module:
    chosen = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS, **options)
    return zero.shard(deepcopy(net), stage, comm=comm, options=chosen)


@covering(strength=1, stage=[0, 1, 2, 3], aliases=["copy", "skip"], max_file_bytes=[700, 5 << 30])
def test_weights_are_those_of_an_export(
    worlds, tmp_path, monkeypatch, stage, aliases, max_file_bytes
):
    """The saved weights equal an export of a checkpoint of the same module."""
    monkeypatch.setattr(tensor_file, "SLICE_BYTES", 64)
    net = Net()

    def work(comm):
        module = sharded(net, stage, comm)
        choice: dict[str, Any] = {"aliases": aliases, "max_file_bytes": max_file_bytes}
        files = zero.save_pretrained(module, tmp_path / "out", **choice)
        return files, zero.save(tmp_path / "run", 1, module), choice

    (files, folder, choice), _ = worlds(2).run(work)
    exported = zero.export_safetensors(folder, tmp_path / "exported", **choice)
    assert (max_file_bytes == 700) == (len(files) > 1)
    assert {each.name for each in (tmp_path / "out").iterdir()} == (
        {file.name for file in files} | ({INDEX} if len(files) > 1 else set())
    )
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= max_file_bytes or len(sizes) == 1
    ours, theirs = (
        {n: t for f in each for n, t in load_file(f).items()} for each in (files, exported)
    )
    wanted = net.state_dict()
    assert (
        ours.keys()
        == theirs.keys()
        == {*wanted} - ({"head.weight"} if aliases == "skip" else set())
    )
    for name, tensor in ours.items():
        assert tensor.dtype is wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    told = [metadata(file) for file in files]
    assert all(each.pop("format") == "pt" for each in told)
    assert [each for each in told if each] == (
        [{"head.weight": "embed.weight"}] if aliases == "skip" else []
    )
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
        assert {n: f.name for f in files for n in load_file(f)} == index["weight_map"]


def metadata(path: Any) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def test_weights_in_another_dtype_over_nodes(tmp_path):
    net = Net()

    def work(comm):
        module = sharded(net, 3, comm, state="node")
        return zero.save_pretrained(module, tmp_path / "out", dtype=torch.float16)

    with ringcomm.local_world(4, nodes=[2, 2], timeout=60) as world:
        ((path,), *_) = world.run(work)
    for name, tensor in load_file(path).items():
        wanted = net.state_dict()[name]
        assert torch.equal(tensor, wanted.half() if wanted.is_floating_point() else wanted), name


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write(worlds, tmp_path, monkeypatch, failing):
    """If one rank cannot write, all ranks raise and no file is left; the next save succeeds."""
    net = Net()
    write = export._ExportedFile.write
    failing_ranks = {failing}

    def full_disk(self, folder, shards):
        # Rank 0 writes the buffers.
        if int(not shards["model.count"].local.numel()) in failing_ranks:
            raise OSError(28, "No space left on device")
        write(self, folder, shards)

    monkeypatch.setattr(export._ExportedFile, "write", full_disk)

    def work(comm):
        module = sharded(net, 3, comm)
        with pytest.raises(CheckpointError, match=rf"rank {failing} of 2.*cannot write.*No space"):
            zero.save_pretrained(module, tmp_path / "out")
        comm.barrier()
        assert list(tmp_path.iterdir()) == []
        failing_ranks.clear()
        comm.barrier()
        zero.save_pretrained(module, tmp_path / "out")
        with pytest.raises(CheckpointError, match="it is not overwritten"):
            zero.save_pretrained(module, tmp_path / "out")
        with pytest.raises(MismatchError, match="Option path"):
            zero.save_pretrained(module, tmp_path / str(comm.rank))
        with pytest.raises(ArgumentError, match="max_file_bytes: expected a positive number"):
            zero.save_pretrained(module, tmp_path / "other", max_file_bytes=0)
        return [each.name for each in tmp_path.iterdir()]

    assert worlds(2).run(work) == [["out"]] * 2


def test_a_step_that_failed_halfway(worlds, tmp_path):
    def work(comm):
        module = sharded(net, 2, comm)
        optimizer = AdamW(module.parameters())
        optimizer.prepare()
        optimizer.sharded_step().partly_updated = True
        with pytest.raises(ringcomm.errors.RingcommError, match="failed halfway"):
            zero.save_pretrained(module, tmp_path / "out")

    net = Net()
    worlds(1).run(work)
    assert list(tmp_path.iterdir()) == []
