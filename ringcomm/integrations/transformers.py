"""The public name of ``ringcomm.extras.integrations.transformers``."""

from __future__ import annotations

from ringcomm.extras.integrations.transformers import ZeroTrainer

__all__ = ["ZeroTrainer"]
