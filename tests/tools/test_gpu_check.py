"""``make gpu-check`` as far as it goes without a GPU: its plan, its stages and their parsing."""

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

from ringcomm.bench import device_steps, training
from ringcomm.bench.collectives import parse
from ringcomm.bench.report import Row
from tests.bench.programs import run_program
from tests.support import ROOT
from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check import benches, noting, sanitizer, stages
from tools.gpu_check.__main__ import Saver, run_stages, summary
from tools.gpu_check.plan import (
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
    fit,
    limit_s,
    select,
)
from tools.gpu_check.stages import Workplace

FACTS = {
    "gpu": "NVIDIA H999 80GB (test)",
    "compute capability": "9.0",
    "driver": "1.2",
    "NCCL": "2.28.3",
    "commit": "abc",
    "date": "2031-02-03",
}


@pytest.fixture
def place(tmp_path):
    return Workplace(Runner(tmp_path, tmp_path / "log", os.environ), tmp_path, FACTS)


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = run_program("tools.gpu_check", "--stages", "build,test")
    assert done.returncode == 2
    line, what_then = done.stdout.splitlines()
    assert line.startswith("gpu-check: no usable GPU here: ") and "no usable CUDA" in line
    assert "REHEARSE=1" in what_then


def test_the_stages_fit_into_ten_minutes():
    assert BUDGET_S < 580
    names = [stage.name for stage in STAGES]
    assert names == ["build", "test", "sanitize", "bench", "steps", "record"]
    assert {stage.name for stage in STAGES} == {*stages.RUN, "record"}


def test_stages_keep_their_order():
    assert [stage.name for stage in select("record, build")] == ["build", "record"]
    for text in ("", "bench,benches"):
        with pytest.raises(ValueError, match="expected some of build,test"):
            select(text)


def test_time_left_over_goes_to_the_next_stage_and_overruns_are_paid_back():
    chosen = select("build,test,bench")
    build, test, bench = (stage.budget_s for stage in chosen)
    assert limit_s(chosen, 0, 0.0) == build
    assert limit_s(chosen, 1, build) == test
    assert limit_s(chosen, 1, 10.0) == test + build - 10.0
    assert limit_s(chosen, 2, build + test + 7.0) == bench - 7.0
    assert limit_s(chosen, 2, 10_000.0) == 1.0


@pytest.mark.parametrize("budget_s", [2000.0, BUDGET_S, 300.0, 148.0])
def test_a_budget_is_divided_among_all_stages(budget_s):
    parts, left_out = fit(STAGES, budget_s)
    assert left_out == () and [part.name for part in parts] == [each.name for each in STAGES]
    assert sum(part.budget_s for part in parts) == pytest.approx(budget_s)
    assert all(part.budget_s >= part.least_s for part in parts)
    # In the same proportions.
    spare = [part.budget_s - part.least_s for part in parts]
    wanted = [stage.budget_s - stage.least_s for stage in STAGES]
    assert spare[1] * wanted[0] == pytest.approx(spare[0] * wanted[1])


@pytest.mark.parametrize(
    ("budget_s", "names"),
    [
        (146.0, ("sanitize",)),
        (125.0, ("steps",)),
        (100.0, ("sanitize", "bench")),
        (75.0, ("sanitize", "bench", "steps")),
        (1.0, ("build", "test", "sanitize", "bench", "steps", "record")),
    ],
)
def test_what_a_budget_has_no_room_for_is_named(budget_s, names):
    parts, left_out = fit(STAGES, budget_s)
    assert left_out == names
    assert [part.name for part in parts] == [each.name for each in STAGES if each.name not in names]
    assert sum(part.budget_s for part in parts) < budget_s + 1e-6


def test_a_stage_without_time_is_left_out_and_named(place):
    called = []

    def body(place, limit):
        called.append(limit)
        return Result("build", OK, "")

    chosen = (Stage("build", 50.0, 10.0), Stage("test", 5.0, 40.0))
    results = run_stages(chosen, place, {"build": body, "test": body}, time.monotonic() - 20.0)
    assert [result.verdict for result in results] == [OK, LEFT_OUT]
    assert results[1].data == {"left out": ["test"]} and len(called) == 1


def test_a_budget_without_room_for_any_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--budget", "1"])
    assert "--budget 1" in capsys.readouterr().err


# The command on a GPU that is made up, with one stage that ends and one that does not.
COMMAND = """
import sys
from pathlib import Path
from tools.gpu_check import __main__ as command
from tools.gpu_check.plan import OK, Result

command.ROOT, command.FOLDER = Path.cwd(), Path.cwd() / "folder"
command._PROBE = "import json; print(json.dumps({'gpu': 'NVIDIA H999'}))"

def lasts(place, limit):
    place.runner.run([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); "
                      "open('pid', 'w').write(str(os.getpid())); time.sleep(600)"], limit)

command.RUN = {"build": lambda place, limit: Result("build", OK, "built"), "test": lasts}
sys.exit(command.main(["--stages", "build,test,sanitize,record", "--budget", "80"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_what_it_had(tmp_path, number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OUT": str(tmp_path / "out")}
    with subprocess.Popen([sys.executable, "-c", COMMAND], cwd=tmp_path, env=environment) as run:
        pid = tmp_path / "pid"
        until_there(pid, run)
        run.send_signal(number)
    assert run.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_for_end(int(pid.read_text()))  # the command, which would hold the GPU
    for folder in (tmp_path / "bench" / "results", tmp_path / "out"):
        (file,) = folder.glob("gpu-nvidia-h999-*.json")
        document = json.loads(file.read_text())
        assert document["ended"] is False
        assert [(each["stage"], each["verdict"]) for each in document["stages"]] == [
            ("sanitize", LEFT_OUT),
            ("build", OK),
        ]


def until_there(file, writer):
    """Waits for a file with something in it, which a process that runs will write."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert writer.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_a_record_stands_after_each_stage(place):
    """The record of the stages so far is there, whatever ends the run later."""
    (place.folder / "log").touch()
    seen = []
    place.saver = Saver(FACTS, place.folder / "results", place.folder / "out", place.folder / "log")

    def body(place, limit):
        place.save(Result("test", PARTIAL, "under way"))
        for folder in ("results", "out"):
            (file,) = (place.folder / folder).glob("gpu-*.json")
            seen.append(json.loads(file.read_text()))
        raise KeyboardInterrupt

    run = {"build": lambda place, limit: Result("build", OK, "built"), "test": body}
    before = [Result("steps", LEFT_OUT, "no room")]
    with pytest.raises(KeyboardInterrupt):
        run_stages(select("build,test"), place, run, time.monotonic(), before)
    for document in seen:
        assert document["ended"] is False
        named = [(stage["stage"], stage["verdict"]) for stage in document["stages"]]
        assert named == [("steps", LEFT_OUT), ("build", OK), ("test", PARTIAL)]
    (text,) = (place.folder / "results").glob("*.md")
    assert "This run was stopped before its end" in text.read_text()
    assert not list(place.folder.rglob("*.unfinished"))


def test_a_record_that_cannot_be_written_ends_nothing(place, capsys):
    """OUT is no folder: the results have the record, and the run its verdict."""
    (place.folder / "log").touch()
    (place.folder / "out").touch()
    saver = Saver(FACTS, place.folder / "results", place.folder / "out", place.folder / "log")
    place.saver = saver
    run = {name: lambda place, limit: Result("build", OK, "built") for name in ("build", "test")}
    results = run_stages(select("build,test"), place, run, time.monotonic())
    assert [result.verdict for result in results] == [OK, OK]
    assert capsys.readouterr().out.count("the record cannot be written: ") == 2
    last = gpu_check._record(saver, results)
    assert last.verdict == FAILED and "cannot be written" in last.detail
    (file,) = (place.folder / "results").glob("*.json")
    assert json.loads(file.read_text())["ended"] is True


def test_a_command_is_run_in_the_tree_with_its_output_in_the_log(place):
    code = "import os; print(os.getcwd()); print(os.environ['PYTHONPATH']); print(os.environ['X'])"
    done = place.runner.run(python(code), 30.0, {"X": "9"})
    assert done.status == 0 and done.last_line == "9"
    assert done.output.splitlines()[0] == str(place.folder)
    assert done.output.splitlines()[1].split(os.pathsep)[0] == str(place.folder)
    assert done.output in (place.folder / "log").read_text()


def wait_for_end(pid):
    """A process that was killed ends soon, and may then wait for its parent as a zombie."""
    deadline = time.monotonic() + 30
    while (state := Path(f"/proc/{pid}/stat")).exists():
        if state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_ends_at_its_limit_with_its_children(place):
    child = "import os, time; os.setpgid(0, 0); time.sleep(600)"  # as ninja's children do
    code = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        "time.sleep(600)"
    )
    done = place.runner.run(python(code), 3.0)
    assert done.status is None and done.seconds < 60
    wait_for_end(int(done.last_line))


def test_a_stage_that_raises_stops_no_other(place, capsys):
    def broken(place, limit):
        raise RuntimeError("no disk")

    run = {"build": broken, "test": lambda place, limit: Result("test", OK, f"{limit:.0f} s")}
    chosen = select("build,test,record")
    results = run_stages(chosen, place, run, time.monotonic() - 20.0)
    assert [(result.name, result.verdict) for result in results] == [
        ("build", FAILED),
        ("test", OK),
    ]
    assert results[1].detail == "330 s"
    assert "RuntimeError: no disk" in results[0].detail
    # What went before is taken off.
    assert "gpu-check: build, 90 s at most" in capsys.readouterr().out
    lines = summary(place, results)
    assert any(line.startswith("build     failed") for line in lines)


MEMCHECK_CLEAN = "========= COMPUTE-SANITIZER\nfine\n========= ERROR SUMMARY: 0 errors\n"
MEMCHECK_BAD = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at rc_move+0x1f0
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"


@pytest.mark.parametrize(
    ("tool", "output", "status", "errors", "detail"),
    [
        ("memcheck", MEMCHECK_CLEAN, 0, 0, ""),
        ("memcheck", MEMCHECK_CLEAN, 1, None, "exit status 1"),
        ("memcheck", MEMCHECK_BAD, 99, 3, "Invalid __global__ write of size 4 bytes"),
        ("memcheck", MEMCHECK_CLEAN + MEMCHECK_BAD, 99, 3, "Invalid __global__"),
        ("racecheck", RACECHECK.format(0, 0, 0), 0, 0, ""),
        ("racecheck", RACECHECK.format(2, 1, 1), 99, 1, "RACECHECK SUMMARY"),
        ("synccheck", "Traceback", 1, None, "without a summary"),
        ("synccheck", "", 0, None, "without a summary"),
        ("memcheck", MEMCHECK_CLEAN, None, None, "stopped at its limit"),
        ("memcheck", "========= Error: Device not supported\n", 255, None, "not supported"),
    ],
)
def test_what_the_sanitizer_says(tool, output, status, errors, detail):
    verdict = sanitizer.read(tool, output, status)
    assert verdict.errors == errors and detail in verdict.detail
    assert verdict.clean == (errors == 0)
    assert verdict.unavailable == ("not supported" in output)


def test_warnings_are_counted_and_are_no_errors():
    verdict = sanitizer.read("racecheck", RACECHECK.format(2, 0, 2), 0)
    assert (verdict.errors, verdict.warnings) == (0, 2)


def sanitizer_program(folder, monkeypatch, body):
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_sanitizer_stage(place, monkeypatch):
    sanitizer_program(
        place.folder, monkeypatch, f"echo '{RACECHECK.format(0, 0, 1).strip()}'; echo $2 $6"
    )
    result = stages.sanitize(place, 30.0)
    assert result.verdict == OK
    assert result.detail.startswith("memcheck clean (1 warnings); racecheck clean")
    # A tool that finds something fails the stage, whatever the others say.
    sanitizer_program(
        place.folder,
        monkeypatch,
        "if [ $2 = racecheck ]; then echo RACECHECK SUMMARY: 1 hazards displayed '(1 errors, 0 "
        "warnings)'; exit 99; fi; echo ERROR SUMMARY: 0 errors",
    )
    assert stages.sanitize(place, 30.0).verdict == FAILED
    sanitizer_program(place.folder, monkeypatch, "echo Device not supported; exit 1")
    assert stages.sanitize(place, 30.0).verdict == UNAVAILABLE
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    result = stages.sanitize(place, 30.0)
    assert (result.verdict, result.detail) == (UNAVAILABLE, "no compute-sanitizer on this machine")


@pytest.mark.parametrize(
    ("statuses", "verdict", "words"),
    [
        ((0, 0), OK, "kernel units by nvcc"),
        ((1,), FAILED, "what it said"),
        ((0, 1), FAILED, "nvcc's kernels, so they come at first use: what it said"),
        ((0, None), FAILED, "nvcc's kernels, so they come at first use: stopped at its limit"),
    ],
)
def test_the_module_is_built_before_nvcc_is_tried(place, monkeypatch, statuses, verdict, words):
    asked, left = [], list(statuses)

    def run(command, limit_s, environment):
        asked.append(environment["CMAKE_ARGS"])
        return Finished(left.pop(0), "what it said", 1.0)

    monkeypatch.setattr(place.runner, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvcc")
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    result = stages.build(place, 60.0)
    assert result.verdict == verdict and words in result.detail
    assert asked == ["-DRINGCOMM_CUDA=OFF", "-DRINGCOMM_CUDA=sm_90a"][: len(statuses)]


TESTS = """
import os, time
import pytest

def test_right(record_property):
    record_property("us per call", 4.5)

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


def noted(folder, body, *options):
    (folder / "test_it.py").write_text(body)
    notes = folder / "notes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), noting.NOTES_VARIABLE: str(notes)}
    subprocess.run(
        [*command, "-p", "tools.gpu_check.noting", "test_it.py"],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
    )
    return noting.read(notes)


@pytest.mark.parametrize(
    ("value", "ending", "options"),
    [
        (1, "pass", ()),
        (2, "os.kill(os.getpid(), 9)", ()),
        (2, "time.sleep(600)", ("--timeout=1", "--timeout-method=thread")),
    ],
)
def test_what_tests_noted_is_read_back(tmp_path, value, ending, options):
    run = noted(tmp_path, TESTS.format(value=value, ending=ending), *options)
    assert run.skipped == 1 and run.figures == {"us per call": "4.5"}
    if value == 1:
        assert (run.passed, run.failed, run.unended) == (4, (), ())
        return
    assert run.passed == 1
    assert run.failed == ("test_it.py::test_wrong", "test_it.py::test_of_a_broken_end")
    assert run.unended == ("test_it.py::test_ended",)
    assert run.summary == "1 passed, 2 failed, 1 skipped, 1 without an end"


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    assert noting.read(tmp_path / "none").summary == "0 passed, 0 failed, 0 skipped"
    (tmp_path / "notes").write_text('{"began": "a"}\n{"ended": "a", "outc')
    assert noting.read(tmp_path / "notes").unended == ("a",)


@pytest.fixture
def marked(place, monkeypatch):
    """Writes a file with tests that have the mark."""
    monkeypatch.setattr(stages, "TEST_FOLDERS", (".",))
    (place.folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Every test of these has a pytest of its own, most of whose start would be plugins.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    place.runner = Runner(place.folder, place.folder / "log", os.environ)

    def write(name, *bodies):
        head = "import os, time\nimport pytest\npytestmark = pytest.mark.gpu\n"
        tests = [f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies)]
        (place.folder / name).write_text(head + "".join(tests))

    return write


def test_the_test_stage_needs_tests_that_ran(place, marked):
    marked("test_it.py", "pass")
    result = stages.test(place, 60.0)
    assert (result.verdict, result.detail) == (OK, "1 passed, 0 failed, 0 skipped")
    marked("test_it.py", "pytest.skip('no GPU')")
    result = stages.test(place, 60.0)
    assert result.verdict == FAILED and "nothing passed" in result.detail
    # A file that cannot be read is missed, and the others go on.
    (place.folder / "test_broken.py").write_text("import nothing_of_that_name")
    marked("test_it.py", "assert False", "pass")
    result = stages.test(place, 60.0)
    assert result.verdict == FAILED and "the list of tests: " in result.detail
    assert "1 passed, 1 failed" in result.detail and "first: test_it.py::test_0" in result.detail


def test_a_file_that_dies_takes_no_other_along_and_triton_is_last(place, marked):
    marked("test_triton_a.py", "pass")
    marked("test_b.py", "pass", "os._exit(0)", "pass")
    marked("test_c.py", "pass", "os.kill(os.getpid(), 11)")
    saved = []
    place.saver = lambda results: saved.append(results[-1].data["summary"])
    result = stages.test(place, 90.0)
    assert result.verdict == FAILED
    assert result.data["failed"] == ["test_b.py::test_1", "test_c.py::test_1"]
    lines = (place.folder / stages.NOTES_NAME).read_text().splitlines()
    began = [json.loads(line).get("began", "").partition("::")[0] for line in lines]
    assert list(dict.fromkeys(filter(None, began))) == [
        "test_b.py",
        "test_c.py",
        "test_triton_a.py",
    ]
    # Recorded as it went.
    assert saved == [
        f"{n} passed, 0 failed, 0 skipped, {unended} without an end"
        for n, unended in ((1, 1), (2, 2), (3, 2))
    ]


class Hanging:
    """A runner whose test files pass one test and hang in the next, but for ``test_good.py``."""

    def __init__(self, root):
        self.root = root

    def run(self, command, limit_s, environment=None):
        (file,) = (each for each in command if each.endswith(".py"))
        hangs = file != "test_good.py"
        noted = [
            {"began": f"{file}::0"},
            {"ended": f"{file}::0", "outcome": "passed", "figures": {}},
        ]
        with Path(environment[noting.NOTES_VARIABLE]).open("a") as notes:
            for each in [*noted, *([{"began": f"{file}::1"}] if hangs else [])]:
                notes.write(json.dumps(each) + "\n")
        if hangs:
            time.sleep(limit_s)
        return Finished(None if hangs else 0, "", limit_s)


@pytest.fixture
def hanging(place, monkeypatch):
    place.runner = Hanging(place.folder)
    files = ["test_a.py", "test_good.py"]
    monkeypatch.setattr(stages, "_test_files", lambda place, limit: (files, ""))
    monkeypatch.setattr(stages, "_LEAST_FILE_S", 0.3)


def test_files_without_time_are_named(place, hanging):
    result = stages.test(place, 0.5)
    assert result.verdict == PARTIAL, result.detail
    assert result.data["left out"] == ["the rest of test_a.py", "test_good.py"]
    assert result.data["failed"] == []
    assert "no time left for the rest of test_a.py, test_good.py" in result.detail


def test_a_file_that_takes_too_long_leaves_time_to_the_others(place, hanging, monkeypatch):
    monkeypatch.setattr(stages, "_FILE_LIMIT_S", 0.1)
    result = stages.test(place, 60.0)
    assert result.verdict == FAILED and "test_a.py: stopped after 0 s" in result.detail
    assert result.data["failed"] == ["test_a.py::1"]
    assert result.data["summary"] == "2 passed, 0 failed, 0 skipped, 1 without an end"


def test_every_measurement_is_a_command_that_the_harness_takes():
    for one in benches.plan((2, 30, 0)):
        options = parse(one.arguments)
        assert options.device == "cuda" and options.tensors == "heap"
        assert one.limit_s <= 60
    assert len(benches.plan((2, 30, 0))) == len(benches.plan((2, 29, 9))) + 2
    assert len({one.name for one in benches.plan((2, 30, 0))}) == 7
    worlds = {parse(one.arguments).ranks for one in benches.plan(())}
    assert worlds == {2, 4, 8}


def test_every_measurement_of_the_optimizer_is_a_command_too():
    plan = benches.optimizer_plan()
    assert [one.name for one in plan] == [
        "adamw_shard",
        *(f"adamw_step, {world} ranks" for world in (2, 8)),
        *(f"training, {world} ranks" for world in (1, 2)),
        "adamw_step, 4 ranks",
    ]
    for one in (each for each in plan if each.module == "ringcomm.bench.training"):
        trained = training.parse(list(one.arguments))
        assert (trained.device, one.name) == ("cuda", f"training, {trained.ranks} ranks")
    for one in (each for each in plan if each.module != "ringcomm.bench.training"):
        asked = device_steps.parse(list(one.arguments))
        assert (asked.dtype, asked.millions) == ("bfloat16", 256)
        assert one.module == "ringcomm.bench.device_steps" and one.limit_s <= 30
        assert asked.what == "shard" or f"{asked.ranks} ranks" in one.name


HARNESS = """
import pathlib, shutil, sys
path = sys.argv[sys.argv.index("--json") + 1]
if "--graph" not in sys.argv:
    shutil.copyfile("report.json", path)
sys.exit({status} if "processes-on-one-gpu" in sys.argv else 0)
"""


def make_harness(root: Path) -> Path:
    """The folder of a package ringcomm.bench below ``root``, which holds nothing yet."""
    folder = root / "ringcomm" / "bench"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    return folder


def test_the_bench_stage_goes_on_after_a_run_that_fails(place, monkeypatch):
    harness = make_harness(place.folder)
    script = harness / "collectives.py"
    a_row = Row("all_gather", 64, 16, "float", "none", -1, 2, "ringcomm", "out", 10.0, wrong=0)
    report: dict[str, Any] = {"schema": 1, "provenance": {}, "rows": [vars(a_row)]}
    (place.folder / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr(benches, "plan", lambda version: [benches.sweep(2), benches.processes(2)])
    script.write_text(HARNESS.format(status=1))
    result = stages.bench(place, 60.0)
    # NCCL's run may fail; what it had measured is kept, and the failure is said.
    assert result.verdict == OK and len(result.data["reports"]) == 2
    assert "processes on one GPU, 2 ranks: no output" in result.detail
    report["rows"][0]["wrong"] = 4
    (place.folder / "report.json").write_text(json.dumps(report))
    assert stages.bench(place, 60.0).verdict == FAILED
    monkeypatch.setattr(benches, "plan", lambda version: [benches.small()])
    (place.folder / "bench-0.json").unlink()
    assert stages.bench(place, 60.0).verdict == FAILED


def test_the_steps_stage_runs_the_optimizers_program(place, monkeypatch):
    harness = make_harness(place.folder)
    script = harness / "device_steps.py"
    script.write_text(HARNESS.format(status=0))
    (harness / "training.py").write_text(HARNESS.format(status=0))
    report: dict[str, Any] = {"schema": 1, "provenance": {}, "rows": []}
    (place.folder / "report.json").write_text(json.dumps(report))
    result = stages.steps(place, 60.0)
    assert (result.name, result.verdict, len(result.data["reports"])) == ("steps", OK, 6)
    # What one of them has cost is not left for the next ones.
    assert "no time left" in stages.steps(place, 0.5).detail
    script.write_text("import sys; sys.exit('too little memory')")
    for file in place.folder.glob("steps-*.json"):
        file.unlink()
    result = stages.steps(place, 60.0)
    assert result.verdict == FAILED and "adamw_shard: too little memory" in result.detail


def test_the_makefile_has_the_target():
    makefile = (ROOT / "Makefile").read_text()
    assert "\ngpu-check:\n" in makefile and "-m tools.gpu_check" in makefile
    assert "$(if $(REHEARSE),--rehearse)" in makefile
