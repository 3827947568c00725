# SPDX-License-Identifier: Apache-2.0
"""The watch over a communicator of several nodes: finds out which rank failed, informs all others.

Ranks notice a failed rank in different ways: the ranks of its node by the node's abort words, its
rail peers by a broken connection, and all other ranks not at all. A rank that gives up breaks its
own rails, so a fault spreads through all connections while only one rank knows its cause. So the
first rank that knows a cause *posts* it in the store, which keeps only the first cause; a rank that
notices a fault later takes the posted cause. Each rank that has a cause aborts its node's
communicator, through which the other ranks of the node read the cause, and breaks its own rails.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch.distributed import Store

from ringcomm import _native, errors
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.host.engine import Call
from ringcomm.comm.host.rendezvous import ENDED, LEFT, NodeLayout, why_lost
from ringcomm.comm.nodes.transport import ARRIVAL_S, Probe, join, told_by
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.reader import (
    LIMIT_S,
    FlightRecorder,
    OfNode,
    Writing,
    last_over_nodes,
    told_over_nodes,
)
from ringcomm.comm.recorder.records import Recording, at, renumbered
from ringcomm.cuda.runtime import Event
from ringcomm.errors import (
    AbortedError,
    PeerLost,
    RingcommError,
    from_fault,
    look_at,
    printable,
    start_thread,
    timed_out,
)
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import store_address

# ---- The trace file that the ranks of one node leave at a fault of a communicator over nodes ----
# Only the ranks of a node can read each other's records, so every node writes a file of its own.
# ``ringcomm trace`` reads the files of all nodes together.

# NOTE [A trace over nodes]
#
# The watch of a rank leaves the trace when it notices the fault. The call that raises does not
# leave it, because a rank for which the others wait may make no more calls. The watch copies the
# records before it aborts its node, so that they show the calls under way and the ranks that they
# wait for, and writes the file after it has informed all ranks.


class NodeTrace:
    """The trace of one fault; on each node, the first rank that notices the fault writes it.

    Args:
        recorder: reads the records of this node's ranks, by local rank.
        layout: the nodes of all ranks.
        awaited: returns the rank for which a local rank waits on a rail; -1: none.
        world_id: identifies the communicator on all nodes.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        layout: NodeLayout,
        awaited: Callable[[int], int],
        world_id: int,
    ) -> None:
        self._recorder = recorder
        self._layout = layout
        self._awaited = awaited
        self._of_node = OfNode(world_id, layout.node, layout.nodes)
        self._copies: list[bytes] = []
        self._waits: list[int] = []
        self._trouble = ""
        self._writing: Writing | None = None
        self._begun = threading.Event()

    def copy(self) -> None:
        """Copies the current records of this node's ranks; raises nothing."""
        if reader.is_off():
            return
        try:
            self._waits = [
                self._awaited(local_rank) for local_rank in range(len(self._layout.node_ranks))
            ]
            self._copies = self._recorder.copies()
        except Exception as trouble:
            self._trouble = f". No trace was written: {trouble}"

    def write(self, error: RingcommError) -> None:
        """Starts to write the copied records and the error; does not wait, and raises nothing."""
        if self._copies:
            self._writing = Writing(partial(self._leave, str(error)))
        self._begun.set()

    def told(self) -> str:
        """Returns a sentence about the trace for an error; waits for the file, but not for long."""
        if not self._begun.wait(LIMIT_S):
            return ""
        return self._trouble if self._writing is None else self._writing.told()

    def _leave(self, error: str) -> str:
        recording = renumbered(self._recorder.read(self._copies), self._layout.node_ranks)
        ranks = []
        for each in recording.ranks:
            beyond = self._waits[self._layout.local_rank_of(each.rank)]
            ranks.append(replace(each, waits_for=beyond) if beyond >= 0 else each)
        recording = replace(recording, ranks=tuple(ranks))
        return reader.leave(recording, self._layout.rank, error, self._of_node)


LOOK_S = 0.05
# Seconds between two queries of the store. Only the first rank of each node makes them.
ASK_STORE_S = 0.15
# Seconds to wait for the cause of a broken connection: another rank may be about to post it.
CAUSE_S = 0.25
# A wait on a rail ends this many seconds after its timeout: the failed rank's node ends before.
GRACE_S = 0.5
STORE_S = 0.5
LONGEST_CAUSE = 240
_SILENT = "The store"

T = TypeVar("T")


RANK = re.compile(r"\b([Rr])ank (\d{1,9})\b(?! \(node)")


class Awaiting:
    """A word in each local rank's heap: the rank that the local rank awaits on a rail, or -1.

    A rank that waits too long for a local peer reads in the peer's word which rank the peer awaits.

    Args:
        ptrs: by local rank, the address at which this process has mapped the word.
        keep: the objects that keep the addresses valid.
    """

    def __init__(self, ptrs: Sequence[int], keep: object) -> None:
        self._words = [ctypes.c_int32.from_address(ptr) for ptr in ptrs]
        self._keep = keep

    def of(self, local_rank: int) -> int:
        """Returns the rank that this node's rank ``local_rank`` awaits on a rail, or -1."""
        return self._words[local_rank].value

    def note(self, local_rank: int, rank: int) -> None:
        """Sets the word of this rank (local rank ``local_rank``) to ``rank``."""
        self._words[local_rank].value = rank


@dataclass(frozen=True)
class RailWait:
    """A wait for a rank of another node.

    Attributes:
        peer: the rank.
        limit: the deadline of the wait.
        called: returns a description of the call.
    """

    peer: int
    limit: Deadline
    called: Callable[[], str]

    def ended(self, watch: Watch, text: str) -> None:
        """Reports to the watch that this wait failed; ``text`` is the transport's message."""
        watch.on_rail(self.peer, self.called(), self.limit.waited_s(), self.limit.timeout_s, text)


class Breakable(Protocol):
    """Messages of a rank that can be ended when the communicator ends."""

    def break_up(self) -> None: ...


class Connected(Breakable, Protocol):
    """The rails of a rank, whose connections can be checked."""

    def look(self, peer: int) -> None: ...


class Watch:
    """One rank's watch over all ranks of a communicator of several nodes.

    Args:
        inner: the native communicator of this rank's node.
        layout: the nodes of all ranks.
        awaiting: by local rank, the rank that the local rank awaits on a rail.
        store: used for the faults of this communicator only.
        rails: the rails, which are added to ``breakable``.
        name: the name of the communicator.

    Attributes:
        error: the error that ended the communicator, without an operation's name; or None.
        awaiting: the argument.
        breakable: everything that is broken up at a fault.
        trace: the trace that this node's ranks leave at a fault; None: no trace.
        left: when ranks of other nodes made their last call, if they are threads of this process.
    """

    def __init__(
        self,
        inner: _native.Comm,
        layout: NodeLayout,
        awaiting: Awaiting,
        store: Store,
        rails: Connected,
        name: str,
    ) -> None:
        self.error: RingcommError | None = None
        self.awaiting = awaiting
        self._inner = inner
        self._layout = layout
        self._store = store
        self._rails = rails
        self.breakable: list[Breakable] = [rails]
        self.trace: NodeTrace | None = None
        self.left: dict[int, float] = {}
        self._wait: RailWait | None = None
        self._probed: tuple[RailWait, Probe] | None = None
        self._recorder = FlightRecorder(inner, name, (layout.local_rank, len(layout.node_ranks)))
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._asked_s = self._asked_of_ends_s = 0.0
        self._told_ended: set[int] = set()
        self._known_ended: set[int] = set()
        self._asking: threading.Thread | None = None
        self._thread = threading.Thread(target=self._loop, name=f"{name}-watch", daemon=True)
        start_thread(self._thread, f"communicator {name!r}", "It was not built")

    def awaits(self, wait: RailWait | None) -> None:
        """Notes the rank for which this rank waits on a rail, if any; does nothing after a fault.

        So local peers and the trace can read which rank this rank awaited when it gave up.
        """
        self._wait = wait
        if self.error is None:
            self.awaiting.note(self._layout.local_rank, -1 if wait is None else wait.peer)

    # ---- the causes of a fault -------------------------------------------------------------------

    def in_node(self) -> RingcommError:
        """Returns the error of a call in which the node's communicator gave up."""
        return self.known() or self.fail(
            AbortedError(f"{self._me()} found its node's communicator closed")
        )

    def known(self) -> RingcommError | None:
        """Returns the error that ended this communicator or its node's communicator, or None."""
        fault = self._inner.fault() if self.error is None else None
        return self.error if fault is None else self.fail(self._of_node(fault))

    def on_rail(self, peer: int, called: str, waited_s: float, timeout_s: float, text: str) -> None:
        """Reports that a wait for a rank of another node failed.

        Args:
            peer: the rank that was awaited.
            called: a description of the call.
            waited_s: how long the wait lasted, in seconds.
            timeout_s: the timeout of the communicator, in seconds.
            text: the transport's message.
        """
        cause = self._cause_of_others(CAUSE_S)
        if cause is not None:
            self.fail(cause, posted=True)
            return
        who, awaited = self._me(), self._layout.named(peer)
        said = told_by(text)
        if waited_s >= timeout_s:
            came = f"{awaited}, which did not come"
            advice = look_at(awaited, on_other_node=True)
            self.fail(timed_out(f"{who} in {called}", waited_s, came, advice))
            return
        self.fail(
            PeerLost(
                f"{who} in {called} expected {awaited} to take part, but the connection to it "
                f"broke after {waited_s:.3f} s ({said}). "
                "Its process or its node has ended: see why"
            )
        )

    def set_left(self, rank: int, left: bool) -> None:
        """Notes whether a rank of another node has left; for worlds whose ranks are threads."""
        if left:
            self.left[rank] = time.monotonic()
        else:
            self.left.pop(rank, None)

    def awaits_in_vain(self, called: str, rank: int, waited_s: float) -> None:
        """Ends the communicator if rank ``rank``, for which this rank waits on a rail, has left.

        A rank may leave after its part of a call; its messages then arrive within ``ARRIVAL_S``.
        """
        left_s = self.left.get(rank)
        if left_s is not None and min(time.monotonic() - left_s, waited_s) >= ARRIVAL_S:
            who, other = self._me(), self._layout.named(rank)
            self.fail(PeerLost(f"{who} in {called} expected {other} to take part, but {LEFT}"))

    def why_lost(self, rank: int) -> str:
        """Returns why a rank makes no more calls, as the end of a sentence, or ""."""
        if rank in self.left:
            return LEFT
        if rank in self._layout.node_ranks:
            return why_lost(self._inner, self._layout.local_rank_of(rank))
        if rank not in self._known_ended:
            self._ask_of_ends()
        return ENDED if rank in self._known_ended else ""

    def _ask_of_ends(self) -> None:
        """Reads from the store which ranks of other nodes have ended (see :meth:`_tell_ends`)."""
        if time.monotonic() < self._asked_of_ends_s + LOOK_S:
            return
        self._asked_of_ends_s = time.monotonic()
        others = [rank for node in self._layout.nodes for rank in node if self._is_elsewhere(rank)]

        def ask() -> None:
            for rank in others:
                if self._store.check([f"ended/{rank}"]):
                    self._known_ended.add(rank)

        self._ask(ask, STORE_S)

    def _is_elsewhere(self, rank: int) -> bool:
        return rank not in self._layout.node_ranks and rank not in self._known_ended

    def _tell_ends(self) -> None:
        """Informs the ranks of other nodes, by the store, which local peers' processes have ended.

        An ended process is not a fault by itself: a rank may end after its last call. But ranks of
        other nodes that build a group need not wait for an ended rank.
        """
        inner, node_ranks = self._inner, self._layout.node_ranks
        ended = {local_rank for local_rank in range(len(node_ranks)) if inner.health(local_rank)}
        living = min(local_rank for local_rank in range(len(node_ranks)) if local_rank not in ended)
        processes = {
            node_ranks[local_rank] for local_rank in ended if not inner.is_thread(local_rank)
        }
        news = processes - self._told_ended
        if living != self._layout.local_rank or not news:
            return
        self._told_ended |= news

        def tell() -> None:
            for rank in news:
                self._store.set(f"ended/{rank}", "")

        self._ask(tell, STORE_S)

    # ---- the end of the communicator -------------------------------------------------------------

    def fail(self, error: RingcommError, *, posted: bool = False) -> RingcommError:
        """Ends the communicator with an error unless it has ended; returns the error that ended it.

        Args:
            error: the error, whose message does not name the operation yet.
            posted: True if the error is the cause in the store.
        """
        with self._guard:
            if self.error is not None:
                return self.error
            if not posted:
                error = self._post_cause(error)
            self.error = error
        if self.trace is not None:
            self.trace.copy()  # NOTE [A trace over nodes]
        self._abort_node(text_of(error)[:LONGEST_CAUSE])
        for each in self.breakable:
            each.break_up()
        if self.trace is not None:
            self.trace.write(error)
        return error

    def _abort_node(self, cause: str) -> None:
        """Aborts the calls of this node, whose ranks then read ``cause``."""
        self._inner.abort(cause)

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()
        join(self._thread)
        join(self._asking)

    # ---- implementation --------------------------------------------------------------------------

    def _me(self) -> str:
        return self._layout.named(self._layout.rank)

    def _of_node(self, fault: dict[str, Any]) -> RingcommError:
        """Returns the error for a fault of the node, with the recorded calls."""
        return self._worded(fault, self._recording())

    def _worded(self, fault: dict[str, Any], recording: Recording | None) -> RingcommError:
        """Returns the error for a fault whose ranks are numbered within the node."""
        node_ranks = self._layout.node_ranks
        if fault["kind"] == "aborted" and (told := _error_of(fault["reason"])) is not None:
            # The abort reason may be cut off, so prefer the complete cause in the store.
            answers = self._ask(self._posted_cause, STORE_S)
            return (answers[0] or told) if answers else self._without_store(told)
        fault = dict(fault)
        for name in ("rank", "peer"):
            if 0 <= fault[name] < len(node_ranks):
                fault[name] = node_ranks[fault[name]]
        known = fault if recording is None else told_over_nodes(fault, recording)
        beyond = self._beyond(fault["peer"], recording) if fault["kind"] == "timeout" else -1
        error = from_fault("", known) if beyond < 0 else _waited_beyond(known, beyond)
        text = str(error).removeprefix(": ").partition(" The communicator is unusable now")[0]
        text = RANK.sub(lambda found: f"{found[1]}{self._layout.named(int(found[2]))[1:]}", text)
        return type(error)(text.rstrip(" ."))

    def _recording(self) -> Recording | None:
        """Returns the records of this node's ranks, with world ranks; None: they are damaged."""
        try:
            return renumbered(self._recorder.recording(), self._layout.node_ranks)
        except RingcommError:
            return None

    def site_of(self, number: int) -> str:
        """Returns " at" and the call site of this rank's recorded call ``number``, or ""."""
        recording = self._recording()
        mine = None if recording is None else recording.rank(self._layout.rank)
        return at(None if mine is None else mine.collective(number))

    def _beyond(self, peer: int, recording: Recording | None) -> int:
        """Returns the rank of another node for which ``peer`` waits, also indirectly, or -1."""
        layout, seen = self._layout, set[int]()
        while peer in layout.node_ranks and peer not in seen:
            seen.add(peer)
            beyond = self.awaiting.of(layout.local_rank_of(peer))
            if beyond >= 0:
                return beyond
            record = None if recording is None else recording.rank(peer)
            peer = -1 if record is None else record.waits_for
        return -1

    def _loop(self) -> None:
        while not self._ended.wait(LOOK_S):
            if self.error is not None:
                return
            self._look()

    def _look(self) -> None:
        fault = self._inner.fault()
        if fault is not None:
            self.fail(self._of_node(fault))
            return
        wait = self._wait
        if wait is not None:
            self.awaits_in_vain("a call", wait.peer, wait.limit.waited_s())
            if wait.limit.waited_s() >= wait.limit.timeout_s + GRACE_S and wait is self._wait:
                wait.ended(self, "")
                return
            broken = self._probe(wait).broken(wait.limit.waited_s())
            if broken is not None and wait is self._wait:
                wait.ended(self, broken)
                return
        if self._waits():
            for local_rank, rank in enumerate(self._layout.node_ranks):
                # A rank whose thread has left may have made its part of the call before:
                # awaits_in_vain() decides.
                if self._inner.is_thread(local_rank):
                    continue
                if rank != self._layout.rank and self._inner.health(local_rank):
                    self.fail(self._ended_process(rank))
                    return
        self._tell_ends()
        if self._layout.local_rank == 0 and time.monotonic() >= self._asked_s + ASK_STORE_S:
            self._asked_s = time.monotonic()
            cause = self._read_cause()
            if cause is not None:
                self.fail(cause, posted=True)

    def _probe(self, wait: RailWait) -> Probe:
        """Returns the probe of the connection that the wait uses."""
        if self._probed is None or self._probed[0] is not wait:
            self._probed = wait, Probe(partial(self._rails.look, wait.peer))
        return self._probed[1]

    def _ended_process(self, rank: int) -> PeerLost:
        recording = self._recording()
        its = None if recording is None else recording.rank(rank)
        last = "" if its is None or recording is None else last_over_nodes(its, recording.taken_ns)
        did = f"; its last call: {last}" if last else ""
        named = self._layout.named(rank)
        return PeerLost(f"the process of {named} has ended{did}. See why")

    def _waits(self) -> bool:
        """True if a call of this rank waits for other ranks now."""
        return self.awaited >= 0

    @property
    def awaited(self) -> int:
        """The rank for which a call of this rank waits on a rail, or -1."""
        return self.awaiting.of(self._layout.local_rank)

    def _cause_of_others(self, patience_s: float) -> RingcommError | None:
        """Returns the cause in the store; waits for a cause that is about to be posted."""
        deadline = time.monotonic() + patience_s
        while True:
            if self.error is not None:
                return self.error
            fault = self._inner.fault()
            if fault is not None:
                return self._of_node(fault)
            cause = self._read_cause(max(deadline - time.monotonic(), LOOK_S))
            if cause is not None:
                return cause
            if time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_S)

    def _read_cause(self, patience_s: float = STORE_S) -> RingcommError | None:
        answers = self._ask(self._posted_cause, patience_s)
        return answers[0] if answers else None

    def _posted_cause(self) -> RingcommError | None:
        if not self._store.check(["cause"]):
            return None
        return _error_of(self._store.get("cause").decode(errors="replace"))

    def _post_cause(self, error: RingcommError) -> RingcommError:
        """Posts the cause in the store; returns the cause that the store keeps."""

        answers = self._ask(lambda: post_cause(self._store, error), STORE_S)
        if not answers:
            return self._without_store(error)
        return answers[0] or error

    def _ask(self, question: Callable[[], T], patience_s: float) -> list[T]:
        """Queries the store; returns [answer], or [] if no answer came in time.

        It queries on a thread, since a store whose node is gone does not answer for minutes. While
        an earlier query is unanswered, it makes no other query.
        """
        if self._asking is not None:
            self._asking.join(patience_s)
            if self._asking.is_alive():
                return []
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, name="ringcomm-ask", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return []
        self._asking = thread
        thread.join(patience_s)
        return answers[:1]

    def _without_store(self, error: RingcommError) -> RingcommError:
        """Adds to an error that the store does not answer, unless the error already says so."""
        text = str(error).rstrip(" .")
        if _SILENT in text:
            return error
        return type(error)(
            f"{text}. {_SILENT}{store_address(self._store)}, through which the nodes tell each "
            "other of faults, does not answer: see whether the process or the node that holds it "
            "(usually rank 0's) ended"
        )


def _waited_beyond(fault: dict[str, Any], beyond: int) -> RingcommError:
    """Returns the error for a wait for a local peer that itself waits for a remote rank."""
    return timed_out(
        f"rank {fault['rank']} in {fault['mine']}",
        fault["waited_ms"] / 1000,
        f"rank {beyond}, which did not come: a local peer, rank {fault['peer']}, waits for that "
        "rank",
        look_at(f"rank {beyond}", on_other_node=True),
    )


def post_cause(store: Store, error: RingcommError) -> RingcommError | None:
    """Posts the cause in a communicator's store of faults; returns the cause that the store has.

    Raises:
        RuntimeError: the store does not answer.
    """
    text = store.compare_set("cause", "", text_of(error))
    return _error_of(text.decode(errors="replace"))


def text_of(error: RingcommError) -> str:
    """Returns an error as the text that the store keeps."""
    return json.dumps([type(error).__name__, str(error)])


def is_posted_cause(text: str) -> bool:
    """True if the reason of an abort is a cause from the store."""
    return _error_of(text) is not None


def _error_of(text: str) -> RingcommError | None:
    """Returns the error that :func:`text_of` wrote, even if cut off; None for any other text."""
    kind, _, rest = text.partition('", "')
    found = getattr(errors, kind.removeprefix('["'), None)
    if not rest or not (isinstance(found, type) and issubclass(found, RingcommError)):
        return None
    try:
        words = json.loads(text)[1]
    except (ValueError, IndexError, TypeError):
        words = rest
    error: RingcommError = found(printable(str(words)))
    return error


# ---- The watch over a communicator on devices over nodes: calls under way, and kernel faults ----
# A host that has enqueued a call does not wait for it; the watch's thread does. The thread reads
# the faults that kernels of this rank leave, checks whether processes of this node have ended while
# a call is under way, and ends a call that runs too long.

# Seconds to wait for the end of the watch's thread; a store that has ended may block this thread.
END_S = 2.0


class _Enqueued(NamedTuple):
    call: Call
    begun: Event
    done: Event


class UnderWay:
    """The enqueued calls that are not done; keeps their tensors alive."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._calls: deque[_Enqueued] = deque()
        self._oldest: _Enqueued | None = None
        self._runs = Deadline(0.0)  # of the oldest call

    def add(self, call: Call, begun: Event, done: Event) -> None:
        """Adds a call that runs between two events of its stream."""
        with self._guard:
            self._sift()
            self._calls.append(_Enqueued(call, begun, done))

    def __bool__(self) -> bool:
        with self._guard:
            self._sift()
            return bool(self._calls)

    def late(self, timeout_s: float) -> str:
        """Returns the name of the oldest call if it has run longer than the timeout, else ""."""
        with self._guard:
            self._sift()
            if not self._calls or not self._calls[0].begun.query():
                return ""
            if self._calls[0] is not self._oldest:
                self._oldest, self._runs = self._calls[0], Deadline(timeout_s)
            late = self._runs.waited_s() > timeout_s
            return self._oldest.call.name if late else ""

    def events(self) -> list[Event]:
        """Returns events; when all have passed, no call is running."""
        with self._guard:
            return [each.done for each in self._calls]

    def _sift(self) -> None:
        while self._calls and self._calls[0].done.query():
            self._calls.popleft()
        if not self._calls:
            self._oldest = None


class DeviceWatch(Watch):
    """One rank's watch that also watches its device.

    Args:
        inner: the host core of the node.
        layout: the nodes of all ranks.
        awaiting: the words of this node.
        store: used for the faults of this communicator only.
        rails: the host rails.
        name: the name of the communicator.
        calls: the device communicator of the node.

    Attributes:
        under_way: the calls of this rank.
    """

    def __init__(
        self,
        inner: _native.Comm,
        layout: NodeLayout,
        awaiting: Awaiting,
        store: Store,
        rails: Connected,
        name: str,
        calls: DeviceCallEngine,
    ) -> None:
        self.under_way = UnderWay()
        self._calls = calls
        super().__init__(inner, layout, awaiting, store, rails, name)

    def see_device(self) -> RingcommError | None:
        """Returns the error that ended the communicator or a kernel of this rank, or None."""
        core = self._calls.device_core
        if self.error is None and core.native.raised:
            fault = core.fault()
            if fault is not None:
                if fault["kind"] == "aborted" and not is_posted_cause(fault["reason"]):
                    fault = {**fault, "reason": self._renamed(fault["reason"])}
                self.fail(self._worded(fault, None))
        return self.error

    def in_calls(self, error: RingcommError, called: str) -> None:
        """Ends the communicator after the node's device communicator has raised ``error``."""
        if self.see_device() is None:
            text = str(error).partition(": ")[2].partition(" The communicator is unusable now")[0]
            said = self._renamed(text).rstrip(" .")
            self.fail(type(error)(f"{self._me()} in {called}: {said}"))

    def close(self) -> None:
        super().close()
        self._thread.join(END_S)

    def _renamed(self, text: str) -> str:
        """Returns the text with the node's rank numbers replaced by the communicator's."""
        node_ranks = self._layout.node_ranks
        return RANK.sub(
            lambda found: (
                f"{found[1]}{self._layout.named(node_ranks[int(found[2])])[1:]}"
                if int(found[2]) < len(node_ranks)
                else found[0]
            ),
            text,
        )

    def _abort_node(self, cause: str) -> None:
        super()._abort_node(cause)
        self._calls.device_core.abort(cause)

    def _waits(self) -> bool:
        return super()._waits() or bool(self.under_way)

    def _look(self) -> None:
        if self.see_device() is not None:
            return
        timeout_s = self._inner.timeout_ms / 1000
        # GRACE_S lets kernels report first: kernels have the same deadline and report more details.
        late = self.under_way.late(timeout_s + GRACE_S)
        if late:
            layout = self._layout
            ranks = {
                rank
                for rail in layout.rails_of(layout.rank)
                for rank in layout.rail(rail)
                if rank != layout.rank
            }
            peers = ", ".join(map(layout.named, sorted(ranks)))
            self.fail(
                timed_out(
                    f"{self._me()} in {late}",
                    timeout_s,
                    f"its device: data of {peers}, which made this call, too, did not arrive, or "
                    "the device waits for other work",
                    "Look at what those ranks do and at the link between the nodes",
                )
            )
            return
        super()._look()
