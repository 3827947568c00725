"""Training at each ZeRO stage, against DDP and FSDP2 on Gloo and on ringcomm, and DeepSpeed.

It runs on the ranks of one machine, or under torchrun on those of several. There HSDP takes part,
too, and the stages that keep parameters or state as FSDP2 and HSDP do. DeepSpeed's ZeRO, on Gloo,
takes part where it is installed; elsewhere its rows have no time.

All systems train one GPT of the same size on the same text, each on its own copy, in one run and
interleaved. A step is forward, backward, update and zero_grad. After the last one the losses of
every step and the weights are compared: those that must be equal to the bit and are not count as
wrong, and the exit status is 1.

With ``--device cuda`` all ranks share one GPU, the rival is torch's fused AdamW on each rank
alone, with no communication at all, and nothing is compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ringcomm.errors import ArgumentError
from ringcomm.examples.corpus import read_corpus

from . import training_deepspeed
from . import training_systems as gpt
from .devices import PROCESSES_ON_ONE_GPU, CudaDevice
from .options import choice, numbers, option, positive
from .report import PROCESSES, Row, row_of
from .run import Bench, Run
from .timing import Device, Timing, ratios
from .timing import rows_of as timed_rows
from .training_systems import Batches, Shape, TrainedModel

DEFAULT_CONTEXT = 64
_MB = 1e6
# A stage's parameters and gradients, and what it gathers and reduces them in.
_HEAP_COPIES = 4
_HEAP_SLACK_BYTES = 1 << 30


class TrainingOutcome(NamedTuple):
    """The outcome of one system's training, over all ranks."""

    wrong: int | None  # losses and weights that are not the twin's; None where it has no twin
    first_loss: float  # in nats per byte, mean of the ranks
    last_loss: float
    held_bytes: int  # what it adds to a rank's memory, on the rank where that is most

    @property
    def text(self) -> str:
        losses = f"loss {self.first_loss:.3f} to {self.last_loss:.3f}"
        return f"{losses}; {self.held_bytes / _MB:.1f} MB a rank"


def find_out(
    run: Run, trained: Mapping[str, TrainedModel], nodes: int
) -> dict[str, TrainingOutcome]:
    """Compares each system with its twin; collective, and the same on all ranks."""
    pairs = {} if gpt.TORCH_ALONE in trained else gpt.twins(run.world, nodes)
    mine = {}
    for name, each in trained.items():
        twin = trained.get(pairs.get(name, ""))
        wrong = None if twin is None else gpt.differences(each, twin)
        mine[name] = wrong, each.losses[0].item(), each.losses[-1].item(), each.held_bytes
    found = {}
    by_rank = run.board.exchange(mine)
    for name in trained:
        wrongs, first, last, held = zip(*(here[name] for here in by_rank), strict=True)
        total = None if None in wrongs else sum(wrongs)
        means = statistics.mean(first), statistics.mean(last)
        found[name] = TrainingOutcome(total, *means, max(held))
    return found


def rows_of(
    shape: Shape,
    world: int,
    timings: Mapping[str, Timing],
    findings: Mapping[str, TrainingOutcome],
    nodes: int = 1,
) -> list[Row]:
    """A row per system; ratios are over the rival: torch alone, or DDP."""
    alone = gpt.TORCH_ALONE in timings
    mode = PROCESSES_ON_ONE_GPU if alone else PROCESSES
    elems, dtype = shape.parameters, shape.dtype
    case = row_of(gpt.TRAINING, str(shape), world, elems, dtype, mode=mode, nodes=nodes)
    rows = []
    for row in timed_rows(case, timings, gpt.TORCH_ALONE if alone else gpt.DDP):
        found, own = findings[row.system], timings[row.system]
        others = {
            name: timings[name] for name in gpt.RIVALS if name in timings and name != row.system
        }
        took = {name: statistics.median(ratios(each, own)) for name, each in others.items()}
        note = "; ".join([found.text, *(f"{name} takes {took[name]:.3f}" for name in took)])
        rows.append(replace(row, wrong=found.wrong, note=note, held_bytes=found.held_bytes))
    if gpt.FSDP2 in timings and not training_deepspeed.installed_version():
        note = training_deepspeed.MISSING
        rows += [replace(case, system=name, note=note) for name in training_deepspeed.STAGES]
    return rows


def measure(run: Run) -> None:
    asked, contexts = run.options, run.options.context or [DEFAULT_CONTEXT]
    sizes = (asked.width, asked.depth, asked.heads, asked.sequences)
    how = (asked.optimizer, getattr(torch, asked.dtype))
    shapes = [Shape(*sizes, context, *how) for context in contexts]
    on_gpu = asked.device == "cuda"
    # By the host's clock, until the GPU has done what the calls have queued.
    device = Device(torch.cuda.synchronize) if on_gpu else Device()
    # A GPU's heap does not grow, and its default is no measure of these models.
    most = max(shape.parameters for shape in shapes) * torch.float32.itemsize
    room = len(gpt.STAGES) * _HEAP_COPIES * most + _HEAP_SLACK_BYTES
    comm = run.connect("gloo", device=asked.device, heap_bytes=room if on_gpu else None)
    nodes = f" on {comm.num_nodes} nodes" if comm.num_nodes > 1 else ""
    run.say(f"# {run.world} ranks{nodes}; {asked.corpus.source}")
    for shape in shapes:
        batches = Batches(shape, asked.corpus, run.rank, run.world, comm.device)
        trained = gpt.entrants(batches, comm, alone=on_gpu)
        timings = run.time(trained, warmup_rounds=1, device=device)
        found = find_out(run, trained, comm.num_nodes)
        run.add(rows_of(shape, run.world, timings, found, comm.num_nodes))
        del trained
    run.facts = CudaDevice(0).facts() if on_gpu and run.rank == 0 else {}
    if any(row.system in training_deepspeed.STAGES and row.rounds for row in run.rows):
        run.versions["deepspeed"] = training_deepspeed.installed_version() or ""


def read_text(parser: argparse.ArgumentParser, asked: argparse.Namespace, context: int) -> None:
    """Adds the text of ``--data`` to the options; refuses too little for contexts of that size."""
    try:
        asked.corpus = read_corpus(asked.data, context)
    except ArgumentError as error:
        parser.error(str(error))


DATA = option("--data", "text file or folder (default: Python's standard library)", metavar="PATH")
OPTIONS = (
    *numbers(width=512, depth=8, heads=8),
    option("--sequences", "a rank", type=positive, default=1),
    option("--context", type=positive, action="append", help="bytes (default 64)"),
    DATA,
    choice(
        "--optimizer",
        "of all systems: ringcomm's, and torch's (Lion: in torch's operations; adamw8bit: torch's "
        "AdamW)",
        *gpt.OPTIMIZERS,
    ),
    choice(
        *("--dtype", "of parameters and gradients; all systems keep FP32 masters of the latter"),
        *("float32", "bfloat16"),
    ),
    choice("--device", "where tensors lie", "cpu", "cuda"),
)
BENCH = Bench(
    "training",
    __doc__,
    measure,
    OPTIONS,
    on_nodes=True,
    check=lambda parser, asked: read_text(parser, asked, max(asked.context or [DEFAULT_CONTEXT])),
)
BENCH.run_as_main(__name__)
