# SPDX-License-Identifier: Apache-2.0
"""Ranks whose Triton kernels run in Triton's interpreter, and their contexts of ``ringcomm.tl``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.forkserver import ForkServer
from typing import Any

from ringcomm import CommOptions, Communicator
from tests.support import ranks

# In worlds of this size, and there alone, the interpreter looks whether each sum and product of 32
# bits overflows: every collective and step has such a world, and the looks are a third of the time.
WORLD_THAT_CHECKS_OVERFLOW = 3
LIMIT_S = 100.0


class Ranks(ranks.Ranks):
    """Forks of a process in which Triton and the kernels are loaded for the interpreter."""

    server = ForkServer()
    server.set_forkserver_preload(["tests.tl.preloaded"])


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = LIMIT_S
) -> list[Any]:
    """Does what ``ranks.run_ranks`` does, with these ranks."""
    return ranks.run_ranks(fn, world_size, *args, timeout_s=timeout_s, kind=Ranks)


def check_overflow(checks: bool) -> None:
    """Has the interpreter look whether sums and products overflow, or not."""
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=checks)


def connect(store: Any, rank: int, world: int, name: str = "world", **options: Any) -> Communicator:
    """A communicator of processes, whose kernels are Triton's unless a call says otherwise."""
    check_overflow(world == WORLD_THAT_CHECKS_OVERFLOW)
    usual = {"timeout": 40.0, "segment_bytes": 4096, "kernels": "triton"}
    chosen = CommOptions(**{**usual, **options})
    return Communicator.from_store(store, rank, world, name=name, options=chosen)


def open_context(
    store: Any, rank: int, world: int, timeout: float = 30.0, blocks: int | None = None
) -> tuple[Communicator, Any, Any]:
    """A communicator with native collectives, a context on it, and ``ringcomm.tl``."""
    comm = connect(store, rank, world, kernels="native", timeout=timeout)
    from ringcomm import tl

    return comm, tl.Context(comm, blocks), tl


def run_kernel(
    context: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any
) -> None:
    """A launch of a kernel that begins and ends as all do."""
    context.launch(
        kernel, grid, context.table_ptr, context.timeout_ns, *args, G=context.geometry, **constants
    )


def no_wait(ws: Any, word: Any, peer: Any, epoch: Any, step: Any, status: Any, G: Any) -> Any:
    """In place of wait_acquire_sys(), for negative controls."""
    return status
