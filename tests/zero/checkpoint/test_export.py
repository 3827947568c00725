# SPDX-License-Identifier: Apache-2.0
"""Exports weights into safetensors files that other programs can load."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.zero.checkpoint import Checkpoints, export_safetensors
from ringcomm.zero.checkpoint import format as tensor_file
from tests.zero.checkpoint.states import even_cuts, flat_shard, in_world
from tests.zero.checkpoint.system_calls import count_calls, interposed


class Tied(nn.Module):
    """A submodule called "model", two tied weights, a buffer of integers and a scalar."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4), nn.LayerNorm(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.model.get_submodule("0").get_parameter("weight")
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("count", torch.tensor([seed, 2, 3]))


TIED = {"head.weight": "model.0.weight"}


@pytest.fixture
def folder(worlds, tmp_path):
    """A checkpoint of the module of seed 1 and its optimizer's state, saved by two ranks."""
    net = Tied(1)
    named = dict(net.named_parameters()) | dict(net.named_buffers())

    def work(ranks):
        tensors = {}
        for name, tensor in named.items():
            flat, cuts = tensor.detach().reshape(-1), even_cuts(tensor.numel(), 2)
            tensors[f"model.{name}"] = flat_shard(flat, cuts, ranks.rank, tuple(tensor.shape))
            tensors[f"exp_avg.{name}"] = flat_shard(flat.float() + 1, cuts, ranks.rank)
        return Checkpoints(tmp_path / "root", ranks=ranks).save(5, tensors, data={"tied": TIED})

    return in_world(worlds, 2, work)[0]


def loaded(files):
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= load_file(file)
    return state


def assert_same(state, expected):
    assert {*state} == {*expected}
    for name, tensor in expected.items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("max_file_bytes", [1, 100, 300, 5 << 30])
@pytest.mark.parametrize("slice_bytes", [8, 1 << 20])
def test_a_module_loads_it(folder, tmp_path, monkeypatch, max_file_bytes, slice_bytes):
    monkeypatch.setattr(tensor_file, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr("ringcomm.zero.checkpoint.export.SLICE_BYTES", slice_bytes)
    path = tmp_path / "out"
    files = export_safetensors(folder, path, max_file_bytes=max_file_bytes)
    net, other = Tied(1), Tied(2)
    state = loaded(files)
    assert_same(state, net.state_dict())
    other.load_state_dict(state, strict=True)
    assert_same(other.state_dict(), net.state_dict())
    assert {each.name for each in path.iterdir()} - {file.name for file in files} == (
        {"model.safetensors.index.json"} if len(files) > 1 else set()
    )
    for file in files:
        sizes = [tensor.numel() * tensor.element_size() for tensor in load_file(file).values()]
        assert sum(sizes) <= max_file_bytes or len(sizes) == 1


def test_the_index_says_where_each_weight_is(folder, tmp_path):
    files = export_safetensors(folder, tmp_path / "out", max_file_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for number, file in enumerate(files, 1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for name, tensor in load_file(file).items():
            assert index["weight_map"].pop(name) == file.name
            total += tensor.numel() * tensor.element_size()
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert len(files) > 1 and index == {"metadata": {"total_size": total}, "weight_map": {}}


def test_aliases_can_be_left_to_the_metadata(folder, tmp_path):
    (file,) = export_safetensors(folder, tmp_path / "out", aliases="skip")
    expected = Tied(1).state_dict()
    del expected["head.weight"]
    assert_same(load_file(file), expected)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", **TIED}
    other = Tied(2)
    missing, unexpected = load_model(other, file)
    assert not missing and not unexpected
    assert_same(other.state_dict(), Tied(1).state_dict())


def test_floats_are_converted_and_integers_are_not(folder, tmp_path):
    state = loaded(
        export_safetensors(folder, tmp_path / "out", dtype=torch.bfloat16, max_file_bytes=100)
    )
    expected = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in Tied(1).state_dict().items()
    }
    assert_same(state, expected)


def test_some_weights_are_chosen(folder, tmp_path):
    names = ["scale", "model.1.bias", "head.weight"]
    state = loaded(export_safetensors(folder, tmp_path / "out", names=names))
    assert_same(state, {name: Tied(1).state_dict()[name] for name in names})


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"names": ["scale", "exp_avg.scale"]}, ArgumentError, r"got \['exp_avg\.scale'\]"),
        ({"names": ["model.scale"]}, ArgumentError, r"got \['model\.scale'\]"),
        ({"max_file_bytes": 0}, ArgumentError, "max_file_bytes: expected a positive number"),
        ({"aliases": "drop"}, ArgumentError, 'expected "copy" or "skip"'),
        ({"dtype": torch.int8}, ArgumentError, "expected a floating-point dtype"),
        ({"dtype": torch.complex64}, UnsupportedError, "export: expected a dtype of"),
    ],
)
def test_a_bad_request_writes_nothing(folder, tmp_path, settings, kind, message):
    with pytest.raises(kind, match=message):
        export_safetensors(folder, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [{"a": "nothing"}, {"scale": "count"}, {"a": 3}, ["scale"], 3])
def test_aliases_that_cannot_be_are_refused(tmp_path, tied):
    x = torch.ones(1)
    tensors = {"model.scale": flat_shard(x, [], 0), "model.count": flat_shard(x, [], 0)}
    folder = Checkpoints(tmp_path / "root").save(1, tensors, data={"tied": tied})
    with pytest.raises(
        CheckpointError, match=r"expected to map an alias|expected a dict from aliases"
    ):
        export_safetensors(folder, tmp_path / "out")


def test_nothing_is_written_over(folder, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="there is one, and it is not overwritten"):
        export_safetensors(folder, tmp_path / "out")


def test_an_error_of_any_call_leaves_nothing_visible(folder, tmp_path):
    whole = tmp_path / "whole" / "out"
    calls = count_calls(lambda: export_safetensors(folder, whole, max_file_bytes=300))
    seen = 0
    for failing in range(calls):
        path = tmp_path / str(failing) / "out"

        def fails(number, name, args, failing=failing):
            if number == failing:
                raise OSError(28, "No space left on device")

        with interposed(fails), pytest.raises(CheckpointError, match="No space left on device"):
            export_safetensors(folder, path, max_file_bytes=300)
        # After the rename, only the sync to disk can still fail.
        if path.exists():
            assert failing >= calls - 2
            seen += 1
            assert_same(loaded(sorted(path.glob("*.safetensors"))), Tied(1).state_dict())
        elif path.parent.exists():
            assert list(path.parent.iterdir()) == []
    assert seen == 2


def test_a_damaged_checkpoint_is_not_exported(folder, tmp_path):
    file = folder / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: expected checksum"):
        export_safetensors(folder, tmp_path / "out")
    assert {each.name for each in tmp_path.iterdir()} == {"root"}
