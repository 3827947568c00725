# SPDX-License-Identifier: Apache-2.0
"""The goals for a GPU's figures, and how far each goal is reached."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ringcomm.bench.collectives import BLOCKS
from ringcomm.bench.device_calls import ASYNC, SYNC
from ringcomm.bench.device_calls import HOST as CALL_HOST
from ringcomm.bench.device_steps import COPY, OLDER, SEPARATE, SHARD, STEP, SUBJECT, TORCH
from ringcomm.bench.devices import COPY_FACT, ONE_LAUNCH, PROCESSES_ON_ONE_GPU
from ringcomm.bench.model import bound_us
from ringcomm.bench.report import Report, Row, size_label
from ringcomm.bench.training import GRAPH, HOST
from ringcomm.bench.training_systems import FSDP2_NCCL, STAGES, TRAINING

KIB, MIB = 1 << 10, 1 << 20
SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le}


@dataclass(frozen=True)
class Where:
    """Selects the rows of a goal; a field of None admits every row."""

    system: Collection[str]
    collective: Collection[str] | None = None
    mode: str | None = None
    from_bytes: int = 0
    to_bytes: int = 1 << 62
    from_count: int = 0
    dtype: str | None = None
    placement: str | None = None
    graph: bool = False  # True: rows that timed replays of a graph
    ranks: Collection[int] | None = None

    def admits(self, row: Row) -> bool:
        return (
            row.system in self.system
            and (self.collective is None or row.collective in self.collective)
            and self.mode in (None, row.mode)
            and self.from_bytes <= row.size_bytes <= self.to_bytes
            and row.count >= self.from_count
            and self.dtype in (None, row.dtype)
            and self.placement in (None, row.placement)
            and (row.graph_calls > 0) == self.graph
            and (self.ranks is None or row.ranks in self.ranks)
            # Runs with a chosen number of blocks are comparisons only.
            and not row.note.endswith(BLOCKS)
        )


# Computes the figure of a row from its report, the row, and all reports; None: no figure.
Measured = Callable[[Report, Row, Sequence[Report]], float | None]


def _ratio(report: Report, row: Row, reports: Sequence[Report]) -> float | None:
    return row.ratio


def _share(report: Report, row: Row, reports: Sequence[Report]) -> float | None:
    """Returns the time of a copy of the bytes that must move, divided by the row's time."""
    return share_of_bound(row, float(report.provenance[COPY_FACT]))


def share_of_bound(row: Row, copy_gbps: float) -> float | None:
    """Returns the share of the bound that a row reaches; None if its bytes are not counted."""
    if row.mode != ONE_LAUNCH or not row.time_us:
        return None
    least_us = bound_us(row, copy_gbps * 1e3)
    return None if least_us is None else least_us / row.time_us


@dataclass(frozen=True)
class Goal:
    """A limit for the figure that ``measured`` computes from each row that ``where`` admits."""

    name: str
    sign: str
    limit: float
    unit: str
    where: Where
    measured: Measured = _ratio

    def reached(self, value: float) -> bool:
        return bool(SIGNS[self.sign](value, self.limit))

    def margin(self, value: float) -> float:
        """Returns 1 if the figure equals the limit, less if it misses the goal, more otherwise."""
        return value / self.limit if self.sign != "<=" else self.limit / max(value, 1e-9)


@dataclass(frozen=True)
class Judged:
    """A goal with its measured figures, by label; if there are none, ``why`` has the reason."""

    goal: Goal
    figures: tuple[tuple[str, float], ...]
    why: str

    @property
    def worst(self) -> tuple[str, float]:
        return min(self.figures, key=lambda figure: self.goal.margin(figure[1]))

    @property
    def line(self) -> str:
        """The goal's row of a Markdown table, with its worst figure."""
        goal, worst, answer = self.goal, "- | -", self.why
        if self.figures:
            label, value = self.worst
            worst, answer = f"{label} | {value:.3f}", "yes" if goal.reached(value) else "no"
        return f"| {goal.name} | {goal.sign} {goal.limit:g} {goal.unit} | {worst} | {answer} |"


def judge(goal: Goal, reports: Sequence[Report]) -> Judged:
    """Returns the goal judged by the reports of one run."""
    found = [(report, row) for report in reports for row in report.rows if goal.where.admits(row)]
    measured = [(_label(row), goal.measured(report, row, reports)) for report, row in found]
    figures = tuple((label, value) for label, value in measured if value is not None)
    notes = sorted({row.note for _, row in found} - {""})
    return Judged(goal, figures, ": ".join(["not measured", *notes]))


def _label(row: Row) -> str:
    if row.collective == TRAINING:
        return f"{row.system}, {row.ranks} ranks, {row.placement}"
    if row.system == CALL_HOST:
        return f"{row.collective}, {row.ranks} ranks, {row.placement}"
    optimizer = row.collective in (SHARD, STEP)
    size = f"{row.count / MIB:g} Mi parameters" if optimizer else size_label(row.size_bytes)
    return f"{row.collective}, {row.ranks} ranks, {size}"


def _time(report: Report, row: Row, reports: Sequence[Report]) -> float | None:
    return row.time_us if row.ranks == 2 else None


def _of_fsdp2(report: Report, row: Row, reports: Sequence[Report]) -> float | None:
    """Returns the host's extra cost of a step over torch alone, divided by FSDP2's extra cost."""
    case = (FSDP2_NCCL + HOST, row.placement, row.ranks)
    rows = [each for report in reports for each in report.rows]
    theirs = [each.ratio for each in rows if (each.system, each.placement, each.ranks) == case]
    if row.ratio is None or not theirs or theirs[0] is None or theirs[0] <= 1:
        return None
    return (row.ratio - 1) / (theirs[0] - 1)


def _large(system: str, from_mib: int, ranks: Collection[int] | None = None) -> Where:
    halves = ("reduce_scatter", "all_gather")
    least = from_mib * MIB
    return Where([system], halves, ONE_LAUNCH, from_bytes=least, graph=True, ranks=ranks)


def _call(how: str) -> Where:
    return Where([CALL_HOST], ["all_reduce"], placement=how)


def _stages(kind: str) -> Where:
    return Where([stage + kind for stage in STAGES[1:]], [TRAINING])


def _optimizer(what: str, system: str) -> Where:
    least = 256 * MIB if what == SHARD else 0
    return Where([system], [what], from_count=least, dtype="bfloat16")


_COPY, _TIMES = "of the copy's bandwidth", "times the CUDA kernels' time"
_BOUND = "of a copy of its bytes"
_IN_GRAPHS = Where(["ringcomm"], ["all_reduce"], ONE_LAUNCH, to_bytes=32 * KIB, graph=True)
_TORCH = Where(["torch"], mode=ONE_LAUNCH, from_bytes=16 * MIB, graph=True)
_NCCL = Where(["nccl"], mode=PROCESSES_ON_ONE_GPU)
_TRITON = Where(["triton:one_shot"], mode=ONE_LAUNCH, from_bytes=16 * MIB, graph=True)
# No goal compares eager steps with torch alone: with small models the host limits torch, so that
# the ratio measures Python code, not the GPU. Graphs measure the GPU; the host's part is compared
# with FSDP2's. A share of a bound counts only bytes that must move. NCCL cannot run several ranks
# in one launch on one GPU, so the step of all ranks is compared with torch's sum and copies.
_ONE_SHOT = "ringcomm:one_shot"
GOALS = (
    Goal("one-shot, 256 MiB, 2 ranks", ">=", 0.90, _BOUND, _large(_ONE_SHOT, 256, [2]), _share),
    Goal("one-shot, 256 MiB, 8 ranks", ">=", 0.85, _BOUND, _large(_ONE_SHOT, 256, [8]), _share),
    Goal("torch's sums and copies, from 16 MiB", ">", 1.0, _TIMES, _TORCH),
    Goal("all_reduce to 32 KiB in a graph, 2 ranks", "<=", 4.5, "us per call", _IN_GRAPHS, _time),
    Goal("NCCL with its ranks on one GPU", ">", 1.0, _TIMES, _NCCL),
    Goal("Triton's kernels, from 16 MiB", "<=", 1.1, _TIMES, _TRITON),
    Goal("shard of 256 Mi parameters, to a copy", ">=", 0.92, _COPY, _optimizer(SHARD, COPY)),
    Goal("shard of 256 Mi parameters, to torch", ">", 1.0, _TIMES, _optimizer(SHARD, TORCH)),
    Goal("step of all ranks", ">=", 0.88, _BOUND, _optimizer(STEP, SUBJECT), _share),
    Goal("step of all ranks, to separate kernels", ">=", 1.0, _TIMES, _optimizer(STEP, SEPARATE)),
    Goal(
        "step of all ranks, to torch's sum and copies", ">=", 1.5, _TIMES, _optimizer(STEP, TORCH)
    ),
    Goal("step in a graph, stages 1 to 3", "<=", 1.05, "times torch's in a graph", _stages(GRAPH)),
    Goal("host's part of an eager step", "<=", 0.5, "times FSDP2's", _stages(HOST), _of_fsdp2),
    Goal("host's part of an all_reduce", "<=", 1.3, "times torch's add_", _call(SYNC)),
    Goal("and with async_op and wait()", "<=", 2.3, "times torch's add_", _call(ASYNC)),
    Goal("serial loops, from 64 MiB", ">=", 1.0, _TIMES, _large("serial:one_shot", 64)),
    Goal("serial loops, step of all ranks", ">=", 1.0, _TIMES, _optimizer(STEP, OLDER)),
)


def evaluate(reports: Sequence[Report]) -> list[Judged]:
    """Returns all goals, judged by the reports of one run."""
    return [judge(goal, reports) for goal in GOALS]
