"""Saved shards: checked, read across ranks, and cut anew for another world.

A shard is a dict: "state" has the tensors "step" (float64 [params]), "steps_taken" and
"skipped_steps" (float64 scalars), and "buckets", a list of dicts of tensors [chunk elements] (see
``ShardState``); "param_groups" is as in torch; "shard" is plain JSON: which rank of which world,
and the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.optim.layout import ShardLayout

Tensor = torch.Tensor
Shard = Mapping[str, Any]
ChunkTensors = list[dict[str, Tensor]]  # by bucket and name

SHARD_VERSION = 1
_FLOATS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
DTYPE_OF = {**dict.fromkeys(_FLOATS, torch.float32), "remainder": torch.int16}
_SCALARS = ("steps_taken", "skipped_steps")


def describe_shard(layout: ShardLayout, rank: int, world_size: int) -> dict[str, Any]:
    """The entry "shard", as plain JSON types."""
    return {
        "version": SHARD_VERSION,
        "rank": rank,
        "world_size": world_size,
        "layout": layout.describe(),
        "digest": layout.digest,
    }


class SavedShard:
    """One checked shard."""

    def __init__(self, saved: Any, operation: str) -> None:
        self.operation = operation
        if not isinstance(saved, Mapping) or "shard" not in saved:
            hint = (
                "; for one of torch.optim, call load_torch_state_dict()"
                if isinstance(saved, Mapping) and "param_groups" in saved
                else ""
            )
            raise CheckpointError(f"{operation}: expected the state of a shard{hint}")
        try:
            shard, self.state = saved["shard"], saved["state"]
            self.param_groups = saved["param_groups"]
            self.version, self.rank = shard["version"], shard["rank"]
            self.world_size, self.digest = shard["world_size"], shard["digest"]
            self.layout = ShardLayout.from_description(shard["layout"])
            self.step: Tensor = self.state["step"]
            self.buckets: ChunkTensors = [dict(each) for each in self.state["buckets"]]
            self.scalars = {name: float(self.state[name]) for name in _SCALARS}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{operation}: a shard cannot be read: {error!r}") from error
        self._check()

    def fail(self, text: str) -> None:
        raise CheckpointError(
            f"{self.operation}: shard of rank {self.rank} of {self.world_size}: {text}"
        )

    def _check(self) -> None:
        if self.version != SHARD_VERSION:
            self.fail(f"expected version {SHARD_VERSION}, got {self.version!r}")
        if self.digest != self.layout.digest:
            self.fail("its layout is not the one that its digest is of: the file is damaged")
        if not 0 <= self.rank < self.world_size:
            self.fail("there is no such rank")
        if self.step.shape != (len(self.layout.params),) or self.step.dtype != torch.float64:
            self.fail(f"step: expected float64 of {len(self.layout.params)} parameters")
        counts = [*self.step.tolist(), *self.scalars.values()]
        if not all(0 <= count < math.inf for count in counts):
            self.fail(f"expected step numbers from 0 on, got {counts}")
        if len(self.buckets) != len(self.layout.buckets):
            self.fail(f"expected {len(self.layout.buckets)} buckets, got {len(self.buckets)}")
        for number, tensors in enumerate(self.buckets):
            elems = self.layout.chunk(number, self.rank, self.world_size).elems
            for name in {"exp_avg", "exp_avg_sq", *tensors}:
                tensor, dtype = tensors.get(name), DTYPE_OF.get(name)
                if (
                    not isinstance(tensor, Tensor)
                    or tensor.shape != (elems,)
                    or tensor.dtype != dtype
                ):
                    got = f"{tensor.dtype} {tuple(tensor.shape)}" if tensor is not None else "none"
                    self.fail(f"bucket {number}: {name}: expected {dtype} [{elems}], got {got}")


class SavedShards:
    """All shards of a world, or one of them alone."""

    def __init__(self, saved: Sequence[Any], operation: str) -> None:
        self.operation = operation
        if not saved:
            raise CheckpointError(f"{operation}: expected at least one shard, got none")
        shards = [SavedShard(each, operation) for each in saved]
        self.first = shards[0]
        self.layout, self.world_size = self.first.layout, self.first.world_size
        self.by_rank = {shard.rank: shard for shard in shards}
        if len(self.by_rank) != len(shards):
            raise CheckpointError(f"{operation}: got two shards of one rank")
        for shard in shards:
            self._check_alike(shard)

    def _check_alike(self, shard: SavedShard) -> None:
        first = self.first
        alike = {
            "world sizes": (shard.world_size, first.world_size),
            "layouts": (shard.digest, first.digest),
            "steps": (shard.step.tolist(), first.step.tolist()),
            "step counts": (shard.scalars, first.scalars),
            "kinds of state": (
                [sorted(each) for each in shard.buckets],
                [sorted(each) for each in first.buckets],
            ),
        }
        for what, (mine, theirs) in alike.items():
            if mine != theirs:
                raise CheckpointError(
                    f"{self.operation}: the shards of ranks {first.rank} and {shard.rank} have "
                    f"different {what}; pass shards that were saved together"
                )

    @property
    def complete(self) -> bool:
        """Whether all ranks' shards are there."""
        return set(self.by_rank) == set(range(self.world_size))

    def require_all(self) -> None:
        """Raises unless :attr:`complete`."""
        if not self.complete:
            missing = sorted(set(range(self.world_size)) - set(self.by_rank))
            raise CheckpointError(
                f"{self.operation}: to load into another world or layout, pass the shards of all "
                f"{self.world_size} ranks; missing are those of {missing}"
            )

    def cut(self, layout: ShardLayout, rank: int, world_size: int) -> ChunkTensors:
        """What ``rank`` of ``world_size`` keeps under ``layout``, of equal parameters; copies."""
        mine: ChunkTensors = []
        for bucket in layout.buckets:
            chunk = bucket.chunk(rank, world_size)
            tensors = {
                name: torch.zeros(chunk.elems, dtype=DTYPE_OF[name], device="cpu")
                for name in self._names(bucket.segments[0].param)
            }
            for begin, end, param in bucket.segments:
                low, high = max(begin, chunk.begin), min(end, chunk.end)
                if low < high:
                    for name, tensor in tensors.items():
                        target = tensor[low - chunk.begin : high - chunk.begin]
                        self._read(param, name, low - begin, target)
            mine.append(tensors)
        return mine

    def _names(self, param: int) -> list[str]:
        number, _ = self.layout.places[param]
        return list(self.first.buckets[number])

    def _read(self, param: int, name: str, begin: int, target: Tensor) -> None:
        """Elements of a parameter's state from ``begin`` on, wherever ranks have them."""
        number, segment = self.layout.places[param]
        low = segment.begin + begin
        high = low + target.numel()
        for rank, shard in self.by_rank.items():
            chunk = self.layout.chunk(number, rank, self.world_size)
            a, b = max(low, chunk.begin), min(high, chunk.end)
            if a < b:
                source = shard.buckets[number][name][a - chunk.begin : b - chunk.begin]
                target[a - low : b - low].copy_(source)


def reshard(shards: Sequence[Shard], world_size: int) -> list[dict[str, Any]]:
    """Cuts the shards of one world anew for another one.

    Args:
        shards: ``state_dict()`` of all ranks, in any order; their tensors are not kept.
        world_size: how many ranks are to load them.

    Returns:
        What each rank loads, by rank; on the CPU.

    Raises:
        CheckpointError: a shard is damaged or missing, or they were not saved together.
        ArgumentError: ``world_size`` is not a positive integer.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError(f"reshard: world_size: expected an integer >= 1, got {world_size!r}")
    saved = SavedShards(list(shards), "reshard")
    saved.require_all()
    first = saved.first
    return [
        {
            "state": {
                **{
                    name: torch.tensor(first.scalars[name], dtype=torch.float64, device="cpu")
                    for name in _SCALARS
                },
                "step": first.step.clone(),
                "buckets": saved.cut(saved.layout, rank, world_size),
            },
            "param_groups": first.param_groups,
            "shard": describe_shard(saved.layout, rank, world_size),
        }
        for rank in range(world_size)
    ]
