"""What pytest recorded of a run, from its JUnit file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TestRun:
    """Counts, the names of what failed, and the figures that tests noted (not asserted)."""

    __test__ = False  # pytest: not a test class

    passed: int
    failed: tuple[str, ...]
    skipped: int
    figures: dict[str, str]

    @property
    def summary(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def read(path: Path) -> TestRun:
    """Reads a JUnit file that pytest wrote.

    Raises:
        FileNotFoundError: pytest ended before it wrote one.
    """
    passed, skipped = 0, 0
    failed: list[str] = []
    figures: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
        for noted in case.iter("property"):
            figures[noted.get("name", "")] = noted.get("value", "")
    return TestRun(passed, tuple(failed), skipped, figures)
