# SPDX-License-Identifier: Apache-2.0
"""Lists the instructions of a PTX text that order memory, by the functions of the source.

NVRTC says with ``-lineinfo`` which line of which function each instruction comes from, and where
that function was inlined, so all copies of one source line have the same name.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

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
_KERNEL = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\(")
# All relevant lines match this; most lines of a text do not.
_TELLS = re.compile(r"\.(?:loc|entry|func|acquire|release|acq_rel)\b|\b(?:fence|bar)\.")
_INFO = re.compile(r"^(\$L__info_string\d+):\s*$")
_BYTES = re.compile(r"^\.b8 (.*)$")
_REDUCED = re.compile(r"bar\.red\.or\.pred\s+(%p\d+), 0, (%p\d+);")
# An access in one of these functions is named by the function's caller; the last is a lambda.
_SPELLINGS = (
    *("load_acquire_sys", "store_release_sys", "exchange_acq_rel_sys", "fence_seq_cst_sys"),
    *("fence_acq_rel_sys", "sync", "share", "__syncthreads_or", "wait_by_lanes", "operator"),
    *("each_by_lanes", "await_alone", "await", "await_reader", "publish", "acknowledge"),
)


@dataclass(frozen=True)
class Ordering:
    """An instruction that orders memory.

    Attributes:
        line: of the text, from 1.
        kind: acquire, release, exchange, fence or barrier.
        function: the innermost one that does more than spell the instruction.
        location: where in that function's file it stands.
        caller: the functions into which this one was inlined, the innermost first.
    """

    line: int
    kind: str
    function: str
    location: tuple[int, ...]
    callers: tuple[str, ...]


def orderings(text: str) -> dict[str, list[Ordering]]:
    """Returns all of them in a text with line information, by name.

    A name such as ``barrier of send`` has a number if the function has several.
    """
    found: dict[tuple[str, str], list[Ordering]] = {}
    for each in _orderings(text):
        found.setdefault((each.kind, each.function), []).append(each)
    named: dict[str, list[Ordering]] = {}
    for (kind, function), copies in found.items():
        lines = sorted({each.location for each in copies})
        for number, location in enumerate(lines, 1):
            name = f"{kind} of {function}" + (f" ({number})" if len(lines) > 1 else "")
            named[name] = [each for each in copies if each.location == location]
    return named


def _orderings(text: str) -> Iterator[Ordering]:
    names = dict(_names(text))
    # By label, the functions around a line and the positions inside them, as last named.
    around: dict[str, tuple[tuple[str, str], ...]] = {}
    location = kernel = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not _TELLS.search(line):
            continue
        if match := _LOC.search(line):
            location = match[1]
            inlined = ((names[match[2]], location), *around.get(match[3], ())) if match[2] else ()
            around[location] = inlined or ((kernel, location),)
        elif match := _KERNEL.search(line):
            kernel = _last_name(match[1])
        else:
            for kind, spelling in _KINDS.items():
                if spelling.search(line):
                    chain = [each for each in around[location] if each[0] not in _SPELLINGS]
                    (function, inside), *outer = chain
                    numbers = tuple(int(each) for each in inside.split())
                    yield Ordering(number, kind, function, numbers, tuple(n for n, _ in outer))


def _names(text: str) -> Iterator[tuple[str, str]]:
    """Yields each label and function name; a name's string follows its label as bytes."""
    label, characters = "", ""
    for line in text.splitlines():
        if match := _INFO.match(line):
            label, characters = match[1], ""
        elif label and (match := _BYTES.match(line)):
            characters += "".join(chr(int(each)) for each in match[1].split(","))
            if characters.endswith("\0"):
                yield label, _last_name(characters[:-1])
                label = ""


def _demangler() -> Callable[[str], str]:
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 3)
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)

    def demangle(name: str) -> str:
        made = library.__cxa_demangle(name.encode(), None, None, None)
        if not made:
            return name
        text = ctypes.string_at(made).decode()
        free(made)
        return text

    return demangle


_demangle = cache(_demangler())
_BRACKETED = re.compile(r"<[^<>()]*>|\([^()]*\)")


def _last_name(mangled: str) -> str:
    """Returns the function's own name for a mangled one: ``fail`` for ``_ZN8ringcomm4failE...``."""
    name = _demangle(mangled).replace("operator()", "operator")
    while (shorter := _BRACKETED.sub("", name)) != name:
        name = shorter
    return name.removesuffix(" const").rsplit("::", 1)[-1].rsplit(" ", 1)[-1]


def without(text: str, lines: Iterable[int]) -> str:
    """Returns the text with the given lines replaced by instructions that do not order memory."""
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
