# SPDX-License-Identifier: Apache-2.0
"""``ringcomm demo``: the benchmark harness with settings that suit a first look."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ringcomm.cli import table_lines
from ringcomm.cli.bench import COLLECTIVES, TRAINING
from ringcomm.cli.output import why_no_file, write_file
from ringcomm.cli.phases import INTERRUPTED, Phase, run_phase
from ringcomm.errors import ArgumentError
from ringcomm.examples.corpus import read_corpus
from ringcomm.rendezvous.launchers import launched_world

CONTEXT = 64


@dataclass
class DemoOutcome:
    """The results of the runs so far, by title.

    Attributes:
        failed: the exit status of each run that failed.
        reports: the report of each run that wrote one.
    """

    failed: dict[str, int] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)


def runs_of(quick: bool, data: str | None) -> list[Phase]:
    """Returns the runs that make up the demo, all with two ranks."""
    pace = "--peers gloo --placement usual"
    pace += " -b 4K -e 256K -f 64 -r 3 -w 1 --turn-us 500" if quick else " -b 4K -e 64M -f 128 -r 9"
    heap = f"reduce_scatter all_gather all_reduce --tensors heap {pace}"
    # The seconds of each phase were measured on an idle machine (AMD EPYC, 2 cores).
    words = ("all", *pace.split())
    found = [Phase("Every collective against Gloo", COLLECTIVES, words, 0 if quick else 20)]
    if not quick:
        found.append(Phase("The same on tensors in the heap", COLLECTIVES, tuple(heap.split()), 10))
    text = () if data is None else ("--data", data)
    # Title, width, depth, heads, rounds, seconds; embedding and output layer share their weights.
    small = ("A GPT of 0.02 M parameters", 32, 1, 2, 3, 0)
    models = [("A GPT of 0.8 M parameters", 128, 4, 4, 15, 13), ("A GPT of 6 M", 320, 5, 5, 7, 24)]
    for title, width, depth, heads, rounds, about_s in [small] if quick else models:
        sizes = f"--width {width} --depth {depth} --heads {heads} --context {CONTEXT}"
        words = (*f"{sizes} --sequences 4 --rounds {rounds}".split(), *text)
        found.append(Phase(f"{title}, trained by each system", TRAINING, words, about_s))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm demo``."""
    parser.description = (
        "Checks and times every collective against Gloo, then trains a small byte-level GPT at all "
        "stages of ZeRO beside DDP and FSDP2, and compares every loss and weight. Starts its own "
        "two ranks, and takes about 70 s on 2 cores. Prints a line per phase and a card of the "
        "results; the tables go to a file. Exit status 1 when any result is wrong."
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    add("--quick", action="store_true", help="small sizes and one small model: some seconds")
    add("--tables", metavar="FILE", help="write the tables to FILE (default: a new file in /tmp)")
    add("--json", metavar="FILE", help="also write all figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Runs all comparisons, and prints a card of the results and whether all were right.

    Raises:
        ArgumentError: this process is a launcher's rank, or a path is wrong.
    """
    if launched_world() is not None:
        raise ArgumentError(
            "demo starts its own ranks; run it without torchrun (use `ringcomm train` there)"
        )
    read_corpus(args.data, CONTEXT)
    for option, path in (("--json", args.json), ("--tables", args.tables)):
        why = None if path is None else why_no_file(path)
        if why is not None:
            raise ArgumentError(f"{option} {path}: {why}")
    started = time.perf_counter()
    chosen, outcome = runs_of(args.quick, args.data), DemoOutcome()
    with _tables_file(args.tables) as tables:
        total_s = sum(each.about_s for each in chosen)
        length = f"about {total_s:.0f} s on two idle cores" if total_s else "some seconds"
        print(f"{len(chosen)} phases, {length}; the tables go to {tables.name}", flush=True)
        _run_all(chosen, tables, outcome)
    if INTERRUPTED in outcome.failed.values():
        phase = len(outcome.failed | outcome.reports)
        print(f"\nInterrupted in phase {phase} of {len(chosen)}; {tables.name} has its tables.")
        return INTERRUPTED
    if args.json is not None:
        result = {"passed": not outcome.failed, "runs": outcome.reports}
        write_file("--json", args.json, json.dumps(result, indent=1) + "\n")
    print("\n" + "\n".join(card_lines(outcome.reports.values())) + "\n")
    for title, status in outcome.failed.items():
        print(f"FAILED: {title}: exit status {status}")
    verdict = "NOT all results agree." if outcome.failed else "All results agree."
    print(f"{verdict} ({time.perf_counter() - started:.0f} s)")
    return 1 if outcome.failed else 0


def _tables_file(path: str | None) -> IO[str]:
    if path is not None:
        return Path(path).open("w+", encoding="utf-8")
    return tempfile.NamedTemporaryFile(
        "w+", prefix="ringcomm-demo-", suffix=".txt", delete=False, encoding="utf-8"
    )


def _run_all(chosen: Sequence[Phase], tables: IO[str], outcome: DemoOutcome) -> None:
    """Runs the phases, with their output in ``tables``; adds what they found to ``outcome``."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-demo-") as folder:
        for number, each in enumerate(chosen, 1):
            file = Path(folder, f"{number}.json")
            status = run_phase(each, f"{number}/{len(chosen)}", tables, ("--json", str(file)))
            if status != 0:
                outcome.failed[each.title] = status
            if status == INTERRUPTED:
                break
            if file.exists():
                outcome.reports[each.title] = json.loads(file.read_text())


def card_lines(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the card: a line per collective at its largest size, and a line per ZeRO stage.

    Shows the first report about collectives, and the last report about training. The last line
    explains the ratios.
    """
    rows: list[list[dict[str, Any]]] = [report["rows"] for report in reports]
    lines: list[str] = []
    for found in [each for each in rows if _is_of_collectives(each)][:1]:
        lines += table_lines([_COLLECTIVE_HEAD, *_collective_cells(found)], right=_RIGHT)
    for found in [each for each in rows if not _is_of_collectives(each)][-1:]:
        lines += table_lines([_STAGE_HEAD, *_stage_cells(found)], right=_RIGHT)
    return [*lines, _EXPLANATION] if lines else []


_TRAINING_STEP = "training_step"  # the harness's name of a step, in the column "collective"
_COLLECTIVE_HEAD = ("collective", "bytes", "ringcomm", "Gloo takes", "wrong elements")
_STAGE_HEAD = ("training", "MB per rank", "step", "DDP on Gloo takes", "compared with stage 0")
_EXPLANATION = (
    "2 ranks, FP32, plain tensors. 2.00x: Gloo takes twice as long; below 1x Gloo is faster."
)
_RIGHT = (False, True, True, True, True)


def _is_of_collectives(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["collective"] != _TRAINING_STEP for row in rows)


def _collective_cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    largest = {row["collective"]: row["size_bytes"] for row in rows}  # sizes grow from row to row
    cells: list[tuple[str, ...]] = []
    for name, size_bytes in largest.items():
        at_size = {
            row["system"]: row
            for row in rows
            if (row["collective"], row["size_bytes"]) == (name, size_bytes)
        }
        own, gloo = at_size["ringcomm"], at_size["gloo"]
        wrong = sum(row["wrong"] or 0 for row in rows if row["collective"] == name)
        cells.append((name, f"{size_bytes:,}", _time(own), _ratio(gloo["ratio"]), str(wrong)))
    return cells


def _stage_cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if not row["system"].startswith("stage"):
            continue
        # The ratio of a stage is its time over the time of DDP on Gloo.
        over = None if row["ratio"] is None else 1 / row["ratio"]
        verdict = {None: "reference", 0: "same weights"}.get(row["wrong"], f"{row['wrong']} WRONG")
        held = "-" if row["held_bytes"] is None else f"{row['held_bytes'] / 1e6:.1f}"
        cells.append((row["system"], held, _time(row), _ratio(over), verdict))
    return cells


def _time(row: Mapping[str, Any]) -> str:
    time_us = row["time_us"]
    if time_us is None:
        return "-"
    return f"{time_us:.1f} us" if time_us < 1e3 else f"{time_us / 1e3:.1f} ms"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
