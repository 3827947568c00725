# SPDX-License-Identifier: Apache-2.0
"""The optimizer's Triton kernels compile for real architectures, to the intended operations."""

import os
import re
from collections import Counter

import pytest

pytest.importorskip("triton")

from ringcomm import _native
from ringcomm._tl.adamw import TURN, adamw_shard_kernel
from ringcomm._tl.adamw_launch import (
    plan_adamw_all_gather,
    plan_one_pass,
    plan_reduce_scatter_norm,
    shard_kind,
)
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm._tl.moving import NUM_WARPS
from tests.proof.compile.compiled import (
    ACQUIRE_SYS,
    RELEASE_SYS,
    TARGETS,
    compile_kernel,
    compile_plan,
    hot_loops,
    opcodes,
    read_by_triton,
)
from tests.proof.compile.ptx_order import misplaced
from tests.support.cuda_code import have_tools
from tests.support.triton_device import WARP

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

ONE_SHOT, RING = _native.ALGORITHMS["one_shot"], _native.ALGORITHMS["ring"]
ALL = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
BUCKET = 1 << 20
# Fused operations per element: two for the gradient and the second moment, and two for the two
# branches of the first moment's lerp.
FUSED_PER_ELEM = 4
# A lane's elements in the turns of whole vectors, and again in the turns of single elements.
ELEMS_PER_LANE = TURN.value // (NUM_WARPS * WARP)


def _kind(param, master, *, world=1, op="SUM", grad=None, amsgrad=False, stochastic=False):
    how = {"master": master, "keeps_max": amsgrad, "stochastic": stochastic}
    return shard_kind(grad or param, param, op, world, **how)


# Kind, and the numbers of FP32 arrays that a turn loads and stores.
SHARDS = {
    "float32": (_kind("float32", "own"), 4, 3),
    "bfloat16 with master": (_kind("bfloat16", "fp32"), 3, 3),
    "bfloat16 with remainder": (_kind("bfloat16", "remainder"), 2, 2),
    "stochastic, amsgrad": (_kind("float16", "none", amsgrad=True, stochastic=True), 3, 3),
}
# World size and plan of each case.
PLANS = {
    "one pass": (
        2,
        plan_one_pass(BUCKET, _kind("bfloat16", "fp32", world=2, op="AVG"), "AVG", ONE_SHOT),
    ),
    "norm": (2, plan_reduce_scatter_norm(BUCKET, "bfloat16", "AVG", 0, False, ONE_SHOT, 2)),
    "update": (
        4,
        plan_adamw_all_gather(BUCKET, _kind("bfloat16", "fp32", grad="float32"), ONE_SHOT),
    ),
    "norm, ring": (2, plan_reduce_scatter_norm(BUCKET, "float32", "SUM", 0, True, RING, 2)),
    "one pass, ring": (2, plan_one_pass(BUCKET, _kind("bfloat16", "fp32"), "SUM", RING)),
    "update, ring": (
        2,
        plan_adamw_all_gather(BUCKET, _kind("bfloat16", "fp32", grad="float32"), RING),
    ),
}
# Kernels that neither these cases nor tests/proof/ptx compile in make test: each ring, for
# parameters of 2 and 4 bytes, and each master. Triton's front end reads each in some tenths of a
# second.
READ = {name: PLANS[name] for name in ("norm, ring", "one pass, ring", "update, ring")}
READ |= {
    "one pass, ring of FP32": (
        4,
        plan_one_pass(BUCKET, _kind("float32", "own", world=4, op="AVG"), "AVG", RING),
    ),
    "update without master, ring": (
        2,
        plan_adamw_all_gather(BUCKET, _kind("float16", "none", stochastic=True), RING),
    ),
    "one pass of one": (1, plan_one_pass(BUCKET, _kind("bfloat16", "remainder"), "SUM", ONE_SHOT)),
    "largest, ring": (2, plan_reduce_scatter_norm(BUCKET, "bfloat16", "SUM", 2, False, RING, 2)),
    "L1, not stored": (
        1,
        plan_reduce_scatter_norm(BUCKET, "float16", "SUM", 1, False, ONE_SHOT, 1, stores=False),
    ),
}
# make test compiles a few cases for each architecture, each form of a step once, and each kind of
# shard (the one with a master copy in the one pass).
SHARD_CASES = [("float32", 100), ("bfloat16 with remainder", 80), ("stochastic, amsgrad", 90)]
PLAN_CASES = [("one pass", 100), ("norm", 90), ("update", 80)]
if ALL:
    SHARD_CASES = [(name, target) for name in SHARDS for target in TARGETS]
    PLAN_CASES = [(name, target) for name in PLANS for target in TARGETS]


def _check_arithmetic(ptx, updates):
    """Checks that no operation is approximate, or could still be contracted by a later compiler."""
    assert not re.search(r"\b(?:mul|add|sub)\.f32(?:x2)?\b", ptx)
    assert not re.search(r"\.(?:approx|full)\b|\.ftz\b", ptx)
    counts = Counter(re.findall(r"\b(fma|sqrt|div)\.rn\.f32\b", ptx))
    counts["fma"] += 2 * len(re.findall(r"\bfma\.rn\.f32x2\b", ptx))  # from sm_100 on
    if updates:
        elems = 2 * ELEMS_PER_LANE  # in turns of vectors and in turns of single elements
        assert (counts["fma"], counts["sqrt"]) == (FUSED_PER_ELEM * elems, elems)
        assert counts["div"] >= 2 * elems
    assert ".local" not in ptx


@pytest.mark.parametrize(("name", "target"), SHARD_CASES)
def test_a_shard_moves_vectors_and_rounds_as_meant(name, target):
    kind, loads, stores = SHARDS[name]
    signature = dict.fromkeys(("shard", "grad", "elems"), "i64")
    binary = compile_kernel(adamw_shard_kernel, signature, target, KIND=kind)
    _check_arithmetic(binary.ptx, True)
    if not have_tools():
        return
    (loop,) = hot_loops(binary.kernels["adamw_shard_kernel"])
    codes = opcodes(loop)
    assert not [code for code in codes if code.startswith(("LDL", "STL", "BAR", "STS", "LDS"))]
    assert len([c for c in codes if c.startswith("LDG") and ".128" in c]) == loads
    assert len([c for c in codes if c.startswith("STG") and ".128" in c]) == stores
    narrow = [c for c in codes if c.startswith(("LDG", "STG")) and ".128" not in c]
    assert all(".64" in code for code in narrow), "16-bit elements move 8 bytes at a time"


@pytest.mark.parametrize(("name", "target"), PLAN_CASES)
def test_collectives_order_and_move_as_meant(name, target):
    world, plan = PLANS[name]
    binary = compile_plan(plan, world, target)
    assert ACQUIRE_SYS.search(binary.ptx), "no wait acquires at system scope"
    assert RELEASE_SYS.search(binary.ptx), "nothing is published with release at system scope"
    assert misplaced(binary.functions) == []
    _check_arithmetic(binary.ptx, not name.startswith("norm"))
    if not have_tools():
        return
    loops = hot_loops(binary.kernels[plan.kernel.__name__])
    assert loops, "no loop loads 16 bytes at a time"
    for loop in loops:
        codes = opcodes(loop)
        assert not [code for code in codes if code.startswith(("LDL", "STL"))]
        assert any(code.startswith("STG") and ".128" in code for code in codes)


@pytest.mark.parametrize("name", READ)
def test_triton_reads_every_form(name):
    world, plan = READ[name]
    assert read_by_triton(plan, world)
