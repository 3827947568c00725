# SPDX-License-Identifier: Apache-2.0
"""Messages between devices, in any pattern that is not a cycle of waits."""

import itertools

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, UnsupportedError
from tests.support.device_worlds import MANY, MEMORIES, on_host, put, room
from tests.support.exact import pattern, same


def _filled(comm, count, value, memory="plain"):
    return put(comm, torch.full((count,), float(value)), memory)


def test_sends_and_receives_in_turn(devices):
    counts = (0, 1, 64, MANY, MANY, MANY, MANY)

    def body(comm):
        peer = 1 - comm.rank
        for count, memory in zip(counts, itertools.cycle(MEMORIES), strict=False):
            mine = put(comm, pattern(count, comm.rank, torch.float32), memory)
            got = room(comm, count, torch.float32, memory, 1)
            if comm.rank == 0:
                comm.send(mine, peer, tag=count)
                assert comm.recv(got, peer, tag=count) == peer
            else:
                assert comm.recv(got, peer, tag=count) == peer
                comm.send(mine, peer, tag=count)
            assert same(on_host(got), pattern(count, peer, torch.float32))

    devices.run(devices.world(2), body)


def test_threads_wait_for_messages_on_the_host(devices):
    """A copy on the stream may block all other threads, so it must not wait for one of them."""

    def body(comm):
        peer = 1 - comm.rank
        for _ in range(20):
            got = _filled(comm, MANY, -1)
            works = [comm.irecv(got, peer), comm.isend(_filled(comm, MANY, comm.rank), peer)]
            for work in works:
                work.wait()
                assert work.is_completed()
            assert torch.equal(on_host(got), torch.full((MANY,), float(peer)))

    devices.run(devices.world(2), body)


@pytest.mark.parametrize("memory", ["plain", "heap"])
def test_both_may_send_first(devices, memory):
    def body(comm):
        peer = 1 - comm.rank
        sent = comm.isend(_filled(comm, MANY, comm.rank, memory), peer)
        got = _filled(comm, MANY, -1, memory)
        comm.recv(got, peer)
        assert sent.wait()
        assert torch.equal(on_host(got), torch.full((MANY,), float(peer)))

    devices.run(devices.world(2), body)


def test_many_messages_arrive_in_order(devices):
    counts = [0, 1, 300, 5, MANY, 7, 64]

    def body(comm):
        peer = 1 - comm.rank
        got = [_filled(comm, count, -1) for count in counts]
        works = [comm.irecv(tensor, peer) for tensor in got]
        for turn, count in enumerate(counts):
            memory = MEMORIES[turn % len(MEMORIES)]
            works.append(comm.isend(_filled(comm, count, turn + comm.rank, memory), peer))
        assert all(work.wait() for work in works)
        for turn, (tensor, count) in enumerate(zip(got, counts, strict=True)):
            assert torch.equal(on_host(tensor), torch.full((count,), float(turn + peer)))

    devices.run(devices.world(2), body)


def test_everybody_to_everybody(devices):
    """Each rank serves its peers in a different order, which both ranks of a pair agree on."""
    world_size = 5

    def body(comm):
        rank, got = comm.rank, {}
        for distance in range(1, world_size):
            ahead, behind = (rank + distance) % world_size, (rank - distance) % world_size
            got[behind] = _filled(comm, 3000, -1)
            works = [
                comm.irecv(got[behind], behind, tag=distance),
                comm.isend(_filled(comm, 3000, 10 * rank + ahead, "mixed"), ahead, tag=distance),
            ]
            assert all(work.wait() for work in works)
        for peer, tensor in got.items():
            assert torch.equal(on_host(tensor), torch.full((3000,), 10.0 * peer + rank))

    devices.run(devices.world(world_size), body)


def test_many_messages_beside_another_communicator(devices):
    """Consecutive launches on a stream need the blocks of one launch only."""

    def body(comm):
        peer = 1 - comm.rank
        with comm.new_group([0, 1], name="beside") as other:
            got = [_filled(comm, MANY, -1) for _ in range(9)]
            works = [comm.irecv(tensor, peer) for tensor in got]
            tensor = _filled(comm, 2000, 1)
            other.all_reduce(tensor)
            assert torch.equal(on_host(tensor), torch.full((2000,), 2.0))
            works += [comm.isend(_filled(comm, MANY, turn), peer) for turn in range(len(got))]
            assert all(work.wait() for work in works)
            for turn, tensor in enumerate(got):
                assert torch.equal(on_host(tensor), torch.full((MANY,), float(turn)))

    devices.run(devices.world(2), body)


def test_exchange_messages_waits_for_none_of_its_own(devices):
    """In separate launches, these sends would wait for each other in a cycle."""

    def body(comm):
        ahead, behind = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        tensors = {peer: _filled(comm, MANY, -1, "heap") for peer in (ahead, behind)}
        sends = [
            (_filled(comm, MANY, 10 * comm.rank + peer, "heap"), peer) for peer in (ahead, behind)
        ]
        receives = [(tensors[peer], peer) for peer in (behind, ahead)]
        work = comm.messages.exchange_messages(sends, receives, tag=7)
        assert work.wait() and work.result() == [tensors[behind], tensors[ahead]]
        for peer, tensor in tensors.items():
            assert torch.equal(on_host(tensor), torch.full((MANY,), 10.0 * peer + comm.rank))
        # A send alone, a receive alone, and no message at all.
        if comm.rank < 2:
            tensor = _filled(comm, 5, comm.rank)
            messages = [(tensor, 1 - comm.rank)]
            sends, receives = (messages, []) if comm.rank == 0 else ([], messages)
            comm.messages.exchange_messages(sends, receives).wait()
            assert torch.equal(on_host(tensor), torch.zeros(5))
        comm.messages.exchange_messages([], []).wait()

    devices.run(devices.world(3), body)


def test_a_batch_of_messages_in_any_order(devices):
    """A cycle of sends and receives, which would wait for each other one by one."""

    def body(comm):
        ahead, behind = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        got = {peer: _filled(comm, MANY, -1, "heap") for peer in (ahead, behind)}
        sends = [
            ringcomm.P2POp(
                ringcomm.isend, _filled(comm, MANY, 10 * comm.rank + peer, "heap"), peer, tag=peer
            )
            for peer in (ahead, behind)
        ]
        receives = [
            ringcomm.P2POp(ringcomm.irecv, got[peer], peer, tag=comm.rank)
            for peer in (ahead, behind)
        ]
        for work in ringcomm.batch_isend_irecv([*sends, *receives]):
            work.wait()
        for peer, tensor in got.items():
            assert torch.equal(on_host(tensor), torch.full((MANY,), 10.0 * peer + comm.rank))

    devices.run(devices.world(3), body)


def test_messages_keep_no_order_with_collectives(devices):
    def body(comm):
        peer = 1 - comm.rank
        got = _filled(comm, 100, -1)
        work = comm.irecv(got, peer)
        for turn in range(3):
            tensor = _filled(comm, 2000, turn)
            comm.all_reduce(tensor)
            assert torch.equal(on_host(tensor), torch.full((2000,), 2.0 * turn))
        comm.send(_filled(comm, 100, comm.rank), peer)
        work.wait()
        assert torch.equal(on_host(got), torch.full((100,), float(peer)))

    devices.run(devices.world(2), body)


def test_a_receive_names_its_sender(devices):
    def body(comm):
        peer = 1 - comm.rank
        got = _filled(comm, 4, -1)
        work = comm.irecv(got, peer)
        sent = comm.isend(_filled(comm, 4, comm.rank), peer)
        assert work.wait() and sent.wait()
        assert work.source_rank() == peer
        assert work.is_success() or not work.is_completed()
        with pytest.raises(ringcomm.RingcommError, match="only known for a receive"):
            sent.source_rank()

    devices.run(devices.world(2), body)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c, t: c.send(t, c.rank), ArgumentError, "another rank than this one, got 0"),
        (lambda c, t: c.recv(t, 5), ArgumentError, "src: expected a rank from 0 to 1, got 5"),
        (lambda c, t: c.isend(t, 1, tag=-1), ArgumentError, "tag: expected 0 <= tag"),
        (lambda c, t: c.irecv(t), UnsupportedError, "waits for one sender"),
        (lambda c, t: c.irecv(t.expand(3, 8), 1), ArgumentError, "memory of its own"),
        (
            lambda c, t: c.messages.exchange_messages([(t, 1), (t, 1)], []),
            ArgumentError,
            r"\[1, 1\]",
        ),
        (lambda c, t: c.messages.exchange_messages([], [(t, 0)]), ArgumentError, "another rank"),
        (lambda c, t: c.send([1.0], 1), ArgumentError, "expected a tensor, got list"),
    ],
)
def test_bad_arguments_disturb_nobody(devices, call, error, words):
    world = devices.world(2)
    with devices.as_on_gpu(world[0]), pytest.raises(error, match=r"on rank 0 of 2: .*" + words):
        call(world[0], _filled(world[0], 8, 0))

    def body(comm):
        tensor = _filled(comm, 8, 1)
        comm.all_reduce(tensor)
        assert torch.equal(on_host(tensor), torch.full((8,), 2.0))

    devices.run(world, body)
