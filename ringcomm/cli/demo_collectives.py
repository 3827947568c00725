"""First part of the demo: every collective checked, and timed against Gloo, call beside call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringcomm.cli.demo_cases import (
    COLLECTIVES,
    IN_HEAP,
    Allocate,
    Case,
    Place,
    barrier,
    fill,
    wrong_elems,
)
from ringcomm.cli.rank import World

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
