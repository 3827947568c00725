"""A trial of an optimizer's class: whether it can step shards, and which state it keeps.

An optimizer can be sharded if what becomes of an element depends on that element alone: its value,
its gradients, and numbers such as the step that are the same for all elements. Nothing in a class
says so. So a small parameter is stepped whole, and in parts as different ranks would have them, by
an instance of the class for each; both must end with the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ringcomm.errors import ArgumentError, UnsupportedError

Tensor = torch.Tensor
Group = Mapping[str, Any]

_SHAPE = (8, 12)
# Parameters begin at multiples of 64 elements in their buckets, and chunks at multiples of 512, so
# a part begins at a multiple of 64 of its parameter. A rank may also have nothing of a parameter.
_PARTS = (slice(0, 64), slice(64, 96), slice(96, 96))
# Magnitudes of the gradients of the steps, so that thresholds are met from both sides.
_MAGNITUDES = (1.0, 1e-3, 64.0, 1.0, 1e-6)
# Keys of a group that are no hyper-parameters.
NOT_HYPER = frozenset({"params", "param_names"})


def name_of(kind: type) -> str:
    """Returns the name of a class for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def hyper_of(group: Group) -> dict[str, Any]:
    """Returns the hyper-parameters of a group."""
    return {name: value for name, value in group.items() if name not in NOT_HYPER}


@dataclass(frozen=True)
class OptimizerClass:
    """A class of optimizers, and the arguments that its instances are made with."""

    kind: type[Optimizer]
    settings: Mapping[str, Any]

    def make(self, groups: Sequence[Group]) -> Optimizer:
        """Makes an instance on groups with all their hyper-parameters."""
        make: Any = self.kind
        made: Optimizer = make([dict(group) for group in groups], **self.settings)
        return made

    def checked(self, hyper: Group, value: Tensor) -> None:
        """Has the class check hyper-parameters, by giving it those that it knows as arguments.

        Most classes check their arguments, and not what a group says.
        """
        known = inspect.signature(self.kind).parameters
        given = {name: each for name, each in hyper.items() if name in known}
        group = {"params": [value.clone().requires_grad_()]}
        OptimizerClass(self.kind, {**self.settings, **given}).make([group])

    def defaults(self) -> dict[str, Any]:
        """Returns the hyper-parameters of a group that is given none.

        Raises:
            ArgumentError: the class does not take the arguments.
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
    """The state that a class keeps of a parameter.

    Attributes:
        tensors: names of FP32 tensors of the parameter's shape.
        numbers: by name, an example of a number, which may be a tensor of one element.
        writes_gradients: True if a step changes the gradients.
    """

    tensors: tuple[str, ...]
    numbers: Mapping[str, Any]
    writes_gradients: bool


class Trial:
    """One instance of a class on one parameter: a whole one, or a part."""

    def __init__(self, made: OptimizerClass, hyper: Group, value: Tensor) -> None:
        self.param = value.clone(memory_format=torch.contiguous_format).requires_grad_()
        self._address = self.param.data_ptr()
        self.optimizer = made.make([{**hyper, "params": [self.param]}])
        self._before = self._facts()
        self.writes_gradients = False

    def _facts(self) -> dict[str, Any]:
        """Returns what an instance must not change, since only tensors of its state are kept."""
        facts = {
            f"the entry {name!r} of its param group": value
            for name, value in hyper_of(self.optimizer.param_groups[0]).items()
        }
        for name, value in vars(self.optimizer).items():
            # Flags remember that something was checked or warned of.
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
        """The parameter's state."""
        state = self.optimizer.state.get(self.param, {})
        return {name: value for name, value in state.items() if value is not None}

    def complaint(self) -> str:
        """Returns what the instance has done that shards do not allow, or ""."""
        if self.param.data_ptr() != self._address:
            return "it puts another tensor in the place of a parameter's memory"
        if any(key is not self.param for key in self.optimizer.state):
            return "it keeps state that is of no parameter"
        before, after = self._before, self._facts()
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return f"it changes {changed[0]}, which no checkpoint would have" if changed else ""


def try_class(made: OptimizerClass, hyper: Group, place: torch.device) -> StateKinds:
    """Tries a class with some hyper-parameters.

    Args:
        made: the class.
        hyper: all hyper-parameters of a group.
        place: device of the parameters.

    Raises:
        ArgumentError: the class does not take the hyper-parameters.
        UnsupportedError: the class cannot step shards; says what was seen.
    """
    hyper = {name: _own(name, value) for name, value in hyper.items()}
    generator = torch.Generator(device="cpu").manual_seed(20)
    draws = [torch.randn(_SHAPE, generator=generator, device="cpu") for _ in (0, *_MAGNITUDES)]
    value, *grads = (each.to(place) for each in draws)
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
    for part in _PARTS:
        try:
            trial = Trial(made, hyper, value.reshape(-1)[part])
        except Exception as error:
            _refuse(made, f"it does not take a part of a parameter: {error!r}")
        _run(made, trial, [grad.reshape(-1)[part] for grad in grads])
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
    """Returns a hyper-parameter for a trial, which must not change the user's, or do nothing."""
    if isinstance(value, Tensor):
        return torch.full_like(value, 2.0**-6) if name == "lr" else value.clone()
    return 2.0**-6 if name == "lr" and value == 0 else value


def _refuse(made: OptimizerClass, seen: str) -> NoReturn:
    raise UnsupportedError(
        f"Sharded: {name_of(made.kind)} cannot step shards: {seen}. What becomes of an element "
        "must depend on that element alone, wherever its parameter is cut. Keep this optimizer on "
        "whole parameters, as under DDP"
    )


def _sorted(made: OptimizerClass, whole: Trial) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of tensors in the state of the whole parameter, and examples of numbers."""
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
    """Compares the whole parameter, the first of the trials, with its parts."""
    whole, *parts = trials
    if not _same(whole.param, [trial.param for trial in parts]):
        _refuse(made, "a parameter in parts becomes another one than the whole")
    if any(trial.state.keys() != whole.state.keys() for trial in parts):
        _refuse(made, "a part of a parameter has other state than the whole one")
    for name in tensors:
        if not _same(whole.state[name], [trial.state[name] for trial in parts]):
            _refuse(made, f"the state {name!r} of a parameter in parts is not the whole one's")
    for name, number in numbers.items():
        if not all(_equal(trial.state[name], number) for trial in parts):
            _refuse(made, f"the state {name!r} of a parameter in parts is not the whole one's")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dim() <= 1
    return isinstance(value, (int, float))


def _equal(one: Any, other: Any) -> bool:
    return _is_number(one) and float(one) == float(other)


def _same(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Returns whether parts have the bits of the whole."""
    joined = torch.cat([part.detach().reshape(-1) for part in parts])
    flat = whole.detach().reshape(-1)
    return joined.shape == flat.shape and torch.equal(
        joined.view(torch.int32), flat.view(torch.int32)
    )


def _key(value: Any) -> Any:
    """Returns what of a hyper-parameter decides which state there is, and how a step is taken."""
    if isinstance(value, float):
        return "a number" if value else 0
    if isinstance(value, (int, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    return type(value).__name__


class TriedClass:
    """A class that was tried with all hyper-parameters that it is used with.

    Numbers other than 0 count as alike, so that a schedule costs no trial a step.

    Attributes:
        numbers: examples of the numbers that are kept of a parameter, by name.
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
        """Makes an instance on groups with all their hyper-parameters."""
        return self._made.make(groups)

    def kinds(self, group: Group, place: torch.device) -> StateKinds:
        """Returns the state that there is with a group's hyper-parameters.

        Raises:
            ArgumentError, UnsupportedError: see :func:`try_class`.
        """
        hyper = hyper_of(group)
        key = tuple((name, _key(hyper[name])) for name in sorted(hyper) if name != "lr")
        if key not in self._tried:
            kinds = self._tried[key] = try_class(self._made, hyper, place)
            self.numbers.update(kinds.numbers)
            self.writes_gradients |= kinds.writes_gradients
        return self._tried[key]
