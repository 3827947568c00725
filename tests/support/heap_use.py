# SPDX-License-Identifier: Apache-2.0
"""The bytes that this process uses in its heap, after everything that can be freed is freed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch.distributed as dist

import ringcomm


def settled_heap_bytes(barrier: Callable[[], None] | None = None) -> int:
    """Returns the used bytes of this process's heap, without remains of earlier tests.

    The difference of two such numbers then depends only on what happened between them. Without
    this, garbage of earlier tests is collected at times that depend on which tests ran before.

    ``barrier`` is a barrier of all processes whose communicators reached this heap, if any.
    """
    # Several rounds: modules are in reference cycles, and a cycle through a C++ object can be
    # collected only after this object. All must be done before the barrier, since a rank keeps a
    # closed communicator's memory until its peers have closed theirs.
    while gc.collect():
        pass
    if barrier is not None:
        barrier()
    # Making or closing a communicator frees what earlier ones kept until their peers left.
    ringcomm.Communicator.from_store(dist.HashStore(), 0, 1).close()
    return int(ringcomm.heap_stats()["used_bytes"])
