"""First part of the demo: every collective checked, and timed against Gloo, call beside call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm.launch import World

# The collectives of the demo: for each its buffers, its call and what the call must give.
#
# A case works on vectors of FP32 small integers, whose sums are exact in any order, so a result is
# right to the bit or wrong. N is the number of elements of the larger side, W the ranks, M = N / W.

ROOT = 0
PERIOD = 11  # the pattern repeats at no power of two, so misplaced segments show

# torch 2.13 renamed these two and warns of the names that torch 2.11 knows.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Allocate = Callable[[int], Tensor]  # elements -> FP32 vector


@dataclass(frozen=True)
class Part:
    """A piece of an output that must hold the sum of what ``ranks`` gave, from ``begin`` on."""

    output: Tensor
    begin: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class Case:
    """One collective at one size on this rank.

    ``call`` runs it on ``inputs``, which hold this rank's source (all of it, its first chunk, or
    nothing where the rank gives nothing); ``parts`` are the outputs. In place they are one.
    """

    inputs: Sequence[Tensor]
    parts: Sequence[Part]
    call: Callable[[dist.ProcessGroup], object]


@dataclass(frozen=True)
class Place:
    """The setting of a case: the ranks, the vector's size N and the kind of memory."""

    world: World
    elems: int
    allocate: Allocate

    @property
    def chunk_elems(self) -> int:
        """M, the elements of one rank's chunk."""
        return self.elems // self.world.size

    @property
    def own_begin(self) -> int:
        """The first element of this rank's chunk in a vector of N elements."""
        return self.world.rank * self.chunk_elems

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world.size)

    def vector(self) -> Tensor:
        """A vector of N elements."""
        return self.allocate(self.elems)

    def chunk(self) -> Tensor:
        """A vector of M elements."""
        return self.allocate(self.chunk_elems)

    def chunks(self) -> list[Tensor]:
        """W vectors of M elements."""
        return [self.chunk() for _ in self.ranks]


@lru_cache
def _pattern(elems: int) -> Tensor:
    return (torch.arange(elems, dtype=torch.int32) % PERIOD).float()


def _offset(rank: int, salt: int) -> int:
    return (rank + 1) * (salt + 1)


def fill(case: Case, place: Place, salt: int) -> None:
    """Write this rank's source, pattern + offset, into the inputs, and -1 into the outputs."""
    for part in case.parts:
        part.output.fill_(-1)
    begin = 0
    for tensor in case.inputs:
        pattern = _pattern(place.elems)[begin : begin + tensor.numel()]
        torch.add(pattern, _offset(place.world.rank, salt), out=tensor)
        begin += tensor.numel()


def wrong_elems(case: Case, place: Place, salt: int) -> int:
    """Elements of the outputs that differ from what they must be; uses the outputs up.

    Turning the sums back into the pattern is exact and, unlike building the sums, needs no large
    temporary, whose page faults would take longer than the collective.
    """
    wrong = 0
    for part in case.parts:
        offset = sum(_offset(rank, salt) for rank in part.ranks)
        pattern = _pattern(place.elems)[part.begin : part.begin + part.output.numel()]
        found = part.output.sub_(offset).div_(len(part.ranks))
        if not torch.equal(found, pattern):
            wrong += int((found != pattern).sum())
    return wrong


def all_reduce(place: Place) -> Case:
    data = place.vector()
    parts = [Part(data, 0, place.ranks)]
    return Case([data], parts, lambda group: dist.all_reduce(data, group=group))


def reduce_scatter(place: Place) -> Case:
    data, out = place.vector(), place.chunk()
    parts = [Part(out, place.own_begin, place.ranks)]
    return Case([data], parts, lambda group: reduce_scatter_single(out, data, group=group))


def reduce_scatter_list(place: Place) -> Case:
    data, out = place.chunks(), place.chunk()
    parts = [Part(out, place.own_begin, place.ranks)]
    return Case(data, parts, lambda group: dist.reduce_scatter(out, data, group=group))


def _one_from_each(place: Place, outputs: Sequence[Tensor], begin: int) -> list[Part]:
    """Outputs by sender: each the sender's elements from ``begin`` on."""
    return [Part(output, begin, [rank]) for rank, output in zip(place.ranks, outputs, strict=True)]


def all_gather(place: Place) -> Case:
    data, out = place.chunk(), place.vector()
    parts = _one_from_each(place, out.view(place.world.size, -1).unbind(), 0)
    return Case([data], parts, lambda group: all_gather_single(out, data, group=group))


def all_gather_list(place: Place) -> Case:
    data, out = place.chunk(), place.chunks()
    parts = _one_from_each(place, out, 0)
    return Case([data], parts, lambda group: dist.all_gather(out, data, group=group))


def broadcast(place: Place) -> Case:
    data = place.vector()
    parts = [Part(data, 0, [ROOT])]
    return Case([data], parts, lambda group: dist.broadcast(data, ROOT, group=group))


def reduce(place: Place) -> Case:
    data = place.vector()
    # Elsewhere than at the root the contents are undefined afterwards.
    parts = [Part(data, 0, place.ranks)] if place.world.rank == ROOT else []
    return Case([data], parts, lambda group: dist.reduce(data, ROOT, group=group))


def gather(place: Place) -> Case:
    data = place.chunk()
    out = place.chunks() if place.world.rank == ROOT else None
    parts = _one_from_each(place, out, 0) if out else []
    return Case([data], parts, lambda group: dist.gather(data, out, ROOT, group=group))


def scatter(place: Place) -> Case:
    out = place.chunk()
    data = place.chunks() if place.world.rank == ROOT else None
    parts = [Part(out, place.own_begin, [ROOT])]
    return Case(data or [], parts, lambda group: dist.scatter(out, data, ROOT, group=group))


def all_to_all(place: Place) -> Case:
    data, out = place.vector(), place.vector()
    parts = _one_from_each(place, out.view(place.world.size, -1).unbind(), place.own_begin)
    return Case([data], parts, lambda group: dist.all_to_all_single(out, data, group=group))


def all_to_all_list(place: Place) -> Case:
    data, out = place.chunks(), place.chunks()
    parts = _one_from_each(place, out, place.own_begin)
    return Case(data, parts, lambda group: dist.all_to_all(out, data, group=group))


def ping_pong(place: Place) -> Case:
    """Rank 0 sends, rank 1 receives and sends it back; the time is that of both ways."""
    data, out = place.vector(), place.vector()

    def call(group: dist.ProcessGroup) -> None:
        if place.world.rank == 0:
            dist.send(data, 1, group=group)
            dist.recv(out, 1, group=group)
        else:
            dist.recv(out, 0, group=group)
            dist.send(out, 0, group=group)

    return Case([data], [Part(out, 0, [0])], call)


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

    return Case([data], [Part(out, 0, [peer])], call)


def barrier(place: Place) -> Case:
    return Case([], [], lambda group: dist.barrier(group=group))


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


FP32_BYTES = 4
SALTS = (1, 2)  # what the inputs hold in the check before the timing
FINAL_SALT = 3  # and in the check after it, when every staging slot was used many times
BLOCK_S = 0.004  # calls are timed in blocks of this length: long beside the clock and the barrier
MAX_CALLS = 200
MIN_ROUNDS = 3
MAX_ROUNDS = 25


@dataclass(frozen=True)
class Pair:
    """The same ranks on both systems."""

    ringcomm: dist.ProcessGroup
    gloo: dist.ProcessGroup


@dataclass(frozen=True)
class Cell:
    """A measured cell: medians over the rounds, times of one call in microseconds."""

    collective: str
    memory: str
    size_bytes: int
    gloo_us: float
    ringcomm_us: float
    ratio: float
    rounds: int
    wrong_elems: int


@dataclass(frozen=True)
class Row:
    """A collective on plain tensors or on tensors in ringcomm's heap."""

    collective: str
    memory: str
    build: Callable[[Place], Case]
    allocate: Allocate


def plain(elems: int) -> torch.Tensor:
    """An ordinary FP32 vector."""
    return torch.empty(elems)


def rows(heap_allocate: Allocate) -> list[Row]:
    """All rows of the table except the barrier's."""
    return [
        *(Row(name, "plain", build, plain) for name, build in COLLECTIVES.items()),
        *(Row(name, "heap", COLLECTIVES[name], heap_allocate) for name in IN_HEAP),
    ]


@dataclass(frozen=True)
class Meter:
    """Measures rows on both systems; every rank must ask for the same rows in the same order.

    ``cell_s`` is about how long one cell is timed.
    """

    world: World
    pair: Pair
    sizes_bytes: tuple[int, ...]
    cell_s: float

    def measure(self, row: Row) -> Iterator[Cell]:
        """A cell per size."""
        for size_bytes in self.sizes_bytes:
            place = Place(self.world, size_bytes // FP32_BYTES, row.allocate)
            yield self._cell(row, row.build(place), place)

    def measure_barrier(self) -> Cell:
        """The barrier's only cell."""
        place = Place(self.world, 0, plain)
        return self._cell(Row("barrier", "", barrier, plain), barrier(place), place)

    def _cell(self, row: Row, case: Case, place: Place) -> Cell:
        wrong = sum(self._check(case, place, salt) for salt in SALTS)
        for tensor in (*case.inputs, *(part.output for part in case.parts)):
            tensor.zero_()  # sums in place stay finite however often they are repeated
        rounds, calls = self._plan(case)
        times = torch.tensor([self._round(case, calls, index % 2 == 0) for index in range(rounds)])
        wrong += self._check(case, place, FINAL_SALT)
        # A round lasts until its last rank is done.
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.pair.gloo)
        gloo_us, ringcomm_us = (times.double() * 1e6).unbind(dim=1)
        return Cell(
            collective=row.collective,
            memory=row.memory,
            size_bytes=place.elems * FP32_BYTES,
            gloo_us=statistics.median(gloo_us.tolist()),
            ringcomm_us=statistics.median(ringcomm_us.tolist()),
            ratio=statistics.median((gloo_us / ringcomm_us).tolist()),
            rounds=rounds,
            wrong_elems=wrong,
        )

    def _check(self, case: Case, place: Place, salt: int) -> int:
        """Wrong elements on all ranks and both systems."""
        wrong = torch.zeros(1, dtype=torch.int64)
        for group in (self.pair.gloo, self.pair.ringcomm):
            fill(case, place, salt)
            case.call(group)
            wrong += wrong_elems(case, place, salt)
        dist.all_reduce(wrong, group=self.pair.gloo)
        return int(wrong)

    def _plan(self, case: Case) -> tuple[int, tuple[int, int]]:
        """Rounds, and calls per round on (Gloo, ringcomm), equal on all ranks."""
        once_s = [
            min(self._block(case, group, calls=1) for _ in range(2))
            for group in (self.pair.gloo, self.pair.ringcomm)
        ]
        slowest = torch.tensor(once_s, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.pair.gloo)
        gloo_s, ringcomm_s = slowest.tolist()
        calls = (_calls(gloo_s), _calls(ringcomm_s))
        round_s = gloo_s * calls[0] + ringcomm_s * calls[1]
        return max(MIN_ROUNDS, min(MAX_ROUNDS, int(self.cell_s / round_s))), calls

    def _round(self, case: Case, calls: tuple[int, int], gloo_first: bool) -> tuple[float, float]:
        """Seconds of one call on (Gloo, ringcomm); the order alternates to share out the noise."""
        systems = [(0, self.pair.gloo), (1, self.pair.ringcomm)]
        call_s = [0.0, 0.0]
        for system, group in systems if gloo_first else reversed(systems):
            call_s[system] = self._block(case, group, calls[system]) / calls[system]
        return call_s[0], call_s[1]

    def _block(self, case: Case, group: dist.ProcessGroup, calls: int) -> float:
        """Seconds that this rank takes for ``calls`` calls, all ranks starting together."""
        dist.barrier(group=group)
        started = time.perf_counter()
        for _ in range(calls):
            case.call(group)
        return time.perf_counter() - started


def _calls(call_s: float) -> int:
    return max(1, min(MAX_CALLS, int(BLOCK_S / call_s)))
