"""Command lines: a bench declares its options, and one function builds the parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Option(NamedTuple):
    """An argument of a parser: its names, and the other arguments of ``add_argument``."""

    names: tuple[str, ...]
    how: Mapping[str, Any]


def option(names: str, help: str = "", **how: Any) -> Option:
    """Declares an argument with names like "-n --ranks"; the help ends with a plain default."""
    shown = how.get("default")
    told = f" (default {shown})" if isinstance(shown, int | float | str) else ""
    return Option(tuple(names.split()), {**how, "help": f"{help}{told}".strip()})


def parse_size(text: str) -> int:
    """Bytes of "4096", "4K", "4KiB", "1M", "1G" (powers of 1024, as nccl-tests reads them)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 4K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def new_file(text: str) -> Path:
    """Refuses a file that could not be written, before the time of a measurement is spent."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist")
    return Path(text)


BUSY = option("--busy", "processes that keep a core busy meanwhile", type=count, default=0)
PIN = option("--pin", "pin each rank, and its threads, to a core", action="store_true")
JSON = option("--json", "write rows and provenance as JSON", type=new_file, metavar="PATH")
CSV = option("--csv", "write rows and provenance as CSV", type=new_file, metavar="PATH")
PROFILE = option(
    "--profile", "write Chrome traces of stages 2 and 3", type=new_file, metavar="PATH"
)


def ranks(usual: int) -> Option:
    told = f"default {usual}, or those that a launcher has started"
    return option("-n --ranks", told, type=positive, metavar="W")


def rounds(usual: int) -> Option:
    text = "in each round every system has a turn"
    return option("-r --rounds", text, type=positive, default=usual, metavar="N")


def build_parser(prog: str, about: str, options: Iterable[Option]) -> argparse.ArgumentParser:
    """Builds the parser of a bench; a short name belongs to the first option that has it."""
    parser = argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    taken: set[str] = set()
    for names, how in options:
        own = [name for name in names if name not in taken]
        taken |= {name for name in own if name.startswith("-")}
        parser.add_argument(*own, **how)
    return parser


def without_files(words: Iterable[str]) -> list[str]:
    """The words of a command line without the files of results, which change no figure."""
    files = {name for each in (JSON, CSV, PROFILE) for name in each.names}
    kept, rest = [], iter(words)
    for word in rest:
        if word in files:
            next(rest, None)
        elif word.partition("=")[0] not in files:
            kept.append(word)
    return kept
