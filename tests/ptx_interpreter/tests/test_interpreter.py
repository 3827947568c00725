# SPDX-License-Identifier: Apache-2.0
"""The PTX interpreter computes as the PTX ISA says, and reports kernels' mistakes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch

from tests import ptx_interpreter as ptx
from tests.ptx_interpreter import PtxSchedule, RefusedError
from tests.ptx_interpreter.build import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# %rd1: the address of the test's memory; %r1: the thread.
KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 memory)
{{
  .reg .pred %p<9>;
  .reg .b16 %rs<9>;
  .reg .b32 %r<20>;
  .reg .f32 %f<9>;
  .reg .b64 %rd<20>;
  .reg .f64 %fd<9>;
  .shared .align 16 .b8 shared[1024];
  ld.param.u64 %rd1, [memory];
  mov.u32 %r1, %tid.x;
  {body}
  ret;
}}
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    ptx.forget()
    ptx.forget_allowed()


def run(
    body: str,
    memory: torch.Tensor,
    threads: int = 32,
    schedule: PtxSchedule | None = None,
    blocks: int = 1,
) -> str | None:
    """Runs a kernel on the memory; returns its mistake, or None."""
    ptx.allow(memory)
    module = ptx.load(KERNEL.format(body=body))
    given = struct.pack("<Q", memory.data_ptr())
    grid = (blocks, 1)
    return ptx.run(module, "kernel", given, grid=grid, threads=threads, schedule=schedule)


def each(operation: str, *values: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """Runs ``operation`` on each row of values, per thread: %{letter}2 ... give %{letter}1."""
    kinds = {2: ("b16", "%rs"), 4: ("b32", "%r"), 8: ("b64", "%rd")}
    count, ways = len(values[0]), [kinds[each.element_size()] for each in values]
    out_type, out = kinds[result.itemsize]
    memories = [torch.zeros(count, dtype=result), *values]
    for tensor in memories:
        ptx.allow(tensor)
    lines = ["mov.u32 %r19, %ctaid.x; shl.b32 %r19, %r19, 8; add.s32 %r19, %r19, %r1;"]
    lines.append("cvt.u64.u32 %rd19, %r19;")
    for number, (tensor, (kind, prefix)) in enumerate(zip(values, ways, strict=True), 2):
        lines.append(f"ld.param.u64 %rd18, [memory+{8 * (number - 1)}];")
        lines.append(f"mad.lo.s64 %rd18, %rd19, {tensor.element_size()}, %rd18;")
        lines.append(f"ld.global.{kind} {prefix}{number}, [%rd18];")
    lines += [operation, f"mad.lo.s64 %rd18, %rd19, {result.itemsize}, %rd1;"]
    lines.append(f"st.global.{out_type} [%rd18], {out}1;")
    text = KERNEL.format(body="\n  ".join(lines))
    text = text.replace(".param .u64 memory", f".param .align 8 .b8 memory[{8 * len(memories)}]")
    given = struct.pack(f"<{len(memories)}Q", *(tensor.data_ptr() for tensor in memories))
    assert count % 256 == 0
    failed = ptx.run(ptx.load(text), "kernel", given, grid=(count // 256, 1), threads=256)
    assert failed is None, failed
    return memories[0]


# ---- arithmetic ---------------------------------------------------------------------------------

ALL_HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


def _bits_of_floats() -> torch.Tensor:
    """FP32 values near each boundary of the bits of FP32 and of 16-bit floats."""
    made = torch.Generator().manual_seed(3)
    exponents = torch.arange(512, dtype=torch.int64) << 23
    near = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x3FF000])
    drawn = torch.randint(0, 1 << 32, (1 << 14,), generator=made)
    bits = torch.cat([(exponents[:, None] + near).flatten(), drawn])
    return torch.nn.functional.pad(bits, (0, -len(bits) % 256)).to(torch.int32)


FLOATS = _bits_of_floats()


def same_but_nan(got: torch.Tensor, want: torch.Tensor, nan_bits: int) -> bool:
    """Compares bits; where ``want`` is NaN, ``got`` must be NVIDIA's only arithmetic NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    expected = torch.where(want.isnan(), torch.tensor(nan_bits, dtype=bits), want.view(bits))
    return torch.equal(got.view(bits), expected)


@pytest.mark.parametrize("kind", HALVES)
def test_every_half_widens(kind: str) -> None:
    got = each(f"cvt.f32.{kind} %r1, %rs2;", ALL_HALVES, result=torch.float32)
    assert same_but_nan(got, ALL_HALVES.view(HALVES[kind]).float(), 0x7FFFFFFF)


def test_a_byte_fills_its_register_with_its_sign() -> None:
    operation = "cvt.s8.s32 %rs1, %r2; cvt.rn.f32.s16 %r1, %rs1;"
    got = each(operation, ALL_HALVES.int(), result=torch.float32)
    assert torch.equal(got, ALL_HALVES.to(torch.int8).float())


def test_lanes_read_whom_they_name() -> None:
    lanes = torch.arange(256, dtype=torch.int32)
    named = lanes.flip(0) * 7
    got = each("shfl.sync.idx.b32 %r1, %r2, %r3, 31, -1;", lanes, named, result=torch.int32)
    assert torch.equal(got, lanes // 32 * 32 + named % 32)
    got = each("shfl.sync.idx.b32 %r1, %r2, %r3, 6175, -1;", lanes, named, result=torch.int32)
    assert torch.equal(got, lanes // 8 * 8 + named % 8)


def test_reciprocals_are_rounded_once() -> None:
    got = each("rcp.rn.f32 %r1, %r2;", FLOATS, result=torch.float32)
    assert same_but_nan(got, 1 / FLOATS.view(torch.float32), 0x7FFFFFFF)


@pytest.mark.parametrize("kind", HALVES)
def test_floats_narrow_to_the_nearest_even(kind: str) -> None:
    got = each(f"cvt.rn.{kind}.f32 %rs1, %r2;", FLOATS, result=torch.int16)
    assert same_but_nan(got, FLOATS.view(torch.float32).to(HALVES[kind]), 0x7FFF)


@pytest.mark.parametrize("kind", HALVES)
def test_sums_of_halves_round_once(kind: str) -> None:
    other = ALL_HALVES[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(5))]
    got = each(f"add.rn.{kind} %rs1, %rs2, %rs3;", ALL_HALVES, other, result=torch.int16)
    wide = ALL_HALVES.view(HALVES[kind]).double() + other.view(HALVES[kind]).double()
    assert same_but_nan(got, wide.float().to(HALVES[kind]), 0x7FFF)


@pytest.mark.parametrize(
    ("spelling", "of"),
    [
        ("add.rn", torch.add),
        ("sub.rn", torch.sub),
        ("mul.rn", torch.mul),
        ("div.rn", torch.div),
    ],
)
def test_arithmetic_of_floats_has_one_nan(spelling: str, of) -> None:
    other = FLOATS.flip(0).contiguous()
    got = each(f"{spelling}.f32 %r1, %r2, %r3;", FLOATS, other, result=torch.float32)
    assert same_but_nan(got, of(FLOATS.view(torch.float32), other.view(torch.float32)), 0x7FFFFFFF)


def test_fused_multiply_add_rounds_once() -> None:
    a, b = FLOATS, FLOATS.flip(0).contiguous()
    c = FLOATS.roll(7)
    got = each("fma.rn.f32 %r1, %r2, %r3, %r4;", a, b, c, result=torch.float32)
    alone = each("mul.rn.f32 %r1, %r2, %r3;\n  add.rn.f32 %r1, %r1, %r4;", a, b, c, result=a.dtype)
    x, y, z = (each.view(torch.float32).double() for each in (a, b, c))
    # The product is exact in FP64. If the sum is exact as well, only one rounding remains.
    product, total = x * y, x * y + z
    exact = (total - z == product) & (total - product == z)
    assert exact.sum() > 1000
    assert torch.equal(got[exact], total.float()[exact])
    assert not torch.equal(got.view(a.dtype), alone)


# ---- mistakes of kernels -------------------------------------------------------------------------

# Lane 0 polls the first word 300 times for the other lanes' stores; the second word tells whether
# it saw them. A turn has fewer polls. After each turn the block gives up the core: more turns would
# take long on a busy core.
POLLS_FOR_A_LANE_OF_ITS_WARP = """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra others;
  mov.u32 %r4, 300;
poll:
  ld.acquire.sys.global.u32 %r2, [%rd1];
  sub.s32 %r4, %r4, 1;
  setp.eq.u32 %p2, %r2, 0;
  setp.gt.s32 %p3, %r4, 0;
  and.pred %p4, %p2, %p3;
  @%p4 bra poll;
  st.global.u32 [%rd1+4], %r2;
  bra done;
others:
  mov.u32 %r3, 1;
  st.release.sys.global.u32 [%rd1], %r3;
done:
"""
STORES_BY_THREAD = "cvt.u64.u32 %rd2, %r1; shl.b64 %rd2, %rd2, 2; add.s64 %rd3, %rd1, %rd2;"
SHARED = "mov.u64 %rd4, shared; add.s64 %rd5, %rd4, %rd2;"
SWAPS = """
  st.shared.u32 [%rd5], %r1;
  {barrier}
  mov.u32 %r2, 252; shl.b32 %r3, %r1, 2; sub.s32 %r3, %r2, %r3;
  cvt.u64.u32 %rd6, %r3; add.s64 %rd7, %rd4, %rd6;
  ld.shared.u32 %r4, [%rd7];
  st.global.u32 [%rd3], %r4;
"""


def words(count: int = 64) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def test_shared_memory_needs_a_barrier() -> None:
    """Each thread reads a byte that a thread of the other warp has written."""
    body, memory = STORES_BY_THREAD + SHARED + SWAPS, words()
    assert run(body.format(barrier="bar.sync 0;"), memory, threads=64) is None
    assert torch.equal(memory, torch.arange(63, -1, -1, dtype=torch.int32))
    found = run(body.format(barrier=""), words(), threads=64)
    assert found is not None and ("nobody has written" in found or "a race" in found)


WRONG = {
    "misaligned": ("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+4];", "misaligned"),
    "out of bounds": ("ld.global.u32 %r2, [%rd1+65536];", "are of no buffer"),
    "shared out of bounds": ("mov.u64 %rd4, shared; ld.shared.u32 %r2, [%rd4+1024];", "of bounds"),
    "shared never written": ("mov.u64 %rd4, shared; ld.shared.u32 %r2, [%rd4];", "nobody has"),
    "some threads at a barrier": (
        "setp.ge.u32 %p1, %r1, 32; @%p1 bra past; bar.sync 0; past:",
        "that never come",
    ),
    "a lane that a shuffle does not name": (
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, 65535;",
        "that the mask does not name",
    ),
    "a barrier in each branch": (
        "setp.ge.u32 %p1, %r1, 16; @%p1 bra other; bar.sync 0; bra past;other: bar.sync 0; past:",
        "another barrier than",
    ),
    "shared word of two threads": (
        "mov.u64 %rd4, shared; st.shared.u32 [%rd4], %r1;",
        "that another one has written",
    ),
    "word of two threads": (
        "st.global.u32 [%rd1], %r1;",
        "that another one has written",
    ),
    "partners at a shuffle that have ended": (
        "setp.ge.u32 %p1, %r1, 16; @%p1 bra past; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; past:",
        "16 of 64 threads wait",
    ),
    "another's word read without a barrier": (
        STORES_BY_THREAD + "st.global.u32 [%rd3], %r1; xor.b32 %r2, %r1, 32;"
        "cvt.u64.u32 %rd2, %r2; shl.b64 %rd2, %rd2, 2; add.s64 %rd3, %rd1, %rd2;"
        "ld.global.u32 %r4, [%rd3];",
        "a race",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    body, told = WRONG[what]
    found = run(body, words(), threads=64)
    assert found is not None and told in found, found


# Block 0 stores the first word and signals that in word 32; block 1 stores the value that it saw in
# word 64. Block 1 runs its first part before block 0 begins, which waits for word 96.
TELLS = """
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, 1;
  setp.ne.u32 %p1, %r2, 0;
  @%p1 bra reader;
begun:
  ld.relaxed.sys.global.u32 %r4, [%rd1+384];
  setp.eq.u32 %p2, %r4, 0;
  @%p2 bra begun;
  st.global.u32 [%rd1], %r3;
  {written}
  st.relaxed.sys.global.u32 [%rd1+128], %r3;
  bra done;
reader:
  {before}
  st.relaxed.sys.global.u32 [%rd1+384], %r3;
poll:
  ld.relaxed.sys.global.u32 %r4, [%rd1+128];
  setp.eq.u32 %p2, %r4, 0;
  @%p2 bra poll;
  {heard}
  ld.global.u32 %r5, [%rd1];
  st.global.u32 [%rd1+256], %r5;
done:
"""


@pytest.mark.parametrize("kind", ["acq_rel", "sc"])
@pytest.mark.parametrize("left_out", ["nothing", "the writer's", "the reader's", "its order"])
def test_a_fence_shows_what_the_words_before_it_told(kind: str, left_out: str) -> None:
    fence, memory = f"fence.{kind}.sys;", words(128)
    body = TELLS.format(
        written="" if left_out == "the writer's" else fence,
        before=fence if left_out == "its order" else "",
        heard="" if left_out in ("the reader's", "its order") else fence,
    )
    assert run(body, memory, threads=1, blocks=2) is None
    assert memory[64] == (left_out == "nothing")


# Each block stores its word, waits for the other's store, and reads the other's word after a fence.
STORE_THEN_LOAD = """
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, 1;
  shl.b32 %r4, %r2, 7;
  cvt.u64.u32 %rd2, %r4;
  add.s64 %rd3, %rd1, %rd2;
  sub.s64 %rd4, %rd1, %rd2;
  st.global.u32 [%rd3], %r3;
  st.relaxed.sys.global.u32 [%rd3+512], %r3;
poll:
  ld.relaxed.sys.global.u32 %r6, [%rd4+640];
  setp.eq.u32 %p1, %r6, 0;
  @%p1 bra poll;
  {fence}
  ld.global.u32 %r5, [%rd4+128];
  st.global.u32 [%rd3+256], %r5;
"""


@pytest.mark.parametrize(
    ("fence", "sees"), [("fence.sc.sys;", True), ("fence.acq_rel.sys;", False)]
)
def test_of_two_that_store_and_fence_one_sees_the_other(fence: str, sees: bool) -> None:
    memory = words(256)
    assert run(STORE_THEN_LOAD.format(fence=fence), memory, threads=1, blocks=2) is None
    assert bool(memory[64] + memory[96]) == sees


@pytest.mark.parametrize("progress", [True, False])
def test_a_lane_may_wait_for_good_for_one_of_its_warp(progress: bool) -> None:
    memory = words()
    schedule = PtxSchedule(no_progress_in_a_warp=not progress)
    assert run(POLLS_FOR_A_LANE_OF_ITS_WARP, memory, schedule=schedule) is None
    assert memory[:2].tolist() == [1, int(progress)]


@pytest.mark.parametrize(
    ("instruction", "named"),
    [
        ("tanh.approx.f32 %f1, %f2;", "tanh.approx.f32"),
        ("ld.volatile.global.u32 %r2, [%rd1];", "ld.volatile.global.u32"),
        ("bar.sync 1;", "a barrier other than 0"),
        ("add.f32 %f1, %f2, %f3;", "add.f32"),  # the compiler could contract it
        ("add.u32 %r1, %r2, %x3;", "%x3"),
        ("add.u32 %r1, %r2;", "add.u32 with 1 operand"),
        ("add.u32 %r1, %r2, %r3, %r4;", "add.u32 with 3 operands"),
        ("call unknown;", "unknown"),
    ],
)
def test_what_is_not_known_is_refused_by_name(instruction: str, named: str) -> None:
    with pytest.raises(RefusedError, match=named.replace(".", r"\.")):
        run(instruction, words())


@pytest.mark.parametrize(
    "opcode",
    [
        "multimem.ld_reduce.weak.global.add.v4.f32",
        "multimem.ld_reduce.relaxed.gpu.global.add.v4.f32",
        "multimem.ld_reduce.relaxed.sys.global.max.v4.f16x2",
        "multimem.ld_reduce.relaxed.sys.global.add.v2.f32",
    ],
)
def test_other_spellings_of_multimem_are_refused_by_name(opcode):
    with pytest.raises(RefusedError, match=f"the instruction {opcode} is not known"):
        run(f"{opcode} {{%r1, %r2, %r3, %r4}}, [%rd1];", words())


@pytest.mark.parametrize(
    ("offset", "said"), [(0, "multimem: no multicast address"), (8, "misaligned: 16 bytes")]
)
def test_addresses_of_no_multicast_object_are_errors(offset, said):
    store = "multimem.st.relaxed.sys.global.v4.f32 [%rd2], {%r1, %r2, %r3, %r4};"
    failed = run(f"and.b64 %rd2, %rd1, -16; add.s64 %rd2, %rd2, {16 + offset}; {store}", words())
    assert failed is not None and said in failed


# ---- trips to memory ----------------------------------------------------------------------------

LOAD = "ld.global.u32 %r2, [%rd1];"
BESIDE = "ld.global.u32 %r3, [%rd1+4];"
# The number of times a kernel waits for loads, one after the other.
WAITS = {
    "no load": ("mov.u32 %r2, 0; st.global.u32 [%rd1+128], %r2;", 0),
    "nobody looks": (LOAD, 0),
    "side by side": (f"{LOAD} {BESIDE} add.s32 %r2, %r2, %r3; st.global.u32 [%rd1+128], %r2;", 1),
    "an address": (
        f"{LOAD} cvt.u64.u32 %rd2, %r2; add.s64 %rd2, %rd1, %rd2; ld.global.u32 %r3, [%rd2];"
        "st.global.u32 [%rd1+128], %r3;",
        2,
    ),
    "a branch": (
        f"{LOAD} setp.ne.s32 %p1, %r2, 0; @%p1 bra past; {BESIDE}"
        "st.global.u32 [%rd1+128], %r3; past:",
        2,
    ),
    "a store between them": (
        f"{LOAD} st.global.u32 [%rd1+128], %r2; {BESIDE} st.global.u32 [%rd1+128], %r3;",
        2,
    ),
    "an acquire": (
        f"ld.acquire.sys.global.u32 %r2, [%rd1]; {BESIDE} st.global.u32 [%rd1+128], %r3;",
        2,
    ),
    "shared memory": (
        f"{LOAD} st.shared.u32 [shared], %r2; bar.sync 0; ld.shared.u32 %r3, [shared];",
        1,
    ),
    "another warp behind a barrier": (
        f"setp.lt.u32 %p1, %r1, 32; @!%p1 bra past; {LOAD} setp.ne.s32 %p2, %r2, 0; @%p2 bra past;"
        f"past: bar.sync 0; {BESIDE} setp.ne.s32 %p2, %r3, 0; @%p2 bra end; end:",
        2,
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_trips_are_counted(case: str) -> None:
    body, wanted = WAITS[case]
    memory = torch.zeros(64, dtype=torch.int32)
    ptx.allow(memory)
    module = ptx.load(KERNEL.format(body=body))
    given, schedule = struct.pack("<Q", memory.data_ptr()), PtxSchedule(counts_trips=1)
    assert ptx.trips(module, "kernel") == -1
    assert ptx.run(module, "kernel", given, threads=64, schedule=schedule) is None
    assert ptx.trips(module, "kernel") == wanted
