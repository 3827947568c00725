# SPDX-License-Identifier: Apache-2.0
"""Prepares a process after its imports for its first fork."""

from __future__ import annotations

import gc
import sys


def settle() -> None:
    """Forgets Triton, and excludes all other imported objects from garbage collection.

    torch's compiler imports Triton, but Triton must be imported later: at import it decides by an
    environment variable, which some ranks set, whether to define its functions for its interpreter.
    """
    # The compiled part (triton._C) is kept: it cannot be loaded twice, and ignores the variable.
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    # A rank's garbage collection would mark every object of these modules, and so copy their pages,
    # which takes a quarter of a second per rank.
    gc.collect()
    gc.freeze()
