# SPDX-License-Identifier: Apache-2.0
"""The core of a communicator on a device: its region, protocol words, faults and close."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from ringcomm import _native, cuda
from ringcomm.comm.device.lifecycle import (
    Peer,
    Watched,
    end_presence,
    process_of,
    retire,
    unwatch,
    watch,
)
from ringcomm.comm.device.topology import TopologyChoice
from ringcomm.comm.host.rendezvous import Membership
from ringcomm.comm.recorder.records import COMPLETED, OPEN, Record, call_of, read_recorder
from ringcomm.cuda import units
from ringcomm.cuda.multicast import MulticastWindow
from ringcomm.cuda.runtime import CONNECTIONS_VARIABLE, HOST_PLACE, DeviceRuntime
from ringcomm.cuda.virtual_memory import MappedChunk
from ringcomm.errors import (
    ArgumentError,
    CorruptedError,
    RendezvousError,
    RingcommError,
    UnsupportedError,
    where,
)
from ringcomm.json_reader import digest_of
from ringcomm.memory.device_heap import (
    DeviceAllocation,
    DeviceHandle,
    DeviceHeap,
    MappedDeviceHeap,
    RecorderAddress,
)
from ringcomm.memory.host_heap import MappedHeap, map_heap, no_room_error, process_heap

__all__ = ["COLLECTIVES", "MESSAGES", "Calls", "DeviceCore", "DeviceRecorder"]


# ---- The flight recorder of a rank on a device --------------------------------------------------
# A call is recorded when it is enqueued. Its end is recorded when the host happens to see it:
# because an event of the communicator has passed, the host waited for the device, a kernel left a
# fault record, or a reader of the records also read the kernels' count of calls.


COLLECTIVES, MESSAGES = 0, 1
_ALIGN_BYTES = 64
# Calls with consecutive numbers: (COLLECTIVES or MESSAGES, first number, last number).
Calls = tuple[int, int, int]


class DeviceRecorder:
    """A rank's own records, and the mapped records of its peers.

    Args:
        comm: the communicator whose calls are recorded from now on.
        membership: the communicator's ranks and options; ``options.records`` is 1 or more.
        operation: the operation that errors name.

    Attributes:
        native: this rank's records.

    Raises:
        HeapError: the heap of this process has too little free memory.
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
        self._recorders: list[tuple[MappedHeap, int] | None] = []
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
        """Maps the peers' records. Recordings lack records that cannot be mapped.

        Raises:
            RendezvousError: a rank announced records at an impossible offset.
        """
        self._recorders = [self._map_recorder(handle.recorder, operation) for handle in handles]
        proofs = {str(handle.rank): handle.proof for handle in handles}
        self._world_id = int(digest_of(proofs), 16) >> 1 or 1
        self.native.set_world_id(self._world_id)

    def _map_recorder(
        self, address: RecorderAddress, operation: str
    ) -> tuple[MappedHeap, int] | None:
        offset, end = address.offset_bytes, _native.recorder_bytes(self._records)
        if offset % _ALIGN_BYTES or not 0 < offset <= address.capacity_bytes - end:
            raise RendezvousError(
                f"{operation}: rank {address.rank} announced a flight recorder of {end} bytes at "
                f"offset {offset} of a heap of {address.capacity_bytes} bytes, which cannot hold "
                "it there. Do all ranks run the same ringcomm?"
            )
        try:
            heap = map_heap(address, self._heap, operation)
        except RingcommError:
            # The operating system may refuse to map host memory although the driver maps device
            # memory. The communicator works without a peer's records; recordings name missing ones.
            return None
        return heap, heap.base_ptr + offset

    def recorded(self, rank: int, most: int) -> bytes:
        """Returns a copy of a rank's recorder and last ``most`` records; empty if not mapped."""
        if rank >= len(self._recorders) or self._recorders[rank] is None:
            return b""
        _, ptr = self._recorders[rank] or (None, 0)
        rank_of = (rank, self._world_size)
        return _native.recorder_snapshot(ptr, self._records, rank_of, self._world_id, most)

    def everything(self) -> list[Calls]:
        """Returns all calls that have been enqueued so far."""
        return [(track, 1, self.native.enqueued(track)) for track in (COLLECTIVES, MESSAGES)]

    def gave_up(self, kind: str, peer: int) -> int:
        """Records that the last collective failed before its launch; returns its number."""
        number = self.native.enqueued(COLLECTIVES)
        self.native.seen_failed(COLLECTIVES, number, _native.STATUSES[kind], peer)
        return number

    def located(self, fault: dict[str, Any]) -> dict[str, Any]:
        """Returns a fault with the call numbers of the records; records this rank's failures.

        A kernel reports other numbers, since its blocks also count replays of graphs. A number is 0
        if the fault may mean calls from different call sites.
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
        """Records that the call in this rank's fault failed; returns a message's number, else 0."""
        status, peer = _native.STATUSES[own["kind"]], own["peer"]
        if not own["message"]:
            calls = self._calls(self._rank, own["sequence"], own["my_call"])
            if len(calls) == 1:
                self.native.seen_failed(COLLECTIVES, calls[0].number, status, peer)
            return 0
        way = "send" if own["waiting_for"] == "consumed" else "recv"
        meant = (way, peer, own["my_call"][3])  # a message has its tag in place of a root
        messages = self._read(self._rank, MESSAGES)
        found = [each for each in messages if (each.collective, each.peer, each.root) == meant]
        if len(found) == 1:
            self.native.seen_failed(MESSAGES, found[0].number, status, peer)
        return _number_of(found)

    def _read(self, rank: int, track: int) -> list[Record]:
        """Returns a rank's records of calls that are not known to be completed."""
        memory = self.recorded(rank, _native.MAX_RECORDS)
        if not memory:
            return []
        read = read_recorder(memory)
        return [
            each
            for each in (read.collectives if track == COLLECTIVES else read.messages)
            if each.state != COMPLETED
        ]

    def _calls(self, rank: int, sequence: int, words: tuple[int, ...]) -> list[Record]:
        """Returns the collectives of ``rank`` that match a kernel's call number and call words."""
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
        self._recorders = []


def _number_of(calls: Sequence[Record]) -> int:
    """Returns the number of the last of ``calls``, or 0 if their call sites differ."""
    return calls[-1].number if len({each.site for each in calls}) == 1 else 0


# The value of a protocol word (4 bytes) after the word was raised.
RAISED = (1).to_bytes(4, "little")
# The staging of one rank, and the limits of its segments. The 256 threads of a block move 32 KiB
# per loop turn. No benchmark has compared other values.
STAGING_BYTES = 64 << 20
SMALLEST_SEGMENT_BYTES, LARGEST_SEGMENT_BYTES = 16 << 10, 128 << 10
# If another rank has aborted this rank: seconds to wait for the reason, and seconds between two
# checks for it. The host of the rank where the fault began writes the reason.
REASON_GRACE_S, REASON_POLL_S = 1.0, 0.002


@cache
def _driver(library: str) -> _native.Driver:
    return _native.Driver(library)


def _driver_of(runtime: DeviceRuntime, operation: str) -> _native.Driver:
    try:
        return _driver(runtime.driver_library)
    except RuntimeError as error:
        raise UnsupportedError(f"{operation}: {error}") from error


def _calls_of(
    native: _native.DeviceComm,
    runtime: DeviceRuntime,
    device: int,
    records: _native.DeviceRecorder | None,
) -> _native.DeviceCalls:
    place = runtime.tensor_place(device)
    # DLPack's device of a tensor on the host is the same for all emulated devices.
    is_mine = runtime.is_device_tensor if place[0] == HOST_PLACE[0] else None
    return _native.DeviceCalls(
        native,
        place,
        device,
        runtime.current_stream,
        runtime.current_device,
        is_mine,
        records,
    )


def _find(device: int, unit: str, name: str) -> tuple[int, int, bool]:
    """Returns a kernel's driver handle, its threads per block, and whether it uses slices."""
    # A function and not a method: the native object keeps it, and a method would make a cycle.
    name = units.kernel_name(name, units.chosen_loops())
    kernel = cuda.current().find_kernel(device, unit, name)
    return kernel.handle, kernel.threads, not units.deals_tiles()


def _segment_bytes(world_size: int, channels: int, slots: int) -> int:
    """Returns the bytes of a segment with which a rank's slots take STAGING_BYTES or half of it."""
    message_channels = min(channels, _native.MESSAGE_CHANNELS)
    slot_sets = channels * (world_size + 1) + message_channels * world_size
    share_bytes = max(STAGING_BYTES // (slot_sets * slots), SMALLEST_SEGMENT_BYTES)
    power_of_two = 1 << (share_bytes.bit_length() - 1)
    return min(power_of_two, LARGEST_SEGMENT_BYTES)


def _check_region(handle: DeviceHandle, region_bytes: int, operation: str) -> None:
    end = handle.region_offset_bytes + region_bytes
    has_bytes = min(handle.capacity_bytes, handle.committed_bytes)
    if handle.region_bytes != region_bytes or end > has_bytes:
        raise RendezvousError(
            f"{operation}: expected a region of {region_bytes} bytes in the heap of "
            f"{has_bytes} bytes of rank {handle.rank}, got {handle.region_bytes} bytes "
            f"at offset {handle.region_offset_bytes}. Do all ranks run the same ringcomm?"
        )


class DeviceCore:
    """Owns ``native``, the core of a rank on a device: its region, its faults and its close.

    Args:
        heap: the heap of this rank's device.
        membership: the ranks and their options.
        choice: the algorithm and the rings that "auto" and "ring" use.
        channels: blocks per collective.
        multiprocessors: each rank's share of its device's multiprocessors; equal on all ranks.
        presence: this rank's presence, which ends with :meth:`close`.

    Attributes:
        region: the region's offset in the heap and its size, in bytes.
        choice, multiprocessors: the arguments of these names.
        recorder: the flight recorder; None with ``CommOptions(records=0)``.
        driver: driver of the device.
        calls: makes the calls of ``native`` and tracks their streams. See NOTE [Device calls] in
            kernels/bindings/device_calls.h.
    """

    def __init__(
        self,
        heap: DeviceHeap,
        membership: Membership,
        choice: TopologyChoice,
        channels: int,
        multiprocessors: int,
        presence: int,
    ) -> None:
        options = membership.options
        world_size = len(membership.ranks)
        operation = where(f"communicator {membership.name!r}", membership.rank, world_size)
        self.heap = heap
        self.runtime = heap.runtime
        self.device = heap.device
        self.rank = membership.rank
        self.world_size = world_size
        self.choice = choice
        self.multiprocessors = multiprocessors
        self.driver = _driver_of(self.runtime, operation)
        self.native = _native.DeviceComm(
            self.driver,
            rank_of=(membership.rank, world_size),
            staging=(
                channels,
                options.slots,
                options.segment_bytes or _segment_bytes(world_size, channels, options.slots),
            ),
            extra=(options.ll_bytes, options.copy_engine_bytes),
            timeout_ms=round(options.timeout_s * 1000),
            family=_native.ALGORITHMS[choice.algorithm],
            find_kernel=partial(_find, self.device),
        )
        recorded = options.records > 0
        self.recorder = DeviceRecorder(self.native, membership, operation) if recorded else None
        self.calls = _calls_of(
            self.native, self.runtime, self.device, self.recorder.native if self.recorder else None
        )
        self._records = options.records
        self._multicast_bytes = options.multicast_bytes
        allocation = heap.allocate(self.native.region_bytes, operation)
        # The space is reused once nothing refers to the allocation any more; see close().
        self._allocation: DeviceAllocation | None = allocation
        self._ptr = allocation.ptr
        self.region = allocation.offset_bytes, self.native.region_bytes
        self.runtime.write(self.device, self._ptr, self.native.words())
        with self.runtime.on_device(self.device):
            self._page = self.runtime.allocate_pinned(_native.HOST_PAGE_BYTES)
        self._regions: list[int] = []
        self._capacities: list[int] = []
        # Bytes of the heap that peers' kernels may access in place; 0 before connect() has run.
        self._lent_bytes = 0
        self._lending = threading.Lock()
        self._mapped: Sequence[MappedDeviceHeap] = ()
        self._window: MulticastWindow | None = None
        self._watched: Watched | None = None
        self._presence = presence
        self._peers: list[Peer] | None = None
        # An abort must not write into a region that close() has freed.
        self._guard = threading.Lock()
        self._aborted = False

    @property
    def layout(self) -> str:
        """The sizes that must be equal on all ranks, as text."""
        native = self.native
        return (
            f"segment_bytes={native.segment_bytes}, slots={native.slots}, "
            f"channels={native.channels}, region_bytes={native.region_bytes}, "
            f"records={self._records}, multicast_bytes={self._multicast_bytes}"
        )

    def announce(self, peers: Sequence[Peer] | None) -> None:
        """Notes the ranks that may write into this region from now on, to prove the links.

        Args:
            peers: the ranks by number, including this rank; None: no rank will write.
        """
        self._peers = None if peers is None else list(peers)

    def reach(self, handles: Sequence[DeviceHandle], mapped: Sequence[MappedDeviceHeap]) -> None:
        """Takes the mapped regions of all peers, which :meth:`abort` and :meth:`close` write to."""
        operation = where("connect", self.rank, self.world_size)
        for handle in handles:
            _check_region(handle, self.native.region_bytes, operation)
        if self.recorder is not None:
            self.recorder.connect(handles, operation)
        self._mapped = mapped
        self._capacities = [handle.capacity_bytes for handle in handles]
        self._regions = [
            each.base_ptr + handle.region_offset_bytes
            for each, handle in zip(mapped, handles, strict=True)
        ]

    def connect(
        self, rings: Sequence[Sequence[int]], window: MulticastWindow | None = None
    ) -> None:
        """Writes the table of all ranks' memory for this rank's kernels; only they read it.

        :meth:`close` also closes the multicast window.
        """
        self._window = window
        if window is not None and not self.native.set_window(
            window.own_ptr, window.all_ptr, self._multicast_bytes, window.heaps_ptr
        ):
            raise ArgumentError(
                f"{where('connect', self.rank, self.world_size)}: multicast_bytes: expected at "
                f"least {2 * self.native.channels * self.world_size * 64} for {self.world_size} "
                f"ranks and {self.native.channels} channels, got {self._multicast_bytes}"
            )
        # All peers have mapped the heap by now; ``heap.memory`` calls lend() for later memory.
        self._lent_bytes = self._capacities[self.rank] = self.heap.memory.reached_bytes
        table = self.native.table(
            regions=self._regions,
            heaps=[each.base_ptr for each in self._mapped],
            heap_bytes=self._capacities,
            host_page=self._page.device_ptr,
            rings=[list(ring) for ring in rings],
        )
        self.runtime.write(self.device, self._ptr + self.native.table_offset_bytes, table)
        this = weakref.ref(self)

        def lend(size_bytes: int) -> None:
            core = this()
            if core is None:
                raise ReferenceError
            core.lend(size_bytes)

        self.heap.memory.on_reached(lend)
        if window is not None:
            self._tell_unbound(window)

            def bind(chunks: Sequence[MappedChunk]) -> None:
                core = this()
                if core is None:
                    raise ReferenceError
                core.bind_heap(chunks)

            self.heap.memory.on_grown(bind)

    def bind_heap(self, chunks: Sequence[MappedChunk]) -> None:
        """Binds the heap's chunks to the multicast object; later launches may use them in place.

        Args:
            chunks: all chunks of this rank's heap.

        Raises:
            ReferenceError: this core is closed.
        """
        with self._lending:
            window = self._window
            if self._allocation is None or window is None:
                raise ReferenceError
            refused = bool(window.heap_refusal)
            window.bind_heap(chunks)
            self.native.set_bound_heap_bytes(window.bound_heap_bytes)
        if not refused:
            self._tell_unbound(window)

    def _tell_unbound(self, window: MulticastWindow) -> None:
        if window.heap_refusal:
            warnings.warn(
                f"{where('multicast', self.rank, self.world_size)}: only the first "
                f"{window.bound_heap_bytes} bytes of the heap on device {self.device} are bound to "
                "the multicast object; calls copy other tensors through the window: "
                f"{window.heap_refusal}",
                RuntimeWarning,
                stacklevel=2,
            )

    def lend(self, size_bytes: int) -> None:
        """Lets kernels share the heap's first ``size_bytes``, which all peers have mapped."""
        with self._lending:
            if self._allocation is None or size_bytes <= self._lent_bytes:
                return
            self._lent_bytes = size_bytes
            self.native.set_own_heap_bytes(size_bytes)
            # One word of 8 bytes: kernels that read the table in memory see either the old size or
            # the new size.
            self._write(self.native.own_heap_bytes_offset, size_bytes.to_bytes(8, "little"))

    def await_peers(self, operation: str) -> None:
        """Waits until all peers have mapped all memory that this rank's heap has now.

        Raises:
            HeapError: a peer has not mapped the memory within the communicator's timeout.
        """
        self.heap.await_peers(where(operation, self.rank, self.world_size), self.timeout_ms / 1000)

    def address_in_heap(self, rank: int, part: tuple[int, int], operation: str) -> int:
        """Returns the address at which this process reaches a part of a peer's heap.

        Args:
            rank: the peer's rank.
            part: offset and size in bytes, as the peer announced them.
            operation: the beginning of the error's message.

        Raises:
            CorruptedError: the heap has no such part.
        """
        offset, size_bytes = part
        if not 0 <= offset <= self._capacities[rank] - size_bytes:
            raise CorruptedError(
                f"{operation}: rank {rank} announced {size_bytes} bytes at offset {offset} of its "
                f"heap of {self._capacities[rank]} bytes. Do all ranks run the same ringcomm?"
            )
        return self._mapped[rank].base_ptr + offset

    def activate(self) -> None:
        """Allows calls and watches the peers' processes; needs :meth:`connect` on all ranks."""
        self.native.activate(self._page.host_ptr)
        if self.recorder is not None:
            self.recorder.native.watch(self._page.host_ptr)
        others = {rank: process_of(each.pid) for rank, each in enumerate(self._mapped) if each.pid}
        self._watched = watch(self.native, others)

    @property
    def timeout_ms(self) -> int:
        return self.native.timeout_ms

    @timeout_ms.setter
    def timeout_ms(self, timeout_ms: int) -> None:
        self.native.timeout_ms = timeout_ms

    @property
    def aborted(self) -> bool:
        return self._aborted or self.native.raised

    @property
    def segment_bytes(self) -> int:
        return self.native.segment_bytes

    def chosen(self, algorithm: int) -> int:
        """Returns the code of the algorithm that a large call runs if given ``algorithm``."""
        return self.native.chosen(algorithm)

    # Constant, since the host waits for no peer: launched calls end by themselves.
    awaited, arrivals, has_messages = -1, 0, False

    def set_left(self, left: bool) -> None:
        """Does nothing: :meth:`DeviceCallEngine.set_peer_left` informs the peers."""

    def fault(self) -> dict[str, Any] | None:
        """Returns the fault record, if possible from the rank where the fault began."""
        found = self._found_fault()
        if found is not None and found["kind"] == "timeout":
            return {**found, "hint": self._crowded()}
        if found is not None and found["kind"] == "peer_lost" and self.is_thread(found["peer"]):
            return {**found, "kind": "peer_left"}
        return found

    def _crowded(self) -> str:
        """Returns a hint that too few hardware queues may have delayed a call, or ""."""
        queues, streams = self.runtime.stream_queues(self.device)
        if streams <= queues:
            return ""
        return (
            f"This process has at least {streams} streams on device {self.device} and hardware "
            f"queues for {queues}: streams that share a queue delay each other's work. Set "
            f"{CONNECTIONS_VARIABLE}=32 before the process starts, or use fewer streams. "
        )

    def _found_fault(self) -> dict[str, Any] | None:
        own = self.native.fault()
        if own is not None and own["kind"] != "aborted":
            return own
        found = self._cause(own)
        deadline = time.monotonic() + REASON_GRACE_S
        # Kernels that their host has aborted may raise the abort word before the host has written
        # the reason.
        while self._awaits_reason(found) and time.monotonic() < deadline:
            time.sleep(REASON_POLL_S)
            found = self._cause(own)
        return found

    @staticmethod
    def _awaits_reason(found: dict[str, Any] | None) -> bool:
        return found is not None and found["kind"] == "aborted" and not found["reason"]

    def _cause(self, own: dict[str, Any] | None) -> dict[str, Any] | None:
        ranks = ((self.rank + distance) % self.world_size for distance in range(self.world_size))
        records = [record for rank in ranks if (record := self._record_of(rank)) is not None]
        # Records of kind "aborted" are of kernels that saw another rank's abort word.
        causes = [record for record in records if record["kind"] != "aborted"]
        aborts = [record for record in records if record["reason"]]
        return next(iter((*causes, *aborts, *records)), own)

    def _record_of(self, rank: int) -> dict[str, Any] | None:
        if not self._regions:
            return None
        try:
            page = self.runtime.read(self.device, self._regions[rank], _native.CONTROL_PAGE_BYTES)
        except Exception:
            # If the rank's process has ended, its memory may be gone; this rank's record remains.
            return None
        return _native.fault_in_page(page, rank, self.world_size)

    def abort(self, reason: str) -> None:
        """Makes kernels of this rank and its peers give up; any thread may call this."""
        with self._guard:
            if self._aborted or self._allocation is None:
                return
            self._aborted = True
            ended_before = self.native.raised
            # The host's own store comes first: the copies below may fail, or wait in a hardware
            # queue for a kernel that only this store ends.
            self.native.request_abort()
            if self.recorder is not None:
                self.recorder.native.stop()
            if not ended_before:
                # The reason tells peers where the abort began; fault() waits for it.
                text = _native.abort_reason(reason or "Communicator.abort() was called")
                self._write(_native.REASON_OFFSET_BYTES, text)
            self._write(_native.ABORTED_OFFSET_BYTES, RAISED)

    def _write(self, offset_bytes: int, data: bytes) -> None:
        self.runtime.write(self.device, self._ptr + offset_bytes, data)

    def look(self) -> None:
        """Writes into the records how many collectives this rank's kernels have begun."""
        if self.recorder is None or not self._regions:
            return
        with self._guard:
            if self._allocation is None:
                return
            ptr = self._ptr + self.native.sequence_offset_bytes
            word = self.runtime.read(self.device, ptr, 8)
        self.recorder.native.seen_begun(int.from_bytes(word, "little"))

    def any_aborted(self) -> bool:
        """True when some rank's abort word is raised; a rank checks it while no kernel runs."""
        return any(self._is_up(region + _native.ABORTED_OFFSET_BYTES) for region in self._regions)

    def is_thread(self, peer: int) -> bool:
        """True when ``peer`` is a thread of this process."""
        return self._peers is not None and self._peers[peer].process is None

    def has_closed(self, peer: int) -> bool:
        """True when ``peer`` has detached."""
        return self._is_up(self._ptr + self.native.detached_offset_bytes(peer))

    def _is_up(self, ptr: int) -> bool:
        return self.runtime.read(self.device, ptr, len(RAISED)) == RAISED

    def synchronize(self) -> None:
        """Waits for all work of the device; kernels end at their deadlines at the latest."""
        self.runtime.synchronize(self.device)

    def close(self) -> None:
        """Detaches from the peers; the region is freed once no peer can write into it any more.

        No kernel of this rank may still run.
        """
        with self._guard, self._lending:
            allocation, self._allocation = self._allocation, None
        if allocation is None:
            return
        if self._watched is not None:
            unwatch(self._watched)
        self._detach()
        # Work handles of earlier calls may still query the native object for a kernel's fault.
        self.native.activate(0)
        if self.recorder is not None:
            self.recorder.close()
        self._page.free()
        recorder, window = self.recorder, self._window

        def forget() -> None:
            if recorder is not None:
                recorder.native.release()
            if window is not None:
                window.close()

        if self._peers is None:
            forget()
        else:
            # A peer of another process does not detach if its rendezvous failed before it mapped
            # the region. The region then stays until that process has ended.
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            words = [self._ptr + self.native.detached_offset_bytes(other) for other in others]
            retire(allocation, words, [self._peers[other] for other in others], forget)
        self._mapped, self._regions = (), []
        del allocation
        end_presence(self._presence)

    def _detach(self) -> None:
        offset = self.native.detached_offset_bytes(self.rank)
        for rank, region in enumerate(self._regions):
            if rank == self.rank:
                continue
            try:
                self.runtime.write(self.device, region + offset, RAISED)
            except Exception:
                # The peer's process has ended, and needs no detach word.
                continue
