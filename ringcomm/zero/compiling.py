"""Keeps hooks out of what ``torch.compile`` traces."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_compile(function: F) -> F:
    """``torch.compiler.disable``, without its import of Dynamo where nothing is compiled.

    That takes 1.2 s (Zen 4), which importing ringcomm.zero would take longer.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(dynamo.disable(function))
        return disabled[0](*args, **kwargs)

    # What Dynamo looks for before it traces a call.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(F, call)
