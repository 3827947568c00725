# SPDX-License-Identifier: Apache-2.0
"""Sharded training on devices, here emulated, has the host's bits at every stage."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ringcomm import CommOptions, Disk, zero
from ringcomm.comm.device.launch import DeviceWork
from ringcomm.errors import UnsupportedError
from ringcomm.optim import Adafactor, AdamW, AdamW8bit, AdamWOptions, Muon
from ringcomm.optim.gradients import DeviceReducer, Into
from ringcomm.zero.stages import reduce, unshard
from ringcomm.zero.stages.sharding import engine_of
from tests.support.covering import covering, in_test_all
from tests.support.device_worlds import on_host
from tests.support.emulator.capture import graph_of, resized_in_graph
from tests.support.emulator.in_stream_order import InStreamOrder
from tests.zero.models import Run, assert_same_bits, new_model, train
from tests.zero.test_two_modules import norms_of_two, one_uses_more, two_modules

Tensor = torch.Tensor
SMALL = zero.ZeroOptions(bucket_elems=512, algorithm="one_shot")
BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16)
# Each segment holds whole tiles of 512 elements.
OPTIONS = CommOptions(timeout=60.0, segment_bytes=4096, channels=2, copy_engine_bytes=1 << 16)
KEPT = zero.Precision.preset("bf16-pure-sr", keep_fp32=("lora_a", "frozen", "head"))
RUNS = {
    "accumulated": Run("mlp", 0, 2, backwards=2),
    "Muon": Run("narrow gpt", 0, 2, precision=BF16, clip=0.3, kind=Muon),
    "Adafactor": Run("mlp", 0, 2, precision=BF16, kind=Adafactor),
    "NAdam": Run("mlp", 0, 2, precision=BF16, clip=0.3, kind=torch.optim.NAdam),
    "partial": Run("partial", 0, 2, backwards=2, quiet=False),
    "kept": Run("partial", 0, 2, clip=0.3, precision=KEPT),
    "pinned, 8 bits": Run("mlp", 0, 2, kind=AdamW8bit, adamw=AdamWOptions(offload_state="cpu")),
}


pytestmark = pytest.mark.usefixtures("resizing_in_stream_order")


@pytest.fixture
def resizing_in_stream_order(devices, monkeypatch):
    """Synchronizes before freeing: malloc reuses memory at once, a GPU's allocator does not."""
    if devices.emulated is None:
        return
    resize = torch.UntypedStorage.resize_

    def in_order(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if resized_in_graph(storage, size_bytes):
            return storage
        for device in devices.emulated.assumed_devices():
            devices.runtime.synchronize(device)
        return resize(storage, size_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", in_order)


def _on_device(comm, base, run):
    # Without this, ranks of one process share autograd's thread of a device.
    with torch.autograd.set_multithreading_enabled(False):
        state, norms = train(comm, base.to(comm.device), run)
    return {name: on_host(tensor) for name, tensor in state.items()}, norms


@covering(strength=1, stage=[0, 1, 2, 3], name=[*RUNS], beside=[False, True])
def test_a_device_trains_as_the_host_does(devices, worlds, monkeypatch, name, stage, beside):
    if beside:
        monkeypatch.setattr(reduce, "SMALL_BYTES", 0)
    assert_trains_alike(devices, worlds, replace(RUNS[name], stage=stage))


@pytest.mark.parametrize("several", [False, True])
def test_units_that_are_unsharded_on_a_stream_of_their_own(devices, worlds, monkeypatch, several):
    monkeypatch.setattr(unshard, "SMALL_BYTES", 0)
    if not several:
        monkeypatch.setattr(unshard, "AHEAD_BYTES", 0)
    assert_trains_alike(devices, worlds, replace(RUNS["Muon"], stage=3, backwards=2))


def assert_trains_alike(devices, worlds, run):
    """Asserts that a device trains to the host's bits."""
    run = replace(run, options={"algorithm": "one_shot"})
    base = new_model(run.model)
    # Offloading applies only to devices; on the host the state is in host memory anyway.
    in_memory = replace(run, adamw=replace(run.adamw, offload_state=None))
    wanted, norms = worlds(2).run(train, base, in_memory)[0]
    world = devices.new_world(2, options=OPTIONS)
    with world:
        for state, their_norms in devices.run(world, _on_device, base, run):
            assert their_norms == norms
            assert_same_bits(state, wanted)


@pytest.mark.parametrize("beside", [False, True])
def test_large_buckets_are_reduced_beside_the_callers_work(devices, monkeypatch, beside):
    asked: set[bool] = set()
    reduce_bucket = DeviceReducer.reduce

    def watched(reducer: DeviceReducer, grads: Tensor, into: Into, async_op: bool = False) -> Any:
        asked.add(async_op)
        return reduce_bucket(reducer, grads, into, async_op)

    monkeypatch.setattr(DeviceReducer, "reduce", watched)
    if beside:
        monkeypatch.setattr(reduce, "SMALL_BYTES", 0)
    run = replace(RUNS["accumulated"], stage=2, options={"algorithm": "one_shot"})
    with devices.new_world(2, options=OPTIONS) as world:
        devices.run(world, _on_device, new_model("mlp"), run)
    assert asked == {beside}


def _on_device_alone(comm, *arguments):
    with torch.autograd.set_multithreading_enabled(False):
        return norms_of_two(comm, *arguments)


@pytest.mark.parametrize("stage", [3, *in_test_all(2)])
def test_two_modules_of_which_ranks_use_different_parameters(devices, worlds, stage):
    modules = two_modules()
    wanted = worlds(2).run(norms_of_two, modules, 1, SMALL, one_uses_more)
    with devices.new_world(2, options=OPTIONS) as world:
        found = devices.run(world, _on_device_alone, modules, stage, SMALL, one_uses_more)
        assert found == wanted


def test_a_backward_asks_no_event_whether_it_has_passed(devices, monkeypatch):
    """Backward queries no event: while a graph is captured, a query is an error."""

    def ask(work: DeviceWork) -> bool:
        raise AssertionError("asked in a backward")

    monkeypatch.setattr(DeviceWork, "is_completed", ask)
    base = new_model("mlp")
    with devices.new_world(2, options=OPTIONS) as world:
        run = replace(RUNS["accumulated"], stage=2, options={"algorithm": "one_shot"})
        assert len(devices.run(world, _on_device, base, run)) == 2


@pytest.mark.parametrize("stage", [0, 3, *in_test_all(1, 2)])
def test_a_graph_replays_the_step_of_a_module(devices, stage):
    """Backwards and zero_grad() are eager; the learning rate changes between replays."""
    if devices.emulated is None:
        pytest.skip("tests/gpu/test_optimizer.py records with torch.cuda")
    base = new_model("mlp")

    def build(comm):
        # A replay would not wait for reductions on another stream, so none runs there.
        options = replace(SMALL, overlap=False)
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        lr = torch.tensor(1e-2)
        return module, lr, AdamW(module.parameters(), lr=lr)

    def backward(module, turn):
        generator = torch.Generator().manual_seed(turn)
        with torch.autograd.set_multithreading_enabled(False):
            module(torch.randn(4, 13, generator=generator)).backward()
        # Drop the views that the emulator keeps; then the backward has freed unsharded memory.
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, InStreamOrder):
                mode.finish()
        unsharder = engine_of(module, "backward").unsharder
        if unsharder is not None:
            unsharder.reshard_all()

    def step(optimizer):
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()

    def work(comm):
        modules, rates, optimizers = zip(*(build(comm) for _ in range(2)), strict=True)
        for module, optimizer in zip(modules, optimizers, strict=True):
            backward(module, 0)
            step(optimizer)
            optimizer.zero_grad(set_to_none=stage > 1)
            backward(module, 1)
        comm.engine.finish_host_side()
        step(optimizers[0])
        known = [rates[1]]
        with graph_of(devices.emulated, known, partial(step, optimizers[1])) as replay:
            replay()
            for turn in range(2, 5):
                for module, rate, optimizer in zip(modules, rates, optimizers, strict=True):
                    optimizer.zero_grad(set_to_none=stage > 1)
                    backward(module, turn)
                    rate.fill_(1e-2 / turn)
                step(optimizers[0])
                replay()
        comm.engine.finish_host_side()
        return [zero.full_state_dict(module) for module in modules]

    with devices.new_world(1, options=OPTIONS) as world:
        ((eager, replayed),) = devices.run(world, work)
    assert_same_bits(replayed, eager)
    assert not torch.equal(eager["head.weight"], base.head.weight)


def _build_on_disk(comm, folder):
    module = zero.shard(torch.nn.Linear(4, 4).to(comm.device), 1, comm=comm)
    optimizer = AdamW(module.parameters(), options=AdamWOptions(offload_state=Disk(folder)))
    with pytest.raises(UnsupportedError, match="expected parameters on the CPU"):
        optimizer.prepare()


def test_state_of_a_device_is_not_put_on_a_disk(devices, tmp_path):
    """State of a device cannot be on a disk: running kernels would read what transfers write."""
    with devices.new_world(2, options=OPTIONS) as world:
        devices.run(world, _build_on_disk, tmp_path)
