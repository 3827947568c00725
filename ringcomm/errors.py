# SPDX-License-Identifier: Apache-2.0
"""The exceptions of ringcomm, and the texts of errors for native faults.

Every message has the operation, the reporting rank, what was expected, what was found and what to
do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

__all__ = [
    "AbortedError",
    "ArgumentError",
    "CheckpointError",
    "CollectiveTimeout",
    "CorruptedError",
    "DiskError",
    "ForkError",
    "HeapError",
    "MismatchError",
    "PeerLost",
    "RendezvousError",
    "RingcommError",
    "UnsupportedError",
]


class RingcommError(RuntimeError):
    """Root of all errors that ringcomm raises.

    Attributes:
        repeats: True if this rank only repeats an error that another rank raised first.
    """

    repeats = False


class ArgumentError(RingcommError, ValueError):
    """An argument cannot be used; raised before the call affects any peer."""


class MismatchError(RingcommError):
    """Two ranks made calls that differ in collective, size, dtype or op; the message names both."""


class CorruptedError(RingcommError):
    """A peer's header is damaged: it does not fit the call, or points outside the peer's memory."""


class PeerLost(RingcommError):
    """A peer's process is gone, or the peer has closed the communicator."""


class CollectiveTimeout(RingcommError, TimeoutError):
    """A peer did not do its part within the communicator's timeout."""


class UnsupportedError(RingcommError, NotImplementedError):
    """This machine or build does not support the request."""


class AbortedError(RingcommError):
    """The communicator was aborted, or became unusable after an earlier fault."""


class HeapError(RingcommError, MemoryError):
    """The heap cannot be made, or has too little free memory for the request."""


class RendezvousError(RingcommError):
    """The ranks of a new communicator could not find or reach each other."""


class CheckpointError(RingcommError):
    """Saved state is damaged, incomplete, or of another model; the load has changed nothing."""


class DiskError(RingcommError):
    """State cannot be stored on a disk, or a read returned data that differ from the written data.

    Attributes:
        path: the folder on the disk, if the error has one.
        extent: the extent of the scratch file, if the error has one.
        offset_bytes: the offset in the scratch file, if the error has one.
    """

    path: str | None = None
    extent: int | None = None
    offset_bytes: int | None = None


class ForkError(RingcommError):
    """A forked child used an object of its parent, such as a communicator."""


def printable(text: str, allowed: str = "\n\t") -> str:
    """Returns ``text`` without control characters, which a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in allowed else "?" for char in text)


def where(operation: str, rank: int, world_size: int) -> str:
    """Returns the beginning of every error message: the operation and the rank."""
    return f"{operation} on rank {rank} of {world_size}"


def _mismatch(fault: Mapping[str, Any]) -> MismatchError:
    return different_calls(f"Rank {fault['rank']}", fault["mine"], _peer(fault), fault["theirs"])


def different_calls(one: str, mine: object, other: str, theirs: object) -> MismatchError:
    """Returns the error for two ranks whose calls differ at one position in the order of calls."""
    # kernels/host/describe.cpp names the variable for kernels that take slices.
    sliced = ["RINGCOMM_KERNELS" in str(each) for each in (mine, theirs)]
    kernels = "; set RINGCOMM_KERNELS to the same value on all ranks" * (sliced[0] != sliced[1])
    return MismatchError(
        f"the ranks made different calls. {one} called {mine}; {other} called {theirs}. All ranks "
        "must call the same collectives in the same order, with equal sizes, dtypes, ops and "
        f"roots{kernels}"
    )


def _corrupt(fault: Mapping[str, Any]) -> CorruptedError:
    return CorruptedError(
        f"the header that {_peer(fault)} published for rank {fault['rank']} is damaged: it points "
        f"outside the publisher's memory, or cuts the data differently from {fault['mine']} (the "
        f"header says {fault['theirs']}). The data were not touched. Look for other writers to the "
        "publisher's memory: a stray pointer, another program, failing memory"
    )


def _refused(fault: Mapping[str, Any]) -> UnsupportedError:
    return UnsupportedError(
        f"rank {fault['rank']} in {fault['mine']} expected to read the memory of {_peer(fault)}, "
        "but the operating system refuses it since one of the two changed its user, its "
        "capabilities or its dumpable flag (PR_SET_DUMPABLE). Make such changes before the "
        "communicator, or build it with CommOptions(single_copy=False)"
    )


def _overlap(fault: Mapping[str, Any]) -> ArgumentError:
    return ArgumentError(
        f"rank {fault['rank']} began {fault['mine']} while another call of the communicator was "
        "under way there: a replay of a graph beside an eager call or another replay, on another "
        "stream. Their data may be mixed. Replay graphs on the stream of the eager calls, make one "
        "stream wait for the other, or use separate communicators for work that runs at the same "
        "time"
    )


def _peer(fault: Mapping[str, Any]) -> str:
    return f"rank {fault['peer']}" if fault["peer"] >= 0 else "any other rank"


def _lost(found: str, advice: str, fault: Mapping[str, Any]) -> PeerLost:
    return PeerLost(
        f"rank {fault['rank']} in {fault['mine']} expected {_peer(fault)} to take part, but "
        f"{found} (noticed after {_seconds(fault['waited_ms'] / 1000)} at item {fault['item']}). "
        f"{advice}"
    )


_MAKE_ALIKE = "All ranks must make the same calls before one of them "


def _timeout(fault: Mapping[str, Any]) -> RingcommError:
    seen = f"item {fault['item']}, epoch wanted {fault['wanted']}, seen {fault['seen']}"
    return timed_out(
        f"rank {fault['rank']} in {fault['mine']}",
        fault["waited_ms"] / 1000,
        f"{_peer(fault)} ({seen}), which did not come",
        look_at(_peer(fault)),
    )


def _aborted(fault: Mapping[str, Any]) -> AbortedError:
    because = f": {printable(fault['reason'])}" if fault["reason"] else ""
    return AbortedError(f"rank {fault['rank']} aborted the communicator{because}")


def _interrupted(fault: Mapping[str, Any]) -> AbortedError:
    return AbortedError(
        f"rank {fault['rank']} was interrupted (Ctrl-C) in {fault['mine']} at item "
        f"{fault['item']}, where it waited for {_peer(fault)}"
    )


_BY_KIND: dict[str, Callable[[Mapping[str, Any]], RingcommError]] = {
    "aborted": _aborted,
    "corrupt": _corrupt,
    "refused": _refused,
    "interrupted": _interrupted,
    "mismatch": _mismatch,
    "overlap": _overlap,
    "peer_closed": partial(_lost, "it has closed the communicator", f"{_MAKE_ALIKE}closes"),
    "peer_left": partial(
        _lost, "it has left the function of LocalWorld.run()", f"{_MAKE_ALIKE}returns"
    ),
    "peer_lost": partial(_lost, "its process has ended", "See why it ended"),
    "timeout": _timeout,
}


def native_missing(package: Path, cause: ImportError) -> ImportError:
    """Returns the error for a native module that is not built or does not fit this Python.

    Args:
        package: the folder of ringcomm's Python files, where the module should be.
        cause: Python's import error.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    built = sorted(path.name for path in package.glob("_native*.so"))
    if not built:
        found = f"the native module is not built: there is no _native in {package}"
    else:
        found = f"the native module does not load in Python {version}: {package} has " + ", ".join(
            built
        )
        if not isinstance(cause, ModuleNotFoundError):
            found += f", and Python says: {cause}"
    if (package.parent / "CMakeLists.txt").is_file():
        advice = (
            f"In {package.parent}, run 'make native' and use .venv/bin/python, or 'pip install .' "
            "with this Python and start it in another folder, so that it finds what was installed"
        )
    else:
        advice = "Install ringcomm again with this Python: pip install --force-reinstall ringcomm"
    return ImportError(f"ringcomm: {found}. {advice}", name="ringcomm._native", path=str(package))


def from_fault(head: str, fault: Mapping[str, Any]) -> RingcommError:
    """Returns the exception for a native fault record.

    Args:
        head: operation and rank of the call that ends, from :func:`where`.
        fault: ``_native.Comm.fault()``; its ``rank`` is the rank where the fault began, perhaps a
            peer. ``hint`` (an action of this process that may be the cause), ``story`` (the awaited
            rank's last calls) and ``trace`` (the file with the records) may be added.
    """
    told = _BY_KIND[fault["kind"]](fault)
    return type(told)(
        f"{head}: {told}. {fault.get('hint', '')}{fault.get('story', '')}The communicator is "
        f"unusable now: close it and build a new one{fault.get('trace', '')}"
    )


def _seconds(seconds: float) -> str:
    return f"{round(seconds, 3):g} s"


def waited_for(waited_s: float, awaited: str) -> str:
    """Returns how long a wait lasted until its timeout, and what it awaited.

    The text is a part of a sentence; :func:`timed_out` makes the whole error.
    """
    return f"waited {_seconds(waited_s)}, until its timeout ended, for {awaited}"


def timed_out(
    waiter: str,
    waited_s: float,
    awaited: str,
    advice: str,
    *,
    kind: type[RingcommError] = CollectiveTimeout,
    option: str = "timeout=",
) -> RingcommError:
    """Returns the error for a wait that reached its timeout.

    Args:
        waiter: who waited, in which call.
        waited_s: how long, in seconds.
        awaited: the rank or thing that the wait was for.
        advice: what to do, apart from raising the timeout.
        kind: class of the error.
        option: the option that sets the timeout.
    """
    return kind(f"{waiter} {waited_for(waited_s, awaited)}. {advice}, or raise {option}")


def look_at(rank: str, *, on_other_node: bool = False) -> str:
    """Returns the ``advice`` for :func:`timed_out` if the wait was for one rank."""
    link = ", or the link between the nodes is down" if on_other_node else ""
    return f"It is stopped, late, or never made this call{link}: look at what {rank} does"


def not_done(call: str, waited_s: float, state: str = "the call goes on") -> CollectiveTimeout:
    """Returns the error for a ``Work.wait(timeout=...)`` that ended before the call did."""
    return CollectiveTimeout(
        f"{call}: not done after {_seconds(waited_s)} of wait(timeout=...); {state}. Wait again, "
        "or abort the communicator"
    )


def unusable_error(
    operation: str, rank: int, world_size: int, first: BaseException
) -> RingcommError:
    """Returns the error for every call on a communicator after its first fault."""
    error = AbortedError(
        f"{where(operation, rank, world_size)}: this communicator is unusable since an earlier "
        f"fault. First fault: {type(first).__name__}: {first}"
    )
    error.__cause__ = first
    return error


def no_thread(purpose: str, error: BaseException, what_now: str) -> RingcommError:
    """Returns the error for a thread that did not start.

    Args:
        purpose: what the thread was for.
        error: the system's error.
        what_now: what happened to the call, and what to do instead.
    """
    return RingcommError(
        f"{purpose}: expected to start a thread, got {error}. {what_now}. For more threads, raise "
        "the limit (ulimit -u, pids.max of the control group) or the memory, or end other threads"
    )


def start_thread(thread: threading.Thread, purpose: str, what_now: str) -> None:
    """Starts ``thread``; see :func:`no_thread`.

    Raises:
        RingcommError: the thread did not start, and never will.
    """
    try:
        thread.start()
    except Exception as error:
        raise no_thread(purpose, error, what_now) from error
