"""The functions that shard a module in place, and those for using and unsharding it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.local_world import local_world
from ringcomm.errors import ArgumentError, where
from ringcomm.memory.disk_chunks import DiskChunks
from ringcomm.optim.agreement import all_or_none, check_agreement, check_on_mesh
from ringcomm.optim.dtensors import PartMesh, find_mesh, local_of, set_local
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.meshes import (
    over_mesh,
    ranks_of_stage,
    read_mesh,
    stages_of,
    with_all_stages,
)
from ringcomm.optim.placement import check_axis, check_memory, check_nodes
from ringcomm.rendezvous.environment import available_cores
from ringcomm.zero.absent import make_present
from ringcomm.zero.buckets import (
    ParamBucket,
    ReplicatedBucket,
    ShardedBucket,
)
from ringcomm.zero.disk_buckets import make_store, reserve
from ringcomm.zero.engine import EngineParts, ShardEngine, owner_of
from ringcomm.zero.hooks import hook_modules, uncompiled
from ringcomm.zero.optimizer import place_params
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.order import module_order
from ringcomm.zero.plans import BucketPlan, plan_buckets
from ringcomm.zero.precision import ModuleDtypes
from ringcomm.zero.prepare import (
    Init,
    Rollback,
    check_batch_norm,
    check_shardable,
    is_meta,
    make_bucket,
    move_in,
    settle_rest,
)
from ringcomm.zero.profile import StepProfile
from ringcomm.zero.units import Unit, choose_options, find_units, leave_out
from ringcomm.zero.values import WeightSource

# NOTE [Freed memory]
# A backward frees a gradient as soon as it is reduced, and stage 3 a unit's parameters as soon as
# they were used. glibc's malloc returns such memory to the system once the top of the heap holds
# more free memory than twice the largest block that was ever freed, and the system zeroes it page
# by page when it is allocated again. A step of a GPT of 25 M FP32 parameters takes 2,500 to 10,000
# page faults, of 3 us each on a virtual machine, and 1.06 (stage 2) to 1.18 (stage 3) times as long
# as without them.
#
# The rule counts blocks of at most 32 MiB (M_MMAP_THRESHOLD in mallopt(3)). So one block of that
# size is allocated and freed, without touching its pages, and the bound is at its highest: at most
# 64 MiB stay with the process that malloc would have returned. A threshold set in the environment
# or by mallopt() switches the rule off and stays in force, and other allocators are unaffected.

# The largest block that glibc's rule counts, less the overhead that malloc and torch add.
_BLOCK_BYTES = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Has glibc keep the memory that backward frees; see NOTE [Freed memory]."""
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")


Tensor = torch.Tensor
_STAGES = (0, 1, 2, 3)
# An attribute of the module, so that engine and module end together.
_ENGINE = "_ringcomm_engine"


def shard(
    module: nn.Module,
    stage: int = 2,
    *,
    comm: CommArgument = None,
    options: ZeroOptions | None = None,
    init: Init = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
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
        UnsupportedError: an embedding with ``max_norm``; DTensors on several meshes, or with other
            placements than Shard and Replicate; ``torch.nn.SyncBatchNorm`` on CPUs or without
            ``torch.distributed``; nodes with different numbers of ranks,
            where each shall have a copy.
        CheckpointError: the files of ``init`` are missing or damaged, or do not fit the module.
        MismatchError: the ranks' modules, options or files differ; names the first parameter that
            does.
        HeapError: the heap of some rank has no room.

    If it raises, the rank's module is as it was before: values, memory, hooks. If it raises on one
    rank it raises on all, unless a rank is lost at the very end, or this one has no communicator
    for a bad ``comm`` or ``mesh``.
    """
    returned = module
    if isinstance(module, nn.Module):
        module = uncompiled(module)
    comm, others = read_mesh(mesh, comm, "shard")
    ranks = _communicator(comm, module)
    options = ZeroOptions() if options is None else options
    # What is refused on one rank is on all, which would wait for it where they are compared.
    with all_or_none(ranks, "shard", None if others is None else PartMesh(others)):
        _check_arguments(module, stage, ranks)
        if stages_of(others) == 1 and not any(True for _ in module.parameters()):
            raise ArgumentError("shard: module: expected at least one parameter, got none")
        check_shardable(module)
        check_batch_norm(module, ranks)
        parted = find_mesh(module.parameters(), "shard")
        over = over_mesh(others, parted, "shard")
        check_nodes(ranks, "shard", options.algorithm, "native")
        options = options.for_nodes(stage, ranks)
        units = find_units(module, options.units)
        ignored = leave_out(module, units, options)
        choose_options(module, units, options)
        chosen = {unit.name: unit.options.param for unit in units if unit.options.param}
        dtypes = ModuleDtypes.of(module, options.precision, chosen)
        plan = plan_buckets(units, options, dtypes, trainable=True)
        frozen = _no_plan(options)
        if stage == 3:
            frozen = plan_buckets(units, options, dtypes, trainable=False)
    alike = stage, (plan, frozen), options, isinstance(init, WeightSource)
    _check_alike(ranks, (others, parted), alike)
    rollback = Rollback(module)
    stored: list[ParamBucket] = []
    stored_frozen: list[ParamBucket] = []
    options = _resolved(options, ranks)
    with rollback.put_back_on_failure():
        store = _make_store(options, (ranks, over), rollback)
        _open(init, module, (ranks, over), rollback)
        turn = _join(ranks, rollback) if stage > 1 else 0
        parts = EngineParts(
            module=module,
            stage=stage,
            comm=ranks,
            options=options,
            dtypes=dtypes,
            units=units,
            plan=plan,
            frozen=frozen,
            stored=stored,
            stored_frozen=stored_frozen,
            number=turn,
            others=others,
            ignored=ignored,
            store=store,
        )
        with all_or_none(ranks, "shard", over):
            _check_devices(units, ranks)
            check_memory(plan.params, plan.layout)
            for kind, buckets in ((plan, stored), (frozen, stored_frozen)):
                for number in range(len(kind.unit_of)):
                    buckets.append(make_bucket(parts, kind, number))
                    rollback.call(buckets[-1].give_back)
            if store is not None:
                reserve(store, stored, stored_frozen)
        with nullcontext() if store is None else store.keeping_faults():
            move_in(parts, init, rollback)
        settle_rest(parts, rollback)
        # The agreement at the end also tells every rank that all chunks are written.
        with all_or_none(ranks, "shard", over):
            if store is not None:
                store.raise_fault()
            if isinstance(init, WeightSource):
                init.settle()
            _attach(parts, rollback)
    if not ranks.launches:
        keep_freed_memory()
    return returned


def engine_of(module: nn.Module, operation: str) -> ShardEngine:
    """Returns the engine of a sharded module.

    Raises:
        ArgumentError: the module was not sharded.
    """
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


def _open(
    init: Init, module: nn.Module, over: tuple[Communicator, PartMesh | None], rollback: Rollback
) -> None:
    """Opens the source of a module's values, if there is one, on all ranks or none; collective."""
    if isinstance(init, WeightSource):
        rollback.call(init.close)
        with all_or_none(over[0], "shard", over[1]):
            init.open(module)
        check_agreement(over[0], "shard", {"options": {"weight files": init.digest}})


def _make_store(
    options: ZeroOptions, over: tuple[Communicator, PartMesh | None], rollback: Rollback
) -> DiskChunks | None:
    """Makes the disk for parameters, if they go to one, on all ranks or none; collective."""
    if options.tier is None:
        return None
    with all_or_none(over[0], "shard", over[1]):
        store = make_store(options.tier, over[0])
        rollback.call(store.close)
    return store


def _attach(parts: EngineParts, rollback: Rollback) -> None:
    """Makes the engine, and attaches it and all hooks to the module."""
    engine = ShardEngine(parts)
    rollback.call(engine.close)
    place_params(engine)
    object.__setattr__(parts.module, _ENGINE, engine)
    engine.own(True)
    rollback.call(forget_engine, parts.module)
    hook_modules(engine, parts.module)


def _check_arguments(module: nn.Module, stage: int, comm: Communicator) -> None:
    if type(stage) is not int or stage not in _STAGES:
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


def _check_not_sharded(module: nn.Module) -> None:
    if any(_ENGINE in vars(each) for each in module.modules()):
        raise ArgumentError("shard: the module, or one inside it, is sharded already; unshard() it")
    for name, param in module.named_parameters():
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


def _no_plan(options: ZeroOptions) -> BucketPlan:
    return BucketPlan((), (), ShardLayout((), options.bucket_elems, ()), ())


def _check_alike(
    ranks: Communicator,
    meshes: tuple[DeviceMesh | None, PartMesh | None],
    alike: tuple[int, tuple[BucketPlan, BucketPlan], ZeroOptions, bool],
) -> None:
    """Raises MismatchError unless ranks shard alike; collective.

    Args:
        ranks: those that share the module.
        meshes: of all ranks that train the model, and of its DTensors.
        alike: the arguments of :func:`_told`.
    """
    others, parted = meshes
    with with_all_stages(ranks, others, "shard"):
        check_axis(ranks, parted, "shard")
    with with_all_stages(ranks, others, "shard"):
        check_agreement(ranks, "shard", _told(ShardLayout.describe, *alike))
    with with_all_stages(ranks, others, "shard"):
        of_stage = ranks_of_stage(others, parted)
        check_on_mesh(ranks, of_stage, "shard", _told(ShardLayout.describe_whole, *alike))


def _told(
    describe: Callable[[ShardLayout], dict[str, Any]],
    stage: int,
    plans: tuple[BucketPlan, BucketPlan],
    options: ZeroOptions,
    reads: bool,
) -> dict[str, Any]:
    """Returns what ranks compare: trainable and frozen parameters, stage and options."""
    trained, frozen = (describe(plan.layout) for plan in plans)
    chosen = {"stage": stage, "frozen parameters": frozen, "reads weights": reads}
    chosen.update(options.describe())
    return {"layout": trained, "options": chosen}


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
def gathered(
    module: nn.Module | Tensor | Iterable[Tensor], write_from: int | None = None
) -> Iterator[None]:
    """Makes parameters whole and readable inside the context, at any stage.

    Reading needs no other rank: one rank may do it alone, while no rank steps. With
    ``params="world"`` over several nodes it is collective.

    Args:
        module: the module that ``shard()`` returned, or a part of it: a module inside, a parameter,
            or several. Of a part only the units that have its parameters are gathered.
        write_from: a rank whose changes all ranks take over at the end, which makes the context
            collective. None: changes are refused at stage 3, and at lower stages stay this rank's
            own.

    Raises:
        ArgumentError: the module is not sharded, or has no parameter; there is no such rank; or
            parameters were changed at stage 3 without ``write_from``, or others than those of a
            part, or replaced; or ``write_from`` inside ``exchanged()``.
        MismatchError: the ranks would take over different parameters, or other ranks'.
        Exception: with ``write_from``, what is raised inside, on all ranks. None takes over
            anything: changes are gone at stage 3, and at lower stages stay this rank's own.
    """
    parts = _engines_and_parts(module)
    if write_from is not None:
        with _on_all(parts):
            _check_writing(parts, write_from)
    with ExitStack() as here:
        for engine, part in parts:
            units = [
                unit
                for unit in engine.parts.units
                if part is None or any(id(param) in part for param in unit.params.values())
            ]
            here.enter_context(_here(engine, units))
            if engine.gatherer is not None:
                for unit in units:
                    engine.gatherer.open(unit)
        if write_from is None:
            yield
            return
        with _on_all(parts):
            yield
        for engine, part in parts:
            _take_changes(engine, write_from, part)


_Parts = Sequence[tuple[ShardEngine, frozenset[int] | None]]


@contextmanager
def _on_all(parts: _Parts) -> Iterator[None]:
    """Has what raises inside raise on all ranks of the engines; collective."""
    with ExitStack() as ranks:
        for engine, _ in parts:
            ranks.enter_context(all_or_none(engine.comm, "gathered", engine.mesh))
        yield


def _check_writing(parts: _Parts, write_from: int) -> None:
    for engine, _ in parts:
        engine.check_values("gathered")
        world_size = engine.comm.world_size
        if type(write_from) is not int or not 0 <= write_from < world_size:
            raise ArgumentError(
                f"gathered: write_from: expected a rank, 0 to {world_size - 1}, got {write_from!r}"
            )


def _engines_and_parts(
    module: nn.Module | Tensor | Iterable[Tensor],
) -> list[tuple[ShardEngine, frozenset[int] | None]]:
    """Returns the engines of parameters, each with the ``id`` of its own; None for all that it has.

    A module that was put into a sharded one may be sharded by itself.

    Raises:
        ArgumentError: a module is not sharded, or there is no parameter of a sharded one.
    """
    if isinstance(module, nn.Module):
        module = uncompiled(module)
        params: list[Tensor] = [p for p in module.parameters() if owner_of(p) is not None]
        if _ENGINE in vars(module) or not params:
            whole = engine_of(module, "gathered")
            nested = dict.fromkeys(map(_engine_of_param, params))
            return [(each, None) for each in {whole: None, **nested}]
    else:
        params = [module] if isinstance(module, Tensor) else list(module)
    found: dict[ShardEngine, set[int]] = {}
    for param in params:
        found.setdefault(_engine_of_param(param), set()).add(id(param))
    if not found:
        raise ArgumentError("gathered: expected parameters of sharded modules, got none")
    return [(engine, frozenset(part)) for engine, part in found.items()]


def _engine_of_param(param: Tensor) -> ShardEngine:
    engine = owner_of(param) if isinstance(param, Tensor) else None
    if engine is None:
        kind = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else param
        raise ArgumentError(
            "gathered: expected a module that shard() returned, a module inside of it, or "
            f"parameters of it, got {kind}, which is none of its parameters"
        )
    return engine


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


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns ``module.state_dict()`` at any stage, with copies of all tensors and extra state.

    It needs no other rank: one rank may call it alone, while no rank steps. With
    ``params="world"`` over several nodes it is collective.

    Raises:
        ArgumentError: the module is not sharded.
    """
    engine = engine_of(module, "full_state_dict")
    with ExitStack() as here:
        for each, _ in _engines_and_parts(module):
            here.enter_context(_here(each, each.parts.units))
        state = engine.parts.module.state_dict()
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
            for name, value in state.items()
        }


@contextmanager
def _here(engine: ShardEngine, units: Sequence[Unit]) -> Iterator[None]:
    gatherer = engine.gatherer
    if gatherer is None:
        yield
        return
    with gatherer.pin():
        for unit in units:
            gatherer.bring(unit)
        yield


@torch.no_grad()
def _take_changes(engine: ShardEngine, rank: int, part: frozenset[int] | None) -> None:
    """Gives all ranks one rank's parameters, and their masters with them; collective.

    Args:
        engine: the engine of the parameters.
        rank: the rank that has changed them.
        part: ``id`` of the parameters; None for all.
    """
    comm = engine.comm
    engine.check_all("gathered")
    named = dict(engine.named_parameters())
    names = [name for name, param in named.items() if part is None or id(param) in part]
    told = {"parameters": names, "write_from": rank}
    check_agreement(comm, "gathered", {"options": told})
    # Chunks are about to change, so all ranks must have finished reading them.
    comm.barrier()
    with engine.together("gathered"):
        _broadcast(engine, named, rank, part)
        engine.placement.refresh_masters(part)
    comm.barrier()


def _broadcast(
    engine: ShardEngine, named: Mapping[str, Tensor], rank: int, part: frozenset[int] | None
) -> None:
    """Gives all ranks one rank's gathered parameters, of which each keeps its own; collective."""
    comm = engine.comm
    placed: set[int] = set()
    for bucket in (*engine.stored, *engine.parts.stored_frozen):
        assert isinstance(bucket, (ReplicatedBucket, ShardedBucket))
        for begin, end in _changed_in(bucket, part):
            comm.broadcast(bucket.flat[begin:end], rank)
            if isinstance(bucket, ShardedBucket):
                bucket.keep_own(begin, end)
        if isinstance(bucket, ShardedBucket):
            bucket.accept_changes(part)
        if part is None:
            bucket.wide = None
        placed.update(id(each.param) for each in bucket.params)
    for param in named.values():
        if id(param) not in placed and param.numel() and (part is None or id(param) in part):
            comm.broadcast(local_of(param).detach(), rank)


def _changed_in(bucket: ParamBucket, part: frozenset[int] | None) -> list[tuple[int, int]]:
    """Returns the runs of a bucket's elements that parameters of a part fill; None for all."""
    chosen = [each for each in bucket.params if part is None or id(each.param) in part]
    if len(chosen) == len(bucket.params):
        return [(0, bucket.layout.elems)]
    return [(each.begin, each.end) for each in chosen]


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
    with _here(engine, engine.parts.units):
        own = [param for _, param in engine.named_parameters() if owner_of(param) is engine]
        copies = [(param, local_of(param).detach().clone()) for param in own]
    # Peers may still be reading this rank's chunks.
    engine.comm.barrier()
    engine.close()
    if engine.stage > 1:
        engine.order.leave(engine.number)
    make_present([param for param, _ in copies])
    for param, copy in copies:
        set_local(param, copy)
    forget_engine(root)
    return module
