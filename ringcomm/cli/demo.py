"""``ringcomm demo``: collectives against Gloo, a GPT trained on both, and at all stages of ZeRO."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.cli.demo_collectives import Cell, Meter, Pair, rows
from ringcomm.cli.demo_training import (
    Contest,
    Result,
    Standing,
    Tour,
    contest,
    tour,
    tour_stages,
    train_both,
)
from ringcomm.errors import ArgumentError
from ringcomm.examples.gpt.config import ModelConfig, TrainConfig
from ringcomm.examples.gpt.corpus import Corpus, Source, find_source, min_corpus_bytes
from ringcomm.examples.gpt.engines import load_same_on_all_ranks
from ringcomm.examples.gpt.report import MB
from ringcomm.examples.gpt.run import joined_ranks
from ringcomm.launch import LaunchPlan, World, launch, threads_per_rank
from ringcomm.output import ProgressBar
from ringcomm.rendezvous.environment import available_cores, launched_world

# The demo's table of stages, and what the summary says of it.

STAGE_NAME_CHARS = 15


def failed_stages(standings: Sequence[Standing]) -> list[Standing]:
    """The stages whose losses or weights are not stage 0's."""
    return [each for each in standings if each.is_stage and not each.equal]


def stages_head(config: TrainConfig, standings: Sequence[Standing]) -> str:
    """Title and column heads."""
    sizes = f"{standings[0].parameters / 1e6:.3g} M parameters"
    sizes += f", {config.batch * config.model.context} tokens a step"
    left = f"{'':{STAGE_NAME_CHARS + 16}}"
    return (
        f"\nStages: {sizes}, AdamW in FP32: ringcomm.zero, and torch's fused\n"
        "AdamW under DDP and FSDP2 on Gloo; the same weights and batches, in rounds; x = median\n"
        "of DDP's and of FSDP2's time over its own. Memory is what training adds to a rank, in\n"
        "MB: the model state's closed form, with buffers for gradients, and as measured between\n"
        "backward and the optimizer's step.\n\n"
        f"{'':{STAGE_NAME_CHARS}}{'loss':^16}{'equal to':>10}{'closed':>9}{'with':>9}"
        f"{'measured':>10}{'a step':>10}{'DDP':>7}{'FSDP2':>7}\n"
        f"{left}{'stage 0':>10}{'form':>9}{'buffers':>9}{'':>10}{'takes':>10}{'x':>7}{'x':>7}"
    )


def stages_line(each: Standing) -> str:
    """One line of the table."""
    loss = f"{each.first_loss:.3f} -> {each.last_loss:.3f}"
    equal = "yes" if each.equal else "NO" if each.is_stage else f"to {each.loss_difference:.0e}"
    buffers = f"{(each.state_bytes + each.buffer_bytes) / MB:.1f}" if each.is_stage else ""
    return (
        f"{each.name:{STAGE_NAME_CHARS}}{loss:>16}{equal:>10}"
        f"{each.state_bytes / MB:>9.1f}{buffers:>9}"
        f"{each.held_bytes / MB:>10.1f}{f'{each.step_s * 1000:.3g} ms':>10}"
        f"{each.ddp_ratio:>7.3g}{each.fsdp2_ratio:>7.3g}"
    )


def stages_summary(standings: Sequence[Standing]) -> list[str]:
    """Says what the table shows, or which stages failed."""
    failed = failed_stages(standings)
    if failed:
        return [
            f"  FAILED: {each.name}: {each.unequal_losses} losses (by up to "
            f"{each.loss_difference:.3g}) and {each.unequal_weights} weights differ from stage 0's "
            f"in {each.steps} steps"
            for each in failed
        ]
    stages = [each for each in standings if each.is_stage]
    memory = ", ".join(f"{each.held_bytes / MB:.1f}" for each in stages)
    return [
        f"  zero, stages 0 to 3: losses and weights bitwise equal over {stages[0].steps} steps; "
        f"{memory} MB a rank"
    ]


NAME_CHARS = 23


@dataclass(frozen=True)
class Findings:
    """The results of the three parts."""

    cells: Sequence[Cell]
    results: Sequence[Result]
    standings: Sequence[Standing]

    @property
    def wrong_cells(self) -> list[Cell]:
        """The cells whose outputs were wrong."""
        return [cell for cell in self.cells if cell.wrong_elems]

    @property
    def passed(self) -> bool:
        """True if every collective was right and every loss and weight equal."""
        equal = all(result.equal for result in self.results)
        return equal and not self.wrong_cells and not failed_stages(self.standings)


def size_text(size_bytes: int) -> str:
    """Bytes as KiB or MiB."""
    if size_bytes >= 1 << 20:
        return f"{size_bytes >> 20} MiB"
    return f"{size_bytes >> 10} KiB"


def time_text(time_us: float) -> str:
    """Microseconds with three digits, in the unit that suits."""
    if time_us < 1000:
        return f"{time_us:.3g} us"
    return f"{time_us / 1000:.3g} ms"


def collectives_head(sizes_bytes: Sequence[int], world: World) -> str:
    """Title and column heads of the first table."""
    sizes = "".join(f"{size_text(size):>18}{'':7}" for size in sizes_bytes)
    columns = f"{'Gloo':>8}{'ringcomm':>10}{'x':>7}" * len(sizes_bytes)
    return (
        f"Collectives: {world.size} ranks, FP32, time of one call; x = median of Gloo / ringcomm "
        f"over interleaved\nrounds. Every cell is checked on both systems: exact, element by "
        f"element.\n\n{'':{NAME_CHARS}}{sizes}\n{'':{NAME_CHARS}}{columns}"
    )


def collectives_line(row: Sequence[Cell]) -> str:
    """One line of the first table."""
    name = row[0].collective + (" (heap)" if row[0].memory == "heap" else "")
    texts = [
        f"{'WRONG':>8}{cell.wrong_elems:>10}{'':>7}"
        if cell.wrong_elems
        else f"{time_text(cell.gloo_us):>8}{time_text(cell.ringcomm_us):>10}{cell.ratio:>7.3g}"
        for cell in row
    ]
    return f"{name:{NAME_CHARS}}" + "".join(texts)


def training_head(source: Source) -> str:
    """Title and column heads of the second table."""
    return (
        f"\nTraining: byte-level GPT under DistributedDataParallel, the same weights and batches "
        f"on both\nsystems in alternating blocks; speeds in tokens/s; x = median of ringcomm / "
        f"Gloo.\n"
        f"Text: {source}.\n\n"
        f"{'parameters':>10}{'gradient':>10}{'tokens':>8}{'steps':>7}  {'loss':^16}{'equal':>7}"
        f"{'held-out':>10}{'Gloo':>10}{'ringcomm':>10}{'x':>7}\n{'':>20}{'a step':>8}"
    )


def training_line(result: Result) -> str:
    """One line of the second table."""
    loss = f"{result.first_loss:.3f} -> {result.last_loss:.3f}"
    gradient_mb = 4 * result.parameters / 1e6
    return (
        f"{result.parameters / 1e6:>8.3g} M{gradient_mb:>7.3g} MB{result.tokens_per_step:>8}"
        f"{result.steps:>7}  {loss:>16}{'yes' if result.equal else 'NO':>7}"
        f"{result.held_out_after:>10.3f}{result.gloo_tokens_per_s:>10,.0f}"
        f"{result.ringcomm_tokens_per_s:>10,.0f}{result.ratio:>7.3f}"
    )


def summary(findings: Findings, elapsed_s: float) -> str:
    """Says what was shown, and what failed."""
    lines = [f"\nSummary ({elapsed_s:.0f} s)", *_collectives_summary(findings)]
    for result in findings.results:
        name = f"{result.parameters / 1e6:.3g} M parameters"
        if result.equal:
            lines.append(
                f"  {name}: losses and weights bitwise equal over {result.steps} steps; "
                f"{result.ratio:.3f}x Gloo's speed"
            )
        else:
            lines.append(
                f"  FAILED: {name}: losses differ by up to {result.loss_difference:.3g}, "
                f"{result.unequal_weights} weights differ after {result.steps} steps"
            )
    lines += stages_summary(findings.standings)
    lines.append("All results agree." if findings.passed else "NOT all results agree.")
    return "\n".join(lines)


def _collectives_summary(findings: Findings) -> list[str]:
    if findings.wrong_cells:
        return [
            f"  FAILED: {cell.collective} {cell.memory} {size_text(cell.size_bytes)}: "
            f"{cell.wrong_elems} wrong elements"
            for cell in findings.wrong_cells
        ]
    cells = findings.cells
    lines = [f"  {len(cells)} of {len(cells)} collective cells exact; Gloo's time over ringcomm's:"]
    for size_bytes in sorted({cell.size_bytes for cell in cells if cell.size_bytes}):
        ratios = [cell.ratio for cell in cells if cell.size_bytes == size_bytes]
        lines.append(
            f"    {size_text(size_bytes):>8}: {min(ratios):.3g} to {max(ratios):.3g}, "
            f"median {statistics.median(ratios):.3g}"
        )
    return lines


def record(findings: Findings, elapsed_s: float) -> dict[str, Any]:
    """Every figure and what it was measured on, as plain values for JSON."""
    return {
        "machine": {
            "processor": _processor(),
            "cores": available_cores(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "passed": findings.passed,
        "elapsed_s": elapsed_s,
        "collectives": [asdict(cell) for cell in findings.cells],
        "training": [{**asdict(result), "equal": result.equal} for result in findings.results],
        "stages": [{**asdict(each), "equal": each.equal} for each in findings.standings],
    }


def _processor() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


# ``ringcomm demo``: collectives against Gloo, a GPT trained on both, and at all stages of ZeRO.

RANKS = 2  # a sum of two FP32 numbers has one value whatever the order, so losses must be equal
CONTEXT = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringcomm demo``."""
    parser.description = (
        "Check and time every collective against Gloo, train a small byte-level GPT on both, then "
        "at all stages of ZeRO beside DDP and FSDP2, and compare every loss. Starts its own "
        f"{RANKS} ranks; takes one to two minutes on 2 cores. Exit status 1 when any result is "
        "wrong or any loss differs."
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    add("--quick", action="store_true", help="small sizes and one small model: a few seconds")
    add("--json", metavar="FILE", help="also write all figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them."""
    if launched_world() is not None:
        raise ArgumentError(
            "demo starts its own ranks; run it without torchrun (`ringcomm train` runs under it)"
        )
    find_source(args.data, min_corpus_bytes(CONTEXT))
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise ArgumentError(f"--json {args.json}: its folder does not exist")
    settings = {"data": args.data, "json": args.json, "quick": args.quick}
    return launch(LaunchPlan("ringcomm.cli.demo", settings, RANKS, threads_per_rank(RANKS)))


# The demo as every rank runs it.

Say = Callable[[str], None]
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Programme:
    """The amount of work that the demo does."""

    sizes_bytes: tuple[int, ...]
    cell_s: float
    contests: tuple[Contest, ...]
    tour: Tour


FULL = Programme(
    sizes_bytes=(4 * KIB, MIB, 64 * MIB),
    cell_s=0.3,
    contests=(
        contest(ModelConfig(64, 2, 2, CONTEXT), steps_per_block=20, blocks=15, limit_s=4),
        contest(ModelConfig(128, 4, 4, CONTEXT), steps_per_block=8, blocks=15, limit_s=4),
        contest(ModelConfig(256, 4, 4, CONTEXT), steps_per_block=3, blocks=15, limit_s=5),
        contest(ModelConfig(512, 6, 8, CONTEXT), steps_per_block=1, blocks=9, limit_s=9),
    ),
    tour=tour(ModelConfig(320, 5, 5, CONTEXT), steps_per_round=1, rounds=15, limit_s=24),
)
QUICK = Programme(
    sizes_bytes=(4 * KIB, 256 * KIB),
    cell_s=0.02,
    contests=(contest(ModelConfig(32, 1, 2, CONTEXT), steps_per_block=3, blocks=3, limit_s=3),),
    tour=tour(ModelConfig(32, 2, 2, CONTEXT), steps_per_round=2, rounds=3, limit_s=3),
)


def run_rank(settings: Mapping[str, Any]) -> int:
    """Run all parts; rank 0 prints, and exits with 1 when anything was wrong."""
    started = time.perf_counter()
    programme = QUICK if settings["quick"] else FULL
    with joined_ranks("ringcomm") as world:
        say: Say = _print if world.rank == 0 else _keep_silent
        # See NOTE [Groups end last] in examples/gpt/run.py.
        findings = _find_out(programme, settings["data"], world, say)
        gc.collect()
    elapsed_s = time.perf_counter() - started
    say(summary(findings, elapsed_s))
    if world.rank == 0 and settings["json"] is not None:
        Path(settings["json"]).write_text(json.dumps(record(findings, elapsed_s), indent=2) + "\n")
    return 0 if findings.passed or world.rank else 1


def _find_out(programme: Programme, data: str | None, world: World, say: Say) -> Findings:
    """Runs the three parts."""
    ringcomm_group = dist.group.WORLD
    assert ringcomm_group is not None
    pair = Pair(ringcomm=ringcomm_group, gloo=dist.new_group(backend="gloo"))
    cells = _measure_collectives(programme, world, pair, say)
    source = find_source(data, min_corpus_bytes(CONTEXT))
    corpus = load_same_on_all_ranks(source, world)
    say(training_head(source))
    results = _train(programme, corpus, world, pair, say)
    standings = _tour(programme.tour, corpus, world, pair, say)
    return Findings(cells, results, standings)


def _measure_collectives(programme: Programme, world: World, pair: Pair, say: Say) -> list[Cell]:
    say(collectives_head(programme.sizes_bytes, world))
    meter = Meter(world, pair, programme.sizes_bytes, programme.cell_s)
    cells = []
    for row in rows(heap_allocate=lambda elems: ringcomm.empty(elems, dtype=torch.float32)):
        measured = list(meter.measure(row))
        say(collectives_line(measured))
        cells += measured
    barrier = meter.measure_barrier()
    say(collectives_line([barrier]))
    return [*cells, barrier]


def _train(
    programme: Programme, corpus: Corpus, world: World, pair: Pair, say: Say
) -> list[Result]:
    results = []
    for plan in programme.contests:
        with ProgressBar("training", plan.blocks) as bar:
            result = train_both(plan, corpus, world, pair, _shown_in(bar, world))
        say(training_line(result))
        results.append(result)
    return results


def _tour(plan: Tour, corpus: Corpus, world: World, pair: Pair, say: Say) -> list[Standing]:
    with ProgressBar("stages", plan.rounds) as bar:
        standings = tour_stages(plan, corpus, world, pair, _shown_in(bar, world))
    say(stages_head(plan.config, standings))
    for each in standings:
        say(stages_line(each))
    return standings


def _shown_in(bar: ProgressBar, world: World) -> Callable[[int, float], None]:
    """A report of rounds done and of the loss, which rank 0 shows."""

    def show(done: int, loss: float) -> None:
        if world.rank == 0:
            bar.show(done, f"loss {loss:.3f}")

    return show


def _print(text: str) -> None:
    print(text, flush=True)


def _keep_silent(text: str) -> None:
    """Ranks other than 0 say nothing."""
