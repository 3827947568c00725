"""State on a disk: one unnamed file a rank, in extents that threads write and read past the cache.

What is in the file is of use to this process alone, and only while it runs. So the file has no name
from the start: however the process ends, the disk's space is free again. Every extent has
checksums in RAM (``kernels/host/scratch.h``), and whatever a disk can do wrong ends in a
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

# Of statfs(2): file systems whose files are in RAM, which is what a disk is to save.
_IN_RAM = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}

# How long a transfer is waited for where no rank waits for this one.
DEFAULT_TIMEOUT_S = 900.0

_OTHER_FOLDER = "Name a folder on a local disk, with ext4 or XFS"


@dataclass(frozen=True)
class Disk:
    """Where state is kept on a disk, and how much RAM that takes.

    Attributes:
        path: a folder on a disk. Each rank has a file in it, which has no name and is gone with the
            process.
        buffer_bytes: what a rank has of RAM for what is on its way to or from the disk.
        resident_bytes: how much of a rank's state stays in RAM.
        timeout_s: how long a rank waits for one transfer. None is half of what the other ranks wait
            for this one (:attr:`Communicator.timeout`), who so learn of a disk that hangs by its
            error; without others it is 15 minutes.
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
    """Memory for transfers: zeros, in whole pages, in huge ones where the system has them.

    Args:
        size_bytes: what it has; its pages are taken when they are first touched.

    Attributes:
        memory: uint8 [size_bytes], which begins a page; what is left of its last page is its own,
            too.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ArgumentError(f"aligned_buffer: expected at least 1 byte, got {size_bytes}")
        # Huge pages begin at multiples of their size, and older kernels map anywhere.
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
        """Gives its pages to the system; it is of zeros again."""
        self._mapped.madvise(mmap.MADV_DONTNEED, self._begin, rounded_up(self.memory.nbytes))


def aligned_buffer(size_bytes: int) -> torch.Tensor:
    """Returns the memory of a :class:`PagedBuffer`: uint8 [size_bytes]."""
    return PagedBuffer(size_bytes).memory


def rounded_up(size_bytes: int) -> int:
    """Returns the bytes of the whole pages that ``size_bytes`` take, in memory and in the file."""
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
    """Returns the reason why a folder takes no unnamed file for direct I/O, and what to do."""
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
    # O_EXCL: nobody can give the file a name later.
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
    """A transfer that was not over after so many seconds; see :class:`ScratchFile`."""

    request: _native.ScratchRequest
    after_s: float


class _File:
    """Holds what a :class:`ScratchFile` has to close, and the memory that threads still use."""

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
        """How long a transfer is waited for: not at all while one hangs."""
        return 0.0 if self.hang is not None else self._timeout_s()

    @property
    def hang(self) -> _Hang | None:
        """The first transfer that was late, while it is not over."""
        if self._hang is not None and self._hang.request.done():
            self._hang = None
        return self._hang

    def is_late(self, request: _native.ScratchRequest, after_s: float) -> None:
        """Notes that a transfer hangs, unless one does already."""
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
        """Frees what a closed file has, once its transfers are over."""
        if not self.pool.close(0.0, self):
            return
        try:
            _hanging.remove(self)
        except KeyError:  # by another thread
            return
        self._release()

    def _release(self) -> None:
        self._is_released = True
        self.under_way.clear()
        os.close(self.descriptor)

    def leave_to_parent(self) -> None:
        # The child lets go of the file at once: the disk's space must not wait for its end. The
        # native pool, whose threads are the parent's, knows by itself not to be touched.
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
# Those that were closed while a transfer hung. Its memory must not be used for anything else, nor
# the number of its descriptor, until it is over.
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
    """One unnamed file of this rank on a disk, in extents.

    Transfers that share an extent, or bytes of memory, run in the order of their submission, all
    others side by side. After a fault on an extent every later transfer of it raises the first
    one. In a forked child it cannot be used. It closes with its ``with`` statement, by
    :meth:`close`, or when nothing refers to it.

    Nothing ends a system call that a disk does not answer. A wait for it raises after
    ``timeout_s``, and until it ends all others raise at once. Its memory is kept until then.

    Args:
        folder: on a disk; a folder in RAM is refused.
        what: what is kept in the file, as errors name it: "optimizer state of rank 3".
        timeout_s: returns how many seconds a transfer is waited for.

    Raises:
        DiskError: the folder takes no such file; says why, and what to do.
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
        """Bytes of the file."""
        return sum(self._extent_bytes)

    @property
    def bytes_read(self) -> int:
        """Bytes that the disk has brought."""
        return self._counter("bytes_read")

    @property
    def bytes_written(self) -> int:
        """Bytes that the disk has taken."""
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
        """Returns memory for transfers, of zeros: uint8 [bytes]; see :func:`aligned_buffer`."""
        return aligned_buffer(size_bytes)

    def add_extent(self, size_bytes: int) -> int:
        """Adds an extent, with space reserved on the disk; it reads as zeros until it is written.

        Args:
            size_bytes: rounded up to pages of 4096 bytes.

        Returns:
            The extent's number, from 0.

        Raises:
            DiskError: the disk has no room; names path, wanted and free bytes.
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
            extent: of :meth:`add_extent`.
            memory: contiguous uint8 on the CPU, in whole pages (:func:`aligned_buffer`), no longer
                than the extent. It must not change until the transfer is over.
        """
        return self._begin("write", extent, memory)

    def read(self, extent: int, memory: torch.Tensor) -> Transfer:
        """Begins to read an extent into ``memory``.

        Args:
            extent: of :meth:`add_extent`.
            memory: as for :meth:`write`, with as many bytes as the extent's last write had.
        """
        return self._begin("read", extent, memory)

    def close(self) -> None:
        """Gives up what is not begun, waits for what is under way, and frees the disk's space.

        It waits for ``timeout_s`` at most, and not at all where a transfer hangs already. What
        hangs then keeps its memory and the disk's space until it ends, or else the process does.
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
                f"{self.what}: {operation}: the scratch file in {self.path} is of the process that "
                f"this one (pid {os.getpid()}) was forked from. Use it there, or make one here"
            )

    def _expect_open(self, operation: str) -> None:
        self._expect_owner(operation)
        if not self._file.is_open:
            raise DiskError(f"{self.what}: {operation}: the scratch file in {self.path} is closed")


class Transfer:
    """A read or write under way. Its memory is kept until it is over, and must be left alone."""

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
        """Returns whether it is over, well or not."""
        return self._request.done()

    def wait(self) -> None:
        """Returns when the bytes are where they are to be; may be called again.

        Raises:
            DiskError: they are not; says operation, path, extent, offset, cause and what to do.
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
            error = DiskError(f"{head}: the scratch file was closed before it ran")
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
        """Returns what is said of a transfer that is not over, and what to do."""
        advice = (
            "The disk hangs, or is too slow: look at its health (dmesg, smartctl) and at what else "
            "uses it, name a folder on another one, or wait for longer with Disk(timeout_s=). What "
            "is under way keeps its memory until it ends"
        )
        hang = self._scratch._file.hang
        if hang is None or hang.request is self._request:
            return f"it is not over{'' if hang is None else f' after {hang.after_s:g} s'}", advice
        return f"an earlier transfer is not over after {hang.after_s:g} s", advice


def _cause(result: dict[str, Any]) -> tuple[str, str]:
    """Returns how a transfer ended otherwise than well, and what to do."""
    health = "Look at the disk's health (dmesg, smartctl), and name a folder on another one"
    end = result["end"]
    if end == "failed":
        code = result["errno"]
        if code in {errno.ENOSPC, errno.EDQUOT}:
            health = "Free space on that disk, or name a folder on another one"
        return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})", health
    if end == "truncated":
        return "the file ends before that", f"Something has cut it short. {health}"
    if end == "stalled":
        return "the system moves no bytes, and names no error", health
    return (
        f"other bytes than were written there last (CRC32C {result['wanted_sum']:#010x} expected, "
        f"{result['seen_sum']:#010x} read): flipped bits, an older version, or another extent's",
        health,
    )


# ---- Chunks whose content lies in a scratch file while nobody needs it --------------------------
# A chunk has a range of addresses for good, so whoever knows it finds its content there whenever it
# is in memory; but it has pages only then. What a chunk needs in pages it takes from one that
# leaves, as the system moves them between ranges of addresses (mremap): a page that is given back
# and taken anew has to be zeroed, which made reads of 4 MiB 0.75 times as fast (Xeon family 6 model
# 207, 2 virtual cores, a disk of 2 GB/s).
#
# Order. :meth:`DiskChunks.here` brings a chunk and keeps it for as long as the context lasts; what
# was changed is written when it ends, in the background. Chunks that were used stay until others
# need the room, the one that was used longest ago leaves first. :meth:`DiskChunks.expect` is told
# the order of what will be needed next, and reads ahead what has room there.

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
        #: The extent with its content; None before it has any, and of a resident one.
        self.extent: int | None = None
        #: True if there is content in the extent; it is of zeros before.
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
        # Unsharding may run in a thread of the communicator, beside a forward that reads ahead.
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
                chunk.extent = self.file.add_extent(chunk.size_bytes)

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
                assert chunk.extent is not None
                try:
                    self._end_write(chunk)
                    chunk.going = self.file.write(chunk.extent, chunk.memory)
                    chunk.written = True
                except RingcommError as error:
                    self._keep(error)

    def _begin(self, chunk: DiskChunk, reads: bool) -> None:
        """Gives a chunk pages, and begins to read it."""
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
