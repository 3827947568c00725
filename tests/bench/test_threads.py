# SPDX-License-Identifier: Apache-2.0
"""The threads of a bench's ranks: one number for all compared systems."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore

from ringcomm.bench.launch import RankInfo
from ringcomm.bench.run import BENCHES, Bench, Run, run_rank, take_cores
from tests.bench.test_options import bench_of
from tests.comm.test_threads import native

NO_RANKS = ("curves", "device_calls", "device_steps", "disk")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv("RINGCOMM_THREADS", "7")  # a value from outside must be ignored
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(("words", "threads"), [((), 1), (("--threads", "3"), 3)])
def test_torch_and_every_communicator_have_the_threads(
    words: tuple[str, ...], threads: int
) -> None:
    found: list[int] = []

    def measure(run: Run) -> None:
        comm = run.connect()
        of_group = torch.distributed.group.WORLD.communicator
        found.append(torch.get_num_threads())
        found.extend(native(each).threads for each in (comm, of_group))

    bench = Bench("of threads", "", measure)
    assert run_rank(bench, bench.parse(words), RankInfo(0, 1, HashStore()), words) == 0
    assert found == [threads] * 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("rank", "threads"), [(0, 1), (1, 1), (0, 2)])
def test_a_pinned_rank_has_a_core_for_each_thread(rank: int, threads: int) -> None:
    usual = sorted(os.sched_getaffinity(0))
    take_cores(Bench("of cores", "", print).parse(["--pin", "--threads", str(threads)]), rank)
    first = rank * threads
    wanted = {usual[(first + i) % len(usual)] for i in range(threads)}
    assert os.sched_getaffinity(0) == wanted
    assert len(wanted) == threads


@pytest.mark.parametrize("name", [name for name in BENCHES if name not in NO_RANKS])
def test_every_bench_of_ranks_has_the_option_once(name: str) -> None:
    actions = bench_of(name).build_parser()._actions
    assert [each.default for each in actions if "--threads" in each.option_strings] == [1]
