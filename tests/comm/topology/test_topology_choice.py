# SPDX-License-Identifier: Apache-2.0
"""Plans for the recorded machines, and properties of the plans of every machine."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from ringcomm.comm.device.topology import (
    Gpu,
    NvLinks,
    Pair,
    Topology,
    TopologyChoice,
    host_choice,
)
from ringcomm.errors import ArgumentError
from tests.comm.topology.fake_nvml import ELSEWHERE, recorded


def one_per_gpu(topology):
    return [gpu.uuid for gpu in topology.gpus]


def check_rings(topology, placements, chosen):
    """Every ring visits all ranks, starting from 0; several rings use all links equally."""
    world = len(placements)
    taken: Counter[tuple[str, str]] = Counter()
    for ring in chosen.rings:
        assert sorted(ring) == list(range(world))
        assert ring[0] == 0
        for at, rank in enumerate(ring):
            taken[placements[ring[at - 1]], placements[rank]] += 1
    if len(chosen.rings) > 1:
        uses = {pair: times for pair, times in taken.items() if pair[0] != pair[1]}
        gpus = {topology.find(name) for name in placements}
        assert len(set(uses.values())) == 1 and len(uses) == len(gpus) * (len(gpus) - 1)


def socket_crossings(topology, placements, ring):
    nodes = [topology.find(placements[rank]).numa_node for rank in ring]
    return sum(nodes[at - 1] != node for at, node in enumerate(nodes))


@pytest.mark.parametrize(
    ("name", "algorithm", "rings", "gbps", "says"),
    [
        ("dgx_h100", "one_shot", 1, 450.0, "NVSwitch (450 GB/s per direction)"),
        ("dgx_1v", "ring", 1, 50.0, "not all pairs of GPUs have NVLink"),
        ("hgx_a100_4", "one_shot", 6, 300.0, "4 NVLinks (100 GB/s per direction)"),
        ("pcie_two_sockets", "ring", 1, None, "between NUMA nodes (SYS)"),
        ("pcie_pair", "one_shot", 1, None, "host bridges of one NUMA node (NODE)"),
        ("one_gpu", "one_shot", 1, None, "no peer"),
    ],
)
def test_one_rank_per_gpu(name, algorithm, rings, gbps, says):
    topology = recorded(name)
    placements = one_per_gpu(topology)
    chosen = topology.choose(placements)
    assert (chosen.algorithm, len(chosen.rings)) == (algorithm, rings)
    assert says in chosen.reason
    check_rings(topology, placements, chosen)
    assert topology.rings_gbps(placements, chosen.rings) == gbps


@pytest.mark.parametrize(
    ("gpus", "algorithm", "gbps"),
    [
        # Six rings: two of them share each direction of a single link.
        ([0, 1, 2, 3], "ring", 75.0),
        # The pairs 0-1 and 0-2 have one link, 1-2 has two.
        ([0, 1, 2], "ring", 50.0),
        ([0, 3], "one_shot", 50.0),
        ([0, 1], "one_shot", 25.0),
        # GPUs 0 and 5 have no NVLink.
        ([0, 5], "one_shot", None),
        # The pair 0-4 has two links, but every ring needs a SYS connection.
        ([0, 4, 1], "ring", None),
        # The GPUs of the first case in another order.
        ([3, 0, 2, 1], "ring", 75.0),
    ],
)
def test_parts_of_the_dgx_1(gpus, algorithm, gbps):
    topology = recorded("dgx_1v")
    placements = [topology.gpus[index].uuid for index in gpus]
    chosen = topology.choose(placements)
    assert chosen.algorithm == algorithm
    check_rings(topology, placements, chosen)
    assert topology.rings_gbps(placements, chosen.rings) == gbps


@pytest.mark.parametrize("name", ["pcie_two_sockets", "dgx_h100"])
def test_sockets_are_crossed_twice_whatever_the_ranks(name):
    topology = recorded(name)
    for seed in range(20):
        placements = one_per_gpu(topology)
        random.Random(seed).shuffle(placements)
        (ring,) = topology.choose(placements).rings
        assert socket_crossings(topology, placements, ring) == 2


def test_ranks_of_one_gpu_stay_together():
    topology = recorded("hgx_a100_4")
    uuids = one_per_gpu(topology)
    placements = [uuids[rank % 4] for rank in range(8)]
    chosen = topology.choose(placements)
    assert len(chosen.rings) == 6
    check_rings(topology, placements, chosen)
    for ring in chosen.rings:
        changes = sum(placements[ring[p - 1]] != placements[r] for p, r in enumerate(ring))
        assert changes == 4
    assert topology.rings_gbps(placements, chosen.rings) == 300.0


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", ["one_gpu", "no_nvml"])
def test_ranks_that_share_one_gpu(name, world):
    chosen = recorded(name).choose([ELSEWHERE if name == "no_nvml" else "0000:65:00.0"] * world)
    assert chosen.algorithm == "one_shot"
    assert chosen.rings == (tuple(range(world)),)
    assert f"all {world} ranks share" in chosen.reason


def test_ranks_that_share_both_gpus():
    topology = recorded("pcie_pair")
    placements = [gpu.pci_bus_id for gpu in topology.gpus] * 2
    assert topology.choose(placements) == TopologyChoice(
        "ring",
        ((0, 2, 1, 3),),
        "not all pairs of GPUs have NVLink: ranks 0 and 1 have PCIe through several host bridges "
        "of one NUMA node (NODE)",
    )


def test_names_of_a_gpu_are_one_gpu():
    topology = recorded("dgx_1v")
    uuid, bus_id = topology.gpus[3].uuid, topology.gpus[3].pci_bus_id
    names = [uuid, uuid.removeprefix("GPU-"), bus_id, f"0000{bus_id}".upper()]
    assert "all 4 ranks share" in topology.choose(names).reason


@pytest.mark.parametrize("placements", [[None] * 4, ["GPU-a", "GPU-b", "GPU-a", "GPU-c"]])
def test_without_nvml_there_is_a_plan_that_says_so(placements):
    chosen = recorded("no_nvml").choose(placements)
    assert chosen.algorithm == "ring"
    assert "NVML Shared Library Not Found" in chosen.reason
    # Without NVML, equal names still count as one GPU.
    assert chosen.rings == (((0, 1, 2, 3) if None in placements else (0, 2, 1, 3)),)


def test_an_unknown_gpu_is_named_and_given_no_link():
    topology = recorded("dgx_h100")
    placements = [ELSEWHERE, *one_per_gpu(topology)[:3]]
    chosen = topology.choose(placements)
    assert chosen.algorithm == "ring"
    assert "the GPU of rank 0 is not in the topology" in chosen.reason
    assert chosen.rings == ((0, 1, 2, 3),)
    assert topology.rings_gbps(placements, chosen.rings) is None


def test_mig_instances_are_apart():
    topology = recorded("mig")
    first, second = topology.gpus[0].mig_instances
    assert "all 3 ranks share an instance of" in topology.choose([first] * 3).reason
    whole = topology.gpus[1].uuid
    for placements in ([first, second], [first, second, first], [first, whole]):
        chosen = topology.choose(placements)
        assert "different MIG instances, which share no memory" in chosen.reason
        assert chosen.algorithm == ("one_shot" if len(placements) == 2 else "ring")
        assert topology.rings_gbps(placements, chosen.rings) is None


def test_instances_have_no_link_even_where_mig_is_not_told():
    known = recorded("mig")
    topology = replace(known, gpus=(replace(known.gpus[0], mig=None), known.gpus[1]))
    placements = [*known.gpus[0].mig_instances, known.gpus[0].mig_instances[0]]
    assert topology.choose(placements).algorithm == "ring"
    assert topology.rings_gbps(placements, ((0, 1, 2),)) is None


def test_refused_access_is_told():
    known = recorded("pcie_two_sockets")
    pairs = (replace(known.pairs[0], peer_access=False), *known.pairs[1:])
    chosen = replace(known, pairs=pairs).choose(one_per_gpu(known))
    assert "the driver gives ranks 0 and 1 no access to each other's memory" in chosen.reason
    # The ring avoids the pair without access.
    assert chosen.rings == ((0, 2, 1, 3),)


def test_a_mesh_with_a_missing_link_is_no_mesh():
    known = recorded("hgx_a100_4")
    pairs = (replace(known.pairs[0], nvlinks=NvLinks(3, "3.0", 25.0)), *known.pairs[1:])
    topology = replace(known, pairs=pairs)
    chosen = topology.choose(one_per_gpu(known))
    assert chosen.algorithm == "ring"
    assert "different NVLinks, 3 to 4" in chosen.reason
    check_rings(topology, one_per_gpu(known), chosen)
    # Two of the six rings share each direction of the three links between GPUs 0 and 1.
    assert topology.rings_gbps(one_per_gpu(known), chosen.rings) == 6 * 75.0 / 2


def mesh(count, gbps):
    """Makes GPUs with one NVLink between every two; ``gbps(a, b)`` is the rate of a pair."""
    gpus = tuple(Gpu(f"GPU-{n}", f"0000:{n + 1:02x}:00.0") for n in range(count))
    pairs = tuple(
        Pair(gpus[a].pci_bus_id, gpus[b].pci_bus_id, NvLinks(1, None, gbps(a, b)), peer_access=True)
        for a in range(count)
        for b in range(a + 1, count)
    )
    return Topology(gpus=gpus, pairs=pairs)


def test_links_of_unknown_speed_count_as_equal():
    topology = mesh(4, lambda a, b: 25.0 if a else None)
    chosen = topology.choose(one_per_gpu(topology))
    assert len(chosen.rings) == 6
    assert topology.rings_gbps(one_per_gpu(topology), chosen.rings) is None


def test_many_gpus_are_ordered_by_numa_node():
    gpus = tuple(Gpu(f"GPU-{n:02d}", f"0000:{n:02x}:00.0", numa_node=n % 2) for n in range(1, 17))
    chosen = Topology(gpus=gpus).choose([gpu.uuid for gpu in gpus])
    # The ring starts on rank 0's node 1, then visits node 0; within a node it follows the bus ids.
    assert chosen.rings == ((*range(0, 16, 2), *range(1, 16, 2)),)


def test_sixteen_gpus_on_a_switch():
    switch = NvLinks(6, "2.0", 25.0)
    gpus = tuple(Gpu(f"GPU-{n}", f"0000:{n:02x}:00.0", switch=switch) for n in range(16))
    topology = Topology(gpus=gpus)
    chosen = topology.choose([gpu.uuid for gpu in gpus])
    assert (chosen.algorithm, chosen.rings) == ("one_shot", (tuple(range(16)),))
    assert topology.rings_gbps([gpu.uuid for gpu in gpus], chosen.rings) == 150.0
    # Two rings share each GPU's link to the switch, although they have no hop in common.
    both_ways = (*chosen.rings, tuple(range(0, -16, -1)))
    both_ways = tuple(tuple(rank % 16 for rank in ring) for ring in both_ways)
    assert topology.rings_gbps([gpu.uuid for gpu in gpus], both_ways) == 150.0


def test_one_gpu_off_the_switch_makes_a_ring():
    known = recorded("dgx_h100")
    gpus = (replace(known.gpus[0], switch=NvLinks()), *known.gpus[1:])
    assert replace(known, gpus=gpus).choose(one_per_gpu(known)).algorithm == "ring"


def test_ranks_on_cpus():
    chosen = host_choice(3)
    assert (chosen.algorithm, chosen.rings) == ("one_shot", ((0, 1, 2),))


def test_no_rank_is_an_error():
    with pytest.raises(ArgumentError, match="at least one rank"):
        recorded("one_gpu").choose([])
