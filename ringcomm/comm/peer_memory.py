# SPDX-License-Identifier: Apache-2.0
"""Peer memory: heap tensors of all ranks, mapped in this process and read one-sidedly."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch

from ringcomm.comm.agreement import first_other, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.arguments import is_contiguous
from ringcomm.errors import where
from ringcomm.memory import empty
from ringcomm.memory.host_heap import process_heap

Tensor = torch.Tensor


class _Mapped(Protocol):
    """A peer's heap on the host or on a device, as mapped in this process."""

    base_ptr: int


# Returns a uint8 tensor over a range of a mapped heap: (heap, address, size in bytes).
_View = Callable[[_Mapped, int, int], Tensor]


_SIZES = ("number of rows", "size in bytes", "size of an element in bytes")


def peer_tensors(comm: Communicator, tensor: Tensor, operation: str) -> tuple[Tensor, ...]:
    """Returns every rank's ``tensor``, by rank, as mapped in this process; collective.

    Reads are one-sided: the ranks must ensure, as by ``comm.barrier()``, that no rank writes during
    a read. The views keep the peers' heaps mapped, but do not keep the peers' tensors alive.

    Args:
        comm: the ranks.
        tensor: contiguous, in the heap; of equal shape and dtype on all ranks.
        operation: the name of the operation, for errors.

    Returns:
        Tensors like ``tensor``; this rank's entry is ``tensor`` itself.

    Raises:
        MismatchError: the ranks' tensors differ in their number of rows, size or dtype.
    """
    heaps, view = _heaps_of(comm)
    awaiting_peers(comm)(operation)
    offset = tensor.data_ptr() - heaps[comm.rank].base_ptr if tensor.numel() else 0
    own = [tensor.size(0), tensor.nbytes, tensor.element_size()]
    mine = torch.tensor([*own, offset], device=comm.device)
    everyone = torch.empty(comm.world_size * 4, dtype=torch.int64, device=comm.device)
    comm.all_gather_into_tensor(everyone, mine)
    comm.engine.finish_host_side()
    told = everyone.view(-1, 4).tolist()
    sizes = [row[:3] for row in told]
    if other := first_other(sizes):
        head = where(operation, comm.rank, comm.world_size)
        raise unequal(head, _SIZES, sizes, other, "Give all ranks tensors of equal shape and dtype")
    found = []
    for rank, (_, size_bytes, _, at) in enumerate(told):
        if rank == comm.rank or not size_bytes:
            found.append(tensor)
            continue
        raw = view(heaps[rank], heaps[rank].base_ptr + at, size_bytes)
        found.append(raw.view(tensor.dtype).view(tensor.shape))
    return tuple(found)


def heap_bases(comm: Communicator) -> tuple[int, ...]:
    """Returns, by rank, the addresses at which this process has mapped the ranks' heaps.

    While the communicator lives, data at an offset in a peer's heap can be read at the heap's
    address plus the offset, under the rule of :func:`peer_tensors`.

    Args:
        comm: ranks of one node, on the host or on devices.
    """
    return tuple(heap.base_ptr for heap in _heaps_of(comm)[0])


def awaiting_peers(comm: Communicator) -> Callable[[str], None]:
    """Returns a function that waits until the peers have mapped all memory of this rank's heap.

    A device's heap may just have grown. The function takes the operation's name for errors, raises
    HeapError if a peer does not map the memory within the timeout, and keeps no communicator alive.
    """
    if isinstance(comm.engine, DeviceCallEngine):
        return comm.engine.device_core.await_peers
    return lambda operation: None


def is_in_heap(comm: Communicator, tensor: Tensor) -> bool:
    """True if peers can read the tensor in place."""
    engine = comm.engine
    if not is_contiguous(tensor):
        return False
    if isinstance(engine, DeviceCallEngine):
        return engine.device_core.heap.is_reached(tensor.data_ptr(), tensor.nbytes)
    return process_heap().contains(tensor.data_ptr(), tensor.nbytes)


def _heaps_of(comm: Communicator) -> tuple[tuple[_Mapped, ...], _View]:
    engine = comm.engine
    if isinstance(engine, DeviceCallEngine):
        core = engine.device_core

        def on_device(heap: _Mapped, ptr: int, size_bytes: int) -> Tensor:
            return core.runtime.tensor(core.device, ptr, size_bytes, heap)

        return cast("tuple[_Mapped, ...]", tuple(core._mapped)), on_device
    return cast("tuple[_Mapped, ...]", engine.membership.heaps), _on_host


def _on_host(heap: _Mapped, ptr: int, size_bytes: int) -> Tensor:
    memory = (ctypes.c_uint8 * size_bytes).from_address(ptr)
    # The tensor keeps the array alive, and the array keeps the mapping.
    memory.heap = heap  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


@contextmanager
def lent_to_peers(
    comm: Communicator, tensor: Tensor, operation: str
) -> Iterator[tuple[Tensor, ...]]:
    """Yields every rank's ``tensor``, by rank, readable within the block; collective.

    The block ends once all ranks have reached its end: only then may a rank write to its tensor or
    reuse its memory.

    Args:
        comm: ranks on the host, all of one node.
        tensor: a tensor in any memory, of equal shape and dtype on all ranks, with at least one
            dimension; no rank may write to it within the block.
        operation: the name of the operation, for errors.

    Raises:
        MismatchError: the ranks' tensors differ in their number of rows or their size.
    """
    own = tensor
    if not is_in_heap(comm, own):
        own = empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    yield peer_tensors(comm, own, operation)
    comm.barrier()
