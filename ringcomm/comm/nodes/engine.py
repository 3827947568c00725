# SPDX-License-Identifier: Apache-2.0
"""The engines of communicators over several nodes, and how they are built."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Generic, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.distributed import PrefixStore

from ringcomm import _native
from ringcomm.comm.device.launch import (
    DeviceCallChecks,
    DeviceCallEngine,
    DeviceWork,
    OwnStreams,
)
from ringcomm.comm.host.arguments import CallChecks
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import (
    EXIT_GRACE_S,
    UNDER_WAY,
    Call,
    CallEngine,
    Outputs,
    RankContext,
    Work,
    itself,
    refusal,
    within,
)
from ringcomm.comm.host.options import milliseconds_of
from ringcomm.comm.host.rendezvous import (
    Membership,
    NodeLayout,
    OneNode,
    SeveralNodes,
    hold_rendezvous,
)
from ringcomm.comm.nodes.calls import CallsOverNodes
from ringcomm.comm.nodes.core import NodesCore, rail_schedule
from ringcomm.comm.nodes.device_core import DeviceNodesCore
from ringcomm.comm.nodes.messages import NodesMessages
from ringcomm.comm.nodes.steps import StepsCore
from ringcomm.comm.nodes.transport import (
    Connector,
    DeviceRails,
    Rails,
    Transport,
    device_transport_of,
    transport_of,
)
from ringcomm.comm.nodes.watch import Awaiting, DeviceWatch, NodeTrace, Watch, post_cause
from ringcomm.comm.recorder.reader import FlightRecorder
from ringcomm.comm.recorder.records import NodeLevel, Recording, renumbered
from ringcomm.cuda.runtime import DeviceRuntime, Event, Stream
from ringcomm.errors import AbortedError, RendezvousError, RingcommError, UnsupportedError, where
from ringcomm.json_reader import read_record, shown
from ringcomm.memory import empty
from ringcomm.rendezvous.handles import forming

Tensor = torch.Tensor

TRITON_IS_OF_NODES = (
    "Triton's kernels work within a node, and this communicator has several. Use "
    'kernels="native", or Communicator.node'
)


# Tells the type checker that a core is a CallsOverNodes; at run time it does nothing.
_calls_over_nodes: Callable[[Core], CallsOverNodes] = itself


class NodesEngine(CallEngine):
    """The engine of ranks on several nodes.

    Args:
        core: makes the calls, and owns the state that they need.
        watch: the watch over all ranks.
        node: the engine of this rank's node, for users; closed with this engine.
        membership: the ranks, after their rendezvous.
    """

    owner: CallsOverNodes

    def __init__(
        self,
        core: NodesCore | DeviceNodesCore,
        watch: Watch,
        node: CallEngine,
        membership: Membership,
    ) -> None:
        rank_of = membership.rank, len(membership.ranks)
        recorder = FlightRecorder(core, membership.name, rank_of)
        super().__init__(core, core, core, membership, recorder)
        self.layout = core.layout
        self._node = node
        self._watch = watch
        # The core's threads keep the core alive. Without this finalizer the core of a communicator
        # that was not closed would live on, and peers would wait. At exit all communicators are
        # closed anyway.
        self._unclosed = weakref.finalize(self, core.forget)
        self._unclosed.atexit = False

    def trace_as(self, world_id: int) -> None:
        """Makes faults leave traces; ``world_id`` identifies the communicator on all nodes."""
        awaited = self._watch.awaiting.of
        self._watch.trace = NodeTrace(self._recorder, self.layout, awaited, world_id)

    def with_compression(
        self, checks: CallChecks, compression: str | None, run: Callable[[Core], int]
    ) -> Callable[[Core], int]:
        run = super().with_compression(checks, compression, run)

        def run_compressed(core: Core) -> int:
            # Do not use ``self.owner``: a call that is under way must not keep the engine alive.
            with _calls_over_nodes(core).using_compression(compression):
                return run(core)

        return run if compression is None else run_compressed

    def recording(self) -> Recording:
        """See :meth:`ringcomm.Communicator.recording`.

        A call over nodes is recorded before the calls within the node that it makes.
        """
        return renumbered(self._within_node(), self.layout.node_ranks)

    def _within_node(self) -> Recording:
        return super().recording()

    def set_peer_left(self, peer: int, left: bool) -> None:
        if peer not in self.layout.node_ranks:
            self._watch.set_left(peer, left)

    def _why_lost(self, peer: int) -> str:
        return self._watch.why_lost(peer)

    def fault(self, name: str) -> RingcommError:
        if self._watch.error is None and self.refuse is not None:
            return self.refuse(name)
        error = self._watch.known()
        head = where(name, *self.rank_of)
        told = error or AbortedError("the communicator was closed")
        trace = self._watch.trace
        left = trace.told() if error is not None and trace is not None else ""
        worded = type(told)(
            f"{head}, node {self.layout.node}: {told}{left}. The communicator is unusable now: "
            "close it and build a new one"
        )
        self._disable(refusal(*self.rank_of, worded))
        self._abort_companion(str(worded))
        return worded

    def _make_triton(self, checks: CallChecks) -> NoReturn:
        raise UnsupportedError(f"{checks}: {TRITON_IS_OF_NODES}")

    def _kernel_target(self, head: str) -> NoReturn:
        raise UnsupportedError(f"{head}: {TRITON_IS_OF_NODES}")

    def _close(self, grace_s: float, in_vain_s: float) -> None:
        super()._close(grace_s, in_vain_s)
        if self.closed:
            self._unclosed.detach()
        self._node._close(grace_s, in_vain_s)


class DeviceNodesEngine(NodesEngine):
    """The engine of ranks on devices of several nodes; see :class:`DeviceCallEngine`.

    A call is enqueued after the earlier work and before the later work of the current stream, once
    the hosts of the rail peers have made the same call.
    """

    owner: DeviceNodesCore

    def __init__(
        self,
        core: DeviceNodesCore,
        watch: DeviceWatch,
        node: CallEngine,
        membership: Membership,
    ) -> None:
        super().__init__(core, watch, node, membership)
        self._watched = watch
        self.device_ref: tuple[DeviceRuntime, int] = core.calls.device_ref
        self._last_stream: int | None = None
        self._streams = OwnStreams(self.device_ref)

    @property
    def device(self) -> torch.device:
        runtime, device = self.device_ref
        return runtime.torch_device(device)

    @property
    def heap_device(self) -> torch.device:
        return torch.device("cuda", self.device_ref[1])

    @property
    def launches(self) -> bool:
        return True

    def _new_checks(self, op: str) -> CallChecks:
        return DeviceCallChecks(op, self.rank_of, self.device_ref)

    def rank_context(self) -> RankContext:
        return self._streams.of_thread()

    # ---- calls ----------------------------------------------------------------------------------

    def _start_call(self, call: Call, async_op: bool) -> Work | None:
        self.admit(call.name, call.outputs, call.inputs)
        runtime, device = self.device_ref
        if runtime.is_capturing(device):
            raise UnsupportedError(
                f"{where(call.name, *self.rank_of)}: the current stream is capturing a "
                "graph, but over several nodes the hosts agree on each call before it is enqueued, "
                "which a replay would not do. Make the call outside of the capture, or capture "
                "calls of Communicator.node"
            )
        with self.queue.turn, runtime.on_device(device):
            self.raise_if_unusable(call.name)
            current = runtime.current_stream(device)
            if not async_op:
                self._enqueue_on(current, call)
                return None
            side = self._streams.side
            runtime.wait_event(device, side.handle, runtime.record_event(device, current))
            with runtime.on_stream(side):
                self._enqueue_on(side.handle, call)
            done = runtime.record_event(device, side.handle)
        return self._work(call.name, call.outputs, side, done)

    def _enqueue_on(self, stream: int, call: Call) -> None:
        """Enqueues a call; the caller holds ``queue.turn`` and is on the rank's device."""
        runtime, device = self.device_ref
        last, self._last_stream = self._last_stream, stream
        if last is not None and last != stream:
            runtime.wait_event(device, stream, runtime.record_event(device, last))
        begun = runtime.record_event(device, stream)
        status = 1
        try:
            status = call.run(self.core)
        finally:
            done = runtime.record_event(device, stream)
            self._watched.under_way.add(call, begun, done)
        if status:
            raise self.fault(call.name)
        increment_version(call.written)

    def execute(self, call: Call) -> Outputs:
        self.start_call(call)
        return call.outputs

    def _work(self, name: str, outputs: Outputs, side: Stream, done: Event) -> DeviceWork:
        return DeviceWork(
            name, outputs, (*self.device_ref, side), done, lambda: self._check_work(name)
        )

    def submit(
        self,
        fn: Callable[[], Outputs],
        opname: str,
        timeout: timedelta | float | None = None,
    ) -> Work:
        """Runs ``fn`` now, on this thread; see :meth:`DeviceCallEngine.submit`."""
        self.raise_if_unusable(opname)
        outputs = fn() if timeout is None else within(self.owner, milliseconds_of(timeout), fn)
        runtime, device = self.device_ref
        with runtime.on_device(device):
            side = self._streams.side_behind_current()
            done = runtime.record_event(device, side.handle)
        return self._work(opname, outputs, side, done)

    def finish_host_side(self) -> None:
        """Blocks until the host may read the results of earlier calls."""
        runtime, device = self.device_ref
        runtime.synchronize(device)
        self.raise_if_unusable("synchronize")

    # ---- faults, and the end --------------------------------------------------------------------

    def _check_work(self, name: str) -> None:
        """Raises if the call of a Work may have failed; an orderly close is not a failure."""
        if not self.closed:
            self.raise_if_unusable(name)
        elif self._watched.error is not None:
            raise self.fault(name)

    def fault(self, name: str) -> RingcommError:
        self._watched.see_device()
        return super().fault(name)

    def _close(self, grace_s: float, in_vain_s: float) -> None:
        if not self.closed and not self.owner.ends(grace_s):
            self.abort(UNDER_WAY)
            self.owner.ends(EXIT_GRACE_S)
        super()._close(grace_s, in_vain_s)

    def close(self) -> None:
        """Waits for the enqueued calls, then frees the communicator's memory.

        Raises:
            RingcommError: a call failed, and no earlier error has reported it. The memory is freed
                nevertheless.
        """
        unreported: RingcommError | None = None
        if not self.closed and self.refuse is None:
            self.owner.ends(self.timeout.total_seconds() + EXIT_GRACE_S)
            if self._watched.see_device() is not None:
                unreported = self.fault("close")
        super().close()
        if unreported is not None:
            raise unreported

    def _within_node(self) -> Recording:
        return self.owner.calls.recording()


class NoMessages:
    """Refuses all messages of ranks on devices of several nodes.

    A transport that moves device memory runs all its operations in one order, so a message would
    wait for collectives.
    """

    def __init__(self, engine: CallEngine) -> None:
        self._engine = engine

    def _refuse(self, op: str) -> NoReturn:
        raise UnsupportedError(
            f"{where(op, *self._engine.rank_of)}: expected a communicator on the host, or of one "
            "node (Communicator.node), got one on devices over several nodes. It has no messages: "
            "use a collective, or send copies on the CPU"
        )

    def send(self, *_: object) -> NoReturn:
        self._refuse("send")

    def recv(self, *_: object) -> NoReturn:
        self._refuse("recv")

    def isend(self, *_: object) -> NoReturn:
        self._refuse("isend")

    def irecv(self, *_: object) -> NoReturn:
        self._refuse("irecv")

    def check_message(self, op: str, *_: object, write: bool) -> NoReturn:
        """Raises for a message of a batch."""
        self._refuse(op)


# ---- Building the engines -----------------------------------------------------------------------


class _Closable(Protocol):
    def close(self) -> None: ...


class _HasEngine(Protocol):
    """A communicator; only its engine is used here."""

    @property
    def engine(self) -> CallEngine: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=_HasEngine)


@dataclass(frozen=True)
class Built(Generic[C]):
    """One rank's newly built communicator over several nodes.

    Attributes:
        engine: the engine of the communicator.
        node: the communicator of this rank's node, for users.
    """

    engine: NodesEngine
    node: C


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
        membership: all ranks.
        found: the nodes of the ranks.
        heap_bytes: as for :func:`ringcomm.comm.host.rendezvous.hold_rendezvous`, on the host.
        make_node: builds a node's communicator for users.
        on_device: True if the ranks are on devices.

    Raises:
        RingcommError: a rank failed or cannot be reached; waiting peers have been informed.
    """
    closing: list[_Closable] = []
    try:
        built = _built_on_device if on_device else _built
        with forming(found.spec.operation):
            return built(membership, found, heap_bytes, make_node, closing)
    except BaseException as error:
        if found.rendezvous.fail(error):
            _post_cause(membership, found, error)
        for each in reversed(closing):
            each.close()
        raise


def _post_cause(membership: Membership, found: SeveralNodes, error: BaseException) -> None:
    """Posts the error for ranks that have already built the communicator; their watches read it."""
    operation = found.spec.operation
    if not isinstance(error, RingcommError):
        told = f"{type(error).__name__}: {error}"
        error = RendezvousError(f"{operation}: expected to build the communicator, got {told}")
    with suppress(RuntimeError):  # the store may be gone by now; ``error`` matters more
        post_cause(_faults(membership, found), error)


def _faults(membership: Membership, found: SeveralNodes) -> PrefixStore:
    """Returns the store of this communicator's faults."""
    return PrefixStore("faults", PrefixStore(found.rendezvous.prefix, membership.store))


def _built(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
    closing: list[_Closable],
) -> Built[C]:
    layout, options, operation = found.layout, membership.options, found.spec.operation
    of_node = _of_node(membership, layout)
    node = make_node(of_node)
    closing.append(node)
    level = NodeLevel(membership.name, layout.node, layout.node_ranks)
    met = _inner(replace(of_node, name=str(level)), heap_bytes, operation)
    inner = met.core
    closing.append(inner)
    store = PrefixStore(found.rendezvous.prefix, membership.store)
    connector = _connector(membership, found, options.transport)
    rails = Rails(layout, PrefixStore("rails", store), connector)
    world = range(len(membership.ranks))
    group = connector.group(PrefixStore("messages", store), layout.rank, world)
    # The last wait for other ranks: after it, a rank may leave, since no rank connects to it.
    awaiting = _awaiting(found, met)
    faults = _faults(membership, found)
    watch = Watch(inner, layout, awaiting, faults, rails, membership.name)
    closing.append(watch)
    messages = NodesMessages(inner, layout, group, watch)
    watch.breakable.append(messages)
    # Quantized sums may be added only at their destination, not on nodes in between.
    rails_asked = "one_shot" if options.compression in _native.QUANT_FORMATS else options.rails
    schedule = rail_schedule(rails_asked, len(layout.nodes))
    core = StepsCore(inner, layout, rails, watch, messages, options.compression, schedule)
    engine = NodesEngine(core, watch, node.engine, _having_met(membership, found))
    engine.trace_as(found.world_id)
    return Built(engine, node)


def _having_met(membership: Membership, found: SeveralNodes) -> Membership:
    return membership.after_rendezvous((), found.spec.lookout.processes)


def _built_on_device(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
    closing: list[_Closable],
) -> Built[C]:
    """Builds the engine on devices: communicators within the node, and both transports.

    One transport moves tensors between devices of different nodes. The hosts agree on the calls by
    the other transport, and by a communicator on the CPUs of the node.
    """
    layout, options, operation = found.layout, membership.options, found.spec.operation
    if options.rails not in ("auto", "one_shot"):
        raise UnsupportedError(
            f"{operation}: rails: expected auto or one_shot on devices, got {options.rails}. Their "
            "transport exchanges between all nodes at once"
        )
    transport = device_transport_of(options.transport, operation)
    of_node = _of_node(membership, layout)
    node = make_node(of_node)
    closing.append(node)
    made = make_node(replace(of_node, name=f"{of_node.name}.calls"))
    closing.append(made)
    calls = made.engine
    assert isinstance(calls, DeviceCallEngine)
    met = _inner(replace(of_node, name=f"{of_node.name}.hosts"), heap_bytes, operation)
    closing.append(met.core)
    store = PrefixStore(found.rendezvous.prefix, membership.store)
    rails = Rails(layout, PrefixStore("rails", store), _connector(membership, found, "gloo"))
    own = PrefixStore("transport", store)
    device_rails = DeviceRails(layout, own, transport, calls.device_ref, operation)
    closing.append(device_rails)
    awaiting = _awaiting(found, met)
    device_rails.prove(options.timeout_s)
    faults = _faults(membership, found)
    watch = DeviceWatch(met.core, layout, awaiting, faults, rails, membership.name, calls)
    closing.append(watch)
    watch.breakable.append(device_rails)
    core = DeviceNodesCore(met.core, layout, rails, watch, options.compression, calls, device_rails)
    return Built(DeviceNodesEngine(core, watch, node.engine, _having_met(membership, found)), node)


def _connector(membership: Membership, found: SeveralNodes, asked: str | Transport) -> Connector:
    operation = found.spec.operation
    return Connector(
        found.layout,
        transport_of(asked, operation),
        membership.options.timeout_s,
        operation,
        found.rendezvous,
        membership.store,
    )


def _of_node(membership: Membership, layout: NodeLayout) -> Membership:
    """Returns the ranks of this rank's node as a membership of their own."""
    return replace(
        membership,
        name=f"{membership.name}/node{layout.node}",
        rank=layout.local_rank,
        ranks=tuple(membership.ranks[rank] for rank in layout.node_ranks),
    )


def _inner(of_node: Membership, heap_bytes: int | None, operation: str) -> OneNode:
    """Builds the core for the parts of calls within the node; users never see it."""
    met = hold_rendezvous(of_node, heap_bytes)
    if not isinstance(met, OneNode):
        raise RendezvousError(
            f"{operation}: the ranks of a node could map each other's memory, and a moment later "
            "could not. See whether a process has changed its user or its dumpable flag"
        )
    return met


def _awaiting(found: SeveralNodes, met: OneNode) -> Awaiting:
    """Waits until all ranks have connected their rails; maps the words of this node's ranks."""
    word = empty(1, dtype=torch.int32).fill_(-1)
    layout, operation = found.layout, found.spec.operation
    offset_bytes = word.data_ptr() - met.heaps[layout.local_rank].base_ptr
    offsets = []
    for rank, text in enumerate(found.rendezvous.everyone("rails", {"word": offset_bytes})):
        theirs = read_record(text, rank, operation).get("word")
        if type(theirs) is not int or theirs < 0 or theirs % word.itemsize:
            raise RendezvousError(
                f"{operation}: expected the offset of a word of rank {rank}, got {shown(theirs)}"
            )
        offsets.append(theirs)
    ptrs = []
    for local_rank, rank in enumerate(layout.node_ranks):
        heap = met.heaps[local_rank]
        if offsets[rank] + word.itemsize > heap.mapping.capacity_bytes:
            raise RendezvousError(
                f"{operation}: expected the offset of a word in the heap of rank {rank}, which has "
                f"{heap.mapping.capacity_bytes} bytes, got {offsets[rank]}"
            )
        ptrs.append(heap.base_ptr + offsets[rank])
    return Awaiting(ptrs, (word, met.heaps))
