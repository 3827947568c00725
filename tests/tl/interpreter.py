"""Ranks whose Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringcomm import CommOptions, Communicator


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels are defined for the interpreter: for a process that has not loaded them."""
    assert "ringcomm._tl.launch" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    yield
    from ringcomm._tl.hooks import IS_INTERPRETED

    assert IS_INTERPRETED


def connect(store: Any, rank: int, world: int, name: str = "world", **options: Any) -> Communicator:
    """A communicator of processes, whose kernels are Triton's unless a call says otherwise."""
    os.environ["TRITON_INTERPRET"] = "1"
    usual = {"timeout": 40.0, "segment_bytes": 4096, "kernels": "triton"}
    chosen = CommOptions(**{**usual, **options})
    return Communicator.from_store(store, rank, world, name=name, options=chosen)
