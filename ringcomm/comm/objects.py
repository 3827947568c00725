"""Collectives of Python objects, under the names of ``torch.distributed``.

Objects travel as plain data (``plain_objects.py``), from which nothing but plain data can come.
torch pickles them, and unpickling runs code that the sender chose; so does
``CommOptions(objects="pickle")``, which every rank must ask for.
"""

from __future__ import annotations

from typing import Any

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import root_of
from ringcomm.comm.groups import Group, communicator_of
from ringcomm.comm.object_parcels import NOTHING, Codec, Parcel, check_list
from ringcomm.errors import ArgumentError, CorruptedError


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fills ``object_list[r]`` with the ``obj`` of rank r, on every rank.

    Raises:
        ArgumentError: ``object_list`` is not a list of world_size entries.
        UnsupportedError: ``obj`` is not plain data; see ``CommOptions.objects``.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "all_gather_object")
    codec = Codec(communicator, "all_gather_object")
    check_list(codec.where, "object_list", object_list, communicator.world_size)
    parcel = codec.pack(obj)
    sizes = codec.sizes_of_all(parcel)
    rooms = [
        parcel if rank == communicator.rank else codec.room(size, rank)
        for rank, size in enumerate(sizes)
    ]
    with codec.moving():
        communicator.all_gather([room.tensor for room in rooms], parcel.tensor)
    object_list[:] = [codec.unpack(room, rank) for rank, room in enumerate(rooms)]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Fills ``object_gather_list[r]`` with the ``obj`` of rank r, on ``dst`` (default 0) only.

    Raises:
        ArgumentError: on ``dst``, ``object_gather_list`` is not a list of world_size entries.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "gather_object")
    if dst is None and group_dst is None:
        dst = 0
    root = root_of(communicator, "gather_object", "dst", dst, group_dst)
    is_root = communicator.rank == root
    codec = Codec(communicator, "gather_object")
    if is_root:
        check_list(codec.where, "object_gather_list", object_gather_list, communicator.world_size)
    parcel = codec.pack(obj)
    sizes = codec.sizes_of_all(parcel)
    # An exchange, since each rank's object has a size of its own.
    sent = _to_one(communicator, root, parcel)
    arriving = [size if is_root and rank != root else 0 for rank, size in enumerate(sizes)]
    rooms = codec.exchange(sent, arriving)
    if object_gather_list is not None and is_root:
        rooms[root] = parcel
        object_gather_list[:] = [codec.unpack(room, rank) for rank, room in enumerate(rooms)]


def _to_one(communicator: Communicator, root: int, parcel: Parcel) -> list[Parcel]:
    """What each rank is sent: ``parcel`` to ``root``, unless that is this rank."""
    return [
        parcel if rank == root != communicator.rank else NOTHING
        for rank in range(communicator.world_size)
    ]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Replaces the entries of ``object_list`` by those of ``src`` (default 0).

    Args:
        object_list: on all ranks a list of the same length.
        src: global rank that has the objects.
        group: the group; None means the default one.
        device: None or a CPU device.
        group_src: rank in ``group``, instead of ``src``.

    Raises:
        ArgumentError: the list's length differs from that on ``src``.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "broadcast_object_list")
    if src is None and group_src is None:
        src = 0
    root = root_of(communicator, "broadcast_object_list", "src", src, group_src)
    is_root = communicator.rank == root
    codec = Codec(communicator, "broadcast_object_list")
    if is_root and not isinstance(object_list, list):
        raise ArgumentError(
            f"{codec.where}: object_list: expected a list, got {type(object_list).__name__}"
        )
    packed = [codec.pack(object_list)] if is_root else []
    (size,) = codec.sizes_of_root(packed, 1, root)
    room = packed[0] if is_root else codec.room(size, root)
    with codec.moving():
        communicator.broadcast(room.tensor, root)
    if not is_root:
        values = codec.unpack(room, root)
        if not isinstance(values, list):
            raise CorruptedError(
                f"{codec.where}: expected a list from rank {root}, got {type(values).__name__}. "
                "Do all ranks run the same ringcomm?"
            )
        check_list(codec.where, "object_list", object_list, len(values), f"as on rank {root}")
        object_list[:] = values


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Puts entry r of ``scatter_object_input_list`` of ``src`` (default 0) into rank r's output.

    Args:
        scatter_object_output_list: a non-empty list; its first entry is replaced.
        scatter_object_input_list: on ``src`` a list of world_size objects; elsewhere ignored.
        src: global rank that has the objects.
        group: the group; None means the default one.
        group_src: rank in ``group``, instead of ``src``.

    Raises:
        ArgumentError: a list has the wrong length.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "scatter_object_list")
    if src is None and group_src is None:
        src = 0
    root = root_of(communicator, "scatter_object_list", "src", src, group_src)
    is_root = communicator.rank == root
    codec = Codec(communicator, "scatter_object_list")
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"{codec.where}: scatter_object_output_list: expected a list of at least one entry"
        )
    packed: list[Parcel] = []
    if is_root:
        check_list(
            codec.where,
            "scatter_object_input_list",
            scatter_object_input_list,
            communicator.world_size,
        )
        packed = [codec.pack(obj) for obj in scatter_object_input_list or []]
    sizes = codec.sizes_of_root(packed, communicator.world_size, root)
    # An exchange, since each rank's object has a size of its own.
    mine = [0] * communicator.world_size
    sent = [each if rank != root else NOTHING for rank, each in enumerate(packed)]
    if not is_root:
        mine[root] = sizes[communicator.rank]
        sent = [NOTHING] * communicator.world_size
    rooms = codec.exchange(sent, mine)
    scatter_object_output_list[0] = codec.unpack(packed[root] if is_root else rooms[root], root)
