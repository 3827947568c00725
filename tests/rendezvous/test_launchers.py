# SPDX-License-Identifier: Apache-2.0
"""Launchers start ranks on two nodes as users would; the ranks meet and sum."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, lab
from tests.support.lab import Lab
from tests.support.launchers import NOT_PASSED, SLURM_TOOLS, RemoteShell, start_slurm

LIMIT_S = 60
NODES = 2
# Ranks are forks that have torch; if this variable is set, they are new interpreters.
REAL = "RINGCOMM_REAL_LAUNCHES"

PROGRAM = """
import os, sys, torch, ringcomm
from ringcomm.rendezvous.launchers import read_environment
comm = ringcomm.Communicator.from_env(timeout=60)
tensor = torch.full((1000,), comm.rank + 1.0)
comm.all_reduce(tensor)
ringcomm.init_process_group(timeout=60)
ringcomm.all_reduce(tensor)
launched = read_environment()
sys.stdout.write(
    f"rank {comm.rank} of {comm.world_size} on {os.uname().nodename} by {launched.launcher}: "
    f"{tensor[999].item():g}, {comm.node.world_size} and {launched.local_world_size} here\\n"
)
ringcomm.barrier()
"""


def said(world: int, launcher: str) -> list[str]:
    per_node = world // NODES
    total = world * world * (world + 1) // 2
    return [
        f"rank {rank} of {world} on node{rank // per_node} by {launcher}: {total}, {per_node} and "
        f"{per_node} here"
        for rank in range(world)
    ]


@pytest.fixture(scope="module")
def two_nodes():
    lab.require()
    with Lab(NODES) as made:
        yield made


@pytest.fixture(scope="module")
def shell(two_nodes, tmp_path_factory):
    made = RemoteShell(two_nodes, tmp_path_factory.mktemp("shell"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


def environment(**variables: str) -> dict[str, str]:
    return {
        **dict.fromkeys(NOT_PASSED, ""),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def check(done: subprocess.CompletedProcess[str], launcher: str, world: int = 4) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"rank .* here", done.stdout)
    assert sorted(lines) == said(world, launcher), done.stdout + done.stderr


def finish(processes: list[Any]) -> subprocess.CompletedProcess[str]:
    """Waits for the launchers, one on each node; returns their joined output."""
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    return subprocess.CompletedProcess("", max(map(abs, codes)), "".join(outputs), "")


def on_each_node(
    made: Lab, commands: list[list[str]], variables: Sequence[Mapping[str, str]]
) -> subprocess.CompletedProcess[str]:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pairs = enumerate(zip(commands, variables, strict=True))
    return finish([made.popen(node, command, env, **streams) for node, (command, env) in pairs])


# ---- torchrun -----------------------------------------------------------------------------------


def torchrun(made: Lab, node: int, rendezvous: str, *words: str) -> list[str]:
    port = made.next_port() if node == 0 else made._port
    where = {
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint={made.address(0)}:{port}"],
        "static": [
            *(f"--node-rank={node}", f"--master-addr={made.address(0)}", f"--master-port={port}")
        ],
    }[rendezvous]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}"]
    return [*command, "--nproc-per-node=2", *where, *words]


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun(two_nodes, program, rendezvous):
    commands = [torchrun(two_nodes, node, rendezvous, str(program)) for node in range(NODES)]
    done = on_each_node(two_nodes, commands, [environment()] * NODES)
    if rendezvous == "c10d":  # numbers the nodes in the order of their arrival
        done.stdout = done.stdout.replace("on node0", "on node?").replace("on node1", "on node?")
        assert done.returncode == 0, done.stdout
        wanted = [re.sub(r"node\d", "node?", line) for line in said(4, "torchrun")]
        assert sorted(re.findall(r"rank .* here", done.stdout)) == wanted, done.stdout
    else:
        check(done, "torchrun")


# A rank of the second node dies in the first attempt. The first node's agent only sees that another
# agent has joined again, and counts no restart: it tells its ranks of no earlier attempt.
DIES = """
import os, pathlib, signal, sys, time, torch, ringcomm
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
comm = ringcomm.Communicator.from_env(timeout=30)
tensor = torch.full((1000,), 1.0)
comm.all_reduce(tensor)
folder = pathlib.Path(sys.argv[1])
is_first = not (folder / "died").exists()
comm.barrier()
if is_first:
    (folder / f"waits{comm.rank}").touch()
    if os.environ["LOCAL_RANK"] == "1" and os.uname().nodename == "node1":
        # A rank that is still in the barrier would fail, too, and its agent would count a restart.
        while len([*folder.glob("waits*")]) < comm.world_size:
            time.sleep(0.01)
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
sys.stdout.write(f"rank {comm.rank} after {attempt}: {tensor[999].item():g}\\n")
comm.barrier()
"""


def test_torchrun_starts_all_ranks_again(two_nodes, tmp_path):
    path = tmp_path / "dies.py"
    path.write_text(DIES)
    words = ["--max-restarts=1", "--monitor-interval=0.05", str(path), str(tmp_path)]
    first, *options = torchrun(two_nodes, 0, "c10d")
    options += words
    done = on_each_node(two_nodes, [[first, *options]] * NODES, [environment()] * NODES)
    assert done.returncode == 0, done.stdout
    lines = sorted(re.findall(r"rank (\d) after (\d): 4", done.stdout))
    assert [rank for rank, _ in lines] == ["0", "1", "2", "3"], done.stdout
    assert {attempt for _, attempt in lines} == {"0", "1"}, "this test no longer shows the trap"


# ---- only RANK, WORLD_SIZE and MASTER_* ---------------------------------------------------------


def test_an_address_and_numbers_alone(two_nodes, program):
    """One rank per pod, as Kubernetes training operators start them."""
    port = str(two_nodes.next_port())
    variables_of_rank_0 = {"MASTER_ADDR": "node0", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    variables = [environment(**variables_of_rank_0, RANK=str(rank)) for rank in range(NODES)]
    done = on_each_node(two_nodes, [[sys.executable, "-u", str(program)]] * NODES, variables)
    done.stdout = done.stdout.replace("1 and 2 here", "1 and 1 here")  # no variable says how many
    check(done, "torchrun", 2)


# ---- mpirun and srun ----------------------------------------------------------------------------


def rank_command(shell: RemoteShell, program: Path) -> list[str]:
    if os.environ.get(REAL):
        return [sys.executable, str(program)]
    return shell.rank(str(program))


def open_mpi() -> str:
    for name in ("mpirun.openmpi", "mpirun"):
        found = shutil.which(name)
        if (
            found
            and "Open MPI" in subprocess.run([found, "-V"], capture_output=True, text=True).stdout
        ):
            return found
    pytest.skip("Open MPI is not installed (apt-get install openmpi-bin)")


def hydra() -> str:
    found = shutil.which("mpiexec.hydra", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("MPICH is not installed (pip install '.[bench]')")
    return found


def test_open_mpi(two_nodes, shell, program):
    command = [open_mpi(), "--allow-run-as-root", "-H", "node0:2,node1:2", "-n", "4"]
    command += ["--mca", "plm_rsh_agent", str(shell.path), "-x", "PYTHONPATH"]
    command += rank_command(shell, program)
    check(two_nodes.command(0, command, LIMIT_S, env=environment()), "Open MPI")


def test_mpich(two_nodes, shell, program):
    command = [hydra(), "-launcher", "rsh", "-launcher-exec", str(shell.path)]
    command += ["-hosts", "node0,node1", "-ppn", "2", "-n", "4"]
    command += ["-genv", "MASTER_ADDR", "node0", "-genv", "MASTER_PORT", str(two_nodes.next_port())]
    command += rank_command(shell, program)
    check(two_nodes.command(0, command, LIMIT_S, env=environment()), "MPICH")


def test_slurm(two_nodes, shell, program, tmp_path):
    missing = [tool for tool in SLURM_TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm)")
    told = start_slurm(two_nodes, tmp_path / "slurm")
    command = ["srun", f"-N{NODES}", "--ntasks-per-node=2", *rank_command(shell, program)]
    check(two_nodes.command(0, command, LIMIT_S, env=environment(**told)), "Slurm")
