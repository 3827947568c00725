"""The second pass of a step: each rank updates its shard, and every rank's bucket gets the result.

The Triton twin of ringcomm/optimizer/fused_steps.h:

  direct   each rank stores its results in its own bucket and in the peers'.
  ring     each rank updates its chunk, then ring all-gather of the parameters.
"""

import triton
import triton.language as tl

from .adamw_shard import PARAMS, own_params, shard_word, update_run
from .all_gather import all_gather_ring
from .buckets import accept, chunk_elems, dests_of, offer, return_offers, slice_of
from .call import RUNTIME, begin_call, end_call, of_rank
from .state import RANK, get


@triton.jit
def gather_parameters_ring(ws, shard, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """Every rank's chunk to every rank, around the ring."""
    ITEM: tl.constexpr = KIND.param.primitive_bitwidth // 8
    params = shard_word(shard, PARAMS)
    chunks = (params, elems * ITEM, chunk_elems(elems, G) * ITEM)
    own = own_params(shard, KIND)
    if ITEM == 4:
        status = all_gather_ring(ws, own, chunks, status, tl.int32, G.blocks_of_4)
    else:
        status = all_gather_ring(ws, own, chunks, status, tl.int16, G.blocks_of_2)
    return status


@triton.jit
def adamw_all_gather_direct(ws, shard, grad, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """The direct form; ``grad`` is the address of the chunk's gradient."""
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    PARAM: tl.constexpr = KIND.param.primitive_bitwidth // 8
    none = elems * 0
    status = offer(ws, none, shard_word(shard, PARAMS), elems, status, ITEM, G)
    status = accept(ws, none, elems, status, ITEM, PARAM, G)
    origin, begin, end = slice_of(ws, elems, get(ws, RANK), G)
    if status == 0:
        dests = dests_of(ws, own_params(shard, KIND), origin * PARAM, G)
        update_run(shard, dests, (grad + begin * ITEM,), begin, end, KIND)
    return return_offers(ws, none, elems, status, ITEM, G)


@triton.jit
def adamw_all_gather_ring(ws, shard, grad, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """The ring form."""
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    _, begin, end = slice_of(ws, elems, get(ws, RANK), G)
    if status == 0:
        dests = (own_params(shard, KIND),)
        update_run(shard, dests, (grad + begin * ITEM,), begin, end, KIND)
    return gather_parameters_ring(ws, shard, elems, status, KIND, G)


@triton.jit(do_not_specialize=[*RUNTIME, "elems"])
def adamw_all_gather_kernel(
    tables, inputs, outputs, elems, timeout_ns, call,
    RING: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: by rank of the launch: addresses of its RankTable, of its chunk's
            gradient, and of its AdamWShard.
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
    grad = of_rank(inputs, rank)
    shard = of_rank(outputs, rank)
    if RING and G.world > 1:
        status = adamw_all_gather_ring(ws, shard, grad, count, status, KIND, G)
    else:
        status = adamw_all_gather_direct(ws, shard, grad, count, status, KIND, G)
    end_call(ws, status, G)
