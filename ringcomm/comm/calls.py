"""What the engine handles: a membership, a checked call, and a native object past its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

from ringcomm import _native
from ringcomm.comm.options import CommOptions
from ringcomm.comm.work import Outputs
from ringcomm.errors import AbortedError, RingcommError, unusable_error, where
from ringcomm.memory.exchange import Store
from ringcomm.memory.peers import MappedHeap


@dataclass(frozen=True)
class Membership:
    """Who a communicator connects, and what it was built with.

    ``ranks`` are the members' ranks in the outermost communicator. ``heaps`` are their heaps
    as mapped here, held for as long as the communicator lives.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    options: CommOptions
    heaps: tuple[MappedHeap, ...]


class Turn:
    """What surrounds a rank that runs as a thread beside others: on the host, nothing."""

    def taken(self) -> AbstractContextManager[None]:
        """Entered by the rank's thread."""
        return nullcontext()

    def rejoin(self) -> None:
        """Called by the thread that started the ranks, once all have ended."""


class Call:
    """A checked call, ready to run.

    ``run`` takes the native communicator and returns its status; ``outputs`` are the tensors that
    hold the result afterwards. Not a dataclass: one is made for each call, and a frozen
    dataclass takes three times as long to make.
    """

    __slots__ = ("name", "outputs", "run")

    def __init__(self, name: str, run: Callable[[_native.Comm], int], outputs: Outputs) -> None:
        self.name = name
        self.run = run
        self.outputs = outputs


# Functions, so that what they return holds no communicator: a cycle would keep its memory and
# descriptors until the garbage collector comes by.
def refusal(rank: int, world_size: int, first: RingcommError) -> Callable[[str], RingcommError]:
    """Makes the error of a call after the communicator's first fault."""
    return lambda op: unusable_error(op, rank, world_size, first)


def closed(rank: int, world_size: int, name: str) -> Callable[[str], RingcommError]:
    """Makes the error of a call after the communicator was closed."""
    return lambda op: AbortedError(
        f"{where(op, rank, world_size)}: the communicator {name!r} was closed; build a new one"
    )


class Unusable:
    """Stands in for the native communicator once it must not be called any more.

    The quick paths call the native object without asking whether it is still usable; this way the
    question costs them nothing.
    """

    _make_error: Callable[[str], RingcommError]

    def __init__(self, make_error: Callable[[str], RingcommError]) -> None:
        object.__setattr__(self, "_make_error", make_error)

    def __setattr__(self, name: str, value: object) -> None:
        raise self._make_error(name)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._make_error(name.removesuffix("_plain"))
