"""The whole state in the format of ``torch.optim.AdamW``, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ringcomm.errors import CheckpointError
from ringcomm.optim import kernels
from ringcomm.optim.agreement import agreed_load
from ringcomm.optim.buckets import Bucket, join_master, split_master
from ringcomm.optim.state import ChunkTensors, check_groups, pack_groups, take_groups, take_state
from ringcomm.optim.step import ShardedStep

Tensor = torch.Tensor
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_LOAD = "load_torch_state_dict"


def gather(sharded: ShardedStep, dst: int | None) -> dict[str, Any]:
    """The state of all parameters on rank ``dst``, or on all ranks; collective."""
    sharded.refuse_if_torn("full_state_dict")
    sharded.written.take_over()
    steps: list[float] = sharded.table.step.tolist()
    amsgrad = [group["amsgrad"] for group in sharded.groups]
    state: dict[int, dict[str, Tensor]] = {}
    masters: dict[int, Tensor] = {}
    for index, spec in enumerate(sharded.layout.params):
        # torch makes a parameter's state at its first gradient.
        if steps[index]:
            step = torch.tensor(steps[index], dtype=_scalar_dtype(), device="cpu")
            state[index] = {"step": step}
            if not spec.elems:
                names = _MOMENTS if amsgrad[spec.group] else _MOMENTS[:2]
                device = sharded.setting.device
                state[index].update({n: torch.zeros(spec.shape, device=device) for n in names})
    keeps = dst is None or sharded.setting.rank == dst
    for bucket in sharded.buckets:
        tensors = {k: v for k, v in bucket.state.tensors().items() if k in _MOMENTS}
        master = master_of(bucket)
        if master is not None:
            tensors["master"] = master
        for name, tensor in tensors.items():
            whole = _whole(sharded, bucket, tensor)
            for index, view in sharded.layout.views(bucket.number, whole):
                if keeps and name == "master":
                    masters[index] = view.clone()
                elif keeps and index in state and _has(name, amsgrad, sharded, index):
                    state[index][name] = view.clone()
    if not keeps:
        return {}
    packed = pack_groups(sharded.groups, sharded.layout)
    full = {"state": dict(sorted(state.items())), "param_groups": packed}
    return {**full, "master": dict(sorted(masters.items()))} if masters else full


def _scalar_dtype() -> torch.dtype:
    """As torch keeps "step"."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _has(name: str, amsgrad: list[bool], sharded: ShardedStep, index: int) -> bool:
    return name != "max_exp_avg_sq" or amsgrad[sharded.layout.params[index].group]


def _whole(sharded: ShardedStep, bucket: Bucket, own: Tensor) -> Tensor:
    """All ranks' chunks of one tensor: float32 [bucket elements]."""
    comm = sharded.setting.comm
    if comm is None or sharded.shard_of[1] == 1:
        return own
    whole = own.new_empty(bucket.layout.elems)
    chunks = [bucket.layout.chunk(rank, comm.world_size) for rank in range(comm.world_size)]
    comm.all_gather([whole[chunk.begin : chunk.end] for chunk in chunks], own)
    return whole


def master_of(bucket: Bucket) -> Tensor | None:
    """The FP32 masters of this rank's chunk; None where the parameters are all there is."""
    remainder = bucket.state.remainder
    if remainder is None:
        return bucket.state.master
    return join_master(bucket.own_params, remainder)


def load(sharded: ShardedStep, given: Mapping[str, Any]) -> None:
    """Takes this rank's part of a whole state.

    Raises:
        CheckpointError: it does not fit the parameters; nothing was changed.
    """
    operation = sharded.setting.where(_LOAD)
    with agreed_load(sharded.setting.comm, operation) as agreement:
        if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
            raise CheckpointError(f'{operation}: expected a dict with "state" and "param_groups"')
        groups = check_groups(
            sharded.groups, given.get("param_groups"), sharded.setting.device, operation
        )
        entries = _by_index(sharded, given)
        both = zip(sharded.groups, groups, strict=True)
        amsgrad = [{**mine, **new}["amsgrad"] for mine, new in both]
        steps = [
            _check_entry(sharded, index, entries.get(index), amsgrad, operation)
            for index in range(len(sharded.layout.params))
        ]
        masters = _check_masters(sharded, given, operation)
        agreement.append(steps)
    _take(sharded, entries, masters, any(amsgrad))
    take_groups(sharded.groups, groups)
    sharded.table.step.copy_(torch.tensor(steps, dtype=torch.float64, device="cpu"))
    # A step of torch's is one of every parameter's at most.
    sharded.table.control[kernels.STEPS].fill_(max(steps, default=0.0))
    sharded.table.control[kernels.SKIPPED].zero_()
    sharded.begin_anew()


def _by_index(sharded: ShardedStep, given: Mapping[str, Any]) -> dict[int, Any]:
    """State by this optimizer's index: torch's keys are what "params" of the groups say."""
    keys = [key for group in given["param_groups"] for key in group["params"]]
    found: dict[int, Any] = {}
    for index, key in enumerate(keys):
        if sharded.layout.params[index].tied_to is None and key in given["state"]:
            found[index] = given["state"][key]
    return found


def _check_entry(
    sharded: ShardedStep, index: int, entry: Any, amsgrad: list[bool], operation: str
) -> float:
    """Checks one parameter's state; returns its step."""
    if entry is None:
        return 0.0
    spec = sharded.layout.params[index]
    names = _MOMENTS if amsgrad[spec.group] else _MOMENTS[:2]
    try:
        step = float(entry["step"])
        tensors = [entry[name] for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{operation}: parameter {index}: expected step, {', '.join(names)}, got {error!r}"
        ) from error
    for name, tensor in zip(names, tensors, strict=True):
        _check_tensor(tensor, spec.shape, f"{operation}: parameter {index}: {name}")
    if not 0 <= step < 2**53:
        raise CheckpointError(f"{operation}: parameter {index}: expected a step >= 0, got {step}")
    return step


def _check_tensor(tensor: Any, shape: tuple[int, ...], called: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != shape or not tensor.is_floating_point():
        got = f"{tensor.dtype} of {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else tensor
        raise CheckpointError(f"{called}: expected floating-point of shape {shape}, got {got}")


def _check_masters(
    sharded: ShardedStep, given: Mapping[str, Any], operation: str
) -> dict[int, Tensor] | None:
    """The masters by index, or None when there are none."""
    masters = given.get("master")
    if masters is None:
        return None
    for index, spec in enumerate(sharded.layout.params):
        if spec.placed and spec.dtype is not torch.float32:
            called = f"{operation}: parameter {index}: master"
            _check_tensor(masters.get(index), spec.shape, called)
    return dict(masters)


def _take(
    sharded: ShardedStep, entries: dict[int, Any], masters: dict[int, Tensor] | None, amsgrad: bool
) -> None:
    tensors: ChunkTensors = []
    for bucket in sharded.buckets:
        names = _MOMENTS if amsgrad else _MOMENTS[:2]
        own = {name: torch.zeros_like(bucket.state.exp_avg) for name in names}
        for begin, end, index in bucket.layout.segments:
            low, high = max(begin, bucket.chunk.begin), min(end, bucket.chunk.end)
            if low < high and index in entries:
                for name, tensor in own.items():
                    if name in entries[index]:
                        flat = _in_order(sharded, index, entries[index][name])
                        target = tensor[low - bucket.chunk.begin : high - bucket.chunk.begin]
                        target.copy_(flat[low - begin : high - begin])
        bucket.refresh_master()
        if masters is not None:
            _take_masters(sharded, bucket, masters)
        # What is not named is zeroed.
        kept = {k: v for k, v in bucket.state.tensors().items() if k not in _MOMENTS}
        tensors.append({**own, **kept})
    take_state(sharded, tensors)


def _in_order(sharded: ShardedStep, index: int, tensor: Tensor) -> Tensor:
    """A tensor of a parameter's shape as float32 [elements], in the bucket's order."""
    spec = sharded.layout.params[index]
    flat = torch.empty(spec.elems, dtype=torch.float32, device=sharded.setting.device)
    spec.view(flat).copy_(tensor)
    return flat


def _take_masters(sharded: ShardedStep, bucket: Bucket, masters: dict[int, Tensor]) -> None:
    state, chunk = bucket.state, bucket.chunk
    if state.master is None and state.remainder is None:
        return
    for begin, end, index in bucket.layout.segments:
        flat = _in_order(sharded, index, masters[index])
        low, high = max(begin, chunk.begin), min(end, chunk.end)
        if state.remainder is not None:
            # Its low half means something only below the parameter that it was split from.
            bucket.write_params(begin, split_master(flat)[0])
        if low >= high:
            continue
        part = slice(low - chunk.begin, high - chunk.begin)
        inside = flat[low - begin : high - begin]
        if state.master is not None:
            state.master[part].copy_(inside)
        if state.remainder is not None:
            state.remainder[part].copy_(split_master(inside)[1])
