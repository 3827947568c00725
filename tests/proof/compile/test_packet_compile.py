# SPDX-License-Identifier: Apache-2.0
"""The kernels of packets are short, since fetching their code adds to a call's latency.

Code for unaligned words, long waits and reports of faults is in functions behind the kernel.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ringcomm.cuda import units
from tests.support import ROOT, cuda_code
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to
from tests.support.cuda_code import Kernel, compile_text, packets_source

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS),
]

EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
# Most instructions of the kernel itself, and of the kernel with its functions.
MOST, MOST_IN_ALL = 1500, 2300
# A word of a narrow type holds several numbers, each scaled, added and rounded by itself.
NARROW = {"reduce_int8/sum": 2100, "reduce_float16/min": 1900}
SOME = {"reduce_float32/sum": MOST, "move/ll_move": MOST}
MORE = {"reduce_bfloat16/sum": MOST, "reduce_float64/sum": MOST, "reduce_int64/sum": MOST, **NARROW}
# For sm_100a ptxas makes 1,511 instructions of bfloat16's kernel, and 2,336 with its functions.
LONGER = {("reduce_bfloat16/sum", "sm_100a"): 1540}
TARGETS = ("sm_80", "sm_90a", "sm_100a") if EVERYTHING else ("sm_90a",)


def packets_kernel(unit: str, target: str, loops: str = units.BATCHED) -> Kernel:
    """Compiles the packet kernel of a subunit."""
    text, headers, macros = packets_source(unit, loops)
    (kernel,) = compile_text(text, target, headers, macros).kernels.values()
    return kernel


def own_instructions(kernel: Kernel) -> int:
    """Returns the kernel's number of instructions without the functions behind it."""
    functions = [at for label, at in kernel.labels.items() if label.startswith("$")]
    return min(functions, default=len(kernel.instructions))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("unit", "most"), {**SOME, **(MORE if EVERYTHING else {})}.items())
def test_a_call_is_short(unit: str, most: int, target: str) -> None:
    kernel = packets_kernel(unit, target)
    most = LONGER.get((unit, target), most)
    assert own_instructions(kernel) <= most
    assert len(kernel.instructions) <= most + MOST_IN_ALL - MOST


def test_the_serial_kernel_is_not() -> None:
    kernel = packets_kernel("reduce_float32/sum", "sm_90a", units.SERIAL)
    assert own_instructions(kernel) > 2 * MOST


@NEEDS_COMPILER
def test_means_are_rounded_as_divisions_round_them(tmp_path: Path) -> None:
    source = Path(__file__).parent / "quotients.cpp"
    include = ROOT / "kernels/include"
    program = compile_to(tmp_path / "quotients", include, source, flags=OPTIMISED)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    differ, first_differ = map(int, done.stdout.split())
    assert differ == 0 < first_differ
