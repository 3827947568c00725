"""The beginning and the end of every collective, around its schedule."""

from collections.abc import Iterable

import triton
import triton.language as tl

from .fault_record import ABORTED, MISMATCH, fail_aborted, fail_header, is_aborted
from .state import HEADER, RANK, READS_PEERS, get, open_state, sequence_word
from .waiting import other_call_seen
from .words import word64

# Arguments of the collectives' kernels whose values Triton must not compile for: it would compile
# again (seconds) for buffers that lie otherwise, while peers wait.
RUNTIME = ["chunk_bytes", "timeout_ns"]
# In tuples Triton compiles for what is a multiple of 16 all the same (Triton 3.6 to 3.9,
# specialize_impl in runtime/jit.py), so there numbers go as 4 * n + 3, which never is one.
TAG_BITS = tl.constexpr(2)
_TAG = 3


def tagged(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers as a kernel takes them in a tuple; :func:`untagged` gives them back."""
    return tuple((number << TAG_BITS.value) + _TAG for number in numbers)


@triton.jit
def untagged(number):
    """Returns the int64 that :func:`tagged` was given."""
    return (number + tl.full((), 0, tl.int64)) >> TAG_BITS


@triton.jit
def of_rank(items, rank):
    """Entry ``rank`` of a tuple of tagged addresses."""
    found = untagged(items[0])
    for r in tl.static_range(1, len(items)):
        if rank == r:
            found = untagged(items[r])
    return found


@triton.jit
def peer_at(ws, distance, G: tl.constexpr):
    """The rank that this one visits at ``distance``: its successor first, so that no two ranks
    read the same peer at the same time."""
    peer = get(ws, RANK) + distance
    return tl.where(peer < G.world, peer, peer - G.world)


@triton.jit
def begin_call(tables, timeout_ns, call, G: tl.constexpr):
    """Numbers the call, and looks for what peers published in calls that this rank did not make.

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
    """After the schedule: what was read in peers' buffers is what they meant to send.

    A sender that gave up may use its buffer again, but it raises its abort word first.
    """
    reads_peers = get(ws, READS_PEERS)
    tl.debug_barrier()
    if (status == 0) & (reads_peers != 0):
        # Orders the block's reads of data before those of the words; it touches nothing else. It is
        # one lane's, between barriers.
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
