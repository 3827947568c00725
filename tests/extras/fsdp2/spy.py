# SPDX-License-Identifier: Apache-2.0
"""Records the collectives that FSDP2 makes on ringcomm, and refuses those that torch makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from ringcomm.comm.communicator import Communicator
from ringcomm.memory.host_heap import process_heap

METHODS = ("all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Seen:
    """A collective: its name, the size of its world, and whether both tensors are in the heap."""

    name: str
    world_size: int
    in_heap: bool


def in_heap(tensor: torch.Tensor) -> bool:
    """True if a tensor is in the heap, or has no elements and so no memory."""
    return not tensor.numel() or process_heap().contains(tensor.data_ptr(), tensor.nbytes)


@contextmanager
def collectives(of_torch: bool = False) -> Iterator[list[Seen]]:
    """Records the collectives that communicators make in the context.

    Args:
        of_torch: whether torch's own collectives are allowed.
    """
    seen: list[Seen] = []

    def spying(name: str) -> Any:
        method = getattr(Communicator, name)

        def spy(self: Communicator, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(Seen(name, self.world_size, in_heap(output) and in_heap(given)))
            return method(self, output, given, *args, **kwargs)

        return mock.patch.object(Communicator, name, spy)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("FSDP2 made a collective of its own")

    with spying(METHODS[0]), spying(METHODS[1]):
        if of_torch:
            yield seen
            return
        with (
            mock.patch.object(DefaultAllGather, "__call__", refuse),
            mock.patch.object(DefaultReduceScatter, "__call__", refuse),
        ):
            yield seen
