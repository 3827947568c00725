# SPDX-License-Identifier: Apache-2.0
"""Command lines: a benchmark declares its options, and one function builds the parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ringcomm import ArgumentError, CommOptions
from ringcomm.cli.output import why_no_file
from ringcomm.cli.usage import CommandParser

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Option(NamedTuple):
    """An argument of a parser: its names, and the other arguments of ``add_argument``."""

    names: tuple[str, ...]
    how: Mapping[str, Any]


def option(names: str, help: str = "", **how: Any) -> Option:
    """Declares an argument with names like "-n --ranks"; appends the default to the help."""
    shown = how.get("default")
    told = f" (default {shown})" if isinstance(shown, int | float | str) else ""
    return Option(tuple(names.split()), {**how, "help": f"{help}{told}".strip()})


def choice(names: str, help: str, *choices: str) -> Option:
    """Declares an option with fixed choices; the first choice is the default."""
    return option(names, help, choices=choices, default=choices[0])


def subject(*choices: str) -> Option:
    """Declares the word that says what is measured; usage and errors show the choices."""
    return option("what", choices=choices, metavar="|".join(choices))


def numbers(**usual: int) -> list[Option]:
    """Declares options for positive numbers, from their names and defaults."""
    return [option(f"--{name}", type=positive, default=each) for name, each in usual.items()]


def tuples(name: str, metavar: str, usual: Sequence[tuple[int, ...]]) -> Option:
    """Declares an option for tuples of numbers, with ``metavar`` such as "N,K"."""

    count_of, example = len(metavar.split(",")), usual[0] if usual else (1, 64)

    def read(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if len(words) != count_of or not all(each.isdecimal() and int(each) for each in words):
            told = f"{text!r} is not {metavar}, positive whole numbers"
            raise argparse.ArgumentTypeError(f"{told} such as {','.join(map(str, example))}")
        return tuple(map(int, words))

    return option(name, nargs="*", type=read, metavar=metavar, default=usual)


def parse_size(text: str) -> int:
    """Converts "4096", "4K", "4KiB", "1M", "1G" to bytes (powers of 1024, as in nccl-tests)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 4K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def count(text: str, least: int = 0) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'positive ' * least}whole number")
    return int(text)


positive = partial(count, least=1)


def thread_count(text: str) -> int:
    """Converts a number of threads; refuses, before ranks start, a number that is too large."""
    found = positive(text)
    try:
        CommOptions(threads=found)
    except ArgumentError as error:
        # For a communicator 0 means a default; benchmarks have no such value.
        why = str(error).replace("expected 0 to", "expected 1 to")
        raise argparse.ArgumentTypeError(why) from error
    return found


def new_file(text: str) -> Path:
    """Converts a path; refuses before any measurement a file that cannot be written."""
    why = why_no_file(text)
    if why is not None:
        raise argparse.ArgumentTypeError(f"{text}: {why}")
    return Path(text)


THREADS = option(
    "--threads",
    "threads per rank, in every system that uses torch's or ringcomm's threads",
    type=thread_count,
    default=1,
    metavar="T",
)
BUSY = option("--busy", "processes that each keep a core busy", type=count, default=0)
PIN = option("--pin", "pin each rank to as many cores as it has threads", action="store_true")
JSON = option(
    "--json",
    "write rows and provenance as JSON, which `ringcomm report PATH` shows with plots",
    type=new_file,
    metavar="PATH",
)
CSV = option("--csv", "write rows and provenance as CSV", type=new_file, metavar="PATH")


def ranks(usual: int) -> Option:
    told = f"ranks; default {usual}, or the ranks of the launcher"
    return option("-n --ranks", told, type=positive, metavar="W")


def rounds(usual: int, *more: str) -> Option:
    """Declares the number of rounds, also under the names ``more``."""
    text = "rounds; each round times every system once"
    names = " ".join(("-r --rounds", *more))
    return option(names, text, type=positive, default=usual, metavar="N")


def build_parser(prog: str, about: str, options: Iterable[Option]) -> argparse.ArgumentParser:
    """Builds the parser of a benchmark."""
    parser = CommandParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for names, how in options:
        parser.add_argument(*names, **how)
    return parser


def without_files(words: Iterable[str]) -> list[str]:
    """Returns the words of a command line without result files, which do not change figures."""
    files = {name for each in (JSON, CSV) for name in each.names}
    kept, rest = [], iter(words)
    for word in rest:
        if word in files:
            next(rest, None)
        elif word.partition("=")[0] not in files:
            kept.append(word)
    return kept
