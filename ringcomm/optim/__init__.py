# SPDX-License-Identifier: Apache-2.0
"""Sharded optimizers: each rank keeps and updates the FP32 state of its shard of the parameters.

Read ``sharded.py`` first, then ``step.py``; ``docs/optimizer.md`` states the guarantees.
"""

from __future__ import annotations

from ringcomm.optim.adafactor import Adafactor
from ringcomm.optim.adamw import SGD, Adam, AdamW, AdamW8bit, Lion
from ringcomm.optim.any_torch import Sharded
from ringcomm.optim.layout import ParamSpec, ShardLayout
from ringcomm.optim.muon import Muon, muon_groups
from ringcomm.optim.options import AdamWOptions, Compression
from ringcomm.optim.setting import LossScaleOptions, LossScaler
from ringcomm.optim.sharded import GradScaler, ShardedOptimizer
from ringcomm.optim.state import reshard

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "AdamWOptions",
    "Compression",
    "GradScaler",
    "Lion",
    "LossScaleOptions",
    "LossScaler",
    "Muon",
    "ParamSpec",
    "ShardLayout",
    "Sharded",
    "ShardedOptimizer",
    "muon_groups",
    "reshard",
]
