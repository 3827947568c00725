"""The properties of a shard, and of its norm, that a kernel is compiled for.

How kernels may pass them on is in NOTE [the oldest Triton] of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NormKind", "ShardKind"]


@dataclass(frozen=True)
class ShardKind:
    """A compile-time argument of the optimizer's kernels; equal on all ranks.

    Attributes:
        grad: Triton's type of the gradients.
        param: Triton's type of the parameters.
        master: where the FP32 parameter lies: "own", it is the parameter; "fp32", a copy;
            "remainder", a bfloat16 parameter and 16 bits more; "none", only in the rounded one.
        keeps_max: some group uses amsgrad.
        stochastic: how 16-bit parameters are rounded.
        divisor: the sum of the gradients is divided by it.
        rule: the update: "adamw" (with Adam), "sgd" (without momentum), "momentum", "lion"
            or "adamw8bit".
    """

    grad: Any
    param: Any
    master: str
    keeps_max: bool
    stochastic: bool
    divisor: int
    rule: str = "adamw"


@dataclass(frozen=True)
class NormKind:
    """A compile-time argument of the kernels that sum norms; equal on all ranks.

    Attributes:
        grad: Triton's type of the gradients.
        kind: of the norm, a native code.
        divisor: the sum of the gradients is divided by it.
        stores: the reduced gradients are stored.
        accumulates: they are added to what lies there.
    """

    grad: Any
    kind: int
    divisor: int
    stores: bool
    accumulates: bool
