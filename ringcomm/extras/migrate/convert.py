"""``convert()``: checkpoints of DeepSpeed and of torch's own become ringcomm's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.extras.migrate.dcp_checkpoint import METADATA, read_dcp
from ringcomm.extras.migrate.deepspeed_checkpoint import find_folder, read_deepspeed
from ringcomm.extras.migrate.foreign import ForeignState, ForeignTensor
from ringcomm.integers import integer
from ringcomm.json_reader import DAMAGE, in_words, shown
from ringcomm.module_names import without_wrappers
from ringcomm.zero.checkpoint import Checkpoints, commit
from ringcomm.zero.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Piece,
    RankRecord,
    SavedTensor,
    check_fill,
    file_name,
    piece_key,
)
from ringcomm.zero.checkpoint.module_state import VERSION
from ringcomm.zero.checkpoint.tensor_file import (
    TensorEntry,
    dtype_name,
    host_blocks,
    write_file,
    write_tensor_file,
)

Tensor = torch.Tensor
T = TypeVar("T")

OPERATION = "convert"
# Weights of a byte become at most themselves and three FP32 moments.
_MOST_GROWTH = 16


def convert(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    step: int | None = None,
) -> Path:
    """Writes a checkpoint of another library as one of ringcomm's, for :func:`ringcomm.zero.load`.

    It runs in one process. Pickles are read without running anything, tensors are views of the
    files and written in blocks, so memory for a whole model is not needed. Weights are written in
    FP32 where the source has them, as masters or weights, and buffers as they were saved: a module
    of any precision loads them, its FP32 masters exactly and its 16-bit parameters rounded.

    Args:
        source: folder of a DeepSpeed checkpoint (ZeRO stages 1 to 3) or of one of
            ``torch.distributed.checkpoint``.
        root: a run's folder, in which the checkpoint becomes step-00000100 or so.
        weights_only: leave the optimizer's state out.
        step: number of the checkpoint; default as saved, or 0.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the source is damaged, or none of these; or it cannot be written.
        UnsupportedError: it has what cannot be converted; the message says what.
        ArgumentError: the step is no integer, or not after those in ``root``.
    """
    state = read(Path(source), weights_only)
    number = integer((state.step or 0) if step is None else step)
    if number is None:
        raise ArgumentError(f"{OPERATION}: step: expected a number from 0 on, got {shown(step)}")
    checkpoints = Checkpoints(root, keep=None)
    latest = checkpoints.latest()
    if latest is not None and number <= latest:
        raise ArgumentError(
            f"{OPERATION}: {root}: expected a step after {latest}, which is there, got {number}"
        )
    target = checkpoints.folder(number)
    try:
        with commit.whole(target) as partial_folder:
            _write(partial_folder, state)
    except OSError as error:
        raise CheckpointError(f"{OPERATION}: cannot write {target}: {error}") from error
    return target


def read(source: Path, weights_only: bool) -> ForeignState:
    """Reads a checkpoint of another library.

    Raises: as of :func:`convert`.
    """
    folder, state = None, None
    try:
        if (source / METADATA).is_file():
            state = read_dcp(source, weights_only)
        else:
            folder = find_folder(source) if source.is_dir() else None
            if folder is not None:
                state = read_deepspeed(folder, weights_only)
        if state is not None:
            state.check()
    except (CheckpointError, UnsupportedError):
        raise
    except DAMAGE as error:
        kind = "torch.distributed.checkpoint" if folder is None else "DeepSpeed"
        raise CheckpointError(f"{source}: is no checkpoint of {kind}: {in_words(error)}") from error
    if state is None:
        raise CheckpointError(
            f"{OPERATION}: {source}: expected a folder of DeepSpeed, with files "
            "*_optim_states.pt or a file latest, or of torch.distributed.checkpoint, with .metadata"
        )
    return _in_plain_names(state)


def _in_plain_names(state: ForeignState) -> ForeignState:
    """Returns a state whose parameters and buffers are named without wrappers."""
    plain = without_wrappers([*state.weights, *state.tied])
    if all(name == each for name, each in plain.items()):
        return state

    def by_name(values: Mapping[str, T]) -> dict[str, T]:
        return {plain.get(name, name): value for name, value in values.items()}

    return replace(
        state,
        weights=by_name(state.weights),
        masters=by_name(state.masters),
        moments={kind: by_name(each) for kind, each in state.moments.items()},
        steps=by_name(state.steps),
        group_params=[[plain.get(name, name) for name in each] for each in state.group_params],
        tied={plain[alias]: plain.get(name, name) for alias, name in state.tied.items()},
    )


def _write(folder: Path, state: ForeignState) -> None:
    tensors = dict(_tensors(state))
    saved, entries = {}, []
    for name, (tensor, kind) in tensors.items():
        pieces = []
        for offsets, piece in tensor.pieces:
            key = piece_key(name, offsets)
            sizes = tuple(piece.shape)
            if not prod(sizes):
                continue
            pieces.append(Piece(offsets, sizes, file_name(0), key))
            entries.append(TensorEntry(key, kind, sizes, partial(_blocks, piece, kind)))
        pieces.sort(key=lambda piece: piece.offsets)
        try:
            check_fill(tensor.size, pieces)
        except ValueError as error:
            raise CheckpointError(f"{OPERATION}: tensor {shown(name)}: {error}") from error
        named = dtype_name(kind, name)
        saved[name] = SavedTensor(named, tensor.size, tensor.shape, tuple(pieces))
    size_bytes = sum(entry.size_bytes for entry in entries)
    if size_bytes > _MOST_GROWTH * state.size_bytes:
        raise CheckpointError(
            f"{OPERATION}: expected tensors of at most {_MOST_GROWTH} times the "
            f"{state.size_bytes} bytes of their files, got {size_bytes} bytes: many share memory"
        )
    files = {file_name(0): write_tensor_file(folder / file_name(0), entries)}
    records = (RankRecord({"generators": None, "extra": {}}, {}),)
    data = {"ringcomm": _facts(state), "tied": state.tied, "user": state.data}
    manifest = Manifest(saved, files, records, data)
    write_file(folder / MANIFEST_NAME, manifest.to_text().encode())


def _blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    for block in host_blocks(tensor):
        yield block.to(dtype)


def _tensors(state: ForeignState) -> Iterator[tuple[str, tuple[ForeignTensor, torch.dtype]]]:
    """Yields by its name in the checkpoint each tensor, and the dtype to write it in."""
    for name, weight in state.weights.items():
        exact = state.masters.get(name, weight)
        yield f"model.{name}", (exact, exact.dtype)
    for moment, tensors in state.moments.items():
        for name in _steps(state):
            # A parameter without a gradient so far has no state.
            zeros = ForeignTensor.zeros(state.weights[name].shape)
            yield f"optim.{moment}.{name}", (tensors.get(name, zeros), torch.float32)


def _facts(state: ForeignState) -> dict[str, Any]:
    """Returns what ringcomm's own checkpoints say beside their tensors."""
    facts: dict[str, Any] = {
        "version": VERSION,
        "stage": 0,
        # No world has this size, so that no rank's own state is looked for.
        "world_size": 0,
        "converted": state.kind,
        "params": list(state.weights),
        "optimizer": None,
    }
    if state.groups:
        steps = _steps(state)
        facts["optimizer"] = {
            "steps": steps,
            "steps_taken": max(steps.values(), default=0.0),
            "skipped_steps": 0.0,
            "groups": state.groups,
            "group_params": state.group_params,
            "kinds": sorted(state.moments),
            "loss_scaler": None,
        }
    return facts


def _steps(state: ForeignState) -> Mapping[str, float]:
    """Returns the steps of all parameters in groups; those without state have taken none."""
    return {name: state.steps.get(name, 0.0) for names in state.group_params for name in names}
