"""The engine of a communicator on devices over nodes: streams, order, handles, refusals and end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.autograd.graph import increment_version

from ringcomm.comm.arguments import CallChecks
from ringcomm.comm.device.launch import DeviceCallChecks
from ringcomm.comm.device.recorder import SeenEvent
from ringcomm.comm.device.streams import DeviceWork, StreamContext
from ringcomm.comm.engine import EXIT_GRACE_S, UNDER_WAY, Call, RankContext
from ringcomm.comm.messages import Messages
from ringcomm.comm.nodes.device_core import DeviceNodesCore
from ringcomm.comm.options import milliseconds_of
from ringcomm.comm.work import Outputs, Work
from ringcomm.cuda.runtime import DeviceRuntime, Stream
from ringcomm.errors import RingcommError, UnsupportedError, where

Tensor = torch.Tensor


class DeviceNodesCalls(Messages):
    """The calls of one rank on a device over several nodes; see :class:`DeviceCallEngine`.

    A call is enqueued behind the current stream's work and before what follows there, once the
    hosts of its rail peers have made it, too. There are no messages: a carrier that moves device
    memory has one order for all, in which they would wait for collectives.
    """

    _core: DeviceNodesCore  # type: ignore[assignment]  # which has the methods of the native one

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.device_place: tuple[DeviceRuntime, int] = self._core.calls.device_place
        # Never zero, so that no call takes the quick paths, which run it on the caller's thread.
        self._queue.pending = 1
        self._last_stream: int | None = None
        self._side: Stream | None = None
        self._thread_stream: Stream | None = None

    @property
    def device(self) -> torch.device:
        """The device on which the tensors of this communicator's calls lie."""
        runtime, device = self.device_place
        return runtime.torch_device(device)

    @property
    def heap_device(self) -> torch.device:
        return torch.device("cuda", self.device_place[1])

    @property
    def launches(self) -> bool:
        return True

    def _new_checks(self, op: str) -> CallChecks:
        return DeviceCallChecks(op, (self._rank, self._world_size), self.device_place)

    def rank_context(self) -> RankContext:
        if self._thread_stream is None:
            runtime, device = self.device_place
            self._thread_stream = runtime.make_stream(device)
        return StreamContext(self.device_place, self._thread_stream)

    # ---- calls ----------------------------------------------------------------------------------

    def start_call(self, call: Call, async_op: bool = False) -> Work | None:
        self.admit(call.name, call.outputs, call.inputs)
        runtime, device = self.device_place
        if runtime.is_capturing(device):
            raise UnsupportedError(
                f"{where(call.name, self._rank, self._world_size)}: the current stream records a "
                "graph, but over several nodes the hosts agree on each call before it is enqueued, "
                "which a replay would not do. Make the call outside of the capture, or capture "
                "calls of Communicator.node"
            )
        with self._queue.turn, runtime.on_device(device):
            self.raise_if_unusable(call.name)
            current = runtime.current_stream(device)
            if not async_op:
                self._enqueue_on(current, call)
                return None
            side = self._side_stream()
            runtime.wait_event(device, side.handle, runtime.record_event(device, current))
            with runtime.on_stream(side):
                self._enqueue_on(side.handle, call)
            done = SeenEvent(runtime.record_event(device, side.handle))
        return self._work(call.name, call.outputs, side, done)

    def _enqueue_on(self, stream: int, call: Call) -> None:
        """Enqueues a call on the current stream; the caller holds the turn and is on the device."""
        runtime, device = self.device_place
        last, self._last_stream = self._last_stream, stream
        if last is not None and last != stream:
            runtime.wait_event(device, stream, runtime.record_event(device, last))
        begun = runtime.record_event(device, stream)
        status = 1
        try:
            status = call.run(self._native)
        finally:
            done = runtime.record_event(device, stream)
            self._core.device_watch.under_way.add(call, begun, done)
        if status:
            raise self._fault(call.name)
        increment_version(call.written)

    def _execute(self, call: Call) -> Outputs:
        self.start_call(call)
        return call.outputs

    def _side_stream(self) -> Stream:
        if self._side is None:
            runtime, device = self.device_place
            self._side = runtime.make_stream(device, high_priority=True)
        return self._side

    def _work(self, name: str, outputs: Outputs, side: Stream, done: SeenEvent) -> DeviceWork:
        return DeviceWork(
            name, outputs, (*self.device_place, side), done, lambda: self._check_work(name)
        )

    def submit(
        self,
        fn: Callable[[], Outputs],
        opname: str,
        timeout: timedelta | float | None = None,
    ) -> Work:
        """Runs ``fn`` now, on this thread; see :meth:`DeviceCallEngine.submit`."""
        self.raise_if_unusable(opname)
        usual_ms = self._core.timeout_ms
        if timeout is not None:
            self._core.timeout_ms = milliseconds_of(timeout)
        try:
            outputs = fn()
        finally:
            self._core.timeout_ms = usual_ms
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
        runtime.synchronize(device)
        self.raise_if_unusable("synchronize")

    # ---- faults, and the end --------------------------------------------------------------------

    def _check_work(self, name: str) -> None:
        """Raises if a Work's call may have failed; an orderly close does not count."""
        if not self._closed:
            self.raise_if_unusable(name)
        elif self._core.device_watch.error is not None:
            raise self._fault(name)

    def _fault(self, name: str) -> RingcommError:
        self._core.device_watch.see_device()
        return super()._fault(name)

    def _close(self, grace_s: float, in_vain_s: float) -> None:
        if not self._closed and not self._core.ends(grace_s):
            self.abort(UNDER_WAY)
            self._core.ends(EXIT_GRACE_S)
        super()._close(grace_s, in_vain_s)

    def close(self) -> None:
        """Waits for the enqueued calls, then frees the communicator's memory.

        Raises:
            RingcommError: a call failed, and no earlier one has said so. The memory is freed all
                the same.
        """
        unreported: RingcommError | None = None
        if not self._closed and self._refuse is None:
            self._core.ends(self.timeout.total_seconds() + EXIT_GRACE_S)
            if self._core.device_watch.see_device() is not None:
                unreported = self._fault("close")
        super().close()
        if unreported is not None:
            raise unreported

    # ---- what there is not ----------------------------------------------------------------------

    def _refused(self, op: str, text: str) -> NoReturn:
        raise UnsupportedError(
            f"{where(op, self._rank, self._world_size)}: expected a communicator on the host, or "
            f"of one node (Communicator.node), got one on devices over several nodes. {text}"
        )

    def _no_messages(self, op: str) -> NoReturn:
        self._refused(op, "It has no messages: use a collective, or send copies on the CPU")

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self._no_messages("send")

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        self._no_messages("recv")

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self._no_messages("isend")

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        self._no_messages("irecv")

    def check_message(
        self, op: str, tensor: Tensor, peer: Any, tag: Any, *, write: bool
    ) -> tuple[int, int]:
        """Refuses a message of a batch."""
        self._no_messages(op)

    def exchange_messages(self, *_: Any) -> Work:
        """Refuses a batch of messages."""
        self._no_messages("exchange_messages")

    def shard_index_of(self, rank: int) -> int:
        self._refused(
            "sharding state", "Optimizers and zero.shard do not work on devices over nodes yet"
        )
