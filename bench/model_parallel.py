"""Training steps of a GPT in two pipeline stages, each under tensor parallelism, with replicas.

``torchrun --nproc-per-node 8 -m ringcomm.bench.model_parallel``: one thread a rank, pp 2 x dp 2 x
tp 2. ringcomm shares the replicas' state at stage 2 of ZeRO, torch by FSDP2, on Gloo and on the
backend "ringcomm". All take turns in one run. A ratio is how many times as long as the first
system the others take. Losses are compared, within rounding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

from . import provenance
from .report import Report, Row, write_csv
from .session import quartiles
from .steps import HostClock
from .timing import Call

Tensor = torch.Tensor
HERE, HERE_SEQUENCES = "ringcomm", "ringcomm, sequences divided"
ON_GLOO, ON_BACKEND = "torch on gloo", "torch on ringcomm"
AXES = {"pp": 2, "dp": 2, "tp": 2}
VOCABULARY, HEAD_DIM, MICRO_BATCHES, LEARNING_RATE = 256, 32, 4, 1e-3
WARM_UP_ROUNDS = 1
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
    """A GPT and its batch: blocks and sequences are those of all ranks together."""

    width: int = 256
    depth: int = 4
    sequences: int = 16
    context: int = 64

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}, {self.sequences}x{self.context} tokens"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        # As many heads as this rank has.
        q, k, v = (
            f(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return out


def make_stage(shape: GptShape, number: int) -> nn.Sequential:
    """Makes a stage, with the same weights on all ranks."""
    torch.manual_seed(number)
    stage = nn.Sequential()
    if number == 0:
        stage.embed = nn.Embedding(VOCABULARY, shape.width)
    stage.blocks = nn.Sequential(*[Block(shape.width) for _ in range(shape.depth // AXES["pp"])])
    if number == AXES["pp"] - 1:
        stage.head = nn.Linear(shape.width, VOCABULARY)
    return stage


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


class ParallelTraining:
    """One system's training on this rank; a call is a step.

    Attributes:
        losses: of the last stage, the mean of each step's micro-batches.
    """

    def __init__(
        self, shape: GptShape, mesh: DeviceMesh, build: Callable[[nn.Module, DeviceMesh], Any]
    ) -> None:
        number = mesh.get_local_rank("pp")
        module = make_stage(shape, number)
        self._optimizer = build(module, mesh)
        self._shape, self._replica = shape, mesh.get_local_rank("dp")
        self._stage = PipelineStage(
            module, number, AXES["pp"], torch.device("cpu"), group=mesh.get_group("pp")
        )
        self._schedule = Schedule1F1B(self._stage, MICRO_BATCHES, loss_of)
        self.losses: list[float] = []
        self._steps = 0

    def __call__(self) -> None:
        draw = torch.Generator().manual_seed(self._steps)
        size = (self._shape.sequences, self._shape.context + 1)
        whole = torch.randint(VOCABULARY, size, generator=draw)
        tokens = whole.chunk(AXES["dp"])[self._replica]
        losses: list[Tensor] = []
        if self._stage.is_first:
            self._schedule.step(tokens[:, :-1])
        else:
            self._schedule.step(target=tokens[:, 1:], losses=losses)
            self.losses.append(torch.stack(losses).detach().mean().item())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1


def with_zero(module: nn.Module, mesh: DeviceMesh) -> Any:
    """Shares state at stage 2 of ZeRO; layers are divided by torch."""
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], PLAN)
    ringcomm.zero.shard(module, 2, mesh=mesh)
    return ringcomm.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


def with_sequences(module: nn.Module, mesh: DeviceMesh) -> Any:
    """The same with ringcomm's layers, between which a rank has its tokens of each sequence."""
    own = {name for name, _ in module.named_children()}
    plan = {name: how for name, how in SEQUENCE_PLAN.items() if name.split(".")[0] in own}
    ringcomm.parallel.parallelize(module, plan, mesh["tp"])
    ringcomm.zero.shard(module, 2, mesh=mesh)
    return ringcomm.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


def with_fsdp2(module: nn.Module, mesh: DeviceMesh) -> Any:
    """torch's own: FSDP2 and tensor parallelism."""
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, foreach=True)


def entrants(shape: GptShape) -> dict[str, ParallelTraining]:
    """Begins training on each system; collective."""
    here = ringcomm.Mesh(device="cpu", **AXES)
    names = tuple(AXES)
    gloo = init_device_mesh(
        "cpu",
        tuple(AXES.values()),
        mesh_dim_names=names,
        backend_override=dict.fromkeys(names, "gloo"),
    )
    return {
        HERE: ParallelTraining(shape, here, with_zero),
        HERE_SEQUENCES: ParallelTraining(shape, here, with_sequences),
        ON_GLOO: ParallelTraining(shape, gloo, with_fsdp2),
        ON_BACKEND: ParallelTraining(shape, here, with_fsdp2),
    }


def times_of(trained: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Microseconds of the slowest rank by system and round; the systems take turns."""
    clock, names = HostClock(), list(trained)
    mine = torch.zeros(len(names), WARM_UP_ROUNDS + rounds, dtype=torch.float64)
    for number in range(mine.size(1)):
        for step in range(len(names)):
            index = (number + step) % len(names)
            dist.barrier()
            mine[index, number] = clock.elapsed_us([trained[names[index]]])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    rows: list[list[float]] = mine[:, WARM_UP_ROUNDS:].tolist()
    return dict(zip(names, rows, strict=True))


def unequal(trained: dict[str, ParallelTraining]) -> dict[str, int]:
    """Losses by system that are not those of the first one within rounding; collective."""
    first = torch.tensor(trained[HERE].losses)
    apart = [
        int((~torch.isclose(torch.tensor(each.losses), first, rtol=1e-3)).sum())
        for each in trained.values()
    ]
    counted = torch.tensor(apart)
    dist.all_reduce(counted)
    return dict(zip(trained, counted.tolist(), strict=True))


def rows_of(
    shape: GptShape,
    times: dict[str, list[float]],
    wrong: dict[str, int],
    parameters: int,
    ranks: int,
) -> list[Row]:
    """A row per system; ratios are over the first."""
    rows = []
    for name, each in times.items():
        pairs = zip(each, times[HERE], strict=True)
        low, middle, high = quartiles([one / other for one, other in pairs])
        rows.append(
            Row(
                collective="pp2_dp2_tp2_step",
                size_bytes=4 * parameters,
                count=parameters,
                dtype="float32",
                op="none",
                root=-1,
                ranks=ranks,
                system=name,
                placement=str(shape),
                time_us=round(statistics.median(each), 1),
                best_us=round(min(each), 1),
                wrong=wrong[name],
                ratio=middle,
                ratio_low=low,
                ratio_high=high,
                rounds=len(each),
                batch=1,
            )
        )
    return rows


def main(words: Sequence[str]) -> int:
    """Prints the rows on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.model_parallel")
    for name in ("width", "depth", "sequences", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(GptShape, name))
    parser.add_argument("-r", "--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path, help="a file of rows and where they come from")
    asked = parser.parse_args(words)
    shape = GptShape(asked.width, asked.depth, asked.sequences, asked.context)
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    stages = [make_stage(shape, number) for number in range(AXES["pp"])]
    parameters = sum(param.numel() for stage in stages for param in stage.parameters())
    trained = entrants(shape)
    times = times_of(trained, asked.rounds)
    wrong = unequal(trained)
    if dist.get_rank() == 0:
        rows = rows_of(shape, times, wrong, parameters, dist.get_world_size())
        for row in rows:
            spread = f"{row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
            print(f"{row.system:28} {row.time_us or 0:12.0f} us  {spread}  wrong {row.wrong}")
        if asked.csv:
            collected = provenance.collect([], {"ringcomm": ringcomm.__version__}, {})
            command = "torchrun --nproc-per-node 8 -m ringcomm.bench.model_parallel"
            write_csv(Report({**collected, "command": command}, rows), asked.csv)
    dist.destroy_process_group()
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
