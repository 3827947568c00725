"""Optimizers on shards: replicated parameters, sharded FP32 state; fused steps are one pass.

See ``docs/optimizer.md`` for its guarantees.
"""

from __future__ import annotations

from ringcomm.optim.adafactor import Adafactor
from ringcomm.optim.adamw import Adam, AdamW, AdamW8bit
from ringcomm.optim.grad_scaler import GradScaler
from ringcomm.optim.layout import ParamSpec, ShardLayout
from ringcomm.optim.loss_scaler import LossScaleOptions, LossScaler
from ringcomm.optim.muon import Muon, muon_groups
from ringcomm.optim.options import AdamWOptions, Wire
from ringcomm.optim.sgd import SGD, Lion
from ringcomm.optim.state import reshard
from ringcomm.optim.torch_rule import Sharded

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "AdamWOptions",
    "GradScaler",
    "Lion",
    "LossScaleOptions",
    "LossScaler",
    "Muon",
    "ParamSpec",
    "ShardLayout",
    "Sharded",
    "Wire",
    "muon_groups",
    "reshard",
]
