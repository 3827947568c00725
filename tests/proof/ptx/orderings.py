"""The places in a PTX text that order memory, by the functions that they come from.

NVRTC says with ``-lineinfo`` which line of which function each instruction comes from, and where
that function was inlined, so that one place of the source is known by all its copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LINE_INFO = "-lineinfo"

_KINDS = {
    "acquire": re.compile(r"\bld\.acquire\."),
    "release": re.compile(r"\bst\.release\."),
    "exchange": re.compile(r"\batom\.acq_rel\."),
    "fence": re.compile(r"\bfence\."),
    "barrier": re.compile(r"\bbar\."),
}
_LOC = re.compile(
    r"\.loc\s+(\d+ \d+ \d+)(?:, function_name (\S+), inlined_at (\d+ \d+ \d+))?", re.ASCII
)
_INFO = re.compile(r"^(\$L__info_string\d+):\s*$")
_BYTES = re.compile(r"^\.b8 (.*)$")
_REDUCED = re.compile(r"bar\.red\.or\.pred\s+(%p\d+), 0, (%p\d+);")
# Of these the caller is what a place is known by. The empty name is that of a lambda's template.
_SPELLINGS = (
    *("load_acquire_sys", "store_release_sys", "exchange_acq_rel_sys", "fence_seq_cst_sys"),
    *("fence_acq_rel_sys", "sync", "share", "__syncthreads_or", "wait_by_lanes", "operator()", ""),
    *("each_by_lanes", "await_alone", "await", "publish", "acknowledge"),
)


@dataclass(frozen=True)
class Ordering:
    """An instruction that orders memory.

    Attributes:
        line: of the text, from 1.
        kind: acquire, release, exchange, fence or barrier.
        function: the innermost one that does more than spell the instruction.
        place: where in that function's file it stands.
        caller: the functions that this one was inlined into, the innermost first.
    """

    line: int
    kind: str
    function: str
    place: tuple[int, ...]
    callers: tuple[str, ...]


def orderings(text: str) -> dict[str, list[Ordering]]:
    """All of a text that was compiled with ``LINE_INFO``, by what they are in the source.

    A name such as ``barrier of send`` has a number where the function has several.
    """
    found: dict[tuple[str, str], list[Ordering]] = {}
    for each in _orderings(text):
        found.setdefault((each.kind, each.function), []).append(each)
    named: dict[str, list[Ordering]] = {}
    for (kind, function), copies in found.items():
        places = sorted({each.place for each in copies})
        for number, place in enumerate(places, 1):
            name = f"{kind} of {function}" + (f" ({number})" if len(places) > 1 else "")
            named[name] = [each for each in copies if each.place == place]
    return named


def _orderings(text: str) -> Iterator[Ordering]:
    names = dict(_names(text))
    # The functions around each place, and where in them it is, as they were when it was last named.
    around: dict[str, tuple[tuple[str, str], ...]] = {}
    place = kernel = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LOC.search(line):
            place = match[1]
            inlined = ((names[match[2]], place), *around.get(match[3], ())) if match[2] else ()
            around[place] = inlined or ((kernel, place),)
        elif match := re.search(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\(", line):
            kernel = _last_name(match[1])
        else:
            for kind, spelling in _KINDS.items():
                if spelling.search(line):
                    chain = [each for each in around[place] if each[0] not in _SPELLINGS]
                    (function, inside), *outer = chain
                    numbers = tuple(int(each) for each in inside.split())
                    yield Ordering(number, kind, function, numbers, tuple(n for n, _ in outer))


def _names(text: str) -> Iterator[tuple[str, str]]:
    """The functions' names by the labels of their strings, which are bytes behind them."""
    label, characters = "", ""
    for line in text.splitlines():
        if match := _INFO.match(line):
            label, characters = match[1], ""
        elif label and (match := _BYTES.match(line)):
            characters += "".join(chr(int(each)) for each in match[1].split(","))
            if characters.endswith("\0"):
                yield label, _last_name(characters[:-1])
                label = ""


def _last_name(mangled: str) -> str:
    """The function's own name, of a mangled one: ``_ZN8ringcomm7generic4failE...`` is ``fail``."""
    if not mangled.startswith("_Z"):
        return mangled
    if "clE" in mangled:
        return "operator()"
    rest, last = mangled[2:].lstrip("NK"), ""
    while match := re.match(r"(\d+)", rest):
        size = int(match[1])
        last = rest[len(match[1]) :][:size]
        rest = rest[len(match[1]) + size :]
        if rest.startswith("I"):  # arguments of a template come before the name that it holds
            rest = _behind_arguments(rest)
    return last


def _behind_arguments(rest: str) -> str:
    depth, at = 0, 0
    while at < len(rest):
        if match := re.match(r"\d+", rest[at:]):
            at += len(match[0]) + int(match[0]) if rest[at - 1 : at] != "L" else len(match[0])
            continue
        depth += {"I": 1, "N": 1, "L": 1, "E": -1}.get(rest[at], 0)
        at += 1
        if depth == 0:
            break
    return rest[at:]


def without(text: str, lines: Iterable[int]) -> str:
    """The text, in which the lines do the same without ordering anything."""
    all_lines = text.splitlines()
    for line in lines:
        before = all_lines[line - 1]
        if match := _REDUCED.search(before):
            all_lines[line - 1] = f"mov.pred {match[1]}, {match[2]};"
        elif re.search(r"\b(?:bar|fence)\.", before):
            all_lines[line - 1] = ""
        else:
            all_lines[line - 1] = re.sub(r"\.(?:acquire|release|acq_rel)\.", ".relaxed.", before)
        assert all_lines[line - 1] != before, before
    return "\n".join(all_lines)
