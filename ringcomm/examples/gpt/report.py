"""The report of ``ringcomm train`` on a run: its outcome, memory, picture and files."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.errors import UnsupportedError
from ringcomm.examples.gpt.config import EngineConfig, TrainConfig
from ringcomm.examples.gpt.corpus import Source
from ringcomm.examples.gpt.footprint import MB, ClosedForm, DiskUse
from ringcomm.launch import RankPlace
from ringcomm.output import new_figure, write_figure

# What a training run gives.


@dataclass(frozen=True)
class Start:
    """The start of a run: step 0, or the step after an earlier run's checkpoint.

    Attributes:
        losses: of the steps before, as in :class:`Outcome`.
        held_out: the loss on held-out text before step 0; None when it is not known yet.
    """

    losses: tuple[float, ...] = ()
    held_out: float | None = None

    @property
    def step(self) -> int:
        """The first step to take."""
        return len(self.losses)


@dataclass(frozen=True)
class RankMemory:
    """The memory that a rank held, in bytes.

    Attributes:
        before_bytes: before the model was built.
        steps_bytes: at each step of this run, between backward and the optimizer's step.
    """

    before_bytes: int
    steps_bytes: list[int]

    @property
    def most_bytes(self) -> int:
        """The memory at the step where the rank held most."""
        return max(self.steps_bytes)

    @property
    def added_bytes(self) -> list[int]:
        """The memory that training has added, at each step."""
        return [size - self.before_bytes for size in self.steps_bytes]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        first_step: at which it began.
        losses: of all steps from 0 on, in nats per byte, averaged over the ranks.
        held_out_before: on held-out text, before step 0.
        held_out_after: and after the last step.
        tokens_per_s: of all ranks; without the first step, which sets things up, and without saves.
        memory: by rank.
        skipped_steps: those that changed nothing, for an overflow.
        loss_scale: at the end; None where losses are not scaled.
        disk: what steps moved of state and parameters, by rank; None where they are in memory.
        steps_s: seconds that each step of this run took this rank, without looks and saves.
    """

    first_step: int
    losses: list[float]
    held_out_before: float
    held_out_after: float
    tokens_per_s: float
    memory: list[RankMemory]
    skipped_steps: int
    loss_scale: float | None
    disk: list[DiskUse] | None = None
    steps_s: Sequence[float] = ()


def gather_memory(before_bytes: int, steps_bytes: Sequence[int]) -> list[RankMemory]:
    """Returns the memory that every rank held, by rank; collective, on the default group."""
    own = torch.tensor([before_bytes, *steps_bytes])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [RankMemory(int(each[0]), each[1:].tolist()) for each in gathered]


# Loss and memory over the steps: as a picture, or in characters.

COLUMNS = 60
LOSS_LINES = 8
MEMORY_LINES = 4
LABEL_CHARS = 9
# Colours of the Okabe-Ito palette, told apart by all readers.
RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
SIZE_INCHES = (8.0, 6.0)


def draw(outcome: Outcome, title: str, path: str) -> None:
    """Writes the picture; its format is the ending of ``path`` (png, svg, pdf).

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: the file cannot be written, or its ending names no format.
    """
    figure = new_figure(SIZE_INCHES, path)
    loss, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_loss(loss, outcome)
    _draw_memory(memory, outcome)
    write_figure(figure, (loss, memory), title, path)


def _draw_loss(panel: Any, outcome: Outcome) -> None:
    steps = len(outcome.losses)
    panel.plot(range(steps), outcome.losses, color="#0072B2", linewidth=1.2, label="training")
    held_out = (outcome.held_out_before, outcome.held_out_after)
    panel.plot((0, steps), held_out, color="#D55E00", marker="o", linestyle="", label="held out")
    panel.set_ylabel("loss (nats per byte)")


def _draw_memory(panel: Any, outcome: Outcome) -> None:
    steps = range(outcome.first_step, len(outcome.losses))
    for rank, held in enumerate(outcome.memory):
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
        sizes = [size / MB for size in held.added_bytes]
        panel.plot(steps, sizes, color=colour, linewidth=1.2, label=f"rank {rank}")
    panel.set_ylim(bottom=0.0)
    panel.set_ylabel("memory added (MB = 1e6 bytes)")
    panel.set_xlabel("step")


def as_text(outcome: Outcome) -> str:
    """The same in characters; of the ranks' memory that of the one that holds most."""
    steps = len(outcome.losses)
    most = max(outcome.memory, key=lambda held: max(held.added_bytes))
    sizes = [size / MB for size in most.added_bytes]
    return "\n".join(
        (
            "loss (nats per byte)",
            *curve(outcome.losses, LOSS_LINES, from_zero=False),
            _axis(0, steps - 1),
            "memory that training adds, on the rank where it is most (MB = 1e6 bytes)",
            *curve(sizes, MEMORY_LINES, from_zero=True),
            _axis(outcome.first_step, steps - 1),
        )
    )


def curve(values: Sequence[float], lines: int, from_zero: bool) -> list[str]:
    """``lines`` lines of text with the largest and the smallest value at their left.

    Each of at most 60 columns is the mean of its share of ``values``; what is not finite leaves its
    column empty.
    """
    columns = min(COLUMNS, len(values))
    edges = [column * len(values) // columns for column in range(columns + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return ["(no value is finite)"]
    low, high = min([0.0, *finite] if from_zero else finite), max(finite)
    grid = [[" "] * columns for _ in range(lines)]
    for column, mean in enumerate(means):
        if math.isfinite(mean):
            height = (mean - low) / (high - low) if high > low else 0.0
            grid[round((1 - height) * (lines - 1))][column] = "*"
    labels = [f"{high:.4g}", *[""] * (lines - 2), f"{low:.4g}"]
    return [
        f"{label:>{LABEL_CHARS}} |{''.join(row)}".rstrip()
        for label, row in zip(labels, grid, strict=True)
    ]


def _axis(first: int, last: int) -> str:
    columns = min(COLUMNS, last - first + 1)
    return f"{'step':>{LABEL_CHARS}}  {first}{last:>{max(2, columns - len(str(first)))}}"


# What ``ringcomm train`` says of a run before and after it, and writes to files.

PRINTED_LOSSES = 10


@dataclass(frozen=True)
class RunReport:
    """The report of a run.

    Attributes:
        config: of the training.
        engine: of the engine.
        world: this rank's place.
        parameter_elems: of the model.
        closed_form: what a rank should hold; None where that is not known.
    """

    config: TrainConfig
    engine: EngineConfig
    world: RankPlace
    parameter_elems: int
    closed_form: ClosedForm | None

    def headline(self, source: Source) -> str:
        """Says what is about to be trained."""
        config, model = self.config, self.config.model
        extras = []
        if config.accum > 1:
            extras.append(f", in {config.accum} micro-batches")
        if config.clip is not None:
            extras.append(f", gradients clipped to a norm of {config.clip:g}")
        if self.engine.checkpoint_activations:
            extras.append(", layers computed again in backward")
        engine = self.engine
        place = "" if engine.state_on is None else f"state   on a disk, in {engine.state_on}\n"
        if engine.params_on is not None:
            place += f"params  on a disk, in {engine.params_on}\n"
        on = self.engine.backend + (" on GPUs" if self.engine.device == "cuda" else "")
        return (
            f"ranks   {self.world.size} on {on}, {self.world.threads} compute thread(s) each\n"
            f"engine  {self.engine}\n{place}"
            f"text    {source}\n"
            f"model   {self.parameter_elems / 1e6:.3g} M parameters: width {model.width}, "
            f"depth {model.depth}, heads {model.heads}, context {model.context} bytes\n"
            f"steps   {config.steps} of {config.batch} x {model.context} bytes{''.join(extras)}"
        )

    def summary(self, outcome: Outcome) -> str:
        """Says what came of the run."""
        steps = len(outcome.losses)
        parts = PRINTED_LOSSES - 1
        shown = sorted({round(i * (steps - 1) / parts) for i in range(PRINTED_LOSSES)})
        lines = [f"step {index:>6}   loss {outcome.losses[index]:.4f}" for index in shown]
        if outcome.first_step:
            lines.append(f"resumed       at step {outcome.first_step}; those before were saved")
        lines += [
            f"held-out loss {outcome.held_out_before:.4f} -> {outcome.held_out_after:.4f} nats per "
            f"byte ({outcome.held_out_after / math.log(2):.3f} bits)",
            f"speed         {outcome.tokens_per_s:,.0f} tokens/s",
        ]
        if outcome.loss_scale is not None:
            lines.append(
                f"loss scale    {outcome.loss_scale:g} at the end; {outcome.skipped_steps} of "
                f"{steps} steps were skipped for an overflow"
            )
        if outcome.disk is not None:
            most_moved = max(outcome.disk, key=lambda use: (use.read_bytes, use.file_bytes))
            places = {"state": self.engine.state_on, "parameters": self.engine.params_on}
            what = " and ".join(name for name, place in places.items() if place is not None)
            lines.append(f"{what} on disk {most_moved}, on the rank where it is most")
        most = max(outcome.memory, key=lambda held: held.most_bytes)
        lines.append(
            f"memory        at most {most.most_bytes / MB:,.1f} MB on a rank, "
            f"{most.before_bytes / MB:,.1f} MB of it before the model was built"
        )
        return "\n".join(lines)

    def memory_table(self, outcome: Outcome) -> str:
        """Tabulates the most that each rank held between backward and the optimizer's step."""
        lines = [f"{'MB = 1e6 bytes':<14}{'before':>10}{'at most':>10}{'of it training':>16}"]
        for rank, held in enumerate(outcome.memory):
            before, most = held.before_bytes / MB, held.most_bytes / MB
            lines.append(f"rank {rank:<9}{before:>10,.1f}{most:>10,.1f}{most - before:>16,.1f}")
        if self.closed_form is not None:
            lines.append(f"closed form   {self.closed_form}")
        return "\n".join(lines)


def software() -> dict[str, str]:
    """The versions that a record names."""
    try:
        own = importlib.metadata.version("ringcomm")
    except importlib.metadata.PackageNotFoundError:
        own = "source tree"
    return {"python": platform.python_version(), "torch": torch.__version__, "ringcomm": own}


def write_files(report: RunReport, outcome: Outcome, settings: Mapping[str, Any]) -> None:
    """Writes the record and the picture that were asked for, or draws the picture in characters.

    Raises:
        ArgumentError: the picture's file cannot be written.
    """
    if settings["json"] is not None:
        record = {
            **settings,
            "ranks": report.world.size,
            "software": software(),
            "outcome": asdict(outcome),
        }
        Path(settings["json"]).write_text(json.dumps(record, indent=2) + "\n")
    path = settings["plot"]
    if path is not None:
        title = f"{report.parameter_elems / 1e6:.3g} M parameters, {report.world.size} ranks, "
        try:
            draw(outcome, title + str(report.engine), path)
        except UnsupportedError as error:
            print(f"ringcomm train: {error}. In characters:", file=sys.stderr, flush=True)
        else:
            print(f"picture       {path}", flush=True)
            return
    print(f"\n{as_text(outcome)}", flush=True)
