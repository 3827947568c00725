"""Ranks: started by the harness itself, or found where torchrun or mpiexec started them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from .busy import busy_loops
from .report import PROCESSES

_STORE_FILE = "RINGCOMM_BENCH_STORE"
_MPI_PLACE = ("PMI_RANK", "PMI_SIZE")
_POLL_S = 0.05
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_NO_MPI = (
    "no {}: MPI needs mpi4py and MPICH, which pip install 'ringcomm[bench]' brings; "
    "--peers gloo does without"
)
# The wheels of MPICH and of Intel MPI hold files of the same names.
_NO_IMPI = (
    "Intel MPI wants an environment of its own beside mpich: python -m venv impi, "
    "impi/bin/pip install impi-rt, and I_MPI_ROOT=impi; {}"
)


class LaunchError(Exception):
    """The ranks cannot be started or joined as asked; the text says what to do."""


@dataclass(frozen=True)
class Wanted:
    """The ranks of a run.

    Attributes:
        ranks: their number; None: however many a launcher has started.
        systems: the systems under test: MPI needs a launcher of its own.
        busy: processes that compute beside the ranks.
        nodes: the nodes that ranks of this machine stand for.
        on_nodes: the ranks may be on several machines.
    """

    ranks: int | None = None
    systems: Sequence[str] = ()
    busy: int = 0
    nodes: int = 1
    on_nodes: bool = False


@dataclass(frozen=True)
class Placing:
    """This process's place among the ranks and the store that all of them share.

    In the mode "one-launch" the process is all ``world`` ranks, and ``rank`` is 0.
    """

    rank: int
    world: int
    store: dist.Store
    mode: str = PROCESSES


def started_by(environment: Mapping[str, str]) -> str | None:
    """ "torchrun", "mpiexec" or "harness" in a rank; None in the process a user started."""
    if _STORE_FILE in environment:
        return "harness"
    if "PMI_RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment:
        return "mpiexec"
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    return None


def join(wanted: Wanted) -> Placing:
    """Finds this rank's place. Raises :class:`LaunchError` where the bench cannot run there."""
    how = started_by(os.environ)
    if how == "harness":
        return placed()
    if wanted.busy:
        raise LaunchError(
            "--busy: run the harness alone, which then starts its ranks as equals of the loops"
        )
    if how == "mpiexec":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        # The store is rank 0's, and the others call it.
        hosted = _store(None, comm.size) if comm.rank == 0 else None
        port = comm.bcast(hosted.port if hosted else 0)
        place = Placing(comm.rank, comm.size, hosted or _store(port, comm.size))
    else:
        place = _join_torchrun(wanted)
    if wanted.ranks not in (None, place.world):
        told = f"{how} started {place.world} ranks; leave the option out"
        raise LaunchError(f"--ranks {wanted.ranks}: {told}")
    return place


def placed() -> Placing:
    """Finds the place of a rank that the harness started, and ties its life to the harness's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    rank = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
    world = int(os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return Placing(rank, world, dist.FileStore(os.environ[_STORE_FILE], world))


def _store(port: int | None, world: int) -> dist.TCPStore:
    listens = port is None
    return dist.TCPStore("127.0.0.1", port or 0, world, is_master=listens, wait_for_workers=False)


def _join_torchrun(wanted: Wanted) -> Placing:
    if "mpi" in wanted.systems or "impi" in wanted.systems:
        raise LaunchError(
            "MPI ranks must be started by mpiexec, and torchrun started these: leave mpi out "
            "of --peers, or run the harness alone (it calls mpiexec itself)"
        )
    world = os.environ["WORLD_SIZE"]
    if not wanted.on_nodes and os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        raise LaunchError(
            f"{world} ranks over several machines: this bench compares systems on one machine, "
            "so start it with --nnodes 1"
        )
    store, rank, size = next(dist.rendezvous("env://"))
    return Placing(rank, size, store)


def run_ranks(words: Sequence[str], wanted: Wanted) -> int:
    """Runs a module and its ``words`` in ranks, which find their places with :func:`placed`.

    Waits for them, and returns the exit status. Raises :class:`LaunchError` without mpiexec.
    """
    command, world = _rank_command(words), wanted.ranks or 1
    if "impi" in wanted.systems or "mpi" in wanted.systems:
        mpiexec, environment = _mpiexec(wanted.systems)
        return _run([([mpiexec, "-n", str(world), *command], environment)], wanted.busy)
    places = [_place_of(rank, world, wanted.nodes) for rank in range(world)]
    return _run([(command, place) for place in places], wanted.busy)


def _place_of(rank: int, world: int, nodes: int) -> dict[str, str]:
    """The variables of a rank; ranks that follow each other stand for a node."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    if nodes > 1:
        place["RINGCOMM_NODE_ID"] = f"node {rank * nodes // world}"
    return place


def _rank_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", *words]


def _run(commands: Sequence[tuple[list[str], dict[str, str]]], busy: int) -> int:
    """Runs commands with their own variables; one that fails takes the others with it."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-bench-") as directory:
        # A job that mpiexec started may call the harness; its own place is not that of a rank.
        outside = {key: os.environ[key] for key in os.environ if key not in _MPI_PLACE}
        shared = {**outside, _STORE_FILE: f"{directory}/store"}
        shared.setdefault("OMP_NUM_THREADS", "1")
        started: list[subprocess.Popen[bytes]] = []
        try:
            with busy_loops(busy):
                for command, own in commands:
                    started.append(subprocess.Popen(command, env={**shared, **own}))
                return _wait(started)
        finally:
            _stop(started)


def _mpiexec(systems: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The launcher of the MPI that is asked for, and the variables by which ranks find it."""
    if "impi" in systems and "mpi" in systems:
        raise LaunchError("a process can hold one MPI: mpi and impi need runs of their own")
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(_NO_MPI.format("mpi4py"))
    if "mpi" in systems:
        beside_python = Path(sys.executable).parent / "mpiexec"
        found = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
        if found is None:
            raise LaunchError(_NO_MPI.format("mpiexec"))
        return found, {}
    root = os.environ.get("I_MPI_ROOT", "")
    mpiexec, library = Path(root, "bin", "mpiexec.hydra"), Path(root, "lib", "libmpi.so.12")
    if not root or not mpiexec.exists() or not library.exists():
        told = f"I_MPI_ROOT={root} has no {mpiexec} or no {library}" if root else "it is not set"
        raise LaunchError(_NO_IMPI.format(told))
    # It pins each rank to a core unless told otherwise; --pin pins them for all systems.
    return str(mpiexec), {"MPI4PY_LIBMPI": str(library.resolve()), "I_MPI_PIN": "0"}


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = [process.poll() for process in started]
        failed = [status for status in statuses if status]
        if failed:
            return failed[0] if failed[0] > 0 else 1
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(_POLL_S)


def _stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
