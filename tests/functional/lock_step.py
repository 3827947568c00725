# SPDX-License-Identifier: Apache-2.0
"""Makes one differentiable function of all ranks' tensors, which gradcheck can test.

Each evaluation, also of derivatives of any order, calls the rank function once on every rank. So
the ranks make the same calls, whichever rank's input gradcheck perturbs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm import Communicator, LocalWorld

Tensor = torch.Tensor
# A function that is called on every rank with the rank's own tensors.
RankFunction = Callable[..., Sequence[Tensor]]


def backward_of(function: RankFunction, count: int) -> RankFunction:
    """Returns the backward: it takes ``count`` inputs, and a gradient for each output."""

    def run(comm: Communicator, *tensors: Tensor) -> Sequence[Tensor]:
        # In the innermost call no tensor requires grad yet.
        tensors = tuple(
            each if each.requires_grad else each.detach().requires_grad_() for each in tensors
        )
        inputs, gradients = tensors[:count], tensors[count:]
        with torch.enable_grad():
            outputs = function(comm, *inputs)
            return torch.autograd.grad(
                outputs, inputs, gradients, create_graph=True, materialize_grads=True
            )

    return run


class _OnAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, world: LocalWorld, function: RankFunction, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.world, ctx.function = world, function
        ctx.save_for_backward(*tensors)
        each = len(tensors) // len(world)

        def body(comm: Communicator) -> list[Tensor]:
            mine = tensors[comm.rank * each : (comm.rank + 1) * each]
            with torch.no_grad():
                return [output.detach() for output in function(comm, *mine)]

        return tuple(output for outputs in world.run(body) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        world, ranks = ctx.world, range(len(ctx.world))
        ins, outs = len(tensors) // len(world), len(gradients) // len(world)
        by_rank = [
            each
            for rank in ranks
            for each in (
                *tensors[rank * ins : (rank + 1) * ins],
                *gradients[rank * outs : (rank + 1) * outs],
            )
        ]
        return None, None, *on_all_ranks(world, backward_of(ctx.function, ins), by_rank)


def on_all_ranks(
    world: LocalWorld, function: RankFunction, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the outputs of all ranks in rank order, from their inputs in the same order."""
    results: tuple[Tensor, ...] = _OnAllRanks.apply(world, function, *tensors)
    return results
