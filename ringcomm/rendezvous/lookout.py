"""Watches the members of a rendezvous for ranks that cannot come any more.

A rank that ends without a word posts nothing, so that the others would wait for it until the
timeout. But they know processes: those of the communicator that they build a group of, and those of
the handles that have come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from ringcomm import _native
from ringcomm.errors import PeerLost

__all__ = ["Lookout", "Parent"]

LOOK_S = 0.01
# A process loses its connections before it counts as ended.
ENDS_S = 0.5


class Parent(Protocol):
    """The parent communicator, which contains the members."""

    def raise_if_unusable(self, name: str) -> None: ...

    def lost(self, ranks: Collection[int]) -> dict[int, str]:
        """Returns who of ``ranks``, of the outermost communicator, makes no call here any more.

        The values say why, as the end of a sentence.
        """
        ...


class Lookout:
    """What a rank knows of the other members' processes.

    Args:
        ranks: the members' ranks in the outermost communicator, by rank in the new one.
        processes: those known already, by rank in the outermost communicator.
        parent: what the new communicator is a part of; None: nothing.

    Attributes:
        processes: those known by now, of this machine and not of this process.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        processes: Mapping[int, _native.Process],
        parent: Parent | None = None,
    ) -> None:
        self._ranks = ranks
        self._parent = parent
        self._looked_s = time.monotonic()
        self.processes = dict(processes)

    def learn(self, rank: int, pid: int) -> None:
        """Notes the process of a member that is on this machine and in this PID namespace."""
        if pid != os.getpid() and self._ranks[rank] not in self.processes:
            self.processes[self._ranks[rank]] = _native.Process(pid, with_descriptor=False)

    def named(self, rank: int) -> str:
        """Names a member, also by its rank in the outermost communicator where that differs."""
        world_rank = self._ranks[rank] if rank < len(self._ranks) else rank
        return f"rank {rank}" if world_rank == rank else f"rank {world_rank} (rank {rank} here)"

    def named_all(self, ranks: Collection[int], most: int = 16) -> str:
        """Names several members."""
        first = [self.named(rank).removeprefix("rank ") for rank in sorted(ranks)[:most]]
        more = ", ..." if len(ranks) > most else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(first)}{more}"

    def look(self, awaited: Iterable[int], operation: str) -> None:
        """Raises if one of the members that are awaited cannot come, or this rank cannot go on.

        Called often; looks 100 times a second.

        Raises:
            PeerLost: its process has ended, or it has closed or left the parent; named.
            AbortedError: the parent is unusable here, as after a close.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        awaited = list(awaited)
        for rank in self.ended_among(awaited):
            raise self._lost(rank, "its process has ended", operation)
        if self._parent is None:
            return
        self._parent.raise_if_unusable("the rendezvous of a group")
        lost = self._parent.lost({self._ranks[rank] for rank in awaited})
        for rank in awaited:
            if self._ranks[rank] in lost:
                raise self._lost(rank, lost[self._ranks[rank]], operation)

    def ended_among(self, members: Iterable[int]) -> Iterator[int]:
        """Yields the members whose processes are known here and have ended."""
        return (rank for rank in members if self._has_ended(self._ranks[rank]))

    def ended(self) -> list[int]:
        """Returns the outermost ranks whose processes have ended, or are about to."""
        return self._ended_of(self.processes)

    def raise_if_ended(self, rank: int, operation: str) -> None:
        """Raises PeerLost if the process of a member has ended, or is about to.

        Waits up to ``ENDS_S`` for the end: a process loses its files before it counts as ended.
        """
        if self._ended_of(self.processes.keys() & {self._ranks[rank]}):
            raise self._lost(rank, "its process has ended", operation)

    def _ended_of(self, world_ranks: Collection[int]) -> list[int]:
        deadline_s = time.monotonic() + ENDS_S
        while True:
            found = [rank for rank in sorted(world_ranks) if self._has_ended(rank)]
            if found or not world_ranks or time.monotonic() >= deadline_s:
                return found
            time.sleep(LOOK_S)

    def _has_ended(self, world_rank: int) -> bool:
        process = self.processes.get(world_rank)
        return process is not None and process.has_ended()

    def _lost(self, rank: int, why: str, operation: str) -> PeerLost:
        return PeerLost(
            f"{operation}: expected {self.named(rank)} to take part, but {why}. See why, and build "
            "a communicator of the ranks that are left"
        )
