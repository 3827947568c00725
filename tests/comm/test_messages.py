# SPDX-License-Identifier: Apache-2.0
import threading
import time

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, MismatchError
from tests.support.exact import MOVABLE, pattern, same
from tests.support.memories import MEMORIES, put, room


def test_every_dtype_size_and_memory(worlds):
    def body(comm):
        peer = 1 - comm.rank
        cases = [(dtype, 67, "mixed") for dtype in MOVABLE]
        cases += [(torch.float32, n, memory) for n in (0, 1, 64, 65, 5000) for memory in MEMORIES]
        for dtype, count, memory in cases:
            mine = put(pattern(count, comm.rank, dtype), memory, comm.rank)
            got = room(count, dtype, memory, comm.rank + 1)
            if comm.rank == 0:
                comm.send(mine, peer)
                assert comm.recv(got, peer) == peer
            else:
                assert comm.recv(got, peer) == peer
                comm.send(mine, peer)
            assert same(got, pattern(count, peer, dtype)), (dtype, count, memory)

    worlds(2).run(body)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ring_of_isend_and_irecv(worlds, world_size):
    def body(comm):
        ahead, behind = (comm.rank + 1) % world_size, (comm.rank - 1) % world_size
        for count in (1, 5000):
            got = torch.zeros(count)
            works = [
                comm.isend(torch.full((count,), float(comm.rank)), ahead),
                comm.irecv(got, behind),
            ]
            assert all(work.wait() for work in works)
            assert works[1].source_rank() == behind
            assert torch.equal(got, torch.full((count,), float(behind)))

    worlds(world_size).run(body)


def test_tags_are_matched_and_each_tag_keeps_its_order(worlds):
    def body(comm):
        if comm.rank == 0:
            for number in range(6):
                comm.isend(torch.tensor([number]), 1, tag=number % 2)
        else:
            got = [torch.zeros(1, dtype=torch.int64) for _ in range(6)]
            for number, tag in enumerate((1, 1, 0, 1, 0, 0)):
                comm.recv(got[number], 0, tag)
            assert [each.item() for each in got] == [1, 3, 0, 5, 2, 4]
        comm.barrier()

    worlds(2).run(body)


def test_receive_from_any_rank():
    def body(comm):
        if comm.rank:
            comm.send(torch.tensor([comm.rank * 10]), 0, tag=3)
            return
        seen = {}
        for _ in range(3):
            got = torch.zeros(1, dtype=torch.int64)
            sender = comm.recv(got, tag=3)
            seen[sender] = got.item()
        assert seen == {1: 10, 2: 20, 3: 30}
        work = comm.irecv(torch.zeros(1), tag=9)
        assert not work.is_completed()
        comm.abort("the last receive has no sender")

    world = ringcomm.local_world(4, timeout=60)
    world.run(body)
    world.close()


def test_messages_pass_collectives(worlds):
    """Rank 0 waits in a collective for rank 1, which waits first for a message of rank 0."""

    def body(comm):
        big = torch.full((20_000,), 3.0)
        if comm.rank == 0:
            work = comm.isend(big, 1)
            comm.barrier()
            work.wait()
        else:
            got = torch.zeros(20_000)
            comm.recv(got, 0)
            assert torch.equal(got, big)
            comm.barrier()

    worlds(2).run(body)


def test_strided_tensors(worlds):
    def body(comm):
        grid = torch.arange(12.0).view(3, 4)
        if comm.rank == 0:
            comm.send(grid[:, 1], 1)
            comm.isend(grid.t(), 1).wait()
        else:
            got = torch.zeros(3, 4)
            comm.recv(got[:, 2], 0)
            assert torch.equal(got[:, 2], grid[:, 1])
            assert got.sum() == grid[:, 1].sum()
            turned = torch.zeros(3, 4).t()
            work = comm.irecv(turned, 0)
            assert work.wait()
            assert torch.equal(turned, grid.t())

    worlds(2).run(body)


def test_futures_of_messages(worlds):
    def body(comm):
        got = torch.zeros(4)
        if comm.rank == 0:
            future = comm.irecv(got, 1).get_future()
            comm.barrier()
            assert future.wait()[0] is got
            assert torch.equal(got, torch.ones(4))
        else:
            comm.barrier()
            work = comm.isend(torch.ones(4), 0)
            work.wait()
            assert work.get_future().done()

    worlds(2).run(body)


def test_many_messages_whose_works_are_dropped(worlds):
    def body(comm):
        if comm.rank == 0:
            for number in range(300):
                comm.isend(torch.full((100,), float(number)), 1)
        else:
            for number in range(300):
                got = torch.zeros(100)
                comm.recv(got, 0)
                assert torch.equal(got, torch.full((100,), float(number)))
        comm.barrier()

    worlds(2).run(body)


@pytest.mark.parametrize("count", [64, 1 << 20])
def test_messages_that_nobody_waits_for_advance(worlds, count):
    """In turn one rank only polls, with messages that fit into the slots, or not.

    The pauses let the rank's thread rest.
    """

    def body(comm):
        for turn in range(4):
            mine, got = torch.full((count,), float(turn)), torch.zeros(count)
            if comm.rank == turn % 2:
                works = [comm.isend(mine, 1 - comm.rank), comm.irecv(got, 1 - comm.rank)]
                deadline = time.monotonic() + 20
                while not all(work.is_completed() for work in works):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            else:
                comm.recv(got, 1 - comm.rank)
                comm.send(mine, 1 - comm.rank)
            assert same(got, mine)
            comm.barrier()

    worlds(2).run(body)


def test_size_mismatch_spares_the_communicator(worlds):
    def body(comm):
        if comm.rank == 0:
            comm.send(torch.ones(4), 1)
            comm.send(torch.ones(4), 1)
        else:
            with pytest.raises(
                MismatchError, match=r"recv on rank 1 of 2: expected .*20 bytes.*16"
            ):
                comm.recv(torch.zeros(5), 0)
            work = comm.irecv(torch.zeros(3), 0)
            with pytest.raises(MismatchError, match="12 bytes of float32, got 16 bytes of float32"):
                work.wait()
            assert isinstance(work.exception(), MismatchError)
        comm.barrier()

    worlds(2).run(body)


def test_bad_arguments(worlds):
    def body(comm):
        tensor = torch.ones(2)
        for call in (comm.send, comm.isend, comm.recv, comm.irecv):
            for peer in (comm.rank, -1, 2, 1.0, "0"):
                with pytest.raises(ArgumentError, match="on rank"):
                    call(tensor, peer)
            with pytest.raises(ArgumentError, match="tag: expected"):
                call(tensor, 1 - comm.rank, -1)
            with pytest.raises(ArgumentError, match="expected a tensor, got list"):
                call([1.0], 1 - comm.rank)
        comm.barrier()

    worlds(2).run(body)


def test_close_while_a_thread_receives():
    errors: list[ringcomm.AbortedError] = []
    with ringcomm.local_world(2, timeout=30) as world:

        def receive() -> None:
            try:
                world[0].recv(torch.zeros(4), src=1)
            except ringcomm.AbortedError as error:
                errors.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        time.sleep(0.1)  # the receiver polls, yields, then sleeps; it must end from each state
        world[0].close()
        thread.join(20)
        assert not thread.is_alive()
    assert len(errors) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_closes_takes_back_what_it_lent(waits):
    """The receiver reads a heap message in place, so it must not trust it after the sender left."""
    with ringcomm.local_world(2, timeout=30) as world:
        lent = put(torch.full((20_000,), 7.0), "heap", 0)
        got = torch.zeros(20_000)
        sent = world[0].isend(lent, dst=1)
        if waits:
            receiver = world[1].irecv(got, src=0)
            sent.wait()
            world[0].close()
            receiver.wait()
            assert torch.equal(got, torch.full((20_000,), 7.0))
        else:
            world[0].close()
            with pytest.raises(ringcomm.AbortedError, match="closed before a peer had read"):
                world[1].recv(got, src=0)


def test_wait_with_a_timeout_leaves_the_message_under_way():
    def rank(communicator):
        if communicator.rank == 0:
            received = torch.zeros(4)
            work = communicator.irecv(received, src=1)
            with pytest.raises(ringcomm.CollectiveTimeout, match="still under way"):
                work.wait(0.05)
            communicator.send(torch.ones(1), dst=1)
            work.wait()
            assert torch.equal(received, torch.full((4,), 7.0))
        else:
            communicator.recv(torch.zeros(1), src=0)
            communicator.send(torch.full((4,), 7.0), dst=0)

    with ringcomm.local_world(2, timeout=30) as world:
        world.run(rank)
