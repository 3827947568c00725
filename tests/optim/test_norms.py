"""Norms that depend on no order: a warp's sums, and exact addition."""

import subprocess

import pytest

from tests.proof.races.test_races import COMPILER, ROOT

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
HEADER = "kernels/cuda/warp_sum.h"


def run(folder, include=ROOT):
    program = folder / "norm_test"
    command = [str(COMPILER), "-std=c++20", "-O1", "-ffp-contract=off", f"-I{include}", f"-I{ROOT}"]
    command += [f"-I{ROOT / 'kernels/include'}", str(ROOT / "tests/optim/norm_test.cpp")]
    made = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-4000:]
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
