# SPDX-License-Identifier: Apache-2.0
"""Rounds in which all systems take turns, and statistics of their times.

A turn is a barrier and then a batch of calls; its time is the slowest rank's time, per call. Within
a round the systems follow each other directly, in an order that rotates from round to round, so
that a disturbance of the machine affects all of them. Ratios are computed within a round and then
summarised.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from .board import Board
from .report import Row

# Largest number of calls per turn: with more calls a Python loop is not more precise, and Gloo's
# rounds take longer.
_MAX_BATCH = 200

Call = Callable[[], object]


class Device:
    """The processor under test: the CPU, or in a subclass another processor.

    ``synchronize`` returns when all calls are done; on the CPU calls are always done when they
    return.
    """

    name = "cpu"  # name for ringcomm, such as "cpu" or "cuda:0"
    tensors = "cpu"  # torch device of its tensors
    cache_bytes = 0  # size of the last-level cache that buffers must exceed; 0: ignored
    late = 0  # turns in which the device waited for calls

    def __init__(self, synchronize: Call = lambda: None) -> None:
        self.synchronize = synchronize

    def elapsed_us(self, calls: Iterable[Call]) -> float:
        """Makes the calls and returns the device's time for them, in microseconds."""
        self.synchronize()
        clock = time.perf_counter_ns
        begin = clock()
        for call in calls:
            call()
        self.synchronize()
        return (clock() - begin) / 1e3

    def refresh(self, tensor: torch.Tensor) -> None:
        """Refills an input before a turn if the device moves zeros faster. A CPU does not."""

    def capture(self, calls: Sequence[Call], count: int) -> Call:
        """Returns a call that makes ``count`` calls, in rotation; on a GPU it replays one graph."""

        def replay() -> None:
            for call in islice(cycle(calls), count):
                call()

        return replay

    def facts(self) -> dict[str, str]:
        """Returns facts about the device that a reader of the figures needs."""
        return {}


class HostClock(Device):
    """Measures the host's time for calls: until they return, even if ``device`` has not finished
    them.

    The device is idle when a turn begins.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device.synchronize)

    def elapsed_us(self, calls: Iterable[Call]) -> float:
        self.synchronize()
        clock = time.perf_counter_ns
        begin = clock()
        for call in calls:
            call()
        elapsed_ns = clock() - begin
        self.synchronize()
        return elapsed_ns / 1e3


@dataclass(frozen=True)
class Entrant:
    """The calls of one system that are timed."""

    calls: Sequence[Call]  # calls in rotation, one per buffer set
    calls_each: int = 1  # collectives per call (several in a graph's replay)
    refresh: Call = lambda: None  # runs before each turn, untimed


@dataclass(frozen=True)
class Pace:
    """The number of rounds and calls of a measurement."""

    rounds: int
    warmup_rounds: int
    batch: int  # calls per turn; 0: as many as fit into ``turn_us``
    turn_us: float
    rest_s: float = 0.0  # sleep before each turn (see :meth:`Board.barrier`)


@dataclass(frozen=True)
class Timing:
    """The times of one system in one case: per call, of the slowest rank, by round."""

    times_us: tuple[float, ...]
    batch: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def p95_us(self) -> float:
        """The 95th percentile by nearest rank: the smallest time that at least 95 percent of the
        times do not exceed.
        """
        return sorted(self.times_us)[math.ceil(len(self.times_us) * 95 / 100) - 1]

    @property
    def best_us(self) -> float:
        return min(self.times_us)


def measure(
    board: Board,
    entrants: Mapping[str, Entrant],
    pace: Pace,
    device: Device,
    before_round: Callable[[int, int], object] = lambda index, rounds: None,
) -> dict[str, Timing]:
    """Times all ``entrants`` in turn. Collective; every rank gets all timings.

    Calls ``before_round`` with the number of each round, untimed rounds included, and their count.
    """
    names = list(entrants)
    # A system's next turn continues the rotation where its last turn ended.
    calls = {name: cycle(each.calls) for name, each in entrants.items()}

    def turn_us(name: str, batch: int) -> float:
        entrants[name].refresh()
        device.synchronize()
        board.barrier(pace.rest_s)
        return device.elapsed_us(islice(calls[name], batch)) / batch

    batches = _choose_batches(board, entrants, turn_us, pace)
    mine: dict[str, list[float]] = {name: [] for name in names}
    rounds = pace.warmup_rounds + pace.rounds
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            before_round(index, rounds)
            first = index % len(names)
            for name in (*names[first:], *names[:first]):
                elapsed_us = turn_us(name, batches[name])
                if index >= pace.warmup_rounds:
                    mine[name].append(elapsed_us / entrants[name].calls_each)
    finally:
        gc.enable()
    by_rank = board.exchange(mine)
    timings = {}
    for name, each in entrants.items():  # take the slowest rank of each round
        times_us = tuple(map(max, *(times[name] for times in by_rank), [0.0] * pace.rounds))
        timings[name] = Timing(times_us, batches[name] * each.calls_each)
    return timings


def ratios(timing: Timing, subject: Timing) -> list[float]:
    """Returns times divided by the subject's, round by round: above 1 the subject is faster."""
    return [other / own for other, own in zip(timing.times_us, subject.times_us, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Returns lower quartile, median and upper quartile; None without values."""
    if not values:
        return None, None, None
    spread = list(values) if len(values) > 1 else [values[0]] * 2
    low, middle, high = statistics.quantiles(spread, n=4, method="inclusive")
    return round(low, 4), round(middle, 4), round(high, 4)


def timed(row: Row, timing: Timing, subject: Timing | None) -> Row:
    """Returns ``row`` with its system's times, and their ratios to the times of ``subject``."""
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
    """Returns a row per system; ratios are to ``subject``, or to ``subject[system]``."""
    over = dict.fromkeys(timings, subject) if isinstance(subject, str) else subject
    return [
        timed(replace(case, system=name), timing, timings[over[name]])
        for name, timing in timings.items()
    ]


def _choose_batches(
    board: Board, entrants: Mapping[str, Entrant], turn_us: Callable[[str, int], float], pace: Pace
) -> dict[str, int]:
    if pace.batch > 0:
        return {name: math.ceil(pace.batch / each.calls_each) for name, each in entrants.items()}
    # The first call of a library may set up connections, so it does not predict the second.
    for name in entrants:
        turn_us(name, 1)
    by_rank = board.exchange({name: min(turn_us(name, 2) for _ in range(3)) for name in entrants})
    return {
        name: batch_for(max(us[name] for us in by_rank), pace.turn_us, each.calls_each)
        for name, each in entrants.items()
    }


def batch_for(single_us: float, turn_us: float, calls_each: int = 1) -> int:
    """Returns how many calls of ``single_us`` fill a turn of ``turn_us``: from 1 to 200."""
    most = max(1, _MAX_BATCH // calls_each)
    return min(most, max(1, math.ceil(turn_us / max(single_us, 1e-3))))
