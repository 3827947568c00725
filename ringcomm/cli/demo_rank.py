"""The demo as every rank runs it."""

from __future__ import annotations

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
from ringcomm.cli.config import ModelConfig
from ringcomm.cli.corpus import find_source, min_corpus_bytes
from ringcomm.cli.demo import CONTEXT
from ringcomm.cli.demo_collectives import Cell, Meter, Pair, rows
from ringcomm.cli.demo_training import Contest, Result, contest, train_both
from ringcomm.cli.progress import ProgressBar
from ringcomm.cli.rank import World, joined_world
from ringcomm.cli.training import load_same_on_all_ranks

Say = Callable[[str], None]
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Programme:
    """How much the demo does."""

    sizes_bytes: tuple[int, ...]
    cell_s: float
    contests: tuple[Contest, ...]


FULL = Programme(
    sizes_bytes=(4 * KIB, MIB, 64 * MIB),
    cell_s=0.3,
    contests=(
        contest(ModelConfig(64, 2, 2, CONTEXT), steps_per_block=20, blocks=15, limit_s=6),
        contest(ModelConfig(128, 4, 4, CONTEXT), steps_per_block=8, blocks=15, limit_s=7),
        contest(ModelConfig(256, 4, 4, CONTEXT), steps_per_block=3, blocks=15, limit_s=7),
        contest(ModelConfig(512, 6, 8, CONTEXT), steps_per_block=1, blocks=11, limit_s=11),
    ),
)
QUICK = Programme(
    sizes_bytes=(4 * KIB, 256 * KIB),
    cell_s=0.02,
    contests=(contest(ModelConfig(32, 1, 2, CONTEXT), steps_per_block=3, blocks=3, limit_s=3),),
)


def run_rank(settings: Mapping[str, Any]) -> int:
    """Run both parts; rank 0 prints, and exits with 1 when anything was wrong."""
    started = time.perf_counter()
    programme = QUICK if settings["quick"] else FULL
    with joined_world("ringcomm") as world:
        ringcomm_group = dist.group.WORLD
        assert ringcomm_group is not None
        pair = Pair(ringcomm=ringcomm_group, gloo=dist.new_group(backend="gloo"))
        say: Say = _print if world.rank == 0 else _keep_silent
        cells = _measure_collectives(programme, world, pair, say)
        results = _train(programme, settings["data"], world, pair, say)
    elapsed_s = time.perf_counter() - started
    say(demo_report.summary(cells, results, elapsed_s))
    if world.rank == 0 and settings["json"] is not None:
        record = demo_report.record(cells, results, elapsed_s)
        Path(settings["json"]).write_text(json.dumps(record, indent=2) + "\n")
    return 0 if demo_report.passed(cells, results) or world.rank else 1


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
    programme: Programme, data: str | None, world: World, pair: Pair, say: Say
) -> list[Result]:
    source = find_source(data, min_corpus_bytes(CONTEXT))
    corpus = load_same_on_all_ranks(source, world)
    say(demo_report.training_head(source))
    results = []
    for plan in programme.contests:
        with ProgressBar("training", plan.blocks) as bar:

            def show(done: int, loss: float, bar: ProgressBar = bar) -> None:
                if world.rank == 0:
                    bar.show(done, f"loss {loss:.3f}")

            result = train_both(plan, corpus, world, pair, show)
        say(demo_report.training_line(result))
        results.append(result)
    return results


def _print(text: str) -> None:
    print(text, flush=True)


def _keep_silent(text: str) -> None:
    """Ranks other than 0 say nothing."""
