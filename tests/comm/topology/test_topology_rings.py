"""The search for rings, against exhaustion and against what is known of graphs."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.comm.topology.plan import best_ring, disjoint_rings, hops


def matrix(count, links):
    """A symmetric matrix from numbers above the diagonal."""
    rows = [[0] * count for _ in range(count)]
    numbers = iter(links)
    for a in range(count):
        for b in range(a + 1, count):
            rows[a][b] = rows[b][a] = next(numbers)
    return rows


def uniform(count, links):
    return matrix(count, [links] * (count * (count - 1) // 2))


def check(links, rings, per_hop):
    """Every ring is an order of all, and together they take no link twice in one direction."""
    taken: Counter[tuple[int, int]] = Counter()
    for ring in rings:
        assert sorted(ring) == list(range(len(links)))
        assert ring[0] == 0
        taken.update(dict.fromkeys(hops(ring), per_hop))
    assert all(number <= links[a][b] for (a, b), number in taken.items())


def most_rings(links):
    """The largest number of rings, by trying all sets."""
    rings = [list(hops((0, *rest))) for rest in permutations(range(1, len(links)))]

    def extend(free, first):
        best = 0
        for number in range(first, len(rings)):
            if all(free[hop] for hop in rings[number]):
                best = max(best, 1 + extend(free - Counter(rings[number]), number))
        return best

    ends = range(len(links))
    return extend(Counter({(a, b): links[a][b] for a in ends for b in ends if a != b}), 0)


def test_hops_close_the_ring():
    assert list(hops((0, 2, 1))) == [(1, 0), (0, 2), (2, 1)]


@settings(max_examples=60)
@given(
    st.integers(3, 5).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.integers(0, 2), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2),
        )
    )
)
def test_the_search_is_exact(drawn):
    links = matrix(*drawn)
    rings, per_hop = disjoint_rings(links)
    check(links, rings, per_hop)
    assert len(rings) * per_hop == most_rings(links)


def test_a_search_that_must_turn_back():
    # A device whose links are all needed offers rings that an earlier choice had passed over.
    rows = ["021100", "10210", "0211", "112", "11", "2"]
    links = matrix(7, [int(digit) for row in rows for digit in row])
    rings, per_hop = disjoint_rings(links)
    check(links, rings, per_hop)
    assert len(rings) * per_hop == 4


@settings(max_examples=40)
@given(
    st.integers(6, 8).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.integers(0, 6), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2),
        )
    )
)
def test_larger_searches_take_no_link_twice(drawn):
    links = matrix(*drawn)
    check(links, *disjoint_rings(links))


# Complete graphs have as many one-way rings as each device has peers, save those of 4 and 6
# devices (T. W. Tillson, "A Hamiltonian decomposition of K*2m, 2m >= 8", J. Combin. Theory B 29).
@pytest.mark.parametrize(
    ("count", "links", "total"),
    [
        (2, 4, 4),
        (3, 1, 2),
        (4, 1, 2),
        (4, 2, 6),
        (4, 4, 12),
        (4, 6, 18),
        (5, 1, 4),
        (6, 1, 4),
        (6, 2, 10),
        (7, 1, 6),
        (8, 1, 7),
        (8, 2, 14),
    ],
)
def test_complete_graphs(count, links, total):
    rings, per_hop = disjoint_rings(uniform(count, links))
    check(uniform(count, links), rings, per_hop)
    assert len(rings) * per_hop == total


def test_a_search_that_runs_out_of_steps_keeps_what_it_has(monkeypatch):
    monkeypatch.setattr("ringcomm.comm.topology.plan.SEARCH_STEPS", 3)
    rings, per_hop = disjoint_rings(uniform(8, 2))
    check(uniform(8, 2), rings, per_hop)
    assert len(rings) * per_hop == 4


def test_what_rings_have_in_common_is_divided_out():
    assert disjoint_rings(uniform(3, 4)) == (((0, 1, 2), (0, 2, 1)), 4)
    rings, per_hop = disjoint_rings(uniform(4, 4))
    assert (len(set(rings)), len(rings), per_hop) == (6, 6, 2)


@pytest.mark.parametrize(
    "links",
    [uniform(2, 0), uniform(5, 0), matrix(3, [1, 1, 0]), matrix(4, [9, 9, 9, 0, 0, 0])],
)
def test_where_there_is_no_ring(links):
    assert disjoint_rings(links)[0] == ()


def test_the_best_ring_avoids_the_worst_hops():
    # Two near pairs, 0-2 and 1-3.
    near = matrix(4, [1, 5, 1, 1, 5, 1])
    assert best_ring(near) == (0, 1, 3, 2)
    assert best_ring([[0]]) == (0,)
    assert best_ring(uniform(8, 1)) == tuple(range(8))


@settings(max_examples=40)
@given(
    st.integers(3, 6).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.integers(0, 4), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2),
        )
    )
)
def test_no_other_ring_is_better(drawn):
    quality = matrix(*drawn)

    def worth(ring):
        return sorted(quality[a][b] for a, b in hops(ring))

    orders = [(0, *rest) for rest in permutations(range(1, drawn[0]))]
    assert worth(best_ring(quality)) == max(map(worth, orders))
