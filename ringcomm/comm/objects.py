"""Collectives of Python objects, under the names of ``torch.distributed``.

Objects travel as plain data (``object_codec.py``), and only plain data can arrive. torch pickles
them, and unpickling runs code that the sender chose. ``CommOptions(objects="pickle")`` does the
same, and every rank must ask for it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import root_of
from ringcomm.comm.groups import Group, communicator_of
from ringcomm.comm.object_codec import pack, unpack
from ringcomm.errors import (
    ArgumentError,
    CorruptedError,
    RingcommError,
    UnsupportedError,
    where,
)

__all__ = [
    "Codec",
    "Parcel",
    "all_gather_object",
    "broadcast_object_list",
    "check_list",
    "gather_object",
    "scatter_object_list",
]

# A rank whose object cannot be sent tells its peers a negative size instead. Every rank then
# receives the reason and raises, too.

PICKLE_MAGIC = b"RCK1"
LONGEST_REFUSAL = 2000


class Parcel:
    """The bytes of an object, and a tensor over them that needs no numpy.

    With a ``refusal`` the bytes are the text that says why the object cannot be sent.
    """

    __slots__ = ("raw", "refusal", "tensor")

    def __init__(self, raw: bytearray, refusal: RingcommError | None = None) -> None:
        self.raw = raw
        self.refusal = refusal
        self.tensor = (
            torch.frombuffer(raw, dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )

    @property
    def told_size(self) -> int:
        """The size that the other ranks are told; negative for a refusal."""
        return -len(self.raw) if self.refusal else len(self.raw)


NOTHING = Parcel(bytearray())


def check_list(place: str, name: str, target: Any, count: int, each: str = "one per rank") -> None:
    """Checks that ``target`` is a list of ``count`` entries."""
    if not isinstance(target, list) or len(target) != count:
        raise ArgumentError(
            f"{place}: {name}: expected a list of {count} entries, {each}, got "
            f"{len(target) if isinstance(target, list) else type(target).__name__}"
        )


class Codec:
    """The conversion and exchange of one call's objects.

    ``where`` names the call and the rank in errors.
    """

    def __init__(self, communicator: Communicator, operation: str) -> None:
        self.where = where(operation, communicator.rank, communicator.world_size)
        communicator.admit(operation, ())  # the tensors that hold the bytes are made before a call
        self._communicator = communicator
        self._pickles = communicator.options.objects == "pickle"
        self._largest = communicator.options.largest_object_bytes

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Makes faults of the collectives that move the objects name the call of the user."""
        try:
            yield
        except RingcommError as error:
            error.args = (f"{self.where}: {error}",)
            raise

    def pack(self, obj: Any) -> Parcel:
        """Returns the object as bytes, or the refusal that every rank is to hear of."""
        try:
            raw = self._pickled(obj) if self._pickles else pack(obj, self.where)
            if len(raw) > self._largest:
                raise UnsupportedError(
                    f"{self.where}: expected an object of at most {self._largest} bytes, got one "
                    f"of {len(raw)}. Raise CommOptions.largest_object_bytes on all ranks, or send "
                    "tensors"
                )
        except RingcommError as error:
            told = str(error).encode("utf-8", "replace")[:LONGEST_REFUSAL]
            return Parcel(bytearray(told), error)
        return Parcel(raw)

    def _pickled(self, obj: Any) -> bytearray:
        try:
            return bytearray(PICKLE_MAGIC + pickle.dumps(obj))
        except Exception as error:  # whatever the object's own methods raise
            raise UnsupportedError(
                f"{self.where}: a {type(obj).__qualname__} cannot be pickled: "
                f"{type(error).__name__}: {error}"
            ) from error

    def unpack(self, parcel: Parcel, sender: int) -> Any:
        raw = memoryview(parcel.raw)
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

    def check_size(self, told_size: int, sender: int) -> None:
        if not -LONGEST_REFUSAL <= told_size <= self._largest or not told_size:
            raise CorruptedError(
                f"{self.where}: rank {sender} announced an object of {told_size} bytes; expected "
                f"1 to {self._largest}. Give all ranks the same CommOptions.largest_object_bytes"
            )

    def room(self, size_bytes: int, sender: int) -> Parcel:
        try:
            return Parcel(bytearray(size_bytes))
        except MemoryError:
            error = RingcommError(
                f"{self.where}: no memory for the object of {size_bytes} bytes that rank {sender} "
                "announced. Send less at a time, or lower CommOptions.largest_object_bytes"
            )
        # The other ranks go on to exchange objects, and must not wait for this one.
        self._communicator.abort(str(error))
        raise error

    def sizes_of_all(self, parcel: Parcel) -> list[int]:
        """Returns the size of each rank's parcel; raises on all ranks when one has a refusal."""
        communicator = self._communicator
        told = torch.empty(communicator.world_size, dtype=torch.int64, device="cpu")
        mine = torch.tensor([parcel.told_size], dtype=torch.int64, device="cpu")
        with self.moving():
            communicator.all_gather_into_tensor(told, mine)
        sizes: list[int] = told.tolist()
        for rank, size in enumerate(sizes):
            self.check_size(size, rank)
        if min(sizes) < 0:
            rooms = [self.room(max(0, -size), rank) for rank, size in enumerate(sizes)]
            sent = parcel if parcel.refusal else NOTHING
            with self.moving():
                communicator.all_gather([room.tensor for room in rooms], sent.tensor)
            first = next(rank for rank, size in enumerate(sizes) if size < 0)
            self._refuse(parcel, rooms[first], first)
        return sizes

    def sizes_of_root(self, parcels: list[Parcel], count: int, root: int) -> list[int]:
        """Returns the sizes of ``root``'s ``count`` parcels; raises on all ranks at a refusal."""
        refused = next((each for each in parcels if each.refusal), None)
        told = [refused.told_size] * count if refused else [each.told_size for each in parcels]
        sizes = torch.tensor(told or [0] * count, dtype=torch.int64, device="cpu")
        with self.moving():
            self._communicator.broadcast(sizes, root)
        found: list[int] = sizes.tolist()
        for size in found:
            self.check_size(size, root)
        if min(found) < 0:
            room = refused or self.room(-min(found), root)
            with self.moving():
                self._communicator.broadcast(room.tensor, root)
            self._refuse(refused or NOTHING, room, root)
        return found

    def _refuse(self, mine: Parcel, first: Parcel, rank: int) -> None:
        if mine.refusal:
            raise mine.refusal
        error = UnsupportedError(
            f"{self.where}: rank {rank} has an object that cannot travel, so no rank's did. It "
            f"says: {first.raw.decode('utf-8', 'replace')}"
        )
        error.repeats = True
        raise error

    def exchange(self, sent: list[Parcel], sizes: list[int]) -> list[Parcel]:
        """Sends ``sent[r]`` to rank r, and receives a parcel of ``sizes[r]`` bytes from rank r."""
        rooms = [self.room(size, rank) for rank, size in enumerate(sizes)]
        with self.moving():
            self._communicator.all_to_all(
                [room.tensor for room in rooms], [parcel.tensor for parcel in sent]
            )
        return rooms


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
    # An exchange instead of a gather, since the objects differ in size.
    sent = _to_one(communicator, root, parcel)
    arriving = [size if is_root and rank != root else 0 for rank, size in enumerate(sizes)]
    rooms = codec.exchange(sent, arriving)
    if object_gather_list is not None and is_root:
        rooms[root] = parcel
        object_gather_list[:] = [codec.unpack(room, rank) for rank, room in enumerate(rooms)]


def _to_one(communicator: Communicator, root: int, parcel: Parcel) -> list[Parcel]:
    """Returns the parcels to send by rank: ``parcel`` to ``root``, unless that is this rank."""
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
    # An exchange instead of a scatter, since the objects differ in size.
    mine = [0] * communicator.world_size
    sent = [each if rank != root else NOTHING for rank, each in enumerate(packed)]
    if not is_root:
        mine[root] = sizes[communicator.rank]
        sent = [NOTHING] * communicator.world_size
    rooms = codec.exchange(sent, mine)
    scatter_object_output_list[0] = codec.unpack(packed[root] if is_root else rooms[root], root)
