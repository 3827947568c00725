# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between ranks of different nodes; the node's core carries local messages.

Messages of one tag between two ranks keep their order, as within a node. A message is two sends of
the transport: a header (dtype, size), and the data. The data's tag is a hash of the message's tag,
number and size, so that data of another size never arrive in too small a buffer; the header then
shows the size that was expected and the size that was sent.

A receive with a source posts both receives at once. The first receive from any source makes its tag
*open*: from then on this rank receives all headers from other nodes as they arrive, and matches
each with a waiting receive. If a message from this rank's own node arrives first, it completes the
receive.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.host.rendezvous import NodeLayout
from ringcomm.comm.nodes.transport import (
    FOR_EVER,
    Probe,
    begun,
    break_up,
    join,
    look_at_connection,
    memory_at,
    tag_of,
)
from ringcomm.comm.nodes.watch import Watch
from ringcomm.comm.recorder.reader import program_line
from ringcomm.errors import AbortedError, PeerLost, start_thread, timed_out
from ringcomm.process import Deadline

# ---- Messages under way over nodes, with the methods of ``_native.Request`` ---------------------

LOOK_S = 0.05
# Values for the source in a call of post_recv() of the node's core.
ANY_LOCAL_PEER, ANY_RANK = -1, -2
_DTYPE_NAMES = {code: name for name, code in _native.DTYPES.items()}
_HEADER = "<qqqq"


class MessageHeader(NamedTuple):
    """The header that is sent before a message's data."""

    number: int
    tag: int
    dtype: int
    size_bytes: int

    def packed(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack(_HEADER, *self)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, memory: torch.Tensor) -> MessageHeader:
        return cls(*struct.unpack(_HEADER, bytes(memory.tolist())))


HEADER_BYTES = struct.calcsize(_HEADER)


class LocalRequest:
    """A message of the node's core, which numbers ranks by local rank."""

    def __init__(self, request: _native.Request, node_ranks: tuple[int, ...]) -> None:
        self._request = request
        self._node_ranks = node_ranks
        self.wait, self.done, self.status = request.wait, request.done, request.status
        self.withdraw = request.withdraw

    @property
    def source(self) -> int:
        local_rank = self._request.source
        return self._node_ranks[local_rank] if local_rank >= 0 else -1

    @property
    def dtype(self) -> str:
        return self._request.dtype

    @property
    def size_bytes(self) -> int:
        return self._request.size_bytes


class RailRequest:
    """A message to or from another node.

    Args:
        name: "send" or "recv".
        source: the other rank.
        ptr: the address of the data to send, or of the buffer to receive into.
        expected: the expected header; its ``number`` is not used.
        give_up: called with this request and the seconds waited so far while a thread waits; ends
            the communicator if the wait was too long, or the connection has broken.
        interrupted: called when Ctrl-C has ended a wait; ends the communicator.
        look: raises RuntimeError if the connection to a rank has broken.

    Attributes:
        source, dtype, size_bytes: as in ``_native.Request``.
        expected: the argument.
        probe: checks the connection to ``source``.
    """

    def __init__(
        self,
        name: str,
        source: int,
        ptr: int,
        expected: MessageHeader,
        give_up: Callable[[Any, float], None],
        interrupted: Callable[[Any], None],
        look: Callable[[int], None],
    ) -> None:
        self._name, self._line = name, program_line()
        self.source = source
        self.expected = expected
        self.dtype = _DTYPE_NAMES.get(expected.dtype, "?")
        self.size_bytes = expected.size_bytes
        self._ptr = ptr
        self._give_up = give_up
        self._interrupted = interrupted
        self._ended = threading.Event()
        self._status = 0
        self.probe = Probe(lambda: look(self.source))

    @property
    def called(self) -> str:
        """Describes the call and its line in the program."""
        file, line = self._line
        _, tag, dtype, size_bytes = self.expected
        what = f"{_DTYPE_NAMES.get(dtype, '?')}, {size_bytes} bytes, tag {tag}"
        return f"{self._name}({what}) at {file}:{line}"

    def memory(self) -> torch.Tensor:
        """Returns the data's memory as a uint8 tensor."""
        return memory_at(self._ptr, self.expected.size_bytes)

    def claim(self, peer: int) -> bool:
        """Claims this receive for a message of ``peer``; False if it is claimed already."""
        return True

    def came(self, header: MessageHeader) -> None:
        """Stores the dtype and size of the message that arrived."""
        self.dtype = _DTYPE_NAMES.get(header.dtype, "?")
        self.size_bytes = header.size_bytes

    def end(self, status: int) -> None:
        """Stores how the message ended, unless it has already ended."""
        if not self._ended.is_set():
            self._status = status
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def status(self) -> int:
        return self._status

    def wait(self, timeout_ms: int = -1) -> int:
        """Waits like ``_native.Request.wait``; a negative timeout means the communicator's."""
        try:
            return self._wait(timeout_ms)
        except BaseException:
            self._interrupted(self)
            raise

    def _wait(self, timeout_ms: int) -> int:
        limit = Deadline(timeout_ms / 1000)
        while True:
            left_s = LOOK_S if timeout_ms < 0 else limit.left_s()
            if self._wait_for(min(left_s, LOOK_S)):
                return self._status
            if timeout_ms < 0:
                self._give_up(self, limit.waited_s())
            elif left_s <= 0:
                return _native.STATUSES["timeout"]

    def _wait_for(self, seconds: float) -> bool:
        return self._ended.wait(seconds)


class AnyRequest(RailRequest):
    """A receive from any rank: from a local peer, by the node's core, or from another node.

    Args:
        ptr, expected: as in :class:`RailRequest`.
        inner: the core of the node.
        node_ranks: the ranks of the node.
        give_up, interrupted, look: as in :class:`RailRequest`.
    """

    def __init__(
        self,
        ptr: int,
        expected: MessageHeader,
        inner: _native.Comm,
        node_ranks: tuple[int, ...],
        give_up: Callable[[Any, float], None],
        interrupted: Callable[[Any], None],
        look: Callable[[int], None],
    ) -> None:
        super().__init__("recv", -1, ptr, expected, give_up, interrupted, look)
        self._node_ranks = node_ranks
        self._guard = threading.Lock()
        self._elsewhere = False
        self._within = self._posted(inner, ANY_RANK)

    def _posted(self, inner: _native.Comm, source: int) -> LocalRequest:
        _, tag, dtype, size_bytes = self.expected
        return LocalRequest(
            inner.post_recv(self._ptr, size_bytes, source, tag, dtype), self._node_ranks
        )

    def stay_within(self, inner: _native.Comm) -> None:
        """Waits for local peers only, since no rank of another node can send any more."""
        with self._guard:
            if not self._elsewhere and self._within.withdraw():
                self._within = self._posted(inner, ANY_LOCAL_PEER)

    def claim(self, peer: int) -> bool:
        with self._guard:
            if not self._within.withdraw():
                return False
            self._elsewhere = True
            self.source = peer
            return True

    def done(self) -> bool:
        with self._guard:
            if not self._elsewhere and not self._ended.is_set() and self._within.done():
                self.source = self._within.source
                self.dtype, self.size_bytes = self._within.dtype, self._within.size_bytes
                self.end(self._within.status())
        return self._ended.is_set()

    def _wait_for(self, seconds: float) -> bool:
        if not self.done() and not self._elsewhere:
            self._within.wait(round(seconds * 1000))
        return self.done() or (self._elsewhere and self._ended.wait(seconds))


PEER_LOST = _native.STATUSES["peer_lost"]


class _Line:
    """The messages of one tag to or from one peer; a thread completes them in order.

    Attributes:
        number: the count of messages so far.
        pending: the count of messages that have not ended.
    """

    def __init__(self, name: str) -> None:
        self.number = 0
        self.pending = 0
        self._guard = threading.Lock()
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        start_thread(self._thread, name, "The message was not begun")

    def add(self, step: Callable[[], None]) -> None:
        """Queues ``step``, which completes a message once all earlier messages have ended."""
        with self._guard:
            self.pending += 1
        self._steps.put(step)

    def stop(self) -> None:
        self._steps.put(None)

    def join(self) -> None:
        join(self._thread)

    def _loop(self) -> None:
        while (step := self._steps.get()) is not None:
            step()
            del step
            with self._guard:
                self.pending -= 1


class _OpenTag:
    """The receives with an open tag that wait for a header from another node.

    Args:
        strangers: the number of ranks on other nodes.
    """

    def __init__(self, strangers: int) -> None:
        self._strangers = strangers
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._waiting: list[RailRequest] = []
        self._ended = False

    def add(self, request: RailRequest) -> bool:
        """Adds a waiting receive; returns False if every rank that could send to it has ended."""
        with self._changed:
            if self._ended or self._in_vain(request):
                return False
            # Drop any-source receives that a local peer's message has completed in the meantime.
            self._waiting = [each for each in self._waiting if not each.done()]
            self._waiting.append(request)
            self._changed.notify_all()
        return True

    def take(self, peer: int) -> RailRequest | None:
        """Returns the first receive that accepts a message of ``peer``; waits until there is one.

        Returns None once all messages have been ended.
        """
        with self._changed:
            while not self._ended:
                for request in list(self._waiting):
                    if request.source in (-1, peer):
                        self._waiting.remove(request)
                        if request.claim(peer):
                            return request
                self._changed.wait()
        return None

    def end(self, peer: int | None = None) -> list[RailRequest]:
        """Marks ``peer`` (None: everything) as ended; returns receives that cannot complete."""
        with self._changed:
            if peer is None:
                self._ended = True
            else:
                self._gone.add(peer)
            ended = [each for each in self._waiting if self._ended or self._in_vain(each)]
            self._waiting = [each for each in self._waiting if each not in ended]
            self._changed.notify_all()
        return ended

    @property
    def gone(self) -> set[int]:
        """The ranks of other nodes that send no more messages."""
        with self._changed:
            return set(self._gone)

    def _in_vain(self, request: RailRequest) -> bool:
        if request.source < 0:
            return len(self._gone) == self._strangers
        return request.source in self._gone


class NodesMessages:
    """Makes the sends and receives of one rank, within its node and between nodes.

    Args:
        inner: the core of this rank's node.
        layout: the nodes of all ranks.
        group: the transport's group of all ranks. It must not be a lazy group of Gloo: there the
            first receive waits until its sender calls as well.
        watch: the watch over all ranks.
    """

    def __init__(
        self,
        inner: _native.Comm,
        layout: NodeLayout,
        group: Any,
        watch: Watch,
    ) -> None:
        self._inner = inner
        self._layout = layout
        self._watch = watch
        self._group = group
        self._sends: dict[tuple[int, int], _Line] = {}
        self._receives: dict[tuple[int, int], _Line] = {}
        self._open: dict[int, _OpenTag] = {}
        self._begun = weakref.WeakSet[RailRequest]()
        # Held while a message is posted, so that messages posted by two threads have an order.
        self._guard = threading.RLock()
        self._closed = False

    def post_send(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int) -> Any:
        """Begins a send to any rank; returns its request."""
        layout = self._layout
        if peer in layout.node_ranks:
            local_rank = layout.local_rank_of(peer)
            within = self._inner.post_send(ptr, size_bytes, local_rank, tag, dtype)
            return LocalRequest(within, layout.node_ranks)
        with self._guard:
            line = self._line(self._sends, peer, tag)
            line.number += 1
            header = MessageHeader(line.number, tag, dtype, size_bytes)
            memory, data_tag = memory_at(ptr, size_bytes), tag_of((tag, line.number), size_bytes)
            header_tag = tag_of(tag, HEADER_BYTES)
            works = [
                begun(lambda: self._group.send([header.packed()], peer, header_tag)),
                begun(lambda: self._group.send([memory], peer, data_tag)),
            ]
            request = self._request("send", peer, ptr, header)
            line.add(lambda: self._end(request, lambda: self._await(works)))
        return request

    def post_recv(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int) -> Any:
        """Begins a receive from a rank, or from any rank (``peer`` < 0); returns its request."""
        layout = self._layout
        if peer in layout.node_ranks:
            local_rank = layout.local_rank_of(peer)
            within = self._inner.post_recv(ptr, size_bytes, local_rank, tag, dtype)
            return LocalRequest(within, layout.node_ranks)
        mine = MessageHeader(0, tag, dtype, size_bytes)
        with self._guard:
            if peer < 0:
                return self._post_recv_of_any(ptr, mine)
            request = self._request("recv", peer, ptr, mine)
            if tag in self._open:
                if not self._open[tag].add(request):
                    self._end_in_vain(request, "the connection had ended before")
            else:
                self._post_recv_of_one(request)
        return request

    def _request(self, name: str, peer: int, ptr: int, header: MessageHeader) -> RailRequest:
        request = RailRequest(name, peer, ptr, header, self._give_up, self._interrupted, self._look)
        self._begun.add(request)
        return request

    def _look(self, peer: int) -> None:
        """Raises RuntimeError if the connection to a rank of another node has broken."""
        if self._group is not None:
            look_at_connection(self._group, peer)

    def _post_recv_of_one(self, request: RailRequest) -> None:
        """Begins to receive a header, and the data that are expected after it."""
        peer, tag = request.source, request.expected.tag
        line = self._line(self._receives, peer, tag)
        line.number += 1
        size_bytes = request.size_bytes
        memory, data_tag = request.memory(), tag_of((tag, line.number), size_bytes)
        room = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        header_tag = tag_of(tag, HEADER_BYTES)
        header = begun(lambda: self._group.recv([room], peer, header_tag))
        data = begun(lambda: self._group.recv([memory], peer, data_tag))

        def finish() -> int:
            self._await([header])
            theirs = MessageHeader.unpacked(room)
            return self._receive(request, theirs, data)

        line.add(lambda: self._end(request, finish))

    def _post_recv_of_any(self, ptr: int, mine: MessageHeader) -> AnyRequest:
        """Begins a receive from any rank, of this node or of another node."""
        opened = self._opened(mine.tag)
        request = AnyRequest(
            ptr,
            mine,
            self._inner,
            self._layout.node_ranks,
            self._give_up_any,
            self._interrupted,
            self._look,
        )
        self._begun.add(request)
        if not opened.add(request):
            self._end_in_vain(request, "")
        return request

    def _opened(self, tag: int) -> _OpenTag:
        """Opens a tag: from now on this rank receives the tag's headers as they arrive."""
        if tag in self._open:
            return self._open[tag]
        strangers = [peer for node in self._layout.others() for peer in self._layout.nodes[node]]
        opened = self._open[tag] = _OpenTag(len(strangers))
        for peer in strangers:
            # Receives that were posted before the tag was opened are queued, and complete first.
            self._line(self._receives, peer, tag).add(partial(self._serve, opened, peer, tag))
        return opened

    def _serve(self, opened: _OpenTag, peer: int, tag: int) -> None:
        """Matches a peer's messages with receives of an open tag, until the messages end."""
        try:
            while True:
                room = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                self._await([self._recv(room, peer, tag_of(tag, HEADER_BYTES))])
                theirs = MessageHeader.unpacked(room)
                request = opened.take(peer)
                if request is None:
                    return
                self._end(request, partial(self._receive, request, theirs))
        except RuntimeError as error:
            everything = self._closed or self._watch.error is not None
            for request in opened.end(None if everything else peer):
                self._end_in_vain(request, str(error))

    def break_up(self) -> None:
        """Ends all messages under way. See NOTE [Ending a wait of Gloo's]."""
        layout, group = self._layout, self._group
        strangers = [peer for node in layout.others() for peer in layout.nodes[node]]
        if group is not None and (self._sends or self._receives) and break_up(group, strangers):
            with self._guard:
                begun = list(self._begun)
            for request in begun:
                request.end(PEER_LOST)

    def close(self) -> None:
        """Ends the threads, and the messages whose other side the peer has not posted."""
        self._closed = True
        lines = (*self._sends.values(), *self._receives.values())
        if any(line.pending for line in lines):
            self.break_up()
        for opened in self._open.values():
            for request in opened.end():
                request.end(PEER_LOST)
        for line in lines:
            line.stop()
        for line in lines:
            line.join()
        self._group = None

    def _line(self, lines: dict[tuple[int, int], _Line], peer: int, tag: int) -> _Line:
        with self._guard:
            if (peer, tag) not in lines:
                lines[peer, tag] = _Line(f"ringcomm-messages-{peer}-{tag}")
            return lines[peer, tag]

    def _receive(self, request: RailRequest, theirs: MessageHeader, data: Any = None) -> int:
        """Receives the data that follow a header; returns the status.

        Args:
            request: the receive.
            theirs: the header that arrived.
            data: the work of the data's receive, if it was posted for the expected size.
        """
        mine, peer = request.expected, request.source
        fits = theirs.size_bytes == mine.size_bytes
        if data is None or not fits:
            lost = torch.empty(0 if fits else theirs.size_bytes, dtype=torch.uint8, device="cpu")
            tag = tag_of((theirs.tag, theirs.number), theirs.size_bytes)
            data = self._recv(request.memory() if fits else lost, peer, tag)
        self._await([data])
        request.came(theirs)
        return 0 if fits and theirs.dtype == mine.dtype else _native.MISMATCH

    def _recv(self, memory: torch.Tensor, peer: int, tag: int) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the communicator was closed")
        return group.recv([memory], peer, tag)

    def _await(self, works: list[Any]) -> int:
        for work in works:
            work.wait(FOR_EVER)
        return 0

    def _end(self, request: RailRequest, finish: Callable[[], int]) -> None:
        try:
            status = finish()
        except RuntimeError as error:
            self._end_in_vain(request, str(error))
        else:
            request.end(status)

    def _end_in_vain(self, request: RailRequest, why: str) -> None:
        """Ends a message whose connection has broken, and the communicator.

        A receive from any source first waits for local peers only, by the rules of the node's core.
        """
        if not self._closed and self._watch.error is None:
            if request.source >= 0:
                for_ever_s = FOR_EVER.total_seconds()
                self._watch.on_rail(request.source, request.called, 0.0, for_ever_s, why)
            elif isinstance(request, AnyRequest) and len(self._layout.node_ranks) > 1:
                request.stay_within(self._inner)
                return
            else:
                who = self._layout.named(self._layout.rank)
                text = f"{who} in {request.called}, from any rank: all others have ended or closed"
                self._watch.fail(PeerLost(text))
        request.end(PEER_LOST)

    def _give_up(self, request: RailRequest, waited_s: float) -> None:
        """Ends the communicator if the wait for a message was too long, or its connection broke."""
        timeout_s = self._inner.timeout_ms / 1000
        self._watch.awaits_in_vain(request.called, request.source, waited_s)
        broken = request.probe.broken(waited_s)
        if waited_s >= timeout_s or broken is not None:
            self._watch.on_rail(request.source, request.called, waited_s, timeout_s, broken or "")

    def _interrupted(self, request: RailRequest) -> None:
        who = self._layout.named(self._layout.rank)
        self._watch.fail(AbortedError(f"{who} was interrupted (Ctrl-C) in {request.called}"))

    def _give_up_any(self, request: AnyRequest, waited_s: float) -> None:
        """Ends the communicator if the wait for a message from any rank was too long."""
        if request.source >= 0:  # a message has begun to arrive
            self._give_up(request, waited_s)
            return
        if waited_s * 1000 < self._inner.timeout_ms:
            return
        layout = self._layout
        gone = self._open[request.expected.tag].gone | {
            rank
            for local_rank, rank in enumerate(layout.node_ranks)
            if rank != layout.rank and self._inner.health(local_rank)
        }
        ended = ", ".join(map(layout.named, sorted(gone)))
        told = f". {ended} could have sent it, but ended or closed before" if gone else ""
        self._watch.fail(
            timed_out(
                f"{layout.named(layout.rank)} in {request.called}, from any rank,",
                waited_s,
                f"a message, which no rank has sent{told}",
                "Look at what the senders do",
            )
        )
