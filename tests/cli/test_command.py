# SPDX-License-Identifier: Apache-2.0
"""The ``ringcomm`` command: its dispatcher, and ``ringcomm doctor``."""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringcomm import __main__ as entry
from ringcomm import cli
from ringcomm.cli import doctor
from ringcomm.cli.doctor import FAIL, NOTE, OK, Finding
from ringcomm.errors import HeapError
from ringcomm.launch import end_at_ctrl_c
from tests.bench.programs import run_program
from tests.support import ROOT, fork_server

INTERRUPTED_IMPORT = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    raise TypeError("expected a message argument")
"""
MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: {} kB\n"


@pytest.fixture
def command(monkeypatch):
    """Registers a subcommand "probe"; returns its module for the test to fill."""
    module: Any = ModuleType("ringcomm.cli.probe")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Entry("a probe"))
    module.add_arguments = lambda parser: parser.add_argument("--level", type=int, default=1)
    return module


def test_help_names_every_subcommand_and_loads_none():
    done = run_program("ringcomm", "--help", anew=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)
    probe = "import sys; from ringcomm.cli import main; main(['-h'])"
    loads = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {probe}"
    assert run_program("timeit", "-n1", "-r1", loads, anew=True).stdout.splitlines()[-1] == "False"


def test_a_dependency_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ringcomm.cli.doctor")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().err
    missing = "torch, which is not installed here: pip install torch"
    assert said == f"ringcomm doctor needs {missing}\n"
    # A missing module that is not a requirement is a bug, so its exception is raised.
    monkeypatch.setattr(cli, "REQUIRED", ())
    with pytest.raises(ModuleNotFoundError, match="torch"):
        cli.main(["doctor"])


def test_each_dependency_of_the_package_would_be_named():
    """Reads pyproject.toml, because the installed metadata may be older than the tree."""
    listed = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert listed is not None
    assert set(re.findall(r'"(\w+)', listed[1])) == set(cli.REQUIRED)


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2.3 of {name}")
    with pytest.raises(SystemExit) as ending:
        cli.main(["--version"])
    assert ending.value.code == 0
    assert capsys.readouterr().out == "ringcomm 1.2.3 of ringcomm\n"


def test_an_unknown_subcommand_is_refused_with_the_known_ones():
    done = run_program("ringcomm", "trian")
    assert done.returncode == 2
    assert "'trian'" in done.stderr and "train" in done.stderr


def test_no_subcommand_prints_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("lines", [1, 100_000], ids=["held back", "written at once"])
def test_output_that_nobody_reads_ends_a_command_as_the_signal_does(command, monkeypatch, lines):
    command.run = lambda args: print("line\n" * lines) or 0
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["probe"]) == 128 + signal.SIGPIPE


def test_another_broken_pipe_is_an_error(command):
    def run(args):
        raise BrokenPipeError

    command.run = run
    with pytest.raises(BrokenPipeError):
        cli.main(["probe"])


def test_options_reach_the_subcommand_and_its_status_comes_back(command):
    command.run = lambda args: args.level
    assert cli.main(["probe", "--level", "7"]) == 7


def test_an_error_of_ringcomm_is_a_message_and_status_1(command, monkeypatch):
    def run(args):
        raise HeapError("no room: set RINGCOMM_HEAP_BYTES")

    writes: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=writes.append))
    command.run = run
    assert cli.main(["probe"]) == 1
    # One write, so that no other rank's line can come between its parts.
    assert writes == ["ringcomm probe: no room: set RINGCOMM_HEAP_BYTES\n"]


def test_ctrl_c_is_status_130(command):
    def run(args):
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["probe"]) == 130


@pytest.mark.parametrize("words", [["ringcomm", "metrics"], ["ringcomm.bench", "--help"]])
def test_ctrl_c_during_an_import_is_silent(tmp_path, words):
    # A stand-in for torch, whose C++ code turns KeyboardInterrupt into another error.
    (tmp_path / "torch.py").write_text(INTERRUPTED_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("interrupted", ["import", "call"])
def test_ctrl_c_around_the_command_is_status_130(monkeypatch, interrupted):
    def main():
        raise KeyboardInterrupt

    module: Any = ModuleType("ringcomm.cli")
    if interrupted == "call":
        module.main = main
    else:
        module.__getattr__ = lambda name: main()  # as if the import were interrupted
    monkeypatch.setitem(sys.modules, "ringcomm.cli", module)
    assert entry.main() == 130


def test_ctrl_c_is_an_exception_after_the_import():
    before = signal.getsignal(signal.SIGINT)
    with end_at_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_bench_hands_its_options_on():
    done = run_program("ringcomm", "bench", "--help")
    assert done.returncode == 0 and "--minbytes" in done.stdout
    done = run_program("ringcomm", "bench", "-b", "many")
    assert done.returncode == 2 and "'many' is not a size" in done.stderr


def test_doctor_finds_this_machine_well():
    done = run_program("ringcomm", "doctor")
    assert done.returncode == 0, done.stdout
    for name in ("python", "torch", "native module", "cores", "memory", "heap", "self-test"):
        assert f"ok    {name} " in done.stdout or f"note  {name} " in done.stdout
    assert done.stdout.endswith("collectives can work here\n")


def test_doctor_fails_when_a_check_fails(monkeypatch, capsys):
    broken = Finding("peer memory", FAIL, "does not open", "mount /proc without hidepid")
    monkeypatch.setattr(doctor, "check_descriptor_paths", lambda: broken)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "collectives cannot work here: peer memory, self-test" in out
    assert "-> mount /proc without hidepid" in out


def test_doctor_names_a_heap_that_cannot_be_made():
    environment = {"RINGCOMM_HEAP_DIR": "/nonexistent"}
    done = run_program("ringcomm", "doctor", "--no-self-test", environment=environment)
    assert done.returncode == 1
    assert "cannot work here: heap" in done.stdout and "/nonexistent" in done.stdout


def test_doctor_reports_ranks_that_fail(monkeypatch):
    monkeypatch.setenv("RINGCOMM_HEAP_BYTES", "lots")
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)
    finding = doctor.check_self_test()
    assert finding.verdict == FAIL and "lots" in finding.value


def test_little_memory_is_noted():
    assert doctor.check_memory(MEMINFO.format(4 << 20), None).verdict == OK
    assert doctor.check_memory(MEMINFO.format(1 << 20), None).verdict == NOTE
    limited = doctor.check_memory(MEMINFO.format(4 << 20), 1 << 30)
    assert limited.verdict == NOTE and "1.0 GiB" in limited.value


def test_a_kernel_without_huge_pages_is_noted(monkeypatch):
    stats = {"capacity_bytes": 1 << 30, "huge_bytes": 0}
    monkeypatch.setattr("ringcomm.heap_stats", lambda: stats)
    finding = doctor.check_heap("always [never]\n")
    assert (finding.verdict, finding.value) == (NOTE, "memfd, up to 1.0 GiB, 4 KiB pages only")
    assert finding.advice.endswith("shmem_enabled is always [never]")
    stats["huge_bytes"] = 32 << 20
    assert doctor.check_heap("").verdict == OK


def test_the_report_is_aligned():
    findings = [Finding("a", OK, "fine"), Finding("longer", FAIL, "bad", "mend it")]
    assert doctor.lines(findings) == [
        "ok    a       fine",
        "FAIL  longer  bad",
        "              -> mend it",
    ]
