# SPDX-License-Identifier: Apache-2.0
"""Stands between saving and the operating system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# All that changes what is on a disk; rmtree() goes through them too.
CHANGING = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")

Before = Callable[[int, str, tuple[Any, ...]], None]


@contextmanager
def interposed(before: Before) -> Iterator[None]:
    """Calls ``before(number, name, arguments)`` ahead of every changing call through ``os``.

    Calls that ``before`` makes itself go straight to ``os``.
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
    """Returns how many changing calls ``work`` makes."""
    numbers = [-1]
    with interposed(lambda number, name, args: numbers.append(number)):
        work()
    return numbers[-1] + 1
