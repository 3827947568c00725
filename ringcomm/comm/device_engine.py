"""Runs calls on a device: on which stream, behind what, and what keeps their tensors alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch

from ringcomm.comm.calls import Call, Membership, Turn
from ringcomm.comm.checks import Site
from ringcomm.comm.device_core import DeviceCore
from ringcomm.comm.device_end import DeviceEnd
from ringcomm.comm.device_meeting import Meeting
from ringcomm.comm.device_order import DeviceOrder
from ringcomm.comm.device_recorder import SeenEvent
from ringcomm.comm.device_site import DeviceSite
from ringcomm.comm.device_triton import Prepared, TritonLaunch, launch
from ringcomm.comm.device_turn import StreamTurn
from ringcomm.comm.device_work import DeviceWork
from ringcomm.comm.options import milliseconds_of
from ringcomm.comm.triton_calls import ONE_RANK, TritonEnd, require_triton
from ringcomm.comm.work import Outputs, Work
from ringcomm.errors import CollectiveTimeout, PeerLost, UnsupportedError, where
from ringcomm.memory.device_runtime import Stream

if TYPE_CHECKING:
    from ringcomm._tl.launch import Plan


class DeviceEngine(DeviceEnd):
    """A rank's end on a device. Its calls return when they are queued on a stream.

    A call is ordered behind the earlier work of the stream that is current where it is made, and
    later work of that stream behind it. All calls of one communicator follow each other, whatever
    streams they are made on; with ``async_op`` they run on a stream of the communicator's own.
    """

    def __init__(
        self,
        core: DeviceCore,
        membership: Membership,
        order: DeviceOrder,
        meeting: Meeting | None,
    ) -> None:
        super().__init__(core, membership, order, meeting)
        self._side: Stream | None = None
        # While one thread prepares the calls of all ranks: of this one.
        self._collecting = False
        self._collected: Prepared | None = None
        self._sends_alone = False  # while a message is launched
        self._name = ""
        core.native.set_submit(_submitter(weakref.ref(self)))

    @property
    def device(self) -> torch.device:
        """Where the tensors of this communicator's calls are."""
        return self._device_core.runtime.torch_device(self._device_core.device)

    @property
    def launches(self) -> bool:
        return True

    def _site(self, op: str) -> Site:
        return DeviceSite(op, (self._rank, self._world_size), self._place)

    def _own_turn(self) -> Turn:
        if self._thread_stream is None:
            runtime, device = self._place
            self._thread_stream = runtime.make_stream(device)
        return StreamTurn(self._place, self._thread_stream)

    _thread_stream: Stream | None = None

    # ---- calls --------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """The turn of a call of a communicator that is still usable then, on its device."""
        runtime, device = self._place
        with self._queue.turn, runtime.on_device(device):
            self._check_usable(name)
            self._name = name
            yield

    def _start(self, call: Call, async_op: bool) -> Work | None:
        if self._meeting is not None:
            self._check_capture(call.name)
        if async_op:
            return self._start_beside(call)
        runtime, device = self._place
        with self._turn(call.name):
            self._run(call, runtime.current_stream(device))
        return None

    def _check_capture(self, name: str) -> None:
        runtime, device = self._place
        if runtime.is_capturing(device):
            # The streams of the other ranks' threads are not part of this capture.
            raise UnsupportedError(
                f"{where(name, self._rank, self._world_size)}: the current stream records a graph, "
                "and the ranks of one process on one device share a launch, which threads cannot "
                "record together. Record it from one thread (LocalWorld.all_reduce, "
                "reduce_scatter_tensor or all_gather_into_tensor), or give each rank a process"
            )

    def _execute(self, call: Call) -> Outputs:
        self._start(call, async_op=False)
        return call.outputs

    def _start_beside(self, call: Call) -> DeviceWork:
        runtime, device = self._place
        with self._turn(call.name):
            side = self._side_stream()
            current = runtime.current_stream(device)
            runtime.wait_event(device, side.handle, runtime.record_event(device, current))
            with runtime.on_stream(side):
                self._run(call, side.handle)
            done = self._seen(runtime.record_event(device, side.handle))
            self._keep(call, done, side.handle)
        return self._work(call.name, call.outputs, side, done)

    def _side_stream(self) -> Stream:
        if self._side is None:
            runtime, device = self._place
            self._side = runtime.make_stream(device, high_priority=True)
        return self._side

    def _work(
        self, name: str, outputs: Outputs, side: Stream, done: SeenEvent, source: int | None = None
    ) -> DeviceWork:
        place = (*self._place, side)
        return DeviceWork(name, outputs, place, done, lambda: self._check_work(name), source)

    def _keep(self, call: Call, done: SeenEvent, stream: int) -> None:
        """Keeps the call's tensors until it is done, so that no allocator reuses their memory."""
        runtime, device = self._place
        self._recorded = [each for each in self._recorded if runtime.is_capturing(device, each[1])]
        if runtime.is_capturing(device, stream):
            # The event of a capture never passes. Memory that came free during the capture could be
            # handed out to a later part of the graph; after it, a graph's tensors are its owner's.
            self._recorded.append((call, stream))
            return
        while self._launched and self._launched[0][1].query():
            self._launched.popleft()
        self._launched.append((call, done))

    def _run(self, call: Call, stream: int) -> None:
        """With the turn, on the device: orders the call on ``stream`` and launches it."""
        native = self._device_core.native
        self._follow_last(stream)
        native.stream = stream
        with self._worded(call.name):
            call.run(cast(Any, native))

    def _follow_last(self, stream: int) -> None:
        """Puts ``stream`` behind the communicator's last call, if that was on another one."""
        if stream == self._last_stream and self._last_recorded is None:
            return
        runtime, device = self._place
        # A capture can neither wait for work outside nor be waited for: see docs/cuda.md.
        if runtime.is_capturing(device, stream):
            last, self._last_recorded = self._last_recorded, stream
            follows = last != stream and last is not None and runtime.is_capturing(device, last)
        else:
            last, self._last_stream = self._last_stream, stream
            follows = last != stream
        if follows and last is not None:
            runtime.wait_event(device, stream, runtime.record_event(device, last))

    def _prepare(self, call: Call, stream: int) -> Prepared:
        """With the turn: what :meth:`_run` would launch."""
        self._collecting = True
        try:
            self._run(call, stream)
        finally:
            self._collecting = False
        prepared, self._collected = self._collected, None
        assert prepared is not None
        return prepared

    def _submit(self, prepared: Prepared) -> None:
        """Launches a call that is ready."""
        if self._collecting:
            self._collected = prepared
            return
        core = self._device_core
        stream = core.native.stream
        if self._sends_alone:
            # Not every rank of this process takes part in a message, and none may be put behind
            # another: room for them is kept (DeviceOrder.sends).
            launch([prepared], stream)
            return
        if self._meeting is not None:
            self._meeting.launch(self._rank, prepared, stream, self._look_for)
            return
        blocks = prepared.prepared_kind[1]
        self._order.before(core, blocks, stream)
        launch([prepared], stream)
        self._order.after(core, blocks, stream)

    def _make_triton(self, site: Site) -> TritonEnd:
        require_triton(site)
        from ringcomm._tl.geometry import Geometry
        from ringcomm._tl.hooks import IS_INTERPRETED
        from ringcomm._tl.launch import Part

        if IS_INTERPRETED and self._meeting is not None:
            raise UnsupportedError(f"{site}: {ONE_RANK}")
        core = self._device_core
        geometry = Geometry.of(core.native.geometry)

        def run(plan: Plan, in_ptr: int, out_ptr: int) -> int:
            part = Part(core.native.table_ptr, in_ptr, out_ptr)
            timeout_ns = core.timeout_ms * 1_000_000
            with self._in_records(plan.call, geometry.channels):
                self._submit(TritonLaunch(self._place, plan, part, timeout_ns, geometry))
            return 0

        return TritonEnd(run, self._world_size, core.native.family)

    def _look_for(self, missing: Sequence[int], waited_s: float) -> None:
        """Raises if this rank waits in vain for threads of this process to make their calls."""
        core, name = self._device_core, self._name
        self._check_usable(name)
        if core.any_aborted():
            raise self._fault(name)
        head = where(name, self._rank, self._world_size)
        for rank in missing:
            if core.has_closed(rank):
                raise self._give_up(
                    PeerLost,
                    f"{head}: expected rank {rank} to take part, but it has closed the "
                    "communicator. All ranks must make the same calls before one of them closes",
                    self._waits_in_vain("peer_closed", rank),
                )
        if waited_s * 1000 > core.timeout_ms:
            named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise self._give_up(
                CollectiveTimeout,
                f"{head}: waited {core.timeout_ms} ms, until its timeout ended, for {named} to "
                "make the same call (step 0: nothing was launched). Ranks of one process on one "
                "device run in one launch, so each needs a thread that makes all its calls",
                self._waits_in_vain("timeout", missing[0]),
            )

    def submit(
        self,
        fn: Callable[[], Outputs],
        opname: str,
        timeout: timedelta | float | None = None,
    ) -> Work:
        """Runs ``fn`` now, on this thread; the Work is done when the calls that it made are.

        Args:
            fn: may call collectives of this communicator; returns the output tensors.
            opname: named in errors.
            timeout: for the calls that ``fn`` makes; None keeps the communicator's.

        Raises:
            AbortedError: the communicator is unusable.
        """
        self._check_usable(opname)
        core = self._device_core
        usual_ms = core.timeout_ms
        if timeout is not None:
            core.timeout_ms = milliseconds_of(timeout)
        try:
            outputs = fn()
        finally:
            core.timeout_ms = usual_ms
        runtime, device = self._place
        with runtime.on_device(device):
            side = self._side_stream()
            behind = runtime.record_event(device, runtime.current_stream(device))
            runtime.wait_event(device, side.handle, behind)
            done = SeenEvent(runtime.record_event(device, side.handle))
        return self._work(opname, outputs, side, done)

    def _finish_host_side(self) -> None:
        """Blocks until the results of earlier calls can be read on the host."""
        runtime, device = self._place
        calls = self._everything()
        runtime.synchronize(device)
        self._check_usable("synchronize")
        self._see_completed(calls)


def _submitter(engine: weakref.ref[DeviceEngine]) -> Callable[[], None]:
    # The native end keeps this function; a strong reference would be a cycle through it.
    def submit() -> None:
        alive = engine()
        if alive is not None:
            alive._submit(alive._device_core.native)

    return submit
