"""Moments of 8 bits: a turn of them widened, and rounded again.

The Triton twin of ringcomm/optimizer/block_moments.h, whose comments say what a code means and why
it is rounded so: the same bits. Exponents are of blocks, [TURN / BLOCK] in a turn, and go with all
of a block's elements, [TURN].
"""

import triton
import triton.language as tl

from ringcomm._native import MOMENT_BLOCK_ELEMS

BLOCK = tl.constexpr(MOMENT_BLOCK_ELEMS)
CUT_BITS = tl.constexpr(20)
CUT_MASK = tl.constexpr((1 << CUT_BITS.value) - 1)
LEAST_EXPONENT = tl.constexpr(36)
NOT_FINITE = tl.constexpr(255 - LEAST_EXPONENT.value)
FIRST_BELOW = tl.constexpr(14)
SECOND_BELOW = tl.constexpr(30)


@triton.jit
def of_elements(blocks):
    """A block's value for each of its elements."""
    COUNT: tl.constexpr = blocks.shape[0]
    spread = tl.broadcast_to(tl.expand_dims(blocks, 1), [COUNT, BLOCK])
    return tl.reshape(spread, [COUNT * BLOCK])


@triton.jit
def _least_normal(exponents, BELOW: tl.constexpr):
    return (exponents + (LEAST_EXPONENT - BELOW)) << 23


@triton.jit
def widened(codes, exponents, BELOW: tl.constexpr):
    """FP32 numbers of codes (uint8) and of their blocks' exponents (int32)."""
    least = of_elements(_least_normal(exponents, BELOW))
    wide = codes.to(tl.int32)
    SIGNED: tl.constexpr = BELOW == FIRST_BELOW
    magnitude = wide
    if SIGNED:
        magnitude = wide & 0x7F
    y = least + (magnitude << CUT_BITS)
    subnormal = y.to(tl.float32, bitcast=True) - least.to(tl.float32, bitcast=True)
    bits = tl.minimum(subnormal.to(tl.int32, bitcast=True), y - (1 << 23))
    if SIGNED:
        bits = bits | ((wide & 0x80) << 24)
    bits = tl.where(of_elements(exponents) == NOT_FINITE, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exponents_of(numbers, inside):
    """The exponents of blocks (int32), of the elements that are ``inside`` of a parameter."""
    magnitude = tl.where(inside, numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    COUNT: tl.constexpr = numbers.shape[0] // BLOCK
    most = tl.max(tl.reshape(magnitude, [COUNT, BLOCK]), axis=1)
    # In 64 bits, since the largest patterns are those of NaN.
    found = ((most.to(tl.int64) + CUT_MASK) >> 23).to(tl.int32)
    return tl.minimum(tl.maximum(found, LEAST_EXPONENT), 255) - LEAST_EXPONENT


@triton.jit
def narrowed(numbers, exponents, random, BELOW: tl.constexpr):
    """The codes (uint8) of FP32 numbers, rounded by 20 random bits each."""
    least = of_elements(_least_normal(exponents, BELOW))
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sums = magnitude.to(tl.float32, bitcast=True) + least.to(tl.float32, bitcast=True)
    # What overflows there is of infinities and NaN, in whose blocks codes mean nothing.
    y = tl.maximum(sums.to(tl.int32, bitcast=True), magnitude + (1 << 23))
    code = (y - least + random) >> CUT_BITS
    if BELOW == FIRST_BELOW:
        code = code | ((bits >> 24) & 0x80)
    else:
        code = tl.maximum(code, tl.minimum(magnitude, 1))
    return (code & 0xFF).to(tl.uint8)


@triton.jit
def random_words(element, key, twist):
    """The random word (uint32) of each element of a parameter; keys are of elements, too."""
    x = ((element & 0xFFFFFFFF).to(tl.uint32) ^ key) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ twist) * 0x846CA68B
    return x ^ (x >> 16)
