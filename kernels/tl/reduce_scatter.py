"""Reduce-scatter: rank r ends with the reduction of everybody's chunk r.

B bytes, W ranks. Both algorithms read and send (W-1)/W * B bytes per rank, as in
ringcomm/collectives/reduce_scatter.h:

  direct   1 hop. Each rank offers chunk r to rank r (zero copy: where it lies in the heap; else in
           pair slots, segment by segment) and sums the W versions of its own chunk in rank order in
           FP32, with one rounding.
  ring     W-1 hops of partial sums around the ring, rounded to the element type at each hop.
"""

import triton
import triton.language as tl

from .call import RUNTIME, begin_call, end_call, of_rank, peer_at
from .endpoint import (
    LOOKAHEAD,
    await_slot,
    begin_receive,
    chunk_of,
    commit_seen,
    commit_sent,
    finish_sending,
    items_of,
    my_slot,
    piece_bytes,
    pieces_of,
    publish_release_sys,
    receive,
    release_sys,
    send_piece,
    slice_of,
    write_header,
)
from .moving import reduce
from .state import CHANNEL, RANK, SOURCE, get, of_peer, ring_position, ring_rank
from .words import PAIR, SLOT_HEADER


@triton.jit
def slice_for(ws, chunks, rank, G: tl.constexpr):
    """This channel's part of the chunk of ``rank``.

    ``chunks`` is an even cut: (address, bytes in all, bytes of a chunk).
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
    """Item ``item`` of every chunk to its owner."""
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
    """Waits for everybody's version of segment ``piece`` of this rank's slice, and reduces it."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    begin = piece * G.piece_bytes
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
def reduce_scatter_direct(
    ws, chunks, out, status, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, G: tl.constexpr
):
    """The schedule of the direct form; ``out`` is the address of this rank's result."""
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
def ring_slot(ws, after, item, stream_bytes, status, G: tl.constexpr):
    """Waits for the slot of item ``item`` to the successor, and writes the first one's header."""
    status = await_slot(ws, PAIR, after, item, status, G)
    slot = my_slot(ws, PAIR, after, item, G)
    if (item == 0) & (status == 0):
        segment = stream_bytes * 0 + G.piece_bytes
        write_header(ws, slot, stream_bytes, segment, segment * 0 - 1)
    return slot, status


@triton.jit
def finish_ring(ws, before, after, items, status, G: tl.constexpr):
    """The ring's streams are done."""
    commit_seen(ws, PAIR, before, status, G)
    if status == 0:
        commit_sent(ws, PAIR, after, items, G)


@triton.jit
def reduce_hop(ws, target, own, before, count, step, status, DTYPE: tl.constexpr):
    """The partial sum that arrived (from step 1 on) plus this rank's version, rounded."""
    if status == 0:
        if step == 0:
            reduce(target, (own,), count, DTYPE, 1)
        else:
            reduce(target, (of_peer(ws, before, SOURCE), own), count, DTYPE, 1)


@triton.jit
def store_sum(kept, out, sources, begin, size_bytes, DTYPE: tl.constexpr, DIVISOR: tl.constexpr):
    """The last hop of a reduce-scatter: the sum goes to its place."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    reduce(out + begin, sources, (size_bytes // ITEM).to(tl.int32), DTYPE, DIVISOR)
    return kept


@triton.jit
def reduce_ring(
    ws, chunks, out, kept, status, DTYPE: tl.constexpr, FINISH: tl.constexpr, KIND: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The schedule of the ring form, whatever becomes of the sums.

    Args:
        ws: the block's state.
        chunks: an even cut.
        out: for FINISH.
        kept: a value that FINISH takes and returns, from piece to piece.
        status: of the call so far.
        DTYPE: of the elements, and of the partial sums that travel.
        FINISH: of the last hop: FINISH(kept, out, sources, begin, size_bytes, DTYPE, KIND), with
            the addresses of a partial sum and of this rank's version of ``size_bytes`` bytes that
            begin ``begin`` bytes behind its chunk.
        KIND: for FINISH.
        G: the communicator's Geometry.

    Returns:
        kept and the status.
    """
    HOPS: tl.constexpr = G.world - 1
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    position = ring_position(ws, G)
    after = ring_rank(ws, (position + 1) % G.world, G)
    before = ring_rank(ws, (position + HOPS) % G.world, G)
    whole, _ = chunk_of(chunks[0], chunks[1], chunks[2], get(ws, RANK))
    # Chunk 0 is the longest; shorter ones send empty pieces, so that all ranks count alike.
    _, longest = slice_for(ws, chunks, position * 0, G)
    rounds = pieces_of(longest, G)
    stream_bytes = rounds * (HOPS * G.piece_bytes)
    begin_receive(ws, PAIR, before, G)
    for j in range(rounds):
        for t in range(HOPS + 1):
            owner = ring_rank(ws, (position + 2 * G.world - 1 - t) % G.world, G)
            address, size_bytes = slice_for(ws, chunks, owner, G)
            here = piece_bytes(size_bytes, j, G)
            own = address + j * G.piece_bytes
            item = j * HOPS + t
            if t > 0:
                begin = (item - 1) * G.piece_bytes
                status = receive(
                    ws, PAIR, before, stream_bytes, begin, begin * 0 + G.piece_bytes, status, G
                )
            if t < HOPS:
                slot, status = ring_slot(ws, after, item, stream_bytes, status, G)
                count = (here // ITEM).to(tl.int32)
                reduce_hop(ws, slot + SLOT_HEADER, own, before, count, t, status, DTYPE)
                if status == 0:
                    publish_release_sys(ws, PAIR, after, item, G)
            else:
                if status == 0:
                    sources = (of_peer(ws, before, SOURCE), own)
                    kept = FINISH(kept, out, sources, own - whole, here, DTYPE, KIND)
            tl.debug_barrier()
            if t > 0:
                release_sys(ws, PAIR, before, stream_bytes, item * G.piece_bytes, status, G)
    finish_ring(ws, before, after, rounds * HOPS, status, G)
    return kept, status


@triton.jit
def reduce_scatter_ring(
    ws, chunks, out, status, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, G: tl.constexpr
):
    """The ring form; ``out`` is the address of this rank's result."""
    _, status = reduce_ring(ws, chunks, out, status, status, DTYPE, store_sum, DIVISOR, G)
    return status


@triton.jit
def reduce_alone(ws, source, target, size_bytes, DTYPE: tl.constexpr, G: tl.constexpr):
    """A world of one: the result is the input."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address, bytes_here = slice_of(source, size_bytes, get(ws, CHANNEL), G)
    for j in range(pieces_of(bytes_here, G)):
        begin = j * G.piece_bytes
        count = (piece_bytes(bytes_here, j, G) // ITEM).to(tl.int32)
        reduce(target + (address - source) + begin, (address + begin,), count, DTYPE, 1)


@triton.jit(do_not_specialize=RUNTIME)
def reduce_scatter_kernel(
    tables, inputs, outputs, chunk_bytes, timeout_ns, call,
    RING: tl.constexpr, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: by rank of the launch: addresses of its RankTable, of its
            world * chunk_bytes bytes of input, and of its chunk_bytes bytes of output.
        chunk_bytes: of one rank's result.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: the ring form, else the direct one.
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
        status = reduce_scatter_direct(ws, chunks, target, status, DTYPE, DIVISOR, G)
    end_call(ws, status, G)
