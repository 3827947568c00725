# SPDX-License-Identifier: Apache-2.0
"""The outline of a function: what it does to memory that others see.

An outline is the function's text without comments, in order, as far as it touches such memory,
calls what does, or decides whether it gets there: calls of the names in WATCHED, the pointers that
they are given, conditions, loops and jumps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Beside all that ends in _sys: what orders memory or wakes, and what stores before or after it.
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
    """Behind the bracket that closes the one at ``at``."""
    depth = 0
    for position in range(at, len(text)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise AssertionError("a bracket that nothing closes")


def code_of(source: str) -> str:
    """Without comments, strings and preprocessor directives."""
    return _NO_CODE.sub("", source)


def body_of(source: str, function: str) -> str:
    """Code between the braces of the one definition of ``function``.

    Raises:
        AssertionError: there is none, or there are several.
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
    """Depth of the block, and a statement on one line; a head without a block goes before it."""
    body, at, begin, depth = re.sub(r"\s+", " ", body), 0, 0, 0
    heads_only = True  # so far in this statement
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
    """Returns that of a function in Python: non-atomic accesses count, addresses are kept."""
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
