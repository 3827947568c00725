"""Mixtures of experts: tokens to the ranks of their experts and back, and a layer made of that.

``docs/moe.md`` says what is promised.
"""

from __future__ import annotations

from ringcomm.extras.moe.dispatch import Handle, combine, dispatch
from ringcomm.extras.moe.layer import (
    MoE,
    Optimizer,
    RoutingOptions,
    load,
    remove_sharding,
    save,
    shard,
)

__all__ = [
    "Handle",
    "MoE",
    "Optimizer",
    "RoutingOptions",
    "combine",
    "dispatch",
    "load",
    "remove_sharding",
    "save",
    "shard",
]
