"""What the flight recorders of a communicator say: its last calls, on all ranks.

``recorder_block`` reads them out of memory, ``trace_file`` out of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringcomm import _native

__all__ = [
    "BEGUN",
    "CAPTURED",
    "COMPLETED",
    "DONE",
    "OPEN",
    "OPTIMIZERS",
    "RUNNING",
    "STATES",
    "RankRecording",
    "Record",
    "Recording",
    "at",
    "describe",
    "divergence",
    "with_failure",
]

RUNNING, DONE, FAILED = "running", "done", "failed"
# On a device.
ENQUEUED, BEGUN, COMPLETED, CAPTURED = "enqueued", "begun", "completed", "captured"
STATES = (RUNNING, DONE, FAILED, ENQUEUED, BEGUN, COMPLETED, CAPTURED)
# Of calls of which no end is known.
OPEN = (RUNNING, ENQUEUED, BEGUN)
_MESSAGES = ("send", "recv")
# From gradients in one dtype to results in another; ranks agree on the elements of the bucket.
OPTIMIZERS = ("reduce_scatter_norm", "adamw_all_gather", "reduce_scatter_adamw_all_gather")


@dataclass(frozen=True)
class Record:
    """One call of one rank.

    Attributes:
        track: "collectives" or "messages", which keep no order with each other.
        number: counts the calls of the track from 1; of a collective equal on all ranks.
        collective: "all_reduce", "send" and so on.
        dtype, op: by name; "" where the call has none. An optimizer's call has "bfloat16 to
            float32", of its gradients and its results.
        root: of the call, or the tag of a message or of an optimizer's call; -1: none.
        algorithm, kernels: "direct", "native" and so on.
        match_bytes: the size on which all ranks must agree, of an optimizer's call in elements;
            0: none.
        size_bytes: of the whole buffer, or of the message.
        state: "running", "done" or "failed"; ``status`` says how it failed, else "". On a device
            "enqueued", then perhaps seen "begun", then seen "completed" or "failed"; or "captured"
            into a graph, which makes the call whenever it is replayed.
        peer: of a message, or awaited by a collective that failed; -1: none.
        begin_ns, end_ns: CLOCK_MONOTONIC of the machine; ``end_ns`` 0: it runs. On a device when
            the host enqueued the call, and when the host saw that it had ended; 0: it has not.
        site: "file.py:12", where it was called; "" if not from Python of the user's.
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
        """What must be equal on all ranks in a collective of one number."""
        parts = (self.collective, self.dtype, self.op, self.root, self.algorithm, self.kernels)
        return (*parts, self.match_bytes)


@dataclass(frozen=True)
class RankRecording:
    """The records of one rank, oldest first in each track.

    ``waits_for`` is the rank that it awaits, or awaited when it gave up; -1: none. ``torn`` counts
    records that could not be read whole, as their owner was writing them or died at it.
    ``on_device``: of a communicator on a device, which says less (docs/trace.md).
    """

    rank: int
    pid: int
    waits_for: int
    collectives: tuple[Record, ...]
    messages: tuple[Record, ...]
    torn: int = 0
    on_device: bool = False

    def waiting_for(self, word: int, world_size: int) -> RankRecording:
        """The same with another ``waits_for``, from the word of the rank's control page."""
        return replace(self, waits_for=word - 1 if 0 < word <= world_size else -1)

    @property
    def last(self) -> Record | None:
        """The newest collective."""
        return self.collectives[-1] if self.collectives else None

    def collective(self, number: int) -> Record | None:
        """The collective of this number; None: never made here, or forgotten."""
        return next((each for each in self.collectives if each.number == number), None)

    def message(self, number: int) -> Record | None:
        return next((each for each in self.messages if each.number == number), None)


@dataclass(frozen=True)
class Recording:
    """The flight recorders of a communicator at one moment.

    Attributes:
        communicator: its name.
        world_size: how many ranks it has.
        world_id: of the communicator, equal on all ranks and of no other; 0: unknown.
        taken_ns: when it was taken, CLOCK_MONOTONIC.
        ranks: what was found, by rank; a rank whose recorder cannot be read is missing.
    """

    communicator: str
    world_size: int
    world_id: int
    taken_ns: int
    ranks: tuple[RankRecording, ...]

    def rank(self, rank: int) -> RankRecording | None:
        return next((each for each in self.ranks if each.rank == rank), None)


def with_failure(recording: Recording, fault: Mapping[str, Any]) -> Recording:
    """The recording with the fault of another rank's kernel, which that rank may not know of yet.

    Args:
        recording: of all ranks.
        fault: what a kernel left; ``located`` if it means the one collective ``sequence`` of the
            rank that reports it. Otherwise nothing changes.
    """
    number, now_ns = fault["sequence"], recording.taken_ns

    def settled(record: Record) -> Record:
        if record.state not in OPEN or record.number > number:
            return record
        if record.number < number:  # collectives follow each other
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


def describe(record: Record) -> str:
    """A call as its user would name it, with dtype, op, root, size and number."""
    size = f"{record.size_bytes} bytes"
    if record.collective in _MESSAGES:
        other = "any rank" if record.peer < 0 else f"rank {record.peer}"
        way = "to" if record.collective == "send" else "from"
        return f"{record.collective}({record.dtype}, {size}, tag {record.root}, {way} {other})"
    if record.collective in OPTIMIZERS:
        size = f"{record.match_bytes} elements"
    parts = []
    if record.collective != "barrier":
        tagged = record.collective in OPTIMIZERS and record.root >= 0
        rooted = record.root >= 0 and not tagged
        parts = [record.dtype, record.op, f"root {record.root}" if rooted else "", size]
        parts.append(record.algorithm)
        parts.append(_native.describe_tag(record.root) if tagged else "")
        parts.append("Triton kernels" if record.kernels == "triton" else "")
    return f"{record.collective}({', '.join([part for part in parts if part])})"


def at(record: Record | None) -> str:
    """Where a call was made, as words behind others; none where that is not known."""
    return f" at {record.site}" if record is not None and record.site else ""


def _calls_by_number(ranks: Iterable[RankRecording]) -> Iterator[tuple[int, list[Record | None]]]:
    known = [{each.number: each for each in rank.collectives} for rank in ranks]
    for number in sorted({number for calls in known for number in calls}):
        yield number, [calls.get(number) for calls in known]


def divergence(recording: Recording) -> int | None:
    """The number of the first collective that is not the same call on all ranks, if there is one.

    A rank that has not come so far, or has forgotten it, differs from none.
    """
    for number, calls in _calls_by_number(recording.ranks):
        if len({call.call for call in calls if call is not None}) > 1:
            return number
    return None
