"""The barriers of the process group: on the host, on devices, and one that says who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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
from ringcomm.deadlines import Deadline
from ringcomm.errors import CollectiveTimeout, PeerLost
from ringcomm.rendezvous.handles import FIRST_POLL_S, LAST_POLL_S, launch_attempt
from ringcomm.rendezvous.lookout import Lookout

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


class MonitoredBarrier:
    """The monitored barriers of one process group.

    Args:
        store: seen by the members of the group only.
        rank: group rank of the caller.
        world_size: members of the group.
        lookout: over the members.
    """

    def __init__(self, store: Store, rank: int, world_size: int, lookout: Lookout) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lookout = lookout
        self._round = 0

    def __call__(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Blocks until every rank of the group has called.

        Args:
            timeout: the longest that rank 0 waits for the others, and they for rank 0.
            wait_all_ranks: rank 0 reports all ranks that did not come, not only the first.

        Raises:
            CollectiveTimeout: on rank 0, naming the ranks that did not come in time.
            PeerLost: on rank 0, naming ranks whose processes have ended; on another rank, when
                rank 0 did not come, has ended or reported a failure.
        """
        # What an earlier attempt left in the store must not count as having come.
        prefix = f"monitored_barrier/attempt{launch_attempt()}/{self._round}"
        self._round += 1
        if self._rank == 0:
            self._judge(prefix, timeout, wait_all_ranks)
        else:
            self._report(prefix, timeout)

    def _judge(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        deadline, pause_s = Deadline(timeout.total_seconds()), FIRST_POLL_S
        awaited = list(range(1, self._world_size))
        while awaited := self._missing(prefix, awaited):
            # A post that a rank made before its end counts.
            ended = self._missing(prefix, self._lookout.ended_among(awaited))
            vain = ended == awaited if wait_all_ranks else bool(ended)
            if vain or deadline.is_over():
                missing = awaited if wait_all_ranks else (ended or awaited)[:1]
                self._fail(prefix, missing, ended, timeout)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)
        self._store.set(f"{prefix}/verdict", _PASS)

    def _missing(self, prefix: str, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"{prefix}/here/{rank}"])]

    def _fail(
        self, prefix: str, missing: list[int], ended: list[int], timeout: timedelta
    ) -> NoReturn:
        what = f"{_ranks(missing)} failed to pass monitoredBarrier"
        if missing != ended:
            what += f" in {_ms(timeout)} ms"
        if ended:
            what += f"; of {_ranks(ended).lower()} the process has ended"
        self._store.set(f"{prefix}/verdict", what)
        advice = "Look at what those ranks do instead, or raise timeout="
        if missing == ended:
            advice = "See why, and build a group of the ranks that are left"
        raise (PeerLost if ended else CollectiveTimeout)(
            f"monitored_barrier on rank 0 of {self._world_size}: expected every rank to come: "
            f"{what}. {advice}."
        )

    def _report(self, prefix: str, timeout: timedelta) -> None:
        here, key = f"{prefix}/here/{self._rank}", f"{prefix}/verdict"
        cause: RuntimeError | None = None
        try:
            self._store.set(here, "")
            verdict = self._verdict(key, timeout)
        except RuntimeError as error:
            cause = error
            verdict = f"the store does not answer any more: {str(error).partition(chr(10))[0]}"
        if verdict != _PASS:
            raise PeerLost(
                f"monitored_barrier on rank {self._rank} of {self._world_size}: "
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank 0: {verdict}. Look at rank 0's message."
            ) from cause

    def _verdict(self, key: str, timeout: timedelta) -> str:
        """Waits for what rank 0 says, or returns why it does not."""
        deadline, pause_s = Deadline(timeout.total_seconds()), FIRST_POLL_S
        while not self._store.check([key]):
            why = ""
            if deadline.is_over():
                why = f"rank 0 did not come within {_ms(timeout)} ms"
            for _ in self._lookout.ended_among([0]):
                why = "its process has ended"
            if why and not self._store.check([key]):
                return why
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)
        return self._store.get(key).decode()


def _ranks(ranks: list[int]) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


def _ms(timeout: timedelta) -> int:
    return timeout // timedelta(milliseconds=1)
