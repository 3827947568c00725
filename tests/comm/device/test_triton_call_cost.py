# SPDX-License-Identifier: Apache-2.0
"""Limits for the host's cost of a call by Triton's kernels: the same as with CUDA kernels.

Triton launches the first call of a kind, on a replacement of its driver; later calls reach a driver
that does nothing. A mutant of each must exceed its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton

import ringcomm
from ringcomm import CommOptions, Communicator, cuda
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.memory import device_heap
from tests.support.stub_driver import COMPILER, StubRuntime
from tests.support.stub_driver.cost import driver_calls_of, frames_of
from tests.support.triton_device import StandIn, executed

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(COMPILER is None, reason="the stub needs a C++ compiler"),
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

OUT = torch.empty(64)
TRITON = CommOptions(kernels="triton")
Call = Callable[[Communicator, torch.Tensor, bool], object]


@pytest.fixture(scope="module")
def gpu() -> Iterator[StandIn]:
    stand_in = StandIn(90)
    with executed(stand_in):
        yield stand_in


@pytest.fixture(scope="module")
def runtime() -> Iterator[StubRuntime]:
    stub = StubRuntime()
    before = cuda.use(stub)
    yield stub
    device_heap.close_heaps()
    cuda.use(before)


@pytest.fixture
def comm(runtime: StubRuntime, gpu: StandIn) -> Iterator[Communicator]:
    with ringcomm.local_world(1, options=TRITON, device="cuda:0") as (communicator,):
        tensor = torch.ones(64)
        for call in COLLECTIVES:
            for asynchronous in (False, True, True):
                call(communicator, tensor, asynchronous)
        yield communicator


def all_reduce(comm: Communicator, tensor: torch.Tensor, asynchronous: bool) -> None:
    finish(comm.all_reduce(tensor, async_op=asynchronous))


def reduce_scatter(comm: Communicator, tensor: torch.Tensor, asynchronous: bool) -> None:
    finish(comm.reduce_scatter_tensor(OUT, tensor, async_op=asynchronous))


def all_gather(comm: Communicator, tensor: torch.Tensor, asynchronous: bool) -> None:
    finish(comm.all_gather_into_tensor(OUT, tensor, async_op=asynchronous))


def finish(work: ringcomm.Work | None) -> None:
    if work is not None:
        work.wait()


COLLECTIVES = [all_reduce, reduce_scatter, all_gather]
FRAMES = {False: 2, True: 8}
DRIVER = {False: {"launch": 1}, True: {"launch": 1, "record": 2, "wait": 2}}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_call_costs_what_one_by_cuda_kernels_does(
    runtime: StubRuntime, gpu: StandIn, comm: Communicator, call: Call, asynchronous: bool
) -> None:
    tensor = torch.ones(64)
    launched = len(gpu.launched)
    call(comm, tensor, asynchronous)
    assert frames_of(lambda: call(comm, tensor, asynchronous)) <= FRAMES[asynchronous]
    entered = driver_calls_of(runtime.driver, lambda: call(comm, tensor, asynchronous))
    assert entered == DRIVER[asynchronous]
    assert len(gpu.launched) == launched


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call", COLLECTIVES)
def test_the_checked_path_is_seen(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, call: Call, asynchronous: bool
) -> None:
    """The mutant: no call is fast, so Python checks all of them."""
    monkeypatch.setattr(comm.engine, "compiled", None)
    assert frames_of(lambda: call(comm, torch.ones(64), asynchronous)) > FRAMES[asynchronous]


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_call_that_is_checked_is_launched_without_triton(
    runtime: StubRuntime,
    gpu: StandIn,
    comm: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
) -> None:
    monkeypatch.setattr(comm.engine, "compiled", None)
    launched = len(gpu.launched)
    entered = driver_calls_of(runtime.driver, lambda: call(comm, torch.ones(64), False))
    assert entered["launch"] == 1
    assert len(gpu.launched) == launched


def test_a_call_that_names_its_kernels_is_fast(runtime: StubRuntime, gpu: StandIn) -> None:
    with ringcomm.local_world(1, device="cuda:0") as (comm,):
        tensor = torch.ones(64)
        comm.all_reduce(tensor, kernels="triton")

        def again() -> None:
            comm.all_reduce(tensor, kernels="triton")

        assert frames_of(again) <= FRAMES[False]
        assert driver_calls_of(runtime.driver, again) == DRIVER[False]


def test_a_plan_is_one_launch(runtime: StubRuntime, comm: Communicator) -> None:
    tensor = torch.ones(64)
    plans = [
        comm.plan_all_reduce(tensor),
        comm.plan_reduce_scatter_tensor(OUT, tensor),
        comm.plan_all_gather_into_tensor(OUT, tensor),
    ]
    for plan in plans:
        assert frames_of(plan) <= FRAMES[False]
        assert driver_calls_of(runtime.driver, plan) == DRIVER[False]
        plan._again = None  # the mutant: each call is checked and prepared
        assert frames_of(plan) > FRAMES[False]


@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_launches_while_it_has_hooks(gpu: StandIn, comm: Communicator, place: str) -> None:
    """A profiler's hooks must see every launch."""
    runtime = triton.knobs.runtime
    seen: list[object] = []
    launched = len(gpu.launched)
    with runtime.scope():
        getattr(runtime, place).add(seen.append)
        try:
            comm.all_reduce(torch.ones(64))
            assert len(gpu.launched) == launched + 1
        finally:
            getattr(runtime, place).remove(seen.append)
        setattr(runtime, place, seen.append)
        comm.all_reduce(torch.ones(64))
        assert len(gpu.launched) == launched + 2
    comm.all_reduce(torch.ones(64))
    assert len(gpu.launched) == launched + 2


def test_sizes_of_other_types_have_kernels_of_their_own(
    runtime: StubRuntime, gpu: StandIn, comm: Communicator
) -> None:
    """Triton compiles another kernel for numbers that do not fit into 32 bits."""
    small, large = torch.ones(64), torch.empty(1 << 28, dtype=torch.bfloat16)
    comm.all_reduce(torch.ones(64, dtype=torch.bfloat16))
    launched = len(gpu.launched)
    comm.all_reduce(large)
    assert len(gpu.launched) == launched + 1
    for tensor in (small, large, small, torch.ones(64, dtype=torch.bfloat16)):
        entered = driver_calls_of(runtime.driver, partial(comm.all_reduce, tensor))
        assert entered == DRIVER[False]
    assert len(gpu.launched) == launched + 1


def test_an_operator_that_no_call_has_had_is_checked(gpu: StandIn, comm: Communicator) -> None:
    launched = len(gpu.launched)
    comm.all_reduce(torch.ones(64), op=torch.distributed.ReduceOp.AVG)
    assert len(gpu.launched) == launched + 1
    with pytest.raises(ringcomm.RingcommError, match="by SUM and AVG"):
        comm.all_reduce(torch.ones(64), op=torch.distributed.ReduceOp.MAX)


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_fast_call_is_recorded_as_a_checked_one(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    def record() -> object:
        call(comm, torch.ones(64), False)
        last = comm.recording().ranks[0].collectives[-1]
        return replace(last, number=0, state="", begin_ns=0, end_ns=0)

    fast = record()
    assert "kernels='triton'" in repr(fast)
    monkeypatch.setattr(comm.engine, "compiled", None)
    assert record() == fast


def test_a_timeout_is_passed_as_the_communicator_has_it(gpu: StandIn, comm: Communicator) -> None:
    """A timeout below 2.1 s fits into 32 bits, so Triton compiles another kernel for it."""
    launched = len(gpu.launched)
    comm.timeout = 1.0
    comm.all_reduce(torch.ones(64))
    comm.all_reduce(torch.ones(64))
    assert len(gpu.launched) == launched + 1


def test_a_closed_communicator_refuses(runtime: StubRuntime, gpu: StandIn) -> None:
    with ringcomm.local_world(1, options=TRITON, device="cuda:0") as (comm,):
        comm.all_reduce(torch.ones(64))
        plan = comm.plan_all_reduce(torch.ones(64))
        engine = comm.engine
        assert isinstance(engine, DeviceCallEngine)
    for call in (plan, lambda: comm.all_reduce(torch.ones(64))):
        with pytest.raises(ringcomm.RingcommError, match="closed"):
            call()
