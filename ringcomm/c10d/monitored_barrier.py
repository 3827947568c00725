"""``monitored_barrier``: a barrier that names the ranks that did not come.

It runs over the group's store, not over the communicator: it has to tell who is missing while
ranks hang inside a collective, and a rank that does not come must leave the communicator usable.

Keys, below the round's prefix; a round is one call, counted alike on every rank:
``here/<rank>``  that rank has come        (writer: the rank, reader: rank 0)
``verdict``      "pass", or who is missing (writer: rank 0, readers: the other ranks)
"""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

from ringcomm.errors import CollectiveTimeout, PeerLost
from ringcomm.memory.exchange import launch_attempt

__all__ = ["MonitoredBarrier", "admit_ringcomm_to_monitored_barrier"]

_PASS = "pass"
_SHORTEST = timedelta(milliseconds=1)  # stores take a timeout of zero for "none"


class MonitoredBarrier:
    """The monitored barriers of one process group.

    Args:
        store: seen by the members of the group only.
        rank: group rank of the caller.
        world_size: members of the group.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._round = 0

    def __call__(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Blocks until every rank of the group has called.

        Args:
            timeout: the longest that rank 0 waits for the others, and they for rank 0.
            wait_all_ranks: rank 0 reports all ranks that did not come, not only the first.

        Raises:
            CollectiveTimeout: on rank 0, naming the ranks that did not come in time.
            PeerLost: on another rank, when rank 0 did not come or reported a failure.
        """
        # What an earlier attempt left in the store must not count as having come.
        prefix = f"monitored_barrier/attempt{launch_attempt()}/{self._round}"
        self._round += 1
        if self._rank == 0:
            self._judge(prefix, timeout, wait_all_ranks)
        else:
            self._report(prefix, timeout)

    def _judge(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        missing: list[int] = []
        for rank in range(1, self._world_size):
            left = timedelta(seconds=deadline - time.monotonic())
            if left <= timedelta(0) and not wait_all_ranks:
                self._fail(prefix, f"Rank 0 timed out in monitoredBarrier after {_ms(timeout)} ms")
            if not self._has_come(f"{prefix}/here/{rank}", left):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            ranks = ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))
            self._fail(prefix, f"{ranks} failed to pass monitoredBarrier in {_ms(timeout)} ms")
        self._store.set(f"{prefix}/verdict", _PASS)

    def _has_come(self, key: str, left: timedelta) -> bool:
        try:
            self._store.wait([key], max(left, _SHORTEST))
        except RuntimeError as error:  # DistStoreError is one
            if not self._is_timeout(error):
                raise
            return self._store.check([key])
        return True

    @staticmethod
    def _is_timeout(error: RuntimeError) -> bool:
        text = str(error).lower()
        return "timeout" in text or "timed out" in text

    def _fail(self, prefix: str, what: str) -> NoReturn:
        self._store.set(f"{prefix}/verdict", what)
        raise CollectiveTimeout(
            f"monitored_barrier on rank 0 of {self._world_size}: expected every rank to come: "
            f"{what}. Look at what those ranks do instead, or raise timeout=."
        )

    def _report(self, prefix: str, timeout: timedelta) -> None:
        self._store.set(f"{prefix}/here/{self._rank}", "")
        try:
            self._store.wait([f"{prefix}/verdict"], max(timeout, _SHORTEST))
            verdict = self._store.get(f"{prefix}/verdict").decode()
        except RuntimeError as error:
            if not self._is_timeout(error):
                raise
            verdict = f"rank 0 did not come within {_ms(timeout)} ms"
        if verdict != _PASS:
            raise PeerLost(
                f"monitored_barrier on rank {self._rank} of {self._world_size}: "
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank 0: {verdict}. Look at rank 0's message."
            )


def _ms(timeout: timedelta) -> int:
    return timeout // timedelta(milliseconds=1)


def admit_ringcomm_to_monitored_barrier() -> None:
    """Lets ``torch.distributed.monitored_barrier`` accept groups of ringcomm.

    Up to torch 2.14 that function raises for every backend that is not named gloo, before it
    asks the group; later versions ask for a group with a CPU backend (pytorch/pytorch#189070).
    Where the test for the name is still there, calls for groups of ringcomm go straight to the
    group and all other calls to the original function.
    """
    original = distributed_c10d.monitored_barrier
    if "GLOO" not in original.__code__.co_names:
        return

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        from ringcomm.c10d.process_group import ProcessGroup

        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ProcessGroup):
            original(group, timeout, wait_all_ranks)
            return
        chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
