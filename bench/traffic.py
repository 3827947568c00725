"""Bytes that a collective reads and writes in the memory of one GPU that holds all its ranks.

``size_bytes`` is that of the table: the larger of the two buffers of a rank, S. With W ranks a
chunk is S/W. Reads and writes both count, as in the bandwidth of a copy.
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
    if collective == "reduce_scatter":
        return (world + 1) * size_bytes
    if collective == "all_gather":
        return 2 * world * size_bytes
    if collective == "all_reduce":
        return (3 * world - 1) * size_bytes
    raise ValueError(f"{collective}: bytes are counted of {', '.join(COUNTED)}")


def distinct_bytes(collective: str, size_bytes: int, world: int) -> int:
    """Each byte of an input read once for all ranks, each byte of an output written once.

    Less than :func:`needed_bytes` where several ranks need the same bytes: their later reads may
    be served by a cache, so that a share of this count can be reached by no more than luck.

    Raises:
        ValueError: the collective is not counted here.
    """
    if collective in ("reduce_scatter", "all_gather"):
        return (world + 1) * size_bytes
    if collective == "all_reduce":
        return 2 * world * size_bytes
    raise ValueError(f"{collective}: bytes are counted of {', '.join(COUNTED)}")


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
