# SPDX-License-Identifier: Apache-2.0
"""Intercepts the system calls through which saving changes the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# Every function of ``os`` that changes the disk; shutil.rmtree() calls them as well.
CHANGING = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")

Before = Callable[[int, str, tuple[Any, ...]], None]


@contextmanager
def interposed(before: Before) -> Iterator[None]:
    """Calls ``before(number, name, arguments)`` ahead of each ``os`` call that changes the disk.

    Calls that ``before`` itself makes are not intercepted.
    """
    count = 0
    inside = False

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, inside
            if inside:
                return real(*args, **kwargs)
            number, count = count, count + 1
            inside = True
            try:
                before(number, name, args)
            finally:
                inside = False
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in CHANGING:
            patches.enter_context(mock.patch.object(os, name, wrapped(name, getattr(os, name))))
        yield


def count_calls(work: Callable[[], Any]) -> int:
    """Returns how many calls ``work`` makes that change the disk."""
    numbers = [-1]
    with interposed(lambda number, name, args: numbers.append(number)):
        work()
    return numbers[-1] + 1
