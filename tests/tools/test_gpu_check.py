# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check`` without a GPU: its plan, its stages, and the parsing of their output."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm.bench import device_calls, device_steps, training
from ringcomm.bench.collectives import parse, sizes_bytes
from ringcomm.bench.report import Row
from ringcomm.bench.training_systems import DDP_NCCL, FSDP2_NCCL
from ringcomm.bench.training_systems import STAGES as STAGES_OF_ZERO
from ringcomm.cuda.units import UNITS
from tests.bench.programs import run_program
from tests.support import ROOT, fork_server
from tools.gpu_check import benches, kernels, stages
from tools.gpu_check.__main__ import run_stages, summary
from tools.gpu_check.result_files import ResultFiles
from tools.gpu_check.runner import (
    BUDGET_S,
    FAILED,
    LEFT_OUT,
    OK,
    PARTIAL,
    STAGES,
    UNAVAILABLE,
    Finished,
    Result,
    Runner,
    Stage,
    limit_s,
    select,
)
from tools.gpu_check.stages import CheckRun

FACTS = {
    "gpu": "NVIDIA H999 80GB (test)",
    "compute capability": "9.0",
    "NCCL": "2.28.3",
    "commit": "abc",
    "date": "2031-02-03",
}

BUILD_AND_TEST = (Stage("build", 90.0, 10.0), Stage("test", 260.0, 40.0))


@pytest.fixture
def check(tmp_path):
    log = tmp_path / "log"
    log.touch()
    files = ResultFiles(FACTS, tmp_path / "results", tmp_path / "out", log)
    return CheckRun(Runner(tmp_path, log, os.environ), tmp_path, files)


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = run_program("tools.gpu_check", "--stages", "build,test")
    assert done.returncode == 2
    line, what_then = done.stdout.splitlines()
    assert line.startswith("gpu-check: no usable GPU here: ") and "no usable CUDA" in line
    assert "REHEARSE=1" in what_then


# ---- the time ----------------------------


def test_the_stages_fit_into_ten_minutes():
    assert BUDGET_S < 580
    assert [stage.name for stage in STAGES] == [*stages.RUN]


def test_stages_keep_their_order_and_share_the_budget():
    chosen = select("test, build", 34.0)
    assert [stage.name for stage in chosen] == ["build", "test"]
    assert [stage.budget_s for stage in chosen] == [22.0, 12.0]
    assert select(",".join(stages.RUN)) == STAGES
    for text in ("", "bench,benches"):
        with pytest.raises(ValueError, match="expected some of build,calls"):
            select(text)


def test_time_left_over_goes_to_the_next_stage_and_overruns_are_paid_back():
    chosen = STAGES[:3]
    first, second, third = (stage.budget_s for stage in chosen)
    assert limit_s(chosen, 0, 0.0) == first
    assert limit_s(chosen, 1, first) == second
    assert limit_s(chosen, 1, 10.0) == second + first - 10.0
    assert limit_s(chosen, 2, first + second + 7.0) == third - 7.0
    assert limit_s(chosen, 2, 10_000.0) == 1.0


def test_a_stage_without_time_is_left_out_and_named(check):
    called = []

    def body(check, limit):
        called.append(limit)
        return Result("build", OK, "")

    chosen = (Stage("build", 50.0, 10.0), Stage("test", 5.0, 40.0))
    results = run_stages(chosen, check, {"build": body, "test": body}, time.monotonic() - 20.0)
    assert [result.verdict for result in results] == [OK, LEFT_OUT] and len(called) == 1
    assert "s were left for it" in results[1].detail


def test_a_stage_that_raises_stops_no_other(check, capsys):
    def broken(check, limit):
        raise RuntimeError("no disk")

    run = {"build": broken, "test": lambda check, limit: Result("test", OK, f"{limit:.0f} s")}
    results = run_stages(BUILD_AND_TEST, check, run, time.monotonic() - 20.0)
    assert [(each.name, each.verdict) for each in results] == [("build", FAILED), ("test", OK)]
    assert results[1].detail == "330 s" and "RuntimeError: no disk" in results[0].detail
    # The budget is reduced by the time that has already passed.
    assert "gpu-check: build, 70 s at most" in capsys.readouterr().out
    assert any(line.startswith("build  failed") for line in summary(FACTS, results))


# ---- the files of results ----------------------------

# The command on a fictitious GPU, with one stage that ends and one that does not.
COMMAND = """
import sys
from pathlib import Path
from tools.gpu_check import __main__ as command
from tools.gpu_check.runner import OK, Result

command.ROOT, command.FOLDER = Path.cwd(), Path.cwd() / "folder"
command._PROBE = "import json; print(json.dumps({{'gpu': 'NVIDIA H999'}}))"

def lasts(check, limit):
    check.runner.run([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); "
                      "open('pid', 'w').write(str(os.getpid())); time.sleep(600)"], limit)

command.RUN = {"build": lambda check, limit: Result("build", OK, "built"), "test": lasts}
sys.exit(command.main(["--stages", "build,test", "--budget", "80"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_what_it_had(tmp_path, number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OUT": str(tmp_path / "out")}
    with fork_server.Popen([sys.executable, "-c", COMMAND], cwd=tmp_path, env=environment) as run:
        pid = tmp_path / "pid"
        wait_until(lambda: pid.exists() and pid.read_text())
        run.send_signal(number)
    assert run.returncode == (-number if number == signal.SIGKILL else 128 + number)
    # A process left running would hold the GPU.
    wait_until(lambda: has_ended(int(pid.read_text())))
    for folder in (tmp_path / "bench" / "results", tmp_path / "out"):
        (file,) = folder.glob("gpu-nvidia-h999-*.json")
        facts = json.loads(file.read_text())["provenance"]
        assert facts["ended"].startswith("no")
        assert [key for key in facts if key.startswith("stage ")] == ["stage build"]


def wait_until(holds, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_record_stands_after_each_stage(check):
    """The files hold all stages so far, however the run ends later."""
    seen = []

    def body(check, limit):
        check.save(Result("test", PARTIAL, "under way"))
        for folder in ("results", "out"):
            (file,) = (check.folder / folder).glob("gpu-*.json")
            seen.append(json.loads(file.read_text())["provenance"])
        raise KeyboardInterrupt

    run = {"build": lambda check, limit: Result("build", OK, "built"), "test": body}
    with pytest.raises(KeyboardInterrupt):
        run_stages(BUILD_AND_TEST, check, run, time.monotonic())
    for facts in seen:
        assert facts["stage build"] == "ok, 0 s: built"
        assert facts["stage test"] == "partial, 0 s: under way"
    (text,) = (check.folder / "results").glob("*.md")
    assert "no: it was stopped" in text.read_text()
    assert not list(check.folder.rglob("*.unfinished"))


def test_a_record_that_cannot_be_written_ends_nothing(check, capsys):
    """OUT is not a folder: the results folder still gets the files, and the run its verdict."""
    (check.folder / "out").touch()
    run = {name: lambda check, limit: Result("build", OK, "built") for name in ("build", "test")}
    results = run_stages(BUILD_AND_TEST, check, run, time.monotonic())
    assert [result.verdict for result in results] == [OK, OK]
    assert capsys.readouterr().out.count("the results cannot be written: ") == 2
    assert not check.save(ended=True)
    (file,) = (check.folder / "results").glob("*.json")
    assert json.loads(file.read_text())["provenance"]["ended"] == "yes"


# ---- commands ----------------------------


def test_a_command_is_run_in_the_tree_with_its_output_in_the_log(check):
    code = "import os; print(os.getcwd()); print(os.environ['PYTHONPATH']); print(os.environ['X'])"
    done = check.runner.run(python(code), 30.0, {"X": "9"})
    assert done.status == 0 and done.why == "9"
    assert done.output.splitlines()[0] == str(check.folder)
    assert done.output.splitlines()[1].split(os.pathsep)[0] == str(check.folder)
    again = check.runner.run(python("print('again')"), 30.0)
    assert again.output == "again\n" and done.output in (check.folder / "log").read_text()


def has_ended(pid):
    """True if a process has ended; a killed process may stay a zombie until its parent waits."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_ends_at_its_limit_with_its_children(check):
    child = "import os, time; os.setpgid(0, 0); time.sleep(600)"  # like ninja's children
    code = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        "time.sleep(600)"
    )
    done = check.runner.run(python(code), 3.0)
    assert (done.status, done.why) == (None, "stopped at its limit")
    wait_until(lambda: has_ended(int(done.output)))


# ---- build and compute-sanitizer ----------------------------


@pytest.mark.parametrize(
    ("statuses", "verdict", "words"),
    [
        ((0, 0, 0), OK, "kernel units by nvcc"),
        ((0, 1, 0), OK, "by nvcc; not compiled beforehand: what it said"),
        ((1,), FAILED, "what it said"),
        ((0, 0, 1), FAILED, "nvcc's kernels, so they come at first use: what it said"),
        ((0, 0, None), PARTIAL, "nvcc's kernels, so they come at first use: stopped at its limit"),
    ],
)
def test_the_module_is_built_before_nvcc_is_tried(check, monkeypatch, statuses, verdict, words):
    asked, left = [], list(statuses)

    def run(command, limit_s, environment):
        asked.append(environment.get("CMAKE_ARGS", command[2:]))
        return Finished(left.pop(0), "what it said")

    monkeypatch.setattr(check.runner, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvcc")
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    result = stages.build(check, 60.0)
    assert result.verdict == verdict and words in result.detail
    before = ["tools.gpu_check.kernels", "9", "0"]
    all_asked = ["-DRINGCOMM_CUDA=OFF", before, "-DRINGCOMM_CUDA=sm_90a"]
    assert asked == all_asked[: len(statuses)]


def test_kernels_are_compiled_with_both_kinds_of_loops(tmp_path, monkeypatch):
    """An interpreter script fails for one kind of loops."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$RINGCOMM_KERNELS $2" >> {tmp_path}/asked\n'
        'case "$RINGCOMM_KERNELS $2" in serial*move*) exit 1;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert kernels.main(["9", "0"]) == 1
    asked = sorted((tmp_path / "asked").read_text().splitlines())
    assert len(asked) == 2 * len(kernels.UNITS) and set(kernels.UNITS) <= set(UNITS)
    assert asked[0].startswith("batched ") and "load_unit('adamw_bfloat16', (9, 0))" in asked[0]


MEMCHECK_CLEAN = "========= COMPUTE-SANITIZER\nfine\n========= ERROR SUMMARY: 0 errors\n"
MEMCHECK_BAD = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at rc_move+0x1f0
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"


@pytest.mark.parametrize(
    ("output", "status", "verdict", "detail"),
    [
        (MEMCHECK_CLEAN, 0, OK, "clean"),
        (MEMCHECK_CLEAN, 1, FAILED, "exit status 1"),
        (MEMCHECK_BAD, 99, FAILED, "Invalid __global__ write of size 4 bytes"),
        (MEMCHECK_CLEAN + MEMCHECK_BAD, 99, FAILED, "Invalid __global__"),
        (RACECHECK.format(0, 0, 0), 0, OK, "clean"),
        (RACECHECK.format(2, 0, 2), 0, OK, "clean (2 warnings)"),
        (RACECHECK.format(2, 1, 1), 99, FAILED, "RACECHECK SUMMARY"),
        ("Traceback", 1, FAILED, "without a summary"),
        ("", 0, FAILED, "without a summary"),
        (MEMCHECK_CLEAN, None, FAILED, "stopped at its limit"),
        ("========= Error: Device not supported\n", 255, UNAVAILABLE, "not supported"),
    ],
)
def test_what_the_sanitizer_says(output, status, verdict, detail):
    found, told = stages.verdict_of(Finished(status, output))
    assert found == verdict and detail in told


def sanitizer_program(folder, monkeypatch, body):
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_sanitizer_stage(check, monkeypatch):
    clean = RACECHECK.format(0, 0, 1).strip()
    sanitizer_program(check.folder, monkeypatch, f"echo '{clean}'; echo $2 $6")
    result = stages.sanitize(check, 30.0)
    assert result.verdict == OK
    assert result.detail.startswith("memcheck clean (1 warnings); racecheck clean")
    # If one tool finds an error, the stage fails, whatever the other tools print.
    found = RACECHECK.format(1, 1, 0).strip()
    body = f"if [ $2 = racecheck ]; then echo '{found}'; exit 99; fi; echo '{MEMCHECK_CLEAN}'"
    sanitizer_program(check.folder, monkeypatch, body)
    assert stages.sanitize(check, 30.0).verdict == FAILED
    sanitizer_program(check.folder, monkeypatch, "echo Device not supported; exit 1")
    assert stages.sanitize(check, 30.0).verdict == UNAVAILABLE
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    result = stages.sanitize(check, 30.0)
    assert (result.verdict, result.detail) == (UNAVAILABLE, "no compute-sanitizer on this machine")


# ---- the profiler ----------------------------

PROFILE = """
==PROF== Connected to process 7
"ID","Kernel Name","Grid Size","gpu__time_duration.sum","launch__registers_per_thread","x"
"","","","us","register/thread",""
"0","rc_reduce_scatter_sum","(128, 2, 1)","340.5","96","1"
"1","rc_adamw_step_bfloat16","(128, 2, 1)","3210","80","2"
"""


def profiler(check, monkeypatch, body):
    program = check.folder / "ncu"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{check.folder}{os.pathsep}{os.environ['PATH']}")


def test_the_profile_stage(check, monkeypatch):
    (check.folder / "profile.csv").write_text(PROFILE)
    shown = f"cat {check.folder}/profile.csv"
    profiler(check, monkeypatch, f'{shown}; echo "$@" > {check.folder}/words')
    result = stages.profile(check, 30.0)
    assert (result.verdict, result.detail) == (OK, "2 kernels")
    assert result.noted == {
        "profile 1, rc_reduce_scatter_sum (128, 2, 1)": "340.5 us, 96 registers",
        "profile 2, rc_adamw_step_bfloat16 (128, 2, 1)": "3210 us, 80 registers",
    }
    words = (check.folder / "words").read_text()
    assert "regex:^rc_" in words and words.endswith("-m tests.gpu.profiled_cases 67108864\n")
    profiler(check, monkeypatch, f"{shown}; echo it broke; exit 3")
    result = stages.profile(check, 30.0)
    assert (result.verdict, result.detail) == (PARTIAL, "2 kernels; it broke")
    profiler(check, monkeypatch, "echo it broke; exit 3")
    assert stages.profile(check, 30.0).verdict == FAILED
    profiler(check, monkeypatch, "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1")
    assert stages.profile(check, 30.0).verdict == UNAVAILABLE
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    result = stages.profile(check, 30.0)
    assert (result.verdict, result.detail) == (UNAVAILABLE, "no ncu on this machine")


# ---- tests ----------------------------

TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("word", ["a b", "test_that.py::test_this"])
def test_right(word):
    pass

def test_wrong():
    assert 1 == {value}

def test_skipped():
    pytest.skip("no")

@pytest.fixture
def broken_end():
    yield
    assert {value} == 1

def test_of_a_broken_end(broken_end):
    pass

def test_ended():
    {ending}
"""


@pytest.mark.parametrize(
    ("value", "ending", "options"),
    [
        (1, "pass", ()),
        (2, "os.kill(os.getpid(), 9)", ()),
        (2, "time.sleep(600)", ("--timeout=1", "--timeout-method=thread")),
    ],
)
def test_outcomes_of_tests_are_read_from_what_pytest_prints(tmp_path, value, ending, options):
    (tmp_path / "test_it.py").write_text(TESTS.format(value=value, ending=ending))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, "test_it.py"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert stages.outcomes_of(done.stdout) == {
        "test_it.py::test_right[a b]": "PASSED",
        "test_it.py::test_right[test_that.py::test_this]": "PASSED",
        "test_it.py::test_wrong": "PASSED" if value == 1 else "FAILED",
        "test_it.py::test_skipped": "SKIPPED",
        "test_it.py::test_of_a_broken_end": "PASSED" if value == 1 else "ERROR",
        "test_it.py::test_ended": "PASSED" if ending == "pass" else "",
    }


@pytest.fixture
def marked(check, monkeypatch):
    """Returns a function that writes a file with tests that have the mark."""
    monkeypatch.setattr(stages, "TEST_FOLDERS", (".",))
    (check.folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    # Each of these tests starts a pytest, whose start-up would mostly load plugins.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    check.runner = Runner(check.folder, check.folder / "log", os.environ)

    def write(name, *bodies):
        head = "import os, time\nimport pytest\npytestmark = pytest.mark.gpu\n"
        tests = [
            f"def test_{number}(record_property):\n    {body}\n"
            for number, body in enumerate(bodies)
        ]
        (check.folder / name).write_text(head + "".join(tests))

    return write


def test_the_test_stage_needs_tests_that_ran(check, marked):
    marked("test_it.py", "record_property('us per call', 4.5)")
    result = stages.test(check, 60.0)
    assert (result.verdict, result.detail) == (OK, "1 passed, 0 failed, 0 skipped")
    assert result.noted == {"figure us per call": "4.5"}
    marked("test_it.py", "pytest.skip('no GPU')")
    assert stages.test(check, 60.0).verdict == FAILED
    # A file that cannot be imported is reported as missed, and the other files run.
    (check.folder / "test_broken.py").write_text("import nothing_of_that_name")
    marked("test_it.py", "assert False", "pass")
    result = stages.test(check, 60.0)
    assert result.verdict == FAILED and "the list of tests: " in result.detail
    assert "1 passed, 1 failed" in result.detail and "failed: test_it.py::test_0" in result.detail


def test_a_file_that_dies_takes_no_other_along_and_triton_is_last(check, marked, monkeypatch):
    marked("test_triton_a.py", "pass")
    marked("test_b.py", "pass", "os._exit(0)", "pass")
    marked("test_c.py", "pass", "os.kill(os.getpid(), 11)")
    saved = []
    monkeypatch.setattr(check, "save", lambda result: saved.append(result.detail))
    result = stages.test(check, 90.0)
    assert result.verdict == FAILED
    assert "failed: test_b.py::test_1, test_c.py::test_1" in result.detail
    # Recorded while the stage runs.
    assert [detail.partition(";")[0] for detail in saved] == [
        "1 passed, 1 failed, 0 skipped",
        "2 passed, 2 failed, 0 skipped",
        "3 passed, 2 failed, 0 skipped",
    ]


class Hanging:
    """A runner whose test files pass one test and hang in the next, except ``test_good.py``."""

    def __init__(self, root):
        self.root = root
        for name in ("test_a.py", "test_good.py"):
            (root / name).touch()

    def run(self, command, limit_s, environment=None):
        if "--collect-only" in command:
            return Finished(0, "test_a.py::test_0\ntest_good.py::test_0\n")
        file = command[-1]
        hangs = file != "test_good.py"
        if hangs:
            time.sleep(limit_s)
        output = f"{file}::test_0 PASSED [50%]\n" + (f"{file}::test_1 " if hangs else "")
        return Finished(None if hangs else 0, output)


@pytest.fixture
def hanging(check, monkeypatch):
    check.runner = Hanging(check.folder)
    monkeypatch.setattr(stages, "_LEAST_FILE_S", 0.3)


def test_files_without_time_are_named(check, hanging):
    result = stages.test(check, 0.5)
    assert result.verdict == PARTIAL, result.detail
    assert result.detail == (
        "1 passed, 0 failed, 0 skipped; no time left for the rest of test_a.py, test_good.py"
    )


def test_a_file_that_takes_too_long_leaves_time_to_the_others(check, hanging, monkeypatch):
    monkeypatch.setattr(stages, "_FILE_LIMIT_S", 0.1)
    result = stages.test(check, 60.0)
    assert result.verdict == FAILED and "test_a.py: stopped at its limit" in result.detail
    assert result.detail.startswith("2 passed, 1 failed, 0 skipped")
    assert result.detail.endswith("failed: test_a.py::test_1")


# ---- benchmarks ----------------------------


def arguments_of(one):
    module, *arguments = one.words.split()
    return module, arguments


def test_every_measurement_is_a_command_that_the_harness_takes():
    plan = benches.plan((2, 30, 0))
    worlds = set()
    in_graphs: dict[int, list[int]] = {}
    for one in plan:
        module, arguments = arguments_of(one)
        options = parse(arguments)
        worlds.add(options.ranks)
        if options.mode == "one-launch":
            assert options.graph
            in_graphs[options.ranks] = max(in_graphs.get(options.ranks, []), sizes_bytes(options))
        assert module == "collectives" and options.device == "cuda" and options.tensors == "heap"
        assert one.command[:2] == ["-m", "ringcomm.bench"] and one.limit_s <= 60
    assert worlds == {2, 4, 8}
    # Figures of ranks that share a launch exclude the host's part.
    assert all((sizes[0], sizes[-1]) == (4 << 10, 256 << 20) for sizes in in_graphs.values())
    assert (
        len(plan) == len(benches.plan((2, 29, 9))) + 2 == len({one.name for one in plan}) == 8 - 1
    )


def test_several_gpus_compare_both_ways_of_multicast():
    assert benches.multicast_plan(1) == []
    plan = benches.multicast_plan(8)
    asked = [parse(arguments_of(one)[1]) for one in plan]
    assert [each.tensors for each in asked] == ["heap", "plain"]
    for one, options in zip(plan, asked, strict=True):
        assert options.systems == ("ringcomm:multicast", "ringcomm:one_shot", "nccl")
        assert options.ranks == 8 and options.mode == "gpu-per-rank" and one.optional
        assert sizes_bytes(options)[-1] == 256 << 20


def test_the_grid_has_both_kinds_of_loops_at_numbers_of_blocks():
    grid: dict[int, list[int]] = {}
    for one in benches.grid_plan():
        module, arguments = arguments_of(one)
        options = parse(arguments)
        assert module == "collectives" and options.graph and options.mode == "one-launch"
        systems = ("ringcomm:one_shot", "sliced:one_shot", "serial:one_shot", "copy")
        assert options.systems == systems
        assert options.collectives == ("reduce_scatter", "all_gather")
        assert sizes_bytes(options) == [64 << 20, 256 << 20]
        grid.setdefault(options.ranks, []).append(options.channels * options.ranks)
    assert grid == {2: [0, 64, 32], 8: [0, 64, 32], 4: [0]}


def test_both_kinds_of_loops_are_timed_at_all_sizes():
    in_graphs = [one.words for one in benches.plan((2, 30, 0)) if "in graphs, " in one.name]
    assert len(in_graphs) == 3 and all(",serial," in words for words in in_graphs)


def test_every_measurement_of_the_optimizer_is_a_command_too():
    plan = benches.optimizer_plan()
    names = ["shard", "step, 2 ranks", "step, 8 ranks", "step, 4 ranks"]
    assert [one.name for one in plan] == names
    for one in plan:
        module, arguments = arguments_of(one)
        assert one.limit_s <= 30
        asked = device_steps.BENCH.parse(arguments)
        assert (module, asked.dtype, asked.millions) == ("device_steps", "bfloat16", 256)
        assert asked.what == "shard" or f"{asked.ranks} ranks" in one.name


def test_each_process_trains_one_system_with_few_and_with_many_tokens():
    trained = {}
    for one in benches.training_plan():
        module, arguments = arguments_of(one)
        asked = training.BENCH.parse(arguments)
        assert (module, asked.device, asked.ranks) == ("training", "cuda", 1)
        assert asked.batches == [(4, 512), (16, 1024)] and one.limit_s <= 40
        trained[asked.system] = asked.graph
    assert trained == {**dict.fromkeys(STAGES_OF_ZERO, True), DDP_NCCL: False, FSDP2_NCCL: False}


def test_the_driver_comes_before_the_calls_that_use_it():
    asked = [device_calls.BENCH.parse(arguments_of(one)[1]) for one in benches.calls_plan()]
    assert [each.what for each in asked] == [["driver"], ["calls"]]


HARNESS = """
import pathlib, shutil, sys
path = sys.argv[sys.argv.index("--json") + 1]
if "32K" not in sys.argv:  # the small run writes nothing
    shutil.copyfile("report.json", path)
sys.exit({status} if "processes-on-one-gpu" in sys.argv else 0)
"""


def make_harness(root: Path) -> Path:
    """Makes a package ringcomm.bench below ``root``; returns the path for its program."""
    folder = root / "ringcomm" / "bench"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    return folder / "__main__.py"


def test_the_bench_stage_goes_on_after_a_run_that_fails(check, monkeypatch):
    script = make_harness(check.folder)
    a_row = Row("all_gather", 64, 16, "float", "none", -1, 2, "ringcomm", "out", 10.0, wrong=0)
    report: dict[str, Any] = {"schema": 1, "provenance": {}, "rows": [vars(a_row)]}
    (check.folder / "report.json").write_text(json.dumps(report))
    first, _, small, *_, shared = benches.plan(())
    monkeypatch.setattr(benches, "plan", lambda version: [first, shared])
    script.write_text(HARNESS.format(status=1))
    result = stages.bench(check, 60.0)
    # If NCCL's run fails, its earlier measurements are kept, and the failure is reported.
    assert result.verdict == OK and len(result.reports) == 2
    assert "processes, 2 ranks: no output" in result.detail
    report["rows"][0]["wrong"] = 4
    (check.folder / "report.json").write_text(json.dumps(report))
    assert stages.bench(check, 60.0).verdict == FAILED
    monkeypatch.setattr(benches, "plan", lambda version: [small])
    (check.folder / "bench-0.json").unlink()
    assert stages.bench(check, 60.0).verdict == FAILED


def test_the_steps_stage_runs_the_optimizers_program(check):
    script = make_harness(check.folder)
    script.write_text(HARNESS.format(status=0))
    report: dict[str, Any] = {"schema": 1, "provenance": {}, "rows": []}
    (check.folder / "report.json").write_text(json.dumps(report))
    result = stages.steps(check, 60.0)
    assert (result.name, result.verdict, len(result.reports)) == ("steps", OK, 4)
    # A run for which no time is left is not started.
    assert "no time left" in stages.steps(check, 0.5).detail
    script.write_text("import sys; sys.exit('too little memory')")
    for file in check.folder.glob("steps-*.json"):
        file.unlink()
    result = stages.steps(check, 60.0)
    assert result.verdict == FAILED and "shard: too little memory" in result.detail
