# SPDX-License-Identifier: Apache-2.0
"""Extensions of the core: experts, tensor parallelism, FSDP2, and other libraries' training loops.

``from ringcomm.extras import moe`` imports one extension. The modules ``lightning``,
``transformers`` and ``accelerate`` import the library of the same name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = ("accelerate", "fsdp2", "lightning", "moe", "parallel", "transformers")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ringcomm.extras.{name}")
    raise AttributeError(f"module 'ringcomm.extras' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


__all__: list[str] = []
