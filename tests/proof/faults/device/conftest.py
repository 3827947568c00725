# SPDX-License-Identifier: Apache-2.0
"""Each test runs on an emulated device, and with ``-m gpu`` on a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.proof.faults.device.rig import Rig
from tests.support.emulator.library import COMPILER

Rigs = Callable[..., Rig]


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
def rig(kind: str) -> Iterator[Rig]:
    """A device; a test must free all memory that it allocates there."""
    made = Rig(kind)
    yield made
    made.close()


@pytest.fixture
def emulated() -> Iterator[Rigs]:
    """``emulated(**knobs)`` returns an emulated device with its own settings of the runtime."""
    _check("emulated")
    made: list[Rig] = []

    def make(**knobs: Any) -> Rig:
        made.append(Rig("emulated", **knobs))
        return made[-1]

    yield make
    for each in made:
        each.close()
