# SPDX-License-Identifier: Apache-2.0
"""plug() and unplug(): the arguments that they accept and refuse, and what they return."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringcomm
from ringcomm.errors import AbortedError, ArgumentError
from ringcomm.extras.fsdp2 import plug, unplug
from ringcomm.rendezvous import handles
from tests.extras.fsdp2 import spy
from tests.extras.fsdp2.whole_numbers import assert_trained, loss_of, sharded, train
from tests.support.covering import covering
from tests.support.heap_use import settled_heap_bytes
from tests.support.rank_pool import default_group


def unplugged(rank, world_size):
    """Unplugging restores the model, and frees all that was built for it."""
    before_bytes = settled_heap_bytes(dist.barrier)
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    assert settled_heap_bytes(dist.barrier) > before_bytes
    with spy.collectives() as seen:
        train(net, rank, steps=1)
    assert seen
    gradients = [parameter.grad.to_local().clone() for parameter in net.parameters()]
    unplug(net)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad.to_local(), gradient)
    net.zero_grad()
    assert settled_heap_bytes(dist.barrier) == before_bytes
    with spy.collectives(of_torch=True) as seen:
        loss_of(net, rank, 0).backward()
    assert seen == []
    plug(net)
    with spy.collectives() as seen:
        loss_of(net, rank, 0).backward()
    assert seen


def dropped(rank, world_size):
    """Dropping a model frees all that was built for it."""
    before_bytes = settled_heap_bytes(dist.barrier)
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    train(net, rank, steps=1)
    del net
    assert settled_heap_bytes(dist.barrier) == before_bytes


def two_models(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    one, other = sharded(mesh), sharded(mesh)
    plug(one)
    plug(other)
    train(one, rank)
    unplug(one)
    with spy.collectives() as seen:
        train(other, rank)
    assert seen
    for net in one, other:
        assert_trained(net, world_size)


def a_part_of_a_model(rank, world_size):
    """A communicator lives until its last module is unplugged."""
    before_bytes = settled_heap_bytes(dist.barrier)
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    unplug(net[0])
    with spy.collectives(of_torch=True) as seen:
        train(net, rank)
    assert {call.name for call in seen} == set(spy.METHODS)
    assert_trained(net, world_size)
    net.zero_grad()
    unplug(net)
    assert settled_heap_bytes(dist.barrier) == before_bytes


def no_growth(rank, world_size):
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    states = []
    for _ in range(50):
        loss_of(net, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(ringcomm.heap_stats())
    assert states[1:] == states[1:2] * 49


def on_a_group_of_ringcomm(rank, world_size):
    """plug() uses the group's communicator and its options, and leaves it open."""
    mesh = init_device_mesh("cpu", (world_size,))
    net = sharded(mesh)
    before_bytes = settled_heap_bytes(dist.barrier)
    with pytest.raises(ArgumentError, match=r"options: expected None .*pg_options"):
        plug(net, options=ringcomm.CommOptions(timeout=5))
    plug(net)
    assert settled_heap_bytes(dist.barrier) == before_bytes
    issued = []
    method = ringcomm.Communicator.all_gather_into_tensor

    def record(self, *args, **kwargs):
        issued.append(self)
        return method(self, *args, **kwargs)

    with mock.patch.object(ringcomm.Communicator, "all_gather_into_tensor", record):
        train(net, rank)
    assert issued and all(each is default_group().communicator for each in issued)
    unplug(net)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((3,), float(world_size)))


def with_options(rank, world_size):
    net = sharded(init_device_mesh("cpu", (world_size,)))
    plug(net, options=ringcomm.CommOptions(timeout=7, slots=8))
    made = []
    method = ringcomm.Communicator.all_gather_into_tensor

    def record(self, *args, **kwargs):
        made.append(self)
        return method(self, *args, **kwargs)

    with mock.patch.object(ringcomm.Communicator, "all_gather_into_tensor", record):
        train(net, rank)
    assert {(each.options.slots, each.timeout.total_seconds()) for each in made} == {(8, 7.0)}
    unplug(net)
    with pytest.raises(AbortedError, match="was closed"):
        made[0].all_reduce(torch.ones(2))


def refusals(rank, world_size):
    net = sharded(init_device_mesh("cpu", (world_size,)))
    with pytest.raises(ArgumentError, match=r"expected a model that plug\(\) was called with"):
        unplug(net)
    plug(net[0])
    with pytest.raises(ArgumentError, match=r"not plugged, but '0' is; call unplug"):
        plug(net)
    unplug(net[0])
    plug(net)
    with pytest.raises(ArgumentError, match=r"not plugged, but 'the root' is; call unplug"):
        plug(net)
    train(net, rank)
    assert_trained(net, world_size)


def on_several_machines(rank, world_size):
    """The model trains over several nodes as on one node."""
    host, boot, namespace = handles.machine_identity()
    elsewhere = (host, f"{boot}-{rank}", namespace)
    net = sharded(init_device_mesh("cpu", (world_size,)))
    with mock.patch("ringcomm.comm.host.rendezvous.machine_identity", lambda: elsewhere):
        plug(net)
        train(net, rank)
    assert_trained(net, world_size)
    unplug(net)


@pytest.mark.parametrize("world_size", [2, 4])
def test_unplug(rank_pools, world_size):
    rank_pools(world_size).run(unplugged, "gloo")


@pytest.mark.parametrize(
    "check",
    [dropped, two_models, a_part_of_a_model, with_options, refusals, on_several_machines],
)
def test_on_gloo(rank_pools, check):
    rank_pools(2).run(check, "gloo")


def test_a_group_of_ringcomm(rank_pools):
    rank_pools(2).run(on_a_group_of_ringcomm)


@covering(strength=1, world_size=[1, 2, 4], backend=["gloo", "ringcomm"])
def test_fifty_steps_take_no_more_memory_than_two(rank_pools, world_size, backend):
    rank_pools(world_size).run(no_growth, backend)


def test_a_model_that_is_not_sharded():
    with pytest.raises(ArgumentError, match=r"got a Linear without any; call fully_shard\(model\)"):
        plug(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"got a Linear without plugged modules"):
        unplug(nn.Linear(2, 2))
