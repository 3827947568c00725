"""Meshes of the ranks of a job whose inner axes stay within nodes."""

from __future__ import annotations

import math
import warnings
import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.process_group import ProcessGroup as RingcommGroup
from ringcomm.errors import (
    ArgumentError,
    MismatchError,
    RingcommError,
    UnsupportedError,
    where,
)
from ringcomm.integers import integer

#: The axes that a mesh may have, from the outermost to the innermost: the further in, the more
#: often its ranks exchange something. Stages of a pipeline send activations, replicas sum gradients
#: once a step; "cp" shares the tokens of a sequence, "ep" experts, and "tp" each matrix product.
AXES = ("pp", "dp_replicate", "dp", "dp_shard", "cp", "ep", "tp")


def Mesh(*, device: str | None = None, **axes: int) -> DeviceMesh:
    """Makes the ``DeviceMesh`` of all ranks, its axes placed for locality; collective.

    Ranks of one node come one after the other, in the order of nodes, whatever numbers the launcher
    gave them, and the innermost axes ("tp", then "cp", then "dp") take neighbours. So an axis is
    within nodes if it and those inside it fit there. ``mesh["tp"]`` goes to ``parallelize_module``,
    ``mesh["dp"]`` to ``optim.AdamW(comm=)`` and ``zero.shard(comm=)``.

    Args:
        device: "cpu" or "cuda", the type of the tensors; None is that of the default group.
        axes: sizes by name, of ``AXES``, in any order; one may be -1, for what the others leave.
            An axis of one rank is an axis, too.

    Raises:
        ArgumentError: there is no such axis, or the sizes do not multiply to the number of ranks,
            on all ranks alike; or no such device.
        UnsupportedError: the device is "cuda", and torch finds none.
        MismatchError: the ranks ask for different axes.
        RingcommError: there is no default group of ``torch.distributed``.
    """
    if not dist.is_initialized():
        raise RingcommError(
            "Mesh: expected a default group of torch.distributed; call "
            'torch.distributed.init_process_group("ringcomm") first'
        )
    group = dist.group.WORLD
    assert group is not None
    # A value that is not an integer stays as it is, and all ranks refuse it.
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
    """Compares what all ranks ask for; collective, so that all of them raise or none."""
    sizes = [axes.get(name, 0) for name in AXES]
    # The sum stands for what is no size of an axis, which _sizes() then refuses on all ranks alike.
    asked = [integer(size) or 0 for size in sizes]
    asked.append(zlib.crc32(repr(sorted(axes.items())).encode()))
    mine = torch.tensor(asked, dtype=torch.int64, device=_device_type(group))
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    found = [each.tolist() for each in everyone]
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise MismatchError(
                f"{where('Mesh', group.rank(), group.size())}: the ranks ask for different axes: "
                f"rank 0 for {_named(found[0])}, rank {rank} for {_named(theirs)}"
            )


def _check_device(device: str | None, group: dist.ProcessGroup) -> None:
    head = where("Mesh", group.rank(), group.size())
    if device not in (None, "cpu", "cuda"):
        raise ArgumentError(f"{head}: device: expected 'cpu', 'cuda' or None, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"{head}: device: expected 'cpu', since torch finds no GPU in this process, got 'cuda'"
        )


def _named(asked: list[int]) -> dict[str, int]:
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
            f"{head}: expected sizes whose product is the {world_size} ranks (one of them may be "
            f"-1), got {told}"
        )
    return {
        name: world_size // given if name in left else axes[name] for name in AXES if name in axes
    }


def _nodes(group: dist.ProcessGroup) -> list[int]:
    """Returns the node of each rank; all are of one where the backend does not know."""
    if not isinstance(group, RingcommGroup):
        return [0] * group.size()
    comm = group.communicator
    return [comm.node_of(rank) for rank in range(comm.world_size)]


def _device_type(group: dist.ProcessGroup) -> str:
    types = [device.type for device in group._device_types]
    return "cuda" if types == ["cuda"] else "cpu"


def _warn_of_axes_over_nodes(sizes: dict[str, int], grid: torch.Tensor, nodes: list[int]) -> None:
    """Warns if ranks that share each matrix product are on several nodes."""
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
