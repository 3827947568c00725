"""Moments of 8 bits in torch: what the kernels keep, and how it is made.

Twin of ``kernels/include/ringcomm/optimizer/block_moments.h``, which says what a code means and why
it is rounded so. Checkpoints go through it, and tests hold the kernels to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcomm import _native

Tensor = torch.Tensor

#: Elements that share an exponent.
BLOCK = _native.MOMENT_BLOCK_ELEMS

_CUT_BITS = 20
_ONE_EXPONENT = 1 << 23
_LEAST_EXPONENT = 36
_NOT_FINITE = 255 - _LEAST_EXPONENT
_WORD = (1 << 32) - 1

#: In place of random bits, this rounds to the nearest code; of two, to the larger magnitude.
TO_NEAREST = 1 << (_CUT_BITS - 1)


@dataclass(frozen=True)
class Code:
    """The numbers that a moment can be.

    Attributes:
        below: number of exponents of normal numbers below that of the block.
        signed: True if a code has a sign, its highest bit.
    """

    below: int
    signed: bool

    def least_normal(self, exponents: Tensor) -> Tensor:
        """Returns the bits of the smallest normal numbers of blocks: int32."""
        return (exponents.to(torch.int32) + (_LEAST_EXPONENT - self.below)) << 23

    def widen(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """Returns the numbers of codes.

        Args:
            codes: uint8 [blocks, BLOCK].
            exponents: uint8 [blocks].

        Returns:
            float32 [blocks, BLOCK].
        """
        least = self.least_normal(exponents)[:, None]
        wide = codes.to(torch.int32)
        magnitude = wide & 0x7F if self.signed else wide
        bits = least + (magnitude << _CUT_BITS)
        subnormal = bits.view(torch.float32) - least.view(torch.float32)
        normal = (bits - _ONE_EXPONENT).view(torch.float32)
        numbers = torch.where(magnitude < 8, subnormal, normal)
        if self.signed:
            numbers = torch.where(wide > 0x7F, -numbers, numbers)
        return torch.where(exponents[:, None] == _NOT_FINITE, torch.nan, numbers)

    def narrow(self, numbers: Tensor, random: Tensor | int = TO_NEAREST) -> tuple[Tensor, Tensor]:
        """Returns codes and exponents of numbers; undoes :meth:`widen`.

        Args:
            numbers: float32 [blocks, BLOCK].
            random: int32 of the same shape, each of 20 bits; or one for all.

        Returns:
            uint8 [blocks, BLOCK] and uint8 [blocks].
        """
        bits = numbers.contiguous().view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        largest = magnitude.amax(1).to(torch.int64) + ((1 << _CUT_BITS) - 1)
        held = (largest >> 23).clamp(_LEAST_EXPONENT, 255) - _LEAST_EXPONENT
        exponents = held.to(torch.uint8)
        least = self.least_normal(exponents)[:, None]
        sums = magnitude.view(torch.float32) + least.view(torch.float32)
        subnormal = sums.view(torch.int32) - least
        normal = magnitude - least + _ONE_EXPONENT
        code = (torch.where(magnitude < least, subnormal, normal) + random) >> _CUT_BITS
        if self.signed:
            code = (code & 0x7F) | ((bits >> 24) & 0x80)
        else:
            code = torch.where((code == 0) & (magnitude != 0), 1, code)
        return (code & 0xFF).to(torch.uint8), exponents


#: The codes by moment.
CODES = {"exp_avg": Code(14, True), "exp_avg_sq": Code(30, False)}


class BlockMoment:
    """A moment of a chunk in 8 bits.

    Attributes:
        memory: uint8 [elements + blocks], the codes and then the exponents, as kernels take them.
    """

    def __init__(self, code: Code, memory: Tensor) -> None:
        self._code = code
        self.memory = memory

    @staticmethod
    def size_bytes(elems: int) -> int:
        """Returns the bytes of a moment of ``elems`` elements, a multiple of :data:`BLOCK`."""
        return elems + elems // BLOCK

    def _parts(self) -> tuple[Tensor, Tensor]:
        blocks = self.memory.numel() // (BLOCK + 1)
        return self.memory[: blocks * BLOCK].view(-1, BLOCK), self.memory[blocks * BLOCK :]

    def wide(self) -> Tensor:
        """Returns a copy in FP32: float32 [elements]."""
        return self._code.widen(*self._parts()).view(-1)

    def take(self, numbers: Tensor) -> None:
        """Sets the moment to float32 [elements], each rounded to the nearest."""
        narrow = self._code.narrow(numbers.to(self.memory.device).view(-1, BLOCK))
        for part, given in zip(self._parts(), narrow, strict=True):
            part.copy_(given)


def random_bits(seed: int, param: int, step: int, elems: int) -> tuple[Tensor, Tensor]:
    """Returns what a step rounds the two moments of a parameter by.

    Args:
        seed: of the optimizer's options.
        param: index of the parameter.
        step: number of the parameter's step, from 1.
        elems: number of the parameter's elements, below 2^32.

    Returns:
        Two of int32 [elems], each of 20 bits.
    """
    key, twist = _philox(seed, param, step)[:2]
    x = _times(torch.arange(elems, dtype=torch.int64, device="cpu") ^ key, 0x7FEB352D)
    x = _times(x ^ (x >> 15) ^ twist, 0x846CA68B)
    x = x ^ (x >> 16)
    first, second = x & ((1 << _CUT_BITS) - 1), x >> (32 - _CUT_BITS)
    return first.to(torch.int32), second.to(torch.int32)


def _times(x: Tensor, factor: int) -> Tensor:
    """Returns the low 32 bits of a product; in halves, since torch has no unsigned 64 bits."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & _WORD


def _philox(seed: int, counter: int, step: int) -> list[int]:
    """Philox4x32-10, as adamw_element.h has it, for the stream of moments."""
    k0, k1 = seed & _WORD, seed >> 32
    c = [counter & _WORD, counter >> 32, step, 1 << 31]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & _WORD, (a >> 32) ^ c[3] ^ k1, a & _WORD]
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c
