"""What the launcher's environment variables say about this rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from torch.distributed import HashStore, Store

from ringcomm.comm.node_store import meet_on_node
from ringcomm.errors import ArgumentError, RendezvousError, UnsupportedError

# Launcher, rank, world size, ranks on this node; the first launcher whose two are set wins.
# torchrun first: it may itself have been started by one of the others.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ""),
)


# Beyond, int() may refuse with an error of its own.
MOST_DIGITS = 20


@dataclass(frozen=True)
class Placement:
    """This rank as its launcher placed it.

    ``has_master`` when there is a MASTER_ADDR; ``job`` is the launcher's name for the launch.
    """

    launcher: str
    rank: int
    world_size: int
    local_world_size: int
    has_master: bool
    job: str = ""

    def store(self, timeout_s: float) -> Store:
        """A store that all ranks of the launch reach.

        Raises:
            RendezvousError: it cannot be reached in time.
            UnsupportedError: the ranks are spread over several machines.
        """
        if self.local_world_size != self.world_size:
            raise UnsupportedError(
                f"communicator from {self.launcher} on rank {self.rank} of {self.world_size}: all "
                f"ranks must run on one machine, but only {self.local_world_size} of them run on "
                "this one. Start them on one machine"
            )
        if self.has_master:
            return _master_store(self, timeout_s)
        if self.world_size == 1:
            return HashStore()
        return meet_on_node(self.rank, self.world_size, timeout_s, self.job)


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.strip().isdecimal() or len(text) > MOST_DIGITS:
        raise ArgumentError(f"{name}: expected an integer >= 0, got {text[:80]!r}")
    return int(text)


def read_environment(environment: Mapping[str, str] | None = None) -> Placement:
    """Finds rank and world size in the environment; without a launcher it is a world of one.

    Raises:
        ArgumentError: a variable is not a number, or the rank is outside the world.
    """
    variables: Mapping[str, str] = os.environ if environment is None else environment
    has_master = bool(variables.get("MASTER_ADDR")) and bool(variables.get("MASTER_PORT"))
    for launcher, rank_name, size_name, local_name in LAUNCHERS:
        if not (variables.get(rank_name) and variables.get(size_name)):
            continue
        rank, world_size = _integer(variables, rank_name), _integer(variables, size_name)
        if rank >= world_size:
            raise ArgumentError(
                f"{rank_name}: expected a rank below {size_name}={world_size}, got {rank}"
            )
        local_size = world_size
        if local_name and variables.get(local_name):
            local_size = _integer(variables, local_name)
        elif launcher == "Slurm" and variables.get("SLURM_NNODES", "1") != "1":
            local_size = 1
        job = ""
        if launcher == "Slurm" and variables.get("SLURM_JOB_ID"):
            job = f"slurm-{variables['SLURM_JOB_ID']}-{variables.get('SLURM_STEP_ID', '')}"
        return Placement(launcher, rank, world_size, local_size, has_master, job)
    return Placement("no launcher", 0, 1, 1, has_master=False)


def _master_store(placement: Placement, timeout_s: float) -> Store:
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(
            rendezvous(
                "env://",
                placement.rank,
                placement.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RendezvousError(
            f"communicator from {placement.launcher} on rank {placement.rank} of "
            f"{placement.world_size}: no store at MASTER_ADDR={os.environ['MASTER_ADDR']} "
            f"MASTER_PORT={os.environ['MASTER_PORT']} within {timeout_s:g} s: {error}"
        ) from error
    return cast(Store, store)
