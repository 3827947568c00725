# SPDX-License-Identifier: Apache-2.0
"""The host's cost of calls, as the harness times it on a stub driver that does nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

import ringcomm
from ringcomm import cuda
from ringcomm.bench import device_calls
from ringcomm.bench.device_calls import (
    ASYNC,
    BENCH,
    DRIVER_CALL,
    DRIVER_CALLS,
    HOST,
    PARAMETER_BYTES,
    SYNC,
    TOGETHER,
    TORCH,
    calls_of,
    driver_costs,
)
from ringcomm.bench.launch import LaunchError, RankInfo
from ringcomm.bench.report import read
from ringcomm.bench.run import Run, main
from ringcomm.bench.timing import Device, HostClock
from ringcomm.memory import device_heap
from tests.bench.stand_ins import StandInGpu
from tests.support.stub_driver import COMPILER, StubDriver, StubRuntime, driver
from tests.support.stub_driver.cost import driver_calls_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stub needs a C++ compiler")


@pytest.fixture(scope="module")
def runtime() -> Iterator[StubRuntime]:
    stub = StubRuntime()
    before = cuda.use(stub)
    yield stub
    device_heap.close_heaps()
    cuda.use(before)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    """Replaces CUDA's driver and runtime by the stub."""
    monkeypatch.setattr(device_calls, "libraries", lambda: (driver().path, driver().path))
    return driver()


def test_each_entry_point_is_called_as_often_as_it_is_timed(stub):
    calls, rounds = 7, 3
    stub.reset()
    timings = driver_costs(calls, rounds)
    assert tuple(timings) == DRIVER_CALLS
    for each in timings.values():
        assert each.batch == calls and len(each.times_us) == rounds
        assert all(0 < time_us < 1e5 for time_us in each.times_us)
    turns = calls * (rounds + 1)  # one warms up
    assert stub.counted() == {
        "launch": len(PARAMETER_BYTES) * turns + 1,  # one launch of the graph itself
        "create": 1,
        "record": turns + 1,  # for the other stream to wait for
        **dict.fromkeys(("wait", "is_capturing", "graph_launch"), turns),
        "set_device": turns + 1,  # once for the thread
    }


def test_what_the_driver_refuses_is_said(stub, monkeypatch):
    stub.reset()
    stub.refuse(719)
    with pytest.raises(LaunchError, match="the driver: cuEventRecord: error 719"):
        driver_costs(1, 1)
    monkeypatch.setattr(device_calls, "libraries", lambda: ("libnothing.so.1", driver().path))
    with pytest.raises(LaunchError, match=r"the driver: libnothing\.so\.1"):
        driver_costs(1, 1)
    device_calls._compiled.cache_clear()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(LaunchError, match=r"false does not compile driver_costs\.cpp"):
        driver_costs(1, 1)


def test_the_calls_are_those_of_their_names(runtime):
    """Counts driver calls, so that no row can have the time of another call."""
    entered = {}
    for ranks in (1, 2):
        with ringcomm.local_world(ranks, device="cuda:0") as world:
            for name, call in calls_of(world, StandInGpu()).items():
                call()
                entered[name] = driver_calls_of(driver(), call)
    assert all(count["launch"] == 1 for count in entered.values())
    assert "record" not in entered["all_reduce", SYNC]
    assert {"record", "wait"} < entered["all_reduce", ASYNC].keys()
    assert ("all_gather", TOGETHER) in entered


class Stepping(Device):
    """Records when the host waits for it."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(lambda: events.append("synchronize"))


def test_the_hosts_time_ends_when_the_calls_have_returned(monkeypatch):
    events: list[str] = []
    times = iter([1000, 4000])

    def clock():
        events.append("clock")
        return next(times)

    monkeypatch.setattr("ringcomm.bench.timing.time.perf_counter_ns", clock)
    took_us = HostClock(Stepping(events)).elapsed_us([lambda: events.append("call")] * 2)
    assert took_us == 3.0
    assert events == ["synchronize", "clock", "call", "call", "clock", "synchronize"]


def test_the_rows_are_beside_torchs(stub, runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(device_calls, "CudaDevice", lambda index: StandInGpu())
    file = tmp_path / "rows.json"
    words = ["--calls", "2", "-r", "2", "--json", str(file)]
    run = Run(BENCH, BENCH.parse(words), RankInfo(0, 1, HashStore()), words)
    seen = []
    add = run.add

    def added(rows, table):
        add(rows, table)
        seen.append(len(read(file).rows))  # each row is written immediately

    monkeypatch.setattr(run, "add", added)
    BENCH.measure(run)
    assert run.finish() == 0
    assert seen == [8, 14, 18, 22, 26]
    rows = read(file).rows
    assert {row.system for row in rows} == {HOST, TORCH}
    assert all(row.time_us and row.rounds == row.batch == 2 for row in rows)
    of_driver = [row for row in rows if row.collective == DRIVER_CALL]
    assert [row.placement for row in of_driver] == list(DRIVER_CALLS)
    torchs = [row for row in rows if row.system == TORCH]
    assert [(row.collective, row.ranks) for row in torchs] == [("add_", n) for n in (1, 2, 4, 8)]
    assert all(row.ratio for row in rows if row not in (*of_driver, *torchs))
    ours = {(row.collective, row.placement, row.ranks) for row in rows if row.system == HOST}
    assert {("all_reduce", SYNC, 1), ("all_reduce", ASYNC, 1), ("barrier", SYNC, 1)} < ours
    assert {("reduce_scatter", TOGETHER, n) for n in (2, 4, 8)} < ours


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(BENCH, ["--what", "calls"]) == 2
    assert "sees no usable CUDA device" in capsys.readouterr().err
