"""The exceptions of ringcomm, and the one place that words a native fault.

Every message says the operation, the rank that reports, what was expected, what came and
what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AbortedError",
    "ArgumentError",
    "CollectiveTimeout",
    "ForkError",
    "HeapError",
    "MismatchError",
    "PeerLost",
    "RendezvousError",
    "RingcommError",
    "UnsupportedError",
]


class RingcommError(RuntimeError):
    """Root of all errors that ringcomm raises."""


class ArgumentError(RingcommError, ValueError):
    """An argument cannot be used; raised before any peer is disturbed."""


class MismatchError(RingcommError):
    """Two ranks called different collectives, sizes, dtypes or ops; both calls are named."""


class PeerLost(RingcommError):
    """A peer's process is gone."""


class CollectiveTimeout(RingcommError, TimeoutError):
    """A peer did not do its part within the communicator's timeout."""


class UnsupportedError(RingcommError, NotImplementedError):
    """This machine or build cannot do what was asked."""


class AbortedError(RingcommError):
    """The communicator was aborted, or became unusable after an earlier fault."""


class HeapError(RingcommError, MemoryError):
    """The heap cannot be made, or has no room for the request."""


class RendezvousError(RingcommError):
    """The ranks of a new communicator could not find or reach each other."""


class ForkError(RingcommError):
    """A communicator was used in a forked child of the process that made it."""


_REBUILD = "The communicator is unusable now: close it and build a new one"


def where(operation: str, rank: int, world_size: int) -> str:
    """The head of every message: which operation, on which rank."""
    return f"{operation} on rank {rank} of {world_size}"


def mismatch_error(fault: Mapping[str, Any], world_size: int) -> MismatchError:
    """The error for two ranks whose calls differ."""
    rank, peer = fault["rank"], fault["peer"]
    return MismatchError(
        f"{where(fault['op'], rank, world_size)}: the ranks made different calls. "
        f"Rank {rank} called {fault['mine'] or fault['op']}; "
        f"rank {peer} called {fault['theirs'] or 'something else'}. "
        "All ranks must call the same collectives in the same order, with equal sizes, dtypes, "
        f"ops and roots. {_REBUILD}."
    )


def peer_lost_error(fault: Mapping[str, Any], world_size: int) -> PeerLost:
    """The error for a peer whose process ended."""
    return PeerLost(
        f"{where(fault['op'], fault['rank'], world_size)}: expected rank {fault['peer']} to take "
        f"part, but it is gone (its process ended or closed the communicator); noticed after "
        f"{fault['waited_ms']} ms at step {fault['step']}. {_REBUILD} over the ranks that live."
    )


def timeout_error(fault: Mapping[str, Any], world_size: int) -> CollectiveTimeout:
    """The error for a peer that lives but did not come in time."""
    return CollectiveTimeout(
        f"{where(fault['op'], fault['rank'], world_size)}: waited {fault['waited_ms']} ms for rank "
        f"{fault['peer']} (step {fault['step']}, epoch wanted {fault['wanted']}, seen "
        f"{fault['seen']}), but it did not come. It is stopped, late, or never made this call: "
        f"look at what rank {fault['peer']} does, or raise timeout=. {_REBUILD}."
    )


def aborted_error(fault: Mapping[str, Any], world_size: int) -> AbortedError:
    """The error for a communicator that this rank or a peer aborted."""
    reason = fault["theirs"] or fault["mine"]
    because = f": {reason}" if reason else ""
    peer = fault["peer"]
    culprit = f"rank {peer}" if peer >= 0 and peer != fault["rank"] else "this rank"
    return AbortedError(
        f"{where(fault['op'], fault['rank'], world_size)}: the communicator was aborted by "
        f"{culprit}{because}. {_REBUILD}."
    )


_BY_KIND = {
    "aborted": aborted_error,
    "interrupted": aborted_error,
    "mismatch": mismatch_error,
    "peer_lost": peer_lost_error,
    "timeout": timeout_error,
}


def from_fault(fault: Mapping[str, Any], world_size: int) -> RingcommError:
    """Turns a native fault record into the exception to raise.

    Args:
        fault: the dict of ``_native.Comm.fault()``.
        world_size: ranks of the communicator.
    """
    make = _BY_KIND.get(fault["kind"])
    if make is None:
        return RingcommError(
            f"{where(fault['op'], fault['rank'], world_size)}: unknown fault {dict(fault)!r}. "
            f"{_REBUILD}."
        )
    return make(fault, world_size)


def unusable_error(
    operation: str, rank: int, world_size: int, first: BaseException
) -> RingcommError:
    """The error of every call on a communicator after its first fault."""
    error = AbortedError(
        f"{where(operation, rank, world_size)}: this communicator is unusable since an earlier "
        f"fault. First fault: {type(first).__name__}: {first}"
    )
    error.__cause__ = first
    return error
