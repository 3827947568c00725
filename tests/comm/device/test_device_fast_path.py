# SPDX-License-Identifier: Apache-2.0
"""Calls that the native module makes directly: the same bits, order and refusals as checked calls.

Each rank has its own device, which is current, as in a program with a thread per GPU. Ranks on one
device would share launches, which are not fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcomm import Communicator, LocalWorld, _native
from ringcomm.comm.device.launch import DeviceCallEngine
from tests.support.device_worlds import Devices
from tests.support.emulator.library import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler")

RANKS = 2
SIZES = (64, 20_011)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


# malloc would reuse memory that a call on a stream still uses; a GPU's allocator would not.
_kept: list[torch.Tensor] = []


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Keeps the tensor alive until the devices have been synchronized, and returns it."""
    _kept.append(tensor)
    return tensor


class Counting:
    """Wraps a communicator's native calls, and counts the calls that were made."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls
        self.made: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.calls, name)

        def call(*args: Any) -> Any:
            result = found(*args)
            self.made[name] += result is not None and result != _native.NOT_FAST
            return result

        return call


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    made = Devices("emulated", devices=RANKS)
    yield made
    made.close()


@pytest.fixture
def world(devices: Devices) -> LocalWorld:
    return devices.world(RANKS, on=tuple(range(RANKS)))


def engine_of(comm: Communicator) -> DeviceCallEngine:
    assert isinstance(comm.engine, DeviceCallEngine)
    return comm.engine


def run(devices: Devices, world: LocalWorld, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``fn(comm, *args)`` on each rank, with the rank's device current."""

    def body(comm: Communicator) -> Any:
        device = engine_of(comm).device_ref[1]
        assert devices.emulated is not None
        with devices.emulated.assuming(device), devices.runtime.on_device(device):
            result = fn(comm, *args)
            devices.runtime.synchronize(device)
        return result

    results = world.run(body)
    _kept.clear()
    return results


def filled(comm: Communicator, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns small integers that differ by rank and position."""
    return kept(((torch.arange(count) + 3 * comm.rank) % 5).to(dtype))


def made_of(comm: Communicator, call: Callable[[], object]) -> Counter[str]:
    """Returns the native calls that ``call`` makes."""
    engine = engine_of(comm)
    counting: Any = Counting(engine.calls)
    fast, starts = engine.fast, engine.starts
    engine.fast = engine.starts = counting
    try:
        call()
    finally:
        engine.fast, engine.starts = fast, starts
    return counting.made


def everything(comm: Communicator, checked: bool) -> list[torch.Tensor]:
    """Returns the results of each collective, on the checked path or on the fast path."""
    engine = engine_of(comm)
    if checked:
        engine.calls.set_shared(True)
    try:
        return [*all_reduced(comm), *moved(comm)]
    finally:
        engine.calls.set_shared(False)


def all_reduced(comm: Communicator) -> Iterator[torch.Tensor]:
    for dtype in DTYPES:
        for op in OPS:
            for count in SIZES:
                tensor = filled(comm, count, dtype)
                comm.all_reduce(tensor, op)
                yield tensor
                whole, chunk = filled(comm, RANKS * count, dtype), torch.zeros(count, dtype=dtype)
                comm.reduce_scatter_tensor(chunk, whole, op)
                yield chunk


def moved(comm: Communicator) -> Iterator[torch.Tensor]:
    for dtype in DTYPES:
        for count in SIZES:
            for algorithm in ("auto", "ring"):
                gathered = torch.zeros(RANKS * count, dtype=dtype)
                comm.all_gather_into_tensor(
                    gathered, filled(comm, count, dtype), algorithm=algorithm
                )
                yield gathered
        for root in range(RANKS):
            tensor = filled(comm, 512, dtype)
            comm.broadcast(tensor, root)
            yield tensor
        comm.barrier()


def test_the_bits_are_those_of_the_checked_path(devices: Devices, world: LocalWorld) -> None:
    def both(comm: Communicator) -> None:
        devices.runtime.synchronize(engine_of(comm).device_ref[1])
        found: list[torch.Tensor] = []
        made = made_of(comm, lambda: found.extend(everything(comm, checked=False)))
        reduced = len(DTYPES) * len(OPS) * len(SIZES)
        assert made == {
            "all_reduce_fast": reduced,
            "reduce_scatter_fast": reduced,
            "all_gather_fast": len(DTYPES) * len(SIZES) * 2,
            "broadcast_fast": len(DTYPES) * RANKS,
            "barrier_fast": len(DTYPES),
        }
        expected: list[torch.Tensor] = []
        made = made_of(comm, lambda: expected.extend(everything(comm, checked=True)))
        assert not any(made.values())
        devices.runtime.synchronize(engine_of(comm).device_ref[1])
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one, two)

    run(devices, world, both)


def test_asynchronous_calls_are_started(devices: Devices, world: LocalWorld) -> None:
    def body(comm: Communicator) -> tuple[Counter[str], list[torch.Tensor]]:
        tensors = [filled(comm, 512, torch.float32) for _ in range(4)]
        chunk, gathered = kept(torch.zeros(256)), kept(torch.zeros(1024))
        first = filled(comm, 512, torch.float32)
        comm.barrier(async_op=True)  # makes the side stream

        def call() -> None:
            works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
            works.append(comm.reduce_scatter_tensor(chunk, tensors[0], async_op=True))
            works.append(comm.all_gather_into_tensor(gathered, tensors[1], async_op=True))
            works.append(comm.broadcast(first, 0, async_op=True))
            works.append(comm.barrier(async_op=True))
            for work in works:
                assert work is not None
                work.wait()

        return made_of(comm, call), [*tensors, chunk, gathered, first]

    results = run(devices, world, body)
    inputs = [((torch.arange(512) + 3 * rank) % 5).float() for rank in range(RANKS)]
    total = inputs[0] + inputs[1]
    for rank, (made, tensors) in enumerate(results):
        others = "reduce_scatter", "all_gather", "broadcast", "barrier"
        assert made == {"start_all_reduce": 4, **{f"start_{name}": 1 for name in others}}
        assert all(torch.equal(tensor, total) for tensor in tensors[:4])
        assert torch.equal(tensors[4], RANKS * total[256 * rank : 256 * (rank + 1)])
        assert torch.equal(tensors[5], torch.cat([total] * RANKS))
        assert torch.equal(tensors[6], inputs[0])


@pytest.mark.parametrize("async_op", [False, True])
def test_a_broadcast_advances_the_versions_of_what_it_writes(
    devices: Devices, world: LocalWorld, async_op: bool
) -> None:
    def body(comm: Communicator) -> int:
        tensor = kept(torch.ones(8))
        comm.barrier(async_op=True)  # makes the side stream
        before = tensor._version
        made = made_of(comm, lambda: comm.broadcast(tensor, 1, async_op))
        assert sum(made.values()) == 1
        return tensor._version - before

    assert run(devices, world, body) == [1, 0]


def test_calls_on_two_streams_follow_each_other(devices: Devices, world: LocalWorld) -> None:
    """Each call adds to the result of the call before, although the streams differ."""

    def body(comm: Communicator) -> torch.Tensor:
        runtime, device = devices.runtime, engine_of(comm).device_ref[1]
        tensor, other = kept(torch.ones(4096)), runtime.make_stream(device)
        for _ in range(3):
            comm.all_reduce(tensor)
            with runtime.on_stream(other):
                comm.all_reduce(tensor)
            work = comm.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        return tensor

    for tensor in run(devices, world, body):
        assert torch.equal(tensor, torch.full((4096,), float(RANKS**9)))


SHARED = torch.zeros(16)
SUM, AUTO = dist.ReduceOp.SUM, "auto"
NOT_FAST: dict[str, Callable[[_native.DeviceCalls], object]] = {
    "a view that is not contiguous": lambda calls: calls.all_reduce_fast(
        torch.ones(8, 8).t()[:4], SUM, AUTO
    ),
    "complex numbers": lambda calls: calls.all_reduce_fast(
        torch.ones(8, dtype=torch.complex64), SUM, AUTO
    ),
    "no element": lambda calls: calls.all_reduce_fast(torch.ones(0), SUM, AUTO),
    "bits of floats": lambda calls: calls.all_reduce_fast(torch.ones(8), dist.ReduceOp.BAND, AUTO),
    "a type without a kernel": lambda calls: calls.all_reduce_fast(
        torch.ones(8, dtype=torch.uint16), dist.ReduceOp.MAX, AUTO
    ),
    "an algorithm of devices": lambda calls: calls.all_reduce_fast(torch.ones(8), SUM, "ll"),
    "no algorithm": lambda calls: calls.all_reduce_fast(torch.ones(8), SUM, "best"),
    "no op": lambda calls: calls.all_reduce_fast(torch.ones(8), "sum", AUTO),
    "no tensor": lambda calls: calls.all_reduce_fast([1.0], SUM, AUTO),
    "a gradient": lambda calls: calls.all_reduce_fast(torch.ones(8, requires_grad=True), SUM, AUTO),
    "two sizes": lambda calls: calls.all_gather_fast(torch.ones(9), torch.ones(4), AUTO),
    "two types": lambda calls: calls.all_gather_fast(
        torch.ones(8), torch.ones(4, dtype=torch.int32), AUTO
    ),
    "no rank": lambda calls: calls.broadcast_fast(torch.ones(8), RANKS),
    "a rank before the first": lambda calls: calls.broadcast_fast(torch.ones(8), -1),
    "a rank that is no integer": lambda calls: calls.broadcast_fast(torch.ones(8), True),
    "an overlap": lambda calls: calls.reduce_scatter_fast(SHARED[2:10], SHARED, SUM, AUTO),
}


@pytest.mark.parametrize("name", NOT_FAST)
def test_other_calls_are_not_fast(devices: Devices, world: LocalWorld, name: str) -> None:
    def body(comm: Communicator) -> object:
        return NOT_FAST[name](engine_of(comm).calls)

    assert run(devices, world, body) == [_native.NOT_FAST] * RANKS


def test_a_mode_of_torch_makes_no_call_fast(devices: Devices, world: LocalWorld) -> None:
    """The mode must see the call."""

    def body(comm: Communicator) -> list[object]:
        calls, tensor = engine_of(comm).calls, torch.ones(8)
        with devices.as_on_gpu(comm):
            return [
                calls.all_reduce_fast(tensor, SUM, AUTO),
                calls.broadcast_fast(tensor, 0),
                calls.barrier_fast(),
                calls.grad_norm_fast(0, 11, 8, 0, 0),
                calls.start_barrier(),
                calls.start_all_reduce(tensor, SUM, AUTO),
            ]

    not_fast = _native.NOT_FAST
    assert run(devices, world, body) == [[not_fast] * 4 + [None] * 2] * RANKS


def test_a_tensor_of_another_device_is_refused(devices: Devices, world: LocalWorld) -> None:
    runtime = devices.emulated
    assert runtime is not None

    def body(comm: Communicator) -> str:
        with runtime.assuming(1 - engine_of(comm).device_ref[1]):
            tensor = torch.ones(8)
            with pytest.raises(ValueError, match="expected a tensor on device") as refused:
                comm.all_reduce(tensor)
        return str(refused.value)

    texts = run(devices, world, body)
    assert [f"on device {rank}" in text for rank, text in enumerate(texts)] == [True] * RANKS


def test_plans_are_made_many_times(devices: Devices, world: LocalWorld) -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        tensor, chunk = kept(torch.ones(512)), kept(torch.zeros(256))
        gathered = kept(torch.zeros(512))
        plans = [
            comm.plan_all_reduce(tensor),
            comm.plan_reduce_scatter_tensor(chunk, tensor),
            comm.plan_all_gather_into_tensor(gathered, chunk),
        ]
        for _ in range(3):
            for plan in plans:
                plan()
        return [tensor, chunk, gathered]

    for tensors in run(devices, world, body):
        assert torch.equal(tensors[0], torch.full((512,), 8.0))
        assert torch.equal(tensors[1], torch.full((256,), 16.0))
        assert torch.equal(tensors[2], torch.full((512,), 16.0))


# ---- one launch for ranks that share a device ----------------------------------------------------


def together(devices: Devices, world: LocalWorld, call: Callable[[], object]) -> list[int]:
    """Makes a call of all ranks in this thread; counts the calls of each native function."""
    names = ("all_reduce_together", "reduce_scatter_together", "all_gather_together")
    made = dict.fromkeys(names, 0)
    before = {name: getattr(_native, name) for name in names}

    def counted(name: str) -> Callable[..., int]:
        def native(*args: Any) -> int:
            status: int = before[name](*args)
            made[name] += status == 0
            return status

        return native

    runtime = devices.emulated
    assert runtime is not None
    with pytest.MonkeyPatch.context() as patch, runtime.assuming(0), runtime.on_device(0):
        for name in names:
            patch.setattr(_native, name, counted(name))
        call()
        runtime.synchronize(0)
    _kept.clear()
    return list(made.values())


def test_one_launch_carries_all_ranks(devices: Devices) -> None:
    world = devices.world(4, on=(0,))
    mine = [filled(comm, 4 * 640, torch.float32) for comm in world]
    inputs = [tensor.clone() for tensor in mine]
    chunks = [kept(torch.zeros(640)) for _ in world]
    gathered = [kept(torch.zeros(4 * 640)) for _ in world]

    def calls() -> None:
        for _ in range(2):
            world.reduce_scatter_tensor(chunks, inputs)
            world.all_gather_into_tensor(gathered, chunks)
            world.all_reduce(mine)

    assert together(devices, world, calls) == [2, 2, 2]
    total = sum(inputs[1:], inputs[0])
    assert all(torch.equal(tensor, 4 * total) for tensor in mine)
    assert all(torch.equal(tensor, total) for tensor in gathered)


def test_one_launch_comes_behind_the_calls_of_threads(devices: Devices) -> None:
    world = devices.world(2, on=(0,))
    tensors = [kept(torch.ones(4096)) for _ in world]
    assert devices.emulated is not None

    def body(comm: Communicator) -> None:
        with devices.emulated.assuming(0):
            comm.all_reduce(tensors[comm.rank])

    def calls() -> None:
        for _ in range(3):
            world.run(body)
            world.all_reduce(tensors)

    assert together(devices, world, calls) == [3, 0, 0]
    assert all(torch.equal(tensor, torch.full((4096,), 64.0)) for tensor in tensors)


def test_ranks_that_differ_are_refused_before_a_launch(devices: Devices) -> None:
    world = devices.world(2, on=(0,))
    tensors = [kept(torch.ones(8)), kept(torch.ones(9))]

    def differ() -> None:
        with pytest.raises(ValueError, match="differ"):
            world.all_reduce(tensors)

    assert together(devices, world, differ) == [0, 0, 0]
    tensors[1] = kept(torch.ones(8))
    assert together(devices, world, lambda: world.all_reduce(tensors)) == [1, 0, 0]
    assert all(torch.equal(tensor, torch.full((8,), 2.0)) for tensor in tensors)


def test_a_capture_of_all_ranks_takes_the_checked_path(devices: Devices) -> None:
    world = devices.world(2, on=(0,))
    tensors = [kept(torch.ones(64)) for _ in world]
    runtime = devices.emulated
    assert runtime is not None

    def calls() -> None:
        world.all_reduce(tensors)
        with runtime.capture() as graph:
            world.all_reduce(tensors)
        for _ in range(2):
            runtime.replay(graph)
        runtime.synchronize(0)
        world.all_reduce(tensors)

    assert together(devices, world, calls) == [2, 0, 0]
    assert all(torch.equal(tensor, torch.full((64,), 16.0)) for tensor in tensors)
