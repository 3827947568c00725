"""Collectives, send and receive as functions, with the semantics of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch

from ringcomm.comm.arguments import SUM
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.messages import PeerMessage, launch_batch, launches_of
from ringcomm.comm.groups import Group, communicator_of, group_rank
from ringcomm.comm.work import Work
from ringcomm.errors import ArgumentError
from ringcomm.integers import integers

# ``group`` is a Communicator, or None for the default one. ``src`` and ``dst`` are global ranks
# (ranks of the default communicator); ``group_src`` and ``group_dst`` are ranks of ``group``.
# torch has no ``algorithm`` and ``kernels``, so these are keyword-only. Argument checks and errors
# are those of the :class:`Communicator` method of the same name.

Tensor = torch.Tensor


def root_of(
    communicator: Communicator,
    operation: str,
    name: str,
    global_rank: int | None,
    rank_in_group: int | None,
) -> int:
    """Returns the group rank that ``src``/``group_src`` or ``dst``/``group_dst`` name.

    Raises:
        ArgumentError: both or none are given, or the global rank is not in the group.
    """
    if (global_rank is None) == (rank_in_group is None):
        raise ArgumentError(
            f"{operation} on rank {communicator.rank} of {communicator.world_size}: expected "
            f"either {name} or group_{name}, got {name}={global_rank}, group_{name}={rank_in_group}"
        )
    if rank_in_group is not None:
        return communicator.checks(operation).peer(f"group_{name}", rank_in_group)
    return group_rank(communicator, global_rank, operation, name)


def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    kernels: str | None = None,
    wire: str | None = None,
) -> Work | None:
    """See :meth:`Communicator.all_reduce`."""
    return communicator_of(group, "all_reduce").all_reduce(
        tensor, op, async_op, algorithm=algorithm, kernels=kernels, wire=wire
    )


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """See :meth:`Communicator.all_reduce_coalesced`."""
    communicator = communicator_of(group, "all_reduce_coalesced")
    return communicator.all_reduce_coalesced(tensors, op, async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """See :meth:`Communicator.reduce`."""
    communicator = communicator_of(group, "reduce")
    root = root_of(communicator, "reduce", "dst", dst, group_dst)
    return communicator.reduce(tensor, root, op, async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """See :meth:`Communicator.reduce_scatter`."""
    return communicator_of(group, "reduce_scatter").reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(  # noqa: PLR0913 -- torch.distributed's signature, and three choices
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    kernels: str | None = None,
    wire: str | None = None,
) -> Work | None:
    """See :meth:`Communicator.reduce_scatter_tensor`."""
    communicator = communicator_of(group, "reduce_scatter_tensor")
    return communicator.reduce_scatter_tensor(
        output, input, op, async_op, algorithm=algorithm, kernels=kernels, wire=wire
    )


def reduce_scatter_coalesced(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """See :meth:`Communicator.reduce_scatter_coalesced`."""
    communicator = communicator_of(group, "reduce_scatter_coalesced")
    return communicator.reduce_scatter_coalesced(outputs, inputs, op, async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """See :meth:`Communicator.all_gather`."""
    return communicator_of(group, "all_gather").all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    kernels: str | None = None,
) -> Work | None:
    """See :meth:`Communicator.all_gather_into_tensor`."""
    communicator = communicator_of(group, "all_gather_into_tensor")
    return communicator.all_gather_into_tensor(
        output_tensor, input_tensor, async_op, algorithm=algorithm, kernels=kernels
    )


def all_gather_coalesced(
    output_tensor_lists: Sequence[list[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fills ``output_tensor_lists[r][i]`` with ``input_tensor_list[i]`` of rank r."""
    communicator = communicator_of(group, "all_gather_coalesced")
    return communicator.all_gather_lists_coalesced(output_tensor_lists, input_tensor_list, async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """See :meth:`Communicator.broadcast`."""
    communicator = communicator_of(group, "broadcast")
    root = root_of(communicator, "broadcast", "src", src, group_src)
    return communicator.broadcast(tensor, root, async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """See :meth:`Communicator.gather`; without ``dst`` and ``group_dst``, dst is 0."""
    communicator = communicator_of(group, "gather")
    if dst is None and group_dst is None:
        dst = 0
    root = root_of(communicator, "gather", "dst", dst, group_dst)
    return communicator.gather(tensor, gather_list, root, async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """See :meth:`Communicator.scatter`; without ``src`` and ``group_src``, src is 0."""
    communicator = communicator_of(group, "scatter")
    if src is None and group_src is None:
        src = 0
    root = root_of(communicator, "scatter", "src", src, group_src)
    return communicator.scatter(tensor, scatter_list, root, async_op)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """See :meth:`Communicator.all_to_all`."""
    communicator = communicator_of(group, "all_to_all")
    return communicator.all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """See :meth:`Communicator.all_to_all_single`."""
    return communicator_of(group, "all_to_all_single").all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op
    )


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """See :meth:`Communicator.barrier`.

    ``device_ids`` is None, or a list of the one device that the group is on.
    """
    communicator = communicator_of(group, "barrier")
    index = communicator.device.index
    if device_ids is not None and (index is None or integers(device_ids) != [index]):
        expected = "None on CPU" if index is None else f"None or [{index}]"
        raise ArgumentError(
            f"barrier on rank {communicator.rank} of {communicator.world_size}: device_ids: "
            f"expected {expected}, got {device_ids!r}"
        )
    return communicator.barrier(async_op, timeout=timeout)


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

    def __repr__(self) -> str:
        way = f"{'to' if self.op is isend else 'from'} rank "
        way += f"{self.peer}" if self.group_peer is None else f"{self.group_peer} of the group"
        shape, dtype = tuple(self.tensor.shape), self.tensor.dtype
        return f"<ringcomm.P2POp {self.op.__name__} {way}, {dtype} {shape}, tag {self.tag}>"

    def start(self) -> Work:
        """Posts the send or receive."""
        key: dict[str, Any] = {"group_dst" if self.op is isend else "group_src": self.group_peer}
        return self.op(self.tensor, self.peer, self.group, self.tag, **key)

    def message(self, communicator: Communicator) -> PeerMessage:
        """Checks the arguments as :meth:`start` does, and returns the message for a device."""
        is_send = self.op is isend
        name = "isend" if is_send else "irecv"
        if is_send:
            peer: int | None = root_of(communicator, name, "dst", self.peer, self.group_peer)
        else:
            peer = _source(communicator, name, self.peer, self.group_peer)
        # A communicator on a device has this method, one on the host does not.
        check = cast(Any, communicator).check_message
        checked: tuple[int, int] = check(name, self.tensor, peer, self.tag, write=not is_send)
        return PeerMessage(communicator, self.tensor, *checked, is_send)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Posts all operations, in any order on the peers, and returns their Works in this order.

    On devices the messages of a communicator with one tag are one launch, in which none waits for
    another. Further messages each way with the same rank follow in further launches.

    Raises:
        ArgumentError: the list is empty or holds something else than P2POp, or one of them has a
            bad argument. No message between devices was sent then.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    if not p2p_op_list or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ArgumentError(
            f"batch_isend_irecv: expected a non-empty list of P2POp, got {p2p_op_list!r}"
        )
    communicators = [communicator_of(op.group, "batch_isend_irecv") for op in p2p_op_list]
    messages = {
        index: op.message(communicator)
        for index, (op, communicator) in enumerate(zip(p2p_op_list, communicators, strict=True))
        if communicator.launches
    }
    works = {index: op.start() for index, op in enumerate(p2p_op_list) if index not in messages}
    works |= _launch(messages)
    return [works[index] for index in range(len(p2p_op_list))]


def _launch(messages: dict[int, PeerMessage]) -> dict[int, Work]:
    """Launches messages between devices; returns their Works under the same keys."""
    keys, in_order = list(messages), list(messages.values())
    works: dict[int, Work] = {}
    for launch in launches_of(in_order):
        work = launch_batch([in_order[index] for index in launch])
        for index in launch:
            message = in_order[index]
            works[keys[index]] = (
                work.part("isend", [], None)
                if message.is_send
                else work.part("irecv", [message.tensor], message.peer)
            )
    return works
