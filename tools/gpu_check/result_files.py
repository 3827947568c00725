# SPDX-License-Identifier: Apache-2.0
"""The result files of a run: all rows as JSON and CSV, a Markdown report, and the log."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringcomm.bench.devices import COPY_FACT
from ringcomm.bench.report import Report, size_label, write_csv, write_json

from .goals import evaluate, share_of_bound
from .runner import Result

# A fact that only rehearsals have.
REHEARSAL = "rehearsal"


def goal_lines(reports: Sequence[Report]) -> list[str]:
    """Returns the table of goals."""
    head = ["| goal | wanted | worst | measured | reached |", "|---|---|---|---|---|"]
    return head + [judged.line for judged in evaluate(reports)]


@dataclass
class ResultFiles:
    """The facts and results of a run, and the files that store them.

    Attributes:
        folder: the folder of the files; ``out``: a folder for copies of them and the log, or None.
        results: the results of the finished stages.
    """

    facts: Mapping[str, str]
    folder: Path
    out: Path | None
    log: Path
    results: list[Result] = field(default_factory=list)

    @property
    def name(self) -> str:
        """ "gpu-nvidia-h200-2026-11-20", or "rehearsal-2026-11-20"."""
        gpu = "gpu-" + re.sub(r"[^a-z0-9]+", "-", self.facts["gpu"].lower()).strip("-")
        return f"{REHEARSAL if REHEARSAL in self.facts else gpu}-{self.facts['date']}"

    def write(self, *running: Result, ended: bool = False) -> list[Path]:
        """Rewrites the files, including the partial results of the ``running`` stage."""
        results = [*self.results, *running]
        reports = [report for result in results for report in result.reports]
        report = self._joined(results, reports, ended)
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / f"{self.name}{ending}" for ending in (".json", ".csv", ".md")]
        # Files are complete at any time: a run killed while it writes leaves the previous version.
        parts = [file.with_suffix(f"{file.suffix}.unfinished") for file in files]
        write_json(report, parts[0])
        write_csv(report, parts[1])
        parts[2].write_text(_markdown(report, goal_lines(reports)), encoding="utf-8")
        for part, file in zip(parts, files, strict=True):
            part.replace(file)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            for file in (*files, self.log):
                shutil.copyfile(file, self.out / file.name)
        return files

    def _joined(self, results: Sequence[Result], reports: Sequence[Report], ended: bool) -> Report:
        """Returns all rows; the provenance has the machine, the stages, and the stages' notes."""
        provenance = dict(reports[0].provenance) if reports else {}
        for of_one_run in ("mode", "load"):
            provenance.pop(of_one_run, None)
        commands = [report.provenance.get("command", "") for report in reports]
        provenance |= {"command": "; ".join(commands), **self.facts}
        provenance["ended"] = "yes" if ended else "no: it was stopped; these are its results"
        for each in results:
            told = f"{each.verdict}, {each.seconds:.0f} s: {each.detail}"
            provenance |= {f"stage {each.name}": told, **each.noted}
        return Report(provenance, [row for report in reports for row in report.rows])


def _markdown(report: Report, goals: Sequence[str]) -> str:
    """Returns the facts, the goals and the times."""
    facts = report.provenance
    text = [f"# {facts['gpu']}, {facts['date']}", "", "| | |", "|---|---|"]
    text += [f"| {key} | {value.replace('|', '/')} |" for key, value in facts.items()]
    text += ["", "## Goals", "", *goals, "", "## Times", ""]
    text += ["Bound: what a copy of the bytes that must move would take, over the time.", ""]
    text += ["| case | size | system | us | ratio | bound |", "|---|---|---|---|---|---|"]
    copy_gbps = 0.0 if REHEARSAL in facts else float(facts.get(COPY_FACT, 0.0))
    for row in report.rows:
        graph = f", graphs of {row.graph_calls} calls" if row.graph_calls else ""
        case = f"{row.collective}, {row.ranks} ranks, {row.mode}{graph}, {row.placement}"
        share = share_of_bound(row, copy_gbps) if copy_gbps else None
        figures = ["-" if x is None else f"{x:.2f}" for x in (row.time_us, row.ratio, share)]
        cells = (case, size_label(row.size_bytes), row.system, *figures)
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"
