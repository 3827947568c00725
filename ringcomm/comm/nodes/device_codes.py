"""Codes of the wires on a device, by torch's operations, with the host's bits.

The arithmetic is that of ``kernels/host/wire_codes.h``, block by block. Torch
fuses no multiplication with an addition in operations of their own, and nothing waits for what is
in a block: whether it has infinities is a choice between two results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcomm import _native

Tensor = torch.Tensor

BLOCK = _native.WIRE_BLOCK
WORD_BYTES = 3
_INFINITY, _MAGNITUDE, _NAN = 0x7F800000, 0x7FFFFFFF, 0x7FC00000
_TINY_BELOW = 64 << 23  # the bits of 2^-63
_UP, _DOWN = 2.0**64, 2.0**-64
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23
_SPECIAL, _TINY, _FLOAT = 1 << 23, 1 << 22, (1 << 22) - 1


@dataclass(frozen=True)
class _Kind:
    """A wire's largest codes: of numbers, of those beside infinities, of NaN and the infinities."""

    most: float
    most_beside: float
    nan: int
    infinity: int
    minus_infinity: int


_KINDS = {
    "int8": _Kind(127.0, 126.0, 0x80, 0x7F, 0x81),
    "fp8": _Kind(256.0, 256.0, 0x7F, 0x7E, 0xFE),
    "int4": _Kind(7.0, 6.0, 0x8, 0x7, 0x9),
}


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _rounded(y: Tensor, wire: str) -> Tensor:
    """Returns the codes of numbers that are divided by their scale, in int32."""
    if wire != "fp8":
        whole = _bits(y + _ROUNDER) - _ROUNDER_BITS
        return whole & (0xF if wire == "int4" else 0xFF)
    bits = _bits(y)
    magnitude = bits & _MAGNITUDE
    normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3)
    subnormal = _bits(_floats(magnitude) + 16384.0) - 0x46800000
    return torch.where(magnitude < 0x3C800000, subnormal, normal) | (bits >> 24 & 0x80)


def _number(codes: Tensor, wire: str) -> Tensor:
    """Returns the numbers of codes in int32, without their scale."""
    if wire != "fp8":
        sign = 8 if wire == "int4" else 128
        return ((codes ^ sign) - sign).to(torch.float32)
    magnitude = codes & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = _bits(_floats(0x46800000 + magnitude) - 16384.0)
    found = torch.where(magnitude < 8, subnormal, normal)
    return _floats(torch.where(codes >= 0x80, found | -(1 << 31), found))


def _in_blocks(x: Tensor) -> Tensor:
    """Returns [blocks, 128], with zeros behind the last."""
    blocks = -(-x.numel() // BLOCK)
    return torch.nn.functional.pad(x, (0, blocks * BLOCK - x.numel())).view(blocks, BLOCK)


def encode(wire: str, x: Tensor) -> Tensor:
    """Returns the codes of numbers and their scales, as the host has them.

    Args:
        wire: "int8", "fp8" or "int4".
        x: float32 [elements].

    Returns:
        uint8 [bytes], as many as ``_native.wire_bytes`` says.
    """
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    kind, blocks = _KINDS[wire], _in_blocks(x)
    bits = _bits(blocks)
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITY
    special = ~finite.all(dim=1, keepdim=True)
    most = torch.where(finite, magnitude, 0).amax(dim=1, keepdim=True)
    tiny = most < _TINY_BELOW
    before = torch.where(tiny, _UP, 1.0).to(torch.float32)
    # Tensors, since torch would multiply by a number of Python's in higher precision.
    less = torch.tensor(1 - 2.0**-12, dtype=torch.float32, device=x.device)
    factors = [less / torch.tensor(each, device=x.device) for each in (kind.most, kind.most_beside)]
    factor = torch.where(special, factors[1], factors[0])
    word = _bits(_floats(most) * before * factor) >> 9
    scale = _floats(word << 9)
    inverse = torch.where(word != 0, scale.reciprocal(), 0.0)
    codes = _rounded(torch.where(finite, blocks, 0.0) * before * inverse, wire)
    infinite = torch.where(bits < 0, kind.minus_infinity, kind.infinity)
    beside = torch.where(magnitude == _INFINITY, infinite, kind.nan)
    codes = torch.where(finite, codes, beside.to(torch.int32))
    word = word | special * _SPECIAL | tiny * _TINY
    shifts = torch.tensor([0, 8, 16], dtype=torch.int32, device=x.device)
    words = (word >> shifts & 0xFF).to(torch.uint8).flatten()
    return torch.cat([_packed(codes, x.numel(), wire), words])


def _packed(codes: Tensor, elems: int, wire: str) -> Tensor:
    """Returns the codes' bytes: one each, or of int4 one for two codes half a block apart."""
    if wire != "int4":
        return codes.to(torch.uint8).flatten()[:elems]
    whole, tail = divmod(elems, BLOCK)
    half = BLOCK // 2
    full = codes[:whole]
    parts = [(full[:, :half] | full[:, half:] << 4).flatten()]
    if tail:
        last, half = codes[whole], (tail + 1) // 2
        high = torch.nn.functional.pad(last[half:tail], (0, 2 * half - tail))
        parts.append(last[:half] | high << 4)
    return torch.cat(parts).to(torch.uint8)


def _unpacked(coded: Tensor, elems: int, wire: str) -> Tensor:
    """Returns int32 [elements], the codes of a run."""
    if wire != "int4":
        return coded.to(torch.int32)
    whole, tail = divmod(elems, BLOCK)
    half = BLOCK // 2
    wide = coded.to(torch.int32)
    full = wide[: whole * half].view(whole, half)
    parts = [torch.cat([full & 0xF, full >> 4], dim=1).flatten()]
    if tail:
        last, half = wide[whole * half :], (tail + 1) // 2
        parts += [last & 0xF, last[: tail - half] >> 4]
    return torch.cat(parts)


def decode(wire: str, coded: Tensor, elems: int) -> Tensor:
    """Returns float32 [elements], the numbers that codes and scales stand for.

    Args:
        wire: "int8", "fp8" or "int4".
        coded: uint8 [bytes], from :func:`encode` or the host's.
        elems: how many numbers there are.
    """
    if not elems:
        return coded.new_empty(0, dtype=torch.float32)
    kind, blocks = _KINDS[wire], -(-elems // BLOCK)
    codes_bytes = coded.numel() - WORD_BYTES * blocks
    shifts = torch.tensor([0, 8, 16], dtype=torch.int32, device=coded.device)
    words = (coded[codes_bytes:].view(blocks, WORD_BYTES).to(torch.int32) << shifts).sum(
        dim=1, keepdim=True, dtype=torch.int32
    )
    codes = _in_blocks(_unpacked(coded[:codes_bytes], elems, wire))
    scale = _floats((words & _FLOAT) << 9)
    after = torch.where((words & _TINY) != 0, _DOWN, 1.0).to(torch.float32)
    numbers = _number(codes, wire) * scale * after
    special = (words & _SPECIAL) != 0
    for code, bits in (
        (kind.nan, _NAN),
        (kind.infinity, _INFINITY),
        (kind.minus_infinity, _INFINITY - (1 << 31)),
    ):
        stands = torch.full((), bits, dtype=torch.int32, device=coded.device)
        numbers = torch.where(special & (codes == code), _floats(stands), numbers)
    if wire == "fp8":  # a NaN of either sign
        stands = torch.full((), _NAN, dtype=torch.int32, device=coded.device)
        numbers = torch.where(special & (codes == 0xFF), _floats(stands), numbers)
    return numbers.flatten()[:elems]
