"""Waits, with a deadline and an eye on the abort words.

Each takes a ``status`` and returns one: 0 while all is well. A failure is not an exception here; a
call goes through the rest of its schedule without waiting or moving anything. All lanes of a block
must take the same branches, so what they branch on comes from words that one lane has read for all.
See NOTE [signals] in ringcomm/protocol/signal.h.
"""

import triton
import triton.language as tl

from .fault_points import AWAIT, passing
from .fault_record import (
    ABORTED,
    FAULT_ON_CONSUMED,
    FAULT_SEEN,
    FAULT_STEP,
    FAULT_STREAM,
    FAULT_THEIRS,
    FAULT_WAITED_NS,
    FAULT_WANTED,
    HOST_ABORT_REQUESTED,
    HOST_LOST,
    MISMATCH,
    PAGE_FAULT,
    PAGE_WAITS_FOR,
    PEER_CLOSED,
    PEER_LOST,
    TIMEOUT,
    claim_fault,
    copy_words,
    is_aborted,
    raise_fault,
)
from .hooks import IS_INTERPRETED, host_clock_ns, host_health, host_pause
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
    my_region,
    of_peer,
    seen,
    signal_line,
    slot_of,
)
from .words import (
    CONSUMED,
    FAREWELL,
    PAIR,
    READY,
    SHARED,
    link_line,
    load_acquire_sys,
    reached,
    word32,
    word64,
)

# A choice, not swept: the clock and the abort words cost as much as a few polls.
POLLS_PER_LOOK = tl.constexpr(16 if IS_INTERPRETED else 1024)

ID_WORDS = tl.constexpr(5)  # of a header, those that must be equal on all ranks


@triton.jit
def word_of_host_acquire_sys(host, peer):
    """Status of the process of ``peer``, from the page of words at ``host``; 0 while it lives."""
    status = tl.full((), 0, tl.int32)
    if load_acquire_sys(host + HOST_LOST + 4 * peer) != 0:
        status = tl.full((), PEER_LOST, tl.int32)
    if load_acquire_sys(host + HOST_ABORT_REQUESTED) != 0:
        status = tl.full((), ABORTED, tl.int32)
    return status


if IS_INTERPRETED:

    def clock_ns(ws):
        """A monotonic clock."""
        return host_clock_ns() + get(ws, CLOCK) * 0

    def health_acquire_sys(ws, peer):
        """Status of the process of ``peer``: 0 while it lives."""
        host = tl.load(word64(get(ws, TABLE) + TABLE_HOST))
        if host != 0:
            return word_of_host_acquire_sys(host, peer)
        return host_health(peer) + (peer * 0).to(tl.int32)

    def pause():
        """Leaves the core to others."""
        host_pause()

else:

    @triton.jit
    def clock_ns(ws):
        """A monotonic clock, the same for all lanes.

        Lanes read it at different times: one lane's reading, through memory, is everybody's.
        """
        clock = word64(ws) + CLOCK
        tl.atomic_xchg(clock, tl.extra.cuda.globaltimer(), sem="relaxed", scope="gpu")
        return tl.atomic_add(clock, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")

    @triton.jit
    def health_acquire_sys(ws, peer):
        """Status of the process of ``peer``, as this rank's host knows it; 0 while it lives."""
        return word_of_host_acquire_sys(tl.load(word64(get(ws, TABLE) + TABLE_HOST)), peer)

    @triton.jit
    def pause():
        """A block polls on: it has nothing to leave its place to."""


@triton.jit
def same_call(ws, theirs):
    """True if the header at ``theirs`` is of the call that this block is in."""
    same = get(ws, HEADER) == tl.load(word64(theirs))
    for i in tl.static_range(1, ID_WORDS):
        same = same & (get(ws, HEADER + i) == tl.load(word64(theirs) + i))
    return same


@triton.jit(noinline=True)
def other_call_seen(ws, peer, G: tl.constexpr):
    """Address of a header that ``peer`` published for another call than this; 0: none.

    A peer that runs another collective may publish on a stream that this call does not read.
    """
    me = get(ws, RANK)
    found = me * 0
    for stream in tl.static_range(PAIR, SHARED + 1):
        after = seen(ws, stream, peer, G) + 1
        # Pairs with the release in publish_release_sys() of the peer.
        ready = load_acquire_sys(signal_line(ws, me, stream, peer, G) + READY)
        if reached(ready, after):
            # This word is this rank's to write. An item acknowledged may be overwritten by now.
            consumed = tl.load(word32(signal_line(ws, peer, stream, me, G) + CONSUMED))
            if not reached(consumed, after):
                theirs = slot_of(ws, peer, stream, me, after, G)
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
    # Pairs with the release with which the peer says farewell. Channel 0 has the word.
    farewell = link_line(my_region(ws), 0, PAIR, peer * 0, peer, G) + FAREWELL
    if load_acquire_sys(farewell) != 0:
        status = tl.full((), PEER_CLOSED, tl.int32)
    for rank in range(G.world):
        if is_aborted(ws, peer * 0 + rank):
            status = tl.full((), ABORTED, tl.int32)
    return status


@triton.jit
def end_of_waiting(ws, peer, G: tl.constexpr):
    """The rank that ``peer`` waits for, and that one in turn, to one that does not wait.

    One lane reads the words for all; they are only a hint for people.
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
        word_of: (stream, peer, on_consumed, step) of the word.
        want: epoch that was awaited.
        was: epoch that was seen.
        waited_ns: how long.
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
        tl.store(word32(fault + FAULT_STEP), word_of[3].to(tl.int32))
        tl.store(word32(fault + FAULT_STREAM), word_of[0])
        tl.store(word32(fault + FAULT_ON_CONSUMED), word_of[2])
        tl.store(word64(fault + FAULT_WAITED_NS), waited_ns)
        if theirs != 0:
            copy_words(fault + FAULT_THEIRS, theirs, HEADER_WORDS)
        raise_fault(ws, page)


@triton.jit(noinline=True)
def await_slowly(ws, word, stream, peer, on_consumed, step, want, G: tl.constexpr):
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
            # The peer may have published and then gone; what it published counts.
            if (status != 0) & (status != ABORTED):
                if reached(load_acquire_sys(word), want):
                    status = tl.full((), 0, tl.int32)
        else:
            pause()
        was = load_acquire_sys(word)
    if status != 0:
        give_up(ws, status, (stream, peer, on_consumed, step), want, was, waited_ns, theirs, G)
    if started != 0:
        tl.store(word32(my_region(ws) + PAGE_WAITS_FOR), tl.full((), 0, tl.int32))
    return status


@triton.jit
def await_acquire_sys(ws, stream, peer, on_consumed, step, want, status, G: tl.constexpr):
    """Waits until a word that ``peer`` writes here reaches epoch ``want``.

    For the reader of data (``on_consumed`` 0: the peer's item is there) and for the writer of a
    slot (``on_consumed`` 1: the peer has read the item). Pairs with :func:`exchange_release_sys`
    of the peer.

    Args:
        ws: the block's state.
        stream: PAIR or SHARED.
        peer: who writes the word.
        on_consumed: which word of the line.
        step: items of this call before the one waited for, for the fault record.
        want: epoch.
        status: of the call so far; unless 0, nothing is waited for.
        G: the communicator's Geometry.

    Returns:
        The status of the call from here on.
    """
    if status == 0:
        passing(ws, AWAIT)
        line = signal_line(ws, get(ws, RANK), stream, peer, G)
        word = line + READY + on_consumed * (CONSUMED - READY)
        if not reached(load_acquire_sys(word), want):
            status = await_slowly(ws, word, stream, peer, on_consumed, step, want, G)
    return status
