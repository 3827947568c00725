"""Kernels that only tests need."""

import triton
import triton.language as tl

from ringcomm._tl.endpoint import chunk_of, slice_of
from ringcomm._tl.moving import round_to
from ringcomm._tl.words import channel_line, header_at, link_line, slot_at, word64


@triton.jit
def offsets_kernel(out, stream, channel, peer, epoch, G: tl.constexpr):
    """Offsets of a signal, epoch and channel line, a slot and a header, as the library has them."""
    zero = tl.full((), 0, tl.int64)
    found = word64(out)
    tl.store(found, link_line(zero, 0, stream, channel, peer, G))
    tl.store(found + 1, link_line(zero, 2, stream, channel, peer, G))
    tl.store(found + 2, channel_line(zero, channel, G))
    tl.store(found + 3, slot_at(zero, stream, channel + zero, peer + zero, epoch + zero, G))
    tl.store(found + 4, header_at(zero, stream, channel + zero, peer + zero, epoch + zero, G))


@triton.jit
def chunks_kernel(out, total_bytes, chunk_bytes, rank, channel, G: tl.constexpr):
    """Stores where a channel's part of a chunk begins, and its size."""
    zero = tl.full((), 0, tl.int64)
    begin, size = chunk_of(zero, total_bytes + zero, chunk_bytes + zero, rank + zero)
    begin, size = slice_of(begin, size, channel + zero, G)
    tl.store(word64(out), begin)
    tl.store(word64(out) + 1, size)


@triton.jit
def rounding_kernel(out, source, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """FP32 rounded to another type."""
    here = tl.arange(0, COUNT)
    x = tl.load(source.to(tl.pointer_type(tl.float32), bitcast=True) + here)
    tl.store(out.to(tl.pointer_type(DTYPE), bitcast=True) + here, round_to(x, DTYPE))
