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
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

import ringcomm
from ringcomm.errors import ArgumentError
from ringcomm.examples.train_gpt import read_corpus

from . import training_deepspeed
from .devices import PROCESSES_ON_ONE_GPU, Gpu, Host
from .options import PROFILE, option, positive
from .report import PROCESSES, Row, row_of
from .run import Bench, Run
from .timing import Call, Clock, Timing, ratios
from .timing import rows_of as timed_rows
from .training_systems import (
    DDP,
    DDP_HERE,
    FSDP2,
    FSDP2_HERE,
    HSDP,
    HSDP_HERE,
    OPTIMIZERS,
    PLAIN,
    STAGES,
    TRAINING,
    Batches,
    Shape,
    Training,
    differences,
    entrants,
    profiled_steps,
    twins,
)

_RIVALS = (*(DDP, DDP_HERE, FSDP2, FSDP2_HERE, *training_deepspeed.STAGES, HSDP, HSDP_HERE), PLAIN)
DEFAULT_CONTEXT = 64
_MB = 1e6
# A stage's parameters and gradients, and what it gathers and reduces them in.
_HEAP_COPIES = 4
_HEAP_SLACK_BYTES = 1 << 30


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of one system's training, over all ranks.

    Attributes:
        wrong: losses and weights that are not the twin's; None where it has no twin.
        first_loss, last_loss: in nats per byte, mean of the ranks.
        held_bytes: what it adds to a rank's memory, on the rank where that is most.
    """

    wrong: int | None
    first_loss: float
    last_loss: float
    held_bytes: int

    @property
    def text(self) -> str:
        return (
            f"loss {self.first_loss:.3f} to {self.last_loss:.3f}; "
            f"{self.held_bytes / _MB:.1f} MB a rank"
        )


def find_out(run: Run, trained: Mapping[str, Training], nodes: int) -> dict[str, TrainingOutcome]:
    """Compares each system with its twin; collective, and the same on all ranks."""
    compared = {} if PLAIN in trained else twins(run.world, nodes)
    compared = {name: twin for name, twin in compared.items() if twin in trained}
    mine = {
        name: (
            differences(each, trained[compared[name]]) if name in compared else None,
            *(each.losses[0].item(), each.losses[-1].item(), each.held_bytes),
        )
        for name, each in trained.items()
    }
    by_rank = run.board.exchange(mine)
    found = {}
    for name in trained:
        wrong, first, last, held = zip(*(here[name] for here in by_rank), strict=True)
        total = sum(wrong) if name in compared else None
        first_loss, last_loss = statistics.mean(first), statistics.mean(last)
        found[name] = TrainingOutcome(total, first_loss, last_loss, max(held))
    return found


def rows_of(
    shape: Shape,
    world: int,
    timings: Mapping[str, Timing],
    findings: Mapping[str, TrainingOutcome],
    nodes: int = 1,
) -> list[Row]:
    """A row per system; ratios are over the rival: torch alone, or DDP."""
    alone = PLAIN in timings
    mode = PROCESSES_ON_ONE_GPU if alone else PROCESSES
    elems, dtype = shape.parameters, shape.dtype
    case = row_of(TRAINING, str(shape), world, elems, dtype, mode=mode, nodes=nodes)
    rows = []
    for row in timed_rows(case, timings, PLAIN if alone else DDP):
        others = [
            f"{other} takes {statistics.median(ratios(timings[other], timings[row.system])):.3f}"
            for other in _RIVALS
            if other in timings and other != row.system
        ]
        found = findings[row.system]
        note = "; ".join([found.text, *others])
        rows.append(replace(row, wrong=found.wrong, note=note, held_bytes=found.held_bytes))
    if FSDP2 in timings and not training_deepspeed.installed_version():
        note = training_deepspeed.MISSING
        rows += [replace(case, system=name, note=note) for name in training_deepspeed.STAGES]
    return rows


class SynchronizedClock:
    """Wall time until the device has done what the calls have queued."""

    def elapsed_us(self, calls: Iterable[Call]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def shapes_of(asked: argparse.Namespace) -> list[Shape]:
    sizes = (asked.width, asked.depth, asked.heads, asked.sequences)
    how = {"optimizer": asked.optimizer, "dtype": getattr(torch, asked.dtype)}
    return [Shape(*sizes, context, **how) for context in asked.context or [DEFAULT_CONTEXT]]


def measure(run: Run) -> None:
    asked, shapes = run.options, shapes_of(run.options)
    on_gpu = asked.device == "cuda"
    clock: Clock = SynchronizedClock() if on_gpu else Host()
    comm = run.connect(
        "gloo", device=asked.device, heap_bytes=_device_heap_bytes(shapes) if on_gpu else None
    )
    nodes = f" on {comm.num_nodes} nodes" if comm.num_nodes > 1 else ""
    run.say(f"# {run.world} ranks{nodes}; {asked.corpus.source}")
    for shape in shapes:
        batches = Batches(shape, asked.corpus, run.rank, run.world, comm.device)
        trained = entrants(batches, comm, alone=on_gpu)
        timings = run.time(trained, warmup_rounds=1, clock=clock)
        found = find_out(run, trained, comm.num_nodes)
        run.add(rows_of(shape, run.world, timings, found, comm.num_nodes))
        del trained
        for stage in (2, 3) if asked.profile else ():
            _profile(batches, stage, run, comm)
    run.facts = Gpu(0).facts() if on_gpu and run.rank == 0 else {}
    if any(row.system in training_deepspeed.STAGES and row.rounds for row in run.rows):
        run.versions["deepspeed"] = training_deepspeed.installed_version() or ""


def _device_heap_bytes(shapes: list[Shape]) -> int:
    """Returns room for the parameters, gradients and buffers of all stages at once.

    A GPU's heap does not grow, and its default is no measure of these models.
    """
    most = max(shape.parameters for shape in shapes) * torch.float32.itemsize
    return len(STAGES) * _HEAP_COPIES * most + _HEAP_SLACK_BYTES


def _profile(batches: Batches, stage: int, run: Run, comm: ringcomm.Communicator) -> None:
    """Prints how much of the communication nobody waited for, and writes this rank's spans."""
    file = run.options.profile
    profile = profiled_steps(batches, stage, comm)
    profile.write(
        file.with_name(f"{file.stem}-stage{stage}-rank{comm.rank}{file.suffix}"), comm.rank
    )
    share = torch.tensor([profile.hidden_share()], dtype=torch.float64)
    comm.all_reduce(share)
    mean = share.item() / comm.world_size
    run.say(f"{batches.shape}  stage {stage}: {mean:.0%} of the communication was hidden")


def read_text(parser: argparse.ArgumentParser, asked: argparse.Namespace, context: int) -> None:
    """Adds the text of ``--data`` to the options; refuses too little for contexts of that size."""
    try:
        asked.corpus = read_corpus(asked.data, context)
    except ArgumentError as error:
        parser.error(str(error))


DATA = option(
    "--data", metavar="PATH", help="text file or folder (default: Python's standard library)"
)
OPTIONS = (
    option("--width", type=positive, default=512),
    option("--depth", type=positive, default=8),
    option("--heads", type=positive, default=8),
    option("--sequences", type=positive, default=1, help="a rank (default 1)"),
    option("--context", type=positive, action="append", help="bytes (default 64)"),
    DATA,
    option(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="adamw",
        help="of all systems: ringcomm's, and torch's (Lion: in torch's operations; adamw8bit: "
        "torch's AdamW)",
    ),
    option(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of parameters and gradients; all systems keep FP32 masters of the latter",
    ),
    option("--device", choices=("cpu", "cuda"), default="cpu"),
    PROFILE,
)
BENCH = Bench(
    "training",
    __doc__,
    measure,
    OPTIONS,
    on_nodes=True,
    check=lambda parser, asked: read_text(parser, asked, max(asked.context or [DEFAULT_CONTEXT])),
)
parse = BENCH.parse
