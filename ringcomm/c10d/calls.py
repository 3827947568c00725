"""How the process group issues one call: inline or queued, with the timeout that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp, Work

from ringcomm.c10d.arguments import explicit_timeout
from ringcomm.c10d.work import CompletedWork, PendingWork
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Work as CommunicatorWork

__all__ = ["Calls", "op_of"]

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

_Call = Callable[[bool], "CommunicatorWork | None"]


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

    def _run(self, opts: Any, tensors: list[Tensor], name: str, call: _Call) -> Work:
        """Runs one collective as its options say.

        Args:
            opts: with ``asyncOp`` and ``timeout``.
            tensors: the outputs, for the work's result and future.
            name: of the operation, for messages.
            call: issues it on the communicator, asynchronously when given True.
        """
        self._sequence += 1
        timeout = explicit_timeout(opts)
        if timeout is not None:
            return self._submit(opts, tensors, name, call, timeout)
        inner = call(opts.asyncOp)
        if inner is None:
            return CompletedWork(tensors)
        return self._pending(inner, tensors)

    def _submit(
        self,
        opts: Any,
        tensors: list[Tensor],
        name: str,
        call: _Call,
        timeout: timedelta | None = None,
    ) -> Work:
        """As :meth:`_run`, but ``call`` may be several calls, or have a timeout of its own."""

        def run() -> list[Tensor]:
            call(False)
            return tensors

        inner = self._communicator.submit(run, name, timeout=timeout)
        if opts.asyncOp:
            return self._pending(inner, tensors)
        inner.wait()
        return CompletedWork(tensors)

    def _pending(self, inner: CommunicatorWork, tensors: list[Tensor]) -> Work:
        work = PendingWork(inner, tensors)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work
