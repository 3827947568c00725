# SPDX-License-Identifier: Apache-2.0
"""Quantization for users' kernels: blocks of 128 numbers to a few bits per number, and back.

The Triton twin of ringcomm/core/quantization.h, with the same bits; comments there define a value,
a scale's word and where both are stored. A format is "int8", "fp8" or "int4". Blocks are tensors of
[blocks, 128] numbers or quantized values, one value per int32 element, and [blocks] int32 words.
"""

import triton
import triton.language as tl

from ringcomm._native import QUANT_BLOCK

from .hooks import INTERPRETED
from .moving import is_aligned, pointer, widen

BLOCK = tl.constexpr(QUANT_BLOCK)
HALF = tl.constexpr(QUANT_BLOCK // 2)
WORD_BYTES = tl.constexpr(3)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NAN = tl.constexpr(0x7FC00000)
LEAST_NORMAL = tl.constexpr(121 << 23)  # bits of 2^-6, the least normal number of e4m3
SPECIAL, TINY, FLOAT = tl.constexpr(1 << 23), tl.constexpr(1 << 22), tl.constexpr((1 << 22) - 1)
TINY_BELOW = tl.constexpr(64 << 23)  # the bits of 2^-63
UP, DOWN = tl.constexpr(2.0**64), tl.constexpr(2.0**-64)
ROUNDER, ROUNDER_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)  # 1.5 * 2^23
LESS = tl.constexpr(1.0 - 2.0**-12)


@triton.jit
def _product(a, b):
    """Returns a rounded product, even if the kernel is compiled to fuse products and sums."""
    if INTERPRETED:
        return a * b
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _quantized(y, FORMAT: tl.constexpr):
    """Returns the quantized values of finite numbers that were divided by their scale."""
    if FORMAT == "fp8":
        bits = y.to(tl.int32, bitcast=True)
        magnitude = bits & MAGNITUDE
        power = tl.maximum(magnitude & INFINITY, LEAST_NORMAL)
        rounder = power + (20 << 23)
        rounded = magnitude.to(tl.float32, bitcast=True) + rounder.to(tl.float32, bitcast=True)
        steps = rounded.to(tl.int32, bitcast=True) - rounder
        return (steps + (power >> 20) - (LEAST_NORMAL >> 20)) | ((bits >> 24) & 0x80)
    else:
        MASK: tl.constexpr = 0xF if FORMAT == "int4" else 0xFF
        return ((y + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS) & MASK


@triton.jit
def _dequantized(values, FORMAT: tl.constexpr):
    """Returns the numbers that quantized values represent, before they are scaled."""
    if FORMAT == "fp8":
        magnitude = values & 0x7F
        normal = (magnitude << 20) + (120 << 23)
        spaced = (magnitude + 0x46800000).to(tl.float32, bitcast=True) - 16384.0
        found = tl.where(magnitude < 8, spaced.to(tl.int32, bitcast=True), normal)
        return (found | ((values & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        SHIFT: tl.constexpr = 28 if FORMAT == "int4" else 24
        return ((values << SHIFT) >> SHIFT).to(tl.float32)


@triton.jit
def _quantized_special(bits, FORMAT: tl.constexpr):
    """Returns the quantized values of infinities and NaNs, given by their bits."""
    infinite = (bits & MAGNITUDE) == INFINITY
    if FORMAT == "fp8":
        return tl.where(infinite, ((bits >> 24) & 0x80) | 0x7E, 0x7F)
    else:
        NONE: tl.constexpr = 0x8 if FORMAT == "int4" else 0x80
        return tl.where(infinite, tl.where(bits < 0, NONE + 1, NONE - 1), NONE)


@triton.jit
def _special_bits(values, numbers, FORMAT: tl.constexpr):
    """Returns the bits of ``numbers``, but infinities and NaNs where ``values`` encode them."""
    found = numbers.to(tl.int32, bitcast=True)
    if FORMAT == "fp8":
        infinite = ((values & 0x80) << 24) | INFINITY
        found = tl.where((values & 0x7F) == 0x7E, infinite, found)
        return tl.where((values & 0x7F) == 0x7F, NAN, found)
    else:
        NONE: tl.constexpr = 0x8 if FORMAT == "int4" else 0x80
        found = tl.where(values == NONE - 1, INFINITY, found)
        found = tl.where(values == NONE + 1, INFINITY - (1 << 31), found)
        return tl.where(values == NONE, NAN, found)


@triton.jit
def _factor(special, FORMAT: tl.constexpr):
    """Returns the FP32 factor that turns a block's largest finite magnitude into its scale."""
    MOST: tl.constexpr = 256.0 if FORMAT == "fp8" else 7.0 if FORMAT == "int4" else 127.0
    BESIDE: tl.constexpr = 256.0 if FORMAT == "fp8" else 6.0 if FORMAT == "int4" else 126.0
    return tl.where(special, LESS / BESIDE, LESS / MOST)


@triton.jit
def quantize_blocks(x, FORMAT: tl.constexpr):
    """Quantizes blocks of numbers.

    Args:
        x: floating-point numbers [blocks, 128]; zeros past the end of a run.
        FORMAT: "int8", "fp8" or "int4".

    Returns:
        The quantized values [blocks, 128] and the words of the scales [blocks], for
        :func:`store_quantized`.
    """
    wide = widen(x)
    bits = wide.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    finite = magnitude < INFINITY
    most = tl.max(tl.where(finite, magnitude, 0), axis=1)
    special = tl.max(magnitude, axis=1) >= INFINITY
    tiny = most < TINY_BELOW
    before = tl.where(tiny, UP, 1.0)
    largest = most.to(tl.float32, bitcast=True) * before
    word = (largest * _factor(special, FORMAT)).to(tl.int32, bitcast=True) >> 9
    scale = tl.where(word == 0, 1.0, (word << 9).to(tl.float32, bitcast=True))
    inverse = tl.where(word == 0, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    raised = tl.where(finite, wide, 0.0) * tl.expand_dims(before, 1)
    values = _quantized(_product(raised, tl.expand_dims(inverse, 1)), FORMAT)
    values = tl.where(finite, values, _quantized_special(bits, FORMAT))
    word = word | tl.where(special, SPECIAL, 0) | tl.where(tiny, TINY, 0)
    return values, word


@triton.jit
def dequantize_blocks(values, words, FORMAT: tl.constexpr):
    """Dequantizes blocks to FP32 numbers [blocks, 128].

    A sum over ranks has the host's bits if it starts with the first rank's numbers and
    ``accumulate`` adds the other ranks' numbers in order.

    Args:
        values: quantized [blocks, 128], from :func:`quantize_blocks` or :func:`load_quantized`.
        words: the words of the scales, [blocks].
        FORMAT: "int8", "fp8" or "int4".
    """
    word = tl.expand_dims(words, 1)
    scale = ((word & FLOAT) << 9).to(tl.float32, bitcast=True)
    after = tl.where((word & TINY) != 0, DOWN, 1.0)
    numbers = _product(_dequantized(values, FORMAT) * scale, after)
    beside = _special_bits(values, numbers, FORMAT)
    found = tl.where((word & SPECIAL) != 0, beside, numbers.to(tl.int32, bitcast=True))
    return found.to(tl.float32, bitcast=True)


# ---- in memory ----------------------------------------------------------------------------------


@triton.jit
def _values_bytes(elems, FORMAT: tl.constexpr):
    if FORMAT == "int4":
        return elems // BLOCK * HALF + (elems % BLOCK + 1) // 2
    else:
        return elems


@triton.jit
def _counts(elems, first, BLOCKS: tl.constexpr):
    """Returns how many numbers each block has, [blocks, 1]."""
    blocks = first + tl.expand_dims(tl.arange(0, BLOCKS), 1)
    return tl.minimum(tl.maximum(elems - blocks * BLOCK, 0), BLOCK).to(tl.int32)


@triton.jit
def _offsets(elems, first, BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the offsets of the scales' bytes after the values, [blocks, 4], and their mask."""
    blocks = first + tl.expand_dims(tl.arange(0, BLOCKS), 1)
    which = tl.expand_dims(tl.arange(0, 4), 0)
    at = _values_bytes(elems, FORMAT) + blocks * WORD_BYTES + which
    return at, (blocks * BLOCK < elems) & (which < WORD_BYTES)


@triton.jit
def _store_whole(to, values, FORMAT: tl.constexpr):
    """Stores the quantized values of whole blocks, at a multiple of 16 bytes."""
    BLOCKS: tl.constexpr = values.shape[0]
    rows = tl.expand_dims(tl.arange(0, BLOCKS), 1)
    if FORMAT == "int4":
        halves = tl.permute(tl.reshape(values, [BLOCKS, 2, HALF]), (0, 2, 1))
        low, high = tl.split(halves)
        here = rows * HALF + tl.expand_dims(tl.arange(0, HALF), 0)
        tl.store(to + here, (low | (high << 4)).to(tl.uint8))
    else:
        here = rows * BLOCK + tl.expand_dims(tl.arange(0, BLOCK), 0)
        tl.store(to + here, values.to(tl.uint8))


@triton.jit
def _store_any(to, values, count, FORMAT: tl.constexpr):
    """Stores the quantized values of blocks that may be short, or at any address."""
    BLOCKS: tl.constexpr = values.shape[0]
    rows = tl.expand_dims(tl.arange(0, BLOCKS), 1)
    if FORMAT == "int4":
        # Byte i of a block holds number i in its low bits and number half + i in its high bits.
        half = (count + 1) // 2
        byte = tl.expand_dims(tl.arange(0, HALF), 0) + rows * 0
        low = tl.gather(values, byte, 1)
        high = tl.gather(values, tl.minimum(byte + half, BLOCK - 1), 1)
        high = tl.where(byte + half < count, high, 0)
        tl.store(to + rows * HALF + byte, (low | (high << 4)).to(tl.uint8), mask=byte < half)
    else:
        cols = tl.expand_dims(tl.arange(0, BLOCK), 0)
        tl.store(to + rows * BLOCK + cols, values.to(tl.uint8), mask=cols < count)


@triton.jit
def store_quantized(out, elems, first, values, words, FORMAT: tl.constexpr):
    """Stores blocks of a quantized run, from block ``first`` on.

    Args:
        out: address of the run.
        elems: number of elements of the run; nothing is stored past its end.
        first: index in the run of the first block of ``values``.
        values: from :func:`quantize_blocks`.
        words: from :func:`quantize_blocks`.
        FORMAT: "int8", "fp8" or "int4".
    """
    zero = tl.full((), 0, tl.int64)
    out, elems, first = zero + out, zero + elems, zero + first
    BLOCKS: tl.constexpr = values.shape[0]
    begin = out + first * (HALF if FORMAT == "int4" else BLOCK)
    if ((first + BLOCKS) * BLOCK <= elems) & is_aligned((out,)):
        _store_whole(pointer(begin, tl.uint8, True), values, FORMAT)
    else:
        _store_any(pointer(begin, tl.uint8, False), values, _counts(elems, first, BLOCKS), FORMAT)
    at, there = _offsets(elems, first, BLOCKS, FORMAT)
    shifted = tl.expand_dims(words, 1) >> (tl.expand_dims(tl.arange(0, 4), 0) * 8)
    tl.store(pointer(out, tl.uint8, False) + at, shifted.to(tl.uint8), mask=there)


@triton.jit
def _load_whole(of, BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Loads the quantized values of whole blocks, at a multiple of 16 bytes."""
    rows = tl.expand_dims(tl.arange(0, BLOCKS), 1)
    if FORMAT == "int4":
        here = rows * HALF + tl.expand_dims(tl.arange(0, HALF), 0)
        both = tl.load(of + here).to(tl.int32)
        halves = tl.permute(tl.join(both & 0xF, both >> 4), (0, 2, 1))
        return tl.reshape(halves, [BLOCKS, BLOCK])
    else:
        here = rows * BLOCK + tl.expand_dims(tl.arange(0, BLOCK), 0)
        return tl.load(of + here).to(tl.int32)


@triton.jit
def _load_any(of, count, BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Loads quantized values of blocks that may be short, or at any address; zeros past the end."""
    rows = tl.expand_dims(tl.arange(0, BLOCKS), 1)
    cols = tl.expand_dims(tl.arange(0, BLOCK), 0)
    if FORMAT == "int4":
        half = (count + 1) // 2
        upper = cols >= half
        at = rows * HALF + cols - tl.where(upper, half, 0)
        both = tl.load(of + at, mask=cols < count, other=0).to(tl.int32)
        return tl.where(upper, both >> 4, both & 0xF)
    else:
        return tl.load(of + rows * BLOCK + cols, mask=cols < count, other=0).to(tl.int32)


@triton.jit
def load_quantized(source, elems, first, BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Loads BLOCKS blocks of a quantized run, from block ``first`` on; zeros past its end.

    Args:
        source: address of the run.
        elems: number of elements of the run.
        first: index in the run of the first block to load.
        BLOCKS: number of blocks, a power of two.
        FORMAT: "int8", "fp8" or "int4".

    Returns:
        The quantized values [blocks, 128] and the words of the scales [blocks], for
        :func:`dequantize_blocks`.
    """
    zero = tl.full((), 0, tl.int64)
    source, elems, first = zero + source, zero + elems, zero + first
    begin = source + first * (HALF if FORMAT == "int4" else BLOCK)
    if ((first + BLOCKS) * BLOCK <= elems) & is_aligned((source,)):
        values = _load_whole(pointer(begin, tl.uint8, True), BLOCKS, FORMAT)
    else:
        count = _counts(elems, first, BLOCKS)
        values = _load_any(pointer(begin, tl.uint8, False), count, BLOCKS, FORMAT)
    at, there = _offsets(elems, first, BLOCKS, FORMAT)
    found = tl.load(pointer(source, tl.uint8, False) + at, mask=there, other=0).to(tl.int32)
    words = tl.sum(found << (tl.expand_dims(tl.arange(0, 4), 0) * 8), axis=1)
    return values, words
