"""What changes from step to step, as tensors that the kernels read.

Twins of the structures in ``kernels/include/ringcomm/adamw.h``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringcomm import _native
from ringcomm.errors import ArgumentError
from ringcomm.optim.layout import ShardLayout

Tensor = torch.Tensor

# Columns of AdamWControl.
INV_SCALE, CLIP, FOUND_INF, STEPS, SKIPPED = range(5)
L2, AMSGRAD, MAXIMIZE = (_native.ADAMW_FLAGS[name] for name in ("l2", "amsgrad", "maximize"))
FACTORS_BYTES = _native.OPTIMIZER_STRUCTURES["factors"]


class StepTable:
    """The table of one optimizer.

    Attributes:
        layout: of the parameters.
        control: float64 [5]: inverse loss scale, clip coefficient, found-inf, steps taken, skipped.
        hyper: float64 [groups, 6]: lr, beta1, beta2, eps, weight decay, flags.
        group: int64 [params].
        active: float64 [params]: not 0 where the parameter takes the step.
        step: float64 [params]: steps taken.
        factors: uint8 [params, 48]: what the kernels make of all that.
        told: float64 [params, or params + 2 on a CPU]: ``active``, which all ranks reduce to its
            maximum, with the digest of the hyper-parameters behind it. See
            NOTE [Hyper-parameters are compared at each step].

    NOTE [Hyper-parameters are compared at each step]
    Ranks with other hyper-parameters would step their shards differently, and no kernel would mind.
    So a digest and its negative travel with ``active``: their maxima are opposite exactly where the
    ranks' are equal. On a GPU a look at them would wait for it, so it is left out there.
    """

    def __init__(self, layout: ShardLayout, groups: int, place: torch.device) -> None:
        params = len(layout.params)
        self.layout = layout
        self.control = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64, device=place)
        self.hyper = torch.zeros(groups, 6, dtype=torch.float64, device=place)
        self.group = layout.group_table(place)
        # As bytes: struct writes two numbers to them in far less time than a tensor of two takes.
        self._memory = bytearray(8 * (params + 2)) if place.type == "cpu" else None
        if self._memory is None:
            self._here = torch.zeros(params, dtype=torch.float64, device=place)
        else:
            self._here = torch.frombuffer(self._memory, dtype=torch.float64)
        self.told = torch.zeros_like(self._here)
        self.active, self._digests = self.told[:params], self.told[params:]
        self.step = torch.zeros(params, dtype=torch.float64, device=place)
        self.factors = torch.zeros(params, FACTORS_BYTES, dtype=torch.uint8, device=place)
        self._rows: list[list[float]] = []
        self._given: list[float] = []

    def write_hyper(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the hyper-parameters of checked groups; a tensor lr is copied on its device."""
        rows = [_row(group) for group in groups]
        if rows != self._rows:
            self.hyper.copy_(torch.tensor(rows, dtype=torch.float64, device="cpu"))
            self._rows = rows
        for row, group in zip(self.hyper, groups, strict=True):
            if isinstance(group["lr"], Tensor):
                row[0].copy_(group["lr"].detach().view(()))

    def write_active(self, active: list[float], groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes which parameters have a gradient here, and checked groups to be compared."""
        params = len(active)
        if active != self._given:
            self._given = active
            given = torch.tensor(active, dtype=torch.float64, device="cpu")
            self._here[:params].copy_(given)
        if self._memory is not None:
            digest = _digest(groups)
            struct.pack_into("=2d", self._memory, 8 * params, digest, -digest)
        # Anew, since the ranks reduce it in place. Usually nothing comes from the host, so that a
        # graph can record the step.
        self.told.copy_(self._here)

    @property
    def hyper_differ(self) -> bool:
        """Whether the ranks' digests differ, once ``told`` is reduced; never on a GPU."""
        digests = self._digests.tolist()
        return bool(digests) and digests[0] != -digests[1]


def _row(group: Mapping[str, Any]) -> list[float]:
    lr = group["lr"]
    flags = 0 if group["decoupled_weight_decay"] else L2
    flags |= AMSGRAD if group["amsgrad"] else 0
    flags |= MAXIMIZE if group["maximize"] else 0
    beta1, beta2 = group["betas"]
    # No number that a float could be: a float after a tensor must show as a change.
    known_lr = -1.0 if isinstance(lr, Tensor) else float(lr)
    return [known_lr, beta1, beta2, group["eps"], group["weight_decay"], float(flags)]


def _digest(groups: Sequence[Mapping[str, Any]]) -> float:
    """A whole number below 2^52, the same for the same hyper-parameters in every process."""
    rows = tuple((float(group["lr"]), *_row(group)) for group in groups)
    return float(hash(rows) & (1 << 52) - 1)


def check_hyper(group: Mapping[str, Any], index: int, place: torch.device) -> None:
    """Checks a group's hyper-parameters; a tensor lr on a GPU is not read.

    Raises:
        ArgumentError: a number is NaN, infinite or out of range, or lr lies elsewhere.
    """

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


def _in(number: Any, low: float, below: float) -> bool:
    try:
        return bool(low <= number < below)
    except (TypeError, ValueError, RuntimeError):
        return False
