# SPDX-License-Identifier: Apache-2.0
"""Shards any elementwise torch optimizer: tries its class, keeps its state, and steps shards.

An optimizer can be sharded if the update of an element depends only on the element's value, its
gradients, and numbers that are equal for all elements, such as the step. A class does not declare
whether this holds. So a *trial* steps a small parameter with one instance of the class, and pieces
of a copy with one instance each; the pieces must end with the bits of the whole parameter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim.backends import Backend, StepTable
from ringcomm.optim.buckets import Bucket, Buckets
from ringcomm.optim.layout import BucketLayout, Chunk, ShardLayout
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import Group, ParamState, TensorBackend, TensorRule, as_json, digest_of
from ringcomm.optim.setting import LossScaler
from ringcomm.optim.sharded import Params, ShardedOptimizer, Sharing

Tensor = torch.Tensor

_SHAPE = (8, 12)
# The pieces of the trial's parameter. In a bucket a piece begins at a multiple of 64 elements of
# its parameter, since parameters begin at multiples of 64 and chunks at multiples of 512. The last
# piece is empty, like the piece of a rank that has no element of a parameter.
_CUTS = (slice(0, 64), slice(64, 96), slice(96, 96))
# Magnitudes of the trial's gradients, by step. They rise and fall, so that values cross thresholds.
_MAGNITUDES = (1.0, 1e-3, 64.0, 1.0, 1e-6)
# Keys of a group that are not hyper-parameters.
NOT_HYPER = frozenset({"params", "param_names"})


def name_of(kind: type) -> str:
    """Returns the name of a class for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def hyper_of(group: Group) -> dict[str, Any]:
    """Returns the hyper-parameters of a group."""
    return {name: value for name, value in group.items() if name not in NOT_HYPER}


@dataclass(frozen=True)
class OptimizerClass:
    """A class of optimizers, and the arguments with which its instances are made."""

    kind: type[Optimizer]
    settings: Mapping[str, Any]

    def make(self, groups: Sequence[Group]) -> Optimizer:
        """Makes an instance for param groups, which have all hyper-parameters."""
        make: Any = self.kind
        made: Optimizer = make([dict(group) for group in groups], **self.settings)
        return made

    def checked(self, hyper: Group, value: Tensor) -> None:
        """Makes an instance, whose constructor checks the hyper-parameters that are its arguments.

        Most classes check the arguments of the constructor, but not the entries of a group.
        """
        known = inspect.signature(self.kind).parameters
        given = {name: each for name, each in hyper.items() if name in known}
        group = {"params": [value.clone().requires_grad_()]}
        OptimizerClass(self.kind, {**self.settings, **given}).make([group])

    def defaults(self) -> dict[str, Any]:
        """Returns the default hyper-parameters of a group.

        Raises:
            ArgumentError: the class does not accept ``settings``.
        """
        param = torch.zeros(_SHAPE, device="cpu", requires_grad=True)
        try:
            return dict(self.make([{"params": [param]}]).defaults)
        except Exception as error:
            raise ArgumentError(
                f"Sharded: {name_of(self.kind)} does not take these arguments: {error!r}"
            ) from error


@dataclass(frozen=True)
class StateKinds:
    """The state that a class keeps for a parameter.

    Attributes:
        tensors: names of the FP32 tensors that have the parameter's shape.
        numbers: maps the name of each number to an example, perhaps a tensor of one element.
        writes_gradients: True if a step changes the gradients.
    """

    tensors: tuple[str, ...]
    numbers: Mapping[str, Any]
    writes_gradients: bool


class Trial:
    """One instance of a class that steps one tensor: the whole parameter of a trial, or a piece."""

    def __init__(self, made: OptimizerClass, hyper: Group, value: Tensor) -> None:
        self.param = value.clone(memory_format=torch.contiguous_format).requires_grad_()
        self._address = self.param.data_ptr()
        self.optimizer = made.make([{**hyper, "params": [self.param]}])
        self._before = self._facts()
        self.writes_gradients = False

    def _facts(self) -> dict[str, Any]:
        """Returns values that steps must not change, since checkpoints do not save these values."""
        facts = {
            f"the entry {name!r} of its param group": value
            for name, value in hyper_of(self.optimizer.param_groups[0]).items()
        }
        for name, value in vars(self.optimizer).items():
            # Booleans may change: they record that something was checked or warned about.
            if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool):
                facts[f"its attribute {name!r}"] = value
        return {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in facts.items()
        }

    def step(self, grad: Tensor) -> None:
        self.param.grad = grad.clone()
        self.optimizer.step()
        self.writes_gradients |= not torch.equal(self.param.grad, grad)

    @property
    def state(self) -> dict[str, Any]:
        """The parameter's state, without entries that are None."""
        state = self.optimizer.state.get(self.param, {})
        return {name: value for name, value in state.items() if value is not None}

    def complaint(self) -> str:
        """Describes a forbidden change that the steps have made; "" if there was none."""
        if self.param.data_ptr() != self._address:
            return "it replaces a parameter's memory by another tensor"
        if any(key is not self.param for key in self.optimizer.state):
            return "it keeps state that belongs to no parameter"
        before, after = self._before, self._facts()
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return f"it changes {changed[0]}, which checkpoints do not save" if changed else ""


def try_class(made: OptimizerClass, hyper: Group, device: torch.device) -> StateKinds:
    """Runs the trial of a class with given hyper-parameters; returns the kinds of its state.

    Args:
        made: the class.
        hyper: all hyper-parameters of a group.
        device: device of the parameters.

    Raises:
        ArgumentError: the class does not take the hyper-parameters.
        UnsupportedError: the class cannot step shards; the message says why.
    """
    hyper = {name: _own(name, value) for name, value in hyper.items()}
    generator = torch.Generator(device="cpu").manual_seed(20)
    draws = [torch.randn(_SHAPE, generator=generator, device="cpu") for _ in (0, *_MAGNITUDES)]
    value, *grads = (each.to(device) for each in draws)
    try:
        made.checked(hyper, value)
        whole = Trial(made, hyper, value)
    except Exception as error:
        raise ArgumentError(
            f"Sharded: {name_of(made.kind)} does not take these hyper-parameters: {error!r}"
        ) from error
    magnitudes = zip(grads, _MAGNITUDES, strict=True)
    grads = [grad * magnitude for grad, magnitude in magnitudes]
    _run(made, whole, grads)
    tensors, numbers = _sorted(made, whole)
    trials = [whole]
    for cut in _CUTS:
        try:
            trial = Trial(made, hyper, value.reshape(-1)[cut])
        except Exception as error:
            _refuse(made, f"it does not take a part of a parameter: {error!r}")
        _run(made, trial, [grad.reshape(-1)[cut] for grad in grads])
        trials.append(trial)
    _compare(made, trials, tensors, numbers)
    writes = any(trial.writes_gradients for trial in trials)
    return StateKinds(tuple(tensors), numbers, writes)


def _run(made: OptimizerClass, trial: Trial, grads: Sequence[Tensor]) -> None:
    """Takes all steps of a trial."""
    try:
        for grad in grads:
            trial.step(grad)
    except Exception as error:
        _refuse(made, f"a step of a small parameter raised {error!r}")
    complaint = trial.complaint()
    if complaint:
        _refuse(made, complaint)


def _own(name: str, value: Any) -> Any:
    """Returns a copy of a hyper-parameter for a trial, with an lr that is not 0."""
    if isinstance(value, Tensor):
        return torch.full_like(value, 2.0**-6) if name == "lr" else value.clone()
    return 2.0**-6 if name == "lr" and value == 0 else value


def _refuse(made: OptimizerClass, seen: str) -> NoReturn:
    raise UnsupportedError(
        f"Sharded: {name_of(made.kind)} cannot step shards: {seen}. The update of an element "
        "must depend on that element alone, wherever its parameter is cut. Keep this optimizer on "
        "whole parameters, as under DDP"
    )


def _sorted(made: OptimizerClass, whole: Trial) -> tuple[list[str], dict[str, Any]]:
    """Divides the whole parameter's state into names of tensors and examples of numbers."""
    tensors: list[str] = []
    numbers: dict[str, Any] = {}
    for name, value in whole.state.items():
        if _is_number(value):
            numbers[name] = value
            continue
        if not isinstance(value, Tensor):
            _refuse(made, f"the state {name!r} of a parameter is a {type(value).__name__}")
        if value.shape != whole.param.shape:
            shape = f"{_SHAPE} has the shape {tuple(value.shape)}"
            _refuse(made, f"the state {name!r} of a parameter of the shape {shape}")
        if value.dtype is not torch.float32:
            _refuse(made, f"the state {name!r} is {value.dtype}, and shards have float32")
        tensors.append(name)
    return tensors, numbers


def _compare(
    made: OptimizerClass, trials: Sequence[Trial], tensors: list[str], numbers: dict[str, Any]
) -> None:
    """Raises if the first trial (the whole parameter) and the others (its pieces) differ."""
    whole, *pieces = trials
    if not _same(whole.param, [trial.param for trial in pieces]):
        _refuse(made, "a parameter in parts gets other values than the whole one")
    if any(trial.state.keys() != whole.state.keys() for trial in pieces):
        _refuse(made, "a part of a parameter has other state than the whole one")
    for name in tensors:
        if not _same(whole.state[name], [trial.state[name] for trial in pieces]):
            _refuse(made, f"the state {name!r} of a parameter in parts is not the whole one's")
    for name, number in numbers.items():
        if not all(_equal(trial.state[name], number) for trial in pieces):
            _refuse(made, f"the state {name!r} of a parameter in parts is not the whole one's")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dim() <= 1
    return isinstance(value, (int, float))


def _equal(one: Any, other: Any) -> bool:
    return _is_number(one) and float(one) == float(other)


def _same(whole: Tensor, pieces: Sequence[Tensor]) -> bool:
    """True if the joined pieces have the shape and bits of the flattened whole tensor."""
    joined = torch.cat([piece.detach().reshape(-1) for piece in pieces])
    flat = whole.detach().reshape(-1)
    return joined.shape == flat.shape and torch.equal(
        joined.view(torch.int32), flat.view(torch.int32)
    )


def _key(value: Any) -> Any:
    """Returns a key for a hyper-parameter's value; values with equal keys share one trial."""
    if isinstance(value, float):
        return "a number" if value else 0
    if isinstance(value, (int, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return type(value).__name__


class TriedClass:
    """A class of optimizers, with one trial for each kind of hyper-parameters in use.

    All nonzero numbers are of one kind, so a learning-rate schedule does not cause more trials.

    Attributes:
        numbers: maps the names of the numbers in a parameter's state to examples.
        writes_gradients: True if a step changes gradients.
    """

    def __init__(self, made: OptimizerClass) -> None:
        self._made = made
        self._tried: dict[Any, StateKinds] = {}
        self.numbers: dict[str, Any] = {}
        self.writes_gradients = False

    @property
    def kind(self) -> type[Optimizer]:
        return self._made.kind

    def make(self, groups: Sequence[Group]) -> Optimizer:
        """Makes an instance for param groups, which have all hyper-parameters."""
        return self._made.make(groups)

    def kinds(self, group: Group, device: torch.device) -> StateKinds:
        """Returns the kinds of state that a group's hyper-parameters need.

        Raises:
            ArgumentError, UnsupportedError: see :func:`try_class`.
        """
        hyper = hyper_of(group)
        key = tuple((name, _key(hyper[name])) for name in sorted(hyper) if name != "lr")
        if key not in self._tried:
            kinds = self._tried[key] = try_class(self._made, hyper, device)
            self.numbers.update(kinds.numbers)
            self.writes_gradients |= kinds.writes_gradients
        return self._tried[key]


# ---- Instances of an optimizer's class that step this rank's segments of parameters --------------


@dataclass(frozen=True)
class ChunkSegment:
    """Elements [begin, end) of a chunk, filled by parameter ``index`` of param group ``group``."""

    index: int
    group: int
    begin: int = 0
    end: int = 0


def segments_of(
    layout: BucketLayout, chunk: Chunk, group_of: Callable[[int], int]
) -> list[ChunkSegment]:
    """Returns the segments of a bucket's parameters that are in this rank's chunk."""
    segments = []
    for begin, end, index in layout.segments:
        low, high = max(begin, chunk.begin), min(end, chunk.end)
        if low < high:
            segments.append(
                ChunkSegment(index, group_of(index), low - chunk.begin, high - chunk.begin)
            )
    return segments


def to_number(example: Any, number: float) -> Any:
    """Converts a number to the type of ``example``, which may be a tensor."""
    if isinstance(example, Tensor):
        return torch.full_like(example, number)
    return type(example)(number)


class Instance:
    """An instance of a class that steps this rank's segments of some parameters.

    The tensors of its state are views of flat tensors [chunk elements], and the flat tensors are
    saved, loaded and resharded. Call :meth:`take_states` before any other method.

    Args:
        tried: the class.
        groups: param groups of the whole optimizer.
        segments: the segments of parameters.
        values: float32 [chunk elements], the parameters or their masters, which steps change.
        moment: returns the flat tensor of the state with a given name: float32 [chunk elements].
    """

    def __init__(
        self,
        tried: TriedClass,
        groups: Sequence[Group],
        segments: Sequence[ChunkSegment],
        values: Tensor,
        moment: Callable[[str], Tensor],
    ) -> None:
        self._tried = tried
        self._groups = groups
        self._segments = segments
        self._moment = moment
        self._params = [values[p.begin : p.end].detach().requires_grad_() for p in segments]
        self._numbers = sorted({segment.group for segment in segments})
        self._optimizer = self._make()
        # For each segment, the state's views of flat tensors, by name.
        self._views: list[dict[str, Tensor]] = [{} for _ in segments]

    def _make(self) -> torch.optim.Optimizer:
        both = list(zip(self._params, self._segments, strict=True))
        return self._tried.make(
            [
                {
                    **hyper_of(self._groups[number]),
                    "params": [param for param, segment in both if segment.group == number],
                }
                for number in self._numbers
            ]
        )

    def step(self, grad: Tensor, active: Sequence[float]) -> None:
        """Steps the segments of parameters that have a gradient.

        Args:
            grad: float32 [chunk elements].
            active: by parameter, nonzero if the parameter takes the step.
        """
        for param, segment in zip(self._params, self._segments, strict=True):
            param.grad = grad[segment.begin : segment.end] if active[segment.index] else None
        for inner, number in zip(self._optimizer.param_groups, self._numbers, strict=True):
            # Copy the hyper-parameters: users and schedulers change the sharded optimizer's groups.
            inner.update(hyper_of(self._groups[number]))
        self._optimizer.step()
        for param in self._params:
            param.grad = None
        self._keep()

    def _keep(self) -> None:
        """Moves the state tensors that the instance has made into the flat tensors."""
        for param, segment, views in zip(self._params, self._segments, self._views, strict=True):
            state = self._optimizer.state.get(param, {})
            for name, value in state.items():
                if value is None or value is views.get(name) or name in self._tried.numbers:
                    continue
                if not isinstance(value, Tensor) or value.shape != param.shape:
                    raise UnsupportedError(
                        f"optimizer.step: {name_of(self._tried.kind)} keeps {name!r}, which it did "
                        "not keep in its trial, and which is not a tensor of its parameter's shape"
                    )
                views[name] = self._view(segment, name).copy_(value)
                state[name] = views[name]

    def _view(self, segment: ChunkSegment, name: str) -> Tensor:
        return self._moment(name)[segment.begin : segment.end]

    def states(self) -> dict[int, ParamState | None]:
        """Returns the states of the parameters by their indices."""
        found: dict[int, ParamState | None] = {}
        for param, segment in zip(self._params, self._segments, strict=True):
            state = self._optimizer.state.get(param, {})
            there = {name: value for name, value in state.items() if value is not None}
            numbers = {n: float(value) for n, value in there.items() if n in self._tried.numbers}
            tensors = tuple(name for name in there if name not in numbers)
            found[segment.index] = ParamState(numbers, tensors) if there else None
        return found

    def take_states(self, states: Sequence[ParamState | None]) -> None:
        """Continues from loaded states of all parameters; the flat tensors are loaded already.

        A parameter without state gets the initial state that the class makes.
        """
        fresh, examples = self._make(), self._tried.numbers
        for param, segment, views in zip(self._params, self._segments, self._views, strict=True):
            state = states[segment.index]
            views.clear()
            self._optimizer.state.pop(param, None)
            if state is not None:
                views.update({name: self._view(segment, name) for name in state.tensors})
                numbers = state.numbers.items()
                restored = {name: to_number(examples[name], number) for name, number in numbers}
                self._optimizer.state[param] = {**restored, **views}
            elif param in fresh.state:
                self._optimizer.state[param] = fresh.state[param]
        self._keep()


# ---- ``Sharded``: instances of any elementwise optimizer's class step the shards ----------------


# ``Sharded`` accepts only these values of these options: other values need AdamW's kernels.
_OF_ANY_CLASS = {"master": "fp32", "rounding": "nearest", "kernels": "native"}


def refuse_kernels_of_adamw(options: AdamWOptions | None) -> None:
    """Raises UnsupportedError for options that need AdamW's kernels."""
    for name, value in _OF_ANY_CLASS.items():
        asked = getattr(options, name, value)
        if asked != value:
            raise UnsupportedError(
                f"Sharded: {name}={asked!r} needs the kernels of ringcomm.optim.AdamW; "
                f"expected {value!r}"
            )


class TorchRule(TensorRule):
    """The update rule of ``Sharded``: one instance of a torch optimizer's class steps each bucket.

    Args:
        made: the class, with its arguments.
    """

    keeps_more = True

    def __init__(self, made: OptimizerClass) -> None:
        self.name = name_of(made.kind)
        self._tried = TriedClass(made)
        self._device = torch.device("cpu")
        # Instances by the key of a bucket or piece; _bare steps parameters without local elements.
        self._instances: dict[tuple[int, int], Instance] = {}
        self._bare: Instance | None = None
        self._buckets: Sequence[Bucket] = ()

    @property
    def numbers(self) -> frozenset[str]:
        return frozenset(self._tried.numbers)

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        for name, value in hyper_of(group).items():
            if isinstance(value, float) and math.isnan(value):
                raise ArgumentError(
                    f"param group {index}: {name}: expected a number, got {value!r}"
                )
        if group.get("differentiable"):
            raise UnsupportedError(
                f"param group {index}: differentiable=True: autograd does not see the step of "
                "shards; use torch.optim for it"
            )
        self._device = device
        self._tried.kinds(group, device)
        self.writes_gradients = self._tried.writes_gradients

    def replaced(self, group: Group) -> dict[str, Any]:
        return {}

    def compared(self, group: Group) -> dict[str, Any]:
        hyper = hyper_of(group)
        return {name: _told(hyper[name]) for name in sorted(hyper) if name != "lr"}

    def digest(self, groups: Sequence[Group]) -> float:
        return digest_of(
            [{"lr": as_json(group.get("lr")), **self.compared(group)} for group in groups]
        )

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        found = [self._tried.kinds(group, self._device).tensors for group in groups]
        return tuple(dict.fromkeys(name for names in found for name in names))

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        # Accept tensors that only earlier hyper-parameters needed, as torch does.
        return ""

    def backend(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Backend:
        # Check the options again, since a sharded module's precision may have changed some of them.
        refuse_kernels_of_adamw(options)
        return TensorBackend(comm, options, table, self)

    def bind(
        self,
        layout: ShardLayout,
        groups: Sequence[Group],
        buckets: Buckets,
        chunks: int,
        states: Sequence[ParamState | None] = (),
    ) -> None:
        states = [*states, *[None] * (len(layout.params) - len(states))]
        self._instances.clear()
        self._bare = None
        self._buckets = buckets
        here: set[int] = set()
        for bucket in (piece for whole in buckets for piece in whole.pieces()):
            segments = segments_of(
                bucket.layout, bucket.chunk, lambda index: layout.params[index].group
            )
            here.update(segment.index for segment in segments)
            if segments:
                made = self._instances[bucket.key] = self._instance(groups, bucket, segments)
                made.take_states(states)
        # Every rank also counts the steps of parameters whose elements are all on other ranks.
        bare = [
            ChunkSegment(index, spec.group)
            for index, spec in enumerate(layout.params)
            if spec.trainable and spec.tied_to is None and index not in here
        ]
        if bare:
            nothing = torch.empty(0, dtype=torch.float32, device=self._device)
            self._bare = Instance(
                self._tried, groups, bare, nothing, lambda name: torch.empty_like(nothing)
            )
            self._bare.take_states(states)

    def _instance(
        self, groups: Sequence[Group], bucket: Bucket, segments: list[ChunkSegment]
    ) -> Instance:
        def moment(name: str) -> Tensor:
            bucket.ensure([name])
            return bucket.state.moments[name]

        master = bucket.state.master
        values = bucket.own_memory if master is None else master
        return Instance(self._tried, groups, segments, values, moment)

    def _all_instances(self) -> list[Instance]:
        bare = [] if self._bare is None else [self._bare]
        return [*self._instances.values(), *bare]

    def begin_updates(self, run: TensorBackend) -> None:
        if self._bare is not None:
            nothing = torch.empty(0, dtype=torch.float32, device=self._device)
            self._bare.step(nothing, run.control.active)

    def update(self, run: TensorBackend, bucket: Bucket, grad: Tensor) -> None:
        if bucket.key not in self._instances:
            return  # none of its parameters is in a group
        self._instances[bucket.key].step(grad, run.control.active)
        if bucket.state.master is not None:
            bucket.own_params.copy_(bucket.state.master)

    def states(
        self, layout: ShardLayout, groups: Sequence[Group], steps: Sequence[float]
    ) -> list[ParamState | None]:
        found: dict[int, ParamState | None] = {}
        for instance in self._all_instances():
            found.update(instance.states())
        return [found.get(index) for index in range(len(layout.params))]

    def take_states(self, states: Sequence[ParamState | None]) -> None:
        for bucket in (piece for whole in self._buckets for piece in whole.pieces()):
            if bucket.key in self._instances:
                self._instances[bucket.key].take_states(states)
        if self._bare is not None:
            self._bare.take_states(states)

    def to_torch(self, name: str, number: float) -> Any:
        return to_number(self._tried.numbers[name], number)

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        kinds = self._tried.kinds(group, self._device)
        there = {name: value for name, value in entry.items() if value is not None}
        wanted = [*kinds.numbers, *kinds.tensors]
        if not there or not wanted:
            return None
        missing = [name for name in wanted if name not in there]
        if missing:
            raise ValueError(f"expected {', '.join(wanted)}, got no {missing[0]}")
        try:
            numbers = {name: float(there[name]) for name in kinds.numbers}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"expected numbers as {', '.join(kinds.numbers)}: {error}") from error
        return ParamState(numbers, kinds.tensors)


def _told(value: Any) -> Any:
    """Returns a hyper-parameter as JSON types, or the name of its class."""
    told = as_json(value)
    if isinstance(told, list):
        return [_told(each) for each in told]
    return told if isinstance(told, (bool, int, float, str, type(None))) else type(told).__name__


class Sharded(ShardedOptimizer):
    """Any elementwise optimizer, sharded: an instance of its class steps FP32 shards on each rank.

    The results have the bits of one process that steps the class with the mean of the ranks'
    gradients. 16-bit parameters are rounded FP32 masters. Otherwise equal to :class:`AdamW`::

        optimizer = Sharded(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)

    Args:
        kind: the class, torch's or another, such as ``torch.optim.SGD``.
        params: see :class:`AdamW`.
        comm: see :class:`AdamW`.
        options: see :class:`AdamW`.
        loss_scaler: see :class:`AdamW`.
        mesh: see :class:`AdamW`.
        settings: arguments of the class.

    Raises:
        ArgumentError: ``kind`` is not a class of optimizers, or does not take ``settings``; see
            also :class:`AdamW`.
        UnsupportedError: the class is not elementwise, or the options need AdamW's kernels.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Params,
        *,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            raise ArgumentError(
                f"Sharded: expected a class of optimizers, such as torch.optim.SGD, got {kind!r}"
            )
        if issubclass(kind, ShardedOptimizer):
            raise ArgumentError(f"Sharded: {kind.__name__} is sharded by itself; use it directly")
        refuse_kernels_of_adamw(options)
        made = OptimizerClass(kind, settings)
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, made.defaults(), sharing, TorchRule(made))
