"""The watch over a communicator on devices over nodes: calls under way, and faults of kernels.

A host that has enqueued a call does not wait for it, so the thread of the watch does: it reads the
faults that kernels of this rank leave, sees whether processes of this node have ended while a call
is under way, and ends a call that does not end.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from torch.distributed import Store

from ringcomm import _native
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.engine import Call
from ringcomm.comm.nodes.places import Places
from ringcomm.comm.nodes.watch import (
    GRACE_S,
    RANK,
    Awaiting,
    Breakable,
    Watch,
    is_claim,
)
from ringcomm.cuda.runtime import Event
from ringcomm.deadlines import Deadline
from ringcomm.errors import CollectiveTimeout, RingcommError

# The watch's thread ends within this, unless a store that is gone holds it.
END_S = 2.0


class _Enqueued(NamedTuple):
    call: Call
    begun: Event
    done: Event


class UnderWay:
    """The calls that are enqueued and not done, whose tensors are kept alive here."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._calls: deque[_Enqueued] = deque()
        self._oldest: _Enqueued | None = None
        self._runs = Deadline(0.0)  # of the oldest

    def add(self, call: Call, begun: Event, done: Event) -> None:
        """Notes a call between two events of its stream."""
        with self._guard:
            self._sift()
            self._calls.append(_Enqueued(call, begun, done))

    def __bool__(self) -> bool:
        with self._guard:
            self._sift()
            return bool(self._calls)

    def late(self, timeout_s: float) -> str:
        """Returns the name of the oldest call if it has run for longer than the timeout, or ""."""
        with self._guard:
            self._sift()
            if not self._calls or not self._calls[0].begun.query():
                return ""
            if self._calls[0] is not self._oldest:
                self._oldest, self._runs = self._calls[0], Deadline(timeout_s)
            late = self._runs.waited_s() > timeout_s
            return self._oldest.call.name if late else ""

    def events(self) -> list[Event]:
        """Returns events that have passed once nothing is under way."""
        with self._guard:
            return [each.done for each in self._calls]

    def _sift(self) -> None:
        while self._calls and self._calls[0].done.query():
            self._calls.popleft()
        if not self._calls:
            self._oldest = None


class DeviceWatch(Watch):
    """One rank's watch over its device, too.

    Args:
        inner: the node's core on the host.
        places: of all ranks.
        awaiting: the words of this node.
        store: of this communicator alone.
        rails: of the host.
        name: of the communicator.
        calls: the node's communicator on devices.

    Attributes:
        under_way: the calls of this rank.
    """

    def __init__(
        self,
        inner: _native.Comm,
        places: Places,
        awaiting: Awaiting,
        store: Store,
        rails: Breakable,
        name: str,
        calls: DeviceCallEngine,
    ) -> None:
        self.under_way = UnderWay()
        self._calls = calls
        super().__init__(inner, places, awaiting, store, rails, name)

    def see_device(self) -> RingcommError | None:
        """Returns what has ended the communicator, also if only a kernel of this rank knows it."""
        core = self._calls._device_core
        if self.error is None and core.native.raised:
            fault = core.fault()
            if fault is not None:
                if fault["kind"] == "aborted" and not is_claim(fault["reason"]):
                    fault = {**fault, "reason": self._renamed(fault["reason"])}
                self.fail(self._worded(fault, None))
        return self.error

    def in_calls(self, error: RingcommError, called: str) -> None:
        """Ends the communicator when the node's one on devices has raised ``error``."""
        if self.see_device() is None:
            text = str(error).partition(": ")[2].partition(" The communicator is unusable now")[0]
            said = self._renamed(text).rstrip(" .")
            self.fail(type(error)(f"{self._me()} in {called}: {said}"))

    def close(self) -> None:
        super().close()
        self._thread.join(END_S)

    def _renamed(self, text: str) -> str:
        """Returns text in which the node's numbers of ranks are those of the communicator."""
        mates = self._places.mates
        return RANK.sub(
            lambda found: (
                f"{found[1]}{self._places.named(mates[int(found[2])])[1:]}"
                if int(found[2]) < len(mates)
                else found[0]
            ),
            text,
        )

    def _abort_node(self, claim: str) -> None:
        super()._abort_node(claim)
        self._calls._device_core.abort(claim)

    def _waits(self) -> bool:
        return super()._waits() or bool(self.under_way)

    def _look(self) -> None:
        if self.see_device() is not None:
            return
        timeout_s = self._inner.timeout_ms / 1000
        # Kernels have the same deadline and say more.
        late = self.under_way.late(timeout_s + GRACE_S)
        if late:
            places = self._places
            ranks = {
                rank
                for rail in places.rails_of(places.rank)
                for rank in places.rail(rail)
                if rank != places.rank
            }
            peers = ", ".join(map(places.named, sorted(ranks)))
            self.fail(
                CollectiveTimeout(
                    f"{self._me()} in {late} waited {timeout_s * 1000:.0f} ms, until its timeout "
                    f"ended, for its device: data of {peers}, which made this call, too, did not "
                    "arrive, or the device waits for other work. Look at what those ranks do and "
                    "at the link between the nodes, or raise timeout="
                )
            )
            return
        super()._look()
