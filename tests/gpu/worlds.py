# SPDX-License-Identifier: Apache-2.0
"""Worlds on one GPU: ranks of this process that share a launch, or a process per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import Store

import ringcomm
from ringcomm import CommOptions, Communicator, LocalWorld
from tests.gpu import device
from tests.gpu.device import DEVICE, PLAIN
from tests.support import ranks

T = TypeVar("T")
TIMEOUT_S = 30.0
# Staging, without which algorithm="copy_engine" is not available. The larger messages go around it
# several times.
COPY_ENGINE_BYTES = 1 << 20


class OrderedWorld(LocalWorld):
    """A local world whose ranks' threads run torch's operations in stream order, as on a GPU."""

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return super().run(device.in_order(fn), *args, **kwargs)


def one_launch_world(
    n: int, timeout: float = TIMEOUT_S, on: str = DEVICE, kernels: str = "native"
) -> Any:
    """Returns ``n`` ranks of this process on one GPU."""
    options = CommOptions(timeout=timeout, copy_engine_bytes=COPY_ENGINE_BYTES, kernels=kernels)
    return OrderedWorld(ringcomm.local_world(n, device=on, options=options))


def connect(
    store: Store, rank: int, world_size: int, timeout: float = TIMEOUT_S, name: str = "world"
) -> Any:
    """Returns the communicator of this process, whose GPU all ranks share."""
    options = CommOptions(timeout=timeout, copy_engine_bytes=COPY_ENGINE_BYTES)
    return Communicator.from_store(
        store, rank, world_size, device=DEVICE, options=options, name=name
    )


def in_process(store: Store, rank: int, world_size: int, fn: Callable[..., T], *args: Any) -> T:
    """Calls ``fn`` as a rank of ``ranks.Ranks``, on the device."""
    device.take()
    with device.ordered():
        return fn(store, rank, world_size, *args)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Does as ``tests.support.ranks.run_ranks``, for ranks that use the device."""
    return ranks.run_ranks(in_process, world_size, fn, *args, timeout_s=timeout_s)


def to_device(tensor: torch.Tensor, in_heap: bool) -> torch.Tensor:
    """Returns a copy on the GPU, in ringcomm's heap or in torch's memory."""
    if not in_heap:
        return tensor.to(PLAIN, copy=True)
    target = ringcomm.empty(tensor.numel(), dtype=tensor.dtype, device=DEVICE)
    # Copy bytes, since not every dtype has a copy kernel.
    target.view(torch.uint8).copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return target.view(tensor.shape)


def ramp(count: int, rank: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    """Small integers on the GPU that depend on rank and position; sums over 16 ranks are exact."""
    positions = torch.arange(count, device=PLAIN)
    return ((positions * 5 + rank * 3 + shift) % 7 - 3).to(dtype)
