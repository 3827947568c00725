# SPDX-License-Identifier: Apache-2.0
"""One call of the process group: its arguments, its turn in the order, its timeout, its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future
from torch.nn import Parameter
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ringcomm.c10d.communicators import Communicators
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceWork
from ringcomm.comm.device.messages import DeviceMessages, PeerMessage, launch_batch, launches_of
from ringcomm.comm.host.arguments import (
    admit_keys,
    is_watched,
    only_inlined_methods,
    without_memory,
)
from ringcomm.comm.host.engine import CallEngine, Unusable
from ringcomm.comm.host.engine import Work as CommunicatorWork
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.integers import integer

__all__ = [
    "BACKEND_NAME",
    "OP_TYPES",
    "UNSET_TIMEOUT",
    "BarrierWork",
    "Batch",
    "Calls",
    "CompletedWork",
    "PendingWork",
    "Seen",
    "WorkGroup",
    "completed",
    "dispatch",
    "in_memory",
    "in_memory_all",
    "op_of",
    "options",
    "seen_by_modes",
    "single",
]


# ---- Work objects that ``torch.distributed`` accepts, around the communicator's Works -----------
# torch's C++ callers (DDP's reducer, ``wait_tensor``) use ``wait`` and ``get_future`` of a Python
# subclass of ``torch.distributed.Work``; Python callers use all methods.


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

# A barrier's wait ends this long after its kernel's timeout, since the kernel's error says more.
KERNEL_GRACE = timedelta(seconds=5)


@only_inlined_methods
class CompletedWork(Work):
    """The work of a call that ran on the caller's thread: there is nothing to wait for.

    A call on a device is on the caller's current stream, whose later work follows it.

    :func:`completed` makes the work: an ``__init__`` in Python would double the cost of making it,
    and a ``__dict__`` would raise this cost by a quarter.
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
        # The future records events on the current streams of these devices.
        devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
        future: Future[list[Tensor]] = Future(devices=list(devices))
        future.set_result(self._tensors)
        return future


def completed(tensors: list[Tensor], op_type: int) -> CompletedWork:
    """Returns a work that is done.

    Args:
        tensors: the tensors that ``result()`` and the future return.
        op_type: a value of :data:`OP_TYPES`.
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
        tensors: the tensors that ``result()`` and the future return once the call is done.
        op_type: a value of :data:`OP_TYPES`.
    """

    def __init__(self, inner: CommunicatorWork, tensors: list[Tensor], op_type: int) -> None:
        super().__init__()
        self._inner = inner
        self._tensors = tensors
        self._op_type = op_type

    def _get_op_type(self) -> int:
        return self._op_type

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the call is done; raises its error.

        For a call on a device it makes the current stream wait; it blocks only with a timeout.

        Args:
            timeout: gives up after this time; None, zero and negative values mean the operation's
                own timeout (torch's C++ callers pass zero for "none").
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
        """Returns a future of the tensors, which also fails for waiters in C++ if the call fails.

        For a call on a device the future has its value at once; its consumer's streams wait.

        A callback raises the error, so that the future fails for C++ as well. It does not call
        ``Future.set_exception``, which would store the exception as a value that only Python
        unwraps: DDP's reducer would use the exception as the reduced bucket.
        """

        if isinstance(self._inner, DeviceWork):
            return self._inner.get_future()

        def tensors_or_raise(done: Future[list[Tensor]]) -> list[Tensor]:
            done.wait()
            return self._tensors

        return self._inner.get_future().then(tensors_or_raise)


@only_inlined_methods
class BarrierWork(PendingWork):
    """The work of a barrier on a device: ``wait`` blocks until all ranks have called it.

    Args:
        inner: the communicator's work.
        timeout: the barrier's timeout, after which its kernel gives up.
    """

    def __init__(self, inner: CommunicatorWork, timeout: timedelta) -> None:
        super().__init__(inner, [], OP_TYPES["barrier"])
        self._longest = timeout + KERNEL_GRACE

    def wait(self, timeout: timedelta | None = None) -> bool:
        given = timeout is not None and timeout > timedelta(0)
        return super().wait(timeout if given else self._longest)


@only_inlined_methods
class WorkGroup(Work):
    """Several works as one work: the result of ``_end_coalescing``."""

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


# ---- Calls of a process group as torch's modes see them: as operators of ``torch.ops.c10d`` ------
# torch's own groups make their calls through its dispatcher, so that a mode on the stack, such as
# CommDebugMode, sees each call. But torch calls this package's Python group directly.


class Seen(NamedTuple):
    """One call that torch's modes will see: the communicator's method, arguments and options."""

    group: ProcessGroup
    name: str
    args: tuple[Any, ...]
    async_op: bool
    timeout: timedelta


def _lists(tensors: Sequence[Tensor] | None) -> list[list[Tensor]]:
    return [] if not tensors else [list(tensors)]


def _any_op() -> Any:
    # Python can pass only a default ReduceOp to an operator; the call itself uses the caller's op.
    return torch.classes.c10d.ReduceOp()


# The operator for each method, and the operator's first arguments; _GROUP is replaced by the group.
_GROUP = object()
_OPERATORS: dict[str, tuple[str, Callable[..., list[Any]]]] = {
    "all_reduce": ("allreduce_", lambda t, op: [[t], _GROUP, _any_op(), None]),
    "all_reduce_coalesced": ("allreduce_coalesced_", lambda ts, op: [ts, _GROUP, _any_op()]),
    "all_reduce of sparse tensors": ("allreduce_", lambda t, op: [[t], _GROUP, _any_op(), None]),
    "broadcast": ("broadcast_", lambda t, root: [[t], _GROUP, root, 0]),
    "reduce": ("reduce_", lambda t, root, op: [[t], _GROUP, _any_op(), root, 0]),
    "all_gather": ("allgather_", lambda outs, t: [_lists(outs), [t], _GROUP]),
    "all_gather_into_tensor": ("_allgather_base_", lambda out, t: [out, t, _GROUP]),
    "all_gather_coalesced": ("allgather_into_tensor_coalesced_", lambda o, i: [o, i, _GROUP]),
    "all_gather_lists_coalesced": ("allgather_coalesced_", lambda o, i: [o, i, _GROUP]),
    "gather": ("gather_", lambda t, outs, root: [_lists(outs), [t], _GROUP, root]),
    "scatter": ("scatter_", lambda out, given, root: [[out], _lists(given), _GROUP, root]),
    "reduce_scatter": ("reduce_scatter_", lambda o, i, op: [[o], _lists(i), _GROUP, _any_op()]),
    "reduce_scatter_tensor": (
        "_reduce_scatter_base_",
        lambda out, t, op: [out, t, _GROUP, _any_op()],
    ),
    "reduce_scatter_coalesced": (
        "reduce_scatter_tensor_coalesced_",
        lambda o, i, op: [o, i, _GROUP, _any_op()],
    ),
    "all_to_all": ("alltoall_", lambda outs, ins: [outs, ins, _GROUP]),
    "all_to_all_single": (
        "alltoall_base_",
        lambda o, i, to, of: [o, i, _GROUP, to or [], of or []],
    ),
    "barrier": ("barrier", lambda: [torch.empty(1, device="cpu"), _GROUP, []]),
    "send": ("send", lambda t, peer, tag: [[t], _GROUP, peer, tag]),
    "recv": ("recv_", lambda t, peer, tag: [[t], _GROUP, peer, tag]),
    "recv from any source": ("recv_any_source_", lambda t, tag: [[t], _GROUP, tag]),
}


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode below all other modes; makes the call once the other modes have seen its operator."""

    def __init__(self, operator: Any, make: Callable[[], Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator = operator
        self._make = make
        self.work: Work | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not self._operator or self.work is not None:
            return func(*args, **(kwargs or {}))
        # torch's dispatcher has already processed the operator for autograd.
        with torch._C._AutoDispatchBelowAutograd():
            self.work = self._make()
        boxed = self.work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


@contextmanager
def _below_all(mode: TorchDispatchMode) -> Iterator[None]:
    above = _get_current_dispatch_mode_stack()
    for _ in above:
        _pop_mode()
    for each in (mode, *above):
        _push_mode(each)
    try:
        yield
    finally:
        for _ in range(len(above) + 1):
            _pop_mode()
        for each in above:
            _push_mode(each)


def seen_by_modes(call: Seen, make: Callable[[], Work]) -> Work | None:
    """Makes a call through torch's dispatcher, so that the modes on the stack see its operator.

    Args:
        call: the call, from which the operator's arguments are made.
        make: makes the call; runs below the modes.

    Returns:
        The result of ``make``; None if a mode did not let the operator through.
    """
    name, arguments = _OPERATORS[call.name]
    operator = getattr(torch.ops.c10d, name).default
    below = _Made(operator, make)
    given = [call.group.boxed() if each is _GROUP else each for each in arguments(*call.args)]
    takes = {argument.name for argument in operator._schema.arguments}
    how: dict[str, Any] = {"async_op": call.async_op} if "async_op" in takes else {}
    if "timeout" in takes:
        how["timeout"] = call.timeout // timedelta(milliseconds=1)
    with _below_all(below):
        operator(*given, **how)
    return below.work


# Functions that convert the argument forms of ``torch.distributed.ProcessGroup`` and check tensors.
#
# Every method of torch's class has the form that ``torch.distributed`` itself uses (lists of
# tensors and an options object) and older forms (single tensors, ``op`` or ``root``, ``timeout``).

_Options = TypeVar("_Options")

BACKEND_NAME = "ringcomm"
# The timeout in an options object if the caller did not set a timeout.
UNSET_TIMEOUT = timedelta(milliseconds=-1)

_TORCH_CLASSES = frozenset({Tensor, Parameter})


def options(kind: type[_Options], given: Any, timeout: timedelta | None, **fields: Any) -> _Options:
    """Returns the options object that is equivalent to the arguments of an older form.

    Args:
        kind: class of the options, such as ``AllreduceOptions``.
        given: the first argument of the older form (op or root), or None.
        timeout: the timeout of this call.
        fields: further arguments by field name; None keeps torch's default.

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
    """Returns the only tensor of a list; like torch's CPU backends, accepts only one tensor.

    Raises:
        ArgumentError: the list does not have exactly one tensor.
    """
    if isinstance(tensors, Tensor):
        return in_memory(tensors, operation)
    if len(tensors) != 1:
        raise ArgumentError(
            f"{operation}: expected one tensor per rank, got {len(tensors)}; call it once per "
            "tensor, or use the coalesced form"
        )
    tensor = tensors[0]
    return tensor if type(tensor) in _TORCH_CLASSES else _unwrapped(tensor, operation)


def in_memory(tensor: Tensor, operation: str) -> Tensor:
    """Returns a tensor with its own memory; waits if it is a functional collective's result.

    Raises:
        UnsupportedError: the tensor's class keeps its data elsewhere (DTensor), or has no data (a
            fake tensor).
    """
    if type(tensor) in _TORCH_CLASSES:
        return tensor
    return _unwrapped(tensor, operation)


def in_memory_all(tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
    """Calls :func:`in_memory` for each tensor of a list; returns the results."""
    return [in_memory(tensor, operation) for tensor in tensors]


def _unwrapped(tensor: Tensor, operation: str) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return in_memory(tensor.wait(), operation)
    if found := without_memory(tensor):
        raise UnsupportedError(f"{operation}: expected a dense tensor with memory, got a {found}")
    return tensor


# Messages between devices that are sent together: torch's coalescing brackets and its batches.
#
# ``ringcomm.comm.device.messages`` explains the reason, and which messages share a launch.


class Posted(NamedTuple):
    """One message of a batch, and the work that the caller holds for it."""

    message: PeerMessage
    work: PendingWork


@dataclass
class Batch:
    """The calls since ``_start_coalescing``: works of begun calls, and messages not sent yet."""

    works: list[Work] = field(default_factory=list)
    posted: list[Posted] = field(default_factory=list)

    def post(
        self, communicator: Communicator, tensor: Tensor, peer: int, tag: int, *, is_send: bool
    ) -> PendingWork:
        """Adds a message; its work can be waited for once the batch has ended."""
        op_type = OP_TYPES["send" if is_send else "recv"]
        work = PendingWork(cast(CommunicatorWork, Unusable(_not_yet)), [tensor], op_type)
        messages = cast(DeviceMessages, communicator.messages)
        self.posted.append(
            Posted(PeerMessage(messages, tensor, _as_int(peer), _as_int(tag), is_send), work)
        )
        return work


def _as_int(value: Any) -> Any:
    """Returns an int for any integer, so that equal ranks compare equal; else ``value``."""
    number = integer(value, bools=True)
    return value if number is None else number


def _not_yet(name: str) -> RingcommError:
    return ArgumentError(
        f"{name} of a batched message: expected to be called when the batch has ended, since the "
        "message goes out only then"
    )


def dispatch(posted: list[Posted]) -> list[Work]:
    """Sends and receives the messages of a batch; returns one work per launch."""
    launches = launches_of([each.message for each in posted])
    return [_launch([posted[index] for index in launch]) for launch in launches]


def _launch(posted: list[Posted]) -> Work:
    messages = [each.message for each in posted]
    inner = launch_batch(messages)
    for each in posted:
        each.work._inner = inner
    received = [message.tensor for message in messages if not message.is_send]
    return PendingWork(inner, received, OP_TYPES["batch"])


# How the process group makes one call: inline or queued, with the timeout from its options.

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
    """Returns the op of an options object, as a constant of ``ReduceOp`` if possible.

    Reading ``opts.reduceOp`` makes a new object each time, but the communicator finds the constants
    by identity, which is fast. For PREMUL_SUM it returns the object itself, which has the factor.
    """
    op = opts.reduceOp
    return _OPS.get(hash(op), op)


class Calls:
    """Mixin of the process group: the code that all its calls share."""

    _communicators: Communicators
    # The engine of the host communicator.
    _host: CallEngine
    # Communicators.of, looked up once: each call uses it to find its tensors' communicator.
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
        """Runs one collective as its options specify.

        Args:
            opts: an options object with ``asyncOp`` and ``timeout``.
            communicator: the communicator for the call's tensors.
            tensors: the outputs, for the work's result and future.
            method: a method of the communicator; its last argument selects an asynchronous call.
            args: the method's arguments except the last.
        """
        name = method.__name__
        if is_watched():
            make = partial(self._run, opts, communicator, tensors, method, *args)
            return self._seen(opts, communicator, name, args, make)
        self._sequence += 1
        timeout = opts.timeout
        if timeout != UNSET_TIMEOUT:
            _admit(communicator, name, tensors, args)
            inner = communicator.engine.submit(
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
        """Makes a call below torch's modes; ``opts`` is None for a message."""
        admit_keys(where(name, communicator.rank, communicator.world_size))
        how = (True, UNSET_TIMEOUT) if opts is None else (opts.asyncOp, opts.timeout)
        work = seen_by_modes(Seen(cast(ProcessGroup, self), name, args, *how), make)
        # None: a mode did not let the operator through; it made the call itself, or suppressed it.
        return completed([], OP_TYPES[name]) if work is None else work

    def _made(self, status: int, engine: CallEngine, name: str, tensors: list[Tensor]) -> Work:
        """Returns the work of a collective that a native call has made; raises if it failed."""
        if status > 0:
            raise engine.fault(name)
        self._sequence += 1
        # The code of completed(), inlined: this saves a Python call on small collectives.
        work = CompletedWork()
        work._tensors = tensors
        work._op_type = OP_TYPES[name]
        return work

    def _submit(
        self,
        opts: Any,
        communicator: Communicator,
        tensors: list[Tensor],
        name: str,
        calls: Callable[[], Any],
    ) -> Work:
        """Runs several calls of the communicator as one collective, in order with other calls.

        Args:
            opts: an options object with ``asyncOp`` and ``timeout``, which applies to each call.
            communicator: the communicator for the call's tensors.
            tensors: the outputs.
            name: the name of the operation, for messages.
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
        inner = communicator.engine.submit(_returning(tensors, calls), name, timeout=timeout)
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
    """Checks, on this thread, a call that the communicator will make on another thread."""
    if communicator.launches:
        return  # the call runs on this thread, and is admitted there
    tensors = (tensor for each in args for tensor in (each if type(each) is list else [each]))
    taken = {id(tensor) for tensor in written}
    communicator.engine.admit(
        name,
        written,
        [each for each in tensors if isinstance(each, Tensor) and id(each) not in taken],
    )


def _returning(tensors: list[Tensor], calls: Callable[[], Any]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        calls()
        return tensors

    return run
