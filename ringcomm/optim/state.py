# SPDX-License-Identifier: Apache-2.0
"""Saves and loads an optimizer's state as shards, for worlds of any size.

A shard is a dict with three entries. "param_groups" is as in torch.

"state" has the tensors "step" (float64 [params]), "steps_taken" and "skipped_steps" (float64
scalars), and "buckets": per bucket, a dict of tensors [chunk elements] (see ``ShardState``). With
Adafactor it also has "whole": per parameter, a dict of tensors that are equal on all ranks. With
error feedback it also has "error_feedback": per bucket, buffers (see ``ErrorFeedback``) or None.

"shard" has, as JSON types, the rank, the world size and the layout. The rank is the index of the
chunk (``StepCalls.shard_index`` over several nodes). With ``AdamWOptions(state="node")`` rank and
world size are within the node, and all nodes have equal shards. For an optimizer other than AdamW
"shard" also has its name and each parameter's further state; with error feedback, the node's
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ringcomm.comm.agreement import agreed_load
from ringcomm.comm.nodes.compressed_sums import ErrorFeedback
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.integers import integer
from ringcomm.json_reader import DAMAGE, exactly, shown
from ringcomm.optim import backends
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.layout import BucketLayout, ShardLayout
from ringcomm.optim.placement import end_changes
from ringcomm.optim.rules import MOMENTS, AdamWRule, ParamState, UpdateRule
from ringcomm.optim.step import ShardedStep

# ---- Error feedback of quantized gradients, saved and loaded for any number of nodes ------------
# NOTE [Error feedback of other nodes] Each node has one error-feedback buffer per bucket, divided
# over its ranks. The buffer has the quantization errors of partial sums, not averaged yet. If as
# many nodes load as saved, each node loads its own buffers, and training continues with the same
# bits.
# If M nodes saved and N nodes load, node n loads the sum of the buffers of nodes n, n + N, ...: the
# total error does not change. With ``reduce="avg"`` the error belongs to the mean gradient, so the
# buffers are multiplied by (ranks that load) / (ranks that saved). A single node quantizes nothing,
# and loads no errors.
#
# If each node has a copy of the state, sums are quantized as well, each element by one rank. If the
# loading ranks do not quantize sums, node 0 loads the errors of sums.

Tensor = torch.Tensor

#: A function (node, first element, tensor) that reads a bucket's saved errors into the tensor: the
#: errors of the partial sums of ``node``, or the errors of the sums if ``node`` is None. Elements
#: that were not saved become zeros.
Read = Callable[[int | None, int, Tensor], None]


@dataclass(frozen=True)
class Debtors:
    """The nodes, ranks and loss scale of a run that keeps or has saved error feedback.

    Attributes:
        nodes: the number of nodes.
        divide_by: the divisor of the sum of partial sums: the number of ranks, or 1.
        scale: the loss scale of the gradients.
    """

    nodes: int
    divide_by: int
    scale: float

    @classmethod
    def of(cls, sharded: ShardedStep) -> Debtors | None:
        """Returns the description of an optimizer's run; None if it keeps no error feedback."""
        comm, options = sharded.setting.comm, sharded.setting.options
        if comm is None or not any(with_error_feedback(sharded)):
            return None
        divide_by = comm.world_size if options.reduce == "avg" else 1
        return cls(comm.num_nodes, divide_by, sharded.setting.loss_scale())

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Debtors:
        """Inverse of :meth:`describe`.

        Raises:
            KeyError, TypeError, ValueError: the description is damaged.
        """
        found = cls(int(described["nodes"]), int(described["divide_by"]), float(described["scale"]))
        if found.nodes < 2 or found.divide_by < 1 or not found.scale > 0.0:
            raise ValueError(f"error feedback of {described}")
        return found

    def describe(self) -> dict[str, Any]:
        """Returns the description as JSON types."""
        return asdict(self)


def with_error_feedback(sharded: ShardedStep) -> Iterator[tuple[Bucket, ErrorFeedback]]:
    """Yields buckets and their error feedback, which it first rescales to the next loss scale."""
    for bucket in sharded.buckets:
        if bucket.error_feedback is not None:
            bucket.error_feedback.follow_scale()
            yield bucket, bucket.error_feedback


def nodes_for(saved: Debtors, sharded: ShardedStep) -> range:
    """Returns the numbers of the saved nodes whose error feedback this rank's node loads."""
    comm = sharded.setting.comm
    assert comm is not None  # a world of one keeps no error feedback
    return range(comm.node_of(comm.rank), saved.nodes, comm.num_nodes)


def take(sharded: ShardedStep, error_feedback: ErrorFeedback, saved: Debtors, read: Read) -> None:
    """Loads one bucket's error feedback; see NOTE [Error feedback of other nodes]."""
    mine = Debtors.of(sharded)
    assert mine is not None
    grows, owed = mine.divide_by / saved.divide_by, nodes_for(saved, sharded)
    error_feedback.forget()
    error_feedback.scale = saved.scale
    for number, node in enumerate(owed):
        more = error_feedback.partial if number == 0 else torch.empty_like(error_feedback.partial)
        read(node, error_feedback.begin, more)
        if number:
            error_feedback.partial.add_(more)
    error_feedback.partial.mul_(grows)
    if error_feedback.sums.numel():
        read(None, error_feedback.sums_begin, error_feedback.sums)
    elif 0 in owed:
        of_sums = torch.empty_like(error_feedback.partial)
        read(None, error_feedback.begin, of_sums)
        error_feedback.partial.add_(of_sums, alpha=mine.divide_by)


def forget_all(sharded: ShardedStep) -> None:
    """Clears all error feedback."""
    for _, error_feedback in with_error_feedback(sharded):
        error_feedback.forget()


# Conversion of error feedback to and from the entries of a saved shard.


def tensors_of(sharded: ShardedStep) -> list[dict[str, Tensor] | None]:
    """Returns each bucket's error-feedback tensors, not copied; None if a bucket has none."""
    kept = {
        bucket.number: error_feedback for bucket, error_feedback in with_error_feedback(sharded)
    }
    return [
        {"partial": kept[n].partial, "sums": kept[n].sums} if n in kept else None
        for n in range(len(sharded.buckets))
    ]


def told_of(sharded: ShardedStep, debtors: Debtors) -> dict[str, Any]:
    """Returns the description of error feedback for the entry "shard", as JSON types."""
    comm = sharded.setting.comm
    assert comm is not None
    kept = {
        bucket.number: error_feedback for bucket, error_feedback in with_error_feedback(sharded)
    }
    begins = {str(number): [each.begin, each.sums_begin] for number, each in kept.items()}
    return {**debtors.describe(), "node": comm.node_of(comm.rank), "begins": begins}


@dataclass(frozen=True)
class SavedErrorFeedback:
    """The error feedback in one rank's saved shard.

    Attributes:
        debtors: the description of the run that saved.
        node: the node of the rank that saved.
        layout: the layout of the parameters when they were saved.
        runs: by bucket number, two pairs (index of the first element, errors from it on); the
            first pair is for partial sums, the second for sums.
    """

    debtors: Debtors
    node: int
    layout: ShardLayout
    runs: Mapping[int, tuple[tuple[int, Tensor], tuple[int, Tensor]]]

    @classmethod
    def read(cls, told: Any, tensors: Any, layout: ShardLayout) -> SavedErrorFeedback:
        """Reads the results of :func:`told_of` and :func:`tensors_of`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the error feedback is damaged.
        """
        runs = {}
        for number, begins in told["begins"].items():
            bucket, found = layout.buckets[int(number)], []
            for begin, name in zip(begins, ("partial", "sums"), strict=True):
                values = tensors[int(number)][name]
                if (
                    values.dtype is not torch.float32
                    or values.dim() != 1
                    or not 0 <= begin <= begin + values.numel() <= bucket.elems
                ):
                    raise ValueError(f"error feedback of bucket {number}: {name}")
                found.append((int(begin), values))
            runs[int(number)] = (found[0], found[1])
        debtors, node = Debtors.read(told), int(told["node"])
        if not 0 <= node < debtors.nodes:
            raise ValueError(f"error feedback of node {node} of {debtors.nodes}")
        return cls(debtors, node, layout, runs)

    def add_to(self, out: Tensor, begin: int, param: int, of_sums: bool) -> None:
        """Adds a parameter's saved errors, from its element ``begin`` on, to ``out``."""
        number, segment = self.layout.locations[param]
        if number not in self.runs:
            return
        first, values = self.runs[number][of_sums]
        low = segment.begin + begin
        a, b = max(low, first), min(low + out.numel(), first + values.numel())
        if a < b:
            out[a - low : b - low].add_(values[a - first : b - first])

    def fits(self, sharded: ShardedStep) -> bool:
        """True if this error feedback covers exactly the elements that this rank keeps."""
        comm = sharded.setting.comm
        assert comm is not None
        mine = {
            bucket.number: [(each.begin, each.partial), (each.sums_begin, each.sums)]
            for bucket, each in with_error_feedback(sharded)
        }
        return (
            self.layout.buckets == sharded.layout.buckets
            and (self.debtors.nodes, self.node) == (comm.num_nodes, comm.node_of(comm.rank))
            and {n: _extents(each) for n, each in self.runs.items()}
            == {n: _extents(each) for n, each in mine.items()}
        )


def _extents(runs: Sequence[tuple[int, Tensor]]) -> list[tuple[int, int]]:
    return [(begin, values.numel()) for begin, values in runs]


def check_error_feedback(
    sharded: ShardedStep, saved: Sequence[SavedErrorFeedback], complete: bool, operation: str
) -> None:
    """Raises CheckpointError if this rank needs error feedback from shards that are not given.

    Args:
        sharded: the optimizer's step, which may keep no error feedback.
        saved: the error feedback of the given shards.
        complete: True if the shards of all ranks are given.
        operation: named in errors.
    """
    if not saved or Debtors.of(sharded) is None or complete:
        return
    if not (len(saved) == 1 and saved[0].fits(sharded)):
        raise CheckpointError(
            f"{operation}: the error feedback of gradients was saved by other nodes; pass "
            "the shards of all ranks"
        )


def take_error_feedback(sharded: ShardedStep, saved: Sequence[SavedErrorFeedback]) -> None:
    """Loads error feedback checked by :func:`check_error_feedback`; clears it if none was saved."""
    forget_all(sharded)
    if not saved or Debtors.of(sharded) is None:
        return
    for bucket, error_feedback in with_error_feedback(sharded):

        def read(
            node: int | None, begin: int, out: Tensor, layout: BucketLayout = bucket.layout
        ) -> None:
            out.zero_()
            for low, high, param in layout.segments:
                a, b = max(low, begin), min(high, begin + out.numel())
                for each in saved if a < b else ():
                    if node is None or each.node == node:
                        each.add_to(out[a - begin : b - begin], a - low, param, node is None)

        take(sharded, error_feedback, saved[0].debtors, read)


Group = dict[str, Any]


def pack_groups(groups: Sequence[Mapping[str, Any]], layout: ShardLayout) -> list[Group]:
    """Returns groups with indices in place of parameters, as in ``torch.optim``'s state_dict."""
    packed, first = [], 0
    for group in groups:
        count = len(group["params"])
        indices = []
        for index in range(first, first + count):
            tied_to = layout.params[index].tied_to
            indices.append(index if tied_to is None else tied_to)
        packed.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
        first += count
    return packed


def check_groups(sharded: ShardedStep, saved: Any, operation: str) -> list[Group]:
    """Checks saved groups, and returns them ready for :func:`take_groups`.

    Raises:
        CheckpointError: ``saved`` does not fit ``sharded``'s groups, or a hyper-parameter is bad.
    """
    groups = sharded.groups
    if not isinstance(saved, Sequence) or len(saved) != len(groups):
        count = len(saved) if isinstance(saved, Sequence) else "none"
        raise CheckpointError(
            f"{operation}: expected {len(groups)} param groups, as the optimizer has, got {count}"
        )
    ready = []
    for index, (group, given) in enumerate(zip(groups, saved, strict=True)):
        if not isinstance(given, Mapping) or not isinstance(given.get("params"), Sequence):
            raise CheckpointError(f"{operation}: param group {index}: cannot be read: {given!r}")
        if len(given["params"]) != len(group["params"]):
            raise CheckpointError(
                f"{operation}: param group {index}: expected {len(group['params'])} parameters, "
                f"got {len(given['params'])}"
            )
        for key, value in given.items():
            if key in group and key != "params" and not _is_alike(value, group[key]):
                raise CheckpointError(
                    f"{operation}: param group {index}: {key}: expected a value such as "
                    f"{shown(group[key])}, got {shown(value)}"
                )
        taken = _read_group(group, given, sharded.setting.device)
        try:
            sharded.rule.check_hyper({**group, **taken}, index, sharded.setting.device)
        except DAMAGE as error:
            raise CheckpointError(f"{operation}: {error}") from error
        ready.append(taken)
    return ready


def _is_alike(given: Any, mine: Any) -> bool:
    """True if a saved hyper-parameter has a type that can replace the optimizer's value."""
    if isinstance(mine, (tuple, list)):
        alike = isinstance(given, (tuple, list)) and len(given) == len(mine)
        return alike and all(_is_alike(a, b) for a, b in zip(given, mine, strict=True))
    if given is None or not (mine is None or isinstance(mine, (int, float, str, Tensor))):
        return True
    if isinstance(given, str) or isinstance(mine, str):
        return isinstance(given, str) and (mine is None or isinstance(mine, str))
    if isinstance(given, Tensor):
        return given.numel() == 1
    return isinstance(given, float) or (isinstance(given, int) and abs(given) < 1 << 64)


def _read_group(group: Group, given: Mapping[str, Any], device: torch.device) -> Group:
    """Returns copies of a saved group's entries, converted to the types of ``group``'s entries."""
    taken = {key: deepcopy(value) for key, value in given.items() if key != "params"}
    for key, value in taken.items():
        if isinstance(value, list) and isinstance(group.get(key), tuple):  # JSON has no tuples
            taken[key] = tuple(value)
        elif isinstance(value, Tensor):
            taken[key] = value.to(device)
        elif isinstance(group.get(key), Tensor) and value is not None:
            taken[key] = torch.full_like(group[key], value)
    if "decoupled_weight_decay" in group:
        # Keep the optimizer's own value: its class decides between Adam and AdamW, as in torch.
        taken["decoupled_weight_decay"] = group["decoupled_weight_decay"]
    return taken


def merged_groups(groups: Sequence[Group], ready: Sequence[Group]) -> list[Group]:
    """Returns the groups as they will be after :func:`take_groups`."""
    return [{**group, **taken} for group, taken in zip(groups, ready, strict=True)]


def take_groups(groups: Sequence[Group], ready: Sequence[Group]) -> None:
    """Updates the optimizer's groups with the result of :func:`check_groups`."""
    for group, taken in zip(groups, ready, strict=True):
        group.update(taken)


Shard = Mapping[str, Any]
ChunkTensors = list[dict[str, Tensor]]  # by bucket and name
KeptWhole = dict[int, dict[str, Tensor]]  # by parameter and name

SHARD_VERSION = 1
MASTERS = ("master", "remainder")
_SCALARS = ("steps_taken", "skipped_steps")


def _dtype_of(name: str) -> torch.dtype:
    return torch.int16 if name == "remainder" else torch.float32


def describe_states(states: Sequence[ParamState | None]) -> list[Any]:
    """Returns parameters' states as JSON types."""
    return [
        None if each is None else {"numbers": dict(each.numbers), "tensors": list(each.tensors)}
        for each in states
    ]


def read_states(described: Sequence[Any]) -> list[ParamState | None]:
    """Inverse of :func:`describe_states`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the description is damaged.
    """
    states: list[ParamState | None] = []
    for each in described:
        if each is None:
            states.append(None)
            continue
        numbers = {str(name): float(number) for name, number in each["numbers"].items()}
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError(f"expected finite numbers, got {shown(numbers)}")
        states.append(ParamState(numbers, tuple(map(str, exactly(each["tensors"], list)))))
    return states


def describe_shard(layout: ShardLayout, rank: int, world_size: int) -> dict[str, Any]:
    """Returns the entry "shard" as JSON types."""
    return {
        "version": SHARD_VERSION,
        "rank": rank,
        "world_size": world_size,
        "layout": layout.describe(),
        "digest": layout.digest,
    }


class SavedShard:
    """A saved shard; its constructor checks the entries."""

    def __init__(self, saved: Any, operation: str) -> None:
        self.operation = operation
        if not isinstance(saved, Mapping) or "shard" not in saved:
            hint = (
                "; to load a state of torch.optim, call load_torch_state_dict()"
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
            self.optimizer = str(shard.get("optimizer", AdamWRule.name))
            self.states = read_states(shard.get("states", []))
            self.whole: KeptWhole = {
                int(index): dict(each) for index, each in self.state.get("whole", {}).items()
            }
            self.error_feedback: SavedErrorFeedback | None = None
            if "error_feedback" in shard:
                self.error_feedback = SavedErrorFeedback.read(
                    shard["error_feedback"], self.state["error_feedback"], self.layout
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{operation}: a shard cannot be read: {error!r}") from error
        self._check()

    def fail(self, text: str) -> None:
        raise CheckpointError(
            f"{self.operation}: shard of rank {self.rank} of {self.world_size}: {text}"
        )

    @property
    def more(self) -> dict[str, Any]:
        """The entries of "shard" that AdamW's shards do not have."""
        if self.optimizer == AdamWRule.name:
            return {}
        return {"optimizer": self.optimizer, "states": describe_states(self.states)}

    def _check(self) -> None:
        if self.version != SHARD_VERSION:
            self.fail(f"expected version {SHARD_VERSION}, got {self.version!r}")
        if self.digest != self.layout.digest:
            self.fail("its layout does not match its digest: the file is damaged")
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
            self._check_named(number, tensors)
            elems = self.layout.chunk(number, self.rank, self.world_size).elems
            required = MOMENTS if self.optimizer == AdamWRule.name else ()
            for name in {*required, *tensors}:
                tensor, dtype = tensors.get(name), _dtype_of(name)
                if (
                    not isinstance(tensor, Tensor)
                    or tensor.shape != (elems,)
                    or tensor.dtype != dtype
                ):
                    got = f"{tensor.dtype} {tuple(tensor.shape)}" if tensor is not None else "none"
                    self.fail(f"bucket {number}: {name}: expected {dtype} [{elems}], got {got}")

    def _check_named(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Checks that a bucket has all tensors of its parameters' states."""
        if not self.states:
            return
        if len(self.states) != len(self.layout.params):
            self.fail(f"expected the states of {len(self.layout.params)} parameters")
        for segment in self.layout.buckets[number].segments:
            state = self.states[segment.param]
            missing = set() if state is None else {*state.tensors} - {*tensors}
            if missing:
                self.fail(f"bucket {number}: expected {sorted(missing)[0]}, it is not there")


def _debtors(shard: SavedShard) -> Debtors | None:
    return None if shard.error_feedback is None else shard.error_feedback.debtors


class SavedShards:
    """Saved shards of one run, from all or some of its ranks."""

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
            "optimizers": (shard.optimizer, first.optimizer),
            "states of parameters": (shard.states, first.states),
            "error_feedback": (_debtors(shard), _debtors(first)),
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
        """True if the shards of all ranks are given."""
        return set(self.by_rank) == set(range(self.world_size))

    def require_all(self) -> None:
        """Raises CheckpointError unless :attr:`complete`."""
        if not self.complete:
            missing = sorted(set(range(self.world_size)) - set(self.by_rank))
            raise CheckpointError(
                f"{self.operation}: to load into another world or layout, pass the shards of all "
                f"{self.world_size} ranks; missing are the shards of {missing}"
            )

    def cut(self, layout: ShardLayout, rank: int, world_size: int) -> ChunkTensors:
        """Returns copies of a rank's state for ``layout``, a layout of the same parameters."""
        mine: ChunkTensors = []
        for bucket in layout.buckets:
            chunk = bucket.chunk(rank, world_size)
            tensors = {
                name: torch.zeros(chunk.elems, dtype=_dtype_of(name), device="cpu")
                for name in self._names(bucket)
            }
            for begin, end, param in bucket.segments:
                low, high = max(begin, chunk.begin), min(end, chunk.end)
                if low < high:
                    for name, tensor in tensors.items():
                        target = tensor[low - chunk.begin : high - chunk.begin]
                        self._read(param, name, low - begin, target)
            mine.append(tensors)
        return mine

    def _names(self, bucket: BucketLayout) -> list[str]:
        """Returns the names of the tensors that a bucket of another layout gets."""
        numbers = [self.layout.locations[segment.param][0] for segment in bucket.segments]
        if not numbers:
            alike = (n for n, b in enumerate(self.layout.buckets) if b.dtype is bucket.dtype)
            numbers = [next(alike)]
        return list(dict.fromkeys(name for n in numbers for name in self.first.buckets[n]))

    def _read(self, param: int, name: str, begin: int, target: Tensor) -> None:
        """Fills ``target`` with a parameter's saved state from element ``begin`` on.

        Leaves ``target`` as it is if no parameter of the saved bucket has the tensor, as with Muon.
        """
        number, segment = self.layout.locations[param]
        if name not in self.first.buckets[number]:
            return
        low = segment.begin + begin
        high = low + target.numel()
        for rank, shard in self.by_rank.items():
            chunk = self.layout.chunk(number, rank, self.world_size)
            a, b = max(low, chunk.begin), min(high, chunk.end)
            if a < b:
                source = shard.buckets[number][name][a - chunk.begin : b - chunk.begin]
                target[a - low : b - low].copy_(source)


def reshard(shards: Sequence[Shard], world_size: int) -> list[dict[str, Any]]:
    """Divides the shards of all ranks into shards for another number of ranks.

    The new shards have no error feedback, since the nodes of the new ranks are not known; to keep
    error feedback, load the shards of all ranks instead.

    Args:
        shards: ``state_dict()`` of all ranks, in any order; the new shards have copies of the data.
        world_size: number of ranks that will load the new shards.

    Returns:
        The new shards, by rank; on the CPU.

    Raises:
        CheckpointError: a shard is damaged or missing, or the shards were not saved together.
        ArgumentError: ``world_size`` is not a positive integer.
    """
    ranks = integer(world_size, most=2**31 - 1)
    if ranks is None or ranks < 1:
        raise ArgumentError(
            f"reshard: world_size: expected an integer from 1 to 2^31 - 1, got {shown(world_size)}"
        )
    world_size = ranks
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
                **({"whole": deepcopy(first.whole)} if first.whole else {}),
            },
            "param_groups": first.param_groups,
            "shard": {**describe_shard(saved.layout, rank, world_size), **first.more},
        }
        for rank in range(world_size)
    ]


_LOAD = "load_state_dict"


def save(sharded: ShardedStep) -> dict[str, Any]:
    """Returns this rank's shard, in the format of this module; FP32 tensors are not copied."""
    sharded.refuse_if_partly_updated("state_dict")
    sharded.written.take_over()
    control = sharded.table.control
    whole, debtors = kept_whole(sharded), Debtors.of(sharded)
    return {
        "state": {
            "step": sharded.table.step,
            "steps_taken": control[backends.STEPS],
            "skipped_steps": control[backends.SKIPPED],
            "buckets": [bucket.state.tensors() for bucket in sharded.buckets],
            **({"whole": whole} if whole else {}),
            **({"error_feedback": tensors_of(sharded)} if debtors is not None else {}),
        },
        "param_groups": pack_groups(sharded.groups, sharded.layout),
        "shard": {
            **describe_shard(sharded.layout, *sharded.shard_of),
            **_told(sharded),
            **({"error_feedback": told_of(sharded, debtors)} if debtors is not None else {}),
        },
    }


def kept_whole(sharded: ShardedStep) -> KeptWhole:
    """Returns by parameter the state tensors that are in no bucket, since all ranks have copies."""
    found = {index: sharded.rule.kept_whole(index) for index in range(len(sharded.layout.params))}
    return {index: dict(each) for index, each in found.items() if each}


def check_whole(sharded: ShardedStep, given: Mapping[int, Mapping[str, Any]], called: str) -> None:
    """Raises CheckpointError unless a saved state has the tensors of :func:`kept_whole`."""
    for index, tensors in kept_whole(sharded).items():
        for name, mine in tensors.items():
            found = given.get(index, {}).get(name)
            if not isinstance(found, Tensor) or found.shape != mine.shape:
                got = tuple(found.shape) if isinstance(found, Tensor) else found
                raise CheckpointError(
                    f"{called}: parameter {index}: {name}: expected a tensor of shape "
                    f"{tuple(mine.shape)}, got {got}"
                )


def take_whole(sharded: ShardedStep, given: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Loads the tensors that :func:`check_whole` checked; zeros for parameters without state."""
    for index, tensors in kept_whole(sharded).items():
        for name, mine in tensors.items():
            if index in given:
                mine.copy_(given[index][name])
            else:
                mine.zero_()


def _told(sharded: ShardedStep) -> dict[str, Any]:
    rule = sharded.rule
    told = {} if rule.saved_as == AdamWRule.name else {"optimizer": rule.saved_as}
    return {**told, "states": describe_states(sharded.states())} if rule.keeps_more else told


def load(sharded: ShardedStep, shards: Sequence[Shard]) -> None:
    """Loads this rank's own shard, or the shards of all ranks that saved; collective.

    Raises:
        CheckpointError: the shards do not fit, on this rank or another; nothing was changed.
    """
    setting = sharded.setting
    operation = setting.where(_LOAD)
    with agreed_load(sharded.ranks, operation) as agreement:
        saved = SavedShards(shards, operation)
        check_same_params(sharded.layout, saved.layout, operation)
        check_same_optimizer(sharded.rule, saved.first.optimizer, operation)
        groups = check_groups(sharded, saved.first.param_groups, operation)
        tensors = _own(sharded, saved, operation)
        _check_kinds(sharded, tensors, merged_groups(sharded.groups, groups), operation)
        states = saved.first.states
        check_states(sharded, states, operation)
        error_feedback = [
            each.error_feedback for each in saved.by_rank.values() if each.error_feedback
        ]
        check_error_feedback(sharded, error_feedback, saved.complete, operation)
        check_whole(sharded, saved.first.whole, operation)
        agreement.append([saved.first.step.tolist(), saved.first.scalars, describe_states(states)])
    take_state(sharded, tensors)
    if setting.comm is not None:
        # Compute the quantized parameters from the loaded masters.
        end_changes(
            setting.comm, [each for each in sharded.buckets if each.compression is not None]
        )
    take_error_feedback(sharded, error_feedback)
    take_groups(sharded.groups, groups)
    take_whole(sharded, saved.first.whole)
    sharded.rule.take_states(states)
    sharded.table.step.copy_(saved.first.step)
    sharded.table.control[backends.STEPS].fill_(saved.first.scalars["steps_taken"])
    sharded.table.control[backends.SKIPPED].fill_(saved.first.scalars["skipped_steps"])
    sharded.begin_anew()


def check_same_optimizer(rule: UpdateRule, saved: str, operation: str) -> None:
    """Raises CheckpointError unless a state was saved by an optimizer of the same class."""
    if saved != rule.saved_as:
        raise CheckpointError(
            f"{operation}: expected the state of {rule.saved_as}, got that of {saved}"
        )


def check_states(sharded: ShardedStep, states: Sequence[ParamState | None], operation: str) -> None:
    """Raises CheckpointError unless the saved states of parameters fit this optimizer."""
    expected = len(sharded.layout.params) if sharded.rule.keeps_more else 0
    if len(states) != expected:
        raise CheckpointError(
            f"{operation}: expected the states of {expected} parameters, got {len(states)}"
        )
    numbers = {name for state in states if state is not None for name in state.numbers}
    unknown = sorted(numbers - sharded.rule.numbers) if expected else []
    if unknown:
        raise CheckpointError(
            f"{operation}: {sharded.rule.name} keeps no {unknown[0]!r} with these hyper-parameters"
        )


def check_same_params(mine: ShardLayout, saved: ShardLayout, operation: str) -> None:
    """Raises CheckpointError unless both layouts have equal parameters; names may differ."""
    if len(mine.params) != len(saved.params):
        raise CheckpointError(
            f"{operation}: expected the state of {len(mine.params)} parameters, got that of "
            f"{len(saved.params)}"
        )
    for index, (spec, given) in enumerate(zip(mine.params, saved.params, strict=True)):
        if replace(spec, name="") != replace(given, name=""):
            raise CheckpointError(
                f"{operation}: parameter {index}: expected the state of {spec}, got that of {given}"
            )


def _own(sharded: ShardedStep, saved: SavedShards, operation: str) -> ChunkTensors:
    """Returns this rank's tensors: from its own shard if it fits, else copied from all shards."""
    rank, world_size = sharded.shard_of
    shard = saved.by_rank.get(rank)
    same_world = saved.world_size == world_size
    if same_world and shard is not None and saved.layout.buckets == sharded.layout.buckets:
        return shard.buckets
    if same_world and shard is None:
        raise CheckpointError(
            f"{operation}: expected the shard of this rank, or of all ranks, got the "
            f"shards of {sorted(saved.by_rank)}"
        )
    saved.require_all()
    return saved.cut(sharded.layout, rank, world_size)


def _check_kinds(
    sharded: ShardedStep, tensors: ChunkTensors, groups: Sequence[Group], operation: str
) -> None:
    for bucket, given in zip(sharded.buckets, tensors, strict=True):
        misfit = misfit_of(sharded, bucket, list(given), groups)
        if misfit:
            raise CheckpointError(
                f"{operation}: bucket {bucket.number}: {misfit}, got {sorted(given)}; convert "
                "with full_state_dict() and load_torch_state_dict()"
            )


def misfit_of(
    sharded: ShardedStep, bucket: Bucket, names: Sequence[str], groups: Sequence[Group]
) -> str:
    """Returns "" if a bucket's saved ``names`` fit, else the expected names, for an error."""
    masters = sorted(bucket.state.masters())
    misfit = sharded.rule.misfit([name for name in names if name not in MASTERS], groups)
    if not misfit and masters == sorted({*names} & {*MASTERS}):
        return ""
    kept = ", ".join([misfit or "those of the optimizer", *masters])
    return f"expected the tensors {kept}, which {keeper_of_masters(sharded)} keeps"


def keeper_of_masters(sharded: ShardedStep) -> str:
    """Returns the option that decides which masters exist, for errors."""
    options = sharded.setting.options
    if options.compression.quantizes_parameters:
        return f"compression: parameters={options.compression.parameters!r}"
    return f"master={options.master!r}"


def take_state(sharded: ShardedStep, tensors: ChunkTensors) -> None:
    """Copies checked tensors into this rank's state."""
    sharded.ensure([[name for name in each if name not in MASTERS] for each in tensors])
    for bucket, given in zip(sharded.buckets, tensors, strict=True):
        bucket.state.take(given)
        # Do not zero missing masters: they have been set already.
        bucket.state.zero({*bucket.state.names()} - {*given, *MASTERS})
    sharded.backend.forget()
