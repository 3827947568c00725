# SPDX-License-Identifier: Apache-2.0
"""torch's profiler sees every call as an event with its bytes; while it is off it costs nothing."""

import re
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

import ringcomm
from ringcomm import optim, zero

EVENT = re.compile(r"ringcomm::(\w+) (\d+) bytes")


def seen(calls):
    """Returns the number of events by name and bytes while ``calls`` runs in this thread."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        calls()
    found = [EVENT.fullmatch(event.name) for event in profiled.events() or ()]
    return Counter((each[1], int(each[2])) for each in found if each)


def through_torch(rank, world_size):
    def calls():
        x, wide = torch.ones(4), torch.ones(8)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_into_tensor(wide, x)
        dist.reduce_scatter_tensor(x, wide)
        dist.broadcast(x, 0)
        dist.all_to_all_single(x, x.clone())
        dist.barrier()
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)

    calls()
    found = seen(calls)
    expected = {
        ("all_reduce", 16): 2,
        ("all_gather_into_tensor", 32): 1,
        ("reduce_scatter_tensor", 32): 1,
        ("broadcast", 16): 1,
        ("all_to_all_single", 16): 1,
        ("barrier", 0): 1,
        ("send" if rank == 0 else "recv", 16): 1,
    }
    # torch may record send() as send or isend, and recv() likewise.
    found = Counter({(name.removeprefix("i"), size): n for (name, size), n in found.items()})
    assert found == expected, found


def own_calls(rank, world_size):
    comm = dist.group.WORLD.communicator
    plan = comm.plan_all_reduce(torch.ones(5))

    def calls():
        x = torch.ones(4)
        comm.all_reduce(x)
        comm.broadcast(x, 1, async_op=True).wait()
        comm.gather(x, [torch.empty(4), torch.empty(4)] if rank == 0 else None, 0)
        plan()
        comm.barrier()
        message = comm.isend(x, 1) if rank == 0 else comm.irecv(x, 0)
        message.wait()

    calls()
    found = seen(calls)
    assert found == {
        ("all_reduce", 16): 1,
        ("broadcast", 16): 1,
        ("gather", 32 if rank == 0 else 16): 1,
        ("all_reduce", 20): 1,
        ("barrier", 0): 1,
        ("isend" if rank == 0 else "irecv", 16): 1,
    }


def events_of_a_step(model):
    """Trains two steps with AdamW; returns the events of the second step."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return seen(step)


def fused_steps(rank, world_size):
    found = events_of_a_step(torch.nn.Linear(8, 8))
    (size_bytes,) = [size for name, size in found if name == "reduce_scatter_adamw_all_gather"]
    assert size_bytes >= (8 * 8 + 8) * 4, found


def sharded_steps(rank, world_size):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    zero.shard(model, stage=3, options=zero.ZeroOptions(overlap=False))
    # On CPUs a rank gathers parameters by reading its peers' memory between barriers.
    assert {"barrier", "reduce_scatter_norm"} <= {name for name, _ in events_of_a_step(model)}


def costs_nothing_while_off(rank, world_size):
    x = torch.ones(4)
    with mock.patch.object(profiler, "record_function", side_effect=AssertionError):
        comm = dist.group.WORLD.communicator
        comm.all_reduce(x)
        comm.all_reduce(x, async_op=True).wait()
        dist.all_reduce(x)
    # Once the profiler is off, the fast path serves calls again.
    seen(lambda: comm.all_reduce(x))
    with mock.patch.object(comm.engine, "start_call", side_effect=AssertionError):
        comm.all_reduce(x)


@pytest.mark.parametrize(
    "check", [through_torch, own_calls, fused_steps, sharded_steps, costs_nothing_while_off]
)
def test_calls_are_events(two_ranks, check):
    two_ranks.run(check)


def test_an_error_ends_the_event():
    with ringcomm.local_world(1) as world:

        def body(comm):
            def calls():
                with record_function("around"), pytest.raises(ringcomm.ArgumentError):
                    comm.all_reduce("no tensor")
                comm.all_reduce(torch.ones(2))

            return seen(calls)

        assert world.run(body) == [{("all_reduce", 8): 1}]
