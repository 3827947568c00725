# SPDX-License-Identifier: Apache-2.0
"""Reads a rank's launch environment, and finds the store for ranks of several nodes.

Importing this module does not load torch, since the process that starts a command's ranks does not
need torch.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ringcomm.errors import ArgumentError, RendezvousError, UnsupportedError, timed_out, where
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import forming, need_descriptors
from ringcomm.rendezvous.same_node import store_on_node

if TYPE_CHECKING:
    from torch.distributed import Store


# This rank's launch, read from the launcher's environment variables.
#
# Launchers, and their variables for rank, world size and ranks on this node; the first with rank
# and world size set is used. torchrun comes first: another launcher may have started it.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ""),
)


# Descriptors that a store needs in addition to its connections to ranks.
SPARE_DESCRIPTORS = 4

# How to set variables on all ranks, by launcher; HOST is the host of rank 0.
SETTING = {
    "Open MPI": "Start them with mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    "MPICH": "Start them with mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
}


@dataclass(frozen=True)
class LaunchedRank:
    """The rank of this process, as its launcher describes it.

    Attributes:
        launcher: the name of the launcher.
        rank: the rank of this process.
        world_size: the number of ranks.
        local_world_size: the number of ranks on this node; ``world_size`` if it is not set.
        has_master: True if MASTER_ADDR and MASTER_PORT are set.
        job: the launcher's name for the launch, or "".
        address: the rendezvous address for several nodes without MASTER_ADDR, if known.
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
        """True if the launcher's variables say that all ranks are on this node."""
        return self.local_world_size == self.world_size

    def store(self, timeout_s: float) -> Store:
        """Returns a store that all ranks of the launch reach.

        Raises:
            RendezvousError: the store cannot be reached in time.
            UnsupportedError: the ranks are on several machines, and no variable names the address
                of their rendezvous.
        """
        operation = where(f"communicator from {self.launcher}", self.rank, self.world_size)
        # torch's server needs a descriptor per rank, and does not report a lack of descriptors.
        needed = SPARE_DESCRIPTORS + (self.world_size if self.rank == 0 else 0)
        with forming(operation):
            if self.world_size > 1:
                need_descriptors(needed, operation, "the store of the ranks' rendezvous")
            return self._store(timeout_s)

    def _store(self, timeout_s: float) -> Store:
        if self.has_master:
            return _master_store(self, timeout_s)
        if self.world_size == 1:
            from torch.distributed import HashStore

            return HashStore()
        if self.is_here:
            return store_on_node(self.rank, self.world_size, timeout_s, self.job)
        if self.address is not None:
            return store_at(self.address, self.launcher, self.rank, self.world_size, timeout_s)
        how = SETTING.get(self.launcher, "Set both on all ranks")
        raise UnsupportedError(
            f"communicator from {self.launcher} on rank {self.rank} of {self.world_size}: only "
            f"{self.local_world_size} of the ranks run on this node, so all ranks need "
            f"MASTER_ADDR, which names rank 0's host, and MASTER_PORT, a free port there. {how}"
        )


def read_environment(environment: Mapping[str, str] | None = None) -> LaunchedRank:
    """Reads rank and world size from the environment; without a launcher the world has one rank.

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
        return LaunchedRank(launcher, rank, world_size, local_size, has_master, job, address)
    return LaunchedRank("no launcher", 0, 1, 1, has_master=False)


def _is_of_srun(variables: Mapping[str, str]) -> bool:
    """True if srun (with --mpi=pmi2) set the PMI variables, and not MPICH's launcher Hydra.

    Hydra sets more PMI variables.
    """
    return "MPI_LOCALNRANKS" not in variables and variables.get("SLURM_PROCID") == variables.get(
        "PMI_RANK"
    )


def launched_world() -> str | None:
    """Returns the world size that torchrun, mpirun or Slurm set, as "WORLD_SIZE=2", or None."""
    for _, rank, size, _ in LAUNCHERS:
        if os.environ.get(rank) and os.environ.get(size):
            return f"{size}={os.environ[size]}"
    return None


def _master_store(launched: LaunchedRank, timeout_s: float) -> Store:
    address, port = os.environ["MASTER_ADDR"], port_in(os.environ, "MASTER_PORT")
    # Do as torch does for env://, except that the server does not wait for the other ranks. If
    # torchrun's agent serves the store already, rank 0 does not serve it.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = launched.rank == 0 and not of_agent
    try:
        return open_store(
            (address, port), launched.world_size, timeout_s, serves=serves, multi_tenant=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        operation = where(
            f"communicator from {launched.launcher}", launched.rank, launched.world_size
        )
        told = f"at MASTER_ADDR={address} MASTER_PORT={port}: {str(error).partition(chr(10))[0]}"
        if serves:
            raise RendezvousError(
                f"{operation}: rank 0 cannot serve a store {told}. If the port is taken, by "
                "another job or by a second process with RANK=0, set another MASTER_PORT on all "
                "ranks, or end that process"
            ) from error
        advice = (
            "See that rank 0, which serves the store, runs, and that all ranks have its host and "
            "port in these variables"
        )
        if of_agent:
            advice = "See that torchrun, which serves the store, runs on the first node"
        raise timed_out(
            f"{operation}:", timeout_s, f"an answer {told}", advice, kind=RendezvousError
        ) from error


# ---- The rendezvous address of several nodes if the launcher sets it, without MASTER_ADDR --------
# The address follows from variables that Slurm, and Open MPI up to version 4, set on every rank.
# Rank 0 serves the store, and checks that it is on the host to which all others connect.

PORT_VARIABLE = "RINGCOMM_MASTER_PORT"
# These ports are below Linux's ephemeral ports (from 32768 on), which it assigns to connections.
FIRST_PORT, PORTS = 20000, 10000
# Jobs on one host mostly have adjacent ids and few steps.
PORTS_PER_JOB = 31
# With more digits, int() may raise its own error.
MOST_DIGITS = 20
MOST_HOSTS = 1 << 16
SHOWN_CHARS = 200


@dataclass(frozen=True)
class MasterAddress:
    """The host and port at which rank 0 serves the store.

    Attributes:
        host: a name or an IPv4 address.
        port: a TCP port.
        source: describes the variable from which it was derived.
        is_here: True if this rank runs on ``host``.
    """

    host: str
    port: int
    source: str
    is_here: bool


def integer(variables: Mapping[str, str], name: str) -> int:
    """Reads a variable; raises ArgumentError unless it is an integer >= 0."""
    text = variables[name]
    if not text.strip().isdecimal() or len(text) > MOST_DIGITS:
        raise ArgumentError(f"{name}: expected an integer >= 0, got {text[:80]!r}")
    return int(text)


def port_of(job: int, step: int, variables: Mapping[str, str]) -> int:
    """Returns the port of a step of a job: 20000 to 29999, or RINGCOMM_MASTER_PORT.

    Raises:
        ArgumentError: RINGCOMM_MASTER_PORT is not a port.
    """
    if not variables.get(PORT_VARIABLE):
        return FIRST_PORT + (PORTS_PER_JOB * job + step) % PORTS
    return port_in(variables, PORT_VARIABLE)


def port_in(variables: Mapping[str, str], name: str) -> int:
    """Reads a variable; raises ArgumentError unless it is a port."""
    port = integer(variables, name)
    if not 1 <= port <= 65535:
        raise ArgumentError(f"{name}: expected a port, 1 to 65535, got {port}")
    return port


# ---- Slurm --------------------------------------------------------------------------------------


def hosts_of(text: str) -> list[str]:
    """Expands a host list of Slurm, such as ``node[01-03,7],gpu5``, in its order.

    Raises:
        ArgumentError: the text is not a host list.
    """
    hosts: list[str] = []
    # Do not split at a comma inside brackets: the next bracket after the comma is a closing one.
    for part in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", part, re.ASCII):
            raise _no_list(text, f"{part[:SHOWN_CHARS]!r} is no name")
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", part)
        choices = [[fixed] if fixed else _numbers(ranges, text) for ranges, fixed in pieces]
        if len(hosts) + prod(map(len, choices)) > MOST_HOSTS:
            raise _no_list(text, f"there are more than {MOST_HOSTS} hosts")
        hosts += map("".join, product(*choices))
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """Expands the text inside brackets; a range's numbers get the width of its first number."""
    numbers: list[str] = []
    for each in ranges.split(","):
        found = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", each, re.ASCII)
        if found is None:
            raise _no_list(text, f"[{each[:SHOWN_CHARS]}] is no range of numbers")
        first, last = found[1], found[2] or found[1]
        if not int(first) <= int(last) < int(first) + MOST_HOSTS:
            raise _no_list(text, f"[{each}] has no numbers, or more than {MOST_HOSTS}")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


def _no_list(text: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"expected a list of hosts as Slurm writes it, such as node[01-03,7],gpu5, got "
        f"{text[:SHOWN_CHARS]!r}: {why}"
    )


def tasks_on(text: str, node: int) -> int:
    """Reads the tasks of a node from a list of Slurm such as ``2(x3),1``: 2 on nodes 0 to 2.

    Raises:
        ArgumentError: the text is not a task list, or lacks the node.
    """
    begin = 0
    for each in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", each, re.ASCII)
        if found is None:
            break
        begin += int(found[2] or 1)
        if node < begin:
            return int(found[1])
    raise ArgumentError(
        f"expected tasks of node {node} as Slurm writes them, such as 2(x3),1, got "
        f"{text[:SHOWN_CHARS]!r}"
    )


def tasks_here(variables: Mapping[str, str], tasks: int) -> int:
    """Returns how many of a step's tasks run on this Slurm node.

    Raises:
        ArgumentError: a variable cannot be read.
    """
    if variables.get("SLURM_STEP_NUM_NODES", variables.get("SLURM_NNODES", "1")) == "1":
        return tasks
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if variables.get(name) and variables.get("SLURM_NODEID"):
            return tasks_on(variables[name], integer(variables, "SLURM_NODEID"))
    return 1


def slurm_address(variables: Mapping[str, str]) -> MasterAddress | None:
    """Returns the first host of the step's list, or None without such a list.

    Raises:
        ArgumentError: a variable cannot be read.
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if variables.get(name) and variables.get("SLURM_JOB_ID"):
            break
    else:
        return None
    text = variables[name]
    try:
        host = hosts_of(text)[0]
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from error
    step = integer(variables, "SLURM_STEP_ID") if variables.get("SLURM_STEP_ID") else 0
    port = port_of(integer(variables, "SLURM_JOB_ID"), step, variables)
    source = f"the first host of {name}={text[:SHOWN_CHARS]}"
    return MasterAddress(host, port, source, variables.get("SLURMD_NODENAME", host) == host)


# ---- Open MPI -----------------------------------------------------------------------------------

_LAUNCHER_URI, _DAEMON_URI = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
_JOB = "OMPI_MCA_ess_base_jobid"


def open_mpi_address(variables: Mapping[str, str]) -> MasterAddress | None:
    """Returns mpirun's host if mpirun reports exactly one address, which is IPv4; else None.

    If there are several, some may be unreachable, such as the address of a bridge of containers,
    and mpirun does not report which.
    """
    uri = re.fullmatch(
        r"\d+\.0;tcp://(\d+\.\d+\.\d+\.\d+):\d+", variables.get(_LAUNCHER_URI, ""), re.ASCII
    )
    if uri is None or not variables.get(_JOB) or not variables.get(_DAEMON_URI):
        return None
    # The lower 16 bits are the number of the program among the programs that one mpirun starts.
    family, number = divmod(integer(variables, _JOB), 1 << 16)
    port = port_of(family, number, variables)
    source = f"the host of mpirun by {_LAUNCHER_URI}={uri[0]}"
    is_here = variables[_DAEMON_URI] == variables[_LAUNCHER_URI]
    return MasterAddress(uri[1], port, source, is_here)


# ---- the store at the address --------------------------------------------------------------------

FIRST_RETRY_S, LAST_RETRY_S = 0.005, 0.1
# Seconds. A host that is down does not answer, so a connection is tried for ATTEMPT_S. An attempt
# that also resolves a name, which may take 5 to 30 s, takes less than LONGEST_ATTEMPT_S.
ATTEMPT_S, LONGEST_ATTEMPT_S = 10.0, 60.0


def open_store(
    address: tuple[str, int],
    world_size: int,
    timeout_s: float,
    *,
    serves: bool,
    multi_tenant: bool = False,
) -> Store:
    """Serves a TCPStore at a host and port, or connects to it as soon as it is served.

    Args:
        address: host and port.
        world_size: how many ranks use the store. The server does not wait for them: the rendezvous
            does, and its errors name missing ranks.
        timeout_s: how long to wait for the server, and the timeout of the store's operations.
        serves: True if this process is the server.
        multi_tenant: share a server that this process already has at that port.

    Raises:
        OSError: no server answered in time.
        RuntimeError, ValueError: torch cannot make the store.
    """
    if not serves:
        _await_server(address, Deadline(timeout_s, LONGEST_ATTEMPT_S))
    from torch.distributed import TCPStore

    return TCPStore(
        *address,
        world_size,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
    )


def _await_server(address: tuple[str, int], deadline: Deadline) -> None:
    """Waits until a server listens at the address; torch itself may try for twice its timeout."""
    pause_s = FIRST_RETRY_S
    while True:
        try:
            attempt_s = min(max(deadline.left_s(), FIRST_RETRY_S), ATTEMPT_S)
            socket.create_connection(address, timeout=attempt_s).close()
            return
        except OSError:  # also raised for a name that is not known yet
            if deadline.left_s() <= pause_s:
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LAST_RETRY_S)


# Servers are never closed: another rank may be about to connect for its next communicator.
_stores: dict[tuple[str, int], Store] = {}


def store_at(
    address: MasterAddress, launcher: str, rank: int, world_size: int, timeout_s: float
) -> Store:
    """Returns a store at an address that the launcher's variables give; rank 0 serves it.

    Raises:
        RendezvousError: rank 0 is on another host, or no server answers there in time.
    """
    key = (address.host, address.port)
    if key in _stores:
        return _stores[key]
    operation = where(f"communicator from {launcher}", rank, world_size)
    called = f"{address.host}:{address.port}"
    if rank == 0 and not address.is_here:
        raise RendezvousError(
            f"{operation}: the other ranks connect to {called} ({address.source}), but rank 0 runs "
            "on another host. Have the launcher start rank 0 there, or set MASTER_ADDR to rank 0's "
            "host and MASTER_PORT to a free port on all ranks"
        )
    try:
        _stores[key] = open_store(key, world_size, timeout_s, serves=rank == 0)
    except (RuntimeError, ValueError, OSError) as error:
        told = (
            f"at {called} ({address.source}; {PORT_VARIABLE} takes the place of the port): "
            f"{str(error).partition(chr(10))[0]}"
        )
        advice = (
            "MASTER_ADDR and MASTER_PORT, which are not set on this rank, take its place: set both "
            "on all ranks"
        )
        if rank == 0:
            raise RendezvousError(
                f"{operation}: rank 0 cannot serve a store {told}. {advice}"
            ) from error
        raise timed_out(
            f"{operation}:",
            timeout_s,
            f"the store of rank 0, which does not answer {told}",
            advice,
            kind=RendezvousError,
        ) from error
    return _stores[key]
