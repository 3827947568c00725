# SPDX-License-Identifier: Apache-2.0
"""A graphed step ends with the bits of eager steps at every stage, or refuses what it cannot do."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from ringcomm import AbortedError, ArgumentError, CommOptions, RingcommError, UnsupportedError, zero
from ringcomm.optim import (
    SGD,
    AdamW,
    AdamW8bit,
    AdamWOptions,
    Lion,
    LossScaleOptions,
    LossScaler,
    Muon,
    Sharded,
)
from ringcomm.zero.stages import graphed_step, reduce, unshard
from ringcomm.zero.stages.sharding import is_sharded
from tests.support.covering import covering
from tests.support.device_worlds import on_host
from tests.zero.models import assert_same_bits, new_model
from tests.zero.test_devices import resizing_in_stream_order

__all__ = ["resizing_in_stream_order"]

Tensor = torch.Tensor
OPTIONS = CommOptions(timeout=10.0, segment_bytes=4096, channels=2)
SMALL = zero.ZeroOptions(bucket_elems=512, algorithm="one_shot", overlap=True)
RULES: dict[str, Any] = {
    "AdamW": partial(AdamW, weight_decay=0.1),
    "momentum": partial(SGD, momentum=0.9),
    "Lion": Lion,
    "AdamW8bit": AdamW8bit,
}
PRECISIONS = {
    "fp32": zero.Precision(),
    "bf16": zero.Precision.preset("bf16-mixed"),
    "remainder": zero.Precision.preset("bf16-remainder"),
    "stochastic": zero.Precision.preset("bf16-pure-sr"),
}
STEPS, WARMUP = 6, 2

pytestmark = pytest.mark.usefixtures("resizing_in_stream_order")


class Training:
    """A sharded copy of a model, and one step of its training."""

    def __init__(
        self, comm: Any, base: Any, stage: Any, make: Any = AdamW, options: Any = SMALL, **more: Any
    ) -> None:
        self.module = deepcopy(base).to(comm.device)
        if stage is None:
            more["comm"] = comm
        else:
            zero.shard(self.module, stage, comm=comm, options=options)
        self.optimizer = make(self.module.parameters(), lr=1e-2, **more)
        self.scaler = more.get("loss_scaler")

    def step(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autograd.set_multithreading_enabled(False):
            loss = self.module(x)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        norm = self.optimizer.clip_grad_norm_(0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "norm": norm}


def batch(comm: Any, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + comm.rank)
    return torch.randn(4, 13, generator=generator).to(comm.device)


def run(training: Training, step: Any, comm: Any, steps: int = STEPS) -> list[Any]:
    """Takes steps, each with another learning rate, and returns all outputs and the final state."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    found = []
    for turn in range(steps):
        outputs = step(batch(comm, turn))
        found.append({name: each.detach().clone() for name, each in outputs.items()})
        schedule.step()
    comm.engine.finish_host_side()
    state = full_state(training.module)
    return [*found, {name: on_host(each) for name, each in state.items()}]


def full_state(module: Any) -> Any:
    return zero.full_state_dict(module) if is_sharded(module) else module.state_dict()


def make_readable(devices: Any, training: Training) -> None:
    """Registers the learning rates as host tensors, since the emulator keeps all memory there."""
    if devices.emulated is not None:
        rates = [group["lr"] for group in training.optimizer.param_groups]
        devices.emulated.host_tensors.extend(rates)


def both(comm: Any, devices: Any, build: Any) -> bool:
    eager = build(comm)
    wanted = run(eager, eager.step, comm)
    if is_sharded(eager.module):
        zero.remove_sharding(eager.module)  # otherwise several modules would agree on the host
    graphed = build(comm)
    step = zero.GraphedStep(graphed.step, graphed.optimizer, warmup=WARMUP)
    make_readable(devices, graphed)
    found = run(graphed, step, comm)
    assert "captured" in repr(step)
    for got, want in zip(found, wanted, strict=True):
        assert_same_bits(got, want)
    assert not torch.equal(wanted[0]["loss"], wanted[-2]["loss"])
    counts = (eager.optimizer.steps_taken.item(), eager.optimizer.skipped_steps.item())
    assert counts == (
        graphed.optimizer.steps_taken.item(),
        graphed.optimizer.skipped_steps.item(),
    )
    return True


@covering(strength=2, stage=[0, 1, 2, 3], rule=[*RULES], precision=[*PRECISIONS])
def test_graphed_steps_have_the_bits_of_eager_ones(two_devices, stage, rule, precision):
    base = new_model("mlp")
    options = zero.ZeroOptions(
        bucket_elems=512, algorithm="one_shot", overlap=True, precision=PRECISIONS[precision]
    )
    build = partial(Training, base=base, stage=stage, make=RULES[rule], options=options)
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        assert two_devices.run(world, both, two_devices, build) == [True, True]


@pytest.mark.parametrize(("stage", "several"), [(2, True), (3, True), (3, False)])
def test_large_buckets_and_units_are_captured_on_streams_of_their_own(
    two_devices, monkeypatch, stage, several
):
    """Lowers ``SMALL_BYTES``, so that buckets and units count as large, as in real models."""
    for module in (reduce, unshard):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    if not several:
        monkeypatch.setattr(unshard, "AHEAD_BYTES", 0)
    build = partial(Training, base=new_model("mlp"), stage=stage)
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        assert two_devices.run(world, both, two_devices, build) == [True, True]


def test_an_optimizer_of_an_unsharded_module_is_graphed_too(two_devices):
    base = new_model("mlp")
    build = partial(Training, base=base, stage=None)
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        assert two_devices.run(world, both, two_devices, build) == [True, True]


def scaled(comm: Any, base: Any, stage: int) -> Training:
    scaler = LossScaler(LossScaleOptions(init_scale=2.0**8, growth_interval=2), comm.device)
    return Training(comm, base, stage, loss_scaler=scaler)


def with_an_overflow(comm: Any, devices: Any, base: Any, stage: int) -> tuple[float, float]:
    """In two of six replayed steps one rank overflows; the second overflow follows a reset."""
    found = []
    for graphed in (False, True):
        training = scaled(comm, base, stage)
        step: Any = training.step
        if graphed:
            step = zero.GraphedStep(step, training.optimizer, warmup=1)
            make_readable(devices, training)
        results = []
        for turn in range(6):
            x = batch(comm, turn)
            if turn in (2, 4) and comm.rank == 1:
                x[0, 0] = float("inf")
            if turn == 3 and graphed:
                step.reset()
            results.append({name: t.detach().nan_to_num(-1.0) for name, t in step(x).items()})
        comm.engine.finish_host_side()
        skipped = float(training.optimizer.skipped_steps.item())
        scale = float(training.scaler.current.item())
        state = zero.full_state_dict(training.module)
        state = {name: on_host(each) for name, each in state.items()}
        found.append((results, state, skipped, scale))
        zero.remove_sharding(training.module)
    (eager, wanted, *counts), (replayed, state, *again) = found
    assert counts == again
    for one, other in zip([*eager, wanted], [*replayed, state], strict=True):
        assert_same_bits(other, one)
    return counts[0], counts[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_replayed_step_that_overflows_is_skipped_on_all_ranks(two_devices, stage):
    base = new_model("mlp")
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        found = two_devices.run(world, with_an_overflow, two_devices, base, stage)
    assert found[0] == found[1]
    assert found[0][0] == 2.0


def beside_eager_work(comm: Any, devices: Any, base: Any, stage: int) -> bool:
    """Evaluates, writes parameters and takes eager steps between replays."""
    states = []
    for graphed in (False, True):
        options = zero.ZeroOptions(
            bucket_elems=512,
            algorithm="one_shot",
            overlap=True,
            reshard_after_forward=False,
            precision=PRECISIONS["bf16"],
        )
        training = Training(comm, base, stage, options=options)
        step: Any = training.step
        if graphed:
            step = zero.GraphedStep(step, training.optimizer, warmup=1)
            make_readable(devices, training)
        seen = []
        for turn in range(7):
            (training.step if turn == 4 else step)(batch(comm, turn))
            with torch.no_grad():
                # At stage 3 the parameters stay unsharded, and hold the current values.
                seen.append({"loss": training.module(batch(comm, 50)).clone()})
            if turn == 3:
                with zero.unsharded(training.module, write_from=0), torch.no_grad():
                    training.module.head.weight.mul_(1.5)
            if turn == 5:
                training.optimizer.param_groups[0]["lr"] = 0.05
        comm.engine.finish_host_side()
        state = zero.full_state_dict(training.module)
        states.append([*seen, {name: on_host(each) for name, each in state.items()}])
        zero.remove_sharding(training.module)
    for eager, replayed in zip(*states, strict=True):
        assert_same_bits(replayed, eager)
    return True


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_replays_and_eager_work_take_turns(two_devices, stage):
    base = new_model("mlp")
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        assert two_devices.run(world, beside_eager_work, two_devices, base, stage) == [True, True]


def test_replays_without_the_host_side_of_a_step_differ(two_devices, monkeypatch):
    """Negative control: without the host's part of a step, a replay gives other tensors."""
    monkeypatch.setattr(graphed_step._Captured, "begin_replay", lambda self, engine: None)
    base = new_model("mlp")
    with (
        two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world,
        pytest.raises(AssertionError, match="expected tensor"),
    ):
        two_devices.run(world, beside_eager_work, two_devices, base, 3)


def one_is_eager(comm: Any, devices: Any, base: Any) -> list[str]:
    training = Training(comm, base, 1)
    step: Any = training.step
    if comm.rank == 0:
        step = zero.GraphedStep(step, training.optimizer, warmup=1)
        make_readable(devices, training)
    step(batch(comm, 0))
    with pytest.raises(RingcommError) as caught:
        for turn in range(1, 4):
            step(batch(comm, turn))
            comm.engine.finish_host_side()
    return [type(caught.value).__name__, str(caught.value)]


def test_a_capture_while_a_peer_is_eager_raises_on_both(two_devices):
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        found = two_devices.run(world, one_is_eager, two_devices, new_model("mlp"))
    assert [kind for kind, _ in found] == ["MismatchError"] * 2
    assert all("the ranks made different calls" in text for _, text in found), found


def one_reads_the_device(comm: Any, devices: Any, base: Any) -> str:
    training = Training(comm, base, 1)

    def step(x: Tensor) -> Tensor:
        loss = training.step(x)["loss"]
        if comm.rank == 1:
            loss.item()
        return loss

    graphed = zero.GraphedStep(step, training.optimizer, warmup=1)
    make_readable(devices, training)
    graphed(batch(comm, 0))
    before = zero.full_state_dict(training.module)
    with pytest.raises(UnsupportedError) as caught:
        graphed(batch(comm, 1))
    assert_same_bits(zero.full_state_dict(training.module), before)
    training.optimizer.zero_grad()
    training.step(batch(comm, 1))  # training continues eagerly
    comm.engine.finish_host_side()
    return str(caught.value)


def test_a_step_that_reads_the_device_is_refused_on_all_ranks(two_devices):
    with two_devices.new_world(2, on=(0, 1), options=OPTIONS) as world:
        told, own = two_devices.run(world, one_reads_the_device, two_devices, new_model("mlp"))
    assert "rank 1 of 2: the step cannot be captured in a graph" in own and ".item()" in own
    assert "rank 1 of 2 failed, so no rank goes on" in told


def refusals_of_calls(comm: Any, devices: Any, base: Any) -> bool:
    training = Training(comm, base, 1)
    step = zero.GraphedStep(training.step, training.optimizer, warmup=1)
    make_readable(devices, training)
    group = training.optimizer.param_groups[0]
    weight = training.module.head.weight
    x = batch(comm, 0)
    with pytest.raises(ArgumentError, match="argument 0: expected a tensor on"):
        step(x.clone().requires_grad_())
    for _ in range(3):
        step(x)
    for given, found in [
        (
            (x[:2],),
            r"expected a torch.float32 of \(4, 13\) on .*, got a torch.float32 of \(2, 13\)",
        ),
        ((x.double(),), "got a torch.float64"),
        ((3.0,), "got 3.0"),
        ((x, x), "expected arguments as at the first call"),
    ]:
        with pytest.raises(ArgumentError, match=found):
            step(*given)
    group["weight_decay"] = 0.5
    with pytest.raises(ArgumentError, match=r"weight_decay was 0\.01 in the capture and is"):
        step(x)
    group["weight_decay"] = 0.01
    weight.requires_grad_(False)
    with pytest.raises(ArgumentError, match="were frozen or unfrozen since"):
        step(x)
    weight.requires_grad_(True)
    step(x)
    step.reset()
    step(x[:2])
    assert "1 eager calls" in repr(step)
    step(x[:2])
    comm.engine.finish_host_side()
    assert "captured" in repr(step)
    comm.abort("no more")
    with pytest.raises(AbortedError, match="no more"):
        step(x[:2])
    return True


def test_calls_that_a_graph_cannot_serve_are_refused(devices):
    with devices.new_world(1, options=OPTIONS) as world:
        assert devices.run(world, refusals_of_calls, devices, new_model("mlp")) == [True]


REFUSED: dict[str, tuple[Any, str]] = {
    "Muon": (Muon, "Muon reads on the host whether a step is skipped"),
    "Sharded": (partial(Sharded, torch.optim.NAdam), "Sharded reads on the host"),
    "offloaded": (partial(AdamW, options=AdamWOptions(offload_state="cpu")), "offload_state='cpu'"),
}


def refused(comm: Any, make: Any) -> str:
    layer = zero.shard(torch.nn.Linear(8, 8, bias=False), 1, comm=comm)
    optimizer = make(layer.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError) as caught:
        zero.GraphedStep(lambda: None, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_host_is_refused_at_construction(devices, name):
    make, expected = REFUSED[name]
    with devices.new_world(1, options=OPTIONS) as world:
        (text,) = devices.run(world, refused, make)
    assert expected in text


def several_modules(comm: Any) -> str:
    one, other = (zero.shard(torch.nn.Linear(8, 8), 2, comm=comm) for _ in range(2))
    with pytest.raises(UnsupportedError) as caught:
        zero.GraphedStep(lambda: None, AdamW(one.parameters()))
    del other
    return str(caught.value)


def test_ranks_and_modules_that_meet_on_the_host_are_refused(devices, worlds):
    with devices.new_world(1, options=OPTIONS) as world:
        (text,) = devices.run(world, several_modules)
        assert "several sharded modules share its communicator" in text
    with devices.new_world(2, options=OPTIONS) as world:
        assert all("share the device" in each for each in devices.run(world, refused, AdamW))
    with devices.host_tensors():
        assert "its parameters are on the CPU" in worlds(2).run(refused, AdamW)[0]


def test_arguments_are_checked():
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(4))])
    wrong: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))])
    with pytest.raises(ArgumentError, match="step: expected a function"):
        zero.GraphedStep(None, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"optimizer: expected one of ringcomm\.optim"):
        zero.GraphedStep(print, wrong)
    for warmup in (0, 1.5, True):
        with pytest.raises(ArgumentError, match="warmup: expected a number of calls >= 1"):
            zero.GraphedStep(print, optimizer, warmup=warmup)  # type: ignore[arg-type]
