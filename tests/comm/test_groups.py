# SPDX-License-Identifier: Apache-2.0
import threading
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, ArgumentError, CommOptions, RendezvousError
from ringcomm.comm import local_world


def test_sub_groups_of_all_kinds(worlds):
    def body(comm):
        with pytest.raises(ArgumentError, match="new_group on rank"):
            comm.new_group([0, 9])
        with pytest.raises(ArgumentError, match="distinct"):
            comm.new_group([0, 0])
        with pytest.raises(ArgumentError, match="at least one"):
            comm.new_group([])
        with pytest.raises(ArgumentError, match="name"):
            comm.new_group([0], name="a b")
        odd = comm.new_group([3, 1])
        assert (odd is None) == (comm.rank % 2 == 0)
        if odd is not None:
            assert odd.ranks == (1, 3)
            assert (odd.rank, odd.world_size) == (comm.rank // 2, 2)
            assert odd.timeout == comm.timeout
            tensor = torch.tensor([comm.rank])
            odd.all_reduce(tensor)
            assert tensor.item() == 4
            # A group of a group.
            alone = odd.new_group([odd.rank])
            assert alone is not None
            assert alone.ranks == (comm.rank,)
            alone.close()
            odd.close()
        comm.barrier()

    worlds(4).run(body)


def test_split_by_colour_and_key(worlds):
    def body(comm):
        part = comm.split(comm.rank % 2 if comm.rank < 4 else None, key=-comm.rank)
        if comm.rank == 4:
            assert part is None
        else:
            assert part is not None
            assert part.ranks == ((2, 0) if comm.rank % 2 == 0 else (3, 1))
            tensor = torch.tensor([comm.rank])
            part.broadcast(tensor, 0)
            assert tensor.item() == part.ranks[0]
            part.close()
        comm.barrier()

    worlds(5).run(body)


def test_many_communicators_at_once_interleaved_differently_on_each_rank(worlds):
    """Each rank drives two communicators from two threads; they do not wait for each other."""

    def body(comm):
        groups = [comm.new_group(range(3), name=f"g{i}") for i in range(2)]
        errors = []

        def drive(group, offset):
            try:
                for turn in range(60):
                    tensor = torch.full((100 + turn,), float(group.rank + offset))
                    group.all_reduce(tensor)
                    assert torch.equal(tensor, torch.full_like(tensor, 3.0 + 3 * offset))
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=drive, args=(group, index))
            for index, group in enumerate(groups)
        ]
        for thread in threads[:: 1 if comm.rank else -1]:
            thread.start()
        for thread in threads:
            thread.join()
        for group in groups:
            group.close()
        if errors:
            raise errors[0]

    worlds(3).run(body)


def test_one_communicator_from_several_threads(worlds):
    """Calls of several threads are serialised; all calls are equal here, so any order matches."""

    def body(comm):
        errors = []

        def drive():
            try:
                for _ in range(100):
                    tensor = torch.ones(16)
                    comm.all_reduce(tensor)
                    assert torch.equal(tensor, torch.full((16,), 2.0))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=drive) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    worlds(2).run(body)


def test_groups_of_one_name_can_be_built_again_and_give_their_memory_back(worlds):
    before = ringcomm.heap_stats()["used_bytes"]

    def body(comm):
        for _ in range(20):
            group = comm.new_group([0, 1], name="again")
            group.barrier()
            group.close()
        comm.barrier()

    worlds(2).run(body)
    worlds(2).run(lambda comm: comm.new_group([0, 1]).close())
    assert ringcomm.heap_stats()["used_bytes"] < before + 16 * (4 << 20)


def test_closed_and_aborted_communicators_say_so():
    world = ringcomm.local_world(2, timeout=30)
    world[1].abort("for a reason")
    for call in (
        lambda: world[1].all_reduce(torch.ones(2)),
        lambda: world[1].barrier(async_op=True),
        lambda: world[1].send(torch.ones(2), 0),
        lambda: world[1].irecv(torch.ones(2), 0),
        lambda: world[1].engine.submit(list, "job"),
        lambda: world[1].new_group([1]),
        lambda: setattr(world[1], "timeout", 3),
    ):
        with pytest.raises(AbortedError, match=r"rank 1 of 2.*First fault.*for a reason"):
            call()
    assert world[1].aborted
    with pytest.raises(AbortedError, match="rank 1 aborted the communicator: for a reason"):
        world[0].all_reduce(torch.ones(2))
    world.close()
    world.close()
    with pytest.raises(AbortedError, match="for a reason"):
        world[0].barrier()
    fresh = ringcomm.local_world(1)
    fresh.close()
    with pytest.raises(AbortedError, match="was closed"):
        fresh[0].all_reduce(torch.ones(2))
    fresh[0].abort("too late to matter")


def test_timeout_can_be_read_and_set(worlds):
    comm = ringcomm.local_world(1, timeout=1.5)[0]
    assert comm.timeout.total_seconds() == 1.5
    comm.timeout = 7
    assert comm.timeout.total_seconds() == 7
    bad_timeouts: list[Any] = [0, -1, "soon", True]
    for bad in bad_timeouts:
        with pytest.raises(ArgumentError, match="timeout"):
            comm.timeout = bad
    comm.close()


def test_options_are_checked():
    wrong: list[dict[str, Any]] = [
        {"segment_bytes": 100},
        {"segment_bytes": -64},
        {"slots": 3},
        {"slots": 1},
        {"kernels": "cuda"},
    ]
    for bad in wrong:
        with pytest.raises(ArgumentError, match="expected"):
            CommOptions(**bad)
    with pytest.raises(ArgumentError, match="local_world"):
        ringcomm.local_world(0)


def test_local_world_raises_the_cause_not_the_consequence():
    world = ringcomm.local_world(3, timeout=30)

    def body(comm):
        if comm.rank == 1:
            raise ValueError("the cause")
        comm.barrier()

    with pytest.raises(ValueError, match="the cause"):
        world.run(body)
    world.close()


def test_context_managers_close():
    with ringcomm.local_world(2) as world, world[0] as comm:
        assert comm is world[0]
        assert len(world) == 2
        assert list(world)[1] is world[1:][0]
    assert world[1].aborted


def test_a_missing_rank_is_named():
    from torch.distributed import HashStore

    with pytest.raises(RendezvousError, match=r"rank 0 of 3.*waited 0.3 s, .* for ranks 1, 2"):
        ringcomm.Communicator.from_store(HashStore(), 0, 3, timeout=0.3)


def test_a_world_calls_a_vector_function_before_its_ranks_may(monkeypatch):
    """First calls at the same time may return other bits: pytorch/pytorch issue 188792."""
    callers, exp = [], torch.exp

    def recorded(tensor):
        callers.append(threading.current_thread())
        return exp(tensor)  # really calls exp: later worlds rely on it

    monkeypatch.setattr(torch, "exp", recorded)
    local_world._settle_vector_math.cache_clear()
    for _ in range(2):
        ringcomm.local_world(2).close()
    assert callers == [threading.main_thread()]
