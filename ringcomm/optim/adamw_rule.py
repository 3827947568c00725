"""The update rule of AdamW and Adam, whose steps are the fused kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError
from ringcomm.optim.kernels import DeviceKernels, HostKernels, Kernels, StepTable
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import Group, ParamState, UpdateRule, plain

Tensor = torch.Tensor

L2, AMSGRAD, MAXIMIZE = (_native.ADAMW_FLAGS[name] for name in ("l2", "amsgrad", "maximize"))
MAXIMA = "max_exp_avg_sq"
MOMENTS = ("exp_avg", "exp_avg_sq")
_COMPARED = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")


def numbers(betas: Any) -> Any:
    """Returns betas as numbers, converted from tensors of one element."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(float(beta) if isinstance(beta, Tensor) else beta for beta in betas)


def _row(group: Group) -> list[float]:
    lr = group["lr"]
    flags = 0 if group["decoupled_weight_decay"] else L2
    flags |= AMSGRAD if group["amsgrad"] else 0
    flags |= MAXIMIZE if group["maximize"] else 0
    beta1, beta2 = group["betas"]
    # A tensor's row has -1.0, which no float lr is, so that a float after a tensor is a change.
    known_lr = -1.0 if isinstance(lr, Tensor) else float(lr)
    return [known_lr, beta1, beta2, group["eps"], group["weight_decay"], float(flags)]


class AdamWRule(UpdateRule):
    """AdamW, and Adam where a group's ``decoupled_weight_decay`` is False."""

    name = "AdamW"
    hyper_columns = 6
    factors_bytes = _native.OPTIMIZER_STRUCTURES["factors"]

    def check_hyper(self, group: Group, index: int, place: torch.device) -> None:
        def fail(name: str, expected: str, got: Any) -> None:
            raise ArgumentError(f"param group {index}: {name}: expected {expected}, got {got!r}")

        lr, betas = group["lr"], group["betas"]
        if isinstance(lr, Tensor):
            if lr.numel() != 1 or not lr.is_floating_point():
                fail("lr", "a tensor of one floating-point element", lr)
            if lr.device != place:
                fail("lr", f"a tensor on {place}, where the parameters are", f"one on {lr.device}")
        if not isinstance(lr, Tensor) or place.type == "cpu":
            number = lr.item() if isinstance(lr, Tensor) else lr
            if not _in(number, 0.0, math.inf):
                fail("lr", "a number >= 0", lr)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            fail("betas", "two numbers", betas)
        for beta in betas:
            if not _in(beta, 0.0, 1.0):
                fail("betas", "numbers from 0 to below 1", betas)
        for name in ("eps", "weight_decay"):
            if not _in(group[name], 0.0, math.inf):
                fail(name, "a number >= 0", group[name])

    def replaced(self, group: Group) -> dict[str, Any]:
        return {"betas": numbers(group["betas"])}

    def compared(self, group: Group) -> dict[str, Any]:
        return {name: plain(group[name]) for name in _COMPARED}

    def digest(self, groups: Sequence[Group]) -> float:
        rows = tuple((float(group["lr"]), *_row(group)) for group in groups)
        return float(hash(rows) & (1 << 52) - 1)

    def row(self, group: Group) -> list[float]:
        return _row(group)

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        return (*MOMENTS, MAXIMA) if any(group["amsgrad"] for group in groups) else MOMENTS

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        fits = set(names) - {MAXIMA} == set(MOMENTS)
        return "" if fits else " and ".join(MOMENTS)

    def kernels(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Kernels:
        native: Kernels
        if comm is not None and comm.launches:
            native = DeviceKernels(comm, options, table)
        else:
            native = HostKernels(comm, options, table)
        if options.kernels == "native":
            return native
        # Imported here, since Triton takes seconds to import.
        from ringcomm.optim.triton_kernels import TritonKernels

        return TritonKernels(comm, options, table, native)

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


def _in(number: Any, low: float, below: float) -> bool:
    try:
        return bool(low <= number < below)
    except (TypeError, ValueError, RuntimeError):
        return False
