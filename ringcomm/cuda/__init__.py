"""The GPUs of this process: the runtime that serves them, and the public ``device=`` argument.

Importing this package loads neither torch nor CuPy: the build of the native module reads
``ringcomm.cuda.units`` where neither is installed.
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
    """The runtime that this process uses; replaced as a whole in a forked child."""

    def __init__(self, parents: bool = False) -> None:
        self.lock = threading.Lock()
        self.runtime: DeviceRuntime | None = None
        self.parent_had_one = parents


_process = _ProcessRuntime()
_inherited: list[_ProcessRuntime] = []


def _forget_runtime_in_child() -> None:
    # A driver does not survive fork(): the child keeps the object, so that no destructor calls
    # into it, and never uses it.
    global _process
    _inherited.append(_process)
    _process = _ProcessRuntime(_process.runtime is not None or _process.parent_had_one)


os.register_at_fork(after_in_child=_forget_runtime_in_child)


def current() -> DeviceRuntime:
    """The runtime of this process: CUDA, made at first use, unless :func:`use` set another.

    Raises:
        UnsupportedError: there is none; says whether CuPy, torch's CUDA, the driver or a
            device is missing, and what a broken driver said.
        ForkError: this process was forked from one that used its devices.
    """
    process = _process
    with process.lock:
        if process.runtime is None:
            if process.parent_had_one:
                raise ForkError(
                    f"device runtime: this process (pid {os.getpid()}) was forked from one that "
                    "uses its devices, and a driver does not survive that. Start the process with "
                    "multiprocessing's 'spawn' or 'forkserver'"
                )
            # Not at the top: CuPy may be absent or broken, and the host path needs none of it.
            from ringcomm.cuda.cupy_runtime import make_cuda_runtime

            process.runtime = make_cuda_runtime()
        return process.runtime


def use(runtime: DeviceRuntime | None) -> DeviceRuntime | None:
    """Makes ``runtime`` this process's, before any device memory is used; None undoes it.

    Returns:
        What was in use before, if anything.
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
    """The device that a public ``device=`` argument names.

    Args:
        device: None, "cpu", "cuda", "cuda:1", an index, or a torch.device.
        operation: named in errors.

    Returns:
        The ordinal in this process; None for the host.

    Raises:
        ArgumentError: it names no device, or one that this process does not have.
        UnsupportedError: this process has no devices; says why.
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
