# SPDX-License-Identifier: Apache-2.0
"""The GPU runtime of this process, and the public ``device=`` argument; read runtime.py first.

Importing this package loads neither torch nor CuPy: the build of the native module imports
``ringcomm.cuda.units`` on machines where neither is installed.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from ringcomm.errors import ArgumentError, ForkError
from ringcomm.integers import integer

if TYPE_CHECKING:
    import torch

    from ringcomm.cuda.runtime import DeviceRuntime

__all__ = ["current", "find_device", "use"]


class _ProcessRuntime:
    """Holds the runtime that this process uses; a forked child starts with a new, empty object."""

    def __init__(self, parents: bool = False) -> None:
        self.lock = threading.Lock()
        self.runtime: DeviceRuntime | None = None
        self.parent_had_one = parents


_process = _ProcessRuntime()
_inherited: list[_ProcessRuntime] = []


def _forget_runtime_in_child() -> None:
    # A driver does not work after fork(). The child keeps the runtime, so that no destructor calls
    # the driver, but never uses it.
    global _process
    _inherited.append(_process)
    _process = _ProcessRuntime(_process.runtime is not None or _process.parent_had_one)


os.register_at_fork(after_in_child=_forget_runtime_in_child)


def current() -> DeviceRuntime:
    """Returns this process's runtime: CUDA, made at first use, unless :func:`use` set another.

    Raises:
        UnsupportedError: there is no usable device; the message says whether CuPy, torch's CUDA,
            the driver or a device is missing, and quotes the driver's error.
        ForkError: this process was forked from one that used its devices.
    """
    process = _process
    with process.lock:
        if process.runtime is None:
            if process.parent_had_one:
                raise ForkError(
                    f"device runtime: this process (pid {os.getpid()}) was forked from one that "
                    "uses its devices, and a driver does not survive a fork. Start the process "
                    "with multiprocessing's 'spawn' or 'forkserver'"
                )
            # Imported here: CuPy may be absent or broken, and the host path does not need it.
            from ringcomm.cuda.cupy_runtime import make_cuda_runtime

            process.runtime = make_cuda_runtime()
        return process.runtime


def use(runtime: DeviceRuntime | None) -> DeviceRuntime | None:
    """Sets the runtime of this process, before any device memory is used; None unsets it.

    Returns:
        The previous runtime, or None.
    """
    process = _process
    with process.lock:
        before, process.runtime = process.runtime, runtime
        return before


def _parsed(device: Any) -> torch.device | None:
    import torch

    index = integer(device)
    try:
        return torch.device(device) if index is None else torch.device("cuda", index)
    except (RuntimeError, TypeError):
        return None


def find_device(device: object, operation: str) -> int | None:
    """Returns the device that a public ``device=`` argument names.

    Args:
        device: None, "cpu", "cuda", "cuda:1", an index, or a torch.device.
        operation: name of the calling operation, for errors.

    Returns:
        The ordinal in this process; None for the host.

    Raises:
        ArgumentError: ``device`` names no device, or a device that this process does not have.
        UnsupportedError: this process has no devices; the message says why.
    """
    if device is None:
        return None
    parsed = _parsed(device)
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"{operation}: device: expected 'cpu', 'cuda', 'cuda:<index>' or a torch.device of "
            f"these, got {device!r}"
        )
    if parsed.type == "cpu":
        return None
    runtime = current()
    index = runtime.current_device() if parsed.index is None else parsed.index
    if index >= runtime.device_count():
        raise ArgumentError(
            f"{operation}: device: expected one of the {runtime.device_count()} devices of this "
            f"process, got {device!r}; see CUDA_VISIBLE_DEVICES"
        )
    return index
