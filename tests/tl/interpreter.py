# SPDX-License-Identifier: Apache-2.0
"""Ranks that run Triton kernels in Triton's interpreter, and their contexts of ``ringcomm.tl``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.forkserver import ForkServer
from typing import Any

from ringcomm import CommOptions, Communicator
from tests.support import ranks

# Only in worlds of this size the interpreter checks each 32-bit sum and product for overflow. Every
# collective and step has such a world, and the checks take a third of the time.
WORLD_THAT_CHECKS_OVERFLOW = 3
LIMIT_S = 100.0


class Ranks(ranks.Ranks):
    """Ranks as forks of a process that has loaded Triton and the kernels for the interpreter."""

    server = ForkServer()
    server.set_forkserver_preload(["tests.tl.preloaded"])


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = LIMIT_S
) -> list[Any]:
    """Does the same as ``ranks.run_ranks``, with these ranks."""
    return ranks.run_ranks(fn, world_size, *args, timeout_s=timeout_s, kind=Ranks)


def check_overflow(checks: bool) -> None:
    """Sets whether the interpreter checks sums and products for overflow."""
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=checks)


def connect(store: Any, rank: int, world: int, name: str = "world", **options: Any) -> Communicator:
    """Returns a process's communicator, with Triton's kernels unless a call chooses others."""
    check_overflow(world == WORLD_THAT_CHECKS_OVERFLOW)
    usual = {"timeout": 40.0, "segment_bytes": 4096, "kernels": "triton"}
    chosen = CommOptions(**{**usual, **options})
    return Communicator.from_store(store, rank, world, name=name, options=chosen)


def open_context(
    store: Any, rank: int, world: int, timeout: float = 30.0, blocks: int | None = None
) -> tuple[Communicator, Any, Any]:
    """Returns a communicator with native collectives, a context on it, and ``ringcomm.tl``."""
    comm = connect(store, rank, world, kernels="native", timeout=timeout)
    from ringcomm import tl

    return comm, tl.Context(comm, blocks), tl


def run_kernel(
    context: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any
) -> None:
    """Launches a kernel with the arguments that all kernels begin and end with."""
    context.launch(
        kernel, grid, context.table_ptr, context.timeout_ns, *args, G=context.geometry, **constants
    )


def no_wait(ws: Any, word: Any, peer: Any, epoch: Any, step: Any, status: Any, G: Any) -> Any:
    """Replaces wait_acquire_sys() in negative controls."""
    return status
