# SPDX-License-Identifier: Apache-2.0
"""Fixtures: worlds that save checkpoints together (rank threads, and processes of any backend)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringcomm.comm.agreement import ModelRanks
from ringcomm.zero.checkpoint import Checkpoints
from tests.c10d.conftest import two_ranks
from tests.comm import conftest
from tests.support.rank_pool import RankPool
from tests.zero.checkpoint.states import in_world, save_step

__all__ = ["folder", "three_ranks", "two_ranks", "worlds"]


@pytest.fixture(scope="session")
def worlds() -> Iterator[conftest.Worlds]:
    """``worlds(n)`` returns a world of n rank threads."""
    with conftest.shared_worlds(conftest.SMALL_SEGMENT_BYTES) as get:
        yield get


@pytest.fixture(scope="session")
def three_ranks(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(3)


@pytest.fixture
def folder(worlds: conftest.Worlds, tmp_path: Path) -> Path:
    """A checkpoint of step 1, saved by two ranks."""

    def work(ranks: ModelRanks) -> Path:
        return save_step(Checkpoints(tmp_path / "root", ranks=ranks), 1, ranks.rank, 2)

    saved: Path = in_world(worlds, 2, work)[0]
    return saved
