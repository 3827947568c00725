"""Each test runs on an emulated device, and with ``-m gpu`` on a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.proof.faults.device.places import Place
from tests.support.emulator.library import COMPILER

Places = Callable[..., Place]


def _check(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device (torch {torch.__version__})")
    if kind == "emulated" and COMPILER is None:
        pytest.skip("the emulated device needs a C++ compiler")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of device, for tests whose ranks are processes."""
    found: str = request.param
    _check(found)
    return found


@pytest.fixture
def place(kind: str) -> Iterator[Place]:
    """A device; what was allocated there must be gone after the test."""
    made = Place(kind)
    yield made
    made.close()


@pytest.fixture
def emulated() -> Iterator[Places]:
    """``emulated(**knobs)`` is an emulated device with the runtime's own settings."""
    _check("emulated")
    made: list[Place] = []

    def make(**knobs: Any) -> Place:
        made.append(Place("emulated", **knobs))
        return made[-1]

    yield make
    for each in made:
        each.close()
