"""How the objects of one call become bytes, and bytes objects; and what is said when they cannot.

A rank whose object cannot travel tells a size below zero instead of one, so that every rank knows
of it, hears why, and raises together with it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.plain_objects import pack, unpack
from ringcomm.errors import (
    ArgumentError,
    CorruptedError,
    RingcommError,
    UnsupportedError,
    where,
)

__all__ = ["Codec", "Parcel", "check_list"]

PICKLE_MAGIC = b"RCK1"
LONGEST_REFUSAL = 2000


class Parcel:
    """Bytes and a tensor over them; they understand each other without numpy.

    With a ``refusal`` the bytes are no object, but say why there is none.
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
        """What the other ranks are told."""
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
    """What one call does with objects; ``where`` names the call and the rank in errors."""

    def __init__(self, communicator: Communicator, operation: str) -> None:
        self.where = where(operation, communicator.rank, communicator.world_size)
        self._communicator = communicator
        self._pickles = communicator.options.objects == "pickle"
        self._largest = communicator.options.largest_object_bytes

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Around the calls that move the objects: their faults name the call that was made."""
        try:
            yield
        except RingcommError as error:
            error.args = (f"{self.where}: {error}",)
            raise

    def pack(self, obj: Any) -> Parcel:
        """The object as bytes, or the refusal that every rank is to hear of."""
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
        # The others go on to move objects, and must not wait for this rank.
        self._communicator.abort(str(error))
        raise error

    def sizes_of_all(self, parcel: Parcel) -> list[int]:
        """What each rank tells of its parcel; raises on all ranks when one has a refusal."""
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
        """As :meth:`sizes_of_all`, of ``count`` parcels that ``root`` alone has."""
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
        """Sends ``sent[r]`` to rank r; what comes from rank r has ``sizes[r]`` bytes."""
        rooms = [self.room(size, rank) for rank, size in enumerate(sizes)]
        with self.moving():
            self._communicator.all_to_all(
                [room.tensor for room in rooms], [parcel.tensor for parcel in sent]
            )
        return rooms
