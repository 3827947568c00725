"""The barriers of the process group: on the host, on devices, and one that says who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed import Store, Work
from torch.distributed.distributed_c10d import BarrierOptions

from ringcomm import cuda
from ringcomm.c10d.calls import UNSET_TIMEOUT, Calls, options
from ringcomm.c10d.work import OP_TYPES, BarrierWork, PendingWork, completed
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Work as CommunicatorWork
from ringcomm.cuda import find_device
from ringcomm.errors import CollectiveTimeout, PeerLost
from ringcomm.rendezvous.handles import launch_attempt

_CPU = torch.device("cpu")


class Barriers(Calls):
    """Mixin of the process group."""

    bound_device_id: torch.device | None

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Waits for all members.

        On a device if one is named (``device_ids``) or bound (``device_id`` of
        ``init_process_group``): every member has then come there behind its current stream's
        earlier work, and the caller blocks until that is so. Else on the host.
        """
        if not isinstance(opts, BarrierOptions):
            opts = options(BarrierOptions, opts, timeout)
        # First the usual case: reading a device's type takes longer than comparing devices.
        device = None if opts.device == _CPU else self._barrier_device(opts)
        if device is None:
            host = self._communicators.host
            return self._run(opts, host, [], host.barrier)
        self._sequence += 1
        communicator = self._communicators.on_device(device, "barrier")
        limit = None if opts.timeout == UNSET_TIMEOUT else opts.timeout
        if limit is None:
            inner = cast(CommunicatorWork, communicator.barrier(True))
        else:
            inner = communicator.submit(_barrier_of(communicator), "barrier", timeout=limit)
        if cuda.current().is_capturing(device):
            # The event of a capture never passes: a graph is ordered, nobody waits for it here.
            work: PendingWork = PendingWork(inner, [], OP_TYPES["barrier"])
        else:
            work = BarrierWork(inner, communicator.timeout if limit is None else limit)
        if opts.asyncOp:
            return self._collected(work)
        work.wait()
        return completed([], OP_TYPES["barrier"])

    def _barrier_device(self, opts: Any) -> int | None:
        device: torch.device | None = opts.device
        if device is None:
            # Only callers of the group itself leave it open; torch.distributed.barrier decides.
            ids = opts.device_ids
            device = torch.device("cuda", ids[0]) if ids else self.bound_device_id
        if device is None or device.type == "cpu":
            return None
        return find_device(device, "barrier") if device.index is None else device.index


def _barrier_of(communicator: Communicator) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        communicator.barrier()
        return []

    return run


# ``monitored_barrier``: a barrier that names the ranks that did not come.
#
# It runs over the group's store, not over the communicator: it has to tell who is missing while
# ranks hang inside a collective, and a rank that does not come must leave the communicator usable.
#
# Keys, below the round's prefix; a round is one call, counted alike on every rank:
# ``here/<rank>``  that rank has come        (writer: the rank, reader: rank 0)
# ``verdict``      "pass", or who is missing (writer: rank 0, readers: the other ranks)

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
