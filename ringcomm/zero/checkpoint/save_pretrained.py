"""``save_pretrained()``: a sharded module's weights as files that Hugging Face's libraries read.

NOTE [Every rank writes its own]
Where each element lies in which file is known once names, shapes and dtypes are. So each rank
writes the runs of elements that it owns to their places, at the same time as the others, and
nothing is gathered. The first rank makes the files and their headers before, and names the folder
when all have synced what they wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ringcomm.errors import CheckpointError, where
from ringcomm.memory import normal_tensors
from ringcomm.module_names import named_parameters, unwrapped
from ringcomm.optim.agreement import all_or_none, check_agreement
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.checkpoint import commit
from ringcomm.zero.checkpoint.contents import FlatShard, blocks_of
from ringcomm.zero.checkpoint.export import (
    DEFAULT_FILE_BYTES,
    INDEX_NAME,
    Weight,
    check_choices,
    cut_into_files,
    index_of,
)
from ringcomm.zero.checkpoint.module_state import StatePart, buffers_of, model_parts
from ringcomm.zero.checkpoint.tensor_file import (
    bytes_of,
    header_of,
    in_order,
    write_file,
)
from ringcomm.zero.checkpoint.weight_names import is_transformers
from ringcomm.zero.engine import ShardEngine
from ringcomm.zero.sharding import engine_of, path_of
from ringcomm.zero.units import aliases as aliases_of

Tensor = torch.Tensor


@normal_tensors()
def save_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    dtype: torch.dtype | None = None,
    aliases: Literal["copy", "skip"] = "copy",
) -> list[Path]:
    """Writes a sharded module's weights as safetensors files; collective.

    Files are like those of :func:`export_safetensors`, and beside them is the configuration of a
    model of the transformers library, so that ``from_pretrained()`` reads the folder. Each rank
    writes what it owns, and holds no more than a block besides. The folder appears whole or not at
    all. Inside :func:`ringcomm.zero.exchanged` the weights are the values that were put in.

    Args:
        module: what ``shard()`` returned.
        path: of the folder to write, on a file system that all ranks see; there must be none yet.
        max_file_bytes: as of :func:`export_safetensors`.
        dtype: as of :func:`export_safetensors`.
        aliases: as of :func:`export_safetensors`.

    Returns:
        The safetensors files.

    Raises:
        ArgumentError: the module is not sharded, or a parameter was replaced since ``shard()``.
        CheckpointError: files cannot be written; on all ranks, and nothing is left.
        MismatchError: the ranks want different files.
    """
    engine = engine_of(module, "save_pretrained")
    target = path_of(path, "save_pretrained", "path")
    with all_or_none(engine.comm, "save_pretrained", engine.mesh):
        most_bytes = check_choices(max_file_bytes, dtype, aliases)
        engine.check_places("save_pretrained")
        owner = engine.placement.owner
        if isinstance(owner, ShardedStep):
            owner.refuse_if_torn("save_pretrained")
    told = {"path": str(path), "max_file_bytes": most_bytes, "dtype": str(dtype)}
    check_agreement(engine.comm, "save_pretrained", {"options": {**told, "aliases": aliases}})
    parts = {part.name: part for part in model_parts(engine)}
    # Ranks of a mesh have other buckets, but all have the module's own order.
    named = [*dict(named_parameters(engine.parts.module)), *buffers_of(engine.parts.module)]
    weights = [_weight(parts[f"model.{name}"], dtype) for name in named]
    tied = aliases_of(engine.parts.module)
    if aliases == "copy":
        saved = {weight.name: weight for weight in weights}
        weights += [
            Weight(alias, saved[name].saved, saved[name].dtype, saved[name].shape)
            for alias, name in tied.items()
        ]
    files = [
        _File(name, in_order([_Entry(weight) for weight in run]), {} if aliases == "copy" else tied)
        for name, run in cut_into_files(weights, most_bytes).items()
    ]
    shards = {name: part.saved_by(engine.mesh).shard() for name, part in parts.items()}
    _write(engine, target, files, shards)
    return [target / file.name for file in files]


def _weight(part: StatePart, dtype: torch.dtype | None) -> Weight:
    kind = part.local.dtype
    kind = dtype if dtype is not None and kind.is_floating_point else kind
    return Weight(part.name.removeprefix("model."), part.name, kind, part.shape)


@dataclass(frozen=True)
class _Entry:
    """A weight as a tensor of a file."""

    weight: Weight

    @property
    def key(self) -> str:
        return self.weight.name

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def size(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def size_bytes(self) -> int:
        return self.weight.size_bytes


@dataclass(frozen=True)
class _File:
    """A file to write.

    Attributes:
        name: of the file.
        entries: in the order in which they lie in it.
        tied: further names of weights, told in its metadata.
    """

    name: str
    entries: Sequence[_Entry]
    tied: Mapping[str, str]

    def header(self) -> bytes:
        here = {entry.key for entry in self.entries}
        told = {alias: name for alias, name in self.tied.items() if name in here}
        return header_of(self.entries, {"format": "pt", **told})

    def make(self, folder: Path) -> None:
        """Makes the file, with a header and room for the elements."""
        write_file(folder / self.name, self.header())
        elements = sum(entry.size_bytes for entry in self.entries)
        os.truncate(folder / self.name, len(self.header()) + elements)

    def write(self, folder: Path, shards: Mapping[str, FlatShard]) -> None:
        """Writes this rank's elements, and waits until they are on the disk."""
        out = os.open(folder / self.name, os.O_WRONLY)
        try:
            begin = len(self.header())
            for entry in self.entries:
                shard = shards[entry.weight.saved]
                for first, run in _runs(shard, entry.size):
                    blocks = blocks_of(run, shard.read)
                    _write_run(out, begin + first * entry.dtype.itemsize, blocks, entry.dtype)
                begin += entry.size_bytes
            os.fsync(out)
        finally:
            os.close(out)


def _write_run(out: int, at: int, blocks: Iterator[Tensor], dtype: torch.dtype) -> None:
    for block in blocks:
        converted = block.to(dtype)
        view = bytes_of(converted)
        while view:
            count = os.pwrite(out, view, at)
            view, at = view[count:], at + count


def _runs(shard: FlatShard, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yields the runs of a flattened tensor that are here, and where each begins."""
    for box in shard.boxes():
        if not box.local.numel():
            continue
        if len(box.offsets) == 1 and box.local.dim() == 1:
            yield box.offsets[0], box.local
            continue
        whole = len(shape)
        while whole and box.sizes[whole - 1] == shape[whole - 1]:
            whole -= 1
        # Dimensions before this one are stepped through; from it on, elements follow each other.
        outer = max(0, whole - 1)
        for at in product(*(range(size) for size in box.sizes[:outer])):
            index = [o + a for o, a in zip(box.offsets, at, strict=False)]
            index += box.offsets[outer:]
            first = sum(i * prod(shape[dim + 1 :]) for dim, i in enumerate(index))
            yield first, box.local[at].reshape(-1)


def _write(
    engine: ShardEngine, target: Path, files: Sequence[_File], shards: Mapping[str, FlatShard]
) -> None:
    """Writes the folder, on all ranks or none; collective."""
    comm, mesh, ranks = engine.comm, engine.mesh, engine.ranks
    operation = where("save_pretrained", comm.rank, comm.world_size)
    made: Path | None = None
    try:
        with all_or_none(comm, "save_pretrained", mesh), _writing(operation, target):
            if ranks.rank == 0:
                for each in commit.leftovers(target.parent, target.name):
                    commit.discard(each)
                made = commit.begin(target)
                for file in files:
                    file.make(made)
        partial = target.with_name(ranks.exchange("" if made is None else made.name)[0])
        with all_or_none(comm, "save_pretrained", mesh), _writing(operation, target):
            for file in files:
                file.write(partial, shards)
        with all_or_none(comm, "save_pretrained", mesh), _writing(operation, target):
            if made is not None:
                _finish(engine.parts.module, made, target, files)
                made = None
    finally:
        if made is not None:
            # What cannot be removed stays hidden, until the next one with this name.
            with suppress(OSError):
                commit.discard(made)


def _finish(root: nn.Module, partial: Path, target: Path, files: Sequence[_File]) -> None:
    """Adds what is not weights, and gives the folder its name."""
    weights = [entry.weight for file in files for entry in file.entries]
    if len(files) > 1:
        runs = {file.name: [entry.weight for entry in file.entries] for file in files}
        write_file(partial / INDEX_NAME, index_of(runs))
    root = unwrapped(root)
    if is_transformers(root):
        _save_config(root, partial, [weight.dtype for weight in weights])
    commit.commit(partial, target)


def _save_config(root: Any, folder: Path, dtypes: Sequence[torch.dtype]) -> None:
    """Writes a model's configuration as its own ``save_pretrained()`` does."""
    config = deepcopy(root.config)
    config.architectures = [type(root).__name__]
    config.dtype = next((each for each in dtypes if each.is_floating_point), root.dtype)
    before = set(folder.iterdir())
    config.save_pretrained(folder)
    if root.can_generate():
        root.generation_config.save_pretrained(folder)
    for path in set(folder.iterdir()) - before:
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _writing(operation: str, target: Path) -> Iterator[None]:
    """Raises CheckpointError for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{operation}: cannot write {target}: {error}; nothing is left of it"
        ) from error
