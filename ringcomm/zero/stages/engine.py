# SPDX-License-Identifier: Apache-2.0
"""The engine of a sharded module on one rank: its buckets, hooks and state of an iteration."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.comm.agreement import ModelRanks, all_or_none
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.module_names import named_modules, named_parameters, unwrapped_name
from ringcomm.offload.scratch import DiskChunks
from ringcomm.optim.buckets import count_change
from ringcomm.optim.dtensors import (
    align_gradient,
    find_mesh,
    is_distributed,
    local_of,
    set_grad,
    without_torch_function,
)
from ringcomm.optim.layout import DTYPE_NAMES
from ringcomm.optim.placement import Placement, displace
from ringcomm.optim.sharded import refuse_join
from ringcomm.zero.stages.buckets import (
    BucketParam,
    ParamBucket,
    ReplicatedBucket,
    ShardedBucket,
    expect,
)
from ringcomm.zero.stages.options import ModuleDtypes, ZeroOptions
from ringcomm.zero.stages.order import StepProfile, in_pipeline, module_order
from ringcomm.zero.stages.reduce import GradientBucket, Reduction
from ringcomm.zero.stages.units import BucketAssignment, Unit
from ringcomm.zero.stages.unshard import Unsharder
from ringcomm.zero.stages.updates import BackwardUpdates

# ---- Slots of a sharded module's parameters, in which no other tensor may replace a parameter ----

Tensor = torch.Tensor


class _ParamSlot(NamedTuple):
    """A slot: ``module._parameters[key] is param``; ``name`` is the parameter's full name."""

    name: str
    module: nn.Module
    key: str
    param: nn.Parameter


class Slots:
    """The slots of a module's bucketed parameters; a slot is a module and a ``_parameters`` key.

    NOTE [Replaced parameters]
    A tensor that replaces a parameter after ``shard()`` would never be trained: hooks, buckets and
    the optimizer refer to the old parameter, which the module no longer uses. If
    ``load_state_dict(assign=True)`` replaces a parameter, the new values are copied into the old
    parameter, as a load without ``assign`` does. The step refuses any other replacement. A
    parameter that only gets another name, as in pruning and most parametrizations, stays trained.
    """

    def __init__(self, root: nn.Module, entries: Iterable[BucketParam], head: str) -> None:
        self._root = root
        self._head = head
        known = {id(each.param) for each in entries}
        self._slots = [
            _ParamSlot(f"{prefix}.{key}" if prefix else key, module, key, param)
            for prefix, module in root.named_modules(remove_duplicate=False)
            for key, param in module._parameters.items()
            if id(param) in known and param is not None
        ]
        # The entries that _read() yielded last. check() compares entries, not the dicts that hold
        # them: unsharding swaps the dicts; see NOTE [A dict while unsharded] in hooks.py.
        self._entries: list[tuple[nn.Module, str, str, object]] | None = None

    def _read(self) -> Iterator[tuple[nn.Module, str, str, object]]:
        """Yields all modules' entries; if these are unchanged, no parameter was replaced."""
        known = {id(slot.param) for slot in self._slots}
        for module in self._root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # TorchScript's entries are not in Python dicts, and do not change
            for key, child in module._modules.items():
                yield module, "_modules", key, child
            for key, param in module._parameters.items():
                if id(param) in known:
                    yield module, "_parameters", key, param

    def check(self) -> None:
        """Checks that each parameter is still in its slot.

        Raises:
            ArgumentError: the module has another tensor in a parameter's slot.
            UnsupportedError: a module of TorchScript replaced a parameter's module.
        """
        if self._entries is None:
            return self._look()
        for module, table, key, thing in self._entries:
            if module.__dict__[table].get(key) is not thing:
                return self._look()
        return None

    def _look(self) -> None:
        there = {id(param) for param in self._root.parameters()}
        for slot in self._slots:
            if self._is_replaced(slot, there):
                name = unwrapped_name(self._root, slot.name)
                raise ArgumentError(
                    f"{self._head}: parameter {name}: another tensor has replaced it in the "
                    "module since shard(), and would never be trained. Keep the parameter and "
                    "change its values in place, with copy_(), at stage 3 inside "
                    "ringcomm.zero.unsharded(module, write_from=0). Replace, tie or parametrize "
                    "parameters before shard(), or call remove_sharding() first"
                )
        self._entries = list(self._read())

    def _is_replaced(self, slot: _ParamSlot, there: set[int]) -> bool:
        owner: Any = self._root
        for part in slot.name.split(".")[:-1]:
            owner = vars(owner)["_modules"].get(part)
            if owner is None:
                return False  # the module was deleted, so nothing uses the slot
            if isinstance(owner, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"{self._head}: parameter {unwrapped_name(self._root, slot.name)}: a "
                    f"{type(owner).__name__} of TorchScript has taken the place of its module "
                    "since shard(), without the module's hooks. Compile modules with "
                    "torch.compile(), or call remove_sharding() before you script or trace "
                    "its parts"
                )
        now = owner._parameters.get(slot.key)
        if now is not None or id(slot.param) in there:
            return now is not None and now is not slot.param
        # The attribute is not read, since a property may compute its value from parameters.
        computed = isinstance(getattr(type(owner), slot.key, None), property)
        held = vars(owner).get(slot.key), owner._buffers.get(slot.key)
        return computed or any(isinstance(each, Tensor) for each in held)

    def watch_loads(self, keep: Callable[[RemovableHandle], None]) -> None:
        """Makes ``load_state_dict(assign=True)`` copy into the parameters, not replace them."""
        of: dict[nn.Module, list[_ParamSlot]] = {}
        for slot in self._slots:
            of.setdefault(slot.module, []).append(slot)
        for module, slots in of.items():
            keep(module.register_load_state_dict_post_hook(_TakeOver(slots)))  # type: ignore[no-untyped-call]


class _TakeOver:
    """A load hook that puts back a module's parameters, with the values of assigned tensors."""

    def __init__(self, slots: list[_ParamSlot]) -> None:
        self._slots = slots

    @torch.no_grad()
    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for slot in self._slots:
            now = module._parameters.get(slot.key)
            if now is not None and now is not slot.param:
                slot.param.copy_(now)
                module._parameters[slot.key] = slot.param


# ---- Conversions of a sharded module by ``.to()``, ``.half()`` and the like, which are refused --
# NOTE [Conversions] A conversion gives each parameter other memory, and the buckets keep the old
# memory. At stages 0 and 1 backward would then fail on gradients of another dtype, and at stages 2
# and 3 the step would fail. All of torch's conversions call each module's ``_apply()`` with a
# function of one tensor. So each module gets an ``_apply()`` of its own, which first tries the
# function on small tensors with the dtypes and devices of the module's tensors.
#
# A function that returns equal tensors is not applied at all. ``.to("cpu:0")`` is an example: torch
# copies tensors of the device "cpu", and the copy changes nothing that a program can observe.


Convert = Callable[[Tensor], Tensor]
# The method of torch's modules that all conversions call.
_METHOD = "_apply"
# Each probe has other values than recent probes, since a function may return uninitialized memory
# that still holds the values of an earlier probe.
_seeds = count(1)


class Unconverted:
    """A sharded module's ``_apply()``, which refuses functions that would change its tensors.

    Attributes:
        module: the module.
        head: the start of a message: operation and rank.
        alive: returns None once the module is no longer sharded, for example because the sharded
            module that contains it was freed.
    """

    def __init__(self, module: nn.Module, head: str, alive: Callable[[], object | None]) -> None:
        self.module = module
        self.head = head
        self.alive = alive

    def __call__(self, fn: Convert, recurse: bool = True) -> nn.Module:
        if self.alive() is None:
            getattr(type(self.module), _METHOD)(self.module, fn, recurse)
            return self.module
        guarded = list(self._inside()) if recurse else [self.module]
        tried: dict[object, str | None] = {}
        for module in guarded:
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._check(module, key, tensor, fn, tried)
        # The function changes no sharded tensor. Apply it to modules added since shard().
        if recurse:
            known = set(map(id, guarded))
            for module in guarded:
                for child in module.children():
                    if id(child) not in known:
                        getattr(child, _METHOD)(fn)
        return self.module

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a part of the module is not sharded: it gets the method of its class.
        return getattr, (self.module, _METHOD)

    def _inside(self) -> Iterator[nn.Module]:
        for module in self.module.modules():
            if isinstance(vars(module).get(_METHOD), Unconverted):
                yield module

    def _check(
        self,
        module: nn.Module,
        key: str,
        tensor: Tensor,
        fn: Convert,
        tried: dict[object, str | None],
    ) -> None:
        """Raises ArgumentError if the function would change tensors like this one."""
        with without_torch_function():
            local = local_of(tensor)
            shape = tuple(min(size, 2) for size in local.shape)
            kind = local.dtype, local.device, shape
        if kind not in tried:
            tried[kind] = _change_of(_probe(*kind), fn)
        change = tried[kind]
        if change is not None:
            which = "param" if key in module._parameters else "buffer"
            raise ArgumentError(self._refusal(self._name_of(module, key), which, kind, change))

    def _name_of(self, module: nn.Module, key: str) -> str:
        names = (name for name, each in named_modules(self.module) if each is module)
        prefix = next(names, "")
        return f"{prefix}.{key}" if prefix else key

    def _refusal(self, name: str, which: str, kind: tuple[Any, ...], change: str) -> str:
        way = "call zero.remove_sharding(), convert the module, and shard() it again"
        if change in map(str, DTYPE_NAMES):
            way = (
                f"pass shard() options=ZeroOptions(precision=Precision({which}={change})) "
                f"instead; or {way}"
            )
        return (
            f"{self.head}: {type(self.module).__name__}.to(), or another call that converts a "
            f"module: {name} is {kind[0]} on {kind[1]}, where shard() has put it, and would get "
            f"{change}. Nothing was changed. To convert it, {way}"
        )


def _probe(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """Returns a small tensor whose values differ from the values of recent probes."""
    elems = torch.Size(shape).numel()
    first = next(_seeds) * max(elems, 1)
    return ((torch.arange(elems, device="cpu") + first) % 97 + 1).to(device, dtype).view(shape)


def _change_of(probe: Tensor, fn: Convert) -> str | None:
    """Describes the change that a function makes to a tensor; None if it changes nothing."""
    before = _bits(probe)
    stride = probe.stride()
    with torch.no_grad():
        made = fn(probe)
    if made.dtype is not probe.dtype:
        return str(made.dtype)
    if made.device != probe.device:
        return f"memory on {made.device}"
    if made.layout is not torch.strided or (made.shape, made.stride()) != (probe.shape, stride):
        return f"strides {made.stride()}" if made.layout is torch.strided else str(made.layout)
    if made.device.type == "cpu" and made.is_shared():  # type: ignore[no-untyped-call]
        return "memory that torch shares between processes"
    return None if torch.equal(_bits(made), before) else "other values"


def _bits(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor's memory as bytes."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).clone()


def refuse_conversions(
    root: nn.Module, head: str, alive: Callable[[], object | None]
) -> list[nn.Module]:
    """Makes a module and all modules inside it refuse conversions; returns these modules.

    Args:
        root: the module.
        head: the start of a message: operation and rank.
        alive: returns None once the module is no longer sharded.
    """
    modules = list(root.modules())
    for module in modules:
        object.__setattr__(module, _METHOD, Unconverted(module, head, alive))
    return modules


def allow_conversions(modules: list[nn.Module]) -> None:
    """Undoes :func:`refuse_conversions`."""
    for module in modules:
        vars(module).pop(_METHOD, None)
    modules.clear()


# NoneType() returns None, as a weak reference to a backward does once the backward has ended.
_NOTHING = type(None)
#: A hook that gets a parameter's name, a shard of its gradient, and the shard's first index.
GradientHook = Callable[[str, Tensor, int], object]
# The engine of each parameter, trainable or frozen. Keys are weak and compared by id(). Values are
# weak, since they refer to the keys. cast(): torch gives WeakIdKeyDictionary no type parameters.
_engines: MutableMapping[Tensor, weakref.ref[ShardEngine]] = cast(Any, WeakIdKeyDictionary)()


def owner_of(param: Tensor) -> ShardEngine | None:
    """Returns the engine of the sharded module that has a parameter, or None."""
    reference = _engines.get(param)
    return None if reference is None else reference()


@dataclass(frozen=True)
class EngineSetup:
    """The parts of an engine: the module, its units and buckets, and the options.

    Attributes:
        module: the root.
        stage: 0 to 3.
        comm: the communicator of the ranks that share the module.
        options: the options of the training.
        dtypes: the dtypes that ``options.precision`` gives the parts of the module.
        units: the units, the root first.
        trainable: the assignment of the trainable parameters to buckets.
        frozen: the assignment of the other parameters; empty before stage 3.
        stored: the buckets of ``trainable``; empty until they are made.
        stored_frozen: the buckets of ``frozen``.
        number: stages 2 and 3: the module's number; see ``ModuleOrder.join``.
        others: the mesh of the model's other pipeline stages and shards, or None.
        ignored: the ``id`` of each parameter in ``ZeroOptions.ignored``.
        store: this rank's chunks of the parameters on a disk; None if they are in memory.
    """

    module: nn.Module
    stage: int
    comm: Communicator
    options: ZeroOptions
    dtypes: ModuleDtypes
    units: Sequence[Unit]
    trainable: BucketAssignment
    frozen: BucketAssignment
    stored: Sequence[ParamBucket] = ()
    stored_frozen: Sequence[ParamBucket] = ()
    number: int = 0
    others: DeviceMesh | None = None
    ignored: frozenset[int] = frozenset()
    store: DiskChunks | None = None


class ShardEngine:
    """The engine of one sharded module on one rank.

    NOTE [Hooks count]
    The hook of a gradient notes the parameter and updates the bucket's counts. The engine looks at
    a bucket when the bucket's last gradient has arrived, when its waiting gradients reach
    ``BATCH_BYTES``, and at stage 3 when backward no longer needs its parameters. The first gradient
    of a backward decides for the whole module whether this backward reduces the module, and whether
    gradients may update parameters. A gradient must not wait in two cases: with sums in FP32,
    because the accumulator would add the waiting gradient to its sum; and after its bucket's turn,
    because the gradient is then left over.

    Attributes:
        setup: the parts of the engine.
        reduction: stages 2 and 3: reduces the gradients.
        unsharder: stage 3: unshards and reshards the parameters.
        profile: records when the engine communicates.
        number: the module's number among the modules that its communicator reduces.
        order: the communicator's order of reductions.
        slots: the slots of the parameters in the module.
        mesh: the mesh of DTensor parameters, or None.
        placement: the module as optimizers see it; set by ``set_placements``.
        watchers: hooks that get reduced gradients, by number.
        closed: True once the module is no longer sharded.
        exchanged: True in :func:`ringcomm.zero.exchanged`, where parameters have other values.
    """

    placement: Placement

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.stage, self.comm, self.options = setup.stage, setup.comm, setup.options
        self.trainable, self.stored = setup.trainable, setup.stored
        self.number = setup.number
        self.order = module_order(self.comm)
        self.profile = StepProfile()
        self.reduction = self._make_reduction() if self.stage > 1 else None
        self.unsharder = self._make_unsharder() if self.stage == 3 else None
        self.mesh = find_mesh(self.setup.module.parameters(), "shard")
        self._handles: list[RemovableHandle] = []
        self._watched: list[nn.Module] = []
        self.closed = False
        self.exchanged = False
        #: With parameters on a disk: copies of the shards by name, while they are written to.
        self.shard_copies: dict[str, Tensor] | None = None
        self.watchers: OrderedDict[int, GradientHook] = OrderedDict()
        self._takes_part = False
        self._creates_graph = False
        # _running() is None unless a backward through the module runs; _counting() is None unless
        # this backward has brought a gradient. No cheaper test notices that a backward raised.
        self._running: Callable[[], object | None] = _NOTHING
        self._counting: Callable[[], object | None] = _NOTHING
        # Whether the backward that _counting refers to reduces the module's gradients.
        self._reduces = False
        everywhere = (*setup.stored, *setup.stored_frozen)
        head = where("zero", setup.comm.rank, setup.comm.world_size)
        entries = [entry for bucket in everywhere for entry in bucket.params]
        self.slots = Slots(setup.module, entries, head)
        self.slots.watch_loads(self.keep)
        known = {*map(id, self.trainable.params), *setup.ignored}
        #: The names of parameters that were frozen at ``shard()``, by parameter.
        self.frozen_params = {
            param: name for name, param in named_parameters(setup.module) if id(param) not in known
        }
        self._unconverted = refuse_conversions(setup.module, head, weakref.ref(self))
        self._align_gradients()
        setup.module.join_hook = refuse_join  # type: ignore[assignment]
        if self.reduction is not None:
            self._watch_gradients(self.reduction.buckets)
            self._gradients = {bucket.stored: bucket for bucket in self.reduction.buckets}
            self._trained = {id(entry.param) for bucket in self.stored for entry in bucket.params}
            self._zero_grad_of_module = setup.module.zero_grad
            setup.module.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def _make_reduction(self) -> Reduction:
        # Only stage 2, whose step gathers parameters, can step in one pass, with FP32 gradients.
        reduced = self.options.precision.reduced_dtype
        exact = all(reduced(each.layout.dtype) is torch.float32 for each in self.stored)
        one_pass = self.stage == 2 and exact and not self.comm.launches
        return Reduction(
            self.stored, self.comm, self.options, self.profile, self.number, keeps=one_pass
        )

    def _make_unsharder(self) -> Unsharder:
        of: dict[int, list[ShardedBucket]] = {number: [] for number in range(len(self.setup.units))}
        for assignment, stored in (
            (self.trainable, self.stored),
            (self.setup.frozen, self.setup.stored_frozen),
        ):
            for unit, bucket in zip(assignment.unit_of, stored, strict=True):
                assert isinstance(bucket, ShardedBucket)
                of[unit].append(bucket)
        units = [(unit, of[number]) for number, unit in enumerate(self.setup.units)]
        store = self.setup.store
        told = None if store is None else partial(expect, store)
        return Unsharder(units, self.comm, self.options, self.profile, told)

    def own(self, owns: bool) -> None:
        """Makes the engine the owner of the module's parameters, or ends its ownership."""
        for param in (*self.trainable.params, *self.frozen_params):
            if owns:
                _engines[param] = weakref.ref(self)
            else:
                _engines.pop(param, None)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this module's parameters with their current unwrapped names.

        Ignored parameters and parameters of other engines are left out: modules that were added
        after ``shard()``, such as adapters, may be sharded by themselves.
        """
        for name, param in named_parameters(self.setup.module):
            if owner_of(param) in (None, self) and id(param) not in self.setup.ignored:
                yield name, param

    def names(self) -> dict[int, str]:
        """Returns parameters' names by ``id``; a removed parameter keeps its last name."""
        buckets = (*self.setup.stored, *self.setup.stored_frozen)
        had = {id(entry.param): entry.name for bucket in buckets for entry in bucket.params}
        return {**had, **{id(param): name for name, param in self.named_parameters()}}

    def keep(self, handle: RemovableHandle) -> None:
        """Registers the handle of a hook; :meth:`close` removes the hook."""
        self._handles.append(handle)

    def watch(self, module: nn.Module, params: dict[str, Any]) -> None:
        """Replaces a module's table of parameters until the engine is closed."""
        module._parameters = params
        self._watched.append(module)

    # ---- gradients ------------------------------------------------------------------------------

    @property
    def ranks(self) -> ModelRanks:
        """The ranks that train the module together."""
        return ModelRanks(self.comm, self.mesh)

    def _align_gradients(self) -> None:
        """Gives gradients of DTensors their parameters' placements as they arrive, in one order.

        Redistributing a gradient may be collective, so a hook does it here, in the same order on
        all ranks. The order of later work depends on each rank's free buffers and local elements.
        See also NOTE [Sums to come] in ``zero/stages/order.py``.
        """
        for param in self.trainable.params:
            if is_distributed(param):
                self.keep(param.register_post_accumulate_grad_hook(_align_gradient))  # type: ignore[no-untyped-call]

    def _watch_gradients(self, buckets: Sequence[GradientBucket]) -> None:
        # Weak references, since parameters may outlive the module and keep their hooks alive.
        me = weakref.ref(self)
        for bucket in buckets:
            for index, param in enumerate(bucket.params):
                hook = partial(_gradient_arrived, me, weakref.ref(bucket), index)
                self.keep(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self.order.add(self)

    def expects_gradients(self) -> bool:
        """True if the running backward will add to some parameter's gradient."""
        return any(_brings_gradient(param) for param in self.trainable.params)

    def begin_backward(self) -> None:
        """Begins a backward, unless one already runs; every hook of a backward calls this."""
        if self._running() is None and not self.in_backward:
            self._takes_part = True
            # With create_graph=True, the gradients' graph refers to the parameters' memory.
            self._creates_graph = torch.is_grad_enabled()
            if self.unsharder is not None and self._creates_graph:
                self.unsharder.held = True
            self.order.take_part(self)
            assert self.order.backward is not None
            self._running = self.order.backward

    def _begin_counting(self, param: Tensor) -> None:
        """Called when a backward has brought its first gradient, the gradient of ``param``."""
        assert self.reduction is not None
        self.begin_backward()
        if self.reduction.updates is not None:
            self._check_gradient(self.reduction.updates, param)
        self._reduces = self.order.arrived(self.number)
        self.reduction.count(self._reduces, to_reshard=self.unsharder is not None)
        self._counting = self._running

    def _look(self, bucket: GradientBucket) -> None:
        """Called when a bucket's count has reached zero: takes the bucket's waiting gradients."""
        assert self.reduction is not None
        arrived, bucket.waiting = bucket.waiting, []
        if self._reduces and self.reduction.arrived(bucket, arrived):
            self.order.advance()
        bucket.pending -= len(arrived)
        bucket.count(self._reduces, to_reshard=self.unsharder is not None)
        if not bucket.pending and self.unsharder is not None:
            assert isinstance(bucket.stored, ShardedBucket)
            self.unsharder.reshard_used(bucket.stored)

    def begin_reducing(self) -> None:
        """Called once the ranks agree that this backward reduces the module; collective."""
        assert self.reduction is not None
        if self.reduction.updates is not None:
            if self._takes_part:
                self._refuse_graph()
            self.refuse_unsharded("backward")
        self.reduction.begin_backward()

    def _check_gradient(self, updates: BackwardUpdates, param: Tensor) -> None:
        """Raises ArgumentError for a gradient that cannot update its parameter in backward."""
        try:
            self._refuse_graph()
            if updates.changed and not self.order.reduces(self.number):
                updates.refuse_another("backward")
        except ArgumentError:
            set_grad(param, None)
            raise

    def _refuse_graph(self) -> None:
        if self._creates_graph:
            raise ArgumentError(
                f"{where('backward', self.comm.rank, self.comm.world_size)}: create_graph=True: "
                "the graph of the gradients needs parameters that this backward would update "
                '(update="in_backward"); build the optimizer with update="in_step". '
                "torch.autograd.grad(create_graph=True) inside of a loss is fine"
            )

    def end_backward(self) -> None:
        """Called when the backward has ended or raised."""
        self._takes_part = False
        self._running = self._counting = _NOTHING
        assert self.reduction is not None
        self.reduction.stop_counting()
        if self.unsharder is not None:
            if not self._creates_graph:
                self.unsharder.release()
            self.unsharder.end_backward()

    @property
    def in_backward(self) -> bool:
        """True while a backward through the module runs."""
        if self.order.backward is not None:
            self.order.settle()
        return self._takes_part

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the reduced gradients, and calls the module's own ``zero_grad()``."""
        self.forget_gradients(set_to_none)
        of_module = getattr(self._zero_grad_of_module, "__func__", None)
        if not set_to_none or of_module is not nn.Module.zero_grad:
            self._zero_grad_of_module(set_to_none)
            return
        # Does as nn.Module.zero_grad(), but skips ``own``, whose gradients are dropped already.
        own = self._trained
        for param in self.setup.module.parameters():
            if id(param) not in own and param.grad is not None:
                param.grad = None

    def forget_gradients(self, set_to_none: bool) -> None:
        """Drops all gradients of the reduction, reduced or not, at stages 2 and 3."""
        self.placement.lost = None
        if self.reduction is None:
            return
        self.order.settle()
        if set_to_none:
            self.reduction.drop()
        else:
            self.reduction.zero()

    def expect_gradients(self, buckets: Sequence[ShardedBucket]) -> None:
        """Called when a backward through a unit begins; expects all its gradients again."""
        if self._counting() is None:
            return
        for stored in buckets:
            bucket = self._gradients.get(stored)
            if bucket is not None and (bucket.waiting or bucket.pending < bucket.trained):
                if bucket.waiting:
                    self._look(bucket)
                bucket.pending = bucket.trained
                bucket.count(self._reduces, to_reshard=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Stops backwards from reducing; see ``ringcomm.zero.no_sync``."""
        self.order.pause(self.number)
        assert self.reduction is not None
        # Other ranks may have gradients even if this rank has none.
        self.reduction.has_left_over = True
        try:
            yield
        finally:
            self.order.resume(self.number)

    # ---- parameters -----------------------------------------------------------------------------

    def reshard_all(self) -> None:
        """Reshards all parameters, at stage 3."""
        if self.unsharder is not None:
            self.unsharder.reshard_all()

    @contextmanager
    def unsharded(self, units: Sequence[Unit]) -> Iterator[None]:
        """Unshards units and keeps them unsharded inside the context; may be collective."""
        if self.unsharder is None:
            yield
            return
        with self.unsharder.pin():
            for unit in units:
                self.unsharder.unshard(unit)
            yield

    def check(self, operation: str) -> None:
        """Checks that the parameters are in their slots, with their own values.

        Raises:
            ArgumentError: the module has another tensor in a parameter's slot, is no longer
                sharded, or is in ``exchanged()``.
        """
        self.check_values(operation)
        self.check_slots(operation)

    def check_slots(self, operation: str) -> None:
        """Checks as :meth:`check` does, but allows other values, as inside ``exchanged()``."""
        if self.closed:
            raise ArgumentError(
                f"{where(operation, self.comm.rank, self.comm.world_size)}: the parameters belong "
                "to a module that is no longer sharded since remove_sharding(), so that its shards "
                "are gone; shard() it again, and build a new optimizer"
            )
        self.slots.check()

    def check_values(self, operation: str) -> None:
        """Raises ArgumentError where the parameters do not have the values of the last step.

        This happens inside ``exchanged()``, which all ranks enter together, and between a backward
        that has updated parameters and ``optimizer.step()``.
        """
        self.refuse_under_way(operation)
        if self.exchanged:
            raise ArgumentError(
                f"{where(operation, self.comm.rank, self.comm.world_size)}: called inside "
                "exchanged(), where the parameters have other values than their own; leave the "
                "context first"
            )

    def refuse_under_way(self, operation: str) -> None:
        """Raises ArgumentError if a backward has updated parameters and no step has followed."""
        updates = None if self.reduction is None else self.reduction.updates
        if updates is not None and updates.under_way and not self.in_backward:
            updates.refuse_under_way(operation)

    def check_all(self, operation: str) -> None:
        """Runs :meth:`check` on all ranks; if one raises, all raise; collective.

        Raises:
            ArgumentError: as :meth:`check`; or a parameter's memory was replaced.
        """
        with all_or_none(self.comm, operation, self.mesh):
            self.check(operation)
            for bucket in self.stored:
                # A sharded bucket makes this check when it is resharded.
                if isinstance(bucket, ReplicatedBucket):
                    bucket.check()

    @contextmanager
    def together(self, operation: str) -> Iterator[None]:
        """Raises on all ranks at the end of the context if one rank's disk failed; collective."""
        store = self.setup.store
        if store is None:
            yield
            return
        with store.keeping_faults():
            yield
        with all_or_none(self.comm, operation, self.mesh):
            store.raise_fault()

    def reshard_for_step(self) -> None:
        """Reshards all parameters, at stage 3, since a step is about to change their values.

        Raises:
            ArgumentError: the step is inside ``unsharded()``.
        """
        self.reshard_for_change("optimizer.step")

    def reshard_for_change(self, operation: str) -> None:
        """Reshards as :meth:`reshard_for_step` does, for any operation that changes values."""
        self.refuse_unsharded(operation)
        if self.unsharder is not None:
            self.unsharder.reshard_for_change()

    def change(self, operation: str) -> None:
        """Calls :meth:`reshard_for_change`, and advances the versions of all parameters."""
        self.reshard_for_change(operation)
        self.count_change()

    def count_change(self, params: Sequence[Tensor] | None = None) -> None:
        """Advances the versions of parameters whose values change.

        The backward of a graph that was built earlier then raises, instead of using new values.

        Args:
            params: the parameters that all ranks have changed, or are about to; None for all.
        """
        if params is None:
            params = [param for _, param in self.named_parameters()]
        count_change(params)
        if self.unsharder is not None:
            only = set(map(id, params))
            for bucket in (*self.setup.stored, *self.setup.stored_frozen):
                assert isinstance(bucket, ShardedBucket)
                bucket.count_change(only)

    def refuse_unsharded(self, operation: str) -> None:
        """Raises ArgumentError inside ``unsharded()``, at stage 3."""
        if self.unsharder is not None and self.unsharder.pinned:
            raise ArgumentError(
                f"{where(operation, self.comm.rank, self.comm.world_size)}: called inside "
                "unsharded(), whose parameters would keep their old values; leave the context first"
            )

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Removes all hooks; the parameters keep their memory."""
        self.closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        vars(self.setup.module).pop("join_hook", None)
        allow_conversions(self._unconverted)
        if self.reduction is not None:
            vars(self.setup.module).pop("zero_grad", None)
            self.reduction.wait()
        if self.unsharder is not None:
            self.unsharder.close()
        # Runs after close() of the unsharder, which puts back the watched tables of modules.
        for module in self._watched:
            module._parameters = dict(module._parameters.items())
        self._watched.clear()
        if self.setup.store is not None:
            self.setup.store.close()
        for param in (*self.trainable.params, *self.frozen_params):
            displace(param)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "zero: a sharded module cannot be copied, since its parameters lie in the heap; "
            "call remove_sharding() first, or copy the module before shard()"
        )

    def __getstate__(self) -> NoReturn:
        self.__deepcopy__({})


def _brings_gradient(param: Tensor) -> bool:
    """True if the running backward will add to a parameter's gradient."""
    # The autograd node is not stored, since a node keeps the stream on which it was made.
    try:
        with without_torch_function():
            node = get_gradient_edge(param).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch raises inside torch.autograd.grad(), which accumulates no gradient.
        return False


def _align_gradient(param: Tensor) -> None:
    if not in_pipeline():
        align_gradient(param)


def _gradient_arrived(
    engine: weakref.ref[ShardEngine],
    reference: weakref.ref[GradientBucket],
    index: int,
    param: Tensor,
) -> None:
    """Counts one gradient that has arrived; calls _look() when the bucket's count runs out."""
    alive, bucket = engine(), reference()
    if alive is None or bucket is None:
        return
    if alive._counting() is None:
        alive._begin_counting(param)
    bucket.waiting.append(index)
    bucket.left -= 1
    bucket.room -= bucket.sizes[index]
    if bucket.left <= 0 or bucket.room <= 0:
        alive._look(bucket)
