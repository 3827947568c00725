# SPDX-License-Identifier: Apache-2.0
"""The interpreter's shared library."""

from __future__ import annotations

from tests.support import ROOT
from tests.support.shared_library import COMPILER, SharedLibrary, Unit

__all__ = ["COMPILER", "LIBRARY"]

SOURCE = ROOT / "tests" / "ptx_interpreter" / "source"
LIBRARY = SharedLibrary(
    "interpreter",
    SOURCE,
    {
        "instructions": Unit("-O1", ("instructions.cpp",)),
        "parser": Unit("-O1", ("parse.cpp",)),
        "running": Unit(
            "-O1", ("history.cpp", "interpreter.cpp", "memory.cpp", "rows.cpp", "warp.cpp")
        ),
    },
    headers=(SOURCE,),
    includes=(ROOT,),
)
