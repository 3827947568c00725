"""Times of a tensor-parallel layer, forward and backward, against torch's own plan for it.

``torchrun --nproc-per-node 2 -m ringcomm.bench.layers [TOKENS,WIDTH ...]``: a norm, a
column-parallel and a row-parallel layer of four times the width, with sequence parallelism, one
thread a rank. ``parallelize`` divides it, and ``parallelize_module`` on the backend "ringcomm" and
on Gloo. "alone" is what a rank computes of it, without any communication. The four take turns.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ringcomm.parallel import parallelize

from .busy import busy_loops, lead_session
from .products import Call, times_of
from .provenance import collect

Tensor = torch.Tensor
Size = tuple[int, int]

SIZES: tuple[Size, ...] = ((512, 256), (1024, 512), (2048, 1024))
OURS, ALONE = "ringcomm", "alone"
PLAN = {"norm": "sequence", "up": "column", "down": "row"}
COLUMNS = (
    *("tokens", "width", "system", "ms", "ratio", "ratio_low", "ratio_high"),
    *("rounds", "ranks", "busy"),
)


class Layer(nn.Module):
    """What a transformer has between its attentions, of some of the hidden features."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.products(self.norm(x))

    def products(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def by_torch(width: int, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(
        Layer(width, 4 * width),
        mesh,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )


def turn(forward: Callable[[Tensor], Tensor], model: nn.Module, shape: Sequence[int]) -> Call:
    """A call of forward and backward; its result is the output, with the input's gradient.

    The output is read, since DTensor's collectives end when somebody does.
    """
    x = torch.randn(*shape, requires_grad=True, device="cpu")
    feed = torch.randn(*shape, device="cpu")

    def run() -> tuple[Tensor, Tensor | None]:
        x.grad = None
        for param in model.parameters():
            param.grad = None
        out = forward(x)
        torch.autograd.backward((out * feed).sum())
        return out.detach(), x.grad

    return run


def systems(size: Size, meshes: Mapping[str, DeviceMesh]) -> dict[str, Call]:
    """The calls that are compared, by name, on weights and inputs that are alike."""
    tokens, width = size
    world = dist.get_world_size()
    shape = (1, tokens // world, width)
    found: dict[str, Call] = {}
    for name, mesh in meshes.items():
        torch.manual_seed(1)
        model = by_torch(width, mesh)
        found[f"DTensor on {name}"] = turn(model, model, shape)
    torch.manual_seed(1)
    ours = parallelize(Layer(width, 4 * width), PLAN, meshes[OURS])
    found[OURS] = turn(ours, ours, shape)
    part = Layer(width, 4 * width // world)
    own, products = turn(part.norm, part.norm, shape), turn(part.products, part, (1, tokens, width))
    return {**found, ALONE: lambda: (own(), products())}


def rows(size: Size, times: Mapping[str, Sequence[float]], busy: int) -> Iterator[list[object]]:
    """A row for each system; ratios of its time to ringcomm's are of one round each."""
    for name, taken in times.items():
        ratios = [one / ours for one, ours in zip(taken, times[OURS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures = (1e3 * statistics.median(taken), middle, low, high)
        facts = (len(taken), dist.get_world_size(), busy)
        yield [*size, name, *(f"{each:.4g}" for each in figures), *facts]


def write(path: Path, found: Sequence[Sequence[object]], arguments: Sequence[str]) -> None:
    facts = collect(arguments, {}, {})
    command = facts["command"].replace("ringcomm bench", "python -m ringcomm.bench.layers")
    with path.open("w", newline="", encoding="utf-8") as file:
        for key, value in {**facts, "command": command}.items():
            file.write(f"# {key}: {value}\n")
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])


def size_of(text: str) -> Size:
    tokens, width = map(int, text.split(","))
    return tokens, width


def main(arguments: Sequence[str]) -> None:
    """Prints the rows on rank 0, and writes them."""
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.layers")
    parser.add_argument("sizes", nargs="*", type=size_of, metavar="TOKENS,WIDTH", default=SIZES)
    parser.add_argument("-n", "--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="loops that compute beside the ranks")
    parser.add_argument("--csv", type=Path, help="CSV")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    first = dist.get_rank() == 0
    default: Any = dist.group.WORLD
    groups = {"Gloo": dist.new_group(backend="gloo"), OURS: default}
    meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
    if options.busy:
        lead_session()
    found = []
    with busy_loops(options.busy) if first else nullcontext():
        for size in options.sizes:
            times = times_of(default.communicator, systems(size, meshes), options.rounds)
            found += list(rows(size, times, options.busy))
            if first:
                for row in found[-len(times) :]:
                    print(*row, sep="\t", flush=True)
    if first and options.csv:
        write(options.csv, found, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
