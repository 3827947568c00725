"""File descriptors: errors when the process has none left, and handing one to another process.

A driver's descriptors cannot be opened through ``/proc/<pid>/fd``, which would open their device
anew, and ``pidfd_getfd`` needs the right to trace the other process, which Yama mostly denies. So
they are sent as SCM_RIGHTS of a Unix socket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import socket
import struct
from collections.abc import Iterator

from ringcomm.errors import HeapError, RendezvousError

_NONE_LEFT = {
    errno.EMFILE: "this process has no file descriptor left. Its limit is {limit} (ulimit -n): "
    "raise it, or close files",
    errno.ENFILE: "the system has no file descriptor left for any process, whatever ulimit -n says "
    "(fs.file-max): raise that, or end processes",
    errno.ENOMEM: "the system has no memory or no room for a mapping left (ulimit -v, "
    "vm.max_map_count): raise the limits, or free memory",
}


def _words_of(number: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _NONE_LEFT[number].format(limit=limit)


def _spare(count: int) -> OSError | None:
    """Returns the error of opening ``count`` more descriptors, or None: they can be opened."""
    opened: list[int] = []
    try:
        # Of a file that a process has always: a duplicate of another one may be none.
        opened.extend(os.open("/", os.O_PATH | os.O_CLOEXEC) for _ in range(count))
    except OSError as error:
        return error
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


def shortage_of(error: BaseException | None) -> str:
    """Returns the name of an exhausted resource in an error or its causes, or ""."""
    texts = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE)}
    seen, known = error, set[int]()
    while seen is not None and id(seen) not in known:  # a chain of causes may be circular
        known.add(id(seen))
        if isinstance(seen, OSError) and seen.errno in _NONE_LEFT:
            return _words_of(seen.errno)
        for text, number in texts.items():
            if text in str(seen):
                return _words_of(number)
        # These do not say why a file could not be opened.
        if isinstance(seen, (ImportError, socket.gaierror)) and (spare := _spare(1)) is not None:
            return shortage_of(spare)
        seen = seen.__cause__ or seen.__context__
    return ""


@contextlib.contextmanager
def forming(operation: str) -> Iterator[None]:
    """Words the errors of a process that runs out of descriptors inside.

    Args:
        operation: what is formed, on which rank.

    Raises:
        RendezvousError: no descriptor is left; names ``ulimit -n``.
    """
    try:
        yield
    except Exception as error:
        # A heap without memory has words of its own.
        no_memory = isinstance(error, HeapError) and not _is_of_descriptors(error)
        shortage = "" if no_memory else shortage_of(error)
        if not shortage:
            raise
        raise RendezvousError(f"{operation}: {shortage}") from error


def _is_of_descriptors(error: HeapError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.ENOMEM


def need_descriptors(count: int, operation: str, purpose: str) -> None:
    """Checks that so many descriptors can be opened, for code that cannot tell when it cannot.

    Args:
        count: how many.
        operation: named in the error.
        purpose: what they are for.

    Raises:
        RendezvousError: they cannot; names ``ulimit -n``.
    """
    error = _spare(count)
    if error is not None:
        raise RendezvousError(
            f"{operation}: expected {count} free file descriptors for {purpose}, but "
            f"{shortage_of(error) or error}"
        ) from error


_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_MOST_DESCRIPTORS = 8
_PAYLOAD = b"descriptor"


class DescriptorInbox:
    """A socket to which another process, or thread, may send one descriptor.

    Attributes:
        name: for :func:`send_descriptor`; the kernel chooses it, and it is no file.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # The kernel then says who sent a message.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")
        self.name: bytes = self._socket.getsockname()

    def receive(self, sender_pid: int, wait_s: float) -> int | None:
        """Returns the descriptor, which is the caller's to close; None: it did not come in time.

        What another process than ``sender_pid`` of this user sends is dropped: everyone on the
        machine can find the name.
        """
        self._socket.settimeout(wait_s)
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
        try:
            _, ancillary, _, _ = self._socket.recvmsg(len(_PAYLOAD), room, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            return None
        descriptors, sender = array.array("i"), (0, 0)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                sender = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[:2]
        if sender == (sender_pid, os.geteuid()) and len(descriptors) == 1:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def close(self) -> None:
        self._socket.close()


def send_descriptor(name: bytes, descriptor: int) -> None:
    """Sends a copy of ``descriptor`` to the inbox of that name.

    Raises:
        OSError: there is no such inbox in this network namespace.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        # Not send_fds(), which ignores its address (https://github.com/python/cpython/issues/107898).
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        sender.sendmsg([_PAYLOAD], [rights], 0, name)
