"""One call of the process group: its arguments, its place in the order, its timeout, its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn import Parameter

from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.modes import Seen, seen_by_modes
from ringcomm.c10d.work import OP_TYPES, PendingWork, completed
from ringcomm.comm.admission import admit_keys, is_watched, without_memory
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.messages import PeerMessage, launch_batch, launches_of
from ringcomm.comm.engine import Unusable
from ringcomm.comm.work import Work as CommunicatorWork
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.integers import integer

__all__ = [
    "BACKEND_NAME",
    "UNSET_TIMEOUT",
    "Batch",
    "Calls",
    "dispatch",
    "in_memory",
    "in_memory_all",
    "is_plain_call",
    "op_of",
    "options",
    "single",
]

# Turns the argument forms of ``torch.distributed.ProcessGroup`` into one, and checks tensors.
#
# Every method of torch's class has the form of ``torch.distributed`` itself (lists of tensors and
# an options object) and older ones (single tensors, ``op`` or ``root``, ``timeout``).

_Options = TypeVar("_Options")

BACKEND_NAME = "ringcomm"
# What an options object says when the caller gave no timeout.
UNSET_TIMEOUT = timedelta(milliseconds=-1)

_PLAIN = frozenset({Tensor, Parameter})


def options(kind: type[_Options], given: Any, timeout: timedelta | None, **fields: Any) -> _Options:
    """The options object that says what the arguments of an older form say.

    Args:
        kind: class of the options, as ``AllreduceOptions``.
        given: the first of the older arguments (op or root), or None.
        timeout: for this one call.
        fields: further arguments by the name of their field; None leaves torch's default.

    Raises:
        ArgumentError: ``given`` is neither an options object nor an argument of an older form.
    """
    made = kind()
    if given is not None:
        if not fields:
            raise ArgumentError(f"opts: expected {kind.__name__}, got {type(given).__name__}")
        fields[next(iter(fields))] = given
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout  # type: ignore[attr-defined]
    return made


def single(tensors: Any, operation: str) -> Tensor:
    """The one tensor of a list, as every CPU backend of torch takes it.

    Raises:
        ArgumentError: the list has another length.
    """
    if isinstance(tensors, Tensor):
        return in_memory(tensors, operation)
    if len(tensors) != 1:
        raise ArgumentError(
            f"{operation}: expected one tensor per rank, got {len(tensors)}; call it once per "
            "tensor, or use the coalesced form"
        )
    tensor = tensors[0]
    return tensor if type(tensor) in _PLAIN else _unwrapped(tensor, operation)


def in_memory(tensor: Tensor, operation: str) -> Tensor:
    """A tensor of a class that has its data itself; waits for a functional collective's.

    Raises:
        UnsupportedError: the tensor is of a class that stands for data elsewhere (DTensor), or
            for none (a fake tensor).
    """
    if type(tensor) in _PLAIN:
        return tensor
    return _unwrapped(tensor, operation)


def in_memory_all(tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
    """:func:`in_memory` for each tensor of a list."""
    return [in_memory(tensor, operation) for tensor in tensors]


def _unwrapped(tensor: Tensor, operation: str) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return in_memory(tensor.wait(), operation)
    if found := without_memory(tensor):
        raise UnsupportedError(f"{operation}: expected a dense tensor with memory, got a {found}")
    return tensor


# Messages between devices that go out together: torch's coalescing brackets and its batches.
#
# Why they have to, and in which launches they go: ``ringcomm.comm.device.messages``.


class Posted(NamedTuple):
    """One message of a batch, and the work that the caller has got for it."""

    message: PeerMessage
    work: PendingWork


@dataclass
class Batch:
    """The calls since ``_start_coalescing``: works of those that run, messages that still wait."""

    works: list[Work] = field(default_factory=list)
    posted: list[Posted] = field(default_factory=list)

    def post(
        self, communicator: Communicator, tensor: Tensor, peer: int, tag: int, *, is_send: bool
    ) -> PendingWork:
        """Takes a message; its work can be waited for once the batch has ended."""
        op_type = OP_TYPES["send" if is_send else "recv"]
        work = PendingWork(cast(CommunicatorWork, Unusable(_not_yet)), [tensor], op_type)
        self.posted.append(
            Posted(PeerMessage(communicator, tensor, _as_int(peer), _as_int(tag), is_send), work)
        )
        return work


def _as_int(value: Any) -> Any:
    """Returns an integer as an int, so that equal ranks are one; the launch refuses others."""
    number = integer(value, bools=True)
    return value if number is None else number


def _not_yet(name: str) -> RingcommError:
    return ArgumentError(
        f"{name} of a batched message: expected to be called when the batch has ended, since the "
        "message goes out only then"
    )


def dispatch(posted: list[Posted]) -> list[Work]:
    """Sends and receives the messages of a batch; one work for each launch."""
    launches = launches_of([each.message for each in posted])
    return [_launch([posted[index] for index in launch]) for launch in launches]


def _launch(posted: list[Posted]) -> Work:
    messages = [each.message for each in posted]
    inner = launch_batch(messages)
    for each in posted:
        each.work._inner = inner
    received = [message.tensor for message in messages if not message.is_send]
    return PendingWork(inner, received, OP_TYPES["batch"])


# How the process group issues one call: inline or queued, with the timeout that it asks for.

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
    """True if a call is synchronous, with only the options that torch.distributed passes."""
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
        name = method.__name__
        if is_watched():
            make = partial(self._run, opts, communicator, tensors, method, *args)
            return self._seen(opts, communicator, name, args, make)
        self._sequence += 1
        timeout = opts.timeout
        if timeout != UNSET_TIMEOUT:
            _admit(communicator, name, tensors, args)
            inner = communicator.submit(
                _returning(tensors, lambda: method(*args)), name, timeout=timeout
            )
            return self._submitted(opts, tensors, inner, OP_TYPES[name])
        started = method(*args, opts.asyncOp)
        if started is None:
            return completed(tensors, OP_TYPES[name])
        return self._pending(started, tensors, OP_TYPES[name])

    def _seen(
        self,
        opts: Any,
        communicator: Communicator,
        name: str,
        args: tuple[Any, ...],
        make: Callable[[], Work],
    ) -> Work:
        """Makes a call below the modes of torch; ``opts`` is None for a message."""
        admit_keys(where(name, communicator.rank, communicator.world_size))
        how = (True, UNSET_TIMEOUT) if opts is None else (opts.asyncOp, opts.timeout)
        work = seen_by_modes(Seen(cast(ProcessGroup, self), name, args, *how), make)
        # A mode that keeps the operator to itself has made the call, or wants none.
        return completed([], OP_TYPES[name]) if work is None else work

    def _done(self, tensors: list[Tensor], op_type: int) -> Work:
        """The work of a collective that was made at once."""
        self._sequence += 1
        return completed(tensors, op_type)

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
        if is_watched():
            make = partial(self._submit, opts, communicator, tensors, name, calls)
            return self._seen(opts, communicator, name, (tensors[0], ReduceOp.SUM), make)
        self._sequence += 1
        timeout = opts.timeout
        if timeout == UNSET_TIMEOUT:
            timeout = None
        _admit(communicator, name, tensors)
        inner = communicator.submit(_returning(tensors, calls), name, timeout=timeout)
        return self._submitted(opts, tensors, inner, OP_TYPES[name])

    def _submitted(
        self, opts: Any, tensors: list[Tensor], inner: CommunicatorWork, op_type: int
    ) -> Work:
        if opts.asyncOp:
            return self._pending(inner, tensors, op_type)
        inner.wait()
        return completed(tensors, op_type)

    def _pending(self, inner: CommunicatorWork, tensors: list[Tensor], op_type: int) -> Work:
        return self._collected(PendingWork(inner, tensors, op_type))

    def _collected(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.works.append(work)
        return work


def _admit(
    communicator: Communicator, name: str, written: list[Tensor], args: Sequence[Any] = ()
) -> None:
    """Admits a call that the communicator's own thread makes, where that is another one."""
    if communicator.launches:
        return  # it runs here, and is admitted there
    tensors = (tensor for each in args for tensor in (each if type(each) is list else [each]))
    taken = {id(tensor) for tensor in written}
    communicator.admit(
        name,
        written,
        [each for each in tensors if isinstance(each, Tensor) and id(each) not in taken],
    )


def _returning(tensors: list[Tensor], calls: Callable[[], Any]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        calls()
        return tensors

    return run
