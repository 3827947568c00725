# SPDX-License-Identifier: Apache-2.0
"""Files and folders of weights: which tensors are read, and which files are refused."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ringcomm.errors import CheckpointError
from ringcomm.zero.checkpoint import pretrained as weight_files
from ringcomm.zero.checkpoint.pretrained import WeightFiles

INDEX = "model.safetensors.index.json"
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
WEIGHTS = {
    "a.weight": torch.randn(7, 5, 3),
    "a.bias": torch.randn(7, dtype=torch.float64),
    "b.count": torch.arange(6).view(2, 3),
    "b.scale": torch.randn(()).bfloat16(),
    "b.none": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path):
    """A folder of two weight files and an index."""
    weight_map = {name: FILES[name.startswith("b")] for name in WEIGHTS}
    for file in FILES:
        save_file({n: t for n, t in WEIGHTS.items() if weight_map[n] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def read(files: WeightFiles, name: str, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((end - begin,), 9).to(dtype)
    files.read(files.tensors[name], begin, out, dtype)
    return out


@pytest.mark.parametrize("slice_bytes", [16, 1 << 20])
def test_any_part_is_read_in_any_dtype(folder, slice_bytes, monkeypatch):
    monkeypatch.setattr(weight_files, "SLICE_BYTES", slice_bytes)
    files = WeightFiles(folder)
    assert {name: stored.shape for name, stored in files.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()
    }
    for name, tensor in WEIGHTS.items():
        flat = tensor.view(-1)
        kinds = {tensor.dtype}
        if tensor.is_floating_point():
            kinds |= {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        assert all(files.tensors[name].becomes(kind) for kind in kinds)
        assert not files.tensors[name].becomes(torch.int8)
        for begin, end in ((0, flat.numel()), (1, flat.numel()), (3, 4)):
            for dtype in kinds if begin <= end <= flat.numel() else ():
                assert torch.equal(read(files, name, begin, end, dtype), flat[begin:end].to(dtype))
    # Rounded twice: first to the module's dtype, FP32, then to BF16.
    out = torch.empty(7, dtype=torch.bfloat16)
    files.read(files.tensors["a.bias"], 0, out, torch.float32)
    assert torch.equal(out, WEIGHTS["a.bias"].float().bfloat16())
    box = torch.empty(4, 2, 3)
    files.read_box(files.tensors["a.weight"], (2, 3, 0), box, torch.float32)
    assert torch.equal(box, WEIGHTS["a.weight"][2:6, 3:5])


def test_links_are_followed_as_a_cache_has_them(folder, tmp_path):
    """Hugging Face's cache keeps blobs, and links to them under the files' names."""
    other = tmp_path / "snapshot"
    other.mkdir()
    for file in (*FILES, INDEX):
        (other / file).symlink_to(folder / file)
    assert WeightFiles(other).digest == WeightFiles(folder).digest


def open_files(folder: Path) -> list[str]:
    """Returns the open files of a folder; others of this process may be closed at any time."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the list itself
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [target for target in targets if target.startswith(f"{folder}/")]


def index(change) -> Any:
    def damage(folder: Path) -> None:
        told = json.loads((folder / INDEX).read_text())
        change(told)
        (folder / INDEX).write_text(json.dumps(told))

    return damage


def header(change) -> Any:
    """Returns a function that changes the first file's header and keeps its data."""

    def damage(folder: Path) -> None:
        path = folder / FILES[0]
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        told = json.loads(content[8:end])
        text = change(told)
        text = json.dumps(told) if text is None else text
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[end:])

    return damage


def first_file(change) -> Any:
    return lambda folder: change(folder / FILES[0])


def with_file(name: str, file: Any) -> Any:
    return index(lambda told: told["weight_map"].update({name: file}))


def told(**fields: Any) -> Any:
    return header(lambda tensors: tensors["a.bias"].update(fields))


def cut(path: Path, by: int = 1) -> None:
    os.truncate(path, path.stat().st_size - by)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse(path: Path) -> None:
    """Writes a sparse file that claims a header of a terabyte and takes no disk space."""
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(path, (1 << 40) + 16)


DAMAGES: dict[str, tuple[Any, str]] = {
    "no weights": (lambda folder: (folder / INDEX).unlink(), r"neither.*pickles"),
    "no folder": (shutil.rmtree, r"cannot be opened"),
    "missing": (first_file(Path.unlink), rf"{FILES[0]}: cannot be opened"),
    "a pipe": (first_file(pipe), "not a regular file"),
    "cut": (first_file(cut), r"header is damaged: expected \d+ bytes of data"),
    "longer": (first_file(lambda path: os.truncate(path, 10_000)), "bytes of data"),
    "empty": (first_file(lambda path: os.truncate(path, 0)), "not a safetensors file"),
    "all header": (first_file(sparse), "not a safetensors file"),
    "no index": (lambda folder: (folder / INDEX).write_text("weights"), "no JSON"),
    "no map": (index(dict.clear), "expected an object weight_map"),
    "a list": (index(lambda told: told.update(weight_map=[1])), "expected an object weight_map"),
    "upwards": (with_file("a.bias", "../model.safetensors"), "file of this folder"),
    "the root": (with_file("a.bias", "/etc/x.safetensors"), "file of this folder"),
    "a hidden one": (with_file("a.bias", "..safetensors"), "file of this folder"),
    "a folder inside": (with_file("a.bias", "a/b.safetensors"), "file of this folder"),
    "another kind": (with_file("a.bias", "model.bin"), "file of this folder"),
    "no name": (with_file("a.bias", 3), "file of this folder"),
    "elsewhere": (with_file("a.bias", FILES[1]), r"'a\.bias' is in it, but not in"),
    "nowhere": (with_file("c", FILES[0]), r"'c' is not in it, but in"),
    "twice": (
        lambda folder: save_file(WEIGHTS, folder / FILES[1]),
        rf"{FILES[1]}: 'a\.\w+' is also in {FILES[0]}",
    ),
    "no object": (header(lambda tensors: "[]"), "no object"),
    "a name twice": (header(lambda tensors: '{"a": 1, "a": 2}'), "occurs twice"),
    "no text": (header(lambda tensors: "{" * 100_000), "no JSON"),
    "dtype": (told(dtype="F32"), "is not 56 bytes"),
    "no dtype": (told(dtype=[]), "expected sizes"),
    "shape": (told(shape=[8]), "is not 56 bytes"),
    "negative": (told(shape=[-7]), "expected sizes"),
    "huge": (told(shape=[1 << 40, 1 << 40]), "expected sizes"),
    "many dimensions": (told(shape=[1] * 64 + [7]), "expected sizes"),
    "a bool": (told(shape=[True]), "expected sizes"),
    "no shape": (told(shape=None), "expected sizes"),
    "more": (told(hidden=1), "expected dtype, shape and data_offsets"),
    "backwards": (told(data_offsets=[56, 0]), "expected sizes"),
    "one offset": (told(data_offsets=[56]), "expected sizes"),
    "over others": (told(data_offsets=[8, 64]), "begins at byte"),
    "beyond": (told(data_offsets=[1 << 40, (1 << 40) + 56]), "begins at byte"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_hostile_folders_are_errors(folder, damage):
    """Damaged and malicious folders raise an error, and no file stays open."""
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        WeightFiles(folder)
    assert open_files(folder) == []


def test_an_open_file_of_a_folder_is_found(folder):
    with (folder / INDEX).open():
        assert open_files(folder) == [str(folder / INDEX)]
    assert open_files(folder) == []


def test_a_dtype_that_torch_does_not_have_is_nobodys_until_it_is_wanted(folder):
    told(dtype="F4", shape=[7, 16])(folder)
    stored = WeightFiles(folder).tensors["a.bias"]
    assert stored.dtype is None and not stored.becomes(torch.float32)


def test_a_file_that_became_shorter(folder):
    files = WeightFiles(folder)
    cut(folder / FILES[0], 20)
    with pytest.raises(CheckpointError, match=r"00001.*'a\.weight': the file ends before"):
        read(files, "a.weight", 0, 105, torch.float32)
