# SPDX-License-Identifier: Apache-2.0
"""The in-place functions' worlds, with segments that hold whole tiles of 512 elements."""

from collections.abc import Iterator

import pytest

from tests.comm import conftest

# The smallest segments that the ring kernels accept.
SMALL_SEGMENT_BYTES = 2048


@pytest.fixture(scope="session")
def worlds() -> Iterator[conftest.Worlds]:
    """``worlds(n)`` returns a world of n rank threads with small segments."""
    with conftest.shared_worlds(SMALL_SEGMENT_BYTES) as get:
        yield get
