# SPDX-License-Identifier: Apache-2.0
"""``p.grad`` of sharded parameters: a gradient that is reduced and sharded over the ranks.

NOTE [What p.grad is]
A training loop clips, logs and clears ``p.grad``, and expects the reduced gradient there. But
autograd accumulates this rank's own gradient in ``p.grad``, and at stages 2 and 3 a reduction moves
this gradient out. So a sharded parameter has a class with a property ``grad``, whose value is None
or a :class:`ParamGradient`: a tensor without memory that represents the reduced gradient.

* Clearing, scaling and adding need no other rank: all parts of the gradient that this rank has,
  reduced or not, are changed in place. ``zero_grad()`` of any container uses only these operations.
* Norms and clamping need the reduced gradient. They are collective, as for FSDP2's DTensors.
  ``torch.nn.utils.clip_grad_norm_()`` and ``clip_grad_value_()`` use only these two.
* Every other read of the values raises. A read must not communicate, since a program may log on one
  rank alone.

A hook that runs in backward gets this rank's own gradient from ``p.grad``, with a warning, since
there is no reduced gradient yet.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.optim.dtensors import (
    TORCH_CLASSES,
    grad_of,
    is_distributed,
    local_of,
    set_grad,
    without_torch_function,
)
from ringcomm.optim.gradients import found_non_finite
from ringcomm.optim.layout import within
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.order import in_pipeline
from ringcomm.zero.stages.resharded import FACTS, Resharded, make_unsharded

Tensor = torch.Tensor

# The attribute of a parameter that holds its ParamGradient.
_SHOWN = "_ringcomm_grad"
_SCALING = {
    **{name: name for name in ("mul_", "div_", "neg_", "zero_")},
    "multiply_": "mul_",
    "divide_": "div_",
    "true_divide_": "div_",
    "__imul__": "mul_",
    "__itruediv__": "div_",
    "__idiv__": "div_",
}
_ADDING = {"add_": "add_", "sub_": "sub_", "__iadd__": "add_", "__isub__": "sub_"}
_REPLACING = ("copy_", "fill_")
_BOUNDING = ("clamp_", "clamp_min_", "clamp_max_", "clip_", "nan_to_num_")
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm")
# Functions that return the ParamGradient itself, and read no values.
_ITSELF = ("data", "detach", "detach_")


class ParamGradient(Tensor):
    """The reduced gradient of a sharded parameter, as ``p.grad`` shows it.

    It has the parameter's shape, dtype and device, but no memory. See NOTE [What p.grad is].
    """

    _of: ModuleGradients
    _position: tuple[int, int]
    _param: weakref.ref[nn.Parameter]

    @staticmethod
    def __new__(
        cls, param: nn.Parameter, of: ModuleGradients, position: tuple[int, int]
    ) -> ParamGradient:
        """Returns the tensor that represents a parameter's gradient.

        Args:
            param: the parameter.
            of: the gradients of the parameter's module.
            position: the number of the parameter's bucket, and the parameter's index in the bucket.
        """
        made: Any = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        made._of, made._position, made._param = of, position, weakref.ref(param)
        found: ParamGradient = made
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = _name_of(func)
        own = next(iter(_gradients_in((args, kwargs))), None)
        if own is None or func in FACTS:
            with without_torch_function():
                return func(*args, **kwargs)
        with torch.no_grad():
            return own._of.call(func, name, own, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Called where torch functions are disabled, and by code that calls operators directly.
        own = next(iter(_gradients_in((args, kwargs or {}))))
        name = str(func).split(".")[1]
        return own._of.call(func, name, own, args, dict(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with without_torch_function():
            facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"<gradient of sharded parameter {self._of.name_of(self)}, {facts}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._of.refuse(self, "pickling")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._of.refuse(self, "copying")


def _name_of(func: Callable[..., Any]) -> str:
    """Returns a function's name; for a getter or setter, the name of its attribute."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def _gradients_in(value: Any) -> Iterable[ParamGradient]:
    if isinstance(value, ParamGradient):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _gradients_in(each)
    elif isinstance(value, dict):
        yield from _gradients_in(list(value.values()))


@dataclass(frozen=True)
class _Reduced:
    """A parameter's reduced gradient, in the shards of its optimizer.

    Attributes:
        sharded: the step of the optimizer.
        index: the parameter's index in the optimizer.
    """

    sharded: ShardedStep
    index: int

    @property
    def is_current(self) -> bool:
        """True if nothing has changed the gradient since it was reduced."""
        first = self.sharded.first_pass
        return first is not None and self.sharded.gradients.same(first.mark, self.index)

    def local_shard(self) -> Tensor:
        """Returns this rank's local shard, flat."""
        bucket_number, segment = self.sharded.layout.locations[self.index]
        bucket = self.sharded.buckets[bucket_number]
        chunk = bucket.layout.chunk(*self.sharded.setting.shard_of)
        return within(self.sharded.plan.reduced(bucket), chunk, segment)

    def power_sum(self, kind: float) -> Tensor | float:
        """Returns sum(|x|^kind) or max(|x|), float64; each element is counted on one rank."""
        bucket_number, segment = self.sharded.layout.locations[self.index]
        bucket = self.sharded.buckets[bucket_number]
        own = within(self.sharded.own_gradient(bucket), self.sharded.own_chunk(bucket), segment)
        if not own.numel():
            return 0.0
        norm: Tensor = torch.linalg.vector_norm(own, kind, dtype=torch.float64)
        return norm if math.isinf(kind) else norm**kind

    def wrote(self) -> None:
        """Notes that all ranks have changed the gradient in place."""
        first = self.sharded.first_pass
        assert first is not None
        first.written = first.clipped = True
        self.sharded.gradients.keep_same(first.mark, self.index)


class ModuleGradients:
    """The gradients of one sharded module, as ``p.grad`` of its parameters shows them."""

    def __init__(self, engine: ShardEngine) -> None:
        # Weak, since parameters may outlive the module.
        self._engine_ref = weakref.ref(engine)
        self._warned = False
        # Norms by (order, parameter's index), of gradients that the first pass _norms_of reduced.
        self._norms: dict[tuple[float, int], Tensor] = {}
        self._norms_of: object = None
        self._one: Tensor | None = None
        # An optimizer's step, and each parameter's index in this optimizer, by the parameter's id.
        self._indices: tuple[object, dict[int, int]] = (None, {})

    @property
    def _engine(self) -> ShardEngine:
        engine = self._engine_ref()
        if engine is None or engine.closed:
            raise ArgumentError(
                "p.grad: the gradient belongs to a parameter whose module is no longer sharded"
            )
        return engine

    def name_of(self, own: ParamGradient) -> str:
        """Returns the name of a gradient's parameter."""
        engine, param = self._engine_ref(), own._param()
        if engine is None or param is None:
            return "?"
        return engine.placement.name_of(param)

    # ---- the property ---------------------------------------------------------------------------

    def shown(self, own: ParamGradient, grad: Tensor | None) -> Tensor | None:
        """Returns the value that ``p.grad`` shows if autograd's gradient of p is ``grad``."""
        engine = self._engine_ref()
        if engine is None or engine.closed or in_pipeline():
            return grad
        if engine.reduction is not None:
            return own if grad is not None or engine.reduction.shows(*own._position) else None
        if grad is None:
            return own if self._has_sum(own) else None
        return grad if engine.comm.world_size == 1 else own

    def clear(self, own: ParamGradient, for_another: bool = False) -> None:
        """Drops all parts of a gradient that are stored outside of the parameter.

        Args:
            own: the gradient.
            for_another: True if another gradient replaces it.

        Raises:
            ArgumentError: the gradient has updated its parameter already.
        """
        engine = self._engine_ref()
        if engine is None or engine.closed or in_pipeline():
            return
        engine.order.settle()
        self._forget_loss(engine, own)
        if engine.reduction is not None:
            updates = engine.reduction.updates
            if for_another and updates is not None and updates.changed:
                updates.refuse_another("p.grad")
            engine.reduction.clear(*own._position)
        elif self._has_sum(own):
            optimizer, param = self._optimizer(), own._param()
            assert optimizer is not None and optimizer.accumulator is not None
            assert param is not None
            optimizer.accumulator.forget(param)

    def set(self, own: ParamGradient, value: Tensor | None) -> None:
        """Replaces a parameter's gradient by another gradient, or by None."""
        param = own._param()
        assert param is not None
        engine = self._engine_ref()
        if value is None and engine is not None and self._are_in_params(engine):
            engine.order.settle()
            set_grad(param, None)
            return
        reduced = self._written(own)
        self.clear(own, for_another=value is not None)
        set_grad(param, value)
        if reduced is not None:
            # Write to the shard: reducing again would lose changes of other parameters' gradients.
            if value is not None:
                reduced.local_shard().copy_(self._local_shard_of(reduced, local_of(value)))
            reduced.sharded.table.active[reduced.index] = float(value is not None)
            self._wrote(reduced)

    def _are_in_params(self, engine: ShardEngine) -> bool:
        """True if all gradients are in autograd's ``p.grad`` alone; a quick check."""
        if engine.closed or engine.reduction is not None or in_pipeline():
            return False
        placement = engine.placement
        if placement.lost is not None:
            return False
        reference, owner = placement.optimizer, placement.owner
        optimizer = None if reference is None else reference()
        if isinstance(optimizer, ShardedOptimizer) and optimizer.accumulator is not None:
            return False
        return not isinstance(owner, ShardedStep) or owner.first_pass is None

    def _written(self, own: ParamGradient) -> _Reduced | None:
        """Returns the reduced gradient if it is current and shards were written to, else None."""
        engine = self._engine_ref()
        if engine is None or engine.closed or engine.reduction is not None:
            return None
        owner = engine.placement.owner
        if not isinstance(owner, ShardedStep) or owner.first_pass is None:
            return None
        reduced = self._reduced(own)
        current = owner.first_pass.written and reduced is not None and reduced.is_current
        return reduced if current else None

    def _forget_loss(self, engine: ShardEngine, own: ParamGradient) -> None:
        """Resets ``placement.lost`` (a disk error) if the last wrong gradient is being cleared."""
        if engine.placement.lost is None:
            return
        there = (param for param in engine.trainable.params if param.grad is not None)
        if all(param is own._param() for param in there):
            engine.placement.lost = None

    def _optimizer(self) -> ShardedOptimizer | None:
        """Returns the optimizer that was built on the module last, or None."""
        reference = self._engine.placement.optimizer
        found = None if reference is None else reference()
        return found if isinstance(found, ShardedOptimizer) else None

    def _has_sum(self, own: ParamGradient) -> bool:
        """True if the optimizer's accumulator has a sum of this gradient, at stages 0 and 1."""
        optimizer, param = self._optimizer(), own._param()
        if optimizer is None or optimizer.accumulator is None or param is None:
            return False
        return optimizer.accumulator.has(param)

    # ---- calls ----------------------------------------------------------------------------------

    def call(
        self,
        func: Callable[..., Any],
        name: str,
        own: ParamGradient,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a function of torch with a gradient among its arguments."""
        if name.startswith("_foreach_"):
            return self._for_each(name.removeprefix("_foreach_"), args, kwargs)
        if not args or args[0] is not own:
            self.refuse(own, name)
        rest = args[1:]
        if name in _ITSELF:
            return own
        if torch._C._current_graph_task_id() != -1:
            return self._in_backward(func, own, rest, kwargs)
        if next(iter(_gradients_in((rest, kwargs))), None) is not None:
            self.refuse(own, name)
        if name in _NORMS:
            return self._norm(own, name, rest, kwargs)
        if name in _SCALING:
            self._scale(own, _SCALING[name], rest, kwargs)
        elif name in _ADDING:
            self._add(own, _ADDING[name], rest, kwargs)
        elif name in _REPLACING:
            self._overwrite(own, name, rest)
        elif name in _BOUNDING:
            self._bound(own, name, rest, kwargs)
        else:
            self.refuse(own, name)
        return own

    def _for_each(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function for each gradient of a list, as ``torch._foreach_*`` do."""
        several, found = list(args[0]), []
        for number, each in enumerate(several):
            rest = [
                arg[number] if isinstance(arg, (list, tuple)) and len(arg) == len(several) else arg
                for arg in args[1:]
            ]
            found.append(getattr(each, name)(*rest, **kwargs))
        return found

    def _in_backward(
        self,
        func: Callable[..., Any],
        own: ParamGradient,
        rest: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a function with this rank's own gradient, in a hook that runs in backward."""
        engine, param = self._engine, own._param()
        grad = None if param is None else grad_of(param)
        head = f"{where('p.grad', engine.comm.rank, engine.comm.world_size)}: {self.name_of(own)}"
        if grad is None:
            raise ArgumentError(
                f"{head}: a hook reads p.grad in backward, after the gradient has left p.grad to "
                "be reduced. Register the hook before shard(), to see this rank's own gradient, or "
                "use ringcomm.zero.on_reduced(), whose hooks see the reduced gradient"
            )
        if not self._warned and engine.comm.world_size > 1:
            self._warned = True
            warnings.warn(
                f"{head}: a hook uses p.grad in backward, which is this rank's own gradient and "
                "not reduced yet; ringcomm.zero.on_reduced() has hooks that see the reduced one",
                stacklevel=4,
            )
        result = func(grad, *rest, **kwargs)
        return own if result is grad else result

    def refuse(self, own: ParamGradient, called: str) -> NoReturn:
        """Raises for a function that needs the values of a whole gradient."""
        engine = self._engine_ref()
        head = "p.grad"
        if engine is not None:
            head = where("p.grad", engine.comm.rank, engine.comm.world_size)
        if called == "_amp_foreach_non_finite_check_and_unscale_":
            optimizer = None if engine is None else self._optimizer()
            if optimizer is not None:
                optimizer.refuse_scaler()
            raise UnsupportedError(
                f"{head}: torch.amp.GradScaler looks at this rank's p.grad only; use "
                "ringcomm.optim.GradScaler in its place, or loss_scaler="
            )
        raise ArgumentError(
            f"{head}: parameter {self.name_of(own)}: {called} needs the whole gradient, and after "
            "shard() each rank has only its shard. Call ringcomm.zero.get_gradient(param) on all "
            "ranks for a copy, and set_gradient() to change it. All ranks together can also call "
            "optimizer.clip_grad_norm_() and clip_grad_value_(), their equivalents in "
            "torch.nn.utils, and norm(), mul_(), div_(), add_() and clamp_() of p.grad"
        )

    # ---- functions that need no other rank -------------------------------------------------------

    def _terms(self, own: ParamGradient) -> list[Tensor]:
        """Returns this rank's parts of the gradient; all ranks' parts add up to the gradient."""
        engine, param = self._engine, own._param()
        engine.order.settle()
        terms: list[Tensor] = []
        grad = None if param is None else grad_of(param)
        if grad is not None:
            terms.append(local_of(grad))
        if engine.reduction is not None:
            terms += engine.reduction.terms(*own._position)
        elif self._has_sum(own):
            optimizer = self._optimizer()
            assert optimizer is not None and optimizer.accumulator is not None
            assert param is not None
            terms.append(optimizer.accumulator.sum_of(param))
        return terms

    def _scale(
        self, own: ParamGradient, name: str, rest: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        factors = [each for each in (*rest, *kwargs.values()) if isinstance(each, Tensor)]
        if any(each.numel() != 1 for each in factors) or kwargs.get("rounding_mode"):
            self.refuse(own, name)
        if name == "zero_":
            if self._engine.reduction is not None:
                self._engine.reduction.zero_one(*own._position)
        else:
            self._refuse_in_backward(name)
        reduced = self._reduced(own)
        current = reduced is not None and reduced.is_current
        terms = self._terms(own)
        if current and reduced is not None and self._engine.reduction is None:
            terms.append(reduced.local_shard())
        for term in terms:
            getattr(term, name)(*rest, **kwargs)
        if current and reduced is not None:
            self._wrote(reduced)

    def _add(
        self, own: ParamGradient, name: str, rest: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._refuse_in_backward(name)
        self._refuse_sum(own, name)
        reduced, param = self._reduced(own), own._param()
        assert param is not None
        current = self._engine.reduction is None and reduced is not None and reduced.is_current
        there = grad_of(param)
        if there is None:
            with without_torch_function():
                there = torch.zeros_like(param, requires_grad=False)
            set_grad(param, there)
        getattr(there, name)(*rest, **kwargs)
        if current and reduced is not None:
            rest = [self._local_shard_of(reduced, each) for each in rest]
            getattr(reduced.local_shard(), name)(*rest, **kwargs)
            self._wrote(reduced)

    def _refuse_sum(self, own: ParamGradient, called: str) -> None:
        """Raises ArgumentError if ranks sum gradients: each rank would add the value to the sum."""
        engine = self._engine
        if engine.options.reduce == "sum" and engine.comm.world_size > 1:
            self.refuse(own, f'{called}, with ZeroOptions(reduce="sum"),')

    def _local_shard_of(self, reduced: _Reduced, value: Any) -> Any:
        """Returns this rank's shard of a tensor that is to be added to a gradient."""
        if not isinstance(value, Tensor) or value.numel() == 1:
            return value
        sharded, index = reduced.sharded, reduced.index
        bucket_number, segment = sharded.layout.locations[index]
        chunk = sharded.buckets[bucket_number].layout.chunk(*sharded.setting.shard_of)
        low = max(segment.begin, chunk.begin)
        flat = value.expand(sharded.layout.params[index].shape).reshape(-1)
        return flat[low - segment.begin : low - segment.begin + reduced.local_shard().numel()]

    def _overwrite(self, own: ParamGradient, name: str, rest: Sequence[Any]) -> None:
        self._refuse_in_backward(name)
        self._refuse_sum(own, name)
        param = own._param()
        assert param is not None
        with without_torch_function():
            there = torch.zeros_like(param, requires_grad=False)
        getattr(there, name)(*rest)
        self.set(own, there)

    # ---- collective functions --------------------------------------------------------------------

    def _step(self, called: str) -> ShardedStep:
        """Returns the optimizer's :class:`ShardedStep`; the first call makes it; collective."""
        engine = self._engine
        owner = engine.placement.owner
        if isinstance(owner, ShardedStep):
            return owner
        optimizer = self._optimizer()
        if optimizer is None:
            raise ArgumentError(
                f"{where('p.grad', engine.comm.rank, engine.comm.world_size)}: {called}: no "
                "optimizer was built on the parameters yet, and only an optimizer reduces "
                "gradients; build one of ringcomm.optim first"
            )
        return optimizer.sharded_step()

    def _reduced(self, own: ParamGradient) -> _Reduced | None:
        """Returns the reduced gradient in a prepared optimizer, or None."""
        owner, param = self._engine.placement.owner, own._param()
        if not isinstance(owner, ShardedStep) or param is None:
            return None
        if self._indices[0] is not owner:
            self._indices = owner, {id(each): at for at, each in enumerate(owner.params)}
        index = self._indices[1].get(id(param))
        return (
            None if index is None or index not in owner.layout.locations else _Reduced(owner, index)
        )

    def _checked(self, own: ParamGradient, called: str) -> _Reduced:
        """Returns the reduced gradient for a call that reads or clamps it; may be collective."""
        param = own._param()
        sharded = self._step(called)
        sharded.refuse_in_backward(f"p.grad.{called}")
        sharded.refuse_if_partly_updated(f"p.grad.{called}")
        head = sharded.setting.where(f"p.grad.{called}")
        if param is not None and is_distributed(param):
            raise UnsupportedError(
                f"{head}: parameter {self.name_of(own)} is a DTensor, of which this rank has a "
                "part; use optimizer.clip_grad_norm_() or clip_grad_value_(), which take its mesh "
                "into account"
            )
        if sharded.setting.loss_scaler is not None:
            raise ArgumentError(
                f"{head}: gradients are of the scaled loss until the step, since the optimizer has "
                "a loss_scaler; use optimizer.clip_grad_norm_() or clip_grad_value_(), which take "
                "the scale into account"
            )
        found = self._reduced(own)
        if found is None:
            raise ArgumentError(
                f"{head}: parameter {self.name_of(own)} is in none of the optimizer's groups, so "
                "nothing reduces its gradient; add it with add_param_group()"
            )
        return found

    def _norm(
        self, own: ParamGradient, called: str, rest: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        """Returns a norm of the reduced gradient: float32, a scalar; collective."""
        order = rest[0] if rest else kwargs.get("ord", kwargs.get("p", 2))
        order = 2 if order in (None, "fro") else order
        others = {key: each for key, each in kwargs.items() if key not in ("ord", "p")}
        if len(rest) > 1 or any(each is not None and each is not False for each in others.values()):
            self.refuse(own, f"{called} along dimensions")
        matrix = called == "linalg_norm" and own.dim() > 1 and order != 2
        if not isinstance(order, (int, float)) or not order > 0 or matrix:
            self.refuse(own, f"{called} of order {order!r}")
        kind, reduced = float(order), self._checked(own, called)
        sharded = reduced.sharded
        if self._norms_of is not sharded.first_pass or not reduced.is_current:
            self._norms.clear()
            sharded.reduce_now(f"p.grad.{called}")
            self._norms_of = sharded.first_pass
        key = kind, reduced.index
        if key not in self._norms:
            self._take_norms(sharded, kind, reduced.index)
        assert sharded.first_pass is not None
        return (self._norms[key] * sharded.first_pass.clip).to(torch.float32)

    def _take_norms(self, sharded: ShardedStep, kind: float, index: int) -> None:
        """Computes the norm of one gradient or, the first time, of all gradients; collective."""
        every = self._all(sharded)
        if any(known == kind for known, _ in self._norms):
            every = [shown for shown in every if shown[0].index == index]
        # Rows: this rank's sums; 1 where p.grad shows a gradient here; 1 where p.grad is None here.
        told = torch.zeros(3, len(every), dtype=torch.float64, device=sharded.setting.device)
        for at, (reduced, shows) in enumerate(every):
            told[0, at] = reduced.power_sum(kind)
            told[1 if shows else 2, at] = 1.0
        if sharded.setting.comm is not None:
            op = ReduceOp.MAX if math.isinf(kind) else ReduceOp.SUM
            sharded.setting.comm.all_reduce(told, op)
        differ = (told[1] * told[2]).nonzero()
        if len(differ):
            other = every[int(differ[0, 0])][0].index
            raise ArgumentError(
                f"{sharded.setting.where('p.grad')}: "
                f"{sharded.gradients.label(other)} has a gradient on some ranks and None on "
                "others, so their norms would differ; use optimizer.clip_grad_norm_(), with "
                "params= for some of the parameters"
            )
        norms = told[0] if math.isinf(kind) else told[0] ** (1 / kind)
        divisor = self._engine.placement.divisor
        for (reduced, _), norm in zip(every, (norms / divisor).unbind(), strict=True):
            self._norms[kind, reduced.index] = norm

    def _all(self, sharded: ShardedStep) -> list[tuple[_Reduced, bool]]:
        """Returns each bucketed parameter's gradient, and whether ``p.grad`` shows it."""
        found = []
        for index in sharded.layout.locations:
            with without_torch_function():
                shows = sharded.params[index].grad is not None
            found.append((_Reduced(sharded, index), shows))
        return found

    def _bound(
        self, own: ParamGradient, name: str, rest: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Applies a clamping function to each element of the reduced gradient; collective."""
        reduced = self._checked(own, name)
        sharded = reduced.sharded
        if any(
            isinstance(each, Tensor) and each.numel() != 1 for each in (*rest, *kwargs.values())
        ):
            self.refuse(own, name)
        if not reduced.is_current:
            sharded.reduce_now(f"p.grad.{name}")
        first = sharded.first_pass
        assert first is not None
        if sharded.two_passes and first.overflowed is None:
            # Bounding may hide an overflow, for which the step must still be skipped.
            if first.written:
                first = sharded.first_pass = sharded.reduce("l2")
            first.overflowed = found_non_finite(first.words)
        if first.clipped and first.clip is not self._one:
            self._apply_clip(sharded)
        divisor = self._engine.placement.divisor
        shard = reduced.local_shard()
        wide = shard if divisor == 1 else shard / divisor
        getattr(wide, name)(*rest, **kwargs)
        if divisor != 1:
            shard.copy_(wide * divisor)
        self._wrote(reduced)

    def _apply_clip(self, sharded: ShardedStep) -> None:
        """Multiplies the gradients by the clip coefficient, which becomes 1."""
        first = sharded.first_pass
        assert first is not None
        factor = first.clip.to(torch.float32)
        for index in sharded.layout.locations:
            each = _Reduced(sharded, index)
            each.local_shard().mul_(factor)
            self._wrote(each)
        first.clip = self._one = torch.ones_like(first.clip)

    def _wrote(self, reduced: _Reduced) -> None:
        reduced.wrote()
        self._norms = {key: each for key, each in self._norms.items() if key[1] != reduced.index}

    # ---- updates in backward --------------------------------------------------------------------

    def _refuse_in_backward(self, called: str) -> None:
        owner = self._engine.placement.owner
        if isinstance(owner, ShardedStep):
            owner.refuse_under_way(f"p.grad.{called}")


# ---- the class of parameters --------------------------------------------------------------------


# NOTE [DTensors have a property of their class]
# Compiled graphs check that their inputs are of the class DTensor itself. So the class DTensor gets
# the property, once; for DTensors of modules that are not sharded nothing changes. The keys of this
# dict are weak and compared by id(). cast(): torch gives WeakIdKeyDictionary no type parameters.
_distributed: MutableMapping[Tensor, ParamGradient] = cast(Any, WeakIdKeyDictionary)()


def _own_of(param: nn.Parameter) -> ParamGradient | None:
    found: ParamGradient | None = vars(param).get(_SHOWN)
    return _distributed.get(param) if found is None and is_distributed(param) else found


def _get(param: nn.Parameter) -> Tensor | None:
    """The gradient, reduced over the ranks, or None; see ``docs/zero.md``."""
    own = _own_of(param)
    with without_torch_function():
        grad = grad_of(param)
    return grad if own is None else own._of.shown(own, grad)


def _set(param: nn.Parameter, value: Tensor | None) -> None:
    own = _own_of(param)
    if own is not None:
        if value is own:
            return
        if isinstance(value, ParamGradient):
            own._of.refuse(value, "p.grad = of another parameter")
        own._of.set(own, value)
    else:
        set_grad(param, value)


def _delete(param: nn.Parameter) -> None:
    _set(param, None)


def _detach(param: nn.Parameter) -> Tensor:
    """Returns the values without the autograd graph, as detach() of every tensor does."""
    values = Tensor.detach(param)
    if torch.compiler.is_dynamo_compiling():
        return values
    if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
        if isinstance(values, Resharded):
            values._refuse("Parameter")
        # nn.Parameter() expects detach() of a subclass to return the same class.
        return values.as_subclass(type(param))
    return values


def _state(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter for pickling, without its gradient."""
    return {key: value for key, value in vars(param).items() if key != _SHOWN}


_GRAD = property(_get, _set, _delete)


@cache
def _kind_showing(kind: type) -> type:
    """Returns the subclass of ``kind`` that sharded parameters of class ``kind`` get."""
    attributes = {
        "grad": _GRAD,
        "detach": _detach,
        "__getstate__": _state,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    made = type(kind.__name__, (kind,), attributes)
    if kind in TORCH_CLASSES:
        TORCH_CLASSES.add(made)
    return made


def prepare_params(params: Iterable[nn.Parameter]) -> None:
    """Gives unsharded parameters the class with the property ``grad``; see :func:`show`."""
    for param in params:
        if is_distributed(param):
            kind: Any = type(param)
            kind.grad = _GRAD
        else:
            param.__class__ = _kind_showing(type(param))


def restore_params(params: Iterable[nn.Parameter]) -> None:
    """Undoes :func:`prepare_params` and :func:`show`, for unsharded parameters."""
    for param in params:
        make_unsharded([param])
        unshow([param])
        if not is_distributed(param):
            param.__class__ = type(param).__mro__[1]


def unshow(params: Iterable[nn.Parameter]) -> None:
    """Undoes :func:`show`: torch cannot swap parameters while weak references to them exist."""
    for param in params:
        if is_distributed(param):
            _distributed.pop(param, None)
        else:
            vars(param).pop(_SHOWN, None)


def show(engine: ShardEngine) -> None:
    """Makes ``p.grad`` of an engine's parameters show the reduced gradient."""
    of = ModuleGradients(engine)
    with without_torch_function():
        for number, bucket in enumerate(engine.stored):
            for index, entry in enumerate(bucket.params):
                own = ParamGradient(entry.param, of, (number, index))
                if is_distributed(entry.param):
                    _distributed[entry.param] = own
                else:
                    vars(entry.param)[_SHOWN] = own
