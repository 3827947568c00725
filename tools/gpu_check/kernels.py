# SPDX-License-Identifier: Apache-2.0
"""Compiles the benchmarks' kernels, with both kinds of loops. Arguments for an H100: ``9 0``.

One process compiles each unit and kind, all at the same time. Without this program, the first
benchmark that needs a unit would wait for its compilation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

# The slowest to compile first.
UNITS = ("adamw_bfloat16", "reduce_float32", "move")
LOOPS = ("batched", "serial")
_COMPILE = "from ringcomm.cuda import build; build.load_unit({!r}, ({}, {}))"


def main(capability: Sequence[str]) -> int:
    """Returns the number of failed compilations; their errors are on stderr."""
    major, minor = map(int, capability)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _COMPILE.format(unit, major, minor)],
            env={**os.environ, "RINGCOMM_KERNELS": loops},
        )
        for unit in UNITS
        for loops in LOOPS
    ]
    return sum(process.wait() != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
