"""Keys of other configurations, what becomes of each here, and which of them a user has asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ringcomm.errors import UnsupportedError
from ringcomm.json_reader import shown

_LONGEST_NAME = 64

MAPPED = "mapped"
NO_EFFECT = "no effect here"
UNSUPPORTED = "unsupported"
# What a key has that asks for nothing.
OFF = (None, False, "none")


@dataclass(frozen=True)
class Key:
    """One key of another configuration; ``docs/migrating.md`` has a row for it.

    Attributes:
        name: with the names of the sections around it, "zero_optimization.stage".
        fate: ``MAPPED``, ``NO_EFFECT`` or ``UNSUPPORTED``.
        text: what it becomes; or the reason, and what to do instead.
        whole: it stands for a section and everything in it.
        off: values with which an unsupported key asks for nothing.
        switch: of an unsupported section, the entry that turns it on; "" where being there does.
    """

    name: str
    fate: str
    text: str
    whole: bool = False
    off: tuple[Any, ...] = OFF
    switch: str = ""

    def asks(self, value: Any) -> bool:
        """Returns whether a value asks for what an unsupported key stands for."""
        if not isinstance(value, Mapping):
            return _is_on(value, self.off)
        if not self.switch:
            return bool(value)
        if not _is_on(value.get(self.switch, True), self.off):
            return False
        return _turned_on(value, self.switch, self.off)

    def note(self, value: Any) -> str:
        """Returns what became of the key with a value."""
        if self.fate == UNSUPPORTED:
            return f"{self.fate}, and {shown(value)} does not ask for it"
        return f"{self.fate}: {self.text}"


def _is_on(value: Any, off: tuple[Any, ...]) -> bool:
    # true equals 1, and is another value.
    return not any(value == each and type(value) is type(each) for each in off)


def _turned_on(section: Mapping[str, Any], switch: str, off: tuple[Any, ...]) -> bool:
    for name, value in section.items():
        if name == switch and _is_on(value, off):
            return True
        if isinstance(value, Mapping) and _turned_on(value, switch, off):
            return True
    return False


def refuse_unsupported(operation: str, asked: Iterable[tuple[str, str]]) -> None:
    """Raises UnsupportedError, if anything was asked, that names each key with its reason."""
    reasons = [f"{name}: {text}" for name, text in asked]
    if reasons:
        raise UnsupportedError(
            f"{operation}: {len(reasons)} of the keys ask for what ringcomm does not have:\n  "
            + "\n  ".join(reasons)
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known names that are nearest to one, for a message."""
    by_end: dict[str, list[str]] = {}
    for each in known:
        by_end.setdefault(each.rpartition(".")[2], []).append(each)
    # The comparison takes time that grows with the square of the length.
    ends = get_close_matches(name.rpartition(".")[2][:_LONGEST_NAME], by_end, n=3, cutoff=0.6)
    found = [each for end in ends for each in by_end[end]][:3]
    if not found:
        return "none is near it"
    return f"the nearest known ones are {', '.join(map(repr, found))}"
