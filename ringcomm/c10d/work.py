"""Work objects that ``torch.distributed`` accepts, over those of the communicator.

torch's C++ callers (DDP's reducer, ``wait_tensor``) see ``wait`` and ``get_future`` of a Python
subclass of ``torch.distributed.Work``; Python callers see every method.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]
from torch.distributed import Work
from torch.futures import Future

from ringcomm.comm.admission import only_inlined_methods
from ringcomm.comm.device.streams import DeviceWork

if TYPE_CHECKING:
    from ringcomm.comm.work import Work as CommunicatorWork

__all__ = ["OP_TYPES", "BarrierWork", "CompletedWork", "PendingWork", "WorkGroup", "completed"]

# Results of torch's ``Work._get_op_type()``, by the communicator's methods.
OP_TYPES = {
    "all_reduce": int(OpType.ALLREDUCE),
    "all_reduce_coalesced": int(OpType.ALLREDUCE_COALESCED),
    "all_reduce of sparse tensors": int(OpType._ALLREDUCE_SPARSE),
    "all_gather": int(OpType.ALLGATHER),
    "all_gather_into_tensor": int(OpType._ALLGATHER_BASE),
    "all_gather_coalesced": int(OpType.ALLGATHER_COALESCED),
    "all_gather_lists_coalesced": int(OpType.ALLGATHER_COALESCED),
    "all_to_all": int(OpType.ALLTOALL),
    "all_to_all_single": int(OpType.ALLTOALL_BASE),
    "barrier": int(OpType.BARRIER),
    "broadcast": int(OpType.BROADCAST),
    "gather": int(OpType.GATHER),
    "reduce": int(OpType.REDUCE),
    "reduce_scatter": int(OpType.REDUCE_SCATTER),
    "reduce_scatter_tensor": int(OpType._REDUCE_SCATTER_BASE),
    "reduce_scatter_coalesced": int(OpType.REDUCE_SCATTER_TENSOR_COALESCED),
    "scatter": int(OpType.SCATTER),
    "send": int(OpType.SEND),
    "recv": int(OpType.RECV),
    "recv from any source": int(OpType.RECVANYSOURCE),
    "batch": int(OpType.COALESCED),
}

# A kernel that gives up words its own fault, which is better than that its waiter ran out of time.
KERNEL_GRACE = timedelta(seconds=5)


@only_inlined_methods
class CompletedWork(Work):
    """The work of a call that ran on the caller's thread: nothing is left to wait for.

    A call on a device ran on the caller's current stream, and later work there is behind it.

    Made by :func:`completed`, since an ``__init__`` in Python would double what it costs; a
    ``__dict__`` would add a quarter.
    """

    __slots__ = ("_op_type", "_tensors")

    _tensors: list[Tensor]
    _op_type: int

    def _get_op_type(self) -> int:
        return self._op_type

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        # The future records events on the current streams of the devices that it is told of.
        devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
        future: Future[list[Tensor]] = Future(devices=list(devices))
        future.set_result(self._tensors)
        return future


def completed(tensors: list[Tensor], op_type: int) -> CompletedWork:
    """A work that is done.

    Args:
        tensors: what ``result()`` and the future give back.
        op_type: of :data:`OP_TYPES`.
    """
    work = CompletedWork()
    work._tensors = tensors
    work._op_type = op_type
    return work


@only_inlined_methods
class PendingWork(Work):
    """The work of a call that the communicator runs off the caller's thread.

    Args:
        inner: the communicator's work.
        tensors: what ``result()`` and the future give back once it is done.
        op_type: of :data:`OP_TYPES`.
    """

    def __init__(self, inner: CommunicatorWork, tensors: list[Tensor], op_type: int) -> None:
        super().__init__()
        self._inner = inner
        self._tensors = tensors
        self._op_type = op_type

    def _get_op_type(self) -> int:
        return self._op_type

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until done and raises what the operation raised.

        Of a call on a device: makes the current stream wait; only a timeout blocks the caller.

        Args:
            timeout: gives up after this long; None, zero and less wait for the operation's own
                timeout (torch's C++ callers pass zero for "none").
        """
        if timeout is not None and timeout <= timedelta(0):
            timeout = None
        self._inner.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def _source_rank(self) -> int:
        return self._inner.source_rank()

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensors; on failure a C++ waiter sees an error, not a value.

        That of a call on a device has its value at once, ordered on its consumer's streams.

        ``Future.set_exception`` stores the exception as a value that only Python unwraps, and
        DDP's reducer would take it for the reduced bucket. A callback that raises makes a
        future that has failed for C++ as well.
        """

        if isinstance(self._inner, DeviceWork):
            return self._inner.get_future()

        def tensors_or_raise(done: Future[list[Tensor]]) -> list[Tensor]:
            done.wait()
            return self._tensors

        return self._inner.get_future().then(tensors_or_raise)


@only_inlined_methods
class BarrierWork(PendingWork):
    """The work of a barrier on a device: ``wait`` blocks the caller until all ranks have come.

    Args:
        inner: the communicator's work.
        timeout: of the barrier, after which its kernel gives up.
    """

    def __init__(self, inner: CommunicatorWork, timeout: timedelta) -> None:
        super().__init__(inner, [], OP_TYPES["barrier"])
        self._longest = timeout + KERNEL_GRACE

    def wait(self, timeout: timedelta | None = None) -> bool:
        given = timeout is not None and timeout > timedelta(0)
        return super().wait(timeout if given else self._longest)


@only_inlined_methods
class WorkGroup(Work):
    """Several works as one: what ``_end_coalescing`` gives back."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def _get_op_type(self) -> int:
        return OP_TYPES["batch"]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[list[Tensor]]:
        def tensors_or_raise(done: Future[list[Future[list[Tensor]]]]) -> list[Tensor]:
            return [tensor for future in done.wait() for tensor in future.wait()]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            tensors_or_raise
        )
