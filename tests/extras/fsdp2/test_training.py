# SPDX-License-Identifier: Apache-2.0
"""Plugged FSDP2 trains bit for bit like unplugged FSDP2, and like one process."""

import time
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ringcomm.extras.fsdp2 import plug
from tests.c10d import test_fsdp
from tests.extras.fsdp2 import spy, whole_numbers
from tests.extras.fsdp2.whole_numbers import (
    assert_gradients,
    assert_trained,
    loss_of,
    sharded,
    train,
)
from tests.support.covering import covering

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
REPLICATED = ("replicate", "shard")


def exact(rank, world_size, *, shape=None, worlds=None, steps=2, **options):
    """Trains with plugged FSDP2, and compares with one process.

    Args:
        shape: shape of the mesh; by default one axis.
        worlds: sizes of the groups that must have made collectives.
    """
    shape = shape or (world_size,)
    net = sharded(
        init_device_mesh("cpu", shape, mesh_dim_names=REPLICATED[-len(shape) :]), **options
    )
    plug(net)
    with spy.collectives() as seen:
        train(net, rank, steps)
    assert all(spy.in_heap(parameter.grad.to_local()) for parameter in net.parameters())
    assert all(call.in_heap for call in seen)
    if world_size > 1:
        assert {call.name for call in seen} == set(spy.METHODS)
    assert {call.world_size for call in seen} == (worlds or {world_size} - {1})
    assert_trained(net, world_size, steps)


def accumulated(rank, world_size):
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    with spy.collectives() as seen:
        net.set_requires_gradient_sync(False)
        loss_of(net, rank, 0).backward()
        scattered = [call for call in seen if call.name == "reduce_scatter_tensor"]
        assert scattered == []
        net.set_requires_gradient_sync(True)
        loss_of(net, rank, 1).backward()
    alone = whole_numbers.model(torch.float64)
    for step in range(2):
        for peer in range(world_size):
            (loss_of(alone, peer, step) / world_size).backward()
    assert_gradients(net, alone)


def divided(rank, world_size):
    """Divide factors give the ops PREMUL_SUM, or sums that FSDP2 divides itself."""
    for forced in (False, True):
        net = sharded(init_device_mesh("cpu", (world_size,)))
        for module in (net, net[0]):
            module.set_gradient_divide_factor(8.0)
            module.set_force_sum_reduction_for_comms(forced)
        plug(net)
        loss_of(net, rank, 0).backward()
        alone = whole_numbers.model(torch.float64)
        for peer in range(world_size):
            (loss_of(alone, peer, 0) / 8).backward()
        assert_gradients(net, alone)


def as_without(rank, world_size, **options):
    """AdamW with clipping on any numbers: with two ranks the order of a sum does not matter."""
    mesh = init_device_mesh("cpu", (world_size,))
    usual = test_fsdp.train(test_fsdp.shard(mesh, **options), rank)
    net = test_fsdp.shard(mesh, **options)
    plug(net)
    with spy.collectives() as seen:
        plugged = test_fsdp.train(net, rank)
    assert seen and all(call.in_heap for call in seen)
    for one, other in zip(plugged, usual, strict=True):
        assert torch.equal(one, other)


def unsharded_ahead(rank, world_size):
    """FSDP2 waits for the work object that an asynchronous all-gather returns."""
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=whole_numbers.LEARNING_RATE)
    with spy.collectives() as seen:
        for step in range(2):
            optimizer.zero_grad()
            if rank == 1:  # keeps rank 0's gather under way when rank 0 begins to wait
                time.sleep(0.1)
            net[0].unshard(async_op=True).wait()
            loss_of(net, rank, step).backward()
            optimizer.step()
    assert seen and all(call.in_heap for call in seen)
    assert_trained(net, world_size)


def scattered_in_a_group_of_its_own(rank, world_size):
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    net.set_separate_reduce_scatter_group()
    with spy.collectives() as seen:
        train(net, rank)
    assert {call.name for call in seen} == set(spy.METHODS)
    assert_trained(net, world_size)


@covering(strength=1, world_size=[1, 2, 4], backend=["gloo", "ringcomm"])
def test_as_one_process(rank_pools, world_size, backend):
    rank_pools(world_size).run(exact, backend)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2, "worlds": {2, 4}},
        {"mp_policy": BF16, "steps": 1},
        {"shape": (2, 2), "worlds": {2}},
    ],
    ids=["kept after forward", "gathered in part", "bfloat16", "replicated"],
)
def test_options_of_four_ranks(rank_pools, options):
    rank_pools(4).run(partial(exact, **options), "gloo")


def test_accumulation(rank_pools):
    rank_pools(4).run(accumulated, "gloo")


def test_divide_factors(rank_pools):
    rank_pools(4).run(divided, "gloo")


@covering(
    strength=1,
    options={"nested": {}, "bfloat16": {"mp_policy": BF16}},
    backend=["gloo", "ringcomm"],
)
def test_as_without(rank_pools, backend, options):
    rank_pools(2).run(partial(as_without, **options), backend)


@pytest.mark.parametrize("backend", ["gloo", "ringcomm"])
def test_an_asynchronous_gather(rank_pools, backend):
    rank_pools(2).run(unsharded_ahead, backend)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs torch 2.13"
)
@pytest.mark.parametrize("backend", ["gloo", "ringcomm"])
def test_a_group_that_is_made_later(rank_pools, backend):
    rank_pools(2).run(scattered_in_a_group_of_its_own, backend)
