# SPDX-License-Identifier: Apache-2.0
"""Compares compiled functions with eager ones, and records the calls that are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ringcomm import Communicator
from tests.support.exact import equal

Tensor = torch.Tensor
METHODS = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter_tensor",
)


def evaluate(function: Callable[..., Tensor], rows: int, seed: int, *rest: Any) -> list[Any]:
    """Returns value and gradient."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(-2, 3, (rows, 3), generator=generator).double() * 12
    tensor.requires_grad_()
    output = function(tensor, *rest)
    output.backward(output.detach().sign())
    return [output.detach(), tensor.grad]


def check(
    function: Callable[..., Tensor],
    rows: int,
    seed: int,
    *rest: Any,
    backend: Any = "aot_eager",
    dynamic: bool | None = None,
) -> None:
    """Compares a compiled function with the eager one."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    want = evaluate(function, rows, seed, *rest)
    assert all(map(equal, evaluate(compiled, rows, seed, *rest), want))


def alone(name: str = "alone") -> Communicator:
    return Communicator.from_store(dist.HashStore(), 0, 1, name=name)


@contextmanager
def recorded_calls() -> Iterator[list[tuple[str, str, int]]]:
    """Records the calls of this process's communicators: group name, method, number of elements."""
    calls: list[tuple[str, str, int]] = []

    def recording(method: str) -> Callable[..., Any]:
        original = getattr(Communicator, method)

        def call(self: Communicator, tensor: Tensor, *rest: Any, **options: Any) -> Any:
            calls.append((self.name, method, tensor.numel()))
            return original(self, tensor, *rest, **options)

        return call

    with ExitStack() as stack:
        for method in METHODS:
            stack.enter_context(mock.patch.object(Communicator, method, recording(method)))
        yield calls
