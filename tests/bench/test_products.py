# SPDX-License-Identifier: Apache-2.0
"""The times of matrix products: all calls give the same result."""

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
        assert list(calls) == list(products.SUBJECTS)
        found = [calls[name]() for name in calls if name != "product"]
        for each in found[1:]:
            torch.testing.assert_close(each, found[0])

    worlds(2).run(body)
