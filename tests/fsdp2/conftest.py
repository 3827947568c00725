"""Worlds of processes, kept for the whole run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Gives the pool of a world size."""
    with ExitStack() as stack:

        @cache
        def pool(world_size: int) -> RankPool:
            made = RankPool(world_size)
            stack.callback(made.close)
            return made

        yield pool
