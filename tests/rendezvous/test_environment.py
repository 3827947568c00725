# SPDX-License-Identifier: Apache-2.0
"""The rank of a process, by its launcher; and real launches by torchrun and mpirun."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from ringcomm import ArgumentError, Communicator, RendezvousError
from ringcomm.rendezvous import same_node
from ringcomm.rendezvous.launchers import read_environment
from tests.support import ROOT, fork_server

TIMEOUT_S = 60

SCRIPT = """
import sys, torch, ringcomm
comm = ringcomm.Communicator.from_env(timeout=60)
tensor = torch.full((1000,), comm.rank + 1.0)
comm.all_reduce(tensor)
again = ringcomm.Communicator.from_env(timeout=60)
again.barrier()
group = comm.new_group(range(comm.world_size))
group.barrier()
ringcomm.init_process_group(timeout=60)
ringcomm.barrier()
sys.stdout.write(f"rank {comm.rank} of {comm.world_size}: {tensor[999].item()}\\n")
"""


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}),
        ("torchrun", {"RANK": "2", "WORLD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}),
        ("MPICH", {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}),
        ("MPICH", {"PMI_RANK": "2", "PMI_SIZE": "4", "RANK": "1"}),
        (
            "Open MPI",
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
        ),
        ("Slurm", {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}),
    ],
)
def test_launchers(launcher, variables):
    launched = read_environment(variables)
    assert launched.launcher == launcher
    assert (launched.rank, launched.world_size, launched.local_world_size) == (2, 4, 4)
    assert not launched.has_master
    with_master = {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert read_environment(with_master).has_master


def test_no_launcher_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with Communicator.from_env() as comm:
        assert (comm.rank, comm.world_size) == (0, 1)
        comm.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"PMI_RANK": "-1", "PMI_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
    ],
)
def test_contradictory_variables(variables):
    with pytest.raises(ArgumentError, match="RANK: expected"):
        read_environment(variables)


def test_no_store_at_the_master_address(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ):
        monkeypatch.setenv(name, value)

    def connects(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch's own call may try for twice the timeout")

    monkeypatch.setattr("torch.distributed.TCPStore", connects)
    with pytest.raises(
        RendezvousError, match=f"waited 1 s, .* at .* MASTER_PORT={port}: .* rank 0"
    ):
        Communicator.from_env(timeout=1)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_mpirun(tmp_path):
    mpirun = Path(sys.executable).with_name("mpirun")
    found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("there is no mpirun on this machine")
    root = ["--allow-run-as-root"] if _is_open_mpi(found) and os.geteuid() == 0 else []
    before = _sockets()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [found, *root, "-n", "2", sys.executable, script]
    done = fork_server.run(command, TIMEOUT_S, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: 3.0" in done.stdout
    # Other tests' ranks use the same namespace; their sockets disappear after some time.
    left, deadline = _sockets() - before, time.monotonic() + 60
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= _sockets()
    assert not left


def _sockets() -> set[str]:
    """Returns the names of ringcomm's sockets on this machine, each with the socket's inode."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {" ".join(line.split()[-2:]) for line in lines if "ringcomm-" in line}


def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in version.stdout


def test_rendezvous_on_a_node_without_rank_0():
    with pytest.raises(RendezvousError, match=r"rank 1 of 2: waited 0\.3 s, .* for rank 0"):
        same_node.store_on_node(1, 2, 0.3)


def _listens_at(port: int) -> set[str]:
    """Returns the hexadecimal addresses at which this machine listens on a port."""
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    texts = [each.read_text() for each in tables if each.exists()]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A"]
    return {at.split(":")[0] for at in listening if int(at.split(":")[1], 16) == port}


def test_the_store_of_a_node_listens_on_loopback_only():
    store = same_node.store_on_node(0, 1, 10.0)
    assert isinstance(store, TCPStore)
    loopback = int.from_bytes(socket.inet_aton("127.0.0.1"), sys.byteorder)
    assert _listens_at(store.port) == {f"{loopback:08X}"}


def test_a_store_that_listens_everywhere_is_noticed():
    """torch's own store listens on all addresses, even if it was made for 127.0.0.1."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = _listens_at(store.port)
    assert found and all(set(address) == {"0"} for address in found)


def test_slurm_ranks_find_each_other_by_their_job():
    """Ranks of a Slurm job meet, whichever process started them."""
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}
    assert read_environment(slurm).job == "slurm-77-3"
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert read_environment({**slurm, **torchrun}).job == ""
