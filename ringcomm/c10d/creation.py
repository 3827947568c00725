"""Makes a process group from what ``torch.distributed`` hands to a backend's creator."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.distributed import BackendConfig

from ringcomm.c10d import BACKEND_NAME
from ringcomm.c10d.calls import admit_ringcomm_to_batches
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import ProcessGroup, admit_ringcomm_to_monitored_barrier
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
    )
    admit_ringcomm_to_monitored_barrier()
    admit_ringcomm_to_batches()
    return ProcessGroup(group.store, communicators)


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
