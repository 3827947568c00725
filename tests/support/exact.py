# SPDX-License-Identifier: Apache-2.0
"""Inputs whose reductions are exact in every dtype and order, and the expected results."""

from __future__ import annotations

from functools import cache

import torch
from torch.distributed import ReduceOp

import ringcomm

Tensor = torch.Tensor

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCIBLE = (*INTEGERS, torch.bool, *FLOATS, *COMPLEX)
MOVED_ONLY = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
MOVABLE = (*REDUCIBLE, *MOVED_ONLY)

OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
PREMUL_FACTOR = 2.0

# A single rank, a pair, odd and even numbers, powers of two, and the maximum. schedule_test.cpp
# checks the schedule's arithmetic for all of 1 to 16.
WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)


def op_of(name: str) -> object:
    """Returns the op object that a caller passes."""
    return ringcomm.premul_sum(PREMUL_FACTOR) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def ops_for(dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the names of the ops that ``dtype`` supports."""
    if dtype in MOVED_ONLY:
        return ()
    if dtype.is_complex:
        return ("SUM", "AVG", "PREMUL_SUM", "PRODUCT")
    if dtype is torch.bool:
        return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    if dtype.is_floating_point:
        return OPS[:6]
    return OPS


def raw_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements as bytes, which are comparable for every dtype, including NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """True if dtype, shape and bits are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))


def equal(a: Tensor, b: Tensor) -> bool:
    """True if dtype, shape and values are equal; for reducible dtypes 0 equals -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # torch.equal() supports neither float8 nor every complex dtype.
    if a.dtype in MOVED_ONLY:
        return torch.equal(raw_bytes(a), raw_bytes(b))
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return torch.equal(a, b)


# The values below are periodic, so the 64-bit remainders are computed once, for a short piece that
# is repeated to any length.


def _repeated(period: Tensor, count: int) -> Tensor:
    return period.repeat(-(-count // period.numel()))[:count]


@cache
def _codes(rank: int, most: int) -> Tensor:
    return ((torch.arange(251) * 31 + rank * 97 + 5) % 251 % most).to(torch.uint8)


def pattern(count: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Elements that differ by rank and position; any bits if data of the dtype is only moved."""
    period = _codes(rank, 2 if dtype is torch.bool else 251)
    return _repeated(period, count * dtype.itemsize).view(dtype)


@cache
def _integers(rank: int, world: int, op: str, *, signed: bool) -> Tensor:
    positions = torch.arange(4 * 3 * 61, dtype=torch.int64)
    if op == "PRODUCT":
        # At most four ranks contribute 2, so that the result of 16 ranks fits into an int8.
        wide = (positions + rank) % 2 + 1 if rank % 4 == 0 else torch.ones_like(positions)
        return wide * (1 - 2 * ((positions + rank) % 3 == 0).long()) if signed else wide
    if op == "AVG":
        # Multiples of the world size: the mean is whole. Few of them: sums fit into an int8.
        return ((positions + rank) % 3 == 0) * world
    if op in ("BAND", "BOR", "BXOR", "MIN", "MAX"):
        return (positions * 7 + rank * 13) % 61 - (30 if signed else 0)
    return (positions * 5 + rank * 3) % 4 - (2 if signed else 0)


def operand(count: int, rank: int, world: int, dtype: torch.dtype, op: str) -> Tensor:
    """Returns rank ``rank``'s input of ``count`` elements for a reduction by ``op``.

    With up to 16 ranks every partial result is a whole number that the dtype holds exactly.
    """
    if dtype is torch.bool:
        return (torch.arange(count) + rank) % (world + 1) > 1
    period = _integers(rank, world, op, signed=dtype.is_signed or dtype.is_complex)
    if not dtype.is_complex:
        return _repeated(period.to(dtype), count)
    values = _repeated(period, count)
    if dtype.is_complex and op != "PRODUCT":
        return torch.complex(values.double(), values.roll(1).double()).to(dtype)
    return values.to(dtype)


def _whole(tensor: Tensor) -> Tensor:
    """Widens to a dtype for which torch has every operator."""
    if tensor.dtype is torch.bool or tensor.dtype.is_complex:
        return tensor.to(torch.complex128) if tensor.dtype.is_complex else tensor.long()
    return tensor.double() if tensor.dtype.is_floating_point else tensor.long()


def _fold(wide: Tensor, op: str) -> Tensor:
    if op == "PRODUCT":
        return wide.prod(0)
    if op in ("MIN", "MAX"):
        return wide.amin(0) if op == "MIN" else wide.amax(0)
    if op in ("BAND", "BOR", "BXOR"):
        result = wide[0].clone()
        for row in wide[1:]:
            result = {"BAND": result & row, "BOR": result | row, "BXOR": result ^ row}[op]
        return result
    return wide.sum(0)


def reduced(inputs: list[Tensor], op: str) -> Tensor:
    """Returns the exact result of reducing ``inputs``, equal in every bit."""
    dtype = inputs[0].dtype
    wide = _fold(torch.stack([_whole(each) for each in inputs]), op)
    if op == "PREMUL_SUM":
        wide = wide * int(PREMUL_FACTOR)
    if op == "AVG":
        wide = wide / len(inputs)
    if dtype is torch.bool and op == "SUM":
        wide = wide > 0
    return wide.to(dtype)
