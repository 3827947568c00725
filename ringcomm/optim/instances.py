"""Instances of an optimizer's class on this rank's parts of parameters, and the state they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.errors import UnsupportedError
from ringcomm.optim.elementwise import Group, TriedClass, hyper_of, name_of
from ringcomm.optim.layout import BucketLayout, Chunk
from ringcomm.optim.rules import ParamState

Tensor = torch.Tensor


@dataclass(frozen=True)
class ChunkPart:
    """Elements [begin, end) of a chunk that parameter ``index`` of param group ``group`` fills."""

    index: int
    group: int
    begin: int = 0
    end: int = 0


def parts_of(layout: BucketLayout, chunk: Chunk, group_of: Callable[[int], int]) -> list[ChunkPart]:
    """Returns this rank's parts of the parameters of a bucket."""
    parts = []
    for begin, end, index in layout.segments:
        low, high = max(begin, chunk.begin), min(end, chunk.end)
        if low < high:
            parts.append(ChunkPart(index, group_of(index), low - chunk.begin, high - chunk.begin))
    return parts


def to_number(example: Any, number: float) -> Any:
    """Returns a number of a state in the form of an example, which may be a tensor."""
    if isinstance(example, Tensor):
        return torch.full_like(example, number)
    return type(example)(number)


class Instance:
    """An instance of a class that steps this rank's parts of some parameters.

    The tensors of its state are views of flat ones, which are what is saved, loaded and cut anew.
    :meth:`take_states` is called before anything else.

    Args:
        tried: the class.
        groups: param groups of the whole optimizer.
        parts: the parts of parameters.
        values: float32 [chunk elements], the parameters or their masters, which steps change.
        moment: returns by name the flat tensor of a state: float32 [chunk elements].
    """

    def __init__(
        self,
        tried: TriedClass,
        groups: Sequence[Group],
        parts: Sequence[ChunkPart],
        values: Tensor,
        moment: Callable[[str], Tensor],
    ) -> None:
        self._tried = tried
        self._groups = groups
        self._parts = parts
        self._moment = moment
        self._params = [values[p.begin : p.end].detach().requires_grad_() for p in parts]
        self._numbers = sorted({part.group for part in parts})
        self._optimizer = self._make()
        # By part and name, the view of a flat tensor that the state has.
        self._views: list[dict[str, Tensor]] = [{} for _ in parts]

    def _make(self) -> torch.optim.Optimizer:
        both = list(zip(self._params, self._parts, strict=True))
        return self._tried.make(
            [
                {
                    **hyper_of(self._groups[number]),
                    "params": [param for param, part in both if part.group == number],
                }
                for number in self._numbers
            ]
        )

    def step(self, grad: Tensor, active: Sequence[float]) -> None:
        """Steps the parts of parameters that have a gradient.

        Args:
            grad: float32 [chunk elements].
            active: by parameter, not 0 where the parameter takes the step.
        """
        for param, part in zip(self._params, self._parts, strict=True):
            param.grad = grad[part.begin : part.end] if active[part.index] else None
        for inner, number in zip(self._optimizer.param_groups, self._numbers, strict=True):
            # Users and their schedulers change the groups of the whole optimizer.
            inner.update(hyper_of(self._groups[number]))
        self._optimizer.step()
        for param in self._params:
            param.grad = None
        self._keep()

    def _keep(self) -> None:
        """Moves tensors of the state that are new into the flat tensors."""
        for param, part, views in zip(self._params, self._parts, self._views, strict=True):
            state = self._optimizer.state.get(param, {})
            for name, value in state.items():
                if value is None or value is views.get(name) or name in self._tried.numbers:
                    continue
                if not isinstance(value, Tensor) or value.shape != param.shape:
                    raise UnsupportedError(
                        f"optimizer.step: {name_of(self._tried.kind)} keeps {name!r}, which it did "
                        "not when it was tried, and which is no tensor of its parameter's shape"
                    )
                views[name] = self._view(part, name).copy_(value)
                state[name] = views[name]

    def _view(self, part: ChunkPart, name: str) -> Tensor:
        return self._moment(name)[part.begin : part.end]

    def states(self) -> dict[int, ParamState | None]:
        """Returns the states of the parameters by their indices."""
        found: dict[int, ParamState | None] = {}
        for param, part in zip(self._params, self._parts, strict=True):
            state = self._optimizer.state.get(param, {})
            there = {name: value for name, value in state.items() if value is not None}
            numbers = {n: float(value) for n, value in there.items() if n in self._tried.numbers}
            tensors = tuple(name for name in there if name not in numbers)
            found[part.index] = ParamState(numbers, tensors) if there else None
        return found

    def take_states(self, states: Sequence[ParamState | None]) -> None:
        """Goes on from the states of all parameters; the flat tensors have the elements.

        A parameter without state begins as the class begins it.
        """
        fresh, examples = self._make(), self._tried.numbers
        for param, part, views in zip(self._params, self._parts, self._views, strict=True):
            state = states[part.index]
            views.clear()
            self._optimizer.state.pop(param, None)
            if state is not None:
                views.update({name: self._view(part, name) for name in state.tensors})
                numbers = state.numbers.items()
                restored = {name: to_number(examples[name], number) for name, number in numbers}
                self._optimizer.state[param] = {**restored, **views}
            elif param in fresh.state:
                self._optimizer.state[param] = fresh.state[param]
        self._keep()
