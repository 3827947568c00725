"""Marks what lies here, skips it without a device, and keeps worlds of one-launch ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.worlds import one_launch_world

HERE = Path(__file__).resolve().parent

Worlds = Callable[[int], Any]


def why_no_gpu() -> str | None:
    """Why the tests cannot run here; None where they can."""
    if torch.cuda.is_available():
        return None
    built = torch.version.cuda
    return f"needs a CUDA device (torch {torch.__version__}, built for CUDA: {built})"


@pytest.hookimpl(tryfirst=True)  # before the tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu_worlds() -> Iterator[Worlds]:
    """``gpu_worlds(n)``: n ranks of this process on one GPU, kept for later tests while whole."""
    built: dict[int, Any] = {}

    def get(n: int) -> Any:
        world = built.get(n)
        if world is None or any(each.aborted for each in world):
            world = built[n] = one_launch_world(n)
        return world

    yield get
    for world in built.values():
        world.close()
