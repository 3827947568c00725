# SPDX-License-Identifier: Apache-2.0
"""Properties of the rings of every machine, even of impossible ones."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.comm.device.topology import LEVELS, Gpu, NvLinks, Pair, Topology
from tests.comm.topology.fake_nvml import ELSEWHERE


@st.composite
def worlds(draw):
    """Draws a machine with arbitrary properties, and ranks on it or elsewhere."""
    count = draw(st.integers(0, 9))
    links = st.builds(NvLinks, st.integers(0, 3), st.none(), st.sampled_from([None, 20.0, 25.0]))
    gpus = tuple(
        Gpu(
            f"GPU-{n}",
            f"0000:{n:02x}:00.0",
            numa_node=draw(st.sampled_from([None, 0, 1])),
            switch=draw(st.sampled_from([NvLinks(), NvLinks(6, None, 25.0)])),
            mig=draw(st.sampled_from([None, False, False, True])),
        )
        for n in range(count)
    )
    pairs = tuple(
        Pair(
            f"0000:{a:02x}:00.0",
            f"0000:{b:02x}:00.0",
            draw(links),
            draw(st.sampled_from([None, *LEVELS])),
            draw(st.sampled_from([None, True, True, False])),
        )
        for a in range(count)
        for b in range(a + 1, count)
    )
    absent = "" if gpus else "there is none"
    names = st.sampled_from([*(gpu.uuid for gpu in gpus), *(g.pci_bus_id for g in gpus), ELSEWHERE])
    placements = draw(st.lists(st.none() | names, min_size=1, max_size=12))
    return Topology(gpus=gpus, pairs=pairs, absent=absent), placements


@settings(max_examples=150)
@given(worlds(), st.randoms(use_true_random=False))
def test_every_world_has_one_plan_and_no_more_links_than_there_are(world, shuffler):
    topology, placements = world
    chosen = topology.choose(placements)
    check_one_plan(topology, placements, chosen, shuffler)
    check_no_link_is_invented(topology, placements, chosen)
    check_rings_share_no_link(topology, placements, chosen)


def check_one_plan(topology, placements, chosen, shuffler):
    assert chosen.rings
    for ring in chosen.rings:
        assert sorted(ring) == list(range(len(placements)))
        assert ring[0] == 0
    gpus, pairs = list(topology.gpus), list(topology.pairs)
    shuffler.shuffle(gpus)
    shuffler.shuffle(pairs)
    again = Topology("another name", tuple(gpus), tuple(pairs), "another driver", topology.absent)
    assert again.choose(placements) == chosen


def check_no_link_is_invented(topology, placements, chosen):
    devices = [topology.find(name) if name else None for name in placements]
    linked = [
        one is not None
        and other is not None
        and (one is other or topology.connection(one, other).links.count > 0)
        for index, one in enumerate(devices)
        for other in devices[:index]
    ]
    shared = None not in placements and len(set(placements)) == 1
    if len(placements) > 2 and not all(linked) and not shared:
        assert chosen.algorithm == "ring"


def check_rings_share_no_link(topology, placements, chosen):
    if len(chosen.rings) > 1:
        devices = [topology.find(name) for name in placements]
        taken = Counter(
            (devices[ring[at - 1]], devices[rank])
            for ring in chosen.rings
            for at, rank in enumerate(ring)
            if devices[ring[at - 1]] is not devices[rank]
        )
        for (sender, receiver), times in taken.items():
            assert times <= topology.pair(sender, receiver).nvlinks.count
