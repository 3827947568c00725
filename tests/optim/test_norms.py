# SPDX-License-Identifier: Apache-2.0
"""Norms that do not depend on the order of summation: a warp's sums, and exact addition."""

import subprocess

from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to

pytestmark = NEEDS_COMPILER
HEADER = "kernels/cuda/warp_sum.h"


def run(folder, include=ROOT):
    program = compile_to(
        folder / "norm_test",
        ROOT / "kernels/include",
        ROOT / "tests/optim/norm_test.cpp",
        flags=OPTIMISED,
        extra=(f"-I{include}",),
    )
    return subprocess.run([str(program)], capture_output=True, text=True, check=False)


def test_every_order_gives_the_same(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout


def test_another_order_is_noticed(tmp_path):
    mutant = tmp_path / HEADER
    mutant.parent.mkdir(parents=True)
    text = (ROOT / HEADER).read_text()
    swapped = text.replace("share_sums<8>(warp, x, 4);", "share_sums<8>(warp, x, 0);")
    assert swapped != text
    mutant.write_text(swapped.replace("exchange(sum, 1);", "exchange(sum, 4);", 1))
    assert run(tmp_path, tmp_path).returncode != 0
