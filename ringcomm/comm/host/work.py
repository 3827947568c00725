"""Handles of calls that run asynchronously."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

from ringcomm.errors import ArgumentError, CollectiveTimeout, RingcommError
from ringcomm.process import Deadline

LOOK_S = 0.1
Outputs = list[torch.Tensor]


def wait_seconds(timeout: timedelta | float | None) -> float:
    """Seconds to wait; -1 means no limit, as zero does for torch's Work."""
    if timeout is None:
        return -1.0
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds < 0:
        raise ArgumentError(f"wait: expected a timeout >= 0, got {timeout!r}")
    return seconds or -1.0


class Work:
    """One call that runs off the caller's thread.

    The tensors of the call stay alive until it is done, even if the handle is dropped.

    Attributes:
        interrupt: aborts the communicator after Ctrl-C.
    """

    __slots__ = (
        "__weakref__",
        "_error",
        "_finished",
        "_future",
        "_gate",
        "_guard",
        "_name",
        "_outputs",
        "_refuse_wait",
        "interrupt",
    )

    def __init__(
        self,
        name: str,
        interrupt: Callable[[], None],
        refuse_wait: Callable[[], bool],
    ) -> None:
        self._name = name
        self.interrupt = interrupt
        self._refuse_wait = refuse_wait
        self._finished = False
        self._error: BaseException | None = None
        self._outputs: Outputs = []
        self._future: torch.futures.Future[Outputs] | None = None
        self._guard = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()

    def __repr__(self) -> str:
        state = "running"
        if self._finished:
            state = "done" if self._error is None else f"failed: {self._error}"
        return f"<ringcomm.Work {self._name}: {state}>"

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the call is done and returns True.

        Args:
            timeout: timedelta or seconds; None or zero waits as long as the call takes.

        Raises:
            CollectiveTimeout: ``timeout`` passed first; the call goes on.
            RingcommError: what the call raised.
        """
        try:
            if not self._finished:
                self._await(timeout)
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if self._error is not None:
            raise self._error
        return True

    def _await(self, timeout: timedelta | float | None) -> None:
        seconds = wait_seconds(timeout)
        if self._refuse_wait():
            raise RingcommError(
                f"{self._name}: waited for on the thread that is to run it, so it would never "
                "end. Do not wait for a later call inside a callback of an earlier one"
            )
        if seconds < 0:
            self._gate.acquire()
        elif not self._ends_within(Deadline(seconds)):
            raise CollectiveTimeout(
                f"{self._name}: not done after {seconds:g} s of wait(timeout=...); the call goes "
                "on. Wait again, or abort the communicator"
            )
        self._gate.release()

    def _ends_within(self, deadline: Deadline) -> bool:
        while not self._gate.acquire(timeout=min(deadline.left_s(), LOOK_S)):
            if deadline.is_over():
                return False
        return True

    def is_completed(self) -> bool:
        """True once the call is done or has failed; does not block."""
        return self._finished

    def is_success(self) -> bool:
        """True once the call is done without an error."""
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        """Returns what the call raised, or None (also while it runs)."""
        return self._error

    def get_future(self) -> torch.futures.Future[Outputs]:
        """Returns a future that gives the list of output tensors, or the error."""
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._finished:
                    self._settle(self._future)
            return self._future

    def result(self) -> Outputs:
        """Waits, then returns the output tensors."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Returns the rank that sent the message; only for a receive."""
        raise RingcommError(f"{self._name}: source_rank() is known of a receive only")

    def _settle(self, future: torch.futures.Future[Outputs]) -> None:
        error = self._error
        if error is None:
            future.set_result(self._outputs)
            return
        if not isinstance(error, Exception):
            error = RingcommError(f"{self._name}: {error!r}")
        # torch annotates the exception with the type of the result.
        future.set_exception(cast(Any, error))

    def finish(self, outputs: Outputs, error: BaseException | None) -> None:
        """Records the end of the call; called once, by whoever ran it."""
        with self._guard:
            self._outputs = outputs
            self._error = error
            self._finished = True
            future = self._future
        self._gate.release()
        if future is not None:
            self._settle(future)
