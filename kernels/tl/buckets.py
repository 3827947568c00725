"""The parts that the optimizer's collectives share: chunks in whole blocks, and offers.

The Triton twin of ringcomm/optimizer/buckets.h. Buckets lie in the heap: every rank reads its
chunk of the peers' gradients where they are, and stores its new parameters where they belong.
"""

import triton
import triton.language as tl

from .adamw_shard import BLOCK_ELEMS, part_of
from .call import peer_at
from .endpoint import (
    CONSUMED_WORD,
    await_slot,
    begin_receive,
    commit_seen,
    commit_sent,
    my_slot,
    publish_release_sys,
    receive,
    release_sys,
    write_header,
)
from .headers import NOT_IN_HEAP, RESULT_OFFSET, open_results
from .state import CHANNEL, HEAP, RANK, RESULT, get, of_peer, sent
from .waiting import await_acquire_sys
from .words import PAIR, word64


@triton.jit
def chunk_elems(elems, G: tl.constexpr):
    """Elements of a rank's chunk of a bucket of ``elems``; the last may be shorter, or empty."""
    share = (elems + (G.world - 1)) // G.world
    return (share + (BLOCK_ELEMS - 1)) // BLOCK_ELEMS * BLOCK_ELEMS


@triton.jit
def slice_of(ws, elems, rank, G: tl.constexpr):
    """Returns the begin of the chunk of ``rank`` in the bucket, and this channel's part [begin, end)
    of the chunk."""
    size = chunk_elems(elems, G)
    origin = tl.minimum(rank * size, elems)
    begin, end = part_of(tl.minimum(size, elems - origin), get(ws, CHANNEL), G.channels)
    return origin, begin, end


@triton.jit
def grads_of(ws, grads, elems, rank, ITEM: tl.constexpr, G: tl.constexpr):
    """Address and bytes of this channel's part of the gradients of ``rank``'s chunk; ``grads`` 0:
    no gradients are exchanged."""
    origin, begin, end = slice_of(ws, elems, rank, G)
    none = grads == 0
    address = tl.where(none, grads, grads + (origin + begin) * ITEM)
    return address, tl.where(none, grads, (end - begin) * ITEM)


@triton.jit
def offer(ws, grads, params, elems, status, ITEM: tl.constexpr, G: tl.constexpr):
    """One item to each peer: where its part of this rank's gradients lies, and (``params`` not 0)
    the bucket in which it may store its results from now on."""
    my_heap = of_peer(ws, get(ws, RANK), HEAP)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        status = await_slot(ws, PAIR, peer, peer * 0, status, G)
        if status == 0:
            address, size_bytes = grads_of(ws, grads, elems, peer, ITEM, G)
            offset = tl.where(grads == 0, NOT_IN_HEAP, address - my_heap)
            staged = size_bytes * 0 + G.piece_bytes
            item_bytes = tl.where(grads == 0, staged, tl.maximum(size_bytes, 1))
            slot = my_slot(ws, PAIR, peer, peer * 0, G)
            write_header(ws, slot, size_bytes, item_bytes, offset)
            if params != 0:
                # Behind write_header()'s own store to the same word, by the same lane.
                tl.store(word64(slot + RESULT_OFFSET), params - my_heap)
            publish_release_sys(ws, PAIR, peer, peer * 0, G)
    return status


@triton.jit
def accept(
    ws, grads, elems, status, ITEM: tl.constexpr, RESULT_ITEM: tl.constexpr, G: tl.constexpr
):
    """Waits for all offers; afterwards SOURCE of a peer is where its gradients of my slice lie, and
    RESULT its bucket of results, whose elements have RESULT_ITEM bytes; 0: nothing is stored."""
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
    """Returns the places for my chunk's results: ``own``, then those accepted in the peers' buckets,
    successor first; ``origin_bytes`` is where the chunk begins in a bucket."""
    WORLD: tl.constexpr = G.world
    found = (own,)
    for distance in tl.static_range(1, WORLD):
        peer = peer_at(ws, distance, G)
        found = found + (of_peer(ws, peer, RESULT) + origin_bytes,)
    return found


@triton.jit
def return_offers(ws, grads, elems, status, ITEM: tl.constexpr, G: tl.constexpr):
    """All lanes have read the peers' gradients, and stored what they store in the peers' buckets:
    says so, and waits until the peers have done the same with mine."""
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
