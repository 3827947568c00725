"""Makes a process group from what ``torch.distributed`` hands to a backend's creator."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import BackendConfig, P2POp, Work, distributed_c10d

from ringcomm.c10d.calls import BACKEND_NAME
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import ProcessGroup
from ringcomm.comm.admission import outside_of_compile
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.options import CommOptions
from ringcomm.errors import ArgumentError, UnsupportedError

__all__ = ["create_process_group"]


def create_process_group(
    group: Any, pg_options: Any, kind: type[Communicators] = Communicators
) -> ProcessGroup:
    """The process group of this rank; every member of the new group calls it.

    Args:
        group: torch's ``_DistributedBackendOptions``: store, group_rank, group_size, timeout,
            group_id.
        pg_options: a ``ringcomm.CommOptions`` or None. Its timeout yields to the group's.
        kind: how the group finds its communicators.

    Raises:
        ArgumentError: ``pg_options`` is something else.
        UnsupportedError: the group mixes ringcomm with another backend.
        RendezvousError: the members did not find each other within the timeout.
    """
    _refuse_other_backends()
    if pg_options is not None and not isinstance(pg_options, CommOptions):
        raise ArgumentError(
            f"init_process_group on rank {group.group_rank} of {group.group_size}: pg_options of "
            f"the backend {BACKEND_NAME!r} is a ringcomm.CommOptions, got "
            f"{type(pg_options).__name__}. Pass ringcomm.CommOptions(...) or nothing."
        )
    communicators = kind.meet(
        group.store,
        group.group_rank,
        group.group_size,
        name=group.group_id,
        timeout=group.timeout,
        options=pg_options,
        part_of=_within_world(group.global_ranks_in_group),
    )
    admit_ringcomm_to_monitored_barrier()
    admit_ringcomm_to_batches()
    return ProcessGroup(group.store, communicators)


def _within_world(members: list[int]) -> tuple[Communicator, list[int]] | None:
    """Returns the default group's communicator, of which torch makes a group of these members.

    None where the default group itself is made, or is of another backend.
    """
    world = dist.group.WORLD if members and dist.is_initialized() else None
    return (world.communicator, members) if isinstance(world, ProcessGroup) else None


def _refuse_other_backends() -> None:
    """Raises when the group is also to have a backend that is not ringcomm.

    torch takes a process group that a creator returns as the whole group, for all devices, and
    drops the other backends without a word. The creator is not told of them, so this reads them
    where torch keeps them: the local ``backend_config`` of ``_new_process_group_helper``.
    """
    config = _backend_config(sys._getframe(1))
    if config is None:
        return
    others = {
        device: name
        for device, name in config.get_device_backend_map().items()
        if name != BACKEND_NAME
    }
    if others:
        raise UnsupportedError(
            f"init_process_group({config!r}): {BACKEND_NAME} cannot share a group with another "
            f"backend ({others}), since a group of {BACKEND_NAME} serves every device by itself. "
            f'Write init_process_group("{BACKEND_NAME}") and make a second group for the other '
            f"devices, as in new_group(backend={next(iter(others.values()))!r})."
        )


def _backend_config(frame: FrameType | None) -> BackendConfig | None:
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if isinstance(config, BackendConfig):
            return config
        frame = frame.f_back
    return None


_of_torch = distributed_c10d.batch_isend_irecv


_NO_GRAPH = "messages and monitored barriers of ringcomm run between the graphs of torch.compile()"


@outside_of_compile(_NO_GRAPH)
def _batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group, tensor = p2p_op_list[0].group, p2p_op_list[0].tensor
    if not isinstance(group, ProcessGroup) or group.is_on_host(tensor, "batch_isend_irecv"):
        return _of_torch(p2p_op_list)
    return [group.batch(p2p_op_list)]


def admit_ringcomm_to_batches() -> None:
    """Lets ``torch.distributed.batch_isend_irecv`` batch the messages of groups of ringcomm.

    That function opens a coalescing bracket only for groups of exactly torch's own class, and
    makes all other groups send and receive one by one. From now on it hands messages between
    devices to groups of ringcomm as a whole; all else goes to the original.
    """
    _batch_isend_irecv.__doc__ = _of_torch.__doc__
    distributed_c10d.batch_isend_irecv = _batch_isend_irecv
    dist.batch_isend_irecv = _batch_isend_irecv


def admit_ringcomm_to_monitored_barrier() -> None:
    """Lets ``torch.distributed.monitored_barrier`` accept groups of ringcomm.

    Up to torch 2.14 that function raises for every backend that is not named gloo, before it
    asks the group; later versions ask for a group with a CPU backend (pytorch/pytorch#189070).
    Where the test for the name is still there, calls for groups of ringcomm go straight to the
    group and all other calls to the original function.
    """
    original = distributed_c10d.monitored_barrier
    if "GLOO" not in original.__code__.co_names:
        return

    @outside_of_compile(_NO_GRAPH)
    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:

        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ProcessGroup):
            original(group, timeout, wait_all_ranks)
            return
        chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
