"""The systems that :mod:`.training` times: one GPT, trained by each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringcomm

Tensor = torch.Tensor
Step = Callable[[], object]
DDP, FSDP2, FSDP2_HERE = "ddp on gloo", "fsdp2 on gloo", "fsdp2 on ringcomm"
PLAIN = "torch alone"
# What no system can do without: the ranks share memory bandwidth and cores, but no gradients.
ARITHMETIC = "forward and backward"
# What reports call a training step.
TRAINING = "training_step"
TRACED_STEPS = 5
VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """A GPT and its batch: 12 * depth * width^2 parameters, and those of the bytes."""

    width: int
    depth: int
    heads: int
    sequences: int
    context: int

    @property
    def parameters(self) -> int:
        """The number of elements that are trained."""
        layer = 12 * self.width**2 + 13 * self.width
        return self.depth * layer + (VOCABULARY + self.context + 2) * self.width

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}, {self.sequences}x{self.context} bytes a rank"


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        batch, length, width = x.shape
        parts = self.mix_in(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix_out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.contract(F.gelu(self.expand(self.second(x))))
        return y


class GPT(nn.Module):
    """A GPT of bytes, with one weight for both ends."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.depth))
        self.last = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting each byte; ``tokens`` is int64 [B, T + 1]."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.last(x) @ self.embed.weight.T
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))


def _model(shape: Shape, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(shape).to(device)


def _step(module: nn.Module, optimizer: Any, batch: Tensor) -> Step:
    def step() -> None:
        # On a GPU matrices are multiplied in bfloat16, as training does it.
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
            loss = module(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # builds what is built at the first one
    step()  # and what depends on it
    return step


def _zero(shape: Shape, stage: int, comm: ringcomm.Communicator, batch: Tensor) -> Step:
    module = ringcomm.zero.shard(_model(shape, comm.device), stage, comm=comm)
    return _step(module, ringcomm.optim.AdamW(module.parameters(), lr=1e-4), batch)


def profiled_steps(
    shape: Shape, stage: int, comm: ringcomm.Communicator
) -> ringcomm.zero.StepProfile:
    """Profiles a few steps of a stage that overlaps: its communication, and waits for that."""
    batch = batch_of(shape, comm)
    options = ringcomm.zero.ZeroOptions(overlap=True)
    module = ringcomm.zero.shard(_model(shape, comm.device), stage, comm=comm, options=options)
    step = _step(module, ringcomm.optim.AdamW(module.parameters(), lr=1e-4), batch)
    with ringcomm.zero.profiled(module) as profile:
        for _ in range(TRACED_STEPS):
            with profile.span("step", kind="compute"):
                step()
    return profile


def batch_of(shape: Shape, comm: ringcomm.Communicator) -> Tensor:
    """int64 [B, T + 1], the rank's own."""
    generator = torch.Generator().manual_seed(comm.rank)
    size = (shape.sequences, shape.context + 1)
    return torch.randint(0, VOCABULARY, size, generator=generator).to(comm.device)


def _ddp(shape: Shape, batch: Tensor) -> Step:
    module = DistributedDataParallel(_model(shape, batch.device), gradient_as_bucket_view=True)
    return _step(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), batch)


def _fsdp2(shape: Shape, batch: Tensor, backend: str) -> Step:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), backend_override={0: backend})
    model = _model(shape, batch.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch)


def _plain(shape: Shape, batch: Tensor) -> Step:
    module = _model(shape, batch.device)
    return _step(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), batch)


def _arithmetic(shape: Shape, batch: Tensor) -> Step:
    module = _model(shape, batch.device)

    def step() -> None:
        module(batch).backward()
        module.zero_grad()

    step()
    return step


def entrants(shape: Shape, comm: ringcomm.Communicator) -> dict[str, Step]:
    """A step of each system: on CPUs against Gloo, on a GPU against torch without communication."""
    batch = batch_of(shape, comm)
    steps = {f"stage {stage}": _zero(shape, stage, comm, batch) for stage in range(4)}
    if batch.is_cuda:
        return {**steps, PLAIN: _plain(shape, batch)}
    steps[ARITHMETIC] = _arithmetic(shape, batch)
    steps[DDP] = _ddp(shape, batch)
    steps[FSDP2] = _fsdp2(shape, batch, "gloo")
    steps[FSDP2_HERE] = _fsdp2(shape, batch, "ringcomm")
    return steps
