# SPDX-License-Identifier: Apache-2.0
"""Saves and loads an optimizer's state in the format of torch's ``state_dict()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringcomm.comm.agreement import agreed_load
from ringcomm.errors import CheckpointError
from ringcomm.optim import backends
from ringcomm.optim.buckets import Bucket, split_master
from ringcomm.optim.dtensors import distributed_as, is_distributed, lies_alike, local_of
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.placement import end_changes
from ringcomm.optim.rules import ParamState
from ringcomm.optim.state import (
    ChunkTensors,
    check_groups,
    describe_states,
    forget_all,
    merged_groups,
    pack_groups,
    take_groups,
    take_state,
    take_whole,
)
from ringcomm.optim.step import ShardedStep

Tensor = torch.Tensor

_LOAD = "load_torch_state_dict"


def gather_torch(sharded: ShardedStep, dst: int | None) -> dict[str, Any]:
    """Returns the state of all parameters on rank ``dst``, or on all ranks; collective."""
    sharded.refuse_if_partly_updated("full_state_dict")
    sharded.written.take_over()
    states = sharded.states()
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    for index, spec in enumerate(sharded.layout.params):
        has = states[index]
        if has is not None:
            numbers = has.numbers.items()
            state[index] = {name: sharded.rule.to_torch(name, each) for name, each in numbers}
            if not spec.elems:
                zeros = torch.zeros(spec.shape, device=sharded.setting.device)
                param = sharded.params[index]
                state[index].update({n: distributed_as(param, zeros.clone()) for n in has.tensors})
            kept = sharded.rule.kept_whole(index).items()
            state[index].update({name: each.clone() for name, each in kept})
    if sharded.setting.options.master != "none":
        masters = {index: _nothing_of(sharded, index) for index in _empty_shards(sharded.layout)}
    keeps = dst is None or sharded.setting.rank == dst
    for bucket in sharded.buckets:
        tensors = bucket.state.wide()
        if bucket.state.masters():
            tensors["master"] = bucket.read_state("master", *bucket.chunk)
        for name, tensor in tensors.items():
            whole = _whole(sharded, bucket, tensor)
            for index, view in sharded.layout.views(bucket.number, whole):
                if keeps and name == "master":
                    masters[index] = distributed_as(sharded.params[index], view.clone())
                elif keeps and _has(states[index], name):
                    state[index][name] = distributed_as(sharded.params[index], view.clone())
    if not keeps:
        return {}
    packed = pack_groups(sharded.groups, sharded.layout)
    full = {"state": dict(sorted(state.items())), "param_groups": packed}
    return {**full, "master": dict(sorted(masters.items()))} if masters else full


def _empty_shards(layout: ShardLayout) -> list[int]:
    """Returns the indices of 16-bit parameters whose elements are all on other ranks."""
    return [
        index
        for index, spec in enumerate(layout.params)
        if spec.trainable
        and spec.tied_to is None
        and spec.sharding is not None
        and not spec.elems
        and spec.dtype is not torch.float32
    ]


def _nothing_of(sharded: ShardedStep, index: int) -> Tensor:
    shape, device = sharded.layout.params[index].shape, sharded.setting.device
    return distributed_as(sharded.params[index], torch.empty(shape, device=device))


def _has(state: ParamState | None, name: str) -> bool:
    return state is not None and name in state.tensors


def _whole(sharded: ShardedStep, bucket: Bucket, own: Tensor) -> Tensor:
    """Gathers all ranks' chunks of one tensor: float32 [bucket elements]; collective."""
    sharers = sharded.setting.sharers
    if sharers is None or sharded.shard_of[1] == 1:
        return own
    whole = own.new_empty(bucket.layout.elems)
    chunks = bucket.layout.chunks(sharers)
    sharers.all_gather([whole[chunk.begin : chunk.end] for chunk in chunks], own)
    return whole


def load_torch(sharded: ShardedStep, given: Mapping[str, Any]) -> None:
    """Loads this rank's shards from a state of all parameters in torch's format; collective.

    Raises:
        CheckpointError: the state does not fit the parameters; nothing was changed.
    """
    operation = sharded.setting.where(_LOAD)
    with agreed_load(sharded.ranks, operation) as agreement:
        if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
            raise CheckpointError(f'{operation}: expected a dict with "state" and "param_groups"')
        groups = check_groups(sharded, given.get("param_groups"), operation)
        entries = {
            index: _local_entry(sharded, index, entry, operation)
            for index, entry in _by_index(sharded, given).items()
        }
        merged = merged_groups(sharded.groups, groups)
        states = [
            _check_entry(sharded, index, entries.get(index), merged, operation)
            for index in range(len(sharded.layout.params))
        ]
        steps = [_step_of(state) for state in states]
        whole = _kept_whole(sharded, entries, states, operation)
        masters = _check_masters(sharded, given.get("master"), operation)
        agreement.append(describe_states(states))
    names = sharded.rule.names(merged)
    _take(sharded, _LoadedState(states, entries, names), masters)
    if sharded.setting.comm is not None:
        end_changes(sharded.setting.comm, sharded.buckets)
    forget_all(sharded)
    take_groups(sharded.groups, groups)
    take_whole(sharded, whole)
    sharded.rule.take_states(states)
    sharded.table.step.copy_(torch.tensor(steps, dtype=torch.float64, device="cpu"))
    # torch counts steps per parameter; the optimizer has taken at least the largest number.
    sharded.table.control[backends.STEPS].fill_(max(steps, default=0.0))
    sharded.table.control[backends.SKIPPED].zero_()
    sharded.begin_anew()


def _by_index(sharded: ShardedStep, given: Mapping[str, Any]) -> dict[int, Any]:
    """Returns saved states by parameter index; the saved groups list the keys in index order."""
    keys = [key for group in given["param_groups"] for key in group["params"]]
    found: dict[int, Any] = {}
    for index, key in enumerate(keys):
        if sharded.layout.params[index].tied_to is None and key in given["state"]:
            found[index] = given["state"][key]
    return found


def _local_entry(sharded: ShardedStep, index: int, entry: Any, operation: str) -> Any:
    """Returns a parameter's entry with each tensor replaced by this rank's part."""
    if not isinstance(entry, Mapping):
        return entry
    called = f"{operation}: parameter {index}"
    return {
        name: _local_tensor(sharded, index, each, f"{called}: {name}")
        for name, each in entry.items()
    }


def _local_tensor(sharded: ShardedStep, index: int, given: Any, called: str) -> Any:
    """Returns this rank's part of a state tensor: a whole tensor, or a DTensor like the parameter.

    Raises:
        CheckpointError: the DTensor has another mesh or other placements than the parameter.
    """
    if not isinstance(given, Tensor):
        return given
    spec, param = sharded.layout.params[index], sharded.params[index]
    if not is_distributed(given):
        sharding = spec.sharding
        whole = sharding is not None and tuple(given.shape) == sharding.shape
        return (
            sharding.local_tensor_of(given, spec.shape) if sharding is not None and whole else given
        )
    if not lies_alike(given, param):
        raise CheckpointError(
            f"{called}: expected a whole tensor, or a DTensor with the mesh and placements of the "
            "parameter, got another DTensor; pass its .full_tensor()"
        )
    return local_of(given)


def _check_entry(
    sharded: ShardedStep,
    index: int,
    entry: Any,
    groups: Sequence[Mapping[str, Any]],
    operation: str,
) -> ParamState | None:
    """Checks one parameter's entry, and returns the parameter's state."""
    if entry is None:
        return None
    spec, called = sharded.layout.params[index], f"{operation}: parameter {index}"
    try:
        state = sharded.rule.from_torch(entry, groups[spec.group])
    except ValueError as error:
        raise CheckpointError(f"{called}: {error}") from error
    for name in () if state is None else state.tensors:
        _check_tensor(entry[name], spec.shape, f"{called}: {name}")
    if not 0 <= _step_of(state) < 2**53:
        raise CheckpointError(f"{called}: expected a step >= 0, got {_step_of(state)}")
    return state


def _kept_whole(
    sharded: ShardedStep,
    entries: Mapping[int, Any],
    states: Sequence[ParamState | None],
    operation: str,
) -> dict[int, dict[str, Tensor]]:
    """Checks and returns the state tensors that are in no bucket, for parameters with state."""
    found: dict[int, dict[str, Tensor]] = {}
    for index, state in enumerate(states):
        for name, mine in sharded.rule.kept_whole(index).items() if state is not None else ():
            called = f"{operation}: parameter {index}: {name}"
            _check_tensor(entries[index].get(name), tuple(mine.shape), called)
            found.setdefault(index, {})[name] = entries[index][name]
    return found


def _step_of(state: ParamState | None) -> float:
    """Returns the steps that a parameter has taken; 1 if its optimizer does not count them."""
    return 0.0 if state is None else state.numbers.get("step", 1.0)


def _check_tensor(tensor: Any, shape: tuple[int, ...], called: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != shape or not tensor.is_floating_point():
        got = f"{tensor.dtype} of {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else tensor
        raise CheckpointError(f"{called}: expected a float tensor of shape {shape}, got {got}")


def _has_master(sharded: ShardedStep, index: int) -> bool:
    """True if a full state has a master of the parameter, which is then 16-bit or quantized."""
    spec, (number, _) = (
        sharded.layout.params[index],
        sharded.layout.locations.get(index, (None, None)),
    )
    quantized = number is not None and sharded.buckets[number].compression is not None
    return spec.in_bucket and (quantized or spec.dtype is not torch.float32)


def _check_masters(
    sharded: ShardedStep, given: Mapping[int, Any] | None, operation: str
) -> dict[int, Tensor] | None:
    """Checks the masters; returns this rank's shards by index, or None if no masters are given."""
    if given is None:
        return None
    masters = {}
    for index, spec in enumerate(sharded.layout.params):
        if _has_master(sharded, index):
            called = f"{operation}: parameter {index}: master"
            masters[index] = _local_tensor(sharded, index, given.get(index), called)
            _check_tensor(masters[index], spec.shape, called)
    return masters


class _LoadedState(NamedTuple):
    """A state to load: each parameter's state and entry, and the names of all tensors."""

    states: Sequence[ParamState | None]
    entries: Mapping[int, Any]
    names: Sequence[str]


def _take(sharded: ShardedStep, given: _LoadedState, masters: dict[int, Tensor] | None) -> None:
    tensors: ChunkTensors = []
    for bucket in sharded.buckets:
        elems, device = bucket.chunk.elems, sharded.setting.device
        own = {name: torch.zeros(elems, dtype=torch.float32, device=device) for name in given.names}
        for begin, end, index in bucket.layout.segments:
            low, high = max(begin, bucket.chunk.begin), min(end, bucket.chunk.end)
            state = given.states[index]
            for name in () if low >= high or state is None else state.tensors:
                flat = _in_order(sharded, index, given.entries[index][name])
                target = own[name][low - bucket.chunk.begin : high - bucket.chunk.begin]
                target.copy_(flat[low - begin : high - begin])
        bucket.refresh_master()
        if masters is not None:
            _take_masters(sharded, bucket, masters)
        tensors.append(own)
    take_state(sharded, tensors)


def _in_order(sharded: ShardedStep, index: int, tensor: Tensor) -> Tensor:
    """Flattens a tensor of a parameter's shape to float32 [elements], in the bucket's order."""
    spec = sharded.layout.params[index]
    flat = torch.empty(spec.elems, dtype=torch.float32, device=sharded.setting.device)
    spec.view(flat).copy_(tensor)
    return flat


def _take_masters(sharded: ShardedStep, bucket: Bucket, masters: dict[int, Tensor]) -> None:
    chunk = bucket.chunk
    if not bucket.state.masters():
        return
    for begin, end, index in bucket.layout.segments:
        flat = _in_order(sharded, index, masters[index])
        low, high = max(begin, chunk.begin), min(end, chunk.end)
        if bucket.state.remainder is not None:
            # A master is a parameter and its remainder together, so write the parameter as well.
            bucket.write_params(begin, split_master(flat)[0])
        if low < high:
            bucket.write_state("master", low, flat[low - begin : high - begin])
