# SPDX-License-Identifier: Apache-2.0
"""PTX of kernels that wait for no peer, executed by the native end of a single rank."""

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

# Yields what such an end has made otherwise than the host.
Differences = Callable[[_native.DeviceComm], Iterator[str]]


@contextmanager
def lone_device() -> Iterator[Devices]:
    """One emulated device, the current one."""
    made = Devices("emulated", devices=1)
    with made.runtime.on_device(0):
        yield made
    made.close()


def end_of(devices: Devices, kernels: PtxKernels) -> _native.DeviceComm:
    """The native end of one rank, which has met nobody, with the PTX of its kernels."""
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
    """Asserts that there are no differences, and that no kernel did anything wrong."""
    assert list(differences(end_of(devices, PtxKernels(PtxSchedule(7), subunit=subunit_of)))) == []
    assert ptx.failure() is None
    ptx.forget_allowed()


def check_seen(
    devices: Devices, subunit: str, mutant: tuple[str, str], differences: Differences
) -> None:
    """Asserts that a mutant of a subunit makes differences, or does something wrong.

    Args:
        devices: where it runs.
        subunit: as of ``ptx_of``.
        mutant: a pattern of the text, and what it becomes.
        differences: finds them.
    """
    whole = ptx_of(subunit)
    changed = re.sub(*mutant, whole)
    assert changed != whole
    kernels = PtxKernels(subunit=subunit_of, text_of=lambda subunit: changed)
    try:
        found: object = next(differences(end_of(devices, kernels)), None)
    except RefusedError:  # such a text shows nothing
        raise
    except RuntimeError as error:  # what a kernel did wrong, as the next call hears of it
        found = error
    finally:
        found = found or ptx.failure()
        ptx.forget()
        ptx.forget_allowed()
    assert found
