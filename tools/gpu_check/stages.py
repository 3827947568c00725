"""The stages themselves: each runs its commands within a limit and says how it ended."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringcomm.bench.report import Report
from ringcomm.bench.report import read as read_report

from . import benches, noting, sanitizer
from .plan import FAILED, OK, PARTIAL, UNAVAILABLE, Result, Runner
from .rehearsal import MARK, Rehearsal

TEST_FOLDERS = ("tests/gpu", "tests/comm/device", "tests/proof/faults/device", "tests/tl")
# What tests have come to, as they end.
NOTES_NAME = "tests.jsonl"
SANITIZER_CASES = "tests/gpu/sanitizer_cases.py"
# Of a test without a limit of its own, and of a file.
_TEST_LIMIT_S = 60
_FILE_LIMIT_S = 150.0
# With less a file is not begun: torch alone takes as long.
_LEAST_FILE_S = 10.0
_TARGETS = {8: "sm_80", 9: "sm_90a", 10: "sm_100a"}


@dataclass
class Workplace:
    """The place of a run: its commands, a folder for what they write, and the GPU's facts.

    Attributes:
        rehearsal: None: the stages run on a GPU.
        saver: writes the record of some results; None: there will be no record.
        results: of the stages before the one that runs.
    """

    runner: Runner
    folder: Path
    facts: Mapping[str, str]
    saver: Callable[[Sequence[Result]], object] | None = None
    results: list[Result] = field(default_factory=list)
    rehearsal: Rehearsal | None = None

    def save(self, result: Result) -> None:
        """Records what the stage that runs has found until now, or in the end.

        A record that cannot be written (a full disk, an OUT that is no folder) ends nothing: the
        verdict is printed all the same, and the last try to write it says what was wrong.
        """
        if self.saver is not None:
            try:
                self.saver([*self.results, result])
            except OSError as error:
                print(f"gpu-check: the record cannot be written: {error}", flush=True)


def build(place: Workplace, limit_s: float) -> Result:
    """The native module in place, and with nvcc the kernels for this GPU."""
    end = time.monotonic() + limit_s
    result = _compiled(place, limit_s, "OFF")
    if not result.ok or place.rehearsal is not None:  # an emulated device has kernels of its own
        return result
    if not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        return replace(result, detail="no nvcc: kernels at first use")
    # By itself: without the module nothing runs, and without nvcc's kernels NVRTC makes them.
    major = int(place.facts["compute capability"].partition(".")[0])
    left_s = max(end - time.monotonic(), 1.0)
    result = _compiled(place, left_s, _TARGETS.get(major, "all"))
    if not result.ok:
        return replace(result, detail=f"nvcc's kernels, so they come at first use: {result.detail}")
    binaries = len(list((place.runner.root / "ringcomm" / "_kernels").glob("*.fatbin")))
    return replace(result, detail=f"{binaries} kernel units by nvcc")


def _compiled(place: Workplace, limit_s: float, kernels: str) -> Result:
    """Builds the native module, and ``kernels``, as CMake's option RINGCOMM_CUDA takes them."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    command += ["--parallel", str(len(os.sched_getaffinity(0)))]
    extra = f"-DRINGCOMM_CUDA={kernels} {os.environ.get('CMAKE_ARGS', '')}".strip()
    done = place.runner.run(command, limit_s, {"CMAKE_ARGS": extra})
    if done.status == 0:
        return Result("build", OK, "without nvcc's kernels")
    why = "stopped at its limit" if done.status is None else done.last_line
    return Result("build", FAILED, why, done.tail)


def _marked(place: Workplace) -> tuple[str, str]:
    """The option that chooses the tests: without a GPU those of tests/gpu have not its mark."""
    return "-m", "gpu" if place.rehearsal is None else "not gpu"


def _turn(file: str) -> int:
    """Files of processes come late, and Triton's last, so that a short time has most of the rest.

    On an H100 a test whose ranks are processes took 20 to 30 s, mostly for imports, and Triton
    compiles for minutes what it has not compiled before.
    """
    if "/tl/" in file or "triton" in file:
        return 2
    return 1 if "processes" in file or file.endswith("/test_faults.py") else 0


def _test_files(place: Workplace, limit_s: float) -> tuple[list[str], str]:
    """The files with tests that need a GPU, slow ones last, and what stood in the way of a list."""
    folders = TEST_FOLDERS if place.rehearsal is None else place.rehearsal.tests
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *_marked(place), *folders]
    done = place.runner.run([*command, "-p", "no:cacheprovider"], limit_s)
    named = [line.partition("::")[0] for line in done.output.splitlines() if "::" in line]
    files = [name for name in dict.fromkeys(named) if (place.runner.root / name).is_file()]
    files.sort(key=_turn)
    if done.status == 0:
        return files, ""
    return files, "stopped at its limit" if done.status is None else done.last_line


@dataclass
class _Tested:
    """The tests of the files until now. ``stopped``: tests in which the stage's time ended."""

    notes: Path
    rehearsed: bool = False
    broken: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    stopped: tuple[str, ...] = ()
    tail: str = ""

    def failed(self, run: noting.TestRun) -> list[str]:
        return [*run.failed, *(name for name in run.unended if name not in self.stopped)]

    def result(self) -> Result:
        run = noting.read(self.notes)
        failed = self.failed(run)
        said = [run.summary, *self.broken]
        figures = run.figures
        if self.rehearsed:
            figures = {f"{MARK}: {name}": value for name, value in figures.items()}
        data: dict[str, Any] = {"failed": failed, "figures": figures, "summary": run.summary}
        if failed:
            said.append(f"first: {', '.join(failed[:3])}")
        if self.left_out:
            data["left out"] = [*self.left_out]
            said.append(f"no time left for {', '.join(self.left_out)}")
        verdict = PARTIAL if self.left_out else OK
        if failed or self.broken or not run.passed:
            verdict = FAILED
        if not run.passed:
            said.append("nothing passed")
        return Result("test", verdict, "; ".join(said), self.tail, data=data)


def test(place: Workplace, limit_s: float) -> Result:
    """The tests that need a GPU, a process for each file and a limit for each test.

    A test that hangs takes its process along, and what that has noted by then stays.
    """
    end = time.monotonic() + limit_s
    files, why = _test_files(place, limit_s)
    tested = _Tested(place.folder / NOTES_NAME, place.rehearsal is not None)
    tested.notes.unlink(missing_ok=True)
    if why:
        tested.broken.append(f"the list of tests: {why}")
    for file in files:
        left_s = end - time.monotonic()
        if left_s < _LEAST_FILE_S:
            tested.left_out.append(file)
            continue
        _test_file(place, file, left_s, tested)
        place.save(tested.result())
    return tested.result()


def _test_file(place: Workplace, file: str, left_s: float, tested: _Tested) -> None:
    command = [sys.executable, "-m", "pytest", "-q", *_marked(place), file, "--durations=5"]
    command += ["-p", "no:cacheprovider", "-p", noting.__name__]
    # By a thread: a signal's handler waits for a call that hangs in the driver.
    command += [f"--timeout={_TEST_LIMIT_S}", "--timeout-method=thread"]
    failed = tested.failed(noting.read(tested.notes))
    limit = min(left_s, _FILE_LIMIT_S)
    done = place.runner.run(command, limit, {noting.NOTES_VARIABLE: str(tested.notes)})
    if done.status is None and limit == left_s:
        tested.left_out.append(f"the rest of {file}")
        tested.stopped = noting.read(tested.notes).unended
    elif done.status is None:
        tested.broken.append(f"{file}: stopped after {limit:.0f} s")
    elif done.status and tested.failed(noting.read(tested.notes)) == failed:
        tested.broken.append(f"{file}: exit status {done.status}")
    if done.status != 0:
        tested.tail = tested.tail or done.tail


def sanitize(place: Workplace, limit_s: float) -> Result:
    """compute-sanitizer's tools over small cases, one after the other."""
    if place.rehearsal is not None:
        done = place.runner.run([sys.executable, SANITIZER_CASES], limit_s)
        why = "no sanitizer: the cases ran by themselves" if done.status == 0 else done.last_line
        why = "stopped at its limit" if done.status is None else why
        return Result("sanitize", OK if done.status == 0 else FAILED, why, done.tail)
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return Result("sanitize", UNAVAILABLE, "no compute-sanitizer on this machine")
    end = time.monotonic() + limit_s
    verdicts, tail = [], ""
    for index, tool in enumerate(sanitizer.TOOLS):
        command = [program, "--tool", tool, f"--error-exitcode={sanitizer.ERROR_STATUS}"]
        # torch and CuPy probe the driver with calls that fail; ours raise when they do.
        command += ["--report-api-errors", "no", sys.executable, SANITIZER_CASES]
        share_s = (end - time.monotonic()) / (len(sanitizer.TOOLS) - index)
        done = place.runner.run(command, max(share_s, 1.0))
        verdicts.append(sanitizer.read(tool, done.output, done.status))
        if not verdicts[-1].clean:
            tail = tail or done.tail
    said = [
        f"{verdict.tool} {'clean' if verdict.clean else verdict.detail}"
        + (f" ({verdict.warnings} warnings)" if verdict.warnings else "")
        for verdict in verdicts
    ]
    outcome = FAILED
    if all(verdict.clean for verdict in verdicts):
        outcome = OK
    elif all(verdict.unavailable for verdict in verdicts):
        outcome = UNAVAILABLE
    return Result("sanitize", outcome, "; ".join(said), tail)


def bench(place: Workplace, limit_s: float) -> Result:
    """The runs of the harness, heaviest first, as far as the time goes."""
    version = tuple(int(part) for part in place.facts["NCCL"].split(".") if part.isdigit())
    return _run_benches("bench", benches.plan(version), place, limit_s)


def steps(place: Workplace, limit_s: float) -> Result:
    """The optimizer's step, in the same way."""
    return _run_benches("steps", benches.optimizer_plan(), place, limit_s)


def _run_benches(
    stage: str, plan: Sequence[benches.Bench], place: Workplace, limit_s: float
) -> Result:
    end = time.monotonic() + limit_s
    found = _Measured(stage)
    if place.rehearsal is not None:
        plan = place.rehearsal.plan(plan)
    for number, one in enumerate(plan):
        left_s = end - time.monotonic()
        if left_s < 1.0:
            found.left_out.append(one.name)
            continue
        file = place.folder / f"{stage}-{number}.json"
        command = [sys.executable, "-m", one.module, *one.arguments, "--json", str(file)]
        done = place.runner.run(command, min(one.limit_s, left_s))
        if file.exists():
            found.reports.append(read_report(file))
        if done.status != 0:
            why = "stopped at its limit" if done.status is None else done.last_line
            found.notes.append(f"{one.name}: {why}")
            found.tail = found.tail or done.tail
            wrong = any(report.wrong for report in found.reports[-1:])
            found.failed = found.failed or not one.optional or wrong
        place.save(found.result())
    return found.result()


@dataclass
class _Measured:
    """The runs of the harness until now."""

    stage: str
    reports: list[Report] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: bool = False
    tail: str = ""

    def result(self) -> Result:
        rows = sum(len(report.rows) for report in self.reports)
        wrong = sum(report.wrong for report in self.reports)
        summary = f"{len(self.reports)} runs, {rows} rows, {wrong} wrong elements"
        left_out = [f"{name}: no time left" for name in self.left_out]
        detail = "; ".join([summary, *self.notes, *left_out])
        data: dict[str, Any] = {"reports": [*self.reports]}
        if left_out:
            data["left out"] = [*self.left_out]
        verdict = PARTIAL if left_out else OK
        if self.failed or wrong or not self.reports:
            verdict = FAILED
        return Result(self.stage, verdict, detail, self.tail, data=data)


RUN: dict[str, Callable[[Workplace, float], Result]] = {
    "build": build,
    "test": test,
    "sanitize": sanitize,
    "bench": bench,
    "steps": steps,
}
