# SPDX-License-Identifier: Apache-2.0
"""The progress of a benchmark: its cases, its rounds and the time left."""

import inspect
import io
import sys
import warnings
from importlib import import_module

import pytest
import torch.distributed.nn.functional

from ringcomm.bench import moe
from ringcomm.bench.pacing import Pacing, progress_of_rank, terminal_variable
from ringcomm.bench.run import BENCHES
from ringcomm.bench.timing import Device, Entrant, Pace, measure
from ringcomm.cli.progress import HEARTBEAT_S, TERMINAL_VARIABLE, Progress
from tests.bench.test_timing import LoggingBoard


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show_two_cases(stream, now_s):
    """Shows the state before each of two rounds of each of two cases, which take 10 s each."""
    pacing = Pacing("bench", Progress(stream, lambda: now_s[0]), lambda: now_s[0])
    pacing.expect([1.0, 3.0], about_s=80.0)
    for _ in range(2):
        pacing.begin()
        for index in range(2):
            pacing.show_round(index, 2)
            now_s[0] += 10.0
        pacing.end()


def test_a_terminal_shows_cases_rounds_and_the_time_left():
    stream = Terminal()
    show_two_cases(stream, [0.0])
    lines = [each.removesuffix("\x1b[K") for each in stream.getvalue().split("\r")]
    assert [each for each in lines if each] == [
        "bench: 2 cases, about 80 s",
        "bench: case 1 of 2, about 80 s left",
        "bench: case 1 of 2, round 2 of 2, about 80 s left",
        "bench: case 2 of 2, about 60 s left",
        "bench: case 2 of 2, round 2 of 2, about 18 s left",
    ]


def test_a_log_has_the_number_of_cases_at_once_and_then_a_line_every_30_s():
    stream = io.StringIO()
    show_two_cases(stream, [0.0])
    assert HEARTBEAT_S == 30.0
    assert stream.getvalue().splitlines() == [
        "bench: 2 cases, about 80 s",
        "bench: case 2 of 2, round 2 of 2, about 18 s left",
    ]


def test_only_rank_0_shows_the_state(capsys):
    pacing = Pacing("bench", None)
    pacing.expect(3)
    pacing.begin()
    pacing.end()
    assert capsys.readouterr() == ("", "")


def test_every_round_is_announced_before_its_turns():
    log: list[object] = []
    pace = Pace(rounds=2, warmup_rounds=1, batch=1, turn_us=0)
    entrants = {"a": Entrant([lambda: log.append("a")])}
    measure(LoggingBoard([]), entrants, pace, Device(), lambda *where: log.append(where))
    assert log == [(0, 3), "a", (1, 3), "a", (2, 3), "a"]


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_announces_its_cases(name):
    assert "pacing.expect(" in inspect.getsource(import_module(f"ringcomm.bench.{name}"))


@pytest.mark.parametrize(
    ("stdout", "stderr", "expected"),
    [
        (Terminal, Terminal, {TERMINAL_VARIABLE: "stdout:80"}),
        (io.StringIO, Terminal, {TERMINAL_VARIABLE: "stderr:80"}),
        (Terminal, io.StringIO, {}),
        (io.StringIO, io.StringIO, {}),
    ],
)
def test_ranks_behind_pipes_write_to_the_terminal_of_their_launcher(
    monkeypatch, stdout, stderr, expected
):
    monkeypatch.setattr(sys, "stdout", stdout())
    monkeypatch.setattr(sys, "stderr", stderr())
    assert terminal_variable() == expected
    for name, value in expected.items():
        monkeypatch.setenv(name, value)
        pipes = {each: io.StringIO() for each in ("stdout", "stderr")}
        for each, pipe in pipes.items():
            monkeypatch.setattr(sys, each, pipe)
        progress_of_rank().show("x" * 99)
        written = {each: pipe.getvalue() for each, pipe in pipes.items() if pipe.getvalue()}
        assert written == {value.partition(":")[0]: "\r" + "x" * 79 + "\x1b[K"}


def test_ranks_show_nothing_if_their_caller_shows_progress(monkeypatch):
    monkeypatch.setenv(TERMINAL_VARIABLE, "none")
    assert progress_of_rank() is None


def test_the_timed_exchange_of_tokens_warns_of_nothing():
    """torch deprecates the function that the code written by hand calls."""
    deprecate = torch.distributed.nn.functional._deprecated
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        moe.ignore_deprecation()
        deprecate("all_to_all_single", "another function")
        assert not told
        deprecate("broadcast", "another function")
        assert len(told) == 1
