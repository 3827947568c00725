# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: tensors, the manifest, and the rename that makes them visible.

A file has 8 bytes of header length, a JSON header and the tensors' bytes, little-endian
(https://huggingface.co/docs/safetensors). The safetensors library's writer first copies all tensors
into bytes; this writer holds at most one slice.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from ringcomm import _native
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError, UnsupportedError
from ringcomm.json_reader import decode, encode, exactly, shown, text_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


Tensor = torch.Tensor

# Each dtype's name in the manifest, and its code in a safetensors header.
DTYPES: dict[torch.dtype, tuple[str, str]] = {
    torch.float64: ("float64", "F64"),
    torch.float32: ("float32", "F32"),
    torch.float16: ("float16", "F16"),
    torch.bfloat16: ("bfloat16", "BF16"),
    torch.float8_e4m3fn: ("float8_e4m3fn", "F8_E4M3"),
    torch.float8_e5m2: ("float8_e5m2", "F8_E5M2"),
    torch.int64: ("int64", "I64"),
    torch.int32: ("int32", "I32"),
    torch.int16: ("int16", "I16"),
    torch.int8: ("int8", "I8"),
    torch.uint64: ("uint64", "U64"),
    torch.uint32: ("uint32", "U32"),
    torch.uint16: ("uint16", "U16"),
    torch.uint8: ("uint8", "U8"),
    torch.bool: ("bool", "BOOL"),
}
DTYPE_OF_NAME = {name: dtype for dtype, (name, _) in DTYPES.items()}

# The most dimensions that NumPy and torch's operators accept.
MOST_DIMS = 64
# So small that a slice is still in the cache when it is written, after its checksum is computed.
SLICE_BYTES = 1 << 20
# The size of slices when only a file's checksum is computed: large enough for the rank's threads to
# share the work (``worker_pool.h``).
_SUMMED_BYTES = 8 << 20
_HEADER_ALIGN = 8


@dataclass(frozen=True)
class SavedFile:
    """The expected size of a file, and its CRC-32 (ISO-HDLC, as zlib) in 8 hexadecimal digits."""

    size_bytes: int
    crc32: str


class Stored(Protocol):
    """A tensor as described by a file's header."""

    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def size_bytes(self) -> int: ...


T = TypeVar("T", bound=Stored)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written.

    Attributes:
        key: its key in the file.
        dtype, size: its dtype and size.
        slices: yields its elements in order, as flat contiguous tensors in host memory.
    """

    key: str
    dtype: torch.dtype
    size: tuple[int, ...]
    slices: Callable[[], Iterable[Tensor]]

    @property
    def size_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Returns the name of a dtype in manifests.

    Raises:
        UnsupportedError: the file format has no such dtype.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{what}: expected a dtype of {', '.join(DTYPE_OF_NAME)}, got {dtype}: safetensors "
            "files have no other dtypes; convert it"
        )
    return DTYPES[dtype][0]


def host_slices(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the elements of a tensor on any device, with any strides, as slices in host memory."""
    flat = tensor.detach().reshape(-1)
    step = SLICE_BYTES // flat.dtype.itemsize
    for begin in range(0, flat.numel(), step):
        yield flat[begin : begin + step].cpu().contiguous()


def write_tensor_file(
    path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
) -> SavedFile:
    """Writes a new file and waits until it is on the disk.

    Args:
        path: the file to write; it must not exist.
        entries: the tensors, with different keys.
        metadata: the metadata for the header, as safetensors defines it.

    Raises:
        OSError: the file cannot be written.
        CheckpointError: an entry's slices do not have its dtype and size.
    """
    ordered = in_order(entries)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        head = header_of(ordered, metadata or {})
        _write(out, memoryview(head))
        size_bytes, crc = len(head), zlib.crc32(head)
        for entry in ordered:
            before = size_bytes
            for values in entry.slices():
                _check_dtype(path, entry, values)
                view = bytes_of(values)
                crc = _native.crc32(values.data_ptr(), len(view), crc)
                _write(out, view)
                size_bytes += len(view)
            _check_size(path, entry, size_bytes - before)
        os.fsync(out)
    finally:
        os.close(out)
    return SavedFile(size_bytes, f"{crc:08x}")


def in_order(entries: Sequence[T]) -> list[T]:
    """Returns entries in the order of a file: wider dtypes first, so that tensors are aligned."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def write_file(path: Path, content: bytes) -> None:
    """Writes a new file and waits until it is on the disk."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write(out, memoryview(content))
        os.fsync(out)
    finally:
        os.close(out)


def crc32_of(path: Path) -> str:
    """Returns the checksum of a file's bytes."""
    crc = 0
    buffer = torch.empty(_SUMMED_BYTES, dtype=torch.uint8, device="cpu")
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(bytes_of(buffer)):
            crc = _native.crc32(buffer.data_ptr(), count, crc)
    return f"{crc:08x}"


def header_of(entries: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a file, before the elements; the entries are in file order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for entry in entries:
        end = begin + entry.size_bytes
        code = DTYPES[entry.dtype][1]
        header[entry.key] = {"dtype": code, "shape": entry.size, "data_offsets": [begin, end]}
        begin = end
    text = text_of(header).encode()
    text = text.ljust(-(-len(text) // _HEADER_ALIGN) * _HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def _check_dtype(path: Path, entry: TensorEntry, values: Tensor) -> None:
    if values.dtype != entry.dtype:
        raise CheckpointError(
            f"{path.name}: {entry.key}: expected elements of {entry.dtype}, as was planned, got "
            f"{values.dtype}; tensors must not change while they are saved"
        )


def _check_size(path: Path, entry: TensorEntry, size_bytes: int) -> None:
    if size_bytes != entry.size_bytes:
        raise CheckpointError(
            f"{path.name}: {entry.key}: expected {entry.size_bytes} bytes for size {entry.size}, "
            f"as was planned, got {size_bytes}; tensors must not change while they are saved"
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a contiguous host tensor's memory; without numpy(), since NumPy may be missing."""
    size_bytes = tensor.numel() * tensor.dtype.itemsize
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")


def _write(out: int, view: memoryview) -> None:
    while view:
        view = view[os.write(out, view) :]


# ---- The manifest ``checkpoint.json``, which is checked before it is used ------------------------
# ``docs/checkpoint.md`` has the format.

# The pieces of a tensor: their positions, their intersections, and whether they fill the tensor.

Bounds = tuple[tuple[int, int], ...]  # [begin, end) by dimension


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the place of the box's elements in a file.

    Attributes:
        offsets, sizes: the box in the tensor, by dimension; sizes are positive.
        file, key: the file with the box's elements, and their key in this file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @property
    def elems(self) -> int:
        return prod(self.sizes)

    def shared(self, offsets: Sequence[int], sizes: Sequence[int]) -> Bounds | None:
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
    """Yields elements [begin, end) of a flattened tensor as the fewest boxes, in order.

    Yields:
        Offsets and sizes, by dimension. A box's elements are contiguous in the flattened tensor.
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
    """Raises ValueError unless each element of a tensor of ``size`` is in exactly one piece."""
    for piece in pieces:
        _check_inside(size, piece)
    if len(pieces) > 1 and not size:
        raise ValueError("a tensor of no dimensions has one element, but several pieces")
    if len(size) == 1:
        _check_apart(sorted(pieces, key=lambda piece: piece.offsets))
    held = sum(piece.elems for piece in pieces)
    if held < prod(size):
        raise ValueError(f"the pieces hold {held} of its {prod(size)} elements")
    if held > prod(size) or not _cover(size, pieces):
        raise ValueError(f"two pieces overlap; the tensor has {len(pieces)} pieces")


def _cover(size: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """True if boxes, which have as many elements as a tensor, cover the tensor; in O(n) time.

    The indicator function of a box is determined by its corners, with signs. So boxes cover the
    tensor without overlap exactly if, for all functions g of the coordinates, the sum over boxes of
    the products over dimensions of ``g(end) - g(begin)`` is the tensor's own product. A random g
    into the integers modulo a prime near 2^127 misses a difference with probability below 2^-120.
    """
    if len(size) == 1 or len(pieces) < 2:
        return True  # 1-D pieces were checked to be disjoint; one piece alone cannot overlap

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
    """Returns a 128-bit number that cannot be predicted outside of this process."""
    text = f"{dim},{coordinate}".encode()
    return int.from_bytes(hashlib.blake2b(text, key=_SECRET, digest_size=16).digest(), "little")


def _check_inside(size: Sequence[int], piece: Piece) -> None:
    inside = len(piece.offsets) == len(piece.sizes) == len(size) and all(
        0 <= offset < offset + extent <= whole
        for offset, extent, whole in zip(piece.offsets, piece.sizes, size, strict=True)
    )
    if not inside:
        raise ValueError(
            f"a piece of sizes {piece.sizes} at {piece.offsets} is not inside {tuple(size)}"
        )


def _check_apart(pieces: Sequence[Piece]) -> None:
    """Raises ValueError if pieces of a flat tensor, which are in order, overlap."""
    for one, other in pairwise(pieces):
        if one.offsets[0] + one.sizes[0] > other.offsets[0]:
            raise ValueError(
                f"two pieces overlap, at {one.offsets} (in {one.file}) and at {other.offsets} (in "
                f"{other.file})"
            )


MANIFEST_NAME = "checkpoint.json"
FORMAT = "ringcomm checkpoint"
VERSION = 1
# No model needs a larger manifest. Without a limit, a sparse file could claim any size.
MAX_MANIFEST_BYTES = 1 << 30
_MAX_EXTENT = 1 << 62
# Only files with such names are opened, so that a manifest cannot refer outside of its folder.
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as saved in pieces.

    Attributes:
        dtype: name of the dtype, as in ``DTYPE_OF_NAME``.
        size: size of the tensor that the pieces fill; [elems] for flat shards.
        shape: shape of the original tensor, with the same number of elements.
        pieces: the pieces; each element is in exactly one piece.
    """

    dtype: str
    size: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def elems(self) -> int:
        return prod(self.size)

    def check(self, files: Mapping[str, SavedFile]) -> None:
        """Raises ValueError unless the tensor is complete and all its files are known."""
        for sizes in (self.size, self.shape):
            # Sizes of 0 count as 1, since strides are products of the other sizes.
            if min(sizes, default=0) < 0 or prod(max(1, each) for each in sizes) > _MAX_EXTENT:
                raise ValueError(f"size {self.size} of shape {self.shape}")
        if prod(self.shape) != self.elems:
            raise ValueError(
                f"shape {self.shape}: expected {self.elems} elements, as in size {self.size}"
            )
        if self.dtype not in DTYPE_OF_NAME:
            raise ValueError(f"dtype {shown(self.dtype)} is unknown")
        check_fill(self.size, self.pieces)
        for piece in self.pieces:
            if piece.file not in files:
                raise ValueError(f"file {shown(piece.file)} is not part of this checkpoint")


@dataclass(frozen=True)
class SavedRank:
    """The data that one rank saved as its own: JSON data, and whole tensors."""

    data: Any = None
    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """All data of a checkpoint except the elements.

    Attributes:
        tensors: the tensors, by name.
        files: the files, by name: "rank-00000.safetensors" and so on.
        ranks: the ranks' own data, by rank of the world that saved.
        data: the user's data, as accepted by ``json_reader.encode``.
        values: by name, values of torch.distributed.checkpoint's states that are not tensors.
    """

    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]
    ranks: tuple[SavedRank, ...]
    data: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def check(self) -> None:
        """Raises ValueError unless all tensors are complete and fit into the files."""
        if not self.ranks:
            raise ValueError("no rank saved it")
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is not a file name of a checkpoint")
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
                raise ValueError(f"{name} is too small for its tensors")

    def to_text(self) -> str:
        """Returns the manifest as one line of JSON.

        Raises:
            UnsupportedError: the data cannot be JSON.
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
        """Reads the output of :meth:`to_text`, and checks the manifest.

        Raises:
            CheckpointError: the text is damaged, has another version, or is invalid.
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
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def piece_key(name: str, offsets: Sequence[int]) -> str:
    """Returns the key, in a rank's file, of the piece of tensor ``name`` at ``offsets``."""
    return f"{name}@{','.join(map(str, offsets))}"


def rank_key(name: str) -> str:
    """Returns the key, in a rank's file, of a rank's own tensor; no piece has such a key."""
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
    """Returns the CRC-32 of JSON data, which does not depend on key order and white space."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _check_head(body: Any) -> None:
    if _dict(body).pop("format", None) != FORMAT:
        raise ValueError(f"it is not a manifest of a {FORMAT}")
    version, crc32 = body.pop("version", None), body.pop("crc32", None)
    if version != VERSION:
        raise ValueError(
            f"expected version {VERSION}, got {shown(version)}: read it with the ringcomm release "
            "that wrote it"
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


def _rank(described: Any) -> SavedRank:
    tensors = _dict(_dict(described)["tensors"])
    return SavedRank(
        decode(described["data"]), {name: _tensor(each) for name, each in tensors.items()}
    )


# ---- Folders that appear whole or not at all ----------------------------------------------------
# A folder is written under a hidden name next to its final name. Every file and then the folder
# itself is synced, and one rename gives the folder its final name. POSIX rename() is atomic for all
# observers. After a machine crash, the file system determines what is left of a rename, as of all
# unsynced data: Pillai et al., "All File Systems Are Not Created Equal" (OSDI'14).

# Hidden names: a "partial" folder was never renamed, a "removed" folder is being removed.
_PARTIAL, _REMOVED = ".partial-", ".removed-"
_NONCE_BYTES = 8


def sync_folder(folder: Path) -> None:
    """Waits until the names of a folder's files are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes a folder and all missing parents, and syncs their names."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        # Another process may make the folder too: pipeline stages save below one folder.
        if not folder.is_dir():
            raise
    sync_folder(folder.parent)


def begin(target: Path) -> Path:
    """Returns the hidden folder, new and empty, that will become ``target``.

    Raises:
        CheckpointError: ``target`` exists.
        OSError: the folder cannot be made.
    """
    if target.exists():
        raise CheckpointError(
            f"{target}: expected no such file or folder, but there is one, and it is not "
            "overwritten; save elsewhere, or remove it"
        )
    make_folder(target.parent)
    partial = target.with_name(f"{_PARTIAL}{target.name}-{secrets.token_hex(_NONCE_BYTES)}")
    os.mkdir(partial)
    return partial


def commit(partial: Path, target: Path) -> None:
    """Gives a folder its final name; all of its files must be synced."""
    sync_folder(partial)
    os.rename(partial, target)
    sync_folder(target.parent)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yields a hidden folder, which becomes ``target`` at the end, or is removed on an error."""
    partial = begin(target)
    try:
        yield partial
        commit(partial, target)
    except BaseException:
        # The folder may have its final name already. If discard() fails, the folder stays hidden.
        with suppress(OSError):
            discard(partial)
        raise


def discard(folder: Path) -> None:
    """Removes a folder; renames it first, so that no half-removed folder is visible."""
    if not folder.name.startswith(_REMOVED):
        removed = folder.with_name(f"{_REMOVED}{secrets.token_hex(_NONCE_BYTES)}")
        os.rename(folder, removed)
        folder = removed
    shutil.rmtree(folder)


def leftovers(parent: Path, name: str | None = None) -> list[Path]:
    """Returns hidden folders of interrupted saves and removals, sorted.

    Args:
        parent: the folder to search; need not exist.
        name: final name of the interrupted save; None for all saves and all removals.
    """
    if not parent.is_dir():
        return []
    ours = (
        f"({re.escape(_PARTIAL)}.+-|{re.escape(_REMOVED)})"
        if name is None
        else re.escape(f"{_PARTIAL}{name}-")
    )
    hidden = re.compile(ours + rf"[0-9a-f]{{{2 * _NONCE_BYTES}}}")
    return sorted(each for each in parent.iterdir() if hidden.fullmatch(each.name))


# ---- The shards and data that each rank saves: described, merged, and written --------------------

# A checkpoint accepts a part of a flat tensor as a FlatShard, which it saves as boxes.


class Box(NamedTuple):
    """A box of a saved tensor, and this rank's memory with the box's elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: Tensor


class FlatShard(torch.Tensor):
    """Elements [begin, begin + data.numel()) of a flat tensor of ``elems`` elements.

    ``torch.distributed.checkpoint`` handles it, with any planner, as a tensor of size [elems] of
    which this rank has a part. Tensor operations on a shard are not possible.

    Args:
        elems: number of elements of the whole flat tensor: a parameter, a master weight, a moment.
        begin: index of the first element that this rank has.
        data: [n], contiguous, on any device, may be empty. Saves read it, and loads write to it.
        shape: shape of the parameter, with ``elems`` elements, for exports; default [elems].

    Attributes:
        elems, begin: the arguments.
        local: the argument ``data``, without gradient.
        read: if ``local`` has no memory (device "meta"), a function that yields a range of elements
            of the tensor of which ``local`` is a view; else None.
        param_shape: the argument ``shape``.

    Raises:
        ArgumentError: the arguments do not fit.
        UnsupportedError: checkpoint files do not have the dtype.
    """

    elems: int
    begin: int
    local: Tensor
    param_shape: tuple[int, ...]
    read: Callable[[int, int], Iterator[Tensor]] | None = None

    @staticmethod
    def __new__(
        cls, elems: int, begin: int, data: Tensor, shape: Sequence[int] | None = None
    ) -> FlatShard:
        _check(elems, begin, data, shape)
        made: FlatShard = cls._make((elems,), data)
        made.elems, made.begin, made.local = elems, begin, data.detach()
        made.param_shape = (elems,) if shape is None else tuple(shape)
        return made

    @classmethod
    def _make(cls, size: Sequence[int], data: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=data.dtype, device=data.device
        )

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.begin + self.local.numel()
        return f"FlatShard({self.begin}..{end} of {self.elems}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:
            # For background saves torch makes empty copies of shards, and then fills ``local``.
            like, device = args[0], (kwargs or {}).get("device")
            return like.with_memory(torch.empty_like(like.local, device=device))
        raise UnsupportedError(
            f"{func}: a FlatShard is a part of a tensor, for checkpoints only; compute with its "
            ".local"
        )

    def with_memory(self, local: Tensor) -> FlatShard:
        """Returns a shard of the same elements in other memory."""
        return FlatShard(self.elems, self.begin, local, self.param_shape)

    def boxes(self) -> list[Box]:
        """Returns this rank's boxes of the saved tensor, which has the size ``self.size()``."""
        # An empty part may begin where another rank's part begins; torch would keep only one part.
        if self.elems and not self.local.numel():
            return []
        return [Box((self.begin,), tuple(self.local.shape), self.local)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.size())),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        here = {box.offsets: box.local for box in self.boxes()}
        if index.offset is None and len(here) == 1:
            return next(iter(here.values()))
        offsets = tuple(index.offset or ())
        if offsets not in here:
            raise ArgumentError(
                f"{index.fqn}: expected a part that begins at one of {list(here)}, which this rank "
                f"has, got {offsets}"
            )
        return here[offsets]


class DTensorBox(NamedTuple):
    """The box of the whole tensor that a DTensor's local tensor on this rank covers.

    Attributes:
        shape: shape of the whole tensor.
        offsets, sizes: the box, by dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class DTensorShard(FlatShard):
    """Elements [begin, begin + data.numel()) of a flattened local tensor of a DTensor.

    A shard is saved as boxes of the whole tensor in its real shape: contiguous elements of the
    local tensor are not contiguous in the whole tensor.

    Args:
        box: the local tensor's box in the whole tensor.
        begin: index in the flattened box of the first element that this rank has.
        data: [n], contiguous, on any device, may be empty.
    """

    box: DTensorBox

    @staticmethod
    def __new__(cls, box: DTensorBox, begin: int, data: Tensor) -> DTensorShard:
        _check(prod(box.sizes), begin, data, None)
        made: DTensorShard = cls._make(box.shape, data)
        made.box, made.param_shape = box, tuple(box.shape)
        made.elems, made.begin, made.local = prod(box.sizes), begin, data.detach()
        return made

    def with_memory(self, local: Tensor) -> FlatShard:
        return DTensorShard(self.box, self.begin, local)

    def boxes(self) -> list[Box]:
        if not prod(self.box.shape):
            return [Box((0,) * len(self.box.shape), self.box.shape, self.local.view(self.shape))]
        end, done = self.begin + self.local.numel(), 0
        found = []
        for at, sizes in flat_boxes(self.box.sizes, self.begin, end):
            offsets = tuple(a + b for a, b in zip(self.box.offsets, at, strict=True))
            found.append(Box(offsets, sizes, self.local[done : done + prod(sizes)].view(sizes)))
            done += prod(sizes)
        return found


def _check(elems: int, begin: int, data: Tensor, shape: Sequence[int] | None) -> None:
    if not isinstance(data, Tensor) or isinstance(data, FlatShard):
        raise ArgumentError(f"FlatShard: expected data as a tensor, got {type(data).__name__}")
    dtype_name(data.dtype, "FlatShard")
    if data.dim() != 1 or not data.is_contiguous():
        raise ArgumentError(
            "FlatShard: expected contiguous data of one dimension, got shape "
            f"{tuple(data.shape)} with stride {data.stride()}"
        )
    if not 0 <= begin <= begin + data.numel() <= elems:
        raise ArgumentError(
            f"FlatShard: expected a part of {elems} elements, got {data.numel()} from {begin} on"
        )
    if shape is not None and prod(shape) != elems:
        raise ArgumentError(f"FlatShard: expected a shape of {elems} elements, got {tuple(shape)}")


@dataclass(frozen=True)
class Contents:
    """The tensors and data that one rank saves.

    Attributes:
        tensors: this rank's shards, by name.
        data: JSON data, equal on all ranks.
        rank_data: this rank's own JSON data.
        rank_tensors: this rank's own tensors, by name.
    """

    tensors: Mapping[str, FlatShard]
    data: Any = None
    rank_data: Any = None
    rank_tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Returns all contents as JSON types, with a checksum of ``data``, but without elements.

        Raises:
            ArgumentError: a name or a tensor is invalid.
            UnsupportedError: data cannot be JSON, or a dtype cannot be saved.
        """
        parts = {}
        for name, shard in self.tensors.items():
            check_name(name)
            if not isinstance(shard, FlatShard):
                raise ArgumentError(
                    f"tensor {name!r}: expected a FlatShard, got {type(shard).__name__}"
                )
            boxes = [[*each[:2]] for each in shard.boxes() if each.local.numel()]
            dtype = dtype_name(shard.dtype, name)
            parts[name] = [dtype, list(shard.size()), list(shard.param_shape), boxes]
        own = {}
        for name, tensor in self.rank_tensors.items():
            check_name(name)
            if not isinstance(tensor, Tensor) or isinstance(tensor, FlatShard):
                raise ArgumentError(
                    f"rank_tensors: {name!r}: expected a tensor, got {type(tensor).__name__}"
                )
            own[name] = [dtype_name(tensor.dtype, name), list(tensor.shape)]
        return {
            "tensors": parts,
            "rank_tensors": own,
            "rank_data": encode(self.rank_data, "rank_data"),
            "data": zlib.crc32(text_of(encode(self.data, "data")).encode()),
        }

    def entries(self) -> list[TensorEntry]:
        """Returns the tensors of this rank's file."""
        parts = [
            TensorEntry(
                piece_key(name, box.offsets),
                shard.dtype,
                box.sizes,
                partial(slices_of, box.local, shard.read),
            )
            for name, shard in self.tensors.items()
            for box in shard.boxes()
            if box.local.numel()
        ]
        own = [
            TensorEntry(
                rank_key(name), tensor.dtype, tuple(tensor.shape), partial(host_slices, tensor)
            )
            for name, tensor in self.rank_tensors.items()
        ]
        return parts + own


def slices_of(
    local: Tensor, read: Callable[[int, int], Iterator[Tensor]] | None
) -> Iterator[Tensor]:
    """Yields the elements of a shard's box, in slices in host memory."""
    if read is None:
        yield from host_slices(local)
    else:
        begin = int(local.storage_offset())
        for values in read(begin, begin + local.numel()):
            yield from host_slices(values)


def check_name(name: object) -> None:
    """Raises ArgumentError unless ``name`` can be the name of a tensor."""
    try:
        if isinstance(name, str) and name.encode():
            return
    except UnicodeEncodeError:
        pass  # a lone surrogate
    raise ArgumentError(f"expected tensors' names as text that is not empty, got {name!r}")


def put_together(
    described: Sequence[Mapping[str, Any]], operation: str
) -> tuple[dict[str, SavedTensor], tuple[SavedRank, ...]]:
    """Returns a manifest's tensors, and the ranks' own data, from all ranks' descriptions.

    Raises:
        MismatchError: ranks differ in a tensor or in the data.
        ArgumentError: an element of a tensor is saved by no rank, or by two ranks.
    """
    heads: dict[str, tuple[int, list[Any]]] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, each in enumerate(described):
        if each["data"] != described[0]["data"]:
            raise MismatchError(
                f"{operation}: ranks 0 and {rank} give different data; pass data that differ as "
                "rank_data"
            )
        for name, (dtype, size, shape, boxes) in each["tensors"].items():
            head = [dtype, size, shape]
            first, expected = heads.setdefault(name, (rank, head))
            if head != expected:
                raise MismatchError(
                    f"{operation}: tensor {name!r} has dtype, size and shape {expected} on "
                    f"rank {first} and {head} on rank {rank}"
                )
            for offsets, sizes in boxes:
                key = piece_key(name, offsets)
                piece = Piece(tuple(offsets), tuple(sizes), file_name(rank), key)
                pieces.setdefault(name, []).append(piece)
    tensors = {}
    for name, (_, (dtype, size, shape)) in heads.items():
        parts = tuple(sorted(pieces.get(name, []), key=lambda piece: piece.offsets))
        try:
            check_fill(size, parts)
        except ValueError as error:
            raise ArgumentError(
                f"{operation}: tensor {name!r}: {error}; expected each of its {prod(size)} "
                "elements on one rank"
            ) from None
        tensors[name] = SavedTensor(dtype, tuple(size), tuple(shape), parts)
    return tensors, tuple(_saved_rank(rank, each) for rank, each in enumerate(described))


def _saved_rank(rank: int, described: Mapping[str, Any]) -> SavedRank:
    tensors = {}
    for name, (dtype, extents) in described["rank_tensors"].items():
        size = tuple(extents)
        piece = Piece((0,) * len(size), size, file_name(rank), rank_key(name))
        tensors[name] = SavedTensor(dtype, size, size, (piece,) if piece.elems else ())
    return SavedRank(decode(described["rank_data"]), tensors)
