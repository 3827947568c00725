# SPDX-License-Identifier: Apache-2.0
"""State on a disk: one unnamed file per rank, divided into extents; I/O bypasses the page cache.

Only this process uses the file's content, and only while it runs. So the file never has a name, and
its space on the disk is freed however the process ends. Threads read and write the extents. RAM
holds checksums of every extent (``kernels/host/scratch.h``), and every failure of a disk raises a
:class:`DiskError`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm import _native
from ringcomm.errors import ArgumentError, DiskError, ForkError, RingcommError, no_thread
from ringcomm.integers import integer, real

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# statfs(2) codes of file systems in RAM, which are refused: offloading is meant to save RAM.
_IN_RAM = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}

# Seconds for which a rank waits for a transfer if no other rank waits for this rank.
DEFAULT_TIMEOUT_S = 900.0

_OTHER_FOLDER = "Name a folder on a local disk, with ext4 or XFS"


@dataclass(frozen=True)
class Disk:
    """Options of offloading to a disk: the folder for a rank's state, and limits of RAM and time.

    Attributes:
        path: a folder on a disk. Each rank has an unnamed file in it, which vanishes with the
            process.
        buffer_bytes: a rank's RAM for data on the way to or from the disk.
        resident_bytes: how much of a rank's state stays in RAM.
        timeout_s: seconds for which a rank waits for one transfer. None means half of the time for
            which the other ranks wait for this rank (:attr:`Communicator.timeout`), so that a
            hanging disk raises its own error first; 15 minutes if there are no other ranks.
    """

    path: str | os.PathLike[str]
    buffer_bytes: int = 64 << 20
    resident_bytes: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise ArgumentError(f"Disk(path=): expected a folder on a disk, got {self.path!r}")
        for name, least in (("buffer_bytes", PAGE_BYTES), ("resident_bytes", 0)):
            value = integer(getattr(self, name))
            if value is None or value < least:
                raise ArgumentError(
                    f"Disk({name}=): expected an integer from {least} to 2^63 - 1, got "
                    f"{getattr(self, name)!r}"
                )
            object.__setattr__(self, name, value)
        if self.timeout_s is None:
            return
        seconds = real(self.timeout_s)
        if seconds is None or not seconds > 0:
            raise ArgumentError(
                f"Disk(timeout_s=): expected seconds > 0 or None, got {self.timeout_s!r}"
            )
        object.__setattr__(self, "timeout_s", seconds)


class PagedBuffer:
    """Zero-initialized memory for transfers, in whole pages, huge ones if the system has them.

    Args:
        size_bytes: the size; pages are allocated when they are first touched.

    Attributes:
        memory: uint8 [size_bytes], starts at a page boundary; no other object is in its last page.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ArgumentError(f"aligned_buffer: expected at least 1 byte, got {size_bytes}")
        # Huge pages begin at multiples of their size, but older kernels map memory anywhere.
        slack_bytes = HUGE_PAGE_BYTES if size_bytes >= HUGE_PAGE_BYTES else 0
        self._mapped = mmap.mmap(
            -1,
            rounded_up(size_bytes) + slack_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._begin = -whole.data_ptr() % HUGE_PAGE_BYTES if slack_bytes else 0
        self.memory = whole[self._begin : self._begin + size_bytes]
        _native.advise_huge_pages(self.memory.data_ptr(), size_bytes)

    def drop_pages(self) -> None:
        """Returns the buffer's pages to the system; the memory then reads as zeros again."""
        self._mapped.madvise(mmap.MADV_DONTNEED, self._begin, rounded_up(self.memory.nbytes))


def aligned_buffer(size_bytes: int) -> torch.Tensor:
    """Returns the memory of a new :class:`PagedBuffer`: uint8 [size_bytes]."""
    return PagedBuffer(size_bytes).memory


def rounded_up(size_bytes: int) -> int:
    """Returns ``size_bytes`` rounded up to a multiple of PAGE_BYTES."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _free_bytes(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _refused(what: str, path: str, reason: str, advice: str) -> DiskError:
    error = DiskError(
        f"{what}: expected a folder on a disk that can hold it, got {path}: {reason}. {advice}"
    )
    error.path = path
    return error


def _why_not_opened(path: str, error: OSError) -> tuple[str, str]:
    """Returns why ``path`` does not support an unnamed file for direct I/O, and the remedy."""
    cause = error.strerror or str(error)
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return cause, "Make the folder before"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return cause, "Give this user the right to write there, or name another folder"
    if error.errno in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}:
        try:
            os.close(os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError:
            return f"its file system has no unnamed files (O_TMPFILE: {cause})", _OTHER_FOLDER
        return f"its file system has no direct I/O (O_DIRECT: {cause})", _OTHER_FOLDER
    return cause, _OTHER_FOLDER


def _open_unnamed(path: str, what: str) -> int:
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(what, path, *_why_not_opened(path, error)) from error
    try:
        in_ram = _IN_RAM.get(_native.file_system_type(folder))
    finally:
        os.close(folder)
    if in_ram is not None:
        raise _refused(what, path, f"it is a {in_ram}, whose files take RAM", _OTHER_FOLDER)
    # O_EXCL: no process can give the file a name later.
    flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise _refused(what, path, *_why_not_opened(path, error)) from error
    alignment = _native.direct_alignment(descriptor)
    if alignment == 0 or (alignment > 0 and PAGE_BYTES % alignment != 0):
        os.close(descriptor)
        reason = (
            f"its direct I/O is by multiples of {alignment} bytes, expected a divisor of "
            f"{PAGE_BYTES}"
            if alignment
            else "its file system has no direct I/O for this file"
        )
        raise _refused(what, path, reason, _OTHER_FOLDER)
    return descriptor


@dataclass(frozen=True)
class _Hang:
    """A transfer that was not done after ``after_s`` seconds; see :class:`ScratchFile`."""

    request: _native.ScratchRequest
    after_s: float


class _File:
    """The resources of a :class:`ScratchFile` that outlive it while one of its transfers hangs."""

    def __init__(self, descriptor: int, timeout_s: Callable[[], float]) -> None:
        self.descriptor = descriptor
        self.pool = _native.ScratchPool(descriptor)
        self.under_way: dict[int, tuple[_native.ScratchRequest, torch.Tensor]] = {}
        self.is_open = True
        self.inherited = False
        self._timeout_s = timeout_s
        self._hang: _Hang | None = None
        self._is_released = False

    @property
    def limit_s(self) -> float:
        """Seconds for which to wait for a transfer: 0 while another transfer hangs."""
        return 0.0 if self.hang is not None else self._timeout_s()

    @property
    def hang(self) -> _Hang | None:
        """The first transfer that was late; None once this transfer is done."""
        if self._hang is not None and self._hang.request.done():
            self._hang = None
        return self._hang

    def is_late(self, request: _native.ScratchRequest, after_s: float) -> None:
        """Records that a transfer hangs, unless another transfer is already recorded."""
        if self.hang is None:
            self._hang = _Hang(request, after_s)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            if self.pool.close(self.limit_s, self):
                self._release()
            else:
                _hanging.add(self)
        _release_what_is_over()

    def release_if_over(self) -> None:
        """Frees the resources of a closed file, once its transfers are done."""
        if not self.pool.close(0.0, self):
            return
        try:
            _hanging.remove(self)
        except KeyError:  # another thread has removed it
            return
        self._release()

    def _release(self) -> None:
        self._is_released = True
        self.under_way.clear()
        os.close(self.descriptor)

    def leave_to_parent(self) -> None:
        # The child closes the descriptor at once, so that the disk's space is not held until the
        # child ends. The native pool's threads run in the parent; the pool checks for a fork.
        self.inherited = True
        self.is_open = False
        if not self._is_released:
            self._is_released = True
            os.close(self.descriptor)

    def let_go_of_what_is_over(self) -> None:
        for key, (request, _) in list(self.under_way.items()):
            if request.done():
                self.under_way.pop(key, None)


_files: weakref.WeakSet[_File] = weakref.WeakSet()
# Files that were closed while a transfer hung. Until the transfer is done, nothing else may use its
# memory or the number of the file's descriptor.
_hanging: set[_File] = set()


def _release_what_is_over() -> None:
    for file in list(_hanging):
        file.release_if_over()


def _leave_files_to_parent() -> None:
    _hanging.clear()
    for file in list(_files):
        file.leave_to_parent()


os.register_at_fork(after_in_child=_leave_files_to_parent)


class ScratchFile:
    """One unnamed file of this rank on a disk, divided into extents.

    Transfers that share an extent, or bytes of memory, run in the order of their submission; all
    others run in parallel. After a fault on an extent every later transfer of the extent raises the
    first fault. A forked child cannot use the file. The ``with`` statement, :meth:`close` or the
    garbage collector closes the file.

    A system call that a disk does not answer cannot be ended. A wait for such a transfer raises
    after ``timeout_s``. Until the call ends, waits for other transfers raise at once, and the
    memory of the transfer is kept.

    Args:
        folder: a folder on a disk; a folder in RAM is refused.
        what: the name of the content, for errors: "optimizer state of rank 3".
        timeout_s: returns the seconds for which to wait for a transfer.

    Raises:
        DiskError: the folder does not support such a file; names the cause and a remedy.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        what: str,
        timeout_s: Callable[[], float] = lambda: DEFAULT_TIMEOUT_S,
    ) -> None:
        _release_what_is_over()
        self.path = os.fspath(folder)
        self.what = what
        self._file = _File(_open_unnamed(self.path, what), timeout_s)
        self._extent_bytes: list[int] = []
        self._keys = itertools.count()
        _files.add(self._file)
        self._close = weakref.finalize(self, self._file.close)

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes."""
        return sum(self._extent_bytes)

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from the disk."""
        return self._counter("bytes_read")

    @property
    def bytes_written(self) -> int:
        """Bytes that were written to the disk."""
        return self._counter("bytes_written")

    @property
    def reading_s(self) -> float:
        """Seconds in which at least one read was under way."""
        return self._counter("reading_ns") / 1e9

    @property
    def writing_s(self) -> float:
        """Seconds in which at least one write was under way."""
        return self._counter("writing_ns") / 1e9

    def _counter(self, name: str) -> int:
        self._expect_owner("counters")
        return self._file.pool.counters()[name]

    @staticmethod
    def buffer(size_bytes: int) -> torch.Tensor:
        """Returns zeroed memory for transfers: uint8 [size_bytes]; see :func:`aligned_buffer`."""
        return aligned_buffer(size_bytes)

    def add_extent(self, size_bytes: int) -> int:
        """Adds an extent, and reserves its disk space; it reads as zeros until it is written.

        Args:
            size_bytes: rounded up to pages of 4096 bytes.

        Returns:
            The extent's number, from 0.

        Raises:
            DiskError: the disk has too little space; names the path, wanted and free bytes.
        """
        self._expect_open("add_extent")
        if size_bytes < 1:
            raise ArgumentError(
                f"{self.what}: expected an extent of 1 byte or more, got {size_bytes}"
            )
        try:
            extent = self._file.pool.add_extent(size_bytes)
        except OSError as error:
            raise self._no_room(size_bytes, error) from error
        self._extent_bytes.append(rounded_up(size_bytes))
        return extent

    def write(self, extent: int, memory: torch.Tensor) -> Transfer:
        """Begins to write ``memory`` into an extent, from its start.

        Args:
            extent: a number from :meth:`add_extent`.
            memory: contiguous uint8 on the CPU, in whole pages (:func:`aligned_buffer`), no longer
                than the extent. It must not change until the transfer is done.
        """
        return self._begin("write", extent, memory)

    def read(self, extent: int, memory: torch.Tensor) -> Transfer:
        """Begins to read an extent into ``memory``.

        Args:
            extent: a number from :meth:`add_extent`.
            memory: as for :meth:`write`, with as many bytes as the last write of the extent.
        """
        return self._begin("read", extent, memory)

    def close(self) -> None:
        """Cancels transfers that have not begun, waits for the others, and frees the disk's space.

        It waits for at most ``timeout_s``, and not at all if a transfer already hangs. The memory
        and the disk space of a hanging transfer are freed once it ends or the process ends.
        """
        if self._file.inherited:
            return
        self._close()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, operation: str, extent: int, memory: torch.Tensor) -> Transfer:
        self._expect_open(operation)
        self._check(operation, extent, memory)
        file = self._file
        file.let_go_of_what_is_over()
        submit = file.pool.write if operation == "write" else file.pool.read
        try:
            request = submit(extent, memory.data_ptr(), memory.nbytes)
        except ValueError as error:
            raise ArgumentError(f"{self.what}: {operation} of extent {extent}: {error}") from error
        except OSError as error:
            raise no_thread(
                f"{self.what}: {operation} of extent {extent} in {self.path}",
                error,
                "Nothing was moved",
            ) from error
        key = next(self._keys)
        file.under_way[key] = (request, memory)
        return Transfer(self, operation, extent, request, key)

    def _check(self, operation: str, extent: int, memory: torch.Tensor) -> None:
        head = f"{self.what}: {operation} of extent {extent}"
        if not 0 <= extent < len(self._extent_bytes):
            raise ArgumentError(f"{head}: expected an extent below {len(self._extent_bytes)}")
        if not isinstance(memory, torch.Tensor):
            raise ArgumentError(f"{head}: expected a tensor, got {type(memory).__name__}")
        if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
            raise ArgumentError(
                f"{head}: expected contiguous uint8 on the CPU, got {memory.dtype} on "
                f"{memory.device} with strides {memory.stride()}"
            )
        if memory.data_ptr() % PAGE_BYTES or memory.nbytes % PAGE_BYTES or not memory.nbytes:
            raise ArgumentError(
                f"{head}: expected whole pages of {PAGE_BYTES} bytes, got {memory.nbytes} bytes at "
                f"address {memory.data_ptr():#x}. Take slices of an aligned_buffer()"
            )
        if memory.nbytes > self._extent_bytes[extent]:
            raise ArgumentError(
                f"{head}: expected at most {self._extent_bytes[extent]} bytes, got {memory.nbytes}"
            )

    def _no_room(self, size_bytes: int, error: OSError) -> DiskError:
        cause = error.strerror or str(error)
        wanted = f"{rounded_up(size_bytes)} bytes after {self.size_bytes} of its own"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            advice = f"{_free_bytes(self.path)} bytes are free. Free space on that disk, raise the "
            advice += "limit (quota, ulimit -f), or name a folder on a larger one"
        elif error.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
            advice = f"Its file system cannot reserve space (fallocate). {_OTHER_FOLDER}"
        else:
            advice = "Look at the disk's health (dmesg)"
        made = DiskError(
            f"{self.what}: expected {wanted} in a scratch file in {self.path}, got: {cause}. "
            f"{advice}"
        )
        made.path = self.path
        return made

    def _expect_owner(self, operation: str) -> None:
        if self._file.inherited:
            raise ForkError(
                f"{self.what}: {operation}: the scratch file in {self.path} belongs to the parent "
                f"of this forked process (pid {os.getpid()}). Use it in the parent, or make a new "
                "file in this process"
            )

    def _expect_open(self, operation: str) -> None:
        self._expect_owner(operation)
        if not self._file.is_open:
            raise DiskError(f"{self.what}: {operation}: the scratch file in {self.path} is closed")


class Transfer:
    """A read or write under way. Keeps its memory alive; do not use the memory until it is done."""

    def __init__(
        self,
        scratch: ScratchFile,
        operation: str,
        extent: int,
        request: _native.ScratchRequest,
        key: int,
    ) -> None:
        self._scratch = scratch
        self._operation = operation
        self._extent = extent
        self._request = request
        self._key = key

    def done(self) -> bool:
        """True if the transfer is done, successfully or not."""
        return self._request.done()

    def wait(self) -> None:
        """Waits until the transfer has succeeded; may be called again.

        Raises:
            DiskError: the transfer failed; names operation, path, extent, offset, cause and remedy.
        """
        scratch = self._scratch
        scratch._expect_owner(f"{self._operation} of extent {self._extent}")
        file = scratch._file
        limit_s = 0.0 if self._request.done() else file.limit_s
        result = self._request.wait(limit_s)
        if result is None or result["end"] != "late":
            file.under_way.pop(self._key, None)
        else:
            file.is_late(self._request, limit_s)
        if result is not None:
            raise self._error(result)

    def _error(self, result: dict[str, Any]) -> DiskError:
        scratch = self._scratch
        head = f"{scratch.what}: {self._operation} of extent {self._extent} in {scratch.path}"
        if result["end"] == "closed":
            error = DiskError(f"{head}: the scratch file was closed before the transfer began")
        else:
            cause, advice = self._lateness() if result["end"] == "late" else _cause(result)
            error = DiskError(
                f"{head}: expected to {result['operation']} {result['size_bytes']} bytes at offset "
                f"{result['offset_bytes']} of the scratch file, got: {cause}. {advice}"
            )
            error.offset_bytes = result["offset_bytes"]
        error.path, error.extent = scratch.path, self._extent
        return error

    def _lateness(self) -> tuple[str, str]:
        """Returns the message and the advice for a transfer that is not done in time."""
        advice = (
            "The disk hangs, or is too slow: look at its health (dmesg, smartctl) and at programs "
            "that use it, name a folder on another one, or wait for longer with Disk(timeout_s=). "
            "Transfers under way keep their memory until they end"
        )
        hang = self._scratch._file.hang
        if hang is None or hang.request is self._request:
            return f"it is not done{'' if hang is None else f' after {hang.after_s:g} s'}", advice
        return f"an earlier transfer is not done after {hang.after_s:g} s", advice


def _cause(result: dict[str, Any]) -> tuple[str, str]:
    """Returns the cause of a failed transfer, and the remedy."""
    health = "Look at the disk's health (dmesg, smartctl), and name a folder on another one"
    end = result["end"]
    if end == "failed":
        code = result["errno"]
        if code in {errno.ENOSPC, errno.EDQUOT}:
            health = "Free space on that disk, or name a folder on another one"
        return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})", health
    if end == "truncated":
        return "the file ends before these bytes", f"The file was truncated. {health}"
    if end == "stalled":
        return "the system moves no bytes, and names no error", health
    return (
        f"other bytes than were written there last (CRC32C {result['wanted_sum']:#010x} expected, "
        f"{result['seen_sum']:#010x} read): flipped bits, an older version, or another extent's",
        health,
    )


# ---- Chunks whose content is in a scratch file while they are not needed ------------------------
# A chunk has the same range of addresses at all times, but the range has pages only while the
# chunk's content is in memory. A chunk that enters memory takes its pages from a chunk that leaves:
# mremap(2) moves pages between ranges of addresses. If pages were freed and allocated again, the
# system would zero them: reads of 4 MiB were then 0.75 times as fast (Xeon family 6 model 207, 2
# virtual cores, a disk of 2 GB/s).
# Order. :meth:`DiskChunks.here` reads a chunk and keeps it while the context lasts; changes are
# written in the background when the context ends. Used chunks stay until others need the memory;
# the least recently used chunk leaves first. :meth:`DiskChunks.expect` gets the order in which
# chunks will be needed next, and reads ahead as many as fit.

Tensor = torch.Tensor

# Flags of mremap(2); DONTUNMAP: the old range stays mapped, but empty (since Linux 5.7).
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4


class DiskChunk:
    """One chunk: a range of addresses, and its pages while its content is in memory.

    Attributes:
        size_bytes: the bytes of the chunk, in whole pages.
        memory: uint8 [size_bytes]; its content is valid while :attr:`in_use`.
        users: the number of contexts that keep the chunk in memory.
        is_resident: True if the chunk never leaves memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = rounded_up(size_bytes)
        self._buffer = PagedBuffer(self.size_bytes)
        self.memory = self._buffer.memory
        self.users = 0
        self.is_resident = False
        #: The extent for the content; None before there is an extent, and for a resident chunk.
        self.extent: int | None = None
        #: True once the extent was written; before, the chunk's content is zeros.
        self.written = False
        #: True if the chunk has pages; a read may still be filling them.
        self.has_pages = False
        self.changed = False
        #: False after :meth:`DiskChunks.expect` has read the chunk ahead, until it is used.
        self.was_used = True
        self.coming: Transfer | None = None
        self.going: Transfer | None = None

    @property
    def in_use(self) -> bool:
        """True while a context keeps the chunk in memory."""
        return self.users > 0

    def take_pages(self, other: DiskChunk) -> bool:
        """Takes all pages of ``other`` if the sizes match; returns True if it took them."""
        if other.size_bytes != self.size_bytes or not _moved(other.memory, self.memory):
            return False
        other.has_pages = False
        return True

    def give_pages_back(self) -> None:
        """Returns the chunk's pages to the system."""
        self._buffer.drop_pages()
        self.has_pages = False


_mremap: Any = ctypes.CDLL(None).mremap
_mremap.restype = ctypes.c_void_p


def _moved(source: Tensor, target: Tensor) -> bool:
    """Moves pages between address ranges of equal size; returns False if this system cannot."""
    size = ctypes.c_size_t(source.nbytes)
    flags = ctypes.c_int(_MAYMOVE | _FIXED | _DONTUNMAP)
    there = ctypes.c_void_p(target.data_ptr())
    found: int | None = _mremap(ctypes.c_void_p(source.data_ptr()), size, size, flags, there)
    return found == target.data_ptr()


class DiskChunks:
    """The chunks of one rank: a scratch file holds the contents of chunks that are not in memory.

    Args:
        disk: the folder of the file, and the RAM to use.
        what: the name of the content, for errors.

    Attributes:
        fault: the first error of the disk, after which nothing is read; None before.
        held_bytes: the bytes of RAM that non-resident chunks take now.
        most_held_bytes: the largest value of ``held_bytes`` so far.
    """

    def __init__(self, disk: Disk, what: str) -> None:
        self.file = ScratchFile(disk.path, what)
        self._buffer_bytes = disk.buffer_bytes
        self._resident_bytes = disk.resident_bytes
        # A thread of the communicator may unshard chunks while a forward reads ahead.
        self._lock = threading.RLock()
        # The chunks that have pages and may leave memory, the least recently used first.
        self._present: dict[DiskChunk, None] = {}
        self._keeping = threading.local()
        self.fault: RingcommError | None = None
        self.held_bytes = 0
        self.most_held_bytes = 0

    def reserve(self, chunks: Sequence[DiskChunk]) -> None:
        """Reserves disk space for chunks; as many of the last chunks as fit become resident.

        Raises:
            DiskError: the disk has too little space.
        """
        left = self._resident_bytes
        for chunk in reversed(chunks):
            if chunk.size_bytes > left:
                break
            left -= chunk.size_bytes
            chunk.is_resident = True
        for chunk in chunks:
            if not chunk.is_resident:
                chunk.extent = self.file.add_extent(chunk.size_bytes)

    # ---- use ------------------------------------------------------------------------------------

    @contextmanager
    def here(self, chunk: DiskChunk, write: bool = False, anew: bool = False) -> Iterator[None]:
        """Keeps a chunk in memory inside the context, on any thread.

        Args:
            chunk: the chunk.
            write: True to keep changes made inside.
            anew: True if the chunk is completely overwritten inside, so that it need not be read.

        Raises:
            DiskError: a read failed, now or earlier; inside :meth:`keeping_faults` none is raised.
        """
        self._enter(chunk, write, anew)
        try:
            yield
        finally:
            self._leave(chunk, write)

    def expect(self, chunks: Iterable[DiskChunk]) -> None:
        """Begins to read the chunks that will be needed next, and keeps them in memory.

        Args:
            chunks: in the order of need; only as many as fit into memory are read ahead.
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
        """A context in which this thread stores errors of the disk in :attr:`fault`, raising none.

        So this rank can continue the calls for which other ranks wait, without the lost data. After
        a fault nothing is written.
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
        """Raises the first error of the disk, if there was one."""
        if self.fault is not None:
            raise self.fault

    def wait(self) -> None:
        """Waits for the writes under way; stores their errors in :attr:`fault`."""
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
                        # Memory that is being written to the disk must not change.
                        self._end_write(chunk)
            except BaseException:
                chunk.users -= 1
                raise
            coming = chunk.coming
        # Waits without the lock, so that a thread that reads ahead is not blocked.
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
                assert chunk.extent is not None
                try:
                    self._end_write(chunk)
                    chunk.going = self.file.write(chunk.extent, chunk.memory)
                    chunk.written = True
                except RingcommError as error:
                    self._keep(error)

    def _begin(self, chunk: DiskChunk, reads: bool) -> None:
        """Gives a chunk pages, and begins to read it if ``reads``."""
        chunk.has_pages = True
        self.held_bytes += chunk.size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        if reads and self.fault is None:
            assert chunk.extent is not None
            try:
                chunk.coming = self.file.read(chunk.extent, chunk.memory)
            except RingcommError as error:
                self._keep(error)

    def _touch(self, chunk: DiskChunk, was_used: bool) -> None:
        chunk.was_used = was_used
        self._present.pop(chunk, None)
        self._present[chunk] = None

    def _make_room(self, chunk: DiskChunk, must: bool) -> bool:
        """Makes other chunks leave until ``chunk`` fits; chunks in use always stay.

        Args:
            chunk: the chunk that needs memory.
            must: True to also wait for writes, and drop chunks that were read ahead.
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
        # A chunk that was never written consists of zeros, as new pages do.
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
        """Yields lists of the chunks that may leave memory, the least needed chunks first."""
        idle = [each for each in self._present if not each.in_use]
        used = [each for each in idle if each.was_used]
        # Compute the set once: a write may end at any moment, and each chunk must be in one list.
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
