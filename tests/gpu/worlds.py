"""Worlds on one GPU: ranks of this process that one launch carries, or a rank per process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import Store

import ringcomm
from ringcomm import Communicator

DEVICE = "cuda:0"
TIMEOUT_S = 30.0


def one_launch_world(n: int, timeout: float = TIMEOUT_S, device: str = DEVICE) -> Any:
    """``n`` ranks of this process on one GPU."""
    return ringcomm.local_world(n, device=device, timeout=timeout)


def connect(
    store: Store, rank: int, world_size: int, timeout: float = TIMEOUT_S, name: str = "world"
) -> Any:
    """The communicator of a process of its own, on the GPU that all of them share."""
    torch.cuda.set_device(0)
    return Communicator.from_store(
        store, rank, world_size, device=DEVICE, timeout=timeout, name=name
    )


def to_device(tensor: torch.Tensor, in_heap: bool) -> torch.Tensor:
    """A copy on the GPU, in ringcomm's heap or in torch's memory."""
    if not in_heap:
        return tensor.to(DEVICE)
    target = ringcomm.empty(tensor.numel(), dtype=tensor.dtype, device=DEVICE)
    # As bytes: not every dtype has a copy kernel.
    target.view(torch.uint8).copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return target.view(tensor.shape)


def ramp(count: int, rank: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    """Small integers on the GPU that tell ranks and places apart; sums of 16 ranks are exact."""
    places = torch.arange(count, device=DEVICE)
    return ((places * 5 + rank * 3 + shift) % 7 - 3).to(dtype)
