# SPDX-License-Identifier: Apache-2.0
"""Sends the chunks of this process's growing heaps to the processes that map them (*readers*).

A reader connects to a socket of the heap's process, and sends the heap's token. The service sends
one message per chunk with the chunk's file descriptor; it sends the next chunk after the reader has
mapped and acknowledged the previous one. The connection lasts as long as the mapping. Later chunks
of the heap are sent in the same way, and a thread of each reader maps them, so no rank waits for
another rank's call. A slow reader, or a busy driver, only costs time: until all readers have
acknowledged a chunk, peers do not access its memory directly, and kernels copy its data instead.
A reader that cannot map a chunk *refuses* it: it sends the reason, and gets no further chunk. If
the service cannot export a chunk, it sends the reason in place of the chunk.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from ringcomm.errors import printable, start_thread
from ringcomm.process import LONGEST_LOOK_S, Deadline

_HELLO = struct.Struct("<Q")  # the heap's token
_CHUNK = struct.Struct("<QQQ")  # the chunk's offset and size, and the size of all chunks, in bytes
_MAPPED = struct.Struct("<Q")  # bytes of the heap, from its start, that the reader has mapped
_REASON_BYTES = 1000  # of a refusal; the text, in UTF-8, follows the numbers of the message
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_LISTEN = 128


class Sent(NamedTuple):
    """A chunk that a reader has received; the reader must close its descriptor."""

    offset_bytes: int
    size_bytes: int
    heap_bytes: int
    descriptor: int


class OfferedHeap(Protocol):
    """A heap whose chunks this process sends to readers."""

    token: int

    @property
    def committed_bytes(self) -> int: ...

    def export_after(self, mapped_bytes: int) -> tuple[int, int]:
        """Returns the size and a new descriptor of the chunk at offset ``mapped_bytes``."""
        ...

    def set_reached(self, size_bytes: int) -> None:
        """Records that all readers have mapped the first ``size_bytes`` of the heap."""
        ...

    def tell_refused(self, refusal: str) -> None:
        """Reports that a reader will never map more of the heap, and why."""
        ...


class _ReaderProgress:
    """How many bytes of a heap were sent to a reader, and how many the reader has mapped.

    ``refusal`` says why the reader will never map more; "" while it may.
    """

    def __init__(self) -> None:
        self.heap: OfferedHeap | None = None
        self.mapped_bytes = self.sent_bytes = 0
        self.refusal, self.is_told = "", False


class ChunkService:
    """This process's socket, its connections, and the thread that answers them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._acknowledged = threading.Condition(self._lock)
        self._heaps: dict[int, OfferedHeap] = {}
        self._readers: dict[socket.socket, _ReaderProgress] = {}
        self._followed: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # the kernel chooses a name outside the file system
        self._listener.listen(_LISTEN)
        self._listener.setblocking(False)
        self.name: bytes = self._listener.getsockname()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._ended = False
        start_thread(
            threading.Thread(target=self._serve, name="ringcomm-heap", daemon=True),
            "the chunks of device heaps",
            "Nothing was shared",
        )

    def _serve(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select():
                handler: Callable[[socket.socket], None] = key.data
                sock = key.fileobj
                if not self._ended and isinstance(sock, socket.socket):
                    self._handle(handler, sock)
        self._selector.close()
        self._listener.close()

    def _handle(self, handler: Callable[[socket.socket], None], sock: socket.socket) -> None:
        try:
            handler(sock)
        except Warning as warning:
            # With -W error. No caller can catch it, and the thread must serve other readers.
            threading.excepthook(
                threading.ExceptHookArgs(
                    (type(warning), warning, warning.__traceback__, threading.current_thread())
                )
            )

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the client has gone, or this service ends
        if _credentials(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        with self._lock:
            self._readers[connection] = _ReaderProgress()
            self._selector.register(connection, selectors.EVENT_READ, self._hear)

    # ---- heaps of this process ------------------------------------------------------------------

    def offer(self, heap: OfferedHeap) -> bool:
        """Lets other processes map ``heap``; returns False if this service has ended."""
        with self._lock:
            if not self._ended:
                self._heaps[heap.token] = heap
            return not self._ended

    def withdraw(self, heap: OfferedHeap) -> None:
        """Disconnects the readers of a heap; ends the service if it has no other work."""
        with self._lock:
            self._heaps.pop(heap.token, None)
            for connection, reader in list(self._readers.items()):
                if reader.heap is heap:
                    self._drop(connection)
            self._end_if_idle()

    def _hear(self, connection: socket.socket) -> None:
        """Receives a message: first a heap's token, later a count of mapped bytes, or a refusal."""
        try:
            text = connection.recv(_HELLO.size + _REASON_BYTES)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        with self._lock:
            reader = self._readers.get(connection)
            if reader is None:
                return
            number = _HELLO.unpack(text)[0] if len(text) == _HELLO.size else None
            if reader.heap is None and number is not None:
                reader.heap = self._heaps.get(number)
            elif reader.heap is not None and len(text) > _MAPPED.size:
                reader.refusal = reader.refusal or _reason_in(text[_MAPPED.size :])
            elif reader.heap is not None and number == reader.sent_bytes:
                reader.mapped_bytes = number
            heap = reader.heap
            # Drop a reader that has gone, or whose heap is unknown.
            if heap is None or not text:
                self._drop(connection)
            else:
                self._send_next(connection, reader)
        if heap is not None:
            self.notify(heap)

    def _drop(self, connection: socket.socket) -> None:
        del self._readers[connection]
        self._selector.unregister(connection)
        connection.close()

    def _send_next(self, connection: socket.socket, reader: _ReaderProgress) -> None:
        """Sends the next chunk to a reader if the reader has mapped all chunks sent before."""
        heap = reader.heap
        if (
            heap is None
            or reader.refusal
            or reader.sent_bytes != reader.mapped_bytes
            or reader.sent_bytes >= heap.committed_bytes
        ):
            return
        try:
            size_bytes, descriptor = heap.export_after(reader.sent_bytes)
            try:
                text = _CHUNK.pack(reader.sent_bytes, size_bytes, heap.committed_bytes)
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
                connection.sendmsg([text], [rights])
            finally:
                os.close(descriptor)
            reader.sent_bytes += size_bytes
        except ConnectionError:
            pass  # the reader has gone; _hear() notices it
        except (OSError, RuntimeError) as error:
            reason = reason_of(error)
            reader.refusal = f"this process cannot send a chunk of it to a peer: {reason}"
            text = _CHUNK.pack(reader.sent_bytes, 0, heap.committed_bytes)
            with suppress(OSError):  # the reader has gone
                connection.send(text + _encoded(f"its process cannot send a chunk: {reason}"))

    def send_grown(self, heap: OfferedHeap) -> None:
        """Sends new chunks of ``heap`` to its readers."""
        with self._lock:
            for connection, reader in list(self._readers.items()):
                if reader.heap is heap:
                    self._send_next(connection, reader)
        self.notify(heap)

    def _reached(self, heap: OfferedHeap) -> int:
        with self._lock:
            mapped = [each.mapped_bytes for each in self._readers.values() if each.heap is heap]
            return min(mapped, default=heap.committed_bytes)

    def notify(self, heap: OfferedHeap) -> None:
        """Calls ``heap.set_reached``, then wakes the threads in :meth:`await_readers`.

        Then reports new refusals to the heap, each once.
        """
        heap.set_reached(self._reached(heap))
        with self._acknowledged:
            self._acknowledged.notify_all()
            refused = [each for each in self._refusing(heap) if not each.is_told]
            for each in refused:
                each.is_told = True
        for each in refused:
            heap.tell_refused(each.refusal)

    def _refusing(self, heap: OfferedHeap) -> list[_ReaderProgress]:
        return [each for each in self._readers.values() if each.heap is heap and each.refusal]

    def refusals(self, heap: OfferedHeap) -> list[str]:
        """Returns why readers of ``heap`` will never map more of it; empty if all readers may."""
        with self._lock:
            return [each.refusal for each in self._refusing(heap)]

    def await_readers(self, heap: OfferedHeap, size_bytes: int, timeout_s: float) -> bool:
        """Waits until all readers have mapped the first ``size_bytes`` of ``heap``.

        Does not wait for readers that refuse. Returns False if a reader refuses, and at the
        timeout. Time in which this process was stopped does not count.
        """
        deadline = Deadline(timeout_s)
        with self._acknowledged:
            while any(
                each.heap is heap and each.mapped_bytes < size_bytes and not each.refusal
                for each in self._readers.values()
            ):
                if deadline.is_over():
                    return False
                self._acknowledged.wait(min(LONGEST_LOOK_S / 2, deadline.left_s()))
            return self._reached(heap) >= size_bytes

    # ---- heaps of other processes ---------------------------------------------------------------

    def follow(self, connection: socket.socket, map_next: Callable[[], bool]) -> bool:
        """Calls ``map_next`` for each chunk that arrives, until ``map_next`` returns False.

        Returns False if this service has ended.
        """

        def hear(connection: socket.socket) -> None:
            may_follow = False
            try:
                may_follow = map_next()
            finally:
                if not may_follow:
                    self._stop_hearing(connection)

        connection.setblocking(False)
        with self._lock:
            if not self._ended:
                self._followed.add(connection)
                self._selector.register(connection, selectors.EVENT_READ, hear)
            return not self._ended

    def _stop_hearing(self, connection: socket.socket) -> None:
        with self._lock, suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def leave(self, connection: socket.socket) -> None:
        """Closes a connection of :meth:`follow`; the heap's process then drops this reader."""
        with self._lock:
            self._stop_hearing(connection)
            self._followed.discard(connection)
            connection.close()
            self._end_if_idle()

    # ---- the end --------------------------------------------------------------------------------

    def _end_if_idle(self) -> None:
        global _service
        if self._heaps or self._followed or self._ended:
            return
        self._ended = True
        for connection in list(self._readers):
            self._drop(connection)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if _service is self:
            _service = None

    def forget_in_child(self) -> None:
        """Closes a forked child's copies of the sockets, so that peers notice the parent's exit."""
        for each in (self._listener, *self._readers, *self._followed):
            each.close()
        self._selector.close()


_service: ChunkService | None = None
_starting = threading.Lock()
_inherited: list[ChunkService] = []


def _forget_service_in_child() -> None:
    global _service, _starting
    _starting = threading.Lock()
    if _service is not None:
        _service.forget_in_child()
        _inherited.append(_service)
        _service = None


os.register_at_fork(after_in_child=_forget_service_in_child)


def _in_service(begin: Callable[[ChunkService], bool]) -> ChunkService:
    """Calls ``begin`` with this process's service; starts the service if none runs."""
    global _service
    with _starting:
        while True:
            if _service is None:
                _service = ChunkService()
            service = _service
            if begin(service):
                return service


def offer(heap: OfferedHeap) -> ChunkService:
    """Lets other processes map ``heap``, until it is withdrawn from the service.

    Raises:
        RingcommError: the service's thread cannot be started.
    """
    return _in_service(lambda service: service.offer(heap))


def follow(connection: socket.socket, map_next: Callable[[], bool]) -> ChunkService:
    """Lets the service's thread call ``map_next`` at each arriving chunk, until it returns False.

    Raises:
        RingcommError: the service's thread cannot be started.
    """
    return _in_service(lambda service: service.follow(connection, map_next))


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns the process id and the user id of the process at the connection's other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def connect(name: bytes, pid: int, token: int, timeout_s: float) -> socket.socket:
    """Connects to the service ``name`` of process ``pid``, and requests the heap with ``token``.

    Raises:
        OSError: this network namespace has no such service, or another process serves it.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(name)
        if _credentials(connection) != (pid, os.geteuid()):
            raise OSError(0, "another process answers there")
        connection.send(_HELLO.pack(token))
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket) -> Sent | None:
    """Returns the next chunk; None if the other process has closed the connection.

    Raises:
        OSError: no message arrived within the socket's timeout, the message is not a chunk, or the
            other process refuses; the error then has its reason.
    """
    room = socket.CMSG_SPACE(8 * array.array("i").itemsize)
    text, ancillary, _, _ = connection.recvmsg(
        _CHUNK.size + _REASON_BYTES, room, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) // 4 * 4])
    if len(text) == _CHUNK.size and len(descriptors) == 1:
        offset_bytes, size_bytes, heap_bytes = _CHUNK.unpack(text)
        return Sent(offset_bytes, size_bytes, heap_bytes, descriptors[0])
    for descriptor in descriptors:
        os.close(descriptor)
    if not text:
        return None
    if len(text) > _CHUNK.size:
        raise OSError(0, _reason_in(text[_CHUNK.size :]))
    raise OSError(0, "received a message that is not a chunk")


def acknowledge(connection: socket.socket, mapped_bytes: int) -> None:
    """Reports that this process has mapped the first ``mapped_bytes`` of the heap."""
    with suppress(OSError):  # the other process has ended
        connection.send(_MAPPED.pack(mapped_bytes))


def refuse(connection: socket.socket, mapped_bytes: int, reason: str) -> None:
    """Reports that this process will never map more than the first ``mapped_bytes``, and why."""
    with suppress(OSError):  # the other process has ended
        connection.send(_MAPPED.pack(mapped_bytes) + _encoded(reason))


def _encoded(reason: str) -> bytes:
    return (reason or "?").encode()[:_REASON_BYTES]


def _reason_in(text: bytes) -> str:
    return printable(text.decode(errors="replace"), allowed="")


def reason_of(error: Exception) -> str:
    """Returns the text of an error, without the number of an OSError."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
