"""Worlds of processes, kept for the whole run."""

from collections.abc import Iterator

import pytest

from tests.c10d.emulated import emulated
from tests.support.emulator.library import COMPILER
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_devices() -> Iterator[RankPool]:
    """Two ranks whose tensors count as those of an emulated device that they share."""
    if COMPILER is None:
        pytest.skip("no C++ compiler to build the emulated driver")
    pool = RankPool(2, emulated)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
