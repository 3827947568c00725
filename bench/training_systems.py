"""The systems that :mod:`.training` times: one GPT, trained by each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from ringcomm.examples.gpt.config import ModelConfig
from ringcomm.examples.gpt.model import GPT, VOCABULARY

Tensor = torch.Tensor
Step = Callable[[], object]
DDP, DDP_HERE = "ddp on gloo", "ddp on ringcomm"
FSDP2, FSDP2_HERE = "fsdp2 on gloo", "fsdp2 on ringcomm"
PLAIN = "torch alone"
# What no system can do without: the ranks share memory bandwidth and cores, but no gradients.
ARITHMETIC = "forward and backward"
# What reports call a training step.
TRAINING = "training_step"
TRACED_STEPS = 5


@dataclass(frozen=True)
class Shape:
    """A GPT with one weight for both ends, and its batch."""

    width: int
    depth: int
    heads: int
    sequences: int
    context: int

    @property
    def parameters(self) -> int:
        """The number of elements that are trained."""
        return 12 * self.depth * self.width**2 + VOCABULARY * self.width

    def model(self) -> GPT:
        """Returns the model, with the same weights on every rank."""
        torch.manual_seed(0)
        return GPT(ModelConfig(self.width, self.depth, self.heads, self.context, tied=True))

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}, {self.sequences}x{self.context} bytes a rank"


def _step(module: nn.Module, optimizer: Any, batch: Tensor) -> Step:
    def step() -> None:
        # On a GPU matrices are multiplied in bfloat16, as training does it.
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
            loss = module(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # builds what is built at the first one
    step()  # and what depends on it
    return step


def _zero(shape: Shape, stage: int, comm: ringcomm.Communicator, batch: Tensor) -> Step:
    module = ringcomm.zero.shard(shape.model().to(comm.device), stage, comm=comm)
    return _step(module, ringcomm.optim.AdamW(module.parameters(), lr=1e-4), batch)


def profiled_steps(
    shape: Shape, stage: int, comm: ringcomm.Communicator
) -> ringcomm.zero.StepProfile:
    """Profiles a few steps of a stage that overlaps: its communication, and waits for that."""
    batch = batch_of(shape, comm)
    options = ringcomm.zero.ZeroOptions(overlap=True)
    module = ringcomm.zero.shard(shape.model().to(comm.device), stage, comm=comm, options=options)
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


def _ddp(shape: Shape, batch: Tensor, backend: str) -> Step:
    group = dist.new_group(backend=backend)
    model = shape.model().to(batch.device)
    module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return _step(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), batch)


def _fsdp2(shape: Shape, batch: Tensor, backend: str) -> Step:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), backend_override={0: backend})
    model = shape.model().to(batch.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch)


def _plain(shape: Shape, batch: Tensor) -> Step:
    module = shape.model().to(batch.device)
    return _step(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), batch)


def _arithmetic(shape: Shape, batch: Tensor) -> Step:
    module = shape.model().to(batch.device)

    def step() -> None:
        module(batch[:, :-1], batch[:, 1:]).backward()
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
    steps[DDP] = _ddp(shape, batch, "gloo")
    steps[DDP_HERE] = _ddp(shape, batch, "ringcomm")
    steps[FSDP2] = _fsdp2(shape, batch, "gloo")
    steps[FSDP2_HERE] = _fsdp2(shape, batch, "ringcomm")
    return steps
