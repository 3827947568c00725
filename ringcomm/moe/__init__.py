"""Mixtures of experts: tokens to the ranks of their experts and back, and a layer made of that.

``docs/moe.md`` says what is promised.
"""

from __future__ import annotations

from ringcomm.moe.checkpoint import load, save
from ringcomm.moe.dispatch import Handle, combine, dispatch
from ringcomm.moe.layer import MoE
from ringcomm.moe.optimizer import Optimizer
from ringcomm.moe.routing import RoutingOptions
from ringcomm.moe.sharding import shard, unshard

__all__ = [
    "Handle",
    "MoE",
    "Optimizer",
    "RoutingOptions",
    "combine",
    "dispatch",
    "load",
    "save",
    "shard",
    "unshard",
]
