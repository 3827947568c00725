"""A rank's streams on a device: its thread's own, and the Work of a call beside the caller's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch

from ringcomm.comm.device.recorder import SeenEvent
from ringcomm.comm.engine import RankContext
from ringcomm.comm.work import Outputs, Work, wait_seconds
from ringcomm.cuda.runtime import DeviceRuntime, Stream
from ringcomm.deadlines import Deadline
from ringcomm.errors import CollectiveTimeout

__all__ = ["FIRST_POLL_S", "LAST_POLL_S", "DeviceWork", "StreamContext"]


class StreamContext(RankContext):
    """A rank's own stream: on a shared one its kernel would block those of the awaited peers."""

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


FIRST_POLL_S = 0.00002
LAST_POLL_S = 0.001


class DeviceWork(Work):
    """One call on a device's side stream.

    ``wait()`` makes the stream that is current where it is called wait for the call; the host
    goes on. With a timeout it blocks the host, as for torch's NCCL, and with ``holds`` always:
    see NOTE [Messages of threads].
    """

    __slots__ = ("_check", "_device", "_done", "_holds", "_runtime", "_side", "_source")

    def __init__(
        self,
        name: str,
        outputs: Outputs,
        place: tuple[DeviceRuntime, int, Stream],
        done: SeenEvent,
        check: Callable[[], None],
        source: int | None = None,
        holds: bool = False,
    ) -> None:
        super().__init__(name, _nothing, _never)
        self._outputs = outputs
        self._runtime, self._device, self._side = place
        self._done = done
        self._check = check
        self._source = source
        self._holds = holds

    def part(self, name: str, outputs: Outputs, source: int | None) -> DeviceWork:
        """Returns the handle of one message of several that went out together.

        Args:
            name: of the message's own call.
            outputs: what it receives into.
            source: the rank that sends; None: it is a send.
        """
        place = (self._runtime, self._device, self._side)
        check, holds = self._check, self._holds
        return DeviceWork(name, outputs, place, self._done, check, source, holds)

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
        stream = self._runtime.current_stream(self._device)
        if seconds > 0:
            self._block(seconds)
        elif self._holds and not self._runtime.is_capturing(self._device, stream):
            self._block(math.inf)  # as long as the kernel's own deadline lets it run
        self._check()
        self._runtime.wait_event(self._device, stream, self._done.event)
        return True

    def _block(self, seconds: float) -> None:
        deadline = Deadline(seconds)
        pause_s = FIRST_POLL_S
        while not self._done.query():
            if deadline.is_over():
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
        """Returns the error of a kernel of this communicator, or None (also while it runs)."""
        try:
            self._check()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Outputs]:
        """Returns a future that gives the outputs, ordered on the stream that its consumer uses.

        The future gives the error instead if a kernel has given up by now.
        """
        with self._guard:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> torch.futures.Future[Outputs]:
        on = self._runtime.torch_device(self._device)
        emulated = on.type == "cpu"
        if emulated:
            # torch has no streams on the CPU, so the outputs must be complete.
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
        """Returns the rank that sends the message, without waiting; only for a receive.

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
    """Does nothing on Ctrl-C: a waiter of a device call does not block."""


def _never() -> bool:
    return False
