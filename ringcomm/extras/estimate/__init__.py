"""Closed forms for memory, traffic and time of sharded training; see ``docs/estimate.md``."""

from __future__ import annotations

from ringcomm.extras.estimate.experts import ExpertLayer
from ringcomm.extras.estimate.model import CHECKPOINTING, ActivationBytes, ModelElems, Transformer
from ringcomm.extras.estimate.tiers import TierBytes
from ringcomm.extras.estimate.training import STAGES, BytesPerElement, Training

__all__ = [
    "CHECKPOINTING",
    "STAGES",
    "ActivationBytes",
    "BytesPerElement",
    "ExpertLayer",
    "ModelElems",
    "TierBytes",
    "Training",
    "Transformer",
]
