# SPDX-License-Identifier: Apache-2.0
"""Point-to-point calls, which never wait for collectives, and their implementation on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import increment_version

from ringcomm import _native
from ringcomm.comm.host.arguments import (
    CallChecks,
    admit_gradients,
    put_back,
    readable,
    size_bytes,
    writable,
)
from ringcomm.comm.host.engine import CallEngine, Outputs, Work, wait_seconds
from ringcomm.comm.host.profiling import event, is_profiled
from ringcomm.errors import (
    MismatchError,
    RingcommError,
    no_thread,
    not_done,
    start_thread,
    where,
)
from ringcomm.integers import integer
from ringcomm.json_reader import shown

Tensor = torch.Tensor
ANY_SOURCE = -1
LARGEST_TAG = 2**31 - 1
# A sweep polls every message under way, so it runs only after this many new messages since the
# last sweep.
SWEEP_EVERY = 64


def _never() -> bool:
    return False


class Message(Work):
    """A send or receive that has begun; it waits on the native request, not on the call queue."""

    __slots__ = ("_claimed", "_dense", "_messages", "_request", "_tensor")

    def __init__(
        self,
        messages: HostMessages,
        request: _native.Request,
        name: str,
        tensor: Tensor,
        dense: Tensor,
    ) -> None:
        super().__init__(name, messages.engine.interrupt, _never)
        self._messages = messages
        self._request = request
        self._tensor = tensor
        self._dense = dense
        self._claimed = False

    def _await(self, timeout: timedelta | float | None) -> None:
        seconds = wait_seconds(timeout)
        timeout_ms = -1 if seconds < 0 else max(1, round(seconds * 1000))
        status = self._request.wait(timeout_ms)
        if status and not self._request.done():
            engine = self._messages.engine
            if engine.aborted:
                raise engine.fault(self._name)
            raise not_done(self._name, seconds, "the message is still under way")
        self._complete(self._request.status())
        if not self._finished:
            # Another thread noticed the end first and is about to record it.
            super()._await(None)

    def _complete(self, status: int) -> None:
        """Records the end of the message, on the thread that notices it first."""
        with self._messages.guard:
            if self._claimed:
                return
            self._claimed = True
            self._messages.under_way.discard(self)
        error = self._messages.error_of(self._name, self._request, self._dense, status)
        if self._name == "irecv" and error is None:
            put_back(self._tensor, self._dense)
            increment_version(self._tensor)
        self.finish([self._tensor], error)

    def poll(self) -> bool:
        """True when the message is done; does not block."""
        if not self._finished and self._request.done():
            self._complete(self._request.wait(-1))
        return self._finished

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and super().is_success()

    def exception(self) -> BaseException | None:
        self.poll()
        return super().exception()

    def source_rank(self) -> int:
        """Waits for the message, then returns the rank that sent it."""
        self.wait()
        return self._request.source

    def get_future(self) -> torch.futures.Future[Outputs]:
        future = super().get_future()
        if not self._finished:
            # The native engine cannot call Python, so a thread must notice the end. Each message
            # has its own thread, since a shared thread might wait for another message.
            start_thread(
                threading.Thread(target=self._watch, name="ringcomm-future", daemon=True),
                f"get_future of {self._name}",
                "The message is still under way: call wait() instead",
            )
        return future

    def _watch(self) -> None:
        self._complete(self._request.wait(-1))


class MessageCore(Protocol):
    """The calls that post messages, on the native core or on the core over nodes."""

    def post_send(
        self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int, /
    ) -> _native.Request: ...

    def post_recv(
        self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int, /
    ) -> _native.Request: ...

    def drive_in_background(self) -> None: ...


class MessageCalls(Protocol):
    """Sends and receives of one rank; see :class:`Messages` for the arguments."""

    def send(self, tensor: Tensor, dst: int, tag: int, /) -> None: ...

    def recv(self, tensor: Tensor, src: int | None, tag: int, /) -> int: ...

    def isend(self, tensor: Tensor, dst: int, tag: int, /) -> Work: ...

    def irecv(self, tensor: Tensor, src: int | None, tag: int, /) -> Work: ...


_NO_EVENT: AbstractContextManager[None] = nullcontext()


def _event(name: str, tensor: Tensor) -> AbstractContextManager[object]:
    """Returns the profiler's event of a message; without a profiler an empty context."""
    return event(name, (), [tensor]) if is_profiled() and torch.is_tensor(tensor) else _NO_EVENT


class Messages:
    """Point-to-point calls of a communicator.

    Attributes:
        messages: makes the calls.
    """

    messages: MessageCalls

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Sends ``tensor`` to rank ``dst``; returns when the caller may change the tensor again.

        On a device later work of the current stream may change it.

        Args:
            tensor: any shape and dtype; the receiver's tensor must have as many bytes.
            dst: another rank of this communicator.
            tag: 0 <= tag < 2**31; the receive must name the same tag.

        Raises:
            ArgumentError: bad argument.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        with _event("send", tensor):
            self.messages.send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receives into ``tensor`` and returns the rank that sent.

        Args:
            tensor: any shape and dtype, as many bytes as the message.
            src: another rank of this communicator; None accepts any rank, on the host only.
            tag: 0 <= tag < 2**31; the send must name the same tag.

        Raises:
            ArgumentError: bad argument.
            UnsupportedError: ``src`` is None on a device, where a kernel waits for one given rank.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        with _event("recv", tensor):
            return self.messages.recv(tensor, src, tag)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Sends like :meth:`send` without waiting; once the Work is done ``tensor`` may change.

        On a device the current stream waits for the send only in ``Work.wait()``.
        """
        with _event("isend", tensor):
            return self.messages.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """Receives like :meth:`recv` without waiting; ``Work.source_rank()`` is the sender.

        On a device only streams that wait for the Work see the data.
        """
        with _event("irecv", tensor):
            return self.messages.irecv(tensor, src, tag)


def other_rank(checks: CallChecks, name: str, rank: Any, own: int) -> int:
    """Checks the argument ``name`` and returns its rank, which must not be this rank, ``own``."""
    peer = checks.peer(name, rank)
    if peer == own:
        checks.fail(f"{name}: expected another rank than this one, got {rank}")
    return peer


def check_tag(checks: CallChecks, tag: Any, engine: CallEngine) -> int:
    """Checks and returns a message's tag; raises if its communicator is unusable."""
    number = integer(tag, bools=True)
    if number is None or not 0 <= number <= LARGEST_TAG:
        checks.fail(f"tag: expected 0 <= tag <= {LARGEST_TAG}, got {shown(tag)}")
    if engine.refuse is not None:
        raise engine.refuse(checks.op)
    return number


class HostMessages:
    """Makes the sends and receives of a rank on the host.

    Args:
        engine: the engine of the communicator.
        core: posts the messages.
        named: returns a rank's name for errors.

    Attributes:
        engine: the engine.
        guard: held while the end of a message is recorded.
        under_way: the unfinished messages, whose tensors are kept alive.
    """

    def __init__(
        self, engine: CallEngine, core: MessageCore, named: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.engine = engine
        self._drive = core.drive_in_background
        self._named = named
        self.guard = threading.Lock()
        self.under_way: set[Message] = set()
        self._sweep_at = SWEEP_EVERY

    @property
    def _core(self) -> MessageCore:
        """The engine's core; its methods raise once the communicator is unusable."""
        return cast(MessageCore, self.engine.core)

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        request, dense = self._post_send("send", tensor, dst, tag)
        self._finish_now("send", request, dense)

    def recv(self, tensor: Tensor, src: int | None, tag: int) -> int:
        request, dense = self._post_recv("recv", tensor, src, tag)
        self._finish_now("recv", request, dense)
        put_back(tensor, dense)
        increment_version(tensor)
        return request.source

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        request, dense = self._post_send("isend", tensor, dst, tag)
        return self._track(Message(self, request, "isend", tensor, dense))

    def irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        request, dense = self._post_recv("irecv", tensor, src, tag)
        return self._track(Message(self, request, "irecv", tensor, dense))

    def _post_send(
        self, op: str, tensor: Tensor, dst: int, tag: int
    ) -> tuple[_native.Request, Tensor]:
        checks = self.engine.checks(op)
        dtype = checks.tensor("tensor", tensor)
        peer = other_rank(checks, "dst", dst, self.engine.rank)
        tag = check_tag(checks, tag, self.engine)
        admit_gradients(op, (), [tensor])
        dense = readable(tensor)
        ptr = dense.data_ptr()
        return self._core.post_send(ptr, size_bytes(dense), peer, tag, dtype), dense

    def _post_recv(
        self, op: str, tensor: Tensor, src: int | None, tag: int
    ) -> tuple[_native.Request, Tensor]:
        checks = self.engine.checks(op)
        dtype = checks.output("tensor", tensor)
        peer = ANY_SOURCE if src is None else other_rank(checks, "src", src, self.engine.rank)
        tag = check_tag(checks, tag, self.engine)
        admit_gradients(op, [tensor])
        dense = writable(tensor)
        ptr = dense.data_ptr()
        return self._core.post_recv(ptr, size_bytes(dense), peer, tag, dtype), dense

    def _finish_now(self, op: str, request: _native.Request, dense: Tensor) -> None:
        error = self.error_of(op, request, dense, request.wait(-1))
        if error is not None:
            raise error

    def error_of(
        self, op: str, request: _native.Request, dense: Tensor, status: int
    ) -> RingcommError | None:
        if not status:
            return None
        if status == _native.MISMATCH and self.engine.owner.fault() is None:
            # The message is lost, but the communicator is still usable.
            return MismatchError(
                f"{where(op, *self.engine.rank_of)}: expected a message of "
                f"{size_bytes(dense)} bytes of {str(dense.dtype).removeprefix('torch.')}, got "
                f"{request.size_bytes} bytes of {request.dtype} from "
                f"{self._named(request.source)}. "
                "Sender and receiver must use tensors of equal size and dtype"
            )
        return self.engine.fault(op)

    def _track(self, message: Message) -> Message:
        """Keeps a message's tensors alive until it is done, even if its Work is dropped."""
        if message.poll():
            return message
        with self.guard:
            self.under_way.add(message)
            sweep = len(self.under_way) >= self._sweep_at
        try:
            self._drive()
        except RuntimeError as error:
            # Without the thread the message progresses only while this rank waits for it, but a
            # peer may need the message earlier.
            text = "The message had begun, so the communicator is aborted: build another"
            failed = no_thread(message._name, error, text)
            self.engine.abort(str(failed))
            raise failed from error
        if sweep:
            for each in tuple(self.under_way):
                each.poll()
            self._sweep_at = len(self.under_way) + SWEEP_EVERY
        return message
