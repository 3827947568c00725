"""The device library and the fused kernels compile to the orders and widths that they promise."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("triton")

import triton.language as tl

from ringcomm._tl.all_gather_matmul import all_gather_matmul_kernel
from ringcomm._tl.geometry import Geometry
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm._tl.reduce_scatter_rms_norm import reduce_scatter_rms_norm_kernel
from tests.tl import device_kernels
from tests.tl.compiled import ACQUIRE_SYS, RELEASE_SYS, TARGETS, compile_kernel

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles")

GEOMETRY = Geometry(world=4, channels=2, slots=4, segment_bytes=65536, staging_bytes=1 << 20)
ACQUIRE_GPU = re.compile(r"\bld\.(?:acquire\.gpu|global\.gpu\.acquire|acquire\.global\.gpu)\b")
RELEASE_GPU = re.compile(r"\b(?:atom|red)\.(?:[\w:]+\.)*(?:gpu\.release|release\.gpu)\b")
WIDE_LOAD = re.compile(r"\bld\.global(?:\.\w+)*\.v(?:4\.b32|2\.b64)\b")
WIDE_STORE = re.compile(r"\bst\.global(?:\.\w+)*\.v(?:4\.b32|2\.b64)\b")
PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
BETWEEN_RANKS = (ACQUIRE_SYS, RELEASE_SYS)
BETWEEN_BLOCKS = (ACQUIRE_GPU, RELEASE_GPU)


@dataclass(frozen=True)
class Case:
    """A kernel, which of its arguments are sizes and not addresses, and what must be in it."""

    kernel: Any
    constants: Mapping[str, Any]
    wanted: tuple[re.Pattern[str], ...]
    types: Mapping[str, str] = field(default_factory=dict)


PRODUCT_CONSTANTS = {"COMM": 16, "CHUNKS": 64, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
NORM_CONSTANTS = {"D": 4096, "BLOCK_D": 4096, "ADDS": True, "KEEPS": True, "ALIGNED": True}
CASES = {
    "put and get": Case(
        device_kernels.shift_kernel,
        {"DTYPE": tl.bfloat16},
        (*BETWEEN_RANKS, WIDE_LOAD, WIDE_STORE),
        {"count": "i32"},
    ),
    "barrier": Case(device_kernels.rounds_kernel, {"ROUNDS": 4}, BETWEEN_RANKS),
    "blocks": Case(device_kernels.relay_kernel, {}, BETWEEN_BLOCKS, {"value": "i32"}),
    "all_gather_matmul": Case(
        all_gather_matmul_kernel,
        {**PRODUCT_CONSTANTS, "DTYPE": tl.bfloat16, "ALIGNED": True},
        (*BETWEEN_RANKS, *BETWEEN_BLOCKS, WIDE_LOAD, WIDE_STORE, PRODUCT),
        dict.fromkeys(("m", "n", "k", "stride_k", "stride_n"), "i32"),
    ),
    "reduce_scatter_rms_norm": Case(
        reduce_scatter_rms_norm_kernel,
        {**NORM_CONSTANTS, "DTYPE": tl.bfloat16},
        (*BETWEEN_RANKS, WIDE_LOAD, WIDE_STORE),
        {"rows": "i32", "eps": "fp32"},
    ),
}
# Every architecture for what a user's kernel is made of, and for a fused one.
EVERYWHERE = ("put and get", "all_gather_matmul")
RUNS = [
    (name, target)
    for name in CASES
    for target in TARGETS
    if target == 90 or name in EVERYWHERE or os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
]


@pytest.mark.parametrize(("name", "target"), RUNS)
def test_orders_widths_and_no_local_memory(name, target):
    case = CASES[name]
    signature = {**dict.fromkeys(case.kernel.arg_names, "i64"), **case.types}
    binary = compile_kernel(case.kernel, signature, target, **case.constants, G=GEOMETRY)
    for pattern in case.wanted:
        assert pattern.search(binary.ptx), pattern.pattern
    assert ".local" not in binary.ptx


def test_a_product_in_fp32_of_unaligned_factors_compiles():
    case = CASES["all_gather_matmul"]
    signature = {**dict.fromkeys(case.kernel.arg_names, "i64"), **case.types}
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    constants = {**case.constants, **tile, "DTYPE": tl.float32, "ALIGNED": False}
    binary = compile_kernel(case.kernel, signature, 90, **constants, G=GEOMETRY)
    assert ".local" not in binary.ptx
