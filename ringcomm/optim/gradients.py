# SPDX-License-Identifier: Apache-2.0
"""Moves gradients into buckets, accumulates and reduces them in FP32, and computes their norms."""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import device_engine_of
from ringcomm.comm.host.arguments import ALGORITHMS, DTYPE_CODES, OP_CODES
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call, Work
from ringcomm.comm.nodes.compressed_sums import ErrorFeedback
from ringcomm.comm.nodes.steps import StepCoreOf, of_one_node
from ringcomm.errors import ArgumentError
from ringcomm.optim.buckets import Buckets
from ringcomm.optim.dtensors import (
    align_gradient,
    apart,
    check_gradient,
    distributed_as,
    grad_of,
    is_distributed,
    local_gradient,
    local_of,
    set_grad,
    without_torch_function,
)
from ringcomm.optim.layout import ParamSpec, ShardLayout
from ringcomm.optim.options import Compression
from ringcomm.process import until_exit

Tensor = torch.Tensor
_increment_version = torch._C._increment_version


def label(index: int, spec: ParamSpec) -> str:
    """Returns the name of a parameter for messages."""
    return f"parameter {index} ({spec.name})" if spec.name else f"parameter {index}"


class Slot(NamedTuple):
    """A parameter in a bucket, with the addresses of its value and gradient there.

    The addresses are cached, since reading the addresses of a thousand views takes longer than a
    step of small parameters. ``p.grad`` is set to ``shown``: this is ``view``, or for a DTensor
    parameter a DTensor with the local tensor ``view``.
    """

    number: int
    param: Tensor
    param_ptr: int
    view: Tensor
    view_ptr: int
    shown: Tensor


class Gradients:
    """The gradients in ``p.grad`` of the parameters that are in buckets.

    ``p.grad`` becomes a view of its bucket. Autograd adds to the view until ``p.grad`` is replaced.
    """

    def __init__(self, params: Sequence[Tensor], layout: ShardLayout, buckets: Buckets) -> None:
        self._params = params
        self._layout = layout
        self._buckets = buckets
        self._slots = [_slot(index, params[index], view) for index, view in buckets.grads.items()]
        self._slot_of = {slot.number: slot for slot in self._slots}
        # All DTensors, even if this rank has none of their elements: other ranks may have some.
        self._distributed = [
            param
            for param, spec in zip(params, layout.params, strict=True)
            if spec.trainable and spec.tied_to is None and is_distributed(param)
        ]
        # Trainable parameters without elements count steps, but are in no bucket.
        self._empty = [
            index
            for index, spec in enumerate(layout.params)
            if spec.trainable and spec.tied_to is None and not spec.elems
        ]
        self._frozen = [index for index, spec in enumerate(layout.params) if not spec.trainable]

    def label(self, index: int) -> str:
        """Returns the name of a parameter for messages."""
        return label(index, self._layout.params[index])

    def check(self) -> None:
        """Checks parameters and gradients before anything is moved.

        Raises:
            ArgumentError, UnsupportedError: see :func:`check_gradient`; or a parameter has left its
                bucket, or has a gradient but was frozen when the buckets were laid out.
        """
        with without_torch_function():
            self._check()

    def _check(self) -> None:
        for index, param, param_ptr, view, view_ptr, shown in self._slots:
            is_view = shown is view
            if (param if is_view else local_of(param)).data_ptr() != param_ptr:
                raise ArgumentError(
                    f"{self.label(index)}: its memory was replaced after it had been moved to its "
                    "bucket (by .to(), .data = or the like); change values in place, with copy_()"
                )
            grad = grad_of(param)
            if grad is None:
                continue
            if grad is shown and (grad if is_view else local_of(grad)).data_ptr() == view_ptr:
                continue
            check_gradient(grad, param, self.label(index))
        for index in self._frozen:
            if grad_of(self._params[index]) is not None:
                raise ArgumentError(
                    f"{self.label(index)}: has a gradient, but it required none when the buckets "
                    "were laid out at the first step; build a new optimizer to train it, or, if "
                    "its module was sharded, unfreeze it before shard()"
                )

    def collect(self) -> list[float]:
        """Moves gradients into the buckets; returns 1.0 per parameter with a gradient, else 0."""
        active = [0.0] * len(self._params)
        for param in self._distributed:
            align_gradient(param)
        with without_torch_function():
            self._collect_slots(active)
            for index in self._empty:
                active[index] = 0.0 if grad_of(self._params[index]) is None else 1.0
        return active

    def _collect_slots(self, active: list[float]) -> None:
        absent: list[Tensor] = []
        views: list[Tensor] = []
        grads: list[Tensor] = []
        for index, param, _, view, view_ptr, shown in self._slots:
            grad = grad_of(param)
            if grad is None:
                absent.append(view)
                continue
            active[index] = 1.0
            here = grad if shown is view else local_of(grad)
            if grad is not shown or here.data_ptr() != view_ptr:
                moved = here.data_ptr() != view_ptr or here.stride() != view.stride()
                if moved or here.is_neg():
                    views.append(view)
                    grads.append(here.detach())
                set_grad(param, shown)
        if views:
            torch._foreach_copy_(views, grads)
        if absent:
            torch._foreach_zero_(absent)

    def flats(self) -> list[Tensor] | None:
        """Returns the tensors that a GradScaler must unscale; None means all ``p.grad``."""
        return None

    def frozen(self) -> list[int]:
        """Returns the indices of parameters that were frozen after the buckets were laid out."""
        with without_torch_function():
            return [
                index
                for index, (param, spec) in enumerate(
                    zip(self._params, self._layout.params, strict=True)
                )
                if spec.trainable and not param.requires_grad
            ]

    def wrote(self, index: int) -> None:
        """Records that a parameter's reduced gradient was written to; called on all ranks."""
        return

    def mark(self) -> object:
        """Returns a mark that equals an earlier mark only if no gradient changed in between."""
        with without_torch_function():
            grads = list(map(grad_of, self._params))
        if self._distributed:
            return [None if grad is None else _mark_of(grad) for grad in grads]
        return [None if grad is None else (grad.data_ptr(), grad._version) for grad in grads]

    def same(self, mark: Any, index: int) -> bool:
        """True if one parameter's gradient is unchanged since a mark; a quick check."""
        return bool(mark[index] == self._mark_at(index))

    def keep_same(self, mark: Any, index: int) -> None:
        """Updates a mark to the gradient that one parameter has now."""
        mark[index] = self._mark_at(index)

    def _mark_at(self, index: int) -> object:
        grad = grad_of(self._params[index])
        if grad is None:
            return None
        return _mark_of(grad) if self._distributed else (grad.data_ptr(), grad._version)

    def zero(self) -> None:
        """Zeroes all gradients; for gradients in buckets, runs one memset per bucket."""
        with without_torch_function():
            self._zero()

    def _zero(self) -> None:
        for param in self._params:
            grad = grad_of(param)
            if grad is not None and grad.grad_fn is not None:
                grad.detach_()
            elif grad is not None:
                grad.requires_grad_(False)
        if self._buckets:
            torch._foreach_zero_([bucket.grads for bucket in self._buckets])
        for index, param in enumerate(self._params):
            grad, slot = grad_of(param), self._slot_of.get(index)
            if grad is None:
                continue
            if slot is None:
                grad.zero_()
            else:
                here = grad if slot.shown is slot.view else local_of(grad)
                if here.data_ptr() != slot.view_ptr:
                    grad.zero_()

    def drop(self) -> None:
        """Sets all gradients to None."""
        with without_torch_function():
            for param in self._params:
                set_grad(param, None)


def _mark_of(grad: Tensor) -> tuple[int, ...]:
    local = local_of(grad)
    return local.data_ptr(), local._version, grad._version


def _slot(index: int, param: Tensor, view: Tensor) -> Slot:
    shown, here = distributed_as(param, apart(param, view)), local_of(param)
    return Slot(index, param, here.data_ptr(), view, view.data_ptr(), shown)


class Accumulator:
    """FP32 sums of gradients: each backward's ``p.grad`` is added to its sum, and then dropped.

    The sums are in separate tensors until the buckets exist; at stages 2 and 3 of ZeRO they remain
    in separate tensors.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # by id of the parameter
        self._written: set[int] = set()
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}

    def watch(self, param: Tensor, called: str) -> None:
        """Hooks ``param`` so that each of its gradients is added to its sum."""
        # The hook lives as long as the parameter, so it refers to the accumulator weakly.
        hook = _hook(weakref.ref(self), called)
        self._handles[id(param)] = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        _accumulators[param] = weakref.ref(self)

    def unwatch(self, param: Tensor) -> None:
        """Removes the hook of :meth:`watch`."""
        handle = self._handles.pop(id(param), None)
        if handle is not None:
            handle.remove()

    @until_exit
    def __del__(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def add(self, param: Tensor, called: str) -> None:
        """Adds a parameter's gradient to its sum, and drops ``p.grad``."""
        if grad_of(param) is None:
            return
        _follow_schedules()
        grad = local_gradient(param, called)
        key = id(param)
        if key in self._written:
            self._sums[key].add_(grad)
        elif key in self._sums:
            self._sums[key].copy_(grad)
        else:
            self._sums[key] = grad.to(torch.float32, copy=True)
        self._written.add(key)
        set_grad(param, None)

    def divide(self, param: Tensor, divisor: int) -> None:
        """Divides the sum of a parameter, if it has one."""
        if id(param) in self._written:
            self._sums[id(param)].div_(divisor)

    def settle(self, params: Sequence[Tensor], views: dict[int, Tensor]) -> None:
        """Moves the sums into ``views``, which map indices in ``params`` to views of buckets."""
        for index, view in views.items():
            key = id(params[index])
            if key in self._written:
                view.copy_(self._sums[key])
            self._sums[key] = view

    def has(self, param: Tensor) -> bool:
        """True if a gradient of ``param`` was added since :meth:`clear`."""
        return id(param) in self._written

    def sum_of(self, param: Tensor) -> Tensor:
        """Returns the sum of a parameter, which must exist."""
        return self._sums[id(param)]

    def forget(self, param: Tensor) -> None:
        """Begins a new sum for one parameter."""
        self._written.discard(id(param))

    def take(self, param: Tensor) -> Tensor:
        """Returns the sum of a parameter, which must exist, and drops it."""
        self._written.remove(id(param))
        return self._sums.pop(id(param))

    def clear(self) -> None:
        """Begins new sums: the next gradient of each parameter overwrites its old sum."""
        self._written.clear()

    def flats(self) -> list[Tensor]:
        """Returns the sums to which a gradient was added."""
        return [self._sums[key] for key in self._written]

    def mark(self) -> object:
        """Returns a mark that equals an earlier mark only if no sum changed in between."""
        return [(key, self._sums[key]._version) for key in sorted(self._written)]


def _hook(accumulator: weakref.ref[Accumulator], called: str) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        found = accumulator()
        if found is not None:
            found.add(param, called)

    return hook


# NOTE [Sums in a pipeline]
# At its end a schedule of torch.distributed.pipelining makes each stage divide ``p.grad`` by the
# number of micro-batches, unless the user turned this off. With an accumulator ``p.grad`` is None.
# Only the call of the stage's scale_grads() shows when to divide and by how much. So a function
# that also divides the sums replaces scale_grads().

_STAGES = "torch.distributed.pipelining.stage"
_lock = threading.Lock()
_followed = False
# The keys are weak and compared by id(). torch's class is not typed.
_accumulators: MutableMapping[Tensor, weakref.ref[Accumulator]] = cast(Any, WeakIdKeyDictionary)()


def _follow_schedules() -> None:
    """Makes pipeline stages divide sums like gradients, if torch's pipelines are imported."""
    global _followed
    stages: Any = sys.modules.get(_STAGES)
    if _followed or stages is None:
        return
    with _lock:
        if not _followed:
            kind = stages._PipelineStageBase
            kind.scale_grads = _dividing_sums(kind.scale_grads)
            _followed = True


def _dividing_sums(scale_grads: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    @functools.wraps(scale_grads)
    def scale_all(stage: Any, grad_scale_factor: int) -> None:
        scale_grads(stage, grad_scale_factor)
        _divide_sums(stage.submod.parameters(), grad_scale_factor)

    return scale_all


@torch.no_grad()
def _divide_sums(params: Iterable[Tensor], divisor: int) -> None:
    for param in params:
        reference = _accumulators.get(param)
        accumulator = None if reference is None else reference()
        if accumulator is not None:
            accumulator.divide(param, divisor)


class AccumulatedGradients(Gradients):
    """Gradients as in the base class, but summed in FP32 by an :class:`Accumulator`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: ShardLayout,
        buckets: Buckets,
        accumulator: Accumulator,
    ) -> None:
        super().__init__(params, layout, buckets)
        self._accumulator = accumulator
        accumulator.settle(params, buckets.grads)

    def collect(self) -> list[float]:
        active = [0.0] * len(self._params)
        for param in self._distributed:
            align_gradient(param)
        with without_torch_function():
            for index, param, _, view, *_ in self._slots:
                # The user may have set p.grad by hand, without a backward.
                self._accumulator.add(param, self.label(index))
                if self._accumulator.has(param):
                    active[index] = 1.0
                else:
                    view.zero_()
        for index in self._empty:
            active[index] = 1.0 if self._accumulator.has(self._params[index]) else 0.0
        return active

    def mark(self) -> object:
        return [super().mark(), self._accumulator.mark()]

    def same(self, mark: Any, index: int) -> bool:
        of_params, of_sums = mark
        return super().same(of_params, index) and bool(of_sums == self._accumulator.mark())

    def keep_same(self, mark: Any, index: int) -> None:
        super().keep_same(mark[0], index)
        mark[1] = self._accumulator.mark()


# ---- Reduction of gradients to FP32 shards, and their norms --------------------------------------


# The number of norm words (kernels/include/ringcomm/optimizer/grad_norm.h). They hold a sum in 20
# digits of 32 bits, the lowest of weight 2^-352, and the number of tiles with an infinity or NaN.
NORM_WORDS = _native.GRAD_NORM_WORDS
DIGITS = 20
BIAS = 352
NON_FINITE_WORD = 23
_KINDS = {2.0: "l2", 1.0: "l1", math.inf: "inf"}


def norm_kind(norm_type: float) -> str:
    """Returns the kernels' name of a norm: "l1", "l2" or "inf".

    Raises:
        ArgumentError: ``norm_type`` is not 1, 2 or inf.
    """
    try:
        kind = _KINDS.get(float(norm_type))
    except (TypeError, ValueError):
        kind = None
    if kind is None:
        raise ArgumentError(f"norm_type: expected 2.0, 1.0 or inf, got {norm_type!r}")
    return kind


def kind_code(kind: str) -> int:
    """Returns the native code of a norm."""
    return _native.GRAD_NORM_KINDS[kind]


def combine(words: Tensor, kind: str) -> Tensor:
    """Combines the norm words of several buckets.

    Args:
        words: int64 [buckets, 24].
        kind: "l2", "l1" or "inf".

    Returns:
        int64 [24].
    """
    if kind != "inf":
        return words.sum(dim=0)
    return words.amax(dim=0) if len(words) else words.new_zeros(NORM_WORDS)


def leave_to_replica(words: Tensor) -> None:
    """Zeroes a bucket's sum, which another replica counts; keeps the count of non-finite tiles.

    Args:
        words: int64 [24], of the bucket.
    """
    words[:NON_FINITE_WORD].zero_()


def found_non_finite(words: Tensor) -> Tensor:
    """Returns 1.0 if the norm words count an infinity or a NaN, else 0.0; float64, a scalar."""
    return (words[NON_FINITE_WORD] != 0).to(torch.float64)


def norm_of(words: Tensor, kind: str, inv_scale: Tensor) -> Tensor:
    """Returns the norm from the words of all buckets and ranks, with no host synchronisation.

    The words are exact sums of integers, so they do not depend on the number of ranks. All ranks
    then compute the norm in the same way, so its bits do not depend on the number of ranks either.

    Args:
        words: int64 [24], from :func:`combine`.
        kind: "l2", "l1" or "inf".
        inv_scale: float64, a scalar: the factor to multiply the gradient by.

    Returns:
        float32, a scalar on the device of ``words``; NaN when the gradient is not finite.
    """
    return wide_norm_of(words, kind, inv_scale).to(torch.float32)


def wide_norm_of(words: Tensor, kind: str, inv_scale: Tensor) -> Tensor:
    """Returns the norm before :func:`norm_of` rounds it, float64."""
    if kind == "inf":
        # The low half of the word has the FP32 bits of the largest magnitude.
        norm = words[0].to(torch.int32).view(torch.float32).to(torch.float64)
    else:
        exponents = torch.arange(DIGITS, dtype=torch.float64, device=words.device) * 32 - BIAS
        total = (words[:DIGITS].to(torch.float64) * torch.exp2(exponents)).sum()
        norm = total.sqrt() if kind == "l2" else total
    return torch.where(words[NON_FINITE_WORD] != 0, math.nan, norm * inv_scale)


def joint_norm(norms: Tensor, kind: str) -> Tensor:
    """Returns the norm of the concatenation of vectors, float64, from their norms float64 [n]."""
    if kind == "l2":
        return norms.square().sum().sqrt()
    return norms.sum() if kind == "l1" else norms.amax()


class ReduceOptions(Protocol):
    """The options that a reducer reads, from the options of an optimizer or of ZeRO."""

    @property
    def reduce(self) -> str: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def compression(self) -> Compression: ...


@dataclass(frozen=True)
class Into:
    """The target of a reduction of a bucket's gradients, and the norm words to compute.

    Attributes:
        out: float32 [chunk elements].
        kind: "l2", "l1" or "inf".
        words: int64 [24], overwritten with the norm words of ``out``, or of this rank's shard of
            ``out`` if each node has a copy of the state; None if no norm is needed.
        accumulate: True to add to ``out``.
        tag: number that distinguishes this reduction from others of equal size, the same on all
            ranks; 0 means no number.
        error_feedback: the bucket's buffer of quantization errors, which quantization reads and
            updates; None to discard the errors.
        zeroed: True if ``words`` are zeros already.
    """

    out: Tensor
    kind: str
    words: Tensor | None
    accumulate: bool = False
    tag: int = 0
    error_feedback: ErrorFeedback | None = None
    zeroed: bool = False


def step_core_of(comm: Communicator | None, options: ReduceOptions) -> StepCoreOf:
    """Returns a function that maps a call's native core to the core for steps with ``options``."""
    if comm is None:
        return of_one_node
    return comm.steps.calls_of(options.state, options.compression.gradients)


def make_error_feedback(
    comm: Communicator | None, options: ReduceOptions, elems: int
) -> ErrorFeedback | None:
    """Makes the error-feedback buffer of a bucket of ``elems`` elements; None without feedback."""
    if comm is None or not options.compression.error_feedback:
        return None
    return comm.steps.error_feedback_of(elems, options.state)


class Reducer(ABC):
    """Reduces gradients over one communicator; a subclass exists for each kind of kernels."""

    @abstractmethod
    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        """Writes the norm words of this rank's gradient to ``words``.

        Args:
            grads: [elements], this rank's shard of the gradient.
            kind: "l2", "l1" or "inf".
            words: int64 [24], overwritten.
        """

    @abstractmethod
    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        """Reduces a bucket's gradients to this rank's chunk; collective.

        Args:
            grads: [bucket elements], of any of the parameters' dtypes.
            into: the target.
            async_op: True to return at once; ``grads`` and the tensors in ``into`` must then live
                until the work is done.

        Returns:
            With ``async_op``, the work to wait for.
        """


class HostReducer(Reducer):
    """Reduces by the native kernels on the CPU; without a communicator only writes norm words."""

    def __init__(
        self, comm: Communicator | None, options: ReduceOptions, step_bytes: int = 0
    ) -> None:
        if comm is not None:
            comm.engine.check_sum_groups("optimizer", options.algorithm, "native")
        self._comm = comm
        self._step_core_of = step_core_of(comm, options)
        self._step_bytes = step_bytes
        self._op = OP_CODES[options.reduce.upper()]
        self._algorithm = ALGORITHMS[options.algorithm]

    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        _native.grad_norm(
            grads.data_ptr(),
            DTYPE_CODES[grads.dtype],
            grads.numel(),
            kind_code(kind),
            words.data_ptr(),
        )

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        arguments = self._arguments(grads, into)

        def run(core: Core) -> int:
            step_core = self._step_core_of(core, into.error_feedback)
            return step_core.reduce_scatter_norm(*arguments, self._step_bytes, into.tag)

        return self._start(run, grads, into, async_op)

    def _arguments(
        self, grads: Tensor, into: Into
    ) -> tuple[int, int, int, int, int, bool, int, int, int]:
        return (
            grads.data_ptr(),
            grads.numel(),
            DTYPE_CODES[grads.dtype],
            self._op,
            into.out.data_ptr(),
            into.accumulate,
            _native.GRAD_NORM_KINDS[into.kind],
            0 if into.words is None else into.words.data_ptr(),
            self._algorithm,
        )

    def _start(
        self, run: Callable[[Core], int], grads: Tensor, into: Into, async_op: bool
    ) -> Work | None:
        if self._comm is None:
            raise AssertionError("a world of one rank has nothing to reduce")
        outputs = [into.out] if into.words is None else [into.out, into.words]
        return self._comm.engine.start_call(
            Call("reduce_scatter_norm", run, outputs, more_bytes=grads.nbytes), async_op=async_op
        )


class DeviceReducer(HostReducer):
    """Reduces with the native kernels on a device; the kernels' blocks add to the norm words."""

    def __init__(self, comm: Communicator, options: ReduceOptions) -> None:
        super().__init__(comm, options)
        self._engine = device_engine_of(comm.engine)
        self._memory = self._engine.device_core.heap.memory

    def norm(self, grads: Tensor, kind: str, words: Tensor) -> None:
        words.zero_()
        engine = self._engine
        arguments = (
            grads.data_ptr(),
            DTYPE_CODES[grads.dtype],
            grads.numel(),
            kind_code(kind),
            words.data_ptr(),
        )
        if engine.fast.grad_norm_fast(*arguments) != 0:
            run = methodcaller("grad_norm", *arguments)
            engine.start_call(Call("grad_norm", run, [], more_bytes=grads.nbytes))

    def reduce(self, grads: Tensor, into: Into, async_op: bool = False) -> Work | None:
        # The kernel's blocks always add to norm words, so the words need memory and must be zero.
        words = into.words
        if words is None:
            words = torch.empty(NORM_WORDS, dtype=torch.int64, device=grads.device)
        if into.words is None or not into.zeroed:
            words.zero_()
        arguments = (
            grads.data_ptr(),
            grads.numel(),
            DTYPE_CODES[grads.dtype],
            self._op,
            into.out.data_ptr(),
            into.accumulate,
            _native.GRAD_NORM_KINDS[into.kind],
            words.data_ptr(),
            self._algorithm,
            into.tag,
        )
        name, engine, outputs = "reduce_scatter_norm", self._engine, [into.out, words]
        if self._memory.reached_bytes < self._memory.committed_bytes:
            engine.device_core.await_peers(name)  # peers read the gradients in place
        if async_op:
            starts = engine.starts
            event = (
                None if starts is None else starts.start_reduce_scatter_norm(outputs, *arguments)
            )
            if event is not None:
                return engine.started(name, outputs, event)
        elif engine.fast.reduce_scatter_norm_fast(*arguments) == 0:
            _increment_version(outputs)
            return None
        run = methodcaller(name, *arguments)
        return engine.start_call(Call(name, run, outputs, more_bytes=grads.nbytes), async_op)


def make_reducer(comm: Communicator | None, options: ReduceOptions, step_bytes: int) -> Reducer:
    """Makes a reducer that runs native kernels on tensors on a communicator's device.

    Args:
        comm: the communicator; None for a world of one on the host.
        options: options of the reductions.
        step_bytes: bytes of the gradients of all buckets.
    """
    if comm is not None and comm.launches:
        return DeviceReducer(comm, options)
    return HostReducer(comm, options, step_bytes)
