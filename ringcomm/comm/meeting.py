"""The rendezvous of a communicator on the host, which makes, announces and maps its regions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch.distributed import Store

from ringcomm import _native
from ringcomm.comm.nodes.places import Places, divide
from ringcomm.comm.options import CommOptions
from ringcomm.comm.recorder.reader import program_line
from ringcomm.deadlines import Deadline
from ringcomm.errors import RendezvousError, UnsupportedError, where
from ringcomm.memory.host_heap import MappedHeap, map_heap, no_room_error, process_heap
from ringcomm.rendezvous.descriptors import forming
from ringcomm.rendezvous.handles import (
    NODE_ID_VARIABLE,
    HeapHandle,
    Meeting,
    Rendezvous,
    machine_identity,
    members_of,
)
from ringcomm.rendezvous.lookout import Lookout, Parent

_STRANGERS = "Does another process post in this store? Give every job a store of its own"


@dataclass(frozen=True)
class Membership:
    """The ranks of a communicator, its store and its options.

    ``ranks`` are the members' ranks in the outermost communicator. ``heaps`` are their heaps as
    mapped here, held as long as the communicator lives. ``node_id`` is what this rank's node was
    named, or "". ``processes`` are those of ranks of the outermost communicator that are known.
    ``parent`` is what the members are a part of, until they have met.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    options: CommOptions
    heaps: tuple[MappedHeap, ...]
    node_id: str = ""
    processes: Mapping[int, _native.Process] = field(default_factory=dict)
    parent: Parent | None = None

    def having_met(
        self, heaps: tuple[MappedHeap, ...], processes: Mapping[int, _native.Process]
    ) -> Membership:
        """Returns the membership once the members have met; it keeps no parent alive."""
        return replace(self, heaps=heaps, processes=processes, parent=None)


def rendezvous_of(membership: Membership) -> Meeting:
    """Returns the meeting of the members, whose timeout begins now."""
    return Meeting(
        membership.store,
        membership.name,
        membership.rank,
        len(membership.ranks),
        Deadline(membership.options.timeout_s),
        Lookout(membership.ranks, membership.processes, membership.parent),
    )


@dataclass(frozen=True)
class OneNode:
    """A connected core, and the members' heaps as mapped here, and their processes."""

    core: _native.Comm
    heaps: tuple[MappedHeap, ...]
    processes: Mapping[int, _native.Process]


@dataclass(frozen=True)
class SeveralNodes:
    """The nodes that the members are on, and the meeting at which they go on.

    ``world_id`` identifies the members on all nodes.
    """

    world_id: int
    places: Places
    meeting: Meeting
    rendezvous: Rendezvous


CLOSED = "it has closed the communicator of which a group is built"
LEFT = "it has left the function of LocalWorld.run()"
ENDED = "its process has ended"


def why_lost(core: _native.Comm, place: int) -> str:
    """Returns why a peer makes no call on a core any more, as the end of a sentence; "": it may."""
    if core.health(place):
        return LEFT if core.is_thread(place) else ENDED
    return CLOSED if core.has_closed(place) else ""


# NOTE [Nodes are found]
#
# Ranks are of one node if they can map each other's memory, and that is tried: /proc/<pid>/fd/<fd>
# is opened, and the token of the heap that was announced must stand there. What a rank says of its
# machine only spares attempts that cannot succeed: another boot of a kernel and another PID
# namespace mean another node. Host names say nothing. Where the kernel refuses, the ranks are on
# different nodes; where something else than the announced heap is found, a handle is forged, or
# machines are clones of each other, and that is an error. Each rank posts whom of its own machine
# it could not map, and from that all ranks derive the same nodes. RINGCOMM_NODE_ID, where it is
# set, takes the place of what a rank says of its machine: ranks of one id must be able to map each
# other, and ranks of different ids are on different nodes.


def meet(membership: Membership, heap_bytes: int | None) -> OneNode | SeveralNodes:
    """Meets the members; if they are on one node, builds a connected core.

    Raises:
        RingcommError: as :meth:`Communicator.from_store`; waiting peers have been told.
    """
    meeting = rendezvous_of(membership)
    with forming(meeting.operation):
        rendezvous = Rendezvous(meeting)
    core: _native.Comm | None = None
    try:
        with forming(meeting.operation):
            heap = process_heap(heap_bytes, len(membership.ranks))
            core = _make_core(heap, membership)
            handles = rendezvous.handles(_handle(heap, core, membership))
            heaps, unreached = _map_heaps(handles, heap, meeting)
            if len(heaps) == len(handles):
                in_order = tuple(heaps[rank] for rank in range(len(handles)))
                _connect(core, handles, in_order, meeting.operation)
            everyone = rendezvous.confirm(handles, unreached)
            machines = [handle.machine for handle in handles]
            places = divide(meeting.rank, machines, everyone, meeting.operation)
            if len(places.nodes) == 1:
                _activate(core, meeting.operation)
                return OneNode(core, in_order, meeting.lookout.processes)
            _check_ids(places, handles, everyone, meeting)
            core.close()
            return SeveralNodes(members_of(handles), places, meeting, rendezvous)
    except BaseException as error:
        if core is not None:
            # A peer may have seen all ranks ready, and must not wait for this one.
            core.abort(f"rendezvous failed: {error}")
            core.close()  # so that the store may have the descriptors
        rendezvous.fail(error)
        raise


def _map_heaps(
    handles: list[HeapHandle], own: _native.Heap, meeting: Meeting
) -> tuple[dict[int, MappedHeap], dict[int, str]]:
    """Maps the heaps of this rank's machine; returns them, and why others cannot be mapped.

    Raises:
        PeerLost: the process of a rank has ended since it posted its handle; named.
        RendezvousError: a heap cannot be mapped for another reason than the kernel's refusal.
    """
    heaps: dict[int, MappedHeap] = {}
    unreached: dict[int, str] = {}
    for rank, handle in enumerate(handles):
        if handle.machine != handles[meeting.rank].machine:
            continue
        try:
            heaps[rank] = map_heap(handle, own, meeting.operation)
        except UnsupportedError as error:  # the kernel refuses; any other error is one
            unreached[rank] = str(error).removeprefix(f"{meeting.operation}: ")
        except RendezvousError:
            meeting.lookout.raise_if_ended(rank, meeting.operation)
            raise
    return heaps, unreached


_warned: set[str] = set()


def _check_ids(
    places: Places, handles: list[HeapHandle], unreached: list[dict[int, str]], meeting: Meeting
) -> None:
    """Refuses nodes that contradict RINGCOMM_NODE_ID, and warns of a machine that is several."""
    for rank, reasons in enumerate(unreached):
        for peer, why in reasons.items():
            if handles[rank].node_id:
                raise RendezvousError(
                    f"{meeting.operation}: ranks {rank} and {peer} have the same "
                    f"{NODE_ID_VARIABLE}={handles[rank].node_id}, but rank {rank} cannot map the "
                    f"memory of rank {peer}: {why}. Give only ranks that share memory one id"
                )
    if meeting.rank != 0:
        return
    for first, second in pairwise(ranks[0] for ranks in places.nodes):
        a, b = handles[first], handles[second]
        if a.boot != b.boot or (a.node_id and b.node_id):
            continue
        why = "they are in different PID namespaces (containers?)"
        if a.node_id or b.node_id:
            why = f"of the two only rank {first if a.node_id else second} has {NODE_ID_VARIABLE}"
        elif a.pid_namespace == b.pid_namespace:
            why = unreached[first].get(second) or unreached[second].get(first) or "see above"
        if a.boot not in _warned:
            _warned.add(a.boot)
            warnings.warn_explicit(
                f"{meeting.operation}: ranks {first} and {second} run on one machine but are on "
                f"different nodes, as neither maps the other's memory: {why}. Between nodes calls "
                f"are slower. If that is meant, set {NODE_ID_VARIABLE} on all ranks",
                RuntimeWarning,
                *program_line(),
            )


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
        node_id=membership.node_id,
        pid=os.getpid(),
        fd=heap.fd,
        capacity_bytes=heap.capacity_bytes,
        token=heap.token,
        region_offset_bytes=core.region_offset_bytes,
        region_bytes=core.region_bytes,
        proof=core.proof,
        layout=(
            f"segment_bytes={core.segment_bytes}, slots={core.slots}, "
            f"records={membership.options.records}, sum_blocks={membership.options.sum_blocks}, "
            f"carrier={membership.options.carrier_name}, wire={membership.options.wire}, "
            f"rails={membership.options.rails}, kernels={membership.options.kernels}, "
            f"objects={membership.options.objects}, "
            f"largest_object_bytes={membership.options.largest_object_bytes}"
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
