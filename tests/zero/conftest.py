# SPDX-License-Identifier: Apache-2.0
"""Fixtures: worlds of rank threads for the optimizer, a world of two nodes, and devices."""

from collections.abc import Iterator

import pytest
import torch

import ringcomm
from tests.comm.device.conftest import devices, two_devices
from tests.optim.conftest import worlds

__all__ = ["devices", "one_thread_for_each_rank", "two_by_two", "two_devices", "worlds"]


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[ringcomm.LocalWorld]:
    """Four rank threads on two nodes."""
    with ringcomm.local_world(4, nodes=[2, 2], timeout=60) as world:
        yield world


@pytest.fixture
def one_thread_for_each_rank() -> Iterator[None]:
    """Limits torch to one compute thread in a test, because the ranks are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
