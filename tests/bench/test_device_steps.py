# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step on a GPU as the harness times it, as far as a host can run it."""

import os
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from ringcomm.bench.device_steps import (
    BENCH,
    COPY,
    OLDER,
    SEPARATE,
    SHARD,
    STEP,
    SUBJECT,
    TORCH,
    TWO_PASSES,
    KernelCase,
    Systems,
    case_rows,
    fitting,
    run_case,
)
from ringcomm.bench.launch import RankInfo
from ringcomm.bench.run import Run, main
from ringcomm.bench.timing import Device, Timing

ELEMS = 8192
STEPS = 3


def stepped(case):
    """Returns all ranks' parameters after some steps, by system."""
    systems = Systems(case, Device())
    try:
        for call in systems.calls.values():
            for _ in range(STEPS - 1):  # building the systems made one
                call()
        return {name: [each.clone() for each in params] for name, params in systems.params.items()}
    finally:
        systems.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_all_systems_do_the_same_step(dtype, world):
    params = stepped(KernelCase(STEP, dtype, ELEMS, world))
    assert list(params) == [SUBJECT, OLDER, TWO_PASSES, SEPARATE, TORCH]
    first = params[SUBJECT][0]
    for name, of_ranks in params.items():
        assert len(of_ranks) == world
        assert all(torch.equal(each, of_ranks[0]) for each in of_ranks), name
        # Separate kernels and torch round 16-bit sums, and torch sums in another order.
        close = 0.0 if name in (OLDER, TWO_PASSES) else 2e-6 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(of_ranks[0], first, rtol=close, atol=close, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_updated_as_torch_does(dtype):
    params = stepped(KernelCase(SHARD, dtype, ELEMS))
    assert list(params) == [SUBJECT, OLDER, TORCH, COPY]
    close = 2e-7 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(params[SUBJECT][0], params[TORCH][0], rtol=close, atol=close)


def test_rows_of_a_run():
    run = Run(BENCH, BENCH.parse(["step", "-r", "2"]), RankInfo(0, 1, HashStore()))
    case = KernelCase(STEP, torch.bfloat16, ELEMS, 2)
    rows = run_case(case, Device(), partial(run.time, batch=3))
    assert [row.system for row in rows] == [SUBJECT, OLDER, TWO_PASSES, SEPARATE, TORCH]
    assert {(row.ranks, row.count, row.rounds, row.batch) for row in rows} == {(2, ELEMS, 2, 3)}
    assert rows[0].ratio == 1.0 and all(row.ratio and row.note == "" for row in rows)
    assert [row.wrong for row in rows] == [None, 0, None, None, None]


def test_the_older_loops_are_asked_for_and_compared(monkeypatch):
    """A system uses the loops of the variable at its first step, which looks up its kernels."""
    asked = []
    ranks = Systems._ranks

    def build(systems, options, name):
        asked.append((name, os.environ.get("RINGCOMM_KERNELS")))
        step = ranks(systems, options, name)
        if name == OLDER:
            systems.params[name][1][3:5] += 1.0

        def call():
            asked.append((name, os.environ.get("RINGCOMM_KERNELS")))
            return step()

        return call

    monkeypatch.delenv("RINGCOMM_KERNELS", raising=False)
    monkeypatch.setattr(Systems, "_ranks", build)
    systems = Systems(KernelCase(STEP, torch.float32, ELEMS, 2), Device())
    try:
        assert systems.wrong_elems == 2
        for call in systems.calls.values():
            call()
    finally:
        systems.close()
    of_ours = [(SUBJECT, None), (OLDER, "serial"), (TWO_PASSES, None)]
    assert asked == [*of_ours, *of_ours]
    assert "RINGCOMM_KERNELS" not in os.environ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bandwidth_counts_28_bytes_per_parameter(dtype):
    case = KernelCase(SHARD, dtype, 1000)
    timings = {SUBJECT: Timing((28.0, 28.0), 1), COPY: Timing((14.0, 21.0), 1)}
    ours, copy = case_rows(case, timings, "why")
    assert case.bytes_per_parameter == 28
    assert (ours.algbw_gbps, ours.ratio, ours.note) == (1.0, 1.0, "why")
    assert copy.ratio == pytest.approx(0.625)


def test_the_size_follows_the_memory():
    case = KernelCase(STEP, torch.bfloat16, 256 << 20, 8)
    assert fitting(case, 139 << 30) is case
    smaller = fitting(case, 40 << 30)
    assert smaller.elems in (64 << 20, 128 << 20) and smaller.world == 8
    with pytest.raises(RuntimeError, match="too few"):
        fitting(case, 1 << 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(BENCH, ["shard"]) == 2
    assert "sees no usable CUDA device" in capsys.readouterr().err
