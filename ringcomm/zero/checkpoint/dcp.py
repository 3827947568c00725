# SPDX-License-Identifier: Apache-2.0
"""Planners, reader and writer that let ``torch.distributed.checkpoint`` use checkpoint folders."""

from __future__ import annotations

import contextlib
import io
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.json_reader import decode, encode, text_of
from ringcomm.module_names import KnownNames
from ringcomm.zero.checkpoint import format as commit
from ringcomm.zero.checkpoint.folder import Reader
from ringcomm.zero.checkpoint.format import (
    DTYPE_OF_NAME,
    MANIFEST_NAME,
    DTensorBox,
    DTensorShard,
    FlatShard,
    Manifest,
    Piece,
    SavedFile,
    SavedRank,
    SavedTensor,
    TensorEntry,
    check_name,
    dtype_name,
    file_name,
    flat_boxes,
    host_slices,
    piece_key,
    write_file,
    write_tensor_file,
)

# Planners of torch.distributed.checkpoint that use JSON where torch's planners use pickle.
#
# ``DefaultSavePlanner`` writes values that are not tensors with ``torch.save``, and
# ``DefaultLoadPlanner`` reads them with ``torch.load(weights_only=False)``, which runs any code
# that the file names.


class SavePlanner(DefaultSavePlanner):
    """torch's planner for saves, except that values other than tensors are saved as JSON.

    Allowed are None, bools, ints, floats, strings, and lists, tuples and dicts of allowed values.
    Others raise UnsupportedError before a write. Arguments: as for ``DefaultSavePlanner``.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                encode(self.lookup_object(item.index), item.index.fqn)
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        return io.BytesIO(text_of(encode(object, write_item.index.fqn)).encode())


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner for loads, which also reads the JSON values of :class:`SavePlanner`.

    Arguments: as for ``DefaultLoadPlanner``.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # For names that were saved with other module wrappers: {name here: name in the checkpoint}.
        self._saved_as: dict[str, str] = {}
        if self.metadata is not None:
            self.metadata = self._with_unwrapped_names(self.metadata)
            self.state_dict, self.metadata = _alike(self.state_dict, self.metadata)

    def _with_unwrapped_names(self, saved: Metadata) -> Metadata:
        """Returns the metadata with wrapped names replaced by the state's names."""
        known, described = KnownNames(self.state_dict), {}
        for name, each in saved.state_dict_metadata.items():
            found = known.find(name)
            if found != name and found not in saved.state_dict_metadata:
                self._saved_as[found] = name
                name = found
            described[name] = each
        return replace(saved, state_dict_metadata=described)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = [
            replace(item, storage_index=replace(item.storage_index, fqn=saved))
            if (saved := self._saved_as.get(item.storage_index.fqn))
            else item
            for item in plan.items
        ]
        return replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = decode(json.loads(value.getvalue()))
        container: Any = self.original_state_dict
        *path, last = self.mappings[name] if self.flatten_state_dict else (name,)
        for key in path:
            container = container[_own_key(container, key)]
        container[_own_key(container, last)] = loaded


def _alike(state: dict[str, Any], saved: Metadata) -> tuple[dict[str, Any], Metadata]:
    """Makes shards and saved pieces both flat, or both boxes; see :class:`DTensorShard`."""
    state, described = dict(state), dict(saved.state_dict_metadata)
    for name, wanted in state.items():
        there = described.get(name)
        if not isinstance(wanted, FlatShard) or not isinstance(there, TensorStorageMetadata):
            continue
        shape = wanted.param_shape
        if wanted.size() == there.size or prod(shape) != prod(there.size):
            continue  # sizes are equal already, or numbers of elements differ (torch will raise)
        if isinstance(wanted, DTensorShard):
            described[name] = replace(there, size=torch.Size(shape), chunks=_boxes(there, shape))
        else:
            whole = DTensorBox(shape, (0,) * len(shape), shape)
            state[name] = DTensorShard(whole, wanted.begin, wanted.local)
    return state, replace(saved, state_dict_metadata=described)


def _boxes(flat: TensorStorageMetadata, shape: Sequence[int]) -> list[ChunkStorageMetadata]:
    """Returns the chunks of a flat tensor as boxes of its real shape."""
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for chunk in flat.chunks
        for offsets, sizes in flat_boxes(shape, chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
    ]


def _own_key(container: Any, key: str | int) -> Any:
    """Returns a container's own key, for a key that torch may have converted to a string."""
    if isinstance(container, dict) and key not in container:
        return next(each for each in container if str(each) == key)
    return key


# The reader of torch.distributed.checkpoint for checkpoint folders.


class StorageReader(storage.StorageReader):
    """Loads a state dict from a checkpoint folder that any of ringcomm's functions has saved.

    ``dcp.load(state_dict, storage_reader=StorageReader(path), planner=LoadPlanner())``

    Tensors in the state dict must have the saved dtypes. An error on any rank is raised on all
    ranks as torch's ``CheckpointException``, which has the original error in ``failures``.

    Args:
        path: the folder.
        verify: as for :class:`~ringcomm.zero.checkpoint.Reader`.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__()
        self.path = Path(path)
        self._verify = verify
        self._opened: Reader | None = None

    def __repr__(self) -> str:
        return f"<ringcomm.zero.checkpoint.StorageReader of {self.path}>"

    @property
    def checkpoint_id(self) -> Path:
        """The folder from which this reader loads."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            self._opened = Reader(self.path, verify=self._verify)
        except CheckpointError as error:
            return _Unreadable(error)
        return _metadata(self._opened.manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> Future[None]:
        reader = self._opened or Reader(self.path, verify=self._verify)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _load_value(reader, item, planner)
            else:
                target = planner.resolve_tensor(item).detach()
                begins = zip(item.storage_index.offset or (), item.storage_offsets, strict=True)
                offsets = [piece + offset for piece, offset in begins]
                reader.read_box(item.storage_index.fqn, offsets, target)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Unreadable(Metadata):
    """Metadata that could not be read: access to its entries raises the error.

    If ``read_metadata`` itself raises, torch replaces the error by "metadata is None". Errors that
    are raised later reach all ranks.
    """

    def __init__(self, error: CheckpointError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        if name == "state_dict_metadata":
            raise self.error
        raise AttributeError(name)


def _metadata(manifest: Manifest) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, saved in manifest.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            for piece in saved.pieces
        ]
        properties = TensorProperties(dtype=DTYPE_OF_NAME[saved.dtype])
        described[name] = TensorStorageMetadata(properties, torch.Size(saved.size), chunks)
    for name in manifest.values:
        described[name] = BytesStorageMetadata()
    return Metadata(described)


def _load_value(reader: Reader, item: ReadItem, planner: AnyLoadPlanner) -> None:
    name = item.storage_index.fqn
    if not isinstance(planner, LoadPlanner):
        raise UnsupportedError(
            f"{name}: {type(planner).__name__} may unpickle values that are not tensors, and this "
            "checkpoint has no pickles; pass planner=ringcomm.zero.checkpoint.LoadPlanner()"
        )
    text = text_of(encode(reader.manifest.values[name], name))
    planner.load_bytes(item, io.BytesIO(text.encode()))


Tensor = torch.Tensor


# The writer of torch.distributed.checkpoint for checkpoint folders.
#
# torch's ``torch/distributed/checkpoint/storage.py`` documents which rank makes which call, and in
# which order.


@dataclass(frozen=True)
class _Wrote:
    """A rank's record of an item that it has written, for the coordinator.

    Attributes:
        value: the value of an item that is not a tensor.
        piece: the piece of an item that is a tensor; None if it has no elements.
        file: the file that contains the piece.
        shape: the real shape of a flat shard.
    """

    value: Any = None
    piece: Piece | None = None
    file: SavedFile | None = None
    shape: tuple[int, ...] | None = None


class StorageWriter(storage.StorageWriter):
    """Saves a state dict as a checkpoint folder, which appears whole or not at all.

    ``dcp.save(state_dict, storage_writer=StorageWriter(path), planner=SavePlanner())``

    An error on any rank is raised on all ranks as torch's ``CheckpointException``, which has the
    original error in ``failures``. The files of a failed save stay in a hidden folder, which is
    deleted when the coordinator's StorageWriter is freed, or by the next save to ``path``.

    Args:
        path: the folder; it must not exist, and all ranks must see its parent folder.
        data: JSON data of the user; only the coordinator's data are saved.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: Any = None) -> None:
        super().__init__()
        self.path = Path(path)
        self._data = data
        self._partial = self.path  # the coordinator replaces it by the hidden folder
        self._clean_up: Callable[[], object] = _nothing

    def __repr__(self) -> str:
        return f"<ringcomm.zero.checkpoint.StorageWriter to {self.path}>"

    @property
    def checkpoint_id(self) -> Path:
        """The folder to which this writer saves."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                f"{self.path}: a checkpoint is one folder that all ranks agree on; save with "
                "use_collectives=True"
            )
        encode(self._data, "data")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            check_name(item.index.fqn)
            if item.tensor_data is not None:
                dtype_name(item.tensor_data.properties.dtype, item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(plan.usable for plan in plans):
            raise UnsupportedError(
                f"{self.path}: plans cached by an earlier save contain the earlier save's folder; "
                "use a planner with enable_plan_caching=False"
            )
        self._clean_up()
        for each in commit.leftovers(self.path.parent, self.path.name):
            commit.discard(each)
        self._partial = commit.begin(self.path)
        # torch does not report ranks' errors to this object, so a finalizer cleans up.
        self._clean_up = weakref.finalize(self, _discard, self._partial, os.getpid())
        name = self._partial.name
        return [replace(plan, storage_data=(name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        name, rank = plan.storage_data
        folder = self.path.with_name(name)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: expected the folder that the coordinator has made, but it is not "
                "there; all ranks must see the same file system"
            )
        results = _write_items(folder / file_name(rank), plan.items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        manifest = _manifest(metadata, results, self._data)
        write_file(self._partial / MANIFEST_NAME, manifest.to_text().encode())
        commit.commit(self._partial, self.path)


def _nothing() -> None:
    pass


def _discard(partial_folder: Path, process: int) -> None:
    """Removes the hidden folder of a failed save; does nothing in a forked child."""
    if os.getpid() == process and partial_folder.exists():
        with contextlib.suppress(OSError):
            commit.discard(partial_folder)


def _write_items(
    path: Path, items: Sequence[WriteItem], planner: AnySavePlanner
) -> list[WriteResult]:
    """Writes a rank's tensors, if any, into the rank's file; returns the results for torch."""
    entries, pieces = [], {}
    for item in items:
        data = item.tensor_data
        if data is not None and data.chunk.sizes.numel():
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            key = piece_key(item.index.fqn, offsets)
            pieces[item.index] = Piece(offsets, sizes, path.name, key)
            slices = partial(_slices, planner, item)
            entries.append(TensorEntry(key, data.properties.dtype, sizes, slices))
    file = write_tensor_file(path, entries) if entries else None
    results = []
    for item in items:
        if item.tensor_data is None:
            wrote = _Wrote(_value(planner, item))
        else:
            wrote = _Wrote(None, pieces.get(item.index), file, _shape(planner, item))
        results.append(WriteResult(item.index, _size_bytes(item.tensor_data), wrote))
    return results


def _slices(planner: AnySavePlanner, item: WriteItem) -> Iterator[Tensor]:
    return host_slices(cast("Tensor", planner.resolve_data(item)))


def _value(planner: AnySavePlanner, item: WriteItem) -> Any:
    if not isinstance(planner, SavePlanner):
        raise UnsupportedError(
            f"{item.index.fqn}: {type(planner).__name__} may pickle values that are not tensors, "
            "and no pickle is written; pass planner=ringcomm.zero.checkpoint.SavePlanner()"
        )
    text = cast("io.BytesIO", planner.resolve_data(item)).getvalue()
    return decode(json.loads(text))


def _shape(planner: AnySavePlanner, item: WriteItem) -> tuple[int, ...] | None:
    """Returns the real shape of a flat shard, for which torch's plans have no field."""
    state = planner.state_dict if isinstance(planner, DefaultSavePlanner) else {}
    saved = state.get(item.index.fqn)
    return saved.param_shape if isinstance(saved, FlatShard) else None


def _size_bytes(data: TensorWriteData | None) -> int:
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _manifest(metadata: Metadata, results: list[list[WriteResult]], data: Any) -> Manifest:
    files: dict[str, SavedFile] = {}
    pieces: dict[str, list[Piece]] = {}
    values: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for result in (each for rank in results for each in rank):
        name, wrote = result.index.fqn, result.storage_data
        if wrote.piece is not None:
            pieces.setdefault(name, []).append(wrote.piece)
            files[wrote.piece.file] = wrote.file
        if wrote.shape is not None:
            shapes[name] = wrote.shape
        if not isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata):
            values[name] = wrote.value
    tensors = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            size = tuple(described.size)
            dtype = dtype_name(described.properties.dtype, name)
            parts = sorted(pieces.get(name, []), key=lambda piece: piece.offsets)
            tensors[name] = SavedTensor(dtype, size, shapes.get(name, size), tuple(parts))
    manifest = Manifest(tensors, files, tuple(SavedRank() for _ in results), data, values)
    try:
        manifest.check()
    except ValueError as error:
        raise CheckpointError(f"save: the ranks do not save whole tensors: {error}") from error
    return manifest
