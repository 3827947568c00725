# SPDX-License-Identifier: Apache-2.0
"""The checks of CUDA machine code accept a right kernel, and reject each kind of wrong kernel."""

import os
from dataclasses import dataclass, replace

import pytest

from tests.support import cuda_checks as checks
from tests.support import cuda_code
from tests.support.cuda_code import compile_text

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS),
]

# Waits, copies, reduces three sources, publishes, and sends an LL packet.
RIGHT = """
constexpr int kCopies = 4, kSums = 4;
__device__ float4 load(const float4* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ void store(float4* p, float4 v) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

extern "C" __global__ void __launch_bounds__(256) k(const float4* a, const float4* b, float4* c,
                                                    unsigned* w, ulonglong2* packets, int n) {
  unsigned seen;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(w) : "memory");
  } while (seen == 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 256 * kCopies) {
    float4 x[kCopies];
#pragma unroll
    for (int u = 0; u < kCopies; ++u) x[u] = load(a + i + u * 256);
#pragma unroll
    for (int u = 0; u < kCopies; ++u) store(c + i + u * 256, x[u]);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 256 * kSums) {
    float4 sum[kSums] = {};
#pragma unroll 1
    for (int s = 0; s < n; ++s) {
      float4 y[kSums];
#pragma unroll
      for (int u = 0; u < kSums; ++u) y[u] = load(b + i + u * 256 + s * n);
#pragma unroll
      for (int u = 0; u < kSums; ++u) add(sum[u], y[u]);
    }
#pragma unroll
    for (int u = 0; u < kSums; ++u) store(c + i + u * 256, sum[u]);
  }
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(w), "r"(seen) : "memory");
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 256) {
    unsigned long long p, q;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(p), "=l"(q) : "l"(packets + i) : "memory");
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                 :: "l"(packets + n + i), "l"(p), "l"(q) : "memory");
  }
}
"""

BEGIN = "  unsigned seen;"
COUNTS = "constexpr int kCopies = 4, kSums = 4;"
LOAD = "ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
STORE = "st.global.v4.f32 [%0], {%1, %2, %3, %4};"
COPY = "store(c + i + u * 256, x[u]);"
LOAD_PACKET = "ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
STORE_PACKET = "st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
TABLE = " unsigned table[64]; for (int j = 0; j < 64; ++j) table[j] = w[j]; w[table[n] & 63] = 1;"
MANY = " struct Many { char bytes[648]; };"
NARROW_SCOPE = "is not of system scope"


@dataclass(frozen=True)
class Wrong:
    """A kernel with ``new`` for ``old``, ``new2`` for ``old2``: ``rule`` says ``words`` of it."""

    rule: str
    words: str
    old: str
    new: str
    old2: str = ""
    new2: str = ""


WRONG = {
    "a table in local memory": Wrong("local_memory", "a table", BEGIN, BEGIN + TABLE),
    "too few registers": Wrong(
        "local_memory", "in a loop", "bounds__(256)", "bounds__(1024, 2)", "kSums = 4", "kSums = 16"
    ),
    "no bound": Wrong("launch_bounds", "no launch bound", "__launch_bounds__(256)", ""),
    "many parameters": Wrong(
        "parameters", "692 bytes", "int n)", "int n, Many many)", COUNTS, COUNTS + MANY
    ),
    "acquire of the GPU": Wrong("memory_orders", NARROW_SCOPE, "ld.acquire.sys", "ld.acquire.gpu"),
    "release of the GPU": Wrong("memory_orders", NARROW_SCOPE, "st.release.sys", "st.release.gpu"),
    "packet of the GPU": Wrong(
        "memory_orders", NARROW_SCOPE, LOAD_PACKET, LOAD_PACKET.replace("sys", "gpu")
    ),
    "fence of the GPU": Wrong("memory_orders", NARROW_SCOPE, BEGIN, BEGIN + " __threadfence();"),
    "atomic of the GPU": Wrong("memory_orders", NARROW_SCOPE, BEGIN, BEGIN + " atomicAdd(w, 1);"),
    "read-only load": Wrong(
        "memory_orders", "reads past", LOAD, LOAD.replace("ld.global", "ld.global.nc")
    ),
    "volatile": Wrong(
        "memory_orders", "no order", BEGIN, BEGIN + " while (*(volatile unsigned*)w == 7) {}"
    ),
    "no acquire": Wrong("protocol", "no ld.acquire.sys", "ld.acquire.sys", "ld.relaxed.sys"),
    "no release": Wrong("protocol", "no st.release.sys", "st.release.sys", "st.relaxed.sys"),
    "one copy at a time": Wrong("copy_loop", "no loop copies", "kCopies = 4", "kCopies = 1"),
    "copies of 8 bytes": Wrong(
        "copy_loop",
        "no loop copies",
        LOAD,
        "ld.global.v2.f32 {%0, %1}, [%4]; ld.global.v2.f32 {%2, %3}, [%4+8];",
    ),
    "stores of 8 bytes": Wrong(
        "copy_loop",
        "no loop copies",
        STORE,
        "st.global.v2.f32 [%0], {%1, %2}; st.global.v2.f32 [%0+8], {%3, %4};",
    ),
    "a small store among the copies": Wrong(
        "copy_loop",
        "no loop copies",
        COPY,
        COPY + ' asm volatile("st.global.u32 [%0], %1;" :: "l"(w), "r"(i));',
    ),
    "one sum at a time": Wrong("reduce_loop", "no loop adds up", "kSums = 4", "kSums = 1"),
    "no sum": Wrong("reduce_loop", "no loop adds up", "add(sum[u], y[u])", "sum[u] = y[u]"),
    "small results": Wrong(
        "reduce_loop",
        "no loop stores",
        "store(c + i + u * 256, sum[u])",
        "c[i + u * 256].x = sum[u].x + sum[u].y + sum[u].z + sum[u].w",
    ),
    "a division in a loop": Wrong(
        "long_divisions", "a loop calls", COPY, COPY + " w[1] = packets[0].x / (packets[1].x | 1);"
    ),
    "a division in a function that a loop calls": Wrong(
        "long_divisions",
        "a loop calls $wrong",
        COPY,
        COPY + " w[1] = quotient(packets[0].x, packets[1].x);",
        COUNTS,
        COUNTS + " __device__ __noinline__ unsigned quotient(size_t a, size_t b) { return a / b; }",
    ),
    "a packet in two loads": Wrong(
        "ll_protocol",
        "no ld.relaxed.sys.global.v2.u64",
        LOAD_PACKET,
        "ld.relaxed.sys.global.u64 %0, [%2]; ld.relaxed.sys.global.u64 %1, [%2+8];",
    ),
    "a packet in two stores": Wrong(
        "ll_protocol",
        "no st.relaxed.sys.global.v2.u64",
        STORE_PACKET,
        "st.relaxed.sys.global.u64 [%0], %1; st.relaxed.sys.global.u64 [%0+8], %2;",
    ),
}

# Each rule takes a binary with one kernel, and the kernel's name.
RULES = {
    "local_memory": lambda binary, _: checks.local_memory(binary),
    "launch_bounds": lambda binary, _: checks.launch_bounds(binary),
    "parameters": lambda binary, _: checks.parameters(binary),
    "memory_orders": lambda binary, _: checks.memory_orders(binary),
    "protocol": checks.protocol,
    "ll_protocol": checks.ll_protocol,
    "long_divisions": lambda binary, name: checks.long_divisions(binary.kernels[name]),
    "copy_loop": lambda binary, name: checks.copy_loop(binary.kernels[name]),
    "reduce_loop": lambda binary, name: checks.reduce_loop(binary.kernels[name]),
}
TARGETS = ("sm_80", "sm_90a", "sm_100a")
# ``make test`` accepts the right kernel for all targets; ``make cuda-compile`` also rejects the
# wrong ones for all.
EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_right_is_accepted(target):
    binary = compile_text(RIGHT, target)
    assert {name: rule(binary, "k") for name, rule in RULES.items()} == {name: [] for name in RULES}


def kernel_of(wrong):
    return f"wrong_{list(WRONG).index(wrong)}"


def text_of(wrong):
    """Returns the text of a wrong kernel, in a namespace of its own."""
    case = WRONG[wrong]
    assert RIGHT.count(case.old) == 1
    assert not case.old2 or RIGHT.count(case.old2) == 1
    text = RIGHT.replace(case.old, case.new)
    text = text.replace(case.old2, case.new2) if case.old2 else text
    name = kernel_of(wrong)
    return f"namespace of_{name} {{\n{text.replace(' k(', f' {name}(')}\n}}\n"


@pytest.fixture(scope="module", params=TARGETS if EVERYTHING else ["sm_90a"])
def all_wrong(request):
    """All wrong kernels in one binary: reading a binary takes longer than compiling all kernels."""
    return compile_text("".join(map(text_of, WRONG)), request.param)


@dataclass(frozen=True)
class Alone:
    """The parts of a binary that the rules read for one kernel and the functions that it calls."""

    whole: cuda_code.Binary
    name: str

    @property
    def functions(self):
        return self.whole.reachable(self.name)

    def reachable(self, kernel):
        return self.whole.reachable(kernel)

    @property
    def resources(self):
        return {name: self.whole.resources[name] for name in self.functions}

    @property
    def thread_bounds(self):
        return {self.name: self.whole.thread_bounds[self.name]}

    @property
    def params_bytes(self):
        return {self.name: self.whole.params_bytes[self.name]}

    @property
    def kernels(self):
        return {self.name: self.whole.kernels[self.name]}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_rejected(wrong, all_wrong):
    case, name = WRONG[wrong], kernel_of(wrong)
    found = RULES[case.rule](Alone(all_wrong, name), name)
    assert any(case.words in each for each in found), found


def test_too_many_registers_are_rejected():
    """ptxas obeys a kernel's bound, so the test edits the number of registers in ptxas's log."""
    binary = compile_text(RIGHT, "sm_90a")
    wrong = replace(binary, ptx=binary.ptx.replace(".maxntid 256", ".maxntid 1024"))
    used = binary.resources["k"].registers
    wrong = replace(wrong, log=wrong.log.replace(f"Used {used} registers", "Used 65 registers"))
    assert checks.launch_bounds(wrong) == ["k: 65 registers for 1024 threads"]


def test_what_does_not_compile_is_said():
    with pytest.raises(AssertionError, match='identifier "no_such_name" is undefined'):
        compile_text("int x = no_such_name;", "sm_90a")
