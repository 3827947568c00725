# SPDX-License-Identifier: Apache-2.0
"""Messages between devices as one launch, as seen in the calls that stand-ins record."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

from ringcomm.c10d.communicators import Communicators
from ringcomm.errors import ArgumentError, UnsupportedError
from tests.c10d.stand_ins import NotedGroup, on_device


def test_any_source_is_refused_on_a_device():
    noted = NotedGroup()
    with pytest.raises(UnsupportedError, match="recv on rank 1 of 2: src: expected a rank"):
        noted.group.recv_anysource([on_device(2)], 0)
    noted.group.recv_anysource([torch.empty(2)], 7).wait()
    assert [(name, arguments[1:]) for name, arguments in noted.host.calls] == [("irecv", (None, 7))]


def test_a_bracket_sends_messages_of_devices_together():
    noted = NotedGroup()
    group, device = noted.group, torch.device("cuda:0")
    one, two, three = on_device(1), on_device(2), on_device(3)
    host_tensor = torch.empty(5)
    group._start_coalescing(device)
    sent = group.send([one], 0, 4)
    group.recv([two], 0, 4)
    group.allreduce([three], AllreduceOptions())
    group.send([host_tensor], 0, 9)
    with pytest.raises(ArgumentError, match="when the batch has ended"):
        sent.wait()
    work = group._end_coalescing(device)
    assert noted.host.calls == [("isend", (host_tensor, 0, 9))]
    assert noted.devices[0].methods == ["all_reduce", "exchange_messages"]
    assert noted.devices[0].calls[1] == ("exchange_messages", ([(one, 0)], [(two, 0)], 4))
    assert not any(inner.waits for inner in noted.devices[0].works + noted.host.works)
    work.wait()
    assert all(inner.waits for inner in noted.devices[0].works + noted.host.works)
    sent.wait()
    assert len(noted.devices[0].works[1].waits) == 2
    assert work.result() == [three, host_tensor, two]


def test_a_bracket_is_opened_and_closed_once():
    group, device = NotedGroup().group, torch.device("cuda:0")
    with pytest.raises(ArgumentError, match="no _start_coalescing"):
        group._end_coalescing(device)
    group._start_coalescing(device)
    with pytest.raises(ArgumentError, match="already"):
        group._start_coalescing(device)
    assert group._end_coalescing(device).wait()


def messages(noted: NotedGroup) -> list[tuple[list[int], list[int], int]]:
    """Returns for each launch the sizes sent, the sizes received, and the tag."""
    found = []
    for name, (sends, receives, tag) in noted.devices[0].calls:
        assert name == "exchange_messages"
        for side in (sends, receives):
            assert len({peer for _, peer in side}) == len(side)
        found.append(([len(t) for t, _ in sends], [len(t) for t, _ in receives], tag))
    return found


def test_more_messages_between_two_ranks_go_in_later_rounds():
    noted = NotedGroup()
    group, device = noted.group, torch.device("cuda:0")
    group._start_coalescing(device)
    for size, peer, tag in ((1, 0, 0), (2, 0, 0), (3, 5, 0), (4, 6, 8), (5, 0, 0)):
        group.send([on_device(size)], peer, tag)
    group.recv([on_device(6)], 0, 0)
    group.recv([on_device(7)], 0, 0)
    group._end_coalescing(device)
    # The third and fourth message go to other ranks, so they need not wait for the first.
    assert messages(noted) == [([1, 3], [6], 0), ([4], [], 8), ([2], [7], 0), ([5], [], 0)]


def test_launches_of_one_round_go_in_the_order_of_their_tags():
    noted = NotedGroup()
    noted.group._start_coalescing(torch.device("cuda:0"))
    for size, peer, tag in ((1, 0, 9), (2, 2, 3), (3, 3, 6)):
        noted.group.send([on_device(size)], peer, tag)
    noted.group._end_coalescing(torch.device("cuda:0"))
    assert [tag for _, _, tag in messages(noted)] == [3, 6, 9]


def test_a_failed_batch_leaves_no_bracket_open():
    noted = NotedGroup()
    bad = NotedGroup(Communicators)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="got one on meta"):
            bad.group.batch([message(dist.isend, bad, torch.empty(1, device="meta"))])
    works = noted.group.batch(
        [message(dist.isend, noted, on_device(2)), message(dist.irecv, noted, on_device(3))]
    )
    assert works.wait() and messages(noted) == [([2], [3], 0)]


def message(op: Callable[..., Any], noted: NotedGroup, tensor: torch.Tensor) -> Any:
    """Has the fields of a P2POp, whose constructor accepts only groups that torch knows."""
    return SimpleNamespace(op=op, tensor=tensor, group=noted.group, group_peer=0, tag=0)


def test_tensors_of_the_host_go_the_usual_way():
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.batch_isend_irecv.__module__ == "ringcomm.c10d.process_group"
        with pytest.raises(ArgumentError, match="another rank than this one"):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 0)])
        not_messages: Any = [torch.ones(1)]
        with pytest.raises(ValueError, match="p2p_op_list"):
            dist.batch_isend_irecv(not_messages)
    finally:
        dist.destroy_process_group()
