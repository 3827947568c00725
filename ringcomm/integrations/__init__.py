"""Training loops of other libraries: the public names of ``ringcomm.extras.integrations``."""

from __future__ import annotations

__all__: list[str] = []
