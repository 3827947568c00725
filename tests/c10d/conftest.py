"""Worlds of processes, kept for the whole run."""

from collections.abc import Iterator

import pytest

from tests.c10d.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
