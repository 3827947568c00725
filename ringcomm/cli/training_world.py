"""How a rank of a training run joins the others, whoever started it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ringcomm.c10d import register
from ringcomm.cli.launch import STORE_PORT_VARIABLE, threads_per_rank
from ringcomm.cli.rank import TIMEOUT, World, launch_store
from ringcomm.comm.environment import Placement, read_environment


@contextmanager
def joined_ranks(backend: str) -> Iterator[World]:
    """Joins torch's default group on ``backend`` for the length of the block.

    The ranks may be those of ``launch.py``, torchrun, mpirun or Slurm. Also sets torch's threads,
    so that the ranks of this machine share its cores.

    NOTE [Groups end last]
    C++ that drops the last reference to a group of Gloo's, as DDP does when it goes, holds Python's
    lock while it waits for Gloo's threads, which may wait for that lock. Where DDP goes first, it
    is Python that drops the group, and it lets the lock go. So with a group of Gloo's, DDP must be
    out of reach when the block ends, and collected where it refers to itself.

    Raises:
        RendezvousError: the ranks did not find each other.
        UnsupportedError: mpirun or Slurm spread them over several machines.
    """
    placement = read_environment()
    register()  # torch does this itself for an installed ringcomm, not for a bare source tree
    threads = threads_per_rank(placement.local_world_size)
    torch.set_num_threads(threads)
    if STORE_PORT_VARIABLE in os.environ:
        _join(backend, placement, launch_store())
    elif placement.launcher == "torchrun":
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        # All ranks are here: Gloo need not resolve the host's name, which may lead nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _join(backend, placement, placement.store(TIMEOUT.total_seconds()))
    try:
        yield World(placement.rank, placement.world_size, threads)
        # Rank 0 holds the store: it must not leave while others still talk to it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _join(backend: str, placement: Placement, store: dist.Store) -> None:
    dist.init_process_group(
        backend,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=TIMEOUT,
    )
