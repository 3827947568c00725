# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' loops have many loads in flight before they wait for the first."""

import os

import pytest

pytest.importorskip("triton")

import triton.language as tl

from ringcomm._tl.hooks import IS_INTERPRETED
from tests.proof.compile.compiled import TARGETS, compile_kernel, hot_loops
from tests.support import cuda_code
from tests.support.cuda_checks import traffic
from tests.tl import kernels

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
    pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS),
]

# Fewest 16-byte loads that a lane must have in flight before the first use.
BAR = 7
SUM = {"target": "i64", "first": "i64", "stride": "i64", "count": "i32"}
COPY = {"target": "i64", "source": "i64", "count": "i32"}
ALL = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
SUMS = [(2, tl.float32, 90), (8, tl.bfloat16, 100)]
if ALL:
    SUMS = [(w, d, t) for w in (2, 3, 4, 8) for d in (tl.float32, tl.bfloat16) for t in TARGETS]


def loads_in_flight(kernel, signature, target, **constants):
    """Returns the loads in flight of the loop that has the most."""
    binary = compile_kernel(kernel, signature, target, **constants)
    return max(traffic(loop).in_flight for loop in hot_loops(binary.kernels[kernel.__name__]))


@pytest.mark.parametrize(("world", "dtype", "target"), SUMS, ids=str)
def test_sources_are_loaded_together(world, dtype, target):
    found = loads_in_flight(kernels.sum_kernel, SUM, target, COUNT=world, DTYPE=dtype)
    assert found >= BAR


@pytest.mark.parametrize("target", TARGETS if ALL else [80])
def test_a_copy_has_as_many(target):
    assert loads_in_flight(kernels.copy_kernel, COPY, target, DTYPE=tl.float32) >= BAR


def test_sources_that_await_one_another_are_told():
    kernel, how = kernels.serial_sum_kernel, {"COUNT": 4, "DTYPE": tl.float32}
    assert 0 < loads_in_flight(kernel, SUM, 90, **how) < BAR
