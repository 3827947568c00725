"""Reads checkpoints of ``torch.distributed.checkpoint``, as FSDP2's users save them.

The folder's ``.metadata`` is a pickle that names each tensor's chunks, and where in the files they
are; each chunk there is a file of ``torch.save()`` of its own. Which tensors are whose follows from
the paths that the planner has kept: the optimizer's lead through "state" and "param_groups", as
``get_optimizer_state_dict()`` makes them, flattened or not, and the rest are the model's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringcomm.errors import CheckpointError
from ringcomm.extras.migrate.foreign import (
    MOMENTS,
    ForeignState,
    ForeignTensor,
    hyper_of,
    plain,
    refuse_moments,
)
from ringcomm.extras.migrate.torch_file import (
    LARGEST_PICKLE_BYTES,
    MappedFile,
    TorchFile,
    plain_pickle,
    sizes_of,
)
from ringcomm.json_reader import number_below, read_bounded, shown, text_of

Tensor = torch.Tensor
# The keys that lead to a value in nested dicts and lists.
Keys = tuple[Any, ...]

METADATA = ".metadata"
_STATE, _GROUPS = "state", "param_groups"


def read_dcp(folder: Path, weights_only: bool) -> ForeignState:
    """Reads a checkpoint.

    Args:
        folder: with a ``.metadata``.
        weights_only: leave the optimizer's state out.

    Raises:
        CheckpointError: files are missing or damaged.
        UnsupportedError: the optimizer is another one than Adam or AdamW.
        Exception: one of ``DAMAGE``: they are not what torch writes.
    """
    return _Checkpoint(folder).state(weights_only)


class _Chunk(NamedTuple):
    """Where a chunk is: bytes of a file, as a file of ``torch.save()``."""

    file: str
    begin: int
    size_bytes: int


class _Checkpoint:
    """The metadata, and what is where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            pickled = read_bounded(folder / METADATA, LARGEST_PICKLE_BYTES)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / METADATA}: cannot be read: {error}") from error
        metadata = plain_pickle(pickled, str(folder / METADATA))
        self._described: dict[str, Any] = metadata.get("state_dict_metadata")
        paths: Mapping[str, Any] = metadata.get("planner_data") or {}
        self._paths = {name: _split(paths.get(name, (name,))) for name in self._described}
        # Lists, not dicts by offsets: the hashes of integers can be made to collide.
        self._chunks: dict[str, list[tuple[tuple[int, ...], _Chunk]]] = {}
        for index, info in metadata.get("storage_data").items():
            offset = sizes_of(index.get("offset") or ())
            self._chunks.setdefault(index.get("fqn"), []).append((offset, _chunk(info)))
        chunks = sorted(chunk for some in self._chunks.values() for _, chunk in some)
        for one, other in pairwise(chunks):
            if one.file == other.file and one.begin + one.size_bytes > other.begin:
                raise ValueError(f"two chunks share bytes of {one.file}")
        self._files = {each.file: MappedFile(folder / each.file) for each in chunks}

    def _read(self, chunk: _Chunk) -> Any:
        return TorchFile(self._files[chunk.file], chunk.begin, chunk.size_bytes).read()

    def state(self, weights_only: bool) -> ForeignState:
        """Returns what was saved."""
        optimizer = self._prefix_of_optimizer()
        weights, more = self._weights(optimizer)
        size_bytes = sum(len(each.bytes) for each in self._files.values())
        made = ForeignState("DCP", size_bytes, weights, data=more, step=_step_in(more))
        if optimizer is not None and not weights_only:
            self._read_optimizer(made, optimizer)
        return made

    def _prefix_of_optimizer(self) -> Keys | None:
        """Returns the path to the optimizer's state, or None if there is none."""
        heads: dict[str, dict[str, Keys]] = {_STATE: {}, _GROUPS: {}}
        for path in self._paths.values():
            for key in heads:
                if key in path:
                    head = path[: path.index(key)]
                    heads[key][str(head)] = head
        if len(heads[_GROUPS]) > 1:
            raise ValueError(f"it has {len(heads[_GROUPS])} optimizers; one can be converted")
        return next((heads[_STATE][each] for each in heads[_GROUPS] if each in heads[_STATE]), None)

    def _weights(self, optimizer: Keys | None) -> tuple[dict[str, ForeignTensor], dict[str, Any]]:
        """Returns the model's tensors, and further plain data by name."""
        found: list[tuple[Keys, ForeignTensor]] = []
        more: dict[str, Any] = {}
        for name, path in self._paths.items():
            if optimizer is not None and path[: len(optimizer)] == optimizer and _is_state(path):
                continue
            value = self._value(name)
            if isinstance(value, ForeignTensor):
                found.append((path, value))
            else:
                more[name] = plain(value)
        if not found:
            raise ValueError("it has no tensors of a model")
        depth = _common([path for path, _ in found])
        named = {".".join(map(str, path[depth:])): each for path, each in found}
        if len(named) < len(found):
            raise ValueError("two tensors have one name")
        return named, more

    def _value(self, name: str) -> Any:
        """Returns a tensor in its chunks, or what else was saved."""
        described, chunks = self._described[name], self._chunks[name]
        if described.name.rpartition(".")[2] == "BytesStorageMetadata":
            ((_, chunk),) = chunks
            return self._read(chunk)
        size = sizes_of(described.get("size"))
        pieces = [(at or (0,) * len(size), self._read(chunk)) for at, chunk in chunks]
        dtypes = {piece.dtype for _, piece in pieces}
        if len(dtypes) != 1:
            raise ValueError(f"{name} has chunks of {len(dtypes)} dtypes")
        return ForeignTensor(dtypes.pop(), size, size, pieces)

    # ---- the optimizer --------------------------------------------------------------------------

    def _read_optimizer(self, made: ForeignState, prefix: Keys) -> None:
        names = made.weights
        groups: dict[Any, dict[str, Any]] = {}
        for name, path in self._paths.items():
            inner = path[len(prefix) :]
            if path[: len(prefix)] != prefix or not _is_state(path):
                continue
            value = self._value(name)
            if inner[0] == _STATE:
                param, kind = _param_and_rest(inner[1:], names)
                self._take_state(made, param, kind, value)
            elif isinstance(inner[1], int):
                groups.setdefault(inner[1], {})[str(inner[2])] = value
            else:
                param, key = _param_and_rest(inner[1:], names)
                groups.setdefault(param, {"params": [param]})[key] = value
        for kind in {kind for kind in made.moments if not made.moments[kind]}:
            del made.moments[kind]
        refuse_moments(sorted(made.moments), str(self._folder))
        made.moments = {kind: made.moments[kind] for kind in MOMENTS if kind in made.moments}
        _put_groups(made, groups)

    def _take_state(self, made: ForeignState, param: str, kind: str, value: Any) -> None:
        if kind == "step":
            step = value.pieces[0][1] if isinstance(value, ForeignTensor) else value
            made.steps[param] = float(step)
        elif isinstance(value, ForeignTensor):
            made.moments.setdefault(kind, {})[param] = value


def _put_groups(made: ForeignState, groups: Mapping[Any, Mapping[str, Any]]) -> None:
    """Puts param groups together: those of one parameter each where hyper-parameters are equal."""
    numbered = all(isinstance(key, int) for key in groups)
    alike: dict[str, list[str]] = {}
    for key in sorted(groups) if numbered else groups:
        hyper, params = hyper_of(groups[key]), [str(each) for each in groups[key]["params"]]
        told = text_of(hyper)
        if not numbered and told in alike:
            alike[told] += params
        else:
            alike[told] = params
            made.groups.append(hyper)
            made.group_params.append(params)


def _chunk(info: Any) -> _Chunk:
    name, (begin, size_bytes) = (
        info.get("relative_path"),
        sizes_of((info.get("offset"), info.get("length"))),
    )
    if type(name) is not str or len(name) > 255 or Path(name).name != name:
        raise ValueError(f"a file is called {shown(name)}")
    if info.get("transform_descriptors"):
        raise ValueError("its files are compressed or otherwise transformed")
    return _Chunk(name, begin, size_bytes)


def _split(path: Any) -> Keys:
    """Returns a path whose keys of a flattened optimizer's state are split off."""
    found: list[Any] = []
    for key in path if isinstance(path, (tuple, list)) else (path,):
        head, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        found += [head, rest] if dot and head in (_STATE, _GROUPS) else [key]
    if not all(type(key) is str or number_below(key, 1 << 16) for key in found):
        raise ValueError(f"expected a path of keys, got {shown(found)}")
    return tuple(found)


def _is_state(path: Keys) -> bool:
    return _STATE in path or _GROUPS in path


def _param_and_rest(inner: Keys, names: Collection[str]) -> tuple[str, str]:
    """Returns which parameter a path below "state" or "param_groups" leads to, and the last key."""
    name, _, key = ".".join(map(str, inner)).rpartition(".")
    if name not in names:
        raise ValueError(f"{shown(name)} is no parameter's name")
    return name, key


def _common(paths: list[Keys]) -> int:
    """Returns how many keys all paths begin with, less the last key of each."""
    depth = 0
    while all(len(path) > depth + 1 and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return depth


def _step_in(more: Mapping[str, Any]) -> int | None:
    """Returns the step number that was saved beside, if there is one."""
    for name, value in more.items():
        if (
            name.rpartition(".")[2] in ("step", "global_step", "global_steps")
            and type(value) is int
        ):
            return value
    return None
