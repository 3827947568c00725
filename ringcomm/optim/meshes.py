"""The argument ``mesh``: the ranks that share a part's state, and those with other parts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError
from ringcomm.optim.agreement import all_or_none
from ringcomm.optim.dtensors import PartMesh

#: The axis whose ranks have different stages of a pipeline.
STAGES = "pp"
#: The axes whose ranks have the same parameters and different data, and share the state.
SHARING = ("dp_replicate", "dp", "dp_shard", "cp")
_TENSOR = "tp"


class ModelMesh(PartMesh):
    """The mesh of all stages and parts of a model: what a whole mesh has beside data parallelism.

    Args:
        mesh: its axes; "pp" has stages, and along the others lie parts of one stage.
        parts: the mesh of this rank's DTensor parameters, or None.
        operation: named in errors.

    Raises:
        ArgumentError: an axis of unknown use, or DTensors that do not lie along the axes.
    """

    def __init__(self, mesh: DeviceMesh, parts: PartMesh | None, operation: str) -> None:
        super().__init__(mesh)
        names = _names(mesh)
        self._axes_of_parts: list[int | None] = []
        if parts is not None:
            self._axes_of_parts = [
                _axis_of(dim, parts, self, operation) for dim in range(parts.mesh.ndim)
            ]
        known = {names[dim] for dim in self._axes_of_parts if dim is not None}
        unknown = [name for name in names if name not in {STAGES, _TENSOR, *known}]
        if unknown:
            raise ArgumentError(
                f"{operation}: mesh: expected the axes {STAGES}, {', '.join(SHARING)}, {_TENSOR} "
                f"and those of DTensor parameters, got {unknown[0]!r}, along which it is unknown "
                "whether ranks have the same parameters; pass a mesh without it"
            )
        self._stages = [dim for dim, name in enumerate(names) if name == STAGES]

    @property
    def has_stages(self) -> bool:
        """True if there are several stages of a pipeline, of which one alone has the loss."""
        return bool(self._stages)

    def counts(self, mesh_dims: Sequence[int]) -> bool:
        """Returns whether this rank stands for its replicas: every stage counts.

        Args:
            mesh_dims: the dimensions of the DTensors' mesh that divide what is summed.
        """
        divides = (self._axes_of_parts[dim] for dim in mesh_dims)
        return super().counts([*self._stages, *(dim for dim in divides if dim is not None)])


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def _axis_of(dim: int, parts: PartMesh, whole: PartMesh, operation: str) -> int | None:
    """Returns the axis of a mesh along which a dimension of DTensors lies; None for one rank."""
    if parts.mesh.size(dim) == 1:
        return None
    mine = dist.get_process_group_ranks(parts.mesh.get_group(dim))
    for axis in whole.dims:
        if dist.get_process_group_ranks(whole.mesh.get_group(axis)) == mine:
            return axis
    raise ArgumentError(
        f"{operation}: mesh: the parameters are DTensors on ranks {mine}, which are those of no "
        f"axis of {_names(whole.mesh)}; parallelize on mesh[{_TENSOR!r}]"
    )


def read_mesh(
    mesh: DeviceMesh | None, comm: CommArgument, operation: str
) -> tuple[CommArgument, DeviceMesh | None]:
    """Divides a mesh into the ranks that share state, and the axes of other parts and stages.

    Args:
        mesh: what the user gave as ``mesh``, or None.
        comm: what the user gave as ``comm``.
        operation: named in errors.

    Returns:
        The argument ``comm`` for the ranks that share state; and a mesh of the axes that have
        several ranks with other parameters, or None where there are none.

    Raises:
        ArgumentError: both were given, or the mesh has no axis of data parallelism, or not this
            rank.
    """
    if mesh is None:
        return comm, None
    if comm is not None:
        raise ArgumentError(
            f"{operation}: expected comm= or mesh=, got both; the axis of data parallelism of "
            "mesh= is the comm"
        )
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"{operation}: mesh: expected a DeviceMesh, got {mesh!r}")
    names = _names(mesh)
    sharing = [name for name in names if name in SHARING]
    if not sharing:
        raise ArgumentError(
            f"{operation}: mesh: expected a DeviceMesh with an axis 'dp', whose ranks share the "
            f"state, got one with the axes {names}; make it by ringcomm.Mesh(pp=, dp=, tp=), with "
            "dp=1 if no rank shares any"
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(
            f"{operation} on rank {dist.get_rank()}: mesh: expected one with this rank, got "
            f"{mesh}; only its members may call"
        )
    several = [name for name in sharing if mesh.size(names.index(name)) > 1] or sharing[:1]
    others = tuple(
        name for dim, name in enumerate(names) if name not in SHARING and mesh.size(dim) > 1
    )
    shared = mesh[several[0]]
    if len(several) > 1:
        shared = mesh[tuple(several)]._flatten("_".join(several))
    return shared, mesh[others] if others else None


def stages_of(others: DeviceMesh | None) -> int:
    """Returns the number of stages of a pipeline that a mesh of :func:`read_mesh` has."""
    if others is None or STAGES not in _names(others):
        return 1
    return others.size(_names(others).index(STAGES))


def ranks_of_stage(others: DeviceMesh | None, parts: PartMesh | None) -> PartMesh | None:
    """Returns the mesh whose ranks have one stage, in parts or alike; None where there is one rank.

    Without a whole mesh only the parameters tell: those that are DTensors have parts.

    Args:
        others: as :func:`read_mesh` returns it.
        parts: the mesh of DTensor parameters, or None.
    """
    if others is None:
        return parts
    axes = tuple(name for name in _names(others) if name != STAGES)
    return PartMesh(others[axes]) if axes else None


def with_all_stages(
    comm: Communicator | None, others: DeviceMesh | None, operation: str
) -> AbstractContextManager[None]:
    """Has what raises inside raise on the ranks of all stages and parts, too; collective on them.

    What is compared within a stage may differ there alone, and the others would wait for it.

    Args:
        comm: the ranks that share state; None for this one alone.
        others: as :func:`read_mesh` returns it.
        operation: named in errors.
    """
    return nullcontext() if others is None else all_or_none(comm, operation, PartMesh(others))


def warn_of_idle_axis(over: PartMesh, divided: Sequence[bool]) -> None:
    """Warns, on the first rank, if a mesh has an axis "tp" along which nothing is divided.

    Args:
        over: the mesh of all stages and parts.
        divided: by rank, whether it has DTensors.
    """
    names = _names(over.mesh)
    if over.number == 0 and _TENSOR in names and not any(divided):
        ranks = over.mesh.size(names.index(_TENSOR))
        warnings.warn(
            f"mesh: no parameter is a DTensor, so the {ranks} ranks of the axis {_TENSOR!r} count "
            "as replicas that compute the same, and their gradients are not summed; divide the "
            f"layers on mesh[{_TENSOR!r}], by parallelize_module() or ringcomm.parallel, before "
            "shard() or the optimizer",
            RuntimeWarning,
            stacklevel=2,
        )


def over_mesh(others: DeviceMesh | None, parts: PartMesh | None, operation: str) -> PartMesh | None:
    """Returns the mesh that norms are taken over: of all stages and parts, or of parts alone.

    Args:
        others: as :func:`read_mesh` returns it.
        parts: the mesh of DTensor parameters, or None.
        operation: named in errors.

    Raises:
        ArgumentError: see :class:`ModelMesh`.
    """
    return parts if others is None else ModelMesh(others, parts, operation)
