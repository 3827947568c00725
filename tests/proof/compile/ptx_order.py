# SPDX-License-Identifier: Apache-2.0
"""Checks compiled kernels for the barriers that one lane's releases and acquires need.

One lane of a block polls or stores a word on behalf of the other lanes. Barriers make this valid:
one between its acquire and any later access of any lane to global memory, and one between such
accesses and its release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LABEL = re.compile(r"^([$\w]+):")
_INSTRUCTION = re.compile(r"^(?:@(!?%\w+)\s+)?([a-z][\w.:]*)(.*)$")
_BRANCH = re.compile(r"(\$[\w$]+)\s*;")
_ACCESS = re.compile(r"(?:ld|st|red|atom)\.global\b|cp\.async\.(?!wait|commit|mbarrier)")
_ORDERED = re.compile(r"(?:ld|st|red|atom)\.[\w.:]*\b(relaxed|acquire|release|acq_rel)\b")
# The facts that may hold before an instruction.
_ACQUIRED = "a lane has acquired, and no barrier followed"
_ACCESSED = "lanes have loaded or stored, and no barrier followed"
_COPYING = "asynchronous copies are under way"

State = frozenset[str]


@dataclass(frozen=True)
class _Line:
    """An instruction with its predicate, and the instructions that may follow it."""

    text: str
    predicate: str | None
    opcode: str
    next: tuple[int, ...]


def _lines(function: str) -> list[_Line]:
    labels: dict[str, int] = {}
    found: list[tuple[str, str | None, str]] = []
    for line in function.splitlines():
        code = line.partition("//")[0].strip()
        if label := _LABEL.match(code):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.match(code):
            found.append((code, match[1], match[2]))
    lines = []
    for index, (code, predicate, opcode) in enumerate(found):
        after = [] if opcode.startswith(("ret", "trap")) and not predicate else [index + 1]
        # Other labels than the compiler's are those of loops in inline assembly, which polls
        # barriers in shared memory.
        if opcode.startswith("bra") and (target := _BRANCH.search(code)):
            after = [labels[target[1]], *([index + 1] if predicate else [])]
        elif opcode.startswith("brx"):
            raise AssertionError(f"a branch by a table, which this does not follow: {code}")
        lines.append(_Line(code, predicate, opcode, tuple(i for i in after if i < len(found))))
    return lines


def _step(line: _Line, state: State) -> tuple[State, str | None]:
    """Returns the state behind an instruction, and the instruction's fault, if any."""
    opcode, wrong = line.opcode, None
    order = _ORDERED.match(opcode)
    if opcode.startswith(("bar.sync", "barrier.sync")):
        return state - {_ACQUIRED, _ACCESSED}, None
    if re.match(r"cp\.async\.wait_(?:all|group\s+0\b)", line.text):
        return state - {_COPYING}, None
    if opcode.startswith("call"):
        return state | {_ACCESSED}, _ACQUIRED if _ACQUIRED in state else None
    if opcode.startswith("ret"):
        return state, _ACQUIRED if _ACQUIRED in state else None
    if order:
        if line.predicate is None:
            wrong = "every lane does it, not one for all"
        if order[1] in ("release", "acq_rel"):
            wrong = next((each for each in (_ACCESSED, _COPYING) if each in state), wrong)
        if order[1] in ("acquire", "acq_rel"):
            state = state | {_ACQUIRED}
        return state, wrong
    if _ACCESS.match(opcode):
        wrong = _ACQUIRED if _ACQUIRED in state else None
        state = state | {_ACCESSED}
        if opcode.startswith("cp.async"):
            state = state | {_COPYING}
    return state, wrong


def misplaced(functions: Mapping[str, str]) -> list[str]:
    """Returns the instructions that lack a barrier on some path to them, and the reasons.

    Args:
        functions: PTX texts of a kernel and of all functions that it calls, by name.
    """
    wrong: dict[tuple[str, int], str] = {}
    for name, text in functions.items():
        lines = _lines(text)
        # A caller may have done anything before, but put a barrier behind its acquires.
        states: dict[int, State] = {0: frozenset({_ACCESSED})}
        waiting = [0] if lines else []
        while waiting:
            index = waiting.pop()
            state, fault = _step(lines[index], states[index])
            if fault is not None:
                wrong[name, index] = f"{name}: {lines[index].text}: {fault}"
            for after in lines[index].next:
                merged = states.get(after, frozenset()) | state
                if after not in states or merged != states[after]:
                    states[after] = merged
                    waiting.append(after)
    return [wrong[key] for key in sorted(wrong)]
