# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter, all-gather and all-reduce, each one-shot and as a ring."""

import triton
import triton.language as tl

from .endpoint import (
    CONSUMED_WORD,
    LOOKAHEAD,
    RUNTIME,
    announce,
    await_slot,
    begin_call,
    begin_receive,
    chunk_of,
    commit_seen,
    commit_sent,
    end_call,
    fill_slot,
    finish_sending,
    is_zero_copy,
    items_of,
    my_header,
    my_slot,
    of_rank,
    peer_at,
    piece_bytes,
    pieces_of,
    publish_release_sys,
    receive,
    release_sys,
    send_piece,
    slice_of,
    write_header,
)
from .moving import copy, reduce
from .state import CHANNEL, RANK, SOURCE, get, of_peer, ring_position, ring_rank, sent
from .waiting import await_acquire_sys
from .words import PAIR, SHARED

# --------------------------------------------------------------------------------------------------
# Reduce-scatter: rank r ends with the reduction of all ranks' chunk r.
#
# B bytes, W ranks. Both algorithms read and send (W-1)/W * B bytes per rank, as in
# ringcomm/collectives/reduce_scatter.h:
#
#  one_shot 1 hop. Each rank offers chunk r to rank r (zero copy: in place in the heap; else in pair
#           slots, segment by segment) and sums the W versions of its own chunk in rank order in
#           FP32, with one rounding.
#  ring     W-1 hops of partial sums around the ring, rounded to the element type at each hop.
# --------------------------------------------------------------------------------------------------


@triton.jit
def slice_for(ws, chunks, rank, G: tl.constexpr):
    """Returns this channel's slice of the chunk of ``rank``.

    ``chunks`` is an even cut of a buffer: (address, bytes in all, bytes of a chunk).
    """
    address, size_bytes = chunk_of(chunks[0], chunks[1], chunks[2], rank)
    return slice_of(address, size_bytes, get(ws, CHANNEL), G)


@triton.jit
def sources_of(ws, mine, G: tl.constexpr):
    """Returns the addresses of every rank's version of a piece, in rank order."""
    WORLD: tl.constexpr = G.world
    found = ()
    for p in tl.static_range(WORLD):
        source = tl.where(get(ws, RANK) == p, mine, of_peer(ws, p, SOURCE))
        found = found + (source,)
    return found


@triton.jit
def send_chunks(ws, chunks, item, status, DTYPE: tl.constexpr, G: tl.constexpr):
    """Sends item ``item`` of every chunk to the chunk's owner."""
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        address, size_bytes = slice_for(ws, chunks, peer, G)
        status = send_piece(ws, PAIR, peer, address, size_bytes, item, status, DTYPE, G)
    return status


@triton.jit
def reduce_piece(
    ws, target, mine, mine_bytes, piece, status, DTYPE: tl.constexpr, DIVISOR: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Waits for all versions of segment ``piece`` of this rank's slice, and reduces them."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    begin = piece * G.segment_bytes
    size_bytes = piece_bytes(mine_bytes, piece, G)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        status = receive(ws, PAIR, peer, mine_bytes, begin, size_bytes, status, G)
    if status == 0:
        sources = sources_of(ws, mine + begin, G)
        reduce(target + begin, sources, (size_bytes // ITEM).to(tl.int32), DTYPE, DIVISOR)
    tl.debug_barrier()
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        release_sys(ws, PAIR, peer, mine_bytes, begin + size_bytes, status, G)
    return status


@triton.jit
def reduce_scatter_one_shot(
    ws, chunks, out, status, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, G: tl.constexpr
):
    """Runs the one-shot reduce-scatter; ``out`` is the address of this rank's result."""
    me = get(ws, RANK)
    whole, _ = chunk_of(chunks[0], chunks[1], chunks[2], me)
    mine, mine_bytes = slice_for(ws, chunks, me, G)
    pieces = pieces_of(mine_bytes, G)
    rounds = pieces
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        address, size_bytes = slice_for(ws, chunks, peer, G)
        rounds = tl.maximum(rounds, items_of(ws, address, size_bytes, G))
        begin_receive(ws, PAIR, peer, G)
    for j in range(rounds + LOOKAHEAD):
        status = send_chunks(ws, chunks, j, status, DTYPE, G)
        if (j >= LOOKAHEAD) & (j - LOOKAHEAD < pieces):
            target = out + (mine - whole)
            status = reduce_piece(
                ws, target, mine, mine_bytes, j - LOOKAHEAD, status, DTYPE, DIVISOR, G
            )
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        commit_seen(ws, PAIR, peer, status, G)
        address, size_bytes = slice_for(ws, chunks, peer, G)
        status = finish_sending(ws, PAIR, peer, address, size_bytes, status, G)
    return status


@triton.jit
def most_pieces(chunks, channel, G: tl.constexpr):
    """Returns the number of segments of a channel's longest slice of any chunk.

    A shorter chunk may have a longer slice, by one line. ``chunks`` is as in :func:`slice_for`.
    """
    rounds = pieces_of(chunks[1] * 0, G)
    for rank in range(G.world):
        address, size_bytes = chunk_of(chunks[0], chunks[1], chunks[2], rank)
        _, here = slice_of(address, size_bytes, channel, G)
        rounds = tl.maximum(rounds, pieces_of(here, G))
    return rounds


@triton.jit
def rounds_of(ws, chunks, G: tl.constexpr):
    """Returns the number of rounds of a ring. It is equal on all ranks, since shorter slices get
    empty pieces."""
    return most_pieces(chunks, get(ws, CHANNEL), G)


@triton.jit
def ring_slot(ws, after, item, stream_bytes, status, G: tl.constexpr):
    """Waits for the slot of item ``item`` to the successor, and writes the first item's header."""
    status = await_slot(ws, PAIR, after, item, status, G)
    slot = my_slot(ws, PAIR, after, item, G)
    if (item == 0) & (status == 0):
        segment = stream_bytes * 0 + G.segment_bytes
        write_header(ws, my_header(ws, PAIR, after, G), stream_bytes, segment, segment * 0 - 1)
    return slot, status


@triton.jit
def finish_ring(ws, before, after, items, status, G: tl.constexpr):
    """Commits the epochs of the ring's streams, which this call no longer uses."""
    commit_seen(ws, PAIR, before, status, G)
    if status == 0:
        commit_sent(ws, PAIR, after, items, G)


@triton.jit
def reduce_hop(ws, target, own, before, count, hop, status, DTYPE: tl.constexpr):
    """Stores the partial sum that arrived (from hop 1 on) plus this rank's version, rounded."""
    if status == 0:
        if hop == 0:
            reduce(target, (own,), count, DTYPE, 1)
        else:
            reduce(target, (of_peer(ws, before, SOURCE), own), count, DTYPE, 1)


@triton.jit
def store_sum(kept, out, sources, begin, size_bytes, DTYPE: tl.constexpr, DIVISOR: tl.constexpr):
    """Does the last hop of a reduce-scatter: stores the sum in the result."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    reduce(out + begin, sources, (size_bytes // ITEM).to(tl.int32), DTYPE, DIVISOR)
    return kept


@triton.jit
def reduce_ring(
    ws, chunks, out, kept, status, DTYPE: tl.constexpr, FINISH: tl.constexpr, KIND: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Runs the ring form of a reduction; FINISH consumes the sums.

    Args:
        ws: the block's state.
        chunks: an even cut of the input.
        out: passed to FINISH.
        kept: a value that FINISH takes and returns, from piece to piece.
        status: the call's status so far.
        DTYPE: type of the elements and of the partial sums that ranks send.
        FINISH: does the last hop: FINISH(kept, out, sources, begin, size_bytes, DTYPE, KIND).
            ``sources`` are the addresses of a partial sum and of this rank's version, of
            ``size_bytes`` bytes each, which begin ``begin`` bytes into this rank's chunk.
        KIND: passed to FINISH.
        G: the communicator's Geometry.

    Returns:
        The last ``kept``, and the new status.
    """
    HOPS: tl.constexpr = G.world - 1
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    position = ring_position(ws, G)
    after = ring_rank(ws, (position + 1) % G.world, G)
    before = ring_rank(ws, (position + HOPS) % G.world, G)
    whole, _ = chunk_of(chunks[0], chunks[1], chunks[2], get(ws, RANK))
    rounds = rounds_of(ws, chunks, G)
    stream_bytes = rounds * (HOPS * G.segment_bytes)
    begin_receive(ws, PAIR, before, G)
    for j in range(rounds):
        for t in range(HOPS + 1):
            owner = ring_rank(ws, (position + 2 * G.world - 1 - t) % G.world, G)
            address, size_bytes = slice_for(ws, chunks, owner, G)
            here = piece_bytes(size_bytes, j, G)
            own = address + j * G.segment_bytes
            item = j * HOPS + t
            if t > 0:
                begin = (item - 1) * G.segment_bytes
                status = receive(
                    ws, PAIR, before, stream_bytes, begin, begin * 0 + G.segment_bytes, status, G
                )
            if t < HOPS:
                slot, status = ring_slot(ws, after, item, stream_bytes, status, G)
                count = (here // ITEM).to(tl.int32)
                reduce_hop(ws, slot, own, before, count, t, status, DTYPE)
                if status == 0:
                    publish_release_sys(ws, PAIR, after, item, G)
            else:
                if status == 0:
                    sources = (of_peer(ws, before, SOURCE), own)
                    kept = FINISH(kept, out, sources, own - whole, here, DTYPE, KIND)
            tl.debug_barrier()
            if t > 0:
                release_sys(ws, PAIR, before, stream_bytes, item * G.segment_bytes, status, G)
    finish_ring(ws, before, after, rounds * HOPS, status, G)
    return kept, status


@triton.jit
def reduce_scatter_ring(
    ws, chunks, out, status, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, G: tl.constexpr
):
    """Runs the ring reduce-scatter; ``out`` is the address of this rank's result."""
    _, status = reduce_ring(ws, chunks, out, status, status, DTYPE, store_sum, DIVISOR, G)
    return status


@triton.jit
def reduce_alone(ws, source, target, size_bytes, DTYPE: tl.constexpr, G: tl.constexpr):
    """Copies the input to the result, in a world of one rank."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address, bytes_here = slice_of(source, size_bytes, get(ws, CHANNEL), G)
    for j in range(pieces_of(bytes_here, G)):
        begin = j * G.segment_bytes
        count = (piece_bytes(bytes_here, j, G) // ITEM).to(tl.int32)
        reduce(target + (address - source) + begin, (address + begin,), count, DTYPE, 1)


@triton.jit(do_not_specialize=RUNTIME)
def reduce_scatter_kernel(
    tables, inputs, outputs, chunk_bytes, timeout_ns, call,
    RING: tl.constexpr, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Does a reduce-scatter. Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: for each rank of the launch, addresses of its RankTable, of its
            world * chunk_bytes bytes of input, and of its chunk_bytes bytes of output.
        chunk_bytes: bytes of one rank's result.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: selects the ring form; else the one-shot form.
        DTYPE: tl.float32, tl.bfloat16 or tl.float16.
        DIVISOR: 1 for SUM, the world size for AVG.
        G: the communicator's Geometry.
    """
    ws, status = begin_call(tables, timeout_ns, call, G)
    rank = tl.program_id(1)
    size_bytes = chunk_bytes + tl.full((), 0, tl.int64)
    source = of_rank(inputs, rank)
    target = of_rank(outputs, rank)
    chunks = (source, size_bytes * G.world, size_bytes)
    if G.world == 1:
        reduce_alone(ws, source, target, size_bytes, DTYPE, G)
    elif RING:
        status = reduce_scatter_ring(ws, chunks, target, status, DTYPE, DIVISOR, G)
    else:
        status = reduce_scatter_one_shot(ws, chunks, target, status, DTYPE, DIVISOR, G)
    end_call(ws, status, G)


# --------------------------------------------------------------------------------------------------
# All-gather: every rank's contribution to every rank.
#
# B bytes of output, W ranks. Each rank reads (W-1)/W * B bytes from its peers, as in
# ringcomm/collectives/all_gather.h:
#
#  one_shot 1 hop. A rank publishes its contribution once, for all readers: zero copy if it is in
#           the heap (as input, or in its place in the output), else through the shared slots.
#  ring     W-1 hops: each rank forwards the data that it received from its predecessor.
# --------------------------------------------------------------------------------------------------


@triton.jit
def copy_piece(target, source, size_bytes, piece, DTYPE: tl.constexpr, G: tl.constexpr):
    """Copies segment ``piece`` of a slice from one address to another."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    begin = piece * G.segment_bytes
    count = (piece_bytes(size_bytes, piece, G) // ITEM).to(tl.int32)
    copy(target + begin, source + begin, count, DTYPE)


@triton.jit
def copy_slice(target, source, size_bytes, DTYPE: tl.constexpr, G: tl.constexpr):
    """Copies a whole slice from one address to another, unless both are equal."""
    if target != source:
        for j in range(pieces_of(size_bytes, G)):
            copy_piece(target, source, size_bytes, j, DTYPE, G)


@triton.jit
def share_piece(ws, address, size_bytes, item, status, DTYPE: tl.constexpr, G: tl.constexpr):
    """Publishes item ``item`` of a slice to all peers."""
    for distance in range(1, G.world):
        status = await_slot(ws, SHARED, peer_at(ws, distance, G), item, status, G)
    if status == 0:
        # All readers share the epochs of the shared stream, so any peer determines the slot.
        slot = my_slot(ws, SHARED, peer_at(ws, 1, G), item, G)
        for distance in range(1, G.world):
            announce(ws, SHARED, peer_at(ws, distance, G), address, size_bytes, item, G)
        fill_slot(ws, slot, address, size_bytes, item, DTYPE, G)
        for distance in range(1, G.world):
            publish_release_sys(ws, SHARED, peer_at(ws, distance, G), item, G)
    return status


@triton.jit
def collect_piece(
    ws, sender, address, size_bytes, piece, status, DTYPE: tl.constexpr, G: tl.constexpr
):
    """Waits for segment ``piece`` of the slice that ``sender`` shares, and copies it to output."""
    if piece < pieces_of(size_bytes, G):
        ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
        begin = piece * G.segment_bytes
        bytes_here = piece_bytes(size_bytes, piece, G)
        status = receive(ws, SHARED, sender, size_bytes, begin, bytes_here, status, G)
        if status == 0:
            count = (bytes_here // ITEM).to(tl.int32)
            copy(address + begin, of_peer(ws, sender, SOURCE), count, DTYPE)
        tl.debug_barrier()
        release_sys(ws, SHARED, sender, size_bytes, begin + bytes_here, status, G)
    return status


@triton.jit
def finish_sharing(ws, zero_copy, items, status, G: tl.constexpr):
    """Waits for all readers if ``zero_copy``, and in any case counts ``items`` as sent."""
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        if zero_copy:
            epoch = sent(ws, SHARED, peer, G) + items
            status = await_acquire_sys(ws, SHARED, peer, CONSUMED_WORD, items, epoch, status, G)
    if status == 0:
        for distance in range(1, G.world):
            commit_sent(ws, SHARED, peer_at(ws, distance, G), items, G)
    return status


@triton.jit
def all_gather_one_shot(ws, source, chunks, status, DTYPE: tl.constexpr, G: tl.constexpr):
    """Runs the one-shot form.

    Args:
        ws: the block's state.
        source: address of this rank's contribution; may be its place in the output.
        chunks: an even cut of the output.
        status: the call's status so far.
        DTYPE: an integer type as wide as the elements.
        G: the communicator's Geometry.
    """
    own, size_bytes = slice_for(ws, chunks, get(ws, RANK), G)
    whole = chunks[0] + tl.minimum(get(ws, RANK) * chunks[2], chunks[1])
    mine = source + (own - whole)
    shared = mine
    if (not is_zero_copy(ws, mine, size_bytes)) & is_zero_copy(ws, own, size_bytes):
        copy_slice(own, mine, size_bytes, DTYPE, G)
        tl.debug_barrier()
        shared = own
    zero_copy = is_zero_copy(ws, shared, size_bytes)
    items = tl.where(zero_copy, size_bytes * 0 + 1, pieces_of(size_bytes, G))
    rounds = pieces_of(size_bytes, G)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        _, peer_bytes = slice_for(ws, chunks, peer, G)
        rounds = tl.maximum(rounds, pieces_of(peer_bytes, G))
        begin_receive(ws, SHARED, peer, G)
    for j in range(rounds + LOOKAHEAD):
        if j < items:
            status = share_piece(ws, shared, size_bytes, j, status, DTYPE, G)
        if (shared != own) & (j < pieces_of(size_bytes, G)) & (status == 0):
            copy_piece(own, mine, size_bytes, j, DTYPE, G)
        if j >= LOOKAHEAD:
            for distance in range(1, G.world):
                peer = peer_at(ws, distance, G)
                address, peer_bytes = slice_for(ws, chunks, peer, G)
                status = collect_piece(
                    ws, peer, address, peer_bytes, j - LOOKAHEAD, status, DTYPE, G
                )
    for distance in range(1, G.world):
        commit_seen(ws, SHARED, peer_at(ws, distance, G), status, G)
    return finish_sharing(ws, zero_copy, items, status, G)


@triton.jit
def all_gather_ring(ws, source, chunks, status, DTYPE: tl.constexpr, G: tl.constexpr):
    """Runs the ring all-gather; arguments as for the one-shot all-gather."""
    HOPS: tl.constexpr = G.world - 1
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    position = ring_position(ws, G)
    after = ring_rank(ws, (position + 1) % G.world, G)
    before = ring_rank(ws, (position + HOPS) % G.world, G)
    own, own_bytes = slice_for(ws, chunks, get(ws, RANK), G)
    whole = chunks[0] + tl.minimum(get(ws, RANK) * chunks[2], chunks[1])
    mine = source + (own - whole)
    if status == 0:
        copy_slice(own, mine, own_bytes, DTYPE, G)
    tl.debug_barrier()
    rounds = rounds_of(ws, chunks, G)
    stream_bytes = rounds * (HOPS * G.segment_bytes)
    begin_receive(ws, PAIR, before, G)
    for j in range(rounds):
        for t in range(HOPS + 1):
            owner = ring_rank(ws, (position + 2 * G.world - t) % G.world, G)
            address, size_bytes = slice_for(ws, chunks, owner, G)
            begin = j * G.segment_bytes
            count = (piece_bytes(size_bytes, j, G) // ITEM).to(tl.int32)
            item = j * HOPS + t
            data = mine + begin
            if t > 0:
                at = (item - 1) * G.segment_bytes
                status = receive(
                    ws, PAIR, before, stream_bytes, at, at * 0 + G.segment_bytes, status, G
                )
                data = of_peer(ws, before, SOURCE)
            if t < HOPS:
                slot, status = ring_slot(ws, after, item, stream_bytes, status, G)
                if status == 0:
                    copy(slot, data, count, DTYPE)
                    publish_release_sys(ws, PAIR, after, item, G)
            if t > 0:
                if status == 0:
                    copy(address + begin, data, count, DTYPE)
                tl.debug_barrier()
                release_sys(ws, PAIR, before, stream_bytes, item * G.segment_bytes, status, G)
    finish_ring(ws, before, after, rounds * HOPS, status, G)
    return status


@triton.jit
def gather_alone(ws, source, target, size_bytes, DTYPE: tl.constexpr, G: tl.constexpr):
    """Copies the input to the output, in a world of one rank."""
    address, bytes_here = slice_of(source, size_bytes, get(ws, CHANNEL), G)
    copy_slice(target + (address - source), address, bytes_here, DTYPE, G)


@triton.jit(do_not_specialize=RUNTIME)
def all_gather_kernel(
    tables, inputs, outputs, chunk_bytes, timeout_ns, call,
    RING: tl.constexpr, DTYPE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Does an all-gather. Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: for each rank of the launch, addresses of its RankTable, of its
            chunk_bytes bytes of input, and of its world * chunk_bytes bytes of output.
        chunk_bytes: bytes of one rank's contribution.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: selects the ring form; else the one-shot form.
        DTYPE: an integer type as wide as the elements.
        G: the communicator's Geometry.
    """
    ws, status = begin_call(tables, timeout_ns, call, G)
    rank = tl.program_id(1)
    size_bytes = chunk_bytes + tl.full((), 0, tl.int64)
    source = of_rank(inputs, rank)
    target = of_rank(outputs, rank)
    chunks = (target, size_bytes * G.world, size_bytes)
    if G.world == 1:
        gather_alone(ws, source, target, size_bytes, DTYPE, G)
    elif RING:
        status = all_gather_ring(ws, source, chunks, status, DTYPE, G)
    else:
        status = all_gather_one_shot(ws, source, chunks, status, DTYPE, G)
    end_call(ws, status, G)


# --------------------------------------------------------------------------------------------------
# All-reduce: every rank ends with the reduction of all ranks' buffers.
#
# B bytes, W ranks; a reduce-scatter, then an all-gather of the results, in one kernel:
#
#  two_shot 2 hops, 2(W-1)/W * B bytes; sums in rank order with one rounding.
#  ring     2(W-1) hops, 2(W-1)/W * B bytes.
#
# The CUDA kernels overlap the two halves segment by segment, and have a form of one hop for small
# buffers (ringcomm/collectives/all_reduce.h); here a channel ends its first half before it begins
# its second half.
# --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=[*RUNTIME, "size_bytes"])
def all_reduce_kernel(
    tables, inputs, outputs, size_bytes, chunk_bytes, timeout_ns, call,
    RING: tl.constexpr, DTYPE: tl.constexpr, MOVED: tl.constexpr, DIVISOR: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Does an all-reduce. Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: for each rank of the launch, addresses of its RankTable, and of its
            input and output, of size_bytes bytes each; both may be one buffer.
        size_bytes: bytes of the buffer.
        chunk_bytes: bytes of one rank's chunk of the buffer, a multiple of 64.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: selects the ring form; else the two-shot form.
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
        status = reduce_scatter_one_shot(ws, given, own, status, DTYPE, DIVISOR, G)
        status = all_gather_one_shot(ws, own, wanted, status, MOVED, G)
    end_call(ws, status, G)
