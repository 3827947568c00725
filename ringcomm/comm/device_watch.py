"""Tells kernels that wait for a rank when its process has ended.

A kernel cannot ask the operating system, so one thread of the process watches the peers' processes
and marks the ended ones in the page that the kernel looks at.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ringcomm import _native

# How late the end of a process without a pidfd is noticed.
POLL_MS = 100


@dataclass(frozen=True, eq=False)
class Watched:
    """One communicator's peers in other processes: pid and, where there is one, pidfd, by rank."""

    native: _native.DeviceComm
    pids: Mapping[int, int]
    pidfds: Mapping[int, int]


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


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        # It has ended, or this kernel or sandbox has no pidfds: its pid must do.
        return None


def _has_ended(watched: Watched, rank: int) -> bool:
    descriptor = watched.pidfds.get(rank)
    if descriptor is not None:
        return bool(select.select([descriptor], [], [], 0)[0])
    try:
        os.kill(watched.pids[rank], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _look(watched: Watched) -> None:
    for rank in watched.pids:
        if _has_ended(watched, rank):
            watched.native.mark_lost(rank)


def _loop(process: _Process, wake: threading.Event) -> None:
    while True:
        wake.wait(POLL_MS / 1000)
        with process.guard:
            if not process.watched:
                process.thread = None
                return
            for watched in tuple(process.watched):
                _look(watched)


def watch(native: _native.DeviceComm, pids: Mapping[int, int]) -> Watched:
    """Watches peers from here on.

    Args:
        native: whose page is marked.
        pids: of the peers that are processes of their own, by rank.
    """
    pidfds = {rank: fd for rank, pid in pids.items() if (fd := _open(pid)) is not None}
    watched = Watched(native, dict(pids), pidfds)
    process = _process
    if not pids:
        return watched
    with process.guard:
        process.watched.append(watched)
        if process.thread is None:
            process.thread = threading.Thread(
                target=_loop, args=(process, threading.Event()), name="ringcomm-watch", daemon=True
            )
            process.thread.start()
    return watched


def unwatch(watched: Watched) -> None:
    """Ends it; a second call does nothing."""
    process = _process
    with process.guard:
        if watched in process.watched:
            process.watched.remove(watched)
            for descriptor in watched.pidfds.values():
                os.close(descriptor)
