# SPDX-License-Identifier: Apache-2.0
"""Kernels that hide communication behind a computation: two matrix products and an RMS norm."""

import triton
import triton.language as tl

from .device import (
    accumulate,
    advance_epoch,
    barrier_sys,
    begin_kernel,
    end_kernel,
    get,
    is_aligned,
    peer_address,
    peer_at,
    pointer,
    rank_of,
    round_to,
    signal_release_gpu,
    signal_release_sys,
    wait_acquire_gpu,
    wait_acquire_sys,
    word_of,
)
from .hooks import INTERPRETED

# --------------------------------------------------------------------------------------------------
# All-gather fused with a matrix product that processes rows as they arrive.
#
# out[W*m, n] = cat(every rank's a[m, k]) @ b[k, n], in one kernel of two kinds of blocks:
#
#  collecting  the first COMM blocks pull the peers' rows, nearest peer first, in chunks of whole
#              tiles, (W-1) * m * k elements in all, and set a word in ``arrived`` for each chunk.
#  computing   all other blocks take tiles of out in the same order: first this rank's rows, which
#              need no wait, then the rows of the nearest peer, and so on.
#
# Words between ranks are int32 [2 * COMM, world]. Row c says for each rank whether its rows can be
# read, row COMM + c whether its collecting block c has read this rank's rows. Words between blocks
# are int32 too: ``arrived`` [world, CHUNKS], ``epochs`` [computing blocks].
# --------------------------------------------------------------------------------------------------


@triton.jit
def chunk_rows(m, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the rows of a chunk, whole tiles: at most CHUNKS chunks hold ``m`` rows."""
    tiles = (m + (BLOCK_M - 1)) // BLOCK_M
    return (tiles + (CHUNKS - 1)) // CHUNKS * BLOCK_M


@triton.jit
def collect_from(
    peer, shards, arrived, gathered, m, k, epoch,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Copies every COMM-th chunk of the rows of ``peer``, which has signalled that they are
    ready."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rows = chunk_rows(m, CHUNKS, BLOCK_M)
    for chunk in range(tl.program_id(0), CHUNKS, COMM):
        first = tl.minimum(chunk * rows, m).to(tl.int64)
        count = (tl.minimum(first + rows, m) - first) * k
        target = gathered + (peer * m + first) * k * ITEM
        get(shards, peer, first * k, target, count, DTYPE)
        signal_release_gpu(arrived + 4 * (peer * CHUNKS + chunk), epoch)


@triton.jit
def collect(
    ws, shards, words, arrived, gathered, m, k, status,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Runs a collecting block: offers this rank's rows, reads the peers' rows, and waits until
    the peers have read this rank's rows: the caller may overwrite them after the kernel."""
    me = rank_of(ws)
    block = tl.program_id(0)
    epoch = advance_epoch(word_of(words, me, block, me, G))
    for distance in range(1, G.world):
        if status == 0:
            peer = peer_at(ws, distance, G)
            signal_release_sys(word_of(words, peer, block, me, G), epoch)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        ready = word_of(words, me, block, peer, G)
        status = wait_acquire_sys(ws, ready, peer, epoch, distance, status, G)
        if status == 0:
            collect_from(peer, shards, arrived, gathered, m, k, epoch, DTYPE, COMM, CHUNKS, BLOCK_M)
            signal_release_sys(word_of(words, peer, COMM + block, me, G), epoch)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        read = word_of(words, me, COMM + block, peer, G)
        status = wait_acquire_sys(ws, read, peer, epoch, G.world + distance, status, G)
    return end_kernel(ws, status, G)


@triton.jit
def multiply_tile(
    a, b, out, rows, last_row, out_row, cols, shape, strides,
    DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Computes one tile of out: rows of ``a`` before ``last_row``, times columns of ``b``.

    ``rows`` index ``a``; ``rows + out_row`` index ``out``. ``shape`` is (n, k).
    """
    n, k = shape
    inner = tl.arange(0, BLOCK_K)
    left = pointer(a, DTYPE, ALIGNED) + rows.to(tl.int64)[:, None] * k
    right = pointer(b, DTYPE, ALIGNED) + cols.to(tl.int64)[None, :] * strides[1]
    total = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    in_rows = (rows < last_row)[:, None]
    in_cols = (cols < n)[None, :]
    for begin in range(0, k, BLOCK_K):
        here = begin + inner
        x = tl.load(left + here[None, :], mask=in_rows & (here < k)[None, :], other=0.0)
        y_at = right + here.to(tl.int64)[:, None] * strides[0]
        y = tl.load(y_at, mask=in_cols & (here < k)[:, None], other=0.0)
        if INTERPRETED:
            # The interpreter's product would take the bits of a bfloat16 for an integer.
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision="ieee")
    to = pointer(out, DTYPE, ALIGNED) + (rows + out_row).to(tl.int64)[:, None] * n
    tl.store(to + cols[None, :], round_to(total, DTYPE), mask=in_rows & in_cols)


@triton.jit
def compute(
    ws, shards, arrived, epochs, gathered, b, out, m, shape, strides, status,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Runs a computing block: its share of the tiles of out, in the order in which rows arrive."""
    me = rank_of(ws)
    block = tl.program_id(0) - COMM
    epoch = advance_epoch(epochs + 4 * block)
    across = (shape[0] + (BLOCK_N - 1)) // BLOCK_N
    tiles = (m + (BLOCK_M - 1)) // BLOCK_M * across
    rows_per_chunk = chunk_rows(m, CHUNKS, BLOCK_M)
    for i in range(block, tiles * G.world, tl.num_programs(0) - COMM):
        distance = i // tiles
        first = i % tiles // across * BLOCK_M
        cols = i % across * BLOCK_N + tl.arange(0, BLOCK_N)
        source = peer_at(ws, distance, G)
        # This rank's rows are in the caller's buffer; ``gathered`` holds the peers' rows.
        a = peer_address(shards, me)
        at = source * 0
        if distance > 0:
            chunk = first // rows_per_chunk
            word = arrived + 4 * (source * CHUNKS + chunk)
            status = wait_acquire_gpu(ws, word, epoch, status, G)
            a = gathered
            at = source * m
        if status == 0:
            rows = at + first + tl.arange(0, BLOCK_M)
            if is_aligned((a, b, out)):
                multiply_tile(
                    a, b, out, rows, at + m, source * m - at, cols, shape, strides,
                    DTYPE, BLOCK_K, True,
                )  # fmt: skip
            else:
                multiply_tile(
                    a, b, out, rows, at + m, source * m - at, cols, shape, strides,
                    DTYPE, BLOCK_K, False,
                )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def all_gather_matmul_kernel(
    table, timeout_ns, shards, words, arrived, epochs, gathered, b, out, m, n, k,
    stride_k, stride_n,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Gathers and multiplies. Grid: COMM collecting blocks, then a fixed number of computing ones.

    Args:
        table, timeout_ns: from the context.
        shards: addresses of every rank's a.
        words: addresses of every rank's words.
        arrived, epochs: addresses of words of this rank's blocks.
        gathered: address of a buffer of W*m rows of k elements; this rank's rows stay unused.
        b: address of the right factor, with strides ``stride_k`` and ``stride_n``.
        out: address of the product, contiguous.
        m, n, k: sizes.
        DTYPE: type of all elements; products are summed in FP32.
        COMM, CHUNKS: collecting blocks, and chunks of a rank's rows, equal on all ranks.
        BLOCK_M, BLOCK_N, BLOCK_K: sizes of a tile.
        G: the communicator's Geometry.
    """
    zero = tl.full((), 0, tl.int64)
    none = tl.full((), 0, tl.int32)
    ws, status = begin_kernel(table, tl.program_id(0), timeout_ns, G)
    m = none + m
    n = none + n
    k = none + k
    if tl.program_id(0) < COMM:
        collect(
            ws, shards, words, zero + arrived, zero + gathered, m, k, status,
            DTYPE, COMM, CHUNKS, BLOCK_M, G,
        )  # fmt: skip
    else:
        compute(
            ws, shards, zero + arrived, zero + epochs, zero + gathered, zero + b, zero + out,
            m, (n, k), (stride_k, stride_n), status,
            DTYPE, COMM, CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K, G,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# A matrix product fused with the reduce-scatter of its rows.
#
# Every rank multiplies a[W*m, k] @ b[k, n]; rank r sums rows r*m to (r+1)*m of all ranks' products
# in rank order. One kernel has two kinds of blocks:
#
#  computing  the first blocks store each tile, rounded, in the inbox [W, m, n] of the rank that
#             sums it. They compute one chunk of rows after another, the peers' tiles of each chunk
#             first. A block increments its word in ``stored`` after its tiles of each chunk.
#  summing    the other COMM blocks each sum every COMM-th chunk: a block waits until all computing
#             blocks of its rank have stored the chunk, signals the peers, waits for the peers'
#             signals, and sums the chunk's rows in its inbox.
#
# Summing blocks have the highest indices, since in the interpreter blocks run one after another.
# Words between ranks are int32 [2 * COMM, world]. Row c counts, for each rank, the chunks that it
# has stored for summing block c of this rank. Row COMM + c counts, for each rank, the calls in
# which its summing block c has read its inbox. Words between blocks are int32 too: ``stored``
# [computing blocks] counts chunks, ``epochs`` [blocks] counts calls.
# --------------------------------------------------------------------------------------------------


@triton.jit
def store_products(
    ws, inboxes, stored, epoch, a, b, m, shape, strides, status,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Runs a computing block: its share of the tiles of each chunk, for all summing ranks."""
    me = rank_of(ws)
    block = tl.program_id(0)
    computing = tl.num_programs(0) - COMM
    across = (shape[0] + (BLOCK_N - 1)) // BLOCK_N
    rows_per_chunk = chunk_rows(m, CHUNKS, BLOCK_M)
    tiles = rows_per_chunk // BLOCK_M * across
    for chunk in range(CHUNKS):
        # Chunks start with different blocks, so that no block gets an extra tile of every chunk.
        turn = chunk * tiles * G.world % computing
        for i in range((block + computing - turn) % computing, tiles * G.world, computing):
            owner = peer_at(ws, (i // tiles + 1) % G.world, G)
            first = chunk * rows_per_chunk + i % tiles // across * BLOCK_M
            cols = i % across * BLOCK_N + tl.arange(0, BLOCK_N)
            if (first < m) & (status == 0):
                at = owner * m
                rows = at + first + tl.arange(0, BLOCK_M)
                inbox = peer_address(inboxes, owner)
                if is_aligned((a, b, inbox)):
                    multiply_tile(
                        a, b, inbox, rows, at + m, me * m - at, cols, shape, strides,
                        DTYPE, BLOCK_K, True,
                    )  # fmt: skip
                else:
                    multiply_tile(
                        a, b, inbox, rows, at + m, me * m - at, cols, shape, strides,
                        DTYPE, BLOCK_K, False,
                    )  # fmt: skip
        if status == 0:
            signal_release_gpu(stored + 4 * block, (epoch - 1) * CHUNKS + chunk + 1)
    end_kernel(ws, status, G)


@triton.jit
def sum_rows(
    inbox, out, first, count, whole, DTYPE: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr
):
    """Sums elements [first, first + count) of all ranks' products of ``whole`` elements each."""
    WORLD: tl.constexpr = G.world
    source = pointer(inbox, DTYPE, False) + first
    target = pointer(out, DTYPE, False) + first
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < count
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(WORLD):
            total = accumulate(total, tl.load(source + peer * whole + at, mask=mask, other=0.0))
        tl.store(target + at, round_to(total, DTYPE), mask=mask)


@triton.jit
def sum_products(
    ws, inboxes, words, stored, epoch, out, m, n, status,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Runs a summing block: sums its chunks, then waits until the peers have read their inboxes,
    since the next call stores there."""
    me = rank_of(ws)
    computing = tl.num_programs(0) - COMM
    block = tl.program_id(0) - computing
    rows_per_chunk = chunk_rows(m, CHUNKS, BLOCK_M)
    for turn in range(CHUNKS // COMM):
        chunk = block + turn * COMM
        for i in range(computing):
            done = (epoch - 1) * CHUNKS + chunk + 1
            status = wait_acquire_gpu(ws, stored + 4 * i, done, status, G)
        tick = (epoch - 1) * (CHUNKS // COMM) + turn + 1
        for distance in range(1, G.world):
            if status == 0:
                peer = peer_at(ws, distance, G)
                signal_release_sys(word_of(words, peer, block, me, G), tick)
        for distance in range(1, G.world):
            peer = peer_at(ws, distance, G)
            there = word_of(words, me, block, peer, G)
            status = wait_acquire_sys(ws, there, peer, tick, distance, status, G)
        if status == 0:
            first = tl.minimum(chunk * rows_per_chunk, m).to(tl.int64)
            count = (tl.minimum(first + rows_per_chunk, m) - first) * n
            whole = (first * 0 + m) * n
            sum_rows(peer_address(inboxes, me), out, first * n, count, whole, DTYPE, BLOCK, G)
    for distance in range(1, G.world):
        if status == 0:
            peer = peer_at(ws, distance, G)
            signal_release_sys(word_of(words, peer, COMM + block, me, G), epoch)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        read = word_of(words, me, COMM + block, peer, G)
        status = wait_acquire_sys(ws, read, peer, epoch, G.world + distance, status, G)
    end_kernel(ws, status, G)


@triton.jit(do_not_specialize=["m"])
def matmul_reduce_scatter_kernel(
    table, timeout_ns, inboxes, words, stored, epochs, a, b, out, m, n, k,
    stride_k, stride_n,
    DTYPE: tl.constexpr, COMM: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Multiplies and reduces. Grid: a fixed number of computing blocks, then COMM summing ones.

    Args:
        table, timeout_ns: from the context.
        inboxes: addresses of every rank's inbox of W*m rows of n elements.
        words: addresses of every rank's words.
        stored, epochs: addresses of words of this rank's blocks.
        a: address of the left factor, contiguous, of W*m rows.
        b: address of the right factor, with strides ``stride_k`` and ``stride_n``.
        out: address of this rank's m rows of the sum, contiguous.
        m, n, k: sizes.
        DTYPE: type of all elements; products and their sums over ranks are FP32, then rounded.
        COMM, CHUNKS: summing blocks, and chunks of a rank's rows, a multiple of COMM; both are
            equal on all ranks.
        BLOCK_M, BLOCK_N, BLOCK_K: sizes of a tile.
        G: the communicator's Geometry.
    """
    zero = tl.full((), 0, tl.int64)
    none = tl.full((), 0, tl.int32)
    block = tl.program_id(0)
    ws, status = begin_kernel(table, block, timeout_ns, G)
    epoch = advance_epoch(zero + epochs + 4 * block)
    m = none + m
    n = none + n
    k = none + k
    if block < tl.num_programs(0) - COMM:
        store_products(
            ws, inboxes, zero + stored, epoch, zero + a, zero + b, m, (n, k),
            (stride_k, stride_n), status,
            DTYPE, COMM, CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K, G,
        )  # fmt: skip
    else:
        sum_products(
            ws, inboxes, words, zero + stored, epoch, zero + out, m, n, status,
            DTYPE, COMM, CHUNKS, BLOCK_M, BLOCK_M * BLOCK_N, G,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Reduce-scatter fused with the RMS norm of its result.
#
# Every rank has partial sums x[W*n, d]; rank r takes rows r*n to (r+1)*n of all ranks, sums them in
# rank order in FP32, adds a residual, divides each row by its root mean square and multiplies it by
# a weight. The sum stays in FP32 until then, and is written only on request: a rank reads (W-1) * n
# * d elements from peers and writes n * d.
# --------------------------------------------------------------------------------------------------


@triton.jit
def sum_row(
    partials, offset, cols, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, G: tl.constexpr
):
    """Returns a row's sum over all ranks' copies, from ``offset`` on, in rank order in FP32."""
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
    """Computes one row of the result, once all ranks' partial sums can be read."""
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
    """Computes this block's rows of the result."""
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
    """Sums and normalizes; block i takes rows i, i + blocks, ... Grid: equal on all ranks.

    Args:
        table, timeout_ns: from the context.
        partials: addresses of every rank's partial sums.
        words: addresses of every rank's words for barrier_sys().
        residual, weight, out, summed: addresses; residual is used if ADDS, summed if KEEPS; an
            unused address must be aligned.
        rows: rows of the result.
        eps: added to the mean square.
        D: elements of a row.
        BLOCK_D: D rounded up to a power of two.
        DTYPE: type of all elements.
        ADDS: there is a residual.
        KEEPS: the sum is stored too.
        G: the communicator's Geometry.
    """
    zero = tl.full((), 0, tl.int64)
    block = tl.program_id(0)
    ws, status = begin_kernel(table, block, timeout_ns, G)
    # After this barrier the blocks of this index read all ranks' partial sums.
    status = barrier_sys(ws, words, block, 0, status, G)
    if status == 0:
        me = rank_of(ws)
        more, factors = zero + residual, zero + weight
        to, sums = zero + out, zero + summed
        # Peers' partial sums are aligned as this rank's are: the heap allocates whole lines.
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
    # After this barrier no block reads partial sums: the callers may overwrite them.
    status = barrier_sys(ws, words, block, 1, status, G)
    end_kernel(ws, status, G)
