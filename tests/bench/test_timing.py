# SPDX-License-Identifier: Apache-2.0
"""Turns, rounds and the figures computed from them, with a clock that the test advances."""

import pytest

from ringcomm.bench import timing
from ringcomm.bench.board import Board
from ringcomm.bench.report import row_of
from ringcomm.bench.timing import (
    Device,
    Entrant,
    Pace,
    Timing,
    batch_for,
    measure,
    quartiles,
    ratios,
    rows_of,
)


class Clock:
    """A clock whose nanoseconds pass only when a call advances it."""

    def __init__(self):
        self.now_ns = 0

    def perf_counter_ns(self):
        return self.now_ns


class LoggingBoard(Board):
    """A board of one rank, which logs the barriers among the calls."""

    def __init__(self, log):
        self.log = log

    def barrier(self, rest_s=0.0):
        self.log.append("|")

    def exchange(self, value):
        return [value]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def takes(clock, log, name, microseconds):
    def call():
        log.append(name)
        clock.now_ns += round(microseconds * 1000)

    return Entrant([call])


def test_systems_take_turns_in_rotating_order(clock):
    log: list[str] = []
    prepared = {name: takes(clock, log, name, 10) for name in "abc"}
    pace = Pace(rounds=3, warmup_rounds=1, batch=2, turn_us=0)
    measure(LoggingBoard(log), prepared, pace, Device())
    assert "".join(log) == "|aa|bb|cc" + "|bb|cc|aa" + "|cc|aa|bb" + "|aa|bb|cc"


def test_times_are_per_call_and_warm_up_does_not_count(clock):
    log: list[str] = []
    prepared = {"a": takes(clock, log, "a", 10), "b": takes(clock, log, "b", 40)}
    pace = Pace(rounds=5, warmup_rounds=2, batch=3, turn_us=0)
    timings = measure(LoggingBoard(log), prepared, pace, Device())
    assert timings["a"].times_us == (10.0,) * 5
    assert ratios(timings["b"], timings["a"]) == [4.0] * 5


def test_a_turn_is_filled_with_calls(clock):
    log: list[str] = []
    prepared = {"fast": takes(clock, log, "f", 1), "slow": takes(clock, log, "s", 900)}
    pace = Pace(rounds=1, warmup_rounds=0, batch=0, turn_us=2000.0)
    timings = measure(LoggingBoard(log), prepared, pace, Device())
    assert (timings["fast"].batch, timings["slow"].batch) == (200, 3)
    assert [batch_for(us, 2000.0) for us in (0.0, 10.0, 5000.0)] == [200, 200, 1]


def test_buffer_sets_go_round_across_turns_and_refreshing_costs_nothing(clock):
    log: list[str] = []
    calls = [takes(clock, log, name, 10).calls[0] for name in "abc"]
    refresh = takes(clock, log, "*", 500).calls[0]
    pace = Pace(rounds=2, warmup_rounds=1, batch=4, turn_us=0)
    entrants = {"x": Entrant(calls, refresh=refresh)}
    timings = measure(LoggingBoard(log), entrants, pace, Device())
    assert "".join(log) == "*|abca*|bcab*|cabc"
    assert timings["x"].times_us == (10.0, 10.0)


def test_a_graph_counts_as_the_calls_in_it(clock):
    log: list[str] = []
    pace = Pace(rounds=2, warmup_rounds=0, batch=40, turn_us=0)
    entrants = {"x": Entrant(takes(clock, log, "g", 100).calls, calls_each=20)}
    timings = measure(LoggingBoard(log), entrants, pace, Device())
    assert "".join(log) == "|gg|gg"
    assert (timings["x"].times_us, timings["x"].batch) == ((5.0, 5.0), 40)
    assert [batch_for(us, 2000.0, 20) for us in (10.0, 900.0, 5000.0)] == [10, 3, 1]


def test_the_slowest_rank_counts_round_by_round(clock):
    class TwoRanks(LoggingBoard):
        def exchange(self, value):
            return [value, {"a": [1.0, 30.0]}]

    entrants = {"a": takes(clock, [], "a", 10)}
    pace = Pace(rounds=2, warmup_rounds=0, batch=1, turn_us=0)
    assert measure(TwoRanks([]), entrants, pace, Device())["a"].times_us == (10.0, 30.0)


def test_the_ratio_is_taken_within_rounds_before_the_median():
    # A disturbance that doubles one round of both systems must not affect the ratio, although it
    # moves the medians of the times apart.
    subject = Timing((1.0, 1.0, 8.0), batch=1)
    assert (subject.p95_us, Timing((*[1.0] * 19, 5.0), batch=1).p95_us) == (8.0, 1.0)
    other = Timing((3.0, 24.0, 24.0), batch=1)
    assert other.median_us / subject.median_us == 24.0
    assert quartiles(ratios(other, subject))[1] == 3.0
    assert (subject.median_us, subject.best_us) == (1.0, 1.0)


def test_quartiles():
    assert quartiles([]) == (None, None, None)
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)


def test_rows_have_ratios_over_the_subject_of_each_system():
    times = {"a": (1.0, 10.0, 2.0), "b": (2.0, 30.0, 8.0), "c": (2.0, 2.0, 2.0)}
    timings = {name: Timing(each, batch=1) for name, each in times.items()}
    case = row_of("step", "32x2", 2, 5)
    found = rows_of(case, timings, "a")
    assert [row.system for row in found] == list(times)
    assert [row.ratio for row in found] == [1.0, 3.0, 1.0]
    assert found[1].time_us == 8.0 and found[1].rounds == 3
    assert (found[1].collective, found[1].placement, found[1].size_bytes) == ("step", "32x2", 20)
    assert [row.ratio for row in rows_of(case, timings, {"a": "a", "b": "a", "c": "b"})] == [
        *(1.0, 3.0, 0.25),
    ]
