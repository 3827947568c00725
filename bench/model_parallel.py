# SPDX-License-Identifier: Apache-2.0
"""Times training steps of a GPT with pipeline, tensor and data parallelism.

The mesh is pp 2 x dp 2 x tp 2, one thread per rank. The replicas share state by ringcomm's stage 2
of ZeRO, or by torch's FSDP2 on Gloo and on the backend "ringcomm". Losses must agree within
rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import ringcomm

from .options import numbers
from .report import row_of
from .run import Bench, Run
from .timing import rows_of

Tensor = torch.Tensor
HERE, HERE_SEQUENCES = "ringcomm", "ringcomm, sequences divided"
ON_GLOO, ON_BACKEND = "torch on gloo", "torch on ringcomm"
AXES = {"pp": 2, "dp": 2, "tp": 2}
VOCABULARY, HEAD_DIM, MICRO_BATCHES, LEARNING_RATE = 256, 32, 4, 1e-3
RANKS = 8
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
PLAN = {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "o": ROWS, "up": COLUMNS, "down": ROWS}
SEQUENCE_PLAN = {
    "embed": "split",
    "blocks.*": "sequence",
    **{f"blocks.*.{name}": "column" for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": "row" for name in ("o", "down")},
    "head": "gather",
}


@dataclass(frozen=True)
class GptShape:
    """A GPT and its batch; numbers of blocks and sequences count all ranks together."""

    width: int = 256
    depth: int = 4
    sequences: int = 16
    context: int = 64

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}, {self.sequences}x{self.context} tokens"


class ParallelBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        # The number of heads follows from the tensor, since this rank has only some of the heads.
        q, k, v = (
            f(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return out


def make_stage(shape: GptShape, number: int) -> nn.Sequential:
    """Makes a pipeline stage, with the same weights on all replicas."""
    torch.manual_seed(number)
    stage = nn.Sequential()
    if number == 0:
        stage.embed = nn.Embedding(VOCABULARY, shape.width)
    stage.blocks = nn.Sequential(
        *[ParallelBlock(shape.width) for _ in range(shape.depth // AXES["pp"])]
    )
    if number == AXES["pp"] - 1:
        stage.head = nn.Linear(shape.width, VOCABULARY)
    return stage


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


class ParallelTraining:
    """The training of one system on this rank; each call makes a step."""

    def __init__(
        self, shape: GptShape, mesh: DeviceMesh, build: Callable[[nn.Module, DeviceMesh], Any]
    ) -> None:
        number, device = mesh.get_local_rank("pp"), torch.device("cpu")
        module = make_stage(shape, number)
        self._optimizer = build(module, mesh)
        self._size, self._replica = (shape.sequences, shape.context + 1), mesh.get_local_rank("dp")
        stage = PipelineStage(module, number, AXES["pp"], device, group=mesh.get_group("pp"))
        self._schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of)
        self._is_first, self._draw = stage.is_first, torch.Generator().manual_seed(0)
        self.losses: list[float] = []  # last stage: the mean over a step's micro-batches

    def __call__(self) -> None:
        whole = torch.randint(VOCABULARY, self._size, generator=self._draw)
        tokens = whole.chunk(AXES["dp"])[self._replica]
        losses: list[Tensor] = []
        if self._is_first:
            self._schedule.step(tokens[:, :-1])
        else:
            self._schedule.step(target=tokens[:, 1:], losses=losses)
            self.losses.append(torch.stack(losses).detach().mean().item())
        self._optimizer.step()
        self._optimizer.zero_grad()


def with_zero(module: nn.Module, mesh: DeviceMesh, sequences: bool = False) -> Any:
    """Shards gradients and state by stage 2 of ZeRO, and divides the layers by torch's plan.

    With ``sequences`` it divides the layers by ringcomm's plan for sequence parallelism: between
    layers a rank has some tokens of each sequence.
    """
    if sequences:
        own = {name for name, _ in module.named_children()}
        plan = {name: how for name, how in SEQUENCE_PLAN.items() if name.split(".")[0] in own}
        ringcomm.extras.parallel.parallelize(module, plan, mesh["tp"])
    else:
        for block in module.blocks:  # type: ignore[union-attr]
            parallelize_module(block, mesh["tp"], PLAN)
    ringcomm.zero.shard(module, 2, mesh=mesh)
    return ringcomm.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


def with_fsdp2(module: nn.Module, mesh: DeviceMesh) -> Any:
    """Uses torch's own FSDP2 and tensor parallelism."""
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, foreach=True)


def entrants(shape: GptShape) -> dict[str, ParallelTraining]:
    """Begins training on each system; collective."""
    here, backends = ringcomm.Mesh(device="cpu", **AXES), dict.fromkeys(AXES, "gloo")
    how: Any = {"mesh_dim_names": tuple(AXES), "backend_override": backends}
    gloo = init_device_mesh("cpu", tuple(AXES.values()), **how)
    return {
        HERE: ParallelTraining(shape, here, with_zero),
        HERE_SEQUENCES: ParallelTraining(shape, here, partial(with_zero, sequences=True)),
        ON_GLOO: ParallelTraining(shape, gloo, with_fsdp2),
        ON_BACKEND: ParallelTraining(shape, here, with_fsdp2),
    }


def unequal(trained: Mapping[str, ParallelTraining]) -> dict[str, int]:
    """Returns losses by system that differ from the first system's beyond rounding; collective."""
    losses = torch.tensor([each.losses for each in trained.values()])
    counted = (~torch.isclose(losses, losses[list(trained).index(HERE)], rtol=1e-3)).sum(1)
    dist.all_reduce(counted)
    return dict(zip(trained, counted.tolist(), strict=True))


def measure(run: Run) -> None:
    run.connect()
    run.pacing.expect(1)
    shape = GptShape(**{name: getattr(run.options, name) for name in vars(GptShape())})
    stages = [make_stage(shape, number) for number in range(AXES["pp"])]
    parameters = sum(param.numel() for stage in stages for param in stage.parameters())
    trained = entrants(shape)
    case = row_of("pp2_dp2_tp2_step", str(shape), run.world, parameters)
    rows = rows_of(case, run.time(trained, warmup_rounds=1), HERE)
    wrong = unequal(trained)
    run.add([replace(row, wrong=wrong[row.system]) for row in rows])


def check(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    if asked.ranks not in (None, RANKS):
        parser.error(f"--ranks {asked.ranks}: the layout has {RANKS}")


BENCH = Bench(
    "model_parallel", __doc__, measure, numbers(**vars(GptShape())), ranks=RANKS, check=check
)
BENCH.run_as_main(__name__)
