# SPDX-License-Identifier: Apache-2.0
"""Watches peers' processes, and frees device memory that outlives its communicator."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import NamedTuple, Protocol

from ringcomm import _native
from ringcomm.cuda.runtime import Event
from ringcomm.errors import RingcommError, start_thread
from ringcomm.memory.device_heap import DeviceAllocation, existing_heap

# A kernel cannot ask the operating system whether a rank's process has ended. So one thread watches
# the peers' processes and marks the ended ones in the page that the kernel reads.

# The longest delay until the end of a process is noticed.
POLL_MS = 100


@dataclass(frozen=True, eq=False)
class Watched:
    """One communicator's peers in other processes, by rank."""

    native: _native.DeviceComm
    processes: dict[int, _native.Process]


class _Watcher:
    """The watches of this process; a forked child starts with a new, empty object."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a communicator on a thread that holds this lock.
        self.guard = threading.RLock()
        self.watched: list[Watched] = []
        self.thread: threading.Thread | None = None


_watcher = _Watcher()
_inherited_watches: list[_Watcher] = []


def _forget_watches_in_child() -> None:
    global _watcher
    _inherited_watches.append(_watcher)
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_forget_watches_in_child)


def process_of(pid: int) -> _native.Process:
    """Returns an object that reports the end of a process that is running now.

    Raises:
        RingcommError: this process has no file descriptor left for the object.
    """
    try:
        return _native.Process(pid)
    except OSError as error:
        raise RingcommError(f"cannot watch process {pid}: {error.strerror}") from error


def _look(watched: Watched) -> None:
    for rank, process in watched.processes.items():
        if process.has_ended():
            watched.native.mark_lost(rank)


def _loop(process: _Watcher, wake: threading.Event) -> None:
    while True:
        wake.wait(POLL_MS / 1000)
        with process.guard:
            if process.thread is not threading.current_thread():
                return  # Ctrl-C interrupted watch() before it had set ``thread`` to this thread
            if not process.watched:
                process.thread = None
                return
            for watched in tuple(process.watched):
                _look(watched)


def watch(native: _native.DeviceComm, processes: Mapping[int, _native.Process]) -> Watched:
    """Begins to watch for the end of peers' processes, and returns the watch.

    Args:
        native: the communicator whose page is marked.
        processes: the processes of peers outside this process, by rank.

    Raises:
        RingcommError: the watching thread cannot be started.
    """
    watched = Watched(native, dict(processes))
    process = _watcher
    if not processes:
        return watched
    with process.guard:
        if process.thread is None:
            thread = threading.Thread(
                target=_loop, args=(process, threading.Event()), name="ringcomm-watch", daemon=True
            )
            start_thread(
                thread,
                "the watch for peers whose process ends",
                "The communicator was not built",
            )
            process.thread = thread
        process.watched.append(watched)
    return watched


def unwatch(watched: Watched) -> None:
    """Ends a watch; a second call does nothing."""
    process = _watcher
    with process.guard:
        if watched in process.watched:
            process.watched.remove(watched)
            watched.processes.clear()  # the watching loop may still refer to this object


# A peer acknowledges data by writing into this rank's region, possibly after this rank has closed.
# So a region is freed only when every peer has detached or has ended. A peer in another process has
# ended when its process has ended; a rank of this process, when its presence (docs/protocol.md) has
# ended. A communicator that nothing refers to any more is closed once its kernels have ended.

WORD_BYTES = 4
# Exit handlers run in falling order of priority: communicators (100), the handler below that closes
# the cores of deleted communicators (95), the handler that unmaps peers' heaps (90).
EXIT_PRIORITY = 95
EXIT_GRACE_S = 5.0
POLL_S = 0.001


class Peer(NamedTuple):
    """A rank that may write into a region: its process (None for this process) and its presence.

    ``process`` was opened while the process ran. A pid is not enough: another process may get the
    same pid later, and an ended process keeps its pid until its parent has waited for it.
    """

    process: _native.Process | None
    presence: int

    @classmethod
    def of(cls, pid: int, presence: int) -> Peer:
        return cls(
            None if pid == os.getpid() else _native.Process(pid, with_descriptor=False), presence
        )

    def has_ended(self) -> bool:
        if self.process is None:
            return self.presence not in _process.presences
        return self.process.has_ended()


@dataclass(frozen=True)
class _Retired:
    """A region whose communicator is closed; a peer detaches by a word at ``detached_ptrs``.

    ``left()`` is called when all peers have detached or ended.
    """

    allocation: DeviceAllocation
    detached_ptrs: tuple[int, ...]
    peers: tuple[Peer, ...]
    left: Callable[[], None]

    def may_go(self) -> bool:
        if not self._is_left():
            return False
        self.left()
        return True

    def _is_left(self) -> bool:
        heap = self.allocation.heap
        if existing_heap(heap.device) is not heap:
            return True  # the heap has been closed with all its regions
        return all(
            heap.runtime.read(heap.device, ptr, WORD_BYTES) != bytes(WORD_BYTES) or peer.has_ended()
            for ptr, peer in zip(self.detached_ptrs, self.peers, strict=True)
        )


class ClosableCore(Protocol):
    """The interface of a core that is still to be closed."""

    def abort(self, reason: str) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Abandoned:
    """A core to close, events that pass when its kernels end, and the objects that they use."""

    core: ClosableCore
    events: Sequence[Event]
    kept: Sequence[object]
    captured: bool

    def may_go(self) -> bool:
        if self.captured or not all(event.query() for event in self.events):
            return False
        self.core.close()
        return True


class _Process:
    """The regions, cores and presences of this process; a forked child gets a new, empty object.

    The garbage collector may add entries at any point, even inside :func:`reclaim` on the same
    thread. So these are deques, which add and remove entries without a lock.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.regions: deque[_Retired] = deque()
        self.abandoned: deque[_Abandoned] = deque()
        self.presences: set[int] = set()
        self.ends_at_exit = False


_process = _Process()
_inherited: list[_Process] = []


def _forget_in_child() -> None:
    global _process
    _inherited.append(_process)
    _process = _Process()


os.register_at_fork(after_in_child=_forget_in_child)


def begin_presence() -> int:
    """Begins the presence of a rank of this process, and returns its number for the rendezvous.

    If the rendezvous fails before the rank has its peers' regions, the rank cannot detach. Then the
    end of its presence tells peers in its own process that the rank has ended.
    """
    presence = secrets.randbits(63)
    _process.presences.add(presence)
    return presence


def end_presence(presence: int) -> None:
    """Ends the presence of a rank that touches no peer's region any more; may be repeated."""
    _process.presences.discard(presence)
    reclaim()


def retire(
    allocation: DeviceAllocation,
    detached_ptrs: Sequence[int],
    peers: Sequence[Peer],
    left: Callable[[], None] = lambda: None,
) -> None:
    """Keeps ``allocation`` until all peers have detached or ended, then calls ``left``.

    ``detached_ptrs`` and ``peers`` have the same order. The end of the caller's own presence and
    each later rendezvous check whether the allocation may be freed.
    """
    _process.regions.append(_Retired(allocation, tuple(detached_ptrs), tuple(peers), left))


def abandon(
    core: ClosableCore, events: Sequence[Event], kept: Sequence[object], *, captured: bool
) -> None:
    """Closes the core of a deleted communicator once its kernels have ended.

    Args:
        core: the communicator's core.
        events: they pass when all kernels that the core launched have ended.
        kept: the objects that the kernels use.
        captured: True if a graph, which may be replayed until exit, holds calls of ``core``.
    """
    process = _process
    process.abandoned.append(_Abandoned(core, tuple(events), tuple(kept), captured))
    if not process.ends_at_exit:
        process.ends_at_exit = True
        Finalize(None, _end_abandoned, exitpriority=EXIT_PRIORITY)
    reclaim()


def reclaim() -> None:
    """Frees unused regions and cores; runs before regions are made and when a presence ends."""
    process = _process
    with process.guard:
        _sift(process.abandoned)
        _sift(process.regions)


def _sift(entries: deque[_Abandoned] | deque[_Retired]) -> None:
    for _ in range(len(entries)):
        try:
            entry = entries.popleft()
        except IndexError:
            return  # a garbage collection has removed the last entries
        gone = False
        try:
            gone = entry.may_go()
        finally:
            if not gone:
                entries.append(entry)  # type: ignore[arg-type]


def _end_abandoned() -> None:
    process = _process
    for entry in process.abandoned:
        if not _ends(entry.events):
            entry.core.abort("this process ends")
    while process.abandoned:
        entry = process.abandoned.popleft()
        if entry.captured:
            entry.core.abort("this process ends")  # ends replays, too
            entry.core.synchronize()
        # If a kernel does not end, it still uses the region, which is then never freed.
        if _ends(entry.events):
            entry.core.close()


def _ends(events: Sequence[Event]) -> bool:
    """Waits for the events; False if they have not passed after EXIT_GRACE_S."""
    deadline = time.monotonic() + EXIT_GRACE_S
    while not all(event.query() for event in events):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
