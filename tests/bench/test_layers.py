# SPDX-License-Identifier: Apache-2.0
"""The bench of a tensor-parallel layer: all systems compute the same result."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from ringcomm.bench import layers
from tests.support.rank_pool import default_group

SIZE = (8, 4)
TORCH = ("DTensor on Gloo", "DTensor on ringcomm")


def what_is_compared_is_the_same(rank: int, world_size: int) -> None:
    calls: dict[str, Any] = layers.systems(SIZE, layers.meshes_of(default_group()))
    assert list(calls) == [*TORCH, layers.OURS, layers.ALONE]
    ours = calls[layers.OURS]()
    for name in TORCH:
        for one, other in zip(calls[name](), ours, strict=True):
            assert_close(one + 0, other)


def test_what_is_compared_is_the_same(rank_pools):
    rank_pools(2).run(what_is_compared_is_the_same)


def test_sizes_are_read(capsys):
    assert layers.BENCH.parse(["8,4"]).sizes == [SIZE]
    with pytest.raises(SystemExit):
        layers.BENCH.parse(["8"])
    assert "argument TOKENS,WIDTH: '8' is not TOKENS,WIDTH" in capsys.readouterr().err
