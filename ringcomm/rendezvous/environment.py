"""The environment of a rank: its number, its world, a store to meet at.

Importing this module does not load torch: the process that starts the ranks of a command has no
other use for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcomm.errors import ArgumentError, RendezvousError, UnsupportedError, where
from ringcomm.rendezvous.addresses import (
    MasterAddress,
    integer,
    meet_at,
    open_mpi_address,
    open_store,
    port_in,
    slurm_address,
    tasks_here,
)
from ringcomm.rendezvous.descriptors import forming, need_descriptors
from ringcomm.rendezvous.same_node import meet_on_node

if TYPE_CHECKING:
    from torch.distributed import Store


# What the launcher's environment variables say about this rank.

# Launcher, rank, world size, ranks on this node; the first launcher whose two are set wins.
# torchrun first: it may itself have been started by one of the others.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ""),
)


# Descriptors that a store needs beside its connections to ranks.
SPARE_DESCRIPTORS = 4

# How to set variables on all ranks, by launcher; HOST is rank 0's.
SETTING = {
    "Open MPI": "Start them with mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    "MPICH": "Start them with mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
}


@dataclass(frozen=True)
class LauncherPlace:
    """This rank as its launcher placed it.

    Attributes:
        launcher: its name.
        rank: of this process.
        world_size: how many ranks there are.
        local_world_size: how many of them are on this node; all, where the launcher does not say.
        has_master: there are a MASTER_ADDR and a MASTER_PORT.
        job: the launcher's name for the launch, or "".
        address: where the ranks of several nodes meet without MASTER_ADDR, if that is known.
    """

    launcher: str
    rank: int
    world_size: int
    local_world_size: int
    has_master: bool
    job: str = ""
    address: MasterAddress | None = None

    @property
    def is_here(self) -> bool:
        """All ranks are on this node, as far as the launcher says."""
        return self.local_world_size == self.world_size

    def store(self, timeout_s: float) -> Store:
        """A store that all ranks of the launch reach.

        Raises:
            RendezvousError: it cannot be reached in time.
            UnsupportedError: the ranks are spread over several machines, and nothing says where
                they meet.
        """
        operation = where(f"communicator from {self.launcher}", self.rank, self.world_size)
        # torch's server has a connection to each rank, and cannot say when it has none left.
        needed = SPARE_DESCRIPTORS + (self.world_size if self.rank == 0 else 0)
        with forming(operation):
            if self.world_size > 1:
                need_descriptors(needed, operation, "the store at which the ranks meet")
            return self._store(timeout_s)

    def _store(self, timeout_s: float) -> Store:
        if self.has_master:
            return _master_store(self, timeout_s)
        if self.world_size == 1:
            from torch.distributed import HashStore

            return HashStore()
        if self.is_here:
            return meet_on_node(self.rank, self.world_size, timeout_s, self.job)
        if self.address is not None:
            return meet_at(self.address, self.launcher, self.rank, self.world_size, timeout_s)
        how = SETTING.get(self.launcher, "Set both on all ranks")
        raise UnsupportedError(
            f"communicator from {self.launcher} on rank {self.rank} of {self.world_size}: only "
            f"{self.local_world_size} of the ranks run on this node, so all ranks need "
            f"MASTER_ADDR, which names rank 0's host, and MASTER_PORT, a free port there. {how}"
        )


def read_environment(environment: Mapping[str, str] | None = None) -> LauncherPlace:
    """Finds rank and world size in the environment; without a launcher it is a world of one.

    Raises:
        ArgumentError: a variable cannot be read, or the rank is outside the world.
    """
    variables: Mapping[str, str] = os.environ if environment is None else environment
    masters = [name for name in ("MASTER_ADDR", "MASTER_PORT") if variables.get(name)]
    for launcher, rank_name, size_name, local_name in LAUNCHERS:
        if not (variables.get(rank_name) and variables.get(size_name)):
            continue
        if launcher == "MPICH" and _is_of_srun(variables):
            continue
        rank, world_size = integer(variables, rank_name), integer(variables, size_name)
        if rank >= world_size:
            raise ArgumentError(
                f"{rank_name}: expected a rank below {size_name}={world_size}, got {rank}"
            )
        local_size, job, address = world_size, "", None
        if local_name and variables.get(local_name):
            local_size = integer(variables, local_name)
        if launcher == "Slurm":
            local_size = tasks_here(variables, world_size)
            address = slurm_address(variables)
            if variables.get("SLURM_JOB_ID"):
                job = f"slurm-{variables['SLURM_JOB_ID']}-{variables.get('SLURM_STEP_ID', '')}"
        elif launcher == "Open MPI":
            address = open_mpi_address(variables)
        if len(masters) == 1 and local_size != world_size:
            raise ArgumentError(
                f"{masters[0]}={variables[masters[0]][:80]} is set without the other of "
                "MASTER_ADDR and MASTER_PORT. Set both on all ranks, or none"
            )
        has_master = len(masters) == 2
        return LauncherPlace(launcher, rank, world_size, local_size, has_master, job, address)
    return LauncherPlace("no launcher", 0, 1, 1, has_master=False)


def _is_of_srun(variables: Mapping[str, str]) -> bool:
    """Tells whether srun set the variables of PMI, as with --mpi=pmi2: Hydra says more."""
    return "MPI_LOCALNRANKS" not in variables and variables.get("SLURM_PROCID") == variables.get(
        "PMI_RANK"
    )


def launched_world() -> str | None:
    """Returns what torchrun, mpirun or Slurm set, such as "WORLD_SIZE=2", or None."""
    for _, rank, size, _ in LAUNCHERS:
        if os.environ.get(rank) and os.environ.get(size):
            return f"{size}={os.environ[size]}"
    return None


def _master_store(placement: LauncherPlace, timeout_s: float) -> Store:
    address, port = os.environ["MASTER_ADDR"], port_in(os.environ, "MASTER_PORT")
    # As torch does it for env://, but for the server's wait for all others. A server of torchrun's
    # outlives the ranks.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = placement.rank == 0 and not of_agent
    try:
        return open_store(
            (address, port), placement.world_size, timeout_s, serves=serves, multi_tenant=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        what = f"nobody answered within {timeout_s:g} s"
        advice = (
            "Does rank 0, which serves the store, run, and do all ranks have its host and port in "
            "these variables?"
        )
        if of_agent:
            advice = "torchrun serves the store: does it run on the first node?"
        elif serves:
            what = "rank 0 cannot serve a store"
            advice = (
                "If the port is taken, by another job or by a second process with RANK=0, set "
                "another MASTER_PORT on all ranks, or end that process"
            )
        raise RendezvousError(
            f"communicator from {placement.launcher} on rank {placement.rank} of "
            f"{placement.world_size}: {what} at MASTER_ADDR={address} MASTER_PORT={port}: "
            f"{str(error).partition(chr(10))[0]}. {advice}"
        ) from error
