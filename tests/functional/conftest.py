# SPDX-License-Identifier: Apache-2.0
"""Fixtures: worlds and devices of the in-place functions, compiling ranks, a compiler reset."""

from collections.abc import Iterator

import pytest
import torch

from tests.comm.conftest import worlds
from tests.comm.device.conftest import devices
from tests.support.rank_pool import RankPool

__all__ = ["devices", "worlds"]


@pytest.fixture(scope="session")
def compiling_ranks() -> Iterator[RankPool]:
    """Two ranks, forked from a process that has imported torch's compiler."""
    pool = RankPool(2, imports=["tests.functional.preloaded"])
    yield pool
    pool.close()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
