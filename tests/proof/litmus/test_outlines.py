# SPDX-License-Identifier: Apache-2.0
"""The litmus tests model the current code.

outlines.txt lists each function's operations on memory that other threads see (source_outline.py),
and must agree with the sources. If this test fails, review the function's litmus tests
(litmus_cases.py) and its model (tests/proof/model), and then write its new outline into
outlines.txt. The outlines of the functions must contain the programs of their litmus tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.proof.litmus.litmus_cases import CASES, Litmus, Program
from tests.proof.litmus.litmus_ops import Op
from tests.proof.litmus.outline_changes import CHANGES, SIGNAL, Change
from tests.proof.litmus.source_outline import code_of, outline, outline_of_triton
from tests.support import ROOT

KERNELS = ROOT / "kernels"
FunctionName = tuple[str, str]  # file below kernels/, and function


def read_outlines() -> dict[FunctionName, list[str]]:
    sections = (Path(__file__).parent / "outlines.txt").read_text().removeprefix("== ")
    found = {}
    for section in sections.split("\n== "):
        title, *lines = section.rstrip("\n").split("\n")
        file, _, function = title.partition(": ")
        found[file, function] = lines
    return found


OUTLINES = read_outlines()


def outline_in(file: str, source: str, function: str) -> list[str]:
    return (outline_of_triton if file.endswith(".py") else outline)(source, function)


@pytest.mark.parametrize("named", OUTLINES, ids=": ".join)
def test_a_function_does_what_its_outline_says(named):
    file, function = named
    assert outline_in(file, (KERNELS / file).read_text(), function) == OUTLINES[named]


def changed_outline(change: Change) -> list[str]:
    source = (KERNELS / change.file).read_text()
    assert source.count(change.text) == 1, f"{change.file}: {change.text!r}, to be changed"
    changed = source.replace(change.text, change.replacement)
    return outline_in(change.file, changed, change.function)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_operation_is_noticed(name):
    change = CHANGES[name]
    assert changed_outline(change) != OUTLINES[change.file, change.function]


def test_a_changed_comment_is_not():
    named = SIGNAL, "wake"
    source = (KERNELS / SIGNAL).read_text().replace("// Store the epoch, then", "// Store; }\n  //")
    assert outline_in(*named[:1], source, named[1]) == OUTLINES[named]


# ---- the programs of the litmus tests ----------------------------------------------------------

OPERATION = re.compile(r"\b(\w+_sys)(?=\()|\b(FUTEX_WA(?:IT|KE))\b|\b([\w:.]+)(?=\()")
# The outline that a call leads to, for calls by another name than the outline's.
LEADS_TO = {
    "team.wake": "Waiter::wake",
    "progress": "Messenger::progress_receives",
    "fence_as_sleeper": "Waiter::fence_as_sleeper",
    ".fence_as_sleeper": "Waiter::fence_as_sleeper",
    "team.fence_as_writer": "Waiter::fence_as_writer",
}
# These calls lead to the end of an unsuccessful wait, which is not part of a program.
ASIDE = {"await_slowly", "give_up", "fail"}
WORDS_BY_NAME = {"ready", "consumed", "aborted", "claimed", "detached", "sleeping"}
# Locations that a user, a kernel's end or the data themselves access.
NOT_OURS = {"buffer", "slot", "data", "record", "region"}
Step = tuple[str, str]  # operation, and its word if the text names one
Outlines = Mapping[FunctionName, Sequence[str]]


def word_of(argument: str, lines: Sequence[str]) -> str:
    """Returns the member to which a pointer points, or the empty text."""
    if re.fullmatch(r"\w+", argument):
        given = [line for line in lines if re.search(rf"\* ?(?:const )?{argument} = ", line)]
        argument = given[0] if given else argument
    name = re.findall(r"\w+", argument)[-1]
    return name if name in WORDS_BY_NAME else ""


def steps_of(function: str, outlines: Outlines) -> Iterator[Step]:
    """Yields every operation of a C++ function, with those of called functions in their places."""
    by_name = {name: lines for (file, name), lines in outlines.items() if file[:2] != "tl"}
    members = {name.partition("::")[2]: name for name in by_name if "Messenger::" in name}
    lines = by_name[function]
    for line in lines:
        for found in OPERATION.finditer(line):
            name = found[1] or found[2] or found[3]
            last = re.split(r"[.:]+", name)[-1]
            callee = LEADS_TO.get(name, members.get(last, last))
            if found[1]:
                argument = re.match(r"\(([^,()]*(?:\([^()]*\)[^,()]*)*)", line[found.end() :])
                yield name, word_of(argument[1], lines) if argument and argument[1] else ""
            elif found[2] or last in ("sync", "share"):
                yield name if found[2] else "sync", ""
            elif callee in by_name and callee not in ASIDE | {function}:
                yield from steps_of(callee, outlines)


def steps_like(op: Op) -> tuple[set[str], str]:
    """Returns the names of a program's operation in the sources, and its word."""
    word = op.location.split(" ")[0]
    if op.location.endswith("team's sync"):
        return {"sync"}, ""
    kind = {"wait": "load", "sleep": "FUTEX_WAIT", "wake": "FUTEX_WAKE"}.get(op.kind, op.kind)
    if kind.startswith("FUTEX"):
        return {kind}, ""
    names = {f"{kind}_{op.order}_sys"}
    if op.order == "relaxed":  # what holds without an order also holds with one
        names |= {f"{kind}_ll_packet_sys", f"{kind}_acquire_sys", f"{kind}_release_sys"}
    return names, word if word in WORDS_BY_NAME else ""


def stands_for(program: Program, functions: Sequence[str], outlines: Outlines) -> bool:
    """Tells whether functions make the program's operations in order; others may lie between."""
    steps = iter([step for name in functions for step in steps_of(name, outlines)])
    for op in program:
        is_data = op.location in NOT_OURS or op.kind in ("read", "write", "only_if")
        if is_data or (op.kind, op.order) == ("fence", "acq_rel"):  # the end of a kernel
            continue
        names, word = steps_like(op)
        if not any(name in names and (not word or at in ("", word)) for name, at in steps):
            return False
    return True


def holds(case: Litmus, outlines: Outlines) -> bool:
    return all(
        stands_for(program, functions, outlines)
        for program, functions in zip(case.programs, case.code, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_the_sources_do_what_the_programs_do(name):
    assert holds(CASES[name], OUTLINES)


@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change.case])
def test_changed_sources_do_not(name):
    change = CHANGES[name]
    changed = {**OUTLINES, (change.file, change.function): changed_outline(change)}
    assert not holds(CASES[change.case], changed)


# ---- nothing is left out -----------------------------------------------------------------------

ORDERED = re.compile(r"\b(?:load_acquire|store_release|exchange_\w+|fence_\w+)_sys\(|FUTEX_WA\w+\b")


def left_out(outlines: Outlines) -> dict[str, int]:
    """Returns the number of ordered operations outside of all outlines, by file of kernels/."""
    missing = {}
    for path in [*(KERNELS / "include").rglob("*.h"), *(KERNELS / "host").glob("*.*")]:
        file = str(path.relative_to(KERNELS))
        outlined = "\n".join(
            line for (where, _), lines in outlines.items() if where == file for line in lines
        )
        count = len(ORDERED.findall(code_of(path.read_text()))) - len(ORDERED.findall(outlined))
        if count != 0 and path.name != "atomics.h":
            missing[file] = count
    return missing


def test_every_ordered_operation_stands_in_an_outline():
    assert left_out(OUTLINES) == {}
    assert left_out({**OUTLINES, (SIGNAL, "publish"): []}) == {SIGNAL: 1}
