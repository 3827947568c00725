"""Ranks that share a process and a device meet on the host, and one launch carries them all.

Kernels that wait for each other must run at the same time. Two launches on one device need not:
they may be on one stream (the legacy default stream, usually), in one hardware queue, or too large
together. The blocks of one launch that fits do. So the last of the ranks to make a call launches
it for all; streams wait on events, and the host only for the other threads to arrive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ringcomm.comm.device_order import DeviceOrder
from ringcomm.comm.device_triton import Prepared, launch
from ringcomm.memory.device_runtime import DeviceRuntime, Event

# How often a rank that waits for others looks whether it does so in vain.
LOOK_S = 0.05

__all__ = ["Meeting", "meeting_of"]

# Called with the ranks that have not come, and for how many seconds: raises to give up.
Look = Callable[[Sequence[int], float], None]


@dataclass(frozen=True)
class _Arrival:
    """A rank's prepared call, the stream that it is ordered on, and its place there."""

    prepared: Prepared
    stream: int
    ready: Event


@dataclass(eq=False)
class _Round:
    """One launch: who has come, and how it ended."""

    arrived: dict[int, _Arrival] = field(default_factory=dict)
    ended: bool = False
    error: BaseException | None = None


class Meeting:
    """The ranks of one communicator that share this process and a device."""

    def __init__(
        self, runtime: DeviceRuntime, device: int, ranks: Sequence[int], order: DeviceOrder
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._ranks = tuple(ranks)
        self._order = order
        # A stream of its own, so that calls follow each other whatever streams the ranks use.
        self._stream = runtime.make_stream(device)
        self._changed = threading.Condition()
        self._round = _Round()

    def launch(self, rank: int, prepared: Prepared, stream: int, look: Look) -> None:
        """Launches the prepared call of ``rank`` together with those of all others.

        Args:
            rank: of the caller.
            prepared: its call.
            stream: the call's place is after its work by now, and before its later work.
            look: called about 20 times a second while others are missing.

        Raises:
            BaseException: what ``look`` raised, and this rank's call is withdrawn; or what the
                launch raised, on all ranks.
        """
        with self._changed:
            mine = self._round
            ready = self._runtime.record_event(self._device, stream)
            mine.arrived[rank] = _Arrival(prepared, stream, ready)
            if len(mine.arrived) == len(self._ranks):
                self._launch_all(mine)
            else:
                self._await_others(rank, mine, look)
            if mine.error is not None:
                raise mine.error

    def _await_others(self, rank: int, mine: _Round, look: Look) -> None:
        started = time.monotonic()
        try:
            while not mine.ended:
                self._changed.wait(LOOK_S)
                if not mine.ended:
                    missing = [each for each in self._ranks if each not in mine.arrived]
                    look(missing, time.monotonic() - started)
        except BaseException:
            # Otherwise a rank that comes later would launch this call, whose tensors are the
            # caller's again.
            mine.arrived.pop(rank, None)
            raise

    def _launch_all(self, mine: _Round) -> None:
        self._round = _Round()
        try:
            self._launch_kinds([mine.arrived[rank] for rank in self._ranks])
        except BaseException as error:
            mine.error = error
        finally:
            mine.ended = True
            self._changed.notify_all()

    def _launch_kinds(self, arrivals: list[_Arrival]) -> None:
        kinds: dict[tuple[int, int], list[_Arrival]] = {}
        for arrival in arrivals:
            kinds.setdefault(arrival.prepared.prepared_kind, []).append(arrival)
        streams = [self._stream]
        while len(streams) < len(kinds):
            # The kernels will find the mismatch and name both calls, if they run side by side.
            streams.append(self._runtime.make_stream(self._device))
        for ((_, channels), each), stream in zip(kinds.items(), streams, strict=True):
            for arrival in each:
                self._runtime.wait_event(self._device, stream.handle, arrival.ready)
            blocks = channels * len(each)
            self._order.before(self, blocks, stream.handle)
            launch([arrival.prepared for arrival in each], stream.handle)
            self._order.after(self, blocks, stream.handle)
            done = self._runtime.record_event(self._device, stream.handle)
            for arrival in each:
                self._runtime.wait_event(self._device, arrival.stream, done)

    def launch_together(self, prepared: Sequence[Prepared], stream: int) -> None:
        """Launches the prepared calls of all ranks on ``stream``: one thread made them all."""
        runtime, device, own = self._runtime, self._device, self._stream.handle
        with self._changed:
            # A capture can neither wait for work outside nor be waited for: see docs/cuda.md.
            captures = runtime.is_capturing(device, stream)
            if not captures:
                runtime.wait_event(device, stream, runtime.record_event(device, own))
            launch(prepared, stream)
            if not captures:
                runtime.wait_event(device, own, runtime.record_event(device, stream))


_guard = threading.Lock()
_meetings: WeakValueDictionary[tuple[int, ...], Meeting] = WeakValueDictionary()


def meeting_of(
    runtime: DeviceRuntime,
    device: int,
    ranks: Sequence[int],
    proofs: Sequence[int],
    order: DeviceOrder,
) -> Meeting:
    """The meeting of these ranks, the same object for each of them.

    Args:
        runtime: of this process.
        device: that they share.
        ranks: of the communicator.
        proofs: of the same ranks, by which no other communicator can be meant.
        order: of the device.
    """
    key = (device, *proofs)
    with _guard:
        meeting = _meetings.get(key)
        if meeting is None:
            meeting = _meetings[key] = Meeting(runtime, device, ranks, order)
        return meeting
