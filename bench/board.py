# SPDX-License-Identifier: Apache-2.0
"""The harness's own barrier, so that no library's timing depends on another library's barrier.

Ranks leave a library's barrier at different times: a Gloo barrier takes longer than a small
collective of any other library. Ranks of one machine each wait on one word of memory that all of
them map. Ranks of several nodes use the barrier of a process group, since their calls take much
longer than a message between the nodes.
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
    """A barrier of all ranks, and an exchange of small objects through the store of all ranks.

    ``group`` is a group of all ranks if they are on several nodes, and None on one machine. On one
    machine :meth:`barrier` raises ``CollectiveTimeout`` if a rank does not enter within five
    minutes; a group has its own timeout.
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
        """Returns when every rank has entered; releases the core while it waits.

        It first sleeps ``rest_s`` seconds, for runs in which other programs also use the cores. The
        scheduler lets a process that has just used more than its share of a core wait longer, and a
        yield counts as use. After the sleep every turn begins under equal conditions. The ranks of
        one machine then sleep until an agreed time, and start together by the clock.
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
        """All-gathers a JSON value; returns a list by rank. Slow: not for use in measurements."""
        key = f"exchange/{self._exchanges}"
        self._exchanges += 1
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{peer}")) for peer in range(self.world)]


def share_memory(store: dist.Store, name: str, rank: int, world: int, size_bytes: int) -> int:
    """Returns a file descriptor of ``size_bytes`` zeroed bytes, shared by all ranks.

    The caller maps and closes the descriptor. The memory is freed when the ranks end. Raises
    ``OSError`` if a process may not open another process's descriptor through /proc.
    """
    if rank == 0:
        descriptor = os.memfd_create(f"ringcomm-bench-{name}")
        os.ftruncate(descriptor, size_bytes)
        store.set(f"memory/{name}", f"/proc/{os.getpid()}/fd/{descriptor}")
    else:
        descriptor = os.open(store.get(f"memory/{name}").decode(), os.O_RDWR)
    store.set(f"opened/{name}/{rank}", "1")
    # Other ranks find the memory through rank 0's descriptor, so rank 0 keeps it open until they
    # have opened it.
    store.wait([f"opened/{name}/{peer}" for peer in range(world)])
    return descriptor
