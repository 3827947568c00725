"""How the ranks of several nodes build what connects them, once they know their nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch.distributed import PrefixStore

from ringcomm import _native
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.meeting import Membership, OneNode, Places, SeveralNodes, chosen, meet
from ringcomm.comm.nodes.calls import CallsOverNodes
from ringcomm.comm.nodes.carrier import (
    Carrier,
    Connector,
    DeviceRails,
    Rails,
    carrier_of,
    device_carrier_of,
)
from ringcomm.comm.nodes.device_core import DeviceNodesCore
from ringcomm.comm.nodes.messages import NodesMessages
from ringcomm.comm.nodes.steps import StepsCore
from ringcomm.comm.nodes.watch import Awaiting, DeviceWatch, Watch, claim
from ringcomm.comm.recorder.records import NodeLevel
from ringcomm.errors import RendezvousError, RingcommError, UnsupportedError
from ringcomm.json_reader import read_record, shown
from ringcomm.memory import empty
from ringcomm.rendezvous.handles import forming


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
