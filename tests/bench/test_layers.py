"""The times of a tensor-parallel layer: all systems compute the same, and rows say what was run."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

from ringcomm.bench import layers, products
from tests.support.rank_pool import default_group

SIZE = (8, 4)
TORCH = ("DTensor on Gloo", "DTensor on ringcomm")


def what_is_compared_is_the_same(rank: int, world_size: int) -> None:
    groups: dict[str, Any] = {"Gloo": dist.new_group(backend="gloo"), layers.OURS: default_group()}
    meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
    calls: dict[str, Any] = layers.systems(SIZE, meshes)
    assert list(calls) == [*TORCH, layers.OURS, layers.ALONE]
    ours = calls[layers.OURS]()
    for name in TORCH:
        for one, other in zip(calls[name](), ours, strict=True):
            assert_close(one + 0, other)
    times = products.times_of(default_group().communicator, calls, rounds=2)
    found = list(layers.rows(SIZE, times, busy=1))
    assert [row[2] for row in found] == list(calls)
    assert all(row[-3:] == [2, world_size, 1] for row in found)
    assert {len(row) for row in found} == {len(layers.COLUMNS)}


def test_what_is_compared_is_the_same(rank_pools):
    rank_pools(2).run(what_is_compared_is_the_same)


def test_ratios_are_of_a_round(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    times = {layers.OURS: [1.0, 10.0, 100.0], "other": [3.0, 20.0, 100.0]}
    _, other = layers.rows(SIZE, times, busy=0)
    assert other[2:5] == ["other", "2e+04", "2"]


def test_sizes_are_read():
    assert layers.size_of("8,4") == SIZE
    with pytest.raises(ValueError, match="unpack"):
        layers.size_of("8")
