"""Point-to-point calls, which are never ordered behind collectives."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

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
# A sweep polls every message under way, so it runs only once this many more messages have gathered
# than the last sweep left.
SWEEP_EVERY = 64


def _never() -> bool:
    return False


class Message(Work):
    """A send or receive under way; it waits on the native request, not on a queue."""

    __slots__ = ("_claimed", "_dense", "_engine", "_request", "_tensor")

    def __init__(
        self,
        engine: Messages,
        request: _native.Request,
        name: str,
        tensor: Tensor,
        dense: Tensor,
    ) -> None:
        super().__init__(name, engine._interrupt, _never)
        self._engine = engine
        self._request = request
        self._tensor = tensor
        self._dense = dense
        self._claimed = False

    def _await(self, timeout: timedelta | float | None) -> None:
        seconds = wait_seconds(timeout)
        timeout_ms = -1 if seconds < 0 else max(1, round(seconds * 1000))
        status = self._request.wait(timeout_ms)
        if status and not self._request.done():
            if self._engine.aborted:
                raise self._engine._fault(self._name)
            raise not_done(self._name, seconds, "the message is still under way")
        self._complete(self._request.status())
        if not self._finished:
            # Another thread noticed the end first and is about to record it.
            super()._await(None)

    def _complete(self, status: int) -> None:
        """Records the end of the message, in the thread that notices it first."""
        with self._engine._message_guard:
            if self._claimed:
                return
            self._claimed = True
            self._engine._under_way.discard(self)
        error = self._engine._message_error(self._name, self._request, self._dense, status)
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
            # The native engine knows no Python, so a thread must notice the end. Each message has
            # its own, since a shared one could wait for a message that ends only after a later one.
            start_thread(
                threading.Thread(target=self._watch, name="ringcomm-future", daemon=True),
                f"get_future of {self._name}",
                "The message is still under way: call wait() instead",
            )
        return future

    def _watch(self) -> None:
        self._complete(self._request.wait(-1))


class Messages(CallEngine):
    """Point-to-point calls of a communicator."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._message_guard = threading.Lock()
        self._under_way: set[Message] = set()
        self._sweep_at = SWEEP_EVERY

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Sends ``tensor`` to rank ``dst``; returns when it may be changed again.

        Args:
            tensor: any shape and dtype; the receiver's must have as many bytes.
            dst: a rank of this communicator other than this one.
            tag: 0 <= tag < 2**31; the receive must name the same.

        Raises:
            ArgumentError: bad argument.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        request, dense = self._post_send("send", tensor, dst, tag)
        self._finish_now("send", request, dense)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receives into ``tensor`` and returns the rank that sent.

        Args:
            tensor: any shape and dtype, as many bytes as the message.
            src: a rank of this communicator other than this one; None takes any.
            tag: 0 <= tag < 2**31; the send must name the same.

        Raises:
            ArgumentError: bad argument.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        request, dense = self._post_recv("recv", tensor, src, tag)
        self._finish_now("recv", request, dense)
        put_back(tensor, dense)
        increment_version(tensor)
        return request.source

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Sends like :meth:`send`, without waiting; the Work tells when ``tensor`` may change."""
        request, dense = self._post_send("isend", tensor, dst, tag)
        return self._track(Message(self, request, "isend", tensor, dense))

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """Receives like :meth:`recv`, without waiting; ``Work.source_rank()`` is the sender."""
        request, dense = self._post_recv("irecv", tensor, src, tag)
        return self._track(Message(self, request, "irecv", tensor, dense))

    def _post_send(
        self, op: str, tensor: Tensor, dst: int, tag: int
    ) -> tuple[_native.Request, Tensor]:
        checks = self.checks(op)
        dtype = checks.tensor("tensor", tensor)
        peer = self._other(checks, "dst", dst)
        tag = self._check_message(checks, tag)
        admit_gradients(op, (), [tensor])
        dense = readable(tensor)
        ptr = dense.data_ptr()
        return self._native.post_send(ptr, size_bytes(dense), peer, tag, dtype), dense

    def _post_recv(
        self, op: str, tensor: Tensor, src: int | None, tag: int
    ) -> tuple[_native.Request, Tensor]:
        checks = self.checks(op)
        dtype = checks.output("tensor", tensor)
        peer = ANY_SOURCE if src is None else self._other(checks, "src", src)
        tag = self._check_message(checks, tag)
        admit_gradients(op, [tensor])
        dense = writable(tensor)
        ptr = dense.data_ptr()
        return self._native.post_recv(ptr, size_bytes(dense), peer, tag, dtype), dense

    def _other(self, checks: CallChecks, name: str, rank: Any) -> int:
        peer = checks.peer(name, rank)
        if peer == self._rank:
            checks.fail(f"{name}: expected another rank than this one, got {rank}")
        return peer

    def _check_message(self, checks: CallChecks, tag: Any) -> int:
        number = integer(tag, bools=True)
        if number is None or not 0 <= number <= LARGEST_TAG:
            checks.fail(f"tag: expected 0 <= tag <= {LARGEST_TAG}, got {shown(tag)}")
        if self._refuse is not None:
            raise self._refuse(checks.op)
        return number

    def _finish_now(self, op: str, request: _native.Request, dense: Tensor) -> None:
        error = self._message_error(op, request, dense, request.wait(-1))
        if error is not None:
            raise error

    def _message_error(
        self, op: str, request: _native.Request, dense: Tensor, status: int
    ) -> RingcommError | None:
        if not status:
            return None
        if status == _native.MISMATCH and self._core.fault() is None:
            # The message is lost, but the communicator can still be used.
            return MismatchError(
                f"{where(op, self._rank, self._world_size)}: expected a message of "
                f"{size_bytes(dense)} bytes of {str(dense.dtype).removeprefix('torch.')}, got "
                f"{request.size_bytes} bytes of {request.dtype} from "
                f"{self._named(request.source)}. "
                "Sender and receiver must use tensors of equal size and dtype"
            )
        return self._fault(op)

    def _named(self, rank: int) -> str:
        """Returns a rank in the words of messages."""
        return f"rank {rank}"

    def _track(self, message: Message) -> Message:
        """Keeps a message's tensors alive until it is done, whatever becomes of its Work."""
        if message.poll():
            return message
        with self._message_guard:
            self._under_way.add(message)
            sweep = len(self._under_way) >= self._sweep_at
        try:
            self._core.drive_in_background()
        except RuntimeError as error:
            # Without that thread the message advances only while this rank waits for it, but a
            # peer may need the message before that.
            text = "The message had begun, so the communicator is aborted: build another"
            failed = no_thread(message._name, error, text)
            self.abort(str(failed))
            raise failed from error
        if sweep:
            for each in tuple(self._under_way):
                each.poll()
            self._sweep_at = len(self._under_way) + SWEEP_EVERY
        return message
