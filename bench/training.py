"""Training at each ZeRO stage, against DDP and FSDP2 on Gloo and on ringcomm, and DeepSpeed.

``python -m ringcomm.bench.training`` runs it on the ranks of one machine, ``torchrun --nnodes N
--nproc-per-node L -m ringcomm.bench.training`` on those of several. There HSDP takes part, too, and
the stages that keep parameters or state as FSDP2 and HSDP do. DeepSpeed's ZeRO, on Gloo, takes part
where it is installed; elsewhere its rows have no time.

All systems train one GPT of the same size on the same text, each on its own copy, in one run and
interleaved (see :mod:`.timing`). A step is forward, backward, update and zero_grad. After the last
one the losses of every step and the weights are compared: those that must be equal to the bit and
are not count as ``wrong``, and the exit status is 1.

With ``--device cuda`` all ranks share one GPU, the rival is torch's fused AdamW on each rank
alone, with no communication at all, and nothing is compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.errors import ArgumentError
from ringcomm.examples.train_gpt import read_corpus

from . import provenance, training_deepspeed
from .board import Board
from .busy import REST_S, lead_session
from .devices import Gpu
from .launch import LaunchError, Placing, join_processes, run_processes, started_by
from .modes import PROCESSES, PROCESSES_ON_ONE_GPU
from .report import Report, Row, write_csv, write_json
from .session import quartiles
from .steps import HostClock
from .timing import Call, Clock, Entrant, Pace, Timing, measure, ratios
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

_RIVALS = (
    *(DDP, DDP_HERE, FSDP2, FSDP2_HERE, *training_deepspeed.STAGES, HSDP, HSDP_HERE),
    PLAIN,
)
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


def find_out(
    board: Board, comm: ringcomm.Communicator, trained: Mapping[str, Training]
) -> dict[str, TrainingOutcome]:
    """Compares each system with its twin; collective, and the same on all ranks."""
    alone = PLAIN in trained
    compared: Mapping[str, str] = {} if alone else twins(comm.world_size, comm.num_nodes)
    compared = {name: twin for name, twin in compared.items() if twin in trained}
    mine = {
        name: (
            differences(each, trained[compared[name]]) if name in compared else None,
            each.losses[0].item(),
            each.losses[-1].item(),
            each.held_bytes,
        )
        for name, each in trained.items()
    }
    by_rank = board.exchange(mine)
    found = {}
    for name in trained:
        wrong, first, last, held = zip(*(here[name] for here in by_rank), strict=True)
        found[name] = TrainingOutcome(
            sum(wrong) if name in compared else None,
            statistics.mean(first),
            statistics.mean(last),
            max(held),
        )
    return found


def rows_of(
    shape: Shape,
    world: int,
    timings: Mapping[str, Timing],
    findings: Mapping[str, TrainingOutcome],
    nodes: int = 1,
) -> list[Row]:
    """A row per system; ratios are over the rival: torch alone, or DDP."""
    rival = timings[PLAIN if PLAIN in timings else DDP]
    same = Row(
        collective=TRAINING,
        size_bytes=shape.dtype.itemsize * shape.parameters,
        count=shape.parameters,
        dtype=str(shape.dtype).removeprefix("torch."),
        op="none",
        root=-1,
        ranks=world,
        system="",
        placement=str(shape),
        mode=PROCESSES_ON_ONE_GPU if PLAIN in timings else PROCESSES,
        nodes=nodes,
    )
    rows = []
    for name, timing in timings.items():
        low, middle, high = quartiles(ratios(timing, rival))
        others = [
            f"{other} takes {statistics.median(ratios(timings[other], timing)):.3f}"
            for other in _RIVALS
            if other in timings and other != name
        ]
        rows.append(
            replace(
                same,
                system=name,
                time_us=round(timing.median_us, 1),
                best_us=round(timing.best_us, 1),
                p95_us=round(timing.p95_us, 1),
                wrong=findings[name].wrong,
                ratio=middle,
                ratio_low=low,
                ratio_high=high,
                rounds=len(timing.times_us),
                batch=1,
                note="; ".join([findings[name].text, *others]),
                held_bytes=findings[name].held_bytes,
            )
        )
    if FSDP2 in timings and not training_deepspeed.installed_version():
        note = training_deepspeed.MISSING
        rows += [replace(same, system=name, note=note) for name in training_deepspeed.STAGES]
    return rows


def _line(row: Row) -> str:
    if row.time_us is None:
        return f"{row.placement}  {row.system:<20} {row.note}"
    milliseconds = row.time_us / 1e3
    told = {None: "", 0: "equal; "}.get(row.wrong, f"WRONG: {row.wrong} losses or weights; ")
    return f"{row.placement}  {row.system:<20} {milliseconds:9.2f} ms  {told}{row.note}"


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


def _run_rank(
    place: Placing, shapes: list[Shape], pace: Pace, asked: argparse.Namespace, words: list[str]
) -> int:
    rank, world, store = place.rank, place.world, place.store
    on_gpu = asked.device == "cuda"
    clock: Clock = SynchronizedClock() if on_gpu else HostClock()
    if asked.busy:
        lead_session()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=world
    )
    comm = ringcomm.Communicator.from_store(
        dist.PrefixStore("ringcomm", store),
        rank,
        world,
        device=asked.device,
        heap_bytes=_device_heap_bytes(shapes) if on_gpu else None,
    )
    # The systems make groups of their own, so nothing else uses torch's first one.
    group = dist.group.WORLD if comm.num_nodes > 1 else None
    board = Board(store, rank, world, group)
    corpus = read_corpus(asked.data, max(shape.context for shape in shapes))
    rows: list[Row] = []
    for shape in shapes:
        batches = Batches(shape, corpus, rank, world, comm.device)
        trained = entrants(batches, comm, alone=on_gpu)
        calls = {name: Entrant([training]) for name, training in trained.items()}
        timings = measure(board, calls, pace, clock)
        found = find_out(board, comm, trained)
        rows += rows_of(shape, world, timings, found, comm.num_nodes)
        del calls, trained
        for stage in (2, 3) if asked.profile else ():
            _profile(batches, stage, comm, asked.profile)
    board.barrier()
    if rank == 0:
        nodes = f" on {comm.num_nodes} nodes" if comm.num_nodes > 1 else ""
        print(f"# {world} ranks{nodes}; {corpus.source}")
        _write(rows, asked, _without_files(words))
    comm.close()
    dist.destroy_process_group()
    # One rank tells it: a rank that fails takes the others with it, which may still write.
    return 1 if rank == 0 and any(row.wrong for row in rows) else 0


def _device_heap_bytes(shapes: list[Shape]) -> int:
    """Returns room for the parameters, gradients and buffers of all stages at once.

    A GPU's heap does not grow, and its default is no measure of these models.
    """
    most = max(shape.parameters for shape in shapes) * torch.float32.itemsize
    return len(STAGES) * _HEAP_COPIES * most + _HEAP_SLACK_BYTES


def _profile(batches: Batches, stage: int, comm: ringcomm.Communicator, file: Path) -> None:
    """Prints how much of the communication nobody waited for, and writes this rank's spans."""
    profile = profiled_steps(batches, stage, comm)
    profile.write(
        file.with_name(f"{file.stem}-stage{stage}-rank{comm.rank}{file.suffix}"), comm.rank
    )
    share = torch.tensor([profile.hidden_share()], dtype=torch.float64)
    comm.all_reduce(share)
    if comm.rank == 0:
        mean = share.item() / comm.world_size
        print(f"{batches.shape}  stage {stage}: {mean:.0%} of the communication was hidden")


def _write(rows: list[Row], asked: argparse.Namespace, words: list[str]) -> None:
    facts = Gpu(0).facts() if asked.device == "cuda" else {}
    versions = {"ringcomm": ringcomm.__version__}
    if any(row.system in training_deepspeed.STAGES and row.rounds for row in rows):
        versions["deepspeed"] = training_deepspeed.installed_version() or ""
    collected = provenance.collect(words, versions, facts)
    collected["command"] = " ".join(["python -m ringcomm.bench.training", *words])
    report = Report(collected, rows)
    print("\n".join(map(_line, rows)))
    if asked.json:
        write_json(report, asked.json)
    if asked.csv:
        write_csv(report, asked.csv)


def _without_files(words: list[str]) -> list[str]:
    """Leaves out the files that results went to, which change no figure."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("--json", "--csv", "--profile"):
            next(rest, None)
        else:
            kept.append(word)
    return kept


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ringcomm.bench.training", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, help="default 2, or those that torchrun started")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1, help="a rank (default 1)")
    parser.add_argument("--context", type=int, action="append", help="bytes (default 64)")
    parser.add_argument(
        "--data", metavar="PATH", help="text file or folder (default: Python's standard library)"
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="adamw",
        help="of all systems: ringcomm's, and torch's (Lion: in torch's operations; adamw8bit: "
        "torch's AdamW)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of parameters and gradients; all systems keep FP32 masters of the latter",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-r", "--rounds", type=int, default=9)
    parser.add_argument(
        "--busy", type=int, default=0, help="processes that compute beside the ranks"
    )
    parser.add_argument("--profile", type=Path, help="also write Chrome traces of stages 2 and 3")
    parser.add_argument("--json", type=Path, help="a file of rows and where they come from")
    parser.add_argument("--csv", type=Path, help="the same as CSV")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    asked = parse(arguments)
    if started_by(os.environ) in ("harness", "torchrun"):
        shapes = [
            Shape(
                *(asked.width, asked.depth, asked.heads, asked.sequences, context),
                optimizer=asked.optimizer,
                dtype=getattr(torch, asked.dtype),
            )
            for context in asked.context or [64]
        ]
        rest_s = REST_S if asked.busy else 0.0
        pace = Pace(rounds=asked.rounds, warmup_rounds=1, batch=1, turn_us=0, rest_s=rest_s)
        try:
            place = join_processes(asked.ranks, asked.busy)
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 2
        return _run_rank(place, shapes, pace, asked, arguments)
    try:
        read_corpus(asked.data, max(asked.context or [64]))
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    return run_processes("ringcomm.bench.training", arguments, asked.ranks or 2, asked.busy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
