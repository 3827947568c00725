"""A model's weights out of a checkpoint, in plain safetensors files with real shapes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal

import torch

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.integers import integer
from ringcomm.json_reader import text_of
from ringcomm.module_names import KnownNames, without_wrappers
from ringcomm.zero.checkpoint import commit
from ringcomm.zero.checkpoint.reader import Reader
from ringcomm.zero.checkpoint.tensor_file import (
    BLOCK_BYTES,
    TensorEntry,
    dtype_name,
    write_file,
    write_tensor_file,
)
from ringcomm.zero.sharding import path_of

Tensor = torch.Tensor

MODEL_PREFIX = "model."
INDEX_NAME = "model.safetensors.index.json"
DEFAULT_FILE_BYTES = 5 << 30


@dataclass(frozen=True)
class Weight:
    """A tensor to write: its name in the model and where it comes from, and what it will be."""

    name: str
    saved: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


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

    The tensors whose names begin with "model." are the weights, and are written without it and
    without names of wrappers, as ``module.load_state_dict`` takes them. ``docs/checkpoint.md`` says
    which files there are. The folder appears whole or not at all, and no more than a block of a
    tensor is in memory.

    Args:
        folder: of a checkpoint. Where its data are a dict with an entry "tied", that is a dict of
            aliases of weights, both named as in the model.
        path: of the folder to write; there must be none yet.
        max_file_bytes: of the tensors in one file; a larger tensor has a file of its own.
        dtype: to convert floating-point weights to; default as saved.
        names: of the weights to write, as in the model; default all.
        aliases: "copy" writes the tensor again for each alias, so that a strict
            ``load_state_dict`` finds it; "skip" names the aliases in the file's metadata only, as
            ``safetensors.torch.save_model`` does and ``load_model`` reads.

    Returns:
        the safetensors files.

    Raises:
        ArgumentError: there is no such weight.
        CheckpointError: the checkpoint is damaged, or the files cannot be written.
    """
    source = path_of(folder, "export_safetensors", "folder")
    target = path_of(path, "export_safetensors", "path")
    most_bytes = check_choices(max_file_bytes, dtype, aliases)
    reader = Reader(source)
    tied = _tied(reader)
    weights = _weights(reader, tied if aliases == "copy" else {}, dtype)
    plain = without_wrappers([*_saved(reader), *tied])
    plain_tied = {plain[alias]: plain[name] for alias, name in tied.items()}
    if names is not None:
        weights = _chosen(reader, weights, names)
    files = cut_into_files(weights, most_bytes)
    try:
        with commit.whole(target) as partial_folder:
            for name, run in files.items():
                kept = {weight.name for weight in run} if aliases == "skip" else set()
                told = {alias: name for alias, name in plain_tied.items() if name in kept}
                entries = [_entry(reader, weight) for weight in run]
                write_tensor_file(partial_folder / name, entries, {"format": "pt", **told})
            if len(files) > 1:
                write_file(partial_folder / INDEX_NAME, index_of(files))
    except OSError as error:
        raise CheckpointError(f"export: cannot write {target}: {error}") from error
    return [target / name for name in files]


def check_choices(max_file_bytes: object, dtype: torch.dtype | None, aliases: object) -> int:
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
    """Returns the aliases in the model, with the names whose tensors they share, as saved."""
    tied = reader.data.get("tied", {}) if isinstance(reader.data, dict) else {}
    saved = set(reader.names())
    for alias, name in tied.items() if isinstance(tied, dict) else [(tied, None)]:
        if f"{MODEL_PREFIX}{name}" not in saved or f"{MODEL_PREFIX}{alias}" in saved:
            raise CheckpointError(
                f"export: {reader.folder}: data['tied'] has {alias!r} for {name!r}; expected a "
                "dict of aliases that are not saved to weights that are, named as in the model"
            )
    return dict(tied)


def _saved(reader: Reader) -> list[str]:
    """Returns the names of the weights, as saved."""
    prefix = MODEL_PREFIX
    return [name.removeprefix(prefix) for name in reader.names() if name.startswith(prefix)]


def _weights(reader: Reader, copied: Mapping[str, str], dtype: torch.dtype | None) -> list[Weight]:
    homes = {name: f"{MODEL_PREFIX}{name}" for name in _saved(reader)}
    homes |= {alias: f"{MODEL_PREFIX}{name}" for alias, name in copied.items()}
    plain = without_wrappers(homes)
    weights = []
    for name, home in ((plain[name], home) for name, home in homes.items()):
        kind = reader.dtype(home)
        if dtype is not None and kind.is_floating_point:
            kind = dtype
        weights.append(Weight(name, home, kind, reader.shape(home)))
    return weights


def _chosen(reader: Reader, weights: list[Weight], names: Collection[str]) -> list[Weight]:
    named = {weight.name for weight in weights}
    wanted = set(map(KnownNames(named).find, names))
    unknown = sorted(wanted - named)
    if unknown:
        raise ArgumentError(
            f"export: expected names of weights in {reader.folder}, got {unknown[:5]}"
        )
    return [weight for weight in weights if weight.name in wanted]


def cut_into_files(weights: list[Weight], max_file_bytes: int) -> dict[str, list[Weight]]:
    """The weights of each file, by its name."""
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


def index_of(files: Mapping[str, list[Weight]]) -> bytes:
    """Makes the index of which weight is where, as Hugging Face's libraries read it."""
    total = sum(weight.size_bytes for run in files.values() for weight in run)
    places = {weight.name: name for name, run in files.items() for weight in run}
    return text_of({"metadata": {"total_size": total}, "weight_map": places}).encode()


def _entry(reader: Reader, weight: Weight) -> TensorEntry:
    return TensorEntry(weight.name, weight.dtype, weight.shape, partial(_blocks, reader, weight))


def _blocks(reader: Reader, weight: Weight) -> Iterator[Tensor]:
    elems, kind = reader.elems(weight.saved), reader.dtype(weight.saved)
    step = BLOCK_BYTES // kind.itemsize
    for begin in range(0, elems, step):
        block = torch.empty(min(step, elems - begin), dtype=kind, device="cpu")
        reader.read(weight.saved, begin, block)
        yield block.to(weight.dtype)
