# SPDX-License-Identifier: Apache-2.0
"""The state of a module and its optimizer in a checkpoint: tensors, and facts as JSON data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.json_reader import DAMAGE, exactly, in_words, shown
from ringcomm.module_names import KnownNames, named_modules
from ringcomm.optim.backends import SKIPPED, STEPS
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.dtensors import MeshView, Sharding, local_of
from ringcomm.optim.layout import Chunk
from ringcomm.optim.rules import AdamWRule, ParamState
from ringcomm.optim.setting import LossScaler
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.optim.state import (
    MASTERS,
    Debtors,
    check_groups,
    check_same_optimizer,
    check_states,
    describe_states,
    forget_all,
    keeper_of_masters,
    merged_groups,
    nodes_for,
    pack_groups,
    read_states,
    take,
    take_groups,
    with_error_feedback,
)
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.checkpoint.format import DTensorBox, DTensorShard, FlatShard, Manifest
from ringcomm.zero.stages.buckets import (
    BucketParam,
    DiskBucket,
    ParamBucket,
    ReplicatedBucket,
    ShardedBucket,
)
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.units import aliases

Tensor = torch.Tensor


def state_shards(engine: ShardEngine, step: ShardedStep, whole: bool) -> Iterator[TensorShard]:
    """Yields the optimizer's state: this rank's chunks, or with ``whole`` all state on this rank.

    A parameter has only the kinds of state that it needs, even if its bucket has more kinds, since
    the module that loads may divide the parameters into other buckets. 8-bit moments are yielded as
    FP32 copies, and all offloaded state as copies.
    """
    step.written.take_over()
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        wanted = stored.state_chunk if whole else stored.chunk
        for kind, flat in bucket.state.tensors().items():
            names = _state_names(engine, step, kind, step.groups)
            yield from bucket_shards(stored, flat, stored.state_chunk, wanted, names)
    yield from replicated_state(engine, step, whole)


def shards_to_save(engine: ShardEngine, step: ShardedStep) -> Iterator[TensorShard]:
    """Yields the optimizer's state of this rank's chunks; elements are read when they are saved.

    For state in memory this is :func:`state_shards`. For offloaded state a shard's ``local`` has no
    memory, and the elements are read piece by piece, in the order in which a file stores them.
    """
    yield from _error_feedback_shards(engine, step)
    if step.offload.in_memory:
        yield from state_shards(engine, step, whole=False)
        return
    step.written.take_over()
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        for kind, dtype in bucket.state.dtypes().items():
            stand_in = torch.empty(bucket.chunk.elems, dtype=dtype, device="meta")
            names = _state_names(engine, step, kind, step.groups)
            shards = bucket_shards(stored, stand_in, stored.state_chunk, stored.chunk, names)
            for shard in shards:
                yield replace(shard, read=partial(_slices, bucket, kind))
    yield from replicated_state(engine, step, whole=False)


def _error_feedback_shards(engine: ShardEngine, step: ShardedStep) -> Iterator[TensorShard]:
    """Yields the quantization errors of gradients: a tensor per parameter and node."""
    comm = engine.comm
    for bucket, error_feedback in with_error_feedback(step):
        runs: list[tuple[int | None, int, Tensor]] = [
            (comm.node_of(comm.rank), error_feedback.begin, error_feedback.partial)
        ]
        if step.setting.options.state == "node":
            runs.append((None, error_feedback.sums_begin, error_feedback.sums))
        for node, begin, values in runs:
            yield from _error_feedback_run(engine, bucket.number, node, begin, values)


def _error_feedback_run(
    engine: ShardEngine, number: int, node: int | None, begin: int, values: Tensor
) -> Iterator[TensorShard]:
    """Yields, by parameter, quantization errors of a node, or (``node`` None) of the nodes' sum."""
    chunk = Chunk(begin, begin + values.numel())
    names = named(engine, f"optim.error_feedback.{'sums' if node is None else node}.")
    yield from bucket_shards(engine.stored[number], values, chunk, chunk, names)


def error_feedback_to_load(
    engine: ShardEngine, step: ShardedStep, saved: Debtors, names: Collection[str]
) -> Iterator[TensorShard]:
    """Yields the shards that :func:`take_error_feedback` reads; ``local`` has no elements yet.

    Args:
        saved: the ranks that saved the error feedback.
        names: names of the checkpoint's tensors; a parameter without a tensor was not quantized.
    """
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    for bucket, _ in with_error_feedback(step):
        for node in (*nodes_for(saved, step), None):
            for shard in _error_feedback_run(engine, bucket.number, node, 0, nothing):
                if shard.name in names:
                    yield shard


def take_error_feedback(
    engine: ShardEngine,
    step: ShardedStep,
    saved: Debtors,
    names: Collection[str],
    read: Callable[[Iterator[TensorShard]], None],
) -> None:
    """Loads the saved quantization errors; ``read`` fills shards from the checkpoint."""
    for bucket, error_feedback in with_error_feedback(step):

        def fill(node: int | None, begin: int, out: Tensor, number: int = bucket.number) -> None:
            shards = _error_feedback_run(engine, number, node, begin, out.zero_())
            read(shard for shard in shards if shard.name in names)

        take(step, error_feedback, saved, fill)


def _slices(bucket: Bucket, kind: str, begin: int, end: int) -> Iterator[Tensor]:
    """Yields elements [begin, end) of a chunk's state tensor, piece by piece."""
    first = bucket.chunk.begin
    for piece in bucket.pieces(first + begin, first + end, write=False):
        here, _ = piece.within(first + begin, first + end)
        yield piece.state.tensors()[kind][here]


def shards_to_load(
    engine: ShardEngine, step: ShardedStep, taken: Sequence[Mapping[str, Any]]
) -> Iterator[TensorShard]:
    """Yields shards of all optimizer state on this rank; write each before you take the next.

    Args:
        engine: the engine of the module.
        step: the step of the optimizer.
        taken: the param groups that the load takes over.
    """
    step.written.take_over()
    for stored, whole in zip(engine.stored, step.buckets, strict=True):
        for bucket in whole.pieces():
            tensors = bucket.state.tensors()
            for kind, flat in tensors.items():
                names = _state_names(engine, step, kind, taken)
                yield from bucket_shards(stored, flat, bucket.chunk, bucket.chunk, names)
            bucket.state.take({name: tensors[name] for name in bucket.state.quantized})
    yield from replicated_state(engine, step, True)


def replicated_state(engine: ShardEngine, step: ShardedStep, whole: bool) -> Iterator[TensorShard]:
    """Yields state that all ranks have in full; without ``whole``, only rank 0 has elements."""
    for index, name in enumerate(names_of(engine, step)):
        for kind, tensor in step.rule.kept_whole(index).items():
            flat = tensor.view(-1)
            local = flat if whole or engine.ranks.rank == 0 else flat[:0]
            called, shape = f"optim.{kind}.{name}", tuple(tensor.shape)
            yield TensorShard(called, flat.numel(), 0, local, shape)


def _state_names(
    engine: ShardEngine, step: ShardedStep, kind: str, groups: Sequence[Mapping[str, Any]]
) -> dict[int, str]:
    """Returns one kind's tensor names by parameter ``id``, except for groups without this kind."""
    without: set[int] = set()
    if kind in step.rule.names(groups):
        for group in groups:
            if kind not in step.rule.names_of(group, groups):
                without.update(map(id, group["params"]))
    names = named(engine, f"optim.{kind}.")
    return {key: name for key, name in names.items() if key not in without}


@dataclass(frozen=True)
class SavedState:
    """Describes which state in an optimizer's buckets a load reads.

    Attributes:
        kinds: for each bucket, the moments for which it must have memory.
        shards: by name, the shards to read; ``local`` has no elements. All other state is zeros.
    """

    kinds: list[list[str]]
    shards: dict[str, TensorShard]


def saved_state(
    engine: ShardEngine,
    step: ShardedStep,
    given: SavedOptimizer,
    groups: Sequence[dict[str, Any]],
    saved: Collection[str],
) -> SavedState:
    """Determines which state a load reads, and changes nothing.

    A moment may be missing only if its parameter has taken no step: then the moment is zeros.

    Args:
        given: the checkpoint's facts about the optimizer.
        groups: the param groups as they will be after the load.
        saved: names of the checkpoint's tensors.
    """
    found = SavedState([], {})
    known = step.rule.names(groups)
    kinds = [kind for kind in given.kinds if kind not in MASTERS]
    names = {kind: _state_names(engine, step, kind, groups) for kind in (*kinds, *MASTERS)}
    pairs = zip(step.params, names_of(engine, step), strict=True)
    begun = {id(param) for param, name in pairs if given.steps[name]}
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        needed = step.rule.names_in(bucket.layout, step.layout, groups)
        here = []
        for kind in kinds:
            # State of kinds that no group keeps is from earlier hyper-parameters: load it if saved.
            wanted = kind in needed or kind not in known
            called = {
                key: name
                for key, name in names[kind].items()
                if wanted and (name in saved or (key in begun and kind in known))
            }
            if any(id(entry.param) in called for entry in stored.params):
                here.append(kind)
                found.shards.update(_unread(stored, torch.float32, called))
        for kind, flat in bucket.state.masters().items():
            found.shards.update(_unread(stored, flat.dtype, names[kind]))
        found.kinds.append(here)
    return found


def _unread(
    stored: ParamBucket, dtype: torch.dtype, names: Mapping[int, str]
) -> dict[str, TensorShard]:
    """Returns the shards of a bucket by name; their tensors have no elements yet."""
    nothing, chunk = torch.empty(0, dtype=dtype, device="cpu"), stored.state_chunk
    return {shard.name: shard for shard in bucket_shards(stored, nothing, chunk, chunk, names)}


# ---- Names of the tensors of a sharded module and its optimizer in a checkpoint ------------------

# A checkpoint holds these tensors of a sharded module and its optimizer:
#
#     model.<name>            a parameter, or a persistent buffer of rank 0
#     optim.<kind>.<name>     exp_avg or another moment, master or remainder of a param
#     optim.error_feedback.<node>.<name>, optim.error_feedback.sums.<name>
#                             quantization errors of the param's gradients, by the saving node
#
# All of these are flat, and each rank has the elements of its chunks, at every stage: so a
# checkpoint of one stage can be loaded at all stages. State of other shapes, as Adafactor keeps, is
# whole on all ranks, and rank 0 saves it. Buffers differ between ranks, so each rank also saves its
# buffers as its own tensors.


@dataclass(frozen=True)
class TensorShard:
    """A rank's elements [begin, begin + local.numel()) of a flat tensor of ``elems`` elements.

    If ``local`` has no memory (device "meta"), ``read(begin, end)`` yields elements by their
    indices in the tensor that ``local`` is a view of. Under tensor parallelism the flat tensor may
    be the local tensor of a DTensor parameter; ``sharding`` is then its position in the DTensor.
    """

    name: str
    elems: int
    begin: int
    local: Tensor
    local_shape: tuple[int, ...]
    sharding: Sharding | None = None
    read: Callable[[int, int], Iterator[Tensor]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.local_shape if self.sharding is None else self.sharding.shape

    def shard(self) -> FlatShard:
        """Returns this shard in the form that a checkpoint saves and loads."""
        shard: FlatShard
        if self.sharding is None:
            shard = FlatShard(self.elems, self.begin, self.local, self.local_shape)
        else:
            box = DTensorBox(self.sharding.shape, self.sharding.offsets, self.local_shape)
            shard = DTensorShard(box, self.begin, self.local)
        shard.read = self.read
        return shard

    def saved_by(self, mesh: MeshView | None) -> TensorShard:
        """Returns the part that this rank saves: empty if another rank of the mesh saves it."""
        dims = () if self.sharding is None else self.sharding.mesh_dims
        if mesh is None or mesh.counts(dims):
            return self
        return replace(self, begin=0, local=self.local[:0])


def overlap(entry: BucketParam, chunk: Chunk) -> tuple[int, int]:
    """Returns the elements [low, high), maybe none, that a parameter and a chunk share."""
    low, high = max(entry.begin, chunk.begin), min(entry.end, chunk.end)
    return low, max(low, high)


def bucket_shards(
    stored: ParamBucket, flat: Tensor, held: Chunk, wanted: Chunk, names: Mapping[int, str]
) -> Iterator[TensorShard]:
    """Yields the shards of a bucket's parameters, with their names in a checkpoint.

    Args:
        stored: the bucket.
        flat: [held elements], one number per element of ``held``.
        held: the part of the bucket that is in ``flat``.
        wanted: the part of the bucket whose shards are wanted, inside ``held``.
        names: names of the tensors by parameter ``id``; other parameters are left out.
    """
    for entry in stored.params:
        if id(entry.param) not in names:
            continue
        low, high = overlap(entry, wanted)
        local = flat[low - held.begin : high - held.begin] if low < high else flat[:0]
        begin = low - entry.begin if low < high else 0
        elems, spec = entry.end - entry.begin, entry.spec
        name = names[id(entry.param)]
        yield TensorShard(name, elems, begin, local, spec.shape, spec.sharding)


def named(engine: ShardEngine, prefix: str) -> dict[int, str]:
    """Returns the names of the engine's parameters with a prefix, by parameter ``id``."""
    return {key: prefix + name for key, name in engine.names().items()}


def param_shards(engine: ShardEngine, whole: bool) -> Iterator[TensorShard]:
    """Yields this rank's chunks of bucketed parameters, or if ``whole`` all that the rank keeps.

    For parameters on a disk, ``local`` has no memory, and the elements are read when needed.
    """
    names = named(engine, "model.")
    for stored in (*engine.stored, *engine.setup.stored_frozen):
        if isinstance(stored, ReplicatedBucket):
            held = Chunk(0, stored.layout.elems)
            wanted = held if whole else stored.chunk
            yield from bucket_shards(stored, stored.flat, held, wanted, names)
            continue
        assert isinstance(stored, ShardedBucket)
        held, wanted = stored.kept_chunk, stored.kept_chunk if whole else stored.chunk
        if not isinstance(stored, DiskBucket):
            yield from bucket_shards(stored, stored.kept, held, wanted, names)
            continue
        stand_in = torch.empty(held.elems, dtype=stored.layout.dtype, device="meta")
        for shard in bucket_shards(stored, stand_in, held, wanted, names):
            yield replace(shard, read=partial(_elements_of, stored))


def _elements_of(stored: DiskBucket, begin: int, end: int) -> Iterator[Tensor]:
    """Yields elements [begin, end) of the chunk that this rank keeps on its disk."""
    with stored.here():
        yield stored.kept[begin:end]


def params_to_load(engine: ShardEngine) -> Iterator[TensorShard]:
    """Yields this rank's shards of parameters; write to each before you take the next."""
    if engine.setup.store is None:
        yield from param_shards(engine, whole=True)
        return
    names = named(engine, "model.")
    for stored in (*engine.stored, *engine.setup.stored_frozen):
        assert isinstance(stored, ShardedBucket)
        with stored.here(write=True):
            held = stored.kept_chunk
            yield from bucket_shards(stored, stored.kept, held, held, names)


def copies_of_params(engine: ShardEngine) -> Iterator[TensorShard]:
    """Yields all shards of :func:`param_shards`; for parameters on a disk, copies in memory."""
    for shard in param_shards(engine, whole=True):
        if shard.read is None:
            yield shard
            continue
        begin = int(shard.local.storage_offset())
        slices = [values.clone() for values in shard.read(begin, begin + shard.local.numel())]
        yield replace(shard, local=torch.cat(slices), read=None)


def loose_shards(engine: ShardEngine, whole: bool) -> Iterator[TensorShard]:
    """Yields parameters without a bucket: if ``whole``, all elements, else this rank's share."""
    bucketed = {
        id(each.param)
        for stored in (*engine.stored, *engine.setup.stored_frozen)
        for each in stored.params
    }
    comm = engine.comm
    for name, param in engine.named_parameters():
        if id(param) in bucketed:
            continue
        here = local_of(param).detach()
        flat, shape = here.reshape(-1), tuple(here.shape)
        elems = flat.numel()
        low = 0 if whole else comm.rank * elems // comm.world_size
        high = elems if whole else (comm.rank + 1) * elems // comm.world_size
        sharding = Sharding.of(param)
        yield TensorShard(f"model.{name}", elems, low, flat[low:high], shape, sharding)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the persistent buffers by unwrapped name, each under one name only."""
    found: dict[str, Tensor] = {}
    for prefix, owner in named_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = local_of(buffer)
    return found


def model_shards(engine: ShardEngine) -> Iterator[TensorShard]:
    """Yields all tensors of the model; on a mesh one rank per replica yields an element."""
    yield from param_shards(engine, whole=False)
    yield from loose_shards(engine, whole=False)
    for name, buffer in buffers_of(engine.setup.module).items():
        flat = buffer.detach().contiguous().reshape(-1)
        local = flat if engine.ranks.rank == 0 else flat[:0]
        yield TensorShard(f"model.{name}", flat.numel(), 0, local, tuple(buffer.shape))


# Names in a checkpoint may contain parts of wrappers (``_orig_mod``) that this module lacks.


# The entries of a checkpoint's JSON data that contain names; see :func:`renamed`.
NAMES_IN_FACTS = {
    "params": True,
    "left_out": True,
    "optimizer": {"steps": True, "states": True, "group_params": True},
}
_NAMES_IN_DATA = {"tied": True, "ringcomm": NAMES_IN_FACTS}


def with_unwrapped_names(manifest: Manifest, known: KnownNames) -> Manifest:
    """Returns a manifest in which names with wrappers are replaced by the unwrapped names."""
    tensors = {name: known_tensor(name, known) for name in manifest.tensors}
    if all(name == inner for name, inner in tensors.items()):
        return manifest
    ranks = tuple(
        replace(
            rank,
            data=_renamed_extra(rank.data, known),
            tensors={known_tensor(name, known): each for name, each in rank.tensors.items()},
        )
        for rank in manifest.ranks
    )
    return replace(
        manifest,
        tensors={tensors[name]: each for name, each in manifest.tensors.items()},
        ranks=ranks,
        data=renamed(manifest.data, known, _NAMES_IN_DATA),
    )


def known_tensor(name: str, known: KnownNames) -> str:
    """Returns the unwrapped name for a name in a checkpoint, such as "optim.exp_avg.0.bias"."""
    kind, _, rest = name.partition(".")
    if kind == "extra":
        module, _, number = rest.rpartition(".")
        return f"extra.{known.find_module(module)}.{number}"
    parts = {"model": 0, "buffer": 0, "optim": 2 if rest.startswith("error_feedback.") else 1}.get(
        kind
    )
    if parts is None:
        return name
    *prefix, last = rest.split(".", parts)
    return ".".join([kind, *prefix, known.find(last)])


def _renamed_extra(told: Any, known: KnownNames) -> Any:
    """Returns a rank's own data with the unwrapped names of the modules that have extra state."""
    if not isinstance(told, dict) or not isinstance(told.get("extra"), dict):
        return told
    extra = {known.find_module(name): each for name, each in told["extra"].items()}
    return {**told, "extra": extra}


def renamed(value: Any, known: KnownNames, where: Any) -> Any:
    """Returns JSON data in which names with wrappers are replaced by the unwrapped names.

    Args:
        value: the data, which is not checked yet.
        known: the module's names.
        where: True if strings and dict keys are names; or a dict with a ``where`` for each key.
    """
    if where is True:
        if isinstance(value, str):
            return known.find(value)
        if isinstance(value, list):
            return [renamed(each, known, True) for each in value]
        if isinstance(value, dict):
            return {
                known.find(key): known.find(each) if isinstance(each, str) else each
                for key, each in value.items()
            }
    elif isinstance(value, dict):
        return {
            key: renamed(each, known, where[key]) if key in where else each
            for key, each in value.items()
        }
    return value


def step_of(
    engine: ShardEngine, optimizer: ShardedOptimizer | None, operation: str
) -> ShardedStep | None:
    """Returns the :class:`ShardedStep` of an optimizer; collective before the first step.

    Raises:
        ArgumentError: the optimizer was built on other parameters.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, ShardedOptimizer) or not _steps_module(engine, optimizer):
        raise ArgumentError(
            f"{operation}: optimizer: expected one of ringcomm.optim that was built on the "
            f"sharded module's parameters, got {optimizer!r}"
        )
    return optimizer.sharded_step()


def _steps_module(engine: ShardEngine, optimizer: ShardedOptimizer) -> bool:
    """True if an optimizer was built on the engine's parameters, or if both have none."""
    if engine.trainable.params:
        return optimizer.placement is engine.placement
    return not any(group["params"] for group in optimizer.param_groups)


def names_of(engine: ShardEngine, step: ShardedStep) -> list[str]:
    """Returns the module's name of each parameter of an optimizer, in the optimizer's order."""
    found = engine.names()
    return [found.get(id(param), "") for param in step.params]


def group_names(names: Sequence[str], groups: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns ``names``, which are in the optimizer's order, as one list per param group."""
    found, first = [], 0
    for group in groups:
        found.append(list(names[first : first + len(group["params"])]))
        first += len(group["params"])
    return found


# The facts in a checkpoint: the saving ranks, names, hyper-parameters and step numbers.

Fail = Callable[[str], CheckpointError]
VERSION = 1


def describe(engine: ShardEngine, step: ShardedStep | None) -> dict[str, Any]:
    """Returns facts about module and optimizer for a checkpoint: JSON, equal on all ranks."""
    told: dict[str, Any] = {
        "version": VERSION,
        "stage": engine.stage,
        "world_size": engine.comm.world_size,
        **({} if engine.mesh is None else {"mesh": engine.mesh.sizes}),
        "params": [name for name, _ in engine.named_parameters()],
        "optimizer": None,
    }
    if step is not None:
        names = names_of(engine, step)
        scaler = step.setting.loss_scaler
        told["optimizer"] = {
            "steps": dict(zip(names, step.table.step.tolist(), strict=True)),
            "steps_taken": step.table.control[STEPS].item(),
            "skipped_steps": step.table.control[SKIPPED].item(),
            "groups": [
                {key: _as_json(value) for key, value in group.items() if key != "params"}
                for group in pack_groups(step.groups, step.layout)
            ],
            "group_params": group_names(names, list(step.groups)),
            "kinds": sorted({kind for each in step.buckets for kind in each.state.names()}),
            "loss_scaler": None if scaler is None else scaler.state_dict(),
        }
        debtors = Debtors.of(step)
        if debtors is not None:
            told["optimizer"]["error_feedback"] = debtors.describe()
        if step.rule.saved_as != AdamWRule.name:
            told["optimizer"]["name"] = step.rule.saved_as
        if step.rule.keeps_more:
            states = dict(zip(names, describe_states(step.states()), strict=True))
            told["optimizer"]["states"] = states
    return told


@dataclass(frozen=True)
class SavedOptimizer:
    """The facts about an optimizer that :func:`describe` returned, with types checked.

    Attributes:
        name: name of the optimizer's rule.
        steps: number of steps taken, by parameter.
        steps_taken, skipped_steps: the optimizer's counts of steps.
        groups: hyper-parameters of the param groups, which :func:`check_optimizer` checks.
        group_params: names of the parameters of each param group.
        kinds: the kinds of state tensors, such as "exp_avg".
        loss_scaler: state of a loss scaler, or None.
        error_feedback: the ranks that saved quantization errors, or None.
        states: further state by parameter, if the rule keeps more.
    """

    name: str
    steps: Mapping[str, float]
    steps_taken: float
    skipped_steps: float
    groups: Sequence[dict[str, Any]]
    group_params: Sequence[list[str]]
    kinds: Sequence[str]
    loss_scaler: Mapping[str, Any] | None
    error_feedback: Debtors | None
    states: Mapping[str, ParamState | None]

    @classmethod
    def read(cls, told: Any) -> SavedOptimizer:
        told = exactly(told, dict)
        steps = {
            exactly(name, str): _count(each) for name, each in exactly(told["steps"], dict).items()
        }
        groups = [exactly(each, dict) for each in exactly(told["groups"], list)]
        group_params = [_names(each) for each in exactly(told["group_params"], list)]
        if len(groups) != len(group_params) or any(
            type(key) is not str for g in groups for key in g
        ):
            raise ValueError("its param groups are damaged")
        scaler, error_feedback = told["loss_scaler"], told.get("error_feedback")
        if scaler is not None:
            LossScaler().load_state_dict(exactly(scaler, dict))
        states = exactly(told.get("states", {}), dict)
        return cls(
            exactly(told.get("name", AdamWRule.name), str),
            steps,
            _count(told["steps_taken"]),
            _count(told["skipped_steps"]),
            groups,
            group_params,
            _names(told["kinds"]),
            scaler,
            None if error_feedback is None else Debtors.read(error_feedback),
            dict(zip(states, read_states(list(states.values())), strict=True)),
        )


@dataclass(frozen=True)
class SavedFacts:
    """The facts of a checkpoint, as :func:`describe` returned them.

    Attributes:
        world_size: number of ranks that saved; 0 for another library's checkpoint.
        mesh: sizes of the mesh of these ranks, or None.
        params: names of the module's parameters.
        optimizer: the facts about the optimizer; None if none was saved.
        converted: True if the checkpoint is from another library.
        left_out: names of parameters that were not saved.
    """

    world_size: int
    mesh: Any
    params: Sequence[str]
    optimizer: SavedOptimizer | None
    converted: bool
    left_out: Sequence[str]

    @classmethod
    def read(cls, told: Any, fail: Fail) -> SavedFacts:
        """Reads the facts from a file's JSON data.

        Raises:
            CheckpointError: the data are not as a save writes them.
        """
        try:
            told = exactly(told, dict)
            if told["version"] != VERSION:
                raise ValueError(f"version {shown(told['version'])}")
            told["stage"]
            optimizer = told["optimizer"]
            return cls(
                exactly(told["world_size"], int),
                told.get("mesh"),
                _names(told["params"]),
                None if optimizer is None else SavedOptimizer.read(optimizer),
                bool(told.get("converted")),
                _names(told.get("left_out", [])),
            )
        except DAMAGE as error:
            raise fail(f"is not a checkpoint of ringcomm.zero.save(): {in_words(error)}") from error


def _names(value: Any) -> list[str]:
    return [exactly(each, str) for each in exactly(value, list)]


def _count(value: Any) -> float:
    """Returns a number of steps, as a float."""
    if not 0 <= exactly(value, float, int) < 2**53:
        raise ValueError(f"expected a number of steps, got {shown(value)}")
    return float(value)


def debtors_of(step: ShardedStep | None, saved: SavedFacts) -> Debtors | None:
    """Returns the ranks that saved the quantization errors that a load reads, or None."""
    if step is None or saved.optimizer is None or Debtors.of(step) is None:
        return None
    return saved.optimizer.error_feedback


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def check_names(engine: ShardEngine, saved: SavedFacts, fail: Fail) -> None:
    """Raises ``fail(text)`` unless the saved parameters are the module's."""
    mine = [name for name, _ in engine.named_parameters()]
    theirs = list(saved.params)
    if saved.converted:
        _check_converted(engine, mine, theirs, fail)
        return
    for index in range(max(len(mine), len(theirs))):
        a, b = mine[index : index + 1], theirs[index : index + 1]
        if a != b:
            raise fail(
                f"is of another model: its parameter {index} is {_one(b)}, and the module's is "
                f"{_one(a)}"
            )


def _check_converted(engine: ShardEngine, mine: list[str], theirs: list[str], fail: Fail) -> None:
    """Checks the names of another library's checkpoint: any order, and buffers may be included."""
    module = engine.setup.module
    known = {*mine, *buffers_of(module), *aliases(module)}
    missing, strange = sorted({*mine} - {*theirs}), sorted({*theirs} - known)
    if missing or strange:
        raise fail(
            f"is of another model: the module's {_few(missing)} is not there"
            if missing
            else f"is of another model: the module has no {_few(strange)}"
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _one(names: list[str]) -> str:
    return repr(names[0]) if names else "missing"


def check_optimizer(
    engine: ShardEngine, step: ShardedStep, saved: SavedFacts, fail: Fail
) -> list[dict[str, Any]]:
    """Returns the saved param groups, after checks that all optimizer data fit."""
    given, converted = saved.optimizer, saved.converted
    if given is None:
        raise fail("was saved without an optimizer; load the module alone")
    check_same_optimizer(step.rule, given.name, str(fail("optimizer")))
    names = names_of(engine, step)
    mine = group_names(names, list(step.groups))
    same = mine == given.group_params
    if converted:
        # State is saved by parameter name, so the order in a group does not matter.
        same = [sorted(group) for group in mine] == [sorted(each) for each in given.group_params]
    if not same:
        raise fail(
            f"expected the param groups {mine}, as the optimizer has them, got {given.group_params}"
        )
    if not converted and (step.setting.loss_scaler is None) != (given.loss_scaler is None):
        raise fail("expected a loss scaler in the checkpoint and here, or in neither")
    if not {*names} <= given.steps.keys():
        raise fail("it lacks step numbers of parameters")
    packed = [
        {**group, "params": params}
        for group, params in zip(given.groups, given.group_params, strict=True)
    ]
    groups = check_groups(step, packed, str(fail("groups")))
    # The weights of another library's checkpoint become the FP32 masters.
    masters = ["master"] if converted and _has_masters(step) else []
    _check_kinds(step, [*given.kinds, *masters], merged_groups(step.groups, groups), fail)
    if step.rule.keeps_more:
        check_states(step, _saved_states(names, given), str(fail("states of parameters")))
    return groups


def _has_masters(step: ShardedStep) -> bool:
    return any(bucket.state.master is not None for bucket in step.buckets)


def _check_kinds(
    step: ShardedStep, kinds: Sequence[str], groups: Sequence[dict[str, Any]], fail: Fail
) -> None:
    if not step.buckets and not kinds:
        return
    mine = {kind for each in step.buckets for kind in each.state.names()}
    misfit = step.rule.misfit([kind for kind in kinds if kind not in MASTERS], groups)
    differ = (mine ^ {*kinds}) & {*MASTERS}
    # In FP32 a master equals its parameter: only quantized parameters keep a master of their own.
    in_fp32 = all(each.layout.dtype is torch.float32 for each in step.buckets)
    if misfit or (differ and not (differ == {"master"} and in_fp32)):
        raise fail(
            f"expected state of the kinds {sorted(mine)}, which {keeper_of_masters(step)} keeps, "
            f"got {kinds}"
        )


def _saved_states(names: Sequence[str], given: SavedOptimizer) -> list[ParamState | None]:
    return [given.states.get(name) for name in names]


def take_optimizer(
    engine: ShardEngine, step: ShardedStep, given: SavedOptimizer, groups: list[dict[str, Any]]
) -> None:
    """Takes over the checked facts about an optimizer, once its state's tensors are loaded."""
    for bucket in step.buckets:
        bucket.state.zero({*bucket.state.names()} - {*given.kinds, *MASTERS})
    names = names_of(engine, step)
    take_groups(list(step.groups), groups)
    if step.rule.keeps_more:
        step.rule.take_states(_saved_states(names, given))
    steps = [given.steps[name] for name in names]
    step.table.step.copy_(torch.tensor(steps, dtype=torch.float64, device="cpu"))
    step.table.control[STEPS].fill_(given.steps_taken)
    step.table.control[SKIPPED].fill_(given.skipped_steps)
    if step.setting.loss_scaler is not None and given.loss_scaler is not None:
        step.setting.loss_scaler.load_state_dict(given.loss_scaler)
    step.backend.forget()
    step.gradients.drop()
    forget_all(step)
    step.begin_anew()
