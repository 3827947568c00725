# SPDX-License-Identifier: Apache-2.0
"""The devices that tests of this folder run on: emulated devices, and with ``-m gpu`` real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.conftest import why_no_gpu
from tests.support.device_worlds import Devices
from tests.support.emulator.library import COMPILER

KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def require(kind: str) -> None:
    """Skips the test if there are no devices of this kind."""
    if kind == "emulated" and COMPILER is None:
        pytest.skip("the emulator needs a C++ compiler")
    reason = why_no_gpu() if kind == "cuda" else None
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of device that the processes of a test must use."""
    require(request.param)
    return str(request.param)


@pytest.fixture(scope="module", params=KINDS)
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    """The devices of this process. At the end of a file all their memory must be free again."""
    require(request.param)
    made = Devices(request.param)
    yield made
    made.close()


@pytest.fixture
def two_devices(devices: Devices) -> Devices:
    if devices.runtime.device_count() < 2:
        pytest.skip("needs two devices")
    return devices
