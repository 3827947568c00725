"""The collectives of the demo: for each its buffers, its call and what the call must give.

A case works on vectors of FP32 small integers, whose sums are exact in any order, so a result is
right to the bit or wrong. N is the number of elements of the larger side, W the ranks, M = N / W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.cli.rank import World

ROOT = 0
PERIOD = 11  # the pattern repeats at no power of two, so misplaced segments show

# torch 2.13 renamed these two and warns of the names that torch 2.11 knows.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Allocate = Callable[[int], Tensor]  # elements -> FP32 vector


@dataclass(frozen=True)
class Case:
    """One collective at one size on this rank.

    ``call`` runs it on ``inputs`` (N elements over all of them, or none where this rank gives
    nothing) and fills ``outputs``; ``expected(salt)`` is what ``outputs`` must hold when every
    rank's inputs were filled with ``salt``. In place: ``outputs`` are ``inputs``.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    call: Callable[[dist.ProcessGroup], object]
    expected: Callable[[int], list[Tensor]]


@dataclass(frozen=True)
class Place:
    """Where a case is built: the ranks, the vector's size N and the kind of memory."""

    world: World
    elems: int
    allocate: Allocate

    @property
    def chunk_elems(self) -> int:
        """M, the elements of one rank's chunk."""
        return self.elems // self.world.size

    def vector(self) -> Tensor:
        """A vector of N elements."""
        return self.allocate(self.elems)

    def chunk(self) -> Tensor:
        """A vector of M elements."""
        return self.allocate(self.chunk_elems)

    def chunks(self) -> list[Tensor]:
        """W vectors of M elements."""
        return [self.chunk() for _ in range(self.world.size)]

    def source(self, rank: int, salt: int) -> Tensor:
        """The N elements that ``rank`` gives."""
        return _pattern(self.elems) + _offset(rank, salt)

    def total(self, salt: int) -> Tensor:
        """The sum of all ranks' sources."""
        ranks = range(self.world.size)
        return len(ranks) * _pattern(self.elems) + sum(_offset(rank, salt) for rank in ranks)

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's chunk of a vector of N elements."""
        return whole.view(self.world.size, -1)[self.world.rank]


@lru_cache
def _pattern(elems: int) -> Tensor:
    return (torch.arange(elems, dtype=torch.int32) % PERIOD).float()


def _offset(rank: int, salt: int) -> int:
    return (rank + 1) * (salt + 1)


def fill(case: Case, place: Place, salt: int) -> None:
    """Write this rank's source into the inputs, and a wrong value into all other outputs."""
    for output in case.outputs:
        output.fill_(-1)
    if case.inputs:
        source = place.source(place.world.rank, salt)
        parts = source.view(-1, case.inputs[0].numel())
        for tensor, part in zip(case.inputs, parts, strict=False):  # a gather gives one chunk only
            tensor.copy_(part)


def wrong_elems(case: Case, salt: int) -> int:
    """Elements of the outputs that differ from what they must be."""
    expected = case.expected(salt)
    return sum(
        int((output != wanted).sum())
        for output, wanted in zip(case.outputs, expected, strict=bool(expected))
    )


def all_reduce(place: Place) -> Case:
    data = place.vector()
    return Case(
        inputs=[data],
        outputs=[data],
        call=lambda group: dist.all_reduce(data, group=group),
        expected=lambda salt: [place.total(salt)],
    )


def reduce_scatter(place: Place) -> Case:
    data, out = place.vector(), place.chunk()
    return Case(
        inputs=[data],
        outputs=[out],
        call=lambda group: reduce_scatter_single(out, data, group=group),
        expected=lambda salt: [place.own_part(place.total(salt))],
    )


def reduce_scatter_list(place: Place) -> Case:
    data, out = place.chunks(), place.chunk()
    return Case(
        inputs=data,
        outputs=[out],
        call=lambda group: dist.reduce_scatter(out, data, group=group),
        expected=lambda salt: [place.own_part(place.total(salt))],
    )


def _first_chunks(place: Place, salt: int) -> list[Tensor]:
    """What the ranks give to a gather: the first chunk of each one's source."""
    return [place.source(rank, salt)[: place.chunk_elems] for rank in range(place.world.size)]


def all_gather(place: Place) -> Case:
    data, out = place.chunk(), place.vector()
    return Case(
        inputs=[data],
        outputs=[out],
        call=lambda group: all_gather_single(out, data, group=group),
        expected=lambda salt: [torch.cat(_first_chunks(place, salt))],
    )


def all_gather_list(place: Place) -> Case:
    data, out = place.chunk(), place.chunks()
    return Case(
        inputs=[data],
        outputs=out,
        call=lambda group: dist.all_gather(out, data, group=group),
        expected=lambda salt: _first_chunks(place, salt),
    )


def broadcast(place: Place) -> Case:
    data = place.vector()
    return Case(
        inputs=[data],
        outputs=[data],
        call=lambda group: dist.broadcast(data, ROOT, group=group),
        expected=lambda salt: [place.source(ROOT, salt)],
    )


def reduce(place: Place) -> Case:
    data = place.vector()
    at_root = place.world.rank == ROOT
    return Case(
        inputs=[data],
        outputs=[data],
        call=lambda group: dist.reduce(data, ROOT, group=group),
        # Elsewhere than at the root the contents are undefined afterwards.
        expected=lambda salt: [place.total(salt)] if at_root else [],
    )


def gather(place: Place) -> Case:
    data = place.chunk()
    at_root = place.world.rank == ROOT
    out = place.chunks() if at_root else None
    return Case(
        inputs=[data],
        outputs=out or [],
        call=lambda group: dist.gather(data, out, ROOT, group=group),
        expected=lambda salt: _first_chunks(place, salt) if at_root else [],
    )


def scatter(place: Place) -> Case:
    out = place.chunk()
    data = place.chunks() if place.world.rank == ROOT else None
    return Case(
        inputs=data or [],
        outputs=[out],
        call=lambda group: dist.scatter(out, data, ROOT, group=group),
        expected=lambda salt: [place.own_part(place.source(ROOT, salt))],
    )


def _exchanged(place: Place, salt: int) -> list[Tensor]:
    """What this rank receives in an all-to-all, by sender."""
    return [place.own_part(place.source(rank, salt)) for rank in range(place.world.size)]


def all_to_all(place: Place) -> Case:
    data, out = place.vector(), place.vector()
    return Case(
        inputs=[data],
        outputs=[out],
        call=lambda group: dist.all_to_all_single(out, data, group=group),
        expected=lambda salt: [torch.cat(_exchanged(place, salt))],
    )


def all_to_all_list(place: Place) -> Case:
    data, out = place.chunks(), place.chunks()
    return Case(
        inputs=data,
        outputs=out,
        call=lambda group: dist.all_to_all(out, data, group=group),
        expected=lambda salt: _exchanged(place, salt),
    )


def ping_pong(place: Place) -> Case:
    """Rank 0 sends, rank 1 receives and sends it back; the time is that of both ways."""
    rank = place.world.rank
    data, out = place.vector(), place.vector()

    def call(group: dist.ProcessGroup) -> None:
        if rank == 0:
            dist.send(data, 1, group=group)
            dist.recv(out, 1, group=group)
        else:
            dist.recv(out, 0, group=group)
            dist.send(out, 0, group=group)

    return Case([data], [out], call, lambda salt: [place.source(0, salt)])


def exchange(place: Place) -> Case:
    """Both ranks send to and receive from each other at once."""
    peer = 1 - place.world.rank
    data, out = place.vector(), place.vector()

    def call(group: dist.ProcessGroup) -> None:
        operations = [
            dist.P2POp(dist.isend, data, peer, group),
            dist.P2POp(dist.irecv, out, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return Case([data], [out], call, lambda salt: [place.source(peer, salt)])


def barrier(place: Place) -> Case:
    return Case([], [], lambda group: dist.barrier(group=group), lambda salt: [])


COLLECTIVES: dict[str, Callable[[Place], Case]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter, list": reduce_scatter_list,
    "all_gather": all_gather,
    "all_gather, list": all_gather_list,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all, list": all_to_all_list,
    "send/recv, both ways": ping_pong,
    "isend/irecv, exchange": exchange,
}
IN_HEAP = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
