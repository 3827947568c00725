"""``checkpoint.json``: what a checkpoint holds and where, checked before anything is believed.

``docs/checkpoint.md`` has the format.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from ringcomm.errors import CheckpointError
from ringcomm.json_reader import decode, encode, exactly, shown, text_of
from ringcomm.zero.checkpoint.tensor_file import DTYPE_OF_NAME, MOST_DIMS, SavedFile

# Pieces of a tensor: where one lies, what two share, and whether all of them fill it.

Box = tuple[tuple[int, int], ...]  # [begin, end) by dimension


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where its elements are.

    Attributes:
        offsets, sizes: of the box in the tensor, by dimension; sizes are positive.
        file, key: where it is saved.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @property
    def elems(self) -> int:
        return prod(self.sizes)

    def shared(self, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
        """Returns the intersection with another box, in the tensor's coordinates, or None."""
        box = []
        for mine, size, theirs, other in zip(self.offsets, self.sizes, offsets, sizes, strict=True):
            begin, end = max(mine, theirs), min(mine + size, theirs + other)
            if begin >= end:
                return None
            box.append((begin, end))
        return tuple(box)


def flat_boxes(
    size: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [begin, end) of a flattened tensor, as the fewest boxes in order.

    Yields:
        offsets and sizes, by dimension. A box's elements follow each other in the flat tensor.
    """
    if begin == end:
        return
    if not size:
        yield (), ()
        return
    row_elems = prod(size[1:])
    row, last = begin // row_elems, end // row_elems
    if begin % row_elems or row == last:
        stop = min(end, (row + 1) * row_elems)
        yield from _in_row(size, row, begin, stop)
        begin, row = stop, row + 1
    if row < last:
        yield (row, *(0 for _ in size[1:])), (last - row, *size[1:])
        begin = last * row_elems
    if begin < end:
        yield from _in_row(size, last, begin, end)


def _in_row(
    size: Sequence[int], row: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * prod(size[1:])
    for offsets, sizes in flat_boxes(size[1:], begin - before, end - before):
        yield (row, *offsets), (1, *sizes)


def check_fill(size: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Raises ValueError unless each element of a tensor of ``size`` is in one piece."""
    for piece in pieces:
        _check_inside(size, piece)
    if len(pieces) > 1 and not size:
        raise ValueError("two pieces are the whole of a tensor of no dimensions")
    if len(size) == 1:
        _check_apart(sorted(pieces, key=lambda piece: piece.offsets))
    held = sum(piece.elems for piece in pieces)
    if held < prod(size):
        raise ValueError(f"the pieces hold {held} of its {prod(size)} elements")
    if held > prod(size) or not _cover(size, pieces):
        raise ValueError(f"two pieces overlap, of {len(pieces)}")


def _cover(size: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Tells whether boxes that have as many elements as a tensor cover it; in O(n) time.

    A box's indicator function is determined by its corners, with signs. So boxes cover the tensor
    without overlap exactly if the sum of products over the dimensions of ``g(end) - g(begin)`` is
    the tensor's own for all functions g of the coordinates. A random g into the integers modulo a
    prime near 2^127 tells a difference, but with a probability below 2^-120.
    """
    if len(size) == 1 or len(pieces) < 2:
        return True  # disjoint, or one

    def measure(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        found = 1
        for dim, (begin, extent) in enumerate(zip(offsets, sizes, strict=True)):
            found = found * (_random(dim, begin + extent) - _random(dim, begin)) % _PRIME
        return found

    total = sum(measure(piece.offsets, piece.sizes) for piece in pieces)
    return total % _PRIME == measure((0,) * len(size), size)


_PRIME = 2**127 - 1
_SECRET = secrets.token_bytes(16)


def _random(dim: int, coordinate: int) -> int:
    """Returns a number of 128 bits that nobody outside of this process can foresee."""
    text = f"{dim},{coordinate}".encode()
    return int.from_bytes(hashlib.blake2b(text, key=_SECRET, digest_size=16).digest(), "little")


def _check_inside(size: Sequence[int], piece: Piece) -> None:
    inside = len(piece.offsets) == len(piece.sizes) == len(size) and all(
        0 <= offset < offset + extent <= whole
        for offset, extent, whole in zip(piece.offsets, piece.sizes, size, strict=True)
    )
    if not inside:
        raise ValueError(
            f"a piece of sizes {piece.sizes} at {piece.offsets} does not lie in {tuple(size)}"
        )


def _check_apart(pieces: Sequence[Piece]) -> None:
    """Raises ValueError if pieces of a flat tensor, in order, overlap."""
    for one, other in pairwise(pieces):
        if one.offsets[0] + one.sizes[0] > other.offsets[0]:
            raise ValueError(
                f"two pieces overlap, at {one.offsets} (in {one.file}) and at {other.offsets} (in "
                f"{other.file})"
            )


MANIFEST_NAME = "checkpoint.json"
FORMAT = "ringcomm checkpoint"
VERSION = 1
# No model needs more; a sparse file could claim any size.
MAX_MANIFEST_BYTES = 1 << 30
_MAX_EXTENT = 1 << 62
# Nothing else is opened, so that no manifest leads out of its folder.
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as it was cut.

    Attributes:
        dtype: its name, as in ``DTYPE_OF_NAME``.
        size: of what the pieces fill; of flat shards [elems].
        shape: of the tensor outside of the checkpoint, with as many elements.
        pieces: each element is in one of them.
    """

    dtype: str
    size: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def elems(self) -> int:
        return prod(self.size)

    def check(self, files: Mapping[str, SavedFile]) -> None:
        """Raises ValueError unless it is whole, and lies in known files."""
        for sizes in (self.size, self.shape):
            # The product of the others is what strides are made of.
            if min(sizes, default=0) < 0 or prod(max(1, each) for each in sizes) > _MAX_EXTENT:
                raise ValueError(f"size {self.size} of shape {self.shape}")
        if prod(self.shape) != self.elems:
            raise ValueError(f"shape {self.shape} has not the {self.elems} elements of its size")
        if self.dtype not in DTYPE_OF_NAME:
            raise ValueError(f"dtype {shown(self.dtype)} is not known")
        check_fill(self.size, self.pieces)
        for piece in self.pieces:
            if piece.file not in files:
                raise ValueError(f"file {shown(piece.file)} is not of this checkpoint")


@dataclass(frozen=True)
class RankRecord:
    """The record of what one rank saved for itself: plain data, and whole tensors."""

    data: Any = None
    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the elements.

    Attributes:
        tensors: by name.
        files: by name, "rank-00000.safetensors" and so on.
        ranks: by rank of the world that saved.
        data: the user's, as ``plain_json`` takes it.
        values: what is no tensor of a state saved through torch.distributed.checkpoint, by name.
    """

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]
    ranks: tuple[RankRecord, ...]
    data: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def check(self) -> None:
        """Raises ValueError unless all tensors are whole, and the files have room for them."""
        if not self.ranks:
            raise ValueError("no rank saved it")
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is no file of a checkpoint")
        saved = [
            ("", self.tensors),
            *((f"rank {r}: ", e.tensors) for r, e in enumerate(self.ranks)),
        ]
        room = {name: file.size_bytes for name, file in self.files.items()}
        for whose, tensors in saved:
            for name, tensor in tensors.items():
                try:
                    tensor.check(self.files)
                except ValueError as error:
                    raise ValueError(f"{whose}{shown(name)}: {error}") from None
                for piece in tensor.pieces:
                    room[piece.file] -= piece.elems * DTYPE_OF_NAME[tensor.dtype].itemsize
        for name, left in room.items():
            if left < 0:
                raise ValueError(f"{name} is too small for what is said to be in it")

    def to_text(self) -> str:
        """One line of JSON.

        Raises:
            UnsupportedError: the data are not plain.
        """
        body = {
            "tensors": {name: _describe(tensor) for name, tensor in self.tensors.items()},
            "files": {
                name: {"bytes": file.size_bytes, "crc32": file.crc32}
                for name, file in self.files.items()
            },
            "ranks": [
                {
                    "data": encode(each.data, f"data of rank {rank}"),
                    "tensors": {name: _describe(t) for name, t in each.tensors.items()},
                }
                for rank, each in enumerate(self.ranks)
            ],
            "data": encode(self.data, "data"),
            "values": {name: encode(value, name) for name, value in self.values.items()},
        }
        head = {"format": FORMAT, "version": VERSION, "crc32": _crc32(body)}
        return text_of({**head, **body}) + "\n"

    @classmethod
    def from_text(cls, text: str, where: str) -> Manifest:
        """Undoes :meth:`to_text`, and checks what it says.

        Raises:
            CheckpointError: it is damaged, of another version, or says what cannot be.
        """
        try:
            body = json.loads(text)
            _check_head(body)
            manifest = cls(
                {name: _tensor(each) for name, each in _dict(body["tensors"]).items()},
                {name: _file(each) for name, each in _dict(body["files"]).items()},
                tuple(_rank(each) for each in _list(body["ranks"])),
                decode(body["data"]),
                {name: decode(each) for name, each in _dict(body["values"]).items()},
            )
            manifest.check()
        except KeyError as error:
            raise CheckpointError(f"{where}: has no entry {error}: it is damaged") from error
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where}: cannot be used: {error}") from error
        return manifest


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def piece_key(name: str, offsets: Sequence[int]) -> str:
    """The key in a rank's file of the piece of tensor ``name`` at ``offsets``."""
    return f"{name}@{','.join(map(str, offsets))}"


def rank_key(name: str) -> str:
    """The key in a rank's file of a tensor of its own; no piece has it."""
    return f"{name}@rank"


def _describe(tensor: SavedTensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "size": tensor.size,
        "shape": tensor.shape,
        "pieces": [
            {
                "offsets": piece.offsets,
                "sizes": piece.sizes,
                "file": piece.file,
                "key": piece.key,
            }
            for piece in tensor.pieces
        ],
    }


def _crc32(body: Mapping[str, Any]) -> str:
    """Returns the CRC of the data, not of their order and layout in the file."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _check_head(body: Any) -> None:
    if _dict(body).pop("format", None) != FORMAT:
        raise ValueError(f"it is no manifest of a {FORMAT}")
    version, crc32 = body.pop("version", None), body.pop("crc32", None)
    if version != VERSION:
        raise ValueError(
            f"expected version {VERSION}, got {shown(version)}: read it with its ringcomm"
        )
    actual = _crc32(body)
    if crc32 != actual:
        raise ValueError(f"expected checksum {shown(crc32)}, got {actual}: it is damaged")


def _dict(value: Any) -> dict[str, Any]:
    return exactly(value, dict)


def _list(value: Any) -> list[Any]:
    return exactly(value, list)


def _ints(value: Any) -> tuple[int, ...]:
    found = tuple(exactly(each, int) for each in _list(value))
    if len(found) > MOST_DIMS:
        raise ValueError(f"expected at most {MOST_DIMS} dimensions, got {len(found)}")
    return found


def _tensor(described: Any) -> SavedTensor:
    pieces = [
        Piece(
            _ints(each["offsets"]),
            _ints(each["sizes"]),
            exactly(each["file"], str),
            exactly(each["key"], str),
        )
        for each in map(_dict, _list(_dict(described)["pieces"]))
    ]
    dtype = exactly(described["dtype"], str)
    return SavedTensor(dtype, _ints(described["size"]), _ints(described["shape"]), tuple(pieces))


def _file(described: Any) -> SavedFile:
    fields = _dict(described)
    return SavedFile(exactly(fields["bytes"], int), exactly(fields["crc32"], str))


def _rank(described: Any) -> RankRecord:
    tensors = _dict(_dict(described)["tensors"])
    return RankRecord(
        decode(described["data"]), {name: _tensor(each) for name, each in tensors.items()}
    )
