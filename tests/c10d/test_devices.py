# SPDX-License-Identifier: Apache-2.0
"""Calls of torch.distributed with tensors on an emulated device, compared with Gloo on the CPU.

``test_collectives.py`` tests the results of each call, ``test_communicators.py`` which communicator
serves it, and ``tests/comm`` the communicators of devices.
"""

import datetime
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BarrierOptions

import ringcomm
from ringcomm.c10d.process_group import ProcessGroup
from ringcomm.errors import ArgumentError, CollectiveTimeout, RingcommError, UnsupportedError
from ringcomm.memory.device_heap import device_heap
from tests.c10d import test_collectives
from tests.c10d.emulated import runtime
from tests.c10d.test_collectives import numbers, total
from tests.support.covering import in_test_all
from tests.support.rank_pool import default_group

DEVICE = torch.device("cuda:0")
SHORT = datetime.timedelta(milliseconds=300)
# tolist() ignores the order of streams, so the tests here compare results as tensors.


def on_the_device(check, rank, world_size):
    """Runs ``check``, and asserts that ringcomm ran it on the device."""
    result = check(rank, world_size)
    group = default_group()
    assert not isinstance(group, ProcessGroup) or group._communicators.devices() == [0]
    return result


def asynchronous(rank, world_size):
    tensors = [numbers(rank + step, 500) for step in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    gathered = torch.empty(4 * world_size)
    works.append(dist.all_gather_into_tensor(gathered, numbers(rank, 4), async_op=True))
    for work in reversed(works):
        # wait() without a timeout only makes the stream wait; with a timeout the host waits, too.
        assert work.wait(datetime.timedelta(seconds=30))
        assert work.is_completed() and work.is_success() and work.exception() is None
    future = dist.all_reduce(tensors[0], async_op=True).get_future()
    return tensors, gathered, future.then(lambda done: done.value()[0] * 2).wait()


def batches_of_messages(rank, world_size):
    peer = 1 - rank
    outgoing = [numbers(rank, 10), numbers(rank, 70000), torch.complex(*[numbers(rank, 3)] * 2)]
    incoming = [torch.empty_like(tensor) for tensor in outgoing]
    ops = [dist.P2POp(dist.isend, t, peer, tag=2 * i) for i, t in enumerate(outgoing)]
    ops += [dist.P2POp(dist.irecv, t, peer, tag=2 * i) for i, t in enumerate(incoming)]
    works = dist.batch_isend_irecv(ops)
    assert len(works) == (1 if isinstance(default_group(), ProcessGroup) else len(ops))
    for work in works:
        work.wait()
    return incoming


def single_messages(rank, world_size):
    """Both ranks send first; messages match in order and by tag."""
    peer = 1 - rank
    outgoing = [numbers(rank, size) for size in (5, 60000)]
    sent = [dist.isend(tensor, peer, tag=tag) for tag, tensor in enumerate(outgoing)]
    incoming = [torch.empty_like(tensor) for tensor in outgoing]
    for tag, tensor in enumerate(incoming):
        assert dist.recv(tensor, peer, tag=tag) == peer
    for work in sent:
        work.wait()
    return incoming


def any_source(rank, world_size):
    with pytest.raises(UnsupportedError, match="src: expected a rank"):
        dist.recv(torch.empty(1))


def wrong_arguments(rank, world_size):
    """Wrong arguments are refused before peers are disturbed, and the group stays usable."""
    dist.all_reduce(torch.ones(1))
    with pytest.raises(ArgumentError):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
    ours = ringcomm.empty(2, device=DEVICE)
    with runtime().assuming(None), pytest.raises(ArgumentError, match="tensors on one device"):
        default_group().all_gather_single(torch.empty(4), ours)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((2,), float(world_size)))


def host_and_device_in_one_group(rank, world_size):
    group = default_group()
    with runtime().assuming(None):
        on_device = ringcomm.zeros(1000, device=DEVICE)
        on_host = torch.zeros(1000)
        for step in range(3):
            on_device += rank + step
            on_host += rank - step
            device_work = dist.all_reduce(on_device, async_op=True)
            host_work = dist.all_reduce(on_host, async_op=True)
            host_work.wait()
            device_work.wait()
        gathered = [None] * world_size
        dist.all_gather_object(gathered, {"rank": rank})
        dist.monitored_barrier()
        dist.barrier()
        assert gathered == [{"rank": peer} for peer in range(world_size)]
    assert group._communicators.devices() == [0]
    expected_device = expected_host = 0.0
    for step in range(3):
        expected_device = sum(expected_device + peer + step for peer in range(world_size))
        expected_host = sum(expected_host + peer - step for peer in range(world_size))
    assert torch.equal(on_device, torch.full((1000,), expected_device))
    assert torch.equal(on_host, torch.full((1000,), expected_host))


def a_bound_device(rank, world_size):
    group = default_group()
    group.eager_connect_single_device(DEVICE)
    assert group.bound_device_id == DEVICE
    for turn in range(3):
        if rank == 1:
            group.get_group_store().set(f"came/{turn}", "")
        dist.barrier()
        assert group.get_group_store().check([f"came/{turn}"])
    assert group._get_sequence_number_for_group() == 3
    # Groups made from a bound group are bound as well, and connected at once.
    alone = [dist.new_group([peer]) for peer in range(world_size)][rank]
    assert alone.bound_device_id == DEVICE and alone._communicators.devices() == [0]
    tensor = numbers(rank, 7)
    dist.all_reduce(tensor, group=alone)
    assert torch.equal(tensor, numbers(rank, 7))


def a_split_group(rank, world_size):
    swapped = default_group().split_group([1, 0])
    assert swapped._communicators.devices() == []
    gathered = torch.empty(2 * world_size)
    swapped.all_gather_single(gathered, numbers(rank, 2)).wait()
    assert torch.equal(gathered, torch.cat([numbers(1, 2), numbers(0, 2)]))
    swapped.shutdown()


def tensors_of_the_group(rank, world_size):
    group = default_group()
    assert group.supports_tensor_alloc(DEVICE)
    tensor = group.allocate_tensor(100, dtype=torch.bfloat16, device=DEVICE)
    assert tensor.shape == (100,) and tensor.dtype is torch.bfloat16
    assert device_heap(0).contains(tensor.data_ptr(), tensor.nbytes)
    with runtime().assuming(None):
        tensor.copy_(numbers(rank, 100))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total(world_size, 100).to(torch.bfloat16))


def barrier_on_the_device(timeout):
    opts = BarrierOptions()
    opts.device, opts.timeout = DEVICE, timeout
    return opts


def timeouts(rank, world_size):
    """The timeout of one call, on a separate group since a fault ends its communicator."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match="barrier"):
            group.barrier(barrier_on_the_device(SHORT)).wait()
        with pytest.raises(RingcommError, match="unusable"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def aborted(rank, world_size):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        group.abort()
        with pytest.raises(RingcommError, match="abort"):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        with pytest.raises(RingcommError, match="abort"):
            group.barrier(barrier_on_the_device(datetime.timedelta(seconds=30))).wait()
    tensor = numbers(rank, 9)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total(world_size, 9))


def ended(rank, world_size):
    group = dist.new_group()
    dist.all_reduce(torch.ones(100), group=group, async_op=True)
    group._wait_for_pending_works()
    on_device = group.communicator_on(DEVICE)
    dist.destroy_process_group(group)
    with pytest.raises(RingcommError, match="closed"):
        on_device.barrier()


@pytest.mark.parametrize(
    "check",
    [
        *in_test_all(
            test_collectives.rooted, test_collectives.gathers_and_scatters, test_collectives.sparse
        ),
        test_collectives.older_forms,
        asynchronous,
        batches_of_messages,
        single_messages,
    ],
)
def test_against_gloo(two_devices, check):
    two_devices.compare(partial(on_the_device, check))


@pytest.mark.parametrize(
    "check",
    [
        test_collectives.coalesced,
        test_collectives.layouts,
        wrong_arguments,
        host_and_device_in_one_group,
        a_bound_device,
        aborted,
        tensors_of_the_group,
    ],
)
def test_on_the_device(two_devices, check):
    two_devices.run(partial(on_the_device, check))


@pytest.mark.parametrize("check", [any_source, a_split_group, timeouts, ended])
def test_in_its_own_group(two_devices, check):
    two_devices.run(check)
