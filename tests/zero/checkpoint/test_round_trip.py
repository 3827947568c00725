# SPDX-License-Identifier: Apache-2.0
"""Ranks can read a checkpoint of any other world, however each world splits the tensors."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringcomm.errors import ArgumentError
from ringcomm.zero.checkpoint import Checkpoints, FlatShard, Reader
from ringcomm.zero.checkpoint.format import DTYPES
from tests.zero.checkpoint.states import (
    SHAPES,
    assert_step,
    even_cuts,
    flat_shard,
    in_world,
    save_step,
    values,
)

MAX_RANKS = 4


def cuts_of(elems: int, most: int = MAX_RANKS) -> st.SearchStrategy[list[int]]:
    """Draws the ends of the parts of 1 to ``most`` ranks; parts may be empty."""
    return st.lists(st.integers(0, elems), max_size=most - 1).map(sorted)


def saved_by(worlds, root, whole, cuts):
    """Saves ``whole`` on len(cuts) + 1 ranks and returns a reader of the checkpoint."""

    def work(ranks):
        checkpoints = Checkpoints(root, ranks=ranks)
        return checkpoints.save(1, {"x": flat_shard(whole, cuts, ranks.rank)})

    return Reader(in_world(worlds, len(cuts) + 1, work)[0])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), elems=st.integers(0, 40), dtype=st.sampled_from(sorted(DTYPES, key=str)))
def test_any_cut_reads_back_by_any_other(worlds, data, elems, dtype):
    whole = torch.arange(elems).remainder(2).to(dtype)
    with tempfile.TemporaryDirectory(prefix="ringcomm-checkpoint-") as folder:
        reader = saved_by(worlds, Path(folder), whole, data.draw(cuts_of(elems)))
        assert (reader.dtype("x"), reader.elems("x")) == (dtype, elems)
        ends = [0, *data.draw(cuts_of(elems, 8)), elems]
        for begin, end in itertools.pairwise(ends):
            out = torch.ones(end - begin, dtype=dtype)
            reader.read("x", begin, out)
            expected = whole[begin:end].view(torch.uint8)
            assert torch.equal(out.view(torch.uint8), expected)


@pytest.mark.parametrize("world_size", [2, 5])
def test_everything_comes_back(worlds, tmp_path, world_size):
    """With five ranks, the last rank has no part of the smallest tensor."""

    def work(ranks):
        checkpoints = Checkpoints(tmp_path, ranks=ranks)
        return save_step(checkpoints, 7, ranks.rank, ranks.world_size)

    folders = in_world(worlds, world_size, work)
    assert set(folders) == {tmp_path / "step-00000007"}
    assert_step(Reader(folders[0]), 7, world_size)
    files = {f"rank-{rank:05d}.safetensors" for rank in range(world_size)}
    assert {each.name for each in folders[0].iterdir()} == files | {"checkpoint.json"}


def test_a_read_fills_what_it_is_given_and_nothing_else(tmp_path):
    folder = save_step(Checkpoints(tmp_path), 1)
    memory = torch.zeros(40)
    Reader(folder).read("moment", 30, memory[::2])
    assert torch.equal(memory[::2], values("moment", 1)[30:50])
    assert not memory[1::2].any()


def test_a_part_is_read_from_the_files_that_hold_it_only(worlds, tmp_path):
    def work(ranks):
        return save_step(Checkpoints(tmp_path, ranks=ranks), 1, ranks.rank, 3)

    reader = Reader(in_world(worlds, 3, work)[0])
    (tmp_path / "step-00000001" / "rank-00002.safetensors").unlink()
    first, _ = even_cuts(77, 3)
    out = torch.empty(first + 1)
    reader.read("moment", 0, out)
    assert torch.equal(out, values("moment", 1)[: first + 1])


@pytest.mark.parametrize(
    ("name", "begin", "out", "message"),
    [
        ("moment", 0, torch.empty(78), "expected a part of its 77 elements"),
        ("moment", 77, torch.empty(1), "expected a part of its 77 elements"),
        ("moment", -1, torch.empty(1), "expected a part of its 77 elements"),
        ("moment", 0, torch.empty(1, 1), "of one dimension"),
        ("moment", 0, torch.empty(1, dtype=torch.float64), "expected float32, as saved"),
        ("moments", 0, torch.empty(1), "has no tensor 'moments'"),
    ],
)
def test_a_bad_read_is_refused(tmp_path, name, begin, out, message):
    reader = Reader(save_step(Checkpoints(tmp_path), 1))
    with pytest.raises(ArgumentError, match=message):
        reader.read(name, begin, out)


def test_bad_boxes_and_ranks_and_files_are_refused(tmp_path):
    reader = Reader(save_step(Checkpoints(tmp_path), 1))
    for offsets, out in (((70,), torch.empty(8)), ((0, 0), torch.empty(1)), ((-1,), torch.ones(1))):
        with pytest.raises(ArgumentError, match="expected a box in size"):
            reader.read_box("moment", offsets, out)
    for rank in (-1, 1):
        with pytest.raises(ArgumentError, match="expected one of the 1 ranks that saved"):
            reader.rank_data(rank)
    with pytest.raises(ArgumentError, match="has no file 'other'"):
        reader.verify(["other"])


def test_rank_tensors_have_any_shape_and_dtype(tmp_path):
    own = {
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "grid": torch.arange(6).view(2, 3).t(),
        "none": torch.empty(0, 2, dtype=torch.bool),
    }
    folder = Checkpoints(tmp_path).save(0, {}, rank_tensors=own)
    back = Reader(folder).rank_tensors(0)
    assert list(back) == list(own)
    for name, tensor in own.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def test_names_may_be_any_text(tmp_path):
    names = ["a", "a@0", "a@rank", "__metadata__", "../a", "ü\n\0", "a,b"]
    tensors = {name: FlatShard(1, 0, torch.tensor([index])) for index, name in enumerate(names)}
    own = {name: torch.tensor(-index) for index, name in enumerate(names)}
    reader = Reader(Checkpoints(tmp_path).save(0, tensors, rank_tensors=own))
    for index, name in enumerate(names):
        out = torch.empty(1, dtype=torch.int64)
        reader.read(name, 0, out)
        assert (out.item(), reader.rank_tensors(0)[name].item()) == (index, -index)


def test_gradients_do_not_get_in_the_way(tmp_path):
    param = torch.ones(5, requires_grad=True)
    folder = Checkpoints(tmp_path).save(0, {"x": FlatShard(5, 0, param)})
    target = FlatShard(5, 0, torch.zeros(5, requires_grad=True))
    Reader(folder).read("x", 0, target.local)
    assert torch.equal(target.local, param)


def test_shapes_of_parameters_are_kept(tmp_path):
    reader = Reader(save_step(Checkpoints(tmp_path), 1))
    assert {name: reader.shape(name) for name in reader.names()} == SHAPES
