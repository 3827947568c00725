"""Destructors that the end of the interpreter leaves silent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

__all__ = ["until_exit"]

T = TypeVar("T")


def until_exit(destructor: Callable[[T], None]) -> Callable[[T], None]:
    """Makes a ``__del__`` do nothing once the interpreter ends.

    By then the interpreter has set globals of modules to None, and a destructor that reads one of
    them would print ``Exception ignored in``. Communicators and device heaps have been closed
    before (:func:`multiprocessing.util.Finalize`), and the process gives back everything else.
    """
    is_finalizing = sys.is_finalizing  # no global any more

    @wraps(destructor)
    def guarded(self: T) -> None:
        if not is_finalizing():
            destructor(self)

    return guarded
