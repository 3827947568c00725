"""Reading the header of a peer's call: is it of this call, and does it point into that peer's heap?

The Triton twin of ringcomm/protocol/header_check.h and of Endpoint::open, but for alignment.
"""

import triton
import triton.language as tl

from ringcomm._native import STRUCTURES

from .fault_record import CORRUPT, MISMATCH, STREAM_BYTES, fail_header
from .state import (
    BASE,
    DATA,
    HEAP,
    ITEM_BYTES,
    ITEMS,
    RANK,
    READS_PEERS,
    RESULT,
    TABLE,
    TABLE_HEAP_BYTES,
    get,
    of_peer,
    set_of_peer,
    slot_of,
)
from .waiting import same_call
from .words import word64

NOT_IN_HEAP = tl.constexpr(-1)
RESULT_OFFSET = tl.constexpr(STRUCTURES["header.result_offset"])


@triton.jit
def in_heap_of(ws, owner, offset, size_bytes):
    """True if the bytes lie in the heap of ``owner``; ``offset`` may be any number."""
    heap_bytes = tl.load(word64(get(ws, TABLE) + TABLE_HEAP_BYTES) + owner)
    return (offset >= 0) & (offset <= heap_bytes) & (size_bytes <= heap_bytes - offset)


@triton.jit
def open_stream(ws, stream, sender, expected_bytes, status, G: tl.constexpr):
    """Reads the header of the sender's call, and compares it with this one."""
    if status == 0:
        first = of_peer(ws, sender, BASE) + 1
        header = slot_of(ws, sender, stream, get(ws, RANK), first, G)
        theirs = word64(header + STREAM_BYTES)
        stream_bytes = tl.load(theirs)
        item_bytes = tl.load(theirs + 1)
        offset = tl.load(theirs + 2)
        staged = offset == NOT_IN_HEAP
        whole = tl.maximum(expected_bytes, 1)
        in_heap = in_heap_of(ws, sender, offset, expected_bytes) & (item_bytes == whole)
        sound = tl.where(staged, item_bytes == G.piece_bytes, in_heap)
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
    """After the first piece of ``sender`` came: RESULT says where my results go in its heap."""
    if status == 0:
        header = slot_of(ws, sender, stream, get(ws, RANK), of_peer(ws, sender, BASE) + 1, G)
        offset = tl.load(word64(header + RESULT_OFFSET))
        if in_heap_of(ws, sender, offset, result_bytes):
            set_of_peer(ws, sender, RESULT, of_peer(ws, sender, HEAP) + offset)
        else:
            status = fail_header(ws, tl.full((), CORRUPT, tl.int32), sender, header, expected_bytes)
    return status
