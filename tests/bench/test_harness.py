# SPDX-License-Identifier: Apache-2.0
"""The harness as a program, with its own ranks, with torchrun's, and with every system here."""

import importlib.util
import platform
import shutil
import sys
from pathlib import Path

import pytest

from ringcomm.bench.report import read
from ringcomm.cli.progress import TERMINAL_VARIABLE
from tests.bench.programs import run_program
from tests.support import ROOT

QUANTIZED = "ringcomm:int8"  # sums between nodes, which ranks of this machine simulate
SMALL = ("-b", "4K", "-e", "16K", "-f", "4", "-r", "2", "-w", "1", "--batch", "2")
HAS_MPI = importlib.util.find_spec("mpi4py") and (Path(sys.executable).parent / "mpiexec").exists()
HAS_COMPILER = platform.machine() == "x86_64" and shutil.which("c++")


def run_bench(*arguments, **how):
    return run_program("ringcomm.bench", *SMALL, *arguments, **how)


def check_rows(path, systems, names):
    report = read(path)
    assert {row.system for row in report.rows} == set(systems)
    assert {row.collective for row in report.rows} == set(names)
    timed = [row for row in report.rows if row.time_us is not None]
    assert {(row.system, row.collective) for row in timed} == {
        (system, name) for system in systems for name in names
    }
    assert all(row.wrong == 0 and row.rounds == 2 and row.batch == 2 for row in timed)
    compared = [row for row in timed if row.system != systems[0]]
    assert all(row.ratio is not None for row in compared)
    assert all(row.busbw_gbps is not None and row.busbw_gbps > 0 for row in timed)
    return report


def test_gloo_in_ranks_of_its_own(tmp_path):
    names = ("reduce_scatter", "broadcast", "send_recv")
    outputs = ("--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv"))
    done = run_bench(*names, "--subject", "gloo", "--peers", "", "--ranks", "2", *outputs)
    assert done.returncode == 0, done.stderr
    report = check_rows(tmp_path / "r.json", ["gloo"], names)
    assert read(tmp_path / "r.csv") == report
    assert "0 wrong elements" in done.stdout
    assert str(tmp_path) not in (tmp_path / "r.json").read_text()


@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpich: pip install mpi4py mpich")
def test_ringcomm_gloo_and_mpi_in_one_run(tmp_path):
    names = ("reduce_scatter", "all_gather", "all_reduce")
    path = str(tmp_path / "r.csv")
    files = ("--json", path + ".json", "--csv", path)
    # The ranks of mpiexec have pipes as output, which here lead to a terminal.
    terminal = {TERMINAL_VARIABLE: "stderr:80"}
    done = run_bench(*names, "--peers", "gloo,mpi", *files, environment=terminal)
    assert done.returncode == 0, done.stderr
    assert "ringcomm bench: 6 cases, about " in done.stderr
    assert "ringcomm bench: case 6 of 6, about " in done.stderr and "\x1b[K" in done.stderr
    check_rows(path, ["ringcomm", "gloo", "mpi"], names)


def test_without_mpi_the_defaults_measure_gloo(tmp_path):
    # Every interpreter imports it at its start, also the ranks' interpreters.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mpi4py'] = None\n")
    path = tmp_path / "r.json"
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run_bench("all_reduce", "--json", str(path), environment=environment, anew=True)
    assert done.returncode == 0, done.stderr
    told = (done.stdout + done.stderr).splitlines()
    assert told.count("note: MPI is left out: no mpi4py (pip install mpi4py mpich)") == 1
    check_rows(path, ["ringcomm", "gloo"], ["all_reduce"])


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler on x86-64")
def test_ringcomm_and_the_bare_loop(tmp_path):
    names = ("reduce_scatter", "all_gather", "all_reduce")
    path = str(tmp_path / "r.json")
    how = ("--peers", "bare", "--tensors", "heap", "-d", "bfloat16")
    done = run_bench(*names, *how, "--json", path)
    assert done.returncode == 0, done.stderr
    check_rows(path, ["ringcomm", "bare"], names)


def test_torchrun_starts_the_ranks_and_the_backend_is_called(tmp_path):
    path = str(tmp_path / "r.json")
    command = (
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "-m",
        "ringcomm.bench",
        "collectives",
        *SMALL,
    )
    how = ("--peers", "gloo", "--api", "dist", "--json", path)
    done = run_program(*command, "all_gather", "all_reduce", *how)
    assert done.returncode == 0, done.stderr
    report = check_rows(path, ["ringcomm", "gloo"], ("all_gather", "all_reduce"))
    assert {row.ranks for row in report.rows} == {3}


def test_mpi_is_refused_under_torchrun():
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run_bench("--peers", "mpi", environment=environment)
    assert done.returncode == 2
    assert "must be started by mpiexec" in done.stderr


def test_a_root_that_is_no_rank_ends_all_ranks():
    done = run_bench("broadcast", "--subject", "gloo", "--peers", "", "--root", "2")
    assert done.returncode == 2
    assert "--root 2: no such rank among 2" in done.stderr


def test_two_ranks_stand_for_two_nodes(tmp_path):
    names = ("all_gather", "all_reduce", "reduce_scatter")
    how = (
        "--nodes",
        "2",
        "--tensors",
        "heap",
        "--placement",
        "usual",
        "--peers",
        f"gloo,{QUANTIZED}",
    )
    pace = ("-b", "16K", "-e", "16K", "-r", "2", "-w", "0", "--batch", "1")
    path = tmp_path / "r.json"
    done = run_program("ringcomm.bench", *names, *how, *pace, "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = read(path).rows
    assert {(row.nodes, row.ranks, row.size_bytes) for row in rows} == {(2, 2, 16384)}
    found = [(row.collective, row.system, row.wrong, row.time_us is None) for row in rows]
    assert found == [
        (
            name,
            system,
            None if system == QUANTIZED else 0,
            (name, system) == ("all_gather", QUANTIZED),
        )
        for name in names
        for system in ("ringcomm", "gloo", QUANTIZED)
    ]


def test_nodes_have_as_many_ranks_as_each_other():
    done = run_program("ringcomm.bench", "--nodes", "2", "--ranks", "3", "--peers", "gloo")
    assert done.returncode == 2 and "as many ranks as each other" in done.stderr
