# SPDX-License-Identifier: Apache-2.0
"""Example state that tests save, split over ranks in any way, and helpers that check the files."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ringcomm.comm.agreement import ModelRanks
from ringcomm.zero.checkpoint import Checkpoints, FlatShard, Reader
from tests.comm.conftest import Worlds

Tensor = torch.Tensor
Cuts = Sequence[int]  # the end of each rank's part of a tensor, except the last rank's

SHAPES: dict[str, tuple[int, ...]] = {"model.weight": (7, 11), "model.bias": (5,), "moment": (77,)}

FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]
MANIFEST = "checkpoint.json"


def values(name: str, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Makes tensor ``name`` of a step: all elements differ, also from those of other steps."""
    elems = prod(SHAPES[name])
    return (torch.arange(elems) + step * 1000 + len(name)).to(dtype)


def flat_shard(
    whole: Tensor, cuts: Cuts, rank: int, shape: tuple[int, ...] | None = None
) -> FlatShard:
    """Returns rank ``rank``'s shard of a flat tensor."""
    ends = [0, *cuts, whole.numel()]
    data = whole[ends[rank] : ends[rank + 1]].clone()
    return FlatShard(whole.numel(), ends[rank], data, shape)


def even_cuts(elems: int, world_size: int) -> list[int]:
    size = -(-elems // world_size)
    return [min(rank * size, elems) for rank in range(1, world_size)]


def state(step: int, rank: int = 0, world_size: int = 1) -> dict[str, FlatShard]:
    """Returns this rank's parts of all tensors at a step."""
    return {
        name: flat_shard(values(name, step), even_cuts(prod(shape), world_size), rank, shape)
        for name, shape in SHAPES.items()
    }


def save_step(checkpoints: Checkpoints, step: int, rank: int = 0, world_size: int = 1) -> Path:
    """Saves the tensors of :func:`state`, with shared data, per-rank data and per-rank tensors."""
    return checkpoints.save(
        step,
        state(step, rank, world_size),
        data={"step": step},
        rank_data=[rank, step],
        rank_tensors={"rng": torch.full((3,), rank + step, dtype=torch.uint8)},
    )


def assert_step(reader: Reader, step: int, world_size: int = 1) -> None:
    """Asserts that the checkpoint equals, bit for bit, the data that :func:`save_step` saved."""
    reader.verify()
    assert reader.names() == list(SHAPES)
    for name, shape in SHAPES.items():
        assert (reader.shape(name), reader.elems(name)) == (shape, prod(shape))
        out = torch.empty(prod(shape))
        reader.read(name, 0, out)
        assert torch.equal(out, values(name, step))
    assert reader.data == {"step": step} and reader.world_size == world_size
    for rank in range(world_size):
        assert reader.rank_data(rank) == [rank, step]
        assert reader.rank_tensors(rank)["rng"].tolist() == [rank + step] * 3


def load_all(folder: Path, verify: bool = True) -> list[Any]:
    """Returns all contents of a checkpoint."""
    reader = Reader(folder, verify=verify)
    told: list[Any] = [reader.data]
    for name in reader.names():
        out = torch.empty(reader.elems(name), dtype=reader.dtype(name))
        reader.read(name, 0, out)
        told.append((name, reader.shape(name), out.tolist()))
    for rank in range(reader.world_size):
        own = {name: each.tolist() for name, each in reader.rank_tensors(rank).items()}
        told.append((reader.rank_data(rank), own))
    return told


def in_world(worlds: Worlds, world_size: int, work: Callable[[ModelRanks], Any]) -> list[Any]:
    """Returns the results of ``work`` on each of ``world_size`` rank threads."""
    return list(worlds(world_size).run(lambda comm: work(ModelRanks(comm))))


def files_below(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files under a folder, by relative name."""
    return {
        os.path.relpath(path, folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def forge(folder, change):
    """Changes the manifest and updates its checksum to match, as an attacker would."""
    text = json.loads((folder / MANIFEST).read_text())
    change(text)
    body = {key: text[key] for key in text if key not in ("format", "version", "crc32")}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    text["crc32"] = f"{zlib.crc32(canonical.encode()):08x}"
    (folder / MANIFEST).write_text(json.dumps(text))
