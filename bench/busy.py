"""Busy loops beside the ranks: how collectives fare where other work wants the cores.

Linux shares the cores among sessions first and among the threads of a session second
(sched_autogroup, see sched(7)). MPICH's mpiexec gives every rank a session of its own, others
start all ranks in one. So with loops beside them all ranks and all loops lead sessions of their
own, and a rank gets what a rank of a container gets, where no sessions count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Longer than any slice: a rank that slept so long owes nothing, and is owed nothing.
REST_S = 0.02

_LOOP = (
    "import ctypes, os, signal\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != {parent}: os._exit(0)\n"
    "while True: pass\n"
)


@contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``count`` processes that compute until the block ends, or the process that began it."""
    # The loop asks the kernel to end it with its parent, and looks whether it came too late.
    command = [sys.executable, "-S", "-E", "-c", _LOOP.format(parent=os.getpid())]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def lead_session() -> None:
    """Makes this rank the leader of a session, unless its launcher has made it lead one."""
    if os.getsid(0) != os.getpid():
        # One that leads a group of processes cannot. It then shares a session with its launcher,
        # which waits.
        with suppress(PermissionError):
            os.setsid()
