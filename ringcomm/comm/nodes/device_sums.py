"""Sums of partial sums on a device, by torch's operations, with the host's bits; and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringcomm import _native
from ringcomm.comm.nodes.wires import Reducing
from ringcomm.errors import ArgumentError

Tensor = torch.Tensor

TORCH_DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for name, code in _native.DTYPES.items() if hasattr(torch, name)
}
# Torch has few operations of these; sums, products and bits are those of the signed ones.
AS_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
AS_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a < b) | (a != a), a, b)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a > b) | (a != a), a, b)


# As combine() of kernels/include/ringcomm/core/reduce.h, to the bit.
_JOIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": _smaller,
    "MAX": _larger,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_JOIN_BOOL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **_JOIN,
    "SUM": torch.bitwise_or,
    "PRODUCT": torch.bitwise_and,
    "MIN": torch.bitwise_and,
    "MAX": torch.bitwise_or,
}
OP_NAMES = {code: name for name, code in _native.OPS.items()}


def joined(partials: Tensor, r: Reducing, divide_by: int) -> Tensor:
    """Adds up partial sums in their order, and divides by ``divide_by`` unless that is 0.

    Args:
        partials: [nodes, elements], of the partial sums' type or, rounded for the wire, of the
            elements'.
        r: the reduction.
        divide_by: the number of ranks, of a mean.

    Returns:
        [elements], of the partial sums' type, where complex numbers are pairs of real ones.
    """
    rows = partials.to(TORCH_DTYPES[r.partial])
    kind = {**AS_SIGNED, **AS_REAL}.get(rows.dtype)
    rows = rows if kind is None else rows.view(kind)
    joins = _JOIN_BOOL if rows.dtype is torch.bool else _JOIN
    join: Callable[[Tensor, Tensor], Tensor] = joins[OP_NAMES[r.joining]]
    total = rows[0]
    for row in rows[1:]:
        total = join(total, row)
    if not divide_by:
        return total
    if not total.is_floating_point():
        return torch.div(total, divide_by, rounding_mode="trunc")
    # A tensor on the device: torch multiplies by the reciprocal of a number of the host's.
    return total / torch.full((), divide_by, dtype=total.dtype, device=total.device)


def is_plain_type(dtype: torch.dtype) -> bool:
    """Tells whether :func:`joined` returns elements of this type, or of its partial sums', as such.

    Others it returns as signed integers or as pairs of real numbers.
    """
    return dtype not in AS_SIGNED and dtype not in AS_REAL


def check_reducible(operation: str, dtype: int, op: int) -> None:
    """Refuses what no kernel reduces; codes of the native module.

    Raises:
        ArgumentError: as :meth:`DeviceComm.reduce` does for the same.
    """
    kind, name = TORCH_DTYPES[dtype], OP_NAMES[op]
    signed_only = kind in AS_SIGNED and name in ("AVG", "PREMUL_SUM", "MIN", "MAX")
    if signed_only or (kind in AS_REAL and name == "PRODUCT"):
        raise ArgumentError(
            f"{operation}: op {name} of {kind} is not reduced on a GPU; convert it to a signed or "
            "wider type, or reduce a CPU copy"
        )


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensor by tensor, in few launches; widens where the types differ."""
    pairs = [
        (to, of) if to.dtype is not of.dtype else (to.view(torch.uint8), of.view(torch.uint8))
        for to, of in zip(targets, sources, strict=True)
        if to.numel()
    ]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
