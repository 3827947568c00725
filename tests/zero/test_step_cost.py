# SPDX-License-Identifier: Apache-2.0
"""Limits on the host's cost of a training step on a device, counted with a stub driver.

See ``tests/support/stub_driver/step_cost.py`` for the model and the counts. For each saving, a
mutant without the saving must exceed a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ringcomm import cuda, zero
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.memory import device_heap
from ringcomm.optim.backends import StepTable
from ringcomm.optim.gradients import Into
from ringcomm.optim.rules import as_json
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.stages import optimizer, reduce
from ringcomm.zero.stages.engine import owner_of
from tests.support.stub_driver import COMPILER, StubRuntime
from tests.support.stub_driver.step_cost import Cost, cost_of, make_step, on_stub

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stub needs a C++ compiler")

#: Upper limits by stage.
BARS = {
    1: Cost(frames=250, ops=15, launches=16, events=0, syncs=0),
    2: Cost(frames=600, ops=20, launches=28, events=30, syncs=0),
    3: Cost(frames=1200, ops=60, launches=30, events=0, syncs=0),
}
#: Upper limit on the kernel parameters of a launch, in bytes.
PARAMETER_BYTES = 640
#: Limits with reductions beside the caller's work, by stage. Each of 13 reductions records two
#: events, and each event is awaited once, because two buffers alternate.
BESIDE = {
    2: Cost(frames=600, ops=20, launches=28, events=54, syncs=0),
    3: Cost(frames=1200, ops=60, launches=30, events=54, syncs=0),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[StubRuntime]:
    stub = StubRuntime()
    before = cuda.use(stub)
    yield stub
    device_heap.close_heaps()
    cuda.use(before)


def cost(runtime: StubRuntime, stage: int, beside: bool = False) -> Cost:
    with on_stub(runtime) as comm:
        return cost_of(runtime, make_step(comm, stage, beside))


def over(found: Cost, bar: Cost) -> set[str]:
    """Returns the names of the counts that exceed their limits."""
    return {name for name, most in vars(bar).items() if getattr(found, name) > most}


@pytest.mark.parametrize("stage", BARS)
def test_a_step_stays_within_its_bars(runtime: StubRuntime, stage: int) -> None:
    found = cost(runtime, stage)
    assert not over(found, BARS[stage]), found
    assert 0 < runtime.driver.params_bytes() <= PARAMETER_BYTES


@pytest.mark.parametrize("stage", BESIDE)
def test_reductions_beside_the_callers_work(runtime: StubRuntime, stage: int) -> None:
    found = cost(runtime, stage, beside=True)
    assert not over(found, BESIDE[stage]), found
    assert "events" in over(found, BARS[stage])  # negative control for small buckets' saving


def test_reductions_on_the_checked_path_are_seen(runtime: StubRuntime) -> None:
    """Mutant: no reduction is started by a native call."""
    with on_stub(runtime) as comm:
        comm.engine.starts = None
        assert "frames" in over(cost_of(runtime, make_step(comm, 2, beside=True)), BESIDE[2])


def move_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Mutant: each gradient is moved at once, without waiting for a batch."""
    for module in (optimizer, reduce):
        patch.setattr(module, "BATCH_BYTES", 0)


def write_control_anew(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a step writes its factors even if they have not changed."""
    write = ShardedStep.write_control

    def anew(step: ShardedStep, *given: Any) -> None:
        step._is_plain = False
        write(step, *given)

    patch.setattr(ShardedStep, "write_control", anew)


def reduce_first(patch: pytest.MonkeyPatch) -> None:
    """Mutant: every step takes two passes."""
    patch.setattr(ShardedStep, "two_passes", True)


def prepare_anew(patch: pytest.MonkeyPatch) -> None:
    """Mutant: no update has a launch plan."""
    patch.setattr(DeviceCallEngine, "planned", lambda engine, call: None)


def read_what_steps(patch: pytest.MonkeyPatch) -> None:
    """Mutant: the host reads which parameters step."""
    patch.setattr(StepTable, "hyper_differ", property(lambda table: not as_json(table.active)))


def wait_for_the_device(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a step waits until the device has received all its work."""
    patch.setattr(ShardedStep, "_report", lambda step: step.setting.comm.engine.finish_host_side())


def zero_each_buckets_words(patch: pytest.MonkeyPatch) -> None:
    """Mutant: each reduction zeroes its own norm words."""
    patch.setattr(reduce, "Into", lambda *given: Into(*given[:6]))


Mutate = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("mutate", "stage", "seen"),
    [
        (move_one_by_one, 1, {"frames", "ops"}),
        (move_one_by_one, 2, {"frames", "ops"}),
        (write_control_anew, 1, {"ops"}),
        (reduce_first, 1, {"frames", "ops", "launches"}),
        (prepare_anew, 1, {"frames"}),
        (zero_each_buckets_words, 2, {"ops"}),
        (read_what_steps, 1, {"syncs"}),
        (wait_for_the_device, 2, {"syncs"}),
    ],
)
def test_a_mutant_is_above_a_bar(
    runtime: StubRuntime,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Mutate,
    stage: int,
    seen: set[str],
) -> None:
    mutate(monkeypatch)
    assert seen <= over(cost(runtime, stage), BARS[stage])


@pytest.mark.parametrize("other", [True, False])
def test_a_stream_is_put_behind_reductions_on_another_one(
    runtime: StubRuntime, other: bool
) -> None:
    """Reductions run on the stream of the backward, which may differ from the step's stream."""
    with on_stub(runtime) as comm:
        module = zero.shard(torch.nn.Linear(8, 8), 2, comm=comm)
        engine = owner_of(module.weight)
        assert engine is not None and engine.reduction is not None
        module(torch.ones(2, 8)).sum().backward()
        stream = runtime.make_stream(0)
        with runtime.on_stream(stream) if other else nullcontext():
            runtime.driver.reset()
            engine.reduction.wait()
            waits = [by for by, _ in runtime.driver.waits()]
            assert waits == ([stream.handle] if other else [])
            engine.reduction.wait()
            assert not runtime.driver.waits()
