"""Ranks with a context of ``ringcomm.tl``, whose kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

from ringcomm import Communicator
from tests.tl.interpreter import connect


def open_context(
    store: Any, rank: int, world: int, timeout: float = 20.0, blocks: int | None = None
) -> tuple[Communicator, Any, Any]:
    """The communicator, a context, and the module of the tests' kernels, which loads Triton."""
    comm = connect(store, rank, world, kernels="native", timeout=timeout)
    from ringcomm import tl as rc
    from tests.tl import device_kernels as kernels

    return comm, rc.Context(comm, blocks), kernels


def run_kernel(
    context: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any
) -> None:
    """A launch of a kernel that begins and ends as all do."""
    context.launch(
        kernel, grid, context.table_ptr, context.timeout_ns, *args, G=context.geometry, **constants
    )
