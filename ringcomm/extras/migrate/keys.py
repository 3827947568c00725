"""Settings of other libraries by name, and what becomes of each; ``keys.ini`` is the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from configparser import RawConfigParser
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ringcomm.errors import UnsupportedError
from ringcomm.json_reader import shown

_LONGEST_NAME = 64

MAPPED = "mapped"
NO_EFFECT = "no effect here"
UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Key:
    """A setting of another library; ``docs/migrating.md`` has a row for it.

    Attributes:
        name: the name, with those of the sections around it: "zero_optimization.stage".
        fate: ``MAPPED``, ``NO_EFFECT`` or ``UNSUPPORTED``.
        text: the setting of ringcomm that it becomes; or the reason, and the remedy.
    """

    name: str
    fate: str
    text: str

    def note(self, value: Any) -> str:
        """Returns what became of the key with a value."""
        if self.fate == UNSUPPORTED:
            return f"{self.fate}, and {shown(value)} does not ask for it"
        return f"{self.fate}: {self.text}"


@cache
def _table() -> RawConfigParser:
    table = RawConfigParser(delimiters=("=",))
    table.optionxform = str  # type: ignore[assignment,method-assign]
    table.read_string(Path(__file__).with_name("keys.ini").read_text("utf-8"))
    return table


def section_of(name: str) -> Mapping[str, str]:
    """Returns a section of the table."""
    return dict(_table()[name])


def keys_of(library: str) -> dict[str, Key]:
    """Returns the settings of a library by name, in the order of the page."""
    parts = {name: each.partition(": ") for name, each in section_of(library).items()}
    return {name: Key(name, fate, text) for name, (fate, _, text) in parts.items()}


def refuse_unsupported(operation: str, asked: Iterable[tuple[str, str]]) -> None:
    """Raises UnsupportedError that names each key asked for with its reason, if there is any."""
    reasons = [f"{name}: {text}" for name, text in asked]
    if reasons:
        raise UnsupportedError(
            f"{operation}: {len(reasons)} of the keys ask for what ringcomm does not have:\n  "
            + "\n  ".join(reasons)
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known names nearest to another name, for a message."""
    by_end: dict[str, list[str]] = {}
    for each in known:
        by_end.setdefault(each.rpartition(".")[2], []).append(each)
    # The comparison takes time that grows with the square of the length.
    ends = get_close_matches(name.rpartition(".")[2][:_LONGEST_NAME], by_end, n=3, cutoff=0.6)
    found = [each for end in ends for each in by_end[end]][:3]
    if not found:
        return "none is near it"
    return f"the nearest known ones are {', '.join(map(repr, found))}"
