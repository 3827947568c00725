# SPDX-License-Identifier: Apache-2.0
"""convert() refuses checkpoints that would exhaust memory, disk or time, or crash it.

The peak of memory, as tracemalloc counts it, is at most proportional to the files' bytes.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import socket
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ringcomm import zero
from ringcomm.errors import CheckpointError
from ringcomm.extras.migrate.torch_file import Inert, MappedFile, TorchFile, read_pickle

OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
# Allowed bytes of memory per byte of a file, and for the reader itself.
MOST_PER_BYTE, CONSTANT = 300, 4 << 20


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def called(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def sequence(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def storage(key: str = "0", elems: int = 1) -> bytes:
    kind = called("torch", "FloatStorage")
    return sequence(text("storage"), kind, text(key), text("cpu"), number(elems)) + b"Q"


def tensor(size: tuple[int, ...] = (1,), stride: tuple[int, ...] = (1,), offset: int = 0) -> bytes:
    sizes, strides = sequence(*map(number, size)), sequence(*map(number, stride))
    args = sequence(storage(), number(offset), sizes, strides, b"\x89", b"N")
    return called("torch._utils", "_rebuild_tensor_v2") + args + b"R"


def tensor_of(dtype: str) -> bytes:
    one = sequence(number(1))
    args = sequence(storage(), number(0), one, one, b"\x89", b"N", called("torch", dtype))
    return called("torch._utils", "_rebuild_tensor_v3") + args + b"R"


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as packed:
        for name, content in members.items():
            packed.writestr(f"archive/{name}", content)
    return out.getvalue()


def saved(body: bytes, elems: int = 1) -> bytes:
    return archive({"data.pkl": b"\x80\x02" + body + b".", "data/0": bytes(4 * elems)})


def dcp(folder: Path, raw: bytes, size: tuple[int, ...] = (1,), **info: Any) -> None:
    """Writes a checkpoint of one tensor with one chunk."""
    stored = {"relative_path": "x.distcp", "offset": 0, "length": len(raw), **info}
    described = dcp_metadata.TensorStorageMetadata(
        dcp_metadata.TensorProperties(dtype=torch.float32), torch.Size(size), []
    )
    index = dcp_metadata.MetadataIndex("w", torch.Size([0] * len(size)))
    whole = dcp_metadata.Metadata({"w": described}, {"w": ("w",)}, {index: _StorageInfo(**stored)})
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    (folder / "x.distcp").write_bytes(raw)


def refused(folder: Path) -> str:
    """Converts a folder that must be refused; returns the error's text."""
    size_bytes = sum(min(path.lstat().st_size, 1 << 28) for path in folder.iterdir())
    out = folder.parent / "out"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            zero.convert(folder, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < CONSTANT + MOST_PER_BYTE * size_bytes
    assert not out.exists() or not any(out.iterdir())
    assert len(str(raised.value)) < 2000
    return str(raised.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    return made


def test_the_control_is_converted(folder, tmp_path):
    dcp(folder, saved(tensor()))
    assert zero.convert(folder, tmp_path / "out").name == "step-00000000"


MANY = 10_000
SET = called("builtins", "set") + b"q\x00"
LONG_LIST = b"]q\x01(" + b"N" * MANY + b"e"
NESTED = called("torch._tensor", "_rebuild_from_type_v2") + b"q\x000"
# Thirty times, a list of two references to the list before: 2^30 values as a tree.
DOUBLED = b"]q\x00" + b"".join(b"(h%ch%clq%c" % (n, n, n + 1) for n in range(30))


def again(kind: bytes, argument: bytes) -> bytes:
    """Returns a list of 4000 calls with one argument."""
    return kind + b"q\x00" + argument + b"\x85q\x020(" + b"h\x00h\x02R" * 4000 + b"l"


PICKLES: dict[str, bytes] = {
    "a key of nested tuples": b"})" + b"\x85" * MANY + b"K\x01s",
    "a key that is a tree of shared tuples": b"})" + b"q\x00h\x00\x86" * 30 + b"K\x01s",
    "a list nested deep": b"]" * MANY + b"a" * (MANY - 1),
    "a list that holds itself": b"]q\x00h\x00a",
    "marks far above the bottom": b"N" * MANY + b"(t0" * MANY,
    "calls within calls": NESTED
    + b"(h\x00N)t"
    + b"q\x010(h\x00Nh\x01t" * 500
    + b"q\x010h\x00h\x01R",
    "a set that is copied": again(called("builtins", "set"), LONG_LIST),
    "a size that is copied": again(called("torch", "Size"), LONG_LIST),
    "pairs that are copied": again(
        called("collections", "OrderedDict"), LONG_LIST.replace(b"N", b"NN\x86")
    ),
    "text that is encoded": called("_codecs", "encode")
    + b"q\x00"
    + text("x" * MANY)
    + text("latin1")
    + b"\x86q\x020("
    + b"h\x00h\x02R" * 4000
    + b"l",
    "arguments that are no tuple": SET + text("x" * MANY) + b"R",
    "a name that is joined": text("m" * MANY)
    + b"q\x00"
    + text("n" * MANY)
    + b"q\x01("
    + b"h\x00h\x01\x93" * 4000
    + b"l",
    "an entry of the memo without end": b"Nr\xff\xff\xff\xff",
    "an entry of the memo in digits": b"Np" + b"9" * 400 + b"\n",
    "an integer of 2 GB": b"\x8b\x7f\xff\xff\xff",
    "an integer of many bytes": b"\x8b" + struct.pack("<I", MANY) + b"\x01" * MANY,
    "an integer of many digits": b"I" + b"9" * MANY + b"\n",
    "text of 16 EB": b"\x8d" + b"\xff" * 8,
    "a list of references": DOUBLED,
    "long text many times": text("x" * MANY) + b"q\x00(" + b"h\x00" * MANY + b"l",
    "a long integer many times": b"L" + b"9" * 4200 + b"L\nq\x00(" + b"h\x00" * MANY + b"l",
    "an integer of 255 bytes many times": b"\x8a\xff"
    + b"\x7f" * 255
    + b"q\x00("
    + b"h\x00" * MANY
    + b"l",
    "text that JSON escapes many times": text("\x01" * 100) + b"q\x00(" + b"h\x00" * MANY + b"l",
    "a long name as a key many times": b"}"
    + called("m" * 120, "n" * 120)
    + b"Nsq\x00("
    + b"h\x00" * MANY
    + b"l",
    "a value below a mark": b"N(a",
    "nothing on the stack": b"R",
    "no end": b"N" * 10,
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("where", ["metadata", "chunk", "optimizer"])
def test_pickles(folder, name, where):
    """Puts each pickle into each of the files that hold pickles."""
    if where == "metadata":
        (folder / ".metadata").write_bytes(b"\x80\x02" + PICKLES[name] + b".")
    elif where == "chunk":
        dcp(folder, saved(PICKLES[name]))
    else:
        (folder / OPTIMIZER).write_bytes(saved(PICKLES[name]))
    refused(folder)


def test_keys_have_hashes_that_nobody_can_choose():
    """Integers a multiple of 2^61 - 1 apart have equal hashes, as do tuples of small integers."""
    keys = [n * (2**61 - 1) for n in range(1, 100)] + [1 << 16, -1, 0.5, (1, 2), b"x"]
    found = read_pickle(pickle.dumps(dict.fromkeys(keys)), "keys")
    assert list(found) == [str(key) for key in keys]
    keys_of_data = [0, 7, (1 << 16) - 1, None, "text"]
    assert list(read_pickle(pickle.dumps(dict.fromkeys(keys_of_data)), "keys")) == keys_of_data
    with pytest.raises(CheckpointError, match="as a key"):
        read_pickle(pickle.dumps({tuple(range(9)): 1}), "keys")


@pytest.mark.parametrize("dtype", ["qint8", "bits8", "complex64", "nothing", "Tensor"])
def test_dtypes_are_those_of_a_table(folder, dtype):
    dcp(folder, saved(tensor_of(dtype)))
    assert "cannot be read" in refused(folder)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((1 << 62, 1 << 62), (0, 0), 0),
        ((0, 1 << 61, 1 << 61), (1, 1, 1), 0),
        ((1 << 50,), (0,), 0),
        ((2,), (0,), 0),
        ((1,), (1,), 1),
        ((1,), (1,), -1),
        ((-1,), (1,), 0),
        ((1,) * 65, (1,) * 65, 0),
        ((1,), (1, 1), 0),
        ((1,), (1,), 1 << 70),
    ],
)
def test_tensors_have_no_more_elements_than_their_storage(folder, size, stride, offset):
    dcp(
        folder,
        saved(tensor(size, stride, offset)),
        size=size if len(size) == 1 and size[0] > 0 else (1,),
    )
    refused(folder)


def test_tensors_that_share_a_storage_a_thousand_times(folder):
    body = tensor((1000,), (1,)).replace(number(1) + b"tQ", number(1000) + b"tQ", 1)
    (folder / OPTIMIZER).write_bytes(saved(b"(" + body * 1000 + b"l", elems=1000))
    assert "same bytes" in refused(folder)


@pytest.mark.parametrize(
    "info",
    [
        {"offset": float("inf")},
        {"offset": -1},
        {"offset": 1 << 62},
        {"offset": True},
        {"length": 1 << 40},
        {"length": None},
        {"length": 3},
        {"relative_path": "../x.distcp"},
        {"relative_path": ".."},
        {"relative_path": ""},
        {"relative_path": "x\0"},
        {"relative_path": 3},
        {"relative_path": "y" * 5000},
        {"transform_descriptors": ["zstd"]},
    ],
)
def test_places_of_chunks(folder, info):
    dcp(folder, saved(tensor()), **info)
    refused(folder)


def test_chunks_that_share_bytes(folder):
    """Otherwise a small description would turn one piece of a file into many."""
    raw = saved(tensor())
    dcp(folder, raw)
    described = dcp_metadata.TensorStorageMetadata(
        dcp_metadata.TensorProperties(dtype=torch.float32), torch.Size((2,)), []
    )
    chunks = {
        dcp_metadata.MetadataIndex("w", torch.Size([at])): _StorageInfo("x.distcp", 0, len(raw))
        for at in range(2)
    }
    whole = dcp_metadata.Metadata({"w": described}, {"w": ("w",)}, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    assert "two chunks share bytes" in refused(folder)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 << 30)


FILES: dict[str, Callable[[Path], Any]] = {
    "pipe": _pipe,
    "socket": _socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "process": lambda path: path.symlink_to("/proc/self/mem"),
    "empty": Path.touch,
    "holes": _holes,
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", [OPTIMIZER, ".metadata", "latest", "x.distcp"])
def test_files_that_are_none(folder, monkeypatch, kind, name):
    monkeypatch.chdir(folder)
    dcp(folder, saved(tensor()))
    if name != "x.distcp":
        (folder / ".metadata").unlink()
    (folder / name).unlink(missing_ok=True)
    FILES[kind](folder / name)
    refused(folder)


def test_latest_leads_to_no_folder_around(folder):
    (folder / "latest").write_text("..")
    (folder.parent / "latest").write_text(folder.name)
    assert "expected a folder of DeepSpeed" in refused(folder)


def test_archives_are_not_compressed(folder):
    whole = {"data.pkl": b"\x80\x02}.", "byteorder": bytes(1 << 20)}
    (folder / OPTIMIZER).write_bytes(archive(whole, zipfile.ZIP_DEFLATED))
    assert "byteorder is not there, or compressed" in refused(folder)
    (folder / OPTIMIZER).write_bytes(archive(whole))
    assert "a byteorder of at most 6 bytes" in refused(folder)


def test_members_of_an_archive_share_nothing(folder):
    def directory(raw: bytes, change: Callable[[bytearray, int], None]) -> bytes:
        changed = bytearray(raw)
        change(changed, raw.rindex(b"PK\x01\x02"))
        return bytes(changed)

    def to_first(raw: bytearray, at: int) -> None:
        struct.pack_into("<I", raw, at + 42, 0)

    def larger(raw: bytearray, at: int) -> None:
        struct.pack_into("<2I", raw, at + 20, 1 << 30, 1 << 30)

    def renamed(raw: bytearray, at: int) -> None:
        raw[at + 46 : at + 46 + 16] = b"another/data.pkl"

    # Both members have names of the same length.
    whole = archive({"data.pkl": b"\x80\x02" + tensor() + b".", "data/000": bytes(4)})
    for change in (to_first, larger, renamed):
        (folder / OPTIMIZER).write_bytes(directory(whole, change))
        refused(folder)


def test_two_tensors_of_one_name(folder):
    dcp(folder, saved(tensor()))
    described = dcp_metadata.TensorStorageMetadata(
        dcp_metadata.TensorProperties(dtype=torch.float32), torch.Size((0,)), []
    )
    paths = {"a": (1,), "b": ("1",)}
    whole = dcp_metadata.Metadata({"a": described, "b": described}, paths, {})
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    refused(folder)


def test_the_work_grows_with_the_bytes(monkeypatch, tmp_path):
    """Twice the pickle needs at most about twice the memory, for any instructions."""
    bodies = (
        b"]",
        b"}",
        b")",
        b"N",
        b"]\x94",
        b"(",
        b")\x85",
        called("a", "b"),
        text("ab"),
        b"K\x01",
    )
    for body in bodies:
        peaks = []
        for count in (10_000, 20_000):
            raw = b"\x80\x04" + body * count + b"."
            tracemalloc.start()
            try:
                with pytest.raises(CheckpointError):
                    read_pickle(raw, "many")
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
            assert peaks[-1] < CONSTANT + MOST_PER_BYTE * len(raw), body
        assert peaks[1] < 2.6 * peaks[0] + CONSTANT
    # The number of tensors is limited by the bytes of the instructions that make them.
    args = b"(" + storage() + number(0) + sequence(number(1)) * 2 + b"\x89N" + b"tq\x02"
    many = (
        called("torch._utils", "_rebuild_tensor_v2")
        + b"q\x01"
        + args
        + b"0"
        + b"h\x01h\x02R" * 2000
    )
    path = tmp_path / "tensors.pt"
    path.write_bytes(saved(b"(" + many + b"l"))
    with pytest.raises(CheckpointError, match="copies more than its size allows"):
        TorchFile(MappedFile(path)).read()


def test_inert_objects_say_what_they_are():
    made = read_pickle(pickle.dumps({"kind": pickletools.OpcodeInfo}), "class")["kind"]
    assert isinstance(made, Inert) and repr(made) == "Inert('pickletools.OpcodeInfo')"


class Foreign:
    """A class of another library."""

    def __init__(self) -> None:
        self.number = 1


FOREIGN = "got an object of tests.extras.migrate.test_convert_hostile.Foreign"
STAGE_2 = {"zero_stage": 2, "partition_count": 1}
OTHERS: list[tuple[object, object, str]] = [
    (Foreign(), None, f"expected a dict with 'optimizer_state_dict', {FOREIGN}"),
    ([1, 2], None, "expected a dict with 'optimizer_state_dict', got list [1, 2]"),
    (
        {"optimizer_state_dict": Foreign()},
        None,
        f"optimizer_state_dict: expected a dict, {FOREIGN}",
    ),
    ({"optimizer_state_dict": {"a": 1}}, None, "with 'zero_stage', got a dict with ['a']"),
    ({"optimizer_state_dict": STAGE_2}, Foreign(), f"states.pt: expected a dict, {FOREIGN}"),
    ({"optimizer_state_dict": STAGE_2}, {"param_shapes": 3}, "expected a list, got int 3"),
    (
        {"optimizer_state_dict": {**STAGE_2, "single_partition_of_fp32_groups": Foreign()}},
        {"param_shapes": [], "shared_params": {}, "lr_scheduler": None, "global_steps": 1},
        f"single_partition_of_fp32_groups: expected a list, {FOREIGN}",
    ),
]


@pytest.mark.parametrize(("optimizer", "model", "says"), OTHERS)
def test_what_is_no_structure_of_deepspeed_is_named(folder, optimizer, model, says):
    torch.save(optimizer, folder / OPTIMIZER)
    if model is not None:
        torch.save(model, folder / "mp_rank_00_model_states.pt")
    said = refused(folder)
    assert says in said and "Inert" not in said and "Error(" not in said


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (Foreign(), f"expected an object with 'state_dict_metadata', {FOREIGN}"),
        ([1], "expected an object with 'state_dict_metadata', got list [1]"),
        (dcp_metadata.Metadata({}, None, 3), "storage_data: expected a dict, got int 3"),
    ],
)
def test_what_is_no_metadata_of_torch_is_named(folder, metadata, says):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = refused(folder)
    assert says in said and "Inert" not in said and "Error(" not in said
