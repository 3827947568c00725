# SPDX-License-Identifier: Apache-2.0
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

HEAD_BYTES = 8192  # A file with a zero byte among its first HEAD_BYTES is binary.
LIMIT_BYTES = 32 << 20  # More than these small models process in a day of CPU time.
HELD_OUT_SHARE = 0.05
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "test", "tests", "idlelib"})


@dataclass(frozen=True)
class Corpus:
    """Bytes for training and held-out bytes, both one-dimensional uint8 tensors."""

    train: Tensor
    held_out: Tensor
    source: str
    checksum: int


def draw(text: Tensor, seed: int, index: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets (B, T) int64, which depend only on the arguments."""
    # The generator's seed combines seed and index, so that draws with one seed do not overlap.
    generator = torch.Generator().manual_seed((seed << 32) + index)
    starts = torch.randint(text.numel() - shape[1], (shape[0], 1), generator=generator)
    window = text[starts + torch.arange(shape[1] + 1)].long()  # (B, T + 1)
    return window[:, :-1], window[:, 1:]


def read_corpus(data: str | None, context: int) -> Corpus:
    """Reads up to 32 MiB of text from a file or a folder's sorted text files; holds out 5 %.

    Raises ArgumentError if a file cannot be read, or there is too little text for the context.
    """
    # Path.expanduser() raises for an unknown user.
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
    """Reads the beginning of a text file; returns b"" for a binary file."""
    with path.open("rb") as file:
        # Generated files, as in /proc, have size 0; reading some of them would wait forever.
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        head = file.read(min(most_bytes, HEAD_BYTES))
        return b"" if b"\0" in head else head + file.read(most_bytes - len(head))


def _files_of(root: Path, python_only: bool) -> Iterator[Path]:
    """Yields the file itself, or the text files of a folder in sorted order.

    Raises ArgumentError if the path does not exist, or a folder cannot be read.
    """
    try:
        is_file = stat.S_ISREG(os.stat(root).st_mode)
    except FileNotFoundError as error:
        raise ArgumentError(f"--data {root}: no such file or folder") from error
    except OSError as error:
        raise _unreadable(error, root) from error
    except ValueError as error:  # the path is not a valid file name
        raise ArgumentError(f"--data {root}: cannot be read: {error}") from error
    if is_file:
        yield root
        return

    def fail(error: OSError) -> NoReturn:
        raise _unreadable(error, error.filename) from error

    # For a pipe or a device, which have no files, the loop is empty.
    for folder, inner, names in os.walk(root, onerror=fail) if os.path.isdir(root) else ():
        skipped = SKIPPED_FOLDERS if python_only else frozenset()
        inner[:] = sorted(name for name in inner if name[0] != "." and name not in skipped)
        for name in sorted(names):
            wanted = name.endswith(".py") if python_only else name[0] != "."
            if wanted and os.path.isfile(path := Path(folder, name)):
                yield path
