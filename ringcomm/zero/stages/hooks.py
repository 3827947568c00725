# SPDX-License-Identifier: Apache-2.0
"""Module hooks: casts at the root, and at stage 3 unsharding and resharding around each unit."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ringcomm.comm.host.arguments import only_inlined, outside_of_compile
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.module_names import (
    KnownNames,
    wrapped_key,
)
from ringcomm.optim.dtensors import is_distributed, with_own_storage
from ringcomm.zero.stages.buckets import ShardedBucket
from ringcomm.zero.stages.engine import ShardEngine, owner_of
from ringcomm.zero.stages.resharded import Resharded, value_of
from ringcomm.zero.stages.units import Unit
from ringcomm.zero.stages.unshard import Unsharder, stays_after_forward

F = TypeVar("F", bound=Callable[..., Any])
# torch's bindings are not typed.
functorch: Any = torch._C._functorch
# Returns the running transforms, or None. Hooks call this first: it runs no Python code.
_transforms: Callable[[], Any] = functorch.get_interpreter_stack
_DIFFERENTIATES = (functorch.TransformType.Grad, functorch.TransformType.Jvp)

# Dynamo shows this text where it breaks a graph, and in the error under fullgraph=True.
_REASON = (
    "ringcomm.zero works between the graphs: at stage 3 it unshards each unit before it runs and "
    "frees it afterwards. For fullgraph=True pass each unit, such as every block, through "
    "torch.compile() before shard(), and leave the module around them uncompiled"
)


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile()`` wrapped, or the module if it is not wrapped."""
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


def in_transform() -> bool:
    """True if ``grad``, ``vjp`` or ``jvp`` of ``torch.func`` calls the module.

    These functions return gradients instead of accumulating them in parameters, so there is nothing
    to reduce. Inside these transforms torch also refuses writes to tensors from outside, and
    unsharding makes such writes.
    """
    stack = _transforms()
    return stack is not None and any(each.key() in _DIFFERENTIATES for each in stack)


Tensor = torch.Tensor
_is_unsharded: Callable[[ShardedBucket], bool] = operator.attrgetter("is_unsharded")


def hook_modules(engine: ShardEngine, root: nn.Module) -> None:
    """Registers all hooks that the engine's stage and precision need."""
    precision = engine.options.precision
    inputs = precision.param if precision.cast_inputs else None
    casts = inputs is not None or precision.output is not None
    cast_inputs, cast_outputs = _casts(inputs, precision.output)
    if casts:
        engine.keep(root.register_forward_pre_hook(cast_inputs, with_kwargs=True))
    _keep_dtypes(engine)
    if engine.stage > 1:
        _RootHooks(engine, root)
    if engine.unsharder is not None:
        unsharder = engine.unsharder
        hooks = [
            _UnitHooks(engine, unsharder, unit, unit.module is root) for unit in engine.setup.units
        ]
        _watch_accesses(engine, hooks)
        refuse = _refuse_states(engine)
        engine.keep(root.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # TorchScript takes no such hooks; shard() refuses it if it has tensors
            engine.keep(module.register_load_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
    if casts:
        engine.keep(root.register_forward_hook(cast_outputs))


def _keep_dtypes(engine: ShardEngine) -> None:
    """Registers casts for modules whose dtype differs from the dtype around them."""
    # Modules of one kind share two hooks, so that compiled units of one kind share their code.
    casts: dict[tuple[torch.dtype, torch.dtype | None], tuple[Any, Any]] = {}
    for chosen in engine.setup.dtypes.chosen:
        for module in _called(chosen.module):
            stays = getattr(module, "returns_fp32", False)
            kind = chosen.dtype, None if stays else chosen.outside
            if kind not in casts:
                casts[kind] = _casts(*kind)
            cast_inputs, cast_outputs = casts[kind]
            engine.keep(module.register_forward_pre_hook(cast_inputs, with_kwargs=True))
            engine.keep(module.register_forward_hook(cast_outputs))


def _casts(inside: torch.dtype | None, outside: torch.dtype | None) -> tuple[Any, Any]:
    """Returns hooks that cast the inputs and outputs of a module's outermost call.

    Inner calls of a module that calls itself are not cast.

    Args:
        inside: the dtype of inputs; None leaves inputs as they are.
        outside: the dtype of outputs; None leaves outputs as they are.
    """
    running: list[nn.Module] = []

    @only_inlined
    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_inner = any(each is module for each in running)
        if is_inner and not torch.compiler.is_dynamo_compiling() and not _calls_itself(module):
            # An exception ended the earlier call, as when activation checkpoints stop recomputing.
            running[:] = [each for each in running if each is not module]
            is_inner = False
        running.append(module)
        if is_inner or inside is None:
            return None
        return _cast(args, inside), _cast(kwargs, inside)

    @only_inlined
    def cast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        while running and running.pop() is not module:
            pass
        is_inner = any(each is module for each in running)
        if is_inner or outside is None:
            return None
        return _cast(output, outside)

    return cast_inputs, cast_outputs


def _refuse_states(engine: ShardEngine) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        if engine.unsharder is not None and not engine.unsharder.pinned:
            raise ArgumentError(
                "state_dict: at stage 3 a module has its parameters only inside unsharded(). Save "
                "with ringcomm.zero.save(), save_pretrained() or full_state_dict(), and load "
                "inside unsharded(module, write_from=0)"
            )

    return refuse


class _ShowValues:
    """A hook that makes a module's own values in its state dict safe to save.

    Each value gets a storage of its own: ``safetensors.torch.save_model()`` refuses a part of a
    storage, and ``torch.save()`` would write the whole bucket. At stage 3, outside of
    ``unsharded()``, values are placeholders: frameworks call ``state_dict()`` then only for names.
    """

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = weakref.ref(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a part of the module is not sharded, so its hook does nothing.
        return partial, (_leave_as_it_is,)

    def __call__(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        engine = self._engine()
        for key, param in module._parameters.items():
            name = prefix + key
            value = state.get(name)
            if (
                value is None
                or isinstance(value, (nn.Parameter, Resharded))
                or is_distributed(value)
            ):
                continue
            if engine is None or param is None or owner_of(param) is not engine:
                continue
            unsharder = engine.unsharder
            if unsharder is not None and not unsharder.pinned:
                if unsharder.has(value):
                    state[name] = value_of(name, param)
            elif unsharder is None or unsharder.has(value):
                # Assigning .data keeps the version, which the value shares with the parameter.
                value.data = with_own_storage(value.detach())


def _leave_as_it_is(*_: Any) -> None:
    return


def settle_states(engine: ShardEngine, outer: nn.Module) -> None:
    """Makes ``state_dict()`` return unwrapped names and values that can be saved, and
    ``load_state_dict()`` accept names with and without wrappers.

    Args:
        engine: the engine of the module.
        outer: the module that was passed to ``shard()``, perhaps a wrapper around the root.
    """
    root = engine.setup.module
    show = _ShowValues(engine)
    for module in root.modules():
        if module._parameters:
            engine.keep(module.register_state_dict_post_hook(show))  # type: ignore[no-untyped-call]
    around = [] if outer is root else [outer]
    for module in (*around, *root.modules()):
        key = wrapped_key(module)
        # Wrappers of activation checkpoints already have hooks that remove the wrappers' names.
        if key is not None and not hasattr(type(module), "_post_state_dict_hook"):
            engine.keep(module.register_state_dict_post_hook(partial(_leave_out, key)))  # type: ignore[no-untyped-call]
            engine.keep(module.register_load_state_dict_pre_hook(partial(_put_in, key)))  # type: ignore[no-untyped-call]
    first = root.register_load_state_dict_pre_hook(_find_names)  # type: ignore[no-untyped-call]
    # This hook runs first: hooks of wrappers, also the root's, expect unwrapped names.
    hooks: Any = root._load_state_dict_pre_hooks
    hooks.move_to_end(first.id, last=False)
    engine.keep(first)


def _leave_out(key: str, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Removes a wrapper's part from the names in a finished state dict."""
    _replace_prefix(state, f"{prefix}{key}.", prefix)


def _put_in(key: str, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Inserts a wrapper's part into the names of a state dict that is about to be loaded."""
    inner, wrapped = module._modules[key], f"{prefix}{key}."
    names = [name for name in state if name.startswith(prefix)]
    # The module inside may also have a child named ``key``.
    first = f"{wrapped}{key}." if inner is not None and key in inner._modules else wrapped
    is_wrapped = all(name.startswith(wrapped) for name in names)
    if not (is_wrapped and any(name.startswith(first) for name in names)):
        _replace_prefix(state, prefix, wrapped)


def _replace_prefix(state: Any, prefix: str, other: str) -> None:
    """Replaces a prefix of names, and keeps their order."""
    for table in (state, getattr(state, "_metadata", {})):
        for name in list(table):
            value = table.pop(name)
            begins = name.startswith(prefix)
            table[other + name[len(prefix) :] if begins else name] = value


def _find_names(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Renames values that are about to be loaded to the unwrapped names of a module's tensors."""
    known = KnownNames.of(module)
    for name in [name for name in state if name.startswith(prefix)]:
        found = prefix + known.find(name[len(prefix) :])
        if found != name and found not in state:
            state[found] = state.pop(name)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def tensors_in(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """Yields all tensors in a value: in containers, dataclasses and other objects.

    Args:
        value: inputs or outputs of a module.
        seen: objects that were visited, by ``id``, since objects may refer to each other.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (str, bytes, type, nn.Module)):
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (Sequence, set, frozenset)):
        inside = value
    elif is_dataclass(value):
        inside = (getattr(value, field.name) for field in fields(value))
    elif hasattr(value, "__dict__"):
        held = vars(value).values()
        inside = [each for each in held if isinstance(each, (Tensor, Mapping, Sequence))]
    seen[id(value)] = value
    for each in inside:
        yield from tensors_in(each, seen)


def _watch_gradients(output: Any, hook: Callable[[Tensor], None]) -> bool:
    """Registers ``hook`` to be called before a backward reaches the code that made ``output``.

    Returns whether any tensor got the hook. Leaf tensors get none: they would keep it for ever.
    """
    watched = False
    for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
        # After a change in place, the gradient of a view arrives at the view's base.
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                each.register_hook(hook)  # type: ignore[no-untyped-call]
                watched = True
    return watched


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that can be called: a list of modules has no forward."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield module
        return
    for child in module.children():
        yield from _called(child)


class _RootHooks:
    """The hooks that notify the engine when a backward begins, before any nested backward."""

    def __init__(self, engine: ShardEngine, root: nn.Module) -> None:
        self._engine = engine
        for module in _called(root):
            engine.keep(module.register_forward_hook(self._after))

    @only_inlined
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        # A compiled graph of the whole module has one backward, without nested backwards.
        if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return
        if not in_transform():
            if not self._engine.in_backward:
                self._engine.order.runs(self._engine.number)
            _watch_gradients(output, self._backward)

    def _backward(self, grad: Tensor) -> None:
        self._engine.begin_backward()


class _UnitHooks:
    """The hooks that unshard a unit before its forward and backward, and reshard it afterwards.

    NOTE [When a bucket can be resharded in backward]
    A trainable parameter's gradient arrives after all nodes that use the parameter have run. So a
    bucket whose gradients have all arrived is no longer needed, unless autograd still refers to its
    memory, for instance through a detached weight. A bucket of frozen parameters, which have no
    gradients, is resharded when the gradients of the unit's inputs have arrived. All other buckets
    are resharded at the end of backward.
    """

    def __init__(
        self, engine: ShardEngine, unsharder: Unsharder, unit: Unit, is_root: bool
    ) -> None:
        self._engine = engine
        self._unsharder = unsharder
        self._unit = unit
        self.buckets = unsharder.buckets_of(unit)
        self._has_frozen = not all(bucket.trains for bucket in self.buckets)
        self.outside: list[_UnitHooks] = []
        self.everyone: Sequence[_UnitHooks] = ()
        self._is_root = is_root
        self._depth = 0
        # True if looking up a parameter of the resharded unit has unsharded the unit.
        self._touched = False
        # True if the unit stays unsharded after forward. touched() also sets it: for parameters
        # that are used outside of their module's calls.
        self.stays = is_root or stays_after_forward(unit, engine.options)
        engine.keep(unit.module.register_forward_pre_hook(self._before, with_kwargs=True))
        engine.keep(
            unit.module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        )

    @property
    def _is_unsharded(self) -> bool:
        return all(map(_is_unsharded, self.buckets))

    def _need(self) -> None:
        if _transforms() is not None and in_transform():
            self._check_unsharded()
        else:
            self._unsharder.need(self._unit)

    def _check_unsharded(self) -> None:
        """Raises UnsupportedError if a unit would have to be unsharded inside torch.func."""
        if not self._is_unsharded:
            comm = self._engine.comm
            raise UnsupportedError(
                f"{where('zero', comm.rank, comm.world_size)}: torch.func differentiates module "
                f"{self._unit.name!r}, whose parameters are resharded: at stage 3 they are "
                "unsharded when they are needed, and torch.func refuses writes to their memory "
                "then. Call grad(), vjp(), jvp() and functions made of them inside "
                "ringcomm.zero.unsharded(module), where all parameters are unsharded"
            )

    @outside_of_compile(_REASON)
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _transforms() is not None and in_transform():
            self._check_unsharded()
            return
        unsharder = self._unsharder
        if self._depth and not _calls_itself(module):
            for each in self.everyone:
                each._depth = 0
            unsharder.running = 0
        if not unsharder.running and not self._engine.in_backward:
            if self._is_root:
                unsharder.reshard_all()
            if self._is_root or unsharder.is_repeated(self._unit):
                unsharder.new_iteration()
        self._depth += 1
        unsharder.running += 1
        for bucket in self.buckets:
            if not bucket.is_unsharded:
                self._touched = False
                break
        # need() leaves out updated buckets: code that backward runs again may not use them.
        unsharder.need(self._unit)
        if self._has_frozen and torch.is_grad_enabled():
            self._watch_inputs((args, kwargs))

    def _watch_inputs(self, inputs: Any) -> None:
        needed = [each for each in tensors_in(inputs) if each.requires_grad]
        # Leaf tensors outlive the backward, and would keep the hook.
        if needed and not any(each.is_leaf for each in needed):
            arrived = _AllArrived(len(needed), self._reshard_frozen)
            for each in needed:
                each.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _reshard_frozen(self) -> None:
        if not self._depth and not self.stays:
            for bucket in self.buckets:
                if not bucket.trains:
                    self._unsharder.reshard_used(bucket)

    @outside_of_compile(_REASON)
    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if _transforms() is not None and in_transform():
            return None
        # torch also calls this hook, with None, after an exception, perhaps before _before() ran.
        if self._depth:
            self._depth -= 1
            self._unsharder.running -= 1
        unsharder, copied = self._unsharder, output
        if not isinstance(output, Tensor) or unsharder.has(output):
            copied = self._without_parameters(output)
        grad = torch.is_grad_enabled()
        watched = not grad or _watch_gradients(copied, self._backward)
        if self._depth or self._engine.in_backward:
            pass
        elif not watched:
            unsharder.keep_for_graph(self._unit)
        elif self._is_root and not grad:
            unsharder.reshard_all()
        elif not self.stays and (grad or not self._touched):
            for bucket in self.buckets:
                unsharder.reshard(bucket)
        return None if copied is output else copied

    def _without_parameters(self, output: Any) -> Any:
        """Returns ``output`` with copies of parameters and views, whose memory will be freed."""
        unsharder = self._unsharder
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            if unsharder.has(tensor):
                break
        else:
            return output
        copied = tree_map_only(Tensor, lambda t: t.clone() if unsharder.has(t) else t, output)
        if any(unsharder.has(tensor) for tensor in tensors_in(copied)):
            raise UnsupportedError(
                f"zero: module {self._unit.name!r} returned a parameter, or a view of one, inside "
                f"a {type(output).__name__}. At stage 3 the memory is about to be freed; "
                "return a copy (.clone())"
            )
        return copied

    def _backward(self, grad: Tensor) -> None:
        """Called when the gradient of one of the unit's outputs arrives; unshards the unit."""
        self._engine.begin_backward()
        self._engine.expect_gradients(self.buckets)
        # The unit may use parameters after it has made an output. Their gradients may arrive before
        # the output's gradient, so that these parameters are already resharded here.
        if _transforms() is None:
            self._unsharder.need(self._unit)
        else:
            self._need()
        for other in self.outside:
            other._need()

    def touched(self, bucket: ShardedBucket) -> None:
        """Called when a parameter of the resharded ``bucket`` is looked up; unshards the bucket."""
        unsharder = self._unsharder
        if not self._depth:
            unsharder.keep_for_graph(self._unit)
            if not self.stays and torch.is_grad_enabled():
                self.stays = True
                self.outside.append(self)
        self._touched = True
        self._need()
        unsharder.unshard_bucket(bucket)
        if not unsharder.running and not self._engine.in_backward:
            unsharder.open(self._unit)


class _AllArrived:
    """A hook of several tensors, which acts once a backward has brought all their gradients.

    torch's own hook for several tensors refers to the graph's nodes, which refer to the hook:
    Python does not collect this cycle, and the module would never be freed. If a backward does not
    reach all of the tensors, nothing happens.
    """

    def __init__(self, count: int, act: Callable[[], None]) -> None:
        self._count = self._left = count
        self._act = act
        self._backward = -1

    def __call__(self, grad: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._left = backward, self._count
        self._left -= 1
        if not self._left:
            self._act()


def _calls_itself(module: nn.Module) -> bool:
    """True if the module's call that has just begun is inside another call of the same module.

    If False although the module is marked as running, Ctrl-C ended an earlier call: torch then
    calls no forward hook (it catches Exception, which does not include KeyboardInterrupt).
    """
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None and calls < 2:
        frame = frame.f_back
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            calls += 1
    return calls > 1


class _WatchedDict(dict[str, Any]):
    """A module's table of parameters in which a look-up unshards the parameter.

    NOTE [Touching unshards]
    Modules use each other's parameters (``F.linear(x, self.embed.weight)``) without a call that
    hooks could see. Since unsharding needs no other rank, it can happen right where
    ``embed.weight`` is looked up. From then on the unit stays unsharded from its first use to the
    end of backward.
    """

    def __init__(self, params: Mapping[str, Any], touch: Callable[[Tensor], None]) -> None:
        super().__init__(params)
        self._touch = touch

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "zero: a sharded module cannot be copied or pickled; call remove_sharding() first"
        )

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._touch(param)
        return param


@dataclass(frozen=True)
class _WatchedTable:
    """A module's table of parameters: watched, or a plain dict while all are unsharded.

    NOTE [A dict while unsharded]
    Dynamo traces into a table whose class is not dict itself, and guards on the module there. So it
    would compile the code of each unit again. Unsharded parameters need no watching, so a compiled
    unit finds a plain dict, and all units of one kind share its code.

    Attributes:
        attributes: the attributes of the module.
        watched: the module's table while some of its parameters are resharded.
        buckets: the buckets of the module's parameters.
    """

    attributes: dict[str, Any]
    watched: _WatchedDict
    buckets: Sequence[ShardedBucket]


def _settle_tables(tables: Sequence[_WatchedTable]) -> None:
    """Switches modules between their two tables after a bucket was unsharded or resharded."""
    for each in tables:
        table, watched = each.attributes["_parameters"], each.watched
        for bucket in each.buckets:
            if not bucket.is_unsharded:
                break
        else:
            if table is watched:
                each.attributes["_parameters"] = dict(watched.items())
            continue
        if table is watched:
            continue
        # The plain dict may have got new or other parameters. They are compared by identity, since
        # resharded parameters raise in a comparison of values.
        unchanged = list(table) == list(watched)
        if not unchanged or not all(map(operator.is_, table.values(), watched.values())):
            watched.clear()
            watched.update(table)
        each.attributes["_parameters"] = watched


def _watch_accesses(engine: ShardEngine, hooks: Sequence[_UnitHooks]) -> None:
    """Makes look-ups of parameters unshard their units; see NOTE [Touching unshards]."""
    assert engine.unsharder is not None
    outside: list[_UnitHooks] = []
    owner: dict[int, tuple[ShardedBucket, _UnitHooks]] = {}
    for each in hooks:
        each.outside, each.everyone = outside, hooks
        for bucket in each.buckets:
            owner.update({id(entry.param): (bucket, each) for entry in bucket.params})

    def touch(param: Tensor) -> None:
        bucket, unit = owner.get(id(param), (None, None))
        if bucket is not None and unit is not None and not bucket.is_unsharded:
            unit.touched(bucket)

    tables: dict[ShardedBucket, list[_WatchedTable]] = {}
    for module in engine.setup.module.modules():
        own = [owner[id(p)][0] for p in module._parameters.values() if id(p) in owner]
        if own:
            watched = _WatchedDict(module._parameters, touch)
            engine.watch(module, watched)
            table = _WatchedTable(vars(module), watched, list(dict.fromkeys(own)))
            for bucket in table.buckets:
                tables.setdefault(bucket, []).append(table)
    for bucket, some in tables.items():
        engine.unsharder.tell(bucket, partial(_settle_tables, some))
