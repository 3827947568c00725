# SPDX-License-Identifier: Apache-2.0
"""The state of a block during a call: a few words of device memory for each channel.

CUDA blocks keep these words in shared memory (kernels/cuda/workspace.h), which Triton kernels
cannot address. ``ws`` is the address of a block's words, int64 each. One lane writes a word and all
lanes read it, so a barrier separates the two.

    word  0      the rank table (kernels/cuda/args.h, RankTable)
    word  1      channel
    word  2      rank
    word  3      deadline of one wait, in ns
    word  4      the clock, as one lane read it
    word  5      1: data were read in place in a peer's heap
    word  6      bytes of this rank's heap that peers have mapped, read when the call began
    word  8..16  the header of the call in progress (call.h, CallHeader), for its fault record
    words 32 + 9p ..  nine words about rank p: REGION to RESULT below
"""

import triton
import triton.language as tl

from ringcomm._native import STRUCTURES

from .words import SEEN, SENT, channel_line, header_at, link_line, slot_at, word32, word64

TABLE = tl.constexpr(0)
CHANNEL = tl.constexpr(1)
RANK = tl.constexpr(2)
TIMEOUT_NS = tl.constexpr(3)
CLOCK = tl.constexpr(4)
READS_PEERS = tl.constexpr(5)
OWN_HEAP_BYTES = tl.constexpr(6)
HEADER = tl.constexpr(8)
HEADER_WORDS = tl.constexpr(STRUCTURES["header"] // 8)
PEERS = tl.constexpr(STRUCTURES["scratch"] // 8)
PEER_WORDS = tl.constexpr(STRUCTURES["scratch_per_rank"] // 8)

REGION = tl.constexpr(0)  # address of the peer's region, as mapped here
HEAP = tl.constexpr(1)  # address of the peer's heap, as mapped here
DATA = tl.constexpr(2)  # zero copy: address of the peer's data; else 0
ITEM_BYTES = tl.constexpr(3)  # bytes that one item of the peer carries
BASE = tl.constexpr(4)  # epoch before the peer's first item of this call
ITEMS = tl.constexpr(5)  # the peer's items of this call
ACKED = tl.constexpr(6)  # items of this call that this block has acknowledged
SOURCE = tl.constexpr(7)  # address of the bytes that were awaited last
RESULT = tl.constexpr(8)  # address for my results in the peer's heap; optimizer collectives only

TABLE_RANK = tl.constexpr(STRUCTURES["table.rank"])
TABLE_HEAP_BYTES = tl.constexpr(STRUCTURES["table.heap_bytes"])
TABLE_RINGS = tl.constexpr(STRUCTURES["table.rings"])
TABLE_HOST = tl.constexpr(STRUCTURES["table.host"])
TABLE_SCRATCH = tl.constexpr(STRUCTURES["table.scratch"])
TABLE_REGIONS = tl.constexpr(STRUCTURES["table.regions"])
TABLE_HEAPS = tl.constexpr(STRUCTURES["table.heaps"])
TABLE_BYTES = tl.constexpr(STRUCTURES["table"])


@triton.jit
def get(ws, word):
    """Returns a word of the block's state."""
    return tl.load(word64(ws) + word)


@triton.jit
def of_peer(ws, peer, word):
    """Returns a word of the block's state about ``peer``."""
    return tl.load(word64(ws) + (PEERS + PEER_WORDS * peer + word))


@triton.jit
def set_of_peer(ws, peer, word, value):
    """Stores a word about ``peer``: after all lanes' reads of the old word, and before later
    reads."""
    tl.debug_barrier()
    tl.store(word64(ws) + (PEERS + PEER_WORDS * peer + word), value.to(tl.int64))
    tl.debug_barrier()


@triton.jit
def state_address(table, channel, G: tl.constexpr):
    """Returns the address of the state of ``channel``, from the address of the rank table."""
    size: tl.constexpr = 8 * (PEERS + PEER_WORDS * G.world)
    return tl.load(word64(table + TABLE_SCRATCH)) + channel * size


@triton.jit
def open_state(table, channel, timeout_ns, call, G: tl.constexpr):
    """Fills the block's state for a call and returns its address.

    Args:
        table: address of this rank's RankTable.
        channel: this block's channel.
        timeout_ns: deadline of one wait.
        call: the four words of ``_native.call_words``.
        G: the communicator's Geometry.
    """
    ws = state_address(table, channel, G)
    rank = tl.load(word32(table + TABLE_RANK))
    words = word64(ws)
    tl.store(words + TABLE, table)
    tl.store(words + CHANNEL, channel.to(tl.int64))
    tl.store(words + RANK, rank.to(tl.int64))
    tl.store(words + TIMEOUT_NS, timeout_ns)
    tl.store(words + READS_PEERS, tl.full((), 0, tl.int64))
    tl.store(words + OWN_HEAP_BYTES, tl.load(word64(table + TABLE_HEAP_BYTES) + rank))
    for i in tl.static_range(4):
        tl.store(words + (HEADER + 1 + i), call[i])
    for p in range(G.world):
        of_p = words + (PEERS + PEER_WORDS * p)
        tl.store(of_p + REGION, tl.load(word64(table + TABLE_REGIONS) + p))
        tl.store(of_p + HEAP, tl.load(word64(table + TABLE_HEAPS) + p))
    tl.debug_barrier()
    return ws


@triton.jit
def my_region(ws):
    """Returns the address of this rank's region."""
    return of_peer(ws, get(ws, RANK), REGION)


@triton.jit
def signal_line(ws, owner, stream, peer, G: tl.constexpr):
    """Returns the address of the signals of ``peer`` in the region of ``owner``."""
    region = of_peer(ws, owner, REGION)
    return link_line(region, 0, stream, get(ws, CHANNEL), peer, G)


@triton.jit
def epoch_line(ws, stream, peer, G: tl.constexpr):
    """Returns the address of this rank's counters of items to and from ``peer``."""
    return link_line(my_region(ws), 2, stream, get(ws, CHANNEL), peer, G)


@triton.jit
def sent(ws, stream, reader, G: tl.constexpr):
    """Returns the epoch of the last item that this rank sent to ``reader`` before this call."""
    return tl.load(word32(epoch_line(ws, stream, reader, G) + SENT)).to(tl.int64)


@triton.jit
def seen(ws, stream, sender, G: tl.constexpr):
    """Returns the epoch of the last item of ``sender`` that this rank read before this call."""
    return tl.load(word32(epoch_line(ws, stream, sender, G) + SEEN)).to(tl.int64)


@triton.jit
def sequence_word(ws, G: tl.constexpr):
    """Returns the address of the word in which this rank counts the collectives of this channel."""
    return word64(channel_line(my_region(ws), get(ws, CHANNEL), G))


@triton.jit
def header_of(ws, reader, stream, sender, epoch, G: tl.constexpr):
    """Returns the mapped address of item ``epoch``'s header from ``sender`` to ``reader``."""
    region = of_peer(ws, reader, REGION)
    return header_at(region, stream, get(ws, CHANNEL), sender, epoch, G)


@triton.jit
def slot_of(ws, sender, stream, reader, epoch, G: tl.constexpr):
    """Returns the mapped address of item ``epoch``'s slot from ``sender`` to ``reader``."""
    region = of_peer(ws, sender, REGION)
    return slot_at(region, stream, get(ws, CHANNEL), reader, epoch, G)


@triton.jit
def ring_rank(ws, position, G: tl.constexpr):
    """Returns the rank at ``position`` of the ring that this block's channel follows."""
    table = get(ws, TABLE)
    rings = tl.load(word32(table + TABLE_RINGS))
    rank = position.to(tl.int64)
    if rings > 0:
        ring = get(ws, CHANNEL) % rings
        rank = tl.load(word32(table + TABLE_BYTES) + (ring * G.world + position)).to(tl.int64)
    return rank


@triton.jit
def ring_position(ws, G: tl.constexpr):
    """Returns this rank's position in the ring that this block's channel follows."""
    rank = get(ws, RANK)
    position = rank
    for p in range(G.world):
        if ring_rank(ws, rank * 0 + p, G) == rank:
            position = rank * 0 + p
    return position
