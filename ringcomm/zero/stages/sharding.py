"""``shard()`` and ``unshard()``, and what is asked of the module in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.local_world import local_world
from ringcomm.errors import ArgumentError, where
from ringcomm.integers import integer
from ringcomm.limits import available_cores
from ringcomm.memory import normal_tensors
from ringcomm.memory.host_heap import keep_freed_memory
from ringcomm.module_names import named_parameters
from ringcomm.offload.scratch import DiskChunks
from ringcomm.optim.agreement import all_or_none, check_agreement, check_on_mesh
from ringcomm.optim.dtensors import PartMesh, find_mesh, local_of, set_local
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.placement import (
    check_axis,
    check_memory,
    check_nodes,
    over_mesh,
    ranks_of_stage,
    read_mesh,
    stages_of,
    with_all_stages,
)
from ringcomm.zero.stages.absent import make_present
from ringcomm.zero.stages.buckets import ParamBucket, make_store, reserve
from ringcomm.zero.stages.engine import EngineParts, ShardEngine, owner_of
from ringcomm.zero.stages.hooks import hook_modules, settle_states, uncompiled
from ringcomm.zero.stages.optimizer import place_params
from ringcomm.zero.stages.options import ModuleDtypes, ZeroOptions
from ringcomm.zero.stages.order import StepProfile, module_order
from ringcomm.zero.stages.param_grads import prepare_params, restore_params, show, unshow
from ringcomm.zero.stages.prepare import (
    Init,
    Rollback,
    check_batch_norm,
    check_memory_of_params,
    check_shardable,
    is_meta,
    make_bucket,
    move_in,
    settle_rest,
)
from ringcomm.zero.stages.units import (
    BucketPlan,
    Unit,
    WeightSource,
    choose_options,
    find_units,
    leave_out,
    plan_buckets,
)

Tensor = torch.Tensor
Module = TypeVar("Module", bound=nn.Module)
_STAGES = (0, 1, 2, 3)
# An attribute of the module, so that engine and module end together.
_ENGINE = "_ringcomm_engine"


def shard(
    module: Module,
    stage: int = 2,
    *,
    comm: CommArgument = None,
    options: ZeroOptions | None = None,
    init: Init = None,
    mesh: DeviceMesh | None = None,
) -> Module:
    """Prepares a module for data-parallel training with sharded state; collective.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC'20. Build an optimizer of :mod:`ringcomm.optim` on its parameters afterwards; the training
    loop stays as it is. ``docs/zero.md`` says what changes at which stage.

    Args:
        module: any module; its parameters move into the heap. Parameters on the meta device get
            memory here, a unit at a time. If ``torch.compile()`` returned it, the module inside is
            sharded.
        stage: 0: everything is replicated; 1: the optimizer's state is sharded; 2: gradients, too;
            3: parameters, too.
        comm: the ranks that share the work: a Communicator, a ProcessGroup of
            ``torch.distributed`` or a one-dimensional DeviceMesh. None for ringcomm's default
            group, else that of ``torch.distributed``, else this rank, in a world of one. "alone"
            for this rank whatever groups there are.
        options: choices, equal on all ranks.
        init: called with each module that has parameters or buffers on the meta device, to fill
            its own; None calls the module's ``reset_parameters()``. What :func:`pretrained` returns
            has each rank read its shards from files, whatever the device was.
        mesh: in place of ``comm``, the DeviceMesh of all ranks that train the model. Its axis "dp"
            is the ``comm``; an optimizer's norms are taken over all axes, so those of all stages of
            "pp", of which some may have no parameters.

    Returns:
        ``module``.

    Raises:
        ArgumentError: a bad stage, no parameter, a module that is sharded already, a
            parameter of a dtype that no optimizer takes, or two that share memory; a module that is
            lazy, of ``fully_shard()``, or a DistributedDataParallel among several ranks; a ``comm``
            that this rank is not in, or of ranks that have different parts of DTensor parameters;
            ranks of a launcher that have no group; a ``mesh`` without an axis "dp"; a name in
            ``Precision.keep_fp32`` that no module has.
        UnsupportedError: an embedding with ``max_norm``; a parameter without memory of its own,
            which is sparse or of a class whose tensors hold others; DTensors on several meshes, or
            with other placements than Shard and Replicate; ``torch.nn.SyncBatchNorm`` on CPUs or
            without ``torch.distributed``; nodes with different numbers of ranks,
            where each shall have a copy.
        CheckpointError: the files of ``init`` are missing or damaged, or do not fit the module.
        MismatchError: the ranks' modules, options or files differ; names the first parameter that
            does.
        HeapError: the heap of some rank has no room.

    If it raises, the rank's module is as it was before: values, memory, hooks. If it raises on one
    rank it raises on all, unless a rank is lost at the very end, or this one has no communicator
    for a bad ``comm`` or ``mesh``.
    """
    eager: nn.Module = uncompiled(module) if isinstance(module, nn.Module) else module
    comm, others = read_mesh(mesh, comm, "shard")
    ranks = _communicator(comm, eager)
    options = ZeroOptions() if options is None else options
    # What is refused on one rank is on all, which would wait for it where they are compared.
    with all_or_none(ranks, "shard", None if others is None else PartMesh(others)):
        _check_arguments(eager, stage, ranks)
        stage = int(stage)
        _check_module(eager, ranks, others)
        trainers = _Trainers.of(eager, ranks, others)
        parts = _plan(eager, stage, trainers, options)
    _check_alike(trainers, parts, isinstance(init, WeightSource))
    parts = replace(parts, options=_resolved(parts.options, ranks))
    rollback = Rollback(eager)
    with rollback.put_back_on_failure():
        parts = replace(parts, store=_make_store(parts.options, trainers, rollback))
        _open(init, eager, trainers, rollback)
        parts = _with_buckets(parts, trainers, rollback)
        prepare_params(parts.plan.params)
        rollback.call(restore_params, parts.plan.params)
        _move(parts, init, rollback)
        # The agreement at the end also tells every rank that all chunks are written.
        with trainers.all_or_none():
            if parts.store is not None:
                parts.store.raise_fault()
            if isinstance(init, WeightSource):
                init.settle()
            _attach(parts, module, rollback)
    if not ranks.launches:
        keep_freed_memory()
    return module


@dataclass(frozen=True)
class _Trainers:
    """The ranks that train a module together.

    Attributes:
        comm: those that share the module.
        others: the mesh of other stages and parts of the model, or None.
        parted: the mesh of its DTensors, or None.
        over: the mesh of both, or None.
    """

    comm: Communicator
    others: DeviceMesh | None
    parted: PartMesh | None
    over: PartMesh | None

    @classmethod
    def of(cls, module: nn.Module, comm: Communicator, others: DeviceMesh | None) -> _Trainers:
        parted = find_mesh(module.parameters(), "shard")
        return cls(comm, others, parted, over_mesh(others, parted, "shard"))

    def all_or_none(self) -> AbstractContextManager[None]:
        """Has all of them learn what one raises inside; collective."""
        return all_or_none(self.comm, "shard", self.over)


# How functions that take a module or a path are called, for arguments in another order.
_CALLS = {
    "save": "save(root, step, module, optimizer)",
    "load": "load(root, module, optimizer)",
    "full_state_dict": "full_state_dict(module)",
    "export_safetensors": "export_safetensors(folder, path), where folder is a checkpoint's; "
    "save_pretrained(module, path) writes the weights of a module",
    "save_pretrained": "save_pretrained(module, path)",
    "load_pretrained": "load_pretrained(module, source)",
    "pretrained": "pretrained(source)",
    "moe.save": "moe.save(root, step, module, optimizer)",
    "moe.load": "moe.load(root, module, optimizer)",
    "TrainState": "TrainState(module, optimizer)",
}


def _kind_of(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"


def check_module(module: object, operation: str) -> None:
    """Raises ArgumentError unless ``module`` is a module; says how the function is called."""
    if not isinstance(module, nn.Module):
        call = f". Call {_CALLS[operation]}" if operation in _CALLS else ""
        raise ArgumentError(
            f"{operation}: module: expected the module that shard() returned, got "
            f"{_kind_of(module)}{call}"
        )


def path_of(path: str | os.PathLike[str], operation: str, name: str) -> Path:
    """Returns a path that a user gave as the argument ``name``.

    Raises:
        ArgumentError: it is something else; says how the function is called.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"{operation}: {name}: expected a path, got {_kind_of(path)}. Call {_CALLS[operation]}"
        )
    return Path(path)


def check_step_number(step: object, operation: str) -> None:
    """Raises ArgumentError unless ``step`` may number a save; says how the function is called."""
    if integer(step, most=10**18 - 1) is None:
        raise ArgumentError(
            f"{operation}: step: expected a number, got {_kind_of(step)}. Call {_CALLS[operation]}"
        )


def engine_of(module: nn.Module, operation: str) -> ShardEngine:
    """Returns the engine of a sharded module.

    Raises:
        ArgumentError: the module was not sharded.
    """
    check_module(module, operation)
    module = uncompiled(module)
    engine = vars(module).get(_ENGINE)
    if not isinstance(engine, ShardEngine):
        raise ArgumentError(
            f"{operation}: expected the module that shard() returned, got a "
            f"{type(module).__name__} that was not sharded"
        )
    return engine


def is_sharded(module: nn.Module) -> bool:
    """Returns whether ``shard()`` has prepared this very module."""
    return _ENGINE in vars(module)


def forget_engine(module: nn.Module) -> None:
    """Detaches the engine from a module, which is plain again."""
    engine_of(module, "unshard").own(False)
    object.__delattr__(module, _ENGINE)


def _plan(module: nn.Module, stage: int, trainers: _Trainers, options: ZeroOptions) -> EngineParts:
    """Plans units and buckets; nothing is moved, and nothing made.

    Raises:
        ArgumentError, UnsupportedError: the options do not fit the module, or the ranks.
    """
    comm = trainers.comm
    check_nodes(comm, "shard", options.algorithm, "native")
    options = options.for_nodes(stage, comm)
    units = find_units(module, options.units)
    ignored = leave_out(module, units, options)
    check_memory_of_params(units)
    choose_options(module, units, options)
    chosen = {unit.name: unit.options.param for unit in units if unit.options.param}
    dtypes = ModuleDtypes.of(module, options.precision, chosen)
    plan = plan_buckets(units, options, dtypes, trainable=True)
    frozen = BucketPlan((), (), ShardLayout((), options.bucket_elems, ()), ())
    if stage == 3:
        frozen = plan_buckets(units, options, dtypes, trainable=False)
    return EngineParts(
        module=module,
        stage=stage,
        comm=comm,
        options=options,
        dtypes=dtypes,
        units=units,
        plan=plan,
        frozen=frozen,
        others=trainers.others,
        ignored=ignored,
    )


def _open(init: Init, module: nn.Module, trainers: _Trainers, rollback: Rollback) -> None:
    """Opens the source of a module's values, if there is one, on all ranks or none; collective."""
    if isinstance(init, WeightSource):
        rollback.call(init.close)
        with trainers.all_or_none():
            init.open(module)
        check_agreement(trainers.comm, "shard", {"options": {"weight files": init.digest}})


def _with_buckets(parts: EngineParts, trainers: _Trainers, rollback: Rollback) -> EngineParts:
    """Returns the parts with empty buckets, and a number where backward reduces; collective."""
    if parts.stage > 1:
        parts = replace(parts, number=_join(parts.comm, rollback))
    with trainers.all_or_none():
        _check_devices(parts.units, parts.comm)
        check_memory(parts.plan.params, parts.plan.layout)
        stored = _make_buckets(parts, parts.plan, rollback)
        stored_frozen = _make_buckets(parts, parts.frozen, rollback)
        if parts.store is not None:
            reserve(parts.store, stored, stored_frozen)
    return replace(parts, stored=stored, stored_frozen=stored_frozen)


def _make_store(options: ZeroOptions, trainers: _Trainers, rollback: Rollback) -> DiskChunks | None:
    """Makes the disk for parameters, if they go to one, on all ranks or none; collective."""
    if options.tier is None:
        return None
    with trainers.all_or_none():
        store = make_store(options.tier, trainers.comm)
        rollback.call(store.close)
    return store


def _make_buckets(parts: EngineParts, plan: BucketPlan, rollback: Rollback) -> list[ParamBucket]:
    made: list[ParamBucket] = []
    for number in range(len(plan.unit_of)):
        made.append(make_bucket(parts, plan, number))
        rollback.call(made[-1].give_back)
    return made


def _move(parts: EngineParts, init: Init, rollback: Rollback) -> None:
    """Fills the buckets with the module's values, and settles what has no bucket; collective."""
    with nullcontext() if parts.store is None else parts.store.keeping_faults():
        move_in(parts, init, rollback)
    for bucket in parts.stored:
        if bucket.wire is not None:
            bucket.settle()
    settle_rest(parts, rollback)


def _attach(parts: EngineParts, outer: nn.Module, rollback: Rollback) -> None:
    """Makes the engine, and attaches it and all hooks to the module.

    Args:
        parts: all of the engine's parts.
        outer: the module as the caller has it, perhaps what ``torch.compile()`` returned.
        rollback: registers how to undo it.
    """
    engine = ShardEngine(parts)
    rollback.call(engine.close)
    place_params(engine)
    show(engine)
    rollback.call(unshow, parts.plan.params)
    object.__setattr__(parts.module, _ENGINE, engine)
    engine.own(True)
    rollback.call(forget_engine, parts.module)
    engine.count_change()
    hook_modules(engine, parts.module)
    settle_states(engine, outer)


def _check_arguments(module: nn.Module, stage: int, comm: Communicator) -> None:
    if integer(stage) not in _STAGES:
        raise ArgumentError(f"shard: stage: expected 0, 1, 2 or 3, got {stage!r}")
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"shard: module: expected a torch.nn.Module, got {module!r}")
    _check_not_sharded(module)
    if comm.world_size > 1 and any(
        isinstance(each, DistributedDataParallel) for each in module.modules()
    ):
        raise ArgumentError(
            f"{where('shard', comm.rank, comm.world_size)}: module: expected one without "
            "DistributedDataParallel, which would reduce the gradients, too; leave DDP away, since "
            'shard() takes its place, or pass comm="alone"'
        )


def _check_module(module: nn.Module, comm: Communicator, others: DeviceMesh | None) -> None:
    if stages_of(others) == 1 and not any(True for _ in module.parameters()):
        raise ArgumentError("shard: module: expected at least one parameter, got none")
    check_shardable(module)
    check_batch_norm(module, comm)


def _check_not_sharded(module: nn.Module) -> None:
    if any(_ENGINE in vars(each) for each in module.modules()):
        raise ArgumentError("shard: the module, or one inside it, is sharded already; unshard() it")
    for name, param in named_parameters(module):
        if owner_of(param) is not None:
            raise ArgumentError(
                f"shard: parameter {name} is of a module that is sharded already. Of what is put "
                "into such a module, as adapters are, shard what is new alone, such as an "
                "nn.ModuleList of the adapters; or unshard() the whole and shard() it anew"
            )


def _communicator(comm: CommArgument, module: nn.Module) -> Communicator:
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    device = None if first is None else first.device
    found = find_communicator(comm, "shard", device)
    if found is not None:
        return found
    on_gpu = device is not None and device.type == "cuda"
    return local_world(1, device=device if on_gpu else None)[0]


def _join(comm: Communicator, rollback: Rollback) -> int:
    """Returns the module's number among those the communicator reduces for; collective."""
    order = module_order(comm)
    number = order.join()
    rollback.call(order.leave, number)
    return number


def _resolved(options: ZeroOptions, comm: Communicator) -> ZeroOptions:
    if comm.launches:
        # A device overlaps on other streams and with copy engines, which need no core of the host.
        return replace(options, overlap=options.overlap is not False)
    if comm.num_nodes > 1:
        # A wait for the wire needs no core either. All do alike, so that calls have one order.
        return replace(options, overlap=options.overlap is not False)
    return options.resolved(comm.world_size, torch.get_num_threads(), available_cores())


def _check_alike(trainers: _Trainers, parts: EngineParts, reads: bool) -> None:
    """Raises MismatchError unless ranks shard alike; collective.

    Args:
        trainers: the ranks.
        parts: what this rank has planned.
        reads: True if values are read from files.
    """
    comm, others, parted = trainers.comm, trainers.others, trainers.parted
    with with_all_stages(comm, others, "shard"):
        check_axis(comm, parted, "shard")
    with with_all_stages(comm, others, "shard"):
        check_agreement(comm, "shard", _told(ShardLayout.describe, parts, reads))
    with with_all_stages(comm, others, "shard"):
        of_stage = ranks_of_stage(others, parted)
        check_on_mesh(comm, of_stage, "shard", _told(ShardLayout.describe_whole, parts, reads))


def _told(
    describe: Callable[[ShardLayout], dict[str, Any]], parts: EngineParts, reads: bool
) -> dict[str, Any]:
    """Returns what ranks compare: trainable and frozen parameters, stage and options."""
    frozen = describe(parts.frozen.layout)
    chosen = {"stage": parts.stage, "frozen parameters": frozen, "reads weights": reads}
    chosen.update(parts.options.describe())
    return {"layout": describe(parts.plan.layout), "options": chosen}


def _check_devices(units: Sequence[Unit], comm: Communicator) -> None:
    for name, param in (named for unit in units for named in unit.params.items()):
        if not is_meta(param) and param.device != comm.device:
            raise ArgumentError(
                f"shard: parameter {name}: expected it on {comm.device}, as the communicator's "
                f"tensors, got it on {param.device}; move the module there first"
            )


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Keeps backwards from reducing: they add to this rank's gradients, at any stage.

    The next backward outside, or the step, reduces all gradients. At stages 2 and 3 the full
    gradients stay in ``p.grad`` until then, which takes memory. At stages 0 and 1 only the step
    reduces anyway.
    """
    engine = engine_of(module, "no_sync")
    return engine.no_sync() if engine.reduction is not None else nullcontext()


@contextmanager
def profiled(module: nn.Module) -> Iterator[StepProfile]:
    """Records when the engine communicates, and when it waits for communication.

    Yields:
        The profile, empty at first; :meth:`StepProfile.write` makes a file for Chrome and Perfetto.

    Raises:
        ArgumentError: the module is not sharded.
    """
    profile = engine_of(module, "profiled").profile
    profile.spans.clear()
    profile.on = True
    try:
        yield profile
    finally:
        profile.on = False


@normal_tensors()
def unshard(module: nn.Module) -> nn.Module:
    """Undoes ``shard()``: removes its hooks, and makes parameters plain and whole; collective.

    Values and dtypes are those of the last step. An optimizer on the parameters cannot be used any
    more.

    Returns:
        ``module``.

    Raises:
        ArgumentError: the module is not sharded, or has other values, inside ``exchanged()``.
    """
    engine = engine_of(module, "unshard")
    engine.check_values("unshard")
    root = engine.parts.module
    with engine.here(engine.parts.units):
        own = [param for _, param in engine.named_parameters() if owner_of(param) is engine]
        copies = [(param, local_of(param).detach().clone()) for param in own]
    # Peers may still be reading this rank's chunks.
    engine.comm.barrier()
    engine.close()
    if engine.stage > 1:
        engine.order.leave(engine.number)
    make_present([param for param, _ in copies])
    restore_params(engine.plan.params)
    for param, copy in copies:
        set_local(param, copy)
    forget_engine(root)
    return module
