# SPDX-License-Identifier: Apache-2.0
"""Calls over several nodes: their order, headers, messages on the rails, and the collectives."""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from ringcomm import _native
from ringcomm.algorithms import algorithm_name
from ringcomm.comm.host.core import NoFastCalls
from ringcomm.comm.host.rendezvous import NodeLayout
from ringcomm.comm.nodes.compressed_sums import Reducing
from ringcomm.comm.nodes.messages import NodesMessages
from ringcomm.comm.nodes.transport import HEADER_TAG, RailMessage, Rails, memory_at, tag_of
from ringcomm.comm.nodes.watch import RailWait, Watch
from ringcomm.errors import (
    AbortedError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    UnsupportedError,
    different_calls,
)
from ringcomm.process import Deadline

Tensor = torch.Tensor

AUTO, ONE_SHOT = _native.ALGORITHMS["auto"], _native.ALGORITHMS["one_shot"]
BYTE = _native.DTYPES["uint8"]
_DTYPE_NAMES = {code: name for name, code in _native.DTYPES.items()}
_OP_NAMES = {code: name for name, code in _native.OPS.items()}


class _Failed(Exception):
    """Raised inside a call that has failed; :attr:`Watch.error` is the reason."""


# The collectives of sharded training; the headers of these calls have a tag in place of a root.
_TAGGED = ("reduce_scatter_norm", "reduce_scatter_adamw_all_gather", "all_gather_bucket")
_HEADER = "<q32s8sqiii"
_COLLECTIVES = _native.RECORD_NAMES["collectives"]
_RECORDED_AS = {"all_gather_on_rail": "all_gather", "all_gather_bucket": "all_gather"}
_ABORTED = _native.STATUSES["aborted"]
_STATUSES = (
    (CollectiveTimeout, _native.STATUSES["timeout"]),
    (PeerLost, _native.STATUSES["peer_lost"]),
    (MismatchError, _native.STATUSES["mismatch"]),
)


class RailHeader(NamedTuple):
    """Describes a rank's call to the ranks of its rail, as native call headers do in a node."""

    sequence: int
    name: str
    match_bytes: int
    dtype: int
    op: int
    root: int
    compression: str

    def packed(self) -> Tensor:
        sequence, name, *rest, compression = self
        raw = struct.pack(_HEADER, sequence, name.encode(), compression.encode(), *rest)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, memory: Tensor) -> RailHeader:
        sequence, *texts, size, dtype, op, root = struct.unpack(_HEADER, bytes(memory.tolist()))
        name, compression = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        return cls(sequence, name, size, dtype, op, root, compression)

    def words(self, optimizer: tuple[int, int] | None) -> tuple[int, int, int, int]:
        """Returns the call as the words that the flight recorder stores.

        Args:
            optimizer: (bucket elements, dtype of the results) of an optimizer's call, else None.
        """
        kind = _COLLECTIVES.index(_RECORDED_AS.get(self.name, self.name))
        size, root = self.match_bytes, -1 if self.name in _TAGGED else self.root
        if optimizer is not None:
            # Low byte: the results' dtype; the bits above: the tag (ResultsAndTag in call.h).
            size, root = optimizer[0], optimizer[1] | max(self.root, 0) << 8
        return _native.call_words(size, kind, self.dtype, self.op, ONE_SHOT, root)

    def __str__(self) -> str:
        parts = [f"{self.match_bytes} bytes"] if self.match_bytes else []
        parts += [_DTYPE_NAMES[self.dtype]] if self.dtype in _DTYPE_NAMES else []
        parts += [f"op {_OP_NAMES[self.op]}"] if self.op in _OP_NAMES else []
        parts += (
            [f"compression {self.compression}"] if self.compression in _native.QUANT_FORMATS else []
        )
        if self.root >= 0:
            tagged = self.name in _TAGGED
            parts += [_native.describe_tag(self.root) if tagged else f"root {self.root}"]
        return f"{self.name} (call {self.sequence}; {', '.join(parts)})"


HEADER_BYTES = struct.calcsize(_HEADER)


class Scratch:
    """Reusable memory of this rank for partial sums and arriving data."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size_bytes: int) -> Tensor:
        """Returns a uint8 tensor of at least ``size_bytes`` bytes."""
        size = 1 << max(size_bytes - 1, 4095).bit_length()
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu")

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Takes back tensors that :meth:`take` returned, for later calls."""
        for tensor in tensors:
            self._free.setdefault(tensor.numel(), []).append(tensor)


class CallsOverNodes(NoFastCalls):
    """One rank's calls over nodes: order, headers and messages; subclasses add the collectives.

    Methods return 0, or a nonzero status; :attr:`Watch.error` then says what happened. Only the
    thread that holds :attr:`turn` makes calls.

    Args:
        inner: the core of this rank's node; nothing else uses it.
        layout: the nodes of all ranks.
        rails: the rails of this rank.
        watch: the watch over all ranks.
        messages: makes the sends and receives of this rank; None if there are none.
        compression: as ``CommOptions.compression``; :meth:`using_compression` overrides this value.
        schedule: the name of the schedule by which the ranks of a rail exchange data.

    Attributes:
        turn: the lock of calls, as in the native core.
    """

    def __init__(
        self,
        inner: _native.Comm,
        layout: NodeLayout,
        rails: Rails,
        watch: Watch,
        messages: NodesMessages | None,
        compression: str,
        schedule: str,
    ) -> None:
        self._inner = inner
        self.layout = layout
        self._rails = rails
        self._watch = watch
        self._messages = messages
        self.compression = compression
        self._schedule = schedule
        self._world = sum(map(len, layout.nodes))
        self._scratch = Scratch()
        self._sequence = 0
        self._called = RailHeader(0, "", 0, -1, -1, -1, compression)
        self._record = 0
        self._headers: list[RailMessage] = []
        self._sent: list[RailMessage] = []
        self._closed = False
        self._arrived_on_rails = 0
        self.turn = threading.Lock()

    # ---- the interface of a core ----------------------------------------------------------------

    @property
    def segment_bytes(self) -> int:
        return self._inner.segment_bytes

    @property
    def timeout_ms(self) -> int:
        return self._inner.timeout_ms

    @timeout_ms.setter
    def timeout_ms(self, timeout_ms: int) -> None:
        self._inner.timeout_ms = timeout_ms

    @property
    def aborted(self) -> bool:
        return self._closed or self._watch.error is not None or self._inner.aborted

    def chosen(self, algorithm: int) -> int:
        """Returns ``algorithm``, or the code of "one_shot" if it is the code of "auto"."""
        return ONE_SHOT if algorithm == AUTO else algorithm

    @property
    def awaited(self) -> int:
        """The rank that a call waits for, or -1; as in the native core."""
        local_rank = self._inner.awaited
        return self.layout.node_ranks[local_rank] if local_rank >= 0 else self._watch.awaited

    @property
    def arrivals(self) -> int:
        """A count that grows while peers progress in a call; as in the native core."""
        return self._inner.arrivals + self._arrived_on_rails

    @property
    def has_messages(self) -> bool:
        """True while messages within the node are under way; ignores messages between nodes."""
        return self._inner.has_messages

    def set_left(self, left: bool) -> None:
        """Notes whether this rank has left; :meth:`Watch.set_left` informs other nodes."""
        self._inner.set_left(left)

    def fault(self) -> None:
        """Returns None: :attr:`Watch.error` describes the fault."""
        return None

    def recorded(self, rank: int, most: int = 0) -> bytes:
        """Returns the records of a rank of this node: its calls within the node."""
        if rank not in self.layout.node_ranks:
            return b""
        local_rank = self.layout.local_rank_of(rank)
        return self._inner.recorded(local_rank, *([most] if most else []))

    def abort(self, reason: str) -> None:
        who = self.layout.named(self.layout.rank)
        text = f": {reason}" if reason else ""
        self._watch.fail(AbortedError(f"{who} aborted the communicator{text}"))

    def close(self) -> None:
        self._closed = True
        self._watch.close()
        if self._messages is not None:
            self._messages.close()
        self._rails.close()
        self._inner.close()

    def forget(self) -> None:
        """Closes the core once its communicator has been garbage-collected."""
        self.close()

    def post_send(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int) -> Any:
        assert self._messages is not None  # the communicator has checked that messages are possible
        return self._messages.post_send(ptr, size_bytes, peer, tag, dtype)

    def post_recv(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int) -> Any:
        assert self._messages is not None
        return self._messages.post_recv(ptr, size_bytes, peer, tag, dtype)

    def drive_in_background(self) -> None:
        self._inner.drive_in_background()

    @contextmanager
    def using_compression(self, compression: str | None) -> Iterator[None]:
        """Makes the calls inside use ``compression``; None: the communicator's compression."""
        before = self.compression, self._schedule
        if compression is not None:
            self.compression = compression
            # Quantized sums may be added only at their destination, which only one-shot rails do.
            self._schedule = "one_shot" if compression in _native.QUANT_FORMATS else self._schedule
        try:
            yield
        finally:
            self.compression, self._schedule = before

    # ---- a call ---------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        head: tuple[int, int, int, int],
        algorithm: int,
        body: Callable[[], None],
        *,
        headers: bool = True,
        optimizer: tuple[int, int] | None = None,
    ) -> int:
        """Makes a call.

        Args:
            name: the name of the call.
            head: bytes, dtype, op and root, which must be equal on all ranks.
            algorithm: "auto" or "one_shot".
            body: does the work of the call.
            headers: whether headers are exchanged before the body.
            optimizer: as in :meth:`RailHeader.words`.
        """
        if algorithm not in (AUTO, ONE_SHOT):
            who = self.layout.named(self.layout.rank)
            raise UnsupportedError(
                f"{name} on {who}: algorithm: expected auto or {algorithm_name(name, ONE_SHOT)} "
                "over several nodes; the others work only within a node (Communicator.node)"
            )
        if self.aborted:
            return 1
        self._sequence += 1
        self._called = RailHeader(self._sequence, name, *head, self.compression)
        record = self._record = self._inner.record_around(self._called.words(optimizer))
        status = _ABORTED
        try:
            if headers:
                self._send_headers()
            if name in _TAGGED and self._called.root >= 0:
                self._compare_tags()
            body()
            self._check_headers()
            self._settle(self._sent)
            status = 0
        except _Failed:
            status = self._status()
            return self._forget()
        except BaseException as error:
            who, what = self.layout.named(self.layout.rank), type(error).__name__
            if isinstance(error, KeyboardInterrupt):
                what = "Ctrl-C"
            called = f"{self._called}{self._watch.site_of(record)}"
            self._watch.fail(AbortedError(f"{who} was interrupted ({what}) in {called}"))
            self._forget()
            raise
        finally:
            self._inner.record_around_end(record, status)
        return 0

    def _status(self) -> int:
        """Returns the status code that the flight recorder stores for a failed call."""
        error = self._watch.error
        return next((code for kind, code in _STATUSES if isinstance(error, kind)), _ABORTED)

    def _forget(self) -> int:
        """Drops the messages of a failed call and the memory that they use."""
        self._headers, self._sent = [], []
        self._scratch = Scratch()
        return 1

    def _inside(self, status: int) -> None:
        """Raises _Failed, which ends the call, if a call within the node returned nonzero."""
        if status:
            self._watch.in_node()
            raise _Failed

    def _send_headers(self) -> None:
        mine = self._called.packed()
        for rail in self.layout.rails_of(self.layout.rank):
            for node in self.layout.others():
                theirs = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                with self._waiting_on_rail(self.layout.rail(rail)[node]):
                    header = self._rails.receive(rail, node, theirs, HEADER_TAG)
                    self._headers.append(replace(header, check=self._check_header))
                    self._sent.append(self._rails.send(rail, node, mine, HEADER_TAG))

    def _check_headers(self) -> None:
        """Waits for the headers of the rail peers and compares them with this rank's call."""
        headers, self._headers = self._headers, []
        for message in headers:
            self._wait([message])

    def _check_header(self, message: RailMessage) -> None:
        theirs = RailHeader.unpacked(message.memory)
        if theirs != self._called:
            self._differs(message.rank, theirs)

    def _compare_tags(self) -> None:
        """Compares tags within the node, since the node's native calls compare only sizes."""
        mine = torch.tensor([self._called.root], dtype=torch.int64, device="cpu")
        tags = mine.new_empty(len(self.layout.node_ranks))
        byte = _native.DTYPES["uint8"]
        self._inside(self._inner.all_gather(mine.data_ptr(), tags.data_ptr(), 8, byte, ONE_SHOT))
        for rank, tag in zip(self.layout.node_ranks, tags.tolist(), strict=True):
            if tag != self._called.root:
                self._differs(rank, self._called._replace(root=tag))

    def _differs(self, peer: int, theirs: RailHeader) -> NoReturn:
        """Ends the call because rank ``peer`` makes a different call."""
        me, other = (self.layout.named(rank) for rank in (self.layout.rank, peer))
        self._watch.fail(
            different_calls(
                me.capitalize(),
                f"{self._called}{self._watch.site_of(self._record)}",
                other,
                theirs,
            )
        )
        raise _Failed

    def _wait(self, messages: Sequence[RailMessage]) -> None:
        """Waits for messages to or from one rank."""
        with self._waiting_on_rail(messages[0].rank):
            self._rails.wait(messages)
        self._arrived_on_rails += len(messages)

    @contextmanager
    def _waiting_on_rail(self, peer: int) -> Iterator[None]:
        """A context for waits for rank ``peer`` on a rail; a failed wait ends the call."""
        wait = RailWait(peer, Deadline(self.timeout_ms / 1000), self._called_at)
        self._watch.awaits(wait)
        try:
            yield
        except RuntimeError as error:
            wait.ended(self._watch, str(error))
            raise _Failed from error
        finally:
            self._watch.awaits(None)

    def _called_at(self) -> str:
        """Returns the call and its call site, for an error message."""
        return f"{self._called}{self._watch.site_of(self._record)}"

    def _arrived(self, message: RailMessage) -> None:
        """Waits for data, and first for the header that the same rank sent before the data."""
        before = [header for header in self._headers if header.rank == message.rank]
        self._headers = [header for header in self._headers if header.rank != message.rank]
        self._check_headers()
        self._wait([*before, message])

    def _settle(self, sent: list[RailMessage]) -> None:
        """Waits until messages have been sent, so that this rank may reuse their memory."""
        for _, to_one_rank in groupby(sent, key=attrgetter("rank")):
            self._wait(list(to_one_rank))
        sent.clear()

    # Messages of one round that have equal sizes and come from the same rank arrive in the order in
    # which they were sent.
    def _send(
        self, rail: int, node: int, ptr: int, size_bytes: int, number: int = 0
    ) -> RailMessage:
        memory, tag = memory_at(ptr, size_bytes), tag_of((self._called, number), size_bytes)
        with self._waiting_on_rail(self.layout.rail(rail)[node]):
            return self._rails.send(rail, node, memory, tag)

    def _receive(
        self, rail: int, node: int, ptr: int, size_bytes: int, number: int = 0
    ) -> RailMessage:
        memory, tag = memory_at(ptr, size_bytes), tag_of((self._called, number), size_bytes)
        with self._waiting_on_rail(self.layout.rail(rail)[node]):
            return self._rails.receive(rail, node, memory, tag)

    def _sizes_by_sender(self, ins_bytes: list[int]) -> list[list[int]]:
        """Returns, for each local rank, the bytes that it sends to each rank of the world.

        ``ins_bytes`` are the bytes that this rank sends.
        """
        mine = torch.tensor(ins_bytes, dtype=torch.int64, device="cpu")
        everyone = mine.new_empty(len(self.layout.node_ranks), self._world)
        self._inside(
            self._inner.all_gather(
                mine.data_ptr(), everyone.data_ptr(), mine.nbytes, BYTE, ONE_SHOT
            )
        )
        rows: list[list[int]] = everyone.tolist()
        return rows

    def _compare_sizes(self, sizes: list[list[int]], expected: list[int]) -> None:
        """Exchanges the sizes of an all_to_all on the rails, and checks them against the outputs.

        Args:
            sizes: for each local rank, the bytes that it sends to each rank of the world.
            expected: for each rank, the bytes that this rank expects from it.
        """
        layout, arriving = self.layout, []
        for node in layout.others():
            told = torch.empty(len(layout.nodes[node]), dtype=torch.int64, device="cpu")
            message = self._receive(layout.local_rank, node, told.data_ptr(), told.nbytes)
            arriving.append((node, told, message))
        kept = []
        for rail in layout.rails_of(layout.rank):
            for node in layout.others():
                if rail < len(layout.nodes[node]):
                    receiver = layout.nodes[node][rail]
                    mine = torch.tensor(
                        [row[receiver] for row in sizes], dtype=torch.int64, device="cpu"
                    )
                    kept.append(mine)
                    self._sent.append(self._send(rail, node, mine.data_ptr(), mine.nbytes))
        sent = dict(zip(layout.node_ranks, (row[layout.rank] for row in sizes), strict=True))
        for node, told, message in arriving:
            self._arrived(message)
            sent |= dict(zip(layout.nodes[node], told.tolist(), strict=True))
        self._settle(self._sent)
        for rank in range(self._world):
            if sent[rank] != expected[rank]:
                self._watch.fail(
                    MismatchError(
                        f"the ranks disagree on an all_to_all. {layout.named(layout.rank)} expects "
                        f"{expected[rank]} bytes of {layout.named(rank)}, which sends "
                        f"{sent[rank]}. What a rank sends must be what its receiver expects"
                    )
                )
                raise _Failed


# ---- The collectives ----------------------------------------------------------------------------

ELEM_BYTES: dict[int, int] = {
    code: getattr(torch, name).itemsize
    for name, code in _native.DTYPES.items()
    if hasattr(torch, name)
}

# Calculated, not measured: 8 KiB take 65 us at 1 Gbit/s, less than one more hop on TCP.
ONE_HOP_BYTES = 8 << 10


class Span(NamedTuple):
    """An address in this process's memory, and the number of elements at the address."""

    ptr: int
    elems: int

    def slice(self, begin: int, end: int, elem_bytes: int) -> Span:
        """Returns elements [begin, end) of the span, clipped to the span."""
        begin, end = min(begin, self.elems), min(end, self.elems)
        return Span(self.ptr + begin * elem_bytes, end - begin)


def spans_of(ptrs: Sequence[int], elems: Sequence[int]) -> list[Span]:
    """Returns the spans at ``ptrs`` with ``elems`` elements each."""
    return [Span(*span) for span in zip(ptrs, elems, strict=True)]


class CollectivesOverNodes(CallsOverNodes, ABC):
    """The collectives of :class:`Core`, as calls over nodes.

    A subclass implements the calls' bodies, which do the work in the node and between nodes. Ranks
    compare the headers of a call before its body runs or while it runs.
    """

    def _reducing(self, name: str, dtype: int, op: int, factor: float) -> Reducing:
        """Returns a reduction's arguments; a subclass may check them, with ``name`` in errors."""
        return Reducing(dtype, op, factor)

    def _call(
        self, name: str, head: tuple[int, int, int, int], algorithm: int, body: Callable[[], None]
    ) -> int:
        """Makes a call by :meth:`_run`; a subclass may wait for its peers before the body runs."""
        return self._run(name, head, algorithm, body)

    def all_reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
    ) -> int:
        r, size_bytes = self._reducing("all_reduce", dtype, op, factor), elems * ELEM_BYTES[dtype]
        ins, out = Span(in_ptr, elems), Span(out_ptr, elems)
        reduce = self._reduce_in_one_hop if size_bytes <= ONE_HOP_BYTES else self._reduce_to_all
        head = (size_bytes, dtype, op, -1)
        return self._call("all_reduce", head, algorithm, lambda: reduce(ins, out, r))

    def reduce_scatter(
        self,
        in_ptr: int,
        out_ptr: int,
        out_elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
    ) -> int:
        size = ELEM_BYTES[dtype] * out_elems
        spans = [Span(in_ptr + rank * size, out_elems) for rank in range(self._world)]
        return self._reduce_scatter(spans, out_ptr, (dtype, op, factor), algorithm)

    def reduce_scatter_list(
        self,
        in_ptrs: Sequence[int],
        in_elems: Sequence[int],
        out_ptr: int,
        dtype: int,
        op: int,
        factor: float,
    ) -> int:
        return self._reduce_scatter(
            spans_of(in_ptrs, in_elems), out_ptr, (dtype, op, factor), ONE_SHOT
        )

    def _reduce_scatter(
        self, spans: list[Span], out_ptr: int, how: tuple[int, int, float], algorithm: int
    ) -> int:
        r = self._reducing("reduce_scatter", *how)
        out = Span(out_ptr, spans[self.layout.rank].elems)
        head = (sum(span.elems for span in spans) * ELEM_BYTES[r.dtype], r.dtype, r.op, -1)
        body = partial(self._reduce_to_each, spans, out, r)
        return self._call("reduce_scatter", head, algorithm, body)

    def reduce(
        self, in_ptr: int, out_ptr: int, elems: int, dtype: int, op: int, factor: float, root: int
    ) -> int:
        r = self._reducing("reduce", dtype, op, factor)
        body = partial(self._reduce_to_root, root, Span(in_ptr, elems), Span(out_ptr, elems), r)
        return self._call("reduce", (elems * ELEM_BYTES[dtype], dtype, op, root), ONE_SHOT, body)

    def all_gather(
        self, in_ptr: int, out_ptr: int, in_bytes: int, dtype: int, algorithm: int
    ) -> int:
        spans = [Span(out_ptr + rank * in_bytes, in_bytes) for rank in range(self._world)]
        return self._all_gather(in_ptr, spans, dtype, algorithm)

    def all_gather_list(
        self, in_ptr: int, out_ptrs: Sequence[int], out_bytes: Sequence[int], dtype: int
    ) -> int:
        return self._all_gather(in_ptr, spans_of(out_ptrs, out_bytes), dtype, ONE_SHOT)

    def _all_gather(self, in_ptr: int, spans: list[Span], dtype: int, algorithm: int) -> int:
        head = (sum(span.elems for span in spans), dtype, -1, -1)
        return self._call("all_gather", head, algorithm, lambda: self._gather_spans(in_ptr, spans))

    def broadcast(self, ptr: int, size_bytes: int, dtype: int, root: int) -> int:
        body = partial(self._broadcast, Span(ptr, size_bytes), root)
        return self._call("broadcast", (size_bytes, dtype, -1, root), ONE_SHOT, body)

    def gather(
        self, in_ptr: int, size_bytes: int, out_ptrs: Sequence[int], dtype: int, root: int
    ) -> int:
        body = partial(self._gather_to, root, in_ptr, size_bytes, out_ptrs)
        return self._call("gather", (size_bytes, dtype, -1, root), ONE_SHOT, body)

    def scatter(
        self, in_ptrs: Sequence[int], out_ptr: int, size_bytes: int, dtype: int, root: int
    ) -> int:
        body = partial(self._scatter_from, root, in_ptrs, out_ptr, size_bytes)
        return self._call("scatter", (size_bytes, dtype, -1, root), ONE_SHOT, body)

    def all_to_all(
        self,
        in_ptrs: Sequence[int],
        in_bytes: Sequence[int],
        out_ptrs: Sequence[int],
        out_bytes: Sequence[int],
        dtype: int,
    ) -> int:
        ins, outs = spans_of(in_ptrs, in_bytes), spans_of(out_ptrs, out_bytes)
        body = partial(self._exchange, ins, outs)
        return self._call("all_to_all", (0, dtype, -1, -1), ONE_SHOT, body)

    @abstractmethod
    def barrier(self) -> int: ...

    @abstractmethod
    def _reduce_in_one_hop(self, ins: Span, out: Span, r: Reducing) -> None:
        """Reduces the whole buffer in each node, then exchanges the results between nodes."""

    @abstractmethod
    def _reduce_to_all(self, ins: Span, out: Span, r: Reducing) -> None:
        """Reduces the pieces that each rank owns, and gathers the sums."""

    @abstractmethod
    def _reduce_to_each(self, spans: list[Span], out: Span, r: Reducing) -> None:
        """Reduces spans, one for each rank; writes this rank's sum to ``out``."""

    @abstractmethod
    def _reduce_to_root(self, root: int, ins: Span, out: Span, r: Reducing) -> None:
        """Reduces to ``out`` on the rank ``root``."""

    @abstractmethod
    def _gather_spans(self, in_ptr: int, spans: list[Span]) -> None:
        """Gathers spans of bytes, one from each rank; this rank's data are at ``in_ptr``."""

    @abstractmethod
    def _broadcast(self, whole: Span, root: int) -> None:
        """Copies the bytes ``whole`` of the rank ``root`` to all ranks."""

    @abstractmethod
    def _gather_to(self, root: int, in_ptr: int, size_bytes: int, out_ptrs: Sequence[int]) -> None:
        """Copies ``size_bytes`` bytes from each rank to the rank ``root``."""

    @abstractmethod
    def _scatter_from(
        self, root: int, in_ptrs: Sequence[int], out_ptr: int, size_bytes: int
    ) -> None:
        """Copies ``size_bytes`` bytes from the rank ``root`` to each rank."""

    @abstractmethod
    def _exchange(self, ins: list[Span], outs: list[Span]) -> None:
        """Copies a span from each rank to each rank."""
