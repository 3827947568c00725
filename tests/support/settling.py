# SPDX-License-Identifier: Apache-2.0
"""Steps of a process between its imports and its first fork."""

from __future__ import annotations

import gc
import sys


def settle() -> None:
    """Forgets Triton, and keeps everything else that was imported out of garbage collections.

    torch's compiler imports Triton, which must not be there: whether its functions are defined for
    its interpreter is decided when it is imported, by an environment variable that some ranks set.
    """
    # The compiled part cannot be loaded twice, and does not ask.
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    # A rank that collects garbage would mark every object of these modules, and so copy their
    # pages: a quarter of a second of each rank.
    gc.collect()
    gc.freeze()
