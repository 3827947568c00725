# SPDX-License-Identifier: Apache-2.0
"""Kernels that only the tests use."""

import triton
import triton.language as tl

from ringcomm._tl.collectives import most_pieces
from ringcomm._tl.endpoint import chunk_of, slice_of
from ringcomm._tl.moving import accumulate, copy, pointer, reduce, round_to
from ringcomm._tl.quantization import (
    dequantize_blocks,
    load_quantized,
    quantize_blocks,
    store_quantized,
)
from ringcomm._tl.words import channel_line, header_at, link_line, slot_at, word64


@triton.jit
def offsets_kernel(out, stream, channel, peer, epoch, G: tl.constexpr):
    """Stores the library's offsets of a signal, epoch and channel line, a slot and a header."""
    zero = tl.full((), 0, tl.int64)
    found = word64(zero + out)
    tl.store(found, link_line(zero, 0, stream, channel, peer, G))
    tl.store(found + 1, link_line(zero, 2, stream, channel, peer, G))
    tl.store(found + 2, channel_line(zero, channel, G))
    tl.store(found + 3, slot_at(zero, stream, channel + zero, peer + zero, epoch + zero, G))
    tl.store(found + 4, header_at(zero, stream, channel + zero, peer + zero, epoch + zero, G))


@triton.jit
def chunks_kernel(out, total_bytes, chunk_bytes, rank, channel, G: tl.constexpr):
    """Stores the begin of a channel's slice of a chunk, and its size."""
    zero = tl.full((), 0, tl.int64)
    begin, size = chunk_of(zero, total_bytes + zero, chunk_bytes + zero, rank + zero)
    begin, size = slice_of(begin, size, channel + zero, G)
    tl.store(word64(zero + out), begin)
    tl.store(word64(zero + out) + 1, size)


@triton.jit
def rounds_kernel(out, total_bytes, chunk_bytes, channel, G: tl.constexpr):
    """Stores the number of rounds of a ring on a channel."""
    zero = tl.full((), 0, tl.int64)
    chunks = (zero, total_bytes + zero, chunk_bytes + zero)
    tl.store(word64(zero + out), most_pieces(chunks, channel + zero, G))


@triton.jit
def quantize_kernel(
    out, source, elems, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr
):
    """Quantizes a run of numbers, BLOCKS blocks per program."""
    zero = tl.full((), 0, tl.int64)
    first = tl.program_id(0) * BLOCKS
    here = (first + tl.arange(0, BLOCKS)[:, None]) * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(pointer(zero + source, DTYPE, False) + here, mask=here < elems, other=0.0)
    values, words = quantize_blocks(x, FORMAT)
    store_quantized(out, elems, first, values, words, FORMAT)


@triton.jit
def dequantize_and_sum_kernel(
    out, source, elems, stride, COUNT: tl.constexpr, DIVISOR: tl.constexpr, DTYPE: tl.constexpr,
    BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Sums COUNT quantized runs, ``stride`` bytes apart, in order; divides unless by 1."""
    zero = tl.full((), 0, tl.int64)
    first = tl.program_id(0) * BLOCKS
    values, words = load_quantized(source, elems, first, BLOCKS, FORMAT)
    total = dequantize_blocks(values, words, FORMAT)
    for i in tl.static_range(1, COUNT):
        values, words = load_quantized(zero + source + i * stride, elems, first, BLOCKS, FORMAT)
        total = accumulate(total, dequantize_blocks(values, words, FORMAT))
    if DIVISOR > 1:
        total = tl.div_rn(total, tl.full(total.shape, DIVISOR, tl.float32))
    here = (first + tl.arange(0, BLOCKS)[:, None]) * 128 + tl.arange(0, 128)[None, :]
    tl.store(pointer(zero + out, DTYPE, False) + here, round_to(total, DTYPE), mask=here < elems)


@triton.jit
def sum_kernel(target, first, stride, count, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Sums sources that are ``stride`` bytes apart, as the collectives do."""
    sources = (first,)
    for i in tl.static_range(1, COUNT):
        sources += (first + i * stride,)  # type: ignore[assignment]
    reduce(target, sources, count, DTYPE, 1)


@triton.jit
def serial_sum_kernel(target, first, stride, count, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Sums as sum_kernel does, but each load waits behind a barrier for the previous source."""
    BLOCK: tl.constexpr = 2048
    lanes = tl.arange(0, BLOCK)
    for i in range(0, count, BLOCK):
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(0, COUNT):
            x = tl.load(pointer(first + source * stride, DTYPE, True) + i + lanes)
            total = accumulate(total, x)
            tl.debug_barrier()
        tl.store(pointer(target, DTYPE, True) + i + lanes, round_to(total, DTYPE))


@triton.jit
def copy_kernel(target, source, count, DTYPE: tl.constexpr):
    copy(target, source, count, DTYPE)
