"""Refuses the steps of optimizers that know nothing of sharding, on parameters that are sharded."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringcomm.errors import ArgumentError
from ringcomm.optim.placement import first_placed
from ringcomm.optim.sharded_adam import ShardedAdam

_lock = threading.Lock()
_watching = False


def watch_optimizers() -> None:
    """Has every optimizer of this process checked before each step, from the first call on.

    It stays: an optimizer without sharded parameters pays 0.1 us a parameter (Zen 4).
    """
    global _watching
    with _lock:
        if not _watching:
            register_optimizer_step_pre_hook(_refuse)
            _watching = True


def _refuse(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ArgumentError when the optimizer would step sharded parameters by itself."""
    if isinstance(optimizer, ShardedAdam):
        return
    found = first_placed(optimizer.param_groups)
    # Wrappers are torch's optimizers, too, and have the groups of the one that they step.
    if found is None or any(isinstance(each, ShardedAdam) for each in vars(optimizer).values()):
        return
    param, placement = found
    kind = type(optimizer)
    name = placement.names().get(id(param), "of no elements")
    raise ArgumentError(
        f"optimizer.step: {kind.__module__}.{kind.__qualname__} holds parameter {name} of a module "
        "that shard() has prepared, and would step it on this rank alone, without the others' "
        "gradients. Use ringcomm.optim.AdamW or Adam, built on the module's parameters after "
        "shard(); or unshard() the module first"
    )
