# SPDX-License-Identifier: Apache-2.0
"""Turns that an optimizer's common loop refuses get exact updates (refused_turns_test.cpp)."""

import os

import pytest

from tests.optim.header_mutants import run_program, write_mutant
from tests.support.compiler import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
HEADER = "kernels/cuda/adamw_lanes.h"


def test_they_have_the_bits_of_single_updates(tmp_path):
    done = run_program("refused_turns_test", tmp_path)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout


# Each replaces a text of the header. "more turns than bits": the leading 1 leaves the word.
MUTANTS = {
    "no turn is refused": (
        "refused = refused + refused + uint32_t(!turn(at));",
        "refused = refused + refused, turn(at);",
    ),
    "more turns than bits": ("kAtOnce = 31;", "kAtOnce = 32;"),
    "the turn after the refused one": (
        "uint64_t(log2_of(refused)) * stride;",
        "uint64_t(log2_of(refused) + 1) * stride;",
    ),
    "bits in the other order": ("at -= stride;\n      from = at", "from = at, at -= stride"),
    "turns are counted wrongly": (
        "w.step.turns + LaneTurns::kAtOnce;",
        "w.step.turns + LaneTurns::kAtOnce + 1;",
    ),
    "refused turns store": ("held_m.store_if(!odd,", "held_m.store_if(true,"),
    "no tail": ("bool tail = active && last;", "bool tail = false;"),
}


@pytest.mark.parametrize("name", MUTANTS if EVERYTHING else ["no turn is refused"])
def test_a_mutant_is_noticed(tmp_path, name):
    text, instead = MUTANTS[name]
    write_mutant(tmp_path, HEADER, text, instead)
    done = run_program("refused_turns_test", tmp_path, tmp_path)
    assert done.returncode != 0
