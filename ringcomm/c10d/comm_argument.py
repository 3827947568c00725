# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that an argument ``comm`` specifies; only this module interprets the argument.

NOTE [Groups of other backends]
A group of another backend has no communicator. The first call for such a group builds one over the
group's store, so all members must make this call; later calls find the communicator.
It is dropped with the group: torch keeps a group's Python object until ``destroy_process_group()``,
and the table's reference is weak. A user of the communicator, such as an optimizer, keeps it alive.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import MutableMapping
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import behind
from ringcomm.comm.agreement import first_other, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import GroupMember, communicator_of, is_initialized
from ringcomm.comm.host.options import CommOptions
from ringcomm.cuda import find_device
from ringcomm.errors import (
    ArgumentError,
    RingcommError,
    UnsupportedError,
    where,
)
from ringcomm.integers import integer
from ringcomm.rendezvous.launchers import read_environment

__all__ = ["ALONE", "CommArgument", "find_communicator", "find_device_type"]


# ---- Meshes of the ranks of a job whose inner axes stay within nodes ----------------------------

#: The axes that a mesh may have, from the outermost to the innermost: the ranks of inner axes
#: communicate more often. Pipeline stages send activations, replicas sum gradients once per step;
#: "cp" shares the tokens of a sequence, "ep" experts, and "tp" each matrix product.
AXES = ("pp", "dp_replicate", "dp", "dp_shard", "cp", "ep", "tp")


def Mesh(*, device: str | None = None, **axes: int) -> DeviceMesh:
    """Makes the ``DeviceMesh`` of all ranks, its axes placed for locality; collective.

    Ranks of one node are adjacent, in the order of nodes, whatever numbers the launcher gave them,
    and the innermost axes ("tp", then "cp", then "dp") connect neighbors. So an axis stays within
    nodes if the axis and its inner axes fit into a node. Pass ``mesh["tp"]`` to
    ``parallelize_module``, ``mesh["dp"]`` to ``optim.AdamW(comm=)`` and ``zero.shard(comm=)``.

    Args:
        device: "cpu" or "cuda", the type of the tensors; None: the default group's type.
        axes: sizes by name, names from ``AXES`` in any order; one size may be -1, for all remaining
            ranks. An axis of one rank is allowed.

    Raises:
        ArgumentError: an unknown axis, or the product of the sizes is not the number of ranks
            (raised on all ranks); or an unknown device.
        UnsupportedError: the device is "cuda", and torch finds none.
        MismatchError: the ranks pass different axes.
        RingcommError: there is no default group of ``torch.distributed``.
    """
    if not dist.is_initialized():
        raise RingcommError(
            "Mesh: expected a default group of torch.distributed; call "
            'torch.distributed.init_process_group("ringcomm") first'
        )
    group = dist.group.WORLD
    assert group is not None
    # Keep a value that is not an integer: all ranks then raise for it.
    read = {name: integer(size) for name, size in axes.items()}
    axes = {name: axes[name] if size is None else size for name, size in read.items()}
    _check_same(axes, group)
    sizes = _sizes(axes, group.rank(), group.size())
    _check_device(device, group)
    nodes = _nodes(group)
    ranks = sorted(range(group.size()), key=lambda rank: (nodes[rank], rank))
    grid = torch.tensor(ranks, dtype=torch.int, device="cpu").view(*sizes.values())
    if group.rank() == 0:
        _warn_of_axes_over_nodes(sizes, grid, nodes)
    return DeviceMesh(device or _device_type(group), grid, mesh_dim_names=tuple(sizes))


def _check_same(axes: dict[str, int], group: dist.ProcessGroup) -> None:
    """Compares the axes of all ranks; collective, so that all ranks raise or none."""
    sizes = [axes.get(name, 0) for name in AXES]
    # The checksum covers invalid names and sizes, for which _sizes() then raises on all ranks.
    asked = [integer(size) or 0 for size in sizes]
    asked.append(zlib.crc32(repr(sorted(axes.items())).encode()))
    mine = torch.tensor(asked, dtype=torch.int64, device=_device_type(group))
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    found = [each.tolist() for each in everyone]
    if other := first_other(found):
        raise unequal(
            where("Mesh", group.rank(), group.size()),
            ("shape of the mesh", "checksum of the axes"),
            [(_by_dimension(each), each[-1]) for each in found],
            other,
            "Give all ranks the same axes",
        )


def _check_device(device: str | None, group: dist.ProcessGroup) -> None:
    head = where("Mesh", group.rank(), group.size())
    if device not in (None, "cpu", "cuda"):
        raise ArgumentError(f"{head}: device: expected 'cpu', 'cuda' or None, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"{head}: device: expected 'cpu', since torch finds no GPU in this process, got 'cuda'"
        )


def _by_dimension(asked: list[int]) -> dict[str, int]:
    return {name: size for name, size in zip(AXES, asked, strict=False) if size}


def _sizes(axes: dict[str, int], rank: int, world_size: int) -> dict[str, int]:
    """Returns the sizes in the order of the axes; raises ArgumentError if they make no mesh."""
    head = where("Mesh", rank, world_size)
    unknown = [name for name in axes if name not in AXES]
    if unknown or not axes:
        raise ArgumentError(
            f"{head}: expected sizes of axes among {', '.join(AXES)}, got "
            f"{', '.join(unknown) or 'none'}"
        )
    for name, size in axes.items():
        if integer(size) is None or (size < 1 and size != -1):
            raise ArgumentError(f"{head}: {name}: expected a size >= 1, or -1, got {size!r}")
    given = math.prod(size for size in axes.values() if size > 0)
    left = [name for name, size in axes.items() if size == -1]
    told = " x ".join(f"{name}={axes[name]}" for name in AXES if name in axes)
    if len(left) > 1 or world_size % given or (not left and given != world_size):
        raise ArgumentError(
            f"{head}: expected sizes whose product is the number of ranks, {world_size} "
            f"(one size may be -1), got {told}"
        )
    return {
        name: world_size // given if name in left else axes[name] for name in AXES if name in axes
    }


def _nodes(group: dist.ProcessGroup) -> list[int]:
    """Returns the node of each rank; 0 for all if the backend does not know the nodes."""
    ours = behind(group)
    if ours is None:
        return [0] * group.size()
    comm = ours.communicator
    return [comm.node_of(rank) for rank in range(comm.world_size)]


def _device_type(group: dist.ProcessGroup) -> str:
    types = [device.type for device in group._device_types]
    return "cuda" if types == ["cuda"] else "cpu"


def _warn_of_axes_over_nodes(sizes: dict[str, int], grid: torch.Tensor, nodes: list[int]) -> None:
    """Warns if ranks that share the work of each matrix product are on several nodes."""
    if "tp" not in sizes:
        return
    for ranks in grid.view(-1, sizes["tp"]).tolist():
        found = sorted({nodes[rank] for rank in ranks})
        if len(found) > 1:
            warnings.warn(
                f"Mesh: tp={sizes['tp']} does not divide the ranks of a node: ranks {ranks} are on "
                f"nodes {found}, and exchange something in every layer. Choose a tp that divides "
                "them",
                RuntimeWarning,
                stacklevel=3,
            )
            return


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
    """Returns the communicator for ``comm``; collective, see NOTE [Groups of other backends].

    ``comm=None`` means ringcomm's default group, else torch.distributed's, else this rank alone.

    Args:
        comm: the user's argument.
        operation: the name of the operation, for errors.
        device: the device of the tensors; None or the meta device if there are none yet.

    Returns:
        The communicator; None if this rank is alone.

    Raises:
        ArgumentError: this rank is not in the group, a mesh has several dimensions, ``comm`` has
            another type, or is None although a launcher has started several ranks.
        UnsupportedError: the ranks of a group run on several machines, or this process lacks the
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
    """Returns the device type of the tensors for ``comm``, or "cpu"; connects nothing.

    Raises:
        ArgumentError: as :func:`find_communicator`, except for ``comm=None`` under a launcher.
    """
    named, mesh_device = _named(comm, operation)
    if isinstance(named, Communicator):
        return named.device.type
    return torch.device("cpu" if named is None else mesh_device or _device_of(named)).type


def _named(comm: Any, operation: str) -> tuple[_Group, str | None]:
    """Returns the group, or None for this rank alone; and the device type of its mesh, or None."""
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
    # torch's and ringcomm's new_group() return this value on ranks outside of the group.
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
            f"{operation}: comm: expected a DeviceMesh of one dimension, got a mesh of "
            f"{mesh.ndim} dimensions{f' {names}' if names else ''}; pass the one-dimensional mesh "
            f"whose ranks share the work, as {example}"
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
    """Raises if a launcher has started several ranks: each would train its own model."""
    launched = read_environment()
    if launched.world_size > 1:
        raise ArgumentError(
            f"{where(operation, launched.rank, launched.world_size)}: comm: "
            f"{launched.launcher} has started {launched.world_size} ranks, but there is no "
            "group of them; call ringcomm.init_process_group() or "
            'torch.distributed.init_process_group() first, or pass comm="alone" for ranks that '
            "must not work together"
        )


def _device_of(group: dist.ProcessGroup) -> torch.device | str:
    """Returns the device that a group is bound to, or the type of its tensors' devices."""
    bound = group.bound_device_id
    if bound is not None:
        return bound
    return "cuda" if [device.type for device in group._device_types] == ["cuda"] else "cpu"


def _over(
    group: dist.ProcessGroup, operation: str, device: torch.device | str
) -> Communicator | None:
    """Returns the group's communicator for a device; None for one rank without a communicator."""
    ours = behind(group)
    if ours is not None:
        return ours.communicator_on(device)
    if group.size() == 1:
        return None
    index = find_device(device, operation)
    communicators = _built.get(group)
    if communicators is None:
        communicators = _built[group] = Communicators.over(group, "comm", CommOptions())
    return communicators.host if index is None else communicators.on_device(index, operation)
