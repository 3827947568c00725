# SPDX-License-Identifier: Apache-2.0
"""The engine that launches calls on a device, orders them and keeps their tensors alive."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.autograd.graph import increment_version

from ringcomm import _native
from ringcomm.comm.device.copy_plan import CopyPlans
from ringcomm.comm.device.core import Calls, DeviceCore
from ringcomm.comm.device.lifecycle import abandon
from ringcomm.comm.device.rendezvous import MULTICAST, check_multicast
from ringcomm.comm.device.sharing import DeviceOrder, JointLaunch, Prepared, launch_prepared
from ringcomm.comm.device.triton import CompiledKernels, TritonLaunch
from ringcomm.comm.host.arguments import (
    DEVICE_ALGORITHMS,
    CallChecks,
    NativeOp,
)
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import (
    AUTO,
    EXIT_GRACE_S,
    IN_VAIN_S,
    LOOK_S,
    UNDER_WAY,
    Call,
    CallEngine,
    Outputs,
    RankContext,
    Use,
    Work,
    closed,
    itself,
    refusal,
    wait_seconds,
    within,
)
from ringcomm.comm.host.options import milliseconds_of
from ringcomm.comm.host.rendezvous import CLOSED, LEFT, Membership
from ringcomm.comm.host.triton import (
    ONE_RANK,
    KernelTarget,
    TritonEnd,
    device_kernel_target,
    require_triton,
)
from ringcomm.comm.recorder.reader import Fault, FlightRecorder
from ringcomm.comm.recorder.records import Recording
from ringcomm.cuda.runtime import DeviceRuntime, Event, Stream
from ringcomm.errors import (
    ArgumentError,
    PeerLost,
    RingcommError,
    UnsupportedError,
    not_done,
    timed_out,
    where,
)
from ringcomm.process import Deadline, until_exit

if TYPE_CHECKING:
    from ringcomm._tl.launch import KernelPlan

__all__ = [
    "FIRST_POLL_S",
    "LAST_POLL_S",
    "POLL_S",
    "DeviceCallChecks",
    "DeviceCallEngine",
    "DeviceWork",
    "OwnStreams",
    "device_comm_of",
    "device_engine_of",
]


# ---- A rank's own streams on a device, and the Work of a call that runs on a side stream --------


class StreamContext(RankContext):
    """A rank's own stream: on a shared stream, its kernel would block the kernels it waits for."""

    def __init__(self, device_ref: tuple[DeviceRuntime, int], stream: Stream) -> None:
        self._runtime, self._device = device_ref
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


class OwnStreams:
    """The private streams of a communicator on a rank's device, each made when first used.

    Args:
        device_ref: the device's runtime, and the device's ordinal.
    """

    def __init__(self, device_ref: tuple[DeviceRuntime, int]) -> None:
        self._device_ref = device_ref
        self._side: Stream | None = None
        self._thread: Stream | None = None

    @property
    def side(self) -> Stream:
        """The stream of asynchronous calls (the side stream)."""
        if self._side is None:
            runtime, device = self._device_ref
            self._side = runtime.make_stream(device, high_priority=True)
        return self._side

    def of_thread(self) -> StreamContext:
        """Returns the context of a rank that runs as a thread beside other ranks."""
        if self._thread is None:
            runtime, device = self._device_ref
            self._thread = runtime.make_stream(device)
        return StreamContext(self._device_ref, self._thread)

    def side_behind_current(self) -> Stream:
        """Returns the side stream, which now waits for the current stream's work."""
        runtime, device = self._device_ref
        behind = runtime.record_event(device, runtime.current_stream(device))
        runtime.wait_event(device, self.side.handle, behind)
        return self.side


_increment_version = torch._C._increment_version
FIRST_POLL_S = 0.00002
LAST_POLL_S = 0.001
_futures_guard = threading.Lock()


class DeviceWork(Work):
    """One call on a device's side stream.

    ``wait()`` makes the caller's current stream wait for the call, and does not block the host.
    With a timeout it also blocks the host, as torch's NCCL does; with ``holds`` it always does so:
    see NOTE [Messages of threads].
    """

    __slots__ = ("_check", "_device", "_done", "_holds", "_runtime", "_side", "_source")

    def __init__(
        self,
        name: str,
        outputs: Outputs,
        stream_ref: tuple[DeviceRuntime, int, Stream],
        done: Event,
        check: Callable[[], None],
        source: int | None = None,
        holds: bool = False,
    ) -> None:
        # Does not set the attributes of host calls: no thread completes this call.
        self._name = name
        self._outputs = outputs
        self._future = None
        self._runtime, self._device, self._side = stream_ref
        self._done = done
        self._check = check
        self._source = source
        self._holds = holds

    def __repr__(self) -> str:
        return f"<ringcomm.Work {self._name}: on a device>"

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Makes later work of the current stream wait for the call, and returns True.

        Args:
            timeout: timedelta or seconds to block this thread until the call is done; None or zero
                does not block.

        Raises:
            CollectiveTimeout: ``timeout`` passed before the call was done; the call still runs.
            RingcommError: a kernel of this communicator has given up.
        """
        if timeout is not None or self._holds:
            self._wait_on_host(wait_seconds(timeout))
        self._join()
        return True

    def _join(self) -> None:
        """Makes the current stream wait for the call."""
        self._check()
        stream = self._runtime.current_stream(self._device)
        self._runtime.wait_event(self._device, stream, self._done)

    def _wait_on_host(self, seconds: float) -> None:
        if seconds > 0:
            self._block(seconds)
        elif self._holds and not self._runtime.is_capturing(self._device):
            self._block(math.inf)  # blocks until the kernel ends, at the latest at its own deadline

    def _block(self, seconds: float) -> None:
        deadline = Deadline(seconds)
        pause_s = FIRST_POLL_S
        while not self._done.query():
            if deadline.is_over():
                raise not_done(self._name, seconds)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)

    def is_completed(self) -> bool:
        """True once the call is done or has failed; does not block."""
        return self._done.query()

    def is_success(self) -> bool:
        """True once the call is done without an error."""
        return self._done.query() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns the error of a kernel of this communicator; None if no kernel has failed yet."""
        try:
            self._check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Outputs]:
        """Returns a future of the outputs, which makes its consumers' streams wait for the call.

        If a kernel has given up, the future has the error instead.
        """
        with _futures_guard:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> torch.futures.Future[Outputs]:
        on = self._runtime.torch_device(self._device)
        emulated = on.type == "cpu"
        if emulated:
            # On the CPU, torch has no streams that could wait, so wait for the outputs here.
            self._done.synchronize()
        future: torch.futures.Future[Outputs] = torch.futures.Future(
            devices=None if emulated else [on]
        )
        error = self.exception()
        if error is not None:
            # torch's type hint for set_exception() wants the type of the result, hence the cast.
            future.set_exception(cast(Any, error))
            return future
        with self._runtime.on_stream(self._side):
            # The future records events on the streams that are current here, and makes the streams
            # of its consumers wait for these events.
            future.set_result(self._outputs)
        return future

    def source_rank(self) -> int:
        """Returns the rank that sends the received message; does not wait.

        Raises:
            RingcommError: this is not a receive, or a kernel of this communicator has given up.
        """
        if self._source is None:
            return super().source_rank()
        self._check()
        return self._source

    def result(self) -> Outputs:
        """Makes the current stream wait for the call, then returns the output tensors."""
        self.wait()
        return self._outputs


class LaunchedWork(DeviceWork):
    """A call on the devices of one node; the native module keeps its tensors alive."""

    __slots__ = ("calls",)

    calls: _native.DeviceCalls
    _done: _native.DeviceEvent

    def of_message(self, name: str, outputs: Outputs, source: int | None) -> LaunchedWork:
        """Returns the Work of one of several messages that one launch carries.

        Args:
            name: name of the message's own call.
            outputs: the tensors into which the message is received.
            source: the sending rank; None for a send.
        """
        stream_ref = (self._runtime, self._device, self._side)
        work = LaunchedWork(name, outputs, stream_ref, self._done, self._check, source, self._holds)
        work.calls = self.calls
        return work

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        # Most waits take this fast path: one native call.
        if timeout is None and not self._holds:
            try:
                if self.calls.join(self._done):
                    return True
            except RuntimeError as error:
                raise self._not_joined(error) from error
        return super().wait(timeout)

    def _join(self) -> None:
        try:
            if self.calls.join(self._done):
                return
            self._check()
            with self._runtime.on_device(self._device):
                self.calls.join(self._done, checked=True)
        except RingcommError:
            raise
        except RuntimeError as error:
            raise self._not_joined(error) from error

    def _not_joined(self, error: RuntimeError) -> RingcommError:
        return RingcommError(
            f"{self._name}: expected the current stream of device {self._device} to wait for the "
            f"call, but the driver refused: {error}. Usually an earlier kernel of this process has "
            "failed, and the error stays until the process ends: find the kernel with "
            "CUDA_LAUNCH_BLOCKING=1"
        )


class DeviceCallChecks(CallChecks):
    """Argument checks of one call on a device."""

    __slots__ = ("_device", "_runtime")
    algorithms = frozenset(DEVICE_ALGORITHMS.values())

    def __init__(
        self, op: str, rank_of: tuple[int, int], device_ref: tuple[DeviceRuntime, int]
    ) -> None:
        super().__init__(op, *rank_of)
        self._runtime, self._device = device_ref

    def check_device(self, name: str, tensor: torch.Tensor) -> None:
        if not self._runtime.is_device_tensor(tensor, self._device):
            self.fail(
                f"{name}: expected a tensor on device {self._device} "
                f"({self._runtime.torch_device(self._device)}), got one on {tensor.device}; this "
                "communicator works on that device alone. Copy the tensor there, or use a "
                "communicator of the tensor's device"
            )


# The interval at which a closing communicator checks whether its last calls have ended.
POLL_S = 0.0005


def _submitting(engine: weakref.ref[DeviceCallEngine]) -> Callable[[], None]:
    """Returns the function that the native object calls to launch an engine's prepared call.

    The native object keeps the function, so a bound method would make a reference cycle.
    """

    def submit() -> None:
        alive = engine()
        assert alive is not None  # the engine itself is calling
        alive._submit(alive.device_core.native)

    return submit


# Tells the type checker that a core is a device's native core; at run time it does nothing.
device_comm_of: Callable[[Core], _native.DeviceComm] = itself


class DeviceCallEngine(CallEngine):
    """Makes the calls of a rank on a device; a call returns when it is queued on a stream.

    A call runs after the earlier work of the caller's current stream and before its later work. All
    calls of one communicator run one after another, even if made on different streams. With
    ``async_op`` they run on the communicator's side stream.
    """

    fast: _native.DeviceCalls
    starts: _native.DeviceCalls | None

    def __init__(
        self,
        core: DeviceCore,
        membership: Membership,
        order: DeviceOrder,
        joint_launch: JointLaunch | None,
    ) -> None:
        recorder, rank_of = core.recorder, (core.rank, core.world_size)
        locate = recorder.located if recorder is not None else None
        reader = FlightRecorder(recorder, membership.name, rank_of, locate)
        super().__init__(core, core.native, core.calls, membership, reader)
        self.device_core = core
        self.calls = self.starts = core.calls
        self.compiled = self._triton_calls = _native.TritonCalls(core.calls)
        self.device_ref: tuple[DeviceRuntime, int] = (core.runtime, core.device)
        self._checks: dict[str, DeviceCallChecks] = {}
        self.records = recorder.native if recorder is not None else None
        self.order = order
        self.joint_launch = joint_launch
        self._submission = _submitting(weakref.ref(self))
        if joint_launch is not None:
            core.native.set_submit(self._submission)
        # Calls whose tensors must live until the capture of a graph ends, with their streams.
        self._captured: list[tuple[Call, int]] = []
        # Set at the close: True if an error has made the communicator unusable before.
        self._told: bool | None = None
        self._unreported: RingcommError | None = None
        self.streams = OwnStreams(self.device_ref)
        self._side_ref: tuple[DeviceRuntime, int, Stream]
        self.calls.set_shared(joint_launch is not None)
        # This rank's prepared call, set while one thread prepares the calls of all ranks.
        self._collecting = False
        self._collected: Prepared | None = None
        self.sends_alone = False  # True while this rank launches a message
        self.message_streams: set[int] = set()
        self._copy_plans = CopyPlans(core)
        self._name = ""

    @property
    def device(self) -> torch.device:
        return self.device_core.runtime.torch_device(self.device_core.device)

    @property
    def heap_device(self) -> torch.device:
        return torch.device("cuda", self.device_core.device)

    @property
    def launches(self) -> bool:
        return True

    def _new_checks(self, op: str) -> CallChecks:
        checks = self._checks.get(op)
        if checks is None:
            checks = self._checks[op] = DeviceCallChecks(op, self.rank_of, self.device_ref)
        return checks

    def use_kernels(
        self,
        checks: CallChecks,
        kernels: str | None,
        algorithm: str,
        dtype: torch.dtype,
        reduction: NativeOp | None = None,
    ) -> Use:
        if algorithm == MULTICAST and reduction is not None:
            check_multicast(checks, dtype, reduction)
        return super().use_kernels(checks, kernels, algorithm, dtype, reduction)

    def rank_context(self) -> RankContext:
        return self.streams.of_thread()

    # ---- calls --------------------------------------------------------------------------------

    def begin_turn(self, name: str) -> None:
        """Begins a call, or raises; the caller holds ``queue.turn`` and is on the device."""
        self.check_usable(name)
        self._name = name

    def _start_call(self, call: Call, async_op: bool) -> Work | None:
        self.admit(call.name, call.outputs, call.inputs)
        if self.joint_launch is not None:
            self._check_capture(call.name)
        if async_op:
            return self._start_beside(call)
        runtime, device = self.device_ref
        with self.queue.turn, runtime.on_device(device):
            self.begin_turn(call.name)
            self._run(call, runtime.current_stream(device))
        return None

    def is_capturing(self) -> bool:
        runtime, device = self.device_ref
        return runtime.is_capturing(device)

    def _check_capture(self, name: str) -> None:
        runtime, device = self.device_ref
        if runtime.is_capturing(device):
            # The capture in this thread does not include the streams of the other ranks' threads.
            raise UnsupportedError(
                f"{where(name, *self.rank_of)}: the current stream is capturing a graph, "
                "and the ranks of one process on one device share a launch, which threads cannot "
                "capture together. Capture it from one thread (LocalWorld.all_reduce, "
                "reduce_scatter_tensor or all_gather_into_tensor), or give each rank a process"
            )

    def execute(self, call: Call) -> Outputs:
        self.start_call(call)
        return call.outputs

    def _start_beside(self, call: Call) -> DeviceWork:
        runtime, device = self.device_ref
        with self.queue.turn, runtime.on_device(device):
            self.begin_turn(call.name)
            side = self._take_side()
            current = runtime.current_stream(device)
            runtime.wait_event(device, side.handle, runtime.record_event(device, current))
            with runtime.on_stream(side):
                self._run(call, side.handle)
            done = self.calls.mark(side.handle)
            self.keep(call, done, (side.handle, current))
        return self.started(call.name, call.outputs, done, [])

    def _take_side(self) -> Stream:
        """Returns the side stream, and passes it to the native object."""
        side = self.streams.side
        self.calls.set_side(side.handle)
        self._side_ref = (*self.device_ref, side)
        return side

    def planned(self, call: Call) -> Callable[[], int] | None:
        if self.joint_launch is not None:
            return None
        with self.queue.turn:
            self.begin_turn(call.name)
            try:
                plan = self.calls.plan(call.run, [*call.outputs, *call.inputs])
            except BaseException as error:
                self.raise_worded(call.name, error)
        return plan.launch if plan is not None else None

    def gathers_in_place(self, check: Callable[[], Call]) -> Callable[[], Call]:
        return self._copy_plans.gather(self, check)

    def started(
        self,
        name: str,
        outputs: Outputs,
        event: _native.DeviceEvent,
        written: Outputs | None = None,
    ) -> LaunchedWork:
        _increment_version(outputs if written is None else written)
        check = partial(self.check_work, name)
        work = LaunchedWork(name, outputs, self._side_ref, event, check)
        work.calls = self.calls
        return work

    def keep(self, call: Call, done: _native.DeviceEvent, streams: tuple[int, int]) -> None:
        """Keeps the call's tensors until the call is done, so that no allocator reuses them.

        Args:
            call: the launched call.
            done: an event at the call's end.
            streams: the call's stream, and its caller's current stream.
        """
        runtime, device = self.device_ref
        stream, current = streams
        if self._captured:
            capturing = runtime.is_capturing
            self._captured = [each for each in self._captured if capturing(device, each[1])]
        if runtime.is_capturing(device, stream):
            # An event in a capture never passes. Memory freed during the capture could be reused by
            # a later part of the graph. After the capture, the graph's owner keeps the tensors.
            self._captured.append((call, stream))
            return
        self.calls.keep(call, done, current)

    def _run(self, call: Call, stream: int) -> None:
        """Launches the call on ``stream``, after earlier calls; the caller holds ``queue.turn``."""
        native = self.device_core.native
        try:
            self.calls.follow(stream)
        except RuntimeError as error:
            raise RingcommError(f"{where(call.name, *self.rank_of)}: {error}") from error
        native.stream = stream
        try:
            call.run(native)
        except BaseException as error:
            self.raise_worded(call.name, error)
        increment_version(call.written)

    def prepare(self, call: Call, stream: int) -> Prepared:
        """Returns the launch that :meth:`_run` would make; the caller holds ``queue.turn``."""
        self._collecting = True
        self.device_core.native.set_submit(self._submission)
        try:
            self._run(call, stream)
        finally:
            self._collecting = False
            if self.joint_launch is None:
                self.device_core.native.set_submit(None)
        prepared, self._collected = self._collected, None
        assert prepared is not None
        return prepared

    def withdraw(self) -> None:
        """Withdraws the launch that :meth:`prepare` returned."""
        self.device_core.native.withdraw()

    def _submit(self, prepared: Prepared) -> None:
        """Launches a prepared call, or hands it to :meth:`prepare`."""
        if self._collecting:
            self._collected = prepared
            return
        core = self.device_core
        stream = core.native.stream
        if self.sends_alone:
            # Not every rank of this process takes part in a message, so there is no joint launch.
            # Messages need not wait for each other: DeviceOrder.sends() reserves their blocks.
            launch_prepared([prepared], stream)
            return
        if self.joint_launch is not None:
            self.joint_launch.launch(self.rank, prepared, stream, self._look_for)
            return
        blocks = prepared.prepared_kind[1]
        self.order.before(core, blocks, stream)
        launch_prepared([prepared], stream)
        self.order.after(core, blocks, stream)

    def _make_triton(self, checks: CallChecks) -> TritonEnd:
        require_triton(checks)
        import triton

        from ringcomm._tl.geometry import Geometry
        from ringcomm._tl.hooks import IS_INTERPRETED
        from ringcomm._tl.launch import RankPointers

        if IS_INTERPRETED and self.joint_launch is not None:
            raise UnsupportedError(f"{checks}: {ONE_RANK}")
        core = self.device_core
        geometry = Geometry.of(core.native.geometry)
        compiled = CompiledKernels(core.native, core.driver)
        device_ref, table_ptr = self.device_ref, core.native.table_ptr
        if not IS_INTERPRETED:
            self._triton_calls.set_knobs(triton.knobs.runtime)

        def run(plan: KernelPlan, in_ptr: int, out_ptr: int) -> int:
            pointers = RankPointers(table_ptr, in_ptr, out_ptr)
            timeout_ns = core.timeout_ms * 1_000_000
            call = TritonLaunch(device_ref, plan, pointers, timeout_ns, geometry, compiled)
            with self._in_records(plan.call, geometry.channels):
                self._submit(call)
            return 0

        return TritonEnd(run, self.world_size, self.chosen(AUTO))

    def _kernel_target(self, head: str) -> KernelTarget:
        from ringcomm._tl.hooks import IS_INTERPRETED

        if IS_INTERPRETED and self.joint_launch is not None:
            raise UnsupportedError(f"{head}: {ONE_RANK}")
        core = self.device_core
        return device_kernel_target(core.native, self.device_ref, core.multiprocessors, head)

    def _look_for(self, missing: Sequence[int], waited_s: float) -> None:
        """Raises if a missing rank, a thread of this process, can no longer make its call."""
        core, name = self.device_core, self._name
        self.check_usable(name)
        if core.any_aborted():
            raise self.fault(name)
        head = where(name, *self.rank_of)
        for rank in missing:
            if core.has_closed(rank):
                raise self._give_up(
                    PeerLost,
                    f"{head}: expected rank {rank} to take part, but it has closed the "
                    "communicator. All ranks must make the same calls before one of them closes",
                    self._waits_in_vain("peer_closed", rank),
                )
            if self.joint_launch is not None and self.joint_launch.has_left(rank):
                raise self._give_up(
                    PeerLost,
                    f"{head}: expected rank {rank} to take part, but {LEFT}. All ranks must make "
                    "the same calls before one of them returns",
                    self._waits_in_vain("peer_lost", rank),
                )
        if waited_s * 1000 > core.timeout_ms:
            named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            error = timed_out(
                f"{head}:",
                core.timeout_ms / 1000,
                f"{named} to make the same call (item 0: nothing was launched)",
                "Ranks of one process on one device run in one launch: give each a thread that "
                "makes all its calls",
            )
            raise self._give_up(type(error), str(error), self._waits_in_vain("timeout", missing[0]))

    def submit(
        self,
        fn: Callable[[], Outputs],
        opname: str,
        timeout: timedelta | float | None = None,
    ) -> Work:
        """Runs ``fn`` now, on this thread; the Work is done when the calls of ``fn`` are done.

        Args:
            fn: may call collectives of this communicator; returns the output tensors.
            opname: the name in errors.
            timeout: timeout of the calls that ``fn`` makes; None: the communicator's timeout.

        Raises:
            AbortedError: the communicator is unusable.
        """
        self.check_usable(opname)
        outputs = fn() if timeout is None else within(self.owner, milliseconds_of(timeout), fn)
        runtime, device = self.device_ref
        with runtime.on_device(device):
            self._take_side()
            done = self.calls.mark(self.streams.side_behind_current().handle)
        return self.started(opname, outputs, done, [])

    def finish_host_side(self) -> None:
        """Blocks until the results of earlier calls can be read on the host."""
        runtime, device = self.device_ref
        calls = self._everything()
        runtime.synchronize(device)
        self.check_usable("synchronize")
        self._see_completed(calls)

    # ---- the flight recorder --------------------------------------------------------------------

    def recording(self) -> Recording:
        """See :meth:`CallEngine.recording`."""
        if self.refuse is None:
            # Suppress errors: the records can be read even if the device does not answer any more.
            with suppress(Exception):
                self.calls.look()
                self.device_core.look()
        return super().recording()

    def _everything(self) -> list[Calls]:
        recorder = self.device_core.recorder
        return recorder.everything() if recorder is not None else []

    def _see_completed(self, calls: list[Calls]) -> None:
        """Writes into the records that the device has completed ``calls``."""
        if self.records is not None:
            for each in calls:
                self.records.seen_completed(*each)

    @contextmanager
    def _in_records(self, words: tuple[int, int, int, int], channels: int) -> Iterator[None]:
        """Records the launch of Triton kernels for a collective with these ``call_words``."""
        records, (runtime, device) = self.records, self.device_ref
        if records is None:
            yield
            return
        captured = runtime.is_capturing(device, self.device_core.native.stream)
        records.enqueue_triton(words, channels, captured)
        try:
            yield
        except BaseException:
            records.withdraw()
            raise

    # ---- faults ---------------------------------------------------------------------------------

    def check_usable(self, name: str) -> None:
        if self.refuse is not None:
            raise self.refuse(name)
        if self.device_core.native.raised:
            raise self.fault(name)

    def check_work(self, name: str) -> None:
        """Raises if a Work's call may have failed.

        An orderly close is not an error: it has waited for all calls.
        """
        if self._told is not False:
            self.check_usable(name)
        elif self.device_core.native.raised:
            raise self.fault(name)

    def raise_worded(self, name: str, error: BaseException) -> NoReturn:
        """Raises the error of a call's launch, with the call's name in front of the message."""
        if isinstance(error, KeyboardInterrupt):
            self.interrupt()
        if isinstance(error, RingcommError) or not isinstance(error, (ValueError, RuntimeError)):
            raise error
        head = where(name, *self.rank_of)
        if isinstance(error, ValueError):
            raise ArgumentError(f"{head}: {error}") from error
        # Peers may have launched this call, and would take this rank's next call for it.
        raise self._give_up(RingcommError, f"{head}: {error}") from error

    def _give_up(
        self, kind: type[RingcommError], text: str, waits: Fault | None = None
    ) -> RingcommError:
        """Makes the communicator unusable on all ranks, and returns the error that says why.

        Args:
            kind: class of the error.
            text: beginning of its message.
            waits: the fault, if the call waited before its launch and gave up; None if it was
                refused.
        """

        def word(told: Fault) -> RingcommError:
            return kind(
                f"{text}. {told.get('story', '')}The communicator is unusable now: close it and "
                f"build a new one{told.get('trace', '')}"
            )

        refused = {"kind": "aborted", "peer": -1, "sequence": 0}
        fault = {"rank": self.rank, "message": False, "mine": "", **(waits or refused)}
        error = word(fault)
        try:
            error = word(self._recorder.traced(fault, word))
        finally:  # even if a second Ctrl-C interrupts traced()
            self._make_unusable(error, text)
        return error

    def _disable(self, make_error: Callable[[str], RingcommError]) -> None:
        super()._disable(make_error)
        self.calls.disable()

    def _make_unusable(self, error: RingcommError, text: str) -> None:
        self._disable(refusal(self.rank, self.world_size, error))
        self.device_core.abort(text)
        self._abort_companion(text)

    def _waits_in_vain(self, kind: str, peer: int) -> Fault:
        """Returns the fault of the call that was about to be launched, and records its failure."""
        recorder = self.device_core.recorder
        number = recorder.gave_up(kind, peer) if recorder is not None else 0
        return {"kind": kind, "peer": peer, "sequence": number}

    def _why_lost(self, peer: int) -> str:
        # Only a close is reported here; Membership.processes reports processes that have ended.
        return CLOSED if self.device_core.has_closed(peer) else ""

    def _events_of_the_end(self) -> list[Event]:
        """Returns events; when all have passed, no launched kernel runs any more."""
        runtime, device = self.device_ref
        events: list[Event] = [*self.calls.kept()[0]]
        last = self.calls.last_stream
        # kept() has a message until a stream waits for the message; its kernel may run longer.
        streams = self.message_streams if last is None else {last, *self.message_streams}
        for stream in streams:
            if not runtime.is_capturing(device, stream):
                with runtime.on_device(device):
                    events.append(runtime.record_event(device, stream))
        return events

    def _end_calls(self, grace_s: float) -> bool:
        """Refuses new calls and waits for launched calls; False if ``grace_s`` was too short."""
        deadline = Deadline(grace_s)
        if not self._takes_turn(deadline):
            return False
        try:
            if self._told is None:
                self._told = self.refuse is not None
            self._disable(closed(self.rank, self.world_size, self.membership.name))
            if self.calls.has_captured:
                # Wait for the whole device: the streams of a graph's replays are not known here.
                self.device_core.synchronize()
            events = self._events_of_the_end()
            while not all(event.query() for event in events):
                if deadline.is_over():
                    return False
                time.sleep(POLL_S)
            self._see_completed(self._everything())
            return True
        finally:
            self.queue.turn.release()

    def _takes_turn(self, deadline: Deadline) -> bool:
        """Takes ``queue.turn``; False if its holder is late or waits for a lost peer."""
        joint = self.joint_launch
        while not self.queue.turn.acquire(timeout=LOOK_S):
            in_vain = joint is not None and joint.waited_s(self.rank) >= IN_VAIN_S
            if deadline.is_over() or in_vain:
                return False
        return True

    def is_busy(self) -> bool:
        """True if calls or messages of this rank are under way, on the host or on the device."""
        if super().is_busy():
            return True
        if self.closed or self.refuse is not None:
            return False
        # After an error of the device no kernel runs any more; the rank's own calls report it.
        with suppress(RuntimeError):
            return not all(event.query() for event in self._events_of_the_end())
        return False

    def set_peer_left(self, peer: int, left: bool) -> None:
        self.device_core.native.mark_lost(peer, left)
        if self.joint_launch is not None:
            self.joint_launch.set_left(peer, left)

    def _close(self, grace_s: float, in_vain_s: float) -> None:
        if self.closed:
            return
        if not self._end_calls(grace_s):
            self.abort(UNDER_WAY)
            if not self._end_calls(EXIT_GRACE_S):
                # The region is never freed, since a kernel that does not end still uses it.
                return
        if not self._told and self.device_core.aborted:
            self._unreported = self.fault("close")
            self.refuse = refusal(self.rank, self.world_size, self._unreported)
            self._told = True
        self.order.leave(self.joint_launch or self.device_core)
        super()._close(grace_s, in_vain_s)
        self.calls.forget_kept()
        self._captured.clear()

    def close(self) -> None:
        """Waits for the launched calls, then frees the communicator's memory.

        Raises:
            RingcommError: a kernel gave up, and no earlier call has reported it. The memory is also
                freed in this case.
        """
        super().close()
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    @until_exit
    def __del__(self) -> None:
        super().__del__()
        # There is nothing to close if the constructor failed, or in a forked child.
        if not hasattr(self, "_told") or self.closed:
            return
        self.order.leave(self.joint_launch or self.device_core)
        kept, captured = self.calls.kept()[1], self.calls.has_captured
        abandon(self.device_core, self._events_of_the_end(), kept, captured=captured)


# Tells the type checker that an engine is a DeviceCallEngine; at run time it does nothing.
device_engine_of: Callable[[CallEngine], DeviceCallEngine] = itself
