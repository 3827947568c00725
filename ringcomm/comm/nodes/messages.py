"""Sends and receives between ranks of different nodes, and within a node by its own core.

Between two ranks the messages of one tag keep their order, as within a node. A message is two sends
of the carrier: a header (dtype, size), and the data. The data's tag stands for the message's tag,
number and size, so that data which do not fit are never received into too small a buffer; the
header then says what was expected and what came.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.distributed import Store

from ringcomm import _native
from ringcomm.comm.nodes.places import Places
from ringcomm.comm.nodes.rails import (
    Carrier,
    begun,
    break_up,
    memory_at,
    tag_of,
)
from ringcomm.comm.nodes.watch import Watch
from ringcomm.errors import UnsupportedError, start_thread

# A message waits for its peer as long as its Work does, which counts the time; this is for ever.
FOR_EVER = timedelta(days=365)
_DTYPE_NAMES = {code: name for name, code in _native.DTYPES.items()}


_HEADER = "<qqqq"


class MessageHeader(NamedTuple):
    """The description that goes before a message's data."""

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


class MateRequest:
    """A message of the node's core, whose ranks are the places of the node."""

    def __init__(self, request: _native.Request, mates: tuple[int, ...]) -> None:
        self._request = request
        self._mates = mates
        self.wait, self.done, self.status = request.wait, request.done, request.status

    @property
    def source(self) -> int:
        return self._mates[self._request.source]

    @property
    def dtype(self) -> str:
        return self._request.dtype

    @property
    def size_bytes(self) -> int:
        return self._request.size_bytes


class RailRequest:
    """A message to or from another node; has the methods of ``_native.Request``."""

    def __init__(self, peer: int, header: MessageHeader, give_up: Callable[[int, float], None]):
        self.source = peer
        self.dtype = _DTYPE_NAMES.get(header.dtype, "?")
        self.size_bytes = header.size_bytes
        self._give_up = give_up
        self._ended = threading.Event()
        self._status = 0

    def end(self, status: int) -> None:
        """Notes how the message ended."""
        self._status = status
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def status(self) -> int:
        return self._status

    def wait(self, timeout_ms: int = -1) -> int:
        """Waits as ``_native.Request.wait``: negative until the communicator's own timeout."""
        if timeout_ms >= 0:
            ended = self._ended.wait(timeout_ms / 1000)
            return self._status if ended else _native.STATUSES["timeout"]
        begin = time.monotonic()
        while not self._ended.wait(0.05):
            self._give_up(self.source, time.monotonic() - begin)
        return self._status


class _Line:
    """The messages of one tag to or from one peer, ended in order by a thread.

    Attributes:
        number: of messages so far.
        pending: of them, how many have not ended.
    """

    def __init__(self, name: str) -> None:
        self.number = 0
        self.pending = 0
        self._guard = threading.Lock()
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        start_thread(self._thread, name, "The message was not begun")

    def add(self, step: Callable[[], None]) -> None:
        """Ends a message by ``step`` once those before it have ended."""
        with self._guard:
            self.pending += 1
        self._steps.put(step)

    def stop(self) -> None:
        self._steps.put(None)

    def _loop(self) -> None:
        while (step := self._steps.get()) is not None:
            step()
            del step
            with self._guard:
                self.pending -= 1


class NodesMessages:
    """The messages of one rank.

    Args:
        inner: the core of this rank's node.
        places: of all ranks.
        store: of these messages alone.
        watch: over all ranks.
        carrier: makes the group of all ranks.
    """

    def __init__(
        self,
        inner: _native.Comm,
        places: Places,
        store: Store,
        watch: Watch,
        carrier: Carrier,
    ) -> None:
        self._inner = inner
        self._places = places
        self._watch = watch
        world = sum(map(len, places.nodes))
        timeout = timedelta(milliseconds=inner.timeout_ms)
        # Not a lazy group of Gloo's: there the first receive waits until its sender calls, too.
        self._group: Any = carrier(store, places.rank, world, timeout)
        self._sends: dict[tuple[int, int], _Line] = {}
        self._receives: dict[tuple[int, int], _Line] = {}
        self._guard = threading.Lock()
        self._closed = False

    def post_send(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int) -> Any:
        """Begins a send to any rank; returns its request."""
        places = self._places
        if peer in places.mates:
            place = places.place_of(peer)
            within = self._inner.post_send(ptr, size_bytes, place, tag, dtype)
            return MateRequest(within, places.mates)
        line = self._line(self._sends, peer, tag)
        with self._guard:
            line.number += 1
            header = MessageHeader(line.number, tag, dtype, size_bytes)
            memory, data_tag = memory_at(ptr, size_bytes), tag_of((tag, line.number), size_bytes)
            header_tag = tag_of(tag, HEADER_BYTES)
            works = [
                begun(lambda: self._group.send([header.packed()], peer, header_tag)),
                begun(lambda: self._group.send([memory], peer, data_tag)),
            ]
        request = RailRequest(peer, header, self._give_up)
        line.add(lambda: self._end(request, lambda: self._await(works)))
        return request

    def post_recv(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int) -> Any:
        """Begins a receive from any one rank; returns its request.

        Raises:
            UnsupportedError: no rank is named.
        """
        places = self._places
        if peer < 0:
            raise UnsupportedError(
                f"recv on {places.named(places.rank)}: src: expected a rank, got None: over "
                "several nodes a receive names its sender. Name it, or receive on "
                "Communicator.node what comes from this node"
            )
        if peer in places.mates:
            place = places.place_of(peer)
            within = self._inner.post_recv(ptr, size_bytes, place, tag, dtype)
            return MateRequest(within, places.mates)
        line = self._line(self._receives, peer, tag)
        with self._guard:
            line.number += 1
            mine = MessageHeader(line.number, tag, dtype, size_bytes)
            memory, data_tag = memory_at(ptr, size_bytes), tag_of((tag, line.number), size_bytes)
            room = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
            header_tag = tag_of(tag, HEADER_BYTES)
            header = begun(lambda: self._group.recv([room], peer, header_tag))
            data = begun(lambda: self._group.recv([memory], peer, data_tag))
        request = RailRequest(peer, mine, self._give_up)
        line.add(
            lambda: self._end(request, lambda: self._finish(request, mine, room, header, data))
        )
        return request

    def break_up(self) -> None:
        """Ends all messages under way."""
        for peer, _ in (*self._sends, *self._receives)[:1]:
            break_up(self._group, peer)

    def close(self) -> None:
        """Lets the threads end, and with them messages that nobody has met."""
        self._closed = True
        lines = (*self._sends.values(), *self._receives.values())
        if any(line.pending for line in lines):
            self.break_up()
        for line in lines:
            line.stop()
        self._group = None

    def _line(self, lines: dict[tuple[int, int], _Line], peer: int, tag: int) -> _Line:
        with self._guard:
            if (peer, tag) not in lines:
                lines[peer, tag] = _Line(f"ringcomm-messages-{peer}-{tag}")
            return lines[peer, tag]

    def _finish(
        self, request: RailRequest, mine: MessageHeader, room: torch.Tensor, header: Any, data: Any
    ) -> int:
        """Waits for a message's header and data; returns the status."""
        self._await([header])
        theirs = MessageHeader.unpacked(room)
        if theirs == mine:
            return self._await([data])
        request.dtype = _DTYPE_NAMES.get(theirs.dtype, "?")
        request.size_bytes = theirs.size_bytes
        if theirs.size_bytes != mine.size_bytes:  # the data are received, and lost
            lost = torch.empty(theirs.size_bytes, dtype=torch.uint8, device="cpu")
            tag = tag_of((theirs.tag, theirs.number), theirs.size_bytes)
            self._await([self._group.recv([lost], request.source, tag)])
        else:
            self._await([data])
        return _native.MISMATCH

    def _await(self, works: list[Any]) -> int:
        for work in works:
            work.wait(FOR_EVER)
        return 0

    def _end(self, request: RailRequest, finish: Callable[[], int]) -> None:
        try:
            status = finish()
        except RuntimeError as error:
            if not self._closed:
                for_ever_s = FOR_EVER.total_seconds()
                self._watch.on_rail(request.source, "a message", 0.0, for_ever_s, str(error))
            status = _native.STATUSES["peer_lost"]
        request.end(status)

    def _give_up(self, peer: int, waited_s: float) -> None:
        """Ends the communicator when a message was awaited for too long."""
        timeout_s = self._inner.timeout_ms / 1000
        if waited_s >= timeout_s:
            self._watch.on_rail(peer, "a message", waited_s, timeout_s, "")
