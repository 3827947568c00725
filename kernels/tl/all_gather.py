"""All-gather: every rank's contribution to every rank.

B bytes of output, W ranks. Each rank reads (W-1)/W * B bytes from its peers, as in
ringcomm/collectives/all_gather.h:

  direct   1 hop. The contribution is published once, for all readers: zero copy where it lies in
           the heap (the input, or its place in the output), else through the shared slots.
  ring     W-1 hops: each rank forwards what it received from its predecessor.
"""

import triton
import triton.language as tl

from .call import RUNTIME, begin_call, end_call, of_rank, peer_at
from .endpoint import (
    CONSUMED_WORD,
    LOOKAHEAD,
    await_slot,
    begin_receive,
    commit_seen,
    commit_sent,
    fill_slot,
    is_zero_copy,
    my_slot,
    piece_bytes,
    pieces_of,
    publish_release_sys,
    receive,
    release_sys,
    slice_of,
)
from .moving import copy
from .reduce_scatter import finish_ring, ring_slot, slice_for
from .state import CHANNEL, RANK, SOURCE, get, of_peer, ring_position, ring_rank, sent
from .waiting import await_acquire_sys
from .words import PAIR, SHARED, SLOT_HEADER


@triton.jit
def copy_piece(target, source, size_bytes, piece, DTYPE: tl.constexpr, G: tl.constexpr):
    """Segment ``piece`` of a slice from one place to another."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    begin = piece * G.piece_bytes
    count = (piece_bytes(size_bytes, piece, G) // ITEM).to(tl.int32)
    copy(target + begin, source + begin, count, DTYPE)


@triton.jit
def copy_slice(target, source, size_bytes, DTYPE: tl.constexpr, G: tl.constexpr):
    """A whole slice from one place to another, unless they are the same."""
    if target != source:
        for j in range(pieces_of(size_bytes, G)):
            copy_piece(target, source, size_bytes, j, DTYPE, G)


@triton.jit
def share_piece(ws, address, size_bytes, item, status, DTYPE: tl.constexpr, G: tl.constexpr):
    """Publishes item ``item`` of a slice to all peers."""
    for distance in range(1, G.world):
        status = await_slot(ws, SHARED, peer_at(ws, distance, G), item, status, G)
    if status == 0:
        # All readers' epochs advance together on the shared stream, so any peer names the slot.
        slot = my_slot(ws, SHARED, peer_at(ws, 1, G), item, G)
        fill_slot(ws, slot, address, size_bytes, item, DTYPE, G)
        for distance in range(1, G.world):
            publish_release_sys(ws, SHARED, peer_at(ws, distance, G), item, G)
    return status


@triton.jit
def collect_piece(
    ws, sender, address, size_bytes, piece, status, DTYPE: tl.constexpr, G: tl.constexpr
):
    """Waits for segment ``piece`` of what ``sender`` shares, and copies it to its place."""
    if piece < pieces_of(size_bytes, G):
        ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
        begin = piece * G.piece_bytes
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
    """Zero copy: waits for all readers. Always: counts the items."""
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
def all_gather_direct(ws, source, chunks, status, DTYPE: tl.constexpr, G: tl.constexpr):
    """The schedule of the direct form.

    Args:
        ws: the block's state.
        source: address of this rank's contribution; may be its place in the output.
        chunks: the output's even cut.
        status: of the call so far.
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
    """The schedule of the ring form; arguments as for the direct one."""
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
    _, longest = slice_for(ws, chunks, position * 0, G)
    rounds = pieces_of(longest, G)
    stream_bytes = rounds * (HOPS * G.piece_bytes)
    begin_receive(ws, PAIR, before, G)
    for j in range(rounds):
        for t in range(HOPS + 1):
            owner = ring_rank(ws, (position + 2 * G.world - t) % G.world, G)
            address, size_bytes = slice_for(ws, chunks, owner, G)
            begin = j * G.piece_bytes
            count = (piece_bytes(size_bytes, j, G) // ITEM).to(tl.int32)
            item = j * HOPS + t
            data = mine + begin
            if t > 0:
                at = (item - 1) * G.piece_bytes
                status = receive(
                    ws, PAIR, before, stream_bytes, at, at * 0 + G.piece_bytes, status, G
                )
                data = of_peer(ws, before, SOURCE)
            if t < HOPS:
                slot, status = ring_slot(ws, after, item, stream_bytes, status, G)
                if status == 0:
                    copy(slot + SLOT_HEADER, data, count, DTYPE)
                    publish_release_sys(ws, PAIR, after, item, G)
            if t > 0:
                if status == 0:
                    copy(address + begin, data, count, DTYPE)
                tl.debug_barrier()
                release_sys(ws, PAIR, before, stream_bytes, item * G.piece_bytes, status, G)
    finish_ring(ws, before, after, rounds * HOPS, status, G)
    return status


@triton.jit
def gather_alone(ws, source, target, size_bytes, DTYPE: tl.constexpr, G: tl.constexpr):
    """A world of one: the output is the input."""
    address, bytes_here = slice_of(source, size_bytes, get(ws, CHANNEL), G)
    copy_slice(target + (address - source), address, bytes_here, DTYPE, G)


@triton.jit(do_not_specialize=RUNTIME)
def all_gather_kernel(
    tables, inputs, outputs, chunk_bytes, timeout_ns, call,
    RING: tl.constexpr, DTYPE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Grid (channels, ranks of this launch).

    Args:
        tables, inputs, outputs: by rank of the launch: addresses of its RankTable, of its
            chunk_bytes bytes of input, and of its world * chunk_bytes bytes of output.
        chunk_bytes: of one rank's contribution.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        RING: the ring form, else the direct one.
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
        status = all_gather_direct(ws, source, chunks, status, DTYPE, G)
    end_call(ws, status, G)
