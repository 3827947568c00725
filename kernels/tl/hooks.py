"""Questions that a kernel asks: the interpreter its process, a GPU its own clock and host page.

A kernel in Triton's interpreter is Python: it can read the host's clock, be interrupted, and look
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

# Whether TRITON_INTERPRET is set: then every kernel here is Python. Triton looks when it defines a
# kernel, which is when this is imported.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IS_INTERPRETED)

# A rank that polls in vain leaves the core: others may have to run on it. A choice, longer than a
# poll takes in the interpreter, so that a rank that waits does not take the core for most of it.
_PAUSE_S = 2e-3


def lives(peer: int) -> int:
    """Knows of no process that has ended."""
    return 0


_health: Callable[[int], int] = lives
# The interpreter keeps the position of the program that it runs in a global variable.
_one_at_a_time = threading.Lock()


def host_health(peer: Any) -> int:
    """Status of the awaited peer: 0 while it lives."""
    return _health(operator.index(peer))


def host_passing(point: Any, rank: Any, sequence: Any) -> None:
    """A kernel is about to publish, to acknowledge or to wait; see ``passing`` in waiting.py."""
    if _native.fault_armed():
        _native.pass_fault_point(*(operator.index(each) for each in (point, rank, sequence)))


_looked_ns, _unwatched_ns = time.monotonic_ns(), 0


def host_clock_ns() -> int:
    """A monotonic clock, which stands still while no kernel looks at it, as a Deadline does."""
    global _looked_ns, _unwatched_ns
    now_ns = time.monotonic_ns()
    if now_ns - _looked_ns > LONGEST_LOOK_S * 1e9:
        _unwatched_ns += now_ns - _looked_ns
    _looked_ns = now_ns
    return now_ns - _unwatched_ns


def host_pause() -> None:
    """Leaves the core to others; a signal handler may raise here."""
    time.sleep(_PAUSE_S)


class _NoScope:
    """Stands in for the patches that were made already."""

    def restore(self) -> None:
        """Those of the kernel around it stay."""


@contextmanager
def interpreting(health: Callable[[int], int]) -> Iterator[None]:
    """Inside, a kernel may run in the interpreter; one of a process at a time.

    Args:
        health: status of the process of a peer, 0 while it lives.
    """
    global _health
    with _one_at_a_time, patched_once():
        before, _health = _health, health
        try:
            yield
        finally:
            _health = before


def interpreted_int64(number: int) -> Any:
    """An argument of an interpreted kernel that is an int64 however small ``number`` is.

    Triton takes a Python integer for an int32 where it fits into 32 bits. An address does so on the
    heap of a Python that is linked at a fixed address.
    """
    from triton.runtime.interpreter import interpreter_builder

    return tl.tensor(interpreter_builder.get_int64(number), tl.int64)


@contextmanager
def patched_once() -> Iterator[None]:
    """Inside, Triton's interpreter prepares its language once per kernel.

    By itself it does so again at each call of a device function (Triton 3.6 to 3.9,
    InterpretedFunction.__call__ in runtime/interpreter.py), which took 70% of a collective's time.
    Our functions see ``triton.language``, and Triton's own, such as ``tl.sum``, see
    ``triton.language.core``: once for each is enough.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[int] = set()
    scanned: dict[int, dict[str, Any]] = {}  # the values keep their ids from being used again

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
