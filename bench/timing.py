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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Protocol

from .board import Board
from .report import Row

# Calls of one turn at most: a Python loop over more gains no precision and costs Gloo's rounds.
_MAX_BATCH = 200

Call = Callable[[], object]


def host_elapsed_us(calls: Iterable[Call]) -> float:
    """Makes the calls, each of which returns when it is done; microseconds by the host's clock."""
    clock = time.perf_counter_ns
    begin = clock()
    for call in calls:
        call()
    return (clock() - begin) / 1e3


class Clock(Protocol):
    """The interface of a clock that times calls."""

    def elapsed_us(self, calls: Iterable[Call]) -> float:
        """Makes the calls and returns how long they took, in microseconds."""

    def synchronize(self) -> None:
        """Returns when nothing is under way."""


@dataclass(frozen=True)
class Entrant:
    """The calls by which one system is timed.

    Args:
        calls: made in rotation, one per set of buffers.
        calls_each: collectives that one of them makes (a graph's replay makes several).
        refresh: done before each turn, outside its time.
    """

    calls: Sequence[Call]
    calls_each: int = 1
    refresh: Call = lambda: None


@dataclass(frozen=True)
class Pace:
    """The amount of measuring. ``batch`` 0: as many calls as fit into ``turn_us``.

    ``rest_s`` seconds of sleep come before each turn (see :meth:`Board.barrier`).
    """

    rounds: int
    warmup_rounds: int
    batch: int
    turn_us: float
    rest_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """One system's cell. Times are per call and of the slowest rank, by round."""

    times_us: tuple[float, ...]
    batch: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def p95_us(self) -> float:
        return percentile(self.times_us, 95)

    @property
    def best_us(self) -> float:
        return min(self.times_us)


class _Turns:
    """The turns of one system; the next one goes on in the rotation where the last one ended."""

    def __init__(self, board: Board, clock: Clock, entrant: Entrant, rest_s: float) -> None:
        self._board, self._clock, self._entrant = board, clock, entrant
        self._rest_s = rest_s
        self._calls = cycle(entrant.calls)

    def take(self, batch: int) -> float:
        """Microseconds per element of ``calls``."""
        self._entrant.refresh()
        self._clock.synchronize()
        self._board.barrier(self._rest_s)
        return self._clock.elapsed_us(islice(self._calls, batch)) / batch


def measure(
    board: Board, entrants: Mapping[str, Entrant], pace: Pace, clock: Clock
) -> dict[str, Timing]:
    """Times every one of ``entrants`` in turn. Collective; every rank gets all timings."""
    names = list(entrants)
    turns = {name: _Turns(board, clock, entrants[name], pace.rest_s) for name in names}
    batches = _choose_batches(board, entrants, turns, pace)
    mine: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for index in range(pace.warmup_rounds + pace.rounds):
            first = index % len(names)
            for name in (*names[first:], *names[:first]):
                elapsed_us = turns[name].take(batches[name])
                if index >= pace.warmup_rounds:
                    mine[name].append(elapsed_us / entrants[name].calls_each)
    finally:
        gc.enable()
    by_rank = board.exchange(mine)
    return {
        name: Timing(slowest([times[name] for times in by_rank]), batches[name] * each.calls_each)
        for name, each in entrants.items()
    }


def slowest(times_by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The time of the slowest rank, round by round."""
    return tuple(max(times) for times in zip(*times_by_rank, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of ``values`` that is not below ``percent`` percent of them (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def ratios(timing: Timing, subject: Timing) -> list[float]:
    """Returns times relative to the subject's, round by round: above 1 the subject is faster."""
    return [other / own for other, own in zip(timing.times_us, subject.times_us, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Lower quartile, median and upper quartile; None of nothing."""
    if not values:
        return None, None, None
    spread = list(values) if len(values) > 1 else [values[0]] * 2
    low, middle, high = statistics.quantiles(spread, n=4, method="inclusive")
    return round(low, 4), round(middle, 4), round(high, 4)


def timed(row: Row, timing: Timing, subject: Timing | None) -> Row:
    """``row`` with the times of its system, and how they compare with those of ``subject``."""
    low, middle, high = quartiles(ratios(timing, subject) if subject else [])
    return replace(
        row,
        time_us=round(timing.median_us, 3),
        best_us=round(timing.best_us, 3),
        p95_us=round(timing.p95_us, 3),
        rounds=len(timing.times_us),
        batch=timing.batch,
        ratio=middle,
        ratio_p95=timing.p95_us / subject.p95_us if subject else None,
        ratio_low=low,
        ratio_high=high,
    )


def rows_of(
    case: Row, timings: Mapping[str, Timing], subject: str | Mapping[str, str]
) -> list[Row]:
    """A row of the case for each system; ratios are over ``subject``, or over each one's own."""
    over = dict.fromkeys(timings, subject) if isinstance(subject, str) else subject
    return [
        timed(replace(case, system=name), timing, timings[over[name]])
        for name, timing in timings.items()
    ]


def _choose_batches(
    board: Board, entrants: Mapping[str, Entrant], turns: Mapping[str, _Turns], pace: Pace
) -> dict[str, int]:
    if pace.batch > 0:
        return {name: math.ceil(pace.batch / each.calls_each) for name, each in entrants.items()}
    # The first call of a library may set up its connections: it says nothing of the second.
    for one in turns.values():
        one.take(1)
    single_us = {name: min(one.take(2) for _ in range(3)) for name, one in turns.items()}
    by_rank = board.exchange(single_us)
    return {
        name: batch_for(max(us[name] for us in by_rank), pace.turn_us, each.calls_each)
        for name, each in entrants.items()
    }


def batch_for(single_us: float, turn_us: float, calls_each: int = 1) -> int:
    """Elements of ``single_us`` each that fill ``turn_us``: from 1 to what makes 200 calls."""
    most = max(1, _MAX_BATCH // calls_each)
    return min(most, max(1, math.ceil(turn_us / max(single_us, 1e-3))))
