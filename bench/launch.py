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
from .modes import PROCESSES
from .options import Options

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
_BUSY_ELSEWHERE = (
    "--busy: run the harness alone, which then starts its ranks as equals of the loops"
)


class LaunchError(Exception):
    """The ranks cannot be started or joined as asked; the text says what to do."""


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


def join(options: Options) -> Placing:
    """Finds this rank's place. Raises :class:`LaunchError` where the systems cannot run."""
    how = started_by(os.environ)
    systems = options.systems
    if options.busy and how != "harness":
        raise LaunchError(_BUSY_ELSEWHERE)
    if how == "torchrun":
        return _join_torchrun(systems)
    if how == "mpiexec":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        hosted = _host_store(None, comm.size) if comm.rank == 0 else None
        port = comm.bcast(hosted.port if hosted else 0)
        return Placing(comm.rank, comm.size, hosted or _host_store(port, comm.size))
    return placed()


def placed() -> Placing:
    """Finds the place of a rank that the harness started, which ends with the harness."""
    _die_with_parent()
    rank = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
    world = int(os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return Placing(rank, world, dist.FileStore(os.environ[_STORE_FILE], world))


def join_processes(ranks: int | None, busy: int) -> Placing:
    """Finds the place of a rank that the harness started, or torchrun on any number of nodes.

    Args:
        ranks: as many as are expected; None: however many there are.
        busy: processes that were to compute beside the ranks.

    Raises:
        LaunchError: torchrun started other ranks than were asked for, or without the loops.
    """
    if started_by(os.environ) == "harness":
        return placed()
    if busy:
        raise LaunchError(_BUSY_ELSEWHERE)
    store, rank, world = next(dist.rendezvous("env://"))
    if ranks not in (None, world):
        raise LaunchError(f"--ranks {ranks}: torchrun started {world} ranks; leave the option out")
    return Placing(rank, world, store)


def _host_store(port: int | None, world: int) -> dist.TCPStore:
    """The store of ranks that a user's mpiexec started: rank 0 listens, the others call."""
    listens = port is None
    return dist.TCPStore("127.0.0.1", port or 0, world, is_master=listens, wait_for_workers=False)


def _die_with_parent() -> None:
    """Has the kernel end this rank when whatever started it is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _join_torchrun(systems: Sequence[str]) -> Placing:
    if "mpi" in systems or "impi" in systems:
        raise LaunchError(
            "MPI ranks must be started by mpiexec, and torchrun started these: leave mpi out "
            "of --peers, or run the harness alone (it calls mpiexec itself)"
        )
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]:
        raise LaunchError(
            f"{os.environ['WORLD_SIZE']} ranks over several machines: the harness compares "
            "systems on one machine, so start it with --nnodes 1"
        )
    store, rank, world = next(dist.rendezvous("env://"))
    return Placing(rank, world, store)


def run_ranks(options: Options, arguments: Sequence[str]) -> int:
    """Starts the ranks of :mod:`.collectives`, waits, and returns the exit status.

    Raises :class:`LaunchError` without mpiexec.
    """
    module, world, systems = f"{__package__}.collectives", options.ranks, options.systems
    rank_command = _rank_command(module, arguments)
    if "impi" in systems:
        command, environment = _intel_mpiexec(options)
        return _run([([*command, "-n", str(world), *rank_command], environment)], options.busy)
    if "mpi" in systems:
        return _run([([_mpiexec(), "-n", str(world), *rank_command], {})], options.busy)
    return run_processes(module, arguments, world, options.busy)


def run_processes(module: str, arguments: Sequence[str], world: int, busy: int = 0) -> int:
    """Runs ``module`` in ``world`` processes, each of which finds its place with :func:`placed`.

    Waits for them, beside ``busy`` loops that compute, and returns the exit status.
    """
    command = _rank_command(module, arguments)
    places = [{"RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    return _run([(command, place) for place in places], busy)


def _rank_command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


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


def _mpiexec() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(_NO_MPI.format("mpi4py"))
    beside_python = Path(sys.executable).parent / "mpiexec"
    found = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError(_NO_MPI.format("mpiexec"))
    return found


def _intel_mpiexec(options: Options) -> tuple[list[str], dict[str, str]]:
    """The launcher of Intel MPI under $I_MPI_ROOT, and what its ranks need to find it."""
    if "mpi" in options.systems:
        raise LaunchError("a process can hold one MPI: mpi and impi need runs of their own")
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(_NO_MPI.format("mpi4py"))
    root = os.environ.get("I_MPI_ROOT", "")
    mpiexec, library = Path(root, "bin", "mpiexec.hydra"), Path(root, "lib", "libmpi.so.12")
    if not root or not mpiexec.exists() or not library.exists():
        found = f"I_MPI_ROOT={root} has no {mpiexec} or no {library}" if root else "it is not set"
        raise LaunchError(_NO_IMPI.format(found))
    environment = {"MPI4PY_LIBMPI": str(library.resolve())}
    # It pins each rank to a core unless told otherwise; --pin pins them for all systems.
    environment["I_MPI_PIN"] = "0"
    return [str(mpiexec)], environment


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
