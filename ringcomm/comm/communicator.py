# SPDX-License-Identifier: Apache-2.0
"""The communicator, with the ways to build and divide it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import Store as TorchStore

from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.device.messages import DeviceMessages
from ringcomm.comm.device.rendezvous import rendezvous_on_device
from ringcomm.comm.device.topology import TopologyChoice
from ringcomm.comm.host.arguments import CallChecks
from ringcomm.comm.host.collectives import Collectives
from ringcomm.comm.host.engine import CallEngine, HostEngine, live
from ringcomm.comm.host.messages import HostMessages, MessageCalls, Messages
from ringcomm.comm.host.options import CommOptions
from ringcomm.comm.host.rendezvous import Membership, NodeLayout, OneNode, hold_rendezvous
from ringcomm.comm.nodes.engine import TRITON_IS_OF_NODES, NoMessages, build
from ringcomm.comm.nodes.steps import StepCalls
from ringcomm.comm.recorder.records import Recording
from ringcomm.cuda import find_device
from ringcomm.errors import ArgumentError, RendezvousError, UnsupportedError, where
from ringcomm.integers import integer
from ringcomm.json_reader import shown
from ringcomm.rendezvous.handles import check_name, named_node
from ringcomm.rendezvous.launchers import read_environment

Tensor = torch.Tensor


Device = torch.device | str | int | None

# A host communicator that serves a device communicator sends only small messages.
_HOST_SEGMENT_BYTES = 4096


class Communicator(Collectives, Messages):
    """A connection of ``world_size`` ranks; this process or thread is one of them.

    Ranks in all methods are ranks of this communicator. All ranks must call the same collectives
    in the same order. Sends and receives are not part of that order. As a context manager, a
    communicator closes itself.

    Attributes:
        engine: runs the calls; see NOTE [Internal API] in ``host/engine.py``.
        node_layout: which ranks are of one node, and which ranks exchange between nodes.
        steps: the calls of sharded training, for optimizers.
    """

    def __init__(
        self,
        engine: CallEngine,
        messages: MessageCalls,
        node_layout: NodeLayout,
        node: Communicator | None = None,
    ) -> None:
        self.engine = engine
        self.messages = messages
        self.node_layout = node_layout
        self.steps = StepCalls(engine, node_layout)
        self._node = node
        self._on_host: Communicator | None = None
        self._rank, self._world_size = engine.rank_of
        _communicators.add(self)

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

        The launcher is torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), or
        MPICH, Open MPI or Slurm on one machine. Without a launcher the world has one rank.

        Args:
            timeout: how long to wait for peers, here and in every call; default 30 minutes.
            heap_bytes: capacity of the process's heap; used if the process has no heap yet.
            options: tunables; ``timeout`` overrides ``options.timeout``.
            device: None or "cpu" for CPU tensors; "cuda" (this process's current GPU),
                "cuda:1" or a torch.device for tensors of that GPU.

        Raises:
            ArgumentError: the variables contradict each other.
            RendezvousError: a rank is missing; the error names it.
            UnsupportedError: the ranks run on several nodes, and no variable names the address of
                their rendezvous.
            HeapError: no space for the heap.
        """
        options = _options(options, timeout)
        launched = read_environment()
        store = launched.store(options.timeout_s)
        return cls.from_store(
            store,
            launched.rank,
            launched.world_size,
            heap_bytes=heap_bytes,
            options=options,
            device=device,
        )

    # The arguments are not a dataclass: most are optional and named as in init_process_group().
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
            name: distinguishes communicators on one store; equal on all ranks.
            timeout: how long to wait for peers, here and in every call; default 30 minutes.
            heap_bytes: capacity of the process's heap; used if the process has no heap yet.
            options: tunables, equal on all ranks; ``timeout`` overrides ``options.timeout``.
            device: None or "cpu" for CPU tensors; "cuda", "cuda:1" or a torch.device for tensors of
                that GPU.
            node_id: names this rank's node; None: RINGCOMM_NODE_ID. Without a name the ranks find
                out by mapping each other's memory.

        Raises:
            ArgumentError: a bad rank, world size or name.
            RendezvousError: a rank is missing or failed; the error names it.
            MismatchError: the ranks disagree on world size or options.
            UnsupportedError: no transport between nodes for tensors of the device; or devices of
                one node cannot reach each other.
            HeapError: no space for the heap or the communicator's region in it.
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
        return _build(membership, device, heap_bytes)

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks that this communicator connects."""
        return self._world_size

    @property
    def name(self) -> str:
        """The communicator's name, shown in errors and used at rendezvous."""
        return self.engine.membership.name

    @property
    def options(self) -> CommOptions:
        """The options that the communicator was built with."""
        return self.engine.membership.options

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the outermost communicator, by rank in this communicator."""
        return self.engine.membership.ranks

    @property
    def timeout(self) -> timedelta:
        """The time that a call waits for its peers; can be set."""
        return self.engine.timeout

    @timeout.setter
    def timeout(self, timeout: timedelta | float) -> None:
        self.engine.timeout = timeout

    @property
    def launches(self) -> bool:
        """True if calls are launched on a device instead of run by a thread of this process."""
        return self.engine.launches

    @property
    def aborted(self) -> bool:
        """True once a fault, :meth:`abort` or :meth:`close` made the communicator unusable here.

        A fault, abort or close on a peer makes this rank's next call raise.
        """
        return self.engine.aborted

    @property
    def device(self) -> torch.device:
        """The device that must hold the tensors of this communicator's calls."""
        return self.engine.device

    @property
    def heap_device(self) -> torch.device:
        """The device that makes :func:`ringcomm.empty` allocate tensors for zero copy."""
        return self.engine.heap_device

    @property
    def topology_choice(self) -> TopologyChoice:
        """The algorithm and the rings that "auto" and "ring" use on devices of a node, and why.

        Raises:
            UnsupportedError: a communicator on the host, or over several nodes.
        """
        if not isinstance(self.engine, DeviceCallEngine):
            raise UnsupportedError(
                f"{where('topology_choice', self._rank, self._world_size)}: expected a "
                "communicator on devices of one node; for others no topology selects an algorithm"
            )
        return self.engine.device_core.choice

    def recording(self) -> Recording:
        """Returns the last calls of all ranks, and who waits for whom, from the flight recorders.

        This is local and works at any time before :meth:`close`, also while calls are under way
        and after a fault. The recording is empty with ``CommOptions(records=0)``. On devices it
        only contains events that the hosts have noticed.

        Raises:
            AbortedError: the communicator is closed.
            ForkError: the communicator belongs to the parent of this forked process.
        """
        return self.engine.recording()

    def abort(self, reason: str = "") -> None:
        """Makes the communicator unusable on all its ranks and wakes all threads waiting in it.

        Any thread may call this. It does not block, and a second call changes nothing.
        """
        self.engine.abort(reason)

    def close(self) -> None:
        """Ends the calls under way, then frees the communicator's memory; may be called repeatedly.

        Synchronous and asynchronous calls that move data are finished first. A call of any thread
        that waits for a peer that does not come ends with AbortedError at once, and so do its
        peers' calls. Peers need not close at the same time.

        Raises:
            RingcommError: on a device: a call failed, and no earlier error has reported it. The
                memory is freed nevertheless.
        """
        self.engine.close()

    def __repr__(self) -> str:
        state = " (unusable)" if self.engine.refuse is not None else ""
        on = f" on node {self.node_layout.node} of {self.num_nodes}" if self.num_nodes > 1 else ""
        of = f"rank {self._rank} of {self._world_size}{state}{on}"
        return f"<ringcomm.Communicator {self.name} {of}>"

    @property
    def node(self) -> Communicator:
        """The communicator of this rank's node; with a single node, this communicator."""
        return self._node or self

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks of this rank's exchanges between nodes, by node, including this rank."""
        return self.node_layout.rail(self.node_layout.local_rank)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that the ranks are on."""
        return len(self.node_layout.nodes)

    def node_of(self, rank: int) -> int:
        """Returns the number of the node that a rank is on."""
        return self.node_layout.node_of(self.engine.checks("node_of").peer("rank", rank))

    def new_group(
        self,
        ranks: Iterable[int],
        *,
        name: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> Communicator | None:
        """Builds a communicator of some of these ranks, which are renumbered 0, 1, ... in order.

        Only members need to call this method, but all members of a group in the same order.

        Args:
            ranks: ranks of this communicator, distinct; order does not matter.
            name: distinguishes groups of the same ranks; equal on all members.
            timeout: default: this communicator's timeout.

        Returns:
            The new communicator, or None on a rank that is not a member.

        Raises:
            ArgumentError: a bad rank or name.
            RingcommError: as :meth:`from_store`.
        """
        checks = self.engine.checks("new_group")
        return self._group(checks, sorted(checks.ranks("ranks", ranks)), name, timeout)

    def _group(
        self,
        checks: CallChecks,
        members: list[int],
        name: str | None,
        timeout: timedelta | float | None,
    ) -> Communicator | None:
        if self.engine.refuse is not None:
            raise self.engine.refuse(checks.op)
        if name is not None:
            check_name(name)
        if self._rank not in members:
            return None
        # The members' ranks are part of the key, so that groups of different ranks that are built
        # at the same time under the same name have different rendezvous.
        label = name or "group"
        membership = Membership(
            f"{self.name}/{label}:{'.'.join(map(str, members))}",
            members.index(self._rank),
            tuple(self.ranks[member] for member in members),
            self.engine.membership.store,
            _options(self.options, timeout if timeout is not None else self.timeout),
            (),
            self.engine.membership.node_id,
            self.engine.membership.processes,
            self.engine,
        )
        return _build(membership, self.heap_device)

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
        """Builds a communicator of some of this communicator's ranks, over another store.

        During the rendezvous the members watch each other through this communicator, which may
        already be unusable.

        Args:
            store: a store that all members reach.
            members: ranks of this communicator, including this rank, by new rank.
            name: as in :meth:`from_store`.
            options: the options of the new communicator.
            device: as in :meth:`from_store`.

        Raises:
            RingcommError: as :meth:`from_store`.
        """
        check_name(name)
        known = self.engine.membership
        membership = Membership(
            name,
            members.index(self._rank),
            tuple(self.ranks[member] for member in members),
            store,
            options,
            (),
            known.node_id,
            known.processes,
            None if self.aborted else self.engine,
        )
        return _build(membership, device)

    def on_host(self) -> Communicator:
        """Returns the communicator of the same ranks for CPU tensors; the first call is collective.

        A device communicator builds it at the first call, with its current timeout. The two end
        together: an abort or a fault of either ends the calls of both.

        Raises:
            RingcommError: as :meth:`from_store`.
        """
        if not self.launches:
            return self
        if self._on_host is None:
            options = CommOptions(
                timeout=self.timeout,
                segment_bytes=_HOST_SEGMENT_BYTES,
                records=self.options.records,
            )
            store, name = self.engine.membership.store, f"{self.name}/host"
            made = self.group_at(store, range(self._world_size), name=name, options=options)
            self.engine.set_companion(made.engine)
            self._on_host = made
        return self._on_host

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Divides the ranks: the ranks of each ``color`` get a communicator of their own.

        All ranks must call this method.

        Args:
            color: any integer of 64 bits; None: this rank joins no communicator.
            key: an integer of 64 bits, which orders the ranks within their color; ranks with
                equal keys keep their order.

        Returns:
            The communicator of this rank's color; None when ``color`` is None.
        """
        checks = self.engine.checks("split")
        color = None if color is None else checks.integer("color", color)
        entry = [color is not None, color or 0, checks.integer("key", key)]
        mine = torch.tensor(entry, dtype=torch.int64, device=self.device)
        everyone = torch.empty(self._world_size, 3, dtype=torch.int64, device=self.device)
        self.all_gather_into_tensor(everyone.view(-1), mine)
        self.engine.finish_host_side()
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
        """Returns this communicator, so that a copy of a module shares it with the original."""
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
            # Peers may wait for a call that this rank will never make.
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


# The communicators of this process; in a forked child also those of its parent.
_communicators: WeakSet[Communicator] = WeakSet()


def live_at(identity: int) -> Communicator | None:
    """Returns the communicator of this process whose ``id()`` is ``identity``, or None."""
    while True:
        try:
            found = (each for each in _communicators if id(each) == identity)
            communicator = next(found, None)
        except RuntimeError:  # another thread has built a communicator during the loop
            continue
        return communicator if communicator is not None and communicator.engine in live else None


def _build(membership: Membership, device: Device, heap_bytes: int | None = None) -> Communicator:
    """Builds a communicator; ``device`` is as in :meth:`Communicator.from_store`."""
    index = find_device(device, f"communicator {membership.name!r}")
    if index is None:
        return _build_on_host(membership, heap_bytes)
    return _build_on_device(membership, index, heap_bytes)


def _build_on_host(membership: Membership, heap_bytes: int | None = None) -> Communicator:
    met = hold_rendezvous(membership, heap_bytes)
    if isinstance(met, OneNode):
        engine = HostEngine(met.core, membership.after_rendezvous(met.heaps, met.processes))
        return Communicator(engine, HostMessages(engine, met.core), _one_node(membership))
    if membership.options.kernels == "triton":  # all ranks raise: they have compared their options
        raise UnsupportedError(f"{met.spec.operation}: {TRITON_IS_OF_NODES}")
    membership = replace(membership, processes=met.spec.lookout.processes)
    built = build(membership, met, heap_bytes, _build_on_host)
    messages = HostMessages(built.engine, built.engine.owner, met.layout.named)
    return Communicator(built.engine, messages, met.layout, built.node)


def _one_node(membership: Membership) -> NodeLayout:
    return NodeLayout((tuple(range(len(membership.ranks))),), membership.rank)


def _build_on_device(
    membership: Membership, device: int, heap_bytes: int | None = None
) -> Communicator:
    engine = rendezvous_on_device(membership, device, heap_bytes, DeviceCallEngine)
    if engine is not None:
        return Communicator(engine, DeviceMessages(engine), _one_node(membership))
    # The ranks did not name one common machine or node. The host finds out which ranks share a
    # node; the devices of each node then check their links, or raise with the reason.
    met = hold_rendezvous(replace(membership, name=f"{membership.name}.nodes"), None)
    if isinstance(met, OneNode):
        met.core.close()
        raise RendezvousError(
            f"{where(membership.name, membership.rank, len(membership.ranks))}: the ranks "
            "named different nodes, and a moment later the same node. Give every job a "
            "store of its own"
        )

    def make_node(of_node: Membership) -> Communicator:
        return _build_on_device(of_node, device, heap_bytes)

    membership = replace(membership, processes=met.spec.lookout.processes)
    built = build(membership, met, None, make_node, on_device=True)
    return Communicator(built.engine, NoMessages(built.engine), met.layout, built.node)


def _options(options: CommOptions | None, timeout: timedelta | float | None) -> CommOptions:
    if options is not None and not isinstance(options, CommOptions):
        raise ArgumentError(f"options: expected a ringcomm.CommOptions, got {options!r:.80}")
    options = options or CommOptions()
    return options if timeout is None else replace(options, timeout=timeout)
