"""Bytes that a collective reads and writes in the memory of one GPU that holds all its ranks.

``size_bytes`` is the larger of the two buffers of a rank. Reads and writes both count, as in the
bandwidth of a copy.
"""

from __future__ import annotations

COUNTED = ("reduce_scatter", "all_gather", "all_reduce")


def needed_bytes(collective: str, size_bytes: int, world: int) -> int:
    """Each rank reads what its result needs once, and writes its result once.

    reduce_scatter: a chunk of every rank in, one out. all_gather: the same bytes in and out.
    all_reduce, in place: a reduce-scatter, then the other chunks in and out.

    Raises:
        ValueError: the collective is not counted here.
    """
    if collective not in COUNTED:
        raise ValueError(f"{collective}: bytes are counted of {', '.join(COUNTED)}")
    sizes = {"reduce_scatter": world + 1, "all_gather": 2 * world, "all_reduce": 3 * world - 1}
    return sizes[collective] * size_bytes


def ring_bytes(collective: str, size_bytes: int, world: int) -> int:
    """Counts the bytes that the rings of ``reduce_scatter.h`` and ``all_gather.h`` move.

    Every rank: one hop without a predecessor (2 chunks: in, slot), W-2 hops that read a slot and
    fill the next with the own version or output beside it (3 chunks), and the last one (3
    chunks): 3W-1 chunks. An all-gather has as many: it copies the own chunk, and the last hop
    fills no slot. A chunk that is loaded for two stores is counted once.

    Raises:
        ValueError: not a reduce_scatter or all_gather.
    """
    if collective not in ("reduce_scatter", "all_gather"):
        raise ValueError(f"{collective}: the ring's bytes are counted of its two halves")
    return (3 * world - 1) * size_bytes
