"""The move of a module's parameters into buckets with rank 0's values, and its rollback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.memory import normal_tensors
from ringcomm.memory.host_heap import give_back_freed
from ringcomm.module_names import named_modules, named_parameters, wrapped_key
from ringcomm.optim.dtensors import check_placements, is_distributed, local_of, set_local
from ringcomm.optim.layout import DTYPE_NAMES, BucketLayout
from ringcomm.zero.stages.absent import make_present
from ringcomm.zero.stages.buckets import (
    BucketParam,
    DiskBucket,
    ParamBucket,
    ReplicatedBucket,
    ShardedBucket,
    WorldBucket,
)
from ringcomm.zero.stages.engine import EngineParts
from ringcomm.zero.stages.options import ZeroOptions
from ringcomm.zero.stages.units import BucketPlan, HeldValues, Unit, Values, WeightSource


def check_shardable(root: nn.Module) -> None:
    """Checks that ``shard()`` can take the modules and parameters in ``root``.

    Raises:
        ArgumentError: some are sharded by torch, or have no shape yet.
        UnsupportedError: a module writes to its parameter in forward, or is one of TorchScript
            with tensors; or a DTensor is not contiguous, or placed in other ways than tensor
            parallelism does.
    """
    # Looked up in sys.modules, to import nothing: no module can be an FSDP module otherwise.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in named_modules(root):
        called = f"shard: module {name or type(module).__name__!r}"
        if isinstance(module, fsdp):
            raise ArgumentError(
                f"{called} is sharded by fully_shard() (FSDP2) already; use one of both: call "
                "shard() on the module as it was before"
            )
        if isinstance(module, torch.jit.ScriptModule) and _has_tensors(module):
            first = next((f" with parameter {p!r}" for p, _ in module.named_parameters()), "")
            raise UnsupportedError(
                f"{called} is a {type(module).__name__} of TorchScript{first}, in which Python can "
                "replace neither tensors nor hooks; shard() the module that torch.jit.script() or "
                "trace() was given, and compile it with torch.compile(). For deployment, "
                "unshard() it and script it then"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedError(
                f"{called}: max_norm={module.max_norm} has its forward write to the weight's rows "
                "that this rank's batch uses, so that the ranks' weights would differ; build it "
                "without max_norm, and clip the rows yourself after each step (inside "
                "gathered(module, write_from=0))"
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
    """Checks that the parameters of units have memory of their own, or none yet on "meta".

    Raises:
        UnsupportedError: one is sparse, nested or of torch's quantized dtypes, or of a class whose
            tensors hold others, as quantized weights of torchao are.
    """
    for name, param in (named for unit in units for named in unit.params.items()):
        local = local_of(param)
        if not _has_memory(local):
            kind = type(local if is_distributed(param) else param)
            raise UnsupportedError(
                f"shard: parameter {name}: expected a dense tensor in memory of its own, got a "
                f"{kind.__module__}.{kind.__qualname__} of {local.dtype} and {local.layout}, whose "
                "values shard() cannot place. Hold the codes of quantized weights in a frozen "
                "parameter or a buffer of 8 bits that forward dequantizes; or pass "
                f"options=ZeroOptions(ignored=({name!r},)), which leaves it to you"
            )


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    # A class that overrides operators wraps other tensors, or has no memory.
    plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    if type(tensor) not in (Tensor, nn.Parameter) and not plain:
        return False
    return torch._C._has_storage(tensor) and not torch._is_functional_tensor(tensor)


def check_batch_norm(root: nn.Module, comm: Communicator) -> None:
    """Checks that torch's synchronised batch normalisations, if there are any, can work.

    Raises:
        UnsupportedError: they would fail in the forward, or take this rank's batch alone.
    """
    works = comm.device.type != "cpu" and dist.is_available() and dist.is_initialized()
    if comm.world_size == 1 or works:
        return
    for name, module in named_modules(root):
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"shard: module {name or type(module).__name__!r}: torch.nn.SyncBatchNorm works on "
                "GPUs alone, and without torch.distributed takes each rank's own batch; use "
                "ringcomm.zero.convert_sync_batchnorm(module, comm) in place of torch's conversion"
            )


Tensor = torch.Tensor


def _put_back(param: nn.Parameter, data: Tensor) -> None:
    make_present([param])
    set_local(param, data)


class Rollback:
    """The list of actions that put a module back if ``shard()`` fails; none needs another rank.

    NOTE [All or nothing]
    Ranks can be lost at any moment, so a rank must be able to put its module back alone. Its own
    values may exist nowhere else: the buckets hold the values of rank 0, rounded, and at stage 3
    only a part of them. So the parameters' old memory stays until all ranks have moved all of
    their parameters. Parameters on the meta device had no memory and go back there, so such a
    module is not held twice.

    Attributes:
        meta: the ``id`` of every parameter that was on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.meta = {id(param) for param in module.parameters() if param.device.type == "meta"}
        self._undo = ExitStack()

    def call(self, undo: Callable[..., object], *args: Any) -> None:
        """Registers ``undo(*args)``; what was registered last is undone first."""
        self._undo.callback(undo, *args)

    def keep_data(self, param: nn.Parameter) -> None:
        """Keeps the memory of a parameter that is about to get other memory."""
        if id(param) not in self.meta:
            self.call(_put_back, param, local_of(param).data)

    def keep_values(self, tensor: Tensor) -> None:
        """Keeps a copy of a tensor that is about to be written to."""
        if id(tensor) not in self.meta:
            there = local_of(tensor).detach()
            self.call(there.copy_, there.clone())

    def keep_entry(self, table: dict[str, Any], key: str) -> None:
        """Keeps ``table[key]``, which is about to be replaced."""
        self.call(table.__setitem__, key, table[key])

    @contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """Undoes everything if the body of the ``with`` raises."""
        with normal_tensors(), self._undo:
            yield
            self._undo.pop_all()


# Fills the parameters and buffers that a module has itself, not those of its children.
Initialize: TypeAlias = "Callable[[nn.Module], None]"
# Who says what a module's values shall be: a function, files, or the module itself.
Init: TypeAlias = "Initialize | WeightSource | None"


def is_meta(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape and no memory."""
    return tensor.device.type == "meta"


def materialize(
    unit: Unit, units: Sequence[Unit], device: torch.device, init: Init, rollback: Rollback
) -> None:
    """Gives a unit's meta tensors memory on ``device``, and values.

    Parameters whose values a source has get neither, but where an initialisation would write to
    them, too.

    Args:
        unit: the unit, whose modules are visited down to those of other units.
        units: all units.
        device: device of the communicator.
        init: see ``shard()``.
        rollback: registers how to undo it.

    Raises:
        ArgumentError: a module has no ``reset_parameters()`` and ``init`` is None.
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
                "meta device and no reset_parameters(); pass init=, which fills those of a module"
            )


def _has_all(source: WeightSource, module: nn.Module) -> bool:
    """Returns whether a source has the values of all of a module's own meta tensors."""
    params = (p for p in module._parameters.values() if p is not None and is_meta(p))
    buffers = (key for key, b in module._buffers.items() if b is not None and is_meta(b))
    return all(source.values_of(param) is not None for param in params) and all(
        source.values_of_buffer(module, key) is not None for key in buffers
    )


def _make_room(module: nn.Module, device: torch.device, rollback: Rollback, held: bool) -> None:
    """Gives a module's own meta tensors memory, and keeps the values of the others if ``held``.

    Without it parameters get the memory of one element, in place of all, until they have moved.
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
    # Swapped in place, since optimizers and other modules know the parameter by its identity.
    other = nn.Parameter(memory, param.requires_grad)
    if type(other) is not type(param):
        other.__class__ = type(param)  # classes are swapped, too
    torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]
    rollback.call(torch.utils.swap_tensors, param, other)


def _modules(module: nn.Module, name: str, others: set[int]) -> list[tuple[str, nn.Module]]:
    """Returns the module and the modules inside it by plain name, without those of other units."""
    found = [(name, module)]
    for key, child in module.named_children():
        if id(child) not in others:
            called = name if wrapped_key(module) == key else f"{name}.{key}" if name else key
            found += _modules(child, called, others)
    return found


def make_bucket(parts: EngineParts, plan: BucketPlan, number: int) -> ParamBucket:
    """Makes an empty bucket of a plan; no other rank takes part, and no parameter changes.

    Args:
        parts: the engine's parts, of which ``plan`` is one.
        plan: of the trainable parameters, or of the frozen ones.
        number: of the bucket.

    Raises:
        HeapError: the heap has no room.
    """
    comm, options, trains = parts.comm, parts.options, plan is parts.plan
    layout = plan.layout.buckets[number]
    params = [
        BucketParam(plan.names[s.param], plan.params[s.param], plan.layout.params[s.param], *s[:2])
        for s in layout.segments
    ]
    if options.params == "world" or parts.store is not None:
        # A backward of 0 stands for none: reductions count theirs from 1 on.
        among_all = number if trains else number + len(parts.plan.layout.buckets)
        tag = _native.grad_tag(parts.number, 0, among_all)
        if parts.store is not None:
            return DiskBucket(layout, params, comm, trains, tag, parts.store)
        made: ParamBucket = WorldBucket(layout, params, comm, trains, tag)
    elif parts.stage == 3:
        made = ShardedBucket(layout, params, comm, trains, options.state)
    else:
        made = ReplicatedBucket(layout, params, comm, trains, options.state)
        if parts.stage == 0:
            made.state_chunk = layout.chunk(0, 1)
    made.wire = _wire_of(options, layout, trains)
    return made


def _wire_of(options: ZeroOptions, layout: BucketLayout, trains: bool) -> str | None:
    """Returns the codes in which a bucket's parameters cross between nodes, or None.

    What is frozen never crosses, and what stays FP32 among parameters of 16 bits is to be exact.
    """
    kept = layout.dtype is torch.float32 and options.precision.param not in (None, torch.float32)
    codes = options.wire.codes_parameters and trains and not kept
    return options.wire.parameters if codes else None


def move_in(parts: EngineParts, init: Init, rollback: Rollback) -> None:
    """Fills the buckets, unit by unit; collective.

    A unit's meta tensors get memory right before the unit is sharded.

    Args:
        parts: the engine's parts, with empty buckets.
        init: see ``shard()``.
        rollback: registers how to undo it.
    """
    units = parts.units
    # Inner units come first: a parameter that they share belongs to a unit around them, and their
    # modules must initialise it before that unit is sharded.
    for number in sorted(range(len(units)), key=lambda n: -_depth(units[n])):
        materialize(units[number], units, parts.comm.device, init, rollback)
        values = _values(parts, units[number], init, rollback)
        kinds = (parts.plan, parts.stored), (parts.frozen, parts.stored_frozen)
        for plan, stored in kinds:
            for bucket, of in zip(stored, plan.unit_of, strict=True):
                if of == number:
                    bucket.connect()
                    mine = [values[id(placed.param)] for placed in bucket.params]
                    bucket.take(mine, keeps_wide=bucket.trains)
        del values
        give_back_freed()
    if isinstance(init, WeightSource):
        _read_buffers(parts.module, init, rollback)


def _depth(unit: Unit) -> int:
    return unit.name.count(".") + bool(unit.name)


def _values(parts: EngineParts, unit: Unit, init: Init, rollback: Rollback) -> dict[int, Values]:
    """Returns the values for buckets, by ``id`` of each parameter of a unit that moves; collective.

    With ``broadcast``, the unit's other parameters get rank 0's values in place. What a source has,
    each rank reads for itself.
    """
    comm, broadcast = parts.comm, parts.options.broadcast
    takes = broadcast and comm.rank != 0
    moves = {id(param) for param in (*parts.plan.params, *parts.frozen.params)}
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
                # A quantized layer holds its codes apart from the parameter, too.
                rollback.keep_values(param)
            elif takes:
                # The rollback keeps the memory of ``value``: the broadcast must not write to it.
                value = value.clone()
            values[id(param)] = HeldValues(value)
        elif takes:
            rollback.keep_values(param)
        if broadcast:
            comm.broadcast(value, 0)
    return values


def _is_held(value: Tensor) -> bool:
    """Returns whether others than a parameter, and this view of it, refer to its memory."""
    storage = value.untyped_storage()
    # The storage object here is the third to refer to it.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 3


def _read_in_place(param: nn.Parameter, values: Values, rollback: Rollback) -> None:
    """Reads values into a parameter without a bucket, which gets dense memory for them."""
    rollback.keep_data(param)
    set_local(param, _read_whole(local_of(param), values))


def _read_whole(like: Tensor, values: Values) -> Tensor:
    fresh = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    values.read(0, fresh.view(-1))
    return fresh


def _read_buffers(root: nn.Module, source: WeightSource, rollback: Rollback) -> None:
    """Reads the buffers that a source has."""
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


def settle_rest(parts: EngineParts, rollback: Rollback) -> None:
    """Casts parameters without a bucket, makes them dense, and settles buffers; collective.

    A checkpoint reads into a view of each such parameter as one row, which only dense ones have.
    Buffers are broadcast and cast.

    Args:
        parts: the engine's parts, after :func:`move_in`.
        rollback: registers how to undo it.
    """
    comm, options = parts.comm, parts.options
    dtypes = parts.dtypes
    buckets = (*parts.stored, *parts.stored_frozen)
    placed = {id(each.param) for bucket in buckets for each in bucket.params}
    for param in parts.module.parameters():
        if id(param) in placed or id(param) in parts.ignored:
            continue
        dtype = dtypes.of_param(param) if param.dtype in DTYPE_NAMES else None
        local = local_of(param).detach()
        if dtype is not None or not local.is_contiguous():
            rollback.keep_data(param)
            set_local(param, local.to(dtype or param.dtype).contiguous())
    # Several modules may have one buffer, which stays one but where they want it in two dtypes. The
    # ids are those of the old buffers, which ``rollback`` keeps alive.
    settled: dict[tuple[int, torch.dtype | None], Tensor] = {}
    for owner in parts.module.modules():
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
