"""The times of matrix products: all calls give the same, and ratios are those of a round."""

import pytest
import torch

from ringcomm.bench import products
from tests.comm.conftest import worlds

__all__ = ["worlds"]


@pytest.mark.parametrize("cases", [products.gathers, products.scatters])
def test_what_is_compared_is_the_same(worlds, cases):
    def body(comm):
        torch.manual_seed(1)
        calls = cases(comm, (4, 3, 2))
        times = products.times_of(comm, calls, rounds=2)
        found = [calls[name]() for name in calls if name != "product"]
        for each in found[1:]:
            torch.testing.assert_close(each, found[0])
        return times

    first, second = worlds(2).run(body)
    assert first == second and all(len(each) == 2 for each in first.values())
    assert "4x3x2" in products.line("name", (4, 3, 2), first)


def test_a_ratio_is_taken_within_a_round():
    assert products.ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 2.0]}, "a", "b") == 3.0
