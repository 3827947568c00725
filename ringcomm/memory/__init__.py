# SPDX-License-Identifier: Apache-2.0
"""Tensors in the symmetric heap: memory of this process that its peers map.

Read ``host_heap`` first: it makes the heap in host memory, and maps other processes' heaps.
``device_heap`` makes a heap on each GPU, and maps the heaps of other ranks' GPUs. ``numa`` chooses
the NUMA nodes of the host heap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from ringcomm.cuda import find_device
from ringcomm.errors import ArgumentError
from ringcomm.integers import integer, integers
from ringcomm.memory.device_heap import device_empty
from ringcomm.memory.device_heap import device_heap as heap_of_device
from ringcomm.memory.host_heap import allocate, process_heap
from ringcomm.offload.scratch import Disk

__all__ = ["Disk", "empty", "heap_stats", "zeros"]


def _shape_of(size: tuple[Any, ...], operation: str) -> tuple[int, ...]:
    listed = len(size) == 1 and integer(size[0]) is None
    shape = integers(size[0] if listed else size)
    if shape is None:
        raise ArgumentError(f"{operation}: expected integers below 2^63 as the shape, got {size!r}")
    if any(dim < 0 for dim in shape):
        raise ArgumentError(f"{operation}: expected dimensions >= 0, got {shape}")
    return tuple(shape)


def _tensor(
    size: tuple[Any, ...], dtype: torch.dtype | None, device: object, operation: str
) -> torch.Tensor:
    shape = _shape_of(size, operation)
    if dtype is None:
        dtype = torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{operation}: expected a torch.dtype, got {dtype!r}")
    index = find_device(device, operation)
    if index is not None:
        return device_empty(shape, dtype, index, operation)
    count_elems = prod(shape)
    if count_elems == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = allocate(count_elems * dtype.itemsize, operation)
    return torch.frombuffer(memory, dtype=dtype, count=count_elems).view(shape)


def empty(*size: Any, dtype: torch.dtype | None = None, device: object = None) -> torch.Tensor:
    """Returns an uninitialized tensor in the heap. Collectives move it without a staging copy.

    Args:
        size: the shape, as integers or one sequence: ``empty(2, 3)`` or ``empty((2, 3))``.
        dtype: any torch dtype; None means ``torch.get_default_dtype()``.
        device: the heap's device: None or "cpu" for the host; "cuda", "cuda:1" or a torch.device
            for a GPU. The heap of a GPU is made at its first use, and grows up to
            ``RINGCOMM_CUDA_HEAP_BYTES``.

    Returns:
        A contiguous tensor. Its memory is reused once the tensor and all its views are deleted. On
        a GPU, reuse also waits for the work that is queued on the current stream at that moment;
        keep a tensor until the work of all other streams that use it is done.

    Raises:
        ArgumentError: the shape, dtype or device is not usable.
        HeapError: too little memory is free in the heap; the message names needed and free bytes.
        UnsupportedError: this machine lacks the device, or its current stream is capturing a graph.
    """
    return _tensor(size, dtype, device, "ringcomm.empty")


def zeros(*size: Any, dtype: torch.dtype | None = None, device: object = None) -> torch.Tensor:
    """Returns a tensor as :func:`empty` does, filled with zeros."""
    tensor = _tensor(size, dtype, device, "ringcomm.zeros")
    if tensor.numel():
        # Zero the bytes: some dtypes have no fill kernel, and zero bytes are 0 in every dtype.
        tensor.view(-1).view(torch.uint8).zero_()
    return tensor


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Turns gradients and inference mode off, so that new tensors can always be changed in place.

    Outside ``torch.inference_mode()`` torch refuses to change tensors that were made in this mode.
    """
    # Leaving inference mode turns gradients on, so turn them off after leaving it.
    with torch.inference_mode(False), torch.no_grad():
        yield


def heap_stats(device: object = None) -> dict[str, int]:
    """Returns the sizes of this process's heap in bytes; makes the heap if it does not exist yet.

    Args:
        device: the heap's device, as in :func:`empty`.

    Returns:
        ``capacity_bytes`` (address space), ``committed_bytes`` (physical memory
        held), ``used_bytes`` (in tensors and communicators), ``free_bytes``,
        ``largest_free_bytes`` (the largest tensor that fits now) and, on the host only,
        ``huge_bytes`` (the bytes in huge pages).
    """
    index = find_device(device, "ringcomm.heap_stats")
    if index is not None:
        return heap_of_device(index).stats()
    heap = process_heap()
    return {
        "capacity_bytes": heap.capacity_bytes,
        "committed_bytes": heap.committed_bytes,
        "used_bytes": heap.used_bytes,
        "free_bytes": heap.capacity_bytes - heap.used_bytes,
        "largest_free_bytes": heap.largest_free_bytes,
        "huge_bytes": heap.huge_bytes,
    }
