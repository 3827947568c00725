"""Runs the older and the current loops of the CUDA kernels in one process.

The library reads the variable when it looks up a kernel, at the first call of this kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .timing import Call

VARIABLE, SERIAL = "RINGCOMM_KERNELS", "serial"


@contextmanager
def serial_loops() -> Iterator[None]:
    """Inside the block this process looks up kernels that load one source after the other."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = SERIAL
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def with_serial_loops(call: Call) -> Call:
    def inside() -> object:
        with serial_loops():
            return call()

    return inside
