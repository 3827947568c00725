# SPDX-License-Identifier: Apache-2.0
"""Builds the emulated driver: ``python -m tests.support.emulated_driver`` before the tests begin.

It needs a compiler but no installed package, so ``make test`` runs it while pip installs.
"""

from __future__ import annotations

from pathlib import Path

from tests.ptx_interpreter import build as interpreter
from tests.support import ROOT
from tests.support.shared_library import COMPILER, SharedLibrary, Unit

__all__ = ["COMPILER", "library_path"]

FOLDER = ROOT / "tests" / "support" / "emulator"
_FLOATS = ("kernels", "kernels_float", "kernels_half", "kernels_rows", "kernels_quantization")
_DRIVER = ("device", "driver", "graph", "memory", "multicast", "ptx_kernels", "test_kernels")
LIBRARY = SharedLibrary(
    "driver",
    FOLDER,
    # Optimising the kernels takes longer than all their calls in the tests.
    {
        "integers": Unit("-O0", ("kernels_integer.cpp",)),
        "floats": Unit("-O0", tuple(f"{name}.cpp" for name in _FLOATS)),
        "optimizer": Unit("-O0", ("kernels_optimizer.cpp",)),
        "driver": Unit("-O1", tuple(f"{name}.cpp" for name in _DRIVER)),
    },
    headers=(ROOT / "kernels", FOLDER, interpreter.SOURCE),
    includes=(ROOT, ROOT / "kernels" / "include"),
    needs=(interpreter.LIBRARY,),
)


def library_path() -> Path:
    """Returns the path of the emulated driver's library; builds a missing library first."""
    return LIBRARY.path


if __name__ == "__main__":
    library_path()
