"""Reduce-scatter fused with the RMS norm of its result.

Every rank has partial sums x[W*n, d]; rank r takes rows r*n to (r+1)*n of all ranks, sums them in
rank order in FP32, adds a residual, divides each row by its root mean square and multiplies it by a
weight. The sum is never rounded on its way there, nor written unless it is asked for: (W-1) * n * d
elements are read from peers, n * d are written.
"""

import triton
import triton.language as tl

from .device import (
    accumulate,
    barrier_sys,
    begin_kernel,
    end_kernel,
    is_aligned,
    peer_address,
    pointer,
    rank_of,
    round_to,
)


@triton.jit
def sum_row(
    partials, offset, cols, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, G: tl.constexpr
):
    """The elements from ``offset`` on of all ranks' copies, summed in rank order in FP32."""
    WORLD: tl.constexpr = G.world
    total = tl.zeros(cols.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        row = pointer(peer_address(partials, peer), DTYPE, ALIGNED) + offset
        total = accumulate(total, tl.load(row + cols, mask=mask, other=0.0))
    return total


@triton.jit
def normalize_row(
    partials, residual, weight, out, summed, row, rows, me, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, ADDS: tl.constexpr,
    KEEPS: tl.constexpr, ALIGNED: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One row of the result, once all ranks' partial sums can be read."""
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    here = (tl.full((), 0, tl.int64) + row) * D
    total = sum_row(partials, me * rows * D + here, cols, mask, DTYPE, ALIGNED, G)
    if ADDS:
        more = tl.load(pointer(residual, DTYPE, ALIGNED) + here + cols, mask=mask, other=0.0)
        total = accumulate(total, more)
    if KEEPS:
        to = pointer(summed, DTYPE, ALIGNED) + here + cols
        tl.store(to, round_to(total, DTYPE), mask=mask)
    scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    factors = tl.load(pointer(weight, DTYPE, ALIGNED) + cols, mask=mask, other=0.0)
    normal = total * scale * factors.to(tl.float32)
    tl.store(pointer(out, DTYPE, ALIGNED) + here + cols, round_to(normal, DTYPE), mask=mask)


@triton.jit
def normalize_rows(
    partials, residual, weight, out, summed, rows, me, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, ADDS: tl.constexpr,
    KEEPS: tl.constexpr, ALIGNED: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """This block's rows."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        normalize_row(
            partials, residual, weight, out, summed, row, rows, me, eps,
            D, BLOCK_D, DTYPE, ADDS, KEEPS, ALIGNED, G,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def reduce_scatter_rms_norm_kernel(
    table, timeout_ns, partials, words, residual, weight, out, summed, rows, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, ADDS: tl.constexpr,
    KEEPS: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid: any number of blocks, equally many on all ranks; block i takes rows i, i + blocks, ...

    Args:
        table, timeout_ns: of the context.
        partials: addresses of every rank's partial sums.
        words: addresses of every rank's words of barrier_sys().
        residual, weight, out, summed: addresses; the first and the last count if ADDS and KEEPS,
            and are aligned if they do not.
        rows: of the result.
        eps: added to the mean square.
        D: elements of a row.
        BLOCK_D: the next power of two.
        DTYPE: of all elements.
        ADDS: there is a residual.
        KEEPS: the sum is wanted too.
        G: the communicator's Geometry.
    """
    zero = tl.full((), 0, tl.int64)
    block = tl.program_id(0)
    ws, status = begin_kernel(table, block, timeout_ns, G)
    # From here all ranks' blocks of this index read everybody's partial sums ...
    status = barrier_sys(ws, words, block, 0, status, G)
    if status == 0:
        me = rank_of(ws)
        more, factors = zero + residual, zero + weight
        to, sums = zero + out, zero + summed
        # The copies of partial sums lie as one's own does: the heap hands out whole lines.
        if is_aligned((peer_address(partials, me), more, factors, to, sums)):
            normalize_rows(
                partials, more, factors, to, sums, rows, me, eps,
                D, BLOCK_D, DTYPE, ADDS, KEEPS, True, G,
            )  # fmt: skip
        else:
            normalize_rows(
                partials, more, factors, to, sums, rows, me, eps,
                D, BLOCK_D, DTYPE, ADDS, KEEPS, False, G,
            )  # fmt: skip
    # ... and from here none of them does: the callers may store there again.
    status = barrier_sys(ws, words, block, 1, status, G)
    end_kernel(ws, status, G)
