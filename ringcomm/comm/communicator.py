"""The communicator, with the ways to build and divide it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import methodcaller
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import torch
from torch.distributed import PrefixStore
from torch.distributed import Store as TorchStore

from ringcomm import _native
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.device.meeting import meet_on_device
from ringcomm.comm.device.messages import DeviceMessages
from ringcomm.comm.device.topology import TopologyPlan
from ringcomm.comm.host.arguments import ALGORITHMS, DTYPE_CODES, CallChecks
from ringcomm.comm.host.collectives import CoalescedCalls
from ringcomm.comm.host.engine import Call, Use, Work, itself, refusal
from ringcomm.comm.host.meeting import Membership, OneNode, Places, SeveralNodes, chosen, meet
from ringcomm.comm.host.messages import Messages
from ringcomm.comm.host.options import CommOptions
from ringcomm.comm.nodes import wires
from ringcomm.comm.nodes.calls import CallsOverNodes
from ringcomm.comm.nodes.carrier import (
    Carrier,
    Connector,
    DeviceRails,
    Rails,
    carrier_of,
    device_carrier_of,
)
from ringcomm.comm.nodes.device_core import DeviceNodesCalls, DeviceNodesCore
from ringcomm.comm.nodes.messages import NodesMessages
from ringcomm.comm.nodes.steps import InCodes, StepsCore
from ringcomm.comm.nodes.watch import Awaiting, DeviceWatch, NodeTrace, Watch, claim
from ringcomm.comm.nodes.wires import Residual
from ringcomm.comm.recorder.records import NodeLevel, Recording, renumbered
from ringcomm.cuda import find_device
from ringcomm.errors import (
    AbortedError,
    ArgumentError,
    RendezvousError,
    RingcommError,
    UnsupportedError,
    where,
)
from ringcomm.integers import integer
from ringcomm.json_reader import read_record, shown
from ringcomm.memory import empty
from ringcomm.rendezvous.handles import check_name, forming, named_node
from ringcomm.rendezvous.launchers import read_environment


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


@dataclass(frozen=True)
class Built(Generic[C]):
    """One rank's end over several nodes.

    Attributes:
        core: of the communicator.
        node: the communicator of this rank's node, for users.
        watch: over all ranks.
    """

    core: CallsOverNodes
    node: C
    watch: Watch


def build(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
    *,
    on_device: bool = False,
) -> Built[C]:
    """Builds the node's communicators and the rails.

    Args:
        membership: of all ranks.
        found: their nodes.
        heap_bytes: of the host; as for :func:`ringcomm.comm.host.meeting.meet`.
        make_node: builds a node's communicator for users.
        on_device: it is one on devices.

    Raises:
        RingcommError: a rank failed or cannot be reached; waiting peers have been told.
    """
    closing: list[_Closable] = []
    try:
        built = _built_on_device if on_device else _built
        with forming(found.meeting.operation):
            return built(membership, found, heap_bytes, make_node, closing)
    except BaseException as error:
        if found.rendezvous.fail(error):
            _claim(membership, found, error)
        for each in reversed(closing):
            each.close()
        raise


def _claim(membership: Membership, found: SeveralNodes, error: BaseException) -> None:
    """Tells the ranks that have built the communicator already, whose watches read the claim."""
    operation = found.meeting.operation
    if not isinstance(error, RingcommError):
        told = f"{type(error).__name__}: {error}"
        error = RendezvousError(f"{operation}: expected to build the communicator, got {told}")
    with suppress(RuntimeError):  # of a store that has gone meanwhile: ``error`` matters more
        claim(_faults(membership, found), error)


def _faults(membership: Membership, found: SeveralNodes) -> PrefixStore:
    """Returns the store of the claims of this communicator."""
    return PrefixStore("faults", PrefixStore(found.rendezvous.prefix, membership.store))


def _built(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
    closing: list[_Closable],
) -> Built[C]:
    places, options, operation = found.places, membership.options, found.meeting.operation
    of_node = _of_node(membership, places)
    node = make_node(of_node)
    closing.append(node)
    level = NodeLevel(membership.name, places.node, places.mates)
    met = _inner(replace(of_node, name=str(level)), heap_bytes, operation)
    inner = met.core
    closing.append(inner)
    store = PrefixStore(found.rendezvous.prefix, membership.store)
    connector = _connector(membership, found, options.carrier)
    rails = Rails(places, PrefixStore("rails", store), connector)
    world = range(len(membership.ranks))
    group = connector.group(PrefixStore("messages", store), places.rank, world)
    # The last wait for others: who has built may leave, as nobody connects to it any more.
    awaiting = _awaiting(found, met)
    faults = _faults(membership, found)
    watch = Watch(inner, places, awaiting, faults, rails, membership.name)
    closing.append(watch)
    messages = NodesMessages(inner, places, group, watch)
    watch.breakable.append(messages)
    # Codes are added where they end, and so do not pass through other nodes.
    rails_asked = "direct" if options.wire in _native.WIRES else options.rails
    schedule = chosen(rails_asked, len(places.nodes))
    core = StepsCore(inner, places, rails, watch, messages, options.wire, schedule)
    return Built(core, node, watch)


def _built_on_device(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
    closing: list[_Closable],
) -> Built[C]:
    """Builds the node's communicators on devices, the carrier, and what hosts agree on calls by."""
    places, options, operation = found.places, membership.options, found.meeting.operation
    if options.rails not in ("auto", "direct"):
        raise UnsupportedError(
            f"{operation}: rails: expected auto or direct on devices, got {options.rails}. Their "
            "carrier exchanges between all nodes at once"
        )
    carrier = device_carrier_of(options.carrier, operation)
    of_node = _of_node(membership, places)
    node = make_node(of_node)
    closing.append(node)
    made = make_node(replace(of_node, name=f"{of_node.name}.calls"))
    closing.append(made)
    calls = cast(DeviceCallEngine, made)
    met = _inner(replace(of_node, name=f"{of_node.name}.hosts"), heap_bytes, operation)
    closing.append(met.core)
    store = PrefixStore(found.rendezvous.prefix, membership.store)
    rails = Rails(places, PrefixStore("rails", store), _connector(membership, found, "gloo"))
    own = PrefixStore("carrier", store)
    carried = DeviceRails(places, own, carrier, calls.device_place, operation)
    closing.append(carried)
    awaiting = _awaiting(found, met)
    carried.prove(options.timeout_s)
    faults = _faults(membership, found)
    watch = DeviceWatch(met.core, places, awaiting, faults, rails, membership.name, calls)
    closing.append(watch)
    watch.breakable.append(carried)
    core = DeviceNodesCore(met.core, places, rails, watch, options.wire, calls, carried)
    return Built(core, node, watch)


def _connector(membership: Membership, found: SeveralNodes, asked: str | Carrier) -> Connector:
    operation = found.meeting.operation
    return Connector(
        found.places,
        carrier_of(asked, operation),
        membership.options.timeout_s,
        operation,
        found.rendezvous,
        membership.store,
    )


def _of_node(membership: Membership, places: Places) -> Membership:
    """Returns the ranks of this rank's node as members of a communicator of their own."""
    return replace(
        membership,
        name=f"{membership.name}/node{places.node}",
        rank=places.place,
        ranks=tuple(membership.ranks[rank] for rank in places.mates),
    )


def _inner(of_node: Membership, heap_bytes: int | None, operation: str) -> OneNode:
    """Builds the core that calls over nodes use within the node, and users do not."""
    met = meet(of_node, heap_bytes)
    if not isinstance(met, OneNode):
        raise RendezvousError(
            f"{operation}: the ranks of a node could map each other's memory, and a moment later "
            "could not. See whether a process has changed its user or its dumpable flag"
        )
    return met


def _awaiting(found: SeveralNodes, met: OneNode) -> Awaiting:
    """Waits until the rails of all ranks stand, and maps the words of this node's ranks."""
    word = empty(1, dtype=torch.int32).fill_(-1)
    places, operation = found.places, found.meeting.operation
    offset_bytes = word.data_ptr() - met.heaps[places.place].base_ptr
    offsets = []
    for rank, text in enumerate(found.rendezvous.everyone("rails", {"word": offset_bytes})):
        theirs = read_record(text, rank, operation).get("word")
        if type(theirs) is not int or theirs < 0 or theirs % word.itemsize:
            raise RendezvousError(
                f"{operation}: expected the place of a word of rank {rank}, got {shown(theirs)}"
            )
        offsets.append(theirs)
    ptrs = []
    for place, rank in enumerate(places.mates):
        heap = met.heaps[place]
        if offsets[rank] + word.itemsize > heap.mapping.capacity_bytes:
            raise RendezvousError(
                f"{operation}: expected the place of a word in the heap of rank {rank}, which has "
                f"{heap.mapping.capacity_bytes} bytes, got {offsets[rank]}"
            )
        ptrs.append(heap.base_ptr + offsets[rank])
    return Awaiting(ptrs, (word, met.heaps))


# ---- The communicator, with the ways to build and divide it --------------------------------------

Tensor = torch.Tensor


Device = torch.device | str | int | None


class Communicator(CoalescedCalls, Messages):
    """A connection of ``world_size`` ranks, of which this process or thread is one.

    Ranks in all methods are ranks of this communicator. All ranks must call the same collectives
    in the same order. Sends and receives are not part of that order. As a context manager, a
    communicator closes itself.
    """

    @classmethod
    def from_env(
        cls,
        *,
        timeout: timedelta | float | None = None,
        heap_bytes: int | None = None,
        options: CommOptions | None = None,
        device: Device = None,
    ) -> Communicator:
        """Builds the communicator of all ranks that a launcher started.

        Supported are torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), MPICH,
        Open MPI and Slurm on one machine. Without a launcher the world has one rank.

        Args:
            timeout: how long to wait for peers, here and in every call; default 30 minutes.
            heap_bytes: capacity of the process's heap, if this is its first use.
            options: tunables; ``timeout`` wins over theirs.
            device: None or "cpu" for CPU tensors; "cuda" (the current one of this process),
                "cuda:1" or a torch.device for tensors of that GPU.

        Raises:
            ArgumentError: the variables contradict each other.
            RendezvousError: a rank is missing; named.
            UnsupportedError: the ranks run on several nodes, and nothing says where they meet.
            HeapError: no room for the heap.
        """
        options = _options(options, timeout)
        placement = read_environment()
        store = placement.store(options.timeout_s)
        return cls.from_store(
            store,
            placement.rank,
            placement.world_size,
            heap_bytes=heap_bytes,
            options=options,
            device=device,
        )

    # Keywords, most of them optional, as init_process_group() has them: no dataclass.
    @classmethod
    def from_store(  # noqa: PLR0913
        cls,
        store: TorchStore,
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: timedelta | float | None = None,
        heap_bytes: int | None = None,
        options: CommOptions | None = None,
        device: Device = None,
        node_id: str | None = None,
    ) -> Communicator:
        """Builds a communicator of ``world_size`` ranks that share ``store``.

        Args:
            store: a torch store that all ranks reach (TCPStore, FileStore, HashStore, ...).
            rank: this rank, 0 <= rank < world_size.
            world_size: how many ranks take part.
            name: tells communicators on one store apart; equal on all ranks.
            timeout: how long to wait for peers, here and in every call; default 30 minutes.
            heap_bytes: capacity of the process's heap, if this is its first use.
            options: tunables, equal on all ranks; ``timeout`` wins over theirs.
            device: None or "cpu" for CPU tensors; "cuda", "cuda:1" or a torch.device for tensors of
                that GPU.
            node_id: names this rank's node, which is else found by mapping memory; None takes
                RINGCOMM_NODE_ID.

        Raises:
            ArgumentError: a bad rank, world size or name.
            RendezvousError: a rank is missing or failed; named.
            MismatchError: the ranks disagree on world size or options.
            UnsupportedError: no carrier for the tensors of the device between several nodes; or
                devices of one node that cannot reach each other.
            HeapError: no room for the heap or the communicator's region in it.
        """
        check_name(name)
        ranks = integer(world_size, most=2**31 - 1)
        if ranks is None or ranks < 1:
            raise ArgumentError(
                f"world_size: expected an integer from 1 to 2^31 - 1, got {shown(world_size)}"
            )
        checks = CallChecks(f"communicator {name!r}", rank, ranks)
        rank = checks.peer("rank", rank)
        if heap_bytes is not None:
            heap_bytes = checks.integer("heap_bytes", heap_bytes)
        options = _options(options, timeout)
        chosen = named_node() if node_id is None else node_id
        membership = Membership(name, rank, tuple(range(ranks)), store, options, (), chosen)
        return cls._meet_at(membership, device, heap_bytes)

    @classmethod
    def _meet_at(
        cls, membership: Membership, device: Device, heap_bytes: int | None = None
    ) -> Communicator:
        """Builds the communicator on a device as :meth:`from_store` takes it."""
        index = find_device(device, f"communicator {membership.name!r}")
        if index is None:
            return cls._meet(membership, heap_bytes)
        return DeviceCommunicator._meet_on(membership, index, heap_bytes)

    @property
    def device(self) -> torch.device:
        """The device on which the tensors of this communicator's calls lie."""
        return torch.device("cpu")

    @property
    def heap_device(self) -> torch.device:
        """The device that makes :func:`ringcomm.empty` allocate tensors for zero copy."""
        return torch.device("cpu")

    @classmethod
    def _meet(cls, membership: Membership, heap_bytes: int | None = None) -> Communicator:
        """Builds the communicator once the members have met; fills in ``membership.heaps``."""
        met = meet(membership, heap_bytes)
        if isinstance(met, OneNode):
            return cls(met.core, membership.having_met(met.heaps, met.processes))
        return NodesCommunicator._over(membership, met, heap_bytes)

    @property
    def node(self) -> Communicator:
        """The communicator of the ranks of this rank's node; where there is one node, this one."""
        return self

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks that this one meets between nodes, itself included, by node."""
        return (self._rank,)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that the ranks are on."""
        return 1

    def node_of(self, rank: int) -> int:
        """Returns the number of the node that a rank is on."""
        self.checks("node_of").peer("rank", rank)
        return 0

    # For ringcomm's own packages: see NOTE [Internal API].

    @property
    def shard_index(self) -> int:
        """The number of the chunk that this rank owns of what is sharded over all ranks."""
        return self.shard_index_of(self._rank)

    def shard_index_of(self, rank: int) -> int:
        """Returns the number of the chunk that a rank owns of what is sharded over all ranks.

        Raises:
            UnsupportedError: this kind of communicator shards no state.
        """
        return rank

    def calls_of_steps(self, state: str, wire: str | None = None) -> Use:
        """Returns the function that maps the core to the one whose calls an optimizer makes.

        Args:
            state: "world" where state is sharded over all ranks, "node" where each node has a copy.
            wire: of sums of gradients between nodes; None for that of the communicator.
        """
        return itself

    def residual_of_bucket(self, elems: int, state: str) -> Residual | None:
        """Makes what keeps the losses of a bucket's codes; see NOTE [Error feedback].

        Args:
            elems: of the bucket.
            state: as of :meth:`calls_of_steps`.

        Returns:
            None where nothing is coded: on one node, or where the bucket is small.
        """
        return None

    def all_gather_bucket(self, own: Tensor, bucket: Tensor, tag: int) -> None:
        """Gathers a bucket of which each rank owns chunk :attr:`shard_index`, over several nodes.

        Args:
            own: [chunk elements], this rank's chunk.
            bucket: [bucket elements], written.
            tag: number that tells the bucket from others of its size, equal on all ranks.
        """
        raise AssertionError("on one node a bucket's chunks are read where they lie")

    def all_gather_on_rail(self, parts: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """Gathers among the ranks of this one's rail alone, in place.

        Args:
            parts: by node, contiguous; that of this rank's node is sent, the others are written.
            async_op: return a Work at once instead of waiting.
        """
        return None

    def all_gather_in_codes(
        self,
        wide: Tensor,
        parts: Sequence[Tensor],
        wire: str,
        *,
        tag: int = 0,
        on_rail: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        """Gathers numbers that cross between nodes in codes; all ranks have what these decode to.

        Args:
            wide: float32, this rank's numbers.
            parts: by rank, contiguous, of one floating-point dtype; all are written.
            wire: "int8", "fp8" or "int4".
            tag: as of :meth:`all_gather_bucket`.
            on_rail: the ranks of this one's rail alone gather, and ``parts`` are by node.
            async_op: return a Work at once instead of waiting.
        """
        raise AssertionError("on one node nothing is coded")

    def new_group(
        self,
        ranks: Iterable[int],
        *,
        name: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> Communicator | None:
        """Builds a communicator of some of this one's ranks, which become 0, 1, ... in order.

        Only the members need to call it; all members of any group must call in the same order.

        Args:
            ranks: ranks of this communicator, distinct; order does not matter.
            name: tells groups of the same ranks apart; equal on all members.
            timeout: default this communicator's.

        Returns:
            The new communicator, or None on a rank that is not a member.

        Raises:
            ArgumentError: a bad rank or name.
            RingcommError: as :meth:`from_store`.
        """
        checks = self.checks("new_group")
        return self._group(checks, sorted(checks.ranks("ranks", ranks)), name, timeout)

    def _group(
        self,
        checks: CallChecks,
        members: list[int],
        name: str | None,
        timeout: timedelta | float | None,
    ) -> Communicator | None:
        if self._refuse is not None:
            raise self._refuse(checks.op)
        if name is not None:
            check_name(name)
        if self._rank not in members:
            return None
        # The members' ranks are part of the key, so that groups of different ranks that are built
        # at the same time under the same name do not meet each other.
        label = name or "group"
        membership = Membership(
            f"{self.name}/{label}:{'.'.join(map(str, members))}",
            members.index(self._rank),
            tuple(self.ranks[member] for member in members),
            self._membership.store,
            _options(self.options, timeout if timeout is not None else self.timeout),
            (),
            self._membership.node_id,
            self._membership.processes,
            self,
        )
        return self._rebuild(membership)

    def _rebuild(self, membership: Membership) -> Communicator:
        """Builds a communicator of other ranks on this one's device."""
        return Communicator._meet(membership)

    # For ringcomm's own packages: see NOTE [Internal API].

    def group_at(
        self,
        store: TorchStore,
        members: Sequence[int],
        *,
        name: str,
        options: CommOptions,
        device: Device = None,
    ) -> Communicator:
        """Builds a communicator of some of this one's ranks, which meet at another store.

        While they meet, each watches the others as this communicator knows them. It may be unusable
        already.

        Args:
            store: that the members reach.
            members: ranks of this communicator, this one among them, by rank in the new one.
            name: as of :meth:`from_store`.
            options: of the new communicator.
            device: as of :meth:`from_store`.

        Raises:
            RingcommError: as :meth:`from_store`.
        """
        check_name(name)
        known = self._membership
        membership = Membership(
            name,
            members.index(self._rank),
            tuple(self.ranks[member] for member in members),
            store,
            options,
            (),
            known.node_id,
            known.processes,
            None if self.aborted else self,
        )
        return Communicator._meet_at(membership, device)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Divides the ranks: those of one ``color`` get a communicator of their own.

        All ranks must call it.

        Args:
            color: any integer of 64 bits; None: this rank joins no communicator.
            key: an integer of 64 bits, which orders the ranks within their colour; ranks with
                equal keys keep their order.

        Returns:
            The communicator of this rank's colour; None when ``color`` is None.
        """
        checks = self.checks("split")
        color = None if color is None else checks.integer("color", color)
        entry = [color is not None, color or 0, checks.integer("key", key)]
        mine = torch.tensor(entry, dtype=torch.int64, device=self.device)
        everyone = torch.empty(self._world_size, 3, dtype=torch.int64, device=self.device)
        self.all_gather_into_tensor(everyone.view(-1), mine)
        self.finish_host_side()
        if color is None:
            return None
        rows: list[list[int]] = everyone.tolist()
        members = [
            rank
            for _, rank in sorted(
                (row[2], rank) for rank, row in enumerate(rows) if row[:2] == [1, color]
            )
        ]
        return self._group(checks, members, f"split.{color}", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Copies of what has a communicator, such as a module, share it."""
        return self

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # Peers may wait for a call that this rank will not make any more.
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


_TRITON_IS_OF_NODES = (
    "Triton's kernels work within a node, and this communicator has several. Use "
    'kernels="native", or Communicator.node'
)


class NodesCommunicator(Communicator):
    """A :class:`Communicator` whose ranks are on several nodes."""

    _core: CallsOverNodes  # type: ignore[assignment]  # which has the methods of the native one

    def __init__(self, built: Built[Communicator], membership: Membership) -> None:
        super().__init__(built.core, membership)
        self._watch = built.watch
        self._node = built.node
        # The core's threads keep the core: they would outlive a communicator that nobody closes,
        # and its peers would wait for it. At exit all that live are closed anyway.
        self._unclosed = weakref.finalize(self, built.core.forget)
        self._unclosed.atexit = False

    @classmethod
    def _over(
        cls, membership: Membership, found: SeveralNodes, heap_bytes: int | None
    ) -> NodesCommunicator:
        if membership.options.kernels == "triton":  # on all ranks, which have compared it
            raise UnsupportedError(f"{found.meeting.operation}: {_TRITON_IS_OF_NODES}")
        processes = found.meeting.lookout.processes
        membership = replace(membership, processes=processes)
        built = build(membership, found, heap_bytes, Communicator._meet)
        made = cls(built, membership.having_met((), processes))
        awaited = made._watch.awaiting.of
        made._watch.trace = NodeTrace(made._recorder, found.places, awaited, found.world_id)
        return made

    @property
    def node(self) -> Communicator:
        return self._node

    def on_wire(
        self, checks: CallChecks, wire: str | None, run: Callable[[_native.Comm], int]
    ) -> Callable[[_native.Comm], int]:
        run = super().on_wire(checks, wire, run)

        def on_wire(core: Any) -> int:
            with core.on_wire(wire):
                return run(core)

        return run if wire is None else on_wire

    @property
    def places(self) -> Places:
        """Which ranks are of one node, and which rank meets which between nodes."""
        return self._core.places

    @property
    def rail(self) -> tuple[int, ...]:
        return self.places.rail(self.places.place)

    @property
    def num_nodes(self) -> int:
        return len(self.places.nodes)

    def node_of(self, rank: int) -> int:
        self.checks("node_of").peer("rank", rank)
        return self.places.node_of(rank)

    def shard_index_of(self, rank: int) -> int:
        return self.places.shard_index_of(rank)

    def calls_of_steps(self, state: str, wire: str | None = None) -> Use:
        return methodcaller("steps", state == "node", wire)

    def residual_of_bucket(self, elems: int, state: str) -> Residual | None:
        # A bucket is coded by the size of its gradients, which have 32 bits at most.
        if elems * 4 <= wires.CODED_ABOVE_BYTES or not isinstance(self._core, StepsCore):
            return None
        return self._core.residual_of(elems, state == "node")

    def all_gather_bucket(self, own: Tensor, bucket: Tensor, tag: int) -> None:
        arguments = (own.data_ptr(), bucket.data_ptr(), bucket.numel(), bucket.element_size(), tag)

        def run(core: Any) -> int:
            status: int = core.all_gather_bucket(*arguments)
            return status

        self.start_call(Call("all_gather_bucket", run, [bucket]))

    def all_gather_on_rail(self, parts: Sequence[Tensor], async_op: bool = False) -> Work | None:
        ptrs = [part.data_ptr() for part in parts]
        sizes_bytes = [part.nbytes for part in parts]

        def run(core: Any) -> int:
            status: int = core.all_gather_on_rail(ptrs, sizes_bytes, ALGORITHMS["auto"])
            return status

        return self.start_call(Call("all_gather_on_rail", run, list(parts)), async_op)

    def all_gather_in_codes(
        self,
        wide: Tensor,
        parts: Sequence[Tensor],
        wire: str,
        *,
        tag: int = 0,
        on_rail: bool = False,
        async_op: bool = False,
    ) -> Work | None:
        ptrs, elems = [part.data_ptr() for part in parts], [part.numel() for part in parts]
        dtype = DTYPE_CODES[parts[0].dtype]
        call = InCodes(wide.data_ptr(), ptrs, elems, dtype, on_rail, tag)

        def run(core: Any) -> int:
            status: int = core.gather_in_codes(call, wire)
            return status

        return self.start_call(Call("all_gather_in_codes", run, [wide, *parts]), async_op)

    def recording(self) -> Recording:
        """Returns what this node's ranks did last, under their ranks here.

        A call over nodes stands before the calls within the node that it was made of.
        """
        return renumbered(self._within_node(), self.places.mates)

    def _within_node(self) -> Recording:
        return super().recording()

    def __repr__(self) -> str:
        of = f"on node {self.places.node} of {self.num_nodes}"
        return f"{super().__repr__().removesuffix('>')} {of}>"

    def _named(self, rank: int) -> str:
        return self.places.named(rank)

    def set_peer_left(self, place: int, left: bool) -> None:
        if place not in self.places.mates:
            self._watch.set_left(place, left)

    def _why_lost(self, place: int) -> str:
        return self._watch.why_lost(place)

    def _fault(self, name: str) -> RingcommError:
        if self._watch.error is None and self._refuse is not None:
            return self._refuse(name)
        error = self._watch.known()
        head = where(name, self._rank, self._world_size)
        told = error or AbortedError("the communicator was closed")
        trace = self._watch.trace
        left = trace.told() if error is not None and trace is not None else ""
        worded = type(told)(
            f"{head}, node {self.places.node}: {told}{left}. The communicator is unusable now: "
            "close it and build a new one"
        )
        self._disable(refusal(self._rank, self._world_size, worded))
        return worded

    def _make_triton(self, checks: CallChecks) -> NoReturn:
        raise UnsupportedError(f"{checks}: {_TRITON_IS_OF_NODES}")

    def _kernel_place(self, head: str) -> NoReturn:
        raise UnsupportedError(f"{head}: {_TRITON_IS_OF_NODES}")

    def _close(self, grace_s: float, in_vain_s: float) -> None:
        super()._close(grace_s, in_vain_s)
        if self._closed:
            self._unclosed.detach()
        self._node._close(grace_s, in_vain_s)


class DeviceCommunicator(DeviceMessages, Communicator):
    """A :class:`Communicator` whose tensors are on one device of this rank."""

    @property
    def plan(self) -> TopologyPlan:
        """The algorithm and the rings that "auto" and "ring" use, and why."""
        return self._device_core.plan

    @property
    def heap_device(self) -> torch.device:
        return torch.device("cuda", self._device_core.device)

    @classmethod
    def _meet_on(
        cls, membership: Membership, device: int, heap_bytes: int | None = None
    ) -> Communicator:
        made = meet_on_device(membership, device, heap_bytes, cls)
        if made is not None:
            return made
        return DeviceNodesCommunicator._over_devices(membership, device, heap_bytes)

    def _rebuild(self, membership: Membership) -> Communicator:
        return self._meet_on(membership, self._device_core.device)


class DeviceNodesCommunicator(DeviceNodesCalls, NodesCommunicator):
    """A :class:`Communicator` whose tensors are on one device of this rank, over several nodes."""

    _core: DeviceNodesCore

    @classmethod
    def _over_devices(
        cls, membership: Membership, device: int, heap_bytes: int | None
    ) -> DeviceNodesCommunicator:
        """Builds the communicator of ranks that do not name one machine or node.

        Which of them are of one node is found on the host; the devices of each node then prove
        their links, or say why they cannot be reached.
        """
        met = meet(replace(membership, name=f"{membership.name}.nodes"), None)
        if isinstance(met, OneNode):
            met.core.close()
            raise RendezvousError(
                f"{where(membership.name, membership.rank, len(membership.ranks))}: the ranks "
                "named different nodes, and a moment later the same. Give every job a store of "
                "its own"
            )

        def make_node(of_node: Membership) -> Communicator:
            return DeviceCommunicator._meet_on(of_node, device, heap_bytes)

        processes = met.meeting.lookout.processes
        membership = replace(membership, processes=processes)
        built = build(membership, met, None, make_node, on_device=True)
        return cls(built, membership.having_met((), processes))

    def _within_node(self) -> Recording:
        return self._core.calls.recording()

    def _rebuild(self, membership: Membership) -> Communicator:
        return DeviceCommunicator._meet_on(membership, self.device_place[1])


def _options(options: CommOptions | None, timeout: timedelta | float | None) -> CommOptions:
    if options is not None and not isinstance(options, CommOptions):
        raise ArgumentError(f"options: expected a ringcomm.CommOptions, got {options!r:.80}")
    options = options or CommOptions()
    return options if timeout is None else replace(options, timeout=timeout)
