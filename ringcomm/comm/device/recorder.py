"""The flight recorder of a rank on a device.

A call is recorded when it is enqueued. Its end is noted when the host happens to see it: an event
of the communicator has passed, the host waited for the device, a kernel left a fault record, or a
reader of the records also read the kernels' count of calls.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ringcomm import _native
from ringcomm.comm.meeting import Membership
from ringcomm.comm.recorder.records import COMPLETED, OPEN, Record, call_of, read_block
from ringcomm.cuda.runtime import Event
from ringcomm.errors import RendezvousError, RingcommError
from ringcomm.json_reader import digest_of
from ringcomm.memory.device_peers import DeviceHandle, RecorderAddress
from ringcomm.memory.host_heap import MappedHeap, map_heap, no_room_error, process_heap

__all__ = ["COLLECTIVES", "MESSAGES", "Calls", "DeviceRecorder", "SeenEvent"]

COLLECTIVES, MESSAGES = 0, 1
_ALIGN_BYTES = 64
# (track, first, last) of calls with consecutive numbers.
Calls = tuple[int, int, int]


class DeviceRecorder:
    """A rank's own records, and the mapped records of its peers.

    Args:
        comm: the communicator whose calls are recorded from here on.
        membership: of the communicator; ``options.records`` is 1 or more.
        operation: named in errors.

    Attributes:
        native: this rank's records.

    Raises:
        HeapError: the heap of this process has no room.
    """

    def __init__(self, comm: _native.DeviceComm, membership: Membership, operation: str) -> None:
        self._comm = comm
        self._rank, self._world_size = membership.rank, len(membership.ranks)
        self._records = membership.options.records
        self._heap = process_heap(world_size=self._world_size)
        try:
            self.native = _native.DeviceRecorder(
                self._heap,
                rank_of=(self._rank, self._world_size),
                records=self._records,
                name=membership.name,
            )
        except OSError as error:
            raise no_room_error(f"{operation}: flight recorder", self._heap, error) from error
        comm.set_recorder(self.native)
        self._blocks: list[tuple[MappedHeap, int] | None] = []
        self._world_id = 0

    @property
    def address(self) -> RecorderAddress:
        heap = self._heap
        return RecorderAddress(
            self._rank,
            os.getpid(),
            heap.fd,
            heap.capacity_bytes,
            heap.token,
            self.native.offset_bytes,
        )

    def connect(self, handles: Sequence[DeviceHandle], operation: str) -> None:
        """Maps the peers' records. Those that cannot be mapped are missing in recordings.

        Raises:
            RendezvousError: a rank announced records at an impossible place.
        """
        self._blocks = [self._block_of(handle.recorder, operation) for handle in handles]
        proofs = {str(handle.rank): handle.proof for handle in handles}
        self._world_id = int(digest_of(proofs), 16) >> 1 or 1
        self.native.set_world_id(self._world_id)

    def _block_of(self, address: RecorderAddress, operation: str) -> tuple[MappedHeap, int] | None:
        offset, end = address.offset_bytes, _native.recorder_bytes(self._records)
        if offset % _ALIGN_BYTES or not 0 < offset <= address.capacity_bytes - end:
            raise RendezvousError(
                f"{operation}: rank {address.rank} announced a flight recorder of {end} bytes at "
                f"offset {offset} of a heap of {address.capacity_bytes} bytes, where none can be. "
                "Do all ranks run the same ringcomm?"
            )
        try:
            heap = map_heap(address, self._heap, operation)
        except RingcommError:
            # The operating system may refuse to map host memory although the driver maps device
            # memory. The communicator works without, and recordings show whose records are missing.
            return None
        return heap, heap.base_ptr + offset

    def recorded(self, rank: int, most: int) -> bytes:
        """Returns a copy of a rank's recorder with its last ``most`` records; empty if unknown."""
        if rank >= len(self._blocks) or self._blocks[rank] is None:
            return b""
        _, ptr = self._blocks[rank] or (None, 0)
        place = (rank, self._world_size)
        return _native.recorder_snapshot(ptr, self._records, place, self._world_id, most)

    def everything(self) -> list[Calls]:
        """Returns all calls that have been enqueued so far."""
        return [(track, 1, self.native.enqueued(track)) for track in (COLLECTIVES, MESSAGES)]

    def gave_up(self, kind: str, peer: int) -> int:
        """Notes that the last collective failed before its launch; returns its number."""
        number = self.native.enqueued(COLLECTIVES)
        self.native.seen_failed(COLLECTIVES, number, _native.STATUSES[kind], peer)
        return number

    def located(self, fault: dict[str, Any]) -> dict[str, Any]:
        """Returns a fault with the call numbers of the records; notes this rank's failures.

        A kernel's own numbers differ, as each block counts for itself and replays count, too. A
        number is 0 if calls from different call sites may be meant.
        """
        own = self._comm.fault()
        message = self._note(own) if own is not None else 0
        if fault["message"]:
            return {**fault, "sequence": message if fault["rank"] == self._rank else 0}
        mine = self._calls(fault["rank"], fault["sequence"], fault["my_call"])
        theirs: list[Record] = []
        if fault["kind"] == "mismatch":
            theirs = self._calls(fault["peer"], fault["their_sequence"], fault["their_call"])
        return {
            **fault,
            "sequence": _number_of(mine),
            "their_sequence": _number_of(theirs),
            "located": len(mine) == 1 and mine[0].state in OPEN,
        }

    def _note(self, own: dict[str, Any]) -> int:
        """Notes the call that failed by this rank's fault record; returns a message's number."""
        status, peer = _native.STATUSES[own["kind"]], own["peer"]
        if not own["message"]:
            calls = self._calls(self._rank, own["sequence"], own["my_call"])
            if len(calls) == 1:
                self.native.seen_failed(COLLECTIVES, calls[0].number, status, peer)
            return 0
        way = "send" if own["waiting_for"] == "consumed" else "recv"
        meant = (way, peer, own["my_call"][3])  # the tag stands where others have the root
        messages = self._read(self._rank, MESSAGES)
        found = [each for each in messages if (each.collective, each.peer, each.root) == meant]
        if len(found) == 1:
            self.native.seen_failed(MESSAGES, found[0].number, status, peer)
        return _number_of(found)

    def _read(self, rank: int, track: int) -> list[Record]:
        """Returns the records of calls that are not known to be completed."""
        block = self.recorded(rank, _native.MAX_RECORDS)
        if not block:
            return []
        read = read_block(block)
        return [
            each
            for each in (read.collectives if track == COLLECTIVES else read.messages)
            if each.state != COMPLETED
        ]

    def _calls(self, rank: int, sequence: int, words: tuple[int, ...]) -> list[Record]:
        """Returns the collectives that a kernel of ``rank`` may mean by a number and call words."""
        if sequence == 0:
            return []
        call, numbers = call_of(words), set(self.native.numbers_of(sequence))
        return [
            each
            for each in self._read(rank, COLLECTIVES)
            if each.number in numbers and each.call == call
        ]

    def close(self) -> None:
        """Hides the records from `ringcomm trace --pid`; peers may still read them."""
        self.native.stop()
        self.native.unlist()
        self._blocks = []


def _number_of(calls: Sequence[Record]) -> int:
    """Returns the number for a fault that means one of ``calls``; 0: their call sites differ."""
    return calls[-1].number if len({each.site for each in calls}) == 1 else 0


class SeenEvent:
    """An event of a communicator whose passing is noted in the records.

    Args:
        event: of the runtime.
        records: None: nothing is noted.
        calls: those that have ended once the event has passed.
    """

    __slots__ = ("_calls", "_records", "event")

    def __init__(
        self,
        event: Event,
        records: _native.DeviceRecorder | None = None,
        calls: Calls = (COLLECTIVES, 1, 0),
    ) -> None:
        self.event = event
        self._records = records
        self._calls = calls

    def query(self) -> bool:
        if not self.event.query():
            return False
        records = self._records
        if records is not None:
            self._records = None
            records.seen_completed(*self._calls)
        return True

    def synchronize(self) -> None:
        self.event.synchronize()
        self.query()
