"""Weights in safetensors files as Hugging Face's libraries write them, read by parts.

A source is one file, or a folder with ``model.safetensors``, or with several files and an index of
which name is in which file. Headers and index are checked before anything is believed, elements
are read where they belong with no more than a block of them elsewhere, and nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ringcomm.errors import CheckpointError
from ringcomm.json_reader import read_bounded, read_json, shown
from ringcomm.zero.checkpoint.export import INDEX_NAME
from ringcomm.zero.checkpoint.tensor_file import BLOCK_BYTES, DTYPES, MOST_DIMS

Tensor = torch.Tensor

SINGLE_NAME = "model.safetensors"
_DTYPE_OF_CODE = {code: dtype for dtype, (_, code) in DTYPES.items()}
# What the safetensors library takes, too.
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 1 << 28
_MAX_EXTENT = 1 << 62
# A name without a folder, so that no index leads out of its own.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.safetensors")
# Their values are comparable numbers, so that one can be converted into another.
_FLOATING = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        name: in the file.
        code: its dtype, as safetensors names it.
        shape: of the tensor.
        file: number of the file that has it.
        begin_bytes: where its elements begin in that file.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    file: int
    begin_bytes: int

    @property
    def elems(self) -> int:
        return prod(self.shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """None if torch has no such dtype."""
        return _DTYPE_OF_CODE.get(self.code)

    def becomes(self, dtype: torch.dtype) -> bool:
        """Tells whether its values can be had in a dtype."""
        return self.dtype is dtype or (self.dtype in _FLOATING and dtype in _FLOATING)


class WeightFiles:
    """The tensors of a file, or of a folder.

    Attributes:
        source: the file or folder.
        tensors: by name.
        digest: 64 bits for the names, dtypes, shapes and places of all tensors.

    Raises:
        CheckpointError: there are no weights, or files are damaged; names what.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.source = Path(source)
        self.tensors: dict[str, StoredTensor] = {}
        self._files: list[int] = []
        self._paths: list[Path] = []
        self._closing = ExitStack()
        # One for all reads: malloc keeps a block that is freed, and may give its place to others.
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        digest = hashlib.sha256()
        try:
            placed = self._find()
            for path in placed:
                header = self._open(path)
                digest.update(header)
                self._take(path, header, placed[path])
        except BaseException:
            self.close()
            raise
        self.digest = digest.hexdigest()[:16]

    def close(self) -> None:
        """Closes the files; nothing can be read any more."""
        self._closing.close()

    def read(self, stored: StoredTensor, begin: int, out: Tensor, via: torch.dtype) -> None:
        """Fills ``out`` with elements from ``begin`` on of a flattened tensor.

        Args:
            stored: one of ``tensors``.
            begin: the first element to read.
            out: [n], contiguous, of any floating-point dtype if ``stored`` is of one.
            via: the dtype that the elements get first.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        dtype = stored.dtype
        assert dtype is not None
        exact = torch.promote_types(dtype, via) is via
        at = stored.begin_bytes + begin * dtype.itemsize
        if exact and out.dtype is dtype and out.device.type == "cpu":
            self._read_bytes(stored, at, out)
            return
        block = self._block.view(dtype)
        for done in range(0, out.numel(), block.numel()):
            target = out[done : done + block.numel()]
            here = block[: target.numel()]
            self._read_bytes(stored, at + done * dtype.itemsize, here)
            target.copy_(here if exact else here.to(via))

    def read_box(
        self, stored: StoredTensor, offsets: Sequence[int], out: Tensor, via: torch.dtype
    ) -> None:
        """Fills ``out`` [box] with a box of a tensor, from whole rows of it; else as :meth:`read`.

        Args:
            stored, out, via: as of :meth:`read`.
            offsets: of the box, by dimension.
        """
        if not out.numel():
            return
        if not offsets:
            self.read(stored, 0, out.view(-1), via)
            return
        assert stored.dtype is not None
        row_elems = prod(stored.shape[1:])
        rows = max(1, BLOCK_BYTES // max(1, row_elems * stored.dtype.itemsize))
        inner = [slice(o, o + n) for o, n in zip(offsets[1:], out.shape[1:], strict=True)]
        within = (slice(None), *inner)
        for row in range(0, out.shape[0], rows):
            target = out[row : row + rows]
            shape = (target.shape[0], *stored.shape[1:])
            slab = torch.empty(shape, dtype=stored.dtype, device="cpu")
            self.read(stored, (offsets[0] + row) * row_elems, slab.view(-1), stored.dtype)
            target.copy_(slab[within].to(via))

    def _read_bytes(self, stored: StoredTensor, at: int, block: Tensor) -> None:
        """Fills a contiguous tensor in host memory."""
        view = memoryview((ctypes.c_char * block.nbytes).from_address(block.data_ptr())).cast("B")
        path = self._paths[stored.file]
        while view:
            try:
                count = os.preadv(self._files[stored.file], [view], at)
            except OSError as error:
                raise _damaged(path, f"{shown(stored.name)}: cannot be read: {error}") from error
            if not count:
                raise _damaged(path, f"{shown(stored.name)}: the file ends before its elements do")
            view, at = view[count:], at + count

    # ---- index and headers ----------------------------------------------------------------------

    def _find(self) -> dict[Path, set[str] | None]:
        """Returns the files, and which names each has by the index; None without one."""
        if not self.source.is_dir():
            return {self.source: None}
        if (self.source / SINGLE_NAME).exists():
            return {self.source / SINGLE_NAME: None}
        path = self.source / INDEX_NAME
        if not path.exists():
            raise CheckpointError(
                f"{self.source}: expected {SINGLE_NAME} or {INDEX_NAME} in it, and there is "
                "neither. Weights in pickles (.bin, .pt) are not read: save them as safetensors, "
                "as save_pretrained() does"
            )
        placed: dict[Path, set[str] | None] = {}
        for name, file in _weight_map(path).items():
            names = placed.setdefault(self.source / file, set())
            assert names is not None
            names.add(name)
        return placed

    def _open(self, path: Path) -> bytes:
        """Opens a file; returns its header, as bytes."""
        try:
            # Without O_NONBLOCK a pipe that nobody writes to would not even open.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _damaged(path, f"cannot be opened: {error.strerror}") from error
        self._closing.callback(os.close, file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(path, "is no plain file")
        self._files.append(file)
        self._paths.append(path)
        try:
            header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, status.st_size - 8):
                raise _damaged(path, f"is no safetensors file, of {status.st_size} bytes")
            return os.pread(file, header_bytes, 8)
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error

    def _take(self, path: Path, header: bytes, expected: set[str] | None) -> None:
        """Checks a header, and adds its tensors."""
        file = len(self._files) - 1
        try:
            tensors = read_json(header)
            if not isinstance(tensors, dict):
                raise ValueError("no object")
            tensors.pop("__metadata__", None)
            found = [_stored(name, told, file, 8 + len(header)) for name, told in tensors.items()]
            _check_places(found, tensors, os.fstat(self._files[file]).st_size - 8 - len(header))
        except ValueError as error:
            raise _damaged(path, f"its header is damaged: {error}") from error
        for stored in found:
            if stored.name in self.tensors:
                other = self._paths[self.tensors[stored.name].file].name
                raise _damaged(path, f"{shown(stored.name)} is in {other}, too")
            self.tensors[stored.name] = stored
        names = {stored.name for stored in found}
        if expected is not None and names != expected:
            name = min(names ^ expected)
            where = "is in it, and not there by" if name in names else "is not in it, but there by"
            raise _damaged(path, f"{shown(name)} {where} {INDEX_NAME}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}")


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the file of each name.

    Raises:
        CheckpointError: it is no index, or leads out of its folder.
    """
    try:
        index = read_json(read_bounded(path, _MAX_INDEX_BYTES))
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise _damaged(path, f"expected an object weight_map with names, got {shown(found)}")
    for name, file in found.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise _damaged(
                path,
                f"{shown(name)}: expected the name of a .safetensors file of this folder, got "
                f"{shown(file)}",
            )
    return found


def _stored(name: str, told: Any, file: int, data_bytes: int) -> StoredTensor:
    """Reads what a header says of a tensor; raises ValueError."""
    if not isinstance(told, dict) or {*told} != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{shown(name)}: expected dtype, shape and data_offsets, got {shown(told)}"
        )
    code, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    fits = isinstance(code, str) and _are_numbers(shape) and _are_numbers(offsets)
    # The product of many numbers takes time that grows with the square of how many they are.
    fits = fits and len(shape) <= MOST_DIMS
    if not fits or len(offsets) != 2 or offsets[0] > offsets[1] or prod(shape) > _MAX_EXTENT:
        raise ValueError(f"{shown(name)}: expected sizes, got {shown(told)}")
    stored = StoredTensor(name, code, tuple(shape), file, data_bytes + offsets[0])
    if stored.dtype is not None and offsets[1] - offsets[0] != stored.elems * stored.dtype.itemsize:
        raise ValueError(
            f"{shown(name)}: {code} of shape {shown(shape)} is not {offsets[1] - offsets[0]} bytes"
        )
    return stored


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(each) is int and 0 <= each <= _MAX_EXTENT for each in values
    )


def _check_places(found: Sequence[StoredTensor], told: dict[str, Any], data_bytes: int) -> None:
    """Raises ValueError unless tensors follow each other, up to the end of the file."""
    end = 0
    for begin, stop, name in sorted(
        (*told[each.name]["data_offsets"], each.name) for each in found
    ):
        if begin != end:
            raise ValueError(f"{shown(name)} begins at byte {begin} of the data, and not at {end}")
        end = stop
    if end != data_bytes:
        raise ValueError(f"expected {end} bytes of data, as it says, got {data_bytes}")
