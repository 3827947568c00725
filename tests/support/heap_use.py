# SPDX-License-Identifier: Apache-2.0
"""The bytes that this process uses in its heap, with nothing left that only waits to be freed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch.distributed as dist

import ringcomm


def settled_heap_bytes(barrier: Callable[[], None] | None = None) -> int:
    """Returns the used bytes of this process' heap without what earlier tests have left there.

    A difference of two such numbers tells of what happened between them, and of nothing before:
    the garbage of earlier tests is collected at times that depend on which tests ran before.

    ``barrier`` is one of all processes whose communicators reached this heap, if there are several.
    """
    # Modules refer to themselves, and a cycle through an object of C++ is one only after that has
    # gone. All of it must go before the barrier, since a rank keeps a closed communicator's memory
    # until its peers have closed theirs.
    while gc.collect():
        pass
    if barrier is not None:
        barrier()
    # A communicator that is made or closed frees what earlier ones kept until their peers left.
    ringcomm.Communicator.from_store(dist.HashStore(), 0, 1).close()
    return int(ringcomm.heap_stats()["used_bytes"])
