"""``ringcomm demo``: the benchmark harness with settings that suit a first look."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringcomm.cli.bench import COLLECTIVES, TRAINING, run_harness
from ringcomm.cli.output import why_no_file, write_file
from ringcomm.errors import ArgumentError
from ringcomm.examples.corpus import read_corpus
from ringcomm.rendezvous.launchers import launched_world

CONTEXT = 64
INTERRUPTED = 130


@dataclass(frozen=True)
class DemoRun:
    """One run of the harness.

    Attributes:
        title: one line that says what the run shows.
        bench: the name of the benchmark.
        words: the benchmark's command line.
    """

    title: str
    bench: str
    words: tuple[str, ...]


def runs_of(quick: bool, data: str | None) -> list[DemoRun]:
    """Returns the runs that make up the demo, all with two ranks."""
    pace = "--peers gloo --placement usual"
    pace += " -e 256K -f 64 -r 3 -w 1 --turn-us 500" if quick else " -e 64M -f 128 -r 9"
    heap = f"reduce_scatter all_gather all_reduce --tensors heap {pace}"
    found = [DemoRun("Every collective against Gloo", COLLECTIVES, ("all", *pace.split()))]
    if not quick:
        found.append(DemoRun("The same on tensors in the heap", COLLECTIVES, tuple(heap.split())))
    text = () if data is None else ("--data", data)
    # Title, width, depth, heads and rounds; embedding and output layer share their weights.
    small = ("A GPT of 0.02 M parameters", 32, 1, 2, 3)
    models = [("A GPT of 0.8 M parameters", 128, 4, 4, 15), ("A GPT of 6 M", 320, 5, 5, 9)]
    for title, width, depth, heads, rounds in [small] if quick else models:
        sizes = f"--width {width} --depth {depth} --heads {heads} --context {CONTEXT}"
        words = (*f"{sizes} --sequences 4 --rounds {rounds}".split(), *text)
        found.append(DemoRun(f"{title}, trained by each system", TRAINING, words))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm demo``."""
    parser.description = (
        "Checks and times every collective against Gloo, then trains a small byte-level GPT at all "
        "stages of ZeRO beside DDP and FSDP2, and compares every loss and weight. Starts its own "
        "two ranks, and takes one to two minutes on 2 cores. Exit status 1 when any result is "
        "wrong."
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    add("--quick", action="store_true", help="small sizes and one small model: some seconds")
    add("--json", metavar="FILE", help="also write all figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Runs all comparisons, and prints at the end whether every result was right.

    Raises:
        ArgumentError: this process is a launcher's rank, or a path is wrong.
    """
    if launched_world() is not None:
        raise ArgumentError(
            "demo starts its own ranks; run it without torchrun (use `ringcomm train` there)"
        )
    read_corpus(args.data, CONTEXT)
    why = None if args.json is None else why_no_file(args.json)
    if why is not None:
        raise ArgumentError(f"--json {args.json}: {why}")
    started = time.perf_counter()
    failed, documents = _run_all(runs_of(args.quick, args.data))
    if INTERRUPTED in failed.values():
        return INTERRUPTED
    if args.json is not None:
        result = {"passed": not failed, "runs": documents}
        write_file("--json", args.json, json.dumps(result, indent=1) + "\n")
    for title, status in failed.items():
        print(f"FAILED: {title}: exit status {status}")
    verdict = "NOT all results agree." if failed else "All results agree."
    print(f"\n{verdict} ({time.perf_counter() - started:.0f} s)")
    return 1 if failed else 0


def _run_all(chosen: Sequence[DemoRun]) -> tuple[dict[str, int], dict[str, Any]]:
    """Returns the exit status of each run that failed, and the report of each that wrote one."""
    failed, documents = {}, {}
    with tempfile.TemporaryDirectory(prefix="ringcomm-demo-") as folder:
        for number, each in enumerate(chosen):
            file = Path(folder, f"{number}.json")
            print(f"\n=== {each.title}", flush=True)
            status = run_harness(each.bench, *each.words, "--json", str(file))
            if status != 0:
                failed[each.title] = status
            if status == INTERRUPTED:
                break
            if file.exists():
                documents[each.title] = json.loads(file.read_text())
    return failed, documents
