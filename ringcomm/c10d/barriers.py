"""The barrier of the process group, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import BarrierOptions

from ringcomm.c10d.arguments import UNSET_TIMEOUT, options
from ringcomm.c10d.calls import Calls
from ringcomm.c10d.work import BarrierWork, PendingWork, completed
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Work as CommunicatorWork
from ringcomm.memory import device_runtime
from ringcomm.memory.device_argument import find_device

__all__ = ["Barriers"]

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
        if device_runtime.current().is_capturing(device):
            # The event of a capture never passes: a graph is ordered, nobody waits for it here.
            work: PendingWork = PendingWork(inner, [])
        else:
            work = BarrierWork(inner, communicator.timeout if limit is None else limit)
        if opts.asyncOp:
            return self._collected(work)
        work.wait()
        return completed([])

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
