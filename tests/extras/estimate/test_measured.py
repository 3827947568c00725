# SPDX-License-Identifier: Apache-2.0
"""Estimates equal the bytes that training holds, sends, reads and writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import CommOptions, Disk, zero
from ringcomm.extras import moe
from ringcomm.extras.estimate import STAGES, ExpertLayer, ModelElems, Training, Transformer
from ringcomm.offload.scratch import PAGE_BYTES, ScratchFile
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, state_offload
from ringcomm.zero import Compression, Precision, ZeroOptions
from ringcomm.zero.stages.buckets import ShardedBucket
from ringcomm.zero.stages.sharding import engine_of, shard
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import covering

BF16, FP32 = torch.bfloat16, torch.float32
WORLD_SIZE = 2
PURE = AdamWOptions(master="none", rounding="stochastic")
REMAINDER = AdamWOptions(master="remainder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skip_unless_disk(tmp_path_factory.mktemp("disk"))


# ---- optimizers and ZeRO in memory ----------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, AdamWOptions()),
        (torch.float16, AdamWOptions()),
        (FP32, AdamWOptions()),
        (BF16, REMAINDER),
        (BF16, PURE),
    ],
)
def test_stage_1_is_what_the_optimizer_holds(dtype, options):
    """The models need no padding: chunks are multiples of 512 elements."""

    def work(comm):
        params = [torch.zeros(64, 64, dtype=dtype), torch.zeros(1024, dtype=dtype)]
        for param in params:
            param.requires_grad_().grad = torch.zeros_like(param)
        params.append(torch.zeros(7, dtype=dtype))
        optimizer = AdamW(params, comm=comm, options=options)
        optimizer.step()
        kept = [bucket.values() for bucket in optimizer.state_dict()["state"]["buckets"]]
        return (
            sum(param.nbytes for param in params),
            params[0].grad.nbytes + params[1].grad.nbytes,
            sum(tensor.nbytes for tensors in kept for tensor in tensors),
        )

    model = ModelElems(64 * 64 + 1024, frozen=7)
    told = Training(model, WORLD_SIZE, 1, ZeroOptions(Precision(param=dtype)), options).state(1)
    with ringcomm.local_world(WORLD_SIZE) as world:
        assert world.run(work) == [told] * WORLD_SIZE


class Net(nn.Module):
    """Needs no padding: a unit's trained and frozen parts are multiples of width^2."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        wide = 2 * width
        self.first = nn.Linear(wide, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.layers.append(
            nn.Sequential(nn.Linear(width, wide, False), nn.Linear(wide, width, False))
        )
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [batch, 2 width] to [batch, width]."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def storage_bytes(bucket):
    """Returns the bytes that a rank holds of a bucket: its shard, and unsharded memory."""
    if isinstance(bucket, ShardedBucket):
        return bucket.kept.nbytes, bucket.flat.untyped_storage().nbytes()
    return bucket.flat.nbytes, 0


def train(comm, stage, training, width=32):
    """Trains three steps; returns the parts of the model state, and the peak of unsharded bytes."""
    torch.manual_seed(0)
    net = shard(Net(width), stage, comm=comm, options=training.options)
    engine = engine_of(net, "test")
    optimizer = AdamW(net.parameters(), options=training.optimizer)
    buckets = [*engine.stored, *engine.setup.stored_frozen]
    unsharded = []
    for layer in net.layers:
        layer.register_forward_pre_hook(
            lambda *_: unsharded.append(sum(storage_bytes(bucket)[1] for bucket in buckets))
        )
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 2 * width)).float().square().mean().backward()
        optimizer.step()
    whole = [p for p in net.parameters() if not p.requires_grad and stage < 3]
    state = optimizer.state_dict()["state"]
    kept = [each.values() for each in (*state["buckets"], *state.get("error_feedback", ())) if each]
    params = sum(storage_bytes(b)[0] for b in buckets) + sum(p.nbytes for p in whole)
    grads = sum(
        each.shard.nbytes for each in (engine.reduction.buckets if engine.reduction else ())
    )
    return params, grads, sum(t.nbytes for tensors in kept for t in tensors), max(unsharded)


@covering(
    strength=1,
    stage=STAGES,
    overlap=[True, False],
    kept={
        "fp32": (Precision(), AdamWOptions()),
        "masters": (Precision(param=BF16), AdamWOptions()),
        "rounded": (Precision(param=BF16, reduce=BF16), AdamWOptions()),
        "remainders": (Precision(param=BF16), REMAINDER),
        "none": (Precision(param=BF16), PURE),
    },
)
def test_model_state_is_what_training_holds(stage, kept, overlap):
    precision, optimizer = kept
    options = ZeroOptions(precision, bucket_elems=2048, overlap=overlap)
    training = Training(ModelElems.of_module(Net()), WORLD_SIZE, 1, options, optimizer)
    told = training.state(stage)
    with ringcomm.local_world(WORLD_SIZE) as world:
        for params, grads, state, unsharded in world.run(train, stage, training):
            assert (params, state) == (told.params, told.state)
            assert stage < 2 or grads == told.grads
            assert unsharded == training.buffers(stage).units


@pytest.mark.parametrize(
    ("stage", "shared"),
    [
        (1, {"state": "node"}),
        *((3, shared) for shared in ({}, {"state": "node"}, {"params": "world"})),
        *(
            (0, {"compression": Compression("int4", error_feedback=True), "state": s})
            for s in ("world", "node")
        ),
        *(
            (2, {"compression": Compression("int4", error_feedback=True), "state": s})
            for s in ("world", "node")
        ),
    ],
)
def test_over_nodes_it_is_what_their_ranks_share(stage, shared):
    """With a width of 64, the chunks of four ranks are whole tiles of 512 elements."""
    options = ZeroOptions(Precision(param=BF16), bucket_elems=2048, **shared)
    training = Training(ModelElems.of_module(Net(64)), 4, 2, options)
    told = training.state(stage)
    with ringcomm.local_world(4, nodes=[2, 2]) as world:
        for params, grads, state, _ in world.run(train, stage, training, 64):
            assert (params, state) == (told.params, told.state)
            assert stage < 2 or grads == told.grads


# ---- state and parameters on a disk ----------------------------

# By precision: the optimizer, its options, and the parameters' dtype.
KINDS: dict[str, tuple[type, AdamWOptions, torch.dtype]] = {
    "fp32": (AdamW, AdamWOptions(), FP32),
    "masters": (AdamW, AdamWOptions(), BF16),
    "remainders": (AdamW, REMAINDER, BF16),
    "8 bits": (AdamW8bit, AdamWOptions(), FP32),
    "8 bits, masters": (AdamW8bit, AdamWOptions(), BF16),
}


def buffers_for(elems: int) -> int:
    """Returns the buffer size for which pieces have ``elems`` elements."""
    return state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * elems


def held_by(step: Any) -> tuple[int, int, int]:
    """Returns the bytes of offloaded state in shared buffers, in resident ones, in the file."""
    offload, seen = step.offload, set()
    for piece in offload._pieces():
        seen.add(piece.buffer)
    shared = [buffer.memory.nbytes for buffer in seen if buffer.is_shared]
    resident = [buffer.memory.nbytes for buffer in seen if not buffer.is_shared]
    return sum(shared), sum(resident), offload.storage.size_bytes


class Count:
    """Counts the bytes of the submitted transfers: (read, written)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[tuple[int, str], int] = {}
        begin, count = ScratchFile._begin, self.bytes

        def counting(scratch: Any, operation: str, extent: int, memory: torch.Tensor) -> Any:
            key = (id(scratch), operation)
            count[key] = count.get(key, 0) + memory.nbytes
            return begin(scratch, operation, extent, memory)

        monkeypatch.setattr(ScratchFile, "_begin", counting)

    def of(self, scratch: Any) -> tuple[int, int]:
        read, written = (self.bytes.get((id(scratch), name), 0) for name in ("read", "write"))
        return read, written


@covering(strength=1, resident=[0, 3, 9, 13, 16], kind=[*KINDS])
def test_a_run_holds_and_moves_what_the_estimate_says(folder, monkeypatch, kind, resident):
    """Covers runs in which all pieces move, some pieces move, and none moves."""
    made, chosen, dtype = KINDS[kind]
    count, elems = Count(monkeypatch), 4096
    param = torch.zeros(15 * elems + 512, dtype=dtype).requires_grad_()

    def training(resident_bytes: int) -> Training:
        disk = Disk(folder, buffer_bytes=buffers_for(elems), resident_bytes=resident_bytes)
        options = AdamWOptions(offload_state=disk, master=chosen.master)
        precision = ZeroOptions(Precision(param=dtype))
        model = ModelElems(param.numel(), largest=param.numel())
        return Training(model, 1, 1, precision, options, quantized_state=made is AdamW8bit)

    size = sum(size for size, _ in training(0).swap_units(elems, 1))
    estimated = training(resident * size)
    optimizer = made([param], comm="alone", options=estimated.optimizer)
    for step in range(3):
        param.grad = torch.ones_like(param)
        if step == 2:
            before = count.of(optimizer.sharded_step().offload.storage)
        optimizer.step()
    step = optimizer.sharded_step()
    after = count.of(step.offload.storage)
    told = estimated.offloaded_state(0)
    held = held_by(step)
    assert held == (told.buffers, told.resident, told.stored)
    assert (after[0] - before[0], after[1] - before[1]) == (told.read, told.written)
    disk: Any = estimated.optimizer.offload_state
    assert held[0] <= disk.buffer_bytes and held[1] <= disk.resident_bytes
    # The estimate does not count page rounding.
    assert held[0] + held[1] <= estimated.state(0).state + 16 * 4 * PAGE_BYTES


@pytest.mark.parametrize(("resident", "buffers"), [(0, 2), (2, 2), (0, 6), (6, 1), (5, 1)])
def test_parameters_of_a_run_take_and_move_what_the_estimate_says(folder, resident, buffers):
    """Six chunks of a page; chunks that stay in the buffers between passes are not read again."""
    disk = Disk(folder, buffers * PAGE_BYTES, resident * PAGE_BYTES)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    options = ZeroOptions(bucket_elems=1024, offload_params=disk)
    training = Training(ModelElems(6 * 1024, largest=1024), 1, options=options)
    told = training.offloaded_params()
    zero.shard(model, 3, comm="alone", options=options)
    optimizer = AdamW(model.parameters())
    store = optimizer.placement.store
    for _ in range(4):
        store.wait()
        read, written = store.file.bytes_read, store.file.bytes_written
        model(torch.ones(1, 32)).square().mean().backward()
        optimizer.step()
        store.wait()
        assert store.held_bytes <= told.buffers
    assert store.file.size_bytes == told.stored
    assert store.file.bytes_written - written == told.written
    assert max(0, told.read - 4 * told.buffers) <= store.file.bytes_read - read <= told.read
    assert training.state(3).params == min(6 * PAGE_BYTES, told.buffers + told.resident)


class Square(nn.Module):
    """One bucket that needs no padding for two ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize("clips", [False, True])
def test_ranks_hold_what_the_estimate_says_at_every_stage(folder, clips):
    """The file, the buffers, and the gradient shard that a one-pass step keeps."""
    width = 128
    chosen = AdamWOptions(offload_state=Disk(folder, buffer_bytes=buffers_for(1024)))
    model = ModelElems.of_module(Square(width))
    training = Training(model, 2, optimizer=chosen, two_passes=clips)

    def work(comm: Any) -> None:
        for stage in STAGES:
            module = zero.shard(Square(width), stage, comm=comm)
            optimizer = AdamW(module.parameters(), options=chosen)
            for _ in range(2):
                module(torch.ones(2, width)).backward()
                if clips:
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            step = optimizer.sharded_step()
            told = training.offloaded_state(stage)
            assert held_by(step) == (told.buffers, 0, told.stored)
            assert told.stored == 8 * width * width // (1 if stage == 0 else 2)
            own = 0 if step.backend._own is None else step.backend._own.nbytes
            own += sum(b.grad_shard.nbytes for b in step.buckets if b.grad_shard is not None)
            grad_shard = training.buffers(stage).grad_shard
            if stage == 1:
                assert own == grad_shard == 4 * width * width // 2
            elif stage == 2:
                reduced = training.state(stage).grads
                assert own == grad_shard + reduced
                assert grad_shard == (0 if clips else reduced)

    with ringcomm.local_world(2) as world:
        world.run(work)


# ---- activations ----------------------------

SHAPE = Transformer(layers=3, width=24, heads=4, context=10, vocab=50)
MICRO_BATCH = 2


class Layer(nn.Module):
    """The layer in figure 2 of Korthikanti et al., with its three dropouts."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [batch, context, width] to the same shape."""
        x = x + dropout(self.project_out(self.attention(self.norms[0](x))))
        inner = nn.functional.gelu(self.expand(self.norms[1](x)))
        return x + dropout(self.contract(inner))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        split = self.project_in(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        shares = dropout((query @ key.transpose(-1, -2)).softmax(dim=-1))
        return (shares @ value).transpose(1, 2).reshape(batch, context, width)


def dropout(x: torch.Tensor) -> torch.Tensor:
    """Applies dropout with a mask of one byte per element, as on a GPU."""
    return torch.native_dropout(x, 0.1, train=True)[0]


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Returns the bytes that autograd keeps of a forward, without parameters and norms' means."""
    params = {param.data_ptr() for param in layer.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in params and tensor.shape[-1] != 1:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_layer_is_what_autograd_saves(dtype):
    layer = Layer(SHAPE).to(dtype)
    x = torch.randn(MICRO_BATCH, SHAPE.context, SHAPE.width, dtype=dtype, requires_grad=True)
    assert saved_bytes(layer, x) == SHAPE.layer_bytes(MICRO_BATCH, dtype.itemsize)


def test_what_a_disk_has_of_them_is_what_runs_move(tmp_path):
    """With tensors of whole pages: bytes written and read, and the limit of memory."""
    shape = Transformer(layers=3, width=64, heads=4, context=64, vocab=1)
    disk = Disk(skip_unless_disk(tmp_path), buffer_bytes=1 << 18)
    model = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
    activations = zero.activations_on(disk, module=model, least_bytes=PAGE_BYTES)
    start = torch.randn(4, shape.context, shape.width, requires_grad=True)
    most = []

    def hold(*_):
        most.append(activations.held_bytes)

    for layer in model:
        layer.register_forward_hook(hold)
        layer.register_full_backward_hook(hold)
    with activations:
        loss = model(start * 1).sum()
    loss.backward()
    size = shape.layer_bytes(4, 4)
    told = shape.activations(4, elem_bytes=4)._replace(ends=0).kept_on(disk, size)
    assert told.moved == activations.bytes_written == activations.bytes_read
    assert told.moved <= activations.size_bytes <= 2 * told.moved
    assert max(most) + size <= told.layers == disk.buffer_bytes + size


# ---- experts ----------------------------

EXPERTS, HIDDEN = 8, 256


@pytest.mark.parametrize(("k", "compression"), [(2, None), (3, "fp8"), (1, "int8")])
@pytest.mark.parametrize("nodes", [(2, 2), (1, 1, 1, 1)], ids=str)
def test_it_counts_what_crosses(k, compression, nodes, monkeypatch):
    """The estimate for random routing equals the average over all sets of experts."""
    sent: dict[int, int] = dict.fromkeys(range(4), 0)
    found = ringcomm.Communicator.all_to_all_single

    def counting(self: Any, output: torch.Tensor, input: torch.Tensor, *rest: Any) -> Any:
        for to, rows in enumerate(rest[1]):
            if self.node_layout.node_of(to) != self.node_layout.node:
                sent[self.rank] += rows * input[:1].nbytes
        return found(self, output, input, *rest)

    monkeypatch.setattr(ringcomm.Communicator, "all_to_all_single", counting)
    idx = torch.tensor(list(itertools.combinations(range(EXPERTS), k)))
    told = ExpertLayer(EXPERTS, k, HIDDEN, comb(EXPERTS, k), 1000, 4, 4, len(nodes), 4, compression)
    expected = told.between_nodes()

    def body(comm):
        def sent_by(call: Callable[[], Any]) -> Any:
            before = sent[comm.rank]
            done = call()
            counted.append(sent[comm.rank] - before)
            return done

        counted: list[int] = []
        x = torch.zeros(len(idx), HIDDEN, requires_grad=True)
        weights = torch.ones(idx.shape, requires_grad=True)
        rows, _, handle = sent_by(
            lambda: moe.dispatch(x, idx, weights, EXPERTS, comm, compression=compression)
        )
        out = sent_by(lambda: moe.combine(rows, handle))
        sent_by(lambda: out.sum().backward())
        return counted

    with ringcomm.local_world(4, nodes=nodes, options=CommOptions(timeout=60)) as made:
        every = made.run(body)
    mean = torch.tensor(every, dtype=torch.float64).mean(0)
    back = expected.combine_backward + expected.dispatch_backward
    wanted = torch.tensor([expected.dispatch, expected.combine, back], dtype=torch.float64)
    torch.testing.assert_close(mean, wanted, rtol=1e-12, atol=0)
