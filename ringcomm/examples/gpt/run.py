"""One rank of ``ringcomm train``: it joins, trains, saves, continues and reports."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import zero
from ringcomm.c10d import register
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.examples.gpt.config import FROM_ANY, EngineConfig, TrainConfig
from ringcomm.examples.gpt.corpus import find_source, min_corpus_bytes
from ringcomm.examples.gpt.engines import (
    PARAM_DTYPES,
    Trainer,
    TrainingGroup,
    ZeroEngine,
    build_engine,
    load_same_on_all_ranks,
    new_model,
    params_tier_of,
    tier_of,
)
from ringcomm.examples.gpt.footprint import (
    MB,
    ClosedForm,
    DiskMeter,
    MemoryMeter,
    gather_disk_use,
    load_first_use,
)
from ringcomm.examples.gpt.model import GPT
from ringcomm.examples.gpt.report import Outcome, RunReport, Start, gather_memory, write_files
from ringcomm.launch import STORE_PORT_VARIABLE, TIMEOUT, RankPlace, launch_store, threads_per_rank
from ringcomm.output import ProgressBar
from ringcomm.rendezvous.environment import LauncherPlace, read_environment
from ringcomm.zero.checkpoint import Checkpoints

# Checkpoints of ``ringcomm train``: saved while it runs, and continued from.

# A run that goes on may have other ranks and micro-batches; these it must share with what was
# saved, or its losses would be none of the run's.
SHARED = ("model", "batch", "steps", "learning_rate", "seed")


@dataclass(frozen=True)
class Saving:
    """The place and the times at which a run saves.

    Attributes:
        folder: of its checkpoints.
        every: steps from one to the next; the last step is saved, too.
        resume: "latest": it begins behind the latest; "auto": if there is one; None: there must be
            none.
    """

    folder: str
    every: int
    resume: str | None

    def is_due(self, step: int, steps: int) -> bool:
        """True if the run saves once ``step`` of all ``steps`` are done."""
        return step % self.every == 0 or step == steps


def save_run(
    saving: Saving,
    engine: ZeroEngine,
    config: TrainConfig,
    losses: Sequence[float],
    held_out: float,
) -> None:
    """Saves what :func:`resume_run` needs; collective.

    Args:
        saving: the folder.
        engine: after the step whose loss is the last.
        config: of the run.
        losses: of all steps so far, equal on all ranks.
        held_out: the loss before step 0.

    Raises:
        CheckpointError: a rank could not write; on all ranks.
    """
    data = {"config": asdict(config), "losses": list(losses), "held_out": held_out}
    zero.save(saving.folder, len(losses), engine.module, engine.adamw, data=data)


def resume_run(saving: Saving, engine: ZeroEngine, config: TrainConfig) -> Start | None:
    """Returns where the run begins; loads the latest checkpoint if it is to resume; collective.

    Returns:
        None with "auto" where all steps are done.

    Raises:
        ArgumentError: there are checkpoints, and ``saving`` does not say to resume; the one that is
            there is of a run of other options, or with "latest" of one that was done.
        CheckpointError: there is none to resume from, or it is damaged, of another model or not of
            ``ringcomm train``.
    """
    found = Checkpoints(saving.folder)
    latest = found.latest()
    if saving.resume is None:
        if latest is not None:
            raise ArgumentError(
                f"--save {saving.folder}: holds a checkpoint of step {latest} already; add "
                "--resume to go on from it, or give another folder"
            )
        return Start()
    if saving.resume == FROM_ANY and latest is None:
        return Start()
    _check(saving, _saved_config(found), asdict(config))
    if latest == config.steps:
        if saving.resume == FROM_ANY:
            return None
        raise ArgumentError(
            f"--resume: all {config.steps} steps are done in {saving.folder}; there is nothing "
            "left to train"
        )
    loaded = zero.load(saving.folder, engine.module, engine.adamw)
    return Start(tuple(loaded.data["losses"]), loaded.data["held_out"])


def _saved_config(found: Checkpoints) -> dict[str, Any]:
    reader = found.reader()
    try:
        config: dict[str, Any] = reader.data["user"]["config"]
        if not set(SHARED) <= set(config):
            raise KeyError(*SHARED)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"--resume: {reader.folder}: expected a checkpoint that ringcomm train saved, got one "
            "that says nothing of its run"
        ) from error
    return config


def _check(saving: Saving, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in SHARED:
        if saved[name] != wanted[name]:
            raise ArgumentError(
                f"--resume: {saving.folder} was saved with {name} = {saved[name]}, got "
                f"{wanted[name]}; give the options of the run that saved it"
            )


# A whole training run on one rank: steps, progress, saves, and what came of it.


@dataclass(frozen=True)
class Run:
    """The parts of a run on one rank.

    Attributes:
        trainer: of the model.
        start: where it begins.
        meter: of this rank's memory.
        before_bytes: what it read before the model was built.
        saving: where checkpoints go; None saves none.
        speaks: whether this rank shows the progress.
    """

    trainer: Trainer
    start: Start
    meter: MemoryMeter
    before_bytes: int
    saving: Saving | None
    speaks: bool

    def train(self) -> Outcome:
        """Takes all steps that are left; collective."""
        trainer, start = self.trainer, self.start
        held_out = trainer.held_out_loss() if start.held_out is None else start.held_out
        progress = _Progress(self)
        steps = range(start.step, trainer.config.steps)
        with ProgressBar("training", trainer.config.steps) as bar:
            for index in steps:
                progress.take(index)
                if self.speaks:
                    bar.show(index + 1, progress.note)
                if self.saving is not None and self.saving.is_due(index + 1, steps.stop):
                    self._save(self.saving, progress, held_out)
        tokens_per_s = progress.speed.tokens_per_s()
        engine = trainer.engine
        return Outcome(
            first_step=start.step,
            losses=progress.all_losses(),
            held_out_before=held_out,
            held_out_after=trainer.held_out_loss(),
            tokens_per_s=tokens_per_s,
            memory=gather_memory(self.before_bytes, progress.held),
            skipped_steps=engine.skipped_steps,
            loss_scale=engine.loss_scale,
            disk=None if progress.disk is None else gather_disk_use(progress.disk.use),
            steps_s=progress.speed.steps_s,
        )

    def _save(self, saving: Saving, progress: _Progress, held_out: float) -> None:
        engine = self.trainer.engine
        assert isinstance(engine, ZeroEngine)
        if progress.disk is not None:
            progress.disk.leave_out()
        with progress.speed.paused():
            save_run(saving, engine, self.trainer.config, progress.all_losses(), held_out)


class _Progress:
    """The results of a run's steps so far.

    Attributes:
        held: bytes at each.
        speed: of the training.
        disk: counts what state and parameters move; None where they are in memory.
    """

    def __init__(self, run: Run) -> None:
        config = run.trainer.config
        self._run = run
        self._losses: list[Tensor] = []
        self.held: list[int] = []
        self.speed = Speed(config.batch * config.model.context)
        engine = run.trainer.engine
        self.disk = DiskMeter() if isinstance(engine, ZeroEngine) and engine.is_on_disk else None

    def take(self, index: int) -> None:
        """Takes a step."""
        self._losses.append(self._run.trainer.step(index, self._look))
        self.speed.step_done()

    def _look(self) -> None:
        with self.speed.paused():
            self.held.append(self._run.meter.held_bytes())
            # The first step prepares the optimizer.
            if self.disk is not None and len(self.held) > 1:
                engine = self._run.trainer.engine
                assert isinstance(engine, ZeroEngine)
                self.disk.look(engine.scratches)

    def note(self) -> str:
        """Returns the text of the progress bar; waits for a GPU."""
        text = (
            f"loss {self._losses[-1].item():.3f}  {self.speed.tokens_per_s():,.0f} tokens/s  "
            f"{self.held[-1] / MB:,.0f} MB"
        )
        return text if self.disk is None else f"{text}  {self.disk.use.rates}"

    def all_losses(self) -> list[float]:
        """Returns the losses of all steps, averaged over the ranks; collective."""
        means = self._run.trainer.mean_over_ranks(torch.stack(self._losses))
        return [*self._run.start.losses, *means.tolist()]


class Speed:
    """Tokens a second, without the first step, which sets things up, unless it is the only one.

    Attributes:
        steps_s: seconds that each step took this process; a GPU may still be at work then.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._began = self._step_began = time.perf_counter()
        self.steps_s: list[float] = []

    def step_done(self) -> None:
        """One more step."""
        now = time.perf_counter()
        self.steps_s.append(now - self._step_began)
        self._step_began = now
        if len(self.steps_s) == 1:
            self._began = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no time goes by."""
        stopped = time.perf_counter()
        yield
        paused_s = time.perf_counter() - stopped
        self._began += paused_s
        self._step_began += paused_s

    def tokens_per_s(self) -> float:
        """The speed so far, after one step at least."""
        if len(self.steps_s) == 1:
            return self._tokens_per_step / self.steps_s[0]
        seconds = time.perf_counter() - self._began
        return self._tokens_per_step * (len(self.steps_s) - 1) / seconds


# How a rank of a training run joins the others, whoever started it.


@contextmanager
def joined_ranks(backend: str) -> Iterator[RankPlace]:
    """Joins torch's default group on ``backend`` for the length of the block.

    The ranks may be those of ``launch.py``, torchrun, mpirun or Slurm. Also sets torch's threads,
    so that the ranks of this machine share its cores.

    NOTE [Groups end last]
    C++ that drops the last reference to a group of Gloo's, as DDP does when it goes, holds Python's
    lock while it waits for Gloo's threads, which may wait for that lock. Where DDP goes first, it
    is Python that drops the group, and it lets the lock go. So with a group of Gloo's, DDP must be
    out of reach when the block ends, and collected where it refers to itself.

    Raises:
        RendezvousError: the ranks did not find each other.
        UnsupportedError: they are on several nodes, and nothing says where they meet.
    """
    placement = read_environment()
    register()  # torch does this itself for an installed ringcomm, not for a bare source tree
    threads = threads_per_rank(placement.local_world_size)
    torch.set_num_threads(threads)
    if STORE_PORT_VARIABLE in os.environ:
        _join(backend, placement, launch_store())
    elif placement.launcher == "torchrun":
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        if placement.is_here:
            # Gloo need not resolve the host's name then, which may lead nowhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _join(backend, placement, placement.store(TIMEOUT.total_seconds()))
    try:
        yield RankPlace(placement.rank, placement.world_size, threads)
        # Rank 0 holds the store: it must not leave while others still talk to it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _join(backend: str, placement: LauncherPlace, store: dist.Store) -> None:
    dist.init_process_group(
        backend,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=TIMEOUT,
    )


# One rank of ``ringcomm train``.


def run_rank(settings: Mapping[str, Any]) -> int:
    """Train as one rank; ``settings`` are those that ``train.py`` puts together."""
    with joined_ranks(settings["engine"]["backend"]) as world:
        load_first_use()
        # See NOTE [Groups end last].
        _train_and_report(settings, world)
        if settings["engine"]["backend"] == "gloo":
            gc.collect()
    return 0


def _train_and_report(settings: Mapping[str, Any], world: RankPlace) -> None:
    config = TrainConfig.from_plain(settings["config"])
    engine = EngineConfig(**settings["engine"])
    config.micro_sequences(world.size)
    source = find_source(settings["data"], min_corpus_bytes(config.model.context))
    corpus = load_same_on_all_ranks(source, world)
    place = TrainingGroup.of(engine, world.rank)
    meter = MemoryMeter(place.device, engine.backend == "ringcomm", settings["memory"])
    before_bytes = replace(meter, trims=True).held_bytes()
    gpt = new_model(config)
    closed_form = _closed_form(gpt, config, engine, world)
    report = RunReport(config, engine, world, gpt.parameter_elems, closed_form)
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
    outcome, hidden = _train(run, world, settings["profile"])
    if speaks:
        print(report.summary(outcome), flush=True)
        if settings["memory"]:
            print(report.memory_table(outcome), flush=True)
        if settings["profile"] is not None:
            print(f"profile       {settings['profile']}: {hidden}", flush=True)
        write_files(report, outcome, settings)


def _closed_form(
    gpt: GPT, config: TrainConfig, engine: EngineConfig, world: RankPlace
) -> ClosedForm | None:
    if engine.name != "zero":
        return None
    dtype = PARAM_DTYPES[engine.dtype] or torch.float32
    two_passes = config.clip is not None or engine.dtype == "fp16"
    tiers = tier_of(engine), params_tier_of(engine)
    return ClosedForm.of(gpt, engine.zero_stage, world.size, dtype, two_passes, *tiers)


def _train(run: Run, world: RankPlace, path: str | None) -> tuple[Outcome, str]:
    """Trains, and writes the profile of all ranks to ``path``; says what was hidden."""
    if path is None:
        return run.train(), ""
    with ExitStack() as stack:
        profile = stack.enter_context(zero.profiled(run.trainer.engine.module))
        run.trainer.profile = profile
        outcome = run.train()
    write_profile(profile, Path(path), world)
    share = profile.hidden_share()
    if math.isnan(share):
        return outcome, "all communication was in the optimizer's step"
    return outcome, f"{share:.0%} of rank 0's communication was hidden behind computation"


def write_profile(profile: zero.StepProfile, path: Path, world: RankPlace) -> None:
    """Writes one file with the spans of all ranks, whose clock is one; collective."""
    part = Path(f"{path}.rank{world.rank}")
    profile.write(part, world.rank)
    dist.barrier()
    if world.rank == 0:
        parts = [Path(f"{path}.rank{rank}") for rank in range(world.size)]
        profiles = [json.loads(each.read_text()) for each in parts]
        events = [event for each in profiles for event in each["traceEvents"]]
        path.write_text(json.dumps({**profiles[0], "traceEvents": events}))
        for each in parts:
            each.unlink()
