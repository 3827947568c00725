# SPDX-License-Identifier: Apache-2.0
"""Records of calls, and the reader that decodes a flight recorder's memory to records."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NoReturn

from ringcomm import _native
from ringcomm.algorithms import algorithm_name
from ringcomm.errors import RingcommError, printable

__all__ = [
    "BEGUN",
    "CAPTURED",
    "COMPLETED",
    "DONE",
    "FAILED",
    "HEADER_BYTES",
    "OPEN",
    "OPTIMIZERS",
    "RECORD_BYTES",
    "RUNNING",
    "STATES",
    "TOTALS_BYTES",
    "CallTotals",
    "Clock",
    "NodeLevel",
    "RankRecording",
    "Record",
    "RecorderHeader",
    "Recording",
    "at",
    "call_of",
    "read_header",
    "read_recorder",
    "read_totals",
    "renumbered",
    "unstable_records",
    "with_failure",
]

RUNNING, DONE, FAILED = "running", "done", "failed"
# States of calls on a device.
ENQUEUED, BEGUN, COMPLETED, CAPTURED = "enqueued", "begun", "completed", "captured"
STATES = (RUNNING, DONE, FAILED, ENQUEUED, BEGUN, COMPLETED, CAPTURED)
_MOST_WAYS = 64
# States of calls whose end the host has not seen.
OPEN = (RUNNING, ENQUEUED, BEGUN)
_MESSAGES = ("send", "recv")
# The optimizer's calls take gradients of one dtype and return results of another dtype, so ranks
# compare the number of elements of the bucket.
OPTIMIZERS = ("reduce_scatter_norm", "adamw_all_gather", "reduce_scatter_adamw_all_gather")


@dataclass(frozen=True)
class Record:
    """One call of one rank.

    Attributes:
        track: "collectives" or "messages"; the two tracks are not ordered with each other.
        number: counts the calls of the track from 1; for a collective it is equal on all ranks.
        collective: "all_reduce", "send" and so on.
        dtype, op: names; "" if the call has none. An optimizer's call names the dtypes of its
            gradients and its results: "bfloat16 to float32".
        root: the root of the call, or the tag of a message or of an optimizer's call, or the number
            of a plan of the copy engines; -1: none.
        algorithm, kernels: "one_shot", "native" and so on.
        match_bytes: the size on which all ranks must agree, for an optimizer's call in elements;
            0: none.
        size_bytes: the bytes of the whole buffer, or of the message.
        state: "running", "done" or "failed". On a device "enqueued", then "begun" if the host saw
            the beginning, then "completed" or "failed"; or "captured" into a graph, which makes the
            call at each replay.
        status: how the call failed; "" if it has not failed.
        peer: the peer of a message, or the rank that a failed collective awaited; -1: none.
        begin_ns, end_ns: CLOCK_MONOTONIC of the machine; ``end_ns`` is 0 while the call runs. On a
            device: when the host enqueued the call, and when it saw that the call had ended.
        site: the call site, "file.py:12"; "" if the user's Python code did not make the call.
    """

    track: str
    number: int
    collective: str
    dtype: str
    op: str
    root: int
    algorithm: str
    kernels: str
    match_bytes: int
    size_bytes: int
    state: str
    status: str
    peer: int
    begin_ns: int
    end_ns: int
    site: str

    @property
    def call(self) -> tuple[object, ...]:
        """The fields that must be equal on all ranks in the collective with this number."""
        parts = (self.collective, self.dtype, self.op, self.root, self.algorithm, self.kernels)
        return (*parts, self.match_bytes)

    @property
    def is_open(self) -> bool:
        """True for a call whose end the host has not seen."""
        return self.state in OPEN

    def __str__(self) -> str:
        """Describes the call as in the user's code, with dtype, op, root, size and algorithm."""
        size = f"{self.size_bytes} bytes"
        if self.collective in _MESSAGES:
            other = "any rank" if self.peer < 0 else f"rank {self.peer}"
            way = "to" if self.collective == "send" else "from"
            return f"{self.collective}({self.dtype}, {size}, tag {self.root}, {way} {other})"
        if self.collective in OPTIMIZERS:
            size = f"{self.match_bytes} elements"
        parts = []
        if self.collective != "barrier":
            tagged = self.collective in OPTIMIZERS and self.root >= 0
            rooted = self.root >= 0 and not tagged
            # Calls by copy engines have no root; a plan's calls have the plan's number as root.
            root = f"{'plan' if self.algorithm == 'copy_engine' else 'root'} {self.root}"
            parts = [self.dtype, self.op, root if rooted else "", size]
            parts.append(self.algorithm)
            parts.append(_native.describe_tag(self.root) if tagged else "")
            parts.append("Triton kernels" if self.kernels == "triton" else "")
        return f"{self.collective}({', '.join([part for part in parts if part])})"


@dataclass(frozen=True)
class RankRecording:
    """The records of one rank, oldest first in each track.

    ``waits_for`` is the rank that this rank awaits, or awaited when it gave up; -1: none. ``torn``
    counts records that are incomplete, because their owner was writing them or died while writing.
    ``on_device``: the communicator is on a device; its records contain less (docs/trace.md).
    """

    rank: int
    pid: int
    waits_for: int
    collectives: tuple[Record, ...]
    messages: tuple[Record, ...]
    torn: int = 0
    on_device: bool = False

    def waiting_for(self, word: int, world_size: int) -> RankRecording:
        """Returns a copy with ``waits_for`` decoded from ``word`` in the rank's control page."""
        return replace(self, waits_for=word - 1 if 0 < word <= world_size else -1)

    @property
    def last(self) -> Record | None:
        """The newest collective."""
        return self.collectives[-1] if self.collectives else None

    def collective(self, number: int) -> Record | None:
        """Returns the collective of this number; None if not made yet, or overwritten."""
        return next((each for each in self.collectives if each.number == number), None)

    def message(self, number: int) -> Record | None:
        return next((each for each in self.messages if each.number == number), None)

    def backward_at(self, number: int) -> str:
        """Describes the last backward pass up to the collective ``number``; "" if unknown.

        ringcomm's optimizers and sharded modules store the description in the tag of each reduction
        of gradients.
        """
        for record in reversed(self.collectives):
            if record.number <= number and record.collective in OPTIMIZERS and record.root > 0:
                return str(_native.describe_tag(record.root))
        return ""

    def inner_calls(self) -> set[int]:
        """Returns the numbers of the calls that were made as parts of an earlier call."""
        inner, around = set(), None
        for record in self.collectives:
            if around is not None and (not around.end_ns or record.begin_ns < around.end_ns):
                inner.add(record.number)
            else:
                around = record
        return inner


@dataclass(frozen=True)
class Skip:
    """``rank`` seems to have omitted the call ``number`` that ``other`` made at ``site``."""

    rank: int
    other: int
    number: int
    site: str


@dataclass(frozen=True)
class Recording:
    """The flight recorders of a communicator at one moment.

    Attributes:
        communicator: the communicator's name.
        world_size: its number of ranks.
        world_id: identifies the communicator, equal on all its ranks; 0: unknown.
        taken_ns: when the recording was taken, CLOCK_MONOTONIC.
        ranks: in order of rank; a rank whose recorder cannot be read is missing.
    """

    communicator: str
    world_size: int
    world_id: int
    taken_ns: int
    ranks: tuple[RankRecording, ...]

    def rank(self, rank: int) -> RankRecording | None:
        return next((each for each in self.ranks if each.rank == rank), None)

    def divergence(self) -> int | None:
        """Returns the number of the first collective that differs between ranks, if any.

        A rank that has not made the call yet, or no longer has its record, is not compared.
        """
        for number, calls in _calls_by_number(self.ranks):
            if len({call.call for call in calls}) > 1:
                return number
        return None

    def skipped_call(self) -> Skip | None:
        """Finds a call that one rank seems to have omitted, by comparing call sites.

        Calls of equal kind and size match, even if different source lines made them. So if a rank
        omits the call of number n, the peers' call n is matched with the rank's next call: the
        rank's call sites from number n on equal the peers' call sites from number n + 1 on. Ranks
        that intentionally make their calls at different lines do not show this pattern.
        """
        for number, calls in _calls_by_number(self.ranks):
            sites = [call.site for call in calls]
            if len(sites) == len(self.ranks) and all(sites) and len(set(sites)) > 1:
                # Most ranks' lines are equal, so only a few different sequences are compared.
                rests: dict[tuple[str, ...], int] = {}
                for each in self.ranks:
                    if len(rests) < _MOST_WAYS:
                        rests.setdefault(_sites_from(each, number), each.rank)
                for rest, rank in rests.items():
                    for others, other in rests.items():
                        if rest[0] != others[0] and rest == others[1 : len(rest) + 1]:
                            return Skip(rank, other, number, others[0])
                return None
        return None


_number = attrgetter("number")


def _calls_by_number(ranks: Iterable[RankRecording]) -> Iterator[tuple[int, list[Record]]]:
    """Yields the collectives' numbers in order, each with the records of all ranks."""
    calls = sorted((each for rank in ranks for each in rank.collectives), key=_number)
    for number, group in groupby(calls, key=_number):
        yield number, list(group)


def _sites_from(rank: RankRecording, number: int) -> tuple[str, ...]:
    return tuple(each.site for each in rank.collectives if each.number >= number)


# A communicator over nodes has an inner communicator in each node, whose name contains the node's
# number. The inner communicator records a call over nodes before the call's parts within the node.
_OF_NODE = re.compile(r"(?s)(.+)/node(\d{1,9}):(\d[\d.-]{0,400})")


@dataclass(frozen=True)
class NodeLevel:
    """The communicator within a node that belongs to a communicator over nodes.

    Attributes:
        communicator: the name of the communicator over nodes.
        node: the number of the node.
        ranks: the ranks of the node, as numbered by the communicator over nodes.
    """

    communicator: str
    node: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        spans: list[list[int]] = []
        for rank in self.ranks:
            if spans and rank == spans[-1][-1] + 1:
                spans[-1] = [spans[-1][0], rank]
            else:
                spans.append([rank])
        ranks = ".".join("-".join(map(str, span)) for span in spans)
        return f"{self.communicator}/node{self.node}:{ranks}"

    @classmethod
    def of(cls, recording: Recording) -> NodeLevel | None:
        """Decodes the name that ``str()`` of a NodeLevel made; None for any other name."""
        found = _OF_NODE.fullmatch(recording.communicator)
        if found is None:
            return None
        ranks: list[int] = []
        for span in found[3].split("."):
            first, _, last = span.partition("-")
            if not first.isdigit() or not (last or first).isdigit():
                return None
            ranks += range(
                int(first), min(int(last or first), int(first) + recording.world_size) + 1
            )
            if len(ranks) > recording.world_size:
                return None
        if len(ranks) != recording.world_size:
            return None
        return cls(found[1], int(found[2]), tuple(ranks))


def renumbered(recording: Recording, numbers: Sequence[int]) -> Recording:
    """Returns a recording in which rank r has the number ``numbers[r]``."""

    def number(rank: int) -> int:
        return numbers[rank] if 0 <= rank < len(numbers) else rank

    def records(before: tuple[Record, ...]) -> tuple[Record, ...]:
        return tuple(replace(each, peer=number(each.peer)) for each in before)

    ranks = tuple(
        replace(
            each,
            rank=number(each.rank),
            waits_for=number(each.waits_for),
            collectives=records(each.collectives),
            messages=records(each.messages),
        )
        for each in recording.ranks
    )
    return replace(recording, ranks=ranks)


def with_failure(recording: Recording, fault: Mapping[str, Any]) -> Recording:
    """Adds a kernel's fault to the records of its rank, whose host may not have seen it yet.

    Args:
        recording: the records of all ranks.
        fault: a kernel's fault record. If it is ``located``, its call is exactly the collective
            ``sequence`` of the rank that reports it. Otherwise nothing changes.
    """
    number, now_ns = fault["sequence"], recording.taken_ns

    def settled(record: Record) -> Record:
        if record.state not in OPEN or record.number > number:
            return record
        if record.number < number:  # collectives complete in order
            return replace(record, state=COMPLETED, end_ns=now_ns)
        status, peer = fault["kind"], fault["peer"]
        return replace(record, state=FAILED, status=status, peer=peer, end_ns=now_ns)

    if not fault.get("located"):
        return recording
    ranks = tuple(
        replace(rank, collectives=tuple(map(settled, rank.collectives)))
        if rank.rank == fault["rank"]
        else rank
        for rank in recording.ranks
    )
    return replace(recording, ranks=ranks)


def at(record: Record | None) -> str:
    """Returns " at" and the call site of a record; "" if the site is unknown."""
    return f" at {record.site}" if record is not None and record.site else ""


# The following layout is defined in ``kernels/host/recorder.h``.

Bytes = bytes | bytearray
MAGIC = int.from_bytes(b"RINGREC1", "little")
VERSION = 1
HEADER_BYTES = 256
RECORD_BYTES = 192
_HEADER = struct.Struct("<QIIIiiiQQQiIQ176sQ")
_TOTALS = struct.Struct("<4Q")
_RECORD = struct.Struct("<II QQIiiiII QQQii 112s")

_STATES = ("", *STATES)
TOTALS_BYTES = len(_native.RECORD_NAMES["collectives"]) * _TOTALS.size
_TRACKS = ("collectives", "messages")
_NAMES: dict[str, list[str]] = _native.RECORD_NAMES
_STATUSES = {code: name for name, code in _native.STATUSES.items()}
_KERNELS = ("native", "triton")
# A larger number of calls or bytes shows that a record is damaged.
_MOST = (1 << 63) - 1


@dataclass(frozen=True)
class RecorderHeader:
    """The header of a recorder: its communicator and rank, and its layout.

    ``totals`` is the number of totals that follow the records; 0 in a copy of a recorder, and if an
    older ringcomm made the recorder.
    """

    capacity: int
    rank: int
    world_size: int
    pid: int
    created_ns: int
    created_ticks: int
    world_id: int
    control_bytes: int
    waits_for: int
    on_device: bool
    name: str
    totals: int = 0

    @property
    def memory_bytes(self) -> int:
        return HEADER_BYTES + len(_TRACKS) * self.capacity * RECORD_BYTES


def _fail(why: str) -> NoReturn:
    raise RingcommError(f"flight recorder: expected a recorder of version {VERSION}, got {why}")


def _text(raw: bytes) -> str:
    """Decodes the text up to the zero byte; drops characters that control a terminal."""
    return printable(raw.partition(b"\0")[0].decode("utf-8", "replace"), "")


def read_header(memory: Bytes) -> RecorderHeader:
    """Reads the header of a recorder.

    Raises:
        RingcommError: there is no recorder, or a recorder of another version.
    """
    if len(memory) < HEADER_BYTES:
        _fail(f"{len(memory)} bytes")
    values = _HEADER.unpack_from(memory)
    magic, version, record_bytes, capacity, rank, world, pid, created, world_id = values[:9]
    if magic != MAGIC:
        _fail("something else")
    if (version, record_bytes) != (VERSION, RECORD_BYTES):
        _fail(f"version {version} with records of {record_bytes} bytes")
    if not 0 < capacity <= _native.MAX_RECORDS or not 0 <= rank < world:
        _fail(f"{capacity} records of rank {rank} of {world}")
    waits_for = values[10] - 1 if 0 < values[10] <= world else -1
    return RecorderHeader(
        capacity,
        rank,
        world,
        pid,
        created,
        values[12],
        world_id,
        values[9],
        waits_for,
        values[11] == 1,
        _text(values[13]),
        values[14] if values[14] == len(_NAMES["collectives"]) else 0,
    )


@dataclass(frozen=True)
class CallTotals:
    """Totals of a rank's calls of one collective since the communicator was made.

    ``calls`` counts the calls that have begun, ``size_bytes`` adds up their bytes, ``failures``
    counts the calls that have failed, and ``ns`` adds up the times of the calls that have ended.
    """

    calls: int
    size_bytes: int
    failures: int
    ns: int


def read_totals(memory: Bytes, count: int) -> dict[str, CallTotals]:
    """Reads the totals of ``count`` collectives; returns those with calls, by collective."""
    found = [CallTotals(*each) for each in _TOTALS.iter_unpack(memory[: count * _TOTALS.size])]
    return {
        name: each
        for name, each in zip(_NAMES["collectives"], found, strict=False)
        if name and each.calls and max(vars(each).values()) <= _MOST
    }


@dataclass(frozen=True)
class Clock:
    """Converts ticks of records to ns of CLOCK_MONOTONIC, by two moments known in both units.

    Use one clock for all records that you compare.
    """

    then: tuple[int, int]
    now: tuple[int, int]

    @classmethod
    def since(cls, header: RecorderHeader) -> Clock:
        """Returns the clock defined by two moments: when the recorder was made, and now."""
        return cls((header.created_ticks, header.created_ns), _native.clock_pair())

    def ns(self, ticks: int) -> int:
        passed_ticks = max(self.now[0] - self.then[0], 1)
        passed_ns = (ticks - self.then[0]) * (self.now[1] - self.then[1]) // passed_ticks
        return max(self.then[1] + passed_ns, 0)


def _name(kind: str, code: int) -> str:
    names = _NAMES[kind]
    return names[code] if 0 <= code < len(names) else ""


def _dtype_and_root(collective: str, dtype: int, root: int) -> tuple[str, int]:
    """Decodes dtype and root; in optimizers' calls the root has the results' dtype and a tag."""
    if collective in OPTIMIZERS:
        results, tag = _native.results_and_tag(root)
        return f"{_name('dtypes', dtype)} to {_name('dtypes', results)}", tag or -1
    return _name("dtypes", dtype), root


def call_of(words: tuple[int, ...]) -> tuple[object, ...]:
    """Converts a call of a fault record (``my_call``, ``their_call``) to :attr:`Record.call`."""
    collective, dtype, op, root, algorithm, kernels, match_bytes = words
    name = _name("collectives", collective)
    dtypes, root = _dtype_and_root(name, dtype, root)
    return (
        name,
        dtypes,
        _name("ops", op),
        root,
        algorithm_name(name, algorithm),
        _KERNELS[kernels] if 0 <= kernels < len(_KERNELS) else "",
        match_bytes,
    )


def _record(
    raw: tuple[int | bytes, ...], track: str, created_ticks: int, clock: Clock
) -> Record | None:
    """Returns the record of these fields; None if its owner cannot have written such fields."""
    numbers = [value for value in raw if isinstance(value, int)]
    _, state, number, match_bytes, collective, dtype, op, root, algorithm, kernels = numbers[:10]
    size_bytes, begin, end, status, peer = numbers[10:]
    name = _name("collectives", collective)
    if not 0 < state < len(_STATES) or not name or kernels >= len(_KERNELS) or number < 1:
        return None
    in_order = created_ticks <= begin <= (end or clock.now[0]) <= clock.now[0]
    if max(number, match_bytes, size_bytes) > _MOST or min(root, peer) < -1 or not in_order:
        return None
    site = raw[-1]
    dtypes, root = _dtype_and_root(name, dtype, root)
    return Record(
        track,
        number,
        name,
        dtypes,
        _name("ops", op),
        root,
        algorithm_name(name, algorithm),
        _KERNELS[kernels],
        match_bytes,
        size_bytes,
        _STATES[state],
        _STATUSES.get(status, f"status {status}") if status else "",
        peer,
        clock.ns(begin),
        clock.ns(end) if end else 0,
        _text(site) if isinstance(site, bytes) else "",
    )


def read_recorder(
    memory: Bytes, unstable: Iterable[int] = (), clock: Clock | None = None
) -> RankRecording:
    """Reads a copy of a recorder.

    Args:
        memory: header and records.
        unstable: indices of records that changed while they were copied.
        clock: converts times; None: a clock made from this recorder's header.

    Raises:
        RingcommError: ``memory`` is not a recorder, or is incomplete.
    """
    header = read_header(memory)
    if len(memory) < header.memory_bytes:
        _fail(f"{len(memory)} of {header.memory_bytes} bytes")
    clock = clock or Clock.since(header)
    skipped, torn = set(unstable), 0
    tracks: list[dict[int, Record]] = [{}, {}]
    records = memoryview(memory)[HEADER_BYTES : header.memory_bytes]
    for index, raw in enumerate(_RECORD.iter_unpack(records)):
        if raw[0] == 0:
            continue
        where = index // header.capacity
        record = None
        if raw[0] % 2 == 0 and index not in skipped:
            record = _record(raw, _TRACKS[where], header.created_ticks, clock)
        # A number that occurs twice shows a damaged record.
        if record is None or tracks[where].setdefault(record.number, record) is not record:
            torn += 1
    collectives, messages = (tuple(track[each] for each in sorted(track)) for track in tracks)
    pid = max(header.pid, 0)
    waits_for, on_device = header.waits_for, header.on_device
    return RankRecording(header.rank, pid, waits_for, collectives, messages, torn, on_device)


def unstable_records(first: bytes, second: bytes) -> list[int]:
    """Returns the indices of the records in which two copies of one recorder differ."""
    begins = range(HEADER_BYTES, min(len(first), len(second)), RECORD_BYTES)
    return [
        index
        for index, begin in enumerate(begins)
        if first[begin : begin + RECORD_BYTES] != second[begin : begin + RECORD_BYTES]
    ]
