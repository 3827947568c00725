"""Places for tensors: plain memory or the heap, aligned or not."""

from __future__ import annotations

import torch

import ringcomm

Tensor = torch.Tensor
PLACES = ("plain", "heap", "mixed", "unaligned")


def room(count: int, dtype: torch.dtype, place: str, rank: int = 0) -> Tensor:
    """An uninitialised tensor of ``count`` elements at ``place``.

    "mixed" is the heap on odd ranks only; "unaligned" begins one element into its memory, which
    lies in the heap on even ranks only.
    """
    in_heap = place == "heap" or (
        place in ("mixed", "unaligned") and rank % 2 == (place == "mixed")
    )
    make = ringcomm.empty if in_heap else torch.empty
    skip = 1 if place == "unaligned" else 0
    return make(count + skip, dtype=dtype)[skip:]


def put(tensor: Tensor, place: str, rank: int = 0) -> Tensor:
    """A copy of ``tensor`` (one dimension) at ``place``."""
    target = room(tensor.numel(), tensor.dtype, place, rank)
    if tensor.numel():
        # As bytes: not every dtype has a copy kernel.
        target.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return target
