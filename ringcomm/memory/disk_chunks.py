"""Chunks whose content lies in a scratch file while nobody needs it.

A chunk has a range of addresses for good, so whoever knows it finds its content there whenever it
is in memory; but it has pages only then. What a chunk needs in pages it takes from one that leaves,
as the system moves them between ranges of addresses (mremap): a page that is given back and taken
anew has to be zeroed, which made reads of 4 MiB 0.75 times as fast (Xeon family 6 model 207, 2
virtual cores, a disk of 2 GB/s).

Order. :meth:`DiskChunks.here` brings a chunk and keeps it for as long as the context lasts; what
was changed is written when it ends, in the background. Chunks that were used stay until others need
the room, the one that was used longest ago leaves first. :meth:`DiskChunks.expect` is told the
order of what will be needed next, and reads ahead what has room there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringcomm.errors import RingcommError
from ringcomm.memory.scratch import (
    Disk,
    PagedBuffer,
    ScratchFile,
    Transfer,
    rounded_up,
)

Tensor = torch.Tensor

# Of mremap(2): the old range stays mapped, without pages (Linux 5.7).
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4


class DiskChunk:
    """Memory of one chunk.

    Attributes:
        size_bytes: of the chunk, in whole pages.
        memory: uint8 [bytes], whose content counts while :attr:`in_use`.
        users: number of contexts that keep it in memory.
        is_resident: True if it never leaves.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = rounded_up(size_bytes)
        self._buffer = PagedBuffer(self.size_bytes)
        self.memory = self._buffer.memory
        self.users = 0
        self.is_resident = False
        #: The block with its content; None before it has any, and of a resident one.
        self.block: int | None = None
        #: True if there is content in the block; it is of zeros before.
        self.written = False
        #: True if it has pages, with its content, which may be on its way.
        self.has_pages = False
        self.changed = False
        #: False from when it is expected to when it is used.
        self.was_used = True
        self.coming: Transfer | None = None
        self.going: Transfer | None = None

    @property
    def in_use(self) -> bool:
        """True while a context keeps it in memory."""
        return self.users > 0

    def take_pages(self, other: DiskChunk) -> bool:
        """Takes the pages of another chunk if they fit, which has none then."""
        if other.size_bytes != self.size_bytes or not _moved(other.memory, self.memory):
            return False
        other.has_pages = False
        return True

    def give_pages_back(self) -> None:
        """Gives its pages to the system."""
        self._buffer.drop_pages()
        self.has_pages = False


_mremap: Any = ctypes.CDLL(None).mremap
_mremap.restype = ctypes.c_void_p


def _moved(source: Tensor, target: Tensor) -> bool:
    """Moves pages between ranges of addresses of one size; False if this system cannot."""
    size = ctypes.c_size_t(source.nbytes)
    flags = ctypes.c_int(_MAYMOVE | _FIXED | _DONTUNMAP)
    there = ctypes.c_void_p(target.data_ptr())
    found: int | None = _mremap(ctypes.c_void_p(source.data_ptr()), size, size, flags, there)
    return found == target.data_ptr()


class DiskChunks:
    """The chunks of one rank, in a scratch file.

    Args:
        disk: where the file is, and how much RAM it takes.
        what: what is kept in it, as errors name it.

    Attributes:
        fault: the first error of the disk; nothing is brought any more.
        held_bytes: what chunks take of RAM, without those that are resident.
        most_held_bytes: the most that has been.
    """

    def __init__(self, disk: Disk, what: str) -> None:
        self.file = ScratchFile(disk.path, what)
        self._buffer_bytes = disk.buffer_bytes
        self._resident_bytes = disk.resident_bytes
        # Gathers may run in a thread of the communicator, beside a forward that reads ahead.
        self._lock = threading.RLock()
        # Those with pages that may leave, the one that was used longest ago first.
        self._present: dict[DiskChunk, None] = {}
        self._keeping = threading.local()
        self.fault: RingcommError | None = None
        self.held_bytes = 0
        self.most_held_bytes = 0

    def reserve(self, chunks: Sequence[DiskChunk]) -> None:
        """Takes the space that chunks need, of which the last ones are resident.

        Raises:
            DiskError: the disk has no room.
        """
        left = self._resident_bytes
        for chunk in reversed(chunks):
            if chunk.size_bytes > left:
                break
            left -= chunk.size_bytes
            chunk.is_resident = True
        for chunk in chunks:
            if not chunk.is_resident:
                chunk.block = self.file.add_block(chunk.size_bytes)

    # ---- use ------------------------------------------------------------------------------------

    @contextmanager
    def here(self, chunk: DiskChunk, write: bool = False, anew: bool = False) -> Iterator[None]:
        """Has a chunk in memory inside the context, from any thread.

        Args:
            chunk: the chunk.
            write: what is changed inside is kept.
            anew: all that counts of it is written inside, so that it need not be read.

        Raises:
            DiskError: it cannot be read, or a fault came before; not in :meth:`keeping_faults`.
        """
        self._enter(chunk, write, anew)
        try:
            yield
        finally:
            self._leave(chunk, write)

    def expect(self, chunks: Iterable[DiskChunk]) -> None:
        """Keeps the chunks that will be needed next, and begins to read them.

        Args:
            chunks: in the order in which they will be needed; as many count as the buffers take.
        """
        with self._lock:
            if self.fault is not None:
                return
            expected: dict[DiskChunk, None] = {}
            left = self._buffer_bytes
            for chunk in chunks:
                if not chunk.is_resident and chunk not in expected:
                    left -= chunk.size_bytes
                    if left < 0:
                        break
                    expected[chunk] = None
            for other in self._present:
                other.was_used = other not in expected
            for chunk in expected:
                if not chunk.has_pages:
                    if not self._make_room(chunk, must=False):
                        return
                    self._begin(chunk, reads=chunk.written)
                self._touch(chunk, was_used=False)

    @contextmanager
    def keeping_faults(self) -> Iterator[None]:
        """Keeps errors of the disk in :attr:`fault`, where this thread raises none inside.

        The rank goes on with the calls that others wait for, without what is lost. It writes
        nothing any more.
        """
        before = self._keeps_faults
        self._keeping.on = True
        try:
            yield
        finally:
            self._keeping.on = before

    @property
    def _keeps_faults(self) -> bool:
        return getattr(self._keeping, "on", False)

    def raise_fault(self) -> None:
        """Raises the first error of the disk, if there was any."""
        if self.fault is not None:
            raise self.fault

    def wait(self) -> None:
        """Waits for the writes that are under way; their errors are kept."""
        with self._lock:
            for chunk in list(self._present):
                self._end_write(chunk)

    def close(self) -> None:
        """Ends all transfers, and frees the disk's space."""
        self.file.close()

    # ---- implementation -------------------------------------------------------------------------

    def _enter(self, chunk: DiskChunk, write: bool, anew: bool) -> None:
        with self._lock:
            if self.fault is not None and not self._keeps_faults:
                raise self.fault
            chunk.users += 1
            try:
                if not chunk.is_resident and self.fault is None:
                    if not chunk.has_pages:
                        self._make_room(chunk, must=True)
                        self._begin(chunk, reads=chunk.written and not anew)
                    self._touch(chunk, was_used=True)
                    if write:
                        # What is being written must not change.
                        self._end_write(chunk)
            except BaseException:
                chunk.users -= 1
                raise
            coming = chunk.coming
        # Whoever reads ahead meanwhile need not wait for this.
        self._end(coming)
        with self._lock:
            if chunk.coming is coming:
                chunk.coming = None
            if self.fault is not None and not self._keeps_faults:
                chunk.users -= 1
                raise self.fault

    def _leave(self, chunk: DiskChunk, write: bool) -> None:
        with self._lock:
            chunk.users -= 1
            chunk.changed |= write
            if chunk.users or not chunk.changed or chunk.is_resident:
                return
            chunk.changed = False
            if self.fault is None:
                assert chunk.block is not None
                try:
                    self._end_write(chunk)
                    chunk.going = self.file.write(chunk.block, chunk.memory)
                    chunk.written = True
                except RingcommError as error:
                    self._keep(error)

    def _begin(self, chunk: DiskChunk, reads: bool) -> None:
        """Gives a chunk pages, and begins to read it."""
        chunk.has_pages = True
        self.held_bytes += chunk.size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        if reads and self.fault is None:
            assert chunk.block is not None
            try:
                chunk.coming = self.file.read(chunk.block, chunk.memory)
            except RingcommError as error:
                self._keep(error)

    def _touch(self, chunk: DiskChunk, was_used: bool) -> None:
        chunk.was_used = was_used
        self._present.pop(chunk, None)
        self._present[chunk] = None

    def _make_room(self, chunk: DiskChunk, must: bool) -> bool:
        """Has other chunks leave until one can come; what is in use stays, whatever it takes.

        Args:
            chunk: the one that shall come.
            must: also wait for writes, and give up what was read ahead.
        """
        leaving: list[DiskChunk] = []
        left = self.held_bytes + chunk.size_bytes
        for candidates in self._may_leave(must):
            for other in candidates:
                if left <= self._buffer_bytes:
                    break
                leaving.append(other)
                left -= other.size_bytes
        if left > self._buffer_bytes and not must:
            return False
        # A chunk that was never written is of zeros, as new pages are.
        needs = chunk.written
        for other in leaving:
            self._end_read(other)
            self._end_write(other)
            self._forget(other)
            if needs and chunk.take_pages(other):
                needs = False
            else:
                other.give_pages_back()
        return True

    def _may_leave(self, must: bool) -> Iterator[list[DiskChunk]]:
        """Yields the chunks that may leave, those first that are needed least."""
        idle = [each for each in self._present if not each.in_use]
        used = [each for each in idle if each.was_used]
        # Asked once: a write may end at any moment.
        writing = {each for each in used if each.going is not None and not each.going.done()}
        yield [each for each in used if each not in writing]
        if must:
            yield [each for each in used if each in writing]
            yield [each for each in reversed(idle) if not each.was_used]

    def _forget(self, chunk: DiskChunk) -> None:
        if chunk.has_pages:
            self.held_bytes -= chunk.size_bytes
        self._present.pop(chunk, None)

    def _end_read(self, chunk: DiskChunk) -> None:
        coming, chunk.coming = chunk.coming, None
        self._end(coming)

    def _end_write(self, chunk: DiskChunk) -> None:
        going, chunk.going = chunk.going, None
        self._end(going)

    def _end(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            try:
                transfer.wait()
            except RingcommError as error:
                self._keep(error)

    def _keep(self, error: RingcommError) -> None:
        self.fault = self.fault or error
