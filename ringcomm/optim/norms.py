"""From the exact sums that the kernels leave to a norm, with no host synchronisation."""

from __future__ import annotations

import math

import torch

from ringcomm import _native
from ringcomm.errors import ArgumentError

Tensor = torch.Tensor

# kernels/include/ringcomm/grad_norm.h: a sum of 20 digits of 32 bits, the lowest worth 2^-352, and
# how many blocks hold an infinity or a NaN.
NORM_WORDS = _native.GRAD_NORM_WORDS
DIGITS = 20
BIAS = 352
NON_FINITE_WORD = 23
_KINDS = {2.0: "l2", 1.0: "l1", math.inf: "inf"}


def norm_kind(norm_type: float) -> str:
    """The kernels' name of a norm.

    Raises:
        ArgumentError: it is not 1, 2 or inf.
    """
    try:
        kind = _KINDS.get(float(norm_type))
    except (TypeError, ValueError):
        kind = None
    if kind is None:
        raise ArgumentError(f"norm_type: expected 2.0, 1.0 or inf, got {norm_type!r}")
    return kind


def kind_code(kind: str) -> int:
    """The native code of a norm."""
    return _native.GRAD_NORM_KINDS[kind]


def combine(words: Tensor, kind: str) -> Tensor:
    """Several buckets' words as one's.

    Args:
        words: int64 [buckets, 24].
        kind: "l2", "l1" or "inf".

    Returns:
        int64 [24].
    """
    if kind != "inf":
        return words.sum(dim=0)
    return words.amax(dim=0) if len(words) else words.new_zeros(NORM_WORDS)


def found_non_finite(words: Tensor) -> Tensor:
    """1.0 when a gradient holds an infinity or a NaN, else 0.0; float64, a scalar."""
    return (words[NON_FINITE_WORD] != 0).to(torch.float64)


def norm_of(words: Tensor, kind: str, inv_scale: Tensor) -> Tensor:
    """The norm that words of all buckets and ranks stand for.

    The words are sums of whole numbers, equal however many ranks added them; what follows is the
    same arithmetic everywhere, so the norm has the same bits in every world.

    Args:
        words: int64 [24], from :func:`combine`.
        kind: "l2", "l1" or "inf".
        inv_scale: float64, a scalar: what the gradient is multiplied by.

    Returns:
        float32, a scalar on the device of ``words``; NaN when the gradient is not finite.
    """
    if kind == "inf":
        # The low half of the word is the largest magnitude's bits.
        norm = words[0].to(torch.int32).view(torch.float32).to(torch.float64)
    else:
        exponents = torch.arange(DIGITS, dtype=torch.float64, device=words.device) * 32 - BIAS
        total = (words[:DIGITS].to(torch.float64) * torch.exp2(exponents)).sum()
        norm = total.sqrt() if kind == "l2" else total
    norm = torch.where(words[NON_FINITE_WORD] != 0, math.nan, norm * inv_scale)
    return norm.to(torch.float32)
