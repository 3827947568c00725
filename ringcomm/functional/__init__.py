# SPDX-License-Identifier: Apache-2.0
"""Out-of-place collectives, and matrix products, attention and activation checkpoints over ranks.

The collectives are operators of the namespace ``ringcomm`` in ``torch.ops``, so ``torch.compile``
traces through them. Read ``collectives.py`` first; ``docs/functional.md`` states the guarantees.
"""

from __future__ import annotations

from ringcomm.functional.attention import (
    context_positions,
    ring_attention,
    ulysses_attention,
)
from ringcomm.functional.checkpoint import partitioned_checkpoint
from ringcomm.functional.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from ringcomm.functional.matmul import (
    all_gather_matmul,
    join_sequence,
    matmul_reduce_scatter,
    split_sequence,
)

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "context_positions",
    "join_sequence",
    "matmul_reduce_scatter",
    "partitioned_checkpoint",
    "reduce_scatter",
    "ring_attention",
    "split_sequence",
    "ulysses_attention",
]
