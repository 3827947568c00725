# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own c10d tests on Gloo and ringcomm, also over nodes, and tables the differences.

``python -m tests.c10d.conformance`` (``make c10d-conformance``) writes docs/c10d-conformance.md.
The tests are those in the torch wheel, ``torch.testing._internal.distributed.distributed_test``.

When that module is imported, its constant BACKEND decides which tests exist; the module knows no
third-party backend. So this program imports it with the conditions of Gloo, and then sets BACKEND
to the backend under test: every test that exists for Gloo runs on ringcomm, with the same
conditions. Tests that were skipped because they need more ranks, or because the backend is not MPI
(all-to-all), run again on all systems with more ranks or the conditions of MPI.

Over nodes, the ranks are processes of one machine that claim to be on two nodes.
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


@dataclass(frozen=True)
class System:
    """A backend whose ranks claim to be on ``nodes`` nodes; with 1 they claim nothing."""

    backend: str
    nodes: int = 1

    def __str__(self) -> str:
        return self.backend if self.nodes == 1 else f"{self.backend}, {self.nodes} nodes"


GLOO = System("gloo")
SYSTEMS = (GLOO, System("ringcomm"), System("ringcomm", 2))
REPORT = Path(__file__).parents[2] / "docs" / "c10d-conformance.md"
SECONDS_PER_TEST = 120


@dataclass(frozen=True)
class Pass:
    """A run of the tests that earlier passes skipped with a reason containing ``skipped``."""

    conditions: str
    world_size: int
    skipped: str = ""


PASSES = (
    Pass("gloo", 3),  # as in torch's own CI on machines without GPUs
    Pass("gloo", 4, "world size of 4"),
    Pass("gloo", 8, "small world size"),
    Pass("mpi", 8, "Only MPI supports"),
)

Outcomes = dict[str, tuple[str, str]]  # test -> (pass, fail or skip; why)


class Backend(str):
    """The name of the backend under test; also equal to the name of its conditions.

    A few tests compare BACKEND while they run, to choose between code for CPUs and for GPUs.
    """

    conditions: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.conditions

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load_suite(backend: str, conditions: str, world_size: int, folder: str) -> ModuleType:
    """Imports torch's test module.

    Args:
        backend: "gloo" or "ringcomm".
        conditions: the backend for which the tests must exist.
        world_size: ranks of each test.
        folder: an empty folder, for the rendezvous file of tests that make their own group.
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


def test_class(suite: Any, nodes: int) -> type[unittest.TestCase]:
    """Makes the test case class; each test forks its ranks from this process, which runs no op.

    A new interpreter could not unpickle this class, which is local to the function, and would
    import torch again for each rank of each test.
    """

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            if nodes > 1:
                node = rank * nodes // int(os.environ["WORLD_SIZE"])
                os.environ["RINGCOMM_NODE_ID"] = f"node{node}"
            super()._run(rank, *args, **kwargs)

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


def run(system: System, conditions: str, world_size: int, names: list[str]) -> Outcomes:
    """Runs the tests (none: all) in this process, which forks their ranks."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        suite = load_suite(system.backend, conditions, world_size, folder)
        cls = test_class(suite, system.nodes)
        for name in names or unittest.defaultTestLoader.getTestCaseNames(cls):
            cls(name).run(recorder)
            outcome, reason = recorder.outcomes[name]
            print(f"{system} {name}: {outcome} {reason}", file=sys.__stderr__, flush=True)
    return recorder.outcomes


def run_apart(system: System, one: Pass, names: list[str], log: Path) -> Outcomes:
    """Does the same as :func:`run` in a separate process whose output goes to ``log``."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "outcomes.json"
        command = [sys.executable, "-m", "tests.c10d.conformance"]
        command += ["--backend", system.backend, "--nodes", str(system.nodes)]
        command += ["--conditions", one.conditions, "--world-size", str(one.world_size)]
        command += ["--json", str(result), *names]
        with log.open("ab") as stream:
            subprocess.run(command, stdout=stream, stderr=stream, check=True)
        return {name: (row[0], row[1]) for name, row in json.loads(result.read_text()).items()}


def all_passes(system: System, names: list[str], log: Path) -> Outcomes:
    """Returns the outcome of each test in the last pass that runs it."""
    outcomes = run_apart(system, PASSES[0], names, log)
    for one in PASSES[1:]:
        again = [n for n, (kind, why) in outcomes.items() if kind == "skip" and one.skipped in why]
        if again:
            outcomes.update(run_apart(system, one, again, log))
    return outcomes


BEYOND_THE_TESTS = """\
## What the tests do not show

torch's C++ code treats a group that is implemented in Python differently:

* Profilers record no events for the group's collectives, `CommDebugMode` counts only its functional
  collectives, and the flight recorder of torch 2.15 does not record the group. A few tests look at
  profiler events, but only for the backends in torch's own list.
* `DistributedDataParallel._register_builtin_comm_hook(FP16_COMPRESS)` fails. It registers a
  private hook in C++, which needs a future of a C++ list from the group; Python cannot create
  such a future. The public hook in Python, `default_hooks.fp16_compress_hook`, works.
* Up to torch 2.14 `torch.ops._c10d_functional.all_gather_into_tensor_out` raises an error. The
  form without `out` works, and compiled code calls only this form.
"""


def report(outcomes: dict[System, Outcomes], torch_version: str) -> str:
    """Returns the Markdown page: the counts, and every test whose outcome differs."""
    kinds = ("pass", "fail", "skip")
    lines = [
        "# c10d conformance",
        "",
        "This page shows the results of torch's own distributed tests",
        "(`torch.testing._internal.distributed.distributed_test`) on Gloo and on ringcomm, on",
        f"one machine without a GPU, with torch {torch_version} and 3 ranks (4 or 8 for tests that",
        "need more). ringcomm runs every test that exists for Gloo. All systems also run the",
        "all-to-all tests that torch runs only for MPI. With 2 nodes the ranks are processes with",
        "different values of `RINGCOMM_NODE_ID`; 3 ranks are a node of 2 and a node of 1 rank.",
        "`make c10d-conformance` writes this page.",
        "",
        "| system | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for system, results in outcomes.items():
        counts = Counter(outcome for outcome, _ in results.values())
        lines.append(f"| {system} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    found = {
        name: [each.get(name, ("?", "")) for each in outcomes.values()] for name in outcomes[GLOO]
    }
    different = sorted(name for name, each in found.items() if len({kind for kind, _ in each}) > 1)
    lines += ["", f"## Differences ({len(different)})", ""]
    if different:
        lines += [
            f"| test | {' | '.join(map(str, outcomes))} | reason |",
            "|---" * (len(outcomes) + 2) + "|",
        ]
    for name in different:
        reason = next(why for _, why in reversed(found[name]) if why).replace("|", "\\|")
        told = " | ".join(kind for kind, _ in found[name])
        lines.append(f"| {name} | {told} | {reason} |")
    lines += ["", *BEYOND_THE_TESTS.splitlines()]
    last = outcomes[SYSTEMS[-1]]
    skipped = Counter(reason for outcome, reason in last.values() if outcome == "skip")
    lines += ["", "## Why tests are skipped (on all)", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in skipped.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="tests to run (default: all)")
    parser.add_argument("--backend", choices=BACKENDS, help="run one backend in this process")
    parser.add_argument("--nodes", type=int, default=1, help="of the ranks of --backend")
    parser.add_argument("--conditions", default=PASSES[0].conditions)
    parser.add_argument("--world-size", type=int, default=PASSES[0].world_size)
    parser.add_argument("--json", type=Path, help="where --backend writes its outcomes")
    parser.add_argument("--log", type=Path, default=Path("build/c10d-conformance.log"))
    parser.add_argument("--output", type=Path, default=REPORT)
    arguments = parser.parse_args()
    names = arguments.names
    if arguments.backend:
        system = System(arguments.backend, arguments.nodes)
        outcomes = run(system, arguments.conditions, arguments.world_size, names)
        if arguments.json:
            arguments.json.write_text(json.dumps(outcomes))
        return
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    arguments.log.unlink(missing_ok=True)
    results = {system: all_passes(system, names, arguments.log) for system in SYSTEMS}
    import torch

    arguments.output.write_text(report(results, torch.__version__))
    with contextlib.suppress(ValueError):
        print(arguments.output.relative_to(Path.cwd()))


if __name__ == "__main__":
    main()
