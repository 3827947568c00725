"""Tells kernels that wait for a rank when its process has ended.

A kernel cannot ask the operating system, so one thread of the process watches the peers' processes
and marks the ended ones in the page that the kernel looks at.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ringcomm import _native
from ringcomm.comm import thread_start
from ringcomm.errors import RingcommError

# How late the end of a process is noticed.
POLL_MS = 100


@dataclass(frozen=True, eq=False)
class Watched:
    """One communicator's peers in other processes, by rank."""

    native: _native.DeviceComm
    processes: dict[int, _native.Process]


class _Process:
    """What this process watches; replaced as a whole in a forked child."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a communicator on a thread that holds it.
        self.guard = threading.RLock()
        self.watched: list[Watched] = []
        self.thread: threading.Thread | None = None


_process = _Process()
_inherited: list[_Process] = []


def _forget_in_child() -> None:
    global _process
    _inherited.append(_process)
    _process = _Process()


os.register_at_fork(after_in_child=_forget_in_child)


def process_of(pid: int) -> _native.Process:
    """A process that runs, to ask later whether it has ended.

    Raises:
        RingcommError: there is no file descriptor left for it.
    """
    try:
        return _native.Process(pid)
    except OSError as error:
        raise RingcommError(f"the watch for process {pid}: {error.strerror}") from error


def _look(watched: Watched) -> None:
    for rank, process in watched.processes.items():
        if process.has_ended():
            watched.native.mark_lost(rank)


def _loop(process: _Process, wake: threading.Event) -> None:
    while True:
        wake.wait(POLL_MS / 1000)
        with process.guard:
            if process.thread is not threading.current_thread():
                return  # Ctrl-C came before its starter knew that it runs
            if not process.watched:
                process.thread = None
                return
            for watched in tuple(process.watched):
                _look(watched)


def watch(native: _native.DeviceComm, processes: Mapping[int, _native.Process]) -> Watched:
    """Watches peers from here on.

    Args:
        native: whose page is marked.
        processes: of the peers that are processes of their own, by rank.

    Raises:
        RingcommError: there is no thread left to watch them.
    """
    watched = Watched(native, dict(processes))
    process = _process
    if not processes:
        return watched
    with process.guard:
        if process.thread is None:
            thread = threading.Thread(
                target=_loop, args=(process, threading.Event()), name="ringcomm-watch", daemon=True
            )
            thread_start.start(
                thread,
                "the watch for peers whose process ends",
                "The communicator was not built",
            )
            process.thread = thread
        process.watched.append(watched)
    return watched


def unwatch(watched: Watched) -> None:
    """Ends it; a second call does nothing."""
    process = _process
    with process.guard:
        if watched in process.watched:
            process.watched.remove(watched)
            watched.processes.clear()  # the loop may still refer to it
