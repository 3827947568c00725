# SPDX-License-Identifier: Apache-2.0
"""Checks the properties of rounding on which kernels/cuda/ptx.h and ops.h rely."""

import numpy as np
import pytest

BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def rounded(x, bits):
    """Rounds FP64 numbers to ``bits`` significant bits, to nearest even, with any exponent."""
    _, exponents = np.frexp(x)
    shift = bits - exponents
    return np.ldexp(np.rint(np.ldexp(x, shift)), -shift)


def sums(bits):
    """Yields exact sums of pairs of ``bits``-bit numbers, for each relevant exponent distance."""
    generator = np.random.default_rng(bits)
    whole = np.arange(1 << bits - 1, 1 << bits, dtype=np.float64)
    for distance in range(bits + 4):
        a = whole if bits <= 8 else generator.choice(whole, 300)
        b = whole if bits <= 8 else generator.choice(whole, 300)
        for sign in (1.0, -1.0):
            total = np.add.outer(np.ldexp(a, distance), sign * b).ravel()
            yield total[total != 0.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_of_two_rounds_once_as_it_does_by_fp32(dtype):
    bits = BITS[dtype]
    for total in sums(bits):
        assert np.array_equal(rounded(rounded(total, BITS["float32"]), bits), rounded(total, bits))


def test_a_sum_of_two_would_not_by_fewer_bits():
    """The bound is sharp: an intermediate result with fewer bits rounds some sums twice."""
    totals = list(sums(8))
    assert any(not np.array_equal(rounded(rounded(x, 12), 8), rounded(x, 8)) for x in totals)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("divisor", [1, 2, 4, 8, 16, 32, 64])
def test_a_quotient_by_a_power_of_two_is_a_product(dtype, divisor):
    """Checks numbers of every exponent, including the smallest numbers."""
    words = np.uint32 if dtype == np.float32 else np.uint64
    bits = np.finfo(dtype).nmant
    exponents = np.arange(1 << (8 if dtype == np.float32 else 11), dtype=words) << words(bits)
    generator = np.random.default_rng(divisor)
    fractions = generator.integers(0, 1 << bits, 500, dtype=words)
    fractions[:9] = [0, 1, 2, 3, 4, 5, 6, 7, (1 << bits) - 1]
    x = np.bitwise_or.outer(exponents, fractions).ravel().view(dtype)
    x = x[~np.isnan(x)]
    quotient, product = x / dtype(divisor), x * (dtype(1) / dtype(divisor))
    assert np.array_equal(quotient.view(words), product.view(words))
    assert not np.array_equal(x / dtype(3), x * (dtype(1) / dtype(3)))
