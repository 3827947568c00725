"""Collectives that return new tensors, and attention over ranks; gradients flow through all.

The collectives are operators of the namespace ``ringcomm`` in ``torch.ops``, so ``torch.compile``
traces through them. ``docs/functional.md`` says what is promised.
"""

from __future__ import annotations

from ringcomm.functional.attention import (
    context_positions,
    ring_attention,
    ulysses_attention,
)
from ringcomm.functional.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "context_positions",
    "reduce_scatter",
    "ring_attention",
    "ulysses_attention",
]
