"""Rounds in which every system has its turn, and what is computed from them.

A turn is a barrier and then a batch of calls; its time is that of the slowest rank, per
call. Within a round the systems follow each other directly, in an order that rotates from
round to round, so that whatever disturbs the machine disturbs all of them; ratios are
taken within a round and only then summarised.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .board import Board
from .peers import Prepared

# Calls of one turn at most: a Python loop over more gains no precision and costs Gloo's rounds.
_MAX_BATCH = 200


@dataclass(frozen=True)
class Pace:
    """How much is measured. ``batch`` 0: as many calls as fit into ``turn_us``."""

    rounds: int
    warmup_rounds: int
    batch: int
    turn_us: float


@dataclass(frozen=True)
class Timing:
    """One system's cell. Times are per call and of the slowest rank, by round."""

    times_us: tuple[float, ...]
    batch: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def best_us(self) -> float:
        return min(self.times_us)


def measure(board: Board, prepared: Mapping[str, Prepared], pace: Pace) -> dict[str, Timing]:
    """Times every system of ``prepared`` in turn. Collective; every rank gets all timings."""
    names = list(prepared)
    batches = _choose_batches(board, prepared, pace)
    mine: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for index in range(pace.warmup_rounds + pace.rounds):
            for name in _rotated(names, index):
                elapsed_us = _take_turn(board, prepared[name], batches[name])
                if index >= pace.warmup_rounds:
                    mine[name].append(elapsed_us)
    finally:
        gc.enable()
    by_rank = board.exchange(mine)
    return {
        name: Timing(slowest([times[name] for times in by_rank]), batches[name]) for name in names
    }


def slowest(times_by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The time of the slowest rank, round by round."""
    return tuple(max(times) for times in zip(*times_by_rank, strict=True))


def ratios(timing: Timing, subject: Timing) -> list[float]:
    """How many times longer than the subject, round by round: above 1 the subject is faster."""
    return [other / own for other, own in zip(timing.times_us, subject.times_us, strict=True)]


def _take_turn(board: Board, prepared: Prepared, batch: int) -> float:
    call, clock = prepared.call, time.perf_counter_ns
    board.barrier()
    begin = clock()
    for _ in range(batch):
        call()
    return (clock() - begin) / batch / 1e3


def _choose_batches(board: Board, prepared: Mapping[str, Prepared], pace: Pace) -> dict[str, int]:
    if pace.batch > 0:
        return dict.fromkeys(prepared, pace.batch)
    # The first call of a library may set up its connections: it says nothing of the second.
    for name in prepared:
        _take_turn(board, prepared[name], 1)
    single_us = {
        name: min(_take_turn(board, prepared[name], 2) for _ in range(3)) for name in prepared
    }
    by_rank = board.exchange(single_us)
    return {name: batch_for(max(us[name] for us in by_rank), pace.turn_us) for name in prepared}


def batch_for(single_us: float, turn_us: float) -> int:
    """Calls of ``single_us`` each that fill ``turn_us``, from 1 to 200."""
    return min(_MAX_BATCH, max(1, math.ceil(turn_us / max(single_us, 1e-3))))


def _rotated(names: Sequence[str], by: int) -> list[str]:
    shift = by % len(names)
    return [*names[shift:], *names[:shift]]
