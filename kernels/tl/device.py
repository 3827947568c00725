# SPDX-License-Identifier: Apache-2.0
"""The device functions from which users write fused kernels; public as ``ringcomm.tl``.

All lanes of a block run every function. Addresses are int64. A ``ringcomm.tl.Symmetric`` tensor has
one copy per rank; ``ptrs`` is the address of a table of the copies' addresses. ``ws`` is the
block's state, from :func:`begin_kernel`. A ``status`` is 0 until a wait gives up and returns a
fault; then all waits return at once, and the kernel must not signal or touch a peer's memory.

The suffix of a name gives memory order and scope: ``release`` publishes everything that the block
stored before, ``acquire`` lets the block load published data; ``sys`` holds between ranks, ``gpu``
between the blocks of one rank.
"""

import triton
import triton.language as tl

from ringcomm import _native

from .endpoint import end_call, peer_at
from .moving import accumulate, copy, is_aligned, pointer, round_to
from .state import CHANNEL, HEADER, RANK, READS_PEERS, TIMEOUT_NS, open_state
from .state import get as state_word
from .waiting import (
    ABORTED,
    POLLS_PER_LOOK,
    TIMEOUT,
    await_slowly,
    clock_ns,
    give_up,
    is_aborted,
    pause,
)
from .words import PAIR, exchange_release_sys, load_acquire_sys, reached, word32, word64

__all__ = [
    "accumulate",
    "advance_epoch",
    "barrier_sys",
    "begin_kernel",
    "end_kernel",
    "get",
    "is_aligned",
    "peer_address",
    "peer_at",
    "peer_ptr",
    "pointer",
    "put",
    "rank_of",
    "round_to",
    "signal_release_gpu",
    "signal_release_sys",
    "wait_acquire_gpu",
    "wait_acquire_sys",
    "word_of",
]

# A user's kernel is not a collective: it has no header that a peer could compare.
_WORDS = _native.call_words(match_bytes=0, collective=0, dtype=-1, redop=-1, algorithm=0)
_WORD0, _WORD1, _WORD2, _WORD3 = (tl.constexpr(word) for word in _WORDS)


@triton.jit
def begin_kernel(table, block, timeout_ns, G: tl.constexpr):
    """Opens the state of a block; a kernel calls it first.

    Pairs with :func:`end_kernel`.

    Args:
        table: ``context.table_ptr``.
        block: index of this block, below ``context.blocks``; no two blocks of a launch share one.
        timeout_ns: ``context.timeout_ns``, the deadline of one wait.
        G: ``context.geometry``.

    Returns:
        The block's state, and the status so far: not 0 when the communicator is unusable.
    """
    zero = tl.full((), 0, tl.int64)
    call = (zero + _WORD0, zero + _WORD1, zero + _WORD2, zero + _WORD3)
    ws = open_state(zero + table, zero + block, zero + timeout_ns, call, G)
    words = word64(ws)
    # The communicator's own words exist per channel only: waits look at the words of channel 0.
    # Call number 0 precedes any collective that a peer may already run.
    tl.store(words + CHANNEL, zero)
    tl.store(words + HEADER, zero)
    tl.store(words + READS_PEERS, zero + 1)
    tl.debug_barrier()
    status = tl.full((), 0, tl.int32)
    if is_aborted(ws, state_word(ws, RANK)):
        status = tl.full((), ABORTED, tl.int32)
    return ws, status


@triton.jit
def end_kernel(ws, status, G: tl.constexpr):
    """Ends a block's work and returns its status; a block calls it last.

    A peer that gave up may reuse memory that this block has read, but raises its abort word first:
    the data read are valid only if no abort word is up now.
    """
    return end_call(ws, status, G)


@triton.jit
def rank_of(ws):
    """Returns this rank."""
    return state_word(ws, RANK)


# ---- memory of peers ----------------------------------------------------------------------------


@triton.jit
def peer_address(ptrs, peer):
    """Returns the address of the copy of ``peer``, as this rank's kernels use it."""
    return tl.load(word64(tl.full((), 0, tl.int64) + ptrs) + peer)


@triton.jit
def peer_ptr(ptrs, peer, DTYPE: tl.constexpr):
    """Returns the copy of ``peer`` as a pointer to DTYPE, for the kernel's own loads and stores.

    Wait for the peer's signal before a load; signal the peer after a store.
    """
    return peer_address(ptrs, peer).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def _copy_elems(target, source, count, DTYPE: tl.constexpr):
    # The launch passes small integers, and the address 0 of an empty tensor, as 32 bits or less.
    zero = tl.full((), 0, tl.int64)
    copy(zero + target, zero + source, tl.full((), 0, tl.int32) + count, DTYPE)


@triton.jit
def put(ptrs, peer, offset, source, count, DTYPE: tl.constexpr):
    """Copies ``count`` elements from address ``source`` to the copy of ``peer``, from element
    ``offset`` on.

    The peer may load them after it has waited for a later :func:`signal_release_sys` of this block.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    target = peer_address(ptrs, peer) + (tl.full((), 0, tl.int64) + offset) * ITEM
    _copy_elems(target, source, count, DTYPE)


@triton.jit
def get(ptrs, peer, offset, target, count, DTYPE: tl.constexpr):
    """Copies ``count`` elements of the copy of ``peer``, from element ``offset`` on, to address
    ``target``.

    Before, wait with :func:`wait_acquire_sys` for the peer's signal that the elements are ready.
    The peer may overwrite them after it has waited for a later signal of this block.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    source = peer_address(ptrs, peer) + (tl.full((), 0, tl.int64) + offset) * ITEM
    _copy_elems(target, source, count, DTYPE)


# ---- between ranks ------------------------------------------------------------------------------


@triton.jit
def word_of(ptrs, owner, row, writer, G: tl.constexpr):
    """Returns the address of word [row, writer] of int32 words [rows, world] in ``owner``'s copy.

    Only ``writer`` stores the word. A rank counts epochs in its own column of its own copy.
    """
    return peer_address(ptrs, owner) + 4 * (writer + row * G.world)


@triton.jit
def advance_epoch(word):
    """Adds 1 to the 4-byte word at address ``word``, which only this block uses; returns the sum.

    Signals take their epochs from memory, not from the launch's arguments: a captured CUDA graph
    replays its arguments, but memory keeps counting. Epochs wrap around at 2^32, as waits expect.
    """
    epoch = tl.load(word32(word)).to(tl.int64) + 1
    tl.debug_barrier()  # every lane has read the word before one lane changes it
    tl.store(word32(word), epoch.to(tl.int32))
    tl.debug_barrier()
    return epoch


@triton.jit
def signal_release_sys(word, epoch):
    """Stores ``epoch`` in the 4-byte word at address ``word``, in a peer's memory.

    Call it after putting data there or reading the peer's data: all earlier loads and stores of the
    block's lanes come before the signal. Pairs with the peer's :func:`wait_acquire_sys`.
    """
    exchange_release_sys(word, tl.full((), 0, tl.int64) + epoch)


@triton.jit
def wait_acquire_sys(ws, word, peer, epoch, item, status, G: tl.constexpr):
    """Waits until the 4-byte word at address ``word`` of this rank reaches ``epoch``.

    Call it before loading data that ``peer`` has put or made ready, or storing where the peer has
    read. Pairs with the :func:`signal_release_sys` of the peer, the word's only writer.

    Args:
        ws: the block's state.
        word: address, in this rank's copy of a symmetric tensor.
        peer: the rank that stores the word; the error of a failed wait names it.
        epoch: the awaited value; a later epoch also ends the wait.
        item: any number; the error of a failed wait shows it.
        status: the block's status so far; unless 0, the function returns it at once.
        G: the communicator's Geometry.

    Returns:
        The new status: not 0 after the deadline, when the peer or the communicator has ended, or
        when some rank gave up.
    """
    zero = tl.full((), 0, tl.int64)
    if status == 0:
        if not reached(load_acquire_sys(word), zero + epoch):
            status = await_slowly(ws, word, PAIR, peer + zero, 0, item + zero, epoch + zero, G)
    return status


@triton.jit
def barrier_sys(ws, ptrs, block, item, status, G: tl.constexpr):
    """Waits until the blocks with this index have reached the barrier on all ranks.

    For kernels whose ranks read each other's memory between two barriers: after the barrier, each
    of these blocks can load what any of them stored before it. Pairs with itself on the peers.

    Args:
        ws: the block's state.
        ptrs: table of the ranks' int32 words [blocks, world], initially 0, used for barriers only;
            a rank counts its barriers in its own column of its own words.
        block: row of this block; equal on the ranks that synchronize.
        item: any number; the error of a failed wait shows it.
        status: the block's status so far; unless 0, the function returns it and signals no peer.
        G: the communicator's Geometry.

    Returns:
        The new status, as :func:`wait_acquire_sys` returns it.
    """
    if status == 0:
        me = rank_of(ws)
        epoch = advance_epoch(word_of(ptrs, me, block, me, G))
        for distance in range(1, G.world):
            signal_release_sys(word_of(ptrs, peer_at(ws, distance, G), block, me, G), epoch)
        for distance in range(1, G.world):
            peer = peer_at(ws, distance, G)
            word = word_of(ptrs, me, block, peer, G)
            status = wait_acquire_sys(ws, word, peer, epoch, item, status, G)
    return status


# ---- between the blocks of a rank ---------------------------------------------------------------


@triton.jit
def load_acquire_gpu(word):
    """Loads the 4-byte word at address ``word``, which another block of this rank may publish.

    Pairs with :func:`signal_release_gpu`.
    """
    return tl.atomic_add(word32(word), 0, sem="acquire", scope="gpu")


@triton.jit
def signal_release_gpu(word, epoch):
    """Stores ``epoch`` in the 4-byte word at address ``word``, for other blocks of this rank.

    Call it after storing data that other blocks compute on: all earlier stores of the block's lanes
    come before the signal. Pairs with the :func:`wait_acquire_gpu` of those blocks.
    """
    tl.debug_barrier()
    tl.atomic_xchg(word32(word), epoch.to(tl.int32), sem="release", scope="gpu")


@triton.jit(noinline=True)
def await_block(ws, word, epoch, G: tl.constexpr):
    """Polls the word at address ``word`` until it reaches ``epoch`` or this rank has given up."""
    status = tl.full((), 0, tl.int32)
    was = load_acquire_gpu(word)
    polls = tl.full((), 0, tl.int32)
    started = tl.full((), 0, tl.int64)
    while (status == 0) & (not reached(was, epoch)):
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            now = clock_ns(ws)
            if started == 0:
                started = now
            me = rank_of(ws)
            # The other block may wait for each peer in turn until the deadline; its fault record
            # then names the peer. The longer deadline here is for a block that never runs.
            if now - started > state_word(ws, TIMEOUT_NS) * (G.world + 1):
                status = tl.full((), TIMEOUT, tl.int32)
                word_of = (PAIR, me, 0, me * 0)
                give_up(ws, status, word_of, epoch, was, now - started, me * 0, G)
            elif is_aborted(ws, me):
                status = tl.full((), ABORTED, tl.int32)
        else:
            pause()
        was = load_acquire_gpu(word)
    return status


@triton.jit
def wait_acquire_gpu(ws, word, epoch, status, G: tl.constexpr):
    """Waits until the 4-byte word at address ``word`` reaches ``epoch``.

    Call it before computing on data that another block of this rank stores. Pairs with that block's
    :func:`signal_release_gpu`. Blocks that signal must have lower indices than blocks that wait:
    they start first, and in Triton's interpreter they end before the waiting blocks begin.

    Returns:
        The new status: not 0 if another block of this rank has given up.
    """
    if status == 0:
        if not reached(load_acquire_gpu(word), epoch):
            status = await_block(ws, word, epoch, G)
    return status
