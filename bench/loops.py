"""The older loops of the CUDA kernels beside those that are in use, in one process.

The library reads the variable when it looks a kernel up, which is at the first call of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .timing import Call

VARIABLE, SERIAL = "RINGCOMM_KERNELS", "serial"


@contextmanager
def serial_loops() -> Iterator[None]:
    """Inside, this process looks up kernels that load one source after the other."""
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
