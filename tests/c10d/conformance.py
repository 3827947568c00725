"""Runs torch's own c10d tests on ringcomm and on Gloo, and tables where the two differ.

``python -m tests.c10d.conformance`` (``make c10d-conformance``) writes docs/c10d-conformance.md.
The tests are those in the torch wheel, ``torch.testing._internal.distributed.distributed_test``.

That module decides by the constant BACKEND, while it is imported, which tests exist for a
backend, and knows no third-party backend. So it is imported as for Gloo and BACKEND is set to
the backend under test afterwards: every test that exists for Gloo runs on ringcomm, with the
same conditions. What is skipped for want of ranks, or for not being MPI (all-to-all), runs again
with more ranks or with the conditions of MPI, on both backends.
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

BACKENDS = ("gloo", "ringcomm")
REPORT = Path(__file__).parents[2] / "docs" / "c10d-conformance.md"
SECONDS_PER_TEST = 120


@dataclass(frozen=True)
class Pass:
    """One run over the tests that the passes before skipped with a reason like ``skipped``."""

    conditions: str
    world_size: int
    skipped: str = ""


PASSES = (
    Pass("gloo", 3),  # what torch's own CI takes on a machine without GPUs
    Pass("gloo", 4, "world size of 4"),
    Pass("gloo", 8, "small world size"),
    Pass("mpi", 8, "Only MPI supports"),
)

Outcomes = dict[str, tuple[str, str]]  # test -> (pass, fail or skip; why)


class Backend(str):
    """The name of the backend under test, equal to that of its conditions as well.

    A few tests compare BACKEND while they run, to choose between code for CPUs and for GPUs.
    """

    conditions: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.conditions

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load_suite(backend: str, conditions: str, world_size: int, folder: str) -> ModuleType:
    """torch's test module.

    Args:
        backend: "gloo" or "ringcomm".
        conditions: the backend for which the tests must exist.
        world_size: ranks of each test.
        folder: empty, for the file by which tests that make their own group meet.
    """
    os.environ.update(
        BACKEND=conditions,
        WORLD_SIZE=str(world_size),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS_PER_TEST),
        INIT_METHOD=f"file://{folder}/rendezvous",
        TEMP_DIR=folder,
        OMP_NUM_THREADS="1",
    )
    from torch.testing._internal.distributed import distributed_test

    import ringcomm.c10d

    ringcomm.c10d.register()
    suite: Any = distributed_test
    os.environ["BACKEND"] = backend
    suite.BACKEND = Backend(backend)
    suite.BACKEND.conditions = conditions
    return distributed_test


def test_class(suite: Any) -> type[unittest.TestCase]:
    """The test case class; each test forks its ranks from this process, which runs no torch op."""

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
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


def run(backend: str, conditions: str, world_size: int, names: list[str]) -> Outcomes:
    """Runs the tests (none: all) in this process, which forks their ranks."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        cls = test_class(load_suite(backend, conditions, world_size, folder))
        for name in names or unittest.defaultTestLoader.getTestCaseNames(cls):
            cls(name).run(recorder)
            outcome, reason = recorder.outcomes[name]
            print(f"{backend} {name}: {outcome} {reason}", file=sys.__stderr__, flush=True)
    return recorder.outcomes


def run_apart(backend: str, one: Pass, names: list[str], log: Path) -> Outcomes:
    """Does what :func:`run` does in a process of its own, whose output goes to ``log``."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "outcomes.json"
        command = [sys.executable, "-m", "tests.c10d.conformance", "--backend", backend]
        command += ["--conditions", one.conditions, "--world-size", str(one.world_size)]
        command += ["--json", str(result), *names]
        with log.open("ab") as stream:
            subprocess.run(command, stdout=stream, stderr=stream, check=True)
        return {name: (row[0], row[1]) for name, row in json.loads(result.read_text()).items()}


def all_passes(backend: str, names: list[str], log: Path) -> Outcomes:
    """The outcome of every test, of the last pass that it is in."""
    outcomes = run_apart(backend, PASSES[0], names, log)
    for one in PASSES[1:]:
        again = [n for n, (kind, why) in outcomes.items() if kind == "skip" and one.skipped in why]
        if again:
            outcomes.update(run_apart(backend, one, again, log))
    return outcomes


BEYOND_THE_TESTS = """\
## What the tests do not show

torch's C++ sees less of a group that is written in Python:

* Profilers have no event of their own for its collectives, `CommDebugMode` counts its functional
  collectives only, and the flight recorder of torch 2.15 does not record it. A few tests look at
  profiler events, but only for the backends in a list of torch's own.
* `DistributedDataParallel._register_builtin_comm_hook(FP16_COMPRESS)`, a private hook in C++,
  wants a future of a C++ list, which Python cannot make. Its public twin in Python,
  `default_hooks.fp16_compress_hook`, runs.
* Up to torch 2.14 `torch.ops._c10d_functional.all_gather_into_tensor_out` raises; the form
  without `out`, which compiled code calls, runs.
"""


def report(outcomes: dict[str, Outcomes], torch_version: str) -> str:
    """The Markdown page: counts, and every test whose outcome differs."""
    gloo, ours = outcomes["gloo"], outcomes["ringcomm"]
    kinds = ("pass", "fail", "skip")
    lines = [
        "# c10d conformance",
        "",
        "The distributed tests that ship in the torch wheel",
        "(`torch.testing._internal.distributed.distributed_test`), run on ringcomm and on Gloo on",
        f"one machine without a GPU, torch {torch_version}, 3 ranks (4 or 8 for the tests that ask",
        "for them). ringcomm runs every test that exists for Gloo. Both also run the all-to-all",
        "tests that torch reserves for MPI. `make c10d-conformance` writes this page.",
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
    lines += ["", *BEYOND_THE_TESTS.splitlines()]
    skipped = Counter(reason for outcome, reason in ours.values() if outcome == "skip")
    lines += ["", "## Why tests are skipped (on both)", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in skipped.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="tests to run (default: all)")
    parser.add_argument("--backend", choices=BACKENDS, help="run one backend in this process")
    parser.add_argument("--conditions", default=PASSES[0].conditions)
    parser.add_argument("--world-size", type=int, default=PASSES[0].world_size)
    parser.add_argument("--json", type=Path, help="where --backend writes its outcomes")
    parser.add_argument("--log", type=Path, default=Path("build/c10d-conformance.log"))
    parser.add_argument("--output", type=Path, default=REPORT)
    arguments = parser.parse_args()
    names = arguments.names
    if arguments.backend:
        outcomes = run(arguments.backend, arguments.conditions, arguments.world_size, names)
        if arguments.json:
            arguments.json.write_text(json.dumps(outcomes))
        return
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    arguments.log.unlink(missing_ok=True)
    results = {backend: all_passes(backend, names, arguments.log) for backend in BACKENDS}
    import torch

    arguments.output.write_text(report(results, torch.__version__))
    with contextlib.suppress(ValueError):
        print(arguments.output.relative_to(Path.cwd()))


if __name__ == "__main__":
    main()
