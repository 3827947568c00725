"""Starts threads, and says what to do where the system has none left."""

from __future__ import annotations

import threading

from ringcomm.errors import RingcommError


def no_thread(purpose: str, error: BaseException, what_now: str) -> RingcommError:
    """The error of a thread that did not start.

    Args:
        purpose: what it was for.
        error: the system's.
        what_now: what became of the call, and what to do instead.
    """
    return RingcommError(
        f"{purpose}: expected to start a thread, got {error}. {what_now}. For more threads, raise "
        "the limit (ulimit -u, pids.max of the control group) or the memory, or end other threads"
    )


def start(thread: threading.Thread, purpose: str, what_now: str) -> None:
    """Starts ``thread``; see :func:`no_thread`.

    Raises:
        RingcommError: it did not start, and will not.
    """
    try:
        thread.start()
    except Exception as error:
        raise no_thread(purpose, error, what_now) from error
