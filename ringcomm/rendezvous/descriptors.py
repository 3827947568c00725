"""File descriptors that one process hands to another, as SCM_RIGHTS of a Unix socket.

A driver's descriptors cannot be opened through ``/proc/<pid>/fd``, which would open their device
anew, and ``pidfd_getfd`` needs the right to trace the other process, which Yama mostly denies.
"""

from __future__ import annotations

import array
import os
import socket
import struct

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
