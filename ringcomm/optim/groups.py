"""Param groups in checkpoints: packed as torch packs them, checked before they are taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.optim.layout import ShardLayout
from ringcomm.optim.table import check_hyper

Group = dict[str, Any]


def pack_groups(groups: Sequence[Mapping[str, Any]], layout: ShardLayout) -> list[Group]:
    """Groups with indices in place of parameters, as in ``torch.optim``'s state_dict."""
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


def check_groups(
    groups: Sequence[Group], saved: Any, place: torch.device, operation: str
) -> list[Group]:
    """Saved groups, ready to be taken over by :func:`take_groups`.

    Raises:
        CheckpointError: they do not fit ``groups``, or hold what is no hyper-parameter.
    """
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
        taken = {key: deepcopy(value) for key, value in given.items() if key != "params"}
        if isinstance(taken.get("betas"), list):  # JSON knows no tuples
            taken["betas"] = tuple(taken["betas"])
        if isinstance(taken.get("lr"), torch.Tensor):
            taken["lr"] = taken["lr"].to(place)
        # It is the class of an optimizer that decides, as in torch.
        taken["decoupled_weight_decay"] = group["decoupled_weight_decay"]
        try:
            check_hyper({**group, **taken}, index, place)
        except ArgumentError as error:
            raise CheckpointError(f"{operation}: {error}") from error
        ready.append(taken)
    return ready


def take_groups(groups: Sequence[Group], ready: Sequence[Group]) -> None:
    """Takes over what :func:`check_groups` returned."""
    for group, taken in zip(groups, ready, strict=True):
        group.update(taken)
