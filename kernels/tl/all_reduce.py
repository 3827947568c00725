"""All-reduce: every rank ends with the reduction of everybody's buffer.

B bytes, W ranks; a reduce-scatter, then an all-gather of the results, in one kernel:

  direct   2 hops, 2(W-1)/W * B bytes; sums in rank order with one rounding.
  ring     2(W-1) hops, 2(W-1)/W * B bytes.

The CUDA kernels overlap the two halves segment by segment, and have a form of one hop for small
buffers (ringcomm/collectives/all_reduce.h); here the second half begins when a channel's first
has ended.
"""

import triton
import triton.language as tl

from .all_gather import all_gather_direct, all_gather_ring
from .call import RUNTIME, begin_call, end_call, of_rank
from .endpoint import chunk_of
from .reduce_scatter import reduce_alone, reduce_scatter_direct, reduce_scatter_ring
from .state import RANK, get


@triton.jit(do_not_specialize=[*RUNTIME, "size_bytes"])
def all_reduce_kernel(
    tables, inputs, outputs, size_bytes, chunk_bytes, timeout_ns, call,
    RING: tl.constexpr, DTYPE: tl.constexpr, MOVED: tl.constexpr, DIVISOR: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: by rank of the launch: addresses of its RankTable, of its
            size_bytes bytes of input, and of as many of output; both may be the same.
        size_bytes: of the buffer.
        chunk_bytes: of one rank's part of it, a multiple of 64.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: the ring form, else the direct one.
        DTYPE: tl.float32, tl.bfloat16 or tl.float16.
        MOVED: an integer type as wide as DTYPE.
        DIVISOR: 1 for SUM, the world size for AVG.
        G: the communicator's Geometry.
    """
    ws, status = begin_call(tables, timeout_ns, call, G)
    rank = tl.program_id(1)
    zero = tl.full((), 0, tl.int64)
    total = size_bytes + zero
    source = of_rank(inputs, rank)
    target = of_rank(outputs, rank)
    given = (source, total, chunk_bytes + zero)
    wanted = (target, total, chunk_bytes + zero)
    own, _ = chunk_of(target, total, chunk_bytes + zero, get(ws, RANK))
    if G.world == 1:
        reduce_alone(ws, source, target, total, DTYPE, G)
    elif RING:
        status = reduce_scatter_ring(ws, given, own, status, DTYPE, DIVISOR, G)
        status = all_gather_ring(ws, own, wanted, status, MOVED, G)
    else:
        status = reduce_scatter_direct(ws, given, own, status, DTYPE, DIVISOR, G)
        status = all_gather_direct(ws, own, wanted, status, MOVED, G)
    end_call(ws, status, G)
