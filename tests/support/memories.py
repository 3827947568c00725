"""Memories for tensors: plain memory or the heap, aligned or not."""

from __future__ import annotations

import torch

import ringcomm

Tensor = torch.Tensor
MEMORIES = ("plain", "heap", "mixed", "unaligned")


def room(count: int, dtype: torch.dtype, memory: str, rank: int = 0) -> Tensor:
    """An uninitialised tensor of ``count`` elements at ``memory``.

    "mixed" is the heap on odd ranks only; "unaligned" begins one element into its memory, which
    lies in the heap on even ranks only.
    """
    in_heap = memory == "heap" or (
        memory in ("mixed", "unaligned") and rank % 2 == (memory == "mixed")
    )
    make = ringcomm.empty if in_heap else torch.empty
    skip = 1 if memory == "unaligned" else 0
    return make(count + skip, dtype=dtype)[skip:]


def put(tensor: Tensor, memory: str, rank: int = 0) -> Tensor:
    """A copy of ``tensor`` (one dimension) at ``memory``."""
    target = room(tensor.numel(), tensor.dtype, memory, rank)
    if tensor.numel():
        # As bytes: not every dtype has a copy kernel.
        target.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return target
