# SPDX-License-Identifier: Apache-2.0
"""Sends and receives items during a call on one channel, and begins and ends the call."""

from collections.abc import Iterable

import triton
import triton.language as tl

from ringcomm._native import STRUCTURES

from .moving import copy
from .state import (
    ACKED,
    BASE,
    DATA,
    HEADER,
    HEAP,
    ITEM_BYTES,
    ITEMS,
    OWN_HEAP_BYTES,
    RANK,
    READS_PEERS,
    RESULT,
    SOURCE,
    TABLE,
    TABLE_HEAP_BYTES,
    epoch_line,
    get,
    header_of,
    of_peer,
    open_state,
    seen,
    sent,
    sequence_word,
    set_of_peer,
    signal_line,
    slot_of,
)
from .waiting import (
    ABORTED,
    ACKNOWLEDGE,
    CORRUPT,
    MISMATCH,
    PUBLISH,
    STREAM_BYTES,
    await_acquire_sys,
    fail_aborted,
    fail_header,
    is_aborted,
    other_call_seen,
    passing,
    same_call,
)
from .words import CONSUMED, READY, SEEN, SENT, exchange_release_sys, word32, word64

# --------------------------------------------------------------------------------------------------
# Checks of the header of a peer's call: it must be of this call, and point into that peer's heap.
#
# The Triton twin of ringcomm/protocol/header_check.h and Endpoint::open, without alignment checks.
# --------------------------------------------------------------------------------------------------

NOT_IN_HEAP = tl.constexpr(-1)
RESULT_OFFSET = tl.constexpr(STRUCTURES["header.result_offset"])


@triton.jit
def in_heap_of(ws, owner, offset, size_bytes):
    """True if the bytes are in the heap of ``owner``; ``offset`` may be any number."""
    heap_bytes = tl.load(word64(get(ws, TABLE) + TABLE_HEAP_BYTES) + owner)
    return lies_in(heap_bytes, offset, size_bytes)


@triton.jit
def lies_in(heap_bytes, offset, size_bytes):
    """True if the bytes are in a heap of this size."""
    return (offset >= 0) & (offset <= heap_bytes) & (size_bytes <= heap_bytes - offset)


@triton.jit
def open_stream(ws, stream, sender, expected_bytes, status, G: tl.constexpr):
    """Reads the header of the sender's call, and compares it with this rank's call."""
    if status == 0:
        header = header_of(ws, get(ws, RANK), stream, sender, of_peer(ws, sender, BASE) + 1, G)
        theirs = word64(header + STREAM_BYTES)
        stream_bytes = tl.load(theirs)
        item_bytes = tl.load(theirs + 1)
        offset = tl.load(theirs + 2)
        staged = offset == NOT_IN_HEAP
        whole = tl.maximum(expected_bytes, 1)
        in_heap = in_heap_of(ws, sender, offset, expected_bytes) & (item_bytes == whole)
        sound = tl.where(staged, item_bytes == G.segment_bytes, in_heap)
        if not (same_call(ws, header) & (stream_bytes == expected_bytes)):
            status = fail_header(
                ws, tl.full((), MISMATCH, tl.int32), sender, header, expected_bytes
            )
        elif not sound:
            status = fail_header(ws, tl.full((), CORRUPT, tl.int32), sender, header, expected_bytes)
        else:
            data = tl.where(staged, offset * 0, of_peer(ws, sender, HEAP) + offset)
            set_of_peer(ws, sender, DATA, data)
            items = tl.maximum((expected_bytes + item_bytes - 1) // item_bytes, 1)
            set_of_peer(ws, sender, ITEM_BYTES, item_bytes)
            set_of_peer(ws, sender, ITEMS, items)
            if data != 0:
                tl.store(word64(ws) + READS_PEERS, tl.full((), 1, tl.int64))
    return status


@triton.jit
def open_results(ws, stream, sender, expected_bytes, result_bytes, status, G: tl.constexpr):
    """Sets RESULT of ``sender``, whose header has arrived, to my results' address in its heap."""
    if status == 0:
        header = header_of(ws, get(ws, RANK), stream, sender, of_peer(ws, sender, BASE) + 1, G)
        offset = tl.load(word64(header + RESULT_OFFSET))
        if in_heap_of(ws, sender, offset, result_bytes):
            set_of_peer(ws, sender, RESULT, of_peer(ws, sender, HEAP) + offset)
        else:
            status = fail_header(ws, tl.full((), CORRUPT, tl.int32), sender, header, expected_bytes)
    return status


# --------------------------------------------------------------------------------------------------
# One rank's end of all streams during a call on one channel: send, receive, release.
#
# The Triton twin of ringcomm/protocol/endpoint.h; docs/protocol.md is the contract of both. A chunk
# is a tuple (address, bytes); a slice is the share of a chunk that this channel moves.
# --------------------------------------------------------------------------------------------------

# Pieces sent before the first is awaited; see kLookahead.
LOOKAHEAD = tl.constexpr(1)
# Below this many bytes staging is preferred to zero copy; see kZeroCopyMinBytes.
ZERO_COPY_MIN_BYTES = tl.constexpr(16384)
READY_WORD = tl.constexpr(0)
CONSUMED_WORD = tl.constexpr(1)


@triton.jit
def chunk_of(base, total_bytes, chunk_bytes, rank):
    """Returns the chunk of ``rank`` in an even cut, whose tail may be shorter or empty."""
    begin = tl.minimum(rank * chunk_bytes, total_bytes)
    return base + begin, tl.minimum(chunk_bytes, total_bytes - begin)


@triton.jit
def slice_of(address, size_bytes, channel, G: tl.constexpr):
    """Returns this channel's slice of a chunk, in whole lines except for its tail."""
    LINE: tl.constexpr = G.line_bytes
    lines = (size_bytes + (LINE - 1)) // LINE
    begin = tl.minimum(lines * channel // G.channels * LINE, size_bytes)
    end = tl.minimum(lines * (channel + 1) // G.channels * LINE, size_bytes)
    return address + begin, end - begin


@triton.jit
def pieces_of(size_bytes, G: tl.constexpr):
    """Returns the number of segments of a slice; an empty slice has one, for its header."""
    return tl.maximum((size_bytes + (G.segment_bytes - 1)) // G.segment_bytes, 1)


@triton.jit
def piece_bytes(size_bytes, piece, G: tl.constexpr):
    """Returns the bytes of segment ``piece`` of a slice."""
    left = size_bytes - piece * G.segment_bytes
    return tl.maximum(tl.minimum(left, G.segment_bytes), 0)


@triton.jit
def is_zero_copy(ws, address, size_bytes):
    """True if peers read the slice in place, in this rank's heap."""
    me = get(ws, RANK)
    offset = address - of_peer(ws, me, HEAP)
    inside = lies_in(get(ws, OWN_HEAP_BYTES), offset, size_bytes)
    return inside & (size_bytes >= ZERO_COPY_MIN_BYTES)


@triton.jit
def items_of(ws, address, size_bytes, G: tl.constexpr):
    """Returns the number of items that carry a slice."""
    pieces = pieces_of(size_bytes, G)
    return tl.where(is_zero_copy(ws, address, size_bytes), pieces * 0 + 1, pieces)


@triton.jit
def write_header(ws, header, stream_bytes, item_bytes, heap_offset):
    """Writes the header of this call to an address of :func:`my_header` that no peer reads yet."""
    words = word64(header)
    for i in tl.static_range(5):
        tl.store(words + i, get(ws, HEADER + i))
    after = word64(header + STREAM_BYTES)
    tl.store(after, stream_bytes)
    tl.store(after + 1, item_bytes)
    tl.store(after + 2, heap_offset)
    tl.store(after + 3, get(ws, HEADER + 8))
    tl.store(word64(header + RESULT_OFFSET), heap_offset * 0 + NOT_IN_HEAP)


# ---- sending ------------------------------------------------------------------------------------


@triton.jit
def await_slot(ws, stream, reader, item, status, G: tl.constexpr):
    """Waits until ``reader`` has read the former item in the slot of item ``item`` (layout.h)."""
    epoch = sent(ws, stream, reader, G) + 1 + item
    return await_acquire_sys(ws, stream, reader, CONSUMED_WORD, item, epoch - G.slots, status, G)


@triton.jit
def my_slot(ws, stream, reader, item, G: tl.constexpr):
    """Returns the address of the slot for item ``item`` of this call."""
    epoch = sent(ws, stream, reader, G) + 1 + item
    return slot_of(ws, get(ws, RANK), stream, reader, epoch, G)


@triton.jit
def my_header(ws, stream, reader, G: tl.constexpr):
    """Returns the address of this call's header for ``reader``, in that rank's region."""
    return header_of(ws, reader, stream, get(ws, RANK), sent(ws, stream, reader, G) + 1, G)


@triton.jit
def publish_release_sys(ws, stream, reader, item, G: tl.constexpr):
    """Publishes item ``item``, which is complete; pairs with the acquire of the reader's await."""
    passing(ws, PUBLISH)
    epoch = sent(ws, stream, reader, G) + 1 + item
    line = signal_line(ws, reader, stream, get(ws, RANK), G)
    exchange_release_sys(line + READY, epoch)


@triton.jit
def announce(ws, stream, reader, address, size_bytes, item, G: tl.constexpr):
    """Writes the header for one reader, before the first item of a slice is published."""
    if item == 0:
        zero_copy = is_zero_copy(ws, address, size_bytes)
        offset = tl.where(zero_copy, address - of_peer(ws, get(ws, RANK), HEAP), NOT_IN_HEAP)
        item_bytes = tl.where(zero_copy, size_bytes, size_bytes * 0 + G.segment_bytes)
        write_header(ws, my_header(ws, stream, reader, G), size_bytes, item_bytes, offset)


@triton.jit
def fill_slot(ws, slot, address, size_bytes, item, DTYPE: tl.constexpr, G: tl.constexpr):
    """Copies the data of item ``item`` of a slice to its slot, unless peers read them in place."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    if not is_zero_copy(ws, address, size_bytes):
        count = (piece_bytes(size_bytes, item, G) // ITEM).to(tl.int32)
        copy(slot, address + item * G.segment_bytes, count, DTYPE)


@triton.jit
def send_piece(
    ws, stream, reader, address, size_bytes, item, status, DTYPE: tl.constexpr, G: tl.constexpr
):
    """Sends item ``item`` of a slice to one reader, if the slice has that many items."""
    if item < items_of(ws, address, size_bytes, G):
        status = await_slot(ws, stream, reader, item, status, G)
        if status == 0:
            slot = my_slot(ws, stream, reader, item, G)
            announce(ws, stream, reader, address, size_bytes, item, G)
            fill_slot(ws, slot, address, size_bytes, item, DTYPE, G)
            publish_release_sys(ws, stream, reader, item, G)
    return status


@triton.jit
def finish_sending(ws, stream, reader, address, size_bytes, status, G: tl.constexpr):
    """Counts a slice's items as sent. With zero copy, first waits until ``reader`` has read the
    slice."""
    items = items_of(ws, address, size_bytes, G)
    if is_zero_copy(ws, address, size_bytes):
        epoch = sent(ws, stream, reader, G) + items
        status = await_acquire_sys(ws, stream, reader, CONSUMED_WORD, items, epoch, status, G)
    if status == 0:
        commit_sent(ws, stream, reader, items, G)
    return status


@triton.jit
def commit_sent(ws, stream, reader, items, G: tl.constexpr):
    """Counts ``items`` as sent, after the last use of their epochs."""
    epoch = sent(ws, stream, reader, G) + items
    tl.debug_barrier()
    tl.store(word32(epoch_line(ws, stream, reader, G) + SENT), epoch.to(tl.int32))
    tl.debug_barrier()


# ---- receiving ----------------------------------------------------------------------------------


@triton.jit
def begin_receive(ws, stream, sender, G: tl.constexpr):
    """Resets the state of ``sender`` before the call awaits its first piece."""
    base = seen(ws, stream, sender, G)
    zero = base * 0
    set_of_peer(ws, sender, DATA, zero)
    set_of_peer(ws, sender, ITEM_BYTES, zero + 1)
    set_of_peer(ws, sender, BASE, base)
    set_of_peer(ws, sender, ITEMS, zero)
    set_of_peer(ws, sender, ACKED, zero)
    set_of_peer(ws, sender, SOURCE, zero)


@triton.jit
def receive(ws, stream, sender, expected_bytes, begin, size_bytes, status, G: tl.constexpr):
    """Waits for bytes [begin, begin + size_bytes) of a stream; sets SOURCE to their address."""
    base = of_peer(ws, sender, BASE)
    if begin == 0:
        status = await_acquire_sys(ws, stream, sender, READY_WORD, begin, base + 1, status, G)
        status = open_stream(ws, stream, sender, expected_bytes, status, G)
    last = tl.maximum(begin + size_bytes - 1, 0) // of_peer(ws, sender, ITEM_BYTES)
    if size_bytes == 0:
        last = begin * 0
    if last > 0:
        want = base + 1 + last
        status = await_acquire_sys(ws, stream, sender, READY_WORD, last, want, status, G)
    data = of_peer(ws, sender, DATA)
    slot = slot_of(ws, sender, stream, get(ws, RANK), base + 1 + last, G)
    set_of_peer(ws, sender, SOURCE, tl.where(data != 0, data + begin, slot))
    return status


@triton.jit
def release_sys(ws, stream, sender, expected_bytes, end, status, G: tl.constexpr):
    """Frees the slots before ``end`` of the sender's stream, which this block has read.

    The reader's part of *releasing a slot*: pairs with the acquire of the sender's await_slot.
    """
    if status == 0:
        done = end // of_peer(ws, sender, ITEM_BYTES)
        if end >= expected_bytes:
            done = of_peer(ws, sender, ITEMS)
        if done != of_peer(ws, sender, ACKED):
            passing(ws, ACKNOWLEDGE)
            set_of_peer(ws, sender, ACKED, done)
            line = signal_line(ws, sender, stream, get(ws, RANK), G)
            exchange_release_sys(line + CONSUMED, of_peer(ws, sender, BASE) + done)


@triton.jit
def commit_seen(ws, stream, sender, status, G: tl.constexpr):
    """Counts the call's items as seen, after the last piece from ``sender``."""
    if status == 0:
        epoch = of_peer(ws, sender, BASE) + of_peer(ws, sender, ITEMS)
        tl.debug_barrier()
        tl.store(word32(epoch_line(ws, stream, sender, G) + SEEN), epoch.to(tl.int32))
        tl.debug_barrier()


# --------------------------------------------------------------------------------------------------
# The beginning and the end of every collective, around its schedule.
# --------------------------------------------------------------------------------------------------

# Arguments of the collectives' kernels on whose values Triton must not specialize: it would compile
# again (for seconds) for values of another kind, while peers wait.
RUNTIME = ["chunk_bytes", "timeout_ns"]
# In tuples Triton specializes on multiples of 16 nevertheless (Triton 3.6 to 3.9, specialize_impl
# in runtime/jit.py), so a number n in a tuple is passed as 4 * n + 3, which is never a multiple.
TAG_BITS = tl.constexpr(2)
_TAG = 3


def tagged(numbers: Iterable[int]) -> tuple[int, ...]:
    """Returns numbers in the form for a kernel's tuple; :func:`untagged` restores a number."""
    return tuple((number << TAG_BITS.value) + _TAG for number in numbers)


@triton.jit
def untagged(number):
    """Returns the int64 whose tagged form is ``number``."""
    return (number + tl.full((), 0, tl.int64)) >> TAG_BITS


@triton.jit
def of_rank(items, rank):
    """Returns entry ``rank`` of a tuple of tagged addresses."""
    found = untagged(items[0])
    for r in tl.static_range(1, len(items)):
        if rank == r:
            found = untagged(items[r])
    return found


@triton.jit
def peer_at(ws, distance, G: tl.constexpr):
    """Returns the rank that this rank visits at ``distance``: its successor first, so that no two
    ranks read from one peer at the same time."""
    peer = get(ws, RANK) + distance
    return tl.where(peer < G.world, peer, peer - G.world)


@triton.jit
def begin_call(tables, timeout_ns, call, G: tl.constexpr):
    """Numbers the call, and fails if a peer has published an item of a different call.

    Args:
        tables: addresses of the RankTable of each rank in this launch.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``; tagged, as the tables are.
        G: the communicator's Geometry.

    Returns:
        The block's state, and the status of the call so far.
    """
    zero = tl.full((), 0, tl.int64)
    words = (untagged(call[0]), untagged(call[1]), untagged(call[2]), untagged(call[3]))
    table = of_rank(tables, tl.program_id(1))
    ws = open_state(table, tl.program_id(0), timeout_ns + zero, words, G)
    one = tl.full((), 1, tl.int64)
    sequence = tl.atomic_add(sequence_word(ws, G), one, sem="relaxed", scope="gpu") + 1
    tl.store(word64(ws) + HEADER, sequence)
    tl.store(word64(ws) + HEADER + 8, tl.full((), 0x3FF0000000000000, tl.int64))  # factor: 1.0
    tl.debug_barrier()
    status = tl.full((), 0, tl.int32)
    if is_aborted(ws, get(ws, RANK)):
        status = tl.full((), ABORTED, tl.int32)
    for distance in range(1, G.world):
        peer = peer_at(ws, distance, G)
        if status == 0:
            theirs = other_call_seen(ws, peer, G)
            if theirs != 0:
                mismatch = tl.full((), MISMATCH, tl.int32)
                status = fail_header(ws, mismatch, peer, theirs, zero)
    return ws, status


@triton.jit
def end_call(ws, status, G: tl.constexpr):
    """Ends a call after its schedule, and checks that data read in peers' buffers were valid.

    A sender that gave up may use its buffer again, but it raises its abort word first.
    """
    reads_peers = get(ws, READS_PEERS)
    tl.debug_barrier()
    if (status == 0) & (reads_peers != 0):
        # Orders the block's reads of data before its reads of the words, by an addition that
        # changes nothing. One lane adds, between barriers.
        tl.atomic_add(
            word64(ws) + READS_PEERS, tl.full((), 0, tl.int64), sem="acq_rel", scope="sys"
        )
        tl.debug_barrier()
        for distance in range(1, G.world):
            peer = peer_at(ws, distance, G)
            if status == 0:
                if is_aborted(ws, peer):
                    status = fail_aborted(ws)
    return status
