# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for real architectures, to the accesses that the protocol needs."""

import os

import pytest

pytest.importorskip("triton")

from ringcomm import _native
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm._tl.launch import plan_all_gather, plan_all_reduce, plan_reduce_scatter
from tests.proof.compile.compiled import (
    ACQUIRE_SYS,
    RELEASE_SYS,
    TARGETS,
    compile_plan,
    hot_loops,
    opcodes,
    read_by_triton,
)
from tests.proof.compile.ptx_order import misplaced
from tests.support.cuda_code import have_tools

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

ONE_SHOT, RING = _native.ALGORITHMS["one_shot"], _native.ALGORITHMS["ring"]
INT16 = _native.DTYPES["int16"]
# World size and plan of each case.
PLANS = {
    "reduce-scatter one-shot": (2, plan_reduce_scatter(1 << 20, "bfloat16", "AVG", ONE_SHOT, 2)),
    "all-gather ring": (2, plan_all_gather(1 << 20, INT16, 2, RING, 2)),
    "reduce-scatter one-shot of 8": (
        8,
        plan_reduce_scatter(1 << 20, "float32", "SUM", ONE_SHOT, 8),
    ),
    "all-gather one-shot of 4": (4, plan_all_gather(1 << 20, INT16, 2, ONE_SHOT, 4)),
    "all-reduce ring of 4": (4, plan_all_reduce(1 << 20, "float16", "SUM", RING, 4)),
    "all-reduce two-shot": (2, plan_all_reduce(1 << 20, "float32", "SUM", ONE_SHOT, 2)),
}
# Plans that neither these cases nor tests/proof/ptx compile in make test.
READ = {
    "reduce-scatter ring": (4, plan_reduce_scatter(1 << 20, "float16", "AVG", RING, 4)),
    "reduce-scatter of one": (1, plan_reduce_scatter(1 << 20, "float32", "SUM", ONE_SHOT, 1)),
    "all-gather of one": (1, plan_all_gather(1 << 20, INT16, 8, RING, 1)),
    "all-reduce of one": (1, plan_all_reduce(1 << 20, "bfloat16", "AVG", ONE_SHOT, 1)),
}
# A kernel takes up to 10 s to compile. ``make cuda-compile`` compiles all for all architectures.
# ``make test`` compiles one kernel per architecture, of either family; the newest architecture has
# the kernel that loads, sums and stores. tests/proof/ptx executes kernels compiled for sm_90.
SOME = {80: ["all-gather ring"], 90: ["all-gather one-shot of 4"], 100: ["reduce-scatter one-shot"]}
ALL = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
CASES = [(name, target) for name in PLANS for target in TARGETS if ALL or name in SOME[target]]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_orders_widths_and_no_local_memory(name, target):
    world, plan = PLANS[name]
    binary = compile_plan(plan, world, target)
    assert ACQUIRE_SYS.search(binary.ptx), "no wait acquires at system scope"
    assert RELEASE_SYS.search(binary.ptx), "nothing is published with release at system scope"
    assert misplaced(binary.functions) == []
    assert ".local" not in binary.ptx
    assert f".maxntid {8 * 32}" in binary.ptx or f".reqntid {8 * 32}" in binary.ptx
    if not have_tools():
        return
    loops = hot_loops(binary.kernels[plan.kernel.__name__])
    assert loops, "no loop loads 16 bytes at a time"
    for loop in loops:
        codes = opcodes(loop)
        # A slow path of a wait may spill to the stack around its call, but these loops may not.
        assert not [code for code in codes if code.startswith(("LDL", "STL"))]
        assert any(code.startswith("STG") and ".128" in code for code in codes)
        wide = [code for code in codes if code.startswith("LDG") and ".128" in code]
        assert len(wide) >= 2, "a turn keeps several loads in flight"
        assert not [c for c in codes if c.startswith("LDG") and c.endswith((".U8", ".U16"))]


@pytest.mark.parametrize("name", READ)
def test_triton_reads_every_form(name):
    world, plan = READ[name]
    assert read_by_triton(plan, world)
