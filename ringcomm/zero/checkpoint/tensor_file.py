"""Files of tensors in the safetensors format, written as a stream.

The format is 8 bytes of header length, a JSON header and the tensors' bytes, little-endian
(https://huggingface.co/docs/safetensors). The library's own writer copies all tensors into bytes
first; this one holds no more than a block.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.json_reader import text_of

Tensor = torch.Tensor

# By dtype: its name in the manifest and its code in a safetensors header.
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

# NumPy's limit, and that of torch's operators.
MOST_DIMS = 64
# Small enough that a block is still in the cache when it is written after its checksum.
BLOCK_BYTES = 1 << 20
_HEADER_ALIGN = 8


@dataclass(frozen=True)
class SavedFile:
    """A file as it must be: its size, and CRC-32 (ISO-HDLC, zlib's) as 8 hexadecimal digits."""

    size_bytes: int
    crc32: str


class Stored(Protocol):
    """A tensor as a file's header describes it."""

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
    """One tensor to write.

    Attributes:
        key: in the file.
        dtype, size: of the tensor.
        blocks: yields its elements in order, as flat contiguous tensors in host memory.
    """

    key: str
    dtype: torch.dtype
    size: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]

    @property
    def size_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The name of a dtype in manifests.

    Raises:
        UnsupportedError: the file format has no such dtype.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{what}: expected a dtype of {', '.join(DTYPE_OF_NAME)}, got {dtype}: safetensors "
            "files have no other; convert it"
        )
    return DTYPES[dtype][0]


def host_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor of any device and strides, by blocks in host memory."""
    flat = tensor.detach().reshape(-1)
    step = BLOCK_BYTES // flat.dtype.itemsize
    for begin in range(0, flat.numel(), step):
        yield flat[begin : begin + step].cpu().contiguous()


def write_tensor_file(
    path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
) -> SavedFile:
    """Writes a new file and waits until it is on the disk.

    Args:
        path: must not exist.
        entries: of different keys.
        metadata: into the header, where safetensors has it.

    Raises:
        OSError: it cannot be written.
        CheckpointError: an entry's blocks are not what its dtype and size say.
    """
    ordered = in_order(entries)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        head = header_of(ordered, metadata or {})
        _write(out, memoryview(head))
        size_bytes, crc = len(head), zlib.crc32(head)
        for entry in ordered:
            before = size_bytes
            for block in entry.blocks():
                _check_dtype(path, entry, block)
                view = bytes_of(block)
                crc = zlib.crc32(view, crc)
                _write(out, view)
                size_bytes += len(view)
            _check_size(path, entry, size_bytes - before)
        os.fsync(out)
    finally:
        os.close(out)
    return SavedFile(size_bytes, f"{crc:08x}")


def in_order(entries: Sequence[T]) -> list[T]:
    """Returns entries as files have them: larger items first, so that all are aligned."""
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
    """The checksum of a file's bytes."""
    crc = 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return f"{crc:08x}"


def header_of(entries: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """Returns what a file begins with, before the elements of its entries in this order."""
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


def _check_dtype(path: Path, entry: TensorEntry, block: Tensor) -> None:
    if block.dtype != entry.dtype:
        raise CheckpointError(
            f"{path.name}: {entry.key}: expected elements of {entry.dtype}, as was planned, got "
            f"{block.dtype}; what is saved must not change while it is saved"
        )


def _check_size(path: Path, entry: TensorEntry, size_bytes: int) -> None:
    if size_bytes != entry.size_bytes:
        raise CheckpointError(
            f"{path.name}: {entry.key}: expected {entry.size_bytes} bytes for size {entry.size}, "
            f"as was planned, got {size_bytes}; what is saved must not change while it is saved"
        )


def bytes_of(block: Tensor) -> memoryview:
    """A contiguous host tensor's memory. Not numpy(): torch runs without it."""
    size_bytes = block.numel() * block.dtype.itemsize
    return memoryview((ctypes.c_char * size_bytes).from_address(block.data_ptr())).cast("B")


def _write(out: int, view: memoryview) -> None:
    while view:
        view = view[os.write(out, view) :]
