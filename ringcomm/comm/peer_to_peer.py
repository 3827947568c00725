"""Send and receive under the names, parameters and semantics of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import root_of
from ringcomm.comm.groups import Group, communicator_of
from ringcomm.comm.message_rounds import Letter, exchange, rounds
from ringcomm.comm.work import Work
from ringcomm.errors import ArgumentError

Tensor = torch.Tensor


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """See :meth:`Communicator.send`; ``dst`` is a global rank, ``group_dst`` one of ``group``."""
    communicator = communicator_of(group, "send")
    communicator.send(tensor, root_of(communicator, "send", "dst", dst, group_dst), tag)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """See :meth:`Communicator.isend`; ``dst`` is a global rank, ``group_dst`` one of ``group``."""
    communicator = communicator_of(group, "isend")
    return communicator.isend(tensor, root_of(communicator, "isend", "dst", dst, group_dst), tag)


def _source(
    communicator: Communicator, operation: str, src: int | None, group_src: int | None
) -> int | None:
    if src is None and group_src is None:
        return None
    return root_of(communicator, operation, "src", src, group_src)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """See :meth:`Communicator.recv`; without ``src`` and ``group_src`` from any rank.

    Returns:
        The global rank that sent.
    """
    communicator = communicator_of(group, "recv")
    sender = communicator.recv(tensor, _source(communicator, "recv", src, group_src), tag)
    return communicator.ranks[sender]


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """See :meth:`Communicator.irecv`; without ``src`` and ``group_src`` from any rank."""
    communicator = communicator_of(group, "irecv")
    return communicator.irecv(tensor, _source(communicator, "irecv", src, group_src), tag)


class P2POp:
    """One send or receive for :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv` of this package.
        tensor: sent or received into.
        peer: global rank of the peer.
        group: the group; None means the default one.
        tag: the message's tag.
        group_peer: rank of the peer in ``group``, instead of ``peer``.

    Raises:
        ArgumentError: ``op`` is something else.
    """

    def __init__(
        self,
        op: Callable[..., Work],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ArgumentError(f"P2POp: op: expected ringcomm.isend or ringcomm.irecv, got {op!r}")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def start(self) -> Work:
        """Posts it."""
        key: dict[str, Any] = {"group_dst" if self.op is isend else "group_src": self.group_peer}
        return self.op(self.tensor, self.peer, self.group, self.tag, **key)

    def letter(self, communicator: Communicator) -> Letter:
        """Of a communicator on a device: what is to be launched, checked as :meth:`start` does."""
        is_send = self.op is isend
        name = "isend" if is_send else "irecv"
        if is_send:
            peer: int | None = root_of(communicator, name, "dst", self.peer, self.group_peer)
        else:
            peer = _source(communicator, name, self.peer, self.group_peer)
        # A communicator on a device has this method, one on the host does not.
        check = cast(Any, communicator).check_letter
        checked: int = check(name, self.tensor, peer, self.tag, write=not is_send)
        return Letter(communicator, self.tensor, checked, self.tag, is_send)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Posts all of them, in any order on the peers, and returns their Works in this order.

    On devices the messages of a communicator with one tag are one launch, in which none waits for
    another; further messages each way with the same rank follow in further launches.

    Raises:
        ArgumentError: the list is empty or holds something else than P2POp, or a bad argument of
            one of them; no message between devices was sent then.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    if not p2p_op_list or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ArgumentError(
            f"batch_isend_irecv: expected a non-empty list of P2POp, got {p2p_op_list!r}"
        )
    communicators = [communicator_of(op.group, "batch_isend_irecv") for op in p2p_op_list]
    letters = {
        index: op.letter(communicator)
        for index, (op, communicator) in enumerate(zip(p2p_op_list, communicators, strict=True))
        if communicator.launches
    }
    works = {index: op.start() for index, op in enumerate(p2p_op_list) if index not in letters}
    works |= _launch(letters)
    return [works[index] for index in range(len(p2p_op_list))]


def _launch(letters: dict[int, Letter]) -> dict[int, Work]:
    """The Works of messages between devices, under the same keys."""
    keys, in_order = list(letters), list(letters.values())
    works: dict[int, Work] = {}
    for launch in rounds(in_order):
        work = exchange([in_order[index] for index in launch])
        for index in launch:
            letter = in_order[index]
            works[keys[index]] = (
                work.part("isend", [], None)
                if letter.is_send
                else work.part("irecv", [letter.tensor], letter.peer)
            )
    return works
