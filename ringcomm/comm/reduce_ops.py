"""Reduction operators and dtypes, and their codes in the native module."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed import ReduceOp

from ringcomm import _native
from ringcomm.errors import ArgumentError

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items() if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES}
OP_CODES = _native.OPS
_TORCH_OPS = {name: getattr(ReduceOp, name) for name in OP_CODES if hasattr(ReduceOp, name)}
PREMUL_SUM = "PREMUL_SUM"


class PremulSum:
    """Sum of the inputs, each multiplied by ``factor`` first; made by :func:`premul_sum`."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return f"premul_sum({self.factor})"


def premul_sum(factor: float | torch.Tensor) -> PremulSum:
    """The op PREMUL_SUM: each rank's elements times a factor, then their sum.

    torch.distributed makes one only through a private function; both kinds are accepted wherever
    ringcomm takes an op.

    Args:
        factor: a real number, or a tensor of one element; for integers a whole number.

    Raises:
        ArgumentError: it is neither.
    """
    return PremulSum(_factor_of(factor))


def _factor_of(factor: object) -> float:
    if isinstance(factor, torch.Tensor) and factor.numel() == 1 and not factor.is_complex():
        return float(factor.item())
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        return float(factor)
    raise ArgumentError(
        f"PREMUL_SUM: expected a real number or a tensor of one element as the factor, "
        f"got {factor!r}"
    )


class Reduction:
    """An op as the native module takes it: its code, and the factor of PREMUL_SUM (else 1)."""

    __slots__ = ("code", "factor", "name")

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name = name
        self.code = OP_CODES[name]
        self.factor = factor


_NAMES: dict[object, str] = {torch_op: name for name, torch_op in _TORCH_OPS.items()}
_PLAIN = {name: Reduction(name) for name in OP_CODES if name != PREMUL_SUM}
_PLAIN_BY_ID = {id(_TORCH_OPS[name]): plain for name, plain in _PLAIN.items()}


def reduction_of(op: object) -> Reduction:
    """The native form of a ``ReduceOp``, ``RedOpType`` or :func:`premul_sum`.

    Raises:
        ArgumentError: it is not an op, or PREMUL_SUM without a factor.
    """
    quick = _PLAIN_BY_ID.get(id(op))
    if quick is not None:
        return quick
    if isinstance(op, PremulSum):
        return Reduction(PREMUL_SUM, op.factor)
    if not isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        raise ArgumentError(f"op: expected a torch.distributed.ReduceOp, got {op!r}")
    kind, factor = _parts_of(op)
    name = _NAMES.get(kind)
    if name is None:
        raise ArgumentError(f"op: {kind} is unknown; known are {', '.join(OP_CODES)}")
    if name != PREMUL_SUM:
        return _PLAIN[name]
    if factor is None:
        raise ArgumentError(
            "op: PREMUL_SUM needs a factor; pass ringcomm.premul_sum(factor) instead of "
            "ReduceOp.PREMUL_SUM"
        )
    return Reduction(PREMUL_SUM, _factor_of(factor))


def _parts_of(op: object) -> tuple[object, object]:
    """Kind and factor of an op of torch."""
    # First, since torch lets isinstance(kind, ReduceOp) hold too.
    if isinstance(op, ReduceOp.RedOpType):
        return op, None
    # The pickle state is the only view of the factor (__reduce_ex__ aborts the process in torch
    # 2.13: a pybind11 type without constructor).
    state: tuple[object, object] = cast(Any, op).__getstate__()
    return state


# The native module finds the ops by identity: to hash or compare torch's op objects costs more than
# the rest of a small call, and the objects live as long as torch. A torch whose tensors lack the
# interface has no plain tensors, and its calls go the careful path.
if (_exchange := getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)) is not None:
    _native.read_tensors_with(
        _exchange,
        torch.Tensor,
        torch.nn.Parameter,
        ReduceOp,
        [(op, OP_CODES[name]) for name, op in _TORCH_OPS.items() if name != PREMUL_SUM],
    )

DEVICE_ALGORITHMS = _native.ALGORITHMS
ALGORITHMS = {name: DEVICE_ALGORITHMS[name] for name in ("auto", "direct", "ring")}
SUM = ReduceOp.SUM

__all__ = [
    "ALGORITHMS",
    "DEVICE_ALGORITHMS",
    "DTYPE_CODES",
    "DTYPE_NAMES",
    "SUM",
    "PremulSum",
    "ReduceOp",
    "Reduction",
    "premul_sum",
    "reduction_of",
]
