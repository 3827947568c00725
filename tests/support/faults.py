# SPDX-License-Identifier: Apache-2.0
"""Fault injection, and checks that nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")


def die() -> None:
    """Kills this process as the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def shared_memory_files() -> set[str]:
    """Returns the names in /dev/shm that may be ringcomm's: all but other libraries' semaphores."""
    return {entry.name for entry in SHARED_MEMORY.iterdir() if "ringcomm" in entry.name}


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until_stopped(pid: int) -> None:
    """Waits until the process is stopped; on a busy machine a signal takes time."""
    deadline = time.monotonic() + 60.0
    while not is_stopped(pid):
        assert time.monotonic() < deadline, "the process was not stopped"
        time.sleep(0.001)


def wait_for_all(store: Any, name: str, n: int) -> None:
    """A barrier: returns when ``n`` processes have called it, however busy the machine is."""
    store.add(f"met/{name}", 1)
    deadline = time.monotonic() + 60.0
    while int(store.add(f"met/{name}", 0)) < n:
        assert time.monotonic() < deadline, "not all processes came"
        time.sleep(0.001)


def until_rank_threads_have_ended(*ranks: int) -> None:
    """Waits until the threads of these ranks of a local world have ended by an error or a return.

    These threads must have begun; the caller is the thread of another rank.
    """
    names = {f"ringcomm-rank-{rank}" for rank in ranks}
    deadline = time.monotonic() + 60.0
    while any(thread.name in names for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the rank threads have not ended"
        time.sleep(0.001)


def leaving_together(body: Callable[[Any], T], ranks: int) -> Callable[[Any], T]:
    """Wraps a function for ``LocalWorld.run`` so that no rank returns before all have finished.

    Otherwise a rank's error could depend on whether another rank has returned or is only late.
    """
    barrier = threading.Barrier(ranks)

    def stay(comm: Any) -> T:
        try:
            return body(comm)
        finally:
            barrier.wait(60.0)

    return stay
