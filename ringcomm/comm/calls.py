"""A call of a communicator, who takes part in it, and the queue that keeps calls in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn

from ringcomm import _native
from ringcomm.comm.options import CommOptions
from ringcomm.comm.work import Outputs, Work
from ringcomm.errors import (
    AbortedError,
    RingcommError,
    start_thread,
    unusable_error,
    where,
)
from ringcomm.memory.host_heap import MappedHeap
from ringcomm.rendezvous.handles import Store

# What the engine handles: a membership, a checked call, and a native object past its end.


@dataclass(frozen=True)
class Membership:
    """Who a communicator connects, and what it was built with.

    ``ranks`` are the members' ranks in the outermost communicator. ``heaps`` are their heaps
    as mapped here, held for as long as the communicator lives.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    options: CommOptions
    heaps: tuple[MappedHeap, ...]


class RankContext:
    """What surrounds a rank that runs as a thread beside others: on the host, nothing."""

    def taken(self) -> AbstractContextManager[None]:
        """Entered by the rank's thread."""
        return nullcontext()

    def rejoin(self) -> None:
        """Called by the thread that started the ranks, once all have ended."""


class Call:
    """A checked call, ready to run.

    ``run`` takes the native communicator and returns its status; ``outputs`` are the tensors that
    hold the result afterwards. Not a dataclass: one is made for each call, and a frozen
    dataclass takes three times as long to make.
    """

    __slots__ = ("name", "outputs", "run")

    def __init__(self, name: str, run: Callable[[_native.Comm], int], outputs: Outputs) -> None:
        self.name = name
        self.run = run
        self.outputs = outputs


# Functions, so that what they return holds no communicator: a cycle would keep its memory and
# descriptors until the garbage collector comes by.
def refusal(rank: int, world_size: int, first: RingcommError) -> Callable[[str], RingcommError]:
    """Makes the error of a call after the communicator's first fault."""
    return lambda op: unusable_error(op, rank, world_size, first)


def closed(rank: int, world_size: int, name: str) -> Callable[[str], RingcommError]:
    """Makes the error of a call after the communicator was closed."""
    return lambda op: AbortedError(
        f"{where(op, rank, world_size)}: the communicator {name!r} was closed; build a new one"
    )


class Unusable:
    """Stands in for the native communicator once it must not be called any more.

    The quick paths call the native object without asking whether it is still usable; this way the
    question costs them nothing.
    """

    _make_error: Callable[[str], RingcommError]

    def __init__(self, make_error: Callable[[str], RingcommError]) -> None:
        object.__setattr__(self, "_make_error", make_error)

    def __setattr__(self, name: str, value: object) -> None:
        raise self._make_error(name)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._make_error(name.removesuffix("_plain"))


# Keeps the calls of one communicator in order.
#
# A synchronous call runs on its caller's thread as long as nothing is queued. Asynchronous calls,
# and whatever follows them, go through a first-in first-out queue to one worker thread.

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
        turn: a lock, held by whoever runs a call. The host's communicators bring their own, which
            calls on plain tensors take without Python.
        pending: calls queued or running on the worker thread.
    """

    __slots__ = ("_guard", "_in_call", "_items", "_name", "_stopped", "_thread", "pending", "turn")

    def __init__(self, name: str, turn: _native.CallLock | None = None) -> None:
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
        # Until it runs, so that after Ctrl-C anywhere in here the queue takes nothing and waits for
        # no thread; the loop ends where _thread does not name it.
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
        """Lets the worker end after what is queued; False if it did not within ``timeout_s``.

        Negative means no limit. Called on the worker thread itself it does not wait.
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
