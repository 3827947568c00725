# SPDX-License-Identifier: Apache-2.0
"""Kinds of memory for tensors: plain memory or the heap, aligned or not."""

from __future__ import annotations

import mmap
import platform

import pytest
import torch

import ringcomm

Tensor = torch.Tensor
# mmap.MAP_32BIT from Python 3.13 on.
MAP_32BIT = 0x40
needs_low_addresses = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="MAP_32BIT is a flag of x86-64"
)
MEMORIES = ("plain", "heap", "mixed", "unaligned")


def room(count: int, dtype: torch.dtype, memory: str, rank: int = 0) -> Tensor:
    """Returns an uninitialised tensor of ``count`` elements in a kind of memory.

    "mixed" is the heap on odd ranks only. "unaligned" begins one element after the start of its
    allocation, which is in the heap on even ranks only.
    """
    in_heap = memory == "heap" or (
        memory in ("mixed", "unaligned") and rank % 2 == (memory == "mixed")
    )
    make = ringcomm.empty if in_heap else torch.empty
    skip = 1 if memory == "unaligned" else 0
    return make(count + skip, dtype=dtype)[skip:]


def put(tensor: Tensor, memory: str, rank: int = 0) -> Tensor:
    """Returns a copy of ``tensor`` (one dimension) in a kind of memory."""
    target = room(tensor.numel(), tensor.dtype, memory, rank)
    if tensor.numel():
        # Copied as bytes, since some dtypes have no copy kernel.
        target.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return target


def below_2_gib(tensor: Tensor) -> Tensor:
    """Returns a copy of ``tensor`` at an address that fits into an int32.

    A Python that is linked at a fixed address may have such addresses in its heap.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT
    memory = mmap.mmap(-1, max(1, tensor.nbytes), flags=flags)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
    assert copy.data_ptr() < 2**31
    return copy.copy_(tensor)
