"""FSDP2 on ringcomm's collectives: the public names of ``ringcomm.extras.fsdp2``."""

from __future__ import annotations

from ringcomm.extras.fsdp2 import plug, unplug

__all__ = ["plug", "unplug"]
