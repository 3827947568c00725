"""Networks between nodes: hops, bisection and contention against counts over all pairs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest

from ringcomm.comm.topology.network import NETWORKS, Network, cubic_dims, torus_network
from ringcomm.errors import ArgumentError

SWITCHED = [Network("switch", 12), Network("fat-tree", 64, leaf_nodes=4)]
TORI = [torus_network(8), torus_network(5), torus_network(4, 4), torus_network(4, 3, 2)]


def coordinates(node, sizes):
    at = []
    for size in sizes:
        at.append(node % size)
        node //= size
    return tuple(at)


def place(at, sizes):
    return sum(c * math.prod(sizes[:dim]) for dim, c in enumerate(at))


def mirror(node, sizes):
    at = coordinates(node, sizes)
    return place([-c % size for c, size in zip(at, sizes, strict=True)], sizes)


def torus_route(source, target, sizes):
    """The directed links of a shortest way, dimension by dimension; ties go up."""
    at = list(coordinates(source, sizes))
    for dim, (goal, size) in enumerate(zip(coordinates(target, sizes), sizes, strict=True)):
        way = 1 if (goal - at[dim]) % size <= size // 2 else -1
        while at[dim] != goal:
            yield (tuple(at), dim, way)
            at[dim] = (at[dim] + way) % size


def counted_loads(pairs, sizes):
    """How many of the routes of all pairs each directed link carries; ties go half each way."""
    loads: defaultdict[object, float] = defaultdict(float)
    for source, target in pairs:
        for link in torus_route(source, target, sizes):
            loads[link] += 0.5
        # The same way in a mirror, where ties go down.
        ends = mirror(source, sizes), mirror(target, sizes)
        for at, dim, way in torus_route(*ends, sizes):
            loads[coordinates(mirror(place(at, sizes), sizes), sizes), dim, -way] += 0.5
    return loads


@pytest.mark.parametrize("network", TORI, ids=str)
def test_a_torus_counts_as_its_routes_do(network):
    sizes, nodes = network.sizes, network.nodes
    pairs = list(itertools.permutations(range(nodes), 2))
    hops = [len(list(torus_route(*pair, sizes))) for pair in pairs]
    assert network.diameter == max(hops)
    assert network.mean_hops == pytest.approx(sum(hops) / len(hops), rel=1e-12)
    # Each node sends 1 / (nodes - 1) to each other one; a link has 1 / (2 dims) of its rate.
    busiest = max(counted_loads(pairs, sizes).values()) / (nodes - 1) * 2 * len(sizes)
    assert network.exchange_contention(nodes) == pytest.approx(max(1.0, busiest), rel=1e-12)


@pytest.mark.parametrize("distance", [1, 2, 3, 4])
def test_a_shift_on_a_ring_loads_links_by_its_distance(distance):
    ring = Network("ring", 8)
    pairs = [(node, (node + distance) % 8) for node in range(8)]
    assert ring.hops(distance) == len(list(torus_route(0, distance, (8,))))
    expected = max(1.0, max(counted_loads(pairs, (8,)).values()) * 2)
    assert ring.shift_contention(distance) == expected


def test_groups_on_a_torus_stay_among_themselves():
    torus = torus_network(8, 8)
    # Rows of 8: the load of one ring, on one of two dimensions.
    assert torus.exchange_contention(8) == pytest.approx(8 / 8 * 4 * 8 / 7)
    assert torus.exchange_contention(8, 8) == torus.exchange_contention(8)
    assert torus.exchange_hops(8) == torus.exchange_hops(8, 8) == 4
    # Half a row is a line of 4: its middle link carries all that crosses.
    assert torus.exchange_contention(4) == pytest.approx(4 / 4 * 4 * 4 / 3)
    assert torus.exchange_hops(64) == torus.diameter == 8


def test_a_fat_tree_has_as_many_tiers_as_its_switches_need():
    tiers = {32: 1, 33: 2, 2 * 32**2: 2, 2 * 32**2 + 1: 3, 2 * 32**3: 3, 2 * 32**3 + 1: 4}
    assert {nodes: Network("fat-tree", nodes).tiers for nodes in tiers} == tiers
    tree = Network("fat-tree", 4096)
    assert [tree.hops(distance) for distance in (1, 31, 32, 1023, 1024)] == [2, 2, 4, 4, 6]
    assert tree.diameter == 6
    near, pod, far = 31, 1024 - 32, 4096 - 1024
    assert tree.mean_hops == pytest.approx((2 * near + 4 * pod + 6 * far) / 4095)


def test_a_taper_slows_what_leaves_its_leaf_only():
    tree = Network("fat-tree", 64, leaf_nodes=8, taper=4.0)
    assert tree.bisection == 1 / 4
    assert [tree.shift_contention(d) for d in (1, 2, 4, 8, 32)] == [1, 1, 2, 4, 4]
    assert tree.exchange_contention(8) == 1.0
    assert tree.exchange_contention(8, 8) == 4.0
    assert tree.exchange_contention(64) == pytest.approx(4 * 56 / 63)
    one_leaf = Network("fat-tree", 8, leaf_nodes=8, taper=4.0)
    assert one_leaf.bisection == one_leaf.exchange_contention(8) == 1.0


@pytest.mark.parametrize("network", SWITCHED, ids=str)
def test_full_bisection_never_contends(network):
    assert network.bisection == 1.0
    for distance in range(1, network.nodes):
        assert network.shift_contention(distance) == 1.0
    assert network.exchange_contention(network.nodes) == 1.0


def test_bisections_of_tori():
    # A cut through the longest dimension crosses 2 links a line, each 1 / (2 d) of a node's rate.
    for sizes in ((8,), (16, 16), (8, 8, 4), (16, 16, 16)):
        torus, nodes, longest = torus_network(*sizes), math.prod(sizes), max(sizes)
        links = 2 * nodes // longest
        expected = links / (2 * len(sizes)) / (nodes / 2)
        assert torus.bisection == pytest.approx(min(1.0, expected)), sizes


def test_a_ring_is_a_torus_of_one_dimension_and_ones_do_not_count():
    ring, torus = Network("ring", 12), torus_network(12, 1, 1)
    assert ring.sizes == torus.sizes == (12,)
    assert (ring.diameter, ring.mean_hops, ring.bisection) == (
        torus.diameter,
        torus.mean_hops,
        torus.bisection,
    )


@pytest.mark.parametrize("nodes", [2, 7, 12, 32, 64, 100, 256, 4096, 16384])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_default_torus_is_the_most_cubic(nodes, dims):
    found = cubic_dims(nodes, dims)
    assert len(found) == dims and math.prod(found) == nodes
    assert list(found) == sorted(found, reverse=True)
    if dims == 2:
        best = min(b for b in range(1, nodes + 1) if not nodes % b and b * b >= nodes)
        assert max(found) == best


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("mesh", 4), f"one of {', '.join(NETWORKS)}, got mesh"),
        (("switch", 1), "at least 2 nodes, got 1"),
        (("torus", 12, (4, 4)), "a torus of 12 nodes, got 4 x 4"),
        (("ring", 12, (12,)), "dimensions of a torus only, got ring"),
        (("fat-tree", 12, (), 1), "at least 2 leaf nodes, got 1"),
        (("fat-tree", 12, (), 4, 0.5), "a taper of at least 1, got 0.5"),
    ],
)
def test_no_such_network(arguments, says):
    with pytest.raises(ArgumentError, match=says):
        Network(*arguments)
