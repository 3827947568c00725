"""Send and receive, in the argument forms of ``torch.distributed``."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import Work

from ringcomm.c10d.arguments import single
from ringcomm.c10d.work import PendingWork
from ringcomm.comm.communicator import Communicator

__all__ = ["PeerToPeer"]


class PeerToPeer:
    """Mixin of the process group: messages between two members. Ranks are ranks of the group."""

    _communicator: Communicator
    _coalescing: list[Work] | None

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        tensor = single(tensors, "send")
        return self._message(PendingWork(self._communicator.isend(tensor, dstRank, tag), [tensor]))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        tensor = single(tensors, "recv")
        return self._message(PendingWork(self._communicator.irecv(tensor, srcRank, tag), [tensor]))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        tensor = single(tensors, "recv_anysource")
        return self._message(PendingWork(self._communicator.irecv(tensor, None, tag), [tensor]))

    def _message(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work
