# SPDX-License-Identifier: Apache-2.0
"""The kernels' branch-free quotients and roots round as IEEE's do (see quotients_test.cpp)."""

import os

import pytest

from tests.optim.header_mutants import run_program, write_mutant
from tests.support.compiler import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
# `make test` tests one of this many mantissas of divisors; there are 2^23.
EVERY = 1 if EVERYTHING else 512
QUOTIENTS, RULES = "kernels/cuda/quotients.h", "kernels/cuda/update_rules.h"


def test_they_are_correctly_rounded(tmp_path):
    done = run_program("quotients_test", tmp_path, arguments=[str(EVERY)])
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout


MUTANTS = {
    "no correction of a quotient": (
        QUOTIENTS,
        "fused_multiply_add(fused_multiply_add(near, b, -a), -inverse, near)",
        "near",
    ),
    "no correction of a reciprocal": (
        QUOTIENTS,
        "fused_multiply_add(near, fused_multiply_add(-b, near, 1.0f), near)",
        "near",
    ),
    "no correction of a root": (
        QUOTIENTS,
        "fused_multiply_add(fused_multiply_add(-near, near, x), half, near)",
        "near + 0 * half",
    ),
    "a root of zero": (RULES, "0x1p64f, 0x1p-126f)", "0x1p64f, 0.0f)"),
    "any numerator": (RULES, "odd |= is_below(numerator, 0x1p-90f);", ""),
    "zero is no numerator": (QUOTIENTS, "> 0 - bound", ">= 0 - bound"),
    "any result": (RULES, "odd |= !is_finite(result);", ""),
    "any divisor": (RULES, "f.bias_correction2_sqrt >= 0x1p-12f &&", ""),
    "any eps": (RULES, "f.eps >= 0x1p-58f &&", ""),
}


@pytest.mark.parametrize("name", MUTANTS if EVERYTHING else ["any numerator"])
def test_a_mutant_is_noticed(tmp_path, name):
    header, text, instead = MUTANTS[name]
    write_mutant(tmp_path, header, text, instead)
    done = run_program("quotients_test", tmp_path, tmp_path, arguments=[str(EVERY)])
    assert done.returncode != 0
