"""Reads a checkpoint's folder, from any number of processes at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.json_reader import read_bounded, shown
from ringcomm.zero.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Box,
    Manifest,
    Piece,
    SavedTensor,
    flat_boxes,
)
from ringcomm.zero.checkpoint.tensor_file import BLOCK_BYTES, DTYPE_OF_NAME, DTYPES, crc32_of

Tensor = torch.Tensor


class Reader:
    """One checkpoint, saved by any world.

    Nothing is unpickled, and no memory is taken for what a file only claims to hold.

    Args:
        folder: of a finished checkpoint.
        verify: check a file's checksum before its first element is read.
        rounds: floating-point numbers are converted to the dtype that they are read into.

    Attributes:
        folder: as given.
        manifest: what the checkpoint holds and where.

    Raises:
        CheckpointError: the folder is no whole checkpoint; the file is named.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, verify: bool = True, rounds: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.manifest = self._read_manifest()
        for file in self.manifest.files:
            self._check_file(file)
        self._verify = verify
        self._rounds = rounds
        self._verified: set[str] = set()
        self._open: dict[str, Any] = {}
        # By file, its tensors' pieces; filled when a file is verified.
        self._pieces: dict[str, list[tuple[SavedTensor, Piece]]] = {}

    def __repr__(self) -> str:
        ranks = f"saved by {self.world_size} ranks"
        return f"<ringcomm.zero.checkpoint.Reader of {self.folder}, {ranks}>"

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self.manifest.world_size

    @property
    def data(self) -> Any:
        """The user's data, as they were given."""
        return self.manifest.data

    def names(self) -> list[str]:
        """The tensors, in the order in which they were saved."""
        return list(self.manifest.tensors)

    def elems(self, name: str) -> int:
        """Returns how many elements a tensor has."""
        return self._saved(name).elems

    def shape(self, name: str) -> tuple[int, ...]:
        """The real shape of a tensor that may be saved flat."""
        return self._saved(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return DTYPE_OF_NAME[self._saved(name).dtype]

    def rank_data(self, rank: int) -> Any:
        """The data that ``rank`` of the world that saved gave for itself."""
        return self._rank(rank).data

    def rank_tensors(self, rank: int) -> dict[str, Tensor]:
        """The tensors that ``rank`` gave for itself, in host memory.

        Raises:
            CheckpointError: a file is damaged.
        """
        tensors = {}
        for name, saved in self._rank(rank).tensors.items():
            dtype = DTYPE_OF_NAME[saved.dtype]
            tensors[name] = torch.empty(saved.size, dtype=dtype, device="cpu")
            self._fill(saved, (0,) * len(saved.size), tensors[name])
        return tensors

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Fills ``out`` with elements from ``begin`` on of the flattened tensor.

        Only the files' parts that hold them are read, once the files are verified.

        Args:
            name: of a tensor.
            begin: the first element to read.
            out: [n], of the saved dtype, on any device.

        Raises:
            ArgumentError: the tensor has no such elements, or ``out`` does not fit.
            CheckpointError: a file is damaged; ``out`` may be partly filled.
        """
        saved = self._saved(name)
        self._check_out(name, saved, out)
        if out.dim() != 1 or not 0 <= begin <= begin + out.numel() <= saved.elems:
            raise ArgumentError(
                f"read {name}: expected a part of its {saved.elems} elements and a tensor of one "
                f"dimension, got {tuple(out.shape)} from element {begin} on"
            )
        filled = 0
        for offsets, sizes in flat_boxes(saved.size, begin, begin + out.numel()):
            target = out[filled : filled + prod(sizes)]
            self._fill(saved, offsets, target.view(sizes))
            filled += target.numel()

    def read_box(self, name: str, offsets: Sequence[int], out: Tensor) -> None:
        """Fills ``out`` with a box of a tensor; else as :meth:`read`.

        Args:
            name: of a tensor.
            offsets: of the box, by dimension of the tensor's ``size`` in the manifest, or where it
                was saved flat, by dimension of its shape.
            out: [box], of the saved dtype, on any device.
        """
        saved = self._saved(name)
        if len(offsets) != len(saved.size) and len(saved.size) == 1:
            return self._read_slabs(name, offsets, out)
        self._check_out(name, saved, out)
        _check_box(name, saved.size, offsets, out)
        self._fill(saved, offsets, out)
        return None

    def _read_slabs(self, name: str, offsets: Sequence[int], out: Tensor) -> None:
        """Fills ``out`` with a box of a tensor that was saved flat, from whole rows of it."""
        saved = self._saved(name)
        if saved.size == saved.shape:
            raise ArgumentError(f"read {name}: expected a box in size {saved.size}, got {offsets}")
        _check_box(name, saved.shape, offsets, out)
        row_elems = prod(saved.shape[1:])
        rows = max(1, BLOCK_BYTES // max(1, row_elems * out.element_size()))
        inner = [slice(o, o + n) for o, n in zip(offsets[1:], out.shape[1:], strict=True)]
        within = (slice(None), *inner)
        for row in range(0, out.shape[0] if out.numel() else 0, rows):
            target = out[row : row + rows]
            shape = (target.shape[0], *saved.shape[1:])
            slab = torch.empty(shape, dtype=out.dtype, device="cpu")
            self.read(name, (offsets[0] + row) * row_elems, slab.view(-1))
            target.copy_(slab[within])

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Reads files, and compares their checksums and headers with the manifest.

        Files that were compared before are skipped.

        Args:
            files: their names; default all.

        Raises:
            CheckpointError: a file is damaged; it is named.
        """
        for file in self.manifest.files if files is None else files:
            if file in self._verified:
                continue
            if file not in self.manifest.files:
                raise ArgumentError(f"verify: {self.folder} has no file {file!r}")
            expected = self.manifest.files[file].crc32
            self._check_file(file)
            try:
                actual = crc32_of(self.folder / file)
            except OSError as error:
                raise self._damaged(file, f"cannot be read: {error}") from error
            if actual != expected:
                raise self._damaged(file, f"expected checksum {shown(expected)}, got {actual}")
            self._check_header(file)
            self._verified.add(file)

    def _check_header(self, file: str) -> None:
        """Checks that a file has the tensors that the manifest says."""
        if not self._pieces:
            ranks = (each.tensors for each in self.manifest.ranks)
            for saved in chain(self.manifest.tensors.values(), *(each.values() for each in ranks)):
                for piece in saved.pieces:
                    self._pieces.setdefault(piece.file, []).append((saved, piece))
        for saved, piece in self._pieces.get(file, ()):
            try:
                self._slice(saved, piece)
            except (SafetensorError, OSError, ValueError) as error:
                raise self._unreadable(piece, error) from error

    def _read_manifest(self) -> Manifest:
        path = self.folder / MANIFEST_NAME
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
                raise CheckpointError(
                    f"{path}: expected a file of at most {MAX_MANIFEST_BYTES} bytes; it is foreign"
                )
            text = read_bounded(path, MAX_MANIFEST_BYTES).decode("utf-8")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.folder}: expected a checkpoint, but it has no {MANIFEST_NAME}: it was "
                "never finished, or is something else. Take another"
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}. Take another") from error
        return Manifest.from_text(text, str(path))

    def _saved(self, name: str) -> SavedTensor:
        if name not in self.manifest.tensors:
            raise ArgumentError(f"{self.folder}: has no tensor {name!r}; see names()")
        return self.manifest.tensors[name]

    def _rank(self, rank: int) -> Any:
        if not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{self.folder}: expected a rank of the {self.world_size} that saved, got {rank}"
            )
        return self.manifest.ranks[rank]

    def _check_out(self, name: str, saved: SavedTensor, out: Tensor) -> None:
        dtype = DTYPE_OF_NAME[saved.dtype]
        rounds = self._rounds and dtype.is_floating_point and out.dtype.is_floating_point
        if out.dtype != dtype and not rounds:
            raise ArgumentError(f"read {name}: expected {saved.dtype}, as saved, got {out.dtype}")

    def _check_file(self, file: str) -> None:
        expected = self.manifest.files[file].size_bytes
        try:
            status = os.lstat(self.folder / file)
        except OSError as error:
            raise self._damaged(file, f"is missing: {error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise self._damaged(file, "is no plain file")
        if status.st_size != expected:
            raise self._damaged(file, f"expected {expected} bytes, got {status.st_size}")

    def _damaged(self, file: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / file}: {what}. Take another checkpoint")

    def _fill(self, saved: SavedTensor, offsets: Sequence[int], out: Tensor) -> None:
        for piece in saved.pieces:
            box = piece.shared(offsets, out.shape)
            if box is not None:
                target = out[_within(box, offsets)] if box else out
                target.copy_(self._stored(saved, piece, box))

    def _stored(self, saved: SavedTensor, piece: Piece, box: Box) -> Tensor:
        """The elements of a piece's box, as they lie in the file."""
        if self._verify:
            self.verify([piece.file])
        try:
            stored = self._slice(saved, piece)
            # safetensors makes it wherever the default device says.
            with torch.device("cpu"):
                taken: Tensor = (
                    stored[_within(box, piece.offsets)]
                    if box
                    else self._open[piece.file].get_tensor(piece.key)
                )
        except (SafetensorError, OSError, ValueError) as error:
            raise self._unreadable(piece, error) from error
        return taken

    def _slice(self, saved: SavedTensor, piece: Piece) -> Any:
        """Returns a piece as safetensors reads it, once its dtype and shape are those saved."""
        file = self._open.get(piece.file)
        if file is None:
            # Read in pages, as they are touched.
            file = safe_open(self.folder / piece.file, framework="pt")
            self._open[piece.file] = file
        stored, code = file.get_slice(piece.key), DTYPES[DTYPE_OF_NAME[saved.dtype]][1]
        if stored.get_dtype() != code or tuple(stored.get_shape()) != piece.sizes:
            raise self._damaged(
                piece.file,
                f"{piece.key}: expected {code} {piece.sizes}, got {stored.get_dtype()} "
                f"{tuple(stored.get_shape())}",
            )
        return stored

    def _unreadable(self, piece: Piece, error: Exception) -> CheckpointError:
        return self._damaged(piece.file, f"{piece.key}: cannot be read: {error}")


def _check_box(name: str, size: Sequence[int], offsets: Sequence[int], out: Tensor) -> None:
    fits = len(offsets) == out.dim() == len(size) and all(
        0 <= offset <= offset + extent <= whole
        for offset, extent, whole in zip(offsets, out.shape, size, strict=True)
    )
    if not fits:
        raise ArgumentError(
            f"read {name}: expected a box in size {tuple(size)}, got {tuple(out.shape)} at "
            f"{tuple(offsets)}"
        )


def _within(box: Box, offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - offset, end - offset)
        for (begin, end), offset in zip(box, offsets, strict=True)
    )
