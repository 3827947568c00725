"""How the process group issues one call: inline or queued, with the timeout that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp, Work

from ringcomm.c10d.arguments import UNSET_TIMEOUT
from ringcomm.c10d.work import PendingWork, completed
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Work as CommunicatorWork

__all__ = ["Calls", "op_of"]

_Method = Callable[..., CommunicatorWork | None]

_OPS = {
    hash(ReduceOp(op)): op
    for op in (
        ReduceOp.SUM,
        ReduceOp.AVG,
        ReduceOp.PRODUCT,
        ReduceOp.MIN,
        ReduceOp.MAX,
        ReduceOp.BAND,
        ReduceOp.BOR,
        ReduceOp.BXOR,
    )
}


def op_of(opts: Any) -> Any:
    """The op of an options object, as the constant of ``ReduceOp`` where it is one.

    Reading ``opts.reduceOp`` makes a new object each time; the communicator finds the constants
    by identity, without comparing. PREMUL_SUM keeps its object, which has the factor.
    """
    op = opts.reduceOp
    return _OPS.get(hash(op), op)


class Calls:
    """Mixin of the process group: what all its collectives share."""

    _communicator: Communicator
    _sequence: int
    _coalescing: list[Work] | None

    def _run(self, opts: Any, tensors: list[Tensor], method: _Method, *args: Any) -> Work:
        """Runs one collective as its options say.

        Args:
            opts: with ``asyncOp`` and ``timeout``.
            tensors: the outputs, for the work's result and future.
            method: of the communicator; its last argument asks for an asynchronous call.
            args: its arguments but the last.
        """
        self._sequence += 1
        timeout = opts.timeout
        if timeout != UNSET_TIMEOUT:
            return self._enqueue(opts, tensors, method.__name__, lambda: method(*args), timeout)
        inner = method(*args, opts.asyncOp)
        if inner is None:
            return completed(tensors)
        return self._pending(inner, tensors)

    def _submit(
        self, opts: Any, tensors: list[Tensor], name: str, calls: Callable[[], Any]
    ) -> Work:
        """Runs several calls of the communicator as one collective, in their place in the order.

        Args:
            opts: with ``asyncOp`` and ``timeout``, which holds for each of the calls.
            tensors: the outputs.
            name: of the operation, for messages.
            calls: makes the calls, synchronously; runs on the communicator's worker thread.
        """
        self._sequence += 1
        timeout = opts.timeout
        if timeout == UNSET_TIMEOUT:
            timeout = None
        return self._enqueue(opts, tensors, name, calls, timeout)

    def _enqueue(
        self,
        opts: Any,
        tensors: list[Tensor],
        name: str,
        calls: Callable[[], Any],
        timeout: timedelta | None,
    ) -> Work:
        def run() -> list[Tensor]:
            calls()
            return tensors

        inner = self._communicator.submit(run, name, timeout=timeout)
        if opts.asyncOp:
            return self._pending(inner, tensors)
        inner.wait()
        return completed(tensors)

    def _pending(self, inner: CommunicatorWork, tensors: list[Tensor]) -> Work:
        work = PendingWork(inner, tensors)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work
