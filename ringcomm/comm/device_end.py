"""How a communicator on a device fails, and how it ends: what was launched ends first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from ringcomm.comm.calls import Call, Membership, closed, refusal
from ringcomm.comm.device_core import DeviceCore
from ringcomm.comm.device_meeting import Meeting
from ringcomm.comm.device_order import DeviceOrder
from ringcomm.comm.device_recorder import COLLECTIVES, Calls, SeenEvent
from ringcomm.comm.device_retired import abandon
from ringcomm.comm.engine import Engine
from ringcomm.comm.flight_recorder import Fault, FlightRecorder
from ringcomm.comm.live_engines import EXIT_GRACE_S
from ringcomm.comm.recording import Recording
from ringcomm.errors import ArgumentError, RingcommError, where
from ringcomm.memory.device_runtime import DeviceRuntime, Event

POLL_S = 0.0005


class DeviceEnd(Engine):
    """Faults and the end of a rank on a device."""

    def __init__(
        self,
        core: DeviceCore,
        membership: Membership,
        order: DeviceOrder,
        meeting: Meeting | None,
    ) -> None:
        super().__init__(cast(Any, core), membership)
        self._device_core = core
        recorder = core.recorder
        self._records = recorder.native if recorder is not None else None
        locate = recorder.located if recorder is not None else None
        self._recorder = FlightRecorder(recorder, self.name, (core.rank, core.world_size), locate)
        # Never zero: the quick paths are for calls that run on the caller's thread.
        self._queue.pending = 1
        self._order = order
        self._meeting = meeting
        # Of the last call, and of the last one that a graph recorded: neither waits for the other.
        self._last_stream: int | None = None
        self._last_recorded: int | None = None
        # Calls whose tensors must live: until their event passed, or while a graph is recorded.
        self._launched: deque[tuple[Call, SeenEvent]] = deque()
        self._recorded: list[tuple[Call, int]] = []
        # Once closing: whether it was unusable before, so that somebody has been told why.
        self._told: bool | None = None
        self._unreported: RingcommError | None = None

    @property
    def _place(self) -> tuple[DeviceRuntime, int]:
        return self._device_core.runtime, self._device_core.device

    # ---- the flight recorder --------------------------------------------------------------------

    def recording(self) -> Recording:
        """See :meth:`Engine.recording`."""
        if self._refuse is None:
            # A device that does not answer any more hides no records.
            with suppress(Exception):
                for _, done in tuple(self._launched):
                    done.query()
                self._device_core.look()
        return super().recording()

    def _everything(self) -> list[Calls]:
        recorder = self._device_core.recorder
        return recorder.everything() if recorder is not None else []

    def _see_completed(self, calls: list[Calls]) -> None:
        """The device has done ``calls``."""
        if self._records is not None:
            for each in calls:
                self._records.seen_completed(*each)

    def _seen(self, event: Event) -> SeenEvent:
        """``event``, behind all collectives by now; it is noted in the records that it passed."""
        records = self._records
        if records is None:
            return SeenEvent(event)
        return SeenEvent(event, records, (COLLECTIVES, 1, records.enqueued(COLLECTIVES)))

    def _withdraw(self) -> None:
        """The last call was prepared, and not launched."""
        if self._records is not None:
            self._records.withdraw()

    @contextmanager
    def _in_records(self, words: tuple[int, int, int, int], channels: int) -> Iterator[None]:
        """Around the launch of Triton's kernels for a collective of ``_native.call_words``."""
        records, (runtime, device) = self._records, self._place
        if records is None:
            yield
            return
        captured = runtime.is_capturing(device, self._device_core.native.stream)
        records.enqueue_triton(words, channels, captured)
        try:
            yield
        except BaseException:
            records.withdraw()
            raise

    # ---- faults ---------------------------------------------------------------------------------

    def _check_usable(self, name: str) -> None:
        if self._refuse is not None:
            raise self._refuse(name)
        if self._device_core.raised:
            raise self._fault(name)

    def _check_work(self, name: str) -> None:
        """As a call is checked; but a communicator that was closed in order has done its work."""
        if self._told is not False:
            self._check_usable(name)
        elif self._device_core.raised:
            raise self._fault(name)

    @contextmanager
    def _worded(self, name: str) -> Iterator[None]:
        head = where(name, self._rank, self._world_size)
        try:
            yield
        except RingcommError:
            raise
        except ValueError as error:
            raise ArgumentError(f"{head}: {error}") from error
        except RuntimeError as error:
            # Peers may have launched their part, and would take the next call for this one.
            raise self._give_up(RingcommError, f"{head}: {error}") from error
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _give_up(
        self, kind: type[RingcommError], text: str, waits: Fault | None = None
    ) -> RingcommError:
        """Makes the communicator unusable on all ranks, and returns the error that says why.

        Args:
            kind: of the error.
            text: of the error.
            waits: what a call that was not launched waits for; None: it was refused.
        """

        def word(told: Fault) -> RingcommError:
            return kind(
                f"{text}. {told.get('story', '')}The communicator is unusable now: close it and "
                f"build a new one{told.get('trace', '')}"
            )

        refused = {"kind": "aborted", "peer": -1, "sequence": 0}
        fault = {"rank": self._rank, "message": False, "mine": "", **(waits or refused)}
        error = word(fault)
        try:
            error = word(self._recorder.traced(fault, word))
        finally:  # a second Ctrl-C may come meanwhile
            self._make_unusable(error, text)
        return error

    def _make_unusable(self, error: RingcommError, text: str) -> None:
        self._disable(refusal(self._rank, self._world_size, error))
        self._device_core.abort(text)

    def _waits_in_vain(self, kind: str, peer: int) -> Fault:
        """The fault of the call that is about to be launched, which fails."""
        recorder = self._device_core.recorder
        number = recorder.gave_up(kind, peer) if recorder is not None else 0
        return {"kind": kind, "peer": peer, "sequence": number}

    def _events_of_the_end(self) -> list[Event]:
        """Passed once nothing that was launched runs any more."""
        runtime, device = self._place
        events: list[Event] = [done for _, done in self._launched]
        last = self._last_stream
        if last is not None and not runtime.is_capturing(device, last):
            with runtime.on_device(device):
                events.append(runtime.record_event(device, last))
        return events

    def _end_calls(self, grace_s: float) -> bool:
        """Lets no more calls begin, and waits for those that have; False after ``grace_s``."""
        deadline = time.monotonic() + grace_s
        if not self._queue.turn.acquire(timeout=grace_s):
            return False
        try:
            if self._told is None:
                self._told = self._refuse is not None
            self._disable(closed(self._rank, self._world_size, self.name))
            if self._last_recorded is not None:
                # Replays are on streams that nobody has told this communicator about.
                self._device_core.synchronize()
            events = self._events_of_the_end()
            while not all(event.query() for event in events):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(POLL_S)
            self._see_completed(self._everything())
            return True
        finally:
            self._queue.turn.release()

    def _close(self, grace_s: float) -> None:
        if self._closed:
            return
        if not self._end_calls(grace_s):
            self.abort("closed with a call under way")
            if not self._end_calls(EXIT_GRACE_S):
                # A kernel that does not end still uses the region: it is left alone for good.
                return
        if not self._told and self._device_core.aborted:
            self._unreported = self._fault("close")
            self._refuse = refusal(self._rank, self._world_size, self._unreported)
            self._told = True
        self._order.leave(self._meeting or self._device_core)
        super()._close(grace_s)
        self._launched.clear()
        self._recorded.clear()

    def close(self) -> None:
        """As the host's; waits for what was launched.

        Raises:
            RingcommError: a kernel gave up, and no earlier call has said so. All is given back.
        """
        super().close()
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    def __del__(self) -> None:
        super().__del__()
        # Not after a construction that failed, nor in a forked child.
        if not hasattr(self, "_told") or self._closed:
            return
        self._order.leave(self._meeting or self._device_core)
        recorded = self._last_recorded is not None
        abandon(self._device_core, self._events_of_the_end(), self._launched, recorded=recorded)
