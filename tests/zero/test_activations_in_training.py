# SPDX-License-Identifier: Apache-2.0
"""Training with activations on a disk or recomputed keeps its bits; disk faults reach all ranks."""

from __future__ import annotations

import errno
import gc
import os
import threading
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ringcomm import Disk, DiskError, zero
from ringcomm.functional import partitioned_checkpoint
from ringcomm.optim import AdamW
from ringcomm.zero.stages.activations import ActivationStore
from ringcomm.zero.stages.engine import owner_of
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import covering, in_test_all
from tests.zero.models import MODELS, SMALL_BUCKET_ELEMS, assert_same_bits, new_model, text

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)
PAGE = 4096


@pytest.fixture
def folder(tmp_path):
    return skip_unless_disk(tmp_path)


class Checkpointed(nn.Module):
    """Recomputes a block in backward, in one of three ways."""

    def __init__(self, block: nn.Module, kind: str, comm: Any) -> None:
        super().__init__()
        self.block = block
        self.kind = kind
        self.comm = comm

    def forward(self, *args: Tensor) -> Any:
        if self.kind == "partitioned":
            return partitioned_checkpoint(self.block, *args, group=self.comm)
        return checkpoint(self.block, *args, use_reentrant=self.kind == "reentrant")


@dataclass(frozen=True)
class Job:
    """A training run of two ranks.

    Attributes:
        stage: stage of ZeRO.
        disk: where the activations are; None for memory.
        model: a key of MODELS.
        checkpoints: None, "reentrant", "other" or "partitioned".
        around: the part of training inside ``with``: "forward", "step", or "run".
        names: whether :func:`zero.activations_on` gets the module.
        units: see ZeroOptions.
    """

    stage: int
    disk: Disk | None = None
    model: str = "narrow gpt"
    checkpoints: str | None = None
    around: str = "step"
    names: bool = True
    units: Any = None


def train(comm, base, job: Job):
    """Runs two backwards per step, the first under no_sync; returns state, losses, file sizes."""
    options = replace(SMALL, units=job.units)
    module: Any = zero.shard(deepcopy(base), job.stage, comm=comm, options=options)
    if job.checkpoints is not None:
        for index, block in enumerate(module.blocks):
            module.blocks[index] = Checkpointed(block, job.checkpoints, comm)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    acts: Any = None
    if job.disk is not None:
        known = module if job.names else None
        acts = zero.activations_on(job.disk, module=known, least_bytes=1)

    def within(part: str) -> Any:
        return acts if acts is not None and part == job.around else nullcontext()

    losses, sizes = [], []
    # All ranks of a partitioned checkpoint must have the same inputs.
    rank = 0 if job.checkpoints == "partitioned" else comm.rank
    with within("run"):
        for turn in range(2):
            generator = torch.Generator().manual_seed(10 * turn + rank)
            for quiet in (True, False):
                batch = MODELS[job.model][1](generator, turn)
                with within("step"), zero.no_sync(module) if quiet else nullcontext():
                    with within("forward"):
                        loss = module(*batch)
                    loss.backward()
                losses.append(loss.item())
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(0 if acts is None else acts.size_bytes)
    del loss
    if acts is not None:
        gc.collect()
        assert acts.extents_in_use == 0
        assert acts.held_bytes <= job.disk.buffer_bytes
        assert acts.bytes_read > 0 or job.disk.resident_bytes
    state = {
        name.replace(".block.", "."): each for name, each in zero.full_state_dict(module).items()
    }
    zero.remove_sharding(module)
    return state, losses, sizes


def run(worlds, base, job: Job):
    return worlds(2).run(train, base, job)[0]


@pytest.mark.parametrize(
    ("stage", "checkpoints"),
    [(1, "reentrant"), (2, None), (3, "other"), *in_test_all((0, None), (1, None), (3, None))],
)
def test_training_has_the_bits_of_training_without(worlds, folder, stage, checkpoints):
    base = new_model("narrow gpt")
    wanted, losses, _ = run(worlds, base, Job(stage))
    small = Disk(folder, buffer_bytes=16 * PAGE)
    partly = Disk(folder, buffer_bytes=8 * PAGE, resident_bytes=40 * PAGE)
    ways = [(small, "forward"), (partly, "step"), (small, "run")]
    # Each stage tests one way, but stage 3 all: it also unshards again in backward.
    if stage < 3:
        ways = [ways[stage]]
    elif checkpoints is not None:
        ways = ways[::2]
    for disk, around in ways:
        job = Job(stage, disk, checkpoints=checkpoints, around=around)
        found, theirs, sizes = run(worlds, base, job)
        assert theirs == losses
        assert_same_bits(found, wanted)
        # Steps after the first one reuse its file extents.
        assert len(set(sizes)) == 1, sizes


@pytest.mark.parametrize("stage", STAGES)
def test_partitioned_checkpoints(worlds, folder, stage):
    """Pieces of a partitioned checkpoint stay in memory; other activations go to the disk."""
    base = new_model("narrow gpt")
    wanted, losses, _ = run(worlds, base, Job(stage, checkpoints="partitioned"))
    job = Job(stage, Disk(folder, buffer_bytes=16 * PAGE), checkpoints="partitioned")
    found, theirs, _ = run(worlds, base, job)
    assert theirs == losses
    assert_same_bits(found, wanted)


class Together(nn.Module):
    """Runs all blocks in one checkpoint."""

    def __init__(self, blocks: nn.ModuleList, reentrant: bool) -> None:
        super().__init__()
        self.blocks = blocks
        self.reentrant = reentrant

    def forward(self, *args: Tensor) -> Tensor:
        def inner(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, cos, sin)
            return x

        return checkpoint(inner, *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_several_units(worlds, reentrant):
    base = new_model("narrow gpt")
    wanted = run(worlds, base, Job(0))[0]
    base.blocks = nn.ModuleList([Together(base.blocks, reentrant)])
    for stage, units in ((2, None), (3, lambda name, module: name.endswith("mlp"))):
        found = run(worlds, base, Job(stage, units=units))[0]
        assert_same_bits({n.replace("0.blocks.", ""): each for n, each in found.items()}, wanted)


@covering(strength=1, model=[name for name in MODELS if "gpt" not in name], names=[True, False])
def test_models_that_are_brittle(worlds, folder, model, names):
    base = new_model(model)
    disk = Disk(folder, buffer_bytes=16 * PAGE)
    wanted, losses, _ = run(worlds, base, Job(3, model=model))
    found, theirs, sizes = run(worlds, base, Job(3, disk, model, names=names))
    assert theirs == losses
    assert_same_bits(found, wanted)
    # A model that differs from step to step may save more in a later step.
    assert model in ("wandering", "partial") or len(set(sizes)) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_unsharded_is_not_written(worlds, folder, monkeypatch, stage):
    """No bucket's memory is written to the disk, whether the parameters are known or not."""
    saved: list[int] = []
    save = ActivationStore.save

    def watched(self: ActivationStore, tensor: Tensor, watch: Any) -> Any:
        saved.append(tensor.untyped_storage().data_ptr())
        return save(self, tensor, watch)

    monkeypatch.setattr(ActivationStore, "save", watched)
    base = new_model("narrow gpt")

    def work(comm, names):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        engine = owner_of(module.head.weight)
        known = module if names else None
        acts = zero.activations_on(Disk(folder), module=known, least_bytes=1)
        own: set[int] = set()
        for block in module.blocks:
            block.register_forward_hook(lambda *_: own.update(buckets_of(engine)))
            # Views of weights that torch does not track as views; one belongs to a bucket of which
            # nothing else was saved before.
            block.mlp.contract.register_forward_hook(
                lambda layer, _, out: out * layer.weight.detach()[:, 0]
            )
            if names or stage == 3:
                block.mlp.contract.register_forward_pre_hook(
                    lambda layer, args: args[0] * layer.weight.detach()[0]
                )
        with acts:
            module(*text(comm, 0)).backward()
        assert own
        assert saved
        assert not own & set(saved)
        zero.remove_sharding(module)

    for names in (True, False):
        saved.clear()
        worlds(1).run(work, names)


def buckets_of(engine: Any) -> set[int]:
    if engine.unsharder is None:
        return {bucket.flat.data_ptr() for bucket in engine.stored}
    return {bucket.flat.data_ptr() for bucket in engine.unsharder._unsharded}


def test_gradients_of_gradients_of_a_sharded_module(worlds, folder):
    base = new_model("mlp")

    def work(comm, disk):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        on = nullcontext() if disk is None else zero.activations_on(disk, least_bytes=1)
        x = torch.linspace(-1, 1, 26).view(2, 13).requires_grad_()
        with on:
            (grad,) = torch.autograd.grad(module(x), x, create_graph=True)
            grad.square().sum().backward()
        optimizer.step()
        found = [*zero.full_state_dict(module).values(), x.grad]
        zero.remove_sharding(module)
        return found

    wanted = worlds(2).run(work, None)[0]
    found = worlds(2).run(work, Disk(folder))[0]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_step_between_forward_and_backward_is_seen(worlds, folder):
    """A parameter's change between forward and backward is found, though it stays in memory."""
    base = new_model("mlp")

    def work(comm):
        module: Any = zero.shard(deepcopy(base), 1, comm=comm, options=SMALL)
        with zero.activations_on(Disk(folder), least_bytes=1):
            loss = module(torch.ones(4, 13))
        with torch.no_grad():
            module.layers[0].weight.add_(0)
            module.layers[2].weight.add_(1)
        with pytest.raises(RuntimeError, match=r"\[37, 37\]\].*at version \d+; expected"):
            loss.backward()
        zero.remove_sharding(module)

    worlds(1).run(work)


# ---- faults -------------------------------------------------------------------------------------


def fail_at_add(acts: Any) -> None:
    """Lets the forward find a full disk."""
    error = OSError(errno.ENOSPC, "No space left on device")

    def add_extent(size_bytes: int) -> int:
        raise acts._store.scratch._no_room(size_bytes, error)

    acts._store.scratch.add_extent = add_extent


def damage(acts: Any) -> None:
    """Overwrites the data on the disk, so that the backward reads wrong bytes."""
    store = acts._store
    for _, transfer in store._writing:
        transfer.wait()
    path = f"/proc/self/fd/{store.scratch._file.descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        os.pwrite(descriptor, os.urandom(size), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@covering(strength=1, stage=STAGES, when=["backward", "forward"])
def test_a_fault_on_one_rank_reaches_all_at_the_step(worlds, folder, stage, when):
    """All ranks end their backward without waiting; rank 0's raises, and no rank steps."""
    base = new_model("narrow gpt")
    ended = threading.Event()

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        before = zero.full_state_dict(module)
        acts = zero.activations_on(Disk(folder), module=module, least_bytes=1)
        if comm.rank == 0 and when == "forward":
            fail_at_add(acts)
        with acts:
            # Backward reads the tensors that the loss saved before those of the module.
            loss = (module(*text(comm, 0)) * torch.ones(2)).square().sum()
        if comm.rank == 0 and when == "backward":
            damage(acts)
        words = "No space left" if when == "forward" else "other bytes than were written"
        if comm.rank == 0:
            with pytest.raises(DiskError, match=f"activations of rank 0: .*{words}"):
                loss.backward()
            assert ended.wait(60), "the other rank waits for this one"
        else:
            loss.backward()
            ended.set()
        for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
            with pytest.raises(DiskError, match=f"activations of rank 0: .*{words}"):
                call()
        optimizer.zero_grad()
        assert_same_bits(zero.full_state_dict(module), before)
        # Without the faulty disk, training continues.
        return one_step(comm, module, optimizer)

    def one_step(comm, module=None, optimizer=None):
        if module is None:
            module = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
            optimizer = AdamW(module.parameters(), lr=1e-2)
        module(*text(comm, 0)).backward()
        optimizer.step()
        state = zero.full_state_dict(module)
        zero.remove_sharding(module)
        return state

    world = worlds(2)
    assert_same_bits(world.run(work)[0], world.run(one_step)[0])


def test_a_fault_outside_of_training_is_raised_at_the_end_of_each_backward(folder):
    x = torch.randn(4096).requires_grad_()
    acts = zero.activations_on(Disk(folder, buffer_bytes=4 * PAGE), least_bytes=1)
    with acts:
        first, node = (x * 1).sin().sum(), (x * 2).sin()
        damage(acts)
        for _ in range(2):
            with pytest.raises(DiskError, match="other bytes"):
                torch.autograd.grad(first, x, retain_graph=True)
        with pytest.raises(DiskError, match="other bytes"):
            _ = node.grad_fn._saved_self
        # After a fault new activations are neither written nor kept.
        used = acts.extents_in_use
        later = ((x * 3).sin() + torch.arange(4096).view(64, 64).t().reshape(-1) * x).sum()
        assert acts.extents_in_use == used
        with pytest.raises(DiskError, match="other bytes"):
            later.backward()
    assert x.grad.isnan().all()


# ---- other ways to compute ----------------------------------------------------------------------


@pytest.mark.compiles
def test_compiled_functions(folder):
    """Tensors that a compiled graph saves are packed at run time, with any backend."""
    torch._dynamo.reset()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(x) @ weight

    x, weight = torch.randn(64, 64).requires_grad_(), torch.randn(64, 64).requires_grad_()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(function(x, weight).cos().sum(), (x, weight))
    acts = zero.activations_on(Disk(folder), least_bytes=1)
    # The first call compiles inside the context; the second call runs the compiled code.
    for _ in range(2):
        before = acts.bytes_written
        with acts:
            found = torch.autograd.grad(compiled(x, weight).cos().sum(), (x, weight))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        for _, transfer in acts._store._writing:
            transfer.wait()
        assert acts.bytes_written > before
    torch._dynamo.reset()


@pytest.mark.compiles
def test_it_is_entered_outside_of_compiled_functions(folder):
    """Entering the context inside a compiled function breaks the graph or raises."""
    torch._dynamo.reset()
    acts = zero.activations_on(Disk(folder), least_bytes=1)

    def inside(x: Tensor) -> Tensor:
        with acts:
            return (x * 2).sin().sum()

    x = torch.randn(64, 64).requires_grad_()
    (wanted,) = torch.autograd.grad((x * 2).sin().sum(), x)
    (found,) = torch.autograd.grad(torch.compile(inside, backend="eager")(x), x)
    assert torch.equal(found, wanted)
    assert acts.bytes_read == 64 * 64 * 4
    torch._dynamo.reset()

    def whole(x: Tensor) -> Tensor:
        with acts:
            return x.sin().sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="`Activations` context manager"):
        torch.compile(whole, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_torch_func_says_that_it_has_no_hooks(folder):
    with zero.activations_on(Disk(folder)), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))


def test_parts_of_dtensors_go_and_come_back(worlds, folder):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(64, 64)

        def run() -> Tensor:
            x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
            loss = ((x * 2).sin() * (x * 3)).sum()
            loss.backward()
            assert isinstance(x.grad, DTensor)
            return x.grad.to_local()

        wanted = run()
        acts = zero.activations_on(Disk(folder), least_bytes=1)
        with acts:
            assert torch.equal(run(), wanted)
            x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
            y = (x * 2).exp()
            with torch.no_grad():
                y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        for _, transfer in acts._store._writing:
            transfer.wait()
        # Four tensors: 2 x for the sine; the sine and 3 x for the product; and the result of exp().
        assert acts.bytes_written == 4 * 64 * 64 * 4
    finally:
        torch.distributed.destroy_process_group()
