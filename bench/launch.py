# SPDX-License-Identifier: Apache-2.0
"""Ranks: started by the harness itself, or found if torchrun or mpiexec started them.

With busy loops the harness measures collectives while other programs use the cores. Linux divides
the cores first among sessions and then among the threads of a session (sched_autogroup, see
sched(7)). MPICH's mpiexec starts every rank in its own session; other launchers use one for all.
Therefore, with busy loops, every rank and every loop leads its own session, and a rank gets the
same share as a rank in a container, where sessions do not count.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ringcomm.launch import RankCommand, end_with, rank_variables, run_commands, started

from .pacing import terminal_variable
from .report import PROCESSES

_STORE_FILE = "RINGCOMM_BENCH_STORE"
_MPI_VARIABLES = ("PMI_RANK", "PMI_SIZE")
_NO_MPI = (
    "no {}: MPI needs mpi4py and MPICH; install both with pip install mpi4py mpich, "
    "or use --peers gloo"
)
# The wheels of MPICH and of Intel MPI contain files of the same names.
_NO_IMPI = (
    "Intel MPI needs a separate environment, without mpich: python -m venv impi, "
    "impi/bin/pip install impi-rt, and I_MPI_ROOT=impi; {}"
)
_NO_ONECCL = (
    "oneCCL is loaded from Intel MPI's folder: impi/bin/pip install --no-deps oneccl, and then "
    "impi/bin/pip install --no-deps --force-reinstall oneccl-cpu; there is no {}"
)
# Systems that run over MPI: MPICH, and two that run over Intel MPI.
_MPICH, _IMPI, _ONECCL = "mpi", "impi", "oneccl"
# Longer than any time slice: after this sleep the scheduler treats all ranks equally.
REST_S = 0.02

_LOOP = (
    "import ctypes, os, signal\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != {parent}: os._exit(0)\n"
    "while True: pass\n"
)


class LaunchError(Exception):
    """The ranks cannot be started or joined in the requested way; the message says what to do."""


@dataclass(frozen=True)
class Wanted:
    """The ranks that a run needs."""

    ranks: int | None = None  # None: use the launcher's ranks
    systems: Sequence[str] = ()  # systems under test: MPI needs its own launcher
    busy: int = 0  # number of busy processes besides the ranks
    nodes: int = 1  # number of nodes that ranks of this machine emulate
    on_nodes: bool = False  # True if the ranks may be on several machines


@dataclass(frozen=True)
class RankInfo:
    """This process's rank, and the store that all ranks share.

    In the mode "one-launch" this process runs all ``world`` ranks, and ``rank`` is 0.
    """

    rank: int
    world: int
    store: dist.Store
    mode: str = PROCESSES


def started_by(environment: Mapping[str, str]) -> str | None:
    """Returns "torchrun", "mpiexec" or "harness": what started this process; None: a user did."""
    if _STORE_FILE in environment:
        return "harness"
    if "PMI_RANK" in environment or "OMPI_COMM_WORLD_RANK" in environment:
        return "mpiexec"
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    return None


def join(wanted: Wanted) -> RankInfo:
    """Returns this process's rank; raises :class:`LaunchError` if its launcher does not fit."""
    how = started_by(os.environ)
    if how == "harness":
        return rank_of_harness()
    if wanted.busy:
        raise LaunchError("--busy: run the harness alone, so that it starts the ranks itself")
    if how == "mpiexec":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        file = comm.bcast(str(Path(tempfile.gettempdir(), f"ringcomm-bench-{uuid.uuid4()}")))
        info = RankInfo(comm.rank, comm.size, dist.FileStore(file, comm.size))
    else:
        info = _join_torchrun(wanted)
    if wanted.ranks not in (None, info.world):
        told = f"{how} started {info.world} ranks; leave the option out"
        raise LaunchError(f"--ranks {wanted.ranks}: {told}")
    return info


def rank_of_harness() -> RankInfo:
    """Returns the rank of a process that the harness started, and ends it when the harness ends."""
    end_with(os.getppid())
    rank = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
    world = int(os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return RankInfo(rank, world, dist.FileStore(os.environ[_STORE_FILE], world))


def _join_torchrun(wanted: Wanted) -> RankInfo:
    if needs_mpiexec(wanted.systems):
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
    return RankInfo(rank, size, store)


def run_ranks(words: Sequence[str], wanted: Wanted) -> int:
    """Runs a module with ``words`` in ranks, which call :func:`rank_of_harness`.

    Waits for them, and returns the exit status. Raises :class:`LaunchError` without mpiexec.
    """
    command, world = [sys.executable, "-m", *words], wanted.ranks or 1
    if needs_mpiexec(wanted.systems):
        mpiexec, environment = find_mpiexec(wanted.systems)
        variables = {"mpiexec": {**environment, **terminal_variable()}}
        return _run([mpiexec, "-n", str(world), *command], variables, wanted.busy)
    variables = {f"rank {rank}": rank_variables(rank, world) for rank in range(world)}
    if wanted.nodes > 1:  # consecutive ranks form a node
        for rank, own in enumerate(variables.values()):
            own["RINGCOMM_NODE_ID"] = f"node {rank * wanted.nodes // world}"
    return _run(command, variables, wanted.busy)


def _run(command: Sequence[str], variables: Mapping[str, Mapping[str, str]], busy: int) -> int:
    """Runs a command once per set of environment variables, while ``busy`` loops run."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-bench-") as directory, busy_loops(busy):
        # The harness itself may run in a job of mpiexec: remove that job's variables, since this
        # process is not a rank of the benchmark.
        outside = {key: os.environ[key] for key in os.environ if key not in _MPI_VARIABLES}
        shared = {"OMP_NUM_THREADS": "1", **outside, _STORE_FILE: f"{directory}/store"}
        ranks = [RankCommand(name, command, {**shared, **own}) for name, own in variables.items()]
        return run_commands(ranks)


def needs_mpiexec(systems: Sequence[str]) -> bool:
    return not {_MPICH, _IMPI, _ONECCL}.isdisjoint(systems)


def find_mpiexec(systems: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Returns the launcher of the requested MPI, and the variables by which ranks find it.

    Raises :class:`LaunchError` if a system is not installed, or if no process can hold all of them.
    """
    of_intel = [each for each in (_IMPI, _ONECCL) if each in systems]
    if of_intel and _MPICH in systems:
        told = f"{_MPICH} and {of_intel[0]} need runs of their own"
        raise LaunchError(f"a process can hold one MPI: {told}")
    if _MPICH in systems:
        missing = missing_of_mpich()
        if missing:
            raise LaunchError(_NO_MPI.format(missing))
        return str(_mpiexec_of_mpich()), {}
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(_NO_MPI.format("mpi4py"))
    root = os.environ.get("I_MPI_ROOT", "")
    mpiexec, library = Path(root, "bin", "mpiexec.hydra"), Path(root, "lib", "libmpi.so.12")
    if not root or not mpiexec.exists() or not library.exists():
        told = f"I_MPI_ROOT={root} has no {mpiexec} or no {library}" if root else "it is not set"
        raise LaunchError(_NO_IMPI.format(told))
    plugin = Path(root, "lib", "libccl_legacy_cpu.so")
    if _ONECCL in systems and not plugin.exists():
        raise LaunchError(_NO_ONECCL.format(plugin))
    # Intel's mpiexec pins each rank to a core by default; --pin pins the ranks of all systems.
    return str(mpiexec), {"MPI4PY_LIBMPI": str(library.resolve()), "I_MPI_PIN": "0"}


def missing_of_mpich() -> str:
    """Returns the first missing part of an installation for MPI: "mpi4py" or "mpiexec", or ""."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py"
    return "" if _mpiexec_of_mpich() else "mpiexec"


def _mpiexec_of_mpich() -> str | None:
    beside_python = Path(sys.executable).parent / "mpiexec"
    return str(beside_python) if beside_python.exists() else shutil.which("mpiexec")


def busy_loops(count: int) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Runs ``count`` busy processes until the block or this process ends."""
    # Each loop asks the kernel to kill it when its parent ends, and then checks whether the parent
    # has ended already.
    words = [sys.executable, "-S", "-E", "-c", _LOOP.format(parent=os.getpid())]
    return started([RankCommand("loop", words)] * count)


def lead_session() -> None:
    """Makes this rank the leader of a session, unless its launcher has already done so."""
    if os.getsid(0) != os.getpid():
        # The leader of a process group cannot create a session. It shares the session of its
        # launcher, which only waits.
        with suppress(PermissionError):
            os.setsid()
