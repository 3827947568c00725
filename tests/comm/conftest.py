"""Worlds of rank threads, built once per size and shared by the tests that leave them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import ringcomm
from ringcomm import CommOptions, LocalWorld

TIMEOUT_S = 60.0
# Small segments, so that a few kilobytes go through many of them.
SMALL_SEGMENT_BYTES = 256

Worlds = Callable[..., LocalWorld]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds(n)`` is a world of n rank threads with small segments."""
    built: dict[tuple[int, int], LocalWorld] = {}

    def get(n: int, segment_bytes: int = SMALL_SEGMENT_BYTES) -> LocalWorld:
        world = built.get((n, segment_bytes))
        if world is None or any(each.aborted for each in world):
            options = CommOptions(timeout=TIMEOUT_S, segment_bytes=segment_bytes)
            world = built[n, segment_bytes] = ringcomm.local_world(n, options=options)
        return world

    yield get
    for world in built.values():
        world.close()
