"""The rendezvous of a communicator on the host, which makes, announces and maps its regions."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ringcomm import _native
from ringcomm.comm.options import CommOptions
from ringcomm.errors import RendezvousError, where
from ringcomm.memory.host_heap import MappedHeap, map_heap, no_room_error, process_heap
from ringcomm.rendezvous.handles import (
    HeapHandle,
    Meeting,
    Rendezvous,
    Store,
    machine_identity,
    members_of,
)

_STRANGERS = "Does another process post in this store? Give every job a store of its own"


@dataclass(frozen=True)
class Membership:
    """The ranks of a communicator, its store and its options.

    ``ranks`` are the members' ranks in the outermost communicator. ``heaps`` are their heaps as
    mapped here, held as long as the communicator lives.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    options: CommOptions
    heaps: tuple[MappedHeap, ...]


def rendezvous_of(membership: Membership) -> Meeting:
    """Returns the meeting of the members, whose timeout begins now."""
    timeout_s = membership.options.timeout_s
    return Meeting(
        membership.store,
        membership.name,
        membership.rank,
        len(membership.ranks),
        time.monotonic() + timeout_s,
        timeout_s,
    )


def meet(
    membership: Membership, heap_bytes: int | None
) -> tuple[_native.Comm, tuple[MappedHeap, ...]]:
    """Builds a connected core, and returns it with the members' heaps as mapped here.

    Raises:
        RingcommError: as :meth:`Communicator.from_store`; waiting peers have been told.
    """
    meeting = rendezvous_of(membership)
    rendezvous = Rendezvous(meeting)
    core: _native.Comm | None = None
    try:
        heap = process_heap(heap_bytes)
        core = _make_core(heap, membership)
        handles = rendezvous.handles(_handle(heap, core, membership))
        heaps = tuple(map_heap(handle, heap, meeting.operation) for handle in handles)
        _connect(core, handles, heaps, meeting.operation)
        rendezvous.confirm(handles)
        _activate(core, meeting.operation)
    except BaseException as error:
        rendezvous.fail(error)
        if core is not None:
            # A peer may have seen all ranks ready, and must not wait for this one.
            core.abort(f"rendezvous failed: {error}")
            core.close()
        raise
    return core, heaps


def _make_core(heap: _native.Heap, membership: Membership) -> _native.Comm:
    options = membership.options
    world_size = len(membership.ranks)
    try:
        return _native.Comm(
            heap,
            rank=membership.rank,
            world=world_size,
            segment_bytes=options.segment_bytes,
            slots=options.slots,
            timeout_ms=round(options.timeout_s * 1000),
            records=options.records,
            name=membership.name,
            single_copy=options.single_copy,
            sum_blocks=options.sum_blocks,
        )
    except OSError as error:
        operation = where(f"communicator {membership.name!r}", membership.rank, world_size)
        raise no_room_error(operation, heap, error) from error


def _handle(heap: _native.Heap, core: _native.Comm, membership: Membership) -> HeapHandle:
    host, boot, pid_namespace = machine_identity()
    return HeapHandle(
        rank=membership.rank,
        world_size=len(membership.ranks),
        host=host,
        boot=boot,
        pid_namespace=pid_namespace,
        pid=os.getpid(),
        fd=heap.fd,
        capacity_bytes=heap.capacity_bytes,
        token=heap.token,
        region_offset_bytes=core.region_offset_bytes,
        region_bytes=core.region_bytes,
        proof=core.proof,
        layout=(
            f"segment_bytes={core.segment_bytes}, slots={core.slots}, "
            f"records={membership.options.records}, "
            f"sum_blocks={membership.options.sum_blocks}"
        ),
    )


def _connect(
    core: _native.Comm, handles: list[HeapHandle], heaps: tuple[MappedHeap, ...], operation: str
) -> None:
    try:
        core.connect(
            [
                (heap.mapping, handle.region_offset_bytes, heap.pid, handle.proof)
                for handle, heap in zip(handles, heaps, strict=True)
            ]
        )
    except ValueError as error:
        raise RendezvousError(f"{operation}: {error}. {_STRANGERS}") from error
    core.meet(members_of(handles))


def _activate(core: _native.Comm, operation: str) -> None:
    try:
        core.activate()
    except ValueError as error:
        raise RendezvousError(f"{operation}: {error}. {_STRANGERS}") from error
