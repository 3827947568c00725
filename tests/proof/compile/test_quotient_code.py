# SPDX-License-Identifier: Apache-2.0
"""The quotients and roots of the optimizer's kernels are the same operations as the compiler's own.

NVIDIA documents bounds on the errors of ``rcp.approx`` and ``rsqrt.approx``, and a few results
within these bounds would round to another quotient or root (tests/optim/test_quotients.py). The
compiler's division and square root are correctly rounded on every GPU, and their fast paths begin
with the same approximations. Equal operations on equal approximations have equal results.

The test reads the machine code of both, and compares the expressions. The sign of a product is
moved out of a fused multiply-add, since rounding to nearest is symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from ringcomm.cuda import units
from tests.support import cuda_code
from tests.support.cuda_code import Instruction, compile_text

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS),
]

TARGETS = ("sm_80", "sm_90a", "sm_100a")
KERNELS = """
#include "kernels/cuda/quotients.h"
using namespace ringcomm::device;
extern "C" __global__ void library_quotient(float* out, const float* a, const float* b) {
  out[0] = a[0] / b[0];
}
extern "C" __global__ void library_root(float* out, const float* a, const float*) {
  out[0] = sqrtf(a[0]);
}
extern "C" __global__ void own_quotient(float* out, const float* a, const float* b) {
  const float divisor = b[0];
  out[0] = quotient(a[0], divisor, reciprocal(divisor));
}
extern "C" __global__ void own_root(float* out, const float* a, const float*) {
  out[0] = root(a[0]);
}
"""
# The mutant: a quotient without the step that corrects it.
UNCORRECTED = (
    "  return fused_multiply_add(fused_multiply_add(near, b, -a), -inverse, near);\n",
    "  return near;\n",
)
OPERAND = re.compile(r"(-?)\|?(?:(R\d+)|([\d.]+)|(RZ))(?:\.reuse)?\|?")

# A sign, and an operation with its operands.
Expression = tuple[int, tuple[object, ...]]


def operand(text: str, values: Mapping[str, Expression]) -> Expression:
    """Returns the expression in a register or a constant of an instruction."""
    match = OPERAND.fullmatch(text.strip())
    assert match, text
    sign, tree = (1, ("constant", match[3] or "0")) if not match[2] else values[match[2]]
    return (-sign if match[1] else sign), tree


def product_of(a: Expression, b: Expression) -> Expression:
    return a[0] * b[0], ("product", *sorted((a[1], b[1]), key=repr))


def fused(a: Expression, b: Expression, c: Expression) -> Expression:
    """Returns the expression a * b + c with a positive product, and the sign outside of it."""
    if c[1] == ("constant", "0"):
        return product_of(a, b)
    sign, (_, *factors) = product_of(a, b)
    return sign, ("sum", *factors, c[0] * sign, c[1])


def stored(code: Sequence[Instruction]) -> Expression:
    """Returns the expression that a kernel stores on its fast path.

    Both inputs are the results of loads, in the order of their addresses. The function follows the
    branches as compilers lay out these kernels: the slow path is a call, whose result the function
    ignores.
    """
    values: dict[str, Expression] = {}
    inputs: dict[str, tuple[object, ...]] = {}
    for instruction in code:
        kind, words = instruction.opcode.split(".")[0], instruction.operands.split(", ")
        if kind == "LDG":
            values[words[0]] = 1, ("input", len(inputs))
            inputs[words[0]] = values[words[0]][1]
        elif kind == "MUFU":
            values[words[0]] = 1, (instruction.opcode, operand(words[1], values))
        elif kind == "FMUL":
            values[words[0]] = product_of(operand(words[1], values), operand(words[2], values))
        elif kind == "FFMA":
            a, b, c = (operand(word, values) for word in words[1:4])
            values[words[0]] = fused(a, b, c)
        elif kind == "STG":
            return values[words[-1].strip()]
    raise AssertionError("the kernel stores nothing")


def expressions(target: str, slip: tuple[str, str] | None = None) -> dict[str, str]:
    source = units.read_source(units.source_root(), units.UNITS["adamw_bfloat16"])
    headers = dict(source.headers)
    if slip:
        name = "kernels/cuda/quotients.h"
        assert slip[0] in headers[name]
        headers[name] = headers[name].replace(*slip)
    made = compile_text(KERNELS, target, headers).kernels
    return {name: repr(stored(kernel.instructions)) for name, kernel in made.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_quotients_and_roots_are_the_compilers_own(target):
    found = expressions(target)
    assert found["own_quotient"] == found["library_quotient"]
    assert found["own_root"] == found["library_root"]


def test_a_missing_correction_is_noticed():
    found = expressions("sm_90a", UNCORRECTED)
    assert found["own_quotient"] != found["library_quotient"]
