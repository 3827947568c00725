"""Sharded state of modules with experts: each part over the ranks that have it.

The *dense part* of a module is what all ranks have alike: everything but the experts, and so the
routers, too. Of the experts a rank has its own, and its *replicas* are the ranks with the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm import zero
from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.groups import communicator_of
from ringcomm.comm.local_world import local_world
from ringcomm.errors import ArgumentError
from ringcomm.extras.moe.layer import MoE
from ringcomm.module_names import named_modules
from ringcomm.optim.agreement import all_or_none
from ringcomm.optim.meshes import SHARING, STAGES
from ringcomm.zero.sharding import check_module, is_sharded

_SHARD = "moe.shard"
_EXPERTS, _TENSOR = "ep", "tp"
# An attribute of the module, so that both end together.
_PARTS = "_ringcomm_parts"


@dataclass(frozen=True)
class Parts:
    """The parts of a module, and the ranks that have them.

    Attributes:
        everyone: the ranks that have the dense part.
        experts: the experts of this rank, by layer; None where there are none.
        group: the ranks that experts are divided over, or None.
        replicas: the ranks with the same experts, or None.
        stages: the ranks with other stages of the model, or None.
        writes: True if this rank's experts go into checkpoints; others have the same, under tensor
            parallelism that leaves experts whole.
    """

    everyone: Communicator
    experts: nn.ModuleList | None = None
    group: Communicator | None = None
    replicas: Communicator | None = None
    stages: Communicator | None = None
    writes: bool = True


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a job that train a module: those of its stage, and of other stages."""

    everyone: Communicator
    stages: Communicator | None = None
    tensor_place: int = 0


def shard(
    module: nn.Module,
    stage: int = 2,
    *,
    comm: CommArgument = None,
    mesh: DeviceMesh | None = None,
    options: zero.ZeroOptions | None = None,
    expert_options: zero.ZeroOptions | None = None,
) -> nn.Module:
    """Shards a module that has :class:`MoE` layers, as ``zero.shard`` does; collective.

    The dense part is sharded over all ranks, and experts over the ranks that have the same. With
    ``reduce="avg"`` both have the gradient of the mean of all ranks' losses; with "sum", of the
    sum. Routers stay float32. Build :class:`Optimizer` on the module afterwards.

    Args:
        module: has layers of experts that are all divided over the same ranks.
        stage: of ZeRO, 0 to 3, of both parts.
        comm: all ranks that train the module, as of ``zero.shard``.
        mesh: in place of ``comm``, a DeviceMesh of the axes "ep" and of data parallelism, and
            perhaps "pp" and "tp".
        options: of the dense part.
        expert_options: of the experts, whose names are "0.1.weight" and so on, by layer; None
            takes ``options``, but no names of modules in them.

    Returns:
        ``module``.

    Raises:
        ArgumentError: layers of different groups, which do not divide the ranks evenly; experts
            with buffers, or on the meta device; a mesh without "ep".
        Exception: as of ``zero.shard``.

    If it raises the module is as it was, and it raises on all ranks.
    """
    ranks = _ranks_of(comm, mesh, module)
    everyone, options = ranks.everyone, zero.ZeroOptions() if options is None else options
    with all_or_none(everyone, _SHARD):
        layers = {name: each for name, each in named_modules(module) if isinstance(each, MoE)}
        group = _group_of(layers, everyone)
        _check_experts(layers)
    if group is None:
        zero.shard(module, stage, comm=everyone, options=options)
        object.__setattr__(module, _PARTS, Parts(everyone, stages=ranks.stages))
        return module
    replicas = _replicas_of(group, everyone)
    if group is everyone:
        # The layers' calls and reductions have no common order on one communicator.
        own = everyone.split(0)
        assert own is not None
        everyone = own
    experts = nn.ModuleList(layer.experts for layer in layers.values())
    chosen = _of_experts(layers, options, expert_options, group.world_size)
    zero.shard(module, stage, comm=everyone, options=_of_dense(layers, options))
    try:
        with all_or_none(everyone, _SHARD):
            zero.shard(experts, stage, comm=replicas, options=chosen)
    except Exception:
        if is_sharded(experts):
            zero.unshard(experts)
        zero.unshard(module)
        raise
    divided = any(getattr(each, "device_mesh", None) is not None for each in experts.parameters())
    writes = divided or ranks.tensor_place == 0
    parts = Parts(everyone, experts, group, replicas, ranks.stages, writes)
    object.__setattr__(module, _PARTS, parts)
    return module


def parts_of(module: nn.Module, operation: str) -> Parts:
    """Returns the parts of a module.

    Raises:
        ArgumentError: :func:`shard` has not made any.
    """
    check_module(module, operation)
    found = vars(module).get(_PARTS)
    if not isinstance(found, Parts):
        raise ArgumentError(
            f"{operation}: expected the module that moe.shard() returned, got a "
            f"{type(module).__name__} that was not sharded by it"
        )
    return found


def unshard(module: nn.Module) -> nn.Module:
    """Undoes :func:`shard`, as ``zero.unshard`` does; collective. Experts stay this rank's."""
    parts = parts_of(module, "moe.unshard")
    if parts.experts is not None:
        zero.unshard(parts.experts)
    zero.unshard(module)
    object.__delattr__(module, _PARTS)
    return module


def _ranks_of(comm: CommArgument, mesh: DeviceMesh | None, module: nn.Module) -> _Ranks:
    device = next((each.device for each in module.parameters()), None)
    if mesh is None:
        found = find_communicator(comm, _SHARD, device)
        return _Ranks(local_world(1)[0] if found is None else found)
    names = tuple(mesh.mesh_dim_names or ())
    known = (STAGES, *SHARING, _EXPERTS, _TENSOR)
    if comm is not None:
        raise ArgumentError(f"{_SHARD}: expected comm= or mesh=, got both")
    if _EXPERTS not in names or not set(names) <= set(known):
        raise ArgumentError(
            f"{_SHARD}: mesh: expected a DeviceMesh with an axis {_EXPERTS!r} and others of "
            f"{', '.join(each for each in known if each != _EXPERTS)}, got the axes {names}"
        )
    axes = tuple(name for name in names if name in SHARING or name == _EXPERTS)
    shared = mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten("_".join(axes))
    everyone = find_communicator(shared, _SHARD, device)
    assert everyone is not None
    stages = None
    if STAGES in names and mesh[STAGES].size() > 1:
        stages = find_communicator(mesh[STAGES], _SHARD, device)
    place = mesh.get_local_rank(_TENSOR) if _TENSOR in names else 0
    return _Ranks(everyone, stages, place)


def _group_of(layers: Mapping[str, MoE], everyone: Communicator) -> Communicator | None:
    """Returns the ranks that the experts of all layers are divided over."""
    groups = {name: communicator_of(each.group, _SHARD) for name, each in layers.items()}
    first = next(iter(groups.items()), None)
    if first is None:
        return None
    for name, group in groups.items():
        if (group.rank, group.world_size) != (first[1].rank, first[1].world_size):
            raise ArgumentError(
                f"{_SHARD}: expected layers whose experts are divided over the same ranks, but "
                f"this is rank {first[1].rank} of {first[1].world_size} of {first[0]!r}, and "
                f"{group.rank} of {group.world_size} of {name!r}"
            )
    if everyone.world_size % first[1].world_size:
        raise ArgumentError(
            f"{_SHARD}: comm: expected all ranks that train the module, a multiple of the "
            f"{first[1].world_size} that its experts are divided over, got {everyone.world_size}"
        )
    return first[1]


def _replicas_of(group: Communicator, everyone: Communicator) -> Communicator:
    """Builds the communicator of the ranks that have the same experts; collective."""
    replicas = everyone.split(group.rank)
    assert replicas is not None
    with all_or_none(everyone, _SHARD):
        if replicas.world_size * group.world_size != everyone.world_size:
            raise ArgumentError(
                f"{_SHARD}: expected groups of {group.world_size} ranks that divide the "
                f"{everyone.world_size} evenly, but {replicas.world_size} have rank {group.rank} "
                "of theirs"
            )
    return replicas


def _check_experts(layers: Mapping[str, MoE]) -> None:
    for name, layer in layers.items():
        for buffer, _ in layer.experts.named_buffers():
            raise ArgumentError(
                f"{_SHARD}: {name}.experts: expected no buffers, which all ranks would get from "
                f"one, got {buffer}"
            )
        for param, each in layer.experts.named_parameters():
            if each.is_meta:
                raise ArgumentError(
                    f"{_SHARD}: {name}.experts: expected parameters with values, got {param} on "
                    "the meta device"
                )


def _of_dense(layers: Mapping[str, MoE], options: zero.ZeroOptions) -> zero.ZeroOptions:
    """Returns the options of the dense part, which leaves experts out and routers in FP32."""
    prefixes = [f"{name}." if name else "" for name in layers]
    experts = [
        f"{prefix}experts"
        for prefix, layer in zip(prefixes, layers.values(), strict=True)
        if any(True for _ in layer.experts.parameters())
    ]
    precision = options.precision
    if precision.param not in (None, torch.float32):
        routers = [
            f"{prefix}router"
            for prefix, layer in zip(prefixes, layers.values(), strict=True)
            if any(True for _ in layer.router.parameters())
        ]
        precision = replace(precision, keep_fp32=(*precision.keep_fp32, *routers))
    return replace(options, ignored=(*options.ignored, *experts), precision=precision)


def _of_experts(
    layers: Mapping[str, MoE],
    options: zero.ZeroOptions,
    given: zero.ZeroOptions | None,
    group_size: int,
) -> zero.ZeroOptions:
    """Returns the options of the experts.

    Backward brings each of them the gradients of the tokens of its whole group.
    """
    if given is None:
        precision = replace(options.precision, keep_fp32=())
        given = replace(options, units=None, ignored=(), per_unit={}, precision=precision)
    if given.units is None:
        called: set[int] = set()
        for layer in layers.values():
            listed = isinstance(layer.experts, nn.ModuleList)
            called.update(map(id, layer.experts.children() if listed else [layer.experts]))
        given = replace(given, units=lambda name, module: id(module) in called)
    return replace(given, divisor=group_size if given.reduce == "avg" else 1)
