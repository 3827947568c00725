"""A plugin of pytest's that notes each test as it goes, and reads what was noted.

A line goes out when a test begins and another when it has ended, so a process that is killed, or
that pytest-timeout ends, leaves what it did, and which test it was in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# The file, given by whoever starts pytest with ``-p tools.gpu_check.noting``.
NOTES_VARIABLE = "RINGCOMM_GPU_CHECK_NOTES"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def _note(**facts: object) -> None:
    with Path(os.environ[NOTES_VARIABLE]).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(facts) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(began=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test ends with its teardown; before that only what is no success counts.
    if report.when == "teardown" or report.outcome != PASSED:
        figures = {name: str(value) for name, value in report.user_properties}
        _note(ended=report.nodeid, outcome=report.outcome, figures=figures)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == FAILED:
        _note(ended=report.nodeid, outcome=FAILED, figures={})


@dataclass(frozen=True)
class TestRun:
    """Counts, the names of what failed, and the figures that tests noted (not asserted).

    ``unended`` are tests in which the process ended.
    """

    __test__ = False  # pytest: not a test class

    passed: int
    failed: tuple[str, ...]
    skipped: int
    figures: Mapping[str, str]
    unended: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        unended = f", {len(self.unended)} without an end" if self.unended else ""
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped{unended}"


def read(path: Path) -> TestRun:
    """Everything that was noted until now; nothing where there is no such file."""
    outcomes: dict[str, str] = {}
    began: dict[str, None] = {}
    figures: dict[str, str] = {}
    for noted in _lines(path):
        if "began" in noted:
            began[noted["began"]] = None
            continue
        name = noted["ended"]
        figures |= noted["figures"]
        if outcomes.get(name, PASSED) == PASSED:
            outcomes[name] = noted["outcome"]
    named = {
        outcome: tuple(name for name, found in outcomes.items() if found == outcome)
        for outcome in (PASSED, FAILED, SKIPPED)
    }
    unended = tuple(name for name in began if name not in outcomes)
    return TestRun(len(named[PASSED]), named[FAILED], len(named[SKIPPED]), figures, unended=unended)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the process was killed while it wrote
            continue
