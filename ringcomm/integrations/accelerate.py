"""The public name of ``ringcomm.extras.integrations.accelerate``."""

from __future__ import annotations

from ringcomm.extras.integrations.accelerate import ZeroAccelerator

__all__ = ["ZeroAccelerator"]
