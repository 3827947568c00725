# SPDX-License-Identifier: Apache-2.0
"""Placements, which record that a sharded module's buckets hold an optimizer's parameters.

``ringcomm.zero`` puts the parameters of a module into buckets. An optimizer that is built on the
parameters later finds their placement here, and uses these buckets instead of making new ones.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.comm.agreement import all_or_none, check_agreement, check_on_mesh, exchange
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ALGORITHMS
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.offload.scratch import DiskChunks
from ringcomm.optim.backends import Backend, StagePlan
from ringcomm.optim.buckets import Bucket, Buckets, count_change
from ringcomm.optim.dtensors import MeshView, local_of
from ringcomm.optim.gradients import Accumulator, Gradients, label
from ringcomm.optim.layout import TILE_ELEMS, ParamSpec, ShardLayout
from ringcomm.optim.options import AdamWOptions

# ---- The argument ``mesh``: axes whose ranks share a local tensor's state, and other axes -------

#: The axis whose ranks have different stages of a pipeline.
STAGES = "pp"
#: The axes whose ranks have the same parameters and different data, and share the state.
SHARING = ("dp_replicate", "dp", "dp_shard", "cp")
_TENSOR = "tp"


class ModelMesh(MeshView):
    """The mesh of a model's pipeline stages and tensor shards: all axes except data parallelism.

    Args:
        mesh: the mesh; the axis "pp" numbers the stages, other axes number shards of one stage.
        tensor_mesh: the mesh of this rank's DTensor parameters, or None.
        operation: name of the operation, for errors.

    Raises:
        ArgumentError: an axis has an unknown use, or DTensors are not sharded along the axes.
    """

    def __init__(self, mesh: DeviceMesh, tensor_mesh: MeshView | None, operation: str) -> None:
        super().__init__(mesh)
        names = _names(mesh)
        self._axes_of_dtensors: list[int | None] = []
        if tensor_mesh is not None:
            self._axes_of_dtensors = [
                _axis_of(dim, tensor_mesh, self, operation) for dim in range(tensor_mesh.mesh.ndim)
            ]
        known = {names[dim] for dim in self._axes_of_dtensors if dim is not None}
        unknown = [name for name in names if name not in {STAGES, _TENSOR, *known}]
        if unknown:
            raise ArgumentError(
                f"{operation}: mesh: expected the axes {STAGES}, {', '.join(SHARING)}, {_TENSOR} "
                f"and the axes of DTensor parameters, got {unknown[0]!r}, along which it is "
                "unknown whether ranks have the same parameters; pass a mesh without this axis"
            )
        self._stages = [dim for dim, name in enumerate(names) if name == STAGES]

    @property
    def has_stages(self) -> bool:
        """True if the mesh has several pipeline stages; only the last stage has the loss."""
        return bool(self._stages)

    def counts(self, mesh_dims: Sequence[int]) -> bool:
        """True if this rank is the first of the ranks that have its stage and its shard.

        Args:
            mesh_dims: the dimensions of the DTensors' mesh along which the summed tensor is
                sharded.
        """
        divides = (self._axes_of_dtensors[dim] for dim in mesh_dims)
        return super().counts([*self._stages, *(dim for dim in divides if dim is not None)])


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def _axis_of(dim: int, tensor_mesh: MeshView, whole: MeshView, operation: str) -> int | None:
    """Returns the axis of ``whole`` with the ranks of ``dim``; None if ``dim`` has one rank."""
    if tensor_mesh.mesh.size(dim) == 1:
        return None
    mine = dist.get_process_group_ranks(tensor_mesh.mesh.get_group(dim))
    for axis in whole.dims:
        if dist.get_process_group_ranks(whole.mesh.get_group(axis)) == mine:
            return axis
    raise ArgumentError(
        f"{operation}: mesh: the parameters are DTensors on ranks {mine}, which match no axis of "
        f"{_names(whole.mesh)}; parallelize on mesh[{_TENSOR!r}]"
    )


def read_mesh(
    mesh: DeviceMesh | None, comm: CommArgument, operation: str
) -> tuple[CommArgument, DeviceMesh | None]:
    """Divides a mesh into the ranks that share state, and the axes of other shards and stages.

    Args:
        mesh: the user's argument ``mesh``, or None.
        comm: the user's argument ``comm``.
        operation: named in errors.

    Returns:
        The ranks that share state, in a form of the argument ``comm``; and a mesh of the other axes
        that have several ranks, or None if there are no such axes.

    Raises:
        ArgumentError: the user passed both arguments; or the mesh has no axis of data parallelism,
            or does not contain this rank.
    """
    if mesh is None:
        return comm, None
    if comm is not None:
        raise ArgumentError(
            f"{operation}: expected comm= or mesh=, got both; with mesh= its axis of data "
            "parallelism takes the place of comm="
        )
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"{operation}: mesh: expected a DeviceMesh, got {mesh!r}")
    names = _names(mesh)
    sharing = [name for name in names if name in SHARING]
    if not sharing:
        raise ArgumentError(
            f"{operation}: mesh: expected a DeviceMesh with an axis 'dp', whose ranks share the "
            f"state, got one with the axes {names}; make it by ringcomm.Mesh(pp=, dp=, tp=), with "
            "dp=1 if no ranks share state"
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(
            f"{operation} on rank {dist.get_rank()}: mesh: expected a mesh with this rank, got "
            f"{mesh}; only ranks of the mesh may call"
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
    """Returns the number of pipeline stages in a mesh that :func:`read_mesh` returned."""
    if others is None or STAGES not in _names(others):
        return 1
    return others.size(_names(others).index(STAGES))


def ranks_of_stage(others: DeviceMesh | None, tensor_mesh: MeshView | None) -> MeshView | None:
    """Returns the mesh of the ranks that have this rank's stage; None if only this rank has it.

    If ``others`` is None, returns ``tensor_mesh``.

    Args:
        others: as :func:`read_mesh` returns it.
        tensor_mesh: the mesh of DTensor parameters, or None.
    """
    if others is None:
        return tensor_mesh
    axes = tuple(name for name in _names(others) if name != STAGES)
    return MeshView(others[axes]) if axes else None


def with_all_stages(
    comm: Communicator | None, others: DeviceMesh | None, operation: str
) -> AbstractContextManager[None]:
    """Returns a context that raises one rank's error on the ranks of all stages; collective.

    Without it, an error in one stage's comparison would leave the other stages waiting.

    Args:
        comm: the ranks that share state; None for this rank alone.
        others: as :func:`read_mesh` returns it.
        operation: named in errors.
    """
    return nullcontext() if others is None else all_or_none(comm, operation, MeshView(others))


def warn_of_idle_axis(over: MeshView, divided: Sequence[bool]) -> None:
    """Warns, on the first rank, if no parameter is sharded along the axis "tp" of a mesh.

    Args:
        over: the mesh of all stages and shards.
        divided: for each rank, True if the rank has DTensors.
    """
    names = _names(over.mesh)
    if over.number == 0 and _TENSOR in names and not any(divided):
        ranks = over.mesh.size(names.index(_TENSOR))
        warnings.warn(
            f"mesh: no parameter is a DTensor, so the {ranks} ranks of the axis {_TENSOR!r} count "
            "as replicas that compute the same, and their gradients are not summed; divide the "
            f"layers on mesh[{_TENSOR!r}], by parallelize_module() or ringcomm.extras.parallel, "
            "before shard() or the optimizer",
            RuntimeWarning,
            stacklevel=2,
        )


def over_mesh(
    others: DeviceMesh | None, tensor_mesh: MeshView | None, operation: str
) -> MeshView | None:
    """Returns the mesh of norms: ``others`` with the tensor shards, else ``tensor_mesh`` alone.

    Args:
        others: as :func:`read_mesh` returns it.
        tensor_mesh: the mesh of DTensor parameters, or None.
        operation: named in errors.

    Raises:
        ArgumentError: see :class:`ModelMesh`.
    """
    return tensor_mesh if others is None else ModelMesh(others, tensor_mesh, operation)


Tensor = torch.Tensor
Group = Mapping[str, Any]

OPERATION = "optimizer.prepare"


def all_params(groups: Sequence[Group]) -> list[Tensor]:
    """Returns the parameters of all groups, in order; tied parameters occur several times."""
    return [param for group in groups for param in group["params"]]


def specs_of(groups: Sequence[Group]) -> list[ParamSpec]:
    """Returns the specs of :func:`all_params`; a repeated tensor is tied to its first entry."""
    specs: list[ParamSpec] = []
    first: dict[int, int] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for param, name in zip(group["params"], names, strict=True):
            specs.append(ParamSpec.of(param, number, name, first.get(id(param))))
            first.setdefault(id(param), len(specs) - 1)
    return specs


def check_memory(params: Sequence[Tensor], layout: ShardLayout) -> None:
    """Checks that no two parameters share memory, since moving them would silently untie them.

    Raises:
        ArgumentError: two parameters share memory; the message names both.
    """
    here = {index: local_of(params[index]) for index in layout.locations}
    spans = sorted(
        (local.data_ptr(), local.data_ptr() + _extent_bytes(local), index)
        for index, local in here.items()
        if local.device.type != "meta"
    )
    for (_, end, index), (begin, _, other) in pairwise(spans):
        if begin < end:
            names = [label(each, layout.params[each]) for each in sorted((index, other))]
            raise ArgumentError(
                f"{names[0]} and {names[1]} are two tensors that share memory. To tie them, use "
                "one Parameter for both; else give each its own memory with .clone()"
            )


def _extent_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the memory from the first to the last element of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def check_masters(layout: ShardLayout, options: AdamWOptions) -> None:
    """Checks that the options fit the parameters' dtypes.

    Raises:
        ArgumentError: a parameter is float16 and ``master`` is "remainder".
    """
    for index in layout.locations:
        if options.master == "remainder" and layout.params[index].dtype is torch.float16:
            raise ArgumentError(
                f"{label(index, layout.params[index])}: master: expected bfloat16 or float32 "
                'parameters with "remainder" (the low half of an FP32 number), got float16; use '
                'master="fp32"'
            )


def check_axis(comm: Communicator | None, mesh: MeshView | None, operation: str) -> None:
    """Checks that the ranks that share state have the same local tensors; collective.

    Args:
        comm: the ranks; None for this rank alone.
        mesh: mesh of the DTensor parameters; None if every rank has whole parameters.
        operation: name of the operation, for the error.

    Raises:
        ArgumentError: the ranks' coordinates on the mesh differ; all ranks raise.
    """
    if comm is None or mesh is None or comm.world_size == 1:
        return
    coordinates = exchange(comm, mesh.describe())
    if all(each == coordinates[0] for each in coordinates):
        return
    other = next(rank for rank, each in enumerate(coordinates) if each != coordinates[0])
    raise ArgumentError(
        f"{where(operation, comm.rank, comm.world_size)}: comm: the parameters are DTensors. "
        f"Rank 0 has the local tensors at {coordinates[0]} of their mesh, rank {other} the local "
        f"tensors at {coordinates[other]}; only ranks with equal local tensors can share state. "
        'Pass the axis of data parallelism, as comm=mesh["dp"] of a mesh with the names '
        '("dp", "tp")'
    )


def check_ranks(
    operation: str,
    comm: Communicator | None,
    others: DeviceMesh | None,
    mesh: MeshView | None,
    layout: ShardLayout,
    told: Mapping[str, Any],
) -> None:
    """Compares parameters, hyper-parameters (lr excepted) and options of all ranks; collective.

    Ranks with different local tensors compare only the whole parameters' descriptions.

    Args:
        operation: named in errors.
        comm: the ranks that share state; None for this rank alone.
        others: the mesh of other stages and shards, or None.
        mesh: the mesh of DTensor parameters, or None.
        layout: layout of the parameters.
        told: options under "options" and hyper-parameters under "groups", as JSON types.

    Raises:
        MismatchError: two ranks differ; the message names both, and the first parameter that
            differs.
    """
    with with_all_stages(comm, others, operation):
        if comm is not None:
            check_agreement(comm, operation, {"layout": layout.describe(), **told})
    with with_all_stages(comm, others, operation):
        in_common = {"layout": layout.describe_whole(), **told}
        check_on_mesh(comm, ranks_of_stage(others, mesh), operation, in_common)


def move_parameters(
    params: list[Tensor], buckets: Buckets, comm: Communicator | None, broadcast: bool
) -> None:
    """Moves parameters into their buckets; ``broadcast`` copies rank 0's values to all ranks."""
    buckets.adopt(params)
    if comm is not None and broadcast:
        for bucket in buckets:
            comm.broadcast(bucket.params, 0)
        count_change([params[index] for index in buckets.params])


def share_params(comm: Communicator, sharers: Communicator, buckets: Buckets) -> None:
    """Copies each rank's chunk of the parameters to all ranks that keep them; collective.

    Args:
        comm: all ranks.
        sharers: the ranks that share the state.
        buckets: buckets of the parameters.
    """
    for bucket in buckets:
        if bucket.has_all_params and bucket.compression is None:
            own = bucket.own_params.clone()
            chunks = [bucket.params[c.begin : c.end] for c in bucket.layout.chunks(sharers)]
            sharers.all_gather(chunks, own)
    end_changes(comm, buckets)


def end_changes(comm: Communicator, buckets: Sequence[Bucket]) -> None:
    """Publishes changes of parameters that other ranks read in this rank's memory; collective.

    It updates all copies of the parameters, and returns only once all ranks' copies are updated.
    """
    split = [bucket for bucket in buckets if not bucket.has_all_params or bucket.compression]
    for bucket in split:
        bucket.share()
    if split:
        comm.barrier()


def check_nodes(comm: Communicator, operation: str, algorithm: str, kernels: str) -> None:
    """Checks that state can be sharded over a communicator's nodes, if it has several.

    Raises:
        UnsupportedError: the algorithm or the kernels work only within one node, or no state can be
            sharded over the communicator.
    """
    if comm.num_nodes == 1:
        return
    comm.steps.shard_index  # noqa: B018 -- a communicator that shards no state raises here
    head = where(operation, comm.rank, comm.world_size)
    if algorithm == "ring":
        raise UnsupportedError(
            f'{head}: algorithm: expected "auto" or "one_shot" over several nodes, got "ring", '
            "which works only within one node (Communicator.node)"
        )
    if kernels != "native":
        raise UnsupportedError(
            f'{head}: kernels: expected "native" over several nodes, got {kernels!r}, which '
            "work only within one node (Communicator.node)"
        )


def check_even(comm: Communicator, operation: str, asked: str, instead: str) -> None:
    """Checks that all nodes have equally many ranks.

    The ranks of a rail, one per node, update and exchange one chunk, so nodes need equal chunks.

    Raises:
        UnsupportedError: the nodes have different numbers of ranks.
    """
    sizes = list(Counter(map(comm.node_of, range(comm.world_size))).values())
    if len(set(sizes)) > 1:
        raise UnsupportedError(
            f"{where(operation, comm.rank, comm.world_size)}: {asked}: expected nodes with equally "
            f"many ranks, got {', '.join(map(str, sizes))}. Pass {instead}, start as many ranks on "
            "each node, or shard over a new_group() with equally many ranks of each node"
        )


def check_segments(comm: Communicator, algorithm: int) -> None:
    """Raises UnsupportedError if a ring segment is smaller than a tile, the unit of norm sums."""
    segment_bytes, least = comm.engine.segment_bytes, TILE_ELEMS * 4
    if comm.engine.chosen(algorithm) == ALGORITHMS["ring"] and segment_bytes < least:
        raise UnsupportedError(
            f"optimizer: ring algorithms move whole tiles of {TILE_ELEMS} elements, so they "
            f"expect CommOptions.segment_bytes >= {least}, got {segment_bytes}"
        )


class BucketOwner(Protocol):
    """The part of an optimizer's step that a placement uses; the step keeps the optimizer state."""

    buckets: Buckets


class ShardedModule(Protocol):
    """The interface through which optimizers use a module whose parameters are in buckets."""

    @property
    def watchers(self) -> Mapping[int, Callable[[str, Tensor, int], object]]:
        """Numbered functions that receive each reduced gradient; all ranks have equally many.

        Each function takes the parameter's name, this rank's elements of the flattened reduced
        gradient, and the index of the first of these elements. It may write to the elements.
        """

    def check_values(self, operation: str) -> None:
        """Checks that the parameters have the values to which the masters belong.

        Args:
            operation: named in errors.

        Raises:
            ArgumentError: the parameters temporarily have other values.
        """

    def count_change(self, params: Sequence[Tensor] | None = None) -> None:
        """Increments the versions of changed parameters; None means all parameters."""

    def forget_gradients(self, set_to_none: bool) -> None:
        """Forgets the gradients of earlier backwards, with or without an optimizer.

        Args:
            set_to_none: True to set gradients to None, False to set them to zero.
        """


class Placement(ABC):
    """The buckets of a sharded module's parameters, and how an optimizer's step uses them."""

    #: The module.
    module: ShardedModule
    #: The trainable parameters, including those without elements, and their names.
    params: Sequence[Tensor]
    names: Sequence[str]
    #: The ranks that share the parameters; None for a world of one on the host.
    comm: Communicator | None
    #: Index of the chunk that this rank keeps state for, and the number of chunks.
    shard_of: tuple[int, int]
    #: The mesh of other stages and shards of the model, or None.
    others: DeviceMesh | None
    #: True if the loss must be scaled before backward.
    scaled: bool
    #: The number that a step divides reduced gradients by.
    divisor: int = 1
    #: The latest optimizer that was built on the parameters, prepared or not; or None.
    optimizer: weakref.ref[Optimizer] | None = None
    #: The error that made this rank's gradients wrong, until the gradients are cleared; else None.
    lost: RingcommError | None = None
    #: The disk with this rank's chunks of the parameters; None if they are in memory.
    store: DiskChunks | None = None
    _owner: weakref.ref[BucketOwner] | None = None

    def name_of(self, param: Tensor) -> str:
        """Returns the name of a parameter of the module."""
        named = zip(self.names, self.params, strict=True)
        return next(name for name, each in named if each is param)

    def left_out(self, groups: Sequence[Group]) -> list[Tensor]:
        """Returns the module's parameters that are not in an optimizer's groups."""
        there = {id(param) for param in all_params(groups)}
        return [param for param in self.params if id(param) not in there]

    @property
    def owner(self) -> BucketOwner | None:
        """The optimizer's step, or None before there is one."""
        return None if self._owner is None else self._owner()

    def bind(self, owner: BucketOwner, before: BucketOwner | None = None) -> None:
        """Makes one optimizer the owner.

        Args:
            owner: the optimizer's step.
            before: the step that ``owner`` replaces if the optimizer has grown; else None.

        Raises:
            ArgumentError: another optimizer is the owner.
        """
        if self.owner is not before:
            raise ArgumentError(
                "optimizer: another optimizer steps these parameters already; build only one, or "
                "call remove_sharding() and shard() the module again"
            )
        self._owner = weakref.ref(owner)

    @abstractmethod
    def options(self, options: AdamWOptions) -> AdamWOptions:
        """Returns the optimizer's options; the placement's values replace some of them.

        Raises:
            ArgumentError: the optimizer was given other values for the replaced options.
        """

    @abstractmethod
    def layout(self, params: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> ShardLayout:
        """Returns the layout with parameters in the optimizer's order."""

    @abstractmethod
    def buckets(self, layout: ShardLayout, options: AdamWOptions) -> Buckets:
        """Returns the buckets for an optimizer with these options."""

    @abstractmethod
    def gradients(
        self,
        params: Sequence[Tensor],
        layout: ShardLayout,
        buckets: Buckets,
        accumulator: Accumulator | None,
    ) -> Gradients:
        """Returns the gradients of a step."""

    @abstractmethod
    def accumulate(self, accumulator: Accumulator) -> None:
        """Makes backwards add unreduced gradients to an accumulator.

        Raises:
            ArgumentError: backwards have already reduced gradients without an accumulator.
        """

    @abstractmethod
    def stage_plan(self, backend: Backend) -> StagePlan:
        """Returns the plan of a step, with the optimizer's backend."""

    @abstractmethod
    def check(self, operation: str) -> None:
        """Checks that the parameters are where shard() put them; called before a step.

        Args:
            operation: named in errors.

        Raises:
            ArgumentError: a parameter was moved, replaced, or written to in memory whose values the
                step would not use.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Ends a step whose updates backward has made (``update="in_backward"``); collective.

        Raises:
            RingcommError: a bucket could not be updated, on this rank or another.
        """


# The keys are weak and compared by id(), and the values are weak since they refer to the keys.
# torch's class is not typed.
_placements: MutableMapping[Tensor, weakref.ref[Placement]] = cast(Any, WeakIdKeyDictionary)()
# Maps parameters that were frozen when their module was sharded to their name and placement.
_frozen: MutableMapping[Tensor, tuple[str, weakref.ref[Placement]]] = cast(
    Any, WeakIdKeyDictionary
)()
# The ids of both dictionaries' keys, and of some deleted keys. Look-ups test this set first, since
# it takes an eighth of the time of a look-up in a weak dictionary.
_ids: set[int] = set()


def set_placement(param: Tensor, placement: Placement) -> None:
    """Records a parameter's placement."""
    _placements[param] = weakref.ref(placement)
    _ids.add(id(param))


def displace(param: Tensor) -> None:
    """Removes the records of :func:`set_placement` and :func:`set_frozen_placement`."""
    _placements.pop(param, None)
    _frozen.pop(param, None)
    _ids.discard(id(param))


def set_frozen_placement(param: Tensor, name: str, placement: Placement) -> None:
    """Records a parameter that was frozen when its module was sharded."""
    _frozen[param] = name, weakref.ref(placement)
    _ids.add(id(param))


def check_frozen(params: Iterable[Tensor], operation: str) -> None:
    """Checks that no trainable parameter was frozen when its module was sharded.

    Raises:
        ArgumentError: a trainable parameter was frozen then; the message names the parameter.
    """
    for param in params:
        found = _frozen.get(param) if id(param) in _ids and param.requires_grad else None
        if found is not None and found[1]() is not None:
            raise ArgumentError(
                f"{operation}: parameter {found[0]} was frozen when shard() laid out its module, "
                "and has no memory for a gradient there. Call remove_sharding(), unfreeze the "
                "parameter, and shard() the module again; a parameter to be trained at times must "
                "require a gradient at shard(), and can be frozen right after it"
            )


def first_with_placement(groups: Iterable[Mapping[str, Any]]) -> tuple[Tensor, Placement] | None:
    """Returns the first parameter in groups that has a placement, with that placement, or None."""
    for group in groups:
        params = group["params"]
        if _ids.isdisjoint(map(id, params)):
            continue
        for param in params:
            placement = placement_of(param)
            if placement is not None:
                return param, placement
    return None


def placement_of(params: Any) -> Placement | None:
    """Returns the first placement of a parameter in an optimizer's argument ``params``, or None."""
    if isinstance(params, Tensor):
        found = _placements.get(params)
        return None if found is None else found()
    if isinstance(params, dict):
        return placement_of(params.get("params", ()))
    if isinstance(params, (list, tuple)):
        each = (placement_of(entry) for entry in params)
        return next((placement for placement in each if placement is not None), None)
    return None


def check_order(found: Placement | None, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that an optimizer's parameters were not sharded after the optimizer was built.

    Raises:
        ArgumentError: they were sharded later, perhaps over other ranks than the optimizer's.
    """
    if found is None and placement_of(list(groups)) is not None:
        raise ArgumentError(
            "optimizer: its parameters were sharded after it had been built; build it on the "
            "parameters of the module that shard() returned"
        )


def find_placement(groups: Sequence[Mapping[str, Any]], grows: bool = False) -> Placement | None:
    """Returns the placement of an optimizer's parameters, or None if they have no placement.

    With ``grows`` parameters may be missing, since a later group may add them.

    Raises:
        ArgumentError: the parameters have several placements, or only some have a placement, or
            trainable parameters of the sharded module are missing.
    """
    trainable = [
        (param, f"param group {number}, parameter {index}")
        for number, group in enumerate(groups)
        for index, param in enumerate(group["params"])
        if param.requires_grad
    ]
    everything = all_params(groups)
    check_frozen(everything, "optimizer")
    placements = [placement_of(param) for param in everything]
    found = {id(each): each for each in placements if each is not None}
    if not found:
        return None
    for param, called in trainable:
        if placement_of(param) is None:
            raise ArgumentError(
                f"{called}: is not a parameter of the sharded module, but others are. Build the "
                "optimizer on the parameters of one module that shard() returned, and another "
                "optimizer for parameters outside of the module, such as adapters"
            )
    if len(found) > 1:
        raise ArgumentError(
            "optimizer: expected the parameters of one sharded module, got those of "
            f"{len(found)}; shard a module that contains them, or build an optimizer for each"
        )
    (placement,) = found.values()
    left_out = [] if grows else placement.left_out(groups)
    missing = [placement.name_of(each) for each in left_out if each.requires_grad]
    if missing:
        raise ArgumentError(
            f"optimizer: expected all trainable parameters of the sharded module, {len(missing)} "
            f"are missing, the first is {missing[0]!r}. Pass module.parameters(), or freeze the "
            "others by requires_grad_(False); add_param_group() can add them later"
        )
    return placement
