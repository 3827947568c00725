"""The training text: bytes of a file or of a folder's text files, and batches cut from them."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringcomm.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

HELD_OUT_SHARE = 0.05
LIMIT_BYTES = 32 << 20  # read up to here: more than these small models see in a day of CPU time
PROBE_BYTES = 8192
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "test", "tests", "idlelib"})


@dataclass(frozen=True)
class Source:
    """The files that make up a corpus, in reading order."""

    root: Path
    files: tuple[Path, ...]
    size_bytes: int
    cut: bool

    def __str__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        cut = f" (its first {LIMIT_BYTES >> 20} MiB)" if self.cut else ""
        return f"{self.size_bytes / 1e6:.3g} MB of text in {files} of {self.root}{cut}"


def find_source(data: str | None, min_bytes: int) -> Source:
    """Choose the files to train on: ``data`` (a file or folder), else Python's standard library.

    A folder gives its text files (no NUL byte in the first 8 KiB) in sorted order, the first 32
    MiB of them; hidden entries are passed over. Raises ArgumentError when the path is missing or
    unreadable, or when it holds fewer than ``min_bytes`` bytes of text.
    """
    root = Path(data).expanduser() if data is not None else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise ArgumentError(f"--data {root}: no such file or folder")
    candidates = [root] if root.is_file() else _walk(root, python_only=data is None)
    files: list[Path] = []
    size_bytes = 0
    for path in candidates:
        if size_bytes > LIMIT_BYTES:
            break
        if _is_text(path, required=path == root):
            files.append(path)
            size_bytes += path.stat().st_size
    cut = size_bytes > LIMIT_BYTES
    size_bytes = min(size_bytes, LIMIT_BYTES)
    if size_bytes < min_bytes:
        raise ArgumentError(
            f"--data {root}: holds {size_bytes} bytes of text; this model and batch need at least "
            f"{min_bytes}: give more text, or a smaller --context"
        )
    return Source(root, tuple(files), size_bytes, cut)


def _walk(root: Path, python_only: bool) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith(".") and not (python_only and name in SKIPPED_FOLDERS)
        )
        for name in sorted(names):
            path = Path(folder, name)
            wanted = name.endswith(".py") if python_only else not name.startswith(".")
            if wanted and path.is_file():
                yield path


def _is_text(path: Path, required: bool) -> bool:
    """True if the file holds text; one that the user named and that holds none is an error."""
    try:
        with path.open("rb") as file:
            text = b"\0" not in file.read(PROBE_BYTES)
    except OSError as error:
        raise ArgumentError(f"--data {path}: cannot be read: {error.strerror}") from error
    if required and not text:
        raise ArgumentError(f"--data {path}: is binary (has NUL bytes); a text file is needed")
    return text


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both one-dimensional uint8 tensors."""

    train: Tensor
    held_out: Tensor
    checksum: int

    def batch(self, seed: int, step: int, sequences: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a training step, each (sequences, context) int64.

        The batch depends on nothing but the arguments, so every rank can draw the same one and
        keep its rows.
        """
        return _draw(self.train, seed, step, (sequences, context))

    def held_out_batch(
        self, seed: int, index: int, sequences: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Same as ``batch``, from the held-out bytes."""
        return _draw(self.held_out, seed, index, (sequences, context))


def _draw(text: Tensor, seed: int, index: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    import torch

    sequences, context = shape
    # Two draws of one seed must not overlap, hence a generator seeded by both numbers.
    generator = torch.Generator().manual_seed((seed << 32) + index)
    starts = torch.randint(text.numel() - context, (sequences, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)].long()  # (sequences, context + 1)
    return window[:, :-1], window[:, 1:]


def min_corpus_bytes(context: int) -> int:
    """Bytes a corpus needs so that its held-out part fills one sequence with room to vary."""
    return int(2 * (context + 1) / HELD_OUT_SHARE) + 1


def load(source: Source) -> Corpus:
    """Read the files and split off the last 5 % as held-out text."""
    import torch

    content = bytearray()
    for path in source.files:
        with path.open("rb") as file:
            content += file.read(source.size_bytes - len(content))
    text = torch.frombuffer(content, dtype=torch.uint8)
    split = text.numel() - int(text.numel() * HELD_OUT_SHARE)
    return Corpus(text[:split], text[split:], zlib.crc32(content))
