"""Reads checkpoints of ``torch.distributed.checkpoint``, as FSDP2's users save them.

The folder's ``.metadata`` is a pickle that names each tensor's chunks, and where in the files they
are; each chunk there is a file of ``torch.save()`` of its own. Which tensors are whose follows from
the paths that the planner has kept: the optimizer's lead through "state" and "param_groups", as
``get_optimizer_state_dict()`` makes them, flattened or not, and the rest are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringcomm.errors import CheckpointError
from ringcomm.zero.migrating.foreign import (
    MOMENTS,
    ForeignState,
    ForeignTensor,
    hyper_of,
    plain,
    refuse_moments,
)
from ringcomm.zero.migrating.torch_file import TorchFile, plain_pickle

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
    """
    try:
        return _Checkpoint(folder).state(weights_only)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: is no checkpoint of torch.distributed.checkpoint: {error!r}"
        ) from error


@dataclass(frozen=True)
class _Chunk:
    """Where a chunk is: bytes of a file, as a file of ``torch.save()``."""

    path: Path
    begin: int
    size_bytes: int

    def read(self) -> Any:
        return TorchFile(self.path, self.begin, self.size_bytes).read()


class _Checkpoint:
    """The metadata, and what is where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            pickled = (folder / METADATA).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error
        metadata = plain_pickle(pickled, str(folder / METADATA))
        self._described: dict[str, Any] = metadata.get("state_dict_metadata")
        paths: Mapping[str, Any] = metadata.get("planner_data") or {}
        self._paths = {name: _split(paths.get(name, (name,))) for name in self._described}
        self._chunks: dict[str, dict[tuple[int, ...], _Chunk]] = {}
        for index, info in metadata.get("storage_data").items():
            offset = index.get("offset") or ()
            self._chunks.setdefault(index.get("fqn"), {})[tuple(offset)] = self._chunk(info)

    def _chunk(self, info: Any) -> _Chunk:
        name = info.get("relative_path")
        if Path(name).name != name:
            raise ValueError(f"a file is called {name!r}")
        if info.get("transform_descriptors"):
            raise ValueError("its files are compressed or otherwise transformed")
        return _Chunk(self._folder / name, int(info.get("offset")), int(info.get("length")))

    def state(self, weights_only: bool) -> ForeignState:
        """Returns what was saved."""
        optimizer = self._prefix_of_optimizer()
        weights, more = self._weights(optimizer)
        made = ForeignState("DCP", weights, data=more, step=_step_in(more))
        if optimizer is not None and not weights_only:
            self._read_optimizer(made, optimizer)
        return made

    def _prefix_of_optimizer(self) -> Keys | None:
        """Returns the path to the optimizer's state, or None if there is none."""
        heads = {
            path[: path.index(key)]
            for path in self._paths.values()
            for key in (_STATE, _GROUPS)
            if key in path
        }
        groups = {path[: path.index(_GROUPS)] for path in self._paths.values() if _GROUPS in path}
        if len(groups) > 1:
            raise ValueError(f"it has {len(groups)} optimizers, of which one can be converted")
        return next(iter(groups & heads), None)

    def _weights(self, optimizer: Keys | None) -> tuple[dict[str, ForeignTensor], dict[str, Any]]:
        """Returns the model's tensors, and further plain data by name."""
        found: dict[Keys, ForeignTensor] = {}
        more: dict[str, Any] = {}
        for name, path in self._paths.items():
            if optimizer is not None and path[: len(optimizer)] == optimizer and _is_state(path):
                continue
            value = self._value(name)
            if isinstance(value, ForeignTensor):
                found[path] = value
            else:
                more[name] = plain(value)
        if not found:
            raise ValueError("it has no tensors of a model")
        depth = _common(list(found))
        return {".".join(map(str, path[depth:])): each for path, each in found.items()}, more

    def _value(self, name: str) -> Any:
        """Returns a tensor in its chunks, or what else was saved."""
        described, chunks = self._described[name], self._chunks[name]
        if described.name.rpartition(".")[2] == "BytesStorageMetadata":
            (chunk,) = chunks.values()
            return chunk.read()
        size = tuple(described.get("size"))
        pieces = {offset or (0,) * len(size): chunk.read() for offset, chunk in chunks.items()}
        dtypes = {piece.dtype for piece in pieces.values()}
        if len(dtypes) != 1:
            raise ValueError(f"{name} has chunks of {len(dtypes)} dtypes")
        return ForeignTensor(dtypes.pop(), size, size, pieces)

    # ---- the optimizer --------------------------------------------------------------------------

    def _read_optimizer(self, made: ForeignState, prefix: Keys) -> None:
        names = sorted(made.weights, key=len, reverse=True)
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
            step = next(iter(value.pieces.values())) if isinstance(value, ForeignTensor) else value
            made.steps[param] = float(step)
        elif isinstance(value, ForeignTensor):
            made.moments.setdefault(kind, {})[param] = value


def _put_groups(made: ForeignState, groups: Mapping[Any, Mapping[str, Any]]) -> None:
    """Puts param groups together: those of one parameter each where hyper-parameters are equal."""
    numbered = all(isinstance(key, int) for key in groups)
    for key in sorted(groups) if numbered else groups:
        hyper, params = hyper_of(groups[key]), [str(each) for each in groups[key]["params"]]
        if not numbered and hyper in made.groups:
            made.group_params[made.groups.index(hyper)] += params
        else:
            made.groups.append(hyper)
            made.group_params.append(params)


def _split(path: Any) -> Keys:
    """Returns a path whose keys of a flattened optimizer's state are split off."""
    found: list[Any] = []
    for key in path if isinstance(path, (tuple, list)) else (path,):
        head, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        found += [head, rest] if dot and head in (_STATE, _GROUPS) else [key]
    return tuple(found)


def _is_state(path: Keys) -> bool:
    return _STATE in path or _GROUPS in path


def _param_and_rest(inner: Keys, names: list[str]) -> tuple[str, str]:
    """Returns which parameter a path below "state" or "param_groups" leads to, and the rest."""
    text = ".".join(map(str, inner))
    for name in names:
        if text.startswith(f"{name}."):
            return name, text[len(name) + 1 :]
    raise ValueError(f"{text!r} begins with no parameter's name")


def _common(paths: list[Keys]) -> int:
    """Returns how many keys all paths begin with, less the last key of each."""
    depth = 0
    while (
        all(len(path) > depth + 1 for path in paths) and len({path[depth] for path in paths}) == 1
    ):
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
