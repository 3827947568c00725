"""Text for ``train_gpt.py``: bytes of a file or of a folder's text files, and batches of them."""

from __future__ import annotations

import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ringcomm import ArgumentError

HEAD_BYTES = 8192  # a zero byte among these makes a file binary
LIMIT_BYTES = 32 << 20  # more than these small models see in a day of CPU time
HELD_OUT_SHARE = 0.05
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "test", "tests", "idlelib"})


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8 tensors of one dimension."""

    train: Tensor
    held_out: Tensor
    source: str
    checksum: int


def draw(text: Tensor, seed: int, index: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets (B, T) int64, which depend on nothing but the arguments."""
    # Two draws of one seed must not overlap, hence a generator seeded by both numbers.
    generator = torch.Generator().manual_seed((seed << 32) + index)
    starts = torch.randint(text.numel() - shape[1], (shape[0], 1), generator=generator)
    window = text[starts + torch.arange(shape[1] + 1)].long()  # (B, T + 1)
    return window[:, :-1], window[:, 1:]


def read_corpus(data: str | None, context: int) -> Corpus:
    """Reads up to 32 MiB of text, of a folder its text files in sorted order; holds out 5 %.

    Raises ArgumentError where a file cannot be read, or there is too little text for the context.
    """
    # Path.expanduser() raises for a user that there is not.
    root = Path(os.path.expanduser(sysconfig.get_path("stdlib") if data is None else data))
    content, count = bytearray(), 0
    for path in _files_of(root, python_only=data is None):
        try:
            piece = _text_of(path, LIMIT_BYTES - len(content))
        except OSError as error:
            raise _unreadable(error, path) from error
        if piece:
            content += piece
            count += 1
        if len(content) == LIMIT_BYTES:
            break
    least = int(2 * (context + 1) / HELD_OUT_SHARE) + 1
    if len(content) < least:
        told = f"holds {len(content)} bytes of text; this context needs {least}"
        raise ArgumentError(f"--data {root}: {told}")
    text = torch.frombuffer(content, dtype=torch.uint8)
    split = text.numel() - int(text.numel() * HELD_OUT_SHARE)
    source = f"{len(content) / 1e6:.3g} MB of text in {count} file(s) of {root}"
    return Corpus(text[:split], text[split:], source, zlib.crc32(content))


def _unreadable(error: OSError, path: str | Path) -> ArgumentError:
    return ArgumentError(f"--data {path}: cannot be read: {error.strerror}")


def _text_of(path: Path, most_bytes: int) -> bytes:
    """Reads the beginning of a text file, and nothing of a binary file."""
    with path.open("rb") as file:
        # Files that a kernel makes up, as in /proc, have no size; some wait for events for ever.
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        head = file.read(min(most_bytes, HEAD_BYTES))
        return b"" if b"\0" in head else head + file.read(most_bytes - len(head))


def _files_of(root: Path, python_only: bool) -> Iterator[Path]:
    """Finds a file itself, or the text files of a folder in sorted order.

    Raises ArgumentError where there is neither, or a folder cannot be read.
    """
    try:
        is_file = stat.S_ISREG(os.stat(root).st_mode)
    except FileNotFoundError as error:
        raise ArgumentError(f"--data {root}: no such file or folder") from error
    except OSError as error:
        raise _unreadable(error, root) from error
    except ValueError as error:  # no name that a file can have
        raise ArgumentError(f"--data {root}: cannot be read: {error}") from error
    if is_file:
        yield root
        return

    def fail(error: OSError) -> NoReturn:
        raise _unreadable(error, error.filename) from error

    # A pipe or a device has no files.
    for folder, inner, names in os.walk(root, onerror=fail) if os.path.isdir(root) else ():
        skipped = SKIPPED_FOLDERS if python_only else frozenset()
        inner[:] = sorted(name for name in inner if name[0] != "." and name not in skipped)
        for name in sorted(names):
            wanted = name.endswith(".py") if python_only else name[0] != "."
            if wanted and os.path.isfile(path := Path(folder, name)):
                yield path
