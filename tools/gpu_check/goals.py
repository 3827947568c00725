"""The goals that a GPU's figures are held against, and how far each is reached."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ringcomm.bench.collectives.torch_ops import needed_bytes
from ringcomm.bench.device_steps import COPY, SEPARATE, SHARD, STEP, TORCH
from ringcomm.bench.devices import COPY_FACT, ONE_LAUNCH, PROCESSES_ON_ONE_GPU
from ringcomm.bench.report import Report, Row, size_label
from ringcomm.bench.training_systems import TRAINING

KIB, MIB = 1 << 10, 1 << 20
SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le}


@dataclass(frozen=True)
class Where:
    """The rows that a goal speaks of. None admits any."""

    system: Collection[str]
    collective: Collection[str] | None = None
    mode: str | None = None
    from_bytes: int = 0
    to_bytes: int = 1 << 62
    from_count: int = 0
    dtype: str | None = None
    graph: bool = False

    def admits(self, row: Row) -> bool:
        return (
            row.system in self.system
            and (self.collective is None or row.collective in self.collective)
            and self.mode in (None, row.mode)
            and self.from_bytes <= row.size_bytes <= self.to_bytes
            and row.count >= self.from_count
            and self.dtype in (None, row.dtype)
            and (row.graph_calls > 0) == self.graph
        )


def ring_bytes(collective: str, size_bytes: int, world: int) -> int:
    """Counts the bytes that the rings of ``reduce_scatter.h`` and ``all_gather.h`` move.

    Every rank: one hop without a predecessor (2 chunks: in, slot), W-2 hops that read a slot and
    fill the next with the own version or output beside it (3 chunks), and the last one (3
    chunks): 3W-1 chunks. An all-gather has as many: it copies the own chunk, and the last hop
    fills no slot. A chunk that is loaded for two stores is counted once.
    """
    if collective not in ("reduce_scatter", "all_gather"):
        raise ValueError(f"{collective}: the ring's bytes are counted of its two halves")
    return (3 * world - 1) * size_bytes


def _share(count: Callable[[str, int, int], int]) -> Callable[[Report, Row], float | None]:
    """The bandwidth of a row over the device's own copy, by a count of the bytes that move."""

    def share(report: Report, row: Row) -> float | None:
        if row.time_us is None or row.placement != "out":
            return None
        gbps = count(row.collective, row.size_bytes, row.ranks) / row.time_us / 1e3
        return gbps / float(report.provenance[COPY_FACT])

    return share


@dataclass(frozen=True)
class Goal:
    """A limit for the figure that ``measured`` computes from a row, or None without a figure."""

    name: str
    sign: str
    limit: float
    unit: str
    where: Where
    measured: Callable[[Report, Row], float | None] = lambda report, row: row.ratio

    def reached(self, value: float) -> bool:
        return bool(SIGNS[self.sign](value, self.limit))

    def margin(self, value: float) -> float:
        """Returns 1 where the goal is just reached, and less where it is missed."""
        return value / self.limit if self.sign != "<=" else self.limit / max(value, 1e-9)


@dataclass(frozen=True)
class Judged:
    """A goal with what was measured, by label; where nothing was, ``why`` says so."""

    goal: Goal
    figures: tuple[tuple[str, float], ...]
    why: str

    @property
    def worst(self) -> tuple[str, float]:
        return min(self.figures, key=lambda figure: self.goal.margin(figure[1]))

    @property
    def line(self) -> str:
        """The goal in a table of Markdown, with the figure that is furthest from it."""
        goal, worst, answer = self.goal, "- | -", self.why
        if self.figures:
            label, value = self.worst
            worst, answer = f"{label} | {value:.3f}", "yes" if goal.reached(value) else "no"
        return f"| {goal.name} | {goal.sign} {goal.limit:g} {goal.unit} | {worst} | {answer} |"


def judge(goal: Goal, reports: Sequence[Report]) -> Judged:
    """Judges a goal by the reports of one run."""
    found = [(report, row) for report in reports for row in report.rows if goal.where.admits(row)]
    measured = [(_label(row), goal.measured(report, row)) for report, row in found]
    figures = tuple((label, value) for label, value in measured if value is not None)
    notes = sorted({row.note for _, row in found} - {""})
    return Judged(goal, figures, ": ".join(["not measured", *notes]))


def _label(row: Row) -> str:
    if row.collective == TRAINING:
        return f"{row.system}, {row.ranks} ranks, {row.placement}"
    optimizer = row.collective in (SHARD, STEP)
    size = f"{row.count / MIB:g} Mi parameters" if optimizer else size_label(row.size_bytes)
    return f"{row.collective}, {row.ranks} ranks, {size}"


def _time(report: Report, row: Row) -> float | None:
    return row.time_us if row.ranks == 2 else None


def _large(algorithm: str) -> Where:
    halves = ("reduce_scatter", "all_gather")
    return Where([f"ringcomm:{algorithm}"], halves, ONE_LAUNCH, from_bytes=64 * MIB)


def _optimizer(what: str, system: str) -> Where:
    least = 256 * MIB if what == SHARD else 0
    return Where([system], [what], from_count=least, dtype="bfloat16")


_COPY, _TIMES = "of the copy's bandwidth", "times the CUDA kernels' time"
_IN_GRAPHS = Where(["ringcomm"], ["all_reduce"], ONE_LAUNCH, to_bytes=32 * KIB, graph=True)
_TORCH = Where(["torch"], mode=ONE_LAUNCH, from_bytes=MIB)
_NCCL = Where(["nccl"], mode=PROCESSES_ON_ONE_GPU)
_TRITON = Where(["triton:one_shot"], mode=ONE_LAUNCH, from_bytes=16 * MIB)
_STAGES = Where([f"stage {stage}" for stage in (1, 2, 3)], [TRAINING])
# A share of bandwidth counts the bytes that must move, or the ring's own. NCCL has no ranks that
# share a GPU and a launch: in a step torch's sum and copies do its work.
GOALS = (
    Goal(
        "one-shot algorithm, from 64 MiB",
        ">=",
        0.85,
        _COPY,
        _large("one_shot"),
        _share(needed_bytes),
    ),
    Goal("ring algorithm, from 64 MiB", ">=", 0.70, _COPY, _large("ring"), _share(ring_bytes)),
    Goal("torch's sums and copies, from 1 MiB", ">", 1.0, _TIMES, _TORCH),
    Goal("all_reduce to 32 KiB in a graph, 2 ranks", "<=", 6.0, "us per call", _IN_GRAPHS, _time),
    Goal("NCCL with its ranks on one GPU", ">", 1.0, _TIMES, _NCCL),
    Goal("Triton's kernels, from 16 MiB", "<=", 1.1, _TIMES, _TRITON),
    Goal("shard of 256 Mi parameters, to a copy", ">=", 0.92, _COPY, _optimizer(SHARD, COPY)),
    Goal("shard of 256 Mi parameters, to torch", ">", 1.0, _TIMES, _optimizer(SHARD, TORCH)),
    Goal("step of all ranks, to separate kernels", ">=", 1.3, _TIMES, _optimizer(STEP, SEPARATE)),
    Goal(
        "step of all ranks, to torch's sum and copies", ">=", 1.5, _TIMES, _optimizer(STEP, TORCH)
    ),
    Goal("training step, stages 1 to 3", "<=", 1.03, "times torch without communication", _STAGES),
)


def evaluate(reports: Sequence[Report]) -> list[Judged]:
    """Returns all goals, judged by the reports of one run."""
    return [judge(goal, reports) for goal in GOALS]
