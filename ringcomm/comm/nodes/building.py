"""How the ranks of several nodes build what connects them, once they know their nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from torch.distributed import PrefixStore

from ringcomm import _native
from ringcomm.comm.meeting import Membership, OneNode, SeveralNodes, meet
from ringcomm.comm.nodes.messages import NodesMessages
from ringcomm.comm.nodes.rails import Rails, carrier_of
from ringcomm.comm.nodes.steps import StepsCore
from ringcomm.comm.nodes.watch import Watch
from ringcomm.errors import RendezvousError
from ringcomm.json_reader import read_record, shown


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

    core: StepsCore
    node: C
    watch: Watch


def build(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
) -> Built[C]:
    """Builds the node's communicators and the rails.

    Args:
        membership: of all ranks.
        found: their nodes.
        heap_bytes: as for :func:`ringcomm.comm.meeting.meet`.
        make_node: builds a node's communicator for users.

    Raises:
        RingcommError: a rank failed or cannot be reached; waiting peers have been told.
    """
    closing: list[_Closable] = []
    try:
        built = _built(membership, found, heap_bytes, make_node, closing)
        _confirm(found, built[1])
    except BaseException as error:
        found.rendezvous.fail(error)
        for each in reversed(closing):
            each.close()
        raise
    return built[0]


def _built(
    membership: Membership,
    found: SeveralNodes,
    heap_bytes: int | None,
    make_node: Callable[[Membership], C],
    closing: list[_Closable],
) -> tuple[Built[C], Rails]:
    places, options, operation = found.places, membership.options, found.meeting.operation
    of_node = replace(
        membership,
        name=f"{membership.name}/node{places.node}",
        rank=places.place,
        ranks=tuple(membership.ranks[rank] for rank in places.mates),
    )
    node = make_node(of_node)
    closing.append(node)
    inner = _inner(replace(of_node, name=f"{of_node.name}.calls"), heap_bytes, operation)
    closing.append(inner)
    store = PrefixStore(found.rendezvous.prefix, membership.store)
    carrier = carrier_of(options.carrier, operation)
    rails = Rails(places, PrefixStore("rails", store), carrier, options.timeout_s, operation)
    watch = Watch(inner, places, PrefixStore("faults", store), rails, membership.name)
    closing.append(watch)
    messages = NodesMessages(inner, places, PrefixStore("messages", store), watch, carrier)
    watch.breakable.append(messages)
    core = StepsCore(inner, places, rails, watch, messages, options.wire)
    return Built(core, node, watch), rails


def _inner(of_node: Membership, heap_bytes: int | None, operation: str) -> _native.Comm:
    """Builds the core that calls over nodes use within the node, and users do not."""
    met = meet(of_node, heap_bytes)
    if not isinstance(met, OneNode):
        raise RendezvousError(
            f"{operation}: the ranks of a node could map each other's memory, and a moment later "
            "could not. See whether a process has changed its user or its dumpable flag"
        )
    return met.core


def _confirm(found: SeveralNodes, rails: Rails) -> None:
    """Waits until the rails of all ranks stand, and tells them which connections are theirs."""
    operation = found.meeting.operation
    ends: list[list[list[str]]] = []
    begin = time.monotonic()
    for rank, text in enumerate(found.rendezvous.everyone("rails", {"ends": rails.ends()})):
        theirs = read_record(text, rank, operation).get("ends")
        if not isinstance(theirs, list) or not all(
            isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in theirs
        ):
            raise RendezvousError(
                f"{operation}: expected pairs of addresses from rank {rank} after "
                f"{time.monotonic() - begin:.1f} s, got {shown(theirs)}"
            )
        ends.append(theirs)
    rails.confirm(ends)
