# SPDX-License-Identifier: Apache-2.0
"""Threads that cannot start, and Ctrl-C while one starts, raise an error and leave no hang."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, Communicator, RendezvousError, RingcommError, _native
from ringcomm.comm.device import lifecycle
from ringcomm.comm.host.engine import CallQueue
from ringcomm.rendezvous import same_node
from ringcomm.zero.stages.order import StepProfile
from ringcomm.zero.stages.unshard import HostCopier
from tests.support.ranks import Ranks

T = torch.ones
SOON_S = 20.0
LONG_S = 60.0
# More than any process may have, so that a thread with this stack size cannot start.
STACK_BYTES = 1 << 46
# At least the size of a pthread_attr_t, which has 56 or 64 bytes in glibc.
ATTR_BYTES = 256


@contextmanager
def no_threads() -> Iterator[None]:
    """Inside, the system refuses new threads, as at the limit of processes (``ulimit -u``)."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def no_native_threads() -> Iterator[None]:
    """The same for threads that do not set a stack size."""
    libc = ctypes.CDLL(None)
    before, huge = ctypes.create_string_buffer(ATTR_BYTES), ctypes.create_string_buffer(ATTR_BYTES)
    assert libc.pthread_getattr_default_np(before) == 0
    assert libc.pthread_attr_init(huge) == 0
    assert libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(STACK_BYTES)) == 0
    assert libc.pthread_setattr_default_np(huge) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(before) == 0


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, runs: bool) -> Iterator[None]:
    """Inside, Ctrl-C comes while a thread starts: before it runs, or just after it began to run."""
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", begin)
        with pytest.raises(KeyboardInterrupt):
            yield


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns or raises what ``call`` does; fails if ``call`` has not ended in time."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append((call(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert ended, "the call hangs"
    value, error = ended[0]
    if error is not None:
        raise error
    return value


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.002)


def named(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


def a_call_without_a_thread() -> None:
    comm = ringcomm.local_world(1, timeout=LONG_S)[0]
    with no_threads(), pytest.raises(RingcommError, match=r"async_op=True.*ulimit -u"):
        comm.all_reduce(T(4), async_op=True)
    assert not comm.aborted
    within(SOON_S, lambda: comm.all_reduce(T(4)))
    work = comm.all_reduce(T(4), async_op=True)
    within(SOON_S, work.wait)
    within(SOON_S, comm.close)


def test_an_asynchronous_call_without_a_thread() -> None:
    a_call_without_a_thread()


def test_close_without_a_thread() -> None:
    comm = ringcomm.local_world(1, timeout=LONG_S)[0]
    with no_threads(), pytest.raises(RingcommError):
        comm.engine.submit(list, "nothing")
    within(SOON_S, comm.close)


def test_a_queue_that_forgets_that_nothing_started_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def begin(queue: Any) -> None:
        begun.append(queue)
        queue._thread = threading.Thread(target=queue._loop, name=queue._name, daemon=True)
        queue._thread.start()

    monkeypatch.setattr(CallQueue, "_begin", begin)
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        a_call_without_a_thread()
    assert not isinstance(raised.value, RingcommError)
    begun[0]._thread = None  # otherwise the garbage collector finds it, too


@pytest.mark.parametrize("runs", [False, True])
def test_ctrl_c_while_the_worker_starts(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ringcomm.local_world(2, timeout=LONG_S, options=ringcomm.CommOptions())
    first, second = world
    name = f"ringcomm-{first.name}"
    before = set(named(name))  # of other tests
    with interrupted(monkeypatch, runs):
        first.all_reduce(T(4), async_op=True)
    assert first.aborted
    for call in (lambda: first.all_reduce(T(4)), lambda: second.all_reduce(T(4))):
        with pytest.raises(AbortedError, match="KeyboardInterrupt"):
            within(SOON_S, call)
    with pytest.raises(AbortedError, match="KeyboardInterrupt"):
        first.all_reduce(T(4), async_op=True)
    within(SOON_S, world.close)
    until(lambda: not set(named(name)) - before)


def test_a_future_of_a_message_without_a_thread() -> None:
    first, second = ringcomm.local_world(2, timeout=LONG_S)
    work = first.irecv(T(4), 1)
    with no_threads(), pytest.raises(RingcommError, match=r"get_future of irecv.*call wait"):
        work.get_future()
    second.send(T(4), 0)
    within(SOON_S, work.wait)
    assert work.get_future().done()
    for each in (first, second):
        each.close()


def _isend_without_room(store: Any, rank: int, world: int) -> tuple[str, bool]:
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    tensor = T(4_000_000)
    if rank == 1:
        try:
            comm.barrier()  # rank 0 may be ahead, and abort during it
            comm.recv(tensor, 0)
        except AbortedError as error:
            comm.close()
            return str(error), True
        return "received", False
    comm.barrier()
    try:
        with no_native_threads():
            comm.isend(tensor, 1)
    except RingcommError as error:
        told = str(error)
    else:
        told = "sent"
    aborted = comm.aborted
    comm.close()
    return told, aborted


def test_a_message_without_a_thread_to_move_it() -> None:
    with Ranks(_isend_without_room, 2) as ranks:
        outcomes = ranks.wait(LONG_S)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        told, aborted = outcome.value
        assert "isend: expected to start a thread" in told, told
        assert "build another" in told and aborted


class Lost:
    """Replaces the native communicator of a device."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()

    def mark_lost(self, rank: int) -> None:
        self.ranks.add(rank)


def _ends_at_once() -> int:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.mark.parametrize("how", ["refused", "interrupted", "interrupted as it runs"])
def test_the_watch_for_processes_on_devices(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: not named("ringcomm-watch"))
    native: Any = Lost()
    pid = _ends_at_once()
    processes = {3: lifecycle.process_of(pid)}
    if how == "refused":
        with no_threads(), pytest.raises(RingcommError, match="was not built"):
            lifecycle.watch(native, processes)
    else:
        with interrupted(monkeypatch, how.endswith("runs")):
            lifecycle.watch(native, processes)
    watched = lifecycle.watch(native, processes)
    until(lambda: native.ranks == {3})
    lifecycle.unwatch(watched)
    until(lambda: not named("ringcomm-watch"))
    os.waitpid(pid, 0)


def test_a_rendezvous_on_a_node_without_a_thread() -> None:
    sockets = same_node.LaunchSockets.of(f"without threads {os.getpid()}", 0, "rendezvous")
    for _ in range(2):  # the first failure must leave the address free
        with no_threads(), pytest.raises(RendezvousError, match="rendezvous: expected to start"):
            same_node.serve(sockets, 2, SOON_S)


def test_a_local_world_without_threads() -> None:
    with no_threads(), pytest.raises(RingcommError, match="rank 0 of local_world: expected"):
        ringcomm.local_world(2)


def _second_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if thread.name == "ringcomm-rank-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)


def test_a_local_world_with_too_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks must not wait for their timeouts."""
    world = ringcomm.local_world(3, timeout=LONG_S)
    _second_does_not_start(monkeypatch)
    with pytest.raises(RingcommError, match="rank 1 of local_world: expected"):
        within(SOON_S, lambda: world.run(lambda comm: comm.all_reduce(T(4))))
    world.close()
    with pytest.raises(RingcommError, match="rank 1 of local_world: expected"):
        within(SOON_S, lambda: ringcomm.local_world(3, timeout=LONG_S))
    assert not named("ringcomm-rank-0") and not named("ringcomm-rank-2")


def test_stage_3_without_a_thread() -> None:
    with no_threads(), pytest.raises(RingcommError, match="zero: expected to start a thread"):
        HostCopier(StepProfile())


def test_what_ctrl_c_kept_from_being_unsharded_is_unsharded_by_who_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bucket:
        flat = T(4)
        coming = None
        filled = False

        def fill(self) -> None:
            self.filled = True

    copier, bucket = HostCopier(StepProfile()), Bucket()
    taken: Any = bucket
    with monkeypatch.context() as patch:
        patch.setattr(copier._pool, "submit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            copier.begin([taken])
    copier.end(taken)
    assert bucket.filled
    copier.close()


def test_a_fault_without_a_thread_for_its_trace() -> None:
    timeout = pytest.raises(ringcomm.CollectiveTimeout, match="No trace was written: can't start")
    with ringcomm.local_world(2, timeout=0.1) as world, no_threads(), timeout:
        world[0].barrier()


def test_processes_of_threads_never_end() -> None:
    assert not _native.Process(0).has_ended()
