# SPDX-License-Identifier: Apache-2.0
"""The ``ringcomm`` command: one module of this package per subcommand, ``usage`` and
``output``.

A subcommand is a module ``ringcomm.cli.<name>`` with ``add_arguments(parser)`` and
``run(args) -> int``. Only the requested subcommand is imported, so that ``ringcomm --help``
does not wait for torch. Start with ``main()`` below.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from ringcomm.cli.usage import CommandParser
from ringcomm.launch import end_at_ctrl_c, hide_missing_numpy
from ringcomm.process import new_unknown

__all__ = ["main"]


class Subcommand(Protocol):
    """The functions that each module of this package provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True)
class Entry:
    """An entry of the command table; ``forwards``: the command parses its own options."""

    summary: str
    forwards: bool = False


COMMANDS = {
    "bench": Entry("time collectives against Gloo and MPI", forwards=True),
    "build-backend": Entry("compile the C++ backend, for groups that also use other backends"),
    "convert": Entry("convert checkpoints of DeepSpeed or torch for zero.load()"),
    "demo": Entry(
        "check and time every collective, then train a small model on ringcomm and on Gloo"
    ),
    "doctor": Entry("check whether collectives can work on this machine"),
    "estimate": Entry("estimate memory, traffic and time of a sharded training step"),
    "metrics": Entry("print or serve calls, bytes, waits and faults for Prometheus"),
    "report": Entry("write a run as one HTML page: waits, bandwidths, step times, memory"),
    "trace": Entry("show each rank's last calls, from a fault's trace or running processes"),
    "topo": Entry("show the links between GPUs, and the algorithm and rings that they select"),
    "train": Entry("train a small byte-level GPT data-parallel"),
}

# The package's dependencies, which are missing if a wheel was installed without them.
REQUIRED = ("torch", "safetensors", "jinja2")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status; ``argv`` defaults to ``sys.argv[1:]``."""
    hide_missing_numpy()
    for told in new_unknown():
        print(f"ringcomm: warning: {told.removeprefix('ringcomm has ')}", file=sys.stderr)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, module = _build_parser(arguments)
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        missing = f"{error.name}, which is not installed here: pip install {error.name}"
        print(f"ringcomm {' '.join(arguments)} needs {missing}", file=sys.stderr)
        return 1
    namespace = parser.parse_args(arguments)
    if module is None:
        parser.print_help()
        return 2
    from ringcomm.errors import ArgumentError, RingcommError

    try:
        status = module.run(namespace)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return 128 + signal.SIGPIPE
    except RingcommError as error:
        # A library function may begin its message with its own name, such as "convert".
        told = str(error).removeprefix(f"{namespace.command}: ")
        if isinstance(error, ArgumentError):
            parser.chosen(namespace).report(told)
            return 2
        # In one write, since the ranks of a launcher share stderr.
        sys.stderr.write(f"ringcomm {namespace.command}: {told}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _reader_has_left() -> bool:
    """True if nobody reads stdout any more, as in ``ringcomm estimate | head``.

    If so, discards the rest of the buffer: else the interpreter reports an error at exit.
    """
    stdout = sys.stdout.fileno()
    state = select.poll()
    state.register(stdout, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in state.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout)
    os.close(nowhere)
    return True


def _build_parser(arguments: Sequence[str]) -> tuple[CommandParser, Subcommand | None]:
    parser = CommandParser(
        prog="ringcomm",
        description="Collectives over peer-mapped memory, and tools built on them.",
    )
    parser.add_argument("--version", action="version", version=f"ringcomm {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    module: Subcommand | None = None
    for name, entry in COMMANDS.items():
        if entry.forwards:
            # Without prefix characters "-b 4K" parses as words, which are forwarded unchanged.
            subparser = subparsers.add_parser(
                name, help=entry.summary, add_help=False, prefix_chars="\0"
            )
        else:
            subparser = subparsers.add_parser(name, help=entry.summary, description=entry.summary)
        if name == chosen:
            with end_at_ctrl_c():
                found = importlib.import_module(f"ringcomm.cli.{module_of(name)}")
            module = cast(Subcommand, found)
            module.add_arguments(subparser)
    return parser, module


def module_of(command: str) -> str:
    """Returns the name of a command's module in this package."""
    return command.replace("-", "_")


def table_lines(
    rows: Iterable[Sequence[str]],
    *,
    right: bool | Sequence[bool] = False,
    widths: Sequence[int] = (),
) -> list[str]:
    """Returns the lines of a table: columns as wide as their longest cell, two blanks between.

    Args:
        rows: rows with equally many cells.
        right: whether cells are right-aligned; for all columns, or for each.
        widths: the least width of each column, for a table whose rows are printed one by one.
    """
    cells = list(rows)
    if not cells:
        return []
    columns = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if widths:
        columns = list(map(max, columns, widths))
    sides = [right] * len(columns) if isinstance(right, bool) else right
    formats = [f"{'>' if side else '<'}{width}" for side, width in zip(sides, columns, strict=True)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in cells]


def _version() -> str:
    try:
        return importlib.metadata.version("ringcomm")
    except importlib.metadata.PackageNotFoundError:
        return "(source tree, not installed)"
