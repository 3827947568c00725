"""The places of boxes in a flat tensor, and pieces that fill one or do not."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.zero.checkpoint.format import Piece, check_fill, flat_boxes

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
        ((4,), [((0,), (5,))], "does not lie in"),
        ((4,), [((-1,), (5,))], "does not lie in"),
        ((4,), [((2,), (0,))], "does not lie in"),
        ((4,), [((0,), (-1,))], "does not lie in"),
        ((4,), [((0, 0), (4, 1))], "does not lie in"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "overlap"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], "overlap"),
        # As many elements as there are, but one twice and one not at all.
        ((2, 2), [((0, 0), (2, 1)), ((1, 0), (1, 2))], "overlap"),
        ((4,), [], "hold 0 of its 4"),
        ((), [((), ()), ((), ())], "no dimensions"),
        ((), [], "hold 0 of its 1"),
        ((0, 3), [((0, 0), (1, 3))], "does not lie in"),
    ],
)
def test_what_does_not_fill_is_refused(size, boxes, message):
    with pytest.raises(ValueError, match=message):
        check_fill(size, [piece(*box) for box in boxes])


def test_a_tensor_without_elements_needs_no_piece():
    check_fill((0, 3), [])
    check_fill((), [piece((), ())])
