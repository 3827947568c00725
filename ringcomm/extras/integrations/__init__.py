"""Training loops of other libraries on ``ringcomm.zero``; each module imports its library.

``docs/integrations/index.md`` says what works with which, and what does not, and why.
"""

from __future__ import annotations

__all__: list[str] = []
