# SPDX-License-Identifier: Apache-2.0
"""Worlds of rank threads, built once per size and shared by tests that leave them usable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import ringcomm
from ringcomm import CommOptions, LocalWorld

TIMEOUT_S = 60.0
# Small segments, so that a few kilobytes already need many segments.
SMALL_SEGMENT_BYTES = 256

Worlds = Callable[..., LocalWorld]


def in_nodes(n: int) -> list[int] | None:
    """Returns the number of ranks of each node for RINGCOMM_TEST_NODES nodes; None for one node."""
    nodes = min(int(os.environ.get("RINGCOMM_TEST_NODES", "1")), n)
    if nodes < 2:
        return None
    return [n // nodes + (node < n % nodes) for node in range(nodes)]


@contextmanager
def shared_worlds(usual_segment_bytes: int) -> Iterator[Worlds]:
    """Yields the function behind the ``worlds`` fixtures, and closes its worlds at the end."""
    built: dict[tuple[int, int], LocalWorld] = {}

    def get(n: int, segment_bytes: int = usual_segment_bytes) -> LocalWorld:
        world = built.get((n, segment_bytes))
        if world is None or any(each.aborted for each in world):
            options = CommOptions(timeout=TIMEOUT_S, segment_bytes=segment_bytes)
            world = built[n, segment_bytes] = ringcomm.local_world(
                n, options=options, nodes=in_nodes(n)
            )
        return world

    yield get
    for world in built.values():
        world.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds(n)`` is a world of n rank threads with small segments."""
    with shared_worlds(SMALL_SEGMENT_BYTES) as get:
        yield get


# Features that exist only within a node, by patterns of the names of their tests.
NOT_OVER_NODES = {
    r"\[.*\bring\b.*\]|test_large_with_default_segments|test_any_call_is_exact": "rings",
    r"test_algorithm_and_kernels_are": "rings and Triton's kernels",
    r"test_partial\.py": "partial results for users",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if in_nodes(2) is None:
        return
    for item in items:
        for pattern, what in NOT_OVER_NODES.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"over nodes there are no {what}"))
