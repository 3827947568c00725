"""Messages under way over nodes, with the methods of ``_native.Request``."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.nodes.rails import memory_at
from ringcomm.comm.recorder.reader import program_line
from ringcomm.deadlines import Deadline

LOOK_S = 0.05
# Of post_recv of the node's core.
ANY_MATE, ANY_MATE_OR_ELSEWHERE = -1, -2
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
        self.withdraw = request.withdraw

    @property
    def source(self) -> int:
        place = self._request.source
        return self._mates[place] if place >= 0 else -1

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
        ptr: where the data lie, or come to.
        expected: what they are; its number is not read.
        give_up: called with this request and the seconds so far while somebody waits; ends the
            communicator when that was too long.
        interrupted: called when a Ctrl-C has ended a wait; ends the communicator.

    Attributes:
        source, dtype, size_bytes: as of ``_native.Request``.
        expected: as above.
    """

    def __init__(
        self,
        name: str,
        source: int,
        ptr: int,
        expected: MessageHeader,
        give_up: Callable[[Any, float], None],
        interrupted: Callable[[Any], None],
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

    @property
    def called(self) -> str:
        """The call in words, with the program's line."""
        file, line = self._line
        _, tag, dtype, size_bytes = self.expected
        what = f"{_DTYPE_NAMES.get(dtype, '?')}, {size_bytes} bytes, tag {tag}"
        return f"{self._name}({what}) at {file}:{line}"

    def memory(self) -> torch.Tensor:
        """Returns the data's memory, as bytes."""
        return memory_at(self._ptr, self.expected.size_bytes)

    def claim(self, peer: int) -> bool:
        """Says whether a message of a peer may meet this receive, which is its from then on."""
        return True

    def came(self, header: MessageHeader) -> None:
        """Notes what has come."""
        self.dtype = _DTYPE_NAMES.get(header.dtype, "?")
        self.size_bytes = header.size_bytes

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
    """A receive from any rank: from a mate, by the node's core, or else from another node.

    Args:
        ptr, expected: as of :class:`RailRequest`.
        inner: the core of the node.
        mates: its ranks.
        give_up: as of :class:`RailRequest`.
        interrupted: as of :class:`RailRequest`.
    """

    def __init__(
        self,
        ptr: int,
        expected: MessageHeader,
        inner: _native.Comm,
        mates: tuple[int, ...],
        give_up: Callable[[Any, float], None],
        interrupted: Callable[[Any], None],
    ) -> None:
        super().__init__("recv", -1, ptr, expected, give_up, interrupted)
        self._mates = mates
        self._guard = threading.Lock()
        self._elsewhere = False
        self._within = self._posted(inner, ANY_MATE_OR_ELSEWHERE)

    def _posted(self, inner: _native.Comm, source: int) -> MateRequest:
        _, tag, dtype, size_bytes = self.expected
        return MateRequest(inner.post_recv(self._ptr, size_bytes, source, tag, dtype), self._mates)

    def stay_within(self, inner: _native.Comm) -> None:
        """Notes that no message comes from elsewhere any more."""
        with self._guard:
            if not self._elsewhere and self._within.withdraw():
                self._within = self._posted(inner, ANY_MATE)

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
