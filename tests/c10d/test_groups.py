# SPDX-License-Identifier: Apache-2.0
"""Making, naming, splitting and ending groups."""

import ast
import datetime
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringcomm.c10d
from ringcomm import CommOptions, _native, functional
from ringcomm.c10d.process_group import MonitoredBarrier, ProcessGroup
from ringcomm.errors import ArgumentError, PeerLost, RingcommError, UnsupportedError
from ringcomm.rendezvous.same_node import Lookout
from tests.support.rank_pool import default_group

SHORT = datetime.timedelta(milliseconds=300)


def total(group, rank):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def identity(rank, world_size):
    group = default_group()
    assert isinstance(group, ProcessGroup)
    assert dist.get_backend() == "ringcomm" == group.name() == group._get_backend_name()
    assert (group.rank(), group.size()) == (rank, world_size) == (dist.get_rank(), 4)
    assert group.group_name == group.getGroupName() == "0"
    assert group.group_desc == group.getGroupDesc() == "default_pg"
    assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
    assert group._get_backend(torch.device("cpu")) is group
    assert group._get_backend(torch.device("cuda")) is group
    with pytest.raises(UnsupportedError, match="device type xpu"):
        group._get_backend(torch.device("xpu"))
    assert group.communicator.world_size == world_size
    assert not hasattr(group, "new_group")
    renamed = dist.new_group(group_desc="some words")
    assert renamed.group_desc == "some words" and renamed.group_name != group.group_name
    renamed._set_group_name("other")
    renamed._set_group_desc("other words")
    assert (renamed.group_name, renamed.group_desc) == ("other", "other words")


def ringcomm_finds_it(rank, world_size):
    """Without a group of ringcomm, ringcomm's functions use torch's default group."""
    tensor = torch.ones(2)
    ringcomm.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 2
    gathered = functional.all_gather(torch.tensor([rank]))
    assert gathered.tolist() == list(range(world_size)) and ringcomm.get_rank() == rank
    with pytest.raises(ArgumentError, match=r"call torch\.distributed\.destroy_process_group"):
        ringcomm.destroy_process_group()
    first = dist.new_group([0])
    if rank:
        with pytest.raises(ArgumentError, match=rf"rank {rank}: expected a group that this rank"):
            functional.all_gather(tensor, first)


def another_backend_is_named(rank, world_size):
    with pytest.raises(RingcommError, match=r"there is none of ringcomm, and .* backend 'gloo'"):
        functional.all_gather(torch.ones(1))


def sequence_numbers(rank, world_size):
    group = dist.new_group()
    group._set_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(group)
    assert group._get_sequence_number_for_group() == 4


def messages_that_are_waited_for(rank, world_size):
    """torch's send() and recv() use no background thread, which would be woken needlessly."""
    group: Any = dist.new_group([0, 1])
    if rank > 1:
        return
    comm = group.communicator

    def unexpected(*args):
        raise AssertionError("an asynchronous message")

    comm.isend = comm.irecv = unexpected
    x = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(x, dst=1, group=group, tag=4)
    else:
        assert dist.recv(x, src=0, group=group, tag=4) == 0
    assert x.tolist() == [0.0] * 3
    call = dist.isend if rank == 0 else dist.irecv
    with pytest.raises(AssertionError, match="an asynchronous message"):
        call(x, 1 - rank, group=group)


def subgroups(rank, world_size):
    results = []
    for ranks in ([0, 1], [3, 1], [2], [0, 1, 2, 3]):
        group = dist.new_group(ranks)
        if rank in ranks:
            results.append((total(group, rank), dist.get_rank(group), dist.get_world_size(group)))
    current, _ = dist.new_subgroups(2)
    results.append(total(current, rank))
    return results


def groups_of_their_members_only(rank, world_size):
    """Made without the other ranks of the world; roots and peers are global ranks."""
    group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, rank % 2 + 2, group=group)
    received = torch.empty(1, dtype=torch.int64)
    if rank < 2:
        dist.send(tensor + 10, rank + 2, group=group)
    else:
        dist.recv(received, rank - 2, group=group)
    return total(group, rank), tensor, received if rank >= 2 else None


def groups_of_other_backends(rank, world_size):
    """A group of Gloo beside groups of ringcomm, each served by its own backend."""
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend(gloo) == "gloo" and not isinstance(gloo, ProcessGroup)
    ours = dist.new_group(backend="ringcomm")
    assert isinstance(ours, ProcessGroup)
    assert total(gloo, rank) == total(ours, rank) == sum(range(world_size))
    dist.monitored_barrier(gloo)
    dist.monitored_barrier(ours)


def mixed_backends_without_the_cpp_backend(rank, world_size):
    words = r'run `ringcomm build-backend`, or write init_process_group\("ringcomm"\)'
    for backend in ("cpu:ringcomm,cuda:gloo", "cpu:gloo,cuda:ringcomm"):
        with (
            mock.patch("ringcomm.c10d.backend.find", return_value=None),
            pytest.raises(UnsupportedError, match=words) as error,
        ):
            dist.new_group(backend=backend)
        # The error's frames keep a Gloo group alive, to which other ranks may still be connecting.
        dist.barrier()
        del error
    for backend in ("cpu:ringcomm", "cuda:ringcomm", "cpu:ringcomm,cuda:ringcomm"):
        alone = dist.new_group(backend=backend)
        assert total(alone, rank) == sum(range(world_size))


def options(rank, world_size):
    group = dist.new_group(pg_options=CommOptions(segment_bytes=4096, slots=2))
    assert group.communicator.options.segment_bytes == 4096
    assert total(group, rank) == sum(range(world_size))
    with pytest.raises(ArgumentError, match="CommOptions"):
        dist.new_group(pg_options={"segment_bytes": 4096})
    group.set_timeout(datetime.timedelta(seconds=7))
    assert group.communicator.timeout == datetime.timedelta(seconds=7)


def splits(rank, world_size):
    group = default_group()
    halves = [[1, 0], [2, 3]]
    mine = group.split_group(halves[rank // 2], group_name=f"half{rank // 2}", group_desc="half")
    assert (mine.rank(), mine.group_name) == (halves[rank // 2].index(rank), f"half{rank // 2}")
    tensor = torch.tensor([rank])
    mine.allreduce([tensor]).wait()
    assert int(tensor) == sum(halves[rank // 2])
    nested = mine.split_group([1])
    assert (nested is None) == (mine.rank() != 1)
    named = group.split_group([rank], group_name=f"rank {rank} alone")
    assert named.group_name == f"rank {rank} alone"
    assert (group.split_group([0]) is None) == (rank != 0)
    with pytest.raises(ArgumentError, match="distinct"):
        group.split_group([0, 0])
    mine.shutdown()


def splits_by_torch(rank, world_size):
    try:
        half = dist.split_group(split_ranks=[[0, 3], [1, 2]], group_desc="half")
    except RuntimeError as error:
        # Up to torch 2.14 split_group() accepts only a group that is bound to an accelerator.
        assert "No device associated with the default pg" in str(error)
        return
    assert isinstance(half, ProcessGroup) and half.group_desc == "half"
    assert total(half, rank) == 3


def aborted(rank, world_size):
    group = dist.new_group()
    if rank == 0:
        group.abort()
    with pytest.raises(RingcommError, match="abort"):
        dist.barrier(group)
    with pytest.raises(RingcommError, match=f"^all_reduce on rank {rank} of {world_size}: "):
        dist.all_reduce(torch.ones(4), group=group)
    assert total(None, rank) == sum(range(world_size))


def ended(rank, world_size):
    group = dist.new_group()
    group.allreduce([torch.ones(1)])
    group._wait_for_pending_works()
    communicator = group.communicator
    dist.destroy_process_group(group)
    with pytest.raises(RingcommError, match="closed"):
        communicator.barrier()


def failures_reach_futures(rank, world_size):
    """A failed call's future raises, also for waiters in C++, which see no Python exceptions."""
    group = dist.new_group(timeout=SHORT)
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        with pytest.raises(RuntimeError, match="all_reduce"):
            work.get_future().wait()
        with pytest.raises(RingcommError):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), RingcommError)
    dist.barrier()


def monitored_barriers(rank, world_size):
    for _ in range(2):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30), wait_all_ranks=True)
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.monitored_barrier(pair)
    dist.barrier()


def one_rank_misses_a_monitored_barrier(rank, world_size):
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 2 failed to pass monitoredBarrier in 300 ms"):
            dist.monitored_barrier(timeout=SHORT)
    elif rank != 2:
        with pytest.raises(RuntimeError, match="received errors while waiting"):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    assert total(None, rank) == sum(range(world_size)), "the group must stay usable"


def several_ranks_miss_a_monitored_barrier(rank, world_size):
    if rank == 0:
        with pytest.raises(RuntimeError, match="Ranks 1, 3 failed to pass"):
            dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)
    elif rank == 2:
        with pytest.raises(RuntimeError, match="Ranks 1, 3"):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    dist.barrier()


def rank_0_misses_a_monitored_barrier(rank, world_size):
    group = dist.new_group()
    if rank != 0:
        with pytest.raises(
            RuntimeError, match=r"waited 0\.3 s, until its timeout ended, for rank 0"
        ):
            group.monitored_barrier(0.3)
    dist.barrier()


def test_a_monitored_barrier_names_ranks_whose_processes_have_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    dead = _native.Process(process.pid, with_descriptor=False)
    process.kill()
    process.wait()
    store, minute = dist.HashStore(), datetime.timedelta(minutes=1)

    def barrier(store, rank, ended):
        return MonitoredBarrier(store, rank, 3, Lookout((0, 1, 2), {ended: dead}))

    judge = barrier(store, 0, 2)
    words = r"Rank 2 failed to pass monitoredBarrier; of rank 2 the process has ended\."
    with pytest.raises(PeerLost, match=words):
        judge(minute, False)
    with pytest.raises(PeerLost, match=r"from rank 0: Rank 2 failed"):
        barrier(store, 1, 2)(minute, False)  # comes late, and reads the verdict
    words = "Ranks 1, 2 failed to pass monitoredBarrier in 300 ms; of rank 2 the process"
    with pytest.raises(PeerLost, match=words):
        judge(SHORT, True)
    with pytest.raises(PeerLost, match="from rank 0: its process has ended"):
        barrier(dist.HashStore(), 1, 0)(minute, False)
    # A rank that arrived before its process ended counts as arrived.
    again = dist.HashStore()
    for rank in (1, 2):
        again.set(f"monitored_barrier/attempt0/0/here/{rank}", "")
    barrier(again, 0, 2)(minute, False)


@pytest.mark.parametrize(
    "check",
    [
        identity,
        sequence_numbers,
        messages_that_are_waited_for,
        groups_of_other_backends,
        mixed_backends_without_the_cpp_backend,
        options,
        splits,
        splits_by_torch,
        aborted,
        ended,
        failures_reach_futures,
        monitored_barriers,
        one_rank_misses_a_monitored_barrier,
        several_ranks_miss_a_monitored_barrier,
        rank_0_misses_a_monitored_barrier,
    ],
)
def test_on_ringcomm(four_ranks, check):
    four_ranks.run(check)


@pytest.mark.parametrize("check", [subgroups, groups_of_their_members_only])
def test_as_on_gloo(four_ranks, check):
    four_ranks.compare(check)


def test_ringcomm_finds_the_default_group(four_ranks):
    four_ranks.run(ringcomm_finds_it)
    four_ranks.run(another_backend_is_named, "gloo")


FRESH = """
import sys, torch.distributed as dist
loaded = [name for name in sys.modules if name.startswith("ringcomm.")]
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(dist.torch.ones(1)); dist.barrier(); dist.new_group()
backend = dist.get_backend()
dist.destroy_process_group()
from ringcomm import cuda
touched = dist.torch.cuda.is_initialized(), "cupy" in sys.modules, cuda.use(None)
print(repr((loaded, backend, touched)))
"""


def test_no_import_is_needed():
    """The import of torch registers the backend, imports little, and uses no device."""
    if not any(point.name == "ringcomm" for point in entry_points(group="torch.backends")):
        pytest.skip("ringcomm is not installed in this environment: pip install -e .")
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, backend, touched = ast.literal_eval(done.stdout)
    assert backend == "ringcomm" and set(loaded) <= {"ringcomm.errors", "ringcomm.c10d"}
    assert touched == (False, False, None)


def test_a_failing_registration_does_not_break_the_import_of_torch(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("changed")

    monkeypatch.setattr(dist.Backend, "register_backend", fail)
    with pytest.warns(RuntimeWarning, match="TypeError: changed"):
        ringcomm.c10d.register()


def test_the_flight_recorder_is_told_to_stay_away():
    torch_2_15 = SimpleNamespace(_FR_SELF_RECORDING_BACKENDS={"gloo"})
    ringcomm.c10d._keep_flight_recorder_off(torch_2_15)
    assert {"gloo", "ringcomm"} == torch_2_15._FR_SELF_RECORDING_BACKENDS
    ringcomm.c10d._keep_flight_recorder_off(SimpleNamespace())
