# SPDX-License-Identifier: Apache-2.0
"""Exports weights of a checkpoint or a sharded module to files for Hugging Face's libraries.

NOTE [Every rank writes its own]
Names, shapes and dtypes determine the place of each element in the files. So all ranks of a sharded
module write at the same time: each rank writes its own contiguous elements at their offsets, and
nothing is gathered. Before this the first rank makes the files and headers. After all ranks have
synced their data, the first rank gives the folder its name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ringcomm.comm.agreement import all_or_none, check_agreement
from ringcomm.errors import ArgumentError, CheckpointError, where
from ringcomm.integers import integer
from ringcomm.json_reader import text_of
from ringcomm.memory import normal_tensors
from ringcomm.module_names import KnownNames, named_parameters, unwrapped, without_wrappers
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.checkpoint import format as commit
from ringcomm.zero.checkpoint.folder import Reader
from ringcomm.zero.checkpoint.format import (
    SLICE_BYTES,
    FlatShard,
    TensorEntry,
    bytes_of,
    dtype_name,
    header_of,
    in_order,
    slices_of,
    write_file,
    write_tensor_file,
)
from ringcomm.zero.checkpoint.pretrained import INDEX_NAME, is_transformers
from ringcomm.zero.checkpoint.state import buffers_of, model_shards
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.sharding import engine_of, path_of
from ringcomm.zero.stages.units import aliases as aliases_of

Tensor = torch.Tensor

MODEL_PREFIX = "model."
DEFAULT_FILE_BYTES = 5 << 30


@dataclass(frozen=True)
class Weight:
    """A tensor to be written.

    Attributes:
        key: its name in the model and in the file.
        saved: the name of its source tensor; aliases have the same source tensor.
        dtype, size: dtype and size in the file.
    """

    key: str
    saved: str
    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


def export_safetensors(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
    aliases: Literal["copy", "skip"] = "copy",
) -> list[Path]:
    """Writes the weights of a checkpoint as a folder of safetensors files; in one process.

    The weights are the tensors whose names begin with "model." They are written without this prefix
    and without names of wrappers, as ``module.load_state_dict`` expects them.
    ``docs/checkpoint.md`` lists the files. The folder appears whole or not at all, and at most one
    slice of a tensor is in memory.

    Args:
        folder: the folder of a checkpoint. If its data are a dict with an entry "tied", this entry
            is a dict from names of aliases in the model to names of weights in the model.
        path: the folder to write; it must not exist.
        max_file_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.
        dtype: dtype to which floating-point weights are converted; default as saved.
        names: names in the model of the weights to write; default all.
        aliases: "copy" writes the tensor again for each alias, so that a strict ``load_state_dict``
            finds it; "skip" only names the aliases in the file's metadata, as
            ``safetensors.torch.save_model`` does and ``load_model`` reads.

    Returns:
        The safetensors files.

    Raises:
        ArgumentError: ``names`` has a name that is not a weight, or an option has a bad value.
        CheckpointError: the checkpoint is damaged, or the files cannot be written.
    """
    source = path_of(folder, "export_safetensors", "folder")
    target = path_of(path, "export_safetensors", "path")
    most_bytes = _check_choices(max_file_bytes, dtype, aliases)
    reader = Reader(source)
    tied = _tied(reader)
    weights = _weights(reader, tied if aliases == "copy" else {}, dtype)
    renamed = without_wrappers([*_saved(reader), *tied])
    told = {renamed[alias]: renamed[name] for alias, name in tied.items() if aliases == "skip"}
    if names is not None:
        weights = _chosen(reader, weights, names)
    files = _cut_into_files(weights, most_bytes)
    try:
        with commit.whole(target) as partial_folder:
            for name, run in files.items():
                entries = [_entry(reader, weight) for weight in run]
                write_tensor_file(partial_folder / name, entries, _metadata(run, told))
            if len(files) > 1:
                write_file(partial_folder / INDEX_NAME, _index_of(files))
    except OSError as error:
        raise CheckpointError(f"export: cannot write {target}: {error}") from error
    return [target / name for name in files]


def _check_choices(max_file_bytes: object, dtype: torch.dtype | None, aliases: object) -> int:
    """Checks the options of an export and returns ``max_file_bytes`` as an int.

    Raises:
        ArgumentError: an option has a bad value.
        UnsupportedError: safetensors files do not have the dtype.
    """
    most_bytes = integer(max_file_bytes)
    if most_bytes is None or most_bytes < 1:
        raise ArgumentError(
            f"export: max_file_bytes: expected a positive number, got {max_file_bytes!r}"
        )
    if aliases not in ("copy", "skip"):
        raise ArgumentError(f'export: aliases: expected "copy" or "skip", got {aliases!r}')
    if dtype is not None:
        dtype_name(dtype, "export")
        if not dtype.is_floating_point:
            raise ArgumentError(f"export: expected a floating-point dtype, got {dtype}")
    return most_bytes


def _tied(reader: Reader) -> dict[str, str]:
    """Returns, for each alias in the model, the saved name of the tensor that it shares."""
    tied = reader.data.get("tied", {}) if isinstance(reader.data, dict) else {}
    saved = set(reader.names())
    if not isinstance(tied, dict):
        raise CheckpointError(
            f"export: {reader.folder}: data['tied']: expected a dict from aliases to names of "
            f"saved weights, got {tied!r}"
        )
    for alias, name in tied.items():
        if f"{MODEL_PREFIX}{name}" not in saved or f"{MODEL_PREFIX}{alias}" in saved:
            raise CheckpointError(
                f"export: {reader.folder}: data['tied'] maps {alias!r} to {name!r}; expected to "
                "map an alias, which is not saved, to a saved weight, both named as in the model"
            )
    return dict(tied)


def _saved(reader: Reader) -> list[str]:
    """Returns the names of the weights, as saved."""
    prefix = MODEL_PREFIX
    return [name.removeprefix(prefix) for name in reader.names() if name.startswith(prefix)]


def _weights(reader: Reader, copied: Mapping[str, str], dtype: torch.dtype | None) -> list[Weight]:
    homes = {name: f"{MODEL_PREFIX}{name}" for name in _saved(reader)}
    homes |= {alias: f"{MODEL_PREFIX}{name}" for alias, name in copied.items()}
    renamed = without_wrappers(homes)
    weights = []
    for name, home in ((renamed[name], home) for name, home in homes.items()):
        weights.append(Weight(name, home, _kind(reader.dtype(home), dtype), reader.shape(home)))
    return weights


def _kind(saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that a weight of dtype ``saved`` gets in the file."""
    return wanted if wanted is not None and saved.is_floating_point else saved


def _chosen(reader: Reader, weights: list[Weight], names: Collection[str]) -> list[Weight]:
    named = {weight.key for weight in weights}
    wanted = set(map(KnownNames(named).find, names))
    unknown = sorted(wanted - named)
    if unknown:
        raise ArgumentError(
            f"export: expected names of weights in {reader.folder}, got {unknown[:5]}"
        )
    return [weight for weight in weights if weight.key in wanted]


def _cut_into_files(weights: list[Weight], max_file_bytes: int) -> dict[str, list[Weight]]:
    """Returns the weights of each file, by the file's name."""
    runs: list[list[Weight]] = [[]]
    held = 0
    for weight in weights:
        if runs[-1] and held + weight.size_bytes > max_file_bytes:
            runs.append([])
            held = 0
        runs[-1].append(weight)
        held += weight.size_bytes
    if len(runs) == 1:
        return {"model.safetensors": runs[0]}
    return {
        f"model-{number:05d}-of-{len(runs):05d}.safetensors": run
        for number, run in enumerate(runs, 1)
    }


def _metadata(weights: Sequence[Weight], tied: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata of a file, with the aliases of its weights."""
    here = {weight.key for weight in weights}
    return {"format": "pt", **{alias: name for alias, name in tied.items() if name in here}}


def _index_of(files: Mapping[str, Sequence[Weight]]) -> bytes:
    """Returns an index with the file of each weight, in the form of Hugging Face's libraries."""
    total = sum(weight.size_bytes for run in files.values() for weight in run)
    weight_map = {weight.key: name for name, run in files.items() for weight in run}
    return text_of({"metadata": {"total_size": total}, "weight_map": weight_map}).encode()


def _entry(reader: Reader, weight: Weight) -> TensorEntry:
    return TensorEntry(weight.key, weight.dtype, weight.size, partial(_slices, reader, weight))


def _slices(reader: Reader, weight: Weight) -> Iterator[Tensor]:
    elems, kind = reader.elems(weight.saved), reader.dtype(weight.saved)
    step = SLICE_BYTES // kind.itemsize
    for begin in range(0, elems, step):
        values = torch.empty(min(step, elems - begin), dtype=kind, device="cpu")
        reader.read(weight.saved, begin, values)
        yield values.to(weight.dtype)


# ---- a sharded module: see NOTE [Every rank writes its own] --------------------------------------


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

    The files are like the files of :func:`export_safetensors`. A model of the transformers library
    also gets its configuration, so that ``from_pretrained()`` can read the folder. Each rank writes
    the elements that it owns, and copies at most one slice at a time. The folder appears whole or
    not at all. Inside :func:`ringcomm.zero.exchanged` the exchanged values are written.

    Args:
        module: the module that ``shard()`` returned.
        path: the folder to write, on a file system that all ranks see; it must not exist.
        max_file_bytes: as for :func:`export_safetensors`.
        dtype: as for :func:`export_safetensors`.
        aliases: as for :func:`export_safetensors`.

    Returns:
        The safetensors files.

    Raises:
        ArgumentError: the module is not sharded, or a parameter was replaced since ``shard()``.
        CheckpointError: files cannot be written; raised on all ranks, and no files remain.
        MismatchError: the ranks pass different arguments.
    """
    engine = engine_of(module, "save_pretrained")
    target = path_of(path, "save_pretrained", "path")
    with all_or_none(engine.comm, "save_pretrained", engine.mesh):
        most_bytes = _check_choices(max_file_bytes, dtype, aliases)
        engine.check_slots("save_pretrained")
        owner = engine.placement.owner
        if isinstance(owner, ShardedStep):
            owner.refuse_if_partly_updated("save_pretrained")
    told = {"path": str(path), "max_file_bytes": most_bytes, "dtype": str(dtype)}
    check_agreement(engine.comm, "save_pretrained", {"options": {**told, "aliases": aliases}})
    parts = {part.name: part for part in model_shards(engine)}
    # The order of buckets differs between ranks of a mesh, but the order in the module does not.
    named = [*dict(named_parameters(engine.setup.module)), *buffers_of(engine.setup.module)]
    homes = {name: parts[f"{MODEL_PREFIX}{name}"] for name in named}
    tied = aliases_of(engine.setup.module)
    if aliases == "copy":
        homes |= {alias: homes[name] for alias, name in tied.items()}
        tied = {}
    weights = [
        Weight(name, part.name, _kind(part.local.dtype, dtype), part.shape)
        for name, part in homes.items()
    ]
    files = [
        _ExportedFile(name, in_order(run), tied)
        for name, run in _cut_into_files(weights, most_bytes).items()
    ]
    shards = {name: part.saved_by(engine.mesh).shard() for name, part in parts.items()}
    _write(engine, target, files, shards)
    return [target / file.name for file in files]


@dataclass(frozen=True)
class _ExportedFile:
    """A file to be written.

    Attributes:
        name: name of the file.
        weights: the weights, in their order in the file.
        tied: further names of weights, for the file's metadata.
    """

    name: str
    weights: Sequence[Weight]
    tied: Mapping[str, str]

    def header(self) -> bytes:
        return header_of(self.weights, _metadata(self.weights, self.tied))

    def make(self, folder: Path) -> None:
        """Makes the file, with its header and space for the elements."""
        header = self.header()
        write_file(folder / self.name, header)
        elements = sum(weight.size_bytes for weight in self.weights)
        os.truncate(folder / self.name, len(header) + elements)

    def write(self, folder: Path, shards: Mapping[str, FlatShard]) -> None:
        """Writes this rank's elements, and waits until they are on the disk."""
        out = os.open(folder / self.name, os.O_WRONLY)
        try:
            begin = len(self.header())
            for weight in self.weights:
                shard = shards[weight.saved]
                for first, run in _runs(shard, weight.size):
                    slices = slices_of(run, shard.read)
                    _write_run(out, begin + first * weight.dtype.itemsize, slices, weight.dtype)
                begin += weight.size_bytes
            os.fsync(out)
        finally:
            os.close(out)


def _write_run(out: int, at: int, slices: Iterator[Tensor], dtype: torch.dtype) -> None:
    for values in slices:
        converted = values.to(dtype)
        view = bytes_of(converted)
        while view:
            count = os.pwrite(out, view, at)
            view, at = view[count:], at + count


def _runs(shard: FlatShard, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yields (first index, elements) of this rank's contiguous parts of a flattened tensor."""
    for box in shard.boxes():
        if not box.local.numel():
            continue
        if len(box.offsets) == 1 and box.local.dim() == 1:
            yield box.offsets[0], box.local
            continue
        whole = len(shape)
        while whole and box.sizes[whole - 1] == shape[whole - 1]:
            whole -= 1
        # Loop over the dimensions before ``outer``; later dimensions are contiguous.
        outer = max(0, whole - 1)
        for at in product(*(range(size) for size in box.sizes[:outer])):
            index = [o + a for o, a in zip(box.offsets, at, strict=False)]
            index += box.offsets[outer:]
            first = sum(i * prod(shape[dim + 1 :]) for dim, i in enumerate(index))
            yield first, box.local[at].reshape(-1)


def _write(
    engine: ShardEngine,
    target: Path,
    files: Sequence[_ExportedFile],
    shards: Mapping[str, FlatShard],
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
                _finish(engine.setup.module, made, target, files)
                made = None
    finally:
        if made is not None:
            # A folder that cannot be removed stays hidden until the next save under this name.
            with suppress(OSError):
                commit.discard(made)


def _finish(root: nn.Module, partial: Path, target: Path, files: Sequence[_ExportedFile]) -> None:
    """Adds the files other than weights, and gives the folder its final name."""
    if len(files) > 1:
        runs = {file.name: file.weights for file in files}
        write_file(partial / INDEX_NAME, _index_of(runs))
    root = unwrapped(root)
    if is_transformers(root):
        dtypes = [weight.dtype for file in files for weight in file.weights]
        _save_config(root, partial, dtypes)
    commit.commit(partial, target)


def _save_config(root: Any, folder: Path, dtypes: Sequence[torch.dtype]) -> None:
    """Writes a model's configuration, as the model's own ``save_pretrained()`` does."""
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
    """Raises CheckpointError if the body raises OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{operation}: cannot write {target}: {error}; none of its files remain"
        ) from error
