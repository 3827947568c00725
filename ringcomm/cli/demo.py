"""``ringcomm demo``: collectives against Gloo, a GPT trained on both, and at all stages of ZeRO."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.cli import demo_report
from ringcomm.cli.demo_collectives import Cell, Meter, Pair, rows
from ringcomm.cli.demo_report import stages_head, stages_line
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
from ringcomm.examples.gpt.config import ModelConfig
from ringcomm.examples.gpt.corpus import Corpus, find_source, min_corpus_bytes
from ringcomm.examples.gpt.engines import load_same_on_all_ranks
from ringcomm.examples.gpt.run import joined_ranks
from ringcomm.launch import LaunchPlan, World, launch, threads_per_rank
from ringcomm.output import ProgressBar
from ringcomm.rendezvous.environment import launched_world

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
    """How much the demo does."""

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
    say(demo_report.summary(findings, elapsed_s))
    if world.rank == 0 and settings["json"] is not None:
        record = demo_report.record(findings, elapsed_s)
        Path(settings["json"]).write_text(json.dumps(record, indent=2) + "\n")
    return 0 if findings.passed or world.rank else 1


def _find_out(
    programme: Programme, data: str | None, world: World, say: Say
) -> demo_report.Findings:
    """Runs the three parts."""
    ringcomm_group = dist.group.WORLD
    assert ringcomm_group is not None
    pair = Pair(ringcomm=ringcomm_group, gloo=dist.new_group(backend="gloo"))
    cells = _measure_collectives(programme, world, pair, say)
    source = find_source(data, min_corpus_bytes(CONTEXT))
    corpus = load_same_on_all_ranks(source, world)
    say(demo_report.training_head(source))
    results = _train(programme, corpus, world, pair, say)
    standings = _tour(programme.tour, corpus, world, pair, say)
    return demo_report.Findings(cells, results, standings)


def _measure_collectives(programme: Programme, world: World, pair: Pair, say: Say) -> list[Cell]:
    say(demo_report.collectives_head(programme.sizes_bytes, world))
    meter = Meter(world, pair, programme.sizes_bytes, programme.cell_s)
    cells = []
    for row in rows(heap_allocate=lambda elems: ringcomm.empty(elems, dtype=torch.float32)):
        measured = list(meter.measure(row))
        say(demo_report.collectives_line(measured))
        cells += measured
    barrier = meter.measure_barrier()
    say(demo_report.collectives_line([barrier]))
    return [*cells, barrier]


def _train(
    programme: Programme, corpus: Corpus, world: World, pair: Pair, say: Say
) -> list[Result]:
    results = []
    for plan in programme.contests:
        with ProgressBar("training", plan.blocks) as bar:
            result = train_both(plan, corpus, world, pair, _shown_in(bar, world))
        say(demo_report.training_line(result))
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
