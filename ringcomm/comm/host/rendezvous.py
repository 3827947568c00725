# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a communicator on the host, which makes, announces and maps its regions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch.distributed import Store

from ringcomm import _native
from ringcomm.comm.host.options import CommOptions
from ringcomm.comm.host.threads import (
    channels_of_region,
    named_threads,
    own_cpus,
    share_threads,
)
from ringcomm.comm.recorder.reader import program_line
from ringcomm.errors import RendezvousError, UnsupportedError, where
from ringcomm.memory.host_heap import MappedHeap, map_heap, no_room_error, process_heap
from ringcomm.process import Deadline, available_cores
from ringcomm.rendezvous.handles import (
    NODE_ID_VARIABLE,
    HeapHandle,
    Rendezvous,
    RendezvousSpec,
    forming,
    machine_identity,
    members_of,
)
from ringcomm.rendezvous.same_node import Lookout, Parent

# ---- The layout of ranks on nodes, and the rails between nodes ----------------------------------
# A *node* is a set of ranks that can map each other's memory. A rank's *local rank* is its number
# among the ranks of its node. *Rail* p joins one rank of each node: the rank with local rank p, or,
# on a node of n <= p ranks, the rank with local rank p modulo n. So each rank is on a rail, and if
# all N nodes have equally many ranks it is on exactly one rail, with N - 1 peers.


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a communicator.

    Attributes:
        nodes: the ranks of each node, ascending; the nodes are ordered by their first ranks.
        rank: this rank.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def _found(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, local_rank)
            for node, ranks in enumerate(self.nodes)
            for local_rank, rank in enumerate(ranks)
        }

    def node_of(self, rank: int) -> int:
        """Returns the number of a rank's node."""
        return self._found[rank][0]

    def local_rank_of(self, rank: int) -> int:
        """Returns a rank's number among the ranks of its node."""
        return self._found[rank][1]

    @cached_property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of(self.rank)

    @cached_property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its node."""
        return self.local_rank_of(self.rank)

    @cached_property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, including this rank."""
        return self.nodes[self.node]

    @cached_property
    def num_rails(self) -> int:
        """The number of rails: the number of ranks of the largest node."""
        return max(map(len, self.nodes))

    @property
    def even(self) -> bool:
        """True if all nodes have equally many ranks."""
        return all(len(ranks) == len(self.nodes[0]) for ranks in self.nodes)

    def rail(self, number: int) -> tuple[int, ...]:
        """Returns the ranks of a rail, by node."""
        return tuple(ranks[number % len(ranks)] for ranks in self.nodes)

    def rails_of(self, rank: int) -> list[int]:
        """Returns the numbers of the rails that a rank is on."""
        node, local_rank = self._found[rank]
        return list(range(local_rank, self.num_rails, len(self.nodes[node])))

    @cached_property
    def _shard_indices(self) -> dict[int, int]:
        in_order = sorted(self._found, key=lambda rank: self._found[rank][::-1])
        return {rank: index for index, rank in enumerate(in_order)}

    def shard_index_of(self, rank: int) -> int:
        """Returns the number of the chunk of state that a rank owns: by local rank, then by node.

        If nodes have equal sizes the chunks of one rail are adjacent, so that together they form
        one of the chunks of a node.
        """
        return self._shard_indices[rank]

    def others(self) -> Iterator[int]:
        """Yields the numbers of the other nodes, beginning with the node after this rank's."""
        for distance in range(1, len(self.nodes)):
            yield (self.node + distance) % len(self.nodes)

    def named(self, rank: int) -> str:
        """Returns a rank's name for messages."""
        return f"rank {rank} (node {self.node_of(rank)})"


def divide(
    rank: int,
    machines: Sequence[object],
    unreached: Sequence[Mapping[int, str]],
    operation: str,
) -> NodeLayout:
    """Divides ranks into nodes; all ranks derive the same result from the same facts.

    Args:
        rank: this rank.
        machines: by rank, a value that ranks share if they may map each other's memory.
        unreached: by rank, the ranks of its machine whose memory it could not map, and why.
        operation: the name of the operation, for errors.

    Raises:
        RendezvousError: two ranks can map the memory of a third rank but not each other's memory,
            so they are neither one node nor several.
    """
    nodes: list[list[int]] = []
    for each, machine in enumerate(machines):
        for node in nodes:
            if machines[node[0]] == machine and not _apart(each, node[0], unreached):
                node.append(each)
                break
        else:
            nodes.append([each])
    for node in nodes:
        for first in node:
            for second in node:
                if _apart(first, second, unreached):
                    raise RendezvousError(
                        f"{operation}: ranks {first} and {second} cannot map each other's memory, "
                        f"but both can map the memory of rank {node[0]}: "
                        f"{unreached[first].get(second) or unreached[second].get(first)}. Give the "
                        "ranks of each node a RINGCOMM_NODE_ID of their own, or let all of a "
                        "machine's ranks run as one user in one container"
                    )
    return NodeLayout(tuple(map(tuple, nodes)), rank)


def _apart(first: int, second: int, unreached: Sequence[Mapping[int, str]]) -> bool:
    return second in unreached[first] or first in unreached[second]


_STRANGERS = "Does another process post in this store? Give every job a store of its own"


@dataclass(frozen=True)
class Membership:
    """The ranks of a communicator, its store and its options.

    ``ranks`` are the members' ranks in the outermost communicator. ``heaps`` are their heaps as
    mapped in this process, held as long as the communicator lives. ``node_id`` is the name of this
    rank's node, or "". ``processes`` are the known processes of ranks of the outermost
    communicator. ``parent`` is the membership that contains these members, until their rendezvous.
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

    def after_rendezvous(
        self, heaps: tuple[MappedHeap, ...], processes: Mapping[int, _native.Process]
    ) -> Membership:
        """Returns the membership after the rendezvous; it keeps no parent alive."""
        return replace(self, heaps=heaps, processes=processes, parent=None)


def spec_of(membership: Membership) -> RendezvousSpec:
    """Returns the rendezvous of the members; its timeout begins now."""
    return RendezvousSpec(
        membership.store,
        membership.name,
        membership.rank,
        len(membership.ranks),
        Deadline(membership.options.timeout_s),
        Lookout(membership.ranks, membership.processes, membership.parent),
    )


@dataclass(frozen=True)
class OneNode:
    """A connected core, the members' processes, and their heaps as mapped in this process."""

    core: _native.Comm
    heaps: tuple[MappedHeap, ...]
    processes: Mapping[int, _native.Process]


@dataclass(frozen=True)
class SeveralNodes:
    """The nodes of the members, and the rendezvous, with which the nodes are connected next.

    ``world_id`` identifies the members on all nodes.
    """

    world_id: int
    layout: NodeLayout
    spec: RendezvousSpec
    rendezvous: Rendezvous


CLOSED = "it has closed the communicator of which a group is built"
LEFT = "it has left the function of LocalWorld.run()"
ENDED = "its process has ended"


def why_lost(core: _native.Comm, peer: int) -> str:
    """Returns why a peer makes no more calls on a core, as the end of a sentence, or ""."""
    if core.health(peer):
        return LEFT if core.is_thread(peer) else ENDED
    return CLOSED if core.has_closed(peer) else ""


# NOTE [Nodes are found]
#
# Ranks belong to one node if they can map each other's memory; the rendezvous tries that. A rank
# opens /proc/<pid>/fd/<fd>, where it must find the token of the heap that was announced. A rank's
# description of its machine only saves attempts that cannot succeed: a different boot of the kernel
# or a different PID namespace means a different node. Host names are ignored. If the kernel
# refuses, the ranks are on different nodes; if the rank finds something other than the announced
# heap, a handle is forged or machines are clones of each other, which is an error. Each rank posts
# which ranks of its own machine it could not map; from these posts all ranks derive the same nodes.
# RINGCOMM_NODE_ID, if set, replaces a rank's description of its machine: ranks of one id must be
# able to map each other's memory, and ranks of different ids are on different nodes.


def hold_rendezvous(membership: Membership, heap_bytes: int | None) -> OneNode | SeveralNodes:
    """Holds the rendezvous of the members; if they are on one node, builds a connected core.

    Raises:
        RingcommError: as :meth:`Communicator.from_store`; waiting peers have been informed.
    """
    spec = spec_of(membership)
    with forming(spec.operation):
        rendezvous = Rendezvous(spec)
    core: _native.Comm | None = None
    try:
        with forming(spec.operation):
            heap = process_heap(heap_bytes, len(membership.ranks))
            core = _make_core(heap, membership)
            handles = rendezvous.handles(_handle(heap, core, membership))
            heaps, unreached = _map_heaps(handles, heap, spec)
            if len(heaps) == len(handles):
                in_order = tuple(heaps[rank] for rank in range(len(handles)))
                _connect(core, handles, in_order, spec.operation)
                _use_threads(core, handles, spec)
                if are_apart(
                    [handle.numa_nodes for handle in handles], membership.options.sum_group_size
                ):
                    core.sum_in_levels()
            everyone = rendezvous.confirm(handles, unreached)
            machines = [handle.machine for handle in handles]
            layout = divide(spec.rank, machines, everyone, spec.operation)
            if len(layout.nodes) == 1:
                _activate(core, spec.operation)
                return OneNode(core, in_order, spec.lookout.processes)
            _check_ids(layout, handles, everyone, spec)
            core.close()
            return SeveralNodes(members_of(handles), layout, spec, rendezvous)
    except BaseException as error:
        if core is not None:
            # A peer may have seen that all ranks are ready: the abort ends its wait for this rank.
            core.abort(f"rendezvous failed: {error}")
            core.close()  # frees descriptors, which the store may need
        rendezvous.fail(error)
        raise


def _map_heaps(
    handles: list[HeapHandle], own: _native.Heap, spec: RendezvousSpec
) -> tuple[dict[int, MappedHeap], dict[int, str]]:
    """Maps the heaps of this rank's machine; returns them, and why the others are not mapped.

    Raises:
        PeerLost: a rank's process has ended since it posted its handle; the error names the rank.
        RendezvousError: a heap cannot be mapped for another reason than the kernel's refusal.
    """
    heaps: dict[int, MappedHeap] = {}
    unreached: dict[int, str] = {}
    for rank, handle in enumerate(handles):
        if handle.machine != handles[spec.rank].machine:
            continue
        try:
            heaps[rank] = map_heap(handle, own, spec.operation)
        except UnsupportedError as error:  # the kernel refuses; other exceptions propagate
            unreached[rank] = str(error).removeprefix(f"{spec.operation}: ")
        except RendezvousError:
            spec.lookout.raise_if_ended(rank, spec.operation)
            raise
    return heaps, unreached


_warned: set[str] = set()


def _check_ids(
    layout: NodeLayout,
    handles: list[HeapHandle],
    unreached: list[dict[int, str]],
    spec: RendezvousSpec,
) -> None:
    """Raises for nodes that contradict RINGCOMM_NODE_ID; warns if a machine has several nodes."""
    for rank, reasons in enumerate(unreached):
        for peer, why in reasons.items():
            if handles[rank].node_id:
                raise RendezvousError(
                    f"{spec.operation}: ranks {rank} and {peer} have the same "
                    f"{NODE_ID_VARIABLE}={handles[rank].node_id}, but rank {rank} cannot map the "
                    f"memory of rank {peer}: {why}. Give one id only to ranks that share memory"
                )
    if spec.rank != 0:
        return
    for first, second in pairwise(ranks[0] for ranks in layout.nodes):
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
                f"{spec.operation}: ranks {first} and {second} run on one machine but are on "
                f"different nodes, as neither maps the other's memory: {why}. Between nodes calls "
                f"are slower. If that is meant, set {NODE_ID_VARIABLE} on all ranks",
                RuntimeWarning,
                *program_line(),
            )


def _single_copy_gain(asked: bool | None, world_size: int) -> tuple[bool, bool] | None:
    """Returns in which calls this rank lends its memory: NOTE [Single copy] in endpoint.h."""
    if asked is not None:
        return (True, True) if asked else None
    # Measured only where ranks may lend at all, since it takes milliseconds.
    return _native.single_copy_gain() if world_size == _native.SINGLE_COPY_RANKS else None


def _make_core(heap: _native.Heap, membership: Membership) -> _native.Comm:
    options = membership.options
    world_size = len(membership.ranks)
    try:
        return _native.Comm(
            heap,
            rank=membership.rank,
            world=world_size,
            channels=channels_of_region(options, world_size),
            segment_bytes=options.segment_bytes,
            slots=options.slots,
            timeout_ms=round(options.timeout_s * 1000),
            records=options.records,
            name=membership.name,
            single_copy=_single_copy_gain(options.single_copy, world_size),
            sum_group_size=options.sum_group_size,
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
            f"segment_bytes={core.segment_bytes}, slots={core.slots}, channels={core.channels}, "
            f"records={membership.options.records}, "
            f"sum_group_size={membership.options.sum_group_size}, "
            f"transport={membership.options.transport_name}, "
            f"compression={membership.options.compression}, "
            f"rails={membership.options.rails}, kernels={membership.options.kernels}, "
            f"objects={membership.options.objects}, "
            f"largest_object_bytes={membership.options.largest_object_bytes}"
        ),
        cpus=own_cpus(),
        cores=available_cores(),
        torch_threads=torch.get_num_threads(),
        threads=named_threads(membership.options),
        numa_nodes=",".join(map(str, heap.nodes)),
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
    core.publish_members(members_of(handles))


def _use_threads(core: _native.Comm, handles: list[HeapHandle], spec: RendezvousSpec) -> None:
    threads = share_threads(handles, spec.rank, core.channels)
    try:
        core.use_threads(threads.most, threads.is_exact, threads.channels, threads.is_crowded)
    except RuntimeError as error:
        raise RendezvousError(f"{spec.operation}: {error}") from error


def are_apart(numa_nodes: Sequence[str], group_size: int) -> bool:
    """True if groups of consecutive ranks have heaps on different NUMA nodes.

    Args:
        numa_nodes: by rank, the NUMA nodes to which the heap is bound; "" if it is not bound.
        group_size: the ranks of a group; 0 if there are no groups.
    """
    if group_size < 2 or len(numa_nodes) % group_size:
        return False
    groups = [
        set(numa_nodes[first : first + group_size])
        for first in range(0, len(numa_nodes), group_size)
    ]
    # Each group is on one set of NUMA nodes, and no other group is on that set.
    return (
        len(groups) > 1
        and all(len(group) == 1 and group != {""} for group in groups)
        and len(set.union(*groups)) == len(groups)
    )


def _activate(core: _native.Comm, operation: str) -> None:
    try:
        core.activate()
    except ValueError as error:
        raise RendezvousError(f"{operation}: {error}. {_STRANGERS}") from error
