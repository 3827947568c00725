# SPDX-License-Identifier: Apache-2.0
"""State resharded from one world to another stays the same state, for any parameters."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.optim.layout import TILE_ELEMS, ShardLayout
from ringcomm.optim.state import SavedShards, describe_shard, reshard
from tests.optim.test_layout import LAYOUTS

Tensor = torch.Tensor


def whole_state(layout: ShardLayout) -> list[Tensor]:
    """Numbers all elements of the buckets consecutively, with zeros in the padding."""
    flats, first = [], 1
    for bucket in layout.buckets:
        flat = torch.zeros(bucket.elems)
        for begin, end, _ in bucket.segments:
            flat[begin:end] = torch.arange(first, first + end - begin)
            first += end - begin
        flats.append(flat)
    return flats


def shards_of(layout: ShardLayout, world: int) -> list[dict[str, Any]]:
    """Returns the shards that the ranks of a world save."""
    flats = whole_state(layout)
    shards = []
    for rank in range(world):
        chunks = [layout.chunk(number, rank, world) for number in range(len(flats))]
        own = [flat[chunk.begin : chunk.end] for flat, chunk in zip(flats, chunks, strict=True)]
        shards.append(
            {
                "state": {
                    "step": torch.arange(float(len(layout.params)), dtype=torch.float64),
                    "steps_taken": torch.tensor(7.0),
                    "skipped_steps": torch.tensor(2.0),
                    "buckets": [{"exp_avg": each, "exp_avg_sq": -each} for each in own],
                },
                "param_groups": [],
                "shard": describe_shard(layout, rank, world),
            }
        )
    return shards


def same(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(mine) == len(other) and all(
        a["shard"] == b["shard"]
        and torch.equal(a["state"]["step"], b["state"]["step"])
        and all(
            torch.equal(x[name], y[name])
            for x, y in zip(a["state"]["buckets"], b["state"]["buckets"], strict=True)
            for name in ("exp_avg", "exp_avg_sq")
        )
        for a, b in zip(mine, other, strict=True)
    )


@given(LAYOUTS, st.integers(1, 6), st.integers(1, 6))
def test_resharding_gives_what_the_other_world_would_have_saved(layout, before, after):
    moved = reshard(shards_of(layout, before), after)
    assert same(moved, shards_of(layout, after))
    assert same(reshard(moved[::-1], before), shards_of(layout, before))


@given(LAYOUTS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_buckets_of_any_size_take_over_each_parameters_state(layout, before, after, tiles):
    other = ShardLayout.assign(layout.params, tiles * TILE_ELEMS)
    saved = SavedShards(shards_of(layout, before), "test")
    cuts = [saved.cut(other, rank, after) for rank in range(after)]
    joined = [
        torch.cat([cut[number]["exp_avg"] for cut in cuts]) for number in range(len(other.buckets))
    ]
    expected = layout.unflatten(whole_state(layout))
    found = other.unflatten(joined)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[param], expected[param]) for param in expected)
