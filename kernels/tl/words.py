# SPDX-License-Identifier: Apache-2.0
"""Addresses of the words by which ranks synchronise, and how to load, store and compare them.

The structures are those of kernels/include/ringcomm (layout.h, call.h) and kernels/cuda/args.h;
their offsets come from the native module, so that they are written down once. An address is an
int64; docs/protocol.md has the table of the words.

exchange_release_sys() begins with a barrier, and Triton puts two around each atomic operation. So a
schedule's own barrier before a release orders nothing more: it shows in the schedule where the
order matters, and costs little, since the block would wait at the next barrier anyway.
"""

import triton
import triton.language as tl

from ringcomm._native import STREAMS, STRUCTURES

__all__ = [
    "CONSUMED",
    "PAIR",
    "READY",
    "SHARED",
    "exchange_release_sys",
    "load_acquire_sys",
    "reached",
]


def _offset(name: str) -> tl.constexpr:
    return tl.constexpr(STRUCTURES[name])


PAIR = tl.constexpr(STREAMS["pair"])
SHARED = tl.constexpr(STREAMS["shared"])
READY = _offset("signal.ready")
CONSUMED = _offset("signal.consumed")
DETACHED = _offset("signal.detached")
SENT = _offset("epoch.sent")
SEEN = _offset("epoch.seen")
SEQUENCE = _offset("channel.sequence")
LINE = _offset("line")
CONTROL_PAGE = _offset("control_page")
HEADER_STRIDE = _offset("header_stride")
STREAM_COUNT = tl.constexpr(3)


@triton.jit
def word32(address):
    """Returns the address as a pointer to a word of 4 bytes."""
    return address.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def word64(address):
    """Returns the address as a pointer to a word of 8 bytes."""
    return address.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def load_acquire_sys(address):
    """Loads the 4-byte word that a peer publishes at ``address`` by :func:`exchange_release_sys`.

    The reader's part of *publishing* and of *releasing a slot*: afterwards this block can load what
    the peer stored before it raised the word. Triton lowers the addition of 0 to
    ``ld.acquire.sys``; one lane loads, and all get its value.
    """
    return tl.atomic_add(word32(address), 0, sem="acquire", scope="sys")


@triton.jit
def exchange_release_sys(address, value):
    """Stores ``value`` in the 4-byte word at ``address`` after all earlier stores of the block.

    The writer's part of *publishing* and of *releasing a slot*: pairs with the acquire of the peer
    that polls the word. The barrier extends the release to the stores of all lanes.
    """
    tl.debug_barrier()
    tl.atomic_xchg(word32(address), value.to(tl.int32), sem="release", scope="sys")


@triton.jit
def reached(seen, want):
    """True if epoch ``seen`` is ``want`` or up to 2^31 - 1 past it, modulo 2^32."""
    return (seen.to(tl.int64) - want.to(tl.int64)).to(tl.int32) >= 0


@triton.jit
def link_line(region, table, stream, channel, peer, G: tl.constexpr):
    """Returns a link's line: its signals (``table`` 0) or its epochs (``table`` 2)."""
    links: tl.constexpr = STREAM_COUNT * G.channels * G.world
    link = (stream * G.channels + channel) * G.world + peer
    return region + CONTROL_PAGE + (table * links + link) * LINE


@triton.jit
def channel_line(region, channel, G: tl.constexpr):
    """Returns the address of the line with a channel's own counters."""
    links: tl.constexpr = STREAM_COUNT * G.channels * G.world
    return region + CONTROL_PAGE + (3 * links + channel) * LINE


@triton.jit
def header_at(region, stream, channel, sender, epoch, G: tl.constexpr):
    """Returns the address of the header of item ``epoch`` from ``sender`` to the region's owner."""
    lines: tl.constexpr = (3 * STREAM_COUNT * G.channels * G.world + G.channels + 1) // 2 * 2
    link = (stream * G.channels + channel) * G.world + sender
    index = (epoch - 1) & (G.slots - 1)
    return (
        region + CONTROL_PAGE + lines * LINE + (link.to(tl.int64) * G.slots + index) * HEADER_STRIDE
    )


@triton.jit
def slot_at(region, stream, channel, reader, epoch, G: tl.constexpr):
    """Returns the address of the slot of item ``epoch`` from the region's owner to ``reader``.

    Slot sets for pairs come first (channels x world), then one per channel for shared items.
    """
    slot_set = channel * G.world + reader
    if stream == SHARED:
        slot_set = G.channels * G.world + channel
    index = (epoch - 1) & (G.slots - 1)
    return region + G.staging_bytes + (slot_set.to(tl.int64) * G.slots + index) * G.segment_bytes
