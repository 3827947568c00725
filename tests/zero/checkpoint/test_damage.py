"""Damaged and foreign folders are errors that name the file."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from ringcomm.errors import CheckpointError
from ringcomm.zero.checkpoint import Checkpoints, Reader
from ringcomm.zero.checkpoint import format as manifest
from tests.zero.checkpoint.states import FILES, MANIFEST, assert_step, load_all, save_step


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]


@pytest.mark.parametrize("file", [MANIFEST, *FILES])
def test_a_flipped_bit_of_any_byte_is_an_error_that_names_the_file(folder, file):
    content = (folder / file).read_bytes()
    for place in range(len(content)):
        (folder / file).write_bytes(flipped(content, place))
        with pytest.raises(CheckpointError, match=file):
            load_all(folder)
    (folder / file).write_bytes(content)
    assert_step(Reader(folder), 1, 2)


@pytest.mark.parametrize("file", FILES)
def test_without_checksums_a_flipped_bit_is_an_error_or_other_elements(folder, file):
    """The header is still believed in nothing that matters."""
    content, whole = (folder / file).read_bytes(), load_all(folder)
    refused = 0
    for place in range(len(content)):
        (folder / file).write_bytes(flipped(content, place))
        try:
            told = load_all(folder, verify=False)
        except CheckpointError as error:
            assert file in str(error)
            refused += 1
        else:
            assert [each[:2] for each in told[1:4]] == [each[:2] for each in whole[1:4]]
    assert refused > 100


@pytest.mark.parametrize("file", [MANIFEST, *FILES])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_of_another_length_is_an_error_that_names_it(folder, file, verify):
    content = (folder / file).read_bytes()
    lengths = {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}
    for changed in (*(content[:length] for length in sorted(lengths)), content + b"\0"):
        (folder / file).write_bytes(changed)
        if file == MANIFEST and changed == content.rstrip():
            assert_step(Reader(folder), 1, 2)  # its last byte only ends the line
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
def test_what_is_no_plain_file_is_not_opened(folder, file, kind):
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if kind == "link":
        # As long as the file it stands for.
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
