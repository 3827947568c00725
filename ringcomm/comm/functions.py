# SPDX-License-Identifier: Apache-2.0
"""Collectives, messages and groups as functions, with the semantics of ``torch.distributed``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from ringcomm import cuda
from ringcomm.comm.communicator import Communicator, Device
from ringcomm.comm.device.messages import (
    DeviceMessages,
    PeerMessage,
    launch_batch,
    launches_of,
)
from ringcomm.comm.host.arguments import SUM
from ringcomm.comm.host.engine import Work
from ringcomm.comm.host.options import CommOptions
from ringcomm.cuda import find_device
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.integers import integer, integers
from ringcomm.json_reader import shown
from ringcomm.rendezvous.launchers import read_environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# ---- The default communicator and sub-groups, under the names of ``torch.distributed`` ----------
# A process has one default communicator, which :func:`init_process_group` makes. A rank thread of a
# ``LocalWorld`` has its own. Groups are communicators. Ranks in these functions are global: they
# are ranks of the default communicator.


class _NonMember:
    """The type of ``GroupMember.NON_GROUP_MEMBER``."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class GroupMember:
    """The namespace of the value that :func:`new_group` returns on ranks that are not members."""

    NON_GROUP_MEMBER = _NonMember()


Group: TypeAlias = "Communicator | ProcessGroup | DeviceMesh | _NonMember | None"


class _Thread(threading.local):
    communicator: Communicator | None = None


_thread = _Thread()
_process: Communicator | None = None
BACKENDS = (None, "ringcomm", "cpu:ringcomm", "cuda:ringcomm")


@contextmanager
def thread_default(communicator: Communicator) -> Iterator[None]:
    """Makes ``communicator`` this thread's default."""
    before = _thread.communicator
    _thread.communicator = communicator
    try:
        yield
    finally:
        _thread.communicator = before


def default_communicator(operation: str) -> Communicator:
    """Returns the communicator for ``group=None``; raises if there is none."""
    communicator = _thread.communicator or _process or _of_torchs_default()
    if communicator is None:
        raise RingcommError(
            f"{operation}: expected a default group, but there is none"
            f"{_torchs_default_in_words()}; call ringcomm.init_process_group() first, or "
            'torch.distributed.init_process_group("ringcomm"), or run inside LocalWorld.run()'
        )
    return communicator


def default_places() -> tuple[object, dict[str, Any]]:
    """Returns the objects in which the native module looks up :func:`default_communicator`.

    A thread's default is the attribute ``communicator`` of the first object; the process's default
    has the key ``_process`` in the second object.
    """
    return _thread, globals()


def _of_torchs_default() -> Communicator | None:
    """Returns the communicator of the default group of ``torch.distributed``, or None."""
    return communicator_behind(dist.group.WORLD) if dist.is_initialized() else None


_finders: list[Callable[[ProcessGroup], Communicator | None]] = []


def find_behind_by(finder: Callable[[ProcessGroup], Communicator | None]) -> None:
    """Sets the function that finds the communicator of a process group of torch's own class.

    The package c10d, which makes these groups, sets it.
    """
    if finder not in _finders:
        _finders.append(finder)


def communicator_behind(group: Any) -> Communicator | None:
    """Returns the host communicator of a process group of torch, or None.

    Returns None if neither the group nor any of its backends is ringcomm's.
    """
    found = getattr(group, "communicator", None)
    if isinstance(found, Communicator):
        return found
    if type(group) is not dist.ProcessGroup:
        return None
    return next((comm for find in _finders if (comm := find(group)) is not None), None)


def _torchs_default_in_words() -> str:
    if not dist.is_initialized():
        return ""
    return f" of ringcomm, and that of torch.distributed is of the backend {dist.get_backend()!r}"


def communicator_of(group: Any, operation: str) -> Communicator:
    """Returns the communicator for the ``group`` argument of a module-level function.

    For a process group of the backend "ringcomm", or a one-dimensional mesh, returns the host
    communicator.

    Raises:
        ArgumentError: this rank is not in the group, or ``group`` is not a group of ringcomm.
        RingcommError: there is no default group.
    """
    if group is None:
        return _thread.communicator or default_communicator(operation)
    if isinstance(group, Communicator):
        return group
    # torch's and ringcomm's new_group() return this value on ranks outside of the group.
    of_torch = type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER
    if of_torch or isinstance(group, _NonMember):
        rank = dist.get_rank() if of_torch else default_communicator(operation).rank
        raise ArgumentError(
            f"{operation} on rank {rank}: expected a group that this rank is in, got "
            "GroupMember.NON_GROUP_MEMBER; only members may call"
        )
    if callable(getattr(group, "get_group", None)):
        return communicator_of(group_of_mesh(group, operation), operation)
    found = communicator_behind(group)
    if found is not None:
        return found
    raise ArgumentError(
        f"{operation}: expected a ringcomm.Communicator as the group, a process group of the "
        f'backend "ringcomm" or a DeviceMesh of one dimension, got {type(group).__name__}'
    )


def group_of_mesh(mesh: DeviceMesh, operation: str) -> ProcessGroup:
    """Returns the process group of a mesh; traceable.

    Raises:
        ArgumentError: the mesh has several dimensions.
    """
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("tp",)
        raise ArgumentError(
            f"{operation}: expected a DeviceMesh of one dimension as the group, such as "
            f"mesh[{names[-1]!r}], got a mesh of {mesh.ndim} dimensions"
        )
    return mesh.get_group()


def is_available() -> bool:
    """Returns True, since the host backend is always available."""
    return True


def is_initialized() -> bool:
    """True when there is a default group in this thread or process."""
    return _thread.communicator is not None or _process is not None


def init_process_group(  # noqa: PLR0913 -- torch.distributed's signature
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: CommOptions | None = None,
    device_id: Any = None,
) -> None:
    """Makes the default communicator of this process.

    Args:
        backend: None or "ringcomm"; "cuda:ringcomm" without ``device_id`` selects this process's
            current GPU.
        init_method: "env://", "tcp://HOST:PORT" or "file:///PATH"; None reads the variables that
            the launcher set (torchrun, MPICH, Open MPI, Slurm), unless ``store`` is given.
        timeout: how long to wait for peers, here and in every call; default 30 minutes.
        world_size: with ``store`` or ``init_method``: how many ranks.
        rank: with ``store`` or ``init_method``: this rank.
        store: a torch store that all ranks reach, instead of ``init_method``.
        group_name: name of the default group; default "world".
        pg_options: tunables.
        device_id: the device of the group's tensors: None for the CPU; a GPU as index, "cuda:1" or
            torch.device.

    Raises:
        ArgumentError: contradictory or unusable arguments, or a default group already exists.
        UnsupportedError: this process has no GPU; the error says why.
        RingcommError: as :meth:`Communicator.from_store`.
    """
    global _process
    if is_initialized():
        raise ArgumentError(
            "init_process_group: there is a default group already; call "
            "destroy_process_group() first"
        )
    if backend not in BACKENDS:
        raise ArgumentError(f'init_process_group: backend: expected "ringcomm", got {backend!r}')
    rank, world_size = _number("rank", rank), _number("world_size", world_size)
    device = _device_of_group(backend, device_id)
    options = pg_options or CommOptions()
    seconds = CommOptions(timeout=timeout).timeout_s if timeout is not None else options.timeout_s
    if store is None:
        store, rank, world_size = _find_store(init_method, rank, world_size, seconds)
    elif init_method is not None or rank < 0 or world_size < 1:
        raise ArgumentError(
            "init_process_group: expected store= with rank= and world_size= and without "
            f"init_method=, got rank={rank}, world_size={world_size}, init_method={init_method!r}"
        )
    _process = Communicator.from_store(
        store,
        rank,
        world_size,
        name=group_name or "world",
        timeout=timeout,
        options=options,
        device=device,
    )


def _number(name: str, value: Any) -> int:
    number = integer(value)
    if number is None:
        raise ArgumentError(
            f"init_process_group: {name}: expected an integer below 2^63, got {shown(value)}"
        )
    return number


def _device_of_group(backend: str | None, device_id: Any) -> Device:
    """Returns the ``device`` for the default communicator, before any device is touched."""
    if device_id is None:
        return "cuda" if backend == "cuda:ringcomm" else None
    on_cpu = find_device(device_id, "init_process_group") is None
    if backend in ("cpu:ringcomm", "cuda:ringcomm") and on_cpu != (backend == "cpu:ringcomm"):
        raise ArgumentError(
            f"init_process_group: device_id: expected a device for backend {backend!r}, got "
            f"{device_id!r}"
        )
    return cast(Device, device_id)


def _find_store(
    init_method: str | None, rank: int, world_size: int, timeout_s: float
) -> tuple[Store, int, int]:
    if init_method is None and rank < 0 and world_size < 0:
        launched = read_environment()
        return launched.store(timeout_s), launched.rank, launched.world_size
    from torch.distributed.rendezvous import rendezvous

    try:
        found: tuple[Store, int, int] = next(
            rendezvous(
                init_method or "env://", rank, world_size, timeout=timedelta(seconds=timeout_s)
            )
        )
    except ValueError as error:
        raise ArgumentError(f"init_process_group: init_method {init_method!r}: {error}") from error
    return found


def destroy_process_group(group: Group = None) -> None:
    """Closes a group, or with None the default group.

    Raises:
        ArgumentError: inside ``LocalWorld.run``, for the default group.
        RingcommError: there is no default group.
    """
    global _process
    communicator = communicator_of(group, "destroy_process_group")
    if group is None and not is_initialized():
        raise ArgumentError(
            "destroy_process_group: the default group is torch.distributed's; call "
            "torch.distributed.destroy_process_group()"
        )
    if group is None and communicator is _thread.communicator:
        raise ArgumentError(
            "destroy_process_group: the default group of a LocalWorld's thread belongs to the "
            "LocalWorld; close the LocalWorld"
        )
    communicator.close()
    if communicator is _process:
        _process = None


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
) -> Communicator | _NonMember:
    """Builds a group of some ranks of the default group.

    Args:
        ranks: global ranks; None means all.
        timeout: default: the timeout of the default group.
        backend: None or "ringcomm".
        pg_options: must be None: the group has the tunables of the default group.
        use_local_synchronization: has no effect, since only members ever take part.
        group_desc: part of the group's name.
        device_id: None or the device of the default group.

    Returns:
        A communicator, or ``GroupMember.NON_GROUP_MEMBER`` on ranks that are not members.

    Raises:
        ArgumentError: a bad rank, or an argument that is not supported.
        RingcommError: as :meth:`Communicator.from_store`.
    """
    parent = default_communicator("new_group")
    if backend not in (None, "ringcomm", f"{parent.device.type}:ringcomm"):
        raise ArgumentError(
            f'new_group: backend: expected "ringcomm", on the default group\'s device '
            f"{parent.device}, got {backend!r}"
        )
    if pg_options is not None:
        raise ArgumentError("new_group: pg_options: expected None; groups inherit the tunables")
    _check_device_of_parent(parent, device_id)
    members = range(parent.world_size) if ranks is None else ranks
    made = parent.new_group(members, name=group_desc, timeout=timeout)
    return GroupMember.NON_GROUP_MEMBER if made is None else made


def _check_device_of_parent(parent: Communicator, device_id: Any) -> None:
    if device_id is None:
        return
    wanted = torch.device("cpu")
    index = find_device(device_id, "new_group")
    if index is not None:
        wanted = cuda.current().torch_device(index)
    if wanted != parent.device:
        raise ArgumentError(
            f"new_group on rank {parent.rank} of {parent.world_size}: device_id: expected None or "
            f"the default group's device {parent.device}, got {device_id!r}"
        )


def get_rank(group: Group = None) -> int:
    """Returns this rank in ``group``; -1 when it is not a member."""
    return -1 if isinstance(group, _NonMember) else communicator_of(group, "get_rank").rank


def get_world_size(group: Group = None) -> int:
    """Returns the number of ranks of ``group``; -1 when this rank is not a member."""
    if isinstance(group, _NonMember):
        return -1
    return communicator_of(group, "get_world_size").world_size


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Returns the global ranks of ``group``, by group rank."""
    return list(communicator_of(group, "get_process_group_ranks").ranks)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Returns the rank in ``group`` of a global rank.

    Raises:
        ArgumentError: the rank is not a member.
    """
    communicator = communicator_of(group, "get_group_rank")
    return group_rank(communicator, global_rank, "get_group_rank", "global_rank")


def get_global_rank(group: Group, group_rank: int) -> int:
    """Returns the global rank of a rank in ``group``.

    Raises:
        ArgumentError: there is no such rank.
    """
    ranks = communicator_of(group, "get_global_rank").ranks
    number = integer(group_rank, bools=True)
    if number is None or not 0 <= number < len(ranks):
        raise ArgumentError(
            f"get_global_rank: group_rank: expected 0 to {len(ranks) - 1}, got {shown(group_rank)}"
        )
    return ranks[number]


def group_rank(communicator: Communicator, global_rank: Any, operation: str, name: str) -> int:
    """Converts a member's global rank to its rank in ``communicator``; other ranks raise."""
    ranks = communicator.ranks
    number = integer(global_rank, bools=True)
    if number not in ranks:
        raise ArgumentError(
            f"{operation} on rank {communicator.rank} of {communicator.world_size}: {name}: "
            f"expected one of the group's global ranks {list(ranks)}, got {shown(global_rank)}"
        )
    return ranks.index(number)


# ---- The calls of a group. ``group`` is a Communicator, or None for the default communicator.
# ``src`` and ``dst`` are global ranks (ranks of the default communicator); ``group_src`` and
# ``group_dst`` are ranks of ``group``. torch's functions have no ``algorithm`` and ``kernels``, so
# these are keyword-only. Each function's arguments are checked by the method of
# :class:`Communicator` that has the function's name.

Tensor = torch.Tensor


def root_of(
    communicator: Communicator,
    operation: str,
    name: str,
    global_rank: int | None,
    rank_in_group: int | None,
) -> int:
    """Returns the group rank given by ``src`` or ``group_src`` (or ``dst`` or ``group_dst``).

    Raises:
        ArgumentError: both or none are given, or the global rank is not in the group.
    """
    if (global_rank is None) == (rank_in_group is None):
        raise ArgumentError(
            f"{operation} on rank {communicator.rank} of {communicator.world_size}: expected "
            f"either {name} or group_{name}, got {name}={global_rank}, group_{name}={rank_in_group}"
        )
    if rank_in_group is not None:
        return communicator.engine.checks(operation).peer(f"group_{name}", rank_in_group)
    return group_rank(communicator, global_rank, operation, name)


def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    kernels: str | None = None,
    compression: str | None = None,
) -> Work | None:
    """See :meth:`Communicator.all_reduce`."""
    return communicator_of(group, "all_reduce").all_reduce(
        tensor, op, async_op, algorithm=algorithm, kernels=kernels, compression=compression
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


def reduce_scatter_tensor(  # noqa: PLR0913 -- torch.distributed's signature, and 3 more arguments
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    kernels: str | None = None,
    compression: str | None = None,
) -> Work | None:
    """See :meth:`Communicator.reduce_scatter_tensor`."""
    communicator = communicator_of(group, "reduce_scatter_tensor")
    return communicator.reduce_scatter_tensor(
        output, input, op, async_op, algorithm=algorithm, kernels=kernels, compression=compression
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

    ``device_ids`` is None, or a list with the device of the group.
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
    """See :meth:`Communicator.send`; ``dst`` is a global rank, ``group_dst`` a group rank."""
    communicator = communicator_of(group, "send")
    communicator.send(tensor, root_of(communicator, "send", "dst", dst, group_dst), tag)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """See :meth:`Communicator.isend`; ``dst`` is a global rank, ``group_dst`` a group rank."""
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
    """See :meth:`Communicator.recv`; without ``src`` and ``group_src`` it accepts any rank.

    Returns:
        The global rank of the sender.
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
    """See :meth:`Communicator.irecv`; without ``src`` and ``group_src`` it accepts any rank."""
    communicator = communicator_of(group, "irecv")
    return communicator.irecv(tensor, _source(communicator, "irecv", src, group_src), tag)


class P2POp:
    """One send or receive for :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv` of this package.
        tensor: the tensor to send or to receive into.
        peer: global rank of the peer.
        group: the group; None: the default group.
        tag: the message's tag.
        group_peer: rank of the peer in ``group``, instead of ``peer``.

    Raises:
        ArgumentError: ``op`` is another function.
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
        messages = cast(DeviceMessages, communicator.messages)
        peer, tag = messages.check_message(name, self.tensor, peer, self.tag, write=not is_send)
        return PeerMessage(messages, self.tensor, peer, tag, is_send)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Posts all operations; their order may differ between ranks. Returns the Works in this order.

    On devices, messages of the same communicator and tag run in one launch, where no message waits
    for another. A second message to, or from, the same rank runs in a second launch, and so on.

    Raises:
        ArgumentError: the list is empty or holds something other than P2POp, or an entry has a
            bad argument. Then no message between devices was sent.
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
    """Launches messages between devices; returns each message's Work under the message's key."""
    keys, in_order = list(messages), list(messages.values())
    works: dict[int, Work] = {}
    for launch in launches_of(in_order):
        work = launch_batch([in_order[index] for index in launch])
        for index in launch:
            message = in_order[index]
            works[keys[index]] = (
                work.of_message("isend", [], None)
                if message.is_send
                else work.of_message("irecv", [message.tensor], message.peer)
            )
    return works
