# SPDX-License-Identifier: Apache-2.0
"""The prose of the sources: comments, docstrings, error messages and paragraphs of Markdown."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Files whose prose is read. Generated stubs have no comments of their own.
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".md", ".pml"}

_NO_PARAGRAPH = ("```", "|", "#", "    ", "<", ":::", "!!!")
_CPP_COMMENT = re.compile(r"(?:^|\s)//+\s?(.*)")
_SENTENCE_END = re.compile(r"(?<=[.;:!?]) ")


@dataclass(frozen=True)
class Passage:
    """A comment block, docstring, message or paragraph, joined to one line of text."""

    line: int
    text: str

    def sentence_at(self, offset: int) -> str:
        """Returns the sentence or clause that contains a character."""
        begin = 0
        for sentence in _SENTENCE_END.split(self.text):
            end = begin + len(sentence) + 1
            if offset < end:
                return sentence
            begin = end
        return self.text[begin:]


def passages(path: Path) -> Iterator[Passage]:
    """Yields the prose of a file, in any order."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from _paragraphs(text)
    elif path.suffix == ".py":
        yield from _docstrings_and_messages(ast.parse(text))
        yield from _joined(_python_comments(text))
    else:
        rows = enumerate(text.split("\n"), 1)
        found = ((line, _CPP_COMMENT.search(row)) for line, row in rows)
        yield from _joined((line, match[1]) for line, match in found if match)


def _paragraphs(text: str) -> Iterator[Passage]:
    line = 1
    in_code = False
    for block in text.split("\n\n"):
        fences = block.count("```")
        if not in_code and fences == 0 and not block.lstrip("\n").startswith(_NO_PARAGRAPH):
            yield Passage(line, " ".join(block.split()))
        in_code ^= fences % 2 == 1
        line += block.count("\n") + 2


def _docstrings_and_messages(tree: ast.Module) -> Iterator[Passage]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                yield Passage(node.body[0].lineno, " ".join(doc.split()))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            parts = [each.value for each in ast.walk(node.exc) if isinstance(each, ast.Constant)]
            words = " ".join(part for part in parts if isinstance(part, str))
            yield Passage(node.lineno, " ".join(words.split()))


def _python_comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def _joined(comments: Iterator[tuple[int, str]]) -> Iterator[Passage]:
    """Joins the comments of adjacent lines."""
    first = last = -1
    words: list[str] = []
    for line, text in comments:
        if line != last + 1 and words:
            yield Passage(first, " ".join(words))
            words = []
        if not words:
            first = line
        words.append(text)
        last = line
    if words:
        yield Passage(first, " ".join(words))
