"""A barrier of the harness's own, so that no library under test pays for another's turn.

The barrier of a library would leave its ranks with that library's skew (a Gloo barrier
takes longer than a small collective of any other); this one is a word per rank in memory
that all ranks map. Ranks of several nodes have no such memory, so there the barrier is one of a
process group: it serves calls that take much longer than a message between the nodes.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import Any, Protocol

import torch.distributed as dist

_LINE_BYTES = 64
_DEADLINE_S = 300.0
_LOOKS_PER_CLOCK = 1024
_REST_POLL_S = 100e-6
_START_NS = 500_000


class Barrier(Protocol):
    """The interface of what ranks enter and leave together."""

    def enter(self, rest_s: float) -> None:
        """Returns when every rank has entered; ``rest_s`` as of :meth:`Board.barrier`."""

    def close(self) -> None:
        """Gives its memory back."""


class MappedBarrier:
    """A word per rank in memory that all ranks of one machine map."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._epoch = 0
        descriptor = share_memory(store, "barrier", rank, world, _LINE_BYTES * world)
        self._map = mmap.mmap(descriptor, _LINE_BYTES * world)
        os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")

    def enter(self, rest_s: float) -> None:
        if rest_s > 0:
            time.sleep(rest_s)
        stride, mine = _LINE_BYTES // 8, self._rank * _LINE_BYTES // 8
        self._epoch += 1
        self._words[mine + 1] = time.monotonic_ns()
        self._words[mine] = self._epoch
        looks, deadline = 0, time.monotonic() + _DEADLINE_S
        for peer in range(self._world):
            while self._words[peer * stride] < self._epoch:
                if rest_s > 0:
                    time.sleep(_REST_POLL_S)
                else:
                    os.sched_yield()
                looks += 1
                if looks % _LOOKS_PER_CLOCK == 0 and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {self._rank}: rank {peer} has not reached the barrier"
                    )
        if rest_s > 0:
            last_ns = max(self._words[peer * stride + 1] for peer in range(self._world))
            while time.monotonic_ns() < last_ns + _START_NS:
                pass

    def close(self) -> None:
        self._words.release()
        self._map.close()


class GroupBarrier:
    """The barrier of a process group, whose ranks may be on several nodes.

    They have no common clock by which to start together, so a rest is only a sleep.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def enter(self, rest_s: float) -> None:
        if rest_s > 0:
            time.sleep(rest_s)
        dist.barrier(self._group)

    def close(self) -> None:
        pass


class Board:
    """A barrier of all ranks, and small objects through the store.

    Args:
        store: of all ranks.
        rank, world: this rank, and how many there are.
        group: of all ranks where they are on several nodes, used by no system that is timed; None:
            they are on one machine, and the barrier lies in memory that they map.

    Raises ``TimeoutError`` from :meth:`barrier` when a rank of one machine stays away for five
    minutes; a group has a timeout of its own.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.world = rank, world
        self._store = dist.PrefixStore("board", store)
        self._exchanges = 0
        self._barrier: Barrier
        if group is None:
            self._barrier = MappedBarrier(self._store, rank, world)
        else:
            self._barrier = GroupBarrier(group)
        self.exchange(None)

    def barrier(self, rest_s: float = 0.0) -> None:
        """Returns when every rank has entered; gives the core away while it waits.

        Args:
            rest_s: seconds to sleep first, where other programs want the cores. Whoever has just
                used more than its share of a core waits for it longer, and to have yielded counts
                as use: the rest lets every turn begin alike, whatever the last one did. The ranks
                of one machine then wait asleep, and start together by the clock.
        """
        self._barrier.enter(rest_s)

    def exchange(self, value: object) -> list[Any]:
        """All-gathers a JSON value, by rank. Slow: for use between measurements only."""
        key = f"exchange/{self._exchanges}"
        self._exchanges += 1
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{peer}")) for peer in range(self.world)]

    def close(self) -> None:
        self._barrier.close()


def share_memory(store: dist.Store, name: str, rank: int, world: int, size_bytes: int) -> int:
    """A descriptor of ``size_bytes`` zeroed bytes that all ranks get; nothing outlives the ranks.

    The caller maps and closes it. Raises ``OSError`` where a process may not open another's
    descriptor through /proc.
    """
    if rank == 0:
        descriptor = os.memfd_create(f"ringcomm-bench-{name}")
        os.ftruncate(descriptor, size_bytes)
        store.set(f"memory/{name}", f"/proc/{os.getpid()}/fd/{descriptor}")
    else:
        descriptor = os.open(store.get(f"memory/{name}").decode(), os.O_RDWR)
    store.set(f"opened/{name}/{rank}", "1")
    # The descriptor of rank 0 is how the others find the memory: it stays until they have.
    store.wait([f"opened/{name}/{peer}" for peer in range(world)])
    return descriptor
