# SPDX-License-Identifier: Apache-2.0
"""The module-level functions: torch.distributed's names, parameters and ranks."""

import inspect
import os
import subprocess
import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as torch_dist

import ringcomm as dist
from ringcomm import ArgumentError, RingcommError

SAME_AS_TORCH = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "get_rank",
    "get_world_size",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
    "destroy_process_group",
    "is_initialized",
    "is_available",
)


@pytest.mark.parametrize("name", SAME_AS_TORCH)
def test_parameters_are_those_of_torch(name):
    """Ours may have more parameters than an older torch, but none missing, different or moved."""
    torchs = list(inspect.signature(getattr(torch_dist, name)).parameters)
    ours = list(inspect.signature(getattr(dist, name)).parameters)
    torchs = [each for each in torchs if each != "timeout" or name != "barrier"]
    assert ours[: len(torchs)] == torchs


def test_every_public_name_is_there():
    for name in dist.__all__:
        assert getattr(dist, name) is not None
    assert set(dist.__all__) <= set(dir(dist))
    assert set(dist._HOME_OF) <= set(dist.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dist.nothing  # noqa: B018


def test_collectives_on_the_default_group(worlds):
    def body(comm):
        rank = dist.get_rank()
        assert (rank, dist.get_world_size()) == (comm.rank, 3)
        assert dist.is_initialized()
        one = torch.ones(2)
        dist.all_reduce(one)
        assert torch.equal(one, torch.full((2,), 3.0))
        dist.reduce(one, 1)
        assert one[0] == (9 if rank == 1 else 3)
        dist.broadcast(one, src=1)
        assert one[0] == 9
        output = torch.zeros(2)
        dist.reduce_scatter(output, [one] * 3)
        dist.reduce_scatter_tensor(output, torch.ones(6), dist.ReduceOp.MAX)
        assert torch.equal(output, torch.ones(2))
        parts = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([float(rank)]))
        assert [each.item() for each in parts] == [0, 1, 2]
        flat = torch.zeros(3)
        dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]), async_op=True).wait()
        assert flat.tolist() == [0, 1, 2]
        dist.gather(torch.tensor([float(rank)]), parts if rank == 0 else None)
        got = torch.zeros(1)
        dist.scatter(got, parts if rank == 0 else None)
        assert got.item() == rank
        swapped = torch.zeros(3)
        dist.all_to_all_single(swapped, flat + 10 * rank)
        assert swapped.tolist() == [rank, 10 + rank, 20 + rank]
        dist.all_to_all(parts, [each.clone() for each in (flat + 10 * rank).split(1)])
        assert [each.item() for each in parts] == swapped.tolist()
        dist.barrier()
        dist.barrier(timeout=30)
        dist.all_reduce_coalesced([torch.ones(1), torch.ones(2)])
        dist.reduce_scatter_coalesced([torch.ones(1)], [torch.ones(3)])
        dist.all_gather_coalesced([[torch.zeros(1)] for _ in range(3)], [torch.ones(1)])

    worlds(3).run(body)


def test_algorithm_and_kernels_are_those_of_the_communicator(worlds):
    calls = (
        lambda **forms: dist.all_reduce(torch.ones(6), **forms),
        lambda **forms: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6), **forms),
        lambda **forms: dist.all_gather_into_tensor(torch.ones(6), torch.ones(2), **forms),
    )

    def body(comm):
        for turn, call in enumerate(calls):
            for algorithm in ("ring", "one_shot" if turn else "two_shot"):
                call(algorithm=algorithm, kernels="native")
                last = comm.recording().ranks[comm.rank].last
                assert (last.algorithm, last.kernels) == (algorithm, "native")
            with pytest.raises(ArgumentError, match="algorithm"):
                call(algorithm="none")
            with pytest.raises(ArgumentError, match="kernels"):
                call(kernels="none")

    worlds(3).run(body)


def test_global_and_group_ranks(worlds):
    def body(comm):
        group = dist.new_group([1, 3], timeout=30, backend="ringcomm", group_desc="odd")
        if comm.rank % 2 == 0:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
            with pytest.raises(ArgumentError, match=r"all_reduce on rank \d.*NON_GROUP_MEMBER"):
                dist.all_reduce(torch.ones(1), group=group)
        else:
            assert dist.get_process_group_ranks(group) == [1, 3]
            assert dist.get_group_rank(group, 3) == 1
            assert dist.get_global_rank(group, 0) == 1
            tensor = torch.tensor([comm.rank])
            dist.broadcast(tensor, src=3, group=group)
            assert tensor.item() == 3
            dist.broadcast(tensor.fill_(comm.rank), group=group, group_src=0)
            assert tensor.item() == 1
            for call in (
                lambda: dist.broadcast(tensor, src=0, group=group),
                lambda: dist.get_group_rank(group, 2),
                lambda: dist.reduce(tensor, dst=2, group=group),
                lambda: dist.send(tensor, 0, group),
            ):
                with pytest.raises(ArgumentError, match=r"global ranks \[1, 3\], got"):
                    call()
            with pytest.raises(ArgumentError, match="get_global_rank"):
                dist.get_global_rank(group, 2)
            if comm.rank == 1:
                dist.send(torch.tensor([7]), 3, group)
            else:
                assert dist.recv(tensor, group=group) == 1
                assert tensor.item() == 7
            dist.destroy_process_group(group)
        with pytest.raises(ArgumentError, match="either dst or group_dst"):
            dist.send(torch.ones(1))
        not_a_group: Any = "world"
        with pytest.raises(ArgumentError, match=r"expected a ringcomm.Communicator"):
            dist.all_reduce(torch.ones(1), group=not_a_group)
        with pytest.raises(ArgumentError, match="device_ids"):
            dist.barrier(device_ids=[0])
        with pytest.raises(ArgumentError, match="backend"):
            dist.new_group([0], backend="gloo")
        with pytest.raises(ArgumentError, match="belongs to the LocalWorld"):
            dist.destroy_process_group()

    worlds(4).run(body)


def test_batches_of_messages(worlds):
    def body(comm):
        peer = 1 - comm.rank
        got = torch.zeros(3)
        batch = [
            dist.P2POp(dist.irecv, got, peer),
            dist.P2POp(dist.isend, torch.full((3,), float(comm.rank)), group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert torch.equal(got, torch.full((3,), float(peer)))
        work = dist.irecv(got, tag=4)
        dist.isend(torch.full((3,), 9.0), peer, tag=4)
        work.wait()
        assert work.source_rank() == peer
        with pytest.raises(ArgumentError, match="isend or"):
            dist.P2POp(cast(Any, dist.send), got, peer)
        with pytest.raises(ArgumentError, match="non-empty"):
            dist.batch_isend_irecv([])
        comm.barrier()

    worlds(2).run(body)


def test_objects(worlds):
    def body(comm):
        rank = comm.rank
        mine = {"rank": rank, "text": "x" * (10**rank)}
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, mine)
        assert [each["rank"] for each in everyone] == [0, 1, 2]
        assert len(everyone[2]["text"]) == 100
        gathered = [None] * 3 if rank == 2 else None
        dist.gather_object(mine, gathered, dst=2)
        if rank == 2:
            assert gathered == everyone
        shared = [mine, rank]
        dist.broadcast_object_list(shared, src=1)
        assert shared == [everyone[1], 1]
        out = [None]
        dist.scatter_object_list(out, everyone if rank == 0 else None, src=0)
        assert out == [mine]
        for call in (
            lambda: dist.all_gather_object([None], mine),
            lambda: dist.gather_object(mine, [None], dst=rank),
            lambda: dist.scatter_object_list([], [1, 2, 3], src=rank),
            lambda: dist.scatter_object_list([None], [1], src=rank),
        ):
            with pytest.raises(ArgumentError, match=f"on rank {rank} of 3"):
                call()

    worlds(3).run(body)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch, ringcomm
def body(comm):
    found = [None, None]
    ringcomm.all_gather_object(found, {"rank": comm.rank})
    out = [None]
    ringcomm.scatter_object_list(out, [1, "two"] if comm.rank == 0 else None)
    ringcomm.all_reduce(ringcomm.zeros(3))
    return found, out
print(ringcomm.local_world(2, timeout=30).run(body))
"""


def test_without_numpy():
    run = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    both = "[{'rank': 0}, {'rank': 1}]"
    assert done.stdout.strip() == f"[({both}, [1]), ({both}, ['two'])]"


def test_without_a_default_group():
    assert not dist.is_initialized()
    for call in (lambda: dist.all_reduce(torch.ones(1)), dist.get_rank, dist.destroy_process_group):
        with pytest.raises(RingcommError, match="init_process_group"):
            call()


def test_the_default_group_of_a_process(tmp_path):
    dist.init_process_group(init_method=f"file://{tmp_path}/store?rank=0&world_size=1", timeout=30)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        dist.all_reduce(torch.ones(2))
        with pytest.raises(ArgumentError, match="a default group already"):
            dist.init_process_group()
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
    store = torch_dist.HashStore()
    dist.init_process_group("ringcomm", store=store, rank=0, world_size=1, group_name="again")
    dist.destroy_process_group()
    for bad in (
        {"backend": "gloo"},
        {"device_id": "everywhere"},
        {"backend": "cuda:ringcomm", "device_id": "cpu"},
        {"store": store},
        {"store": store, "rank": 0, "world_size": 1, "init_method": "env://"},
        {"init_method": "file://"},
    ):
        with pytest.raises(ArgumentError, match="init_process_group"):
            dist.init_process_group(**bad)
