"""A whole step in one pass: the reduced gradient is consumed by the update as it comes into being.

The Triton twin of ringcomm/optimizer/fused_steps.h:

  direct   each rank reads its chunk of all ranks' gradients, updates, and stores the parameters in
           all ranks' buckets.
  ring     partial sums go around the ring; the owner's last hop updates; ring all-gather.

The arithmetic is that of reduce_scatter_norm, then adamw_all_gather: the same bits.
"""

import triton
import triton.language as tl

from .adamw_all_gather import gather_parameters_ring
from .adamw_shard import PARAMS, own_params, shard_word, update_run
from .buckets import accept, dests_of, offer, return_offers, slice_of
from .call import RUNTIME, begin_call, end_call, of_rank
from .reduce_scatter import reduce_ring, sources_of
from .reduce_scatter_norm import grad_chunks
from .state import RANK, get


@triton.jit
def update_sum(kept, shard, sources, begin, size_bytes, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """The last hop of the ring form; as :func:`reduce_ring` wants it."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first = begin // ITEM
    update_run(shard, (own_params(shard, KIND),), sources, first, first + size_bytes // ITEM, KIND)
    return kept


@triton.jit
def one_pass_direct(ws, shard, grads, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """The direct form."""
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    PARAM: tl.constexpr = KIND.param.primitive_bitwidth // 8
    status = offer(ws, grads, shard_word(shard, PARAMS), elems, status, ITEM, G)
    status = accept(ws, grads, elems, status, ITEM, PARAM, G)
    origin, begin, end = slice_of(ws, elems, get(ws, RANK), G)
    if status == 0:
        sources = sources_of(ws, grads + (origin + begin) * ITEM, G)
        dests = dests_of(ws, own_params(shard, KIND), origin * PARAM, G)
        update_run(shard, dests, sources, begin, end, KIND)
    return return_offers(ws, grads, elems, status, ITEM, G)


@triton.jit
def one_pass_ring(ws, shard, grads, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """The ring form."""
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    BLOCKS: tl.constexpr = G.blocks_of_4 if ITEM == 4 else G.blocks_of_2
    chunks = grad_chunks(grads, elems, ITEM, G)
    _, status = reduce_ring(ws, chunks, shard, status, status, KIND.grad, update_sum, KIND, BLOCKS)
    return gather_parameters_ring(ws, shard, elems, status, KIND, G)


@triton.jit(do_not_specialize=[*RUNTIME, "elems"])
def reduce_scatter_adamw_all_gather_kernel(
    tables, inputs, outputs, elems, timeout_ns, call,
    RING: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: by rank of the launch: addresses of its RankTable, of its bucket of
            gradients, and of its AdamWShard.
        elems: of the bucket.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: the ring form, else the direct one.
        KIND: a ShardKind.
        G: the communicator's Geometry.
    """
    ws, status = begin_call(tables, timeout_ns, call, G)
    rank = tl.program_id(1)
    count = elems + tl.full((), 0, tl.int64)
    grads = of_rank(inputs, rank)
    shard = of_rank(outputs, rank)
    if RING and G.world > 1:
        status = one_pass_ring(ws, shard, grads, count, status, KIND, G)
    else:
        status = one_pass_direct(ws, shard, grads, count, status, KIND, G)
    end_call(ws, status, G)
