# SPDX-License-Identifier: Apache-2.0
"""If parameters change after a graph was built, its backward raises, as with torch.optim.

If the parameters still have the values that the graph has saved, backward runs, whatever was
unsharded and freed in between.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import CommOptions, Disk, zero
from ringcomm.optim import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    AdamWOptions,
    Lion,
    LossScaleOptions,
    LossScaler,
    Muon,
    Sharded,
    muon_groups,
)
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
OPTIONS = CommOptions(timeout=60.0, segment_bytes=4096, channels=2, copy_engine_bytes=1 << 16)
torch.manual_seed(0)
BASE = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(module: Any, turn: int = 0) -> Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(turn))
    param = next(module.parameters())
    return module(x.to(param.device, param.dtype)).square().mean()


def assert_stale(graph: Tensor) -> None:
    with (
        torch.autograd.set_multithreading_enabled(False),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        graph.backward()


def step(module: Any, optimizer: Any, turn: int = 1) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        loss_of(module, turn).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- steps --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda module, **more: AdamW(module.parameters(), lr=0.1, **more),
    "SGD": lambda module, **more: SGD(module.parameters(), lr=0.1, **more),
    "Lion": lambda module, **more: Lion(module.parameters(), lr=0.1, **more),
    "AdamW8bit": lambda module, **more: AdamW8bit(module.parameters(), lr=0.1, **more),
    "Adafactor": lambda module, **more: Adafactor(module.parameters(), lr=0.1, **more),
    "Muon": lambda module, **more: Muon(muon_groups(module), lr=0.1, **more),
    "Adagrad": lambda module, **more: Sharded(
        torch.optim.Adagrad, module.parameters(), lr=0.1, **more
    ),
}


def one_step(comm: Any, stage: int | None, made: str, clips: bool = False, **options: Any) -> None:
    module = deepcopy(BASE).to(comm.device)
    more = {}
    if stage is None:
        more = {"comm": comm, "options": AdamWOptions(**options)}
    else:
        zero.shard(module, stage, comm=comm, options=zero.ZeroOptions(**options))
    optimizer = OPTIMIZERS[made](module, **more)
    for turn in range(2):
        kept, graph = loss_of(module), loss_of(module)
        with torch.autograd.set_multithreading_enabled(False):
            loss_of(module, 1).backward()
            kept.backward(retain_graph=True)
        if clips:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert_stale(graph)
        assert_stale(kept)
        optimizer.zero_grad()
        step(module, optimizer, turn)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_step_makes_graphs_stale(worlds, stage):
    for number, made in enumerate(OPTIMIZERS):
        worlds(2).run(one_step, stage, made, clips=number % 2 == 0)


@pytest.mark.parametrize("stage", [None, 3])
def test_a_step_of_a_device_makes_graphs_stale(devices, stage):
    with devices.new_world(2, options=OPTIONS) as world:
        devices.run(world, partial(one_step, algorithm="one_shot"), stage, "AdamW", True)


def test_a_step_over_nodes_makes_graphs_stale():
    quantized = {"compression": zero.Compression(parameters="int8")}
    cases: list[tuple[int, dict[str, Any]]] = [
        *((2, {"state": "node"}), (3, {}), (3, {"params": "world"})),
        *((1, quantized), (3, quantized)),
    ]
    with ringcomm.local_world(4, nodes=[2, 2], timeout=60) as world:
        for stage, options in cases:
            world.run(partial(one_step, **options), stage, "AdamW")


def test_a_step_with_parameters_on_a_disk_makes_graphs_stale(worlds, tmp_path):
    disk = Disk(skip_unless_disk(tmp_path), buffer_bytes=24 << 10, resident_bytes=12 << 10)
    worlds(2).run(partial(one_step, offload_params=disk), 3, "AdamW")


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_in_backward_makes_graphs_stale(worlds, stage):
    def work(comm):
        module = zero.shard(deepcopy(BASE), stage, comm=comm)
        optimizer = AdamW(module.parameters(), options=AdamWOptions(update="in_backward"))
        for turn in range(2):
            graph = loss_of(module)
            step(module, optimizer, turn)
            assert_stale(graph)
            step(module, optimizer, turn)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_take_no_step_keep_their_graphs(worlds, stage):
    """A skipped step, or one without gradients of some parameters, keeps graphs as in torch."""

    def work(comm):
        module = zero.shard(deepcopy(BASE), stage, comm=comm)
        scaler = LossScaler(LossScaleOptions(init_scale=2.0))
        optimizer = AdamW(module.parameters(), lr=0.1, loss_scaler=scaler)
        graph = loss_of(module)
        (loss_of(module, 1) * float("inf")).backward()
        optimizer.step()
        assert optimizer.skipped_steps == 1
        optimizer.zero_grad()
        graph.backward()
        optimizer.zero_grad()
        with zero.unsharded(module):
            before = module[4].weight._version
        scaler.scale(module[:3](torch.ones(2, 8)).sum()).backward()
        optimizer.step()
        with zero.unsharded(module):
            assert module[4].weight._version == before

    worlds(2).run(work)


# ---- other changes ------------------------------------------------------------------------------


def load(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    zero.load(folder / "checkpoint", module, optimizer)


def load_module(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    zero.load(folder / "checkpoint", module, strict=False)


def load_pretrained(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    zero.load_pretrained(module, folder / "weights")


def write_unsharded(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    with zero.unsharded(module, write_from=1):
        if comm.rank == 1:
            for param in module.parameters():
                param.data.mul_(2.0)


def write_shards(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    with zero.writing_shards(module) as shards:
        for shard in shards.values():
            shard.values.mul_(2.0)


def set_masters(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    for param in module.parameters():
        zero.set_master(param, zero.get_master(param) * 2)


def exchange(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    others = {name: s.values * 2 for name, s in zero.local_shards(module).items()}
    before = loss_of(module)
    with zero.exchanged(module, others):
        assert_stale(before)
        inside = loss_of(module)
    assert_stale(inside)


def train_state(comm: Any, module: Any, optimizer: Any, folder: Path) -> None:
    state = zero.TrainState(module, optimizer)
    state.load_state_dict(state.state_dict())


CHANGES: dict[str, Callable[..., None]] = {
    "load": load,
    "load a module": load_module,
    "load_pretrained": load_pretrained,
    "unsharded": write_unsharded,
    "writing_shards": write_shards,
    "set_master": set_masters,
    "exchanged": exchange,
    "TrainState": train_state,
}


@covering(strength=1, name=[*CHANGES], stage=range(4))
def test_other_changes_make_graphs_stale(worlds, tmp_path, stage, name):
    def work(comm, with_graph):
        module = zero.shard(deepcopy(BASE), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=0.1)
        step(module, optimizer)
        folder = tmp_path / str(with_graph)
        zero.save(folder / "checkpoint", 1, module, optimizer)
        zero.save_pretrained(module, folder / "weights")
        graph = loss_of(module) if with_graph else None
        CHANGES[name](comm, module, optimizer, folder)
        if graph is not None:
            assert_stale(graph)
            optimizer.zero_grad()
        step(module, optimizer)
        return zero.full_state_dict(module)

    assert_same_bits(worlds(2).run(work, True)[0], worlds(2).run(work, False)[0])


@pytest.mark.parametrize("master", ["fp32", "remainder"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizers_load_makes_graphs_stale_where_masters_decide(worlds, stage, master):
    precision = zero.Precision(param=torch.bfloat16, master=master)

    def work(comm):
        options = zero.ZeroOptions(precision=precision)
        module = zero.shard(deepcopy(BASE), stage, comm=comm, options=options)
        optimizer = AdamW(module.parameters(), lr=0.1)
        step(module, optimizer)
        state = optimizer.full_state_dict()
        graph = loss_of(module)
        optimizer.load_torch_state_dict(state)
        if master == "remainder":
            assert_stale(graph)
        else:
            graph.backward()
        optimizer.zero_grad()  # ends the failed backward on all ranks

    worlds(2).run(work)


def test_what_prepare_broadcasts_makes_graphs_stale(worlds):
    def work(comm):
        module = deepcopy(BASE)
        optimizer = AdamW(module.parameters(), comm=comm)
        graph = loss_of(module)
        optimizer.prepare()
        assert_stale(graph)

    worlds(2).run(work)


# ---- what leaves graphs as they are -------------------------------------------------------------


class Encoder(nn.Module):
    """A module whose children are called, but not the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x) * self.scale.square()

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


ENCODER = Encoder()
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def in_unsharded(module: Any) -> Tensor:
    with zero.unsharded(module):
        return nn.functional.linear(leaf(), module.blocks[1].weight) * module.scale.square()


def encoded_in_unsharded(module: Any) -> Tensor:
    with zero.unsharded(module):
        return module.encode(X)


USES: dict[str, Callable[[Any], Tensor]] = {
    "call": lambda module: module(X),
    "encode": lambda module: module.encode(X),
    "forward": lambda module: module.forward(X),
    "part": lambda module: module.norm(leaf()),
    "unit": lambda module: module.blocks[1](leaf()),
    "forward of a unit": lambda module: module.blocks[1].forward(leaf()),
    "weight of a unit": lambda module: nn.functional.linear(leaf(), module.blocks[1].weight),
    "parameter": lambda module: module.scale * module.scale,
    "parameter after a call": lambda module: module(X) + module.scale.square(),
    "twice": lambda module: module.encode(X) + module.encode(X * 2),
    "in unsharded()": in_unsharded,
    "encode in unsharded()": encoded_in_unsharded,
}


def evaluate(module: Any) -> None:
    with torch.no_grad():
        module(X)


def encode(module: Any) -> None:
    with torch.inference_mode():
        module.encode(X)


def evaluate_unit(module: Any) -> None:
    with torch.no_grad():
        module.blocks[1](X)


def read(module: Any) -> None:
    with zero.unsharded(module):
        assert not any(param.isnan().any() for param in module.parameters())


def train(module: Any) -> None:
    with zero.no_sync(module):
        (module(X).sum() * 0.0).backward()


BETWEEN: dict[str, Callable[[Any], object]] = {
    "nothing": lambda module: None,
    "evaluation": evaluate,
    "encode": encode,
    "evaluation of a unit": evaluate_unit,
    "unsharded": read,
    "full_state_dict": zero.full_state_dict,
    "a forward": lambda module: module(X),
    "a backward": train,
}


@pytest.mark.parametrize("name", USES)
def test_a_graph_runs_backward_whatever_was_unsharded_and_freed_meanwhile(worlds, name):
    def work(comm, stage):
        options = zero.ZeroOptions(bucket_elems=512)
        module: Any = zero.shard(deepcopy(ENCODER), stage, comm=comm, options=options)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        states = {}
        for key, between in BETWEEN.items():
            loss = USES[name](module).pow(3).mean()
            between(module)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            optimizer.zero_grad()  # ends the failed backward on all ranks
            if stage == 3:
                # No parameter stays unsharded once the graph is gone.
                evaluate(module)
                assert all(", resharded" in repr(param) for param in module.parameters()), key
            states.update({f"{key}: {n}": t for n, t in zero.full_state_dict(module).items()})
        return states

    wanted = worlds(2).run(work, 1)[0]
    assert_same_bits(worlds(2).run(work, 3)[0], wanted)


def test_views_taken_in_unsharded_keep_their_values(worlds):
    """Covers the case that a graph kept the parameters unsharded until the step."""

    def work(comm):
        module: Any = zero.shard(deepcopy(ENCODER), 3, comm=comm)
        optimizer = AdamW(module.parameters(), lr=0.1)
        with zero.unsharded(module):
            view = module.scale.detach()
            loss = module.scale.square().sum()
        evaluate(module)
        loss.backward()
        optimizer.step()
        assert torch.equal(view, ENCODER.scale)
        with zero.unsharded(module):
            assert not torch.equal(view, module.scale)

    worlds(2).run(work)
