# SPDX-License-Identifier: Apache-2.0
"""The layout of parameters: round trips, alignment, chunks, descriptions and agreement."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.optim.layout import ALIGN_ELEMS, DTYPES, TILE_ELEMS, ParamSpec, ShardLayout

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
SPECS = st.builds(
    ParamSpec,
    shape=SHAPES,
    dtype=st.sampled_from(list(DTYPES.values())),
    group=st.integers(0, 3),
    trainable=st.sampled_from([True, True, True, False]),
)
LAYOUTS = st.builds(
    ShardLayout.assign,
    st.lists(SPECS, max_size=12),
    st.integers(1, 8).map(lambda tiles: tiles * TILE_ELEMS),
)


def numbered(layout: ShardLayout) -> list[torch.Tensor]:
    """Returns a tensor per parameter; all elements differ, in float32."""
    made, first = [], 1
    for spec in layout.params:
        made.append(torch.arange(first, first + spec.elems, dtype=torch.float32).view(spec.shape))
        first += spec.elems
    return made


@given(LAYOUTS)
def test_flatten_and_unflatten_undo_each_other(layout):
    tensors = numbered(layout)
    flats = layout.flatten(tensors)
    back = layout.unflatten(flats)
    assert set(back) == {index for index, spec in enumerate(layout.params) if spec.in_bucket}
    for index, view in back.items():
        assert torch.equal(view, tensors[index])
        view.zero_()
    assert not any(flat.any() for flat in flats), (
        "the padding is zero, and the views cover the rest"
    )


@given(LAYOUTS)
def test_every_parameter_has_one_aligned_location_in_order(layout):
    in_bucket = [index for index, spec in enumerate(layout.params) if spec.in_bucket]
    assert sorted(layout.locations) == in_bucket
    for bucket in layout.buckets:
        assert bucket.elems % TILE_ELEMS == 0
        assert bucket.elems - bucket.segments[-1].end < TILE_ELEMS
        assert bucket.elems <= layout.bucket_elems or len(bucket.segments) == 1
        last = 0
        for begin, end, param in bucket.segments:
            assert begin % ALIGN_ELEMS == 0 and 0 <= begin - last < ALIGN_ELEMS
            assert end - begin == layout.params[param].elems
            assert layout.params[param].dtype is bucket.dtype
            last = end
        params = [segment.param for segment in bucket.segments]
        assert params == sorted(params)
    table = layout.group_table()
    assert table.tolist() == [spec.group for spec in layout.params]


@given(LAYOUTS, st.integers(1, 9))
def test_chunks_cover_each_bucket_once_and_begin_at_tiles(layout, world):
    for number, bucket in enumerate(layout.buckets):
        end = 0
        for rank in range(world):
            chunk = layout.chunk(number, rank, world)
            assert chunk.begin == end
            assert chunk.begin % TILE_ELEMS == 0 and chunk.elems >= 0
            end = chunk.end
        assert end == bucket.elems


@given(LAYOUTS)
def test_a_description_survives_json(layout):
    described = json.loads(json.dumps(layout.describe()))
    again = ShardLayout.from_description(described)
    assert again == layout
    assert again.digest == layout.digest


def test_the_layout_does_not_know_the_world():
    # A layout depends only on the parameters and the bucket size; kernels read this table.
    specs = [ParamSpec((100,), torch.float32), ParamSpec((7, 3), torch.float32, group=1)]
    layout = ShardLayout.assign(specs)
    assert layout.buckets[0].segment_table().tolist() == [[0, 100, 0], [128, 149, 1]]
    assert layout.buckets[0].elems == 512


def test_a_large_parameter_has_a_bucket_of_its_own():
    sizes = [100, 5000, 200, 300]
    layout = ShardLayout.assign([ParamSpec((n,), torch.float16) for n in sizes], 1024)
    params = [[s.param for s in bucket.segments] for bucket in layout.buckets]
    assert params == [[0], [1], [2, 3]]
    assert [bucket.elems for bucket in layout.buckets] == [512, 5120, 1024]


def test_frozen_tied_and_empty_parameters_take_no_room():
    specs = [
        ParamSpec((3,), torch.float32, trainable=False),
        ParamSpec((0, 5), torch.float32),
        ParamSpec((4,), torch.float32),
        ParamSpec((4,), torch.float32, tied_to=2),
        ParamSpec((), torch.float32),
    ]
    layout = ShardLayout.assign(specs)
    assert list(layout.locations) == [2, 4]
    assert ShardLayout.assign(specs[:2]).buckets == ()


def test_elements_keep_the_order_of_their_memory():
    picture = (
        torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    )
    layout = ShardLayout.assign([ParamSpec.of(picture.requires_grad_())])
    (flat,) = layout.flatten([picture])
    assert torch.equal(flat[:120], picture.permute(0, 2, 3, 1).reshape(-1))
    (back,) = layout.unflatten([flat]).values()
    assert back.stride() == picture.stride() and torch.equal(back, picture)


@pytest.mark.parametrize("make", [lambda t: t[:, ::2], lambda t: t[:1].expand(4, 6)])
def test_what_does_not_fill_its_memory_becomes_contiguous(make):
    tensor = make(torch.arange(24.0).view(4, 6))
    spec = ParamSpec.of(tensor.requires_grad_())
    assert spec.stride is None
    layout = ShardLayout.assign([spec])
    assert torch.equal(layout.unflatten(layout.flatten([tensor]))[0], tensor)


@pytest.mark.parametrize("bucket_elems", [0, -512, 100, 512.0])
def test_a_bad_bucket_size_is_refused(bucket_elems):
    with pytest.raises(ArgumentError, match="bucket_elems: expected a positive multiple of 512"):
        ShardLayout.assign([], bucket_elems)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_a_dtype_without_kernels_is_refused(dtype):
    with pytest.raises(ArgumentError, match="expected dtype float32, bfloat16, float16"):
        ParamSpec((2,), dtype)


DAMAGES = {
    "version": lambda d: d.update(version=99),
    "no buckets": lambda d: d.pop("buckets"),
    "dtype": lambda d: d["params"][0].update(dtype="int8"),
    "shape": lambda d: d["params"][0].update(shape="wide"),
    "segment order": lambda d: d["buckets"][0]["segments"].reverse(),
    "segment end": lambda d: d["buckets"][0]["segments"][1].__setitem__(1, 10**9),
    "segment param": lambda d: d["buckets"][0]["segments"][1].__setitem__(2, 7),
    "bucket size": lambda d: d["buckets"][0].update(elems=513),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_description_is_refused(damage):
    specs = [ParamSpec((3,), torch.float32), ParamSpec((5,), torch.float32)]
    described = ShardLayout.assign(specs).describe()
    DAMAGES[damage](described)
    with pytest.raises(CheckpointError, match="layout"):
        ShardLayout.from_description(described)
