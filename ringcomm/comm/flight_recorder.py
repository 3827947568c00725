"""One rank's view of the flight recorders of its communicator, and what they add to a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import torch

from ringcomm import _native
from ringcomm.comm import trace_file
from ringcomm.comm.recorder_block import Clock, read_block, read_header, world_id_of
from ringcomm.comm.recording import RankRecording, Record, Recording, describe
from ringcomm.errors import RingcommError

__all__ = ["FlightRecorder", "at_this_call_site"]

_HERE = Path(__file__).resolve().parent.parent
# Frames of the library are no call sites; nor are those in which a thread begins. The command's
# programs and the bench use the library as anyone does.
_native.set_library_folders(
    [
        f"{folder}/"
        for folder in (_HERE, _HERE.parent / "kernels" / "tl", Path(torch.__file__).parent)
    ]
    + [threading.__file__, f"{Path(futures.__file__).parent}/"],
    [f"{_HERE / name}/" for name in ("cli", "_bench")],
)

T = TypeVar("T")


def at_this_call_site(run: Callable[[], T]) -> Callable[[], T]:
    """``run`` for another thread, where its calls count as made here."""
    site = _native.call_site()

    def held() -> T:
        _native.hold_call_site(site)
        try:
            return run()
        finally:
            _native.hold_call_site(0)

    return held


def _ago(then_ns: int, now_ns: int) -> str:
    return f"{max(now_ns - then_ns, 0) / 1e9:.1f} s"


def _at(record: Record | None) -> str:
    return f" at {record.site}" if record is not None and record.site else ""


def _is_under_way(record: Record) -> bool:
    # A call that others aborted was, when the fault came.
    return record.state == "running" or record.status == "aborted"


def _in_words(record: Record, now_ns: int) -> str:
    if _is_under_way(record):
        state = f"under way for {_ago(record.begin_ns, record.end_ns or now_ns)}"
    else:
        state = f"{record.state} {_ago(record.end_ns, now_ns)} ago"
    number = "" if record.track == "messages" else f" (call {record.number})"
    return f"{describe(record)}{number}{_at(record)}, {state}"


def _story(peer: RankRecording, fault: dict[str, Any], now_ns: int) -> str:
    """What the awaited rank's records say, as sentences that end with a blank."""
    who = f"Rank {peer.rank}"
    lasts = [track[-1] for track in (peer.collectives, peer.messages) if track]
    if not lasts:
        return f"{who} has made no call yet. "
    if fault["message"]:
        newest = max(lasts, key=lambda record: record.begin_ns)
        return f"{who}'s last call: {_in_words(newest, now_ns)}. "
    same = peer.collective(fault["sequence"])
    if same is not None and _is_under_way(same):
        return f"{who} is in this call, too: {_in_words(same, now_ns)}. "
    last = peer.last
    if last is None:
        return f"{who} has made no collective call yet. "
    has_not = f"{who} has not made this call. " if last.number < fault["sequence"] else ""
    return f"{has_not}{who}'s last call: {_in_words(last, now_ns)}. "


def _tell_mismatch(
    fault: dict[str, Any], reporter: RankRecording, peer: RankRecording | None
) -> None:
    # What the peer published may be of an earlier call, of which this rank made another one then.
    number = fault["their_sequence"]
    mine, theirs = reporter.collective(number), peer.collective(number) if peer else None
    parted = mine is not None and theirs is not None and mine.call != theirs.call
    if mine is not None and parted and number != fault["sequence"]:
        words = describe(mine).removesuffix(")")
        fault["mine"] = (
            f"{words}{', ' if words[-1] != '(' else ''}call {number} of this communicator)"
        )
    elif number != fault["sequence"]:
        mine = reporter.collective(fault["sequence"])
    fault["mine"] += _at(mine)
    fault["theirs"] += _at(theirs)


class FlightRecorder:
    """Reads the recorders of all ranks of a communicator.

    Args:
        core: the native communicator; one on a device records nothing.
        name: of the communicator.
        rank_of: rank and world size.
    """

    def __init__(self, core: _native.Comm, name: str, rank_of: tuple[int, int]) -> None:
        self._core = core if isinstance(core, _native.Comm) else None
        self._name = name
        self._rank, self._world_size = rank_of

    def recording(self) -> Recording:
        """What all ranks recorded so far; of no ranks where nothing is recorded."""
        blocks: list[bytes] = []
        if self._core is not None:
            blocks = [self._core.recorded(rank) for rank in range(self._world_size)]
        held = [block for block in blocks if block]
        clock = Clock.since(read_header(held[0])) if held else None
        return Recording(
            self._name,
            self._world_size,
            world_id_of(held),
            clock.now[1] if clock else time.monotonic_ns(),
            tuple(read_block(block, clock=clock) for block in held),
        )

    def explain(
        self, fault: dict[str, Any], word: Callable[[dict[str, Any]], RingcommError]
    ) -> None:
        """Adds to a fault in words what the recorders tell of it, and leaves a trace.

        Args:
            fault: ``_native.Comm.fault()``.
            word: makes the error of it, for the trace.
        """
        try:
            recording = self._tell(fault)
            if recording.ranks:
                fault["trace"] = trace_file.leave(recording, self._rank, str(word(fault)))
        except Exception as trouble:
            # The fault itself is what the user must hear of.
            fault["trace"] = f". Its flight recorders cannot be read: {trouble}"

    def _tell(self, fault: dict[str, Any]) -> Recording:
        recording = self.recording()
        reporter, peer = recording.rank(fault["rank"]), recording.rank(fault["peer"])
        if reporter is None:
            return recording
        if fault["kind"] == "mismatch":
            _tell_mismatch(fault, reporter, peer)
        elif fault["sequence"]:
            find = reporter.message if fault["message"] else reporter.collective
            fault["mine"] += _at(find(fault["sequence"]))
        if peer is not None and fault["kind"] in ("timeout", "peer_lost", "peer_closed"):
            fault["story"] = _story(peer, fault, recording.taken_ns)
        return recording
