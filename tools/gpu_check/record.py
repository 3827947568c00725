"""The record of a run: JSON for programs, CSV of the rows, Markdown for readers, and the log."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ringcomm.bench.report import SCHEMA, Report, Row, size_label, write_csv

from .goals import Goal
from .plan import Result
from .rehearsal import FACT

LOG_NAME = "gpu-check.log"


@dataclass(frozen=True)
class Record:
    """Everything that is known of a run, which may not have ``ended`` yet."""

    facts: Mapping[str, str]
    results: Sequence[Result]
    goals: Sequence[Goal]
    reports: Sequence[Report]
    ended: bool = True

    @property
    def rows(self) -> list[Row]:
        return [row for report in self.reports for row in report.rows]

    @property
    def provenance(self) -> dict[str, str]:
        """Facts of the machine first; of the harness's runs, what the first one says."""
        first = dict(self.reports[0].provenance) if self.reports else {}
        for own in ("command", "mode", "load"):
            first.pop(own, None)
        commands = [report.provenance.get("command", "") for report in self.reports]
        return {**first, **self.facts, "commands": "; ".join(commands)}


def base_name(facts: Mapping[str, str]) -> str:
    """ "gpu-nvidia-h200-2026-11-20", or "rehearsal-2026-11-20"."""
    if FACT in facts:
        return f"{FACT}-{facts['date']}"
    name = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    return f"gpu-{name}-{facts['date']}"


def write(record: Record, folder: Path, out: Path | None, log: Path) -> list[Path]:
    """Writes the files into ``folder``, and copies them and the log into ``out``."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / base_name(record.facts)
    files = [base.with_suffix(ending) for ending in (".json", ".csv", ".md")]
    texts = {files[0]: json.dumps(document(record), indent=1) + "\n", files[2]: markdown(record)}
    for file in files:
        # Whole at any time: a run that is killed while it writes leaves what stood there before.
        unfinished = file.with_suffix(f"{file.suffix}.unfinished")
        if file in texts:
            unfinished.write_text(texts[file], encoding="utf-8")
        else:
            write_csv(Report(record.provenance, record.rows), unfinished)
        unfinished.replace(file)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for file in (*files, log):
            shutil.copyfile(file, out / file.name)
    return files


def document(record: Record) -> dict[str, object]:
    """The rows as the harness writes them, and beside them the stages and goals."""
    stages = [
        {
            "stage": result.name,
            "verdict": result.verdict,
            "seconds": round(result.seconds, 1),
            "detail": result.detail,
            **{key: value for key, value in result.data.items() if key != "reports"},
        }
        for result in record.results
    ]
    goals = [
        {
            "goal": goal.name,
            "wanted": goal.wanted,
            "reached": goal.reached,
            "answer": goal.answer,
            "cells": [asdict(cell) for cell in goal.cells],
        }
        for goal in record.goals
    ]
    return {
        "schema": SCHEMA,
        "ended": record.ended,
        "provenance": record.provenance,
        "stages": stages,
        "goals": goals,
        "rows": [asdict(row) for row in record.rows],
    }


def goal_lines(goals: Sequence[Goal]) -> list[str]:
    """The table of goals; each with the cell that is furthest from it."""
    lines = ["| goal | wanted | worst cell | measured | reached |", "|---|---|---|---|---|"]
    for goal in goals:
        worst = goal.worst
        where = worst.label if worst else "-"
        measured = f"{worst.measured:.2f} {worst.unit}" if worst else "-"
        lines.append(f"| {goal.name} | {goal.wanted} | {where} | {measured} | {goal.answer} |")
    return lines


def markdown(record: Record) -> str:
    facts = record.facts
    text = [f"# {facts['gpu']}, {facts['date']}", "", "| | |", "|---|---|"]
    text += [f"| {key} | {value} |" for key, value in facts.items()]
    if not record.ended:
        text += ["", "This run was stopped before its end: what follows is what it had by then."]
    text += ["", "## Goals", "", *goal_lines(record.goals)]
    for goal in record.goals:
        if goal.cells:
            text += ["", f"### {goal.name}: {goal.wanted}", ""]
            text += ["| cell | measured | reached | |", "|---|---|---|---|"]
        for cell in goal.cells:
            reached = "yes" if cell.reached else "no"
            measured = f"{cell.measured:.3f} {cell.unit}"
            text.append(f"| {cell.label} | {measured} | {reached} | {cell.remark} |")
    text += ["", "## Stages", "", "| stage | verdict | s | |", "|---|---|---|---|"]
    for result in record.results:
        shown = result.detail.replace("|", "/")
        text.append(f"| {result.name} | {result.verdict} | {result.seconds:.0f} | {shown} |")
    for result in record.results:
        noted = result.data.get("figures", {})
        if noted:
            text += ["", "## Figures noted by tests", "", "| | |", "|---|---|"]
            text += [f"| {name} | {value} |" for name, value in noted.items()]
    return "\n".join([*text, *_time_tables(record.rows)]) + "\n"


def _time_tables(rows: Sequence[Row]) -> list[str]:
    """Times by size and system; one table per mode, world and collective."""
    text: list[str] = []
    kinds = dict.fromkeys(
        (row.mode, row.ranks, row.collective, row.placement, row.dtype, row.graph_calls)
        for row in rows
        if row.time_us is not None
    )
    for mode, ranks, collective, placement, dtype, graph_calls in kinds:
        key = (mode, ranks, collective, placement, dtype, graph_calls)
        chosen = {
            (row.size_bytes, row.system): row.time_us
            for row in rows
            if row.time_us is not None
            and (row.mode, row.ranks, row.collective, row.placement, row.dtype, row.graph_calls)
            == key
        }
        systems = list(dict.fromkeys(system for _, system in chosen))
        graph = f", graphs of {graph_calls} calls" if graph_calls else ""
        text += ["", f"## {collective}, {ranks} ranks, mode {mode}{graph}", ""]
        text += [f"us per call ({dtype}, {placement} of place)".replace("in of", "in"), ""]
        text += ["| size | " + " | ".join(systems) + " |", "|---" * (len(systems) + 1) + "|"]
        for size_bytes in sorted({size for size, _ in chosen}):
            cells = [chosen.get((size_bytes, system)) for system in systems]
            shown = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
            text.append(f"| {size_label(size_bytes)} | {shown} |")
    return text
