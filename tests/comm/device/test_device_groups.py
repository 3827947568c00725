# SPDX-License-Identifier: Apache-2.0
"""Ranks on several devices, their groups, and calls that one thread makes for all ranks."""

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, CommOptions
from ringcomm.algorithms import spelled
from tests.support.call_checks import CHECKS, Case
from tests.support.covering import covering, in_test_all
from tests.support.device_worlds import MANY, device_of, on_host, put
from tests.support.exact import op_of, operand, pattern, reduced, same

BOTH = (0, 1)


@pytest.mark.parametrize("ranks", [3, *in_test_all(2, 4)])
def test_two_devices_of_one_process(two_devices, ranks):
    """One launch per device; a rank's plain tensors belong to its own device."""
    devices = two_devices

    def body(comm):
        for count, memory, algorithm in (
            (0, "heap", "one_shot"),
            (1, "plain", "ring"),
            (257, "mixed", "ll"),
            (5003, "plain", "copy_engine"),
            (5003, "mixed", "ring"),
            (5003, "heap", "one_shot"),
        ):
            for check in CHECKS.values():
                check(comm, Case(count, memory=memory, algorithm=algorithm, root=ranks - 1))
        return device_of(comm)

    on = devices.run(devices.world(ranks, BOTH), body)
    assert on == sorted(on) and set(on) == set(BOTH)


def test_devices_named_one_by_one(two_devices):
    named: list[torch.device | str | int | None] = [torch.device("cuda", 1), "cuda:0", 1]
    # Few blocks, since worlds of other tests still exist and keep blocks for their messages.
    options = CommOptions(timeout=60, channels=2)
    with ringcomm.local_world(3, device=named, options=options) as world:
        assert [device_of(comm) for comm in world] == [1, 0, 1]

        def body(comm):
            tensor = put(comm, torch.full((5,), comm.rank + 1.0), "heap")
            comm.all_reduce(tensor)
            assert on_host(tensor).tolist() == [6.0] * 5

        two_devices.run(world, body)
    with pytest.raises(ArgumentError, match="expected 3 devices, one per rank, got 2"):
        ringcomm.local_world(3, device=["cuda:0", "cuda:1"])


@pytest.mark.parametrize("on", [(0,), BOTH], ids=["one device", "two devices"])
def test_groups(request, devices, on):
    if len(on) > 1:
        request.getfixturevalue("two_devices")

    def body(comm):
        with pytest.raises(ArgumentError, match="new_group on rank"):
            comm.new_group([0, 9])
        odd = comm.new_group([3, 1])
        assert (odd is None) == (comm.rank % 2 == 0)
        if odd is not None:
            assert odd.ranks == (1, 3) and odd.device == comm.device
            tensor = put(odd, torch.full((MANY,), float(comm.rank)), "heap")
            odd.all_reduce(tensor)
            assert torch.equal(on_host(tensor), torch.full((MANY,), 4.0))
            alone = odd.new_group([odd.rank])  # a subgroup of a group
            assert alone.ranks == (comm.rank,)
            alone.all_reduce(tensor)
            assert torch.equal(on_host(tensor), torch.full((MANY,), 4.0))
            alone.close()
            odd.close()
        comm.barrier()

    devices.run(devices.world(4, on), body)


def test_the_calls_of_a_world_and_of_groups_alternate(devices):
    def body(comm):
        groups = [comm.new_group([0, 1, 2], name=f"number-{n}") for n in range(2)]
        works, tensors = [], []
        for turn in range(12):
            tensors.append(put(comm, torch.full((40 * turn + 1,), float(comm.rank)), "mixed"))
            works.append((comm, *groups)[turn % 3].all_reduce(tensors[-1], async_op=True))
            other = put(comm, torch.full((7,), float(comm.rank)), "plain")
            groups[turn % 2].all_reduce(other)
            assert on_host(other).tolist() == [3.0] * 7
        assert all(work.wait() for work in works)
        for turn, tensor in enumerate(tensors):
            assert torch.equal(on_host(tensor), torch.full((40 * turn + 1,), 3.0))
        for group in groups:
            group.close()

    devices.run(devices.world(3), body)


@covering(
    count=[1, 64, MANY],
    algorithm=["auto", "one_shot", "ring", "ll"],
    on={"one device": (0,), "two devices": BOTH},
)
def test_all_ranks_from_one_thread(request, devices, count, algorithm, on):
    if len(on) > 1:
        request.getfixturevalue("two_devices")
    if algorithm == "ll" and count == MANY:
        algorithm = "auto"
    ranks, op = 4, "MAX" if count == 64 else "SUM"
    world = devices.world(ranks, on)
    inputs = [operand(count, rank, ranks, torch.float32, op) for rank in range(ranks)]
    wholes = [operand(count * ranks, rank, ranks, torch.float32, op) for rank in range(ranks)]
    parts = [pattern(count, rank, torch.float32) for rank in range(ranks)]
    with devices.as_on_gpu():
        tensors = [put(comm, inputs[comm.rank], "heap") for comm in world]
        world.all_reduce(tensors, op_of(op), algorithm=spelled(algorithm, "all_reduce"))
        outputs = [put(comm, torch.zeros(count), "heap") for comm in world]
        given = [put(comm, wholes[comm.rank], "heap") for comm in world]
        world.reduce_scatter_tensor(outputs, given, op_of(op), algorithm=algorithm)
        gathered = [put(comm, torch.zeros(count * ranks), "heap") for comm in world]
        sources = [put(comm, parts[comm.rank], "heap") for comm in world]
        world.all_gather_into_tensor(gathered, sources, algorithm=algorithm)
        for comm in world:
            assert torch.equal(on_host(tensors[comm.rank]), reduced(inputs, op))
            want = reduced(wholes, op).chunk(ranks)[comm.rank]
            assert torch.equal(on_host(outputs[comm.rank]), want)
            assert same(on_host(gathered[comm.rank]), torch.cat(parts))


def test_calls_from_one_thread_and_from_many_alternate(devices):
    world = devices.world(3)

    def body(comm):
        tensor = put(comm, torch.full((300,), 1.0 + comm.rank), "plain")
        comm.all_reduce(tensor)
        assert on_host(tensor).tolist() == [6.0] * 300

    for turn in range(4):
        with devices.as_on_gpu(world[0]):
            tensors = [put(comm, torch.full((MANY,), float(turn)), "plain") for comm in world]
            world.all_reduce(tensors)
            devices.run(world, body)
            for tensor in tensors:
                assert torch.equal(on_host(tensor), torch.full((MANY,), 3.0 * turn))
