"""The public name of ``ringcomm.extras.integrations.lightning``."""

from __future__ import annotations

from ringcomm.extras.integrations.lightning import RingcommStrategy

__all__ = ["RingcommStrategy"]
