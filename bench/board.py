"""A barrier of the harness's own, so that no library under test pays for another's turn.

The barrier of a library would leave its ranks with that library's skew: a Gloo barrier takes longer
than a small collective of any other. Ranks of one machine wait at a word each in memory that all of
them map. Ranks of several nodes use the barrier of a process group, which serves calls that take
much longer than a message between the nodes.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import Any

import torch.distributed as dist

from ringcomm.errors import look_at, timed_out, where

_LINE_BYTES = 64
_DEADLINE_S = 300.0
_LOOKS_PER_CLOCK = 1024
_REST_POLL_S = 100e-6
_START_NS = 500_000


class Board:
    """A barrier of all ranks, and small objects through the store of all ranks.

    ``group`` is a group of all ranks where they are on several nodes; None: they are on one
    machine. Raises ``CollectiveTimeout`` from :meth:`barrier` when a rank of one machine stays away
    for five minutes; a group has a timeout of its own.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.world = rank, world
        self._store = dist.PrefixStore("board", store)
        self._exchanges = self._epoch = 0
        self._group = group
        if group is None:
            descriptor = share_memory(self._store, "barrier", rank, world, _LINE_BYTES * world)
            self._words = memoryview(mmap.mmap(descriptor, _LINE_BYTES * world)).cast("Q")
            os.close(descriptor)
        self.exchange(None)

    def barrier(self, rest_s: float = 0.0) -> None:
        """Returns when every rank has entered; gives the core away while it waits.

        It sleeps ``rest_s`` seconds first, where other programs want the cores. A process that has
        just used more than its share of a core waits for it longer, and a yield counts as use: the
        rest lets every turn begin alike. The ranks of one machine then wait asleep, and start
        together by the clock.
        """
        if rest_s > 0:
            time.sleep(rest_s)
        if self._group is not None:
            dist.barrier(self._group)
            return
        stride = _LINE_BYTES // 8
        self._epoch += 1
        self._words[self.rank * stride + 1] = time.monotonic_ns()
        self._words[self.rank * stride] = self._epoch
        looks, deadline = 0, time.monotonic() + _DEADLINE_S
        for peer in range(self.world):
            while self._words[peer * stride] < self._epoch:
                time.sleep(_REST_POLL_S) if rest_s > 0 else os.sched_yield()
                looks += 1
                if looks % _LOOKS_PER_CLOCK == 0 and time.monotonic() > deadline:
                    raise timed_out(
                        f"{where('barrier', self.rank, self.world)}:",
                        _DEADLINE_S,
                        f"rank {peer}, which did not come",
                        look_at(f"rank {peer}"),
                        option="_DEADLINE_S",
                    )
        if rest_s > 0:
            last_ns = max(self._words[peer * stride + 1] for peer in range(self.world))
            while time.monotonic_ns() < last_ns + _START_NS:
                pass

    def exchange(self, value: object) -> list[Any]:
        """All-gathers a JSON value, by rank. Slow: for use between measurements only."""
        key = f"exchange/{self._exchanges}"
        self._exchanges += 1
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{peer}")) for peer in range(self.world)]


def share_memory(store: dist.Store, name: str, rank: int, world: int, size_bytes: int) -> int:
    """Returns a descriptor of ``size_bytes`` zeroed bytes, the same memory on all ranks.

    The caller maps and closes it. Nothing outlives the ranks. Raises ``OSError`` where a process
    may not open another's descriptor through /proc.
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
