# SPDX-License-Identifier: Apache-2.0
"""Gives each test a device, lists the tests that need a GPU, and reuses one-launch worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import device as the_device
from tests.gpu.worlds import one_launch_world
from tests.support.emulator.library import COMPILER

HERE = Path(__file__).resolve().parent

# Files, and functions of files, that cannot run on an emulated device. All others run on a GPU if
# there is one, and otherwise on an emulated device.
NEEDS_A_GPU = {
    "test_nodes.py": "NCCL moves the memory of GPUs, each of one rank alone",
    "test_training.py": "torch's wrappers use streams of their own for tensors of CUDA only",
    "test_optimizer.py::test_a_graph_replays_steps_as_eager_ones": (
        "a step has operations of torch's in it, which an emulated device cannot capture"
    ),
    "test_optimizer.py::test_a_step_does_not_wait_for_the_device": (
        "torch says where it would wait for CUDA only"
    ),
}

Worlds = Callable[[int], Any]


def why_no_gpu() -> str | None:
    """Returns the reason why tests that need a GPU cannot run here, or None if they can."""
    if torch.cuda.is_available():
        return None
    built = torch.version.cuda
    return f"needs a CUDA device (torch {torch.__version__}, built for CUDA: {built})"


def _why_not_emulated(item: pytest.Item) -> str | None:
    name = getattr(item, "originalname", item.name)
    return NEEDS_A_GPU.get(item.path.name) or NEEDS_A_GPU.get(f"{item.path.name}::{name}")


@pytest.hookimpl(tryfirst=True)  # runs before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without = why_no_gpu()
    for item in items:
        if item.path.parent != HERE:
            continue
        needed = _why_not_emulated(item)
        if needed or without is None:
            item.add_marker(pytest.mark.gpu)
        if needed and without:
            item.add_marker(pytest.mark.skip(reason=f"{without}: {needed}"))
        elif without and COMPILER is None:
            item.add_marker(pytest.mark.skip(reason="the emulator needs a C++ compiler"))


@pytest.fixture(scope="module")
def device() -> Iterator[None]:
    """Opens the device for a test file; the file must have freed all of its memory at the end."""
    with the_device.in_use():
        yield


@pytest.fixture(autouse=True)
def in_stream_order(device: None) -> Iterator[None]:
    with the_device.ordered():
        yield


@pytest.fixture(scope="module")
def gpu_worlds(device: None) -> Iterator[Worlds]:
    """``gpu_worlds(n)``: n ranks of this process on one GPU. Later tests reuse a faultless world.

    Only one world is open at a time: several would not fit into the device's heap.
    """
    built: list[Any] = []

    def get(n: int) -> Any:
        if not built or len(built[0]) != n or any(each.aborted for each in built[0]):
            while built:
                built.pop().close()
            built.append(one_launch_world(n))
        return built[0]

    yield get
    # Closing is not enough: what ranks keep must be freed before the device is closed.
    while built:
        built.pop().close()
