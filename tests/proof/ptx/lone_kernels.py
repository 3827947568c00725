# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of kernels that wait for no peer, on the native end of a single rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringcomm import _native
from tests import ptx_interpreter as ptx
from tests.proof.ptx.small_jobs import subunit_of
from tests.ptx_interpreter import PtxSchedule, RefusedError
from tests.support.device_worlds import Devices
from tests.support.emulator.library import figures_of
from tests.support.emulator.ptx import PtxKernels, ptx_of

# Yields the results in which such an end differs from the host.
Differences = Callable[[_native.DeviceComm], Iterator[str]]


@contextmanager
def lone_device() -> Iterator[Devices]:
    """Makes an emulated device, and makes it the current device."""
    made = Devices("emulated", devices=1)
    with made.runtime.on_device(0):
        yield made
    made.close()


def end_of(devices: Devices, kernels: PtxKernels) -> _native.DeviceComm:
    """Returns the native end of a rank without peers, with the PTX of its kernels."""
    runtime = devices.runtime

    def find(unit: str, name: str) -> tuple[int, int, bool]:
        kernel = kernels.kernel(unit, name, runtime.find_kernel(0, unit, name).handle)
        return kernel, figures_of(kernel).threads, False

    native = _native.DeviceComm(
        _native.Driver(runtime.driver_library), (0, 1), (1, 2, 1024), (0, 0), 1000, 0, find
    )
    native.stream = runtime.current_stream(0)
    return native


def check(devices: Devices, differences: Differences) -> None:
    """Asserts that there are no differences from the host, and that no kernel made a mistake."""
    assert list(differences(end_of(devices, PtxKernels(PtxSchedule(7), subunit=subunit_of)))) == []
    assert ptx.failure() is None
    ptx.forget_allowed()


def check_seen(
    devices: Devices, subunit: str, mutant: tuple[str, str], differences: Differences
) -> None:
    """Asserts that a mutant of a subunit causes differences or a reported mistake.

    Args:
        devices: the devices on which it runs.
        subunit: as of ``ptx_of``.
        mutant: a pattern of the text, and the replacement.
        differences: finds them.
    """
    whole = ptx_of(subunit)
    changed = re.sub(*mutant, whole)
    assert changed != whole
    kernels = PtxKernels(subunit=subunit_of, text_of=lambda subunit: changed)
    try:
        found: object = next(differences(end_of(devices, kernels)), None)
    except RefusedError:  # a text that the interpreter refuses proves nothing
        raise
    except RuntimeError as error:  # the next call raises the kernel's mistake
        found = error
    finally:
        found = found or ptx.failure()
        ptx.forget()
        ptx.forget_allowed()
    assert found
