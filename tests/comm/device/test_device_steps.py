# SPDX-License-Identifier: Apache-2.0
"""On devices the sharded optimizer's steps equal the host's in every bit, in every form."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions
from ringcomm.optim import SGD, AdamW, AdamW8bit, AdamWOptions, Lion, LossScaleOptions, LossScaler
from tests.support.covering import covering, in_test_all
from tests.support.device_worlds import Devices
from tests.support.emulator.capture import graph_of

# A ring's pieces must be multiples of a tile of 512 elements.
COMM = CommOptions(timeout=20.0, segment_bytes=4096, channels=2)
SHAPES = ((700,), (3, 5), (40, 41), ())
STEPS = 3


def values(dtype: torch.dtype, rank: int, turn: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def train(comm, dtype, options, clip, groups=None, make=AdamW):
    """Returns the parameters after some steps; in one step a parameter has no gradient."""
    params = [torch.nn.Parameter(each.to(comm.device)) for each in values(dtype, 99, 99)]
    decay, no_decay = {"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}
    optimizer = make([decay, {**no_decay, **(groups or {})}], lr=1e-2, comm=comm, options=options)
    norms = []
    for turn in range(STEPS):
        for param, grad in zip(params, values(dtype, comm.rank, turn), strict=True):
            param.grad = grad.to(comm.device)
        if turn == 1:
            params[1].grad = None
        if clip:
            norms.append(optimizer.clip_grad_norm_(0.5).clone())
        optimizer.step()
    return [param.detach().clone() for param in params], norms


def on_host(world_size, *arguments):
    with ringcomm.local_world(world_size, timeout=20.0, options=COMM) as world:
        return world.run(lambda comm: train(comm, *arguments))[0]


def same_as_on_host(
    devices: Devices, world_size, dtype, options, clip=False, groups=None, make=AdamW
):
    arguments = (dtype, options, clip, groups, make)
    with devices.host_tensors():
        wanted, norms = on_host(world_size, *arguments)

    def body(comm):
        got, found = train(comm, *arguments)
        comm.engine.finish_host_side()
        return [each.cpu() for each in got], [each.cpu() for each in found]

    for got, found in devices.run(devices.world(world_size, options=COMM), body):
        assert all(map(torch.equal, got, wanted))
        assert all(map(torch.equal, found, norms)), (found, norms)


@covering(
    world_size=[1, 3], algorithm=["one_shot", "ring"], clip={"one pass": False, "two passes": True}
)
def test_every_form(devices, world_size, algorithm, clip):
    same_as_on_host(
        devices, world_size, torch.float32, AdamWOptions(algorithm=algorithm), clip=clip
    )


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [AdamW, AdamW8bit])
def test_each_channel_reads_its_own_gradients(devices, make, clips):
    """The parameter is large enough to be divided between several channels."""

    def step(comm: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        param = torch.nn.Parameter(torch.randn(20000, generator=generator).to(comm.device))
        optimizer = make([param], lr=1e-2, comm=comm)
        param.grad = torch.randn(20000, generator=generator).to(comm.device)
        if clips:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        if comm.device.type != "cpu":
            comm.engine.finish_host_side()
        return param.detach().cpu().clone()

    for ranks in (1, 3):
        with devices.host_tensors(), ringcomm.local_world(ranks, options=COMM) as host:
            wanted = host.run(step)[0]
        for got in devices.run(devices.world(ranks, options=COMM), step):
            assert torch.equal(got, wanted)


# An infinity, a NaN, and gradients whose steps need exact quotients: the common loops refuse them.
ODD = (float("inf"), float("nan"), 3e38, 1e-35, -1e-30, 1e-45, -0.0)


@covering(strength=1, world_size=[2, 4, 8], dtype=[torch.float32, torch.bfloat16])
def test_gradients_that_need_exact_steps(devices, world_size, dtype):
    """Every exponent occurs, also in the first step, whose moments are zero."""

    def step(comm: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(comm.rank)
        param = torch.nn.Parameter(torch.ones(20000, dtype=dtype, device=comm.device))
        optimizer = AdamW([param], lr=1e-2, comm=comm)
        for _ in range(2):
            exponents = torch.randint(-149, 127, (20000,), generator=generator)
            grads = torch.ldexp(torch.randn(20000, generator=generator), exponents)
            grads[:10000:7] = torch.tensor(ODD)[torch.arange(1429) % len(ODD)]
            param.grad = grads.to(dtype).to(comm.device)
            optimizer.step()
        if comm.device.type != "cpu":
            comm.engine.finish_host_side()
        return param.detach().cpu().clone()

    with devices.host_tensors(), ringcomm.local_world(world_size, options=COMM) as host:
        wanted = host.run(step)[0]
    assert 0 < int(wanted.isnan().sum()) < 10000
    for got in devices.run(devices.world(world_size, options=COMM), step):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


WAYS = {
    "master": AdamWOptions(),
    "remainder": AdamWOptions(master="remainder"),
    "stochastic": AdamWOptions(master="none", rounding="stochastic", seed=7),
    "accumulated": AdamWOptions(accumulate_dtype=torch.float32, check_finite=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16(devices, way):
    same_as_on_host(devices, 2, torch.bfloat16, WAYS[way])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "remainder"])
def test_float16(devices, way):
    same_as_on_host(devices, 2, torch.float16, WAYS[way])


@pytest.mark.parametrize(
    "groups",
    [{"amsgrad": True}, {"maximize": True, "betas": (0.3, 0.9)}],
    ids=["amsgrad", "maximize and beta1 below a half"],
)
def test_branches_of_the_update(devices, groups):
    same_as_on_host(devices, 2, torch.float32, AdamWOptions(), groups=groups)


RULES = {
    "SGD": SGD,
    "momentum": partial(SGD, momentum=0.9, weight_decay=0.1),
    "Lion": partial(Lion, weight_decay=0.1),
    "AdamW8bit": AdamW8bit,
}


@covering(strength=1, rule=[*RULES], way=["master", "remainder"])
def test_other_rules(devices, rule, way):
    groups = {"momentum": {"nesterov": True, "maximize": True}, "Lion": {"betas": (0.3, 0.5)}}
    dtype = torch.float32 if way == "master" else torch.bfloat16
    same_as_on_host(
        devices,
        2,
        dtype,
        WAYS[way],
        groups=groups.get(rule),
        clip=rule in ("Lion", "AdamW8bit"),
        make=RULES[rule],
    )


def test_torchs_grad_scaler_drives_one_rank(devices):
    """Its communicator only launches the kernels: there is no other rank that could overflow."""

    def body(comm):
        params = [torch.nn.Parameter(each.to(comm.device)) for each in values(torch.float32, 9, 9)]
        plain = [torch.nn.Parameter(param.detach().clone()) for param in params]
        optimizer, reference = AdamW(params, comm=comm), AdamW(plain, comm=comm)
        scaler = torch.amp.GradScaler(comm.device.type, init_scale=256.0)
        for turn in range(STEPS):
            for scaled, param, grad in zip(
                params, plain, values(torch.float32, 0, turn), strict=True
            ):
                param.grad = grad.to(comm.device)
                scaled.grad = scaler.scale(param.grad)
                if turn == 1:
                    scaled.grad = scaled.grad / 0.0
            scaler.step(optimizer)
            scaler.update()
            if turn != 1:
                reference.step()
        comm.engine.finish_host_side()
        assert optimizer.skipped_steps.item() == 1.0 and scaler.get_scale() == 128.0
        return all(map(torch.equal, params, plain))

    assert all(devices.run(devices.world(1, options=COMM), body))


def step_once(optimizer, clip):
    if clip:
        optimizer.clip_grad_norm_(0.5)
        optimizer.clip_grad_value_(0.1)
        optimizer.clip_grad_norm_(0.3, params=optimizer.param_groups[0]["params"][:2])
    optimizer.step()


# Rule and dtype. The cases below have clipping and scaling both on, both off, and one of them.
CAPTURED: dict[str, tuple[Any, torch.dtype]] = {
    "AdamW": (AdamW, torch.float32),
    "bfloat16": (AdamW, torch.bfloat16),
    "SGD": (partial(SGD, momentum=0.9), torch.float32),
}


@pytest.mark.parametrize(
    ("name", "clip", "scaled"),
    [
        ("AdamW", True, True),
        ("bfloat16", False, True),
        ("SGD", False, False),
        *in_test_all(("AdamW", False, False), ("AdamW", True, False), ("SGD", True, True)),
    ],
)
def test_a_graph_replays_steps_as_eager_ones(devices, name, clip, scaled):
    """No step waits for the device: step number, learning rate and scale are on the device.

    Two steps are captured, and replayed with other gradients and rates. A capture runs no part of a
    step, so values read during the capture would differ from those of the replay.
    """
    if devices.emulated is None:
        pytest.skip("tests/gpu/test_optimizer.py captures with torch.cuda")
    make, dtype = CAPTURED[name]

    def body(comm):
        def build():
            params = [torch.nn.Parameter(each.clone()) for each in values(dtype, 99, 99)]
            scaler = LossScaler(LossScaleOptions(growth_interval=2)) if scaled else None
            lr = torch.tensor(1e-2)
            optimizer = make(params, lr=lr, comm=comm, loss_scaler=scaler)
            give(params, 0)
            step_once(optimizer, clip)  # makes what a first step makes, outside of the capture
            return params, lr, optimizer

        def give(params, turn):
            for param, grad in zip(params, values(dtype, comm.rank, turn), strict=True):
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                with torch.no_grad():
                    param.grad.copy_(grad * 1024.0 if scaled else grad)
            if turn == 2:
                params[0].grad[3] = float("inf") if scaled else 1.0

        eager_params, eager_lr, eager = build()
        params, lr, optimizer = build()
        comm.engine.finish_host_side()
        before = [param.detach().clone() for param in params]

        def twice(which):
            step_once(which, clip)
            step_once(which, clip)

        with graph_of(devices.emulated, [lr], partial(twice, optimizer)) as replay:
            assert all(map(torch.equal, params, before)), "a capture runs nothing"
            for turn in range(1, 4):
                for each in (eager_lr, lr):
                    each.fill_(1e-2 / turn)
                give(eager_params, turn)
                give(params, turn)
                replay()
                twice(eager)
        comm.engine.finish_host_side()
        assert optimizer.steps_taken.item() == eager.steps_taken.item() == (5 if scaled else 7)
        assert optimizer.skipped_steps.item() == (2 if scaled else 0)
        assert not any(map(torch.equal, params, before))
        return all(map(torch.equal, params, eager_params))

    assert devices.run(devices.world(1, options=COMM), body) == [True]
