"""``ringcomm trace``: what the ranks of a communicator did last, and where they part."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ringcomm.cli.trace_chrome import chrome_text
from ringcomm.cli.trace_live import ended_ranks, live_recordings
from ringcomm.cli.trace_report import report
from ringcomm.comm.recording import Recording
from ringcomm.comm.trace_file import newest, read
from ringcomm.errors import ArgumentError

__all__ = ["add_arguments", "run"]

SHOWN_CALLS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="*", type=Path, help="traces that a fault left; none: the newest one"
    )
    parser.add_argument(
        "--pid",
        nargs="+",
        type=int,
        default=[],
        metavar="PID",
        help="look into running, hung or stopped processes instead; one rank is enough",
    )
    parser.add_argument(
        "--last",
        type=int,
        default=SHOWN_CALLS,
        metavar="N",
        help=f"calls to show of each rank, default {SHOWN_CALLS}; 0: all",
    )
    parser.add_argument(
        "--chrome",
        type=Path,
        metavar="OUT.json",
        help="write all calls as a Chrome trace, for Perfetto or chrome://tracing",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the recordings; 0 also when they show a fault.

    Raises:
        ArgumentError: options that do not go together, or an output that cannot be written.
        RingcommError: a file is no trace, or a process has no recorder to read.
    """
    if args.file and args.pid:
        raise ArgumentError("expected FILEs or --pid, got both")
    if args.last < 0:
        raise ArgumentError(f"--last: expected a number >= 0, got {args.last}")
    recordings: list[Recording] = []
    parts: list[str] = []
    if args.pid:
        recordings = live_recordings(args.pid)
        parts = [
            "\n".join(report(each, args.last, ended_ranks(each, args.pid[0])))
            for each in recordings
        ]
    else:
        for path in args.file or [newest()]:
            trace = read(path)
            recordings.append(trace.recording)
            told = [f"{path}, written by rank {trace.written_by}", trace.error, ""]
            parts.append("\n".join([*told, *report(trace.recording, args.last)]))
    print("\n\n".join(parts))
    if args.chrome is not None:
        try:
            args.chrome.write_text(chrome_text(recordings), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--chrome: cannot write {args.chrome}: {error}") from error
        print(f"\nwrote {args.chrome}", file=sys.stderr)
    return 0
