# SPDX-License-Identifier: Apache-2.0
"""The device library and the fused kernels compile to the promised memory orders and widths."""

import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

import ringcomm
from ringcomm import Communicator
from ringcomm import tl as rc
from ringcomm._tl.geometry import Geometry
from ringcomm._tl.hooks import IS_INTERPRETED, lives
from ringcomm.comm.host.engine import CallEngine
from ringcomm.comm.host.triton import KernelTarget
from tests.proof.compile.compiled import (
    ACQUIRE_SYS,
    RELEASE_SYS,
    TARGETS,
    compile_kernel,
    on_gpu,
    only_binary,
)
from tests.proof.compile.ptx_order import misplaced
from tests.support.memories import below_2_gib, needs_low_addresses
from tests.tl import device_kernels, kernels

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

GEOMETRY = Geometry(world=4, channels=2, slots=4, segment_bytes=65536, staging_bytes=1 << 20)
ACQUIRE_GPU = re.compile(r"\bld\.(?:acquire\.gpu|global\.gpu\.acquire|acquire\.global\.gpu)\b")
RELEASE_GPU = re.compile(r"\b(?:atom|red)\.(?:[\w:]+\.)*(?:gpu\.release|release\.gpu)\b")
WIDE_LOAD = re.compile(r"\bld\.global(?:\.\w+)*\.v(?:4\.b32|2\.b64)\b")
WIDE_STORE = re.compile(r"\bst\.global(?:\.\w+)*\.v(?:4\.b32|2\.b64)\b")
WIDE_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared(?:::\w+)?\.global(?:[.:\w]*) \[[^]]*\], \[[^]]*\], (?:16|0x10)\b"
)
PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
BETWEEN_RANKS = (ACQUIRE_SYS, RELEASE_SYS)
BETWEEN_BLOCKS = (ACQUIRE_GPU, RELEASE_GPU)


@dataclass(frozen=True)
class Case:
    """A kernel, the arguments that are sizes and not addresses, and the expected instructions."""

    kernel: Any
    constants: Mapping[str, Any]
    wanted: tuple[re.Pattern[str], ...]
    types: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "put and get": Case(
        device_kernels.shift_kernel,
        {"DTYPE": tl.bfloat16},
        (*BETWEEN_RANKS, WIDE_LOAD, WIDE_STORE),
        {"count": "i32"},
    ),
    "barrier": Case(device_kernels.rounds_kernel, {"ROUNDS": 4}, BETWEEN_RANKS),
    "blocks": Case(device_kernels.relay_kernel, {}, BETWEEN_BLOCKS, {"value": "i32"}),
}
# make test compiles each kernel for one architecture, and a fused kernel for each; ``make
# cuda-compile`` compiles all.
ALL = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
SOME = [("put and get", 80), ("barrier", 90), ("blocks", 100)]
RUNS = [(n, t) for n in CASES for t in TARGETS] if ALL else SOME
EVERY_PRODUCT = [*((each, torch.bfloat16) for each in TARGETS), (90, torch.float32)]
GATHERED = EVERY_PRODUCT if ALL else [(80, torch.float32)]
SCATTERED = EVERY_PRODUCT if ALL else [(100, torch.bfloat16)]


@pytest.mark.parametrize(("name", "target"), RUNS)
def test_orders_widths_and_no_local_memory(name, target):
    case = CASES[name]
    signature = {**dict.fromkeys(case.kernel.arg_names, "i64"), **case.types}
    binary = compile_kernel(case.kernel, signature, target, **case.constants, G=GEOMETRY)
    _check(binary, case.wanted)


def _kernel_target(engine, operation):
    table = engine.owner.rank_table(0)
    geometry = Geometry.of(engine.owner.geometry)
    return KernelTarget(table, geometry, "cpu", 132, 132, lives, nullcontext)


@pytest.fixture
def compiled(monkeypatch):
    """Calls a function on one of two ranks, whose launches go to a stand-in for a GPU.

    The other rank makes the same call without launches.
    """
    monkeypatch.setattr(CallEngine, "kernel_target", _kernel_target)
    monkeypatch.setattr(Communicator, "launches", True)

    def run(target, function):
        def body(comm):
            with rc.Context(comm) as context:
                if comm.rank > 0:
                    vars(context)["launch"] = lambda *args, **constants: None
                function(context)

        with on_gpu(target) as gpu, ringcomm.local_world(2) as ranks:
            ranks.run(body)
        return gpu

    return run


def _moved_by_one(*shape, dtype=torch.bfloat16):
    """Returns a tensor that begins one element after the start of its memory."""
    return torch.empty(1 + prod(shape), dtype=dtype)[1:].view(shape)


def _check(binary, patterns):
    for pattern in patterns:
        assert pattern.search(binary.ptx), pattern.pattern
    assert misplaced(binary.functions) == []
    assert ".local" not in binary.ptx


@pytest.mark.parametrize(("target", "dtype"), GATHERED)
def test_a_product_is_compiled_once_wherever_its_factor_lies(compiled, target, dtype):
    def calls(context):
        a = context.empty((256, 512), dtype)
        for b in (torch.empty(512, 128, dtype=dtype), _moved_by_one(512, 128, dtype=dtype)):
            rc.all_gather_matmul(context, a, b)

    gpu = compiled(target, calls)
    assert gpu.launched == ["all_gather_matmul_kernel"] * 2
    product = () if dtype == torch.float32 else (PRODUCT,)
    wanted = (*BETWEEN_RANKS, *BETWEEN_BLOCKS, WIDE_LOAD, WIDE_STORE, WIDE_COPY, *product)
    _check(only_binary(gpu), wanted)
    assert gpu.made[0].metadata.enable_fp_fusion


@pytest.mark.parametrize(("target", "dtype"), SCATTERED)
def test_a_scattered_product_is_compiled_once_wherever_its_factor_lies(compiled, target, dtype):
    def calls(context):
        inbox = context.empty((256, 128), dtype)
        a = torch.empty(256, 512, dtype=dtype)
        for b in (torch.empty(512, 128, dtype=dtype), _moved_by_one(512, 128, dtype=dtype)):
            rc.matmul_reduce_scatter(context, a, b, inbox)

    gpu = compiled(target, calls)
    assert gpu.launched == ["matmul_reduce_scatter_kernel"] * 2
    product = () if dtype == torch.float32 else (PRODUCT,)
    wanted = (*BETWEEN_RANKS, *BETWEEN_BLOCKS, WIDE_STORE, WIDE_COPY, *product)
    _check(only_binary(gpu), wanted)
    assert gpu.made[0].metadata.enable_fp_fusion


def test_a_norm_is_compiled_once_wherever_its_operands_lie(compiled):
    def calls(context):
        for rows in (1, 16, 17):
            x = context.empty((2 * rows, 4096), torch.bfloat16)
            aligned = torch.empty(rows, 4096, dtype=torch.bfloat16)
            for more in (aligned, _moved_by_one(rows, 4096)):
                rc.reduce_scatter_rms_norm(
                    context, x, _moved_by_one(4096), residual=more, summed=more, eps=1
                )

    gpu = compiled(90, calls)
    assert gpu.launched == ["reduce_scatter_rms_norm_kernel"] * 6
    _check(only_binary(gpu), (*BETWEEN_RANKS, WIDE_LOAD, WIDE_STORE))
    assert gpu.made[0].metadata.enable_fp_fusion


@needs_low_addresses
def test_a_kernel_is_compiled_once_for_addresses_of_32_bits_too(compiled):
    def calls(context):
        dense = torch.zeros(1000)
        for data in (dense, below_2_gib(dense)):
            context.launch(
                device_kernels.relay_kernel, (1,), context.table_ptr, context.timeout_ns,
                data, dense, out=data, value=3, G=context.geometry,
            )  # fmt: skip

    gpu = compiled(90, calls)
    assert gpu.launched == ["relay_kernel"] * 2
    assert [gpu.made[0].src.signature[name] for name in ("word", "data", "out")] == ["i64"] * 3
    only_binary(gpu)


def test_a_kernel_of_the_user_s_is_compiled_once_wherever_its_tensors_lie(compiled):
    def calls(context):
        inboxes = context.empty(1000)
        words = context.zeros((2, 2), torch.int32)
        dense = torch.empty(1000)
        for source in (dense, _moved_by_one(1000, dtype=torch.float32), torch.empty(0)):
            context.launch(
                device_kernels.shift_kernel, (1,), context.table_ptr, context.timeout_ns,
                inboxes.ptrs, words.ptrs, source, target=dense, count=1000,
                DTYPE=tl.float32, G=context.geometry,
            )  # fmt: skip

    gpu = compiled(90, calls)
    assert gpu.launched == ["shift_kernel"] * 3
    _check(only_binary(gpu), (*BETWEEN_RANKS, WIDE_LOAD, WIDE_STORE))


@pytest.mark.parametrize("quant_format", ["int4", "fp8"] if ALL else ["int4"])
def test_quantization_is_compiled_for_kernels_that_fuse(quant_format):
    """In kernels with fusion, products that must be rounded are marked mul.rn, so none is fused."""
    aligned, elems = 1 << 40, 16_000
    how = {"DTYPE": tl.float32, "BLOCKS": 8, "FORMAT": quant_format}
    with on_gpu(90) as gpu:
        kernels.quantize_kernel[(1,)](aligned, 2 * aligned, elems, **how)
        kernels.dequantize_and_sum_kernel[(1,)](
            aligned, 2 * aligned, elems, aligned, COUNT=2, DIVISOR=1, **how
        )
    for made in gpu.made:
        text = made.asm["ptx"]
        assert made.metadata.enable_fp_fusion
        assert "mul.rn.f32" in text and "fma." not in text and ".local" not in text
    quantizing, summing = (made.asm["ptx"] for made in gpu.made)
    # Numbers may have any address here, and are accessed one by one; quantized values are at a
    # multiple of 16 bytes.
    assert re.search(r"\bst\.global\.(?:v[24]\.)?b32\b", quantizing)
    assert re.search(r"\bld\.global\.(?:v[24]\.)?b32\b", summing)
