"""All communicators of this process: closed at exit, and left alone in a forked child."""

from __future__ import annotations

import os
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from ringcomm.comm.engine import Engine

# Calls under way at exit get this long to end by themselves before their peers are told.
EXIT_GRACE_S = 5.0
# Before multiprocessing joins its children, which may wait for this rank.
EXIT_PRIORITY = 100

live: WeakSet[Engine] = WeakSet()
_inherited: list[Any] = []
_closes_at_exit_of = 0


def add(engine: Engine) -> None:
    """Notes a new communicator."""
    global _closes_at_exit_of
    if _closes_at_exit_of != os.getpid():
        _closes_at_exit_of = os.getpid()
        # Not atexit, which the children of multiprocessing skip; and anew in each of them, since
        # they forget the finalizers of their parent.
        Finalize(None, close_all, exitpriority=EXIT_PRIORITY)
    live.add(engine)


def close_all() -> None:
    """Closes every communicator of this process; runs at exit."""
    for engine in list(live):
        engine._close(EXIT_GRACE_S)


def _leave_all_to_parent() -> None:
    for engine in list(live):
        _inherited.append((engine, *engine._leave_to_parent()))
    live.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
