# SPDX-License-Identifier: Apache-2.0
"""The stages: each function runs its commands within a time limit and returns a result."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringcomm.bench.devices import GPUS_FACT
from ringcomm.bench.report import Report, read

from . import benches
from .result_files import ResultFiles
from .runner import FAILED, OK, PARTIAL, UNAVAILABLE, Finished, Result, Runner

TEST_FOLDERS = ("tests/gpu", "tests/comm/device", "tests/proof/faults/device", "tests/tl")
SANITIZER_CASES = ("-m", "tests.gpu.sanitizer_cases")
PROFILED_CASES = ("-m", "tests.gpu.profiled_cases")
_PROFILED_BYTES = 64 << 20
# Tests that have not yet run to their end on a GPU come first: Triton's step, messages between
# threads, device faults, and mixture of experts.
_NEVER_RUN = (
    *("tests/gpu/test_triton.py", "tests/comm/device/test_device_messages.py"),
    *("tests/proof/faults/device", "tests/gpu/test_moe.py"),
)
# Time limits in seconds: of a test without a limit of its own, and of a file.
_TEST_LIMIT_S = 60
_FILE_LIMIT_S = 150.0
# With less time left, no test file is started: importing torch alone takes as long.
_LEAST_FILE_S = 10.0
_TARGETS = {8: "sm_80", 9: "sm_90a", 10: "sm_100a"}
MARK = "rehearsed"
NOT_A_GPU = "on an emulated device: no figure here is a GPU's, and no goal is judged"


@dataclass
class CheckRun:
    """A run: its command runner, a folder for the commands' files, and the result files.

    ``rehearsal`` is "" on a GPU. On an emulated device it is "rehearsal" or, to run only one test
    file and one benchmark per stage, "sample".
    """

    runner: Runner
    folder: Path
    files: ResultFiles
    rehearsal: str = ""

    def python(self, arguments: Sequence[str], limit_s: float, **environment: str) -> Finished:
        return self.runner.run([sys.executable, *arguments], limit_s, environment)

    def save(self, *running: Result, ended: bool = False) -> bool:
        """Writes the results so far: of ended stages and of the running one (partial).

        Returns True if they were written. If they cannot be written (a full disk, an OUT that is
        not a folder), the run continues and fails at its end.
        """
        try:
            self.files.write(*running, ended=ended)
            return True
        except OSError as error:
            print(f"gpu-check: the results cannot be written: {error}", flush=True)
            return False


def build(check: CheckRun, limit_s: float) -> Result:
    """Builds the native module, then the benchmarks' kernels by NVRTC and all kernels by nvcc."""
    end = time.monotonic() + limit_s
    # Build the module first, without kernels, since nothing runs without the module. If nvcc then
    # fails to build the kernels, NVRTC compiles each kernel at its first use.
    kernels = ["OFF"]
    said = ""
    has_nvcc = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
    if has_nvcc and not check.rehearsal:  # emulated devices have their own kernels
        major = int(check.files.facts["compute capability"].partition(".")[0])
        kernels.append(_TARGETS.get(major, "all"))
    command = ["setup.py", "-q", "build_ext", "--inplace"]
    command += ["--parallel", str(len(os.sched_getaffinity(0)))]
    for option in kernels:
        extra = f"-DRINGCOMM_CUDA={option} {os.environ.get('CMAKE_ARGS', '')}".strip()
        done = check.python(command, max(end - time.monotonic(), 1.0), CMAKE_ARGS=extra)
        if done.status != 0:
            what = "nvcc's kernels, so they come at first use: " if option != "OFF" else ""
            verdict = PARTIAL if what and done.status is None else FAILED
            return Result("build", verdict, f"{what}{done.why}{said}", done.tail)
        if option == "OFF" and not check.rehearsal:
            capability = check.files.facts["compute capability"].split(".")
            left_s = max(end - time.monotonic(), 1.0)
            done = check.python(["-m", "tools.gpu_check.kernels", *capability], left_s)
            said = f"; not compiled beforehand: {done.why}" if done.status != 0 else ""
    binaries = len(list((check.runner.root / "ringcomm" / "_kernels").glob("*.fatbin")))
    made = f"{binaries} kernel units by nvcc" if len(kernels) > 1 else "kernels at first use"
    return Result("build", OK, made + said)


# ---- tests ----------------------------
# pytest -v writes a line when a test begins, and the outcome when it ends: the output of a killed
# process has the outcomes so far, and the test that was running.
_OUTCOME = re.compile(
    r"(?m)^([^\s\[]+\.py::[\w:]+(?:\[.*?\](?= |$))?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS))?"
)


_WRONG = {"FAILED", "ERROR", ""}  # "": the process ended in the test


def outcomes_of(output: str) -> dict[str, str]:
    """Returns the outcome of each test by its name."""
    outcomes: dict[str, str] = {}
    for name, outcome in _OUTCOME.findall(output):
        # A teardown error follows the outcome, and warnings repeat the name without an outcome.
        if name not in outcomes or (outcome and outcomes[name] not in ("FAILED", "ERROR")):
            outcomes[name] = outcome
    return outcomes


def _turn(file: str) -> int:
    """Returns a file's position: untried files first, multi-process late, Triton's last.

    On an H100 the processes took 20 to 30 s, mostly to import, and Triton compiles for minutes.
    """
    if file.startswith(_NEVER_RUN) and "processes" not in file:
        return 0
    if "/tl/" in file or "triton" in file:
        return 3
    return 2 if "processes" in file else 1


def test(check: CheckRun, limit_s: float) -> Result:
    """Runs the tests that need a GPU, in a process per file, with a time limit per test.

    A test that hangs ends its process. In a rehearsal, tests without the mark "gpu" run instead.
    """
    end = time.monotonic() + limit_s
    tests = _Tests()
    sample = "tests/gpu/test_launch_cost.py" if check.rehearsal == "sample" else "tests/gpu"
    folders = (sample,) if check.rehearsal else TEST_FOLDERS
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-m"]
    pytest.append("not gpu" if check.rehearsal else "gpu")
    listed = check.python([*pytest, "-q", "--collect-only", *folders], limit_s)
    if listed.status != 0:
        tests.broken.append(f"the list of tests: {listed.why}")
    named = (line.partition("::")[0] for line in listed.output.splitlines() if "::" in line)
    files = [name for name in dict.fromkeys(named) if (check.runner.root / name).is_file()]
    # Time out by a thread: a signal handler would wait for a call that hangs in the driver.
    pytest += [
        "-v",
        "-o",
        "junit_family=xunit1",
        "--durations=5",
        f"--timeout={_TEST_LIMIT_S}",
        "--timeout-method=thread",
    ]
    for file in sorted(files, key=_turn):
        left_s = end - time.monotonic()
        if left_s < _LEAST_FILE_S:
            tests.left_out.append(file)
            continue
        figures = check.folder / "figures.xml"
        figures.unlink(missing_ok=True)
        done = check.python([*pytest, f"--junitxml={figures}", file], min(left_s, _FILE_LIMIT_S))
        tests.add(file, done, left_s < _FILE_LIMIT_S)
        if figures.exists():
            for each in ET.parse(figures).iter("property"):
                tests.figures[f"figure {each.get('name')}"] = each.get("value", "")
        check.save(tests.result())
    return tests.result()


@dataclass
class _Tests:
    """Outcomes of the test files so far; ``broken`` lists failures outside single tests."""

    outcomes: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tail: str = ""

    def add(self, file: str, done: Finished, stage_ends: bool) -> None:
        outcomes = outcomes_of(done.output)
        if done.status is None and stage_ends:  # the stopped test has not failed
            self.left_out.append(f"the rest of {file}")
            outcomes = {name: outcome for name, outcome in outcomes.items() if outcome}
        elif done.status and not _WRONG & set(outcomes.values()):
            self.broken.append(f"{file}: exit status {done.status}")
        elif done.status is None:
            self.broken.append(f"{file}: {done.why}")
        self.outcomes |= outcomes
        self.tail = self.tail or ("" if done.status == 0 else done.tail)

    def result(self) -> Result:
        failed = [name for name, outcome in self.outcomes.items() if outcome in _WRONG]
        counts = Counter(self.outcomes.values())
        said = [f"{counts['PASSED']} passed, {len(failed)} failed, {counts['SKIPPED']} skipped"]
        said += self.broken
        said += [f"failed: {', '.join(failed)}"] if failed else []
        said += [f"no time left for {', '.join(self.left_out)}"] if self.left_out else []
        verdict = PARTIAL if self.left_out else OK
        if failed or self.broken or not counts["PASSED"]:
            verdict = FAILED
        return Result("test", verdict, "; ".join(said), self.tail, noted=self.figures)


# ---- compute-sanitizer ----------------------------

TOOLS = ("memcheck", "racecheck", "synccheck")
# Racecheck prints a summary of its own. There is one summary per process.
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: .*\((\d+) errors?")
_WARNINGS = re.compile(r"RACECHECK SUMMARY: .* (\d+) warn")
_REFUSALS = ("Device not supported", "No attachable process found", "Unable to find injection")


def verdict_of(done: Finished) -> tuple[str, str]:
    """Returns the verdict on a run of a tool, and a line about it."""
    for refusal in _REFUSALS:
        if refusal in done.output:
            return UNAVAILABLE, refusal
    counts = [int(one or other) for one, other in _ERRORS.findall(done.output)]
    if done.status is None:
        return FAILED, done.why
    if not counts:
        return FAILED, "ended without a summary"
    if sum(counts):
        found = re.search(r"(?m)^=+ (?!COMPUTE|ERROR SUMMARY)(.+)$", done.output)
        return FAILED, found[1] if found else "see the log"
    if done.status:
        return FAILED, f"the cases ended with exit status {done.status}"
    warnings = sum(map(int, _WARNINGS.findall(done.output)))
    return OK, f"clean ({warnings} warnings)" if warnings else "clean"


def sanitize(check: CheckRun, limit_s: float) -> Result:
    """Runs compute-sanitizer's tools on small cases, one tool after the other."""
    if check.rehearsal:
        done = check.python(SANITIZER_CASES, limit_s)
        if done.status == 0:
            return Result("sanitize", OK, "no sanitizer: the cases ran by themselves")
        return Result("sanitize", FAILED, done.why, done.tail)
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return Result("sanitize", UNAVAILABLE, "no compute-sanitizer on this machine")
    end = time.monotonic() + limit_s
    verdicts, said, tail = [], [], ""
    for index, tool in enumerate(TOOLS):
        # Ignore API errors: torch and CuPy try calls that may fail; ringcomm raises its own errors.
        command = [program, "--tool", tool, "--error-exitcode=99", "--report-api-errors", "no"]
        share_s = (end - time.monotonic()) / (len(TOOLS) - index)
        done = check.runner.run([*command, sys.executable, *SANITIZER_CASES], max(share_s, 1.0))
        verdict, detail = verdict_of(done)
        verdicts.append(verdict)
        said.append(f"{tool} {detail}")
        tail = tail or ("" if verdict == OK else done.tail)
    outcome = verdicts[0] if len(set(verdicts)) == 1 else FAILED
    return Result("sanitize", outcome, "; ".join(said), tail)


# ---- profiler ----------------------------

# ncu's metrics, by their names in the results.
METRICS = {
    "us": "gpu__time_duration.sum",
    "% of the memory's rate": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "% hits in L2": "lts__t_sector_hit_rate.pct",
    "registers": "launch__registers_per_thread",
    **{
        f"warps that wait for {what}": (
            f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
        )
        for what, name in (
            ("loads", "long_scoreboard"),
            ("instructions", "no_instruction"),
            ("results", "wait"),
            ("branches", "branch_resolving"),
        )
    },
}


def profiled(output: str) -> dict[str, str]:
    """Returns each kernel's figures, by position and name, from ``ncu --csv --page raw``."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found = {}
    for place, row in enumerate(csv.DictReader(lines)):
        if not row["ID"].isdigit():  # the row of units
            continue
        figures = [f"{row[name]} {what}" for what, name in METRICS.items() if row.get(name)]
        grid = row.get("Grid Size", "")
        found[f"profile {place}, {row['Kernel Name']} {grid}".strip()] = ", ".join(figures)
    return found


def profile(check: CheckRun, limit_s: float) -> Result:
    """Runs ncu to measure stalls per kernel; in a rehearsal, runs the cases without ncu."""
    if check.rehearsal:
        done = check.python(PROFILED_CASES, limit_s)
        if done.status == 0:
            return Result("profile", OK, "no profiler: the cases ran by themselves")
        return Result("profile", FAILED, done.why, done.tail)
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(program).exists():
        return Result("profile", UNAVAILABLE, "no ncu on this machine")
    command = [program, "--csv", "--page", "raw", "--kernel-name", "regex:^rc_"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, *PROFILED_CASES]
    done = check.runner.run([*command, str(_PROFILED_BYTES)], limit_s)
    if "ERR_NVGPUCTRPERM" in done.output:
        return Result("profile", UNAVAILABLE, "the driver lets this user read no counters")
    found = profiled(done.output)
    # A profiler that was stopped at its limit has printed the earlier kernels.
    verdict = OK if done.status == 0 and found else PARTIAL if found else FAILED
    told = f"{len(found)} kernels" + ("" if done.status == 0 else f"; {done.why}")
    return Result("profile", verdict, told, done.tail if verdict == FAILED else "", noted=found)


# ---- benchmarks ----------------------------


def bench(check: CheckRun, limit_s: float) -> Result:
    """Runs the benchmarks of the collectives, the most important first, within the limit."""
    version = tuple(int(part) for part in check.files.facts["NCCL"].split(".") if part.isdigit())
    multicast = benches.multicast_plan(int(check.files.facts.get(GPUS_FACT, "1")))
    return _run_benches("bench", [*multicast, *benches.plan(version)], check, limit_s)


def calls(check: CheckRun, limit_s: float) -> Result:
    """Measures the host's cost of single calls, in the same way as :func:`bench`."""
    return _run_benches("calls", benches.calls_plan(), check, limit_s)


def grid(check: CheckRun, limit_s: float) -> Result:
    """Times large collectives by kind of loops and number of blocks, as :func:`bench` does."""
    return _run_benches("grid", benches.grid_plan(), check, limit_s)


def training(check: CheckRun, limit_s: float) -> Result:
    """Times training steps, in the same way as :func:`bench`."""
    return _run_benches("training", benches.training_plan(), check, limit_s)


def steps(check: CheckRun, limit_s: float) -> Result:
    """Times the optimizer's step, in the same way as :func:`bench`."""
    return _run_benches("steps", benches.optimizer_plan(), check, limit_s)


def marked(report: Report) -> Report:
    """Returns a rehearsal's report with a mark in every row, so that copied rows keep the mark."""
    told = f"{MARK} {NOT_A_GPU}"
    rows = [
        replace(row, system=f"{row.system} ({MARK})", note=f"{told}. {row.note}".strip())
        for row in report.rows
    ]
    return Report(report.provenance, rows)


def _run_benches(
    stage: str, plan: Sequence[benches.BenchRun], check: CheckRun, limit_s: float
) -> Result:
    end = time.monotonic() + limit_s
    result = Result(stage, OK, "")
    notes: list[str] = []
    if check.rehearsal:
        plan = [benches.rehearsed(each) for each in plan]
        plan = plan[:1] if check.rehearsal == "sample" else plan
    for number, one in enumerate(plan):
        left_s = end - time.monotonic()
        if left_s < 1.0:
            notes.append(f"{one.name}: no time left")
            result.verdict = PARTIAL if result.verdict == OK else result.verdict
            continue
        file = check.folder / f"{stage}-{number}.json"
        done = check.python([*one.command, "--json", str(file)], min(one.limit_s, left_s))
        reports = [read(file)] if file.exists() else []
        result.reports += [marked(each) for each in reports] if check.rehearsal else reports
        if done.status != 0:
            notes.append(f"{one.name}: {done.why}")
            result.tail = result.tail or done.tail
        if any(each.wrong for each in reports) or (done.status != 0 and not one.optional):
            result.verdict = FAILED
        result.detail = _told(result.reports, notes)
        check.save(result)
    result.detail = _told(result.reports, notes)
    result.verdict = result.verdict if result.reports else FAILED
    return result


def _told(reports: Sequence[Report], notes: Sequence[str]) -> str:
    rows = sum(len(report.rows) for report in reports)
    wrong = sum(report.wrong for report in reports)
    return "; ".join([f"{len(reports)} runs, {rows} rows, {wrong} wrong elements", *notes])


RUN: dict[str, Callable[[CheckRun, float], Result]] = {
    each.__name__: each
    for each in (build, calls, profile, grid, steps, bench, training, test, sanitize)
}
