"""What is on a disk, or on the host: what a rank has where, what moves, and how long.

Closed forms of what ``optim/tiers.py`` does with an optimizer's state. A rank's chunks are divided
into pieces, whose records go through buffers in turn: each moves in and out once a step. Where a
buffer has one piece to serve its record stays, so that nothing moves if all records fit into the
buffers. Parameters go by chunks (``memory/disk_chunks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm.memory.scratch import PAGE_BYTES, Disk, rounded_up
from ringcomm.optim.layout import BLOCK_ELEMS, round_up
from ringcomm.optim.tiers import elems_of_pieces, piece_elems
from ringcomm.zero.estimate import (
    BytesPerElement,
    World,
    check_stage,
    largest_bucket,
    shard_elems,
    tier_sizes,
)
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.estimate_time import GIGA, require_positive
from ringcomm.zero.options import ZeroOptions


@dataclass(frozen=True)
class Records:
    """Records of one size that follow each other."""

    size_bytes: int
    count: int


@dataclass(frozen=True)
class TierBytes:
    """The bytes of a rank whose state is in another tier than memory.

    Attributes:
        buffers: in memory, which records take in turn.
        resident: in memory, of records that never move.
        stored: of the file, or of pinned memory of the host.
        moved: what a step reads, and what it writes.
        ahead: of that, what can be read before the step.
        behind: of that, what can be written after the step.
    """

    buffers: int
    resident: int
    stored: int
    moved: int
    ahead: int
    behind: int

    @classmethod
    def of(cls, records: Sequence[Records], disk: Disk) -> TierBytes:
        """Returns those of a state whose records a step visits in this order."""
        left, resident, rest = disk.resident_bytes, 0, list(records)
        while rest:
            size, count = rest[-1].size_bytes, rest[-1].count
            kept = min(count, left // size) if size else 0
            resident += kept * size
            left -= kept * size
            rest.pop()
            if kept < count:
                rest.append(Records(size, count - kept))
                break
        total = sum(each.count for each in rest)
        if not total:
            return cls(0, resident, 0, 0, 0, 0)
        size = max(PAGE_BYTES, *(each.size_bytes for each in rest))
        buffers = min(total, disk.buffer_bytes // size)
        # Buffer b serves the records b, b + buffers, ...: from here on they have one each.
        sharing = min(buffers, total - buffers)
        return cls(
            buffers=buffers * size,
            resident=resident,
            stored=_bytes_of(rest),
            moved=_bytes_of(rest, 0, sharing) + _bytes_of(rest, buffers),
            ahead=_bytes_of(rest, 0, sharing),
            behind=_bytes_of(rest, total - sharing),
        )


def _bytes_of(records: Sequence[Records], begin: int = 0, end: int | None = None) -> int:
    """Returns the bytes of records [begin, end)."""
    found, at = 0, 0
    for each in records:
        low, high = max(begin, at), at + each.count
        if end is not None:
            high = min(high, end)
        found += max(0, high - low) * each.size_bytes
        at += each.count
    return found


def records_of(elems: int, count: int, each: BytesPerElement, disk: Disk) -> list[Records]:
    """Returns the records of equal chunks.

    Args:
        elems: of a chunk, a multiple of 512.
        count: of the chunks.
        each: bytes of an element.
        disk: whose buffers bound the size of a piece.

    Raises:
        ArgumentError: the buffers are too small for any piece.
    """
    if not elems or not count:
        return []
    size = elems_of_pieces(elems, piece_elems(disk.buffer_bytes))
    equal = (elems - 1) // size
    found = [Records(_record_bytes(size, each), equal * count)] if equal else []
    return [*found, Records(_record_bytes(elems - equal * size, each), count)]


def _record_bytes(elems: int, each: BytesPerElement) -> int:
    return sum(map(rounded_up, each.lane_bytes(elems)))


def state_in_tier(
    model: ModelElems,
    stage: int,
    world: int | World,
    each: BytesPerElement,
    options: ZeroOptions,
    tier: Disk | str,
) -> TierBytes:
    """Returns the bytes of the rank that has most, its state divided into buckets of one size.

    Args:
        model: sizes of the model.
        stage: 0 to 3.
        world: the ranks, or how many there are on one node.
        each: bytes of an element.
        options: of the training.
        tier: as in ``AdamWOptions``.

    Raises:
        ArgumentError: there is no such stage or world, or the buffers are too small.
    """
    check_stage(stage)
    disk = tier_sizes(tier)
    shares = 1 if stage == 0 else World.of(world).state_shares
    bucket = largest_bucket(model, options)
    whole, rest = divmod(model.trainable, bucket) if bucket else (0, 0)
    records: list[Records] = []
    for elems, count in ((bucket, whole), (rest, 1)):
        chunk = round_up(shard_elems(elems, shares), BLOCK_ELEMS)
        records += records_of(chunk, count, each, disk)
    return TierBytes.of(records, disk)


FP32_MASTER = 4


@dataclass(frozen=True)
class ParamTierBytes:
    """The bytes of a rank whose parameters are on a disk, at stage 3.

    Attributes:
        buffers: in memory, of chunks that come and go.
        resident: in memory, of chunks that never move.
        stored: of the file.
        read: in a step, at most: forward, backward and the optimizer read each chunk, the latter
            not where FP32 masters give what is written. What is still in the buffers where one
            begins as the other has ended is not read.
        written: in a step.
        ahead: of what is read, that of forward and backward.
        behind: of what is written, what can be written after the step.
    """

    buffers: int
    resident: int
    stored: int
    read: int
    written: int
    ahead: int
    behind: int


def params_in_tier(
    model: ModelElems,
    world: int | World,
    each: BytesPerElement,
    options: ZeroOptions,
    disk: Disk,
) -> ParamTierBytes:
    """Returns the bytes of the rank that has most, its parameters in buckets of one size.

    Args:
        model: sizes of the model.
        world: the ranks, or how many there are on one node.
        each: bytes of an element.
        options: of the training.
        disk: as in ``ZeroOptions.tier``.
    """
    shares = World.of(world).param_shares
    bucket = largest_bucket(model, options)
    sizes: list[Records] = []
    frozen = 0
    for elems in (model.frozen, model.trainable):
        whole, rest = divmod(elems, bucket) if bucket else (0, 0)
        for part, count in ((bucket, whole), (rest, 1)):
            chunk = round_up(shard_elems(part, shares), BLOCK_ELEMS)
            if chunk and count:
                sizes.append(Records(rounded_up(each.param * chunk), count))
        if elems == model.frozen:
            frozen = _bytes_of(sizes)
    total, left, resident = _bytes_of(sizes), disk.resident_bytes, 0
    for size in reversed([record.size_bytes for record in sizes for _ in range(record.count)]):
        if size > left:
            break
        left, resident = left - size, resident + size
    moving = total - resident
    largest = max((record.size_bytes for record in sizes), default=0)
    buffers = min(moving, max(disk.buffer_bytes, largest))
    trained = min(moving, total - frozen)
    reads = moving > buffers
    return ParamTierBytes(
        buffers=buffers,
        resident=resident,
        stored=moving,
        read=2 * moving + (trained if each.master < FP32_MASTER else 0) if reads else 0,
        written=trained,
        ahead=2 * moving if reads else 0,
        behind=min(trained, buffers),
    )


@dataclass(frozen=True)
class DiskRates:
    """The rates of a node's disk, which its ranks share, in 1e9 bytes/s.

    Attributes:
        read_gbps: while it reads alone.
        write_gbps: while it writes alone.
    """

    read_gbps: float
    write_gbps: float

    def __post_init__(self) -> None:
        require_positive(disk_read_gbps=self.read_gbps, disk_write_gbps=self.write_gbps)

    @property
    def both_gbps(self) -> float:
        """The rate at which as many bytes are read as are written, by turns."""
        return 2 / (1 / self.read_gbps + 1 / self.write_gbps)

    def time(self, moved: TierBytes, mates: int) -> DiskTime:
        """Returns the time of a step's reads and writes on a node of so many ranks."""
        return self._time((moved.moved, moved.moved), (moved.ahead, moved.behind), mates)

    def time_of_params(self, moved: ParamTierBytes, mates: int) -> DiskTime:
        """Does :meth:`time` for parameters."""
        return self._time((moved.read, moved.written), (moved.ahead, moved.behind), mates)

    def _time(self, moved: tuple[int, int], between: tuple[int, int], mates: int) -> DiskTime:
        """Returns the time of bytes that are read and written."""
        read_s, write_s = mates / (self.read_gbps * GIGA), mates / (self.write_gbps * GIGA)
        return DiskTime(
            read_s=moved[0] * read_s,
            write_s=moved[1] * write_s,
            between_s=between[0] * read_s + between[1] * write_s,
        )


@dataclass(frozen=True)
class DiskTime:
    """Seconds of a step's reads and writes, which take turns.

    Attributes:
        read_s: of the reads.
        write_s: of the writes.
        between_s: of both, what may go on while the model computes.
    """

    read_s: float
    write_s: float
    between_s: float

    @property
    def total_s(self) -> float:
        return self.read_s + self.write_s

    def added_s(self, compute_s: float) -> float:
        """Returns what is left of it in the step, beside so much computing between steps."""
        return self.total_s - min(self.between_s, compute_s)

    def hidden_share(self, compute_s: float) -> float:
        """Returns the share, 0 to 1, that is behind computing; 1 of nothing."""
        return 1 - self.added_s(compute_s) / self.total_s if self.total_s else 1.0
