"""The fault record of a rank whose call fails, and the abort word that tells the others.

The twins of ``claim_fault``, ``raise_fault`` and ``fail`` in ringcomm/protocol/signal.h.
"""

import triton
import triton.language as tl

from ringcomm._native import STATUSES, STRUCTURES

from .state import HEADER, HEADER_WORDS, RANK, REGION, TABLE, TABLE_HOST, get, my_region, of_peer
from .words import exchange_release_sys, load_acquire_sys, word32, word64

TIMEOUT = tl.constexpr(STATUSES["timeout"])
PEER_LOST = tl.constexpr(STATUSES["peer_lost"])
MISMATCH = tl.constexpr(STATUSES["mismatch"])
ABORTED = tl.constexpr(STATUSES["aborted"])
PEER_CLOSED = tl.constexpr(STATUSES["peer_closed"])
CORRUPT = tl.constexpr(STATUSES["corrupt"])

PAGE_CLAIMED = tl.constexpr(STRUCTURES["page.claimed"])
PAGE_WAITS_FOR = tl.constexpr(STRUCTURES["page.waits_for"])
PAGE_ABORTED = tl.constexpr(STRUCTURES["page.aborted"])
PAGE_FAULT = tl.constexpr(STRUCTURES["page.fault"])
FAULT_WORDS = tl.constexpr(STRUCTURES["fault"] // 8)
FAULT_STATUS = tl.constexpr(STRUCTURES["fault.status"])
FAULT_RANK = tl.constexpr(STRUCTURES["fault.rank"])
FAULT_PEER = tl.constexpr(STRUCTURES["fault.peer"])
FAULT_WANTED = tl.constexpr(STRUCTURES["fault.wanted"])
FAULT_SEEN = tl.constexpr(STRUCTURES["fault.seen"])
FAULT_STEP = tl.constexpr(STRUCTURES["fault.step"])
FAULT_STREAM = tl.constexpr(STRUCTURES["fault.stream"])
FAULT_ON_CONSUMED = tl.constexpr(STRUCTURES["fault.on_consumed"])
FAULT_WAITED_NS = tl.constexpr(STRUCTURES["fault.waited_ns"])
FAULT_MINE = tl.constexpr(STRUCTURES["fault.mine"])
FAULT_THEIRS = tl.constexpr(STRUCTURES["fault.theirs"])
STREAM_BYTES = tl.constexpr(STRUCTURES["header.stream_bytes"])
HOST_ABORT_REQUESTED = tl.constexpr(STRUCTURES["host.abort_requested"])
HOST_FAULT_RAISED = tl.constexpr(STRUCTURES["host.fault_raised"])
HOST_LOST = tl.constexpr(STRUCTURES["host.lost"])
HOST_FAULT = tl.constexpr(STRUCTURES["host.fault"])


@triton.jit
def is_aborted(ws, rank):
    """True if the abort word of ``rank`` is up; pairs with the release in :func:`raise_fault`."""
    return load_acquire_sys(of_peer(ws, rank, REGION) + PAGE_ABORTED) != 0


@triton.jit
def copy_words(target, source, COUNT: tl.constexpr):
    """COUNT words of 8 bytes, at most 32."""
    lanes = tl.arange(0, 32)
    words = tl.load(word64(source) + lanes, mask=lanes < COUNT)
    tl.store(word64(target) + lanes, words, mask=lanes < COUNT)


@triton.jit
def raise_fault(ws, page):
    """The record is complete: raises this rank's abort word, and tells its host."""
    # Pairs with the acquire in is_aborted() on every other rank.
    exchange_release_sys(page + PAGE_ABORTED, tl.full((), 1, tl.int32))
    host = tl.load(word64(get(ws, TABLE) + TABLE_HOST))
    if host != 0:
        copy_words(host + HOST_FAULT, page + PAGE_FAULT, FAULT_WORDS)
        # Pairs with the acquire in DeviceComm's `raised` and `fault`.
        exchange_release_sys(host + HOST_FAULT_RAISED, tl.full((), 1, tl.int32))


@triton.jit
def claim_fault(ws, status, peer):
    """Begins this rank's fault record; 0 when it is taken, else the address of its page."""
    page = my_region(ws)
    # Blocks of one rank race for the record; no other rank touches the claim.
    one = tl.full((), 1, tl.int32)
    tl.debug_barrier()  # one lane claims for all
    taken = tl.atomic_xchg(word32(page + PAGE_CLAIMED), one, sem="acq_rel", scope="sys")
    if taken == 0:
        fault = page + PAGE_FAULT
        tl.store(word32(fault + FAULT_STATUS), status)
        tl.store(word32(fault + FAULT_RANK), get(ws, RANK).to(tl.int32))
        tl.store(word32(fault + FAULT_PEER), peer.to(tl.int32))
        copy_words(fault + FAULT_MINE, ws + 8 * HEADER, HEADER_WORDS)
        tl.debug_barrier()
    return tl.where(taken == 0, page, page * 0)


@triton.jit(noinline=True)
def fail_header(ws, status, peer, theirs, expected_bytes):
    """Records what the header at ``theirs`` is not: of this call, or sound; returns the status."""
    page = claim_fault(ws, status, peer)
    if page != 0:
        copy_words(page + PAGE_FAULT + FAULT_THEIRS, theirs, HEADER_WORDS)
        tl.store(word64(page + PAGE_FAULT + FAULT_MINE + STREAM_BYTES), expected_bytes)
        raise_fault(ws, page)
    return status


@triton.jit(noinline=True)
def fail_aborted(ws):
    """Records that some rank gave up while its buffer was read; returns the status."""
    status = tl.full((), ABORTED, tl.int32)
    page = claim_fault(ws, status, get(ws, RANK))
    if page != 0:
        raise_fault(ws, page)
    return status
