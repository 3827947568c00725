# SPDX-License-Identifier: Apache-2.0
"""Moves and reduces elements with all lanes of a block, 16 bytes per lane if memory is aligned.

Counts are numbers of elements of one segment, so offsets fit into 32 bits; addresses are int64.
"""

import triton
import triton.language as tl

from .hooks import INTERPRETED

# 256 lanes with four accesses of 16 bytes each. A turn that copies moves two such blocks. A turn
# that sums takes one block of each source, or half a block of each of four or more sources. So a
# lane has at least 8 loads under way. This choice has not been measured on a GPU.
BLOCK_BYTES = tl.constexpr(16384)
NUM_WARPS = 8
# A sum loads this many sources before it adds the first; also chosen, not measured.
SOURCES_AT_ONCE = tl.constexpr(4)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Rounds FP32 to DTYPE, to nearest even.

    Triton's interpreter truncates FP32 to bfloat16, while compiled code rounds
    (https://github.com/triton-lang/triton, python/triton/runtime/interpreter.py, _convert_float).
    So in the interpreter this function computes the bits itself.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        kept = tl.where(x != x, quiet, rounded)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def widen(x):
    """Converts any floating-point type to FP32, exactly.

    The interpreter's _convert_float (see :func:`round_to`) gets subnormal bfloat16 numbers wrong.
    """
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def accumulate(total, x):
    """Returns ``total`` (FP32) plus ``x`` of any floating-point type."""
    return total + widen(x)


@triton.jit
def is_aligned(addresses):
    """True if all addresses are multiples of 16, so that lanes may access 16 bytes at once."""
    bits = addresses[0]
    for i in tl.static_range(1, len(addresses)):
        bits = bits | addresses[i]
    return (bits & 15) == 0


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns the address as a pointer to elements; ``ALIGNED`` promises a multiple of 16.

    Triton 3.9 turns the cast of a sum into a sum after a cast, and then loses the hint of
    ``tl.multiple_of`` about the cast. The mask keeps the operand of the cast from being a sum.
    """
    if ALIGNED:
        typed = (address & -16).to(tl.pointer_type(DTYPE), bitcast=True)
        return tl.multiple_of(typed, 16)
    else:
        return address.to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def _copy(target, source, count, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    # A turn moves two blocks. With one block of twice the size, Triton 3.6 keeps the offset of each
    # access in local memory where a kernel copies at several places.
    HALF: tl.constexpr = BLOCK_BYTES // (DTYPE.primitive_bitwidth // 8)
    BLOCK: tl.constexpr = 2 * HALF
    to = pointer(target, DTYPE, ALIGNED)
    of = pointer(source, DTYPE, ALIGNED)
    lanes = tl.arange(0, HALF)
    whole = count // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        first = tl.load(of + i + lanes)
        second = tl.load(of + i + HALF + lanes)
        tl.store(to + i + lanes, first)
        tl.store(to + i + HALF + lanes, second)
    # Copies the remaining elements: as vectors, then the last few singly.
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    vectors = count // VECTOR * VECTOR
    for i in tl.static_range(0, BLOCK, HALF):
        here = whole + i + lanes
        tl.store(to + here, tl.load(of + here, mask=here < vectors), mask=here < vectors)
    last = vectors + tl.arange(0, VECTOR)
    tl.store(to + last, tl.load(of + last, mask=last < count), mask=last < count)


@triton.jit
def copy(target, source, count, DTYPE: tl.constexpr):
    """Copies ``count`` elements of DTYPE from address ``source`` to address ``target``."""
    if is_aligned((target, source)):
        _copy(target, source, count, DTYPE, True)
    else:
        _copy(target, source, count, DTYPE, False)


@triton.jit
def _load(source, here, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer(source, DTYPE, ALIGNED) + here, mask=mask)
    else:
        return tl.load(pointer(source, DTYPE, ALIGNED) + here)


@triton.jit
def sum_of(sources, here, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Returns elements ``here`` of all sources, summed in the sources' order in FP32.

    It loads all sources of a batch before it adds the first of them.
    """
    COUNT: tl.constexpr = len(sources)
    for first in tl.static_range(0, COUNT, SOURCES_AT_ONCE):
        loaded = (_load(sources[first], here, mask, DTYPE, ALIGNED, MASKED),)
        for i in tl.static_range(first + 1, first + SOURCES_AT_ONCE):
            if i < COUNT:
                loaded = loaded + (_load(sources[i], here, mask, DTYPE, ALIGNED, MASKED),)
        for i in tl.static_range(0, len(loaded)):
            if first + i == 0:
                total = widen(loaded[0])
            else:
                total = accumulate(total, loaded[i])
    return total


@triton.jit
def _finish(total, DTYPE: tl.constexpr, DIVISOR: tl.constexpr):
    if DIVISOR > 1:
        total = tl.div_rn(total, tl.full(total.shape, DIVISOR, tl.float32))
    return round_to(total, DTYPE)


@triton.jit
def _reduce(
    target, sources, count, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, ALIGNED: tl.constexpr
):
    PARTS: tl.constexpr = 1 if len(sources) < 4 else 2
    BLOCK: tl.constexpr = BLOCK_BYTES // PARTS // (DTYPE.primitive_bitwidth // 8)
    to = pointer(target, DTYPE, ALIGNED)
    lanes = tl.arange(0, BLOCK)
    whole = count // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        total = sum_of(sources, i + lanes, lanes < BLOCK, DTYPE, ALIGNED, False)
        tl.store(to + i + lanes, _finish(total, DTYPE, DIVISOR))
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    vectors = count // VECTOR * VECTOR
    here = whole + lanes
    total = sum_of(sources, here, here < vectors, DTYPE, ALIGNED, True)
    tl.store(to + here, _finish(total, DTYPE, DIVISOR), mask=here < vectors)
    last = vectors + tl.arange(0, VECTOR)
    total = sum_of(sources, last, last < count, DTYPE, ALIGNED, True)
    tl.store(to + last, _finish(total, DTYPE, DIVISOR), mask=last < count)


@triton.jit
def reduce(target, sources, count, DTYPE: tl.constexpr, DIVISOR: tl.constexpr):
    """Sums ``count`` elements of all ``sources`` in their order in FP32, and rounds once.

    Args:
        target: address of the result; may be one of the sources.
        sources: tuple of addresses.
        count: elements, of one segment.
        DTYPE: tl.float32, tl.bfloat16 or tl.float16.
        DIVISOR: the sum is divided by it before it is rounded.
    """
    if is_aligned(sources + (target,)):
        _reduce(target, sources, count, DTYPE, DIVISOR, True)
    else:
        _reduce(target, sources, count, DTYPE, DIVISOR, False)
