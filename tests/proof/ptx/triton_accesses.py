# SPDX-License-Identifier: Apache-2.0
"""Lists the accesses in a Triton kernel's PTX that order memory, by the functions of the source.

Triton says which line of kernels/tl each instruction comes from, and where that function was
inlined. Barriers with nothing but arithmetic between them count as one: those of
``tl.debug_barrier`` and those that Triton itself puts around an atomic operation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import ROOT

_KINDS = {
    "acquire": re.compile(r"\bld\.[\w.]*\.acquire\."),
    "release": re.compile(r"\batom\.[\w.]*\.release\."),
    "exchange": re.compile(r"\batom\.[\w.]*\.acq_rel\."),
    "barrier": re.compile(r"\bbar\.sync\b"),
}
_MEMORY = re.compile(r"\b(?:ld|st|atom|red)\.(?!param|weak\.param)|\b(?:bra|call|ret)\b|^\$\S+:")
_LOC = re.compile(r"\.loc\s+(\d+ \d+ \d+)(?:, function_name \S+, inlined_at (\d+ \d+ \d+))?")
_FILE = re.compile(r'\.file\s+(\d+) "([^"]*)"')
# An access in one of these functions is named by the function's caller.
_SPELLINGS = (
    *("load_acquire_sys", "exchange_release_sys", "load_acquire_gpu", "is_aborted", "get"),
    *("of_peer", "publish_release_sys", "signal_release_sys", "wait_acquire_sys", "release_sys"),
)


def accesses(text: str) -> dict[str, list[int]]:
    """Returns the lines of each access of a text; copies of a source access belong together."""
    found: dict[str, list[int]] = {}
    barriers: list[int] = []
    ordered = told = ""  # the last access that orders memory; and where the barriers are said to be
    for number, kind, chain in _ordered(text):
        if kind == "barrier":
            barriers.append(number)
            told = told or (f"behind the {ordered}" if ordered else f"in {chain}")
            continue
        access = f"{kind} of {chain}"
        if barriers:
            told = f"before the {access}" if kind in _KINDS else told
            found.setdefault(f"barrier {told}", []).extend(barriers)
            barriers, told = [], ""
        if kind in _KINDS:
            found.setdefault(access, []).append(number)
            ordered = access
        elif kind != "shared":  # by shared memory one lane gives the others the value it has loaded
            ordered = ""
    for access in [each for each in found if each.startswith("release of ")]:
        found[f"all barriers of the {access}"] = _barriers_of(found, access)
    return found


def _barriers_of(found: dict[str, list[int]], release: str) -> list[int]:
    """Returns the releasing function's barriers: one of them may order what another orders."""
    function = release.split()[2]
    named = re.compile(rf"barrier (?:before the release of|in|in set_of_peer in) {function}\b")
    return sorted(line for access in found if named.match(access) for line in found[access])


def _ordered(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields number, kind and name of each line that has a kind or accesses memory."""
    files = {number: Path(name).name for number, name in _FILE.findall(text)}
    around: dict[str, tuple[str, ...]] = {}
    chain: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LOC.search(line):
            inlined = around.get(match[2], ()) if match[2] else ()
            chain = around[match[1]] = (_function_at(files, match[1]), *inlined)
            continue
        kind = next((kind for kind, form in _KINDS.items() if form.search(line)), None)
        if kind or _MEMORY.search(line):
            known = [each for each in chain if each not in _SPELLINGS]
            kind = kind or ("shared" if ".shared" in line else "access")
            yield number, kind, " in ".join(known[:2])


def _function_at(files: dict[str, str], location: str) -> str:
    file, line, _ = location.split()
    return _functions(files[file]).get(int(line), files[file])


@cache
def _functions(name: str) -> dict[int, str]:
    """Returns the innermost function of each line of a file of kernels/tl or of tests/tl."""
    paths = [folder / name for folder in (ROOT / "kernels" / "tl", ROOT / "tests" / "tl")]
    path = next((each for each in paths if each.exists()), None)
    if path is None:
        return {}
    made: dict[int, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            made |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), node.name)
    return made


def without(text: str, lines: list[int]) -> str:
    """Returns the text with the given lines replaced by instructions that do not order memory."""
    all_lines = text.splitlines()
    for line in lines:
        before = all_lines[line - 1]
        if _KINDS["barrier"].search(before):
            all_lines[line - 1] = ""
        else:
            all_lines[line - 1] = re.sub(r"\.(?:acquire|release|acq_rel)\.", ".relaxed.", before)
        assert all_lines[line - 1] != before, before
    return "\n".join(all_lines)
