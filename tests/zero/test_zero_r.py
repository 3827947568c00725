# SPDX-License-Identifier: Apache-2.0
"""ZeRO-R's promises on memory beyond the model state: constant buffers, no fragmentation.

Rajbhandari et al., "ZeRO" (SC'20), section 6. ``docs/disk.md`` lists which features replace the
paper's. Partitioned activations (P_a) are in ``tests/functional/test_checkpoint.py``.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import Disk, zero
from ringcomm.extras.estimate import STAGES, ModelElems, Training
from ringcomm.memory import host_heap
from ringcomm.offload import scratch
from ringcomm.optim import AdamW, AdamWOptions, state_offload
from ringcomm.optim.buckets import Bucket, BucketMemory
from ringcomm.optim.layout import BucketLayout, Segment
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import covering
from tests.zero.test_memory import held_bytes

Tensor = torch.Tensor
WORLD = 2
# Kernel tables grow with the number of parameters, and are not part of the formula.
TABLES_BYTES = 1 << 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skip_unless_disk(tmp_path_factory.mktemp("disk"))


class Layers(nn.Module):
    """Layers of one size; each layer is a bucket of whole tiles."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner, bias=False)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).square().mean() for layer in self.layers)


def held_of(comm: Any, stage: int, disk: Disk, options: zero.ZeroOptions, sizes: Any) -> int:
    module = zero.shard(Layers(*sizes), stage, comm=comm, options=options)
    optimizer = AdamW(module.parameters(), options=AdamWOptions(offload_state=disk))
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(2, sizes[1])).backward()
        optimizer.step()
    return held_bytes(module, optimizer)


@covering(strength=1, stage=STAGES, larger={"layers": (9, 64, 64), "one parameter": (3, 64, 512)})
def test_nothing_but_the_tensors_themselves_grows(worlds, folder, stage, larger):
    """With state on a disk, a larger model holds only as many more bytes as the formula says.

    More layers have more parameters and gradients; a larger parameter also has a larger bucket.
    """
    smaller = (3, 64, 64)
    disk = Disk(
        folder, buffer_bytes=state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * 1024
    )
    options = zero.ZeroOptions(bucket_elems=4096)

    def bucket_bytes(sizes: tuple[int, int, int]) -> int:
        return 4 * ModelElems.of_module(Layers(*sizes)).largest

    def closed_form(sizes: tuple[int, int, int]) -> int:
        model = ModelElems.of_module(Layers(*sizes))
        training = Training(model, WORLD, 1, options, AdamWOptions(offload_state=disk))
        state, buffers = sum(training.state(stage)), training.buffers(stage)
        # Between steps no unit is unsharded, and no reduced sum is held.
        return state + buffers.grad_shard + (buffers.buckets if stage >= 2 else 0)

    def work(comm: Any) -> int:
        held = [held_of(comm, stage, disk, options, sizes) for sizes in (smaller, larger)]
        return held[1] - held[0]

    wanted = closed_form(larger) - closed_form(smaller)
    # Stage 3 uses a second bucket only if the first one is not reduced in time.
    spared = bucket_bytes(larger) - bucket_bytes(smaller) if stage == 3 else 0
    for grown in worlds(WORLD).run(work):
        assert wanted - spared <= grown <= wanted + TABLES_BYTES


def bucket_of(elems: int) -> Bucket:
    """Makes a bucket of one parameter, whose memory stays untouched address space."""
    layout = BucketLayout(torch.float32, elems, (Segment(0, elems, 0),))
    memory = BucketMemory(own_params=torch.empty(elems, dtype=torch.float32))
    return Bucket(0, layout, layout.chunk(0, 1), memory)


def test_a_parameter_of_200_million_elements_has_the_buffers_of_a_smaller_one(folder, monkeypatch):
    """Only the parameter's first piece is moved: 8 MiB of the reserved 1.6 GB."""
    disk = Disk(folder)
    made: list[int] = []

    aligned = scratch.aligned_buffer

    def allocate(size_bytes: int) -> Tensor:
        made.append(size_bytes)
        return aligned(size_bytes)

    monkeypatch.setattr(scratch, "aligned_buffer", allocate)
    found = []
    for elems in (20 << 20, 200 << 20):
        blocks, bucket = scratch.ScratchFile(folder, "the test"), bucket_of(elems)
        offload = state_offload.PiecedOffload(blocks, disk.buffer_bytes, disk.resident_bytes)
        bucket.keep_state("fp32", quantized_state=False, offload=offload)
        bucket.ensure(["exp_avg", "exp_avg_sq"])
        for piece in bucket.pieces(0, 1):
            piece.state.moments["exp_avg"].fill_(1.0)
        offload.wait()
        assert blocks.size_bytes == 8 * elems and blocks.bytes_written == 8 << 20
        told = Training(
            ModelElems(elems, largest=elems), 1, optimizer=AdamWOptions(offload_state=disk)
        )
        assert sum(made) == told.offloaded_state(0).buffers
        found.append([*made])
        made.clear()
    assert found[0] == found[1] == [8 << 20] * 8


# M_D of the paper: memory that lives long, among memory that comes and goes.


class Uneven(nn.Module):
    """Units of several sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = (width, 3 * width, width // 2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, each), nn.Tanh(), nn.Linear(each, width))
            for each in inner
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Churn:
    """Takes random steps, the same on each rank: trains, unshards, saves, grows and frees."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.random = comm, random.Random(7)
        self.jobs: list[tuple[Any, AdamW]] = []
        self.others: list[AdamW] = []
        self.kept: list[Tensor] = []
        self.most = 0
        for _ in range(2):
            self.begin()

    def begin(self) -> None:
        """Starts a model of another size, in place of one of the training models."""
        if len(self.jobs) == 3:
            self.jobs.pop(self.random.randrange(3))
        width, stage = self.random.choice([24, 64, 96, 200]), self.random.randrange(4)
        options = zero.ZeroOptions(bucket_elems=4096)
        module = zero.shard(Uneven(width), stage, comm=self.comm, options=options)
        self.jobs.append((module, AdamW(module.parameters())))

    def train(self) -> None:
        module, optimizer = self.random.choice(self.jobs)
        width = module.layers[0][0].in_features
        module(torch.ones(2, width)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def unshard(self) -> None:
        module, _ = self.random.choice(self.jobs)
        with zero.unsharded(self.random.choice([*module.layers, module])):
            pass

    def save(self) -> None:
        module, optimizer = self.random.choice(self.jobs)
        zero.full_state_dict(module)
        optimizer.state_dict()

    def grow(self) -> None:
        """Adds a parameter to an optimizer, or replaces a grown optimizer by a new one."""
        param = torch.zeros(self.random.randrange(1, 20_000)).requires_grad_()
        if not self.others or len(self.others[-1].param_groups) > 5:
            self.others = [*self.others[-1:], AdamW([param], comm=self.comm)]
        else:
            self.others[-1].add_param_group({"params": [param]})
        optimizer = self.others[-1]
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        optimizer.step()

    def keep(self) -> None:
        """Keeps some tensors of the user in the heap for a while."""
        self.kept = self.kept[-5:]
        self.kept.append(ringcomm.empty(self.random.randrange(1, 500_000)))

    def run(self, steps: int) -> None:
        ways: list[Callable[[], None]] = [self.train, self.unshard, self.save, self.keep]
        ways += [self.begin, self.grow]
        for each in self.random.choices(ways, [6, 8, 2, 4, 0.5, 1], k=steps):
            each()
            self.most = max(self.most, ringcomm.heap_stats()["used_bytes"])


def test_hundreds_of_random_steps_leave_the_heap_whole(monkeypatch):
    """The memory that the heap takes from the system stays near the peak of memory in use."""
    monkeypatch.setattr(host_heap, "_process", host_heap._ProcessHeap())
    host_heap.process_heap(1 << 30)

    def work(comm: Any) -> int:
        churn = Churn(comm)
        churn.run(400)
        return churn.most

    with ringcomm.local_world(WORLD, options=ringcomm.CommOptions(segment_bytes=64 << 10)) as world:
        begun = ringcomm.heap_stats()["used_bytes"]
        most = max(world.run(work))
        taken = ringcomm.heap_stats()["committed_bytes"]
        gc.collect()
        assert ringcomm.heap_stats()["used_bytes"] == begun
    assert most - begun > 10 * (2 << 20)
    # Memory is taken in units of 2 MiB. Without joining free blocks it would be 2.7 times as much.
    assert taken - begun <= 1.5 * (most - begun) + (2 << 20)
