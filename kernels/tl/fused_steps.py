# SPDX-License-Identifier: Apache-2.0
"""The optimizer's collectives: norms, the two passes of a step, and a step in one pass.

They are the Triton twins of ringcomm/optimizer/fused_steps.h, over buckets in the heap.
"""

import triton
import triton.language as tl

from ringcomm._native import GRAD_NORM_KINDS, GRAD_NORM_WORDS

from .adamw import PARAMS, TILE_ELEMS, extent_of, gradient, own_params, shard_word, update_run
from .collectives import all_gather_ring, reduce_ring, sources_of
from .endpoint import (
    CONSUMED_WORD,
    NOT_IN_HEAP,
    RESULT_OFFSET,
    RUNTIME,
    await_slot,
    begin_call,
    begin_receive,
    commit_seen,
    commit_sent,
    end_call,
    my_header,
    of_rank,
    open_results,
    peer_at,
    publish_release_sys,
    receive,
    release_sys,
    write_header,
)
from .moving import is_aligned, pointer
from .state import CHANNEL, HEAP, RANK, RESULT, get, of_peer, sent
from .waiting import await_acquire_sys
from .words import PAIR, word64

# --------------------------------------------------------------------------------------------------
# Norms of gradients that do not depend on how the gradient is cut into shards.
#
# The Triton twin of ringcomm/optimizer/grad_norm.h: a tile of 512 elements is summed in double
# precision by halving it, and the tiles' sums are added exactly, as 32-bit digits of an integer. A
# program keeps these words in registers and adds them to memory once; integers add in any order.
#
# A turn has eight tiles, as a tensor of [quarter of a tile, tile] rows of 128 elements. Triton then
# gives each of the eight warps one or two whole tiles, and every halving stays in its warp.
# --------------------------------------------------------------------------------------------------

INF = tl.constexpr(GRAD_NORM_KINDS["inf"])
L2_NORM = tl.constexpr(GRAD_NORM_KINDS["l2"])
WORDS = tl.constexpr(GRAD_NORM_WORDS)
LANES = tl.constexpr(32)  # number of words, rounded up to a power of two
NON_FINITE_WORD = tl.constexpr(23)
BIAS = tl.constexpr(352)
TILES = tl.constexpr(8)  # of a turn
QUARTER = tl.constexpr(TILE_ELEMS.value // 4)
TURN = tl.constexpr(TILES.value * TILE_ELEMS.value)


@triton.jit
def _halve(terms, HALF: tl.constexpr):
    """Adds element i + HALF of each tile to element i."""
    return tl.sum(tl.reshape(terms, [TILES, 2, HALF]), axis=1)


@triton.jit
def _tile_sums(x, KIND: tl.constexpr):
    """Returns the sums of a turn's tiles, in double precision."""
    wide = x.to(tl.float64)
    if KIND == L2_NORM:
        terms = wide * wide
    else:
        terms = tl.where(wide < 0.0, -wide, wide)
    terms = tl.sum(tl.reshape(terms, [2, 2, TILES, QUARTER]), axis=0)
    terms = tl.sum(terms, axis=0)
    terms = _halve(terms, 64)
    terms = _halve(terms, 32)
    terms = _halve(terms, 16)
    terms = _halve(terms, 8)
    terms = _halve(terms, 4)
    terms = _halve(terms, 2)
    return tl.reshape(_halve(terms, 1), [TILES, 1])


@triton.jit
def _add_sums(words, sums):
    """Returns the words with the digits of the tiles' sums added."""
    lanes = tl.arange(0, LANES)[None, :]
    is_finite = (sums.to(tl.int64, bitcast=True) >> 52) != 0x7FF  # no sum is negative
    counts = is_finite & (sums != 0.0)
    bits = tl.where(counts, sums, 1.0).to(tl.int64, bitcast=True)
    mantissa = (bits & 0xFFFFFFFFFFFFF) | 0x10000000000000
    bit = (bits >> 52) - (1075 - BIAS)  # position of the mantissa's last bit; never below 0
    digit = bit // 32
    shift = bit % 32
    # 53 bits shifted by up to 31, as unsigned: `high` takes the bits that leave at the top.
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
    """Returns the words with the bits of the tiles' largest magnitudes; a NaN is the largest."""
    lanes = tl.arange(0, LANES)[None, :]
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.max(tl.max(tl.reshape(magnitudes, [4, TILES, QUARTER]), axis=0), axis=1)
    most = tl.reshape(most, [TILES, 1]).to(tl.int64)
    is_finite = most < 0x7F800000
    largest = tl.where(is_finite & (lanes == 0), most, 0)
    return tl.maximum(words, largest) + ((lanes == NON_FINITE_WORD) & (is_finite == 0)).to(tl.int64)


@triton.jit
def no_words():
    """Returns words that are all 0, one set for each tile of a turn."""
    return tl.zeros([TILES, LANES], tl.int64)


@triton.jit
def add_words(address, words, KIND: tl.constexpr):
    """Adds a program's words to the words in memory, to which other programs add as well."""
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
    """Reduces the turn at element ``at`` of the sources and ``out``, and adds the turn's norm."""
    rows = tl.arange(0, 4 * TILES)[:, None]
    here = rows % TILES * TILE_ELEMS + rows // TILES * QUARTER + tl.arange(0, QUARTER)[None, :]
    mask = at + here < size
    x = gradient(sources, at, here, mask, NORM.grad, NORM.divisor, MASKED)
    if NORM.stores:
        pointers = pointer(out + at * 4, tl.float32, not MASKED) + here
        if NORM.accumulates:
            if MASKED:
                x = tl.load(pointers, mask=mask, other=0.0) + x
            else:
                x = tl.load(pointers) + x
        if MASKED:
            tl.store(pointers, x, mask=mask)
        else:
            tl.store(pointers, x)
    if MASKED:
        x = tl.where(mask, x, 0.0)
    if NORM.kind == INF:
        return _add_largest(words, x)
    else:
        return _add_sums(words, _tile_sums(x, NORM.kind))


@triton.jit
def reduce_run(words, out, sources, begin, end, NORM: tl.constexpr):
    """Stores the gradients of elements [begin, end) of a chunk, and sums their norm.

    Args:
        words: the words of the tiles so far.
        out: address of the chunk's FP32 gradients; unused unless NORM.stores.
        sources: addresses of the values to sum for element ``begin``: gradients or partial sums.
        begin: a multiple of TILE_ELEMS.
        end: index after the last element.
        NORM: a NormKind.

    Returns:
        The words with these tiles added.
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
    """Sums a gradient's norm. Grid: any number of blocks, which share the gradient.

    Args:
        grad: address of the gradient.
        words: address of the words to which the kernel adds the norm.
        elems: elements of the gradient.
        NORM: a NormKind that stores nothing and has divisor 1.
    """
    zero = tl.full((), 0, tl.int64)
    begin, end = extent_of(elems + zero, tl.program_id(0), tl.num_programs(0))
    ITEM: tl.constexpr = NORM.grad.primitive_bitwidth // 8
    source = grad + zero + begin * ITEM
    found = reduce_run(no_words(), zero, (source,), begin, end, NORM)
    add_words(words + zero, found, NORM.kind)


# --------------------------------------------------------------------------------------------------
# Functions that the optimizer's collectives share: chunks in whole tiles, and offers.
#
# The Triton twin of ringcomm/optimizer/buckets.h. Buckets are in the heap: every rank reads its
# chunk of the peers' gradients in place, and stores its new parameters in the peers' buckets.
# --------------------------------------------------------------------------------------------------


@triton.jit
def chunk_elems(elems, G: tl.constexpr):
    """Returns the elements of a rank's chunk of a bucket; the last may be shorter, or empty."""
    share = (elems + (G.world - 1)) // G.world
    return (share + (TILE_ELEMS - 1)) // TILE_ELEMS * TILE_ELEMS


@triton.jit
def slice_of(ws, elems, rank, G: tl.constexpr):
    """Returns where the chunk of ``rank`` begins in the bucket, and this channel's slice [begin,
    end) of the chunk."""
    size = chunk_elems(elems, G)
    origin = tl.minimum(rank * size, elems)
    begin, end = extent_of(tl.minimum(size, elems - origin), get(ws, CHANNEL), G.channels)
    return origin, begin, end


@triton.jit
def grads_of(ws, grads, elems, rank, ITEM: tl.constexpr, G: tl.constexpr):
    """Returns address and bytes of this channel's slice of the gradients of ``rank``'s chunk; both
    are 0 if ``grads`` is 0, which means that the call exchanges no gradients."""
    origin, begin, end = slice_of(ws, elems, rank, G)
    none = grads == 0
    address = tl.where(none, grads, grads + (origin + begin) * ITEM)
    return address, tl.where(none, grads, (end - begin) * ITEM)


@triton.jit
def offer(ws, grads, params, elems, status, ITEM: tl.constexpr, G: tl.constexpr):
    """Sends one item to each peer: the address of my gradients of the peer's slice and, unless
    ``params`` is 0, the bucket in which the peer may store its results from now on."""
    my_heap = of_peer(ws, get(ws, RANK), HEAP)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        status = await_slot(ws, PAIR, peer, peer * 0, status, G)
        if status == 0:
            address, size_bytes = grads_of(ws, grads, elems, peer, ITEM, G)
            offset = tl.where(grads == 0, NOT_IN_HEAP, address - my_heap)
            staged = size_bytes * 0 + G.segment_bytes
            item_bytes = tl.where(grads == 0, staged, tl.maximum(size_bytes, 1))
            header = my_header(ws, PAIR, peer, G)
            write_header(ws, header, size_bytes, item_bytes, offset)
            if params != 0:
                # The same lane stores the word after write_header() has stored another value there.
                tl.store(word64(header + RESULT_OFFSET), params - my_heap)
            publish_release_sys(ws, PAIR, peer, peer * 0, G)
    return status


@triton.jit
def accept(
    ws, grads, elems, status, ITEM: tl.constexpr, RESULT_ITEM: tl.constexpr, G: tl.constexpr
):
    """Waits for all offers. Then SOURCE of a peer is the address of its gradients of my slice, and
    RESULT the address of its bucket. RESULT_ITEM: the bytes of a bucket's element; 0: RESULT is not
    set."""
    _, size_bytes = grads_of(ws, grads, elems, get(ws, RANK), ITEM, G)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        begin_receive(ws, PAIR, peer, G)
        status = receive(ws, PAIR, peer, size_bytes, size_bytes * 0, size_bytes, status, G)
        if RESULT_ITEM > 0:
            status = open_results(ws, PAIR, peer, size_bytes, elems * RESULT_ITEM, status, G)
    return status


@triton.jit
def dests_of(ws, own, origin_bytes, G: tl.constexpr):
    """Returns the addresses for my chunk's results: ``own``, then one in each peer's bucket,
    successor first; ``origin_bytes`` is the chunk's offset in a bucket."""
    WORLD: tl.constexpr = G.world
    found = (own,)
    for distance in tl.static_range(1, WORLD):
        peer = peer_at(ws, distance, G)
        found = found + (of_peer(ws, peer, RESULT) + origin_bytes,)
    return found


@triton.jit
def return_offers(ws, grads, elems, status, ITEM: tl.constexpr, G: tl.constexpr):
    """Signals to the peers that this block has finished with their gradients and buckets, and
    waits until the peers have finished with this rank's gradients and bucket."""
    _, size_bytes = grads_of(ws, grads, elems, get(ws, RANK), ITEM, G)
    tl.debug_barrier()
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        release_sys(ws, PAIR, peer, size_bytes, size_bytes, status, G)
        commit_seen(ws, PAIR, peer, status, G)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        epoch = sent(ws, PAIR, peer, G) + 1
        status = await_acquire_sys(ws, PAIR, peer, CONSUMED_WORD, epoch * 0 + 1, epoch, status, G)
        if status == 0:
            commit_sent(ws, PAIR, peer, 1, G)
    return status


# --------------------------------------------------------------------------------------------------
# The second pass of a step: each rank updates its shard, and every rank's bucket gets the result.
#
# The Triton twin of ringcomm/optimizer/fused_steps.h:
#
#  one_shot each rank stores its results in its own bucket and in the peers'.
#  ring     each rank updates its chunk, then ring all-gather of the parameters.
# --------------------------------------------------------------------------------------------------


@triton.jit
def gather_parameters_ring(ws, shard, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """Sends every rank's chunk to every rank, around the ring."""
    ITEM: tl.constexpr = KIND.param.primitive_bitwidth // 8
    params = shard_word(shard, PARAMS)
    chunks = (params, elems * ITEM, chunk_elems(elems, G) * ITEM)
    own = own_params(shard, KIND)
    MOVED: tl.constexpr = tl.int32 if ITEM == 4 else tl.int16
    TILES: tl.constexpr = G.tiles_of_4 if ITEM == 4 else G.tiles_of_2
    return all_gather_ring(ws, own, chunks, status, MOVED, TILES)


@triton.jit
def adamw_all_gather_one_shot(ws, shard, grad, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """Runs adamw_all_gather one-shot; ``grad`` is the address of the chunk's gradient."""
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
    """Runs adamw_all_gather as a ring; ``grad`` is the address of the chunk's gradient."""
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
    """Updates shards and gathers the parameters. Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: for each rank of the launch, addresses of its RankTable, of its
            chunk's gradient, and of its AdamWShard.
        elems: elements of the bucket.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: selects the ring form; else the one-shot form.
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
        status = adamw_all_gather_one_shot(ws, shard, grad, count, status, KIND, G)
    end_call(ws, status, G)


# --------------------------------------------------------------------------------------------------
# Reduce-scatter of gradients into FP32 shards, which also computes the norm of the result.
#
# The Triton twin of ringcomm/optimizer/fused_steps.h:
#
#  one_shot 1 hop: the sum in rank order in FP32, which is not rounded again.
#  ring     W-1 hops, with partial sums in the gradients' type; the last hop's sum stays in FP32.
# --------------------------------------------------------------------------------------------------


@triton.jit
def store_norm(words, out, sources, begin, size_bytes, DTYPE: tl.constexpr, NORM: tl.constexpr):
    """Does the last hop of the ring form; :func:`reduce_ring` calls it."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first = begin // ITEM
    return reduce_run(words, out, sources, first, first + size_bytes // ITEM, NORM)


@triton.jit
def grad_chunks(grads, elems, ITEM: tl.constexpr, G: tl.constexpr):
    """Returns the even cut of a bucket into chunks: (address, total bytes, bytes of a chunk)."""
    return (grads, elems * ITEM, chunk_elems(elems, G) * ITEM)


@triton.jit
def reduce_scatter_norm_one_shot(
    ws, grads, out, elems, status, NORM: tl.constexpr, G: tl.constexpr
):
    """Runs reduce_scatter_norm one-shot; returns this block's words and the status."""
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
    """Reduces gradients into shards, with their norm. Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: for each rank of the launch, addresses of its RankTable, of its
            bucket of gradients, and of a pair of addresses: the address of its FP32 shard, and the
            address of the words to which the kernel adds the norm.
        elems: elements of the bucket.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: selects the ring form; else the one-shot form.
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
        TILES: tl.constexpr = G.tiles_of_4 if ITEM == 4 else G.tiles_of_2
        chunks = grad_chunks(grads, count, ITEM, G)
        words, status = reduce_ring(
            ws, chunks, out, no_words(), status, NORM.grad, store_norm, NORM, TILES
        )
    else:
        words, status = reduce_scatter_norm_one_shot(ws, grads, out, count, status, NORM, G)
    if status == 0:
        add_words(tl.load(results + 1), words, NORM.kind)
    end_call(ws, status, G)


# --------------------------------------------------------------------------------------------------
# A whole step in one pass: the update consumes reduced gradients as they are computed.
#
# The Triton twin of ringcomm/optimizer/fused_steps.h:
#
#  one_shot each rank reads its chunk of all ranks' gradients, updates, and stores the parameters in
#           all ranks' buckets.
#  ring     partial sums go around the ring; the owner's last hop updates; ring all-gather.
#
# The results have the same bits as reduce_scatter_norm followed by adamw_all_gather.
# --------------------------------------------------------------------------------------------------


@triton.jit
def update_sum(kept, shard, sources, begin, size_bytes, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Does the last hop of the ring form; :func:`reduce_ring` calls it."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first = begin // ITEM
    update_run(shard, (own_params(shard, KIND),), sources, first, first + size_bytes // ITEM, KIND)
    return kept


@triton.jit
def one_pass_one_shot(ws, shard, grads, elems, status, KIND: tl.constexpr, G: tl.constexpr):
    """Runs the one-shot form of a step."""
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
    """Runs the ring form of a step."""
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    TILES: tl.constexpr = G.tiles_of_4 if ITEM == 4 else G.tiles_of_2
    chunks = grad_chunks(grads, elems, ITEM, G)
    _, status = reduce_ring(ws, chunks, shard, status, status, KIND.grad, update_sum, KIND, TILES)
    return gather_parameters_ring(ws, shard, elems, status, KIND, G)


@triton.jit(do_not_specialize=[*RUNTIME, "elems"])
def reduce_scatter_adamw_all_gather_kernel(
    tables, inputs, outputs, elems, timeout_ns, call,
    RING: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Does a whole step in one pass. Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: for each rank of the launch, addresses of its RankTable, of its
            bucket of gradients, and of its AdamWShard.
        elems: elements of the bucket.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: selects the ring form; else the one-shot form.
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
        status = one_pass_one_shot(ws, shard, grads, count, status, KIND, G)
    end_call(ws, status, G)
