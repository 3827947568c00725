"""The libraries that integrations belong to, which ringcomm does not bring along."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def imported(names: tuple[str, ...], package: str, asks: str) -> Any:
    """Imports a library that goes by several names: that which the program has, or else the first.

    Args:
        names: of its modules, the preferred one first.
        package: what pip calls it.
        asks: the module of ringcomm that needs it.

    Raises:
        ImportError: there is none of them.
    """
    loaded = [name for name in names if name in sys.modules]
    there = loaded or [name for name in names if find_spec(name.partition(".")[0]) is not None]
    if not there:
        raise ImportError(
            f"{asks} needs the module {' or '.join(names)}, which is not installed: "
            f"pip install {package}"
        )
    return import_module(there[0])
