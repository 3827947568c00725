# SPDX-License-Identifier: Apache-2.0
"""Quantization: values against a reference, bounds of the error, all native loops."""

from __future__ import annotations

import struct
from bisect import bisect
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch

from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES

Tensor = torch.Tensor
BLOCK = _native.QUANT_BLOCK
INF, NAN = float("inf"), float("nan")
TINY = Fraction(1, 2**150)  # half of the smallest positive number


class Kind(NamedTuple):
    """A format: bits per value, and the non-negative numbers that its lowest codes represent."""

    bits: int
    numbers: list[Fraction]
    beside: int  # how many numbers are usable if the block has infinities or NaNs


def _e4m3() -> list[Fraction]:
    def number(value: int) -> Fraction:
        exponent, mantissa = value >> 3, value & 7
        if exponent == 0:
            return Fraction(mantissa, 512)
        return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)

    return [number(value) for value in range(0x79)]


KINDS = {
    "int8": Kind(8, [Fraction(n) for n in range(128)], 127),
    "fp8": Kind(8, _e4m3(), 121),
    "int4": Kind(4, [Fraction(n) for n in range(8)], 7),
}


def quantize(quant_format: str, numbers: Tensor, error_feedback: Tensor | None = None) -> Tensor:
    code, elems = _native.QUANT_FORMATS[quant_format], numbers.numel()
    out = torch.full((_native.quantized_bytes(code, elems) + 1,), 0xA5, dtype=torch.uint8)
    ptr = 0 if error_feedback is None else error_feedback.data_ptr()
    _native.quantize(
        code, numbers.data_ptr(), DTYPE_CODES[numbers.dtype], out.data_ptr(), elems, ptr
    )
    assert int(out[-1]) == 0xA5
    return out[:-1]


def total(
    quant_format: str,
    quantized: list[Tensor],
    elems: int,
    dtype: torch.dtype = torch.float32,
    by: int = 0,
) -> Tensor:
    out = torch.full((elems + 1,), 77.0, dtype=dtype)
    ptrs = [each.data_ptr() for each in quantized]
    _native.dequantize_and_sum(
        _native.QUANT_FORMATS[quant_format], ptrs, out.data_ptr(), DTYPE_CODES[dtype], elems, by
    )
    assert float(out[-1]) == 77.0
    return out[:-1]


def dequantized(quant_format: str, numbers: Tensor) -> Tensor:
    return total(quant_format, [quantize(quant_format, numbers)], numbers.numel())


def f32(x: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", x))[0]
    return result


def values_of(quant_format: str, block: list[float]) -> tuple[list[int], int]:
    """Returns a block's values and word by exact arithmetic, except that the scale is rounded."""
    kind = KINDS[quant_format]
    finite = [abs(x) for x in block if abs(x) < INF]
    special = len(finite) < len(block)
    count = kind.beside if special else len(kind.numbers)
    most = max(finite, default=0.0)
    tiny = most < 2.0**-63
    up = 2.0**64 if tiny else 1.0
    largest = float(kind.numbers[count - 1])
    factor = f32(f32(1 - 2.0**-12) / f32(largest))
    bits = struct.unpack("I", struct.pack("f", f32(f32(most * up) * factor)))[0] >> 9
    scale = Fraction(struct.unpack("f", struct.pack("I", bits << 9))[0])
    word = special << 23 | tiny << 22 | bits

    def quantized(x: float) -> int:
        sign = 1 << (kind.bits - 1)
        mask = 2 * sign - 1
        if x != x or abs(x) == INF:
            return {"int8": (0x80, 0x7F, 0x81), "int4": (8, 7, 9), "fp8": (0x7F, 0x7E, 0xFE)}[
                quant_format
            ][0 if x != x else 1 if x > 0 else 2]
        if scale == 0:
            at = 0
        else:
            y = abs(Fraction(x)) * Fraction(up) / scale
            # The nearest number; of two equally near ones the even one. Rounding the product may
            # turn a tie into one of its neighbours, which the caller allows.
            above = bisect(kind.numbers, y, hi=count)
            near = range(max(above - 1, 0), min(above + 1, count))
            at = min(near, key=lambda n: (abs(kind.numbers[n] - y), n & 1))
        if quant_format == "fp8":
            return at | (sign if struct.pack("f", x)[3] & 0x80 else 0)
        return (-at if x < 0 else at) & mask

    return [quantized(x) for x in block], word


def unpacked(quant_format: str, quantized: Tensor, elems: int) -> tuple[list[int], list[int]]:
    """Returns the values and words of a run, according to the layout in quantization.h."""
    values: list[int] = []
    at, raw = 0, quantized.tolist()
    for begin in range(0, elems, BLOCK):
        n = min(BLOCK, elems - begin)
        if quant_format == "int4":
            half = (n + 1) // 2
            packed = raw[at : at + half]
            values += [byte & 15 for byte in packed] + [byte >> 4 for byte in packed[: n - half]]
            at += half
        else:
            values += raw[at : at + n]
            at += n
    words = [int.from_bytes(raw[b : b + 3], "little") for b in range(at, len(raw), 3)]
    return values, words


def blocks_of_all_kinds() -> Tensor:
    """Returns blocks of random numbers of all magnitudes, and blocks with special values."""
    seed = torch.Generator(device="cpu").manual_seed(5)
    normal = torch.randn(12, BLOCK, generator=seed)
    normal *= torch.tensor(
        [2.0**e for e in (0, 3, -20, 90, 124, -60, -63, -66, -100, -126, -135, -141)]
    )[:, None]
    whole = torch.randint(-127, 128, (1, BLOCK), generator=seed).float()
    outlier = torch.randn(1, BLOCK, generator=seed)
    outlier[0, 17] = -1e30
    zeros = torch.zeros(1, BLOCK)
    zeros[0, 5] = -0.0
    special = torch.randn(3, BLOCK, generator=seed)
    special[0, 3], special[0, 4] = INF, -INF
    special[1, 9] = NAN
    special[2] = torch.tensor([INF, -INF, NAN, NAN]).repeat(BLOCK // 4)
    smallest = torch.full((1, BLOCK), 2.0**-149)
    largest = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    largest[0, ::3] *= -0.4
    return torch.cat([normal, whole, outlier, zeros, special, smallest, largest])


@pytest.mark.parametrize("quant_format", KINDS)
def test_values_are_those_of_exact_arithmetic(quant_format):
    numbers = blocks_of_all_kinds()
    values, words = unpacked(
        quant_format, quantize(quant_format, numbers.flatten()), numbers.numel()
    )
    kind = KINDS[quant_format]
    moved = 0
    for number, row in enumerate(numbers):
        expected, word = values_of(quant_format, row.tolist())
        assert words[number] == word, number
        for x, value, want in zip(row.tolist(), values[number * BLOCK :], expected, strict=False):
            if value != want:
                # x * (1 / scale) is rounded twice, so it may cross the midpoint of two values.
                scale = Fraction(struct.unpack("f", struct.pack("I", (word & 0x3FFFFF) << 9))[0])
                y = abs(Fraction(x)) * (2**64 if word & 1 << 22 else 1) / scale
                low, high = kind.numbers[max(bisect(kind.numbers, y) - 1, 0) :][:2]
                assert abs(y - (low + high) / 2) <= y / 2**22, (number, x)
                moved += 1
    assert moved <= 2


@pytest.mark.parametrize("quant_format", KINDS)
def test_errors_are_bounded(quant_format):
    numbers = blocks_of_all_kinds()
    found = dequantized(quant_format, numbers.flatten()).view_as(numbers)
    for row, back in zip(numbers, found, strict=True):
        finite = row.isfinite()
        assert torch.equal(back[~finite].isnan(), row[~finite].isnan())
        known = ~finite & ~row.isnan()
        assert torch.equal(back[known], row[known])
        most = Fraction(row[finite].abs().max().item()) if finite.any() else Fraction(0)
        beside = not bool(finite.all())
        slack = TINY if most < Fraction(1, 2**62) else 0
        for x, y in zip(row[finite].tolist(), back[finite].tolist(), strict=True):
            error = abs(Fraction(x) - Fraction(y))
            if quant_format == "fp8":
                bound = max(abs(Fraction(x)) / 16, most / 262144)
            else:
                bound = (
                    most
                    / {"int8": 252 if beside else 254, "int4": 12 if beside else 14}[quant_format]
                )
            assert error <= bound + slack, (x, y)


@pytest.mark.parametrize("quant_format", KINDS)
def test_all_loops_have_the_same_bits(quant_format):
    numbers = blocks_of_all_kinds().flatten()
    seen = []
    for name in ("avx512", "avx2", "baseline"):
        if _native.force_isa(name):
            quantized = quantize(quant_format, numbers)
            sums = total(
                quant_format,
                [quantized, quantize(quant_format, numbers.flip(0))],
                numbers.numel(),
                by=3,
            )
            seen.append(quantized.tolist() + sums.view(torch.int32).tolist())
    _native.force_isa("")
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("quant_format", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_dequantized_numbers(quant_format, dtype):
    seed = torch.Generator(device="cpu").manual_seed(6)
    for elems in (0, 1, 2, 63, 64, 127, 128, 129, 191, 256, 301):
        sources = [torch.randn(elems, generator=seed).to(dtype) for _ in range(3)]
        quantized = [quantize(quant_format, source) for source in sources]
        wide = [dequantized(quant_format, source.float()) for source in sources]
        for source, each in zip(sources, quantized, strict=True):
            assert torch.equal(each, quantize(quant_format, source.float()))
            assert each.numel() == _native.quantized_bytes(
                _native.QUANT_FORMATS[quant_format], elems
            )
        found = total(quant_format, quantized, elems, dtype)
        assert torch.equal(found, ((wide[0] + wide[1]) + wide[2]).to(dtype))
        mean = total(quant_format, quantized, elems, dtype, by=3)
        assert torch.equal(mean, (((wide[0] + wide[1]) + wide[2]) / 3).to(dtype))


@pytest.mark.parametrize("quant_format", KINDS)
def test_error_feedback_is_what_quantization_leaves_out(quant_format):
    seed = torch.Generator(device="cpu").manual_seed(7)
    numbers = torch.randn(3 * BLOCK + 5, generator=seed)
    numbers[BLOCK + 3] = INF
    error_feedback = torch.randn(numbers.numel(), generator=seed) / 50
    given = numbers + error_feedback
    quantized = quantize(quant_format, numbers, error_feedback)
    assert torch.equal(quantized, quantize(quant_format, given))
    left = given - total(quant_format, [quantized], numbers.numel())
    left[BLOCK : 2 * BLOCK] = 0
    assert torch.equal(error_feedback, left)
    # With error feedback the quantized values of a constant average to the constant; without, they
    # do not.
    constant, carried = torch.full((BLOCK,), 0.003), torch.zeros(BLOCK)
    constant[0] = 1.0
    sums = torch.zeros(BLOCK)
    for _ in range(256):
        sums += total(quant_format, [quantize(quant_format, constant, carried)], BLOCK)
    assert torch.allclose(sums / 256, constant, rtol=0, atol=1 / 256)
    if quant_format != "fp8":
        assert not torch.allclose(
            dequantized(quant_format, constant), constant, rtol=0, atol=1 / 512
        )


def test_bytes():
    for quant_format, most in (("int8", 1.03), ("fp8", 1.03), ("int4", 0.53)):
        assert (
            _native.quantized_bytes(_native.QUANT_FORMATS[quant_format], 1 << 20) / (1 << 20)
            <= most
        )


def test_what_cannot_be_quantized_is_refused():
    x = torch.ones(4, dtype=torch.float64)
    code = DTYPE_CODES[x.dtype]
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16"):
        _native.quantize(0, x.data_ptr(), code, x.data_ptr(), 4)
    with pytest.raises(ValueError, match="no such format"):
        _native.quantized_bytes(len(_native.QUANT_FORMATS), 4)
    with pytest.raises(ValueError, match="one source or more"):
        _native.dequantize_and_sum(0, [], x.data_ptr(), DTYPE_CODES[torch.float32], 4)
