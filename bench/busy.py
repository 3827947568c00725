"""Busy loops beside the ranks: how collectives fare where other work wants the cores.

NOTE [Sessions]

Linux shares the cores among sessions first and among the threads of a session second
(sched_autogroup, see sched(7)). MPICH's mpiexec gives every rank a session of its own, others
start all ranks in one: the same loops would take more from some ranks than from others. So with
loops beside them all ranks and all loops lead sessions of their own, and a rank gets what a rank of
a container or a batch job gets, where no sessions count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

# Longer than any slice: a rank that slept so long owes nothing, and is owed nothing.
REST_S = 0.02

_LOOP = (
    "import ctypes, os, signal\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != {parent}: os._exit(0)\n"
    "while True: pass\n"
)


class BusyLoops:
    """``count`` processes that compute until the block ends, or the process that began it.

    ``loops`` are those that run.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.loops: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> BusyLoops:
        # The loop asks the kernel to end it with its parent, and looks whether it came too late.
        command = [sys.executable, "-S", "-E", "-c", _LOOP.format(parent=os.getpid())]
        self.loops = [subprocess.Popen(command, start_new_session=True) for _ in range(self._count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for loop in self.loops:
            loop.kill()
        for loop in self.loops:
            loop.wait()


def lead_session() -> None:
    """Makes this rank the leader of a session, unless its launcher has made it lead one."""
    if os.getsid(0) != os.getpid():
        # One that leads a group of processes cannot. It then shares a session with its launcher,
        # which waits.
        with suppress(PermissionError):
            os.setsid()
