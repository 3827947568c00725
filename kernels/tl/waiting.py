# SPDX-License-Identifier: Apache-2.0
"""Waits that have a deadline and watch the abort words, and the faults of waits that fail."""

import triton
import triton.language as tl

from ringcomm._native import FAULT_POINTS, STATUSES, STRUCTURES

from .hooks import IS_INTERPRETED, host_clock_ns, host_health, host_passing, host_pause
from .state import (
    CLOCK,
    HEADER,
    HEADER_WORDS,
    RANK,
    REGION,
    TABLE,
    TABLE_HOST,
    TIMEOUT_NS,
    get,
    header_of,
    my_region,
    of_peer,
    seen,
    signal_line,
)
from .words import (
    CONSUMED,
    DETACHED,
    PAIR,
    READY,
    SHARED,
    exchange_release_sys,
    link_line,
    load_acquire_sys,
    reached,
    word32,
    word64,
)

# --------------------------------------------------------------------------------------------------
# The points at which tests inject faults into the interpreter: publications, acks and waits.
#
# The Triton twin of ``Team::passing`` (ringcomm/core/team.h): the fault that the process has armed
# (``ringcomm._native.arm_fault``) counts these passages like the passages of native calls.
# --------------------------------------------------------------------------------------------------

PUBLISH = tl.constexpr(FAULT_POINTS["publish"])
ACKNOWLEDGE = tl.constexpr(FAULT_POINTS["acknowledge"])
AWAIT = tl.constexpr(FAULT_POINTS["await"])

if IS_INTERPRETED:

    def passing(ws, point):
        """Passes the fault point ``point``, just before the operation that it names."""
        host_passing(point, get(ws, RANK), get(ws, HEADER))

else:

    @triton.jit
    def passing(ws, point: tl.constexpr):
        """Does nothing on a GPU."""


# --------------------------------------------------------------------------------------------------
# The fault record of a rank whose call fails, and the abort word that the other ranks watch.
#
# The twins of ``claim_fault``, ``raise_fault`` and ``fail`` in ringcomm/protocol/signal.h.
# --------------------------------------------------------------------------------------------------

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
FAULT_ITEM = tl.constexpr(STRUCTURES["fault.item"])
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
    """Copies COUNT words of 8 bytes each, at most 32 words."""
    lanes = tl.arange(0, 32)
    words = tl.load(word64(source) + lanes, mask=lanes < COUNT)
    tl.store(word64(target) + lanes, words, mask=lanes < COUNT)


@triton.jit
def raise_fault(ws, page):
    """Raises this rank's abort word and informs its host, once the fault record is complete."""
    # Pairs with the acquire in is_aborted() on every other rank.
    exchange_release_sys(page + PAGE_ABORTED, tl.full((), 1, tl.int32))
    host = tl.load(word64(get(ws, TABLE) + TABLE_HOST))
    if host != 0:
        copy_words(host + HOST_FAULT, page + PAGE_FAULT, FAULT_WORDS)
        # Pairs with the acquire in DeviceComm's `raised` and `fault`.
        exchange_release_sys(host + HOST_FAULT_RAISED, tl.full((), 1, tl.int32))


@triton.jit
def claim_fault(ws, status, peer):
    """Claims this rank's fault record: returns the address of its page, or 0 if it is taken."""
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
    """Records that the header at ``theirs`` is of another call or corrupt; returns the status."""
    page = claim_fault(ws, status, peer)
    if page != 0:
        copy_words(page + PAGE_FAULT + FAULT_THEIRS, theirs, HEADER_WORDS)
        tl.store(word64(page + PAGE_FAULT + FAULT_MINE + STREAM_BYTES), expected_bytes)
        raise_fault(ws, page)
    return status


@triton.jit(noinline=True)
def fail_aborted(ws):
    """Records that a peer gave up while this rank read its buffer; returns the status."""
    status = tl.full((), ABORTED, tl.int32)
    page = claim_fault(ws, status, get(ws, RANK))
    if page != 0:
        raise_fault(ws, page)
    return status


# --------------------------------------------------------------------------------------------------
# Waits that have a deadline and watch the abort words.
#
# Each takes a ``status`` and returns the new status: 0 while all is well. A failure raises no
# exception; the call goes through the rest of its schedule without waiting or moving data. All
# lanes of a block must take the same branches, so they branch on words that one lane has read for
# all. See NOTE [signals] in ringcomm/protocol/signal.h.
# --------------------------------------------------------------------------------------------------

# Chosen, not measured: reading the clock and the abort words costs as much as a few polls.
POLLS_PER_LOOK = tl.constexpr(16 if IS_INTERPRETED else 1024)

ID_WORDS = tl.constexpr(5)  # the first words of a header, which must be equal on all ranks


@triton.jit
def word_of_host_acquire_sys(host, peer):
    """Returns the status of ``peer``'s process from the host page at ``host``; 0 while it lives."""
    status = tl.full((), 0, tl.int32)
    if load_acquire_sys(host + HOST_LOST + 4 * peer) != 0:
        status = tl.full((), PEER_LOST, tl.int32)
    if load_acquire_sys(host + HOST_ABORT_REQUESTED) != 0:
        status = tl.full((), ABORTED, tl.int32)
    return status


if IS_INTERPRETED:

    def clock_ns(ws):
        """Returns the time of a monotonic clock, in nanoseconds."""
        return host_clock_ns() + get(ws, CLOCK) * 0

    def health_acquire_sys(ws, peer):
        """Returns the status of ``peer``'s process: 0 while it lives."""
        host = tl.load(word64(get(ws, TABLE) + TABLE_HOST))
        if host != 0:
            return word_of_host_acquire_sys(host, peer)
        return host_health(peer) + (peer * 0).to(tl.int32)

    def pause():
        """Yields the core to other threads."""
        host_pause()

else:

    @triton.jit
    def clock_ns(ws):
        """Returns the time of a monotonic clock in nanoseconds, equal in all lanes.

        Lanes would read the clock at different times: all take one lane's reading from memory.
        """
        clock = word64(ws) + CLOCK
        tl.atomic_xchg(clock, tl.extra.cuda.globaltimer(), sem="relaxed", scope="gpu")
        return tl.atomic_add(clock, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")

    @triton.jit
    def health_acquire_sys(ws, peer):
        """Returns the status of ``peer``'s process on this rank's host page; 0 while it lives."""
        return word_of_host_acquire_sys(tl.load(word64(get(ws, TABLE) + TABLE_HOST)), peer)

    @triton.jit
    def pause():
        """Does nothing: a block on a GPU has no other thread to yield to."""


@triton.jit
def same_call(ws, theirs):
    """True if the header at ``theirs`` describes the call that this block runs."""
    same = get(ws, HEADER) == tl.load(word64(theirs))
    for i in tl.static_range(1, ID_WORDS):
        same = same & (get(ws, HEADER + i) == tl.load(word64(theirs) + i))
    return same


@triton.jit(noinline=True)
def other_call_seen(ws, peer, G: tl.constexpr):
    """Returns the address of a header that ``peer`` published for another call, or 0.

    A peer that runs another collective may publish on a stream that this call does not read.
    """
    me = get(ws, RANK)
    found = me * 0
    for stream in tl.static_range(PAIR, SHARED + 1):
        after = seen(ws, stream, peer, G) + 1
        # Pairs with the release in publish_release_sys() of the peer.
        ready = load_acquire_sys(signal_line(ws, me, stream, peer, G) + READY)
        if reached(ready, after):
            # Only this rank writes the word. An acknowledged item may be overwritten by now.
            consumed = tl.load(word32(signal_line(ws, peer, stream, me, G) + CONSUMED))
            if not reached(consumed, after):
                theirs = header_of(ws, me, stream, peer, after, G)
                if tl.load(word64(theirs)) <= get(ws, HEADER):
                    if not same_call(ws, theirs):
                        found = theirs
    return found


@triton.jit
def reason_to_give_up(ws, peer, waited_ns, G: tl.constexpr):
    """Returns why a wait for ``peer`` that began ``waited_ns`` ago must end, or 0."""
    status = tl.full((), 0, tl.int32)
    if waited_ns > get(ws, TIMEOUT_NS):
        status = tl.full((), TIMEOUT, tl.int32)
    health = health_acquire_sys(ws, peer)
    if health != 0:
        status = health
    # Pairs with the release with which the peer detaches. The word is in channel 0's line.
    detached = link_line(my_region(ws), 0, PAIR, peer * 0, peer, G) + DETACHED
    if load_acquire_sys(detached) != 0:
        status = tl.full((), PEER_CLOSED, tl.int32)
    for rank in range(G.world):
        if is_aborted(ws, peer * 0 + rank):
            status = tl.full((), ABORTED, tl.int32)
    return status


@triton.jit
def end_of_waiting(ws, peer, G: tl.constexpr):
    """Follows the chain of ranks that wait for each other from ``peer`` on; returns its last rank.

    One lane reads the words for all; the result is only a hint for people.
    """
    for _ in range(G.world):
        after = load_acquire_sys(of_peer(ws, peer, REGION) + PAGE_WAITS_FOR).to(tl.int64) - 1
        if (after >= 0) & (after < G.world) & (after != get(ws, RANK)):
            peer = after
    return peer


@triton.jit
def give_up(ws, status, word_of, want, was, waited_ns, theirs, G: tl.constexpr):
    """Records why the wait for a word ended.

    Args:
        word_of: (stream, peer, on_consumed, item) of the word.
        want: awaited epoch.
        was: epoch that the word had.
        waited_ns: duration of the wait.
        theirs: address of the other call's header at a mismatch, else 0.
    """
    peer = word_of[1]
    if status == TIMEOUT:
        peer = end_of_waiting(ws, peer, G)
    page = claim_fault(ws, status, peer)
    if page != 0:
        fault = page + PAGE_FAULT
        tl.store(word32(fault + FAULT_WANTED), want.to(tl.int32))
        tl.store(word32(fault + FAULT_SEEN), was.to(tl.int32))
        tl.store(word32(fault + FAULT_ITEM), word_of[3].to(tl.int32))
        tl.store(word32(fault + FAULT_STREAM), word_of[0])
        tl.store(word32(fault + FAULT_ON_CONSUMED), word_of[2])
        tl.store(word64(fault + FAULT_WAITED_NS), waited_ns)
        if theirs != 0:
            copy_words(fault + FAULT_THEIRS, theirs, HEADER_WORDS)
        raise_fault(ws, page)


@triton.jit(noinline=True)
def await_slowly(ws, word, stream, peer, on_consumed, item, want, G: tl.constexpr):
    """Polls the word at address ``word`` until it reaches ``want``, or there is a reason to give
    up; the other arguments are those of :func:`await_acquire_sys`."""
    status = tl.full((), 0, tl.int32)
    was = load_acquire_sys(word)
    polls = tl.full((), 0, tl.int32)
    started = tl.full((), 0, tl.int64)
    waited_ns = tl.full((), 0, tl.int64)
    theirs = tl.full((), 0, tl.int64)
    while (status == 0) & (not reached(was, want)):
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            now = clock_ns(ws)
            if started == 0:
                started = now
                tl.store(word32(my_region(ws) + PAGE_WAITS_FOR), peer.to(tl.int32) + 1)
            waited_ns = now - started
            status = reason_to_give_up(ws, peer, waited_ns, G)
            if status != ABORTED:
                theirs = other_call_seen(ws, peer, G)
                if theirs != 0:
                    status = tl.full((), MISMATCH, tl.int32)
            # The peer may have published and then ended; the published item is valid.
            if (status != 0) & (status != ABORTED):
                if reached(load_acquire_sys(word), want):
                    status = tl.full((), 0, tl.int32)
        else:
            pause()
        was = load_acquire_sys(word)
    if status != 0:
        give_up(ws, status, (stream, peer, on_consumed, item), want, was, waited_ns, theirs, G)
    if started != 0:
        tl.store(word32(my_region(ws) + PAGE_WAITS_FOR), tl.full((), 0, tl.int32))
    return status


@triton.jit
def await_acquire_sys(ws, stream, peer, on_consumed, item, want, status, G: tl.constexpr):
    """Waits until a word that ``peer`` writes here reaches epoch ``want``.

    For the reader of data (``on_consumed`` 0: the peer's item is there) and for the writer of a
    slot (``on_consumed`` 1: the peer has read the item). Pairs with :func:`exchange_release_sys`
    of the peer.

    Args:
        ws: the block's state.
        stream: PAIR or SHARED.
        peer: the rank that writes the word.
        on_consumed: which word of the line.
        item: index in this call of the awaited item, for the fault record.
        want: epoch.
        status: the call's status so far; unless 0, the function returns it at once.
        G: the communicator's Geometry.

    Returns:
        The new status of the call.
    """
    if status == 0:
        passing(ws, AWAIT)
        line = signal_line(ws, get(ws, RANK), stream, peer, G)
        word = line + READY + on_consumed * (CONSUMED - READY)
        if not reached(load_acquire_sys(word), want):
            status = await_slowly(ws, word, stream, peer, on_consumed, item, want, G)
    return status
