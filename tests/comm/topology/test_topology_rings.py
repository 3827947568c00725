# SPDX-License-Identifier: Apache-2.0
"""The rings of a mesh, and the best ring compared with an exhaustive search."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.comm.device.topology import best_ring, hops, mesh_rings


def matrix(count, links):
    """Makes a symmetric matrix from the numbers above the diagonal."""
    rows = [[0] * count for _ in range(count)]
    numbers = iter(links)
    for a in range(count):
        for b in range(a + 1, count):
            rows[a][b] = rows[b][a] = next(numbers)
    return rows


def uniform(count, links):
    return matrix(count, [links] * (count * (count - 1) // 2))


def test_hops_close_the_ring():
    assert list(hops((0, 2, 1))) == [(1, 0), (0, 2), (2, 1)]


@pytest.mark.parametrize("count", [3, 4])
def test_rings_of_a_mesh_use_every_direction_of_every_pair_alike(count):
    rings = mesh_rings(count)
    assert all(sorted(ring) == list(range(count)) and ring[0] == 0 for ring in rings)
    taken = Counter(hop for ring in rings for hop in hops(ring))
    times = len(rings) // (count - 1)
    assert taken == dict.fromkeys(permutations(range(count), 2), times)


def test_the_best_ring_avoids_the_worst_hops():
    # Two close pairs: 0-2 and 1-3.
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
