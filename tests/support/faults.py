"""Fault injection, and proof that nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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
