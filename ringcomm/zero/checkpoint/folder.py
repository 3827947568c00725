# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints, and a reader of one checkpoint that many processes can use at once."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ringcomm.comm.agreement import Ranks, first_other, outcomes, unequal
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.integers import integer
from ringcomm.json_reader import read_bounded, shown
from ringcomm.zero.checkpoint import format as commit
from ringcomm.zero.checkpoint.format import (
    DTYPE_OF_NAME,
    DTYPES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    SLICE_BYTES,
    Bounds,
    Contents,
    FlatShard,
    Manifest,
    Piece,
    SavedFile,
    SavedTensor,
    crc32_of,
    file_name,
    flat_boxes,
    put_together,
    write_file,
    write_tensor_file,
)

Tensor = torch.Tensor


class Reader:
    """A reader of one checkpoint, which any number of ranks may have saved.

    Nothing is unpickled, and no memory is allocated for sizes that a file only claims.

    Args:
        folder: the folder of a finished checkpoint.
        verify: check a file's checksum before its first element is read.
        rounds: convert floating-point numbers to the dtype of the tensor into which they are read.

    Attributes:
        folder: as given.
        manifest: the checkpoint's tensors, files and data, without the elements.

    Raises:
        CheckpointError: the folder is not a complete checkpoint; the message names the file.
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
        # By file, the pieces of tensors in it; filled when the first file is verified.
        self._pieces: dict[str, list[tuple[SavedTensor, Piece]]] = {}

    def __repr__(self) -> str:
        ranks = f"saved by {self.world_size} ranks"
        return f"<ringcomm.zero.checkpoint.Reader of {self.folder}, {ranks}>"

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return self.manifest.world_size

    @property
    def data(self) -> Any:
        """The user's data, as passed to the save."""
        return self.manifest.data

    def names(self) -> list[str]:
        """Returns the names of the tensors, in the order in which they were saved."""
        return list(self.manifest.tensors)

    def elems(self, name: str) -> int:
        """Returns the number of elements of a tensor."""
        return self._saved(name).elems

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the real shape of a tensor, which may be saved flat."""
        return self._saved(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return DTYPE_OF_NAME[self._saved(name).dtype]

    def rank_data(self, rank: int) -> Any:
        """Returns the data that rank ``rank`` saved as its own."""
        return self._rank(rank).data

    def rank_tensors(self, rank: int) -> dict[str, Tensor]:
        """Returns the tensors that rank ``rank`` saved as its own, in host memory.

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
        """Fills ``out`` with the elements of the flattened tensor from ``begin`` on.

        Reads only the parts of files that hold these elements, once the files are verified.

        Args:
            name: name of a tensor.
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
        """Fills ``out`` with a box of a tensor; otherwise like :meth:`read`.

        Args:
            name: name of a tensor.
            offsets: offsets of the box in the tensor's ``size`` in the manifest, or in the tensor's
                shape if the tensor was saved flat; by dimension.
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
        """Fills ``out`` with a box of a tensor that was saved flat; reads whole rows."""
        saved = self._saved(name)
        if saved.size == saved.shape:
            raise ArgumentError(f"read {name}: expected a box in size {saved.size}, got {offsets}")
        _check_box(name, saved.shape, offsets, out)
        row_elems = prod(saved.shape[1:])
        rows = max(1, SLICE_BYTES // max(1, row_elems * out.element_size()))
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

        Files that were verified before are skipped.

        Args:
            files: names of the files; default all.

        Raises:
            CheckpointError: a file is damaged; the message names it.
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
        """Checks that a file has the tensors that the manifest lists for it."""
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
                    f"{path}: expected a file of at most {MAX_MANIFEST_BYTES} bytes; this file is "
                    "not a manifest"
                )
            text = read_bounded(path, MAX_MANIFEST_BYTES).decode("utf-8")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.folder}: expected a checkpoint, but it has no {MANIFEST_NAME}: the save "
                "never finished, or the folder is something else. Load another checkpoint"
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read: {error}. Load another checkpoint"
            ) from error
        return Manifest.from_text(text, str(path))

    def _saved(self, name: str) -> SavedTensor:
        if name not in self.manifest.tensors:
            raise ArgumentError(f"{self.folder}: has no tensor {name!r}; see names()")
        return self.manifest.tensors[name]

    def _rank(self, rank: int) -> Any:
        if not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"{self.folder}: expected one of the {self.world_size} ranks that saved, got {rank}"
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
            raise self._damaged(file, "is not a regular file")
        if status.st_size != expected:
            raise self._damaged(file, f"expected {expected} bytes, got {status.st_size}")

    def _damaged(self, file: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / file}: {what}. Load another checkpoint")

    def _fill(self, saved: SavedTensor, offsets: Sequence[int], out: Tensor) -> None:
        for piece in saved.pieces:
            box = piece.shared(offsets, out.shape)
            if box is not None:
                target = out[_within(box, offsets)] if box else out
                target.copy_(self._stored(saved, piece, box))

    def _stored(self, saved: SavedTensor, piece: Piece, box: Bounds) -> Tensor:
        """Returns the elements of ``box`` in a piece, in the saved dtype and in host memory."""
        if self._verify:
            self.verify([piece.file])
        try:
            stored = self._slice(saved, piece)
            # Without this context, safetensors would make the tensor on torch's default device.
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
        """Returns a piece as a safetensors slice, after a check of its dtype and shape."""
        file = self._open.get(piece.file)
        if file is None:
            # The file is mapped: its pages are read when they are touched.
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


def _within(box: Bounds, offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(begin - offset, end - offset)
        for (begin, end), offset in zip(box, offsets, strict=True)
    )


# ---- A folder of checkpoints: saved together, seen whole or not at all, removed when old ---------

# The ranks that save together, and how they agree on a save.


class OneRank:
    """A process that saves alone."""

    rank = 0
    world_size = 1
    name = "rank 0 of 1"

    def __repr__(self) -> str:
        return "OneRank()"

    def exchange(self, mine: Any) -> list[Any]:
        return [mine]


def agreed(ranks: Ranks, operation: str, work: Callable[[], Any]) -> list[Any]:
    """Runs ``work`` on each rank; if it fails on one rank, all ranks raise; collective.

    Returns:
        The results of ``work``, JSON data, by rank.

    Raises:
        CheckpointError: ``work`` failed on this rank with an OSError.
        Exception: any other exception of ``work`` on this rank.
        RingcommError: ``work`` failed on another rank; of the same class if the class is
            ringcomm's, otherwise CheckpointError.
    """
    result, error = None, None
    try:
        result = work()
    # Any failure is sent to the other ranks, so that they need not wait until their timeout.
    except Exception as raised:
        error = raised
    told = outcomes(ranks, operation, error, result)
    if isinstance(error, OSError):
        raise CheckpointError(
            f"{operation}: {ranks.name} cannot write: {error}. Earlier checkpoints are intact"
        ) from error
    if error is not None:
        raise error
    for each in told:
        if each.kind:
            failed = each.error_class(CheckpointError)(
                f"{operation}: {each.name} failed, so no rank continues: {each.text}. Earlier "
                "checkpoints are intact"
            )
            failed.repeats = True
            raise failed
    return [each.value for each in told]


_log = logging.getLogger("ringcomm.zero")
_STEP = re.compile(r"step-(\d{8,18})")


class Checkpoints:
    """The checkpoints of one training run, in ``root``/step-00000100 and so on.

    A checkpoint is complete once its folder has its final name. If a save ends early, at any
    moment, earlier checkpoints are intact; the files of the save are hidden, are never loaded, and
    are removed by the next save. Only one run at a time may save into ``root``.

    Args:
        root: the folder, made by the first save, on a file system that all ranks see.
        keep: number of checkpoints to keep, the latest ones; None keeps all.
        ranks: the ranks that save together; default this process alone.

    Raises:
        ArgumentError: ``keep`` is not a positive number.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = 2,
        ranks: Ranks | None = None,
    ) -> None:
        kept = None if keep is None else integer(keep)
        if keep is not None and (kept is None or kept < 1):
            raise ArgumentError(f"keep: expected a number from 1 on, or None, got {keep!r}")
        self.root = Path(root)
        self.keep = kept
        self._ranks: Ranks = OneRank() if ranks is None else ranks

    def __repr__(self) -> str:
        return f"<ringcomm.zero.Checkpoints in {self.root} of {self._ranks.name}, keep {self.keep}>"

    def folder(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint, which need not exist."""
        number = integer(step)
        if number is None or not 0 <= number < 10**18:
            raise ArgumentError(f"step: expected a number from 0 on, got {step!r}")
        return self.root / f"step-{number:08d}"

    def steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, sorted.

        Raises:
            CheckpointError: the folder exists and cannot be read; other methods also raise this.
        """
        with _reading(self.root):
            return [step for step, folder in self._visible() if (folder / MANIFEST_NAME).is_file()]

    def latest(self) -> int | None:
        """Returns the last of :meth:`steps`, or None."""
        return max(self.steps(), default=None)

    def incomplete(self) -> list[Path]:
        """Returns the folders of incomplete checkpoints.

        The next save removes hidden folders. An incomplete folder with the name of a step was
        complete once; it is left for the user to inspect.
        """
        with _reading(self.root):
            broken = [each for _, each in self._visible() if not (each / MANIFEST_NAME).is_file()]
            return commit.leftovers(self.root) + broken

    def reader(self, step: int | None = None) -> Reader:
        """Opens a checkpoint, by default the latest.

        Raises:
            CheckpointError: no checkpoint exists, or it is damaged; no other one is opened instead.
        """
        if step is None:
            step = self.latest()
        if step is None:
            raise CheckpointError(f"{self.root}: expected a complete checkpoint, found none")
        return Reader(self.folder(step))

    def remove(self, step: int) -> None:
        """Removes the checkpoint of a step, atomically for readers; call it on one rank.

        Raises:
            ArgumentError: there is no such checkpoint.
        """
        folder = self.folder(step)
        if not folder.is_dir():
            raise ArgumentError(f"remove: {folder}: expected a checkpoint, there is none")
        commit.discard(folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, FlatShard],
        *,
        data: Any = None,
        rank_data: Any = None,
        rank_tensors: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Saves the tensors and data of all ranks; collective.

        Returns when the checkpoint is on the disk under its name. The oldest checkpoints beyond
        ``keep`` are then removed.

        Args:
            step: a number greater than all saved steps; equal on all ranks.
            tensors: by name, this rank's shards of flat tensors. Each element is on one rank.
            data: None, bools, ints, floats, strings, and lists, tuples and dicts of these; equal on
                all ranks.
            rank_data: this rank's own data, of the types of ``data``.
            rank_tensors: small tensors of this rank, of any shape, such as generators' states.

        Raises:
            ArgumentError, MismatchError, UnsupportedError: bad arguments; no rank wrote anything.
            CheckpointError: the save failed, and earlier checkpoints are intact.

        If a rank raises an error, all ranks raise an error of the same class.
        """
        contents = Contents(tensors, data, rank_data, rank_tensors or {})
        return _Save(self, step, contents, self._ranks).run()

    def _visible(self) -> list[tuple[int, Path]]:
        try:
            inside = list(self.root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for each in inside:
            match = _STEP.fullmatch(each.name)
            if match and each.is_dir() and each == self.folder(int(match[1])):
                found.append((int(match[1]), each))
        return sorted(found)


@contextmanager
def _reading(root: Path) -> Iterator[None]:
    """Raises CheckpointError if the body cannot read a run's folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{root}: cannot be read: {error}") from error


class _Save:
    """One save, in phases: all ranks complete a phase before any rank begins the next phase."""

    def __init__(
        self, checkpoints: Checkpoints, step: int, contents: Contents, ranks: Ranks
    ) -> None:
        number = integer(step)
        self._step = step if number is None else number  # describe() refuses invalid steps
        self._checkpoints, self._contents = checkpoints, contents
        self._ranks = ranks
        # Stages of a pipeline save in folders of their own, so the folder identifies the stage.
        self._operation = f"save step {step} in {checkpoints.root}"
        self._partial: Path | None = None  # the hidden folder, on rank 0 while it exists

    def run(self) -> Path:
        try:
            described = agreed(self._ranks, self._operation, self._describe)
            target = self._checkpoints.folder(self._step)
            self._check_same_step(described)
            tensors, ranks = put_together(described, self._operation)
            made = self._agreed_by_first(lambda: self._begin(target))
            partial = target.with_name(str(made))
            written = agreed(self._ranks, self._operation, lambda: self._write(partial))
            files = {file_name(rank): SavedFile(*each) for rank, each in enumerate(written)}
            manifest = Manifest(tensors, files, ranks, self._contents.data)
            self._agreed_by_first(lambda: self._commit(partial, target, manifest))
        finally:
            self._clean_up()
        if self._ranks.rank == 0:
            self._remove_old()
        return target

    def _agreed_by_first(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on rank 0 only; returns its result on all ranks."""
        first = self._ranks.rank == 0
        return agreed(self._ranks, self._operation, work if first else lambda: None)[0]

    def _describe(self) -> dict[str, Any]:
        self._checkpoints.folder(self._step)  # refuses invalid steps
        return {"step": self._step, **self._contents.describe()}

    def _check_same_step(self, described: list[dict[str, Any]]) -> None:
        rows = [(each["step"],) for each in described]
        if other := first_other(rows):
            advice = "All ranks must save the same step"
            raise unequal(self._operation, ("step",), rows, other, advice)

    def _begin(self, target: Path) -> str:
        latest = self._checkpoints.latest()
        if latest is not None and self._step <= latest:
            raise ArgumentError(
                f"{self._operation}: expected a step after {latest}, which is saved. To resume, "
                f"load() the checkpoint first. To start again, save under another root, or delete "
                f"the later steps by Checkpoints({str(self._checkpoints.root)!r}).remove(step)"
            )
        for each in commit.leftovers(self._checkpoints.root):
            commit.discard(each)
        self._partial = commit.begin(target)
        return self._partial.name

    def _check_there(self, partial: Path) -> None:
        if not partial.is_dir():
            raise CheckpointError(
                f"{partial}: expected the folder that the first rank has made, but it is not "
                "there; all ranks must see the same file system, and jobs that save at the same "
                "time, such as another pipeline stage, must each save into a root of their own"
            )

    def _write(self, partial: Path) -> list[Any]:
        self._check_there(partial)
        name = file_name(self._ranks.rank)
        written = write_tensor_file(partial / name, self._contents.entries())
        return [written.size_bytes, written.crc32]

    def _commit(self, partial: Path, target: Path, manifest: Manifest) -> None:
        self._check_there(partial)
        write_file(partial / MANIFEST_NAME, manifest.to_text().encode())
        commit.commit(partial, target)
        self._partial = None

    def _clean_up(self) -> None:
        """Removes a failed save's folder; if this fails, the next save removes the folder."""
        if self._partial is None or not self._partial.exists():
            return
        try:
            commit.discard(self._partial)
        except OSError as error:
            _log.warning("%s: cannot remove %s: %s", self._operation, self._partial, error)

    def _remove_old(self) -> None:
        keep, steps = self._checkpoints.keep, self._checkpoints.steps()
        for step in [] if keep is None else steps[:-keep]:
            try:
                self._checkpoints.remove(step)
            except OSError as error:
                # The new checkpoint is saved, so this failure must not raise.
                _log.warning("%s: cannot remove step %d: %s", self._operation, step, error)
