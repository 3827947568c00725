"""Send and receive of the process group, in the argument forms of ``torch.distributed``.

Between CPU tensors a message is found by its tag. Between devices messages match in order, and
their tags must agree; a receive there names its sender.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp, Work, isend

from ringcomm.c10d.calls import Batch, Calls, dispatch, single
from ringcomm.c10d.work import OP_TYPES, PendingWork, WorkGroup, completed
from ringcomm.comm.admission import is_watched
from ringcomm.errors import ArgumentError, UnsupportedError, where

# torch asks a group for an asynchronous message even where its function waits for it at once: that
# message needs no work, and no thread of ours that gets it on its way meanwhile.
_WAITING = {
    unwrap(function).__code__ for function in (torch.distributed.send, torch.distributed.recv)
}


def _is_waited_for() -> bool:
    """Returns whether ``torch.distributed.send()`` or ``recv()`` has made the group's call."""
    # Behind this function, the group's, and isend() or irecv().
    frame = sys._getframe(2).f_back
    return frame is not None and frame.f_code in _WAITING


class PeerToPeer(Calls):
    """Mixin of the process group: messages between two members. Ranks are ranks of the group."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        tensor = single(tensors, "send")
        communicator = self._of([tensor], "send")
        if is_watched():
            make = partial(self.send, [tensor], dstRank, tag)
            return self._seen(None, communicator, "send", (tensor, dstRank, tag), make)
        batch = self._coalescing
        if batch is not None and communicator is not self._communicators.host:
            return batch.post(communicator, tensor, dstRank, tag, is_send=True)
        if batch is None and communicator is self._communicators.host and _is_waited_for():
            communicator.send(tensor, dstRank, tag)
            return completed([tensor], OP_TYPES["send"])
        sent = communicator.isend(tensor, dstRank, tag)
        return self._collected(PendingWork(sent, [tensor], OP_TYPES["send"]))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        tensor = single(tensors, "recv")
        communicator = self._of([tensor], "recv")
        if is_watched():
            make = partial(self.recv, [tensor], srcRank, tag)
            return self._seen(None, communicator, "recv", (tensor, srcRank, tag), make)
        batch = self._coalescing
        if batch is not None and communicator is not self._communicators.host:
            return batch.post(communicator, tensor, srcRank, tag, is_send=False)
        if batch is None and communicator is self._communicators.host and _is_waited_for():
            communicator.recv(tensor, srcRank, tag)
            return completed([tensor], OP_TYPES["recv"])
        received = communicator.irecv(tensor, srcRank, tag)
        return self._collected(PendingWork(received, [tensor], OP_TYPES["recv"]))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        tensor = single(tensors, "recv_anysource")
        if not self.is_on_host(tensor, "recv"):
            host = self._communicators.host
            raise UnsupportedError(
                f"{where('recv', host.rank, host.world_size)}: src: expected a rank for a tensor "
                f"on {tensor.device}, got None; a receive on a device waits for one sender. Name "
                "it, or receive into a CPU tensor"
            )
        communicator = self._communicators.host
        if is_watched():
            make = partial(self.recv_anysource, [tensor], tag)
            return self._seen(None, communicator, "recv from any source", (tensor, tag), make)
        received = communicator.irecv(tensor, None, tag)
        return self._collected(PendingWork(received, [tensor], OP_TYPES["recv from any source"]))

    def is_on_host(self, tensor: Tensor, operation: str) -> bool:
        """True if the host's communicator serves the tensor."""
        return self._communicators.is_on_host(tensor, operation)

    def batch(self, ops: Sequence[P2POp]) -> Work:
        """Sends and receives of devices, none of which waits for another; one work for all.

        Args:
            ops: of this group. Messages between two ranks keep their order, which must be the
                same on both.

        Raises:
            ArgumentError: bad argument; no message was sent.
            RingcommError: a fault; see ``ringcomm.errors``.
        """
        device = ops[0].tensor.device
        self._start_coalescing(device)
        try:
            for op in ops:
                # By torch's own functions, which see a complex tensor as one of real numbers.
                peer: dict[str, Any] = {
                    "group_dst" if op.op is isend else "group_src": op.group_peer
                }
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        except BaseException:
            self._coalescing = None
            raise
        return self._end_coalescing(device)

    def _start_coalescing(self, device: torch.device) -> None:
        """Begins to collect the calls that follow.

        Collectives, and messages of CPU tensors, run at once; messages of devices wait for the end.
        """
        if self._coalescing is not None:
            raise ArgumentError("_start_coalescing: the group is coalescing already")
        self._coalescing = Batch()

    def _end_coalescing(self, device: torch.device) -> Work:
        """One work for all calls since ``_start_coalescing``."""
        if self._coalescing is None:
            raise ArgumentError("_end_coalescing: there was no _start_coalescing")
        batch, self._coalescing = self._coalescing, None
        works = batch.works + dispatch(batch.posted)
        return WorkGroup(works) if works else completed([], OP_TYPES["batch"])
