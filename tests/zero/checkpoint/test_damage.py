# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged checkpoint folders raise errors that name the file."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import api

from ringcomm.errors import CheckpointError
from ringcomm.zero.checkpoint import (
    Checkpoints,
    FlatShard,
    LoadPlanner,
    Reader,
    SavePlanner,
    StorageReader,
    StorageWriter,
    export_safetensors,
)
from ringcomm.zero.checkpoint import format as manifest
from tests.support.covering import thinned
from tests.zero.checkpoint.states import FILES, MANIFEST, assert_step, forge, load_all, save_step


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]


@pytest.mark.parametrize("file", [MANIFEST, *FILES])
def test_a_flipped_bit_of_any_byte_is_an_error_that_names_the_file(folder, file):
    content = (folder / file).read_bytes()
    # Every fifth byte is enough for a file of tensors: its checksum treats all bytes the same.
    for at in range(0, len(content), 1 if file == MANIFEST else 5):
        (folder / file).write_bytes(flipped(content, at))
        with pytest.raises(CheckpointError, match=file):
            load_all(folder)
    (folder / file).write_bytes(content)
    assert_step(Reader(folder), 1, 2)


def test_without_checksums_a_flipped_bit_is_an_error_or_other_elements(folder):
    """Without checksums, names and shapes still load right, or the load raises."""
    file = FILES[0]
    content, whole = (folder / file).read_bytes(), load_all(folder)
    refused = 0
    for at in thinned(range(len(content)), 3):
        (folder / file).write_bytes(flipped(content, at))
        try:
            told = load_all(folder, verify=False)
        except CheckpointError as error:
            assert file in str(error)
            refused += 1
        else:
            assert [each[:2] for each in told[1:4]] == [each[:2] for each in whole[1:4]]
    assert refused > 40


@pytest.mark.parametrize("file", [MANIFEST, *FILES])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_of_another_length_is_an_error_that_names_it(folder, file, verify):
    content = (folder / file).read_bytes()
    lengths = {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}
    for changed in (*(content[:length] for length in sorted(lengths)), content + b"\0"):
        (folder / file).write_bytes(changed)
        if file == MANIFEST and changed == content.rstrip():
            assert_step(Reader(folder), 1, 2)  # the last byte is only the newline
            continue
        with pytest.raises(CheckpointError, match=file):
            load_all(folder, verify)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(folder, file):
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: is missing"):
        Reader(folder)


def test_a_file_of_another_checkpoint_is_told_by_its_checksum(folder):
    root = folder.parent
    other = save_step(Checkpoints(root.parent / "other"), 2)
    shutil.copy(folder / FILES[0], folder / FILES[1])
    with pytest.raises(CheckpointError, match=r"rank-00001.*expected (\d+ bytes|checksum)"):
        load_all(folder)
    shutil.copy(other / FILES[0], folder / FILES[0])
    with pytest.raises(CheckpointError, match="rank-00000"):
        load_all(folder)


def test_a_file_is_verified_once_and_only_if_it_is_read(folder):
    reader = Reader(folder)
    out = torch.empty(1)
    reader.read("moment", 0, out)
    content = (folder / FILES[0]).read_bytes()
    (folder / FILES[0]).write_bytes(flipped(content, 0))
    reader.verify([FILES[0]])
    (folder / FILES[1]).write_bytes(flipped((folder / FILES[1]).read_bytes(), 0))
    with pytest.raises(CheckpointError, match=f"{FILES[1]}: expected checksum"):
        reader.read("moment", 76, out)
    with pytest.raises(CheckpointError, match=f"{FILES[1]}: expected checksum"):
        reader.verify()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("file", [MANIFEST, FILES[0]])
def test_what_is_no_regular_file_is_not_opened(folder, file, kind):
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if kind == "link":
        # The path of the link is as long as the file that it points to.
        name = "e" * (2 - len(content) % 2)
        (folder / name).write_bytes(content)
        (folder / file).symlink_to("./" * ((len(content) - len(name)) // 2) + name)
        assert (folder / file).lstat().st_size == len(content)
        assert (folder / file).read_bytes() == content
    elif kind == "folder":
        (folder / file).mkdir()
    else:
        os.mkfifo(folder / file)
    with pytest.raises(CheckpointError, match=file):
        Reader(folder)


def test_a_manifest_too_large_to_be_one_is_not_read(folder):
    os.truncate(folder / MANIFEST, manifest.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CheckpointError, match="expected a file of at most"):
        Reader(folder)


# ---- malicious folders raise errors: no code runs, no memory is taken, no other file is opened


def moment(change):
    return lambda text: change(text["tensors"]["moment"])


def renamed(to):
    def change(text):
        text["files"][to] = text["files"].pop(FILES[0])
        own = text["ranks"][0]["tensors"]
        for tensor in (*text["tensors"].values(), *own.values()):
            for piece in tensor["pieces"]:
                piece["file"] = piece["file"].replace(FILES[0], to)

    return change


def of_size(elems):
    def change(tensor):
        tensor["size"] = tensor["shape"] = [elems]
        tensor["pieces"] = [{**tensor["pieces"][0], "offsets": [0], "sizes": [elems]}]

    return moment(change)


def own_tensor(extents):
    def change(text):
        tensor = text["ranks"][0]["tensors"]["rng"]
        tensor["size"] = tensor["shape"] = tensor["pieces"][0]["sizes"] = extents

    return change


FORGERIES = {
    "size": (of_size(10**15), "is too small for its tensors"),
    "size beyond all": (of_size(1 << 63), "size"),
    "empty but huge": (moment(lambda t: t.update(size=[0, 1 << 63])), "size"),
    "rank's size": (own_tensor([10**12]), "is too small"),
    "boolean size": (of_size(True), "expected int, got True"),
    "negative size": (moment(lambda t: t.update(size=[-7], shape=[-7], pieces=[])), "size"),
    "shape": (moment(lambda t: t.update(shape=[7, 12])), "expected 77 elements"),
    "gap": (moment(lambda t: t["pieces"].pop()), "the pieces hold 39 of its 77"),
    "overlap": (moment(lambda t: t["pieces"][1].update(offsets=[38])), "two pieces overlap"),
    "outside": (moment(lambda t: t["pieces"][1].update(offsets=[40])), "is not inside"),
    "same piece": (moment(lambda t: t.update(pieces=t["pieces"][:1] * 2)), "two pieces overlap"),
    "dtype": (moment(lambda t: t.update(dtype="object")), "dtype 'object' is unknown"),
    "dtype of half": (moment(lambda t: t.update(dtype="float16")), r"moment@0: expected F16 \(39"),
    "key": (moment(lambda t: t["pieces"][0].update(key="nothing")), "nothing: cannot be read"),
    "key of another": (
        moment(lambda t: t["pieces"][0].update(key="model.bias@0")),
        r"model.bias@0: expected F32 \(39,\), got F32 \(3,\)",
    ),
    "unknown file": (
        moment(lambda t: t["pieces"][0].update(file="rank-00009.safetensors")),
        "is not part of this checkpoint",
    ),
    "file above": (renamed("../rank-00000.safetensors"), "is not a file name of a checkpoint"),
    "file anywhere": (renamed("/etc/passwd"), "is not a file name of a checkpoint"),
    "file below": (renamed("a/rank-00000.safetensors"), "is not a file name of a checkpoint"),
    "other file": (renamed("checkpoint.json"), "is not a file name of a checkpoint"),
    "file with more": (renamed("rank-00000.safetensors\n"), "is not a file name of a checkpoint"),
    "missing file": (renamed("rank-00005.safetensors"), "rank-00005.safetensors: is missing"),
    "no ranks": (lambda text: text.update(ranks=[]), "no rank saved it"),
    "no entry": (lambda text: text.pop("values"), "has no entry 'values'"),
    "kind": (lambda text: text.update(tensors=[]), "expected dict, got"),
    "data": (lambda text: text.update(data={"$call": ["os.system", "true"]}), "unknown object"),
    "key of a dict": (lambda text: text.update(data={"$dict": [[[], 1]]}), "unhashable"),
    "version": (lambda text: text.update(version=2), "expected version 1, got 2"),
    "format": (lambda text: text.update(format="x"), "it is not a manifest of a ringcomm"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused(folder, name):
    change, message = FORGERIES[name]
    forge(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_all(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "{",
        "[" * 100_000,
        '{"format":' * 100_000,
        "1" * 10_000,
        "\x00",
        "NaN",
    ],
)
def test_what_is_no_manifest_is_refused(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: cannot be used"):
        Reader(folder)


def test_a_manifest_that_is_no_text_is_refused(folder):
    (folder / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: cannot be read"):
        Reader(folder)


def replaced(folder, file, content):
    """Puts other content into a file, and that content's size and checksum into the manifest."""
    (folder / file).write_bytes(content)
    told = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    forge(folder, lambda text: text["files"].update({file: told}))


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


HEADERS = {
    "length of 2^60": (1 << 60).to_bytes(8, "little"),
    "length of the file": (4096).to_bytes(8, "little"),
    "no JSON": header("x" * 8),
    "nested": header("[" * 3000),
    "no tensors": header("{}  "),
    "offsets beyond": header('{"moment@0":{"dtype":"F32","shape":[39],"data_offsets":[0,156]}}'),
    "huge": header('{"moment@0":{"dtype":"F32","shape":[9000000000000],"data_offsets":[0,4]}}'),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_file_is_refused(folder, name):
    size = len((folder / FILES[0]).read_bytes())
    replaced(folder, FILES[0], HEADERS[name].ljust(max(size, len(HEADERS[name])), b"\0"))
    with pytest.raises(CheckpointError, match=rf"{FILES[0]}: .*cannot be read"):
        load_all(folder)


def _little_memory(source, rank, world_size):
    """Loads folders with forged sizes, in a process that may allocate only 64 MiB more."""
    if rank:
        return
    for name in ("size", "rank's size", "empty but huge"):
        copy = source.with_name(f"forged {name}")
        shutil.copytree(source, copy)
        forge(copy, FORGERIES[name][0])
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        usual = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), usual[1]))
        with pytest.raises(CheckpointError):
            load_all(copy)
        resource.setrlimit(resource.RLIMIT_AS, usual)


def test_a_forged_size_takes_no_memory(two_ranks, folder):
    two_ranks.run(partial(_little_memory, folder))


class Bomb:
    """Creates a file as evidence when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("file", [MANIFEST, FILES[0]])
def test_a_pickle_is_not_loaded(folder, tmp_path, file):
    trace = tmp_path / "trace"
    content = pickle.dumps(Bomb(trace))
    pickle.loads(content)
    assert trace.exists()  # the bomb works
    trace.unlink()
    # The place where torch's own reader would look.
    (folder / ".metadata").write_bytes(content)
    if file == MANIFEST:
        (folder / file).write_bytes(content)
    else:
        replaced(folder, file, content.ljust((folder / file).stat().st_size, b"."))
    with pytest.raises(CheckpointError, match=file):
        load_all(folder)
    state = {"moment": FlatShard(77, 0, torch.empty(77))}
    with pytest.raises(api.CheckpointException):
        dcp.load(state, storage_reader=StorageReader(folder), planner=LoadPlanner(), no_dist=True)
    with pytest.raises(CheckpointError):
        export_safetensors(folder, tmp_path / "export", names=["weight"])
    assert not trace.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_pickles_or_unpickles(folder, tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("pickle is used")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refused)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refused)
    load_all(folder)
    save_step(Checkpoints(tmp_path / "saved"), 1)
    values = {"a": torch.arange(6.0)}
    told = {"c": (1, "x"), "d": [None, 2.5]}
    path = tmp_path / "dcp"
    dcp.save(
        {"values": values, "plain": told, "e": True},
        storage_writer=StorageWriter(path),
        planner=SavePlanner(),
        no_dist=True,
    )
    loaded_values = {"a": torch.zeros(6)}
    loaded: dict[str, Any] = {"values": loaded_values, "plain": dict.fromkeys(told), "e": None}
    dcp.load(loaded, storage_reader=StorageReader(path), planner=LoadPlanner(), no_dist=True)
    assert torch.equal(loaded_values["a"], torch.arange(6.0))
    assert loaded["plain"] == told and loaded["e"] is True
    export_safetensors(folder, tmp_path / "export")
