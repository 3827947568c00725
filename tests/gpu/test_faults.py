"""A process that is killed or silent is reported by the others, and the GPU stays usable."""

import signal
import time
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, CollectiveTimeout, PeerLost, RingcommError
from tests.gpu.device import DEVICE, PLAIN, synchronize
from tests.gpu.worlds import connect, in_process, one_launch_world
from tests.support.faults import die, leaving_together
from tests.support.ranks import Ranks

pytestmark = pytest.mark.deadlines

# Much longer than a report may take, so that no deadline stands in for it.
LONG_S = 60.0

# What the survivors wait in when the fault happens.
WAITS: dict[str, Any] = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(100_000, device=PLAIN)),
    "ring": lambda c: c.all_reduce(torch.ones(50_000, device=PLAIN), algorithm="ring"),
    "heap": lambda c: c.all_reduce(ringcomm.zeros(100_000, device=DEVICE)),
    "async": lambda c: c.all_reduce(torch.ones(5000, device=PLAIN), async_op=True).wait(),
    "recv": lambda c: c.recv(torch.ones(100, device=PLAIN), c.world_size - 1),
    "barrier": lambda c: c.barrier(),
}


def raises_in_time(comm, wait):
    """The first error; a call may return before the device notices."""
    started = time.monotonic()
    try:
        WAITS[wait](comm)
        while time.monotonic() - started < LONG_S:
            synchronize()
            comm.barrier()
    except RingcommError as error:
        return error
    raise AssertionError("nothing was raised")


def waits_for_the_last(store, rank, world, wait, end):
    comm = connect(store, rank, world, timeout=3.0 if end == "stop" else LONG_S)
    comm.barrier()
    synchronize()
    if rank == world - 1:
        if end == "die":
            die()
        signal.raise_signal(signal.SIGSTOP)
    error = raises_in_time(comm, wait)
    with pytest.raises(AbortedError):
        comm.all_reduce(torch.ones(4, device=PLAIN))
    comm.close()
    # The device took no harm: torch computes, and a new world forms.
    assert torch.ones(1000, device=PLAIN).sum().item() == 1000
    fresh = connect(store, rank, world - 1, name="fresh")
    tensor = torch.ones(5000, device=PLAIN)
    fresh.all_reduce(tensor)
    total = tensor[0].item()
    fresh.close()
    return type(error), str(error), total


def survivors(world, wait, end):
    with Ranks(in_process, world, waits_for_the_last, wait, end) as ranks:
        outcomes = ranks.wait(LONG_S, list(range(world - 1)))
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    return [outcome.value for outcome in outcomes]


@pytest.mark.timeout(LONG_S + 20)
@pytest.mark.parametrize(("wait", "world"), [*((wait, 2) for wait in WAITS), ("all_reduce", 4)])
def test_a_killed_process_is_reported(wait, world):
    for kind, text, total in survivors(world, wait, "die"):
        assert kind is PeerLost, text
        assert f"rank {world - 1}" in text
        assert total == world - 1


def test_a_silent_process_is_a_timeout():
    for kind, text, _ in survivors(3, "all_reduce", "stop"):
        assert kind is CollectiveTimeout, text
        assert "rank 2" in text


def test_a_rank_that_never_calls_is_a_timeout_within_one_process():
    world = one_launch_world(2, timeout=1.0)

    def body(comm):
        if comm.rank == 0:
            with pytest.raises((CollectiveTimeout, AbortedError)):
                comm.all_reduce(torch.ones(10, device=PLAIN))
                synchronize()
                comm.barrier()

    with world:
        world.run(leaving_together(body, 2))
    assert torch.ones(10, device=PLAIN).sum().item() == 10
