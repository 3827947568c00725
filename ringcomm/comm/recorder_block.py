"""Reads a flight recorder out of a copy of its memory (``kernels/host/recorder.h``)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from ringcomm import _native
from ringcomm.comm.recording import OPTIMIZERS, STATES, RankRecording, Record
from ringcomm.errors import RingcommError, printable

__all__ = [
    "HEADER_BYTES",
    "RECORD_BYTES",
    "Clock",
    "Header",
    "call_of",
    "read_block",
    "read_header",
    "unstable_records",
]

Bytes = bytes | bytearray
MAGIC = int.from_bytes(b"RINGREC1", "little")
VERSION = 1
HEADER_BYTES = 256
RECORD_BYTES = 192
_HEADER = struct.Struct("<QIIIiiiQQQiIQ184s")
_RECORD = struct.Struct("<II QQIiiiII QQQii 112s")

_STATES = ("", *STATES)
_TRACKS = ("collectives", "messages")
_NAMES: dict[str, list[str]] = _native.RECORD_NAMES
_STATUSES = {code: name for name, code in _native.STATUSES.items()}
_KERNELS = ("native", "triton")
# Of calls and bytes: no owner comes so far.
_MOST = (1 << 63) - 1


@dataclass(frozen=True)
class Header:
    """Of a recorder: whose it is, and how it is laid out."""

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

    @property
    def block_bytes(self) -> int:
        return HEADER_BYTES + len(_TRACKS) * self.capacity * RECORD_BYTES


def _fail(why: str) -> NoReturn:
    raise RingcommError(f"flight recorder: expected one of version {VERSION}, got {why}")


def _text(raw: bytes) -> str:
    """Text up to the zero byte, with nothing in it that a terminal obeys."""
    return printable(raw.partition(b"\0")[0].decode("utf-8", "replace"), "")


def read_header(block: Bytes) -> Header:
    """Reads the beginning of a recorder.

    Raises:
        RingcommError: there is none, or of another version.
    """
    if len(block) < HEADER_BYTES:
        _fail(f"{len(block)} bytes")
    values = _HEADER.unpack_from(block)
    magic, version, record_bytes, capacity, rank, world, pid, created, world_id = values[:9]
    if magic != MAGIC:
        _fail("something else")
    if (version, record_bytes) != (VERSION, RECORD_BYTES):
        _fail(f"version {version} with records of {record_bytes} bytes")
    if not 0 < capacity <= _native.MAX_RECORDS or not 0 <= rank < world:
        _fail(f"{capacity} records of rank {rank} of {world}")
    waits_for = values[10] - 1 if 0 < values[10] <= world else -1
    return Header(
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
    )


@dataclass(frozen=True)
class Clock:
    """Turns the ticks of records into ns of CLOCK_MONOTONIC, by two moments known in both.

    Records that shall be compared need one clock.
    """

    then: tuple[int, int]
    now: tuple[int, int]

    @classmethod
    def since(cls, header: Header) -> Clock:
        """By the moment at which a recorder was made, and this one."""
        return cls((header.created_ticks, header.created_ns), _native.clock_pair())

    def ns(self, ticks: int) -> int:
        passed_ticks = max(self.now[0] - self.then[0], 1)
        passed_ns = (ticks - self.then[0]) * (self.now[1] - self.then[1]) // passed_ticks
        return max(self.then[1] + passed_ns, 0)


def _name(kind: str, code: int) -> str:
    names = _NAMES[kind]
    return names[code] if 0 <= code < len(names) else ""


def _dtype_and_root(collective: str, dtype: int, root: int) -> tuple[str, int]:
    """The optimizer's calls have the dtype of their results and a tag in place of a root."""
    if collective in OPTIMIZERS:
        results, tag = _native.results_and_tag(root)
        return f"{_name('dtypes', dtype)} to {_name('dtypes', results)}", tag or -1
    return _name("dtypes", dtype), root


def call_of(words: tuple[int, ...]) -> tuple[object, ...]:
    """:attr:`Record.call` of a call of a fault record (``my_call``, ``their_call``)."""
    collective, dtype, op, root, algorithm, kernels, match_bytes = words
    name = _name("collectives", collective)
    dtypes, root = _dtype_and_root(name, dtype, root)
    return (
        name,
        dtypes,
        _name("ops", op),
        root,
        _name("algorithms", algorithm),
        _KERNELS[kernels] if 0 <= kernels < len(_KERNELS) else "",
        match_bytes,
    )


def _record(
    raw: tuple[int | bytes, ...], track: str, created_ticks: int, clock: Clock
) -> Record | None:
    """A record from its fields, None for what its owner cannot have written."""
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
        _name("algorithms", algorithm),
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


def read_block(
    block: Bytes, unstable: Iterable[int] = (), clock: Clock | None = None
) -> RankRecording:
    """Reads a copy of a recorder.

    Args:
        block: header and records.
        unstable: indices of records that changed while they were copied.
        clock: default this recorder's own.

    Raises:
        RingcommError: it is no recorder, or cut short.
    """
    header = read_header(block)
    if len(block) < header.block_bytes:
        _fail(f"{len(block)} of {header.block_bytes} bytes")
    clock = clock or Clock.since(header)
    skipped, torn = set(unstable), 0
    tracks: list[dict[int, Record]] = [{}, {}]
    records = memoryview(block)[HEADER_BYTES : header.block_bytes]
    for index, raw in enumerate(_RECORD.iter_unpack(records)):
        if raw[0] == 0:
            continue
        where = index // header.capacity
        record = None
        if raw[0] % 2 == 0 and index not in skipped:
            record = _record(raw, _TRACKS[where], header.created_ticks, clock)
        # No owner gives a number twice.
        if record is None or tracks[where].setdefault(record.number, record) is not record:
            torn += 1
    collectives, messages = (tuple(track[each] for each in sorted(track)) for track in tracks)
    pid = max(header.pid, 0)
    waits_for, on_device = header.waits_for, header.on_device
    return RankRecording(header.rank, pid, waits_for, collectives, messages, torn, on_device)


def unstable_records(first: bytes, second: bytes) -> list[int]:
    """Indices of the records in which two copies of one recorder differ."""
    begins = range(HEADER_BYTES, min(len(first), len(second)), RECORD_BYTES)
    return [
        index
        for index, begin in enumerate(begins)
        if first[begin : begin + RECORD_BYTES] != second[begin : begin + RECORD_BYTES]
    ]
