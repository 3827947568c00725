"""Messages between devices that go out together: torch's coalescing brackets and its batches.

Why they have to, and in which launches they go: ``ringcomm.comm.message_rounds``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, Work, distributed_c10d

from ringcomm.c10d.work import PendingWork
from ringcomm.comm.calls import Unusable
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.message_rounds import Letter, exchange, rounds
from ringcomm.comm.work import Work as CommunicatorWork
from ringcomm.errors import ArgumentError, RingcommError

__all__ = ["Batch", "admit_ringcomm_to_batches", "dispatch"]


class Posted(NamedTuple):
    """One message of a batch, and the work that the caller has got for it."""

    letter: Letter
    work: PendingWork


@dataclass
class Batch:
    """What came since ``_start_coalescing``: works of what runs, messages that still wait."""

    works: list[Work] = field(default_factory=list)
    posted: list[Posted] = field(default_factory=list)

    def post(
        self, communicator: Communicator, tensor: Tensor, peer: int, tag: int, *, is_send: bool
    ) -> PendingWork:
        """Takes a message; its work can be waited for once the batch has ended."""
        work = PendingWork(cast(CommunicatorWork, Unusable(_not_yet)), [tensor])
        self.posted.append(Posted(Letter(communicator, tensor, peer, tag, is_send), work))
        return work


def _not_yet(name: str) -> RingcommError:
    return ArgumentError(
        f"{name} of a batched message: expected to be called when the batch has ended, since the "
        "message goes out only then"
    )


def dispatch(posted: list[Posted]) -> list[Work]:
    """Sends and receives the messages of a batch; one work for each launch."""
    launches = rounds([each.letter for each in posted])
    return [_launch([posted[index] for index in launch]) for launch in launches]


def _launch(posted: list[Posted]) -> Work:
    letters = [each.letter for each in posted]
    inner = exchange(letters)
    for each in posted:
        each.work._inner = inner
    return PendingWork(inner, [letter.tensor for letter in letters if not letter.is_send])


_of_torch = distributed_c10d.batch_isend_irecv


def _batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    from ringcomm.c10d.process_group import ProcessGroup

    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group, tensor = p2p_op_list[0].group, p2p_op_list[0].tensor
    if not isinstance(group, ProcessGroup) or group.is_on_host(tensor, "batch_isend_irecv"):
        return _of_torch(p2p_op_list)
    return [group.exchange(p2p_op_list)]


def admit_ringcomm_to_batches() -> None:
    """Lets ``torch.distributed.batch_isend_irecv`` batch the messages of groups of ringcomm.

    That function opens a coalescing bracket only for groups of exactly torch's own class, and
    makes all other groups send and receive one by one. From now on it hands messages between
    devices to groups of ringcomm as a whole; all else goes to the original.
    """
    _batch_isend_irecv.__doc__ = _of_torch.__doc__
    distributed_c10d.batch_isend_irecv = _batch_isend_irecv
    dist.batch_isend_irecv = _batch_isend_irecv
