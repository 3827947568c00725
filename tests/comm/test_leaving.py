# SPDX-License-Identifier: Apache-2.0
"""A rank that closes a communicator or leaves LocalWorld.run() leaves no other rank waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, Communicator, PeerLost, RingcommError
from ringcomm.optim import AdamW
from tests.support.covering import covering

pytestmark = pytest.mark.deadlines

LONG_S = 600.0
# How a world of four ranks is divided into nodes.
NODES = {"one node": None, "two nodes": [2, 2]}


def _step(comm: Communicator) -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = AdamW([parameter], comm=comm)
    parameter.grad = torch.ones(64)
    optimizer.step()


def _stage_3(comm: Communicator) -> None:
    module = ringcomm.zero.shard(torch.nn.Linear(8, 8), stage=3, comm=comm)
    module(torch.ones(2, 8))


def _barrier(comm: Communicator) -> list[torch.Tensor]:
    comm.barrier()
    return []


# Calls that wait for rank 3.
WAITS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(4)),
    "large all_reduce": lambda c: c.all_reduce(torch.ones(500_000)),
    "async": lambda c: c.all_reduce(torch.ones(4), async_op=True).wait(),
    "queued": lambda c: [c.barrier(async_op=True), c.barrier(async_op=True)][0].wait(),
    "coalesced": lambda c: c.all_reduce_coalesced([torch.ones(4), torch.ones(9)]),
    "barrier": lambda c: c.barrier(),
    "broadcast": lambda c: c.broadcast(torch.ones(4), 3),
    "recv": lambda c: c.recv(torch.ones(4), 3),
    "irecv": lambda c: c.irecv(torch.ones(4), 3).wait(),
    "send": lambda c: c.send(torch.ones(2_000_000), 3),
    "object": lambda c: ringcomm.all_gather_object([None] * 4, {"rank": c.rank}, group=c),
    "submit": lambda c: c.engine.submit(lambda: _barrier(c), "mine").wait(),
    "step": _step,
    "stage 3": _stage_3,
    "new_group": lambda c: c.new_group(range(4)).barrier(),
    "split": lambda c: c.split(0),
}


def _error_of(call: Callable[[Communicator], Any], comm: Communicator) -> RingcommError | None:
    try:
        call(comm)
    except RingcommError as error:
        return error
    return None


@covering(strength=1, where=[*NODES], call=[*WAITS])
def test_close_ends_what_another_thread_waits_for(where: str, call: str) -> None:
    """Rank 3 makes no call; each other rank closes while one of its threads waits."""
    with ringcomm.local_world(4, timeout=LONG_S, nodes=NODES[where]) as world:
        errors: dict[int, RingcommError | None] = {}

        def wait(comm: Communicator) -> None:
            errors[comm.rank] = _error_of(WAITS[call], comm)

        threads = [threading.Thread(target=wait, args=(comm,)) for comm in world[:3]]
        for thread in threads:
            thread.start()
        threads[0].join(0.1)
        world[0].close()
        threads[0].join()
        assert isinstance(errors[0], AbortedError), errors
        for comm in world[1:]:
            comm.close()
        for thread in threads:
            thread.join()
    assert all(isinstance(error, RingcommError) for error in errors.values()), errors


def test_close_finishes_calls_that_go_on() -> None:
    """The peer makes the calls, but so late that a close that did not wait would abort them."""
    with ringcomm.local_world(2, timeout=LONG_S) as world:
        tensors = [torch.ones(1_000_000) for _ in range(8)]
        works = [world[0].all_reduce(tensor, async_op=True) for tensor in tensors]
        closing = threading.Thread(target=world[0].close)

        def rest() -> None:
            for _ in tensors:
                world[1].all_reduce(torch.ones(1_000_000))

        peer = threading.Thread(target=rest)
        peer.start()
        closing.start()
        closing.join()
        peer.join()
        for work in works:
            work.wait()
    assert all(torch.equal(tensor, torch.full((1_000_000,), 2.0)) for tensor in tensors)


class _Mine(Exception):
    pass


@covering(where=[*NODES], call=[*WAITS], how=["returns", "raises"])
def test_a_rank_that_has_left_ends_waits_for_it(where: str, call: str, how: str) -> None:
    """Also in a group of the ranks. The run raises the error that the first rank raised itself."""
    with ringcomm.local_world(4, timeout=LONG_S, nodes=NODES[where]) as world:
        errors: dict[int, RingcommError | None] = {}

        def rank(comm: Communicator) -> None:
            group = comm.new_group(range(4), name="inner")
            assert group is not None
            if comm.rank == 3:
                if how == "raises":
                    raise _Mine
                return
            errors[comm.rank] = _error_of(WAITS[call], group)

        if how == "raises":
            with pytest.raises(_Mine):
                world.run(rank)
        else:
            world.run(rank)
        assert any(isinstance(error, PeerLost) for error in errors.values()), errors
        assert all(isinstance(error, PeerLost | AbortedError) for error in errors.values()), errors
        if how == "returns":  # no rank waited in the world itself: its next run has all ranks
            assert world.run(lambda comm: comm.barrier()) == [None] * 4


def test_what_a_rank_began_before_it_returned_is_finished() -> None:
    with ringcomm.local_world(2, timeout=LONG_S) as world:
        late = threading.Event()

        def rank(comm: Communicator) -> torch.Tensor:
            tensor = torch.ones(1000)
            if comm.rank == 0:
                comm.all_reduce(tensor, async_op=True)
                comm.isend(torch.full((3,), 7.0), 1)
                late.set()
                return tensor
            late.wait()
            comm.all_reduce(tensor)
            got = torch.empty(3)
            comm.recv(got, 0)
            return torch.cat([tensor, got])

        sent, got = world.run(rank)
    assert torch.equal(sent, torch.full((1000,), 2.0))
    assert torch.equal(got, torch.cat([sent, torch.full((3,), 7.0)]))
