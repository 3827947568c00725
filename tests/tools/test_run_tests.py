"""``make test`` runs every test once, in three parts, and fails when one does."""

import sys

import pytest

from tools import run_tests


def program(text, status):
    return [sys.executable, "-c", f"import sys; print({text!r}, flush=True); sys.exit({status})"]


@pytest.mark.parametrize(
    ("statuses", "together"),
    [
        ((0, 0, 0), 0),
        ((1, 0, 0), 1),
        ((0, 1, 0), 1),
        ((0, 0, 1), 1),
        ((5, 0, 5), 0),
        ((5, 5, 5), 5),
        ((5, 2, 0), 2),
        ((0, 0, 3), 3),
    ],
)
def test_one_failure_is_enough(capfd, statuses, together):
    one, two, three = map(program, ("one", "two", "three"), statuses)
    assert run_tests.run([one, two], three) == together
    assert capfd.readouterr().out.split() == ["three", "one", "two"]


def test_each_test_is_in_one_part(monkeypatch):
    seen: list[list[str]] = []

    def run(beside, others):
        seen.extend([*beside, others])
        return 0

    monkeypatch.setattr(run_tests, "run", run)
    assert run_tests.main(["-q"]) == 0
    beside, training, others = seen
    assert all((run_tests.ROOT / path).is_file() for path in run_tests.BESIDE)
    assert all((run_tests.ROOT / path).exists() for path in run_tests.TRAINING)
    assert set(run_tests.BESIDE) <= set(beside) and set(run_tests.TRAINING) <= set(training)
    ignored = {f"--ignore={path}" for path in run_tests.BESIDE}
    assert ignored <= set(training)
    assert ignored | {f"--ignore={path}" for path in run_tests.TRAINING} <= set(others)
    assert all("-q" in each for each in seen)
