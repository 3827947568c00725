"""Whether this process has CUDA devices that both CuPy and torch can use, and if not, why.

All of it raises UnsupportedError, in words, whatever CuPy, torch or the driver raise.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ringcomm.errors import UnsupportedError
from ringcomm.memory.cuda_driver import DRIVER_LIBRARY

NO_DEVICE = 100  # cudaErrorNoDevice
SAID_CHARS = 300


def said(error: BaseException) -> str:
    """What a library said, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SAID_CHARS]}"


def no_device(reason: str) -> UnsupportedError:
    """The error for an installation or a machine without usable devices."""
    return UnsupportedError(f"CUDA device: {reason}. Tensors on the CPU need none of this")


def import_cupy() -> Any:
    """CuPy, if it is there and whole."""
    try:
        import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise no_device(
                "CuPy is not installed: pip install 'ringcomm[cuda13]', or 'ringcomm[cuda12]' for "
                "a driver of CUDA 12"
            ) from error
        raise no_device(f"CuPy is installed but cannot be imported: {said(error)}") from error
    return cupy


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "is not set" if value is None else f"is {value!r}"


def count_devices(cuda: Any) -> int:
    """How many devices the driver shows to CuPy; at least one."""
    try:
        has_driver = cuda.driverGetVersion() != 0
        count = int(cuda.getDeviceCount()) if has_driver else 0
    except Exception as error:
        if getattr(error, "status", None) != NO_DEVICE:
            raise no_device(
                f"the driver does not work with CuPy: {said(error)}. See whether nvidia-smi "
                "works, and whether the driver is new enough for the CUDA version of CuPy"
            ) from error
        count = 0
    if not has_driver:
        raise no_device(f"there is no NVIDIA driver ({DRIVER_LIBRARY}) on this machine")
    if count == 0:
        raise no_device(f"the driver shows no device; CUDA_VISIBLE_DEVICES {_visible()}")
    return count


def check_torch(count: int) -> None:
    """Starts CUDA in torch, which must see the same ``count`` devices."""
    if torch.version.cuda is None:
        raise no_device(
            f"this torch ({torch.__version__}) was built without CUDA: install a CUDA build of it"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        seen = torch.cuda.device_count()
    except Exception as error:
        raise no_device(f"the driver does not work with torch: {said(error)}") from error
    if seen != count:
        raise no_device(
            f"CuPy sees {count} devices and torch {seen}; CUDA_VISIBLE_DEVICES {_visible()}, and "
            "must not change while the process runs"
        )
