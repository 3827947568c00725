"""Reduce-scatter of gradients into FP32 shards, with the norm of the result on the way out.

The Triton twin of ringcomm/optimizer/fused_steps.h:

  direct   1 hop: the sum in rank order in FP32, and not rounded again.
  ring     W-1 hops, with partial sums in the gradients' type; the last hop's sum stays in FP32.
"""

import triton
import triton.language as tl

from .buckets import accept, chunk_elems, offer, return_offers, slice_of
from .call import RUNTIME, begin_call, end_call, of_rank
from .grad_norm import add_words, no_words, reduce_run
from .reduce_scatter import reduce_ring, sources_of
from .state import RANK, get
from .words import word64


@triton.jit
def store_norm(words, out, sources, begin, size_bytes, DTYPE: tl.constexpr, NORM: tl.constexpr):
    """The last hop of the ring form; as :func:`reduce_ring` wants it."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first = begin // ITEM
    return reduce_run(words, out, sources, first, first + size_bytes // ITEM, NORM)


@triton.jit
def grad_chunks(grads, elems, ITEM: tl.constexpr, G: tl.constexpr):
    """A bucket's even cut, in bytes."""
    return (grads, elems * ITEM, chunk_elems(elems, G) * ITEM)


@triton.jit
def reduce_scatter_norm_direct(ws, grads, out, elems, status, NORM: tl.constexpr, G: tl.constexpr):
    """The direct form; returns this block's words and the status."""
    ITEM: tl.constexpr = NORM.grad.primitive_bitwidth // 8
    words = no_words()
    status = offer(ws, grads, grads * 0, elems, status, ITEM, G)
    status = accept(ws, grads, elems, status, ITEM, 0, G)
    origin, begin, end = slice_of(ws, elems, get(ws, RANK), G)
    if status == 0:
        sources = sources_of(ws, grads + (origin + begin) * ITEM, G)
        words = reduce_run(words, out, sources, begin, end, NORM)
    status = return_offers(ws, grads, elems, status, ITEM, G)
    return words, status


@triton.jit(do_not_specialize=[*RUNTIME, "elems"])
def reduce_scatter_norm_kernel(
    tables, inputs, outputs, elems, timeout_ns, call,
    RING: tl.constexpr, NORM: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: by rank of the launch: addresses of its RankTable, of its bucket of
            gradients, and of two addresses: of its FP32 shard, and of the norm's words, which are
            added to.
        elems: of the bucket.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: the ring form, else the direct one.
        NORM: a NormKind.
        G: the communicator's Geometry.
    """
    ws, status = begin_call(tables, timeout_ns, call, G)
    rank = tl.program_id(1)
    count = elems + tl.full((), 0, tl.int64)
    grads = of_rank(inputs, rank)
    results = word64(of_rank(outputs, rank))
    out = tl.load(results)
    if RING and G.world > 1:
        ITEM: tl.constexpr = NORM.grad.primitive_bitwidth // 8
        BLOCKS: tl.constexpr = G.blocks_of_4 if ITEM == 4 else G.blocks_of_2
        chunks = grad_chunks(grads, count, ITEM, G)
        words, status = reduce_ring(
            ws, chunks, out, no_words(), status, NORM.grad, store_norm, NORM, BLOCKS
        )
    else:
        words, status = reduce_scatter_norm_direct(ws, grads, out, count, status, NORM, G)
    if status == 0:
        add_words(tl.load(results + 1), words, NORM.kind)
    end_call(ws, status, G)
