"""What a checkpoint says beside its tensors: whose state it is, hyper-parameters, step numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringcomm.errors import CheckpointError
from ringcomm.optim.groups import check_groups, pack_groups, take_groups
from ringcomm.optim.sharded import ShardedStep
from ringcomm.optim.table import SKIPPED, STEPS
from ringcomm.zero.contents import group_names, names_of
from ringcomm.zero.engine import Engine

Tensor = torch.Tensor
Fail = Callable[[str], CheckpointError]
VERSION = 1


def describe(engine: Engine, step: ShardedStep | None) -> dict[str, Any]:
    """What a checkpoint says beside the tensors; plain JSON, equal on all ranks."""
    told: dict[str, Any] = {
        "version": VERSION,
        "stage": engine.stage,
        "world_size": engine.comm.world_size,
        "params": [name for name, _ in engine.parts.module.named_parameters()],
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
                {key: _plain(value) for key, value in group.items() if key != "params"}
                for group in pack_groups(step.groups, step.layout)
            ],
            "group_params": group_names(names, list(step.groups)),
            "kinds": sorted({kind for each in step.buckets for kind in each.state.tensors()}),
            "loss_scaler": None if scaler is None else scaler.state_dict(),
        }
    return told


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def check_names(engine: Engine, saved: Mapping[str, Any], fail: Fail) -> None:
    """Raises what ``fail`` makes of it unless the saved parameters are the module's."""
    mine = [name for name, _ in engine.parts.module.named_parameters()]
    theirs = saved["params"]
    for index in range(max(len(mine), len(theirs))):
        a, b = mine[index : index + 1], theirs[index : index + 1]
        if a != b:
            raise fail(
                f"is of another model: its parameter {index} is {_one(b)}, and the module's is "
                f"{_one(a)}"
            )


def _one(names: list[str]) -> str:
    return repr(names[0]) if names else "missing"


def check_optimizer(
    engine: Engine, step: ShardedStep, saved: Mapping[str, Any], fail: Fail
) -> list[dict[str, Any]]:
    """The saved param groups, once everything about the optimizer fits; see :func:`describe`."""
    given = saved["optimizer"]
    kinds = {kind for each in step.buckets for kind in each.state.tensors()}
    amsgrad = {"max_exp_avg_sq"}
    if kinds - amsgrad != set(given["kinds"]) - amsgrad:
        raise fail(
            f"expected state of the kinds {sorted(kinds)}, which "
            f"master={step.setting.options.master!r} keeps, got {given['kinds']}"
        )
    names = names_of(engine, step)
    mine = group_names(names, list(step.groups))
    if mine != given["group_params"]:
        raise fail(
            f"expected the param groups {mine}, as the optimizer has them, got "
            f"{given['group_params']}"
        )
    packed = [
        {**group, "params": params}
        for group, params in zip(given["groups"], given["group_params"], strict=True)
    ]
    for group, taken in zip(step.groups, packed, strict=True):
        if isinstance(group["lr"], Tensor):
            taken["lr"] = torch.full_like(group["lr"], taken["lr"])
    if (step.setting.loss_scaler is None) != (given["loss_scaler"] is None):
        raise fail("expected a loss scaler on both sides, or on none")
    if not all(0 <= given["steps"].get(name, -1) < 2**53 for name in names):
        raise fail("its step numbers are damaged")
    return check_groups(list(step.groups), packed, step.setting.device, str(fail("groups")))


def take_optimizer(
    engine: Engine, step: ShardedStep, saved: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    """Takes over what :func:`check_optimizer` has checked; the state's tensors are there."""
    given = saved["optimizer"]
    if "max_exp_avg_sq" not in given["kinds"]:
        for bucket in step.buckets:
            if bucket.state.max_exp_avg_sq is not None:
                bucket.state.max_exp_avg_sq.zero_()
    take_groups(list(step.groups), groups)
    steps = [given["steps"][name] for name in names_of(engine, step)]
    step.table.step.copy_(torch.tensor(steps, dtype=torch.float64, device="cpu"))
    step.table.control[STEPS].fill_(given["steps_taken"])
    step.table.control[SKIPPED].fill_(given["skipped_steps"])
    if step.setting.loss_scaler is not None:
        step.setting.loss_scaler.load_state_dict(given["loss_scaler"])
    step.kernels.forget()
    step.gradients.drop()
    step.begin_anew()
