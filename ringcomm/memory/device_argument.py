"""Reads the public ``device=`` arguments."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.errors import ArgumentError
from ringcomm.memory import device_runtime


def _parsed(device: Any) -> torch.device | None:
    try:
        return torch.device("cuda", device) if type(device) is int else torch.device(device)
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
    runtime = device_runtime.current()
    index = runtime.current_device() if parsed.index is None else parsed.index
    if index >= runtime.device_count():
        raise ArgumentError(
            f"{operation}: device: expected one of the {runtime.device_count()} devices of this "
            f"process, got {device!r}; see CUDA_VISIBLE_DEVICES"
        )
    return index
