# SPDX-License-Identifier: Apache-2.0
"""Times training at each ZeRO stage, against DDP and FSDP2 on Gloo and ringcomm, and DeepSpeed.

The ranks are on one machine, or with torchrun on several machines. On several machines the
benchmark also trains HSDP, and the stages that store parameters or state as FSDP2 and HSDP do. It
trains DeepSpeed's ZeRO, on Gloo, if DeepSpeed is installed; otherwise DeepSpeed's rows have no
time.

All systems train a GPT of the same size on the same text, each on its own copy, in one run and
interleaved. A step is forward, backward, update and zero_grad. After the last step the benchmark
compares the losses of every step and the weights. Values that must be equal to the bit count as
wrong if they differ; then the exit status is 1.

With ``--device cuda`` all ranks share one GPU, and nothing is compared. ``--system`` names a stage,
or DDP or FSDP2 on NCCL. The process trains this system and torch alone: torch's fused AdamW without
communication. Ratios are relative to torch alone. Each of the two has a row for its eager step, a
row for the host's time of this step (", host": until the step has returned), and with ``--graph`` a
row for the whole step as a CUDA graph (", graph"), relative to torch in a graph. For small models
torch is limited by its host, so eager steps compare the cost of Python, and graphs compare the work
of the GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

import ringcomm
from ringcomm.errors import ArgumentError
from ringcomm.examples.corpus import read_corpus

from . import training_deepspeed
from . import training_systems as gpt
from .devices import PROCESSES_ON_ONE_GPU, CudaDevice
from .options import choice, numbers, option, positive, tuples
from .report import PROCESSES, Row, row_of
from .run import Bench, Run
from .timing import Device, HostClock, Timing, ratios
from .timing import rows_of as timed_rows
from .training_systems import Batches, GpuShape, GraphedModel, ResidentBatches, Shape, TrainedModel

DEFAULT_CONTEXT = 64
# Suffixes of a system's name: its whole step as a graph, and the host's time of an eager step.
GRAPH, HOST = ", graph", ", host"
# In a row's note, before the ratio of another system's time to the row's time.
TAKES = " takes "
_MB = 1e6
# Buffers per parameter: a stage's parameters and gradients, and the buffers of gathers and
# reductions.
_HEAP_COPIES = 4
_HEAP_SLACK_BYTES = 1 << 30


class TrainingOutcome(NamedTuple):
    """The result of one system's training, over all ranks."""

    wrong: int | None  # losses and weights that differ from the twin's; None without twin
    first_loss: float  # nats per byte, mean over ranks
    last_loss: float
    held_bytes: int  # memory that training adds to a rank, on the rank with the most

    @property
    def text(self) -> str:
        losses = f"loss {self.first_loss:.3f} to {self.last_loss:.3f}"
        return f"{losses}; {self.held_bytes / _MB:.1f} MB a rank"


def find_out(
    run: Run, trained: Mapping[str, TrainedModel], nodes: int
) -> dict[str, TrainingOutcome]:
    """Compares systems with their :func:`twins`; collective, with equal results on all ranks."""
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
    """Returns a row per system; ratios are relative to DDP."""
    case = _case(shape, world, PROCESSES, nodes)
    rows = []
    for row in timed_rows(case, timings, gpt.DDP):
        found, own = findings[row.system], timings[row.system]
        others = {
            name: timings[name] for name in gpt.RIVALS if name in timings and name != row.system
        }
        took = {name: statistics.median(ratios(each, own)) for name, each in others.items()}
        note = "; ".join([found.text, *(f"{name}{TAKES}{took[name]:.4f}" for name in took)])
        rows.append(replace(row, wrong=found.wrong, note=note, held_bytes=found.held_bytes))
    if gpt.FSDP2 in timings and not training_deepspeed.installed_version():
        note = training_deepspeed.MISSING
        rows += [replace(case, system=name, note=note) for name in training_deepspeed.STAGES]
    return rows


def taken_by_rivals(row: Row) -> dict[str, float]:
    """Returns, by system, the median over rounds of its time divided by the time of ``row``."""
    parts = (part.rpartition(TAKES) for part in row.note.split("; "))
    return {name: float(ratio) for name, separator, ratio in parts if separator}


def _case(shape: Shape, world: int, mode: str, nodes: int = 1) -> Row:
    elems, dtype = shape.parameters, shape.dtype
    return row_of(gpt.TRAINING, str(shape), world, elems, dtype, mode=mode, nodes=nodes)


def gpu_rows(
    shape: Shape, world: int, timings: Mapping[str, Timing], kind: str, notes: Mapping[str, str]
) -> list[Row]:
    """Returns a row per system, with ``kind`` after its name; ratios are to torch alone."""
    rows = timed_rows(_case(shape, world, PROCESSES_ON_ONE_GPU), timings, gpt.TORCH_ALONE)
    return [replace(row, system=row.system + kind, note=notes.get(row.system, "")) for row in rows]


def measure_on_gpu(run: Run, shape: Shape, comm: ringcomm.Communicator, device: Device) -> None:
    """Trains torch alone and the selected system; first eager, and then in graphs."""
    asked = run.options
    batches = Batches(shape, asked.corpus, run.rank, run.world, comm.device)
    builds = gpt.on_gpu(batches, comm, asked.system)
    held = ResidentBatches(batches)
    # The host's clock measures until the GPU has finished the queued calls.
    clock = Device(device.synchronize)
    trained = {name: TrainedModel(build, held) for name, build in builds.items()}
    timings = run.time(trained, warmup_rounds=1, device=clock)
    of_host = run.time(trained, warmup_rounds=1, device=HostClock(device))
    found = find_out(run, trained, comm.num_nodes)
    notes = {name: outcome.text for name, outcome in found.items()}
    run.add(gpu_rows(shape, run.world, timings, "", notes))
    run.add(gpu_rows(shape, run.world, of_host, HOST, {}))
    # With two sharded modules on one communicator a graph could capture neither of them.
    trained[asked.system].end()
    del trained
    gc.collect()
    if asked.graph:
        graphed = {name: GraphedModel(build, held, device) for name, build in builds.items()}
        timings = run.time(graphed, warmup_rounds=1, device=clock)
        notes = {name: f"loss {each.loss:.3f}" for name, each in graphed.items()}
        run.add(gpu_rows(shape, run.world, timings, GRAPH, notes))
        graphed[asked.system].end()
        del graphed
        gc.collect()


def shapes_of(asked: argparse.Namespace) -> list[Shape]:
    """Returns the shapes to train, one after the other."""
    pairs = asked.batches or [(asked.sequences, each) for each in contexts_of(asked)]
    make = GpuShape if asked.device == "cuda" else Shape
    how = (asked.optimizer, getattr(torch, asked.dtype))
    sizes = (asked.width, asked.depth, asked.heads)
    return [make(*sizes, sequences, context, *how) for sequences, context in pairs]


def contexts_of(asked: argparse.Namespace) -> list[int]:
    return [context for _, context in asked.batches] or asked.context or [DEFAULT_CONTEXT]


def measure(run: Run) -> None:
    asked, shapes = run.options, shapes_of(run.options)
    device: Device = CudaDevice(0) if asked.device == "cuda" else Device()
    heap_bytes = None
    if asked.device == "cuda":
        run.facts = device.facts() if run.rank == 0 else {}
        # A GPU's heap does not grow, and its default size does not fit these models.
        most = max(shape.parameters for shape in shapes) * torch.float32.itemsize
        heap_bytes = _HEAP_COPIES * most + _HEAP_SLACK_BYTES
    comm = run.connect("gloo", device=asked.device, heap_bytes=heap_bytes)
    nodes = f" on {comm.num_nodes} nodes" if comm.num_nodes > 1 else ""
    run.say(f"# {run.world} ranks{nodes}; {asked.corpus.source}")
    # On a GPU a shape has its eager step, the host's time, and with --graph its graph.
    run.pacing.expect(len(shapes) * (2 + asked.graph if asked.device == "cuda" else 1))
    for shape in shapes:
        if asked.device == "cuda":
            measure_on_gpu(run, shape, comm, device)
            continue
        trained = gpt.entrants(Batches(shape, asked.corpus, run.rank, run.world, comm.device), comm)
        timings = run.time(trained, warmup_rounds=1)
        found = find_out(run, trained, comm.num_nodes)
        run.add(rows_of(shape, run.world, timings, found, comm.num_nodes))
        del trained
    if any(row.system in training_deepspeed.STAGES and row.rounds for row in run.rows):
        run.versions["deepspeed"] = training_deepspeed.installed_version() or ""


def check(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Refuses options that cannot be measured, and adds the text of ``--data`` to the options."""
    named = asked.system
    asked.system = None if named is None else named.replace("-", " ")
    if asked.device == "cuda":
        if asked.system is None:
            parser.error(f"--device cuda: a process trains one --system: {', '.join(_SYSTEMS)}")
        if asked.system not in gpt.STAGES and asked.ranks != 1:
            parser.error(f"--system {named}: NCCL takes a GPU per rank; use --ranks 1")
        if asked.system not in gpt.STAGES and asked.graph:
            parser.error(f"--graph: {named} is not captured; leave it out")
    elif asked.system is not None or asked.graph:
        parser.error("--system and --graph need --device cuda")
    read_text(parser, asked, max(contexts_of(asked)))


def read_text(parser: argparse.ArgumentParser, asked: argparse.Namespace, context: int) -> None:
    """Adds the text of ``--data`` to the options; refuses a text too short for the context."""
    try:
        asked.corpus = read_corpus(asked.data, context)
    except ArgumentError as error:
        parser.error(str(error))


_SYSTEMS = [name.replace(" ", "-") for name in gpt.ON_GPU]
DATA = option("--data", "text file or folder (default: Python's standard library)", metavar="PATH")
OPTIONS = (
    *numbers(width=512, depth=8, heads=8),
    option("--sequences", "sequences per rank", type=positive, default=1),
    option("--context", type=positive, action="append", help="bytes (default 64)"),
    tuples("--batches", "SEQUENCES,CONTEXT", ()),
    DATA,
    choice(
        "--optimizer",
        "optimizer of all systems, ringcomm's or torch's (Lion: written in torch; adamw8bit: "
        "torch's AdamW)",
        *gpt.OPTIMIZERS,
    ),
    choice(
        *("--dtype", "dtype of parameters and gradients; bfloat16 has FP32 masters"),
        *("float32", "bfloat16"),
    ),
    choice("--device", "device of the tensors", "cpu", "cuda"),
    option(
        "--system",
        f"system to train on a GPU, besides torch alone: {', '.join(_SYSTEMS)}",
        choices=_SYSTEMS,
        metavar="NAME",
    ),
    option("--graph", "also time the whole step as a CUDA graph", action="store_true"),
)
BENCH = Bench(
    "training",
    __doc__,
    measure,
    OPTIONS,
    on_nodes=True,
    check=check,
)
BENCH.run_as_main(__name__)
