"""The update rules of AdamW and Adam, of SGD and of Lion, whose steps are the fused kernels.

A rule's hyper-parameters and moments take the places of AdamW's in the structures that the kernels
read; ``kernels/include/ringcomm/optimizer/adamw.h`` says which.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError
from ringcomm.optim.kernels import (
    DeviceKernels,
    DeviceKernelsInParts,
    HostKernels,
    Kernels,
    StepTable,
)
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import Group, ParamState, UpdateRule, plain

Tensor = torch.Tensor

_FLAGS = _native.ADAMW_FLAGS
MAXIMA = "max_exp_avg_sq"
MOMENTS = ("exp_avg", "exp_avg_sq")


def numbers(betas: Any) -> Any:
    """Returns betas as numbers, converted from tensors of one element."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(float(beta) if isinstance(beta, Tensor) else beta for beta in betas)


def fail(index: int, name: str, expected: str, got: Any) -> NoReturn:
    raise ArgumentError(f"param group {index}: {name}: expected {expected}, got {got!r}")


def _in(number: Any, low: float, below: float) -> bool:
    try:
        return bool(low <= number < below)
    except (TypeError, ValueError, RuntimeError):
        return False


def check_rate(group: Group, index: int, place: torch.device) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            fail(index, "lr", "a tensor of one floating-point element", lr)
        if lr.device != place:
            expected = f"a tensor on {place}, where the parameters are"
            fail(index, "lr", expected, f"one on {lr.device}")
    if not isinstance(lr, Tensor) or place.type == "cpu":
        number = lr.item() if isinstance(lr, Tensor) else lr
        if not _in(number, 0.0, math.inf):
            fail(index, "lr", "a number >= 0", lr)


def check_betas(group: Group, index: int) -> None:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        fail(index, "betas", "two numbers", betas)
    for beta in betas:
        if not _in(beta, 0.0, 1.0):
            fail(index, "betas", "numbers from 0 to below 1", betas)


def check_positive(group: Group, index: int, *names: str) -> None:
    for name in names:
        if not _in(group[name], 0.0, math.inf):
            fail(index, name, "a number >= 0", group[name])


class FusedRule(UpdateRule):
    """A rule that the fused kernels know.

    Attributes:
        hypers: hyper-parameters that ranks compare; lr is compared at each step.
        kind: the rule as :class:`ringcomm._tl.adamw_kind.ShardKind` names it, without momentum.
        moments: names of the tensors of the state, in the order of the kernels' moments.
    """

    hyper_columns = 6
    factors_bytes = _native.OPTIMIZER_STRUCTURES["factors"]
    hypers: tuple[str, ...]
    kind: str
    moments: tuple[str, ...]

    @abstractmethod
    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        """Returns beta1, beta2, eps, weight decay and flags, or what takes their places."""

    def kind_of(self, names: Sequence[str]) -> str:
        """Returns the rule as Triton's kernels name it, where the state has these tensors."""
        return self.kind

    def replaced(self, group: Group) -> dict[str, Any]:
        return {"betas": numbers(group["betas"])} if "betas" in group else {}

    def compared(self, group: Group) -> dict[str, Any]:
        return {name: plain(group[name]) for name in self.hypers}

    def digest(self, groups: Sequence[Group]) -> float:
        rows = tuple((float(group["lr"]), *self.row(group)) for group in groups)
        return float(hash(rows) & (1 << 52) - 1)

    def row(self, group: Group) -> list[float]:
        lr, (*others, flags) = group["lr"], self.columns(group)
        flags |= _FLAGS["maximize"] if group["maximize"] else 0
        # A tensor's row has -1.0, which no float lr is, so that a float after a tensor is a change.
        known_lr = -1.0 if isinstance(lr, Tensor) else float(lr)
        return [known_lr, *others, float(flags)]

    def kernels(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Kernels:
        native: Kernels
        if comm is not None and comm.launches:
            kind = DeviceKernelsInParts if self.eight_bits else DeviceKernels
            native = kind(comm, options, table, self.moments)
        else:
            native = HostKernels(comm, options, table, self.moments)
        if options.kernels == "native":
            return native
        # Imported here, since Triton takes seconds to import.
        from ringcomm.optim.triton_kernels import TritonKernels

        return TritonKernels(comm, options, table, native, self.moments, self.kind_of)


class AdamWRule(FusedRule):
    """AdamW, and Adam where a group's ``decoupled_weight_decay`` is False."""

    name = "AdamW"
    kind = "adamw"
    moments: tuple[str, ...] = (*MOMENTS, MAXIMA)
    hypers = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")

    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        check_rate(group, index, place)
        check_betas(group, index)
        check_positive(group, index, "eps", "weight_decay")

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        flags = 0 if group["decoupled_weight_decay"] else _FLAGS["l2"]
        flags |= _FLAGS["amsgrad"] if group["amsgrad"] else 0
        beta1, beta2 = group["betas"]
        return beta1, beta2, group["eps"], group["weight_decay"], flags

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        return self.moments if any(group["amsgrad"] for group in groups) else MOMENTS

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        fits = set(names) - {MAXIMA} == set(MOMENTS)
        return "" if fits else " and ".join(MOMENTS)

    def states(
        self, layout: ShardLayout, groups: Sequence[Group], steps: Sequence[float]
    ) -> list[ParamState | None]:
        # As in torch, a parameter has state from its first gradient on.
        return [
            ParamState({"step": step}, self.names([groups[spec.group]])) if step else None
            for spec, step in zip(layout.params, steps, strict=True)
        ]

    def to_torch(self, name: str, number: float) -> Any:
        # The dtype in which torch keeps "step".
        wide = torch.get_default_dtype() == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.tensor(number, dtype=dtype, device="cpu")

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        names = self.names([group])
        try:
            step = float(entry["step"])
            missing = next((name for name in names if name not in entry), None)
            if missing is not None:
                raise KeyError(missing)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected step, {', '.join(names)}, got {error!r}") from error
        return ParamState({"step": step}, names)


class AdamW8bitRule(AdamWRule):
    """AdamW with moments of 8 bits."""

    name = "AdamW8bit"
    kind = "adamw8bit"
    moments = MOMENTS
    eight_bits = True

    @property
    def saved_as(self) -> str:
        # Saved moments are widened to FP32, so that either optimizer goes on from the other's.
        return AdamWRule.name

    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        super().check_hyper(group, index, place)
        if group["amsgrad"]:
            fail(index, "amsgrad", "False, since its maxima are not kept in 8 bits", True)

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        beta1, beta2, eps, decay, flags = super().columns(group)
        return beta1, beta2, eps, decay, flags | _FLAGS["eight_bits"]

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        return "" if set(names) == set(MOMENTS) else " and ".join(MOMENTS)


class _OneMoment(FusedRule):
    """The base of the rules whose state is one tensor a parameter, or none."""

    def _has(self, group: Group) -> bool:
        """Tells whether the parameters of a group have the moment."""
        return True

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        return self.moments if any(map(self._has, groups)) else ()

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        # A moment that no group needs is kept, as the buckets keep it.
        fits = set(self.names(groups)) <= set(names) <= set(self.moments)
        return "" if fits else self.moments[0]

    def states(
        self, layout: ShardLayout, groups: Sequence[Group], steps: Sequence[float]
    ) -> list[ParamState | None]:
        return [
            ParamState({}, self.moments) if step and self._has(groups[spec.group]) else None
            for spec, step in zip(layout.params, steps, strict=True)
        ]

    def to_torch(self, name: str, number: float) -> Any:
        return number

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        if not self._has(group):
            return None
        if entry.get(self.moments[0]) is None:
            raise ValueError(f"expected {self.moments[0]}, got {sorted(entry)}")
        return ParamState({}, self.moments)


class SgdRule(_OneMoment):
    """SGD, with momentum or without."""

    name = "SGD"
    kind = "sgd"
    moments = ("momentum_buffer",)
    hypers = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")

    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        check_rate(group, index, place)
        check_positive(group, index, "momentum", "weight_decay")
        dampening = group["dampening"]
        if not _in(dampening, -math.inf, math.inf):
            fail(index, "dampening", "a number", dampening)
        if group["nesterov"] and (group["momentum"] == 0.0 or dampening != 0.0):
            fail(index, "nesterov", "a momentum and no dampening beside it", group["nesterov"])

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        flags = _FLAGS["sgd"] | _FLAGS["l2"]
        flags |= _FLAGS["momentum"] if self._has(group) else 0
        flags |= _FLAGS["nesterov"] if group["nesterov"] else 0
        return group["dampening"], group["momentum"], 0.0, group["weight_decay"], flags

    def kind_of(self, names: Sequence[str]) -> str:
        return "momentum" if names else self.kind

    def _has(self, group: Group) -> bool:
        return bool(group["momentum"] != 0.0)


class LionRule(_OneMoment):
    """Lion."""

    name = "Lion"
    kind = "lion"
    moments = ("exp_avg",)
    hypers = ("betas", "weight_decay", "maximize")

    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        check_rate(group, index, place)
        check_betas(group, index)
        check_positive(group, index, "weight_decay")

    def columns(self, group: Group) -> tuple[float, float, float, float, int]:
        beta1, beta2 = group["betas"]
        return beta1, beta2, 0.0, group["weight_decay"], _FLAGS["lion"]
