"""``ringcomm report``: one HTML page of a run, which opens from a disk and fetches nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from ringcomm.cli.report.sections import Section, of_processes
from ringcomm.cli.report.sources import find
from ringcomm.comm.recorder.reader import ended_ranks, live_recordings
from ringcomm.comm.recorder.trace_file import newest
from ringcomm.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm report``."""
    parser.description = (
        "Writes one HTML page of a run: who waited for whom, bandwidths, step times and "
        "memory. It opens from a disk and fetches nothing. docs/report.md shows how to read it."
    )
    kinds = "traces of faults, profiles of steps, what bench, demo and train write with --json"
    told = f"{kinds}, and folders of such files; none: the newest trace"
    pids = "also look into running, hung or stopped processes; one rank is enough"
    output = Path("report.html")
    add = parser.add_argument
    add("run", nargs="*", type=Path, metavar="RUN", help=told)
    add("--pid", nargs="+", type=int, default=[], help=pids)
    add("-o", "--output", type=Path, default=output, help="the page (default: %(default)s)")
    add("--title", help="of the page (default: of what it shows)")


def run(args: argparse.Namespace) -> int:
    """Writes the page; 0 also when it shows a fault.

    Raises:
        ArgumentError: a file is of no kind that is known, or the page cannot be written.
        RingcommError: a trace is damaged, or a process has no recorder to read.
    """
    sections = [
        of_processes(recording, ended_ranks(recording, args.pid[0]), args.pid)
        for recording in (live_recordings(args.pid) if args.pid else [])
    ]
    found, left_out = find(args.run or ([] if args.pid else [newest()]))
    sections += found
    title = args.title or f"ringcomm report: {', '.join(each.title for each in sections[:3])}"
    text = page(title, sections, left_out)
    try:
        written = args.output.write_bytes(text.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--output {args.output}: cannot be written: {error}") from error
    for each in left_out:
        print(f"left out: {each}", file=sys.stderr)
    print(f"wrote {args.output} ({written / 1e6:.1f} MB): open it in a browser", file=sys.stderr)
    return 0


def page(title: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """The HTML text of sections and of what was left out; escapes all text, and runs no script."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title, sections=sections, left_out=left_out
    )
