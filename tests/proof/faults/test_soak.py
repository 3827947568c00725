# SPDX-License-Identifier: Apache-2.0
"""``make soak`` finds the seed that broke a promise, and plays the seed again."""

import pytest

from tests.proof.faults import soak
from tests.support.fault_schedules import draw_chain, interpreted
from tests.support.fault_training import draw_training

pytestmark = pytest.mark.deadlines


def test_a_seed_that_broke_a_promise_is_named(monkeypatch, capsys):
    bad = draw_chain(5)
    monkeypatch.setattr(soak, "run_chain", lambda chain: ["lost"] if chain == bad else [])
    assert soak.soak(range(3, 8), minutes=10.0) == 1
    said = capsys.readouterr().out
    assert "seed 5 broke a promise" in said
    assert "lost" in said
    assert "--seed 5 --only" in said
    assert soak.main(["--seed", "5", "--only"]) == 1
    assert soak.main(["--seed", "6", "--only"]) == 0


def test_time_ends_it(capsys):
    assert soak.main(["--minutes", "0"]) == 0
    assert "0 schedules" in capsys.readouterr().out


def test_each_kind_of_plan_is_played(monkeypatch):
    played: list[object] = []

    def note(fault: object) -> list[str]:
        played.append(fault)
        return []

    monkeypatch.setattr(soak, "run_chain", note)
    monkeypatch.setattr(soak, "run_training", note)
    assert soak.soak(range(soak.PERIOD), minutes=10.0) == 0
    assert draw_chain(0) in played
    assert draw_training(soak.TRAINING) in played
    assert interpreted(draw_chain(soak.INTERPRETED)) in played
