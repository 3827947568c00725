# SPDX-License-Identifier: Apache-2.0
"""The positions of a box in a flat tensor, and the check that pieces fill a tensor exactly."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.errors import ArgumentError
from ringcomm.zero.checkpoint import Checkpoints, FlatShard
from ringcomm.zero.checkpoint import folder as reader
from ringcomm.zero.checkpoint.format import DTensorBox, DTensorShard, Piece, check_fill, flat_boxes

sizes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def piece(offsets, extents):
    return Piece(tuple(offsets), tuple(extents), "rank-00000.safetensors", "key")


@given(st.data(), sizes)
def test_flat_boxes_are_the_elements_in_order(data, size):
    elems = prod(size)
    begin = data.draw(st.integers(0, elems))
    end = data.draw(st.integers(begin, elems))
    whole = torch.arange(elems).view(size)
    taken = []
    boxes = list(flat_boxes(size, begin, end))
    for offsets, extents in boxes:
        assert all(extents)
        where = tuple(slice(a, a + n) for a, n in zip(offsets, extents, strict=True))
        taken += whole[where].reshape(-1).tolist()
    assert taken == list(range(begin, end))
    assert len(boxes) <= max(2 * len(size) - 1, 1)


@given(st.data(), sizes)
def test_a_grid_of_boxes_fills_a_tensor_and_one_less_does_not(data, size):
    ends = [sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else [] for n in size]
    spans = [list(itertools.pairwise([0, *cuts, n])) for cuts, n in zip(ends, size, strict=True)]
    grid = [
        piece([a for a, _ in box], [b - a for a, b in box]) for box in itertools.product(*spans)
    ]
    shuffled = data.draw(st.permutations(grid))
    check_fill(size, shuffled)
    with pytest.raises(ValueError, match="pieces hold"):
        check_fill(size, shuffled[1:])
    if size:
        with pytest.raises(ValueError, match="overlap"):
            check_fill(size, [*shuffled, shuffled[0]])


@pytest.mark.parametrize(
    ("size", "boxes", "message"),
    [
        ((4,), [((0,), (5,))], "is not inside"),
        ((4,), [((-1,), (5,))], "is not inside"),
        ((4,), [((2,), (0,))], "is not inside"),
        ((4,), [((0,), (-1,))], "is not inside"),
        ((4,), [((0, 0), (4, 1))], "is not inside"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "overlap"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], "overlap"),
        # The right number of elements, but one element is covered twice and one is not covered.
        ((2, 2), [((0, 0), (2, 1)), ((1, 0), (1, 2))], "overlap"),
        ((4,), [], "hold 0 of its 4"),
        ((), [((), ()), ((), ())], "no dimensions"),
        ((), [], "hold 0 of its 1"),
        ((0, 3), [((0, 0), (1, 3))], "is not inside"),
    ],
)
def test_what_does_not_fill_is_refused(size, boxes, message):
    with pytest.raises(ValueError, match=message):
        check_fill(size, [piece(*box) for box in boxes])


def test_a_tensor_without_elements_needs_no_piece():
    check_fill((0, 3), [])
    check_fill((), [piece((), ())])


# ---- ranges of a box as boxes of its tensor, and boxes of tensors that were saved flat ----------

WHOLE = torch.arange(4 * 5 * 6.0).view(4, 5, 6)


def boxes_of(size: int) -> list[tuple[int, int]]:
    return [
        (a, b) for a, b in itertools.combinations(range(size + 1), 2) if (a + b) % 2 or b == size
    ]


@pytest.mark.parametrize(
    "box", [DTensorBox((4, 5, 6), (1, 0, 2), (3, 5, 3)), DTensorBox((4,), (3,), (0,))]
)
def test_runs_of_a_box_fill_it(box):
    elems = prod(box.sizes)
    for cut in range(elems + 1):
        found = torch.zeros(box.shape)
        for begin, end in ((0, cut), (cut, elems)):
            shard = DTensorShard(box, begin, torch.arange(float(begin), float(end)))
            assert shard.size() == torch.Size(box.shape)
            for run in shard.boxes():
                assert shard.__get_tensor_shard__(_index(run.offsets)).equal(run.local)
                within = zip(run.offsets, run.sizes, strict=True)
                found[tuple(slice(o, o + n) for o, n in within)] = run.local
        here = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert found[here].equal(torch.arange(float(elems)).view(box.sizes))


def _index(offsets):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex("x", torch.Size(offsets))


@pytest.mark.parametrize("slice_bytes", [8, 100, 1 << 20])
def test_boxes_of_a_tensor_that_was_saved_flat(tmp_path, monkeypatch, slice_bytes):
    monkeypatch.setattr(reader, "SLICE_BYTES", slice_bytes)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": FlatShard(WHOLE.numel(), 0, WHOLE.view(-1), (4, 5, 6))})
    opened = checkpoints.reader()
    for box in itertools.product(boxes_of(4), boxes_of(5), boxes_of(6)):
        out = torch.empty([end - begin for begin, end in box])
        opened.read_box("x", [begin for begin, _ in box], out)
        assert out.equal(WHOLE[tuple(slice(*each) for each in box)])
    with pytest.raises(ArgumentError, match=r"expected a box in size \(4, 5, 6\)"):
        opened.read_box("x", (2, 0, 0), torch.empty(3, 5, 6))


def test_a_tensor_that_was_saved_in_boxes_reads_flat(tmp_path):
    box = DTensorBox((4, 5, 6), (0, 0, 0), (4, 5, 6))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": DTensorShard(box, 0, WHOLE.reshape(-1))})
    out = torch.empty(50)
    checkpoints.reader().read("x", 7, out)
    assert out.equal(WHOLE.view(-1)[7:57])
