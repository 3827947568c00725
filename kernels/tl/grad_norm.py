"""Norms of gradients that do not depend on how the gradient is cut into shards.

The Triton twin of ringcomm/optimizer/grad_norm.h: blocks of 512 elements are summed in double
precision by halves, and the sums of blocks are added exactly, as digits of 32 bits. A program
keeps its words in registers and adds them to memory once, in any order: they are whole numbers.

A turn has eight blocks, as a tile of [quarter of a block, block] rows of 128 elements: so Triton
gives each of the eight warps one or two whole blocks, and no halving leaves its warp.
"""

import triton
import triton.language as tl

from ringcomm._native import GRAD_NORM_KINDS, GRAD_NORM_WORDS

from .adamw_shard import BLOCK_ELEMS, gradient, part_of
from .moving import is_aligned, pointer
from .words import word64

INF = tl.constexpr(GRAD_NORM_KINDS["inf"])
L2_NORM = tl.constexpr(GRAD_NORM_KINDS["l2"])
WORDS = tl.constexpr(GRAD_NORM_WORDS)
LANES = tl.constexpr(32)  # the power of two that holds the words
NON_FINITE_WORD = tl.constexpr(23)
BIAS = tl.constexpr(352)
BLOCKS = tl.constexpr(8)  # of a turn
QUARTER = tl.constexpr(BLOCK_ELEMS.value // 4)
TURN = tl.constexpr(BLOCKS.value * BLOCK_ELEMS.value)


@triton.jit
def _halve(terms, HALF: tl.constexpr):
    """Element i of each block meets element i + HALF."""
    return tl.sum(tl.reshape(terms, [BLOCKS, 2, HALF]), axis=1)


@triton.jit
def _block_sums(x, KIND: tl.constexpr):
    """The sums of a turn's blocks, in double precision."""
    wide = x.to(tl.float64)
    if KIND == L2_NORM:
        terms = wide * wide
    else:
        terms = tl.where(wide < 0.0, -wide, wide)
    terms = tl.sum(tl.reshape(terms, [2, 2, BLOCKS, QUARTER]), axis=0)
    terms = tl.sum(terms, axis=0)
    terms = _halve(terms, 64)
    terms = _halve(terms, 32)
    terms = _halve(terms, 16)
    terms = _halve(terms, 8)
    terms = _halve(terms, 4)
    terms = _halve(terms, 2)
    return tl.reshape(_halve(terms, 1), [BLOCKS, 1])


@triton.jit
def _add_sums(words, sums):
    """The words, with the digits of blocks' sums added."""
    lanes = tl.arange(0, LANES)[None, :]
    is_finite = (sums.to(tl.int64, bitcast=True) >> 52) != 0x7FF  # no sum is negative
    counts = is_finite & (sums != 0.0)
    bits = tl.where(counts, sums, 1.0).to(tl.int64, bitcast=True)
    mantissa = (bits & 0xFFFFFFFFFFFFF) | 0x10000000000000
    place = (bits >> 52) - (1075 - BIAS)  # of the mantissa's last bit; never below 0
    digit = place // 32
    shift = place % 32
    # 53 bits shifted by up to 31: unsigned, for what leaves at the top comes back as `high`.
    low = mantissa.to(tl.uint64) << shift.to(tl.uint64)
    high = (mantissa >> 1) >> (63 - shift)
    none = mantissa * 0
    found = tl.where(lanes == digit, (low & 0xFFFFFFFF).to(tl.int64), none)
    found += tl.where(lanes == digit + 1, (low >> 32).to(tl.int64), none)
    found += tl.where(lanes == digit + 2, high, none)
    found = tl.where(counts, found, 0)
    found += ((lanes == NON_FINITE_WORD) & (is_finite == 0)).to(tl.int64)
    return words + found


@triton.jit
def _add_largest(words, x):
    """The words, with blocks' largest magnitudes' bits taken in; those of a NaN exceed all."""
    lanes = tl.arange(0, LANES)[None, :]
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(tl.max(tl.reshape(magnitudes, [4, BLOCKS, QUARTER]), axis=0), axis=1)
    most = tl.reshape(most, [BLOCKS, 1]).to(tl.int64)
    is_finite = most < 0x7F800000
    largest = tl.where(is_finite & (lanes == 0), most, 0)
    return tl.maximum(words, largest) + ((lanes == NON_FINITE_WORD) & (is_finite == 0)).to(tl.int64)


@triton.jit
def no_words():
    """The words of no block, one set for each block of a turn."""
    return tl.zeros([BLOCKS, LANES], tl.int64)


@triton.jit
def add_words(address, words, KIND: tl.constexpr):
    """Adds a program's words to those in memory, beside other programs."""
    lanes = tl.arange(0, LANES)
    here = word64(address) + lanes
    total = tl.sum(words, axis=0)
    if KIND == INF:
        most = tl.max(words, axis=0)
        tl.atomic_max(here, most, mask=lanes == 0, sem="relaxed", scope="gpu")
        tl.atomic_add(here, total, mask=lanes == NON_FINITE_WORD, sem="relaxed", scope="gpu")
    else:
        used = (lanes < WORDS) & (total != 0)
        tl.atomic_add(here, total, mask=used, sem="relaxed", scope="gpu")


@triton.jit
def _turn(words, out, sources, at, size, NORM: tl.constexpr, MASKED: tl.constexpr):
    """One turn, ``at`` elements behind the sources' first; ``out`` is the address of that one."""
    rows = tl.arange(0, 4 * BLOCKS)[:, None]
    here = rows % BLOCKS * BLOCK_ELEMS + rows // BLOCKS * QUARTER + tl.arange(0, QUARTER)[None, :]
    mask = at + here < size
    x = gradient(sources, at, here, mask, NORM.grad, NORM.divisor, MASKED)
    if NORM.stores:
        place = pointer(out + at * 4, tl.float32, not MASKED) + here
        if NORM.accumulates:
            if MASKED:
                x = tl.load(place, mask=mask, other=0.0) + x
            else:
                x = tl.load(place) + x
        if MASKED:
            tl.store(place, x, mask=mask)
        else:
            tl.store(place, x)
    if MASKED:
        x = tl.where(mask, x, 0.0)
    if NORM.kind == INF:
        return _add_largest(words, x)
    else:
        return _add_sums(words, _block_sums(x, NORM.kind))


@triton.jit
def reduce_run(words, out, sources, begin, end, NORM: tl.constexpr):
    """Stores the gradients of elements [begin, end) of a chunk, and sums their norm.

    Args:
        words: of the blocks before.
        out: where the chunk's FP32 gradients go; of no meaning unless NORM.stores.
        sources: addresses of every version of the gradient of element ``begin``.
        begin: a multiple of BLOCK_ELEMS.
        end: behind the last element.
        NORM: a NormKind.

    Returns:
        The words with those of these blocks.
    """
    size = end - begin
    aligned = is_aligned(sources)
    if NORM.stores:
        aligned = aligned & is_aligned((out,))
    here = out + begin * 4
    whole = tl.where(aligned, size // TURN * TURN, size * 0)
    for at in range(begin * 0, whole, TURN):
        words = _turn(words, here, sources, at, size, NORM, False)
    for at in range(whole, size, TURN):
        words = _turn(words, here, sources, at, size, NORM, True)
    return words


@triton.jit(do_not_specialize=["grad", "words", "elems"])
def grad_norm_kernel(grad, words, elems, NORM: tl.constexpr):
    """Grid: any number of blocks, which share the gradient.

    Args:
        grad: its address.
        words: address of the norm's words, which are added to.
        elems: of the gradient.
        NORM: a NormKind, that stores nothing and whose divisor is 1.
    """
    zero = tl.full((), 0, tl.int64)
    begin, end = part_of(elems + zero, tl.program_id(0), tl.num_programs(0))
    ITEM: tl.constexpr = NORM.grad.primitive_bitwidth // 8
    source = grad + zero + begin * ITEM
    found = reduce_run(no_words(), zero, (source,), begin, end, NORM)
    add_words(words + zero, found, NORM.kind)
