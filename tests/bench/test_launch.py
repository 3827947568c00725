# SPDX-License-Identifier: Apache-2.0
"""Ranks that the harness starts: their numbers, their end, and their cores and threads."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ringcomm.bench.board import Board
from ringcomm.bench.launch import (
    LaunchError,
    Wanted,
    busy_loops,
    find_mpiexec,
    join,
    run_ranks,
)
from tests.bench.programs import run_program
from tests.support import ROOT, fork_server

pytestmark = pytest.mark.deadlines

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def test_ranks_find_their_places_and_one_store(tmp_path, monkeypatch):
    """This works inside an MPI job as well, which has other rank numbers."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)  # forks that have torch loaded
    assert run_ranks(["tests.bench.joining", str(tmp_path)], Wanted(3)) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{rank} of 3" for rank in range(3)]


def test_a_rank_that_fails_takes_the_others_with_it(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert run_ranks(["fails"], Wanted(2)) == 3


def cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_loops_compute_and_end_with_the_block():
    with busy_loops(2) as loops:
        pids = [loop.pid for loop in loops]
        assert [os.getsid(pid) for pid in pids] == pids
        while not all(cpu_ticks(pid) > 1 for pid in pids):
            time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_loops_end_with_a_process_that_is_killed():
    script = (
        "import os, signal\n"
        "from ringcomm.bench.launch import busy_loops\n"
        "with busy_loops(1) as loops:\n"
        "    print(loops[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = fork_server.run([sys.executable, "-c", script], cwd=ROOT)
    path = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 60
    while path.exists() and ") Z " not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not path.exists() or ") Z " in path.read_text()


def test_a_rank_leads_a_session():
    script = (
        "import os\n"
        "from ringcomm.bench.launch import lead_session\n"
        "lead_session()\n"
        "print(os.getsid(0) == os.getpid())\n"
    )
    done = fork_server.run([sys.executable, "-c", script], cwd=ROOT)
    assert done.stdout == "True\n", done.stderr


def test_a_rested_barrier_starts_by_the_clock():
    board = Board(dist.HashStore(), 0, 1)
    begin_ns = time.monotonic_ns()
    board.barrier(rest_s=0.001)
    assert time.monotonic_ns() - begin_ns >= 1_000_000 + 500_000


def test_ranks_run_beside_a_loop(tmp_path):
    path = tmp_path / "r.json"
    small = ("-b", "4K", "-e", "4K", "-r", "2", "-w", "0", "--batch", "2", "--placement", "usual")
    how = ("--subject", "gloo", "--peers", "", "--busy", "1", "--json", str(path))
    done = run_program("ringcomm.bench", "all_reduce", *small, *how)
    assert done.returncode == 0, done.stderr
    assert '"command": "ringcomm bench all_reduce' in path.read_text()
    assert "--busy 1" in path.read_text()


def test_loops_are_refused_where_others_started_the_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(LaunchError, match="run the harness alone"):
        join(Wanted(busy=1))


@pytest.mark.parametrize(
    ("systems", "root", "words"),
    [
        (("mpi", "impi"), None, "a process can hold one MPI: mpi and impi need"),
        (("mpi", "oneccl"), None, "a process can hold one MPI: mpi and oneccl need"),
        (("impi",), None, "I_MPI_ROOT=impi; it is not set"),
        (("impi",), "/nowhere", "I_MPI_ROOT=/nowhere has no /nowhere/bin/mpiexec.hydra"),
        (("oneccl",), "/nowhere", "I_MPI_ROOT=/nowhere has no /nowhere/bin/mpiexec.hydra"),
    ],
)
def test_what_intel_mpi_needs(monkeypatch, systems, root, words):
    pytest.importorskip("mpi4py")
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    if root is not None:
        monkeypatch.setenv("I_MPI_ROOT", root)
    with pytest.raises(LaunchError, match=words):
        run_ranks([], Wanted(2, systems))


def test_mpi_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    told = "no mpi4py: MPI needs .*; install both with pip install mpi4py mpich, or use"
    with pytest.raises(LaunchError, match=told):
        run_ranks([], Wanted(2, ("ringcomm", "mpi")))


def intel_folder(folder, *more):
    """Returns a folder with the files of Intel MPI, and ``more`` of its libraries."""
    for file in ("bin/mpiexec.hydra", "lib/libmpi.so.12", *more):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()
    return str(folder)


def test_oneccl_is_looked_for_beside_intel_mpi(monkeypatch, tmp_path):
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("I_MPI_ROOT", intel_folder(tmp_path))
    assert find_mpiexec(["ringcomm", "impi"])[0] == str(tmp_path / "bin" / "mpiexec.hydra")
    with pytest.raises(LaunchError, match=r"there is no .*/lib/libccl_legacy_cpu\.so"):
        find_mpiexec(["ringcomm", "impi", "oneccl"])
    intel_folder(tmp_path, "lib/libccl_legacy_cpu.so")
    mpiexec, variables = find_mpiexec(["ringcomm", "oneccl"])
    assert mpiexec == str(tmp_path / "bin" / "mpiexec.hydra")
    assert variables["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.12")
