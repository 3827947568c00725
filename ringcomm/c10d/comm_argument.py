"""The ranks that an argument ``comm`` means: the one place that reads it.

NOTE [Groups of other backends]
A group of another backend has no communicator. The first call for it builds one of the same ranks
over the group's store, which all members must therefore make; later calls find it again. It goes
with the group: torch keeps the Python object of a group until ``destroy_process_group()``, and
the table below holds it weakly. What is still in use, as by an optimizer, lives as long as that.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import ProcessGroup as RingcommGroup
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.groups import GroupMember, communicator_of, is_initialized
from ringcomm.comm.options import CommOptions
from ringcomm.cuda import find_device
from ringcomm.errors import ArgumentError, where
from ringcomm.rendezvous.environment import read_environment

__all__ = ["ALONE", "CommArgument", "find_communicator", "find_device_type"]

CommArgument: TypeAlias = Communicator | dist.ProcessGroup | DeviceMesh | Literal["alone"] | None

ALONE = "alone"
_Group: TypeAlias = Communicator | dist.ProcessGroup | None
_FORMS = (
    'expected None, "alone", a ringcomm.Communicator, a ProcessGroup of torch.distributed or a '
    "one-dimensional DeviceMesh"
)

# See NOTE [Groups of other backends].
_built: MutableMapping[dist.ProcessGroup, Communicators] = WeakKeyDictionary()


def find_communicator(
    comm: CommArgument, operation: str, device: torch.device | None
) -> Communicator | None:
    """The communicator that ``comm`` means; collective, see NOTE [Groups of other backends].

    None means ringcomm's default group, else that of ``torch.distributed``, else this rank alone.

    Args:
        comm: what the user gave.
        operation: named in errors.
        device: where the tensors are; None or the meta device where there are none yet.

    Returns:
        The communicator; None when this rank is alone.

    Raises:
        ArgumentError: this rank is not in the group, a mesh has several dimensions, ``comm`` is
            something else, or is None and a launcher has started ranks that have no group.
        UnsupportedError: the ranks of a group run on several machines, or this process has no such
            device.
        RingcommError: the members could not connect.
    """
    named, mesh_device = _named(comm, operation)
    if isinstance(named, Communicator):
        return named
    if named is not None:
        known = device if device is not None and device.type != "meta" else mesh_device
        return _over(named, operation, known or _device_of(named))
    if comm is None:
        _check_alone(operation)
    return None


def find_device_type(comm: CommArgument, operation: str) -> str:
    """The type of device that the tensors of ``comm`` are on, "cpu" without one; connects nothing.

    Raises:
        ArgumentError: as :func:`find_communicator`, except for a launcher's ranks.
    """
    named, mesh_device = _named(comm, operation)
    if isinstance(named, Communicator):
        return named.device.type
    return torch.device("cpu" if named is None else mesh_device or _device_of(named)).type


def _named(comm: Any, operation: str) -> tuple[_Group, str | None]:
    """The group, or None for this rank alone; and the device type of the mesh that it is of."""
    if comm is None:
        if is_initialized():
            return communicator_of(None, operation), None
        return (dist.group.WORLD if dist.is_initialized() else None), None
    if isinstance(comm, str) and comm == ALONE:
        return None, None
    if isinstance(comm, DeviceMesh):
        return _axis(comm, operation), comm.device_type
    if isinstance(comm, dist.ProcessGroup):
        return comm, None
    # What new_group() of torch, or of ringcomm, returns on ranks outside of the group.
    if type(comm) is int and comm == dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_a_member(operation, "GroupMember.NON_GROUP_MEMBER")
    if isinstance(comm, Communicator) or comm is GroupMember.NON_GROUP_MEMBER:
        return communicator_of(comm, operation), None
    raise ArgumentError(f"{operation}: comm: {_FORMS}, got {comm!r}")


def _axis(mesh: DeviceMesh, operation: str) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = 'mesh["dp"], of a mesh with mesh_dim_names'
        if names:
            example = " or ".join(f"mesh[{name!r}]" for name in names)
        raise ArgumentError(
            f"{operation}: comm: expected a DeviceMesh of one dimension, got one of {mesh.ndim}"
            f"{f' {names}' if names else ''}; pass the one whose ranks share the work, as {example}"
        )
    if mesh.get_coordinate() is None:
        raise _not_a_member(operation, f"a DeviceMesh of ranks {mesh.mesh.tolist()}")
    return mesh.get_group()


def _not_a_member(operation: str, got: str) -> ArgumentError:
    rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    return ArgumentError(
        f"{operation}{rank}: comm: expected a group that this rank is in, got {got}; only "
        "members may call"
    )


def _check_alone(operation: str) -> None:
    """Raises when there should be others: each rank alone would train a model of its own."""
    placement = read_environment()
    if placement.world_size > 1:
        raise ArgumentError(
            f"{where(operation, placement.rank, placement.world_size)}: comm: "
            f"{placement.launcher} has started {placement.world_size} ranks, but there is no "
            "group of them; call ringcomm.init_process_group() or "
            'torch.distributed.init_process_group() first, or pass comm="alone" for ranks that '
            "shall not work together"
        )


def _device_of(group: dist.ProcessGroup) -> torch.device | str:
    """Returns the device type of a group's tensors, as far as the group can tell."""
    bound = group.bound_device_id
    if bound is not None:
        return bound
    return "cuda" if [device.type for device in group._device_types] == ["cuda"] else "cpu"


def _over(
    group: dist.ProcessGroup, operation: str, device: torch.device | str
) -> Communicator | None:
    """The group's communicator of a device; None for a group of this rank that has none."""
    if isinstance(group, RingcommGroup):
        return group.communicator_on(device)
    if group.size() == 1:
        return None
    index = find_device(device, operation)
    communicators = _built.get(group)
    if communicators is None:
        communicators = _built[group] = Communicators.over(group, "comm", CommOptions())
    return communicators.host if index is None else communicators.on_device(index, operation)
