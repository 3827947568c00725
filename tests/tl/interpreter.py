"""Ranks whose Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ringcomm import CommOptions, Communicator

# In worlds of this size, and there alone, the interpreter looks whether each sum and product of 32
# bits overflows: every collective and step has such a world, and the looks are a third of the time.
WORLD_THAT_CHECKS_OVERFLOW = 3


def _load_triton(checks_overflow: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    interpreter_builder.options = replace(options, sanitize_overflow=checks_overflow)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels are defined for the interpreter: for a process that has not loaded them."""
    assert "ringcomm._tl.launch" not in sys.modules
    _load_triton(checks_overflow=False)
    yield
    from ringcomm._tl.hooks import IS_INTERPRETED

    assert IS_INTERPRETED


def connect(store: Any, rank: int, world: int, name: str = "world", **options: Any) -> Communicator:
    """A communicator of processes, whose kernels are Triton's unless a call says otherwise."""
    _load_triton(checks_overflow=world == WORLD_THAT_CHECKS_OVERFLOW)
    usual = {"timeout": 40.0, "segment_bytes": 4096, "kernels": "triton"}
    chosen = CommOptions(**{**usual, **options})
    return Communicator.from_store(store, rank, world, name=name, options=chosen)
