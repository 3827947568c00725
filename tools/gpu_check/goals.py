"""The goals that a GPU's figures are held against, and how far each is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ringcomm.bench.device_systems import COPY, SEPARATE, SHARD, STEP, TORCH
from ringcomm.bench.devices import COPY_FACT
from ringcomm.bench.modes import ONE_LAUNCH, PROCESSES_ON_ONE_GPU
from ringcomm.bench.report import Report, Row, size_label
from ringcomm.bench.traffic import distinct_bytes, needed_bytes, ring_bytes
from ringcomm.bench.training_systems import TRAINING

LARGE_BYTES = 64 << 20
COMPARED_FROM_BYTES = 1 << 20
SMALL_BYTES = 32 << 10
DIRECT_SHARE = 0.85
RING_SHARE = 0.70
SMALL_US = 6.0
TRITON_FROM_BYTES = 16 << 20
TRITON_RATIO = 1.10
# The parameters that the goals for a shard speak of: all 256 Mi.
SHARD_ELEMS = 256 << 20
SHARD_SHARE = 0.92
SEPARATE_RATIO = 1.3
TORCH_STEP_RATIO = 1.5
OVERHEAD_RATIO = 1.03
_SHARDED_STAGES = ("stage 1", "stage 2", "stage 3")

_HALVES = ("reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Cell:
    """One measurement that a goal speaks of. ``margin`` is 1 where it is just reached."""

    label: str
    measured: float
    unit: str
    margin: float
    reached: bool
    remark: str = ""


@dataclass(frozen=True)
class Goal:
    """A line of the table of goals; without cells, ``missing`` says why."""

    name: str
    wanted: str
    cells: tuple[Cell, ...]
    missing: str = "not measured"

    @property
    def reached(self) -> bool | None:
        """None where nothing was measured."""
        return all(cell.reached for cell in self.cells) if self.cells else None

    @property
    def worst(self) -> Cell | None:
        return min(self.cells, key=lambda cell: cell.margin, default=None)

    @property
    def answer(self) -> str:
        return {True: "yes", False: "no", None: self.missing}[self.reached]


def evaluate(reports: Sequence[Report]) -> list[Goal]:
    """All goals, from what the reports of one run hold."""
    small = _cells(reports, _is_small, _latency)
    against_torch = _cells(reports, _compares("torch", ONE_LAUNCH, COMPARED_FROM_BYTES), _ahead)
    against_nccl = _cells(reports, _compares("nccl", PROCESSES_ON_ONE_GPU, 0), _ahead)
    triton = _cells(reports, _compares("triton:direct", ONE_LAUNCH, TRITON_FROM_BYTES), _close)
    return [
        _share_goal(reports, "direct", DIRECT_SHARE, "bytes that must move"),
        _share_goal(reports, "ring", RING_SHARE, "the ring's own bytes"),
        Goal("against torch's sums and copies, from 1 MiB", "ahead at every size", against_torch),
        Goal("all_reduce to 32 KiB in a graph, 2 ranks", f"<= {SMALL_US:g} us per call", small),
        Goal(
            "against NCCL with its ranks on one GPU",
            "ahead at every size",
            against_nccl,
            _why_missing(reports, "nccl"),
        ),
        Goal("Triton's kernels, from 16 MiB", f"<= {TRITON_RATIO:g} times the CUDA ones", triton),
        *_optimizer_goals(reports),
        _training_goal(reports),
    ]


def _training_goal(reports: Sequence[Report]) -> Goal:
    def chosen(row: Row) -> bool:
        return row.collective == TRAINING and row.system in _SHARDED_STAGES

    def judge(report: Report, row: Row) -> Cell | None:
        if row.ratio is None:
            return None
        label = f"{row.system}, {row.ranks} ranks, {row.placement}"
        margin = OVERHEAD_RATIO / row.ratio
        reached = row.ratio <= OVERHEAD_RATIO
        return Cell(label, row.ratio, "times torch's fused AdamW alone", margin, reached)

    return Goal(
        "training step at ZeRO stages 1 to 3",
        f"<= {OVERHEAD_RATIO:g} times torch with no communication",
        _cells(reports, chosen, judge),
    )


def _optimizer_goals(reports: Sequence[Report]) -> list[Goal]:
    def goal(name: str, wanted: str, what: str, system: str, least: float) -> Goal:
        def chosen(row: Row) -> bool:
            return (
                row.collective == what
                and row.system == system
                and row.dtype == "bfloat16"
                and (what == STEP or row.count >= SHARD_ELEMS)
            )

        def judge(report: Report, row: Row) -> Cell | None:
            if row.ratio is None:
                return None
            reached = row.ratio > least if least == 1.0 else row.ratio >= least
            label = f"{row.collective}, {row.ranks} ranks, {row.count / 2**20:g} Mi parameters"
            remark = _speed_of_subject(report, row) if what == SHARD else ""
            remark = "; ".join(text for text in (remark, row.note) if text)
            unit = "of the copy" if system == COPY else "times our time"
            return Cell(label, row.ratio, unit, row.ratio / least, reached, remark)

        return Goal(name, wanted, _cells(reports, chosen, judge))

    shard, step = f"{SHARD}, 256 Mi bfloat16 parameters", f"{STEP} in one pass"
    # NCCL has no ranks that share a GPU and a launch: torch's sum and copies do its work.
    times = "its time >= {:g} times ours, at 2, 4 and 8 ranks"
    return [
        goal(shard, f">= {SHARD_SHARE:.0%} of the copy of 28 bytes each", SHARD, COPY, SHARD_SHARE),
        goal(f"{shard}, against torch's fused AdamW", "ahead", SHARD, TORCH, 1.0),
        goal(
            f"{step}, against our separate kernels",
            times.format(SEPARATE_RATIO),
            STEP,
            SEPARATE,
            SEPARATE_RATIO,
        ),
        goal(
            f"{step}, against torch's sum and copies in NCCL's place, and fused AdamW",
            times.format(TORCH_STEP_RATIO),
            STEP,
            TORCH,
            TORCH_STEP_RATIO,
        ),
    ]


def _speed_of_subject(report: Report, row: Row) -> str:
    """Returns what ringcomm moves beside ``row``, and what the row's own system does."""
    ours = next((each.algbw_gbps for each in report.rows if each.system == "ringcomm"), None)
    if ours is None or row.algbw_gbps is None:
        return ""
    return f"{ours:.0f} GB/s, {row.system} {row.algbw_gbps:.0f} GB/s"


def _cells(
    reports: Sequence[Report],
    wanted: Callable[[Row], bool],
    judge: Callable[[Report, Row], Cell | None],
) -> tuple[Cell, ...]:
    judged: Iterable[Cell | None] = (
        judge(report, row) for report in reports for row in report.rows if wanted(row)
    )
    return tuple(cell for cell in judged if cell is not None)


def _share_goal(reports: Sequence[Report], algorithm: str, share: float, counted: str) -> Goal:
    def wanted(row: Row) -> bool:
        return (
            row.system == f"ringcomm:{algorithm}"
            and row.mode == ONE_LAUNCH
            and row.collective in _HALVES
            and row.placement == "out"
            and row.size_bytes >= LARGE_BYTES
        )

    def judge(report: Report, row: Row) -> Cell | None:
        if row.time_us is None:
            return None
        copy_gbps = float(report.provenance[COPY_FACT])
        bytes_of = ring_bytes if algorithm == "ring" else needed_bytes

        def share_of(count: Callable[[str, int, int], int]) -> float:
            moved = count(row.collective, row.size_bytes, row.ranks)
            return moved / (row.time_us or 1.0) / 1e3 / copy_gbps

        measured = share_of(bytes_of)
        remark = f"{measured * copy_gbps:.0f} of {copy_gbps:.0f} GB/s"
        if algorithm == "direct" and row.collective == "all_gather":
            remark += f"; each byte counted once for all ranks: {share_of(distinct_bytes):.2f}"
        reached = measured >= share
        return Cell(_label(row), measured, "of the copy", measured / share, reached, remark)

    return Goal(
        f"{algorithm} reduce_scatter and all_gather, from 64 MiB",
        f">= {share:.0%} of copy bandwidth, counting {counted}",
        _cells(reports, wanted, judge),
    )


def _compares(peer: str, mode: str, from_bytes: int) -> Callable[[Row], bool]:
    def wanted(row: Row) -> bool:
        return row.system == peer and row.mode == mode and row.size_bytes >= from_bytes

    return wanted


def _ahead(report: Report, row: Row) -> Cell | None:
    if row.ratio is None or row.graph_calls:
        return None
    return Cell(_label(row), row.ratio, "times its time", row.ratio, row.ratio > 1.0)


def _close(report: Report, row: Row) -> Cell | None:
    if row.ratio is None:
        return None
    margin = TRITON_RATIO / max(row.ratio, 1e-3)
    return Cell(_label(row), row.ratio, "times our time", margin, row.ratio <= TRITON_RATIO)


def _is_small(row: Row) -> bool:
    return (
        row.system == "ringcomm"
        and row.mode == ONE_LAUNCH
        and row.collective == "all_reduce"
        and row.ranks == 2
        and row.graph_calls > 0
        and row.size_bytes <= SMALL_BYTES
    )


def _latency(report: Report, row: Row) -> Cell | None:
    if row.time_us is None:
        return None
    margin = SMALL_US / max(row.time_us, 1e-3)
    return Cell(_label(row), row.time_us, "us", margin, row.time_us <= SMALL_US)


def _label(row: Row) -> str:
    return f"{row.collective}, {row.ranks} ranks, {size_label(row.size_bytes)}"


def _why_missing(reports: Sequence[Report], system: str) -> str:
    notes = {row.note for report in reports for row in report.rows if row.system == system}
    return f"not measured: {'; '.join(sorted(notes - {''}))}" if notes - {""} else "not measured"
