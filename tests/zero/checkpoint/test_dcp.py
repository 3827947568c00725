# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint saves and loads the same folders, on any process group and world."""

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
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import api
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
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
from tests.zero.checkpoint.states import (
    SHAPES,
    assert_step,
    even_cuts,
    flat_shard,
    in_world,
    save_step,
    values,
)
from tests.zero.checkpoint.system_calls import count_calls, interposed

BACKENDS = ["gloo", "ringcomm"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = torch.arange(1000.0)
GRID = torch.arange(7 * 5 * 3).view(7, 5, 3)
WHOLE = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
DATA = {"lr": 0.1, "betas": (0.9, 0.95), "steps": [1, 2, None], "name": "a", "best": float("inf")}
# Three placements: uneven rows, uneven columns, and a copy on each rank.
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


def grids() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(GRID.clone(), mesh, [placement])
        for name, placement in PLACEMENTS.items()
    }


def save(path, rank, world_size):
    """Saves shards, grids, replicas and JSON values; rank 0 holds no part of the flat tensor."""
    cuts = [0, *even_cuts(1000, world_size - 1)]
    state = {
        "flat": flat_shard(FLAT, cuts, rank, (10, 100)),
        "none": FlatShard(0, 0, torch.empty(0), (0, 3)),
        "grids": grids(),
        "whole": WHOLE,
        "scalar": torch.tensor(2.5),
        "data": DATA,
        "optimizer": {"state": {0: {"step": 3}}},
    }
    writer = StorageWriter(path, data={"from": "dcp"})
    dcp.save(state, storage_writer=writer, planner=SavePlanner())


def expect(state, flat):
    """Asserts that the loaded state equals the saved state bit for bit."""
    assert torch.equal(state["flat"].local, flat)
    for name, grid in state["grids"].items():
        full = grid.full_tensor() if hasattr(grid, "full_tensor") else grid
        assert torch.equal(full, GRID), name
    assert torch.equal(state["whole"], WHOLE) and state["scalar"].item() == 2.5
    assert state["data"] == DATA and state["optimizer"] == {"state": {0: {"step": 3}}}


def blank(flat: FlatShard, empty_grids: dict[str, Any]) -> dict[str, Any]:
    return {
        "flat": flat,
        "none": FlatShard(0, 0, torch.empty(0)),
        "grids": empty_grids,
        "whole": torch.zeros(3, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(0.0),
        "data": dict.fromkeys(DATA, 0),
        "optimizer": {"state": {0: {"step": 0}}},
    }


def load(path, rank, world_size):
    cuts = [100 + each for each in even_cuts(900, world_size)]
    own = flat_shard(torch.zeros(1000), cuts, rank)
    empty_grids = grids()
    for grid in empty_grids.values():
        grid.to_local().zero_()
    state = blank(own, empty_grids)
    dcp.load(state, storage_reader=StorageReader(path), planner=LoadPlanner())
    expect(state, flat_shard(FLAT, cuts, rank).local)


def check_without_torch(path):
    reader = Checkpoints(path.parent).reader()
    reader.verify()
    assert (reader.folder, reader.data, reader.world_size) == (path, {"from": "dcp"}, 2)
    assert reader.shape("flat") == (10, 100) and reader.elems("flat") == 1000
    assert reader.shape("grids.rows") == (7, 5, 3)
    out = torch.empty(300)
    reader.read("flat", 400, out)
    assert torch.equal(out, FLAT[400:700])
    for begin, end in ((0, 105), (0, 1), (104, 105), (7, 50), (15, 30), (50, 50)):
        for name in PLACEMENTS:
            some = torch.empty(end - begin, dtype=torch.int64)
            reader.read(f"grids.{name}", begin, some)
            assert torch.equal(some, GRID.reshape(-1)[begin:end])
    scalar = torch.empty(1)
    reader.read("scalar", 0, scalar)
    assert scalar.item() == 2.5
    assert {each.name for each in path.iterdir()} == {
        "checkpoint.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_save_and_any_load(two_ranks, three_ranks, tmp_path, backend):
    path = tmp_path / "root" / "step-00000012"
    two_ranks.run(partial(save, path), backend)
    loading = three_ranks if backend == "gloo" else two_ranks
    loading.run(partial(load, path), backend)
    check_without_torch(path)
    whole_grids = {name: torch.zeros_like(GRID) for name in PLACEMENTS}
    state = blank(FlatShard(1000, 250, torch.zeros(500)), whole_grids)
    dcp.load(state, storage_reader=StorageReader(path), planner=LoadPlanner())
    expect(state, FLAT[250:750])


def load_unsharded(path, rank, world_size):
    cuts = {name: even_cuts(values(name, 1).numel(), world_size) for name in SHAPES}
    state = {
        name: flat_shard(torch.zeros_like(values(name, 1)), each, rank)
        for name, each in cuts.items()
    }
    dcp.load(state, storage_reader=StorageReader(path), planner=LoadPlanner())
    for name, each in cuts.items():
        assert torch.equal(state[name].local, flat_shard(values(name, 1), each, rank).local)


def test_what_is_saved_without_torch_is_loaded_with_it(worlds, two_ranks, three_ranks, tmp_path):
    def work(ranks):
        return save_step(Checkpoints(tmp_path, ranks=ranks), 1, ranks.rank, 3)

    folder = in_world(worlds, 3, work)[0]
    assert_step(Reader(folder), 1, 3)
    two_ranks.run(partial(load_unsharded, folder), "gloo")
    three_ranks.run(partial(load_unsharded, folder), "ringcomm")
    # A state of tensors only can be loaded by any planner, here torch's default.
    state = {"moment": FlatShard(77, 11, torch.zeros(60))}
    dcp.load(state, storage_reader=StorageReader(folder))
    assert torch.equal(state["moment"].local, values("moment", 1)[11:71])


def save_and_load_with_torch_alone(path, rank, world_size):
    saved = flat_shard(FLAT, even_cuts(1000, world_size), rank)
    dcp.save({"x": saved}, checkpoint_id=path)
    dist.barrier()
    cuts = [700] * (world_size - 1)
    loaded = flat_shard(torch.zeros(1000), cuts, rank)
    dcp.load({"x": loaded}, checkpoint_id=path)
    assert torch.equal(loaded.local, flat_shard(FLAT, cuts, rank).local)


def test_shards_work_with_torchs_own_planner_and_storage(two_ranks, tmp_path):
    two_ranks.run(partial(save_and_load_with_torch_alone, tmp_path / "torch"), "gloo")


def test_a_model_and_its_optimizer_come_back_in_one_process(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=seed, betas=(0.5, seed / 10))
        net(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        return net, optimizer, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}

    net, optimizer, state = made(1)
    path = tmp_path / "saved"
    dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner(), no_dist=True)
    other, other_optimizer, loaded = made(2)
    dcp.load(loaded, storage_reader=StorageReader(path), planner=LoadPlanner(), no_dist=True)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    ours, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, held in ours["state"].items():
        for name, tensor in held.items():
            assert torch.equal(theirs["state"][index][name], tensor)
    for one, two in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    files = export_safetensors(path, tmp_path / "out")
    third = made(3)[0]
    third.load_state_dict(load_file(files[0]), strict=True)
    for one, two in zip(net.state_dict().values(), third.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_a_background_save_has_what_was_there_when_it_began(tmp_path):
    data = FLAT.clone()
    state = {"x": FlatShard(1000, 0, data, (100, 10)), "epoch": 4}
    writer = StorageWriter(tmp_path / "saved")
    future = dcp.async_save(state, storage_writer=writer, planner=SavePlanner(), no_dist=True)
    data.zero_()
    future.result()
    reader = Reader(tmp_path / "saved")
    out = torch.empty(1000)
    reader.read("x", 0, out)
    assert torch.equal(out, FLAT) and reader.shape("x") == (100, 10)


# ---- a failed save or load leaves nothing -----------------------------------------------------


def visible(folder) -> list[str]:
    """Returns the names in a folder that are not hidden."""
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))


def refused(raised) -> list[BaseException]:
    """Returns the ranks' errors from torch's exception."""
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
    del raised  # this also releases the writer
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
    with pytest.raises(api.CheckpointException, match="there is one, and it is not overwritten"):
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    assert (tmp_path / "saved" / "checkpoint.json").read_bytes() == before
    # As with torch's own storage, the checkpoint_id of a save names its folder.
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

    state = {"x": flat_shard(FLAT, even_cuts(1000, world_size), rank)}
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
