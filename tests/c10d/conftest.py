# SPDX-License-Identifier: Apache-2.0
"""Pools of ranks by size, and one whose ranks share an emulated device."""

from collections.abc import Callable, Iterator

import pytest

from tests.c10d.emulated import emulated
from tests.functional.conftest import compiling_ranks
from tests.support.emulator.library import COMPILER
from tests.support.rank_pool import RankPool

__all__ = ["compiling_ranks"]


@pytest.fixture(scope="session")
def two_ranks(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(2)


@pytest.fixture(scope="session")
def four_ranks(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(4)


@pytest.fixture(scope="session")
def two_devices() -> Iterator[RankPool]:
    """Two ranks whose tensors count as tensors of one emulated device."""
    if COMPILER is None:
        pytest.skip("no C++ compiler to build the emulated driver")
    pool = RankPool(2, emulated)
    yield pool
    pool.close()
