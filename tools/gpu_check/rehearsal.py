"""A rehearsal: every stage of a run on an emulated device, at small sizes, its figures marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringcomm.bench.devices import COPY_FACT
from ringcomm.bench.report import Report

from .benches import Bench
from .goals import Goal

# In the facts of a rehearsal, and of no other run.
FACT = "rehearsal"
MARK = "rehearsed"
_WHAT_IT_IS = "on an emulated device: no figure here is a GPU's, and no goal is judged"
_HARNESS = "tests.gpu.rehearsed"
PROBE = (
    "import json; from tests.gpu.rehearsed import EmulatedGpu; "
    "print(json.dumps(EmulatedGpu().facts()))"
)
# Of every module's runs: as little as shows that they end, are right and are written down.
_SMALL: Mapping[str, Mapping[str, str]] = {
    "ringcomm.bench.collectives": {"-b": "4K", "-e": "16K", "-n": "2", "-w": "1"},
    "ringcomm.bench.device_steps": {"-m": "1", "-r": "1"},
    "ringcomm.bench.training": {
        "--width": "32",
        "--depth": "2",
        "--heads": "2",
        "--sequences": "1",
        "--context": "16",
        "-r": "1",
    },
}
# From these sizes to the least that a goal speaks of: 64 MiB, and 256 Mi parameters.
_LARGER_BITS, _MORE_BITS = 14, 8
_NOT_MEASURED = {COPY_FACT: f"none, {MARK}"}
# Slower than a GPU with everything that it does.
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Rehearsal:
    """How the stages run in place of a GPU's.

    Attributes:
        sample: one file of tests, and the first run of the harness of each stage: what
            ``make test`` has the time for.
    """

    sample: bool = False

    @property
    def tests(self) -> tuple[str, ...]:
        return ("tests/gpu/test_launch_cost.py",) if self.sample else ("tests/gpu",)

    def folder(self, usual: Path) -> Path:
        """Where its files go, the record as well: not among the results of GPUs."""
        return usual.with_name(f"{usual.name}-{'sample' if self.sample else 'rehearsal'}")

    def environment(self, usual: Mapping[str, str]) -> dict[str, str]:
        """Hides a GPU, on which the tests would run otherwise."""
        return {**usual, "CUDA_VISIBLE_DEVICES": ""}

    def facts(self, probed: Mapping[str, str]) -> dict[str, str]:
        return {**probed, **_NOT_MEASURED, FACT: _WHAT_IT_IS}

    def plan(self, runs: Sequence[Bench]) -> list[Bench]:
        return [small(run) for run in (runs[:1] if self.sample else runs)]


def small(run: Bench) -> Bench:
    """The same run at small sizes, by the harness that takes an emulated device for its GPU."""
    words = list(run.arguments)
    for option, value in _SMALL[run.module].items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    if "--graph" in words:  # an emulated device records none of torch's operations
        words = [word.removesuffix(",torch") for word in words]
    return replace(run, arguments=(run.module, *words), module=_HARNESS, limit_s=_LIMIT_S)


def enlarged(report: Report) -> Report:
    """The report as if its sizes were a GPU's, so that the goals find the rows they speak of."""
    rows = [
        row
        if row.graph_calls
        else replace(row, size_bytes=row.size_bytes << _LARGER_BITS, count=row.count << _MORE_BITS)
        for row in report.rows
    ]
    return Report(report.provenance, rows)


def marked(report: Report) -> Report:
    """The report with every row marked, wherever it is copied to."""
    rows = [
        replace(
            row,
            system=f"{row.system} ({MARK})",
            note="; ".join(text for text in (f"{MARK} {_WHAT_IT_IS}", row.note) if text),
        )
        for row in report.rows
    ]
    return Report({**report.provenance, **_NOT_MEASURED}, rows)


def unjudged(goal: Goal) -> Goal:
    """The goal without its cells: the emulator's speed says nothing of it."""
    return replace(goal, cells=(), missing=f"{MARK}: {len(goal.cells)} figures, none judged")
