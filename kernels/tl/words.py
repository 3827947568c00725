"""Addresses of the words that ranks synchronise by, and the three ways to touch them.

The structures are those of kernels/include/ringcomm (layout.h, call.h) and kernels/cuda/args.h;
their offsets come from the native module, so that they are written down once. An address is an
int64; docs/protocol.md has the table of the words.

A release has a barrier of its own, and Triton puts two around each atomic operation. So where a
schedule has a barrier before it releases, that one orders nothing more: it stands beside what it is
about, and costs a block nothing that it would not wait for at the next one.
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
    """The address as a pointer to a word of 4 bytes."""
    return address.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def word64(address):
    """The address as a pointer to a word of 8 bytes."""
    return address.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def load_acquire_sys(address):
    """The 4-byte word at ``address``, which a peer publishes with :func:`exchange_release_sys`.

    For the reader of *publishing* and of *releasing a slot*: what the peer stored before it raised
    the word can be loaded after this. Triton lowers the addition of nothing to ``ld.acquire.sys``;
    one lane loads, and all get its value.
    """
    return tl.atomic_add(word32(address), 0, sem="acquire", scope="sys")


@triton.jit
def exchange_release_sys(address, value):
    """Stores the 4-byte word at ``address`` after all that the block stored before.

    For the writer of *publishing* and of *releasing a slot*: pairs with the acquire of the peer
    that polls the word. The barrier makes it speak for all lanes of the block.
    """
    tl.debug_barrier()
    tl.atomic_xchg(word32(address), value.to(tl.int32), sem="release", scope="sys")


@triton.jit
def reached(seen, want):
    """True if epoch ``seen`` is ``want`` or up to 2^31 - 1 past it, modulo 2^32."""
    return (seen.to(tl.int64) - want.to(tl.int64)).to(tl.int32) >= 0


@triton.jit
def link_line(region, table, stream, channel, peer, G: tl.constexpr):
    """The line of a link in the signal pad (``table`` 0) or among the epochs (``table`` 2)."""
    links: tl.constexpr = STREAM_COUNT * G.channels * G.world
    link = (stream * G.channels + channel) * G.world + peer
    return region + CONTROL_PAGE + (table * links + link) * LINE


@triton.jit
def channel_line(region, channel, G: tl.constexpr):
    """The line of a channel's own counters."""
    links: tl.constexpr = STREAM_COUNT * G.channels * G.world
    return region + CONTROL_PAGE + (3 * links + channel) * LINE


@triton.jit
def header_at(region, stream, channel, sender, epoch, G: tl.constexpr):
    """The header of item ``epoch`` that ``sender`` publishes to the region's owner."""
    lines: tl.constexpr = (3 * STREAM_COUNT * G.channels * G.world + G.channels + 1) // 2 * 2
    link = (stream * G.channels + channel) * G.world + sender
    index = (epoch - 1) & (G.slots - 1)
    return (
        region + CONTROL_PAGE + lines * LINE + (link.to(tl.int64) * G.slots + index) * HEADER_STRIDE
    )


@triton.jit
def slot_at(region, stream, channel, reader, epoch, G: tl.constexpr):
    """The slot of item ``epoch`` that the region's owner publishes to ``reader``.

    Sets for pairs come first (channels x world), then one per channel for what is shared.
    """
    slot_set = channel * G.world + reader
    if stream == SHARED:
        slot_set = G.channels * G.world + channel
    index = (epoch - 1) & (G.slots - 1)
    return region + G.staging_bytes + (slot_set.to(tl.int64) * G.slots + index) * G.segment_bytes
