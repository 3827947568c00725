# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a layer, and the calls that send tokens to their experts and back.

Read ``layer.py`` first, then ``dispatch.py``; ``docs/moe.md`` states the guarantees.
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
