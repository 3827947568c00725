"""Runs torch's own c10d tests on ringcomm and on Gloo, and tables where the two differ.

``python -m tests.c10d.conformance`` (``make c10d-conformance``) writes docs/c10d-conformance.md.
The tests are those in the torch wheel, ``torch.testing._internal.distributed.distributed_test``.

That module decides by the constant BACKEND, while it is imported, which tests exist for a
backend, and knows no third-party backend. So it is imported as for Gloo and BACKEND becomes
"ringcomm" afterwards: every test that exists for Gloo runs on ringcomm, with the same
conditions. ``EXCLUDED`` names the exceptions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

BACKENDS = ("gloo", "ringcomm")
REPORT = Path(__file__).parents[2] / "docs" / "c10d-conformance.md"
WORLD_SIZE = 3  # what torch's own CI takes on a machine without GPUs
LARGE_WORLD_SIZE = 8  # what the tests with skip_if_small_worldsize ask for
SMALL_WORLD_REASON = "world_size"
SECONDS_PER_TEST = 120

# Tests that say nothing about a backend's semantics, and are not run on ringcomm.
EXCLUDED: dict[str, str] = {}


def load_suite(backend: str, world_size: int) -> ModuleType:
    """torch's test module, with the conditions of Gloo and the backend that is asked for.

    Args:
        backend: "gloo" or "ringcomm".
        world_size: ranks of each test.
    """
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS_PER_TEST),
        INIT_METHOD="env://",
        TEMP_DIR=tempfile.gettempdir(),
        OMP_NUM_THREADS="1",
    )
    from torch.testing._internal.distributed import distributed_test

    suite: Any = distributed_test
    os.environ["BACKEND"] = suite.BACKEND = backend
    return distributed_test


def test_class(suite: Any) -> type[unittest.TestCase]:
    """The test case class; each test forks its ranks from this process, which runs no torch op."""

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            import torch

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Conformance


class Recorder(unittest.TestResult):
    """Keeps one (outcome, reason) per test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, tuple[str, str]] = {}

    def _record(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        self.outcomes[test.id().split(".")[-1]] = (outcome, reason)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._record(test, "skip", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._record(test, "fail", _last_error_line(str(err[1])))

    addError = addFailure


def _last_error_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "xception" in line]
    return (lines[-1] if lines else text.strip().splitlines()[-1] if text.strip() else "?")[:300]


def run(backend: str, world_size: int, names: list[str] | None) -> dict[str, tuple[str, str]]:
    """Runs the tests in this process (which forks the ranks); outcome and reason by name."""
    cls = test_class(load_suite(backend, world_size))
    recorder = Recorder()
    for name in names or unittest.defaultTestLoader.getTestCaseNames(cls):
        if backend == "ringcomm" and name in EXCLUDED:
            recorder.outcomes[name] = ("excluded", EXCLUDED[name])
            continue
        cls(name).run(recorder)
        outcome, reason = recorder.outcomes.get(name, ("?", ""))
        print(f"{backend} {name}: {outcome} {reason}", file=sys.__stderr__, flush=True)
    return recorder.outcomes


def run_apart(
    backend: str, world_size: int, names: list[str] | None, log: Path
) -> dict[str, tuple[str, str]]:
    """As :func:`run`, in a process of its own, whose output goes to ``log``."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "outcomes.json"
        command = [sys.executable, "-m", "tests.c10d.conformance", "--backend", backend]
        command += ["--world-size", str(world_size), "--json", str(result), *(names or ())]
        with log.open("ab") as stream:
            subprocess.run(command, stdout=stream, stderr=stream, check=True)
        return {name: (row[0], row[1]) for name, row in json.loads(result.read_text()).items()}


def both_worlds(backend: str, names: list[str] | None, log: Path) -> dict[str, tuple[str, str]]:
    """All tests with the usual world, and those that it is too small for with the large one."""
    outcomes = run_apart(backend, WORLD_SIZE, names, log)
    larger = [
        name
        for name, (outcome, reason) in outcomes.items()
        if outcome == "skip" and SMALL_WORLD_REASON in reason
    ]
    if larger:
        outcomes.update(run_apart(backend, LARGE_WORLD_SIZE, larger, log))
    return outcomes


def report(outcomes: dict[str, dict[str, tuple[str, str]]], torch_version: str) -> str:
    """The Markdown page: counts, and every test whose outcome differs."""
    gloo, ours = outcomes["gloo"], outcomes["ringcomm"]
    kinds = ("pass", "fail", "skip", "excluded")
    lines = [
        "# c10d conformance",
        "",
        "The distributed tests that ship in the torch wheel",
        "(`torch.testing._internal.distributed.distributed_test`), run on ringcomm and on Gloo on",
        f"one machine without a GPU, torch {torch_version}, {WORLD_SIZE} ranks ({LARGE_WORLD_SIZE}",
        "for the tests that ask for more). `make c10d-conformance` writes this page.",
        "",
        "| backend | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for backend in BACKENDS:
        counts = Counter(outcome for outcome, _ in outcomes[backend].values())
        lines.append(f"| {backend} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    different = sorted(n for n in gloo if gloo[n][0] != ours.get(n, ("?", ""))[0])
    lines += ["", f"## Differences ({len(different)})", ""]
    if different:
        lines += ["| test | gloo | ringcomm | reason |", "|---|---|---|---|"]
    for name in different:
        reason = (ours[name][1] or gloo[name][1]).replace("|", "\\|")
        lines.append(f"| {name} | {gloo[name][0]} | {ours[name][0]} | {reason} |")
    skipped = Counter(reason for outcome, reason in ours.values() if outcome == "skip")
    lines += ["", "## Why tests are skipped (on both)", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in skipped.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="tests to run (default: all)")
    parser.add_argument("--backend", choices=BACKENDS, help="run one backend in this process")
    parser.add_argument("--world-size", type=int, default=WORLD_SIZE)
    parser.add_argument("--json", type=Path, help="where --backend writes its outcomes")
    parser.add_argument("--log", type=Path, default=Path("build/c10d-conformance.log"))
    parser.add_argument("--output", type=Path, default=REPORT)
    arguments = parser.parse_args()
    names = arguments.names or None
    if arguments.backend:
        outcomes = run(arguments.backend, arguments.world_size, names)
        if arguments.json:
            arguments.json.write_text(json.dumps(outcomes))
        return
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    arguments.log.unlink(missing_ok=True)
    results = {backend: both_worlds(backend, names, arguments.log) for backend in BACKENDS}
    import torch

    arguments.output.write_text(report(results, torch.__version__))
    with contextlib.suppress(ValueError):
        print(arguments.output.relative_to(Path.cwd()))


if __name__ == "__main__":
    main()
