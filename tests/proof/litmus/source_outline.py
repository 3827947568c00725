# SPDX-License-Identifier: Apache-2.0
"""Makes a function's outline: its operations on memory that other threads see.

An outline is the function's text without comments, in order, as far as it concerns such memory:
calls of the names in WATCHED with their pointer arguments, and the conditions, loops and jumps on
the way to them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Names, besides those that end in _sys, that order memory, wake, or store before or after that.
WATCHED = re.compile(
    r"\b(?:\w+_sys|__atomic_\w+|atomic_\w+|sync|share|debug_barrier|futex|syscall|nanosleep|wake"
    r"|sleep_on_any|sleep_flag_at|word_at|publish|acknowledge|await|await_alone|await_slowly"
    r"|await_packets|look_around|clear_other_set|slot_is_free|claim_fault|await_raised|raise_fault|fill_fault|give_up"
    r"|aborted|abort_seen|is_aborted|tell_host|copy_words|copy_shared|load_words|memcpy|insert"
    r"|fence_as_writer|fence_as_sleeper|lock|unlock|progress|progress_sends|progress_receives|take_item)\("
)
_NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|^[ \t]*\#[^\n]*""", re.S | re.M
)
_HEAD = re.compile(r"\b(?:if constexpr|if|while|for) ?(?=\()|\b(?:else|do)\b")
_JUMP = re.compile(r"\b(?:return|break|continue)\b")
_POINTER = re.compile(r"[\w>]\s*\*+\s*(?:const\s+)?(\w+)\s*=[^=]")


def _closing(text: str, at: int) -> int:
    """Returns the position behind the bracket that closes the bracket at ``at``."""
    depth = 0
    for position in range(at, len(text)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise AssertionError("a bracket that nothing closes")


def code_of(source: str) -> str:
    """Returns the source without comments, strings and preprocessor directives."""
    return _NO_CODE.sub("", source)


def body_of(source: str, function: str) -> str:
    """Returns the code between the braces of the only definition of ``function``.

    Raises:
        AssertionError: there is no definition, or there are several.
    """
    source, bodies = code_of(source), []
    for found in re.finditer(rf"(?<![\w~:.>]){re.escape(function)}(?=\()", source):
        behind = _closing(source, found.end())
        opened = re.compile(r"\s*(?:const\s*)?(?::[^{;]*)?\{").match(source, behind)
        if opened:
            bodies.append(source[opened.end() : _closing(source, opened.end() - 1) - 1])
    assert len(bodies) == 1, f"{len(bodies)} definitions of {function}"
    return bodies[0]


def _statements(body: str) -> Iterator[tuple[int, str]]:
    """Yields block depth and statement, one per line; first any head without a block."""
    body, at, begin, depth = re.sub(r"\s+", " ", body), 0, 0, 0
    heads_only = True  # only loop and condition heads so far in this statement
    while at < len(body):
        head = _HEAD.match(body, at) if heads_only else None
        if head:
            at = _closing(body, head.end()) if body[head.end()] == "(" else head.end()
            continue
        opens = body[at] == "{" and body[:at].rstrip().endswith((")", "else", "do"))
        if body[at] == "{" and not opens:
            at = _closing(body, at)  # a list of values
        elif opens or body[at] in ";}":
            if statement := body[begin:at].strip().removeprefix(")").strip(", "):
                yield depth, statement
            depth += {"{": 1, "}": -1, ";": 0}[body[at]]
            at = begin = at + 1
            heads_only = True
        else:
            heads_only = heads_only and body[at] == " "
            at += 1


def outline(source: str, function: str) -> list[str]:
    """Returns the outline of a function in C++, indented by block."""
    statements = list(_statements(body_of(source, function)))
    touching = " ".join(text for _, text in statements if WATCHED.search(text))

    def is_kept(text: str) -> bool:
        pointer = _POINTER.search(text)
        return bool(
            WATCHED.search(text)
            or _HEAD.match(text)
            or _JUMP.match(text)
            or (pointer and re.search(rf"\b{pointer[1]}\b", touching))
        )

    return ["  " * depth + text for depth, text in statements if is_kept(text)]


def outline_of_triton(source: str, function: str) -> list[str]:
    """Returns the outline of a Python function, with non-atomic accesses and with addresses."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert len(found) == 1, f"{len(found)} definitions of {function}"
    lines = ast.unparse(ast.Module(found[0].body, [])).splitlines()
    touching = re.compile(rf"{WATCHED.pattern}|\btl\.(?:load|store)\(")
    decides = re.compile(r"\s*(?:if|elif|else|while|for|return|break|continue)\b")
    names = set(re.findall(r"\w+", " ".join(line for line in lines if touching.search(line))))

    def is_kept(line: str) -> bool:
        given = re.match(r"\s*(\w+) = ", line)
        return bool(touching.search(line) or decides.match(line) or (given and given[1] in names))

    return [line for line in lines if is_kept(line)]
