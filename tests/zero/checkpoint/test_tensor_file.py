# SPDX-License-Identifier: Apache-2.0
"""Tensor files are valid safetensors, hold the given tensors, and return their checksum."""

from __future__ import annotations

import json
import os
import zlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.zero.checkpoint import format as tensor_file
from ringcomm.zero.checkpoint.format import (
    DTYPES,
    TensorEntry,
    crc32_of,
    dtype_name,
    host_slices,
    write_tensor_file,
)


def entry(key, tensor):
    return TensorEntry(key, tensor.dtype, tuple(tensor.shape), partial(host_slices, tensor))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist() if tensor.dim() else tensor.item()


def sample(dtype, *shape):
    elems = torch.Size(shape).numel()
    raw = torch.arange(elems * dtype.itemsize, dtype=torch.int64).remainder(2).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


def test_every_dtype_is_what_the_library_reads(tmp_path):
    given_tensors = {
        f"{name} {shape}": sample(dtype, *shape)
        for dtype, (name, _) in DTYPES.items()
        for shape in ((3,), (2, 5), (0,), (2, 0, 3), (1, 1, 1))
    }
    path = tmp_path / "file"
    saved = write_tensor_file(path, [entry(k, t) for k, t in given_tensors.items()], {"a": "ü"})
    loaded = load_file(path)
    assert {*loaded} == {*given_tensors}
    for key, tensor in given_tensors.items():
        assert (loaded[key].dtype, loaded[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(loaded[key]) == bits(tensor), key
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "ü"}
    content = path.read_bytes()
    assert saved.size_bytes == len(content)
    assert saved.crc32 == crc32_of(path) == f"{zlib.crc32(content):08x}"


def test_tensors_are_aligned_to_their_items(tmp_path):
    path = tmp_path / "file"
    odd = [sample(dtype, 3) for dtype in (torch.uint8, torch.float64, torch.int16, torch.float32)]
    write_tensor_file(path, [entry(f"k{i}", tensor) for i, tensor in enumerate(odd)])
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    for key, told in json.loads(content[8 : 8 + length]).items():
        assert told["data_offsets"][0] % odd[int(key[1])].dtype.itemsize == 0


def test_an_empty_file_is_read(tmp_path):
    write_tensor_file(tmp_path / "file", [])
    assert load_file(tmp_path / "file") == {}


@given(st.integers(0, 40), st.integers(1, 3), st.sampled_from([torch.float32, torch.uint8]))
def test_slices_are_all_elements_in_order(elems, stride, dtype):
    tensor = torch.arange(elems * stride).to(dtype)[::stride]
    whole = tensor_file.SLICE_BYTES
    try:
        tensor_file.SLICE_BYTES = 12
        slices = list(host_slices(tensor))
    finally:
        tensor_file.SLICE_BYTES = whole
    assert all(
        values.numel() * dtype.itemsize <= 12 and values.is_contiguous() for values in slices
    )
    assert torch.equal(torch.cat([tensor[:0], *slices]), tensor)


def test_any_strides_are_written_in_order(tmp_path):
    tensor = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    write_tensor_file(tmp_path / "file", [entry("a", tensor)])
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, view: write(handle, view[:7]))
    saved = write_tensor_file(tmp_path / "file", [entry("a", torch.arange(100.0))])
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "file")["a"], torch.arange(100.0))
    assert saved.crc32 == crc32_of(tmp_path / "file")


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([torch.ones(2)], "expected 12 bytes for size .*, as was planned, got 8"),
        ([torch.ones(2), torch.ones(2)], "expected 12 bytes .*, got 16"),
        ([torch.ones(3, dtype=torch.int32)], r"expected elements of torch\.float32, .*int32"),
    ],
)
def test_what_changes_while_it_is_saved_is_noticed(tmp_path, slices, message):
    with pytest.raises(CheckpointError, match=message):
        write_tensor_file(tmp_path / "f", [TensorEntry("a", torch.float32, (3,), lambda: slices)])


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensor_file(tmp_path / "file", [])
    assert (tmp_path / "file").read_text() == "mine"


def test_other_dtypes_are_refused():
    with pytest.raises(UnsupportedError, match=r"x: expected a dtype of .*got torch\.complex64"):
        dtype_name(torch.complex64, "x")
