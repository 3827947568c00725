# SPDX-License-Identifier: Apache-2.0
"""Reads the documents for tests: blocks of code, commands, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
DOCUMENTS = [*GUIDES, ROOT / "CHANGELOG.md"]
# Shell words between two commands.
_OPERATORS = ("&&", "||", "|", ";", "&", ">", "2>&1")


def name_of(path: Path) -> str:
    """Returns a document's path relative to the root; tests use it as the document's name."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a document; ``line`` is the line of its opening fence."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.path)}:{self.line}"


def blocks_of(path: Path, *languages: str) -> list[Block]:
    """Returns the fenced blocks of a document, in the given languages or in all."""
    found: list[Block] = []
    lines = path.read_text().splitlines()
    begin = None
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if begin is None:
            begin, language, indent = number, line.strip("` "), len(line) - len(line.lstrip())
            continue
        text = "\n".join(each[indent:] for each in lines[begin : number - 1])
        found.append(Block(path, begin, language, text + "\n"))
        begin = None
    assert begin is None, f"{name_of(path)}:{begin}: this fence is never closed"
    return [block for block in found if not languages or block.language in languages]


@dataclass(frozen=True)
class Command:
    """A command that a document shows.

    Attributes:
        block: the block that contains the command.
        variables: the environment variables that are set in front of the command.
        words: the words of the command, without launchers in front.
        output: the output that the document shows, or "".
    """

    block: Block
    variables: Mapping[str, str]
    words: tuple[str, ...]
    output: str = ""

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.words)}"


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def _words_of(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def _split(line: str) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    words: list[str] = []
    for word in [*_words_of(line), ";"]:
        if word not in _OPERATORS:
            words.append(word)
            continue
        variables = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            variables[match[1]] = match[2]
            words.pop(0)
        if words:
            yield variables, tuple(words)
        words = []


def commands_of(path: Path) -> list[Command]:
    """Returns the commands in the shell blocks of a document.

    In a block with prompts ("$ "), the text after a command up to the next prompt is its output.
    """
    found = []
    for block in blocks_of(path, "", "sh", "console"):
        text = block.text.replace("\\\n", " ")
        prompted = re.split(r"^\$ ", text, flags=re.MULTILINE)
        if len(prompted) == 1:
            parts = [(line, "") for line in text.splitlines() if line and not line[0].isspace()]
        else:
            parts = [(part.partition("\n")[0], part.partition("\n")[2]) for part in prompted[1:]]
        for line, output in parts:
            if block.language == "" and line.split()[0].partition("=")[0] not in STARTS:
                continue
            for variables, words in _split(line):
                found.append(Command(block, variables, words, output))
    return found


# In a block without a language, a line with one of these beginnings is a command.
STARTS = (
    *("ringcomm", "make", "pip", "python", "torchrun", "mpirun", "mpiexec", "srun", "docker"),
    *("RINGCOMM_HEAP_BYTES", "RINGCOMM_NODE_ID", "I_MPI_ROOT"),
)


def anchors_of(text: str) -> list[str]:
    """Returns the anchors of a document's headings, as GitHub and the site make them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = []
    for heading in re.findall(r"^#+ (.+)$", outside, re.MULTILINE):
        unlinked = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", unlinked.lower()).replace(" ", "-"))
    return found


def without_code(text: str) -> str:
    """Returns a document without its code blocks and code spans."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
