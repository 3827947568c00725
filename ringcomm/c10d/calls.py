"""How the process group issues one call: inline or queued, with the timeout that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp, Work

from ringcomm.c10d.arguments import UNSET_TIMEOUT
from ringcomm.c10d.batches import Batch
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.work import PendingWork, completed
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Work as CommunicatorWork

__all__ = ["Calls", "is_plain_call", "op_of"]

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


def is_plain_call(opts: Any, kind: type[Any]) -> bool:
    """Whether a call is synchronous, of the form that torch.distributed makes, and asks no more."""
    if type(opts) is not kind or opts.asyncOp:
        return False
    unset: bool = opts.timeout == UNSET_TIMEOUT
    return unset


class Calls:
    """Mixin of the process group: what all its collectives share."""

    _communicators: Communicators
    # Communicators.of, found once: each call asks it where its tensors are.
    _of: Callable[[Sequence[Tensor], str], Communicator]
    _sequence: int
    _coalescing: Batch | None

    def _run(
        self,
        opts: Any,
        communicator: Communicator,
        tensors: list[Tensor],
        method: _Method,
        *args: Any,
    ) -> Work:
        """Runs one collective as its options say.

        Args:
            opts: with ``asyncOp`` and ``timeout``.
            communicator: of the call's tensors.
            tensors: the outputs, for the work's result and future.
            method: of the communicator; its last argument asks for an asynchronous call.
            args: its arguments but the last.
        """
        self._sequence += 1
        timeout = opts.timeout
        if timeout != UNSET_TIMEOUT:
            inner = communicator.submit(
                _returning(tensors, lambda: method(*args)), method.__name__, timeout=timeout
            )
            return self._submitted(opts, tensors, inner)
        started = method(*args, opts.asyncOp)
        if started is None:
            return completed(tensors)
        return self._pending(started, tensors)

    def _done(self, tensors: list[Tensor]) -> Work:
        """The work of a collective that was made at once."""
        self._sequence += 1
        return completed(tensors)

    def _submit(
        self,
        opts: Any,
        communicator: Communicator,
        tensors: list[Tensor],
        name: str,
        calls: Callable[[], Any],
    ) -> Work:
        """Runs several calls of the communicator as one collective, in their place in the order.

        Args:
            opts: with ``asyncOp`` and ``timeout``, which holds for each of the calls.
            communicator: of the call's tensors.
            tensors: the outputs.
            name: of the operation, for messages.
            calls: makes the calls, synchronously; the communicator chooses the thread.
        """
        self._sequence += 1
        timeout = opts.timeout
        if timeout == UNSET_TIMEOUT:
            timeout = None
        inner = communicator.submit(_returning(tensors, calls), name, timeout=timeout)
        return self._submitted(opts, tensors, inner)

    def _submitted(self, opts: Any, tensors: list[Tensor], inner: CommunicatorWork) -> Work:
        if opts.asyncOp:
            return self._pending(inner, tensors)
        inner.wait()
        return completed(tensors)

    def _pending(self, inner: CommunicatorWork, tensors: list[Tensor]) -> Work:
        return self._collected(PendingWork(inner, tensors))

    def _collected(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.works.append(work)
        return work


def _returning(tensors: list[Tensor], calls: Callable[[], Any]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        calls()
        return tensors

    return run
