# SPDX-License-Identifier: Apache-2.0
"""Rings follow the topology's choice: any order of the ranks, and any number of rings."""

from dataclasses import replace

import pytest
import torch

from ringcomm import _native
from ringcomm.algorithms import spelled
from ringcomm.comm.device.topology import Topology
from tests.support.call_checks import Case, check_all_gather, check_all_reduce
from tests.support.call_checks import check_reduce_scatter as check_reduce_scatter_tensor
from tests.support.device_worlds import device_of, on_host, put, with_options

CHOICES = {
    "reversed": ((0, 3, 2, 1),),
    "permuted": ((0, 2, 1, 3),),
    "one for each channel": ((0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 1, 3)),
    "more than channels": ((0, 2, 3, 1), (0, 1, 3, 2), (0, 3, 1, 2), (0, 1, 2, 3)),
}
OPTIONS = with_options(channels=3)


@pytest.fixture
def choose_rings(monkeypatch):
    """``choose_rings(rings, algorithm)`` sets the choice of all ranks that are built later."""
    usual = Topology.choose

    def use(rings, algorithm="one_shot"):
        def chosen(*args):
            return replace(usual(*args), rings=rings, algorithm=algorithm)

        monkeypatch.setattr(Topology, "choose", chosen)

    return use


@pytest.mark.parametrize("name", CHOICES)
def test_every_order_of_the_ranks(devices, choose_rings, name):
    choose_rings(CHOICES[name])

    def body(comm):
        assert comm.topology_choice.rings == CHOICES[name]
        for turn, count in enumerate((0, 1, 3, 1021, 1021, 30_011, 30_011)):
            memory = ("heap", "plain", "unaligned")[turn % 3]
            case = Case(count, memory=memory, algorithm="ring", in_place=turn % 2 == 1)
            check_all_reduce(comm, case)
            check_reduce_scatter_tensor(comm, case)
            check_all_gather(comm, case)

    with devices.new_world(4, options=OPTIONS) as world:
        devices.run(world, body)


def _in_ring_order(parts, ring, owner):
    """Sums around the ring from the owner's successor to the owner, and rounds after each step."""
    start = ring.index(owner)
    order = [ring[(start + 1 + step) % len(ring)] for step in range(len(ring))]
    total = parts[order[0]]
    for rank in order[1:]:
        total = (total.float() + parts[rank].float()).to(parts[rank].dtype)
    return total


@pytest.mark.parametrize("ring", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 1, 3)])
def test_partial_sums_take_the_way_of_the_ring(devices, choose_rings, ring):
    """The rounding shows it: each order of the ranks gives other bits."""
    choose_rings((ring,))
    generator = torch.Generator().manual_seed(3)
    given = list((torch.randn(4, 4 * 500, generator=generator) * 30).bfloat16())
    chunks = [[each.chunk(4)[owner] for each in given] for owner in range(4)]

    def body(comm):
        output = put(comm, torch.zeros(500, dtype=torch.bfloat16), "plain")
        comm.reduce_scatter_tensor(output, put(comm, given[comm.rank], "plain"), algorithm="ring")
        assert torch.equal(on_host(output), _in_ring_order(chunks[comm.rank], ring, comm.rank))

    with devices.new_world(4, options=OPTIONS) as world:
        devices.run(world, body)


@pytest.mark.parametrize("family", ["ring", "one_shot"])
def test_auto_takes_the_family_of_the_choice_for_large_messages(devices, choose_rings, family):
    choose_rings(((0, 2, 1),), family)
    generator = torch.Generator().manual_seed(4)
    given = list((torch.randn(3, 3 * 1500, generator=generator) * 30).bfloat16())

    def body(comm):
        results = []
        for algorithm in ("auto", "ring", "one_shot"):
            tensor = put(comm, given[comm.rank], "plain")
            comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
            results.append(on_host(tensor))
        return results

    with devices.new_world(3, options=OPTIONS) as world:
        auto, ring, one_shot = devices.run(world, body)[0]
    assert not torch.equal(ring, one_shot)
    assert torch.equal(auto, ring if family == "ring" else one_shot)


def test_a_launch_of_one_rank_carries_its_table(two_devices, choose_rings):
    """Two ranks on two devices with emptied tables in memory, so launches must bring theirs."""
    choose_rings(((1, 0),))

    def body(comm):
        native = comm.engine.device_core.native
        nobody = bytes(_native.STRUCTURES["table"])
        two_devices.runtime.write(device_of(comm), native.table_ptr, nobody)
        comm.barrier()
        for algorithm in ("one_shot", "ring", "ll"):
            check_all_reduce(comm, Case(1021, memory="heap", algorithm=algorithm))

    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        two_devices.run(world, body)
