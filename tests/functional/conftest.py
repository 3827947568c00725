"""The in-place functions' worlds and devices, and a compiler that remembers nothing."""

from collections.abc import Iterator

import pytest
import torch

from tests.comm.conftest import worlds
from tests.comm.device.conftest import devices

__all__ = ["devices", "worlds"]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
