# SPDX-License-Identifier: Apache-2.0
"""The measures of loops are right for loops made by hand, and tell good compiled loops from bad."""

import pytest

from tests.support import cuda_code
from tests.support import cuda_loop_measures as measures
from tests.support.cuda_checks import blocks_per_multiprocessor
from tests.support.cuda_code import Instruction, Loop, compile_text
from tests.support.cuda_control_codes import Control, controls, decode
from tests.support.cuda_loop_measures import Turn

pytestmark = pytest.mark.compiles
needs_tools = pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS)


def test_control_codes_are_decoded():
    """Decodes the upper halves of instructions, as nvdisasm prints them with -hex."""
    none = Control(1, True, None, None, frozenset())
    assert decode(0x000FE20000000800) == none  # LDC R1, c[0x0][0x28]
    assert decode(0x000E220000002600) == Control(1, True, 0, None, frozenset())  # S2R
    assert decode(0x001FC800078E02FF) == Control(4, False, None, None, frozenset([0]))  # IMAD
    assert decode(0x004FC6000F8EC03F) == Control(3, False, None, None, frozenset([2]))  # ULEA
    stg = Control(1, True, None, 2, frozenset([5]))
    assert decode(0x0205E2000C101D04) == stg  # STG.E.128 desc[UR4][R18.64], R28
    assert decode(0x021FE400078E0010) == Control(2, True, None, None, frozenset([0, 5]))  # IMAD


def load(scoreboard):
    return (
        Instruction("LDG.E.128", "R4, desc[UR4][R2.64]"),
        Control(1, True, scoreboard, None, frozenset()),
    )


def use(*scoreboards):
    return Instruction("FADD", "R8, R8, R4"), Control(1, True, None, None, frozenset(scoreboards))


def depbar(scoreboard, may_fly):
    operands = f"SB{scoreboard}, {may_fly:#x}"
    return Instruction("DEPBAR.LE", operands), Control(1, True, None, None, frozenset())


# Name: a turn, the loads left in flight at its waits, the most in flight, and the waits in series.
TURNS = {
    "all before the first use": ([load(0), load(1), use(0), use(1)], 0, 2, 1),
    "one scoreboard for all": ([load(0), load(0), load(0), use(0)], 0, 3, 1),
    "one after the other": ([load(0), use(0), load(1), use(1)], 0, 1, 2),
    "the next turn's before the use": ([load(0), use(1), load(1), use(0)], 1, 2, 1),
    "the next turn's on one scoreboard": ([use(0), load(0), load(0)], 0, 2, 1),
    "two turns ahead": ([use(0), load(0), use(1), load(1), use(2), load(2)], 2, 3, 1),
    "a wait for nothing": ([load(0), use(3), use(0), use(0)], 0, 1, 1),
    "all but the last of a scoreboard": ([load(0), load(0), load(0), depbar(0, 2)], 2, 5, 1),
    "a packet is no data": (
        [(Instruction("LDG.E.128.STRONG.SYS", "R4, [R2.64]"), load(0)[1]), load(1), use(0), use(1)],
        *(0, 1, 1),
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_figures_of_turns(name):
    steps, left, most, in_series = TURNS[name]
    turn = Turn(steps)
    assert measures.loads_left_at_waits(turn) == left
    assert measures.most_loads_in_flight(turn) == most
    assert measures.waits_in_series(turn) == in_series


def test_a_load_that_nothing_waits_for_is_refused():
    with pytest.raises(AssertionError, match="nothing waits for it"):
        measures.loads_left_at_waits(Turn([(load(0)[0], use(0)[1])]))


def test_instructions_are_counted():
    names = ("LDG.E.128", "LDG.E.128", "FADD", "FCHK", "LD.E", "ST.E.128", "LDS.128", "BRA")
    loop = Loop(0, len(names), [Instruction(name, "R4, R2") for name in names])
    assert measures.instructions_per_load(loop) == 4
    assert measures.opcodes_in(loop, "FCHK", "BSSY") == 1
    assert measures.generic_accesses(loop) == ["LD.E", "ST.E.128"]


def test_a_call_of_a_label_is_a_branch():
    calls = ("`(.L_x_131) ", "`($__internal_2_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ")
    loop = Loop(0, 2, [Instruction("CALL.REL.NOINC", operand) for operand in calls])
    assert measures.opcodes_in(loop, "CALL") == measures.opcodes_in(loop, "BRA") == 1


# Kernels that sum sources. kAhead: the loads of the next turn precede the sums of this turn.
SUMS = """
struct Sources { const float4* at[8]; };
__device__ float4 load(const float4* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
template <int kSources, int kVectors>
__device__ void load_all(float4 (&v)[kVectors][kSources], const Sources& s, int i) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u)
#pragma unroll
    for (int w = 0; w < kSources; ++w) v[u][w] = load(s.at[w] + i + u * 512);
}
template <int kSources, int kVectors>
__device__ void add_all(float4 (&v)[kVectors][kSources], float4* out, int i) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int w = 1; w < kSources; ++w) add(v[u][0], v[u][w]);
    out[i + u * 512] = v[u][0];
  }
}
template <int kSources, int kVectors>
__device__ void sum(const Sources& s, float4* out, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 512 * kVectors) {
    float4 v[kVectors][kSources];
    load_all<kSources, kVectors>(v, s, i);
    add_all<kSources, kVectors>(v, out, i);
  }
}
template <int kSources, int kVectors>
__device__ void sum_ahead(const Sources& s, float4* out, int n) {
  constexpr int kStep = 512 * kVectors;
  float4 a[kVectors][kSources], b[kVectors][kSources];
  load_all<kSources, kVectors>(a, s, threadIdx.x);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 2 * kStep) {
    load_all<kSources, kVectors>(b, s, i + kStep);
    add_all<kSources, kVectors>(a, out, i);
    load_all<kSources, kVectors>(a, s, i + 2 * kStep);
    add_all<kSources, kVectors>(b, out, i + kStep);
  }
}
template <int kVectors>
__device__ void sum_in_series(const Sources& s, float4* out, int n, int world) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 512 * kVectors) {
    float4 v[kVectors] = {};
#pragma unroll 1
    for (int w = 0; w < world; ++w)
#pragma unroll
      for (int u = 0; u < kVectors; ++u) add(v[u], load(s.at[w] + i + u * 512));
#pragma unroll
    for (int u = 0; u < kVectors; ++u) out[i + u * 512] = v[u];
  }
}
#define KERNEL(name, call) \\
  extern "C" __global__ void __launch_bounds__(512, 1) \\
      name(Sources s, float4* out, int n, int w) { call; }
KERNEL(together, (sum<8, 1>(s, out, n)))
KERNEL(ahead, (sum_ahead<2, 4>(s, out, n)))
KERNEL(in_series, (sum_in_series<4>(s, out, n, w)))
"""


@pytest.fixture(scope="module", params=("sm_80", "sm_90a", "sm_100a"))
def sums(request):
    return compile_text(SUMS, request.param)


@needs_tools
class TestCompiled:
    def test_every_instruction_has_its_control_code(self, sums):
        """A loop's first use of a loaded value waits for the scoreboard that the load sets."""
        loop = measures.steady_loop(sums, "together")
        codes = controls(sums, "together")[loop.begin : loop.end]
        loads = [i for i, each in enumerate(loop.code) if measures.is_load(each)]
        assert len(loads) == 8
        for at in loads:
            filled = loop.code[at].loaded
            user = next(i for i in range(at + 1, len(codes)) if loop.code[i].sources & filled)
            raised = codes[at].write_scoreboard
            assert any(raised in codes[i].waits for i in range(at + 1, user + 1))

    def test_all_sources_of_a_turn_at_once(self, sums):
        loop = measures.steady_loop(sums, "together")
        turn = measures.turn(sums, "together", loop)
        assert measures.loads_left_at_waits(turn) == 0
        assert measures.waits_in_series(turn) == 1
        assert measures.kib_in_flight(sums, "together", turn) == 64
        # With more blocks per multiprocessor more loads are in flight, as far as registers allow.
        blocks = blocks_per_multiprocessor(sums, "together")
        assert measures.kib_in_flight(sums, "together", turn, most_blocks=2) == 128
        assert measures.kib_in_flight(sums, "together", turn, most_blocks=32) == 64 * blocks
        assert measures.instructions_per_load(loop) < 10

    def test_the_next_turn_ahead(self, sums, request):
        turn = measures.turn(sums, "ahead", measures.steady_loop(sums, "ahead"))
        assert measures.waits_in_series(turn) <= 1
        assert measures.kib_in_flight(sums, "ahead", turn) == 128
        # For sm_100a ptxas puts the first sums before the second loads.
        if request.node.callspec.params["sums"] != "sm_100a":
            assert measures.loads_left_at_waits(turn) >= 4

    def test_one_source_after_the_other(self, sums):
        inner = measures.steady_loop(sums, "in_series")
        turn = measures.turn(sums, "in_series", inner)
        assert measures.loads_left_at_waits(turn) == 0
        outer = measures.around(sums, "in_series", inner)
        for world in (2, 8):
            whole = measures.turn(sums, "in_series", outer, inner_turns=world)
            assert measures.waits_in_series(whole) == world

    def test_a_loop_that_is_not_there_is_said(self, sums):
        with pytest.raises(AssertionError, match="together: no such loop loads data"):
            measures.steady_loop(sums, "together", lambda loop: len(loop.code) > 1000)
