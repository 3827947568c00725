"""The queue of calls that a worker thread runs in their order.

A synchronous call runs on its caller's thread as long as nothing is queued. Asynchronous calls,
and whatever follows them, go through a first-in first-out queue to one worker thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ringcomm import _native
from ringcomm.comm.work import Outputs, Work
from ringcomm.errors import AbortedError, start_thread

_Item = tuple[Callable[[], Outputs], Work]


def _outcome(run: Callable[[], Outputs]) -> tuple[Outputs, BaseException | None]:
    try:
        return run(), None
    except BaseException as error:
        return [], error


class CallQueue:
    """The queue and its worker thread, which starts with the first asynchronous call.

    It refers to no communicator except through queued calls, so that an idle worker does not keep
    a forgotten communicator alive.

    Attributes:
        turn: a lock, held by the thread that runs a call. The host's communicators bring their
            own, which calls on plain tensors take without Python.
        pending: calls queued or running on the worker thread.
    """

    __slots__ = ("_guard", "_in_call", "_items", "_name", "_stopped", "_thread", "pending", "turn")

    def __init__(self, name: str, turn: _native.CallLock | threading.Lock | None = None) -> None:
        self._name = name
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._in_call = False
        self.turn: Any = threading.Lock() if turn is None else turn
        self.pending = 0

    def submit(self, run: Callable[[], Outputs], work: Work) -> Work:
        """Queues ``run`` behind all earlier calls; ``work`` tells how it ended.

        Raises:
            RingcommError: the worker thread cannot be started; nothing was queued.
        """
        try:
            with self._guard:
                stopped = self._stopped
                if not stopped:
                    self._put(run, work)
        except KeyboardInterrupt:
            work.interrupt()
            raise
        if stopped:
            work.finish([], AbortedError("the communicator was closed before this call began"))
        return work

    def _put(self, run: Callable[[], Outputs], work: Work) -> None:
        if self._thread is None:
            self._begin()
        self.pending += 1
        self._items.put((run, work))

    def _begin(self) -> None:
        thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        # Stopped until the thread runs: after Ctrl-C anywhere in here, the queue takes no calls
        # and waits for no thread. A thread that started ends itself if _thread does not name it.
        self._stopped = True
        try:
            start_thread(
                thread,
                f"{self._name}: an asynchronous call",
                "The call was not made, and the communicator is as good as before: make it "
                "without async_op=True",
            )
        except Exception:
            self._stopped = False
            raise
        self._thread = thread
        self._stopped = False

    def on_worker_thread(self) -> bool:
        """True on the worker thread: in a call that it runs, or in a callback after one."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def inside_call(self) -> bool:
        """True in a call that the worker thread runs, which holds the turn already."""
        return self._in_call and self.on_worker_thread()

    def _loop(self) -> None:
        with self._guard:
            if self._thread is not threading.current_thread():
                return  # Ctrl-C came before its starter knew that it runs
        _native.wait_in_background()
        while True:
            item = self._items.get()
            if item is None:
                return
            self._run(*item)
            # Blocking in get() must not keep the tensors of the last call alive.
            del item

    def _run(self, run: Callable[[], Outputs], work: Work) -> None:
        with self.turn:
            self._in_call = True
            ended = _outcome(run)
            self._in_call = False
        with self._guard:
            self.pending -= 1
        work.finish(*ended)

    def run_now(self, run: Callable[[], Outputs], work: Work) -> None:
        """Runs a call that was made on the worker thread, right there and ahead of the queue."""
        if self._in_call:
            ended = _outcome(run)
        else:
            with self.turn:
                ended = _outcome(run)
        work.finish(*ended)

    def stop(self, timeout_s: float = -1.0) -> bool:
        """Lets the worker end after the queued calls; False if it did not within ``timeout_s``.

        A negative timeout means no limit. On the worker thread itself this does not wait.
        """
        with self._guard:
            self._stopped = True
            thread = self._thread
            if thread is not None:
                self._items.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(None if timeout_s < 0 else timeout_s)
        return not thread.is_alive()
