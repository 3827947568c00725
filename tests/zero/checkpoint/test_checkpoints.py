# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: contents, deletion of old ones, and that all ranks save or none does."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import pytest
import torch

from ringcomm.errors import (
    ArgumentError,
    CheckpointError,
    MismatchError,
    RingcommError,
    UnsupportedError,
)
from ringcomm.zero.checkpoint import Checkpoints, FlatShard
from ringcomm.zero.checkpoint import format as commit
from ringcomm.zero.checkpoint.format import SavedFile, write_tensor_file
from tests.zero.checkpoint.states import (
    SHAPES,
    assert_step,
    files_below,
    flat_shard,
    in_world,
    save_step,
    state,
    values,
)
from tests.zero.checkpoint.system_calls import count_calls, interposed


def test_a_folder_that_another_process_makes_meanwhile_is_a_folder(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def made_by_both(path):
        mkdir(path)
        mkdir(path)

    monkeypatch.setattr(os, "mkdir", made_by_both)
    commit.make_folder(tmp_path / "run" / "stage1")
    assert (tmp_path / "run" / "stage1").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        commit.make_folder(tmp_path / "file")


def test_stages_that_save_into_one_root_are_told_so(tmp_path, monkeypatch):
    name = "ringcomm.zero.checkpoint.folder.write_tensor_file"

    def meanwhile(path, entries):
        monkeypatch.setattr(name, write_tensor_file)
        save_step(Checkpoints(tmp_path), 1)  # this save removes the files that look left over
        return SavedFile(0, "")

    monkeypatch.setattr(name, meanwhile)
    with pytest.raises(CheckpointError, match="each save into a root of their own"):
        save_step(Checkpoints(tmp_path), 2)
    assert_step(Checkpoints(tmp_path).reader(), 1)


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [40]), (2, [30, 40]), (3, [20, 30, 40]), (None, [10, 20, 30, 40])]
)
def test_the_latest_are_kept(tmp_path, keep, left):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in (10, 20, 30, 40):
        save_step(checkpoints, step)
    assert checkpoints.steps() == left and checkpoints.latest() == 40
    assert {each.name for each in tmp_path.iterdir()} == {f"step-{n:08d}" for n in left}
    for step in left:
        assert_step(checkpoints.reader(step), step)
    assert_step(checkpoints.reader(), 40)


def test_nothing_is_there_before_the_first_save(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "root")
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.incomplete()) == ([], None, [])
    with pytest.raises(CheckpointError, match="expected a complete checkpoint, found none"):
        checkpoints.reader()
    save_step(checkpoints, 0)
    assert_step(checkpoints.reader(), 0)


def test_other_names_are_left_alone(tmp_path):
    others = ["step-5", "step-000000005", "step-", ".partial-x", "step-00000005.bak", "notes"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "step-00000006").write_text("a file")
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.steps() == [] and checkpoints.incomplete() == []
    save_step(checkpoints, 7)
    assert {*others, "step-00000006"} <= {each.name for each in tmp_path.iterdir()}


def test_a_step_without_its_manifest_is_never_loaded_nor_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save_step(checkpoints, 1)
    broken = tmp_path / "step-00000009"
    broken.mkdir()
    assert checkpoints.steps() == [1] and checkpoints.incomplete() == [broken]
    assert_step(checkpoints.reader(), 1)
    with pytest.raises(CheckpointError, match=r"step-00000009: .* has no checkpoint\.json"):
        checkpoints.reader(9)
    save_step(checkpoints, 2)
    assert checkpoints.incomplete() == [broken]
    with pytest.raises(CheckpointError, match="there is one, and it is not overwritten"):
        save_step(checkpoints, 9)
    assert_step(checkpoints.reader(), 2)


def test_leftovers_go_with_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    nonce = "0123456789abcdef"
    left = [tmp_path / f".partial-step-00000005-{nonce}", tmp_path / f".removed-{nonce}"]
    for each in left:
        each.mkdir()
        (each / "rank-00000.safetensors").write_bytes(b"half")
    assert checkpoints.incomplete() == left and checkpoints.steps() == []
    save_step(checkpoints, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_steps_only_grow_until_one_goes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save_step(checkpoints, 10)
    save_step(checkpoints, 20)
    before = files_below(tmp_path)
    for step in (20, 15, 0):
        with pytest.raises(ArgumentError, match="expected a step after 20, which is saved"):
            save_step(checkpoints, step)
    assert files_below(tmp_path) == before
    checkpoints.remove(20)
    assert checkpoints.steps() == [10] and checkpoints.incomplete() == []
    with pytest.raises(ArgumentError, match="expected a checkpoint, there is none"):
        checkpoints.remove(20)
    save_step(checkpoints, 15)
    assert checkpoints.steps() == [10, 15]


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 10**18])
def test_what_is_no_step_is_refused(tmp_path, step):
    with pytest.raises(ArgumentError, match="step: expected a number from 0 on"):
        Checkpoints(tmp_path).save(step, state(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, -1, True, 1.0])
def test_what_keeps_nothing_is_refused(tmp_path, keep):
    with pytest.raises(ArgumentError, match="keep: expected a number from 1 on, or None"):
        Checkpoints(tmp_path, keep=keep)


X = values("moment", 0)
FLAWS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "step": ({"step": 2}, MismatchError, "Step is 1 on rank 0 and 2 on rank 1"),
    "data": ({"data": 1}, MismatchError, "ranks 0 and 1 give different data; pass data"),
    "dtype": (
        {"x": flat_shard(X.double(), [40], 1)},
        MismatchError,
        "on rank 0 and .*float64.* on rank 1",
    ),
    "elems": (
        {"x": flat_shard(X[:60], [40], 1)},
        MismatchError,
        r"\[77\], \[77\]\] on rank 0 and .*60",
    ),
    "shape": (
        {"x": flat_shard(X, [40], 1, (7, 11))},
        MismatchError,
        r"\[77\]\] on .*\[7, 11\]\] on rank 1",
    ),
    "gap": ({"x": flat_shard(X, [41], 1)}, ArgumentError, "the pieces hold 76 of its 77 elements"),
    "twice": (
        {"x": flat_shard(X, [39], 1)},
        ArgumentError,
        r"overlap, .*rank-00000.*\(in rank-00001",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_ranks_that_do_not_fit_save_nothing(worlds, tmp_path, flaw):
    given, kind, message = FLAWS[flaw]

    def work(ranks):
        mine = given if ranks.rank else {}
        tensors = {"x": mine.get("x", flat_shard(X, [40], ranks.rank))}
        checkpoints = Checkpoints(tmp_path, ranks=ranks)
        with pytest.raises(kind, match=message):
            checkpoints.save(mine.get("step", 1), tensors, data=mine.get("data", 0))
        assert list(tmp_path.iterdir()) == []
        save_step(checkpoints, 3, ranks.rank, 2)
        return True

    assert in_world(worlds, 2, work) == [True, True]
    assert_step(Checkpoints(tmp_path).reader(), 3, 2)


BAD_CONTENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tensor": (
        {"tensors": {"x": torch.ones(3)}},
        ArgumentError,
        "expected a FlatShard, got Tensor",
    ),
    "name": (
        {"tensors": {"": flat_shard(X, [], 0)}},
        ArgumentError,
        "names as text that is not empty",
    ),
    "surrogate": ({"tensors": {"\ud800": flat_shard(X, [], 0)}}, ArgumentError, "names as text"),
    "number": ({"tensors": {3: flat_shard(X, [], 0)}}, ArgumentError, "names as text"),
    "rank tensor": ({"rank_tensors": {"x": 3}}, ArgumentError, "expected a tensor, got int"),
    "rank dtype": (
        {"rank_tensors": {"x": torch.ones(1, dtype=torch.complex64)}},
        UnsupportedError,
        "expected a dtype of",
    ),
    "rank data": ({"rank_data": {1, 2}}, UnsupportedError, "rank_data: expected None"),
}


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_one_ranks_bad_argument_is_told_to_all(worlds, tmp_path, name):
    settings, kind, message = BAD_CONTENTS[name]

    def work(ranks):
        mine: dict[str, Any] = {"tensors": {}, **(settings if ranks.rank == 1 else {})}
        with pytest.raises(RingcommError, match=message) as raised:
            Checkpoints(tmp_path, ranks=ranks).save(1, **mine)
        return type(raised.value), raised.value.repeats, "rank 1 of 3 failed" in str(raised.value)

    told = in_world(worlds, 3, work)
    assert told == [(kind, True, True), (kind, False, False), (kind, True, True)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_full_disk_on_one_rank_is_told_to_all(worlds, tmp_path, broken):
    def full(number, name, args):
        if name == "open" and f"rank-{broken:05d}" in str(args[0]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))

    def saves_first(ranks):
        return save_step(Checkpoints(tmp_path, ranks=ranks), 1, ranks.rank, 3)

    def work(ranks):
        checkpoints = Checkpoints(tmp_path, ranks=ranks)
        with pytest.raises(CheckpointError, match="No space left on device") as raised:
            save_step(checkpoints, 2, ranks.rank, 3)
        assert raised.value.repeats == (ranks.rank != broken)
        assert f"rank {broken} of 3" in str(raised.value)
        return checkpoints

    in_world(worlds, 3, saves_first)
    with interposed(full):
        checkpoints = in_world(worlds, 3, work)[0]
    assert checkpoints.steps() == [1] and checkpoints.incomplete() == []
    assert_step(checkpoints.reader(), 1, 3)


def test_an_error_of_any_call_leaves_what_was_and_the_next_save_works(tmp_path, caplog):
    """Lets each call that changes the disk fail in turn: the old checkpoint stays loadable."""
    caplog.set_level(logging.ERROR)
    root = tmp_path / "counted"
    save_step(Checkpoints(root, keep=1), 1)
    calls = count_calls(lambda: save_step(Checkpoints(root, keep=1), 2))
    for failing in range(calls):
        root = tmp_path / str(failing)
        checkpoints = Checkpoints(root, keep=1)
        save_step(checkpoints, 1)

        def fails(number, name, args, failing=failing):
            if number == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        raised = None
        with interposed(fails):
            try:
                save_step(checkpoints, 2)
            except CheckpointError as error:
                raised = error
        # If no error was raised, the new checkpoint is saved; only removing an old one failed.
        assert raised is None or "cannot write: [Errno 5]" in str(raised)
        assert raised is not None or checkpoints.latest() == 2
        latest = checkpoints.latest()
        assert latest is not None
        assert_step(checkpoints.reader(), latest)
        save_step(checkpoints, 3)
        assert_step(checkpoints.reader(), 3)
        assert [each.name for each in root.iterdir()] == ["step-00000003"]
    assert calls > 15


def test_a_folder_that_a_rank_does_not_see_is_an_error(worlds, tmp_path):
    def work(ranks):
        root = tmp_path / ("here" if ranks.rank == 0 else "elsewhere")
        with pytest.raises(CheckpointError, match="all ranks must see the same file system"):
            save_step(Checkpoints(root, ranks=ranks), 1, ranks.rank, 2)
        return True

    assert in_world(worlds, 2, work) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0, [1.0]), "expected data as a tensor, got list"),
        ((4, 0, FlatShard(4, 0, torch.ones(4))), "expected data as a tensor, got FlatShard"),
        (
            (4, 0, torch.ones(2, 2)),
            r"expected contiguous data of one dimension, got shape \(2, 2\)",
        ),
        ((4, 0, torch.ones(8)[::2]), "expected contiguous data"),
        ((4, 1, torch.ones(4)), "expected a part of 4 elements, got 4 from 1 on"),
        ((4, -1, torch.ones(1)), "expected a part of 4 elements"),
        ((4, 5, torch.ones(0)), "expected a part of 4 elements"),
        ((4, 0, torch.ones(4), (2, 3)), r"expected a shape of 4 elements, got \(2, 3\)"),
    ],
)
def test_what_is_no_shard_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=f"FlatShard: {message}"):
        FlatShard(*arguments)


def test_a_shard_is_not_computed_with():
    shard = state(1)["moment"]
    assert repr(shard) == "FlatShard(0..77 of 77, torch.float32, cpu)"
    assert shard.size() == (77,) and SHAPES["moment"] == shard.param_shape
    for compute in (lambda: shard + 1, shard.sum, shard.clone):
        with pytest.raises(UnsupportedError, match=r"compute with its \.local"):
            compute()
