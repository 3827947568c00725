"""The stages themselves: each runs its commands within a limit and says how it ended."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Report
from bench.report import read as read_report

from . import benches, junit, sanitizer
from .plan import FAILED, OK, UNAVAILABLE, Result, Runner

TEST_FOLDERS = ("tests/gpu", "tests/comm/device", "tests/tl")
SANITIZER_CASES = "tests/gpu/sanitizer_cases.py"
_TEST_LIMIT_S = 60
_TARGETS = {8: "sm_80", 9: "sm_90a", 10: "sm_100a"}


@dataclass(frozen=True)
class Workplace:
    """Where a run happens: its commands, a folder for what they write, and the GPU's facts."""

    runner: Runner
    folder: Path
    facts: Mapping[str, str]


def build(place: Workplace, limit_s: float) -> Result:
    """The native module in place, and with nvcc the kernels for this GPU."""
    has_nvcc = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
    told = os.environ.get("CMAKE_ARGS", "")
    major = int(place.facts["compute capability"].partition(".")[0])
    extra = f"-DRINGCOMM_CUDA={_TARGETS.get(major, 'all') if has_nvcc else 'OFF'}"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    command += ["--parallel", str(len(os.sched_getaffinity(0)))]
    done = place.runner.run(command, limit_s, {"CMAKE_ARGS": f"{extra} {told}".strip()})
    binaries = len(list((place.runner.root / "ringcomm" / "_kernels").glob("*.fatbin")))
    if done.status != 0:
        why = "stopped at its limit" if done.status is None else done.last_line
        return Result("build", FAILED, why, done.tail)
    kernels = f"{binaries} kernel units by nvcc" if binaries else "no nvcc: kernels at first use"
    return Result("build", OK, kernels)


def test(place: Workplace, limit_s: float) -> Result:
    """The tests that need a GPU, each with a limit of its own."""
    file = place.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *TEST_FOLDERS]
    command += ["--durations=5"]
    command += ["-p", "no:cacheprovider", f"--junitxml={file}", f"--timeout={_TEST_LIMIT_S}"]
    # pytest ends by itself shortly before the limit, and has then noted what it did.
    command += [f"--session-timeout={max(limit_s - 20.0, 1.0):.0f}"]
    done = place.runner.run(command, limit_s)
    try:
        run = junit.read(file)
    except FileNotFoundError:
        why = "stopped at its limit" if done.status is None else done.last_line
        return Result("test", FAILED, why, done.tail)
    data = {"failed": list(run.failed), "figures": run.figures, "summary": run.summary}
    if run.failed or done.status != 0:
        why = f"{run.summary}, exit status {done.status}; first: {', '.join(run.failed[:3])}"
        return Result("test", FAILED, why, done.tail, data=data)
    if not run.passed:
        return Result("test", FAILED, f"{run.summary}: nothing ran", data=data)
    return Result("test", OK, run.summary, data=data)


def sanitize(place: Workplace, limit_s: float) -> Result:
    """compute-sanitizer's tools over small cases, one after the other."""
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
    reports: list[Report] = []
    notes: list[str] = []
    failed, tail = False, ""
    for number, one in enumerate(plan):
        left_s = end - time.monotonic()
        if left_s < 1.0:
            notes.append(f"{one.name}: no time left")
            continue
        file = place.folder / f"{stage}-{number}.json"
        command = [sys.executable, "-m", one.module, *one.arguments, "--json", str(file)]
        done = place.runner.run(command, min(one.limit_s, left_s))
        if file.exists():
            reports.append(read_report(file))
        if done.status != 0:
            why = "stopped at its limit" if done.status is None else done.last_line
            notes.append(f"{one.name}: {why}")
            tail = tail or done.tail
            failed = failed or not one.optional or any(report.wrong for report in reports[-1:])
    rows = sum(len(report.rows) for report in reports)
    wrong = sum(report.wrong for report in reports)
    detail = "; ".join([f"{len(reports)} runs, {rows} rows, {wrong} wrong elements", *notes])
    verdict = FAILED if failed or wrong or not reports else OK
    return Result(stage, verdict, detail, tail, data={"reports": reports})


RUN: dict[str, Callable[[Workplace, float], Result]] = {
    "build": build,
    "test": test,
    "sanitize": sanitize,
    "bench": bench,
    "steps": steps,
}
