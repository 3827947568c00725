"""Mixtures of experts: the public names of ``ringcomm.extras.moe``."""

from __future__ import annotations

from ringcomm.extras.moe import (
    Handle,
    MoE,
    Optimizer,
    RoutingOptions,
    combine,
    dispatch,
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
