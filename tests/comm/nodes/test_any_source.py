# SPDX-License-Identifier: Apache-2.0
"""Receives from any source over nodes lose no message, and keep each sender's order."""

import threading
import time
from collections import defaultdict

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, CommOptions, MismatchError, PeerLost
from ringcomm.errors import CollectiveTimeout
from tests.support.faults import leaving_together

SHAPES = [(2, 2), (1, 2), (1, 1, 1)]
EACH = 12


def world_of(shape: tuple[int, ...], timeout_s: float = 60) -> ringcomm.LocalWorld:
    return ringcomm.local_world(sum(shape), nodes=shape, options=CommOptions(timeout=timeout_s))


def message(rank: int, tag: int, number: int) -> torch.Tensor:
    return torch.tensor([rank, tag, number] * 50)


def send_all(comm, tags=(0, 7), each=EACH):
    works = [
        comm.isend(message(comm.rank, tag, number), 0, tag)
        for number in range(each)
        for tag in tags
    ]
    for work in works:
        work.wait()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_message_comes_once_and_in_its_senders_order(shape):
    def body(comm):
        if comm.rank:
            send_all(comm)
            return None
        seen: dict[tuple[int, int], list[int]] = defaultdict(list)
        ahead = [(tag, torch.empty(150, dtype=torch.int64)) for tag in (0, 7) for _ in range(5)]
        works = [comm.irecv(tensor, None, tag) for tag, tensor in ahead]
        for (tag, tensor), work in zip(ahead, works, strict=True):
            source = work.source_rank()
            assert torch.equal(tensor, message(source, tag, len(seen[source, tag])))
            seen[source, tag].append(int(tensor[2]))
        for tag in (0, 7):
            for _ in range(EACH * (comm.world_size - 1) - 5):
                tensor = torch.empty(150, dtype=torch.int64)
                source = comm.recv(tensor, tag=tag)
                assert torch.equal(tensor, message(source, tag, len(seen[source, tag])))
                seen[source, tag].append(int(tensor[2]))
        return dict(seen)

    with world_of(shape) as world:
        seen = world.run(body)[0]
    others = range(1, sum(shape))
    assert seen == {(rank, tag): list(range(EACH)) for rank in others for tag in (0, 7)}


def test_named_and_any_sources_of_one_tag():
    asked = [3, 1, 2, *[source for _ in range(6) for source in (None, 2, None, 3, 1, None)]]
    named = {source: asked.count(source) for source in (1, 2, 3, None)}
    # Enough that receives from any source cannot take messages that the other receives need.
    each = {rank: named[rank] + named[None] for rank in (1, 2, 3)}

    def body(comm):
        if comm.rank:
            send_all(comm, (3,), each[comm.rank])
            return
        counts = [0] * comm.world_size
        rest = sum(each.values()) - len(asked)
        tensors = torch.empty(len(asked) + rest, 150, dtype=torch.int64)
        works = [
            comm.irecv(tensor, source, 3) for tensor, source in zip(tensors, asked, strict=False)
        ]
        works += [comm.irecv(tensor, None, 3) for tensor in tensors[len(asked) :]]
        for work, tensor, source in zip(works, tensors, asked + [None] * rest, strict=True):
            came_from = work.source_rank()
            assert source in (None, came_from)
            assert torch.equal(tensor, message(came_from, 3, counts[came_from]))
            counts[came_from] += 1
        assert counts == [0, *each.values()]

    with world_of((2, 2)) as world:
        world.run(body)


def test_sizes_that_differ_cost_one_message():
    def body(comm):
        for sender in (1, 2):
            if comm.rank == sender:
                comm.send(torch.ones(3), 0)
                comm.send(torch.full((2,), float(sender)), 0)
            if comm.rank == 0:
                tensor = torch.empty(2)
                with pytest.raises(
                    MismatchError,
                    match=rf"12 bytes of float32 from rank {sender} \(node {sender // 2}\)",
                ):
                    comm.recv(tensor)
                assert comm.recv(tensor) == sender and tensor.tolist() == [sender] * 2
            comm.barrier()

    with world_of((2, 2)) as world:
        world.run(body)


def test_senders_may_close_before_the_others_have_sent():
    """A receive from any source waits while any other rank is open; when none is, it ends."""
    left = threading.Semaphore(0)

    def body(comm):
        if comm.rank:
            if comm.rank == 3:
                assert left.acquire(timeout=60) and left.acquire(timeout=60)
            comm.send(torch.tensor([comm.rank]), 0)
            comm.close()
            left.release()
            return None
        tensor, seen = torch.empty(1, dtype=torch.int64), []
        for _ in range(3):
            seen.append(comm.recv(tensor))
            assert tensor.item() == seen[-1]
        with pytest.raises(PeerLost, match=r"closed the communicator"):
            comm.recv(tensor)
        return seen

    with world_of((2, 2)) as world:
        seen = world.run(body)[0]
    assert sorted(seen) == [1, 2, 3] and seen[-1] == 3


@pytest.mark.parametrize("aborts", [1, 2])
def test_an_abort_ends_the_wait(aborts):
    def body(comm):
        if comm.rank == aborts:
            time.sleep(0.2)
            comm.abort("on purpose")
        elif comm.rank == 0:
            works = [comm.irecv(torch.empty(1), None, tag) for tag in (0, 1)]
            for work in works:
                with pytest.raises(AbortedError, match="on purpose"):
                    work.wait()

    with world_of((2, 2)) as world:
        world.run(body)


def test_a_timeout_names_those_that_are_gone():
    left = threading.Event()

    def body(comm):
        if comm.rank == 2:
            comm.close()
            left.set()
        elif comm.rank == 0:
            assert left.wait(60)
            gone = r"rank 2 \(node 1\) could have sent it, but ended or closed before"
            said = rf"rank 0 \(node 0\) in recv\(float32, 4 bytes, tag 5\) at {__file__}:.*{gone}"
            with pytest.raises(CollectiveTimeout, match=said):
                comm.recv(torch.empty(1), tag=5)

    with world_of((2, 2), 0.5) as world:
        world.run(leaving_together(body, 4))


def test_a_message_that_does_not_come_is_told_with_the_programs_line():
    def body(comm):
        if comm.rank == 0:
            said = (
                rf"in recv\(float32, 4 bytes, tag 0\) at {__file__}:\d+ waited .* rank 1 \(node 1\)"
            )
            with pytest.raises(CollectiveTimeout, match=said):
                comm.recv(torch.empty(1), 1)

    with world_of((1, 1), 0.5) as world:
        world.run(leaving_together(body, 2))


def test_nobody_sends():
    def body(comm):
        if comm.rank:
            with pytest.raises(CollectiveTimeout, match="from any rank"):
                comm.barrier()
            return
        with pytest.raises(CollectiveTimeout, match="for a message, which no rank has sent"):
            comm.recv(torch.empty(1))

    with world_of((1, 1), 0.5) as world:
        world.run(leaving_together(body, 2))
