# SPDX-License-Identifier: Apache-2.0
"""Batches of messages between devices: launched together, in rounds that all ranks share."""

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, UnsupportedError
from tests.support.device_worlds import MANY, on_host, put


def _filled(comm, count, value):
    return put(comm, torch.full((count,), float(value)), "heap")


def _value(sender, receiver, turn):
    return 100 * turn + 10 * sender + receiver


@pytest.mark.parametrize("turns", [1, 3])
def test_several_groups_and_the_host_in_one_batch(devices, turns):
    """Each rank lists the groups in a different order; the Works are returned in this order."""
    hosts = ringcomm.local_world(3, timeout=60)

    def body(comm):
        rank, host = comm.rank, hosts[comm.rank]
        group = comm.new_group([0, 1, 2], name="other")
        groups = [comm, group, host]
        order = [groups[(turn + rank) % 3] for turn in range(3)]
        ops: list[ringcomm.P2POp] = []
        wanted: list[tuple[int, float] | None] = []
        for turn in range(turns):
            for each in order:
                for peer in {0, 1, 2} - {rank}:
                    n = turns * groups.index(each) + turn

                    def filled(value, on=each):
                        return torch.full((64,), value) if on is host else _filled(on, MANY, value)

                    out = filled(float(_value(rank, peer, n)))
                    ops.append(ringcomm.P2POp(ringcomm.isend, out, peer, group=each))
                    wanted.append(None)
                    into = filled(-1.0)
                    ops.append(ringcomm.P2POp(ringcomm.irecv, into, group_peer=peer, group=each))
                    wanted.append((peer, _value(peer, rank, n)))
        works = ringcomm.batch_isend_irecv(ops)
        for work in works:
            assert work.wait()
        for work, op, want in zip(works, ops, wanted, strict=True):
            if want is not None:
                peer, value = want
                assert work.source_rank() == peer
                (output,) = work.result()
                assert output is op.tensor
                assert torch.equal(on_host(output), torch.full_like(output, float(value)).cpu())
            elif op.group is not host:
                with pytest.raises(ringcomm.RingcommError, match="isend: source_rank"):
                    work.source_rank()
        group.close()

    with hosts:
        devices.run(devices.world(3), body)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        ({"group_peer": 0}, ArgumentError, "irecv on rank 0 of 2: src: .*another rank"),
        ({"peer": 7}, ArgumentError, "irecv on rank 0 of 2: src: .*got 7"),
        ({"peer": 1, "tag": -1}, ArgumentError, "irecv on rank 0 of 2: tag"),
        ({}, UnsupportedError, "irecv on rank 0 of 2: src: .*one sender"),
    ],
)
def test_a_bad_message_keeps_back_the_whole_batch(devices, bad, error, words):
    def body(comm):
        sent, got = _filled(comm, MANY, comm.rank), _filled(comm, MANY, -1)
        if comm.rank == 0:
            with pytest.raises(error, match=words):
                ringcomm.batch_isend_irecv(
                    [
                        ringcomm.P2POp(ringcomm.isend, _filled(comm, 3, 9), 1),
                        ringcomm.P2POp(ringcomm.irecv, got, **bad),
                    ]
                )
        peer = 1 - comm.rank
        batch = [
            ringcomm.P2POp(ringcomm.isend, sent, peer),
            ringcomm.P2POp(ringcomm.irecv, got, peer),
        ]
        for work in ringcomm.batch_isend_irecv(batch):
            work.wait()
        assert torch.equal(on_host(got), torch.full((MANY,), float(peer)))

    devices.run(devices.world(2), body)
