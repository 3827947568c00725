# SPDX-License-Identifier: Apache-2.0
"""Limits for the host's cost of a call on a device: Python functions, and calls of the driver.

A driver that does nothing counts both. A mutant of each fast path must exceed its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import Communicator, _native, cuda
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.memory import device_heap
from tests.support.stub_driver import COMPILER, StubRuntime
from tests.support.stub_driver.cost import driver_calls_of, frames_of, step_calls_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stub needs a C++ compiler")

OUT = torch.empty(64)
Call = Callable[[Communicator, torch.Tensor], object]


@pytest.fixture(scope="module")
def runtime() -> Iterator[StubRuntime]:
    stub = StubRuntime()
    before = cuda.use(stub)
    yield stub
    device_heap.close_heaps()
    cuda.use(before)


@pytest.fixture
def comm(runtime: StubRuntime) -> Iterator[Communicator]:
    with ringcomm.local_world(1, device="cuda:0") as (communicator,):
        # Warm up: the first asynchronous call makes the side stream, the first calls make events.
        tensor = torch.ones(64)
        for _ in range(3):
            communicator.all_reduce(tensor)
            work = communicator.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        yield communicator


def all_reduce(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_reduce(tensor)


def reduce_scatter(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.reduce_scatter_tensor(OUT, tensor)


def all_gather(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_gather_into_tensor(OUT, tensor)


def broadcast(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.broadcast(tensor, 0)


def barrier(comm: Communicator, _: torch.Tensor) -> None:
    comm.barrier()


def all_reduce_and_wait(comm: Communicator, tensor: torch.Tensor) -> None:
    work = comm.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()


def reduce_scatter_and_wait(comm: Communicator, tensor: torch.Tensor) -> None:
    work = comm.reduce_scatter_tensor(OUT, tensor, async_op=True)
    assert work is not None
    work.wait()


def all_gather_and_wait(comm: Communicator, tensor: torch.Tensor) -> None:
    work = comm.all_gather_into_tensor(OUT, tensor, async_op=True)
    assert work is not None
    work.wait()


def broadcast_and_wait(comm: Communicator, tensor: torch.Tensor) -> None:
    work = comm.broadcast(tensor, 0, async_op=True)
    assert work is not None
    work.wait()


def barrier_and_wait(comm: Communicator, _: torch.Tensor) -> None:
    work = comm.barrier(async_op=True)
    assert work is not None
    work.wait()


SYNC = [all_reduce, reduce_scatter, all_gather, broadcast, barrier]
ASYNC = [
    all_reduce_and_wait,
    reduce_scatter_and_wait,
    all_gather_and_wait,
    broadcast_and_wait,
    barrier_and_wait,
]
SYNC_FRAMES, ASYNC_FRAMES = 2, 8
SYNC_DRIVER = {"launch": 1}
ASYNC_DRIVER = {"launch": 1, "record": 2, "wait": 2}


@pytest.mark.parametrize("call", SYNC)
def test_a_call_is_one_launch(runtime: StubRuntime, comm: Communicator, call: Call) -> None:
    tensor = torch.ones(64)
    call(comm, tensor)  # finds the kernel
    assert frames_of(lambda: call(comm, tensor)) <= SYNC_FRAMES
    assert driver_calls_of(runtime.driver, lambda: call(comm, tensor)) == SYNC_DRIVER


@pytest.mark.parametrize("call", ASYNC)
def test_an_asynchronous_call_lies_between_two_events(
    runtime: StubRuntime, comm: Communicator, call: Call
) -> None:
    tensor = torch.ones(64)
    call(comm, tensor)
    assert frames_of(lambda: call(comm, tensor)) <= ASYNC_FRAMES
    assert driver_calls_of(runtime.driver, lambda: call(comm, tensor)) == ASYNC_DRIVER


def test_another_stream_is_asked_whether_it_captures(
    runtime: StubRuntime, comm: Communicator
) -> None:
    with runtime.on_stream(runtime.make_stream(0)):
        comm.barrier()  # orders the stream after the last call's
        assert driver_calls_of(runtime.driver, comm.barrier) == {"is_capturing": 1, "launch": 1}


def test_calls_between_asynchronous_ones_ask_for_no_green_context(
    runtime: StubRuntime, comm: Communicator
) -> None:
    """Each stream's green context is looked up only once, although the streams alternate."""
    tensor = torch.ones(64)

    def turn() -> None:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        comm.all_reduce(tensor)

    turn()
    assert "get_green_context" not in driver_calls_of(runtime.driver, turn)
    with runtime.on_stream(runtime.make_stream(0)):
        assert driver_calls_of(runtime.driver, turn)["get_green_context"] == 1  # the control


def test_a_call_beside_a_second_communicator(runtime: StubRuntime, comm: Communicator) -> None:
    """Each launch is recorded, and the other communicator's launches are queried."""
    with ringcomm.local_world(1, device="cuda:0") as (other,):
        other.barrier()
        comm.barrier()  # orders the stream after the last call's
        runtime.driver.reset()
        other.barrier()
        found = driver_calls_of(runtime.driver, comm.barrier)
        assert found.pop("query") == 1
        assert found == {"exchange_mode": 2, "launch": 1, "record": 1}
        assert frames_of(comm.barrier) <= SYNC_FRAMES
    found = driver_calls_of(runtime.driver, comm.barrier)
    assert found == SYNC_DRIVER


class Slow:
    """Fast calls that do nothing, and return that they are not fast."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None if name.startswith("start_") else _native.NOT_FAST


@pytest.mark.parametrize("call", [*SYNC, *ASYNC])
def test_the_checked_path_is_seen(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The mutant: no call is fast, so Python checks all of them."""
    monkeypatch.setattr(comm.engine, "fast", Slow())
    monkeypatch.setattr(comm.engine, "starts", Slow())
    bar = ASYNC_FRAMES if call in ASYNC else SYNC_FRAMES
    assert frames_of(lambda: call(comm, torch.ones(64))) > bar


STEP_CALLS = (
    "adamw_prepare",
    "adamw_shard",
    "grad_norm",
    "reduce_scatter_norm",
    "adamw_all_gather",
    "reduce_scatter_adamw_all_gather",
    "reduce_scatter_norm, async, wait",
)


@pytest.mark.parametrize("name", STEP_CALLS)
def test_a_call_of_a_step_is_one_launch(
    runtime: StubRuntime, comm: Communicator, name: str
) -> None:
    call = step_calls_of(comm)[name]
    waits = name.endswith("wait")
    call()  # finds the kernel; makes a plan if the call repeats
    assert frames_of(call) <= (ASYNC_FRAMES if waits else SYNC_FRAMES)
    assert driver_calls_of(runtime.driver, call) == (ASYNC_DRIVER if waits else SYNC_DRIVER)


@pytest.mark.parametrize("name", STEP_CALLS)
def test_the_checked_path_of_a_step_is_seen(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The mutant: no call is fast, and no call has a plan."""
    monkeypatch.setattr(comm.engine, "fast", Slow())
    monkeypatch.setattr(comm.engine, "starts", Slow())
    monkeypatch.setattr(comm.engine, "planned", lambda call: None)
    call = step_calls_of(comm)[name]
    call()
    assert frames_of(call) > (ASYNC_FRAMES if name.endswith("wait") else SYNC_FRAMES)


def test_an_event_for_each_call_is_seen(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a communicator records its launches although it is alone on the device."""
    engine = comm.engine
    assert isinstance(engine, DeviceCallEngine)
    engine.order.ledger.set_members(2, 132, 0)
    try:
        assert driver_calls_of(runtime.driver, comm.barrier) != SYNC_DRIVER
    finally:
        engine.order.ledger.set_members(1, 132, 0)


def test_a_plan_is_one_launch(runtime: StubRuntime, comm: Communicator) -> None:
    plan = comm.plan_all_reduce(torch.ones(64))
    plan()  # orders the stream after the last call's
    assert frames_of(plan) <= SYNC_FRAMES
    assert driver_calls_of(runtime.driver, plan) == SYNC_DRIVER
    plan._again = None  # the mutant: each call is checked and prepared
    assert frames_of(plan) > SYNC_FRAMES


@pytest.mark.parametrize("change", ["memory", "gradient"])
def test_a_plan_of_a_tensor_that_has_changed_is_checked_again(
    comm: Communicator, change: str
) -> None:
    """The plan must neither use freed memory nor leave a parameter's version unchanged."""
    tensor = torch.ones(64)
    plan = comm.plan_all_reduce(tensor)
    assert plan._again is not None and plan._again() == 0
    if change == "memory":
        tensor.data = torch.zeros(64)
    else:
        tensor.requires_grad_()
    assert plan._again() == _native.NOT_FAST
    version = tensor._version
    with torch.no_grad():
        plan()
    assert tensor._version > version


def dtype_changes(comm: Communicator) -> tuple[ringcomm.Plan, str]:
    tensor = torch.ones(64)
    plan = comm.plan_all_gather_into_tensor(torch.ones(64), tensor)
    tensor.data = torch.ones(64, dtype=torch.int32)
    return plan, r"all_gather_into_tensor on rank 0 of 1: output: expected the dtype of input"


def size_changes(comm: Communicator) -> tuple[ringcomm.Plan, str]:
    tensor = torch.ones(64)
    plan = comm.plan_reduce_scatter_tensor(torch.ones(64), tensor)
    tensor.resize_(128)
    return plan, r"reduce_scatter_tensor on rank 0 of 1: input: expected 64 elements"


def memory_is_freed(comm: Communicator) -> tuple[ringcomm.Plan, str]:
    tensor = torch.ones(64)
    plan = comm.plan_all_reduce(tensor)
    tensor.untyped_storage().resize_(0)
    return plan, r"all_reduce on rank 0 of 1: tensor: .* 256 bytes reach beyond its storage of 0"


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("change", [dtype_changes, size_changes, memory_is_freed])
def test_a_plan_of_tensors_that_do_not_fit_any_more_is_refused(
    comm: Communicator,
    change: Callable[[Communicator], tuple[ringcomm.Plan, str]],
    async_op: bool,
) -> None:
    """The call itself refuses them, too, before a kernel reads memory outside of a tensor."""
    with ringcomm.local_world(1) as (host,):
        for each in (comm, host):
            plan, text = change(each)
            with pytest.raises((ringcomm.ArgumentError, ringcomm.UnsupportedError), match=text):
                plan(async_op)


def test_a_plan_takes_the_dtype_of_now(comm: Communicator) -> None:
    """The record has the current dtype, not the dtype of the tensor's earlier memory."""
    tensor = torch.ones(64)
    plan = comm.plan_all_reduce(tensor)
    tensor.data = torch.ones(64, dtype=torch.bfloat16)
    plan()
    rank = comm.engine.recording().rank(0)
    assert rank is not None and rank.last is not None
    assert rank.last.dtype == "bfloat16"


def reduce(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.reduce(tensor, 0)


def all_to_all(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_to_all([OUT], [tensor])


PARAMETER_BYTES = 640


@pytest.mark.parametrize("call", [*SYNC, *ASYNC, reduce])
def test_a_launch_has_few_parameters(runtime: StubRuntime, comm: Communicator, call: Call) -> None:
    runtime.driver.reset()
    call(comm, torch.ones(64))
    assert 0 < runtime.driver.params_bytes() <= PARAMETER_BYTES


def test_many_parameters_are_seen(runtime: StubRuntime, comm: Communicator) -> None:
    """The mutant: a call with lists, whose kernel has parameters for many ranks."""
    runtime.driver.reset()
    all_to_all(comm, torch.ones(64))
    assert PARAMETER_BYTES < runtime.driver.params_bytes() <= 4096


LAUNCH_FRAMES = 4


@pytest.mark.parametrize("ranks", [2, 8])
def test_one_launch_of_all_ranks(runtime: StubRuntime, ranks: int) -> None:
    with ringcomm.local_world(ranks, device="cuda:0") as world:
        tensors = [torch.ones(64) for _ in range(ranks)]
        world.all_reduce(tensors)
        assert frames_of(lambda: world.all_reduce(tensors)) <= LAUNCH_FRAMES
        assert driver_calls_of(runtime.driver, lambda: world.all_reduce(tensors)) == SYNC_DRIVER
        assert runtime.driver.params_bytes() <= PARAMETER_BYTES
        world._one_launch = []  # the mutant: Python checks and prepares each rank's call
        assert frames_of(lambda: world.all_reduce(tensors)) > LAUNCH_FRAMES


# ---- tensors are kept as long as the call may use them, and no longer ----------------------------


def tensors_kept(comm: Communicator) -> int:
    engine = comm.engine
    assert isinstance(engine, DeviceCallEngine)
    return len(engine.calls.kept()[1])


def test_tensors_are_kept_until_the_owners_stream_waits(
    runtime: StubRuntime, comm: Communicator
) -> None:
    runtime.driver.reset()
    runtime.driver.hold_events()
    works = [comm.all_reduce(torch.ones(64), async_op=True) for _ in range(3)]
    assert tensors_kept(comm) == 3
    assert works[0] is not None and works[1] is not None
    with runtime.on_stream(runtime.make_stream(0)):
        works[1].wait()  # memory may be reused only on the tensor's own stream
    assert tensors_kept(comm) == 3
    works[1].wait()
    works[0].wait()
    assert tensors_kept(comm) == 1
    runtime.driver.reset()


def test_tensors_are_kept_until_the_call_is_done(runtime: StubRuntime, comm: Communicator) -> None:
    runtime.driver.reset()
    runtime.driver.hold_events()
    comm.all_reduce(torch.ones(64), async_op=True)
    end = runtime.driver.records()[-1]
    comm.all_reduce(torch.ones(64), async_op=True)
    assert tensors_kept(comm) == 2
    runtime.driver.let_pass(end)
    comm.all_reduce(torch.ones(64), async_op=True)
    assert tensors_kept(comm) == 2
    runtime.driver.reset()


# ---- calls that are not fast take the checked path -----------------------------------------------


@pytest.mark.parametrize("code", [3, 201, 400])
@pytest.mark.parametrize("call", [*SYNC, *ASYNC])
def test_a_thread_on_another_device_makes_the_call_on_the_right_one(
    runtime: StubRuntime, comm: Communicator, call: Call, code: int
) -> None:
    tensor = torch.ones(64)
    comm.barrier()  # orders the stream after the last call's
    runtime.driver.reset()
    runtime.driver.refuse(code)
    entered = runtime.calls["on_device"]
    call(comm, tensor)
    assert runtime.calls["on_device"] > entered
    launches = 1 if call in ASYNC else 2  # an asynchronous call begins with an event
    assert runtime.driver.counted()["launch"] == launches


def waits_of(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch, call: Call
) -> list[tuple[int, int]]:
    """Returns the waits of a call on device 1's thread as (stream, current device)."""
    waits: list[tuple[int, int]] = []
    calls = comm.engine.fast

    class Watched:
        def __getattr__(self, name: str) -> Any:
            found = getattr(calls, name)

            def native(*args: Any, **kwargs: Any) -> Any:
                runtime.driver.waits()
                result = found(*args, **kwargs)
                waits.extend((stream, runtime.device_now) for stream, _ in runtime.driver.waits())
                return result

            return native

    watched: Any = Watched()
    for name in ("fast", "starts", "calls"):
        monkeypatch.setattr(comm.engine, name, watched)
    monkeypatch.setattr(runtime, "device_now", 1)
    call(comm, torch.ones(64))
    return waits


@pytest.mark.parametrize("call", [*SYNC, *ASYNC])
def test_no_default_stream_of_another_device_waits(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The driver would allow it: stream 0 is the default stream of the current device."""
    comm.all_reduce(torch.ones(64), async_op=True)  # the next call on stream 0 waits for it
    waits = waits_of(runtime, comm, monkeypatch, call)
    assert waits and all(stream != 0 or device == 0 for stream, device in waits)


def test_a_default_stream_of_another_device_that_waits_is_seen(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the current device is not checked."""
    monkeypatch.setattr(runtime, "hides_device", True)
    comm.all_reduce(torch.ones(64), async_op=True)
    assert (0, 1) in waits_of(runtime, comm, monkeypatch, all_reduce_and_wait)


def test_what_the_driver_refuses_is_worded(runtime: StubRuntime, comm: Communicator) -> None:
    comm.barrier()
    runtime.driver.reset()
    runtime.driver.refuse(719, times=2)
    with pytest.raises(ringcomm.RingcommError, match=r"all_reduce.*refused by the test \(719\)"):
        comm.all_reduce(torch.ones(64))
    with pytest.raises(ringcomm.RingcommError, match="unusable"):
        comm.all_reduce(torch.ones(64))
    runtime.driver.reset()


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_a_wait_that_the_driver_refuses_is_worded(
    runtime: StubRuntime, comm: Communicator, timeout: float | None
) -> None:
    work = comm.all_reduce(torch.ones(64), async_op=True)
    assert work is not None
    runtime.driver.reset()
    runtime.driver.refuse(719, times=2)
    words = r"all_reduce: .* device 0 to wait .*refused by the test \(719\).*CUDA_LAUNCH_BLOCKING"
    with pytest.raises(ringcomm.RingcommError, match=words):
        work.wait(timeout)
    runtime.driver.reset()
    assert work.wait(timeout)


def test_a_stream_that_captures_takes_the_checked_path(
    runtime: StubRuntime, comm: Communicator
) -> None:
    stream = runtime.make_stream(0)
    runtime.driver.reset()
    runtime.driver.set_capturing(stream.handle)
    entered = runtime.calls["on_device"]
    with runtime.on_stream(stream):
        comm.barrier()
    assert runtime.calls["on_device"] > entered
    runtime.driver.set_capturing(stream.handle, False)
