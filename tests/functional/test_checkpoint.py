# SPDX-License-Identifier: Apache-2.0
"""Checkpoints partitioned among ranks: torch's gradients, and a share of the inputs kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm import ArgumentError, Communicator, MismatchError
from ringcomm.functional import partitioned_checkpoint
from ringcomm.functional.checkpoint import _keep, _KeptShare
from tests.functional.compiling import alone

Tensor = torch.Tensor

WIDTH, LAYERS = 7, 3


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]


def trained(model: list[nn.Module], call: Any, keep: list[Any]) -> list[Tensor]:
    """Returns output and gradients; ``keep`` gets weak references to the layers' inputs."""
    first = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    x: Tensor = first
    for layer in model:
        x = call(layer, x)
        keep.append(weakref.ref(x.untyped_storage()))
    x.square().sum().backward()
    params = [param for layer in model for param in layer.parameters()]
    return [x.detach(), *(each.grad for each in (first, *params) if each.grad is not None)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_are_those_of_torchs_checkpoint(worlds, world_size):
    want = trained(layers(), lambda f, x: checkpoint(f, x, use_reentrant=True), [])
    models = [layers() for _ in range(world_size)]

    def body(comm: Communicator) -> list[Tensor]:
        return trained(models[comm.rank], lambda f, x: partitioned_checkpoint(f, x, group=comm), [])

    for got in worlds(world_size).run(body):
        assert len(got) == len(want)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


def test_a_rank_keeps_its_share_alone(worlds):
    """Between forward and backward, each rank keeps only its piece of the inputs."""
    models = [layers() for _ in range(2)]
    kept: list[list[bool]] = [[], []]

    def body(comm: Communicator) -> None:
        inputs: list[Any] = []

        def call(function: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = partitioned_checkpoint(function, x, group=comm)
            del x
            kept[comm.rank] = [each() is not None for each in inputs[:-1]]
            return found

        trained(models[comm.rank], call, inputs)

    worlds(2).run(body)
    # While the last layer runs, the inputs of earlier layers are freed.
    assert kept == [[False], [False]]

    def pieces(comm: Communicator) -> tuple[int, int]:
        whole = torch.arange(7.0)
        found = _keep(comm, whole)
        assert isinstance(found, _KeptShare)
        small = torch.ones(1)
        assert _keep(comm, small) is small
        return found.shard.numel(), found.shard.untyped_storage().nbytes()

    assert worlds(2).run(pieces) == [(4, 16), (4, 16)]


def test_ranks_with_different_inputs_are_told():
    models = [layers() for _ in range(2)]

    def body(comm: Communicator) -> None:
        x = torch.full((2, WIDTH), float(comm.rank), requires_grad=True)
        out = partitioned_checkpoint(models[comm.rank][0], x, group=comm)
        with pytest.raises(MismatchError, match=r"\[2, 7\] with the same bits on all ranks"):
            out.sum().backward()

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(body)


def test_it_needs_ranks_that_have_the_same():
    with pytest.raises(ArgumentError, match="Data-parallel ranks have different activations"):
        partitioned_checkpoint(torch.relu, torch.ones(1), group=None)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiler_goes_around_it():
    def call(tensor: Tensor, comm: Communicator) -> Tensor:
        return partitioned_checkpoint(torch.exp, tensor * 2, group=comm).sum()

    with alone() as comm:
        tensor = torch.ones(3, requires_grad=True)
        with pytest.raises(Unsupported, match="put it around compiled functions"):
            torch.compile(call, backend="eager", fullgraph=True)(tensor, comm)
        torch._dynamo.reset()
        torch.compile(call, backend="eager")(tensor, comm).backward()
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, 2 * torch.exp(torch.full((3,), 2.0)))
