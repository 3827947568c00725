"""State on a disk or on the host, and parameters on a disk: bytes of a rank, and time.

A rank's chunks are divided into pieces, whose records go through buffers in turn. A record moves in
and out once a step, unless its buffer serves no other piece. Parameters move by chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringcomm.errors import ArgumentError
from ringcomm.memory import Disk
from ringcomm.offload.scratch import PAGE_BYTES

GIGA = 1e9


class Records(NamedTuple):
    """Records of one size that follow each other."""

    size_bytes: int
    number: int


def bytes_of(records: Sequence[Records], begin: int = 0, end: int | None = None) -> int:
    """Returns the bytes of records [begin, end)."""
    found, at = 0, 0
    for size, count in records:
        last = at + count if end is None else min(end, at + count)
        found += max(0, last - max(begin, at)) * size
        at += count
    return found


def moving(records: Sequence[Records], disk: Disk) -> list[Records]:
    """Returns the records that do not stay in memory; the last ones stay, as many as fit."""
    left, rest = disk.resident_bytes, list(records)
    while rest:
        size, count = rest.pop()
        kept = min(count, left // size) if size else 0
        left -= kept * size
        if kept < count:
            return [*rest, Records(size, count - kept)]
    return []


class DiskTime(NamedTuple):
    """Seconds of a step's reads and writes; ``between_s`` of both can pass while ranks compute."""

    read_s: float
    write_s: float
    between_s: float

    def added_s(self, compute_s: float) -> float:
        """Returns the seconds by which the disk lengthens a step that computes ``compute_s``."""
        return self.read_s + self.write_s - min(self.between_s, compute_s)


class TierBytes(NamedTuple):
    """Bytes of a rank whose state or parameters are in another tier than memory.

    Attributes:
        buffers: bytes in memory that records take in turn.
        resident: bytes in memory of records that never move.
        stored: bytes of the file, or of pinned memory of the host.
        read: bytes that a step reads, at most.
        written: bytes that a step writes.
        ahead: bytes of ``read`` that can be read while the model computes.
        behind: bytes of ``written`` that can be written while the model computes.
    """

    buffers: int = 0
    resident: int = 0
    stored: int = 0
    read: int = 0
    written: int = 0
    ahead: int = 0
    behind: int = 0

    @classmethod
    def of_state(cls, records: Sequence[Records], disk: Disk) -> TierBytes:
        """Returns the bytes of a state whose records a step visits in this order."""
        rest = moving(records, disk)
        resident, total = bytes_of(records) - bytes_of(rest), sum(count for _, count in rest)
        if not total:
            return cls(resident=resident)
        size = max(PAGE_BYTES, *(size for size, _ in rest))
        buffers = min(total, disk.buffer_bytes // size)
        # Buffer b serves the records b, b + buffers, ...: from here on a buffer has one record.
        sharing = min(buffers, total - buffers)
        ahead, behind = bytes_of(rest, 0, sharing), bytes_of(rest, total - sharing)
        moved = ahead + bytes_of(rest, buffers)
        return cls(buffers * size, resident, bytes_of(rest), moved, moved, ahead, behind)

    @classmethod
    def of_params(
        cls, frozen: Sequence[Records], trained: Sequence[Records], disk: Disk, has_masters: bool
    ) -> TierBytes:
        """Returns the bytes of parameters at stage 3, whose chunks are records of whole pages.

        Forward, backward and optimizer read each chunk that is not resident; the optimizer does not
        where it has FP32 masters. Chunks that stay in the buffers between passes count as read.
        """
        chunks = [*frozen, *trained]
        stored = bytes_of(moving(chunks, disk))
        largest = max((size for size, _ in chunks), default=0)
        buffers = min(stored, max(disk.buffer_bytes, largest))
        written = min(stored, bytes_of(trained))
        ahead = 2 * stored if stored > buffers else 0
        read = ahead + (written if ahead and not has_masters else 0)
        resident = bytes_of(chunks) - stored
        return cls(buffers, resident, stored, read, written, ahead, min(written, buffers))

    def time(self, mates: int, read: float, write: float) -> DiskTime:
        """Returns the time of a node's ``mates`` ranks; reads and writes take turns.

        ``read`` and ``write`` are the rates of the node's disk, in 1e9 bytes/s.
        """
        require_positive(disk_read=read, disk_write=write)
        read_s, write_s = mates / (read * GIGA), mates / (write * GIGA)
        between_s = self.ahead * read_s + self.behind * write_s
        return DiskTime(self.read * read_s, self.written * write_s, between_s)


def require_positive(**values: float) -> None:
    """Raises ArgumentError for the first of ``values`` that is not above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ArgumentError(f"time: expected {name} above 0 and finite, got {value!r}")
