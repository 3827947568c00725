"""The calls of ``torch.distributed`` on one case, for every library that has that interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

import ringcomm

from ..cases import Case
from . import Buffers, Prepared, Unavailable

Allocate = Callable[[int, torch.dtype], torch.Tensor]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class TorchInterface(Protocol):
    """The functions that are called, with names and parameters as in ``torch.distributed``."""

    all_reduce: Callable[..., Any]
    reduce_scatter_tensor: Callable[..., Any]
    all_gather_into_tensor: Callable[..., Any]
    broadcast: Callable[..., Any]
    reduce: Callable[..., Any]
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    all_to_all_single: Callable[..., Any]
    isend: Callable[..., Any]
    recv: Callable[..., Any]


class Allocator:
    """The source of a case's buffers.

    Args:
        tensors: the device of ordinary tensors.
        heap: the device whose heap ringcomm is asked for.
    """

    def __init__(self, tensors: str, heap: str = "cpu") -> None:
        self._tensors, self._heap = tensors, heap

    def plain(self, count_elems: int, dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory, every page present."""
        return torch.zeros(count_elems, dtype=dtype, device=self._tensors)

    def in_heap(self, count_elems: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of ringcomm's heap, not initialised."""
        return ringcomm.empty(count_elems, dtype=dtype, device=self._heap)


def allocate_buffers(case: Case, allocate: Allocate) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of ``case``; in place they share memory as the operation defines it."""
    if not case.in_place:
        return (
            allocate(case.input_elems, case.dtype).zero_(),
            allocate(case.output_elems, case.dtype).zero_(),
        )
    whole = allocate(case.total_elems, case.dtype).zero_()
    own_chunk = whole.narrow(0, case.rank * case.chunk_elems, case.chunk_elems)
    return (
        own_chunk if case.collective.input_is_chunk else whole,
        own_chunk if case.collective.output_is_chunk else whole,
    )


def prepare(
    interface: TorchInterface, case: Case, allocate: Allocate, extra: dict[str, Any]
) -> Prepared:
    """Binds one call; ``extra`` goes to the calls that take an algorithm."""
    name = case.collective.name
    if name in ("all_reduce", "reduce") and not case.in_place:
        raise Unavailable(f"{name} of torch.distributed works in place only")
    source, target = allocate_buffers(case, allocate)
    op = REDUCE_OPS[case.op]
    at_root = case.rank == case.root
    call: Callable[[], object]
    if name == "all_reduce":
        call = partial(interface.all_reduce, target, op, **extra)
    elif name == "reduce_scatter":
        call = partial(interface.reduce_scatter_tensor, target, source, op, **extra)
    elif name == "all_gather":
        call = partial(interface.all_gather_into_tensor, target, source, **extra)
    elif name == "broadcast":
        call = partial(interface.broadcast, target, case.root)
    elif name == "reduce":
        call = partial(interface.reduce, target, case.root, op)
    elif name == "gather":
        pieces = list(target.chunk(case.world)) if at_root else None
        call = partial(interface.gather, source, pieces, case.root)
    elif name == "scatter":
        pieces = list(source.chunk(case.world)) if at_root else None
        call = partial(interface.scatter, target, pieces, case.root)
    elif name == "all_to_all":
        call = partial(interface.all_to_all_single, target, source)
    else:
        call = partial(_send_recv, interface, source, target, case.rank, case.world)
    return Prepared((Buffers(case, source, target),), call)


def _send_recv(
    interface: TorchInterface, source: torch.Tensor, target: torch.Tensor, rank: int, world: int
) -> None:
    sent = interface.isend(source, (rank + 1) % world)
    interface.recv(target, (rank - 1) % world)
    sent.wait()
