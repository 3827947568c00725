# SPDX-License-Identifier: Apache-2.0
"""The loops of the optimizer's kernels hide the latency of all sources at once.

``make test`` compiles the step of two ranks; ``make cuda-compile`` the kernels of more ranks and of
norms too, for each architecture.
"""

import os
import re

import pytest

from tests.support import cuda_code
from tests.support.cuda_code import compile_text, unit_source
from tests.support.cuda_optimizer_bars import (
    MANY,
    PAIR,
    PAIR_OF_SM100,
    STEP_REGISTERS,
    STEP_REGISTERS_OF_SM100,
    norm_loops,
    step_loop,
)

EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
TARGETS = ("sm_90a", "sm_80", "sm_100a") if EVERYTHING else ("sm_90a",)

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS),
]
only_in_everything = pytest.mark.skipif(not EVERYTHING, reason="make cuda-compile")


def compiled(unit, target="sm_90a", changes=()):
    """Compiles a unit with changed headers; ``changes`` holds header, pattern and replacement."""
    text, headers, macros = unit_source(unit)
    for header, pattern, instead in changes:
        headers[header], count = re.subn(pattern, instead, headers[header])
        assert count == 1, (header, pattern)
    return compile_text(text, target, headers, macros)


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_of_two_ranks(target):
    binary = compiled("adamw_bfloat16/step_bfloat16", target)
    name = "rc_adamw_step_bfloat16"
    of_sm100 = target == "sm_100a"
    assert step_loop(binary, name, PAIR_OF_SM100 if of_sm100 else PAIR) == []
    most = STEP_REGISTERS_OF_SM100 if of_sm100 else STEP_REGISTERS
    assert (binary.resources[name].registers or 0) <= most
    # A loop that exceeds a bar is reported.
    lower = type(PAIR)(PAIR.loads, 1000, 100)
    assert len(step_loop(binary, name, lower)) == 2
    assert step_loop(binary, name, type(PAIR)(3, 0, 1000)) != []


@only_in_everything
@pytest.mark.parametrize("target", TARGETS)
def test_a_step_of_eight_ranks(target):
    binary = compiled("adamw_bfloat16/many_bfloat16", target)
    assert step_loop(binary, "rc_adamw_many_bfloat16", MANY) == []


@only_in_everything
@pytest.mark.parametrize("target", TARGETS)
def test_norms(target):
    binary = compiled("adamw_bfloat16/norm", target)
    assert norm_loops(binary, "rc_reduce_scatter_norm", 64, blocks=1) == []
    assert norm_loops(binary, "rc_grad_norm", 64, blocks=2) == []
    assert norm_loops(binary, "rc_grad_norm", 64, blocks=1) != []


@only_in_everything
def test_loads_that_are_not_held_together_are_noticed():
    """The mutant: ptxas puts some loads behind the first uses of other loads."""
    apart = ("kernels/cuda/grad_sum.h", r"return any & misalignment\(vector\);", "return 0;")
    binary = compiled("adamw_bfloat16/step_bfloat16", changes=[apart])
    assert any("waits" in each for each in step_loop(binary, "rc_adamw_step_bfloat16", PAIR))


@only_in_everything
def test_a_turn_of_one_tile_is_noticed():
    """The mutant: a lane of the norm's loop has only two loads in flight."""
    one = ("kernels/cuda/norm_lanes.h", r"kLoads < 8 \? \(8 \+ kLoads - 1\) / kLoads : 1", "1")
    binary = compiled("adamw_bfloat16/norm", changes=[one])
    assert norm_loops(binary, "rc_grad_norm", 64, blocks=2) != []


@only_in_everything
def test_divisions_are_noticed():
    """The mutant: a quotient by the compiler's own division."""
    change = (
        "kernels/cuda/update_rules.h",
        r"quotient\(numerator, denom, reciprocal\(denom\)\)",
        "numerator / denom",
    )
    binary = compiled("adamw_bfloat16/step_bfloat16", changes=[change])
    assert any("FCHK" in each for each in step_loop(binary, "rc_adamw_step_bfloat16", PAIR))
