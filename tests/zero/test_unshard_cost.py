# SPDX-License-Identifier: Apache-2.0
"""Limits on the host's cost of stage 3 on a device, with one sharded module and with several.

One rank trains a GPT of twelve blocks and tiny width on a stub driver that does nothing. So
gradients stay unreduced and parameters unchanged, which changes no count. For each limit, a mutant
must exceed it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm import Communicator, cuda, zero
from ringcomm.comm import agreement
from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.examples.train_gpt import GPT, VOCABULARY, ModelConfig
from ringcomm.memory import device_heap
from ringcomm.optim import AdamW
from ringcomm.optim.dtensors import set_local
from ringcomm.zero.stages import buckets, order, unshard
from ringcomm.zero.stages.buckets import ShardedBucket
from ringcomm.zero.stages.sharding import engine_of
from tests.support.device_worlds import Devices
from tests.support.stub_driver import COMPILER, StubRuntime
from tests.zero.test_two_modules import one_uses_more, two_modules

needs_stub = pytest.mark.skipif(COMPILER is None, reason="the stub needs a C++ compiler")
Step = Callable[[], None]
MODEL = ModelConfig(width=16, depth=12, heads=2, context=8, tied=True)
COPIERS = ("zero/stages/unshard.py",)
WARM_UP = 5
PARTS = "buckets", "hooks", "resharded", "unshard"
FILES = (*(f"zero/stages/{name}.py" for name in PARTS), "optim/dtensors.py")
# A step runs 13 unit forwards, including the root's, and 12 backwards that unshard again.
UNSHARDINGS = 25
FRAMES = 545


@pytest.fixture
def runtime() -> StubRuntime:
    return StubRuntime()


@pytest.fixture
def comm(runtime: StubRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    before = cuda.use(runtime)
    # The text comes from this rank alone, since the stub gathers nothing.
    monkeypatch.setattr(agreement, "gather_bytes", lambda comm, text, longest: [text])
    try:
        with ringcomm.local_world(1, device="cuda:0") as (made,):
            yield made
    finally:
        device_heap.close_heaps()
        cuda.use(before)


def _step_of(
    comm: Communicator,
    stage: int,
    modules: int = 1,
    options: zero.ZeroOptions | None = None,
    model: ModelConfig = MODEL,
) -> Step:
    """Returns a step in which one backward runs through ``modules`` modules; warms it up first."""
    torch.manual_seed(0)
    made: list[Any] = [
        zero.shard(GPT(model), stage, comm=comm, options=options) for _ in range(modules)
    ]
    optimizers = [AdamW(module.parameters(), comm=comm) for module in made]
    tokens = torch.randint(VOCABULARY, (2, MODEL.context + 1))

    def step() -> None:
        sum(module(tokens[:, :-1], tokens[:, 1:]) for module in made).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    return step


# ---- hosts that wait for their device ------------------------------------------------------------


def _any_of_by_device(
    comm: Communicator, numbers: Sequence[int], mine: Iterable[bool]
) -> list[int]:
    """Mutant: ranks agree on the devices, and the host waits for its device."""
    flags = torch.tensor(list(mine), dtype=torch.int32, device=comm.device)
    comm.all_reduce(flags, ReduceOp.MAX)
    comm.engine.finish_host_side()
    return [number for number, flag in zip(numbers, flags.tolist(), strict=True) if flag]


def _waits(runtime: StubRuntime, step: Step) -> int:
    """Returns how often the host waits for the device or one of its events."""
    runtime.driver.reset()
    runtime.calls.clear()
    step()
    return runtime.calls["synchronize"] + runtime.driver.counted().get("synchronize", 0)


@needs_stub
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("modules", [1, 2])
def test_no_host_waits_for_its_device(
    runtime: StubRuntime, comm: Communicator, stage: int, modules: int
) -> None:
    assert _waits(runtime, _step_of(comm, stage, modules)) == 0


@needs_stub
def test_an_agreement_of_devices_is_seen(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "any_of", _any_of_by_device)
    assert _waits(runtime, _step_of(comm, 2, modules=1)) == 0
    assert _waits(runtime, _step_of(comm, 2, modules=2)) > 0


def _waits_of_two(comm: Communicator, stage: int, counts: Counter[str]) -> int:
    """Returns both ranks' waits in two steps in which only rank 0 uses all parameters."""
    options = zero.ZeroOptions(bucket_elems=512, algorithm="one_shot")
    g, d = (zero.shard(each, stage, comm=comm, options=options) for each in two_modules())
    optimizers = [AdamW(each.parameters(), comm=comm) for each in (g, d)]
    for turn in range(4):
        comm.barrier()
        if turn == 2:
            counts.clear()
            comm.barrier()
        with torch.autograd.set_multithreading_enabled(False):
            one_uses_more(comm, g, d, turn)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    comm.barrier()
    return counts["synchronize"]


@pytest.mark.parametrize("by_device", [False, True])
def test_two_ranks_with_two_modules(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, by_device: bool
) -> None:
    """The ranks use different parameters. Other tests check the values."""
    counts: Counter[str] = Counter()
    synchronize = devices.runtime.synchronize

    def counting(device: int) -> None:
        counts["synchronize"] += 1
        synchronize(device)

    monkeypatch.setattr(devices.runtime, "synchronize", counting)
    if by_device:
        monkeypatch.setattr(order, "any_of", _any_of_by_device)
    with devices.new_world(2) as world:
        for found in devices.run(world, _waits_of_two, 2, counts):
            assert (found > 0) == by_device


# ---- frames, operators and events of unsharding --------------------------------------------------


def _frames(step: Step) -> int:
    """Counts the Python calls in the files that unshard and reshard."""
    found = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.endswith(FILES)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def _events(runtime: StubRuntime, step: Step) -> int:
    runtime.driver.reset()
    step()
    found = runtime.driver.counted()
    return found.get("record", 0) + found.get("wait", 0)


class _Copies(TorchDispatchMode):
    """Counts the copy operators that an engine runs to unshard."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "copy_" in str(func):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.endswith(COPIERS):
                frame = frame.f_back
            self.found += frame is not None
        return func(*args, **(kwargs or {}))


def _copies(step: Step) -> int:
    """Counts the operators that fill buckets."""
    with _Copies() as copies:
        step()
    return copies.found


SEVERAL_BUCKETS = zero.ZeroOptions(bucket_elems=1024)
BUCKETS = pytest.mark.parametrize("options", [None, SEVERAL_BUCKETS], ids=["one", "several"])


def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = unshard.DeviceCopier.begin

    def begin_each(copier: unshard.DeviceCopier, buckets: Sequence[ShardedBucket]) -> None:
        for bucket in buckets:
            begin(copier, [bucket])

    monkeypatch.setattr(unshard.DeviceCopier, "begin", begin_each)


@needs_stub
def test_frames_of_unsharding(comm: Communicator) -> None:
    assert _frames(_step_of(comm, 3)) <= FRAMES


@needs_stub
def test_a_function_for_each_parameter_is_seen(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: each parameter is checked for being a DTensor when it gets its memory."""
    monkeypatch.setattr(buckets, "_set_data", set_local)
    assert _frames(_step_of(comm, 3)) > FRAMES


@needs_stub
@BUCKETS
def test_a_small_unit_is_unsharded_by_one_operator_and_no_event(
    runtime: StubRuntime, comm: Communicator, options: zero.ZeroOptions | None
) -> None:
    reductions = _events(runtime, _step_of(comm, 2, options=options))
    step = _step_of(comm, 3, options=options)
    assert _copies(step) == UNSHARDINGS
    assert _events(runtime, step) == reductions


@needs_stub
def test_an_operator_for_each_bucket_is_seen(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _one_by_one(monkeypatch)
    assert _copies(_step_of(comm, 3, options=SEVERAL_BUCKETS)) > UNSHARDINGS


@needs_stub
@BUCKETS
def test_a_large_unit_lies_between_two_events_of_its_own(
    runtime: StubRuntime,
    comm: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    options: zero.ZeroOptions | None,
) -> None:
    """A large unit records two events and waits for each once; a small unit uses none."""
    reductions = _events(runtime, _step_of(comm, 2, options=options))
    monkeypatch.setattr(unshard, "SMALL_BYTES", 0)
    monkeypatch.setattr(unshard, "AHEAD_BYTES", 0)
    assert _events(runtime, _step_of(comm, 3, options=options)) == reductions + 4 * UNSHARDINGS


@needs_stub
def test_events_for_each_bucket_are_seen(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reductions = _events(runtime, _step_of(comm, 2, options=SEVERAL_BUCKETS))
    monkeypatch.setattr(unshard, "SMALL_BYTES", 0)
    monkeypatch.setattr(unshard, "AHEAD_BYTES", 0)
    _one_by_one(monkeypatch)
    found = _events(runtime, _step_of(comm, 3, options=SEVERAL_BUCKETS))
    assert found > reductions + 4 * UNSHARDINGS


# Blocks of 1.5 MiB each; several blocks are unsharded together.
LARGER = replace(MODEL, width=176)
EVENTS = 60


@needs_stub
@pytest.mark.parametrize("joined", [True, False])
def test_units_above_the_limit_are_begun_together(
    runtime: StubRuntime, comm: Communicator, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """Mutant: each unit is started by itself."""
    monkeypatch.setattr(unshard.DeviceCopier, "joins_units", joined)
    step = _step_of(comm, 3, model=LARGER)
    assert (_events(runtime, step) <= EVENTS) == joined
    # The root is small; each other unit is copied by one native call.
    assert runtime.driver.counted()["copy"] == UNSHARDINGS - 1
    assert _copies(step) == 1


@needs_stub
def test_units_ahead_stay_within_their_limit(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[int] = []
    start = unshard.Unsharder._start

    def watched(unsharder: Any, begun: Sequence[ShardedBucket]) -> None:
        start(unsharder, begun)
        ahead.append(sum(bucket.size_bytes for bucket in unsharder._coming))

    monkeypatch.setattr(unshard.Unsharder, "_start", watched)
    step = _step_of(comm, 3, model=LARGER)
    ahead.clear()
    step()
    assert buckets.AHEAD_BYTES // 2 < max(ahead) <= buckets.AHEAD_BYTES


@needs_stub
def test_another_stream_waits_for_small_copies(runtime: StubRuntime, comm: Communicator) -> None:
    module: Any = zero.shard(GPT(MODEL), 3, comm=comm)
    unsharder: Any = engine_of(module, "test").unsharder
    first, *others = unsharder.buckets_of(engine_of(module, "test").setup.units[1])
    assert not others
    unsharder._start([first])
    runtime.driver.reset()
    stream = runtime.make_stream(0)
    with runtime.on_stream(stream):
        unsharder.unshard_bucket(first)
    (event,) = runtime.driver.records()
    assert runtime.driver.waits() == [(stream.handle, event)]
    unsharder.reshard_all()
