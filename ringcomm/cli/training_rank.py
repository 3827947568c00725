"""One rank of ``ringcomm train``."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringcomm import zero
from ringcomm.cli.checkpointing import Saving, resume_run
from ringcomm.cli.config import EngineConfig, TrainConfig
from ringcomm.cli.corpus import find_source, min_corpus_bytes
from ringcomm.cli.gpt import GPT
from ringcomm.cli.rank import World
from ringcomm.cli.training import Trainer, load_same_on_all_ranks, new_model
from ringcomm.cli.training_engines import PARAM_DTYPES, Place, ZeroEngine, build_engine
from ringcomm.cli.training_loop import Run
from ringcomm.cli.training_memory import ClosedForm, MemoryMeter, load_first_use
from ringcomm.cli.training_outcome import Outcome, Start
from ringcomm.cli.training_report import Report, write_files
from ringcomm.cli.training_world import joined_ranks


def run_rank(settings: Mapping[str, Any]) -> int:
    """Train as one rank; ``settings`` are those that ``train.py`` puts together."""
    with joined_ranks(settings["engine"]["backend"]) as world:
        load_first_use()
        # See NOTE [Groups end last] in training_world.py.
        _train_and_report(settings, world)
        if settings["engine"]["backend"] == "gloo":
            gc.collect()
    return 0


def _train_and_report(settings: Mapping[str, Any], world: World) -> None:
    config = TrainConfig.from_plain(settings["config"])
    engine = EngineConfig(**settings["engine"])
    config.micro_sequences(world.size)
    source = find_source(settings["data"], min_corpus_bytes(config.model.context))
    corpus = load_same_on_all_ranks(source, world)
    place = Place.of(engine, world.rank)
    meter = MemoryMeter(place.device, engine.backend == "ringcomm", settings["memory"])
    before_bytes = replace(meter, trims=True).held_bytes()
    gpt = new_model(config)
    closed_form = _closed_form(gpt, config, engine, world)
    report = Report(config, engine, world, gpt.parameter_elems, closed_form)
    speaks = world.rank == 0
    if speaks:
        print(report.headline(source), flush=True)
    trainer = Trainer(config, corpus, world, build_engine(gpt, engine, place))
    saving = None if settings["saving"] is None else Saving(**settings["saving"])
    start: Start | None = Start()
    if saving is not None:
        assert isinstance(trainer.engine, ZeroEngine)
        start = resume_run(saving, trainer.engine, config)
    if start is None:
        if speaks:
            print(f"done          all {config.steps} steps were done before", flush=True)
        return
    run = Run(trainer, start, meter, before_bytes, saving, speaks)
    outcome, hidden = _train(run, world, settings["trace"])
    if speaks:
        print(report.summary(outcome), flush=True)
        if settings["memory"]:
            print(report.memory_table(outcome), flush=True)
        if settings["trace"] is not None:
            print(f"trace         {settings['trace']}: {hidden}", flush=True)
        write_files(report, outcome, settings)


def _closed_form(
    gpt: GPT, config: TrainConfig, engine: EngineConfig, world: World
) -> ClosedForm | None:
    if engine.name != "zero":
        return None
    dtype = PARAM_DTYPES[engine.dtype] or torch.float32
    two_passes = config.clip is not None or engine.dtype == "fp16"
    return ClosedForm.of(gpt, engine.zero_stage, world.size, dtype, two_passes)


def _train(run: Run, world: World, path: str | None) -> tuple[Outcome, str]:
    """Trains, and writes the trace of all ranks to ``path``; says what was hidden."""
    if path is None:
        return run.train(), ""
    with ExitStack() as stack:
        trace = stack.enter_context(zero.traced(run.trainer.engine.module))
        run.trainer.trace = trace
        outcome = run.train()
    write_trace(trace, Path(path), world)
    share = trace.hidden_share()
    if math.isnan(share):
        return outcome, "all communication was in the optimizer's step"
    return outcome, f"{share:.0%} of rank 0's communication was hidden behind computation"


def write_trace(trace: zero.Trace, path: Path, world: World) -> None:
    """Writes one file with the spans of all ranks, whose clock is one; collective."""
    part = Path(f"{path}.rank{world.rank}")
    trace.write(part, world.rank)
    dist.barrier()
    if world.rank == 0:
        parts = [Path(f"{path}.rank{rank}") for rank in range(world.size)]
        traces = [json.loads(each.read_text()) for each in parts]
        events = [event for each in traces for event in each["traceEvents"]]
        path.write_text(json.dumps({**traces[0], "traceEvents": events}))
        for each in parts:
            each.unlink()
