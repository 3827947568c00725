"""``ringcomm report``: one HTML page of a run, which opens from a disk and fetches nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ringcomm.cli.report import traces
from ringcomm.cli.report.page import find_library, page
from ringcomm.cli.report.sources import find
from ringcomm.comm.recorder.live import ended_ranks, live_recordings
from ringcomm.comm.recorder.trace_file import newest
from ringcomm.errors import ArgumentError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``ringcomm report``."""
    parser.description = (
        "Writes one HTML page of a run: the time line of all ranks, what waited for whom, "
        "bandwidths, step times, memory and findings. It opens from a disk and fetches nothing. "
        "docs/report.md shows how to read it."
    )
    parser.add_argument(
        "run",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="traces of faults, Chrome traces, what bench, demo, train and doctor write with "
        "--json, and folders of such files; none: the newest trace",
    )
    parser.add_argument(
        "--pid",
        nargs="+",
        type=int,
        default=[],
        metavar="PID",
        help="also look into running, hung or stopped processes; one rank is enough",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default: %(default)s)",
    )
    parser.add_argument("--title", help="of the page (default: of what it shows)")
    parser.add_argument(
        "--plotly",
        type=Path,
        metavar="FILE",
        help="plotly.js to put into the page, such as the small plotly-basic.min.js (default: that "
        "of the package plotly)",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page; 0 also when it shows a fault.

    Raises:
        UnsupportedError: plotly is not installed.
        ArgumentError: a file is of no kind that is known, or the page cannot be written.
        RingcommError: a trace is damaged, or a process has no recorder to read.
    """
    library = find_library(args.plotly)
    sections = []
    for recording in live_recordings(args.pid) if args.pid else []:
        ended = ended_ranks(recording, args.pid[0])
        sections.append(traces.of_processes(recording, ended, args.pid))
    found = find(args.run or ([] if args.pid else [newest()]))
    sections += found.sections
    title = args.title or f"ringcomm report: {sections[0].title}"
    if args.title is None and len(sections) > 1:
        title += f" and {len(sections) - 1} more"
    text = page(title, sections, found.left_out, library)
    try:
        written = args.output.write_bytes(text.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--output {args.output}: cannot be written: {error}") from error
    for each in found.left_out:
        print(f"left out: {each}", file=sys.stderr)
    print(f"wrote {args.output} ({written / 1e6:.1f} MB): open it in a browser", file=sys.stderr)
    return 0
