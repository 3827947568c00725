# SPDX-License-Identifier: Apache-2.0
"""``shard()``, ``remove_sharding()``, and their checks of modules and arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ringcomm import _native
from ringcomm.c10d.comm_argument import CommArgument, find_communicator
from ringcomm.comm.agreement import all_or_none, check_agreement, check_on_mesh
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.local_world import local_world
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.integers import integer
from ringcomm.memory import normal_tensors
from ringcomm.memory.host_heap import give_back_freed, keep_freed_memory
from ringcomm.module_names import named_modules, named_parameters, wrapped_key
from ringcomm.offload.scratch import DiskChunks
from ringcomm.optim.dtensors import (
    MeshView,
    check_placements,
    find_mesh,
    is_distributed,
    local_of,
    set_local,
)
from ringcomm.optim.layout import DTYPE_NAMES, BucketLayout, ShardLayout
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
from ringcomm.process import available_cores
from ringcomm.zero.stages.buckets import (
    BucketParam,
    DiskBucket,
    ParamBucket,
    ReplicatedBucket,
    ShardedBucket,
    WorldBucket,
    make_store,
    reserve,
)
from ringcomm.zero.stages.engine import EngineSetup, ShardEngine, owner_of
from ringcomm.zero.stages.hooks import hook_modules, settle_states, uncompiled
from ringcomm.zero.stages.optimizer import set_placements
from ringcomm.zero.stages.options import ModuleDtypes, ZeroOptions
from ringcomm.zero.stages.order import StepProfile, module_order
from ringcomm.zero.stages.param_grads import prepare_params, restore_params, show, unshow
from ringcomm.zero.stages.resharded import make_unsharded
from ringcomm.zero.stages.units import (
    BucketAssignment,
    HeldValues,
    Unit,
    Values,
    WeightSource,
    assign_buckets,
    choose_options,
    find_units,
    leave_out,
)

# ---- The move of a module's parameters into buckets with rank 0's values, and its rollback -------


def check_shardable(root: nn.Module) -> None:
    """Checks that ``shard()`` can handle the modules and parameters in ``root``.

    Raises:
        ArgumentError: a module is sharded by FSDP2, or a parameter has no shape yet.
        UnsupportedError: a module writes to its parameter in forward, or is a TorchScript module
            with tensors; or a DTensor is not contiguous, or has placements that tensor parallelism
            does not use.
    """
    # FSDP2 is not imported here: if nobody has imported it, no module can be an FSDP module.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in named_modules(root):
        called = f"shard: module {name or type(module).__name__!r}"
        if isinstance(module, fsdp):
            raise ArgumentError(
                f"{called} is sharded by fully_shard() (FSDP2) already; use only one of them: call "
                "shard() on the module as it was before fully_shard()"
            )
        if isinstance(module, torch.jit.ScriptModule) and _has_tensors(module):
            first = next((f" with parameter {p!r}" for p, _ in module.named_parameters()), "")
            raise UnsupportedError(
                f"{called} is a {type(module).__name__} of TorchScript{first}, in which Python can "
                "replace neither tensors nor hooks; shard() the module that was passed to "
                "torch.jit.script() or trace(), and compile it with torch.compile(). For "
                "deployment, call remove_sharding() and then script the module"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedError(
                f"{called}: max_norm={module.max_norm} makes forward write to the weight's rows "
                "that this rank's batch uses, so that the ranks' weights would differ; build it "
                "without max_norm, and clip the rows yourself after each step (inside "
                "unsharded(module, write_from=0))"
            )
    for name, param in named_parameters(root):
        check_placements(param, f"shard: parameter {name}")
        if is_distributed(param) and not param.is_contiguous():
            raise UnsupportedError(
                f"shard: parameter {name}: expected a DTensor that is contiguous, got strides "
                f"{param.stride()}; make it contiguous before it is distributed"
            )
        if is_lazy(param):
            raise ArgumentError(
                f"shard: parameter {name} has no shape yet, as it belongs to a lazy module; run "
                "the module once, on a batch, before shard()"
            )
        if param.is_inference():
            raise ArgumentError(
                f"shard: parameter {name} was made under torch.inference_mode(), and such a tensor "
                "cannot be trained; build or copy the module outside of it"
            )


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers()))


def check_memory_of_params(units: Sequence[Unit]) -> None:
    """Checks that the parameters of units have memory of their own, or are on "meta".

    Raises:
        UnsupportedError: a parameter is sparse, nested or of a quantized dtype of torch, or of a
            class whose tensors hold other tensors, as torchao's quantized weights do.
    """
    for name, param in (named for unit in units for named in unit.params.items()):
        local = local_of(param)
        if not _has_memory(local):
            kind = type(local if is_distributed(param) else param)
            raise UnsupportedError(
                f"shard: parameter {name}: expected a dense tensor in memory of its own, got a "
                f"{kind.__module__}.{kind.__qualname__} of {local.dtype} and {local.layout}, whose "
                "values shard() cannot move into a bucket. Hold quantized weights in a frozen "
                "parameter or a buffer of 8 bits that forward dequantizes; or pass "
                f"options=ZeroOptions(ignored=({name!r},)), which leaves the parameter to you"
            )


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    # A class that overrides operators wraps other tensors, or has no memory.
    passive = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    if type(tensor) not in (Tensor, nn.Parameter) and not passive:
        return False
    return torch._C._has_storage(tensor) and not torch._is_functional_tensor(tensor)


def check_batch_norm(root: nn.Module, comm: Communicator) -> None:
    """Checks that each ``torch.nn.SyncBatchNorm`` of the module, if there is one, can work.

    Raises:
        UnsupportedError: a SyncBatchNorm would fail in forward, or use this rank's batch alone.
    """
    works = comm.device.type != "cpu" and dist.is_available() and dist.is_initialized()
    if comm.world_size == 1 or works:
        return
    for name, module in named_modules(root):
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"shard: module {name or type(module).__name__!r}: torch.nn.SyncBatchNorm works on "
                "GPUs alone, and without torch.distributed normalizes over each rank's own batch; "
                "use ringcomm.zero.convert_sync_batchnorm(module, comm) in place of torch's "
                "conversion"
            )


Tensor = torch.Tensor


def _put_back(param: nn.Parameter, data: Tensor) -> None:
    make_unsharded([param])
    set_local(param, data)


class Rollback:
    """The actions that restore a module if ``shard()`` fails; none of them needs another rank.

    NOTE [All or nothing]
    Other ranks can be lost at any moment, so a rank must be able to restore its module alone. Its
    own values may exist nowhere else: the buckets hold the values of rank 0, rounded, and at stage
    3 only a part of these. So a rank keeps the parameters' old memory until all ranks have moved
    all parameters. Parameters on the meta device had no memory and return to the meta device, so a
    module that was built there is not held twice.

    Attributes:
        meta: the ``id`` of every parameter that was on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.meta = {id(param) for param in module.parameters() if param.device.type == "meta"}
        self._undo = ExitStack()

    def call(self, undo: Callable[..., object], *args: Any) -> None:
        """Registers ``undo(*args)``; the action that was registered last runs first."""
        self._undo.callback(undo, *args)

    def keep_data(self, param: nn.Parameter) -> None:
        """Keeps a parameter's memory for the rollback, before the parameter gets other memory."""
        if id(param) not in self.meta:
            self.call(_put_back, param, local_of(param).data)

    def keep_values(self, tensor: Tensor) -> None:
        """Keeps a copy of a tensor for the rollback, before the tensor is written to."""
        if id(tensor) not in self.meta:
            there = local_of(tensor).detach()
            self.call(there.copy_, there.clone())

    def keep_entry(self, table: dict[str, Any], key: str) -> None:
        """Keeps ``table[key]`` for the rollback, before it is replaced."""
        self.call(table.__setitem__, key, table[key])

    @contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """Runs all registered actions if the body of the ``with`` raises."""
        with normal_tensors(), self._undo:
            yield
            self._undo.pop_all()


# A function that fills a module's own parameters and buffers, not those of its children.
Initialize: TypeAlias = "Callable[[nn.Module], None]"
# Source of a module's values: a function, files, or (None) the module's reset_parameters().
Init: TypeAlias = "Initialize | WeightSource | None"


def is_meta(tensor: Tensor) -> bool:
    """True if a tensor has a shape and no memory."""
    return tensor.device.type == "meta"


def materialize(
    unit: Unit, units: Sequence[Unit], device: torch.device, init: Init, rollback: Rollback
) -> None:
    """Gives a unit's meta tensors memory on ``device``, and values.

    If a source has the values of all meta tensors of a module, the module is not initialized and
    its parameters get no memory yet. Otherwise initialization writes to all of its parameters, also
    to parameters that a source fills afterwards.

    Args:
        unit: the unit, whose modules are visited except modules of units inside it.
        units: all units.
        device: device of the communicator.
        init: see ``shard()``.
        rollback: collects the actions that undo this call.

    Raises:
        ArgumentError: a module has no ``reset_parameters()``, and ``init`` is None.
    """
    others = {id(each.module) for each in units if each is not unit}
    source = init if isinstance(init, WeightSource) else None
    for name, module in _modules(unit.module, unit.name, others):
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(each is not None and is_meta(each) for each in tensors):
            continue
        if source is not None and _has_all(source, module):
            _make_room(module, device, rollback, held=False)
            continue
        _make_room(module, device, rollback, held=True)
        if source is not None:
            source.initialize(module)
        elif init is not None:
            assert not isinstance(init, WeightSource)
            init(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise ArgumentError(
                f"shard: module {name or type(module).__name__!r} has parameters or buffers on the "
                "meta device and no reset_parameters(); pass init=, which fills them"
            )


def _has_all(source: WeightSource, module: nn.Module) -> bool:
    """Returns whether a source has the values of all of a module's own meta tensors."""
    params = (p for p in module._parameters.values() if p is not None and is_meta(p))
    buffers = (key for key, b in module._buffers.items() if b is not None and is_meta(b))
    return all(source.values_of(param) is not None for param in params) and all(
        source.values_of_buffer(module, key) is not None for key in buffers
    )


def _make_room(module: nn.Module, device: torch.device, rollback: Rollback, held: bool) -> None:
    """Gives a module's own meta tensors memory, all of it if ``held``.

    With ``held``, ``rollback`` also keeps the module's other tensors. Else a parameter gets memory
    of one element, expanded to the parameter's shape, until it has moved into its bucket.
    """
    for param in module._parameters.values():
        if param is None:
            continue
        if is_meta(param):
            _give_memory(param, device, rollback, held or is_distributed(param))
        elif held:
            rollback.keep_values(param)
    for key, buffer in module._buffers.items():
        if buffer is None:
            continue
        if is_meta(buffer):
            rollback.keep_entry(module._buffers, key)
            module._buffers[key] = torch.empty_like(buffer, device=device)
        elif held:
            rollback.keep_values(buffer)


def _give_memory(param: nn.Parameter, device: torch.device, rollback: Rollback, held: bool) -> None:
    if held:
        memory = torch.empty_like(param, device=device)
    else:
        memory = torch.empty((), dtype=param.dtype, device=device).expand(param.shape)
    # Swapped in place, since optimizers and other modules refer to this parameter object.
    other = nn.Parameter(memory, param.requires_grad)
    if type(other) is not type(param):
        other.__class__ = type(param)  # swap_tensors() also swaps the classes
    torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]
    rollback.call(torch.utils.swap_tensors, param, other)


def _modules(module: nn.Module, name: str, others: set[int]) -> list[tuple[str, nn.Module]]:
    """Returns (name without wrappers, module) for the modules of a unit, except inner units."""
    found = [(name, module)]
    for key, child in module.named_children():
        if id(child) not in others:
            called = name if wrapped_key(module) == key else f"{name}.{key}" if name else key
            found += _modules(child, called, others)
    return found


def make_bucket(setup: EngineSetup, assignment: BucketAssignment, number: int) -> ParamBucket:
    """Makes an empty bucket of an assignment; not collective, and no parameter changes.

    Args:
        setup: the engine's setup, which has ``assignment``.
        assignment: the assignment of the trainable parameters, or of the frozen ones.
        number: number of the bucket.

    Raises:
        HeapError: the heap has no room.
    """
    comm, options, trains = setup.comm, setup.options, assignment is setup.trainable
    layout = assignment.layout.buckets[number]
    params = [
        BucketParam(
            assignment.names[s.param],
            assignment.params[s.param],
            assignment.layout.params[s.param],
            *s[:2],
        )
        for s in layout.segments
    ]
    if options.params == "world" or setup.store is not None:
        # 0 means "no backward": reductions number their backwards from 1.
        among_all = number if trains else number + len(setup.trainable.layout.buckets)
        tag = _native.grad_tag(setup.number, 0, among_all)
        if setup.store is not None:
            return DiskBucket(layout, params, comm, trains, tag, setup.store)
        made: ParamBucket = WorldBucket(layout, params, comm, trains, tag)
    elif setup.stage == 3:
        made = ShardedBucket(layout, params, comm, trains, options.state)
    else:
        made = ReplicatedBucket(layout, params, comm, trains, options.state)
        if setup.stage == 0:
            made.state_chunk = layout.chunk(0, 1)
    made.compression = _compression_of(options, layout, trains)
    return made


def _compression_of(options: ZeroOptions, layout: BucketLayout, trains: bool) -> str | None:
    """Returns the quantized format in which nodes exchange a bucket's parameters, or None.

    Frozen parameters are not exchanged; FP32 parameters of a 16-bit model are exchanged exactly.
    """
    kept = layout.dtype is torch.float32 and options.precision.param not in (None, torch.float32)
    quantized = options.compression.quantizes_parameters and trains and not kept
    return options.compression.parameters if quantized else None


def move_in(setup: EngineSetup, init: Init, rollback: Rollback) -> None:
    """Fills the buckets, unit by unit; collective.

    A unit's meta tensors get memory right before the unit is sharded.

    Args:
        setup: the engine's setup, with empty buckets.
        init: see ``shard()``.
        rollback: collects the actions that undo this call.
    """
    units = setup.units
    # Inner units come first. A parameter that several inner units share belongs to a unit around
    # them, and modules of the inner units must initialize it before the outer unit is sharded.
    for number in sorted(range(len(units)), key=lambda n: -_depth(units[n])):
        materialize(units[number], units, setup.comm.device, init, rollback)
        values = _values(setup, units[number], init, rollback)
        kinds = (setup.trainable, setup.stored), (setup.frozen, setup.stored_frozen)
        for assignment, stored in kinds:
            for bucket, of in zip(stored, assignment.unit_of, strict=True):
                if of == number:
                    bucket.connect()
                    mine = [values[id(entry.param)] for entry in bucket.params]
                    bucket.take(mine, keeps_wide=bucket.trains)
        del values
        give_back_freed()
    if isinstance(init, WeightSource):
        _read_buffers(setup.module, init, rollback)


def _depth(unit: Unit) -> int:
    return unit.name.count(".") + bool(unit.name)


def _values(setup: EngineSetup, unit: Unit, init: Init, rollback: Rollback) -> dict[int, Values]:
    """Returns the values of a unit's parameters that move into buckets, by ``id``; collective.

    With ``broadcast``, parameters that move into no bucket get rank 0's values in place. If a
    source has a parameter's values, each rank reads them itself.
    """
    comm, broadcast = setup.comm, setup.options.broadcast
    takes = broadcast and comm.rank != 0
    moves = {id(param) for param in (*setup.trainable.params, *setup.frozen.params)}
    values: dict[int, Values] = {}
    for param in unit.params.values():
        read = init.values_of(param) if isinstance(init, WeightSource) else None
        value = local_of(param).detach()
        if id(param) in moves:
            rollback.keep_data(param)
        if read is not None:
            if id(param) in moves:
                values[id(param)] = read
            else:
                _read_in_place(param, read, rollback)
            continue
        if id(param) in moves:
            if takes and not param.requires_grad and _is_held(value):
                # Overwrite the values in place: a quantized layer also refers to them directly.
                rollback.keep_values(param)
            elif takes:
                # The rollback restores the memory of ``value``: the broadcast must not write to it.
                value = value.clone()
            values[id(param)] = HeldValues(value)
        elif takes:
            rollback.keep_values(param)
        if broadcast:
            comm.broadcast(value, 0)
    return values


def _is_held(value: Tensor) -> bool:
    """True if tensors other than a parameter and this view of it refer to its memory."""
    storage = value.untyped_storage()
    # Three references are the parameter's, this view's, and ``storage`` itself.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 3


def _read_in_place(param: nn.Parameter, values: Values, rollback: Rollback) -> None:
    """Reads values into a parameter without a bucket, and gives it dense memory for them."""
    rollback.keep_data(param)
    set_local(param, _read_whole(local_of(param), values))


def _read_whole(like: Tensor, values: Values) -> Tensor:
    fresh = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    values.read(0, fresh.view(-1))
    return fresh


def _read_buffers(root: nn.Module, source: WeightSource, rollback: Rollback) -> None:
    """Reads the module's buffers from a source, as far as the source has their values."""
    for owner in root.modules():
        for key, buffer in owner._buffers.items():
            values = source.values_of_buffer(owner, key)
            if buffer is None or values is None:
                continue
            if any(step == 0 for step in buffer.stride()):
                # The elements of an expanded tensor share memory, so it cannot be written to.
                rollback.keep_entry(owner._buffers, key)
                buffer = owner._buffers[key] = buffer.contiguous()
            rollback.keep_values(buffer)
            there = local_of(buffer)
            there.copy_(_read_whole(there, values))


def settle_rest(setup: EngineSetup, rollback: Rollback) -> None:
    """Casts and broadcasts buffers, and casts parameters without a bucket; collective.

    Parameters without a bucket also become contiguous: a checkpoint reads into a flat view of each,
    which only a contiguous parameter has.

    Args:
        setup: the engine's setup, after :func:`move_in`.
        rollback: collects the actions that undo this call.
    """
    comm, options = setup.comm, setup.options
    dtypes = setup.dtypes
    buckets = (*setup.stored, *setup.stored_frozen)
    bucketed = {id(each.param) for bucket in buckets for each in bucket.params}
    for param in setup.module.parameters():
        if id(param) in bucketed or id(param) in setup.ignored:
            continue
        dtype = dtypes.of_param(param) if param.dtype in DTYPE_NAMES else None
        local = local_of(param).detach()
        if dtype is not None or not local.is_contiguous():
            rollback.keep_data(param)
            set_local(param, local.to(dtype or param.dtype).contiguous())
    # Modules that share a buffer still share it afterwards, unless they need it in two dtypes. The
    # keys are ids of the old buffers, which ``rollback`` keeps alive.
    settled: dict[tuple[int, torch.dtype | None], Tensor] = {}
    for owner in setup.module.modules():
        dtype = dtypes.of_buffers(owner)
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            rollback.keep_entry(owner._buffers, name)
            was = id(buffer), dtype
            if was in settled:
                owner._buffers[name] = settled[was]
                continue
            if any(step == 0 for step in buffer.stride()):
                # The elements of an expanded tensor share memory, so it cannot be written to.
                buffer = owner._buffers[name] = buffer.contiguous()
            if options.broadcast and buffer.numel():
                if comm.rank != 0:
                    rollback.keep_values(buffer)
                comm.broadcast(local_of(buffer), 0)
            if dtype is not None and buffer.is_floating_point():
                buffer = owner._buffers[name] = buffer.to(dtype)
            settled[was] = buffer


Module = TypeVar("Module", bound=nn.Module)
_STAGES = (0, 1, 2, 3)
# The engine is an attribute of the module, so that Python frees both together.
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
    SC'20. Build an optimizer of :mod:`ringcomm.optim` on the module's parameters afterwards; the
    training loop stays as it is. ``docs/zero.md`` describes each stage.

    Args:
        module: any module; its parameters move into the heap. Parameters on the meta device get
            memory here, a unit at a time. If ``torch.compile()`` returned it, the module inside is
            sharded.
        stage: 0: everything is replicated; 1: the optimizer's state is sharded; 2: also the
            gradients; 3: also the parameters.
        comm: the ranks that share the work: a Communicator, a ProcessGroup of ``torch.distributed``
            or a one-dimensional DeviceMesh. None takes ringcomm's default group, else the default
            group of ``torch.distributed``, else a world of this rank alone. "alone" always takes a
            world of this rank alone.
        options: the options, equal on all ranks.
        init: a function that fills a module's own parameters and buffers; it is called for each
            module that has some on the meta device. None calls the module's ``reset_parameters()``.
            With a result of :func:`pretrained`, each rank reads its shards from files, for
            parameters on any device.
        mesh: in place of ``comm``, the DeviceMesh of all ranks that train the model. Its axis "dp"
            is the ``comm``. An optimizer computes norms over all axes, thus over all stages of
            "pp", even if a stage has no parameters.

    Returns:
        ``module``.

    Raises:
        ArgumentError: a bad stage, no parameter, a module that is sharded already, a parameter of a
            dtype that no optimizer takes, or two parameters that share memory; a lazy module, a
            module of ``fully_shard()``, or a DistributedDataParallel among several ranks; a
            ``comm`` that this rank is not in, or whose ranks have different local tensors of
            DTensor parameters; no group although a launcher has started several ranks; a ``mesh``
            without an axis "dp"; a name in ``Precision.keep_fp32`` that no module has.
        UnsupportedError: an embedding with ``max_norm``; a parameter without memory of its own
            (sparse, or of a class whose tensors wrap others); DTensors on several meshes, or
            with other placements than Shard and Replicate; ``torch.nn.SyncBatchNorm`` on CPUs or
            without ``torch.distributed``; nodes with different numbers of ranks, if each node is to
            have a copy.
        CheckpointError: the files of ``init`` are missing or damaged, or do not fit the module.
        MismatchError: the ranks' modules, options or files differ; the message names the first
            parameter that differs.
        HeapError: the heap of some rank has no room.

    If it raises, this rank's module is as before the call: values, memory, hooks. If it raises on
    one rank, it raises on all ranks, unless a rank is lost at the very end, or this rank has no
    communicator because of a bad ``comm`` or ``mesh``.
    """
    eager: nn.Module = uncompiled(module) if isinstance(module, nn.Module) else module
    comm, others = read_mesh(mesh, comm, "shard")
    ranks = _communicator(comm, eager)
    options = ZeroOptions() if options is None else options
    # If one rank raises, all raise here, so that no rank waits for it in _check_alike().
    with all_or_none(ranks, "shard", None if others is None else MeshView(others)):
        _check_arguments(eager, stage, ranks)
        stage = int(stage)
        _check_module(eager, ranks, others)
        trainers = _Trainers.of(eager, ranks, others)
        setup = _assign(eager, stage, trainers, options)
    _check_alike(trainers, setup, isinstance(init, WeightSource))
    setup = replace(setup, options=_resolved(setup.options, ranks))
    rollback = Rollback(eager)
    with rollback.put_back_on_failure():
        setup = replace(setup, store=_make_store(setup.options, trainers, rollback))
        _open(init, eager, trainers, rollback)
        setup = _with_buckets(setup, trainers, rollback)
        prepare_params(setup.trainable.params)
        rollback.call(restore_params, setup.trainable.params)
        _move(setup, init, rollback)
        # If this context ends without an error, all ranks have also written their chunks.
        with trainers.all_or_none():
            if setup.store is not None:
                setup.store.raise_fault()
            if isinstance(init, WeightSource):
                init.settle()
            _attach(setup, module, rollback)
    if not ranks.launches:
        keep_freed_memory()
    return module


@dataclass(frozen=True)
class _Trainers:
    """The ranks that train a module together.

    Attributes:
        comm: the ranks that share the module.
        others: the mesh of the model's other pipeline stages and shards, or None.
        parted: the mesh of the module's DTensors, or None.
        over: the mesh that joins ``others`` and ``parted``, or None.
    """

    comm: Communicator
    others: DeviceMesh | None
    parted: MeshView | None
    over: MeshView | None

    @classmethod
    def of(cls, module: nn.Module, comm: Communicator, others: DeviceMesh | None) -> _Trainers:
        parted = find_mesh(module.parameters(), "shard")
        return cls(comm, others, parted, over_mesh(others, parted, "shard"))

    def all_or_none(self) -> AbstractContextManager[None]:
        """Returns a context that raises on all these ranks if one raises in it; collective."""
        return all_or_none(self.comm, "shard", self.over)


# For functions that take a module or a path: the right call, shown if arguments are in wrong order.
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
    """Raises ArgumentError unless ``module`` is a module; the message shows the right call."""
    if not isinstance(module, nn.Module):
        call = f". Call {_CALLS[operation]}" if operation in _CALLS else ""
        raise ArgumentError(
            f"{operation}: module: expected the module that shard() returned, got "
            f"{_kind_of(module)}{call}"
        )


def path_of(path: str | os.PathLike[str], operation: str, name: str) -> Path:
    """Returns a path that a user gave as the argument ``name``.

    Raises:
        ArgumentError: ``path`` has another type (the message shows the call), or has a zero byte.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"{operation}: {name}: expected a path, got {_kind_of(path)}. Call {_CALLS[operation]}"
        )
    try:
        os.lstat(path)
    except OSError:
        pass  # the later read or write reports the error
    except ValueError as error:
        told = f"expected a path, got a text that cannot be a file name: {error}"
        raise ArgumentError(f"{operation}: {name}: {path}: {told}") from error
    return Path(path)


def check_step_number(step: object, operation: str) -> None:
    """Raises ArgumentError unless ``step`` can number a save; the message shows the call."""
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
    """True if ``shard()`` was called on this very module."""
    return _ENGINE in vars(module)


def forget_engine(module: nn.Module) -> None:
    """Removes the engine from a module that is no longer sharded."""
    engine_of(module, "remove_sharding").own(False)
    object.__delattr__(module, _ENGINE)


def _assign(
    module: nn.Module, stage: int, trainers: _Trainers, options: ZeroOptions
) -> EngineSetup:
    """Finds units and assigns parameters to buckets; allocates nothing and moves nothing.

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
    trainable = assign_buckets(units, options, dtypes, trainable=True)
    frozen = BucketAssignment((), (), ShardLayout((), options.bucket_elems, ()), ())
    if stage == 3:
        frozen = assign_buckets(units, options, dtypes, trainable=False)
    return EngineSetup(
        module=module,
        stage=stage,
        comm=comm,
        options=options,
        dtypes=dtypes,
        units=units,
        trainable=trainable,
        frozen=frozen,
        others=trainers.others,
        ignored=ignored,
    )


def _open(init: Init, module: nn.Module, trainers: _Trainers, rollback: Rollback) -> None:
    """Opens the source of the values, if ``init`` is one, on all ranks or none; collective."""
    if isinstance(init, WeightSource):
        rollback.call(init.close)
        with trainers.all_or_none():
            init.open(module)
        check_agreement(trainers.comm, "shard", {"options": {"weight files": init.digest}})


def _with_buckets(setup: EngineSetup, trainers: _Trainers, rollback: Rollback) -> EngineSetup:
    """Returns the setup with empty buckets, and with a module number if stage > 1; collective."""
    if setup.stage > 1:
        setup = replace(setup, number=_join(setup.comm, rollback))
    with trainers.all_or_none():
        _check_devices(setup.units, setup.comm)
        check_memory(setup.trainable.params, setup.trainable.layout)
        stored = _make_buckets(setup, setup.trainable, rollback)
        stored_frozen = _make_buckets(setup, setup.frozen, rollback)
        if setup.store is not None:
            reserve(setup.store, stored, stored_frozen)
    return replace(setup, stored=stored, stored_frozen=stored_frozen)


def _make_store(options: ZeroOptions, trainers: _Trainers, rollback: Rollback) -> DiskChunks | None:
    """Opens the disk storage of offloaded parameters on all ranks or none; collective."""
    if options.offload_params is None:
        return None
    with trainers.all_or_none():
        store = make_store(options.offload_params, trainers.comm)
        rollback.call(store.close)
    return store


def _make_buckets(
    setup: EngineSetup, assignment: BucketAssignment, rollback: Rollback
) -> list[ParamBucket]:
    made: list[ParamBucket] = []
    for number in range(len(assignment.unit_of)):
        made.append(make_bucket(setup, assignment, number))
        rollback.call(made[-1].give_back)
    return made


def _move(setup: EngineSetup, init: Init, rollback: Rollback) -> None:
    """Moves values into the buckets, and casts and broadcasts all other tensors; collective."""
    with nullcontext() if setup.store is None else setup.store.keeping_faults():
        move_in(setup, init, rollback)
    for bucket in setup.stored:
        if bucket.compression is not None:
            bucket.settle()
    settle_rest(setup, rollback)


def _attach(setup: EngineSetup, outer: nn.Module, rollback: Rollback) -> None:
    """Makes the engine, and attaches it and all hooks to the module.

    Args:
        setup: the engine's setup.
        outer: the module that the caller passed, perhaps a wrapper of ``torch.compile()``.
        rollback: collects the actions that undo this call.
    """
    engine = ShardEngine(setup)
    rollback.call(engine.close)
    set_placements(engine)
    show(engine)
    rollback.call(unshow, setup.trainable.params)
    object.__setattr__(setup.module, _ENGINE, engine)
    engine.own(True)
    rollback.call(forget_engine, setup.module)
    engine.count_change()
    hook_modules(engine, setup.module)
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
            "DistributedDataParallel, which would reduce the gradients again; do not use DDP, "
            'since shard() takes its place, or pass comm="alone"'
        )


def _check_module(module: nn.Module, comm: Communicator, others: DeviceMesh | None) -> None:
    if stages_of(others) == 1 and not any(True for _ in module.parameters()):
        raise ArgumentError("shard: module: expected at least one parameter, got none")
    check_shardable(module)
    check_batch_norm(module, comm)


def _check_not_sharded(module: nn.Module) -> None:
    if any(_ENGINE in vars(each) for each in module.modules()):
        raise ArgumentError(
            "shard: the module, or one inside it, is sharded already; call remove_sharding() on it"
        )
    for name, param in named_parameters(module):
        if owner_of(param) is not None:
            raise ArgumentError(
                f"shard: parameter {name} belongs to a module that is sharded already. When you "
                "put new modules into a sharded one, such as adapters, shard only the new ones, "
                "such as an nn.ModuleList of the adapters; or call remove_sharding() on the whole "
                "module, and shard() it again"
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
    """Returns the module's number among the communicator's sharded modules; collective."""
    order = module_order(comm)
    number = order.join()
    rollback.call(order.leave, number)
    return number


def _resolved(options: ZeroOptions, comm: Communicator) -> ZeroOptions:
    if comm.launches:
        # A device overlaps on other streams and with copy engines, which need no host core.
        return replace(options, overlap=options.overlap is not False)
    if comm.num_nodes > 1:
        # A wait for the network needs no core. All ranks choose the same, so their calls match.
        return replace(options, overlap=options.overlap is not False)
    return options.resolved(comm.world_size, torch.get_num_threads(), available_cores())


def _check_alike(trainers: _Trainers, setup: EngineSetup, reads: bool) -> None:
    """Raises MismatchError unless all ranks have the same layouts and options; collective.

    Args:
        trainers: the ranks.
        setup: this rank's engine setup.
        reads: True if a source reads values from files.
    """
    comm, others, parted = trainers.comm, trainers.others, trainers.parted
    with with_all_stages(comm, others, "shard"):
        check_axis(comm, parted, "shard")
    with with_all_stages(comm, others, "shard"):
        check_agreement(comm, "shard", _told(ShardLayout.describe, setup, reads))
    with with_all_stages(comm, others, "shard"):
        of_stage = ranks_of_stage(others, parted)
        check_on_mesh(comm, of_stage, "shard", _told(ShardLayout.describe_whole, setup, reads))


def _told(
    describe: Callable[[ShardLayout], dict[str, Any]], setup: EngineSetup, reads: bool
) -> dict[str, Any]:
    """Returns the descriptions that ranks compare: parameters, stage and options."""
    frozen = describe(setup.frozen.layout)
    chosen = {"stage": setup.stage, "frozen parameters": frozen, "reads weights": reads}
    chosen.update(setup.options.describe())
    return {"layout": describe(setup.trainable.layout), "options": chosen}


def _check_devices(units: Sequence[Unit], comm: Communicator) -> None:
    for name, param in (named for unit in units for named in unit.params.items()):
        if not is_meta(param) and param.device != comm.device:
            raise ArgumentError(
                f"shard: parameter {name}: expected it on the communicator's {comm.device}, "
                f"got it on {param.device}; move the module there first"
            )


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which backwards do not reduce, but add to this rank's own gradients.

    The next backward outside of the context, or the step, reduces all gradients. At stages 2 and 3
    the full gradients stay in ``p.grad`` until then, which takes memory. At stages 0 and 1 only the
    step reduces anyway.
    """
    engine = engine_of(module, "no_sync")
    return engine.no_sync() if engine.reduction is not None else nullcontext()


@contextmanager
def profiled(module: nn.Module) -> Iterator[StepProfile]:
    """Records when the engine communicates, and when it waits for communication.

    Yields:
        The profile, empty at first; :meth:`StepProfile.write` makes a file for Perfetto and Chrome.

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
def remove_sharding(module: nn.Module) -> nn.Module:
    """Undoes ``shard()``: removes hooks, and gives each rank all whole parameters; collective.

    Parameters keep the values and dtypes of the last step. An optimizer that was built on them can
    no longer be used.

    Returns:
        ``module``.

    Raises:
        ArgumentError: the module is not sharded, or the call is inside ``exchanged()``.
    """
    engine = engine_of(module, "remove_sharding")
    engine.check_values("remove_sharding")
    root = engine.setup.module
    with engine.unsharded(engine.setup.units):
        own = [param for _, param in engine.named_parameters() if owner_of(param) is engine]
        copies = [(param, local_of(param).detach().clone()) for param in own]
    # Peers may still be reading this rank's chunks.
    engine.comm.barrier()
    engine.close()
    if engine.stage > 1:
        engine.order.leave(engine.number)
    make_unsharded([param for param, _ in copies])
    restore_params(engine.trainable.params)
    for param, copy in copies:
        set_local(param, copy)
    forget_engine(root)
    return module
