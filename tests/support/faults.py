# SPDX-License-Identifier: Apache-2.0
"""Fault injection, and proof that nothing is left behind."""

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
    """Ends this process as the OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def shared_memory_files() -> set[str]:
    """Names in /dev/shm that could be ringcomm's: all but those of other libraries' semaphores."""
    return {entry.name for entry in SHARED_MEMORY.iterdir() if "ringcomm" in entry.name}


def is_stopped(pid: int) -> bool:
    """True when the process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until_stopped(pid: int) -> None:
    """Waits until the process is stopped: a signal takes its time on a busy machine."""
    deadline = time.monotonic() + 60.0
    while not is_stopped(pid):
        assert time.monotonic() < deadline, "it was not stopped"
        time.sleep(0.001)


def wait_for_all(store: Any, name: str, n: int) -> None:
    """Returns in ``n`` processes at about the same time, whatever the machine's load."""
    store.add(f"met/{name}", 1)
    deadline = time.monotonic() + 60.0
    while int(store.add(f"met/{name}", 0)) < n:
        assert time.monotonic() < deadline, "the others did not come"
        time.sleep(0.001)


def until_rank_threads_have_ended(*ranks: int) -> None:
    """Waits until these ranks of a local world have raised or returned, so that they did so first.

    They must have begun; called by another rank's thread.
    """
    names = {f"ringcomm-rank-{rank}" for rank in ranks}
    deadline = time.monotonic() + 60.0
    while any(thread.name in names for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "they go on"
        time.sleep(0.001)


def leaving_together(body: Callable[[Any], T], ranks: int) -> Callable[[Any], T]:
    """Returns a function for ``LocalWorld.run`` in which no rank returns before all have done.

    A rank that returned would be told apart from one that is late.
    """
    barrier = threading.Barrier(ranks)

    def stay(comm: Any) -> T:
        try:
            return body(comm)
        finally:
            barrier.wait(60.0)

    return stay
