# SPDX-License-Identifier: Apache-2.0
"""Files that documents, comments and docstrings name without a folder exist in the tree."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.documents import DOCUMENTS
from tests.support import ROOT

FOLDERS = ("ringcomm", "bench", "kernels", "tests", "tools")
# Build files count as prose in full: all files that they name must exist.
BUILD_FILES = ("MANIFEST.in", "Makefile", "CMakeLists.txt", "mkdocs.yml", "pyproject.toml")
CPP_ENDINGS = {".h", ".cpp", ".cu", ".cuh", ".hpp", ".inc", ".pml"}
# Excludes paths and patterns, which test_documents.py checks.
NAME = re.compile(r"(?<![\w./*{}<>-])([A-Za-z_]\w*\.(?:py|html|h|hpp|cpp|cu|cuh))\b(?![\w/(=])")
# A file that the reader saves.
SAVED = re.compile(r"Save (?:it|this) as `([\w.]+)`")
# Files of other projects, and the file of an example call site.
FOREIGN = {"Python.h", "cuda.h", "file.py", "mpi.h", "zero_to_fp32.py"}


def told_and_code(text: str) -> tuple[str, str]:
    """Returns the comments and docstrings of Python text, and the remaining text."""
    lines = text.splitlines()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    told = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, kinds) or not node.body:
            continue
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            last = first.end_lineno or first.lineno
            told += lines[first.lineno - 1 : last]
            lines[first.lineno - 1 : last] = [""] * (last - first.lineno + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            told.append(token.string)
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(told), "\n".join(lines)


def split(text: str, pattern: str) -> tuple[str, str]:
    """Returns the matches of a pattern in a text, joined, and the text without them."""
    found = re.compile(pattern, re.DOTALL | re.MULTILINE)
    return "\n".join(match.group() for match in found.finditer(text)), found.sub("", text)


def prose_and_code(path: Path) -> tuple[str, str]:
    """Returns a file's prose (comments, docstrings, Markdown), and its remaining text."""
    text = path.read_text()
    if path.suffix == ".py":
        return told_and_code(text)
    if path.suffix in CPP_ENDINGS:
        return split(text, r"//[^\n]*|/\*.*?\*/")
    if path.suffix == ".md":
        code, prose = split(text, r"^ *```.*?^ *```")
        return prose, code
    return text, ""


def files_of(root: Path) -> Iterator[Path]:
    """Yields the source files below the folders of the tree."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def lost_files(path: Path, known: set[str]) -> list[str]:
    """Returns the files that a text names and that neither exist nor appear in its code.

    Splitting a text is slow, so only texts with an unknown name are split.
    """
    unknown = set(NAME.findall(path.read_text())) - known - FOREIGN
    if not unknown:
        return []
    prose, code = prose_and_code(path)
    own = {*NAME.findall(code), *SAVED.findall(prose)}
    return sorted(unknown & set(NAME.findall(prose)) - own)


def all_lost_files(root: Path, others: list[Path]) -> dict[str, list[str]]:
    """Returns the lost files of every file in the tree."""
    sources = [*files_of(root)]
    known = {path.name for path in [*sources, *root.glob("*.*"), *(root / "docs").rglob("*.*")]}
    readable = {".py", *CPP_ENDINGS}
    read = [path for path in sources if path.suffix in readable] + others
    found = {path.relative_to(root).as_posix(): lost_files(path, known) for path in read}
    return {name: lost for name, lost in found.items() if lost}


def test_every_file_that_is_named_exists():
    assert all_lost_files(ROOT, [*DOCUMENTS, *(ROOT / each for each in BUILD_FILES)]) == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ringcomm/cli/a.py", '"""Draws gone.html."""\n'),
        ("ringcomm/cli/a.py", 'def f():\n    """Reads ``gone.py``."""\n'),
        ("ringcomm/cli/a.py", "x = 1  # see gone.py\n"),
        ("kernels/host/a.h", "// (gone.cpp)\n"),
        ("docs/a.md", "The file `gone.h` has it.\n"),
        ("MANIFEST.in", "recursive-include ringcomm gone.html\n"),
    ],
)
def test_a_file_that_is_gone_is_found(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    others = [path] if name.startswith(("docs", "MANIFEST")) else []
    assert [len(lost) for lost in all_lost_files(tmp_path, others).values()] == [1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Reads a.py, gone/b.py, *.py and torch.h5py."""\n'),
        ("a.py", '# It writes chosen.h.\nPath("chosen.h").write_text("")\n'),
        ("a.h", '// a.py\n#include "built.h"\n// built.h is made by the build\n'),
        ("a.md", "Save it as `hang.py`:\n\n```python\n# hang.py\n```\n"),
    ],
)
def test_a_file_that_is_there_or_is_made_is_not_reported(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert lost_files(path, {"a.py"}) == []
