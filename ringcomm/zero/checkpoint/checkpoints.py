"""A folder of checkpoints: saved together, seen whole or not at all, removed when they are old."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ringcomm.errors import ArgumentError, CheckpointError, MismatchError
from ringcomm.integers import integer
from ringcomm.zero.checkpoint import commit
from ringcomm.zero.checkpoint.contents import Contents, FlatShard, put_together
from ringcomm.zero.checkpoint.manifest import MANIFEST_NAME, Manifest, file_name
from ringcomm.zero.checkpoint.reader import Reader
from ringcomm.zero.checkpoint.tensor_file import SavedFile, write_file, write_tensor_file

# The ranks that save together, and how they agree.


class Ranks(Protocol):
    """The interface of a world that saving needs; all ranks see the same folder.

    If a rank is lost, :meth:`exchange` raises on the others.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def name(self) -> str:
        """This rank, as messages name it."""
        ...

    def exchange(self, mine: Any) -> list[Any]:
        """Plain JSON data of every rank, by rank; collective."""
        ...


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
    """Does ``work`` on each rank; all go on, or none; collective.

    Returns:
        what it returned, plain JSON data, by rank.

    Raises:
        CheckpointError: it failed on this rank, with an operating system's error, or on another.
        Exception: what else it raised on this rank.
    """
    result, error = None, None
    try:
        result = work()
    # Whatever it is, the others must not wait for this rank until their timeout.
    except Exception as raised:
        error = raised
    told = ranks.exchange(
        {
            "result": result,
            "error": None if error is None else str(error),
            "name": ranks.name,
        }
    )
    if isinstance(error, OSError):
        raise CheckpointError(
            f"{operation}: {ranks.name} cannot write: {error}. Earlier checkpoints are as they were"
        ) from error
    if error is not None:
        raise error
    for each in told:
        if each["error"] is not None:
            failed = CheckpointError(
                f"{operation}: {each['name']} failed, so no rank goes on: "
                f"{each['error']}. Earlier checkpoints are as they were"
            )
            failed.repeats = True
            raise failed
    return [each["result"] for each in told]


Tensor = torch.Tensor

_log = logging.getLogger("ringcomm.zero")
_STEP = re.compile(r"step-(\d{8,18})")


class Checkpoints:
    """The checkpoints of one training run, in ``root``/step-00000100 and so on.

    A checkpoint is complete once it has its name. Whatever ends a save, at whatever moment, those
    before it are as they were, and what is left of it is hidden, is never loaded, and is removed
    by the next save. One run at a time saves into ``root``.

    Args:
        root: made by the first save, on a file system that all ranks see.
        keep: how many to keep, the latest ones; None keeps all.
        ranks: those that save together; default this process alone.

    Raises:
        ArgumentError: ``keep`` is no positive number.
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
        """The steps that have a complete checkpoint, sorted."""
        return [step for step, folder in self._visible() if (folder / MANIFEST_NAME).is_file()]

    def latest(self) -> int | None:
        """The last of :meth:`steps`, if there is one."""
        return max(self.steps(), default=None)

    def incomplete(self) -> list[Path]:
        """Folders of checkpoints that are not whole.

        The next save removes the hidden ones. One with the name of a step was whole once; it is
        left for a person to look at.
        """
        broken = [each for _, each in self._visible() if not (each / MANIFEST_NAME).is_file()]
        return commit.leftovers(self.root) + broken

    def reader(self, step: int | None = None) -> Reader:
        """Opens a checkpoint, by default the latest.

        Raises:
            CheckpointError: there is none, or it is damaged. No other is taken in its place.
        """
        if step is None:
            step = self.latest()
        if step is None:
            raise CheckpointError(f"{self.root}: expected a complete checkpoint, found none")
        return Reader(self.folder(step))

    def remove(self, step: int) -> None:
        """Removes the checkpoint of a step, at once for all who look; to be called by one rank.

        Raises:
            ArgumentError: there is none.
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
        """Saves what all ranks have; collective.

        Returns when the checkpoint is on the disk under its name; those beyond ``keep`` are then
        removed.

        Args:
            step: after those that are saved; equal on all ranks.
            tensors: by name, this rank's parts of flat tensors. Each element is on one rank.
            data: None, bools, ints, floats, strings, and lists, tuples and dicts of them; equal
                on all ranks.
            rank_data: the same, of this rank.
            rank_tensors: small tensors of this rank, of any shape, such as generators' states.

        Raises:
            ArgumentError, MismatchError, UnsupportedError: no rank has written anything.
            CheckpointError: it could not be saved; on all ranks, and earlier ones are as they were.
        """
        contents = Contents(tensors, data, rank_data, rank_tensors or {})
        return _Save(self, step, contents, self._ranks).run()

    def _visible(self) -> list[tuple[int, Path]]:
        if not self.root.is_dir():
            return []
        found = []
        for each in self.root.iterdir():
            match = _STEP.fullmatch(each.name)
            if match and each.is_dir() and each == self.folder(int(match[1])):
                found.append((int(match[1]), each))
        return sorted(found)


class _Save:
    """One save: each stage is done by all ranks before any begins the next."""

    def __init__(
        self, checkpoints: Checkpoints, step: int, contents: Contents, ranks: Ranks
    ) -> None:
        number = integer(step)
        self._step = step if number is None else number  # describe() refuses what is no step
        self._checkpoints, self._contents = checkpoints, contents
        self._ranks = ranks
        # The folder tells which stage of a pipeline it is.
        self._operation = f"save step {step} in {checkpoints.root}"
        self._partial: Path | None = None  # the hidden folder, on rank 0 while it is there

    def run(self) -> Path:
        try:
            described = agreed(self._ranks, self._operation, self._describe)
            target = self._checkpoints.folder(self._step)
            self._check_same_step(described)
            tensors, records = put_together(described, self._operation)
            made = self._agreed_by_first(lambda: self._begin(target))
            partial = target.with_name(str(made))
            written = agreed(self._ranks, self._operation, lambda: self._write(partial))
            files = {file_name(rank): SavedFile(*each) for rank, each in enumerate(written)}
            manifest = Manifest(tensors, files, records, self._contents.data)
            self._agreed_by_first(lambda: self._commit(partial, target, manifest))
        finally:
            self._clean_up()
        if self._ranks.rank == 0:
            self._remove_old()
        return target

    def _agreed_by_first(self, work: Callable[[], Any]) -> Any:
        """Returns what ``work`` returned on rank 0, which alone does it."""
        first = self._ranks.rank == 0
        return agreed(self._ranks, self._operation, work if first else lambda: None)[0]

    def _describe(self) -> dict[str, Any]:
        self._checkpoints.folder(self._step)  # refuses what is no step
        return {"step": self._step, **self._contents.describe()}

    def _check_same_step(self, described: list[dict[str, Any]]) -> None:
        for rank, each in enumerate(described):
            if each["step"] != described[0]["step"]:
                raise MismatchError(
                    f"{self._operation}: rank 0 saves step {described[0]['step']}, rank {rank} "
                    f"step {each['step']}; all ranks must save the same step"
                )

    def _begin(self, target: Path) -> str:
        latest = self._checkpoints.latest()
        if latest is not None and self._step <= latest:
            raise ArgumentError(
                f"{self._operation}: expected a step after {latest}, which is saved. After going "
                "back to an earlier step, remove() those after it, or save under another root"
            )
        for each in commit.leftovers(self._checkpoints.root):
            commit.discard(each)
        self._partial = commit.begin(target)
        return self._partial.name

    def _check_there(self, partial: Path) -> None:
        if not partial.is_dir():
            raise CheckpointError(
                f"{partial}: expected the folder that the first rank has made, but it is not "
                "there; all ranks must see the same file system, and whoever else saves at the "
                "same time, as another stage of a pipeline does, must save into another root"
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
        """After a failure; what cannot be removed now is removed by the next save."""
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
                # The new one is saved, which is what the caller has to know.
                _log.warning("%s: cannot remove step %d: %s", self._operation, step, error)
