"""``make test`` runs every test once, in two parts, and fails when either does."""

import sys

import pytest

from tools import run_tests


def program(text, status):
    return [sys.executable, "-c", f"import sys; print({text!r}, flush=True); sys.exit({status})"]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (5, 0, 0), (0, 5, 0), (5, 5, 5), (5, 2, 2), (3, 0, 3)],
)
def test_one_failure_is_enough(capfd, first, second, together):
    assert run_tests.run(program("one", first), program("two", second)) == together
    assert capfd.readouterr().out.split() == ["two", "one"]


def test_each_test_is_in_one_part(monkeypatch):
    seen: list[list[str]] = []

    def run(*commands):
        seen.extend(commands)
        return 0

    monkeypatch.setattr(run_tests, "run", run)
    assert run_tests.main(["-q"]) == 0
    beside, others = seen
    assert all((run_tests.ROOT / path).is_file() for path in run_tests.BESIDE)
    assert set(run_tests.BESIDE) <= set(beside)
    assert {f"--ignore={path}" for path in run_tests.BESIDE} <= set(others)
    assert "-q" in beside and "-q" in others
