"""The state of a training run that another library has saved, between reader and ``convert()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ringcomm.errors import UnsupportedError
from ringcomm.json_reader import number_below, shown
from ringcomm.zero.checkpoint.contents import check_name

Tensor = torch.Tensor

# Of a param group, what AdamW has here, too. The rest says how torch computes.
HYPER = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "initial_lr")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor that lies in pieces, as views of files.

    Attributes:
        dtype: of all pieces.
        shape: of the tensor.
        size: of which the pieces are boxes: the shape, or [elements] where they are runs of the
            flattened tensor.
        pieces: the offsets of each, and its elements, of the size of its box.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    size: tuple[int, ...]
    pieces: Sequence[tuple[tuple[int, ...], Tensor]]

    @classmethod
    def whole(cls, tensor: Tensor) -> ForeignTensor:
        """Returns a tensor in one piece."""
        shape = tuple(tensor.shape)
        return cls(tensor.dtype, shape, shape, [((0,) * len(shape), tensor)])

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> ForeignTensor:
        """Returns float32 zeros, which take no memory."""
        return cls.whole(torch.zeros((), device="cpu").expand(tuple(shape)))

    @classmethod
    def of_runs(cls, runs: Sequence[Tensor], shape: Sequence[int], called: str) -> ForeignTensor:
        """Returns the tensor whose flattened elements are in runs one after the other.

        Raises:
            ValueError: they are not as many as the tensor has.
        """
        elems = sum(run.numel() for run in runs)
        if elems != prod(shape):
            raise ValueError(f"{called} has {elems} elements of {prod(shape)}")
        pieces: list[tuple[tuple[int, ...], Tensor]] = []
        begin = 0
        for run in runs:
            if run.numel():
                pieces.append(((begin,), run))
            begin += run.numel()
        dtype = runs[0].dtype if runs else torch.float32
        return cls(dtype, tuple(shape), (elems,), pieces)


@dataclass
class ForeignState:
    """A training run's state.

    Attributes:
        kind: of checkpoint, "DeepSpeed" or "DCP".
        size_bytes: of the files with its tensors.
        weights: parameters and persistent buffers, by name.
        masters: FP32 masters of parameters, by name, where there are any.
        moments: by kind, then by parameter.
        steps: that each parameter has taken.
        groups: hyper-parameters of the param groups.
        group_params: names of the parameters of each.
        tied: aliases of parameters, with the names whose tensors they share.
        step: number under which it was saved; None where the checkpoint does not say.
        data: further plain data.
    """

    kind: str
    size_bytes: int
    weights: dict[str, ForeignTensor]
    masters: dict[str, ForeignTensor] = field(default_factory=dict)
    moments: dict[str, dict[str, ForeignTensor]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    group_params: list[list[str]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    data: Any = None

    def check(self) -> None:
        """Checks what the readers have not: that the parts name and fit each other.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: they do not.
        """
        moments = (each for kind in self.moments.values() for each in kind.items())
        for name, tensor in (*self.weights.items(), *self.masters.items(), *moments):
            check_name(name)
            for _, piece in tensor.pieces:
                if not isinstance(piece, Tensor) or piece.dtype != tensor.dtype:
                    raise ValueError(f"{name} has pieces that are not tensors of one dtype")
            if name in self.weights and tensor.shape != self.weights[name].shape:
                raise ValueError(f"{name} has another shape than its state")
        names = [name for group in self.group_params for name in group]
        if len(set(names)) != len(names):
            raise ValueError("a parameter is in two groups")
        for name in names:
            if not (name in self.weights and 0 <= self.steps.get(name, 0.0) < 2**53):
                raise ValueError(
                    f"{name} is not a parameter, or its number of steps is out of range"
                )
        if self.step is not None and not number_below(self.step, 2**53):
            raise ValueError(f"it has step {shown(self.step)}")


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyper-parameters of a saved param group, as plain data."""
    found = {name: group[name] for name in HYPER if name in group}
    return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Returns a saved value as plain data, or None for what is none."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None


def refuse_moments(names: Sequence[str], called: str) -> None:
    """Raises UnsupportedError unless a parameter's tensors of state are Adam's."""
    if not {"exp_avg", "exp_avg_sq"} <= set(names) <= set(MOMENTS):
        raise UnsupportedError(
            f"{called}: expected the state of Adam or AdamW, exp_avg and exp_avg_sq, got "
            f"{', '.join(sorted(names)) or 'none'}; convert the weights alone"
        )
