"""Collectives of Python objects, under the names of ``torch.distributed``.

Objects travel as plain data (``plain_objects.py``), from which nothing but plain data can come.
torch pickles them, and unpickling runs code that the sender chose; so does
``CommOptions(objects="pickle")``, which every rank must ask for.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import root_of
from ringcomm.comm.groups import Group, communicator_of
from ringcomm.comm.plain_objects import pack, unpack
from ringcomm.errors import ArgumentError, CorruptedError, UnsupportedError, where

PICKLE_MAGIC = b"RCK1"
# A size that a peer names is not memory that it has: beyond this it is not believed.
LARGEST_OBJECT_BYTES = 1 << 36


class _Buffer:
    """Bytes and a tensor over them; they understand each other without numpy."""

    __slots__ = ("raw", "tensor")

    def __init__(self, raw: bytearray) -> None:
        self.raw = raw
        self.tensor = torch.frombuffer(raw, dtype=torch.uint8)


class _Codec:
    """How the objects of one call become bytes, and bytes objects."""

    def __init__(self, communicator: Communicator, operation: str) -> None:
        self.where = where(operation, communicator.rank, communicator.world_size)
        self._pickles = communicator.options.objects == "pickle"

    def pack(self, obj: Any) -> _Buffer:
        if self._pickles:
            return _Buffer(bytearray(PICKLE_MAGIC + pickle.dumps(obj)))
        return _Buffer(pack(obj, self.where))

    def unpack(self, room: _Buffer, size_bytes: int, sender: int) -> Any:
        raw = memoryview(room.raw)[:size_bytes]
        pickled = bytes(raw[: len(PICKLE_MAGIC)]) == PICKLE_MAGIC
        if pickled != self._pickles:
            came, wanted = ("a pickle", "plain data")[:: 1 if pickled else -1]
            raise UnsupportedError(
                f"{self.where}: expected {wanted}, got {came} from rank {sender}. Give all ranks "
                "the same CommOptions.objects"
            )
        if pickled:
            return pickle.loads(raw[len(PICKLE_MAGIC) :])
        return unpack(raw, self.where, sender)

    def check_size(self, size_bytes: int, sender: int) -> None:
        if not 0 < size_bytes <= LARGEST_OBJECT_BYTES:
            raise CorruptedError(
                f"{self.where}: rank {sender} announced an object of {size_bytes} bytes; expected "
                f"1 to {LARGEST_OBJECT_BYTES}"
            )

    def room(self, size_bytes: int, sender: int) -> _Buffer:
        self.check_size(size_bytes, sender)
        return _Buffer(bytearray(size_bytes))


def _sizes(communicator: Communicator, packed: _Buffer) -> list[int]:
    sizes = torch.empty(communicator.world_size, dtype=torch.int64)
    communicator.all_gather_into_tensor(sizes, torch.tensor([len(packed.raw)], dtype=torch.int64))
    found: list[int] = sizes.tolist()
    return found


def _padded(packed: _Buffer, size_bytes: int) -> torch.Tensor:
    return _Buffer(packed.raw.ljust(size_bytes, b"\0")).tensor


def _fill(operation: str, name: str, target: Any, values: list[Any]) -> None:
    if not isinstance(target, list) or len(target) != len(values):
        raise ArgumentError(
            f"{operation}: {name}: expected a list of {len(values)} entries, got "
            f"{len(target) if isinstance(target, list) else type(target).__name__}"
        )
    target[:] = values


def _check_list(communicator: Communicator, operation: str, name: str, target: Any) -> None:
    if not isinstance(target, list) or len(target) != communicator.world_size:
        raise ArgumentError(
            f"{operation} on rank {communicator.rank} of {communicator.world_size}: {name}: "
            f"expected a list of {communicator.world_size} entries, one per rank, got "
            f"{len(target) if isinstance(target, list) else type(target).__name__}"
        )


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fills ``object_list[r]`` with the ``obj`` of rank r, on every rank.

    Raises:
        ArgumentError: ``object_list`` is not a list of world_size entries.
        UnsupportedError: ``obj`` is not plain data; see ``CommOptions.objects``.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "all_gather_object")
    _check_list(communicator, "all_gather_object", "object_list", object_list)
    codec = _Codec(communicator, "all_gather_object")
    packed = codec.pack(obj)
    rooms = [codec.room(size, rank) for rank, size in enumerate(_sizes(communicator, packed))]
    communicator.all_gather([room.tensor for room in rooms], packed.tensor)
    object_list[:] = [codec.unpack(room, len(room.raw), rank) for rank, room in enumerate(rooms)]


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
    if is_root:
        _check_list(communicator, "gather_object", "object_gather_list", object_gather_list)
    codec = _Codec(communicator, "gather_object")
    packed = codec.pack(obj)
    sizes = _sizes(communicator, packed)
    for rank, size in enumerate(sizes):
        codec.check_size(size, rank)
    rooms = [codec.room(max(sizes), rank) for rank in range(len(sizes))] if is_root else []
    mine = _padded(packed, max(sizes))
    communicator.gather(mine, [room.tensor for room in rooms], root)
    if object_gather_list is not None and is_root:
        object_gather_list[:] = [
            codec.unpack(room, size, rank)
            for rank, (room, size) in enumerate(zip(rooms, sizes, strict=True))
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
    codec = _Codec(communicator, "broadcast_object_list")
    packed = codec.pack(object_list) if is_root else None
    size = torch.tensor([len(packed.raw) if packed else 0], dtype=torch.int64)
    communicator.broadcast(size, root)
    room = packed or codec.room(int(size.item()), root)
    communicator.broadcast(room.tensor, root)
    if not is_root:
        values = codec.unpack(room, len(room.raw), root)
        _fill("broadcast_object_list", "object_list", object_list, values)


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
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"scatter_object_list on rank {communicator.rank} of {communicator.world_size}: "
            "scatter_object_output_list: expected a list of at least one entry"
        )
    codec = _Codec(communicator, "scatter_object_list")
    packed: list[_Buffer] = []
    if is_root:
        name = "scatter_object_input_list"
        _check_list(communicator, "scatter_object_list", name, scatter_object_input_list)
        packed = [codec.pack(obj) for obj in scatter_object_input_list or []]
    sizes = torch.tensor([len(each.raw) for each in packed] or [0] * communicator.world_size)
    communicator.broadcast(sizes, root)
    for size in sizes.tolist():
        codec.check_size(size, root)
    longest = int(sizes.max().item())
    room = codec.room(longest, root)
    padded = [_padded(each, longest) for each in packed]
    communicator.scatter(room.tensor, padded, root)
    mine = int(sizes[communicator.rank].item())
    scatter_object_output_list[0] = codec.unpack(room, mine, root)
