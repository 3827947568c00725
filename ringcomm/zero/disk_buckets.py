"""Buckets of which each rank keeps its chunk on a disk, and brings it when it is gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import MismatchError, RingcommError, UnsupportedError, where
from ringcomm.memory.disk_chunks import DiskChunk, DiskChunks
from ringcomm.memory.scratch import Disk
from ringcomm.optim.agreement import all_or_none
from ringcomm.optim.layout import BucketLayout
from ringcomm.zero.buckets import BucketParam, ParamBucket, WorldBucket

Tensor = torch.Tensor


def make_store(disk: Disk, comm: Communicator) -> DiskChunks:
    """Makes the file of a rank's chunks.

    Raises:
        UnsupportedError: parameters are on a device.
        DiskError: the folder takes no such file.
    """
    if comm.launches or comm.device.type != "cpu":
        raise UnsupportedError(
            f"{where('shard', comm.rank, comm.world_size)}: tier: expected parameters on the CPU, "
            f"whose chunks can lie on a disk, got them on {comm.heap_device}"
        )
    return DiskChunks(disk, f"parameters of rank {comm.rank}")


def reserve(
    store: DiskChunks, stored: Sequence[ParamBucket], frozen: Sequence[ParamBucket]
) -> None:
    """Takes the space for the chunks of buckets; the last trained ones stay in memory.

    Raises:
        DiskError: the disk has no room.
    """
    everything = [*frozen, *stored]
    chunks = [bucket.disk_chunk for bucket in everything if isinstance(bucket, DiskBucket)]
    # Forward uses the last ones at its end, and backward at its begin.
    store.reserve(chunks)


def expect(store: DiskChunks, buckets: Iterable[ParamBucket]) -> None:
    """Has the chunks of buckets read ahead that will be needed next, in this order."""
    store.expect(bucket.disk_chunk for bucket in buckets if isinstance(bucket, DiskBucket))


class DiskBucket(WorldBucket):
    """A sharded bucket whose chunk lies on the rank's disk while nobody needs it.

    NOTE [Each rank reads its own]
    Peers cannot map what is read past the page cache, and if each rank read all chunks, the disk of
    a node would move them as often as it has ranks. So a rank reads its chunk alone, and gathering
    is a collective of all ranks, in one order, as it is over nodes with ``params="world"``.

    NOTE [A chunk that cannot be read]
    Before each gathering the ranks tell each other which bucket it is, and whether they have their
    chunks. So a fault of one rank's disk raises on all, in the same call, and none of them waits.

    Args:
        layout, params, comm, trains, tag: as of :class:`WorldBucket`.
        store: the rank's chunks.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[BucketParam],
        comm: Communicator,
        trains: bool,
        tag: int,
        store: DiskChunks,
    ) -> None:
        self.store = store
        super().__init__(layout, params, comm, trains, tag)

    def _make_shard(self) -> Tensor:
        size_bytes = self._kept_elems * self.layout.dtype.itemsize
        self.disk_chunk = DiskChunk(max(1, size_bytes))
        return self.disk_chunk.memory[:size_bytes].view(self.layout.dtype)

    @property
    def full_elems(self) -> int:
        # On one node chunks of equal size are gathered, of which the last ones may be padded.
        if self.comm.num_nodes > 1:
            return super().full_elems
        return self._kept_elems * self.comm.world_size

    @property
    def kept(self) -> Tensor:
        self._expect_here()
        return super().kept

    @property
    def own(self) -> Tensor:
        self._expect_here()
        return super().own

    @property
    def in_memory(self) -> bool:
        """True inside of :meth:`here`."""
        return self.disk_chunk.in_use

    def _expect_here(self) -> None:
        if not self.in_memory:
            names = ", ".join(placed.name for placed in self.params)
            raise AssertionError(f"the chunk of {names} is on the disk; use it in here()")

    def here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        return self.store.here(self.disk_chunk, write, anew)

    def fill(self) -> None:
        with self.store.keeping_faults(), self.here():
            self._agree(self.store.fault)
            if self.comm.num_nodes > 1:
                super().fill()
            else:
                self.comm.all_gather_into_tensor(self.flat, self._shard)

    def _agree(self, fault: RingcommError | None) -> None:
        """Raises on all ranks if one has not its chunk, or gathers another bucket; collective."""
        comm = self.comm
        if comm.world_size > 1:
            mine = torch.tensor([self._tag, fault is None], dtype=torch.int64, device="cpu")
            told = torch.empty(2 * comm.world_size, dtype=torch.int64, device="cpu")
            comm.all_gather_into_tensor(told, mine)
            tags, have = told[::2].tolist(), told[1::2].tolist()
        else:
            tags, have = [self._tag], [fault is None]
        if not all(have):
            with all_or_none(comm, "zero: gathering parameters"):
                if fault is not None:
                    raise fault
        if set(tags) != {self._tag}:
            other = next(rank for rank, tag in enumerate(tags) if tag != self._tag)
            raise MismatchError(
                f"{where('zero', comm.rank, comm.world_size)}: gathers {self.params[0].name}, and "
                f"rank {other} another parameter. With parameters on a disk all ranks gather the "
                "same ones in the same order: give all the same way through the model, and call "
                "gathered() on all"
            )
