# SPDX-License-Identifier: Apache-2.0
"""The engine that runs calls on one core: their order, faults, abort, close, exit and fork."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch.autograd.graph import increment_version
from torch.distributed import Store

from ringcomm import _native
from ringcomm.comm.host.arguments import (
    CallChecks,
    NativeOp,
    admit_gradients,
    admit_keys,
    intercepting_keys,
)
from ringcomm.comm.host.core import CompiledCalls, Core, CoreOwner, FastCalls, StartCalls
from ringcomm.comm.host.options import check_compression, milliseconds_of
from ringcomm.comm.host.profiling import event, is_profiled
from ringcomm.comm.host.rendezvous import Membership, why_lost
from ringcomm.comm.host.triton import (
    NATIVE,
    TRITON,
    HostTriton,
    KernelTarget,
    TritonEnd,
    check_kernels,
    check_triton,
    host_kernel_target,
)
from ringcomm.comm.recorder.reader import FlightRecorder, at_this_call_site
from ringcomm.comm.recorder.records import Recording
from ringcomm.errors import (
    AbortedError,
    ArgumentError,
    ForkError,
    RingcommError,
    UnsupportedError,
    from_fault,
    not_done,
    start_thread,
    unusable_error,
    where,
)
from ringcomm.process import Deadline, until_exit
from ringcomm.rendezvous.same_node import Lookout

LOOK_S = 0.1
Outputs = list[torch.Tensor]


def wait_seconds(timeout: timedelta | float | None) -> float:
    """Returns the seconds to wait; -1 (no limit) for None and for 0, as in torch's Work."""
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
            CollectiveTimeout: ``timeout`` passed first; the call continues.
            RingcommError: the error that the call raised.
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
                f"{self._name}: this wait is on the thread that must run the call, and would "
                "never end. Do not wait for a later call inside a callback of an earlier call"
            )
        if seconds < 0:
            self._gate.acquire()
        elif not self._ends_within(Deadline(seconds)):
            raise not_done(self._name, seconds)
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
        """Returns the exception that the call raised; None if it raised none, or still runs."""
        return self._error

    def get_future(self) -> torch.futures.Future[Outputs]:
        """Returns a future whose value is the list of output tensors, or the error."""
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
        raise RingcommError(f"{self._name}: source_rank() is only known for a receive")

    def _settle(self, future: torch.futures.Future[Outputs]) -> None:
        error = self._error
        if error is None:
            future.set_result(self._outputs)
            return
        if not isinstance(error, Exception):
            error = RingcommError(f"{self._name}: {error!r}")
        # torch annotates the argument of set_exception() with the result's type, hence the cast.
        future.set_exception(cast(Any, error))

    def finish(self, outputs: Outputs, error: BaseException | None) -> None:
        """Records the end of the call; called once, by the thread that ran the call."""
        with self._guard:
            self._outputs = outputs
            self._error = error
            self._finished = True
            future = self._future
        self._gate.release()
        if future is not None:
            self._settle(future)


# ---- The queue of calls, which a worker thread runs in order -------------------------------------
# A synchronous call runs on its caller's thread as long as nothing is queued. Asynchronous calls,
# and all calls after them, go through a first-in first-out queue to one worker thread.

_Item = tuple[Callable[[], Outputs], Work]


def _outcome(run: Callable[[], Outputs]) -> tuple[Outputs, BaseException | None]:
    try:
        return run(), None
    except BaseException as error:
        return [], error


class CallQueue:
    """The queue and its worker thread, which starts with the first asynchronous call.

    It refers to no communicator except through queued calls, so that an idle worker does not keep
    an unreferenced communicator alive.

    Attributes:
        turn: a lock, held by the thread that runs a call. Host communicators pass a native lock,
            which fast calls take without Python.
        pending: the number of calls queued or running on the worker thread.
    """

    __slots__ = (
        *("_guard", "_in_call", "_is_native", "_items", "_name", "_stopped", "_thread"),
        *("pending", "turn"),
    )

    def __init__(self, name: str, turn: _native.CallLock | threading.Lock | None = None) -> None:
        self._name = name
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._in_call = False
        self.turn: Any = threading.Lock() if turn is None else turn
        self._is_native = isinstance(turn, _native.CallLock)
        self.pending = 0

    def submit(self, run: Callable[[], Outputs], work: Work) -> Work:
        """Queues ``run`` behind all earlier calls; ``work`` gets its result or error.

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
        self._count(1)
        self._items.put((run, work))

    def _count(self, calls: int) -> None:
        """Adds ``calls`` to the number of queued calls; the caller holds the guard."""
        self.pending += calls
        if self._is_native:
            self.turn.set_queued(self.pending)

    def shut(self) -> None:
        """Refuses further calls that do not pass through Python; see ``DirectCalls``."""
        if self._is_native:
            self.turn.shut()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        # _stopped is True until the thread runs: after a Ctrl-C in this method, the queue takes no
        # calls and waits for no thread. A thread that started, but is not in _thread, ends itself.
        self._stopped = True
        try:
            start_thread(
                thread,
                f"{self._name}: an asynchronous call",
                "The call was not made, and the communicator is still usable: make the call "
                "without async_op=True",
            )
        except Exception:
            self._stopped = False
            raise
        self._thread = thread
        self._stopped = False

    def on_worker_thread(self) -> bool:
        """True on the worker thread: in a call that it runs, or in a callback after a call."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def inside_call(self) -> bool:
        """True in a call that the worker thread runs; the thread then holds ``turn`` already."""
        return self._in_call and self.on_worker_thread()

    def _loop(self) -> None:
        with self._guard:
            if self._thread is not threading.current_thread():
                return  # Ctrl-C came before _begin() had set _thread
        _native.wait_in_background()
        while True:
            item = self._items.get()
            if item is None:
                return
            self._run(*item)
            # While get() blocks, ``item`` must not keep the tensors of the last call alive.
            del item

    def _run(self, run: Callable[[], Outputs], work: Work) -> None:
        with self.turn:
            self._in_call = True
            ended = _outcome(run)
            self._in_call = False
        with self._guard:
            self._count(-1)
        work.finish(*ended)

    def run_now(self, run: Callable[[], Outputs], work: Work) -> None:
        """Runs a call immediately, ahead of the queue, since the worker thread itself made it."""
        if self._in_call:
            ended = _outcome(run)
        else:
            with self.turn:
                ended = _outcome(run)
        work.finish(*ended)

    def stop(self, timeout_s: float = -1.0) -> bool:
        """Ends the worker after the queued calls; False if they take longer than ``timeout_s``.

        A negative timeout means no limit. Called on the worker thread, this method does not wait.
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


class RankContext:
    """The context in which a rank's thread works, if ranks are threads; on the host it is empty.

    On a device it makes the rank's own stream current.
    """

    def taken(self) -> AbstractContextManager[None]:
        """Returns the context manager that the rank's thread enters."""
        return nullcontext()

    def rejoin(self) -> None:
        """Called by the thread that started the ranks, once all of them have ended."""


class Call:
    """A checked call, ready to run.

    ``run`` takes the core and returns the call's status; ``outputs`` are the tensors that hold the
    result afterwards, ``inputs`` are the other tensors. ``written`` are the outputs whose contents
    and versions change, by default all. ``more_bytes`` are the bytes of a call without listed
    tensors, for profilers. Every call makes a Call, so the class is not a frozen dataclass, whose
    objects take three times as long to make.
    """

    __slots__ = ("inputs", "more_bytes", "name", "outputs", "run", "written")

    def __init__(
        self,
        name: str,
        run: Callable[[Core], int],
        outputs: Outputs,
        inputs: Sequence[torch.Tensor] = (),
        written: Outputs | None = None,
        more_bytes: int = 0,
    ) -> None:
        self.name = name
        self.run = run
        self.more_bytes = more_bytes
        self.outputs = outputs
        self.inputs = inputs
        self.written = outputs if written is None else written


# Functions and not methods, so that the returned closures refer to no communicator: a reference
# cycle would keep the communicator's memory and descriptors until the garbage collector runs.
def refusal(rank: int, world_size: int, first: RingcommError) -> Callable[[str], RingcommError]:
    """Returns a function that makes the error for calls after the communicator's first fault."""
    return lambda op: unusable_error(op, rank, world_size, first)


def closed(rank: int, world_size: int, name: str) -> Callable[[str], RingcommError]:
    """Returns a function that makes the error for calls after the communicator was closed."""
    return lambda op: AbortedError(
        f"{where(op, rank, world_size)}: the communicator {name!r} was closed; build a new one"
    )


def within(owner: CoreOwner, timeout_ms: int, fn: Callable[[], Outputs]) -> Outputs:
    """Runs ``fn``, whose calls use ``timeout_ms`` instead of the communicator's timeout."""
    usual_ms = owner.timeout_ms
    owner.timeout_ms = timeout_ms
    try:
        return fn()
    finally:
        owner.timeout_ms = usual_ms


# Maps the core of a communicator to the object whose kernels a call selects.
Use = Callable[[Core], Core | TritonEnd]


def itself(core: Any) -> Any:
    """Returns ``core`` itself. Assigned to a name of another type, this function is a cast."""
    return core


class Unusable:
    """A stand-in for the native communicator once the native one must not be called any more.

    The fast path calls the native object and does not check whether it is usable. This object, put
    in its place, raises instead.
    """

    _make_error: Callable[[str], RingcommError]

    def __init__(self, make_error: Callable[[str], RingcommError]) -> None:
        object.__setattr__(self, "_make_error", make_error)

    def __setattr__(self, name: str, value: object) -> None:
        raise self._make_error(name)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._make_error(name.removesuffix("_fast").removesuffix("_for_torch"))


# Seconds in which calls that run at exit may end by themselves, before they are aborted.
EXIT_GRACE_S = 5.0
# Seconds that a call may wait for a peer that sends nothing, when its communicator is being closed.
IN_VAIN_S = 0.2
DRAIN_LOOK_S = 0.05
UNDER_WAY = "closed with a call under way"
# Communicators are closed at exit before multiprocessing joins its children, since these may wait
# for this rank.
EXIT_PRIORITY = 100

AUTO = _native.ALGORITHMS["auto"]

# All communicators of this process: closed at exit, but not in a forked child.
live: WeakSet[CallEngine] = WeakSet()
_live_guard = threading.Lock()
_inherited: list[Any] = []
_closes_at_exit_of = 0


def add(engine: CallEngine) -> None:
    """Adds a new communicator to ``live``."""
    global _closes_at_exit_of
    if _closes_at_exit_of != os.getpid():
        _closes_at_exit_of = os.getpid()
        # multiprocessing's children skip atexit and discard the finalizers of their parent, so
        # each process registers its own.
        Finalize(None, close_all, exitpriority=EXIT_PRIORITY)
    with _live_guard:
        live.add(engine)


def engines_at(store: Store) -> list[CallEngine]:
    """Returns the live communicators of this process that were built through a store."""
    with _live_guard:
        return [engine for engine in live if engine.membership.store is store]


def close_all() -> None:
    """Closes every communicator of this process; runs at exit."""
    for engine in list(live):
        engine._close(EXIT_GRACE_S, EXIT_GRACE_S)


def _leave_all_to_parent() -> None:
    global _live_guard
    _live_guard = threading.Lock()
    for engine in list(live):
        _inherited.append((engine, *engine._leave_to_parent()))
    live.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


# NOTE [Internal API]
#
# ringcomm's own packages use the parts of a communicator that docs/reference/communicators.md
# documents for users, and the following names:
#
# * ``engine`` and ``launches``: c10d, functional, tl, optim, zero and extras.
# * ``steps``: optim and zero.
# * ``on_host``: zero.
# * ``node_layout``: extras.
# * ``messages``, ``group_at`` and ``all_gather_lists_coalesced``: c10d.
# * ``topology_choice``: the tests of devices.
#
# tests/packaging/test_site.py compares the list with the class, and tests/test_layering.py forbids
# private names across packages.


class CallEngine(ABC):
    """Runs the calls of one rank: a core, and a queue in front of the core.

    Args:
        owner: the owner of the core.
        core: makes the calls.
        fast: makes the calls that need no checks.
        membership: the ranks.
        recorder: reads the records of the ranks.

    Attributes:
        rank: this rank, 0 <= rank < world_size.
        world_size: the number of ranks.
        queue: the calls that wait for their turn.
        kernels: "triton" if calls that name no kernels use Triton's; None: they use native kernels.
        starts: starts asynchronous calls that need no checks; None: they go through the queue.
        compiled: makes calls of compiled Triton kernels that need no checks; None: no such kernels.
        closed: True once the memory is freed.
        refuse: returns the error of each call after the first fault; None before a fault.
    """

    def __init__(
        self,
        owner: CoreOwner,
        core: Core,
        fast: FastCalls,
        membership: Membership,
        recorder: FlightRecorder,
    ) -> None:
        self.owner = owner
        self.core = core
        self.fast = fast
        self.starts: StartCalls | None = None
        self.compiled: CompiledCalls | None = None
        self.membership = membership
        self.rank = membership.rank
        self.world_size = len(membership.ranks)
        self.queue = CallQueue(f"ringcomm-{membership.name}", getattr(fast, "turn", None))
        self._recorder = recorder
        self._guard = threading.Lock()
        self.refuse: Callable[[str], RingcommError] | None = None
        self.closed = False
        # None selects the native kernels, and permits the fast path.
        self.kernels = None if membership.options.kernels == NATIVE else membership.options.kernels
        self._triton: TritonEnd | None = None
        self._sum_group_size = membership.options.sum_group_size
        self._companion: CallEngine | None = None
        add(self)

    @property
    def rank_of(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self.rank, self.world_size

    @property
    def device(self) -> torch.device:
        """The device that must hold the tensors of calls."""
        return torch.device("cpu")

    @property
    def heap_device(self) -> torch.device:
        """The device that makes :func:`ringcomm.empty` allocate tensors for zero copy."""
        return self.device

    @property
    def launches(self) -> bool:
        """True if calls are launched on a device instead of run by a thread of this process."""
        return False

    @property
    def timeout(self) -> timedelta:
        """The time that a call waits for its peers."""
        return timedelta(milliseconds=self.owner.timeout_ms)

    @timeout.setter
    def timeout(self, timeout: timedelta | float) -> None:
        if self.refuse is not None:
            raise self.refuse("timeout_ms")
        self.owner.timeout_ms = milliseconds_of(timeout)

    @property
    def aborted(self) -> bool:
        """True once a fault, an abort or a close made the communicator unusable here."""
        return self.refuse is not None or self.owner.aborted

    def recording(self) -> Recording:
        """See :meth:`ringcomm.Communicator.recording`."""
        if self.closed and self.refuse is not None:
            raise self.refuse("recording")
        return self._recorder.recording()

    def checks(self, op: str) -> CallChecks:
        """Returns the argument checks of one call; they also build its errors.

        Raises:
            UnsupportedError: see :func:`admit_keys`.
        """
        checks = self._new_checks(op)
        if intercepting_keys():
            admit_keys(checks)
        return checks

    def _new_checks(self, op: str) -> CallChecks:
        return CallChecks(op, self.rank, self.world_size)

    def admit(
        self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        """Checks a call against the modes and transforms of torch on this thread: ``admit_keys``.

        Every call passes this check on the thread that makes it, before it is queued.

        Raises:
            UnsupportedError: see :func:`admit_keys` and :func:`admit_gradients`.
        """
        if intercepting_keys():
            admit_keys(where(name, *self.rank_of))
        if outputs or inputs:
            admit_gradients(name, outputs, inputs)

    def use_kernels(
        self,
        checks: CallChecks,
        kernels: str | None,
        algorithm: str,
        dtype: torch.dtype,
        reduction: NativeOp | None = None,
    ) -> Use:
        """Returns the function that maps the core to the object whose kernels a call selects.

        Raises:
            ArgumentError: there are no such kernels.
            UnsupportedError: see :meth:`use_triton`; or the call does not sum in the groups of
                ``CommOptions.sum_group_size``.
        """
        kernels = kernels or self.kernels
        if kernels is not None and kernels != NATIVE:
            check_kernels(checks, kernels)
            return self.use_triton(checks, algorithm, dtype, reduction)
        if self._sum_group_size and reduction is not None:
            self.check_sum_groups(str(checks), algorithm, NATIVE)
        return itself

    def use_triton(
        self,
        checks: CallChecks,
        algorithm: str,
        dtype: torch.dtype,
        reduction: NativeOp | None = None,
    ) -> Callable[[Core], TritonEnd]:
        """Returns the function that maps the core to the object that runs Triton's kernels.

        Raises:
            UnsupportedError: see :func:`check_triton`; or the communicator sums in groups.
        """
        if self._sum_group_size:
            self.check_sum_groups(str(checks), "", TRITON)
        check_triton(checks, algorithm, dtype, reduction)
        if self._triton is None:
            self._triton = self._make_triton(checks)
        return self._in_triton

    def with_compression(
        self, checks: CallChecks, compression: str | None, run: Callable[[Core], int]
    ) -> Callable[[Core], int]:
        """Checks ``compression``, and returns ``run``: on a single node compression has no effect.

        Raises:
            ArgumentError: there is no such compression.
        """
        if compression is not None:
            check_compression(compression, str(checks))
        return run

    def check_sum_groups(self, operation: str, algorithm: str, kernels: str) -> None:
        """Checks a reduction, if this communicator sums in groups of ranks.

        Raises:
            UnsupportedError: the call uses the ring or Triton's kernels, which sum in other orders.
        """
        if not self._sum_group_size or (algorithm != "ring" and kernels != "triton"):
            return
        asked = 'kernels="triton"' if kernels == "triton" else 'algorithm="ring"'
        raise UnsupportedError(
            f"{operation}: {asked} does not sum in groups of ranks, but this communicator has "
            f"CommOptions(sum_group_size={self._sum_group_size}). "
            'Use algorithm="auto" and the native kernels, or sum_group_size=0'
        )

    def _in_triton(self, core: Any) -> Any:
        # An unusable communicator must not become usable through its Triton kernels.
        return core if isinstance(core, Unusable) else self._triton

    def kernel_target(self, operation: str) -> KernelTarget:
        """Returns the target for Triton kernels that the user launches on this rank.

        Raises:
            UnsupportedError: Triton kernels cannot run on this communicator in this process.
        """
        head = where(operation, self.rank, self.world_size)
        if self.world_size > _native.MAX_DEVICE_WORLD:
            raise UnsupportedError(
                f"{head}: expected a communicator of at most {_native.MAX_DEVICE_WORLD} ranks. "
                "Divide it with split()"
            )
        return self._kernel_target(head)

    @property
    def segment_bytes(self) -> int:
        """The bytes of a segment: the most that the ring algorithm moves in one hop."""
        return self.owner.segment_bytes

    def chosen(self, algorithm: int) -> int:
        """Returns the code of the algorithm that a large call runs if given ``algorithm``."""
        return self.owner.chosen(algorithm)

    def finish_host_side(self) -> None:
        """Blocks until the host may read earlier results; on the host it always may."""
        return

    def raise_if_unusable(self, name: str) -> None:
        """Raises the error that made the communicator unusable, if there is one.

        Args:
            name: the name of the operation, for the error.
        """
        if self.refuse is not None:
            raise self.refuse(name)
        if self.owner.aborted:
            raise self.fault(name)

    def lost(self, ranks: Collection[int]) -> dict[int, str]:
        """Returns the ranks among ``ranks`` that make no more calls here, with the reasons.

        The ranks are numbers in the outermost communicator; a reason is the end of a sentence. For
        ranks of other processes this method also looks at ``Membership.processes``.
        """
        found = {}
        for peer, rank in enumerate(self.membership.ranks):
            if rank in ranks and peer != self.rank and (why := self._why_lost(peer)):
                found[rank] = why
        return found

    def lookout(self) -> Lookout:
        """Returns a watch over the members' processes, for waits outside the engine's calls."""
        return Lookout(self.membership.ranks, self.membership.processes)

    def start_call(self, call: Call, async_op: bool = False) -> Work | None:
        """Runs a checked call in order; returns a Work if the call is asynchronous.

        A profiler of torch sees the call as an event on the calling thread.
        """
        if not is_profiled():
            return self._start_call(call, async_op)
        with event(call.name, call.outputs, call.inputs, call.more_bytes):
            return self._start_call(call, async_op)

    def _start_call(self, call: Call, async_op: bool) -> Work | None:
        if self.refuse is not None:
            raise self.refuse(call.name)
        if self.queue.inside_call():
            # The call was admitted on the caller's thread, whose torch modes count.
            if async_op:
                return self._enqueue(lambda: self.execute(call), call.name)
            self.execute(call)
            return None
        self.admit(call.name, call.outputs, call.inputs)
        if async_op:
            return self._enqueue(lambda: self.execute(call), call.name)
        if not self.queue.pending or self.queue.on_worker_thread():
            # Use a with statement: a signal handler could raise between acquire() and a try.
            with self.queue.turn:
                self.execute(call)
        else:
            self._enqueue(lambda: self.execute(call), call.name).wait()
        return None

    def is_capturing(self) -> bool:
        """True if the next calls are captured into a graph."""
        return False

    # ---- ranks as threads: see LocalWorld.run() -------------------------------------------------

    def is_busy(self) -> bool:
        """True if asynchronous calls or messages of this rank are under way."""
        return self.queue.pending > 0 or self.owner.has_messages

    def set_left(self, left: bool) -> None:
        """Notes whether the thread of this rank has left; then peers do not wait for its calls."""
        self.owner.set_left(left)

    def set_peer_left(self, peer: int, left: bool) -> None:
        """Notes whether a peer has left, on cores that cannot see this in the peer's core."""
        return

    # ---- implementation -------------------------------------------------------------------------

    @abstractmethod
    def _why_lost(self, peer: int) -> str:
        """Returns why a peer makes no more calls here, as the end of a sentence, or "" if none."""

    @abstractmethod
    def _make_triton(self, checks: CallChecks) -> TritonEnd:
        """Makes the object that runs Triton's kernels; called by the first call that uses it."""

    @abstractmethod
    def _kernel_target(self, head: str) -> KernelTarget:
        """Returns the target for the user's Triton kernels on this rank; ``head`` begins errors."""

    def rank_context(self) -> RankContext:
        """Returns the context in which this rank's thread works, if ranks are threads."""
        return RankContext()

    def planned(self, call: Call) -> Callable[[], int] | None:
        """Returns a function that makes a checked call again, with the same tensors.

        The function returns 0, or NOT_FAST if it did nothing and :meth:`start_call` must make the
        call. Returns None if nothing can be prepared.
        """
        return None

    def gathers_in_place(self, check: Callable[[], Call]) -> Callable[[], Call]:
        """Makes a plan with copy engines; returns a function that prepares its calls; collective.

        Engines without such plans return ``check`` itself.
        """
        return check

    def started(
        self, name: str, outputs: Outputs, event: Any, written: Outputs | None = None
    ) -> Work:
        """Returns the Work of a call that ``starts`` has started.

        Args:
            name: the name of the call.
            outputs: as in :class:`Call`.
            event: the event at the end of the call.
            written: as in :class:`Call`.
        """
        raise NotImplementedError

    def execute(self, call: Call) -> Outputs:
        status = call.run(self.core)
        if status:
            raise self.fault(call.name)
        increment_version(call.written)
        return call.outputs

    def _enqueue(self, run: Callable[[], Outputs], name: str) -> Work:
        work = Work(name, self.interrupt, self.queue.on_worker_thread)
        if self.queue.on_worker_thread():
            # The caller is a callback or a submitted function, which may wait for this call. If the
            # call were queued behind the caller, the caller would wait forever.
            self.queue.run_now(run, work)
            return work
        return self.queue.submit(at_this_call_site(run), work)

    def submit(
        self,
        fn: Callable[[], Outputs],
        opname: str,
        timeout: timedelta | float | None = None,
    ) -> Work:
        """Runs ``fn`` on the worker thread, in order with the collectives.

        Args:
            fn: may call collectives of this communicator, which then run immediately on the
                worker thread; returns the output tensors.
            opname: the name of the operation, for errors.
            timeout: timeout of the calls that ``fn`` makes; None: the communicator's timeout.

        Raises:
            AbortedError: the communicator is unusable.
        """
        if self.refuse is not None:
            raise self.refuse(opname)
        if timeout is None:
            return self._enqueue(fn, opname)
        timeout_ms = milliseconds_of(timeout)
        return self._enqueue(lambda: within(self.owner, timeout_ms, fn), opname)

    def fault(self, name: str) -> RingcommError:
        """Returns the error of a call that failed natively; disables the communicator."""
        head = where(name, self.rank, self.world_size)
        fault = self.owner.fault()
        if fault is None and self.refuse is not None:
            return self.refuse(name)  # closed while the call was under way
        error = RingcommError(f"{head}: the native call failed without a fault record")
        try:
            if fault is not None:
                error = from_fault(head, fault)
                error = from_fault(head, self._recorder.explained(fault, partial(from_fault, head)))
                error.repeats = fault["rank"] != self.rank
        finally:  # even if a second Ctrl-C interrupts the block above
            self._disable(refusal(self.rank, self.world_size, error))
            self._abort_companion(str(error))
        return error

    def _disable(self, make_error: Callable[[str], RingcommError]) -> None:
        """Makes all further calls raise; only the first reason counts."""
        with self._guard:
            if self.refuse is None:
                self.refuse = make_error
                self.queue.shut()
                self.core = self.fast = cast(Any, Unusable(make_error))
                self.starts = self.compiled = None

    def set_companion(self, companion: CallEngine) -> None:
        """Makes the host communicator of the same ranks end together with this communicator."""
        self._companion = companion
        if self.refuse is not None:
            companion.abort("the communicator on the device became unusable")

    def _abort_companion(self, reason: str) -> None:
        if self._companion is not None:
            self._companion.abort(reason)

    def interrupt(self) -> None:
        self.abort("interrupted by KeyboardInterrupt")

    def abort(self, reason: str = "") -> None:
        """See :meth:`ringcomm.Communicator.abort`."""
        if self.closed:
            return
        first = AbortedError(
            f"{where('abort', self.rank, self.world_size)}: "
            f"{reason or 'Communicator.abort() was called'}"
        )
        self._disable(refusal(self.rank, self.world_size, first))
        self.owner.abort(reason)
        self._abort_companion(reason)

    def close(self) -> None:
        """See :meth:`ringcomm.Communicator.close`."""
        try:
            # This limit is longer than the timeout of a call under way.
            self._close(self.timeout.total_seconds() + EXIT_GRACE_S, IN_VAIN_S)
        except KeyboardInterrupt:
            self.interrupt()
            raise

    def _close(self, grace_s: float, in_vain_s: float) -> None:
        """Closes the communicator.

        Args:
            grace_s: seconds that calls under way may take before they are aborted.
            in_vain_s: seconds that these calls may wait for peers that send nothing.
        """
        if self.closed:
            return
        if self._companion is not None:
            self._companion._close(grace_s, in_vain_s)
        if not self._becomes_idle(grace_s, in_vain_s):
            self.abort(UNDER_WAY)
            idle = self._becomes_idle(EXIT_GRACE_S, EXIT_GRACE_S)
        else:
            idle = True
        self._disable(closed(self.rank, self.world_size, self.membership.name))
        # A thread that does not return even from an aborted call still uses the native object.
        if idle:
            with self._guard:
                already, self.closed = self.closed, True
            if not already:
                self.owner.close()
            self.queue.turn.release()

    def _becomes_idle(self, grace_s: float, in_vain_s: float) -> bool:
        """Takes ``turn`` once no call runs; False if a call exceeds a limit given to _close()."""
        grace, in_vain = Deadline(grace_s), Deadline(in_vain_s)
        came = self._progress()
        while True:
            look_s = min(DRAIN_LOOK_S, grace_s)
            if self.queue.stop(look_s) and self.queue.turn.acquire(timeout=look_s):
                return True
            last, came = came, self._progress()
            if came is None or came != last:
                in_vain = Deadline(in_vain_s)
            if grace.is_over() or in_vain.is_over():
                return False

    def _progress(self) -> Hashable:
        """Returns a count that grows while peers progress; None if no call waits for a peer."""
        owner = self.owner
        return None if owner.awaited < 0 else (owner.awaited, owner.arrivals)

    @until_exit
    def __del__(self) -> None:
        queue: CallQueue | None = getattr(self, "queue", None)
        if queue is not None:
            queue.stop(0.0)

    def _leave_to_parent(self) -> tuple[Any, ...]:
        """Drops the native object in a forked child, since it belongs to the parent.

        Returns the objects that must never be destroyed here: destroying them would act on the
        parent's communicator.
        """
        parents, self.closed = (self.owner, self.queue), True
        self.queue.shut()
        self._guard = threading.Lock()
        self.queue = CallQueue(self.membership.name)
        self.refuse = self._fork_error
        self.core = self.fast = cast(Any, Unusable(self._fork_error))
        self.starts = self.compiled = None
        return parents

    def _fork_error(self, operation: str) -> ForkError:
        name = self.membership.name
        return ForkError(
            f"{where(operation, *self.rank_of)}: this process (pid {os.getpid()}) was forked from "
            f"the one that built the communicator {name!r}. A child must build its own, or be "
            "started with multiprocessing's 'spawn'"
        )


class HostEngine(CallEngine):
    """The engine of ranks on one node, in host memory.

    Args:
        native: the connected core.
        membership: the ranks, after their rendezvous.
    """

    def __init__(self, native: _native.Comm, membership: Membership) -> None:
        rank_of = membership.rank, len(membership.ranks)
        recorder = FlightRecorder(native, membership.name, rank_of)
        super().__init__(native, native, native, membership, recorder)
        self._native = native

    def _why_lost(self, peer: int) -> str:
        return why_lost(self._native, peer)

    def _make_triton(self, checks: CallChecks) -> TritonEnd:
        run = HostTriton(self._native, self.membership, checks)
        return TritonEnd(run, self.world_size, self.chosen(AUTO))

    def _kernel_target(self, head: str) -> KernelTarget:
        return host_kernel_target(self._native, self.membership, head)
