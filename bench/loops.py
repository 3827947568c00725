# SPDX-License-Identifier: Apache-2.0
"""Runs the older and the current loops of the CUDA kernels in one process.

The library reads ``RINGCOMM_KERNELS`` when it looks up a kernel, before the kernel's first call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .timing import Call

# Serial loops load one source after the other; sliced kernels give each channel one slice of a
# buffer in place of tiles.
VARIABLE, SERIAL, SLICED = "RINGCOMM_KERNELS", "serial", "sliced"


@contextmanager
def other_loops(name: str) -> Iterator[None]:
    """Inside the block this process looks up kernels with ``name`` for ``RINGCOMM_KERNELS``."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def with_other_loops(call: Call, name: str) -> Call:
    def inside() -> object:
        with other_loops(name):
            return call()

    return inside
