"""Launches calls on a device: on which stream, behind what, and what keeps their tensors alive."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch

from ringcomm.comm.arguments import DEVICE_ALGORITHMS, CallChecks
from ringcomm.comm.calls import Call, Membership, RankContext
from ringcomm.comm.device.core import DeviceCore, DeviceEnd
from ringcomm.comm.device.recorder import SeenEvent
from ringcomm.comm.device.sharing import DeviceOrder, JointLaunch
from ringcomm.comm.engine import AUTO
from ringcomm.comm.options import milliseconds_of
from ringcomm.comm.triton import (
    ONE_RANK,
    KernelPlace,
    Prepared,
    TritonEnd,
    TritonLaunch,
    device_place,
    launch,
    require_triton,
)
from ringcomm.comm.work import Outputs, Work, wait_seconds
from ringcomm.cuda.runtime import DeviceRuntime, Stream
from ringcomm.errors import CollectiveTimeout, PeerLost, UnsupportedError, where

if TYPE_CHECKING:
    from ringcomm._tl.launch import KernelPlan

__all__ = [
    "FIRST_POLL_S",
    "LAST_POLL_S",
    "DeviceCallChecks",
    "DeviceCallEngine",
    "DeviceWork",
    "StreamContext",
]

# What the arguments of a call on a device must be.


class DeviceCallChecks(CallChecks):
    """Argument checks of one call on a device."""

    __slots__ = ("_device", "_runtime")
    algorithms = DEVICE_ALGORITHMS

    def __init__(self, op: str, rank_of: tuple[int, int], place: tuple[DeviceRuntime, int]) -> None:
        super().__init__(op, *rank_of)
        self._runtime, self._device = place

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if not self._runtime.is_device_tensor(tensor, self._device):
            self.fail(
                f"{name}: expected a tensor on device {self._device} "
                f"({self._runtime.torch_device(self._device)}), got one on {tensor.device}; this "
                "communicator works on that device alone. Copy the tensor there, or use a "
                "communicator of the tensor's device"
            )


# What surrounds a rank on a device that runs as a thread beside others.


class StreamContext(RankContext):
    """A rank's own stream: on one stream, a rank would wait for what another is about to do."""

    def __init__(self, place: tuple[DeviceRuntime, int], stream: Stream) -> None:
        self._runtime, self._device = place
        self._stream = stream
        self._follow(stream.handle, self._runtime.current_stream(self._device))

    def _follow(self, stream: int, leader: int) -> None:
        with self._runtime.on_device(self._device):
            behind = self._runtime.record_event(self._device, leader)
            self._runtime.wait_event(self._device, stream, behind)

    def taken(self) -> AbstractContextManager[None]:
        return self._runtime.on_stream(self._stream)

    def rejoin(self) -> None:
        self._follow(self._runtime.current_stream(self._device), self._stream.handle)


# Handles of calls that run on a device beside the caller's stream.

FIRST_POLL_S = 0.00002
LAST_POLL_S = 0.001


class DeviceWork(Work):
    """One call on a device's side stream.

    ``wait()`` makes the stream that is current where it is called wait for the call; the host
    goes on. With a timeout it blocks the host, as for torch's NCCL.
    """

    __slots__ = ("_check", "_device", "_done", "_runtime", "_side", "_source")

    def __init__(
        self,
        name: str,
        outputs: Outputs,
        place: tuple[DeviceRuntime, int, Stream],
        done: SeenEvent,
        check: Callable[[], None],
        source: int | None = None,
    ) -> None:
        super().__init__(name, _nothing, _never)
        self._outputs = outputs
        self._runtime, self._device, self._side = place
        self._done = done
        self._check = check
        self._source = source

    def part(self, name: str, outputs: Outputs, source: int | None) -> DeviceWork:
        """The handle of one message of several that went out together.

        Args:
            name: of the message's own call.
            outputs: what it receives into.
            source: the rank that sends; None: it is a send.
        """
        place = (self._runtime, self._device, self._side)
        return DeviceWork(name, outputs, place, self._done, self._check, source)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Orders later work of the current stream behind the call, and returns True.

        Args:
            timeout: timedelta or seconds to block this thread until the call is done; None or zero
                does not block.

        Raises:
            CollectiveTimeout: ``timeout`` passed first; the call goes on.
            RingcommError: a kernel of this communicator gave up by now.
        """
        seconds = wait_seconds(timeout)
        if seconds > 0:
            self._block(seconds)
        self._check()
        stream = self._runtime.current_stream(self._device)
        self._runtime.wait_event(self._device, stream, self._done.event)
        return True

    def _block(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause_s = FIRST_POLL_S
        while not self._done.query():
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"{self._name}: not done after {seconds:g} s of wait(timeout=...); the call "
                    "goes on. Wait again, or abort the communicator"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)

    def is_completed(self) -> bool:
        """True once the call is done or has failed; does not block."""
        return self._done.query()

    def is_success(self) -> bool:
        """True once the call is done without an error."""
        return self._done.query() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What a kernel of this communicator gave up with, or None (also while it runs)."""
        try:
            self._check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Outputs]:
        """A future that gives the outputs, ordered on the stream that its consumer uses.

        It gives the error instead if a kernel has given up by now.
        """
        with self._guard:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> torch.futures.Future[Outputs]:
        on = self._runtime.torch_device(self._device)
        emulated = on.type == "cpu"
        if emulated:
            # torch knows no streams there, so the value must be there.
            self._done.synchronize()
        future: torch.futures.Future[Outputs] = torch.futures.Future(
            devices=None if emulated else [on]
        )
        error = self.exception()
        if error is not None:
            # torch annotates the exception with the type of the result.
            future.set_exception(cast(Any, error))
            return future
        with self._runtime.on_stream(self._side):
            # The future records events on the streams that are current here, and makes its
            # consumers' streams wait for them.
            future.set_result(self._outputs)
        return future

    def source_rank(self) -> int:
        """The rank that sends the message; only of a receive. Known at once: nothing is waited for.

        Raises:
            RingcommError: this is no receive, or a kernel of this communicator gave up by now.
        """
        if self._source is None:
            return super().source_rank()
        self._check()
        return self._source

    def result(self) -> Outputs:
        """Orders the current stream behind the call, then returns the output tensors."""
        self.wait()
        return self._outputs


def _nothing() -> None:
    """A device call is not interrupted by its waiter: waiting does not block."""


def _never() -> bool:
    return False


# Runs calls on a device: on which stream, behind what, and what keeps their tensors alive.


class DeviceCallEngine(DeviceEnd):
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
        joint_launch: JointLaunch | None,
    ) -> None:
        super().__init__(core, membership, order, joint_launch)
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

    def checks(self, op: str) -> CallChecks:
        return DeviceCallChecks(op, (self._rank, self._world_size), self.device_place)

    def rank_context(self) -> RankContext:
        if self._thread_stream is None:
            runtime, device = self.device_place
            self._thread_stream = runtime.make_stream(device)
        return StreamContext(self.device_place, self._thread_stream)

    _thread_stream: Stream | None = None

    # ---- calls --------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """The turn of a call of a communicator that is still usable then, on its device."""
        runtime, device = self.device_place
        with self._queue.turn, runtime.on_device(device):
            self._check_usable(name)
            self._name = name
            yield

    def start_call(self, call: Call, async_op: bool = False) -> Work | None:
        if self.joint_launch is not None:
            self._check_capture(call.name)
        if async_op:
            return self._start_beside(call)
        runtime, device = self.device_place
        with self._turn(call.name):
            self._run(call, runtime.current_stream(device))
        return None

    def _check_capture(self, name: str) -> None:
        runtime, device = self.device_place
        if runtime.is_capturing(device):
            # The streams of the other ranks' threads are not part of this capture.
            raise UnsupportedError(
                f"{where(name, self._rank, self._world_size)}: the current stream records a graph, "
                "and the ranks of one process on one device share a launch, which threads cannot "
                "record together. Record it from one thread (LocalWorld.all_reduce, "
                "reduce_scatter_tensor or all_gather_into_tensor), or give each rank a process"
            )

    def _execute(self, call: Call) -> Outputs:
        self.start_call(call)
        return call.outputs

    def _start_beside(self, call: Call) -> DeviceWork:
        runtime, device = self.device_place
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
            runtime, device = self.device_place
            self._side = runtime.make_stream(device, high_priority=True)
        return self._side

    def _work(
        self, name: str, outputs: Outputs, side: Stream, done: SeenEvent, source: int | None = None
    ) -> DeviceWork:
        place = (*self.device_place, side)
        return DeviceWork(name, outputs, place, done, lambda: self._check_work(name), source)

    def _keep(self, call: Call, done: SeenEvent, stream: int) -> None:
        """Keeps the call's tensors until it is done, so that no allocator reuses their memory."""
        runtime, device = self.device_place
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
        runtime, device = self.device_place
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
        if self.joint_launch is not None:
            self.joint_launch.launch(self._rank, prepared, stream, self._look_for)
            return
        blocks = prepared.prepared_kind[1]
        self._order.before(core, blocks, stream)
        launch([prepared], stream)
        self._order.after(core, blocks, stream)

    def _make_triton(self, checks: CallChecks) -> TritonEnd:
        require_triton(checks)
        from ringcomm._tl.geometry import Geometry
        from ringcomm._tl.hooks import IS_INTERPRETED
        from ringcomm._tl.launch import RankPointers

        if IS_INTERPRETED and self.joint_launch is not None:
            raise UnsupportedError(f"{checks}: {ONE_RANK}")
        core = self._device_core
        geometry = Geometry.of(core.native.geometry)

        def run(plan: KernelPlan, in_ptr: int, out_ptr: int) -> int:
            part = RankPointers(core.native.table_ptr, in_ptr, out_ptr)
            timeout_ns = core.timeout_ms * 1_000_000
            with self._in_records(plan.call, geometry.channels):
                self._submit(TritonLaunch(self.device_place, plan, part, timeout_ns, geometry))
            return 0

        return TritonEnd(run, self._world_size, core.native.family)

    def _kernel_place(self, head: str) -> KernelPlace:
        from ringcomm._tl.hooks import IS_INTERPRETED

        if IS_INTERPRETED and self.joint_launch is not None:
            raise UnsupportedError(f"{head}: {ONE_RANK}")
        core = self._device_core
        return device_place(core.native, self.device_place, core.multiprocessors, head)

    @property
    def segment_bytes(self) -> int:
        size_bytes: int = self._device_core.native.geometry["segment_bytes"]
        return size_bytes

    def chosen(self, algorithm: int) -> int:
        return self._device_core.native.family if algorithm == AUTO else algorithm

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
        runtime, device = self.device_place
        with runtime.on_device(device):
            side = self._side_stream()
            behind = runtime.record_event(device, runtime.current_stream(device))
            runtime.wait_event(device, side.handle, behind)
            done = SeenEvent(runtime.record_event(device, side.handle))
        return self._work(opname, outputs, side, done)

    def finish_host_side(self) -> None:
        """Blocks until the results of earlier calls can be read on the host."""
        runtime, device = self.device_place
        calls = self._everything()
        runtime.synchronize(device)
        self._check_usable("synchronize")
        self._see_completed(calls)


def _submitter(engine: weakref.ref[DeviceCallEngine]) -> Callable[[], None]:
    # The native end keeps this function; a strong reference would be a cycle through it.
    def submit() -> None:
        alive = engine()
        if alive is not None:
            alive._submit(alive._device_core.native)

    return submit
