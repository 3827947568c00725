# SPDX-License-Identifier: Apache-2.0
"""Host functions for kernels in Triton's interpreter: clock, pauses, peers' health and faults.

A kernel in Triton's interpreter is Python: it can read the host's clock, be interrupted, and check
whether a peer's process still lives. A compiled kernel reads ``globaltimer`` and the words that its
host keeps for it.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl

from ringcomm import _native
from ringcomm.process import LONGEST_LOOK_S

# True if TRITON_INTERPRET is set: then every kernel here is Python. Triton reads the variable when
# it defines a kernel, that is, when the kernel's module is imported.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IS_INTERPRETED)

# A waiting rank pauses between polls, since other ranks may need its core. Chosen, not measured:
# longer than a poll takes in the interpreter, so that a waiting rank leaves the core mostly free.
_PAUSE_S = 2e-3


def lives(peer: int) -> int:
    """Returns 0, which means alive, for every peer: the default check."""
    return 0


_health: Callable[[int], int] = lives
# A global variable of the interpreter holds the position of the program that is running.
_one_at_a_time = threading.Lock()


def host_health(peer: Any) -> int:
    """Returns the status of the awaited peer: 0 while it lives."""
    return _health(operator.index(peer))


def host_passing(point: Any, rank: Any, sequence: Any) -> None:
    """Passes the fault point before a publication, ack or wait; see ``passing`` in waiting.py."""
    if _native.fault_armed():
        _native.pass_fault_point(*(operator.index(each) for each in (point, rank, sequence)))


_looked_ns, _unwatched_ns = time.monotonic_ns(), 0


def host_clock_ns() -> int:
    """Returns a monotonic time that stops while no kernel reads it, as in the native Deadline."""
    global _looked_ns, _unwatched_ns
    now_ns = time.monotonic_ns()
    if now_ns - _looked_ns > LONGEST_LOOK_S * 1e9:
        _unwatched_ns += now_ns - _looked_ns
    _looked_ns = now_ns
    return now_ns - _unwatched_ns


def host_pause() -> None:
    """Yields the core to other threads; a signal handler may raise here."""
    time.sleep(_PAUSE_S)


class _NoScope:
    """The scope of a patch that an enclosing kernel has already made."""

    def restore(self) -> None:
        """Keeps the patch, which the enclosing kernel removes."""


@contextmanager
def interpreting(health: Callable[[int], int]) -> Iterator[None]:
    """A context in which a kernel may run in the interpreter; one kernel per process at a time.

    Args:
        health: returns the status of a peer's process, 0 while it lives.
    """
    global _health
    with _one_at_a_time, patched_once():
        before, _health = _health, health
        try:
            yield
        finally:
            _health = before


def interpreted_int64(number: int) -> Any:
    """Returns ``number`` as an int64 argument of an interpreted kernel, however small it is.

    Triton takes a Python integer for an int32 where it fits into 32 bits. An address may fit if
    Python is linked at a fixed address.
    """
    from triton.runtime.interpreter import interpreter_builder

    return tl.tensor(interpreter_builder.get_int64(number), tl.int64)


@contextmanager
def patched_once() -> Iterator[None]:
    """A context in which Triton's interpreter patches its language once per kernel.

    Triton 3.6 to 3.9 patches it again at each call of a device function
    (InterpretedFunction.__call__ in runtime/interpreter.py), which took 70% of a collective's time.
    Our functions use ``triton.language``, and Triton's own, such as ``tl.sum``, use
    ``triton.language.core``: one patch of each module is enough.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[int] = set()
    scanned: dict[int, dict[str, Any]] = {}  # keeps objects alive, so that ids stay unique

    def patch_first(fn: Any) -> Any:
        found = fn.__globals__
        if id(found) in scanned:
            return _NoScope()
        scanned[id(found)] = found
        seen = {id(each) for each in found.values() if each is tl or each is tl.core}
        if seen <= patched:
            return _NoScope()
        patched.update(seen)
        return patch(fn)

    interpreter._patch_lang = patch_first
    try:
        yield
    finally:
        interpreter._patch_lang = patch
