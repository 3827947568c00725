"""Saves and loads that torch.distributed.checkpoint cannot do are errors, and leave nothing."""

from __future__ import annotations

import errno
import gc
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import api
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.zero.checkpoint import (
    FlatShard,
    LoadPlanner,
    Reader,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from tests.zero.checkpoint.states import even_cuts, part
from tests.zero.checkpoint.system_calls import count_calls, interposed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = torch.arange(1000.0)


def visible(folder) -> list[str]:
    """Returns the names in a folder that are not hidden."""
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))


def refused(raised) -> list[BaseException]:
    """Returns the ranks' errors, out of torch's exception."""
    return [error for error, _ in raised.value.failures.values()]


SAVES: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "object": (
        {"a": {"b": object()}},
        SavePlanner,
        UnsupportedError,
        r"a\.b: expected None, .*object",
    ),
    "bytes": (
        {"a": b"x"},
        SavePlanner,
        UnsupportedError,
        "a: expected None, .* got builtins.bytes",
    ),
    "planner": ({"a": 3}, DefaultSavePlanner, UnsupportedError, "a: DefaultSavePlanner may pickle"),
    "dtype": (
        {"a": torch.ones(1, dtype=torch.complex64)},
        SavePlanner,
        UnsupportedError,
        "a: expected a dtype of",
    ),
    "name": ({"": torch.ones(1)}, SavePlanner, ArgumentError, "text that is not empty"),
    "part": (
        {"a": FlatShard(4, 0, torch.ones(3))},
        SavePlanner,
        CheckpointError,
        "'a': the pieces hold 3 of its 4",
    ),
}


@pytest.mark.parametrize("name", SAVES)
def test_what_cannot_be_saved_leaves_nothing(tmp_path, name):
    state, planner, kind, message = SAVES[name]
    path = tmp_path / "a" / "b"
    with pytest.raises(api.CheckpointException, match=message) as raised:
        dcp.save(state, storage_writer=StorageWriter(path), planner=planner())
    assert [type(error) for error in refused(raised)] == [kind]
    assert not path.exists()
    del raised  # and with it the writer
    gc.collect()
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "a"])


def test_a_writer_of_other_kinds_is_refused(tmp_path):
    state = {"a": torch.ones(1)}
    for settings, message in (
        ({"planner": SavePlanner(), "use_collectives": False}, "use_collectives=True"),
        (
            {"planner": SavePlanner(), "storage_writer": StorageWriter(tmp_path / "x", data={1})},
            "data: ",
        ),
    ):
        arguments: dict[str, Any] = {"storage_writer": StorageWriter(tmp_path / "x"), **settings}
        with pytest.raises((UnsupportedError, api.CheckpointException), match=message):
            dcp.save(state, **arguments)
    caching = SavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "1"), planner=caching)
    with pytest.raises(api.CheckpointException, match="enable_plan_caching=False"):
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "2"), planner=caching)
    assert {each.name for each in tmp_path.iterdir()} == {"1"}


def test_a_checkpoint_is_not_saved_over(tmp_path):
    state = {"a": torch.ones(1)}
    writer = StorageWriter(tmp_path / "saved")
    dcp.save(state, storage_writer=writer, planner=SavePlanner())
    before = (tmp_path / "saved" / "checkpoint.json").read_bytes()
    with pytest.raises(api.CheckpointException, match="there is one, and none is written over"):
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    assert (tmp_path / "saved" / "checkpoint.json").read_bytes() == before
    # The id of a save names its folder, as with torch's own storage.
    dcp.save(state, checkpoint_id=tmp_path / "other", storage_writer=writer, planner=SavePlanner())
    loaded = {"a": torch.zeros(1)}
    reader = StorageReader(tmp_path / "saved")
    dcp.load(loaded, checkpoint_id=tmp_path / "other", storage_reader=reader)
    assert loaded["a"].item() == 1 and reader.checkpoint_id == tmp_path / "other"


def test_leftovers_of_this_path_go_and_others_stay(tmp_path):
    nonce = "0123456789abcdef"
    for name in (f".partial-a-{nonce}", f".partial-a-b-{nonce}", f".removed-{nonce}"):
        (tmp_path / name).mkdir()
    dcp.save({}, storage_writer=StorageWriter(tmp_path / "a"), planner=SavePlanner())
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"a", f".partial-a-b-{nonce}", f".removed-{nonce}"}
    assert Reader(tmp_path / "a").names() == []


def test_an_error_of_any_call_leaves_nothing_visible(tmp_path):
    state = {"a": torch.arange(5.0), "b": 1}

    def save_into(path):
        dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())

    calls = count_calls(lambda: save_into(tmp_path / "counted" / "x"))
    assert calls > 8
    for failing in range(calls):
        path = tmp_path / str(failing) / "x"

        def fails(number, name, args, failing=failing):
            if number == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with interposed(fails), pytest.raises(api.CheckpointException, match="No space left"):
            save_into(path)
        if path.exists():
            assert failing >= calls - 2
            Reader(path).verify()
        else:
            assert not path.parent.exists() or visible(path.parent) == []
            save_into(path)
        gc.collect()
        assert [each.name for each in path.parent.iterdir()] == ["x"]


def fail_on_rank_one(path, rank, world_size):
    def full(number, name, args):
        if rank == 1 and name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = {"x": part(FLAT, even_cuts(1000, world_size), rank)}
    with interposed(full), pytest.raises(api.CheckpointException, match="No space left") as raised:
        dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
    assert list(raised.value.failures) == [1]
    assert not path.exists()
    dist.barrier()
    dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())


def test_a_failed_save_is_told_to_all_and_the_next_takes_its_leftovers(two_ranks, tmp_path):
    two_ranks.run(partial(fail_on_rank_one, tmp_path / "x"), "gloo")
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    Reader(tmp_path / "x").verify()


LOADS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"z": torch.zeros(1)}, "Missing key in checkpoint state_dict: z"),
    "size": ({"a": torch.zeros(6)}, "Size mismatch"),
    "dtype": ({"a": torch.zeros(5, dtype=torch.float64)}, "a: expected float32, as saved"),
    "value for tensor": ({"a": 1}, "expected BytesStorageMetadata"),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_does_not_fit_is_not_loaded(tmp_path, name):
    state, message = LOADS[name]
    writer = StorageWriter(tmp_path / "x")
    dcp.save({"a": torch.arange(5.0), "b": 1}, storage_writer=writer, planner=SavePlanner())
    reader = StorageReader(tmp_path / "x")
    with pytest.raises(api.CheckpointException, match=message):
        dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    with pytest.raises(api.CheckpointException, match="b: DefaultLoadPlanner may unpickle"):
        dcp.load({"b": 0}, storage_reader=reader)
    partly = {"a": torch.zeros(5), "z": torch.ones(1)}
    dcp.load(partly, storage_reader=reader, planner=LoadPlanner(allow_partial_load=True))
    assert torch.equal(partly["a"], torch.arange(5.0)) and partly["z"].item() == 1


def test_damage_is_named(tmp_path):
    path = tmp_path / "x"
    dcp.save({"a": torch.arange(5.0)}, storage_writer=StorageWriter(path), planner=SavePlanner())
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\x7f")
    state = {"a": torch.zeros(5)}
    with pytest.raises(api.CheckpointException, match=r"rank-00000\.safetensors") as raised:
        dcp.load(state, storage_reader=StorageReader(path))
    assert [type(error) for error in refused(raised)] == [CheckpointError]
    unchecked = StorageReader(path, verify=False)
    dcp.load(state, storage_reader=unchecked)
    assert torch.equal(state["a"][:4], torch.arange(4.0))
    reader = StorageReader(tmp_path / "nowhere")
    with pytest.raises(api.CheckpointException, match="nowhere: expected a checkpoint") as raised:
        dcp.load(state, storage_reader=reader)
    assert [type(error) for error in refused(raised)] == [CheckpointError]
    with pytest.raises(CheckpointError, match="nowhere: expected a checkpoint"):
        print(reader.read_metadata().state_dict_metadata)
